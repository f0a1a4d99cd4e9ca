"""Arrays from files that nobody vouches for: headers are parsed by hand, sizes are checked before memory is taken."""

import math
import re
import struct
import zipfile
import zlib
from mmap import mmap
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from moeplan.errors import MoeplanError

NPZ_LIMIT = 1 << 30
"""Bytes an array of an npz may expand to: it is held in memory whole. Larger traces are directories, read in place."""

_SUSPECT = 1 << 24  # bytes above which an array that deflated more than _RATIO fold is refused
_RATIO = 256  # deflate reaches 1,032 fold on constant data; int64 ids of 8 experts reach about 21 (64 bits / 3)

_HEADER = re.compile(
    r"\{\s*'descr'\s*:\s*'([<>|=]?[?biufcmMOSUV]\d*)'\s*,\s*'fortran_order'\s*:\s*(True|False)\s*,"
    r"\s*'shape'\s*:\s*\(([\d ,]*)\)\s*,?\s*\}\s*\Z"
)
_BROKEN = (OSError, ValueError, EOFError, KeyError, RuntimeError, MemoryError, TypeError, OverflowError)
_TORN = (*_BROKEN, zipfile.BadZipFile, zlib.error, struct.error, NotImplementedError)


class _RefusedError(ValueError):
    """Why a header is not accepted."""


def read_header(file: IO[bytes], size: int) -> tuple[tuple[int, ...], np.dtype[Any], bool, int]:
    """Shape, type, column-major, and the offset of the data of a .npy file of `size` bytes.

    Format of numpy.lib.format versions 1 to 3. Raises ValueError: no such file, objects or structures, or a size
    that is not what the header claims. Reads at most 64 KiB and takes no memory for the data.
    """
    start = file.read(8)
    if len(start) < 8 or start[:6] != b"\x93NUMPY" or start[6] not in (1, 2, 3):
        raise _RefusedError("no .npy header")
    wide = 2 if start[6] == 1 else 4
    (length,) = struct.unpack("<H" if wide == 2 else "<I", file.read(wide))
    if length > 1 << 16:
        raise _RefusedError(f"a header of {length} bytes")
    found = _HEADER.match(file.read(length).decode("latin-1"))
    if found is None:
        raise _RefusedError("the header describes no plain array")
    if "O" in found[1]:
        raise _RefusedError("an array of objects, which would need unpickling")
    dtype = np.dtype(found[1])
    words = [word.strip() for word in found[3].split(",") if word.strip()]
    if any(len(word) > 19 for word in words) or len(words) > 32:
        raise _RefusedError("axes beyond any array")
    shape = tuple(int(word) for word in words)
    offset = 8 + wide + length
    need = math.prod(shape) * dtype.itemsize
    if size - offset != need:
        raise _RefusedError(f"{dtype} {shape} needs {need} bytes, found {max(0, size - offset)}")
    return shape, dtype, found[2] == "True", offset


def load_arrays(path: Path, keys: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, npt.NDArray[Any]]:
    """The named arrays of an npz file, read without pickle; optional ones only where present.

    Raises MoeplanError naming the file and the key: missing, truncated, not an npz, an array of objects, larger
    than NPZ_LIMIT, or a size that its header or its compression does not bear out.
    """
    if not path.is_file():
        raise MoeplanError(f"{path}: no such file")
    found: dict[str, npt.NDArray[Any]] = {}
    key = "archive"
    try:
        with zipfile.ZipFile(path) as archive:
            present = {name.removesuffix(".npy") for name in archive.namelist()}
            for key in keys:
                if key not in present:
                    raise MoeplanError(f"{path}: no array {key!r} (found {_some(present)})")
            for key in (*keys, *(key for key in optional if key in present)):
                found[key] = _member(archive, key)
    except _TORN as bad:
        raise MoeplanError(f"{path}: {key}: not a readable npz: {_reason(bad)}") from bad
    return found


def _member(archive: zipfile.ZipFile, key: str) -> npt.NDArray[Any]:
    info = archive.getinfo(f"{key}.npy")
    if info.file_size > NPZ_LIMIT:
        raise _RefusedError(f"expands to {info.file_size} bytes, at most {NPZ_LIMIT} are read from an npz")
    if info.file_size > _SUSPECT and info.file_size > _RATIO * info.compress_size:
        raise _RefusedError(f"{info.compress_size} bytes expand to {info.file_size}: a decompression bomb")
    with archive.open(info) as file:
        shape, dtype, columns, _ = read_header(file, info.file_size)
        data = bytearray(file.read())  # ends with the check sum
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise _RefusedError("truncated")
    array = np.frombuffer(data, dtype=dtype) if dtype.itemsize and data else np.empty(0, dtype)
    return array.reshape(shape, order="F" if columns else "C")


def map_array(path: Path) -> npt.NDArray[Any]:
    """A .npy file, read in place (`numpy.memmap`, read only); an empty one is an empty array.

    Raises MoeplanError naming the file: missing, truncated, longer than its header claims, objects, column-major.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            shape, dtype, columns, offset = read_header(file, size)
        if columns and len(shape) > 1:
            raise _RefusedError("column-major order, which cannot be read by rows")
        if 0 in shape or not dtype.itemsize:
            return np.empty(shape, dtype)
        return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape)
    except FileNotFoundError as bad:
        raise MoeplanError(f"{path}: no such file") from bad
    except _TORN as bad:
        raise MoeplanError(f"{path}: not a readable .npy: {_reason(bad)}") from bad


def read_rows(array: npt.NDArray[Any], first: int, last: int) -> npt.NDArray[Any]:
    """Rows first:last. Those of a mapped file are read from it, so that pages once seen do not stay in memory.

    A slice of a map keeps the whole map's file offset, so slices are left to the map.
    """
    if not isinstance(array, np.memmap) or not isinstance(array.base, mmap) or array.filename is None:
        return array[first:last]
    row = math.prod(array.shape[1:])
    count = (min(last, len(array)) - first) * row
    data = np.fromfile(array.filename, array.dtype, count, offset=array.offset + first * row * array.dtype.itemsize)
    if data.size != count:
        raise MoeplanError(f"{array.filename}: became shorter while it was read")
    return data.reshape(-1, *array.shape[1:])


def _some(names: set[str]) -> str:
    known = sorted(names)
    return ", ".join(known[:8]) + (f" and {len(known) - 8} more" if len(known) > 8 else "") if known else "none"


def _reason(bad: BaseException) -> str:
    return (" ".join(str(bad).split()) or type(bad).__name__)[:300]
