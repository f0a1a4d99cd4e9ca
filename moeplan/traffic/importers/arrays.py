"""NumPy arrays and zip archives read with their claims checked against their bytes: nothing is unpickled."""

import math
import re
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moeplan.errors import MoeplanError
from moeplan.traffic.importers.reading import fail, file_size, read_head

MEMBER_LIMIT = 1 << 30  # bytes of one unpacked archive member; a limit of this program
_RATIO = 200  # real arrays deflate at most about this well; a bomb reaches 1,030 (the limit of deflate)
_SMALL = 1 << 20  # members below this are never bombs
_HEADER_LIMIT = 1 << 14
_HEADER = re.compile(
    rb"\s*\{\s*'descr':\s*'([<>|=]?[biuf]\d{1,2})',\s*'fortran_order':\s*(True|False),\s*"
    rb"'shape':\s*\(([\d,\s]{0,200})\),?\s*\}\s*"
)
_ZIP_ERRORS = (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, struct.error, RuntimeError)
# RuntimeError: an encrypted member, or NotImplementedError for an unknown compression.


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """dtype, shape and order of a .npy, and where its values begin."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    start: int

    @property
    def bytes(self) -> int:
        """Bytes the values take: an exact integer however large the claim."""
        return math.prod(self.shape) * self.dtype.itemsize


def npy_header(raw: bytes, where: object) -> NpyHeader:
    """Parse the header of a .npy by pattern: plain numbers only, no objects, no records."""
    if raw[:6] != b"\x93NUMPY" or len(raw) < 10:
        raise fail(where, "not a .npy array")
    wide = raw[6] >= 2  # version 1 has a 2-byte length, 2 and 3 a 4-byte one (numpy.lib.format)
    start = 12 if wide else 10
    if len(raw) < start:
        raise fail(where, "a .npy cut off in its header")
    length = int.from_bytes(raw[8:start], "little")
    if length > _HEADER_LIMIT or len(raw) < start + length:
        raise fail(where, f"a .npy header of {length} bytes, expected at most {_HEADER_LIMIT} within the file")
    match = _HEADER.fullmatch(raw[start : start + length])
    if match is None:
        raise fail(where, "a .npy header that does not describe a plain array of numbers")
    try:
        dtype = np.dtype(match[1].decode())
        shape = tuple(int(part) for part in match[3].split(b",") if part.strip())
    except (TypeError, ValueError) as bad:
        raise fail(where, f"a .npy header with a wrong type or shape: {bad}") from bad
    return NpyHeader(dtype, shape, match[2] == b"True", start + length)


def npy_array(raw: bytes, where: object) -> npt.NDArray[Any]:
    """The array of .npy bytes; what the header claims must be exactly what follows it."""
    header = npy_header(raw, where)
    if header.bytes != len(raw) - header.start:
        raise fail(where, f"shape {header.shape} claims {header.bytes} bytes, {len(raw) - header.start} follow")
    flat = np.frombuffer(raw, header.dtype, offset=header.start)
    return flat.reshape(header.shape, order="F" if header.fortran else "C")


def npy_file(path: Path) -> npt.NDArray[Any]:
    """A .npy file, memory-mapped, after the same check."""
    size = file_size(path)
    header = npy_header(read_head(path, _HEADER_LIMIT + 12), path)
    if header.bytes != size - header.start:
        raise fail(path, f"shape {header.shape} claims {header.bytes} bytes, {size - header.start} follow")
    if not header.bytes:
        return np.zeros(header.shape, header.dtype)
    order: Any = "F" if header.fortran else "C"
    return np.memmap(path, header.dtype, "r", header.start, header.shape, order)


class Archive:
    """A zip whose members are read whole, each within the limits of this module."""

    def __init__(self, path: Path) -> None:
        """Read the directory of the archive. Raises MoeplanError where the file is no sound zip."""
        file_size(path)
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                self._entries = {entry.filename: entry for entry in archive.infolist()}
        except (*_ZIP_ERRORS, NotImplementedError) as bad:
            raise fail(path, f"not a readable zip archive: {bad}") from bad
        self._left = MEMBER_LIMIT

    @property
    def names(self) -> Sequence[str]:
        """Member names, sorted."""
        return sorted(self._entries)

    def read(self, name: str, limit: int = MEMBER_LIMIT, stored: bool = False) -> bytes:
        """One member; `stored` = it must not be compressed. Raises MoeplanError for a missing, damaged or bomb one."""
        entry = self._entries.get(name)
        where = f"{self.path}: {name}"
        if entry is None:
            raise fail(where, "no such member")
        if entry.file_size > min(limit, self._left):
            raise fail(where, f"unpacks to {entry.file_size} bytes, {min(limit, self._left)} allowed")
        if stored and entry.compress_type != zipfile.ZIP_STORED:
            raise fail(where, "is compressed, which this format never is")
        if entry.file_size > max(_SMALL, _RATIO * entry.compress_size):
            raise fail(where, f"unpacks {entry.compress_size} bytes to {entry.file_size}: refused as a zip bomb")
        self._left -= entry.file_size
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(entry) as member:
                raw = member.read(entry.file_size + 1)
        except (*_ZIP_ERRORS, NotImplementedError) as bad:
            raise fail(where, f"cannot unpack: {bad}") from bad
        if len(raw) != entry.file_size:
            raise fail(where, f"{entry.file_size} bytes claimed, {len(raw)} found")
        return raw


def is_archive(path: Path) -> Archive | None:
    """The archive, or None where the file is none."""
    try:
        return Archive(path)
    except MoeplanError:
        return None
