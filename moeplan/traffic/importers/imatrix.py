"""llama.cpp importance matrices (GGUF): `blk.N.ffn_{gate,up,down}_exps.weight.counts` are tokens routed per expert.

A reader of the GGUF header alone (versions 2 and 3, little-endian), with every length checked against the file.
"""

import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moeplan.traffic.importers.counts import TABLE_LIMIT, ExpertCounts, IntTable, expert_counts
from moeplan.traffic.importers.reading import LAYER_LIMIT, fail, file_size, shown
from moeplan.traffic.importers.record import Hints, check_experts

MAGIC = b"GGUF"
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # gguf_type -> bytes (ggml/gguf.h)
_UINT32, _STRING, _ARRAY, _FLOAT32 = 4, 8, 9, 0  # gguf types 4, 8 and 9; GGML_TYPE_F32 = 0
_NAME_LIMIT, _TEXT_LIMIT, _ITEM_LIMIT, _HEADER_LIMIT = 1 << 10, 1 << 20, 1 << 20, 1 << 26
_COUNTS = re.compile(r"blk\.(\d{1,4})\.ffn_(gate|up|down|gate_up)_exps\.weight\.counts")


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class _Header:
    """Walks the header; `take` never passes the end of it."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, file_size(path)
        self.raw = np.memmap(path, np.uint8, "r") if self.size else np.zeros(0, np.uint8)
        self.at = 0
        self.alignment = 32  # GGUF_DEFAULT_ALIGNMENT
        self.texts: dict[str, str] = {}

    def take(self, count: int) -> bytes:
        if count > min(self.size, _HEADER_LIMIT) - self.at:
            raise fail(self.path, f"a GGUF header cut off at byte {self.at}, or larger than {_HEADER_LIMIT} bytes")
        self.at += count
        return self.raw[self.at - count : self.at].tobytes()

    def number(self, code: str) -> int:
        return int(struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0])

    def count(self, what: str, limit: int) -> int:
        value = self.number("Q")
        if value > limit:
            raise fail(self.path, f"{what} = {value}, at most {limit} allowed")
        return value

    def text(self, limit: int) -> str:
        return self.take(self.count("length of a text", limit)).decode("utf-8", "replace")

    def value(self, name: str) -> None:
        """Pass over one value; keep what is needed of it."""
        kind = self.number("I")
        if kind == _STRING:
            self.texts[name] = self.text(_TEXT_LIMIT)[:200]
        elif kind == _UINT32 and name == "general.alignment":
            self.alignment = self.number("I")
        elif kind == _ARRAY:
            self._array(name)
        else:
            self._plain(name, kind, 1)

    def _plain(self, name: str, kind: int, items: int) -> None:
        if kind not in _SIZES:
            raise fail(self.path, f"key {shown(name)} has the unknown or nested type {kind}")
        self.take(_SIZES[kind] * items)

    def _array(self, name: str) -> None:
        kind, items = self.number("I"), self.count(f"items of {shown(name)}", _ITEM_LIMIT)
        if kind != _STRING:
            self._plain(name, kind, items)
            return
        for _ in range(items):
            self.text(_TEXT_LIMIT)

    def tensor(self) -> _Tensor:
        name = self.text(_NAME_LIMIT)
        axes = self.number("I")
        if axes > 4:  # GGML_MAX_DIMS
            raise fail(self.path, f"tensor {shown(name)} has {axes} axes")
        shape = tuple(self.number("Q") for _ in range(axes))
        return _Tensor(name, shape, self.number("I"), self.number("Q"))


def _open(path: Path) -> tuple[_Header, list[_Tensor]]:
    header = _Header(path)
    if header.take(4) != MAGIC:
        raise fail(path, "not a GGUF file (the older .dat has no counts per expert)")
    version = header.number("I")
    if version not in (2, 3):
        raise fail(path, f"GGUF version {version}, expected 2 or 3")
    tensors, keys = header.count("tensors", _ITEM_LIMIT), header.count("keys", _ITEM_LIMIT)
    for _ in range(keys):
        header.value(header.text(_NAME_LIMIT))
    found = [header.tensor() for _ in range(tensors)]
    if header.texts.get("general.type") != "imatrix":
        raise fail(path, f"general.type = {shown(header.texts.get('general.type'))}, expected imatrix")
    if header.alignment == 0 or header.alignment % 8 or header.alignment > 1 << 16:
        raise fail(path, f"general.alignment = {header.alignment}")
    header.at += -header.at % header.alignment
    return header, found


def _counts(header: _Header, tensor: _Tensor) -> IntTable:
    where = f"{header.path}: {tensor.name[:80]}"
    experts = tensor.shape[1] if len(tensor.shape) == 2 and tensor.shape[0] == 1 else 0
    if tensor.kind != _FLOAT32 or experts < 1:
        raise fail(where, f"type {tensor.kind}, shape {tensor.shape[:4]}, expected F32 [1, experts]")
    check_experts(experts, where)
    start, end = header.at + tensor.offset, header.at + tensor.offset + 4 * math.prod(tensor.shape)
    if end > header.size:
        raise fail(where, f"ends at byte {end}, the file has {header.size}")
    values = np.frombuffer(header.raw[start:end].tobytes(), "<f4")
    if not (np.isfinite(values).all() and (values >= 0).all() and (values < 2**53).all()):
        raise fail(where, "a count that is negative or not finite")
    return np.rint(values.astype(np.float64)).astype(np.int64)


def _one(path: Path) -> dict[int, IntTable]:
    header, tensors = _open(path)
    found: dict[int, IntTable] = {}
    for tensor in tensors:
        match = _COUNTS.fullmatch(tensor.name)
        if match is None:
            continue
        layer, row = int(match[1]), _counts(header, tensor)
        if layer >= LAYER_LIMIT or (len(found) + 1) * row.size > TABLE_LIMIT:
            raise fail(path, f"layer {layer} with {row.size} experts: more than {TABLE_LIMIT} counts")
        if not np.array_equal(found.setdefault(layer, row), row):
            raise fail(path, f"layer {layer}: gate, up and down disagree on the tokens of an expert")
    if not found:
        raise fail(path, "no tensor blk.N.ffn_*_exps.weight.counts: not an imatrix of an MoE model")
    return found


def read(paths: Sequence[Path], hints: Hints) -> ExpertCounts:
    """Counts of every file, added up."""
    total: dict[int, IntTable] = {}
    for path in paths:
        for layer, row in _one(path).items():
            if layer in total and total[layer].size != row.size:
                raise fail(path, f"layer {layer}: {row.size} experts, another file has {total[layer].size}")
            total[layer] = total[layer] + row if layer in total else row
    return expert_counts("imatrix", paths, total, hints)
