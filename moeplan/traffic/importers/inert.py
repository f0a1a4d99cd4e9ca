"""Plain data and tensors out of a torch zip file without unpickling: no name in the file is ever looked up.

The opcodes that `torch.save` writes for dicts, lists, tuples, text, numbers and tensors are interpreted here (protocol
2 to 5 of Python's pickletools); any other opcode, and any name but those of tensors, refuses the file.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moeplan.traffic.importers.arrays import Archive
from moeplan.traffic.importers.reading import fail, shown

_PICKLE_LIMIT = 1 << 25  # bytes of data.pkl; limits of this program, memory is bounded by the three together
_OBJECT_LIMIT = 1 << 21  # containers and texts; also the entries of the memo
_TYPES = {"IntStorage": "<i4", "LongStorage": "<i8", "ShortStorage": "<i2", "CharStorage": "<i1", "ByteStorage": "<u1"}
_OTHER = {f"{name}Storage" for name in ("Float", "Double", "Half", "BFloat16", "Bool")}  # carried, never read
_NAMES = {("torch._utils", "_rebuild_tensor_v2"), ("collections", "OrderedDict")}
_NAMES |= {("torch", name) for name in (*_TYPES, *_OTHER)}
_MARK = object()


@dataclass(frozen=True, slots=True)
class _Name:
    module: str
    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    kind: str
    key: str
    items: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as the file describes it; `TorchFile.array` gives its values."""

    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class _Machine:
    """One pass over data.pkl. Containers are only ever built, never hashed or printed."""

    def __init__(self, data: bytes, where: str) -> None:
        self.data, self.where, self.at = data, where, 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.objects = 0

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise fail(self.where, f"cut off at byte {self.at}")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def line(self) -> str:
        end = self.data.find(b"\n", self.at, self.at + 256)
        if end < 0:
            raise fail(self.where, f"a name without an end at byte {self.at}")
        return self.take(end + 1 - self.at)[:-1].decode("utf-8", "replace")

    def push(self, value: Any) -> None:
        self.objects += 1
        if self.objects > _OBJECT_LIMIT:
            raise fail(self.where, f"more than {_OBJECT_LIMIT} objects")
        self.stack.append(value)

    def pop(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            raise fail(self.where, f"nothing to take at byte {self.at}")
        return self.stack.pop()

    def popped(self) -> list[Any]:
        """Everything above the last mark, and the mark gone."""
        found: list[Any] = []
        while self.stack and self.stack[-1] is not _MARK:
            found.append(self.stack.pop())
        if not self.stack:
            raise fail(self.where, f"no mark at byte {self.at}")
        self.stack.pop()
        return found[::-1]

    def name(self, module: object, name: object) -> None:
        if not isinstance(module, str) or not isinstance(name, str) or (module, name) not in _NAMES:
            raise fail(self.where, f"names {shown(module)} {shown(name)}: only plain data and tensors are read")
        self.push(_Name(module, name))

    def put(self, index: int) -> None:
        if not self.stack or self.stack[-1] is _MARK or len(self.memo) >= _OBJECT_LIMIT:
            raise fail(self.where, f"nothing to remember, or too much, at byte {self.at}")
        self.memo[index] = self.stack[-1]

    def get(self, index: int) -> None:
        if index not in self.memo:
            raise fail(self.where, f"nothing remembered as {index}")
        self.stack.append(self.memo[index])

    def extend(self, items: list[Any]) -> None:
        if not self.stack or not isinstance(self.stack[-1], list):
            raise fail(self.where, f"no list to append to at byte {self.at}")
        self.stack[-1].extend(items)

    def update(self, items: list[Any]) -> None:
        if not self.stack or not isinstance(self.stack[-1], dict) or len(items) % 2:
            raise fail(self.where, f"no dict to fill at byte {self.at}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | int):
                raise fail(self.where, f"{shown(key)} as a key, expected text or a number")
            self.stack[-1][key] = value

    def storage(self) -> None:
        match self.pop():
            case ("storage", _Name(module="torch", name=kind), str(key), str(), int(items)) if items >= 0:
                if "/" in key or len(key) > 64:
                    raise fail(self.where, f"storage {shown(key)}")
                self.push(_Storage(kind, key, items))
            case _:
                raise fail(self.where, "a reference that is no tensor storage")

    def reduce(self) -> None:
        args, made = self.pop(), self.pop()
        match made, args:
            case _Name(name="OrderedDict"), ():
                self.push({})
            case _Name(name="_rebuild_tensor_v2"), (_Storage() as kept, int(offset), tuple(size), tuple(stride), *_):
                if len(size) != len(stride) or len(size) > 8 or not _naturals((offset, *size, *stride)):
                    raise fail(self.where, "a tensor with a wrong size or stride")
                self.push(Tensor(kept, offset, size, stride))
            case _:
                raise fail(self.where, "a call other than the rebuilding of a tensor")

    def run(self) -> Any:
        """The object the file describes."""
        while True:
            code = self.take(1)
            if code == b".":
                return self.pop()
            step = _STEPS.get(code)
            if step is None:
                raise fail(self.where, f"opcode {code!r} at byte {self.at - 1}: only plain data and tensors are read")
            step(self)


def _naturals(values: tuple[object, ...]) -> bool:
    return all(type(value) is int and 0 <= value < 1 << 48 for value in values)


def _tuple(count: int) -> Callable[[_Machine], None]:
    return lambda m: m.push(tuple([m.pop() for _ in range(count)][::-1]))


def _text(code: str) -> Callable[[_Machine], None]:
    return lambda m: m.push(m.take(m.number(code)).decode("utf-8", "replace"))


def _global(m: _Machine) -> None:
    m.name(m.line(), m.line())


def _stack_global(m: _Machine) -> None:
    name, module = m.pop(), m.pop()
    m.name(module, name)


def _set_item(m: _Machine) -> None:
    value, key = m.pop(), m.pop()
    m.update([key, value])


def _append(m: _Machine) -> None:
    m.extend([m.pop()])


_STEPS: dict[bytes, Callable[[_Machine], Any]] = {
    b"\x80": lambda m: m.take(1),  # protocol
    b"\x95": lambda m: m.take(8),  # frame
    b"(": lambda m: m.push(_MARK),
    b"}": lambda m: m.push({}),
    b"]": lambda m: m.push([]),
    b")": lambda m: m.push(()),
    b"\x85": _tuple(1),
    b"\x86": _tuple(2),
    b"\x87": _tuple(3),
    b"t": lambda m: m.push(tuple(m.popped())),
    b"X": _text("<I"),
    b"\x8c": _text("<B"),
    b"J": lambda m: m.stack.append(m.number("<i")),
    b"K": lambda m: m.stack.append(m.number("<B")),
    b"M": lambda m: m.stack.append(m.number("<H")),
    b"\x8a": lambda m: m.stack.append(int.from_bytes(m.take(m.number("<B")), "little", signed=True)),
    b"G": lambda m: m.stack.append(m.number(">d")),
    b"N": lambda m: m.stack.append(None),
    b"\x88": lambda m: m.stack.append(True),
    b"\x89": lambda m: m.stack.append(False),
    b"q": lambda m: m.put(m.number("<B")),
    b"r": lambda m: m.put(m.number("<I")),
    b"\x94": lambda m: m.put(len(m.memo)),
    b"h": lambda m: m.get(m.number("<B")),
    b"j": lambda m: m.get(m.number("<I")),
    b"a": _append,
    b"e": lambda m: m.extend(m.popped()),
    b"s": _set_item,
    b"u": lambda m: m.update(m.popped()),
    b"c": _global,
    b"\x93": _stack_global,
    b"R": lambda m: m.reduce(),
    b"Q": lambda m: m.storage(),
}


class TorchFile:
    """A `torch.save` zip: its object, and the values of its integer tensors."""

    def __init__(self, archive: Archive) -> None:
        """Interpret data.pkl. Raises MoeplanError for anything but plain data and tensors."""
        self.archive = archive
        pickles = [name for name in archive.names if name == "data.pkl" or name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise fail(archive.path, f"{len(pickles)} members named data.pkl, expected one")
        self.folder = pickles[0].removesuffix("data.pkl")
        order = f"{self.folder}byteorder"
        if order in archive.names and archive.read(order, 16, stored=True) != b"little":
            raise fail(archive.path, "byteorder is not little")
        raw = archive.read(pickles[0], _PICKLE_LIMIT, stored=True)
        self.object = _Machine(raw, f"{archive.path}: {pickles[0]}").run()
        self._storages: dict[str, bytes] = {}

    def array(self, value: object, axes: int, where: str) -> npt.NDArray[Any]:
        """An integer tensor of so many axes. Raises MoeplanError for anything else, or one larger than its storage."""
        label = f"{self.archive.path}: {where}"
        if not isinstance(value, Tensor) or len(value.size) != axes:
            raise fail(label, f"expected a tensor of {axes} axes")
        kept = value.storage
        if kept.kind not in _TYPES:
            raise fail(label, f"holds {kept.kind}, expected whole numbers")
        dtype = np.dtype(_TYPES[kept.kind])
        last = value.offset + sum((n - 1) * s for n, s in zip(value.size, value.stride, strict=True))
        if 0 in value.size or last >= kept.items or math.prod(value.size) > kept.items:
            raise fail(label, f"size {value.size} does not fit a storage of {kept.items} items")
        if kept.key not in self._storages:
            self._storages[kept.key] = self.archive.read(f"{self.folder}data/{kept.key}", stored=True)
        raw = self._storages[kept.key]
        if len(raw) != kept.items * dtype.itemsize:
            raise fail(label, f"a storage of {len(raw)} bytes, {kept.items} items of {dtype} claimed")
        flat = np.frombuffer(raw, dtype)[value.offset :]
        steps = tuple(s * dtype.itemsize for s in value.stride)
        return np.lib.stride_tricks.as_strided(flat, value.size, steps, writeable=False).copy()
