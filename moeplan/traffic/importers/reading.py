"""Bounded reading of files nobody vouches for: every failure is one line, every size is checked before it is used."""

import base64
import binascii
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from moeplan.errors import MoeplanError

Ids = npt.NDArray[np.int32]

# Limits of this program, not of any format: parsed JSON takes up to 30 times its text, hence the smaller two.
FILE_LIMIT = 1 << 32  # bytes of a file that is streamed or memory-mapped
TEXT_LIMIT = 1 << 26  # bytes of one JSON document, one line, or one member held whole
NODE_LIMIT = 1 << 22  # opening brackets in one JSON text: bounds the objects it becomes
CELL_LIMIT = 1 << 27  # expert ids of one imported trace
EVENT_LIMIT = 1 << 26  # expert ids of one log of single events
EXPERT_LIMIT = 1 << 16  # ids travel as uint16 at most (vLLM)
LAYER_LIMIT = 1 << 12  # far above any model; bounds the dense table of a sparse log
TOP_K_LIMIT = 1 << 8


def fail(where: object, what: str) -> MoeplanError:
    """The error for a bad file: one line of printable ASCII, however strange the content."""
    text = f"{where}: {what}".encode("ascii", "backslashreplace").decode("ascii")
    return MoeplanError(" ".join(text.split())[:400])


def shown(value: object) -> str:
    """A scalar short enough for a message; containers by type only (their text may be endless)."""
    if isinstance(value, str):
        value = value[:60]
    elif not isinstance(value, bool | float | None) and not (isinstance(value, int) and abs(value) < 10**30):
        return f"a {type(value).__name__}"
    return ascii(value)


def file_size(path: Path, limit: int = FILE_LIMIT) -> int:
    """Bytes of a regular file. Raises MoeplanError where it is missing or larger than `limit`."""
    try:
        if not path.is_file():
            raise fail(path, "no such file")
        size = path.stat().st_size
    except (OSError, ValueError) as bad:
        raise fail(path, f"cannot read: {bad}") from bad
    if size > limit:
        raise fail(path, f"{size} bytes, the limit is {limit}")
    return size


def read_whole(path: Path, limit: int = TEXT_LIMIT) -> bytes:
    """The bytes of a file no larger than `limit`."""
    file_size(path, limit)
    try:
        with path.open("rb") as file:
            return file.read(limit)
    except OSError as bad:
        raise fail(path, f"cannot read: {bad}") from bad


def read_head(path: Path, size: int) -> bytes:
    """The first bytes of a file, at most `size`."""
    file_size(path)
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError as bad:
        raise fail(path, f"cannot read: {bad}") from bad


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, text without the end) of each line that is not blank, one in memory at a time."""
    file_size(path)
    try:
        with path.open("rb") as file:
            yield from _lines(path, file)
    except OSError as bad:
        raise fail(path, f"cannot read: {bad}") from bad


def _lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := file.readline(TEXT_LIMIT + 1):
        number += 1
        if len(line) > TEXT_LIMIT:
            raise fail(path, f"line {number} is longer than {TEXT_LIMIT} bytes")
        if line := line.strip():
            yield number, line


class _NotJsonError(MoeplanError):
    """A text that does not parse as JSON."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def parse_json(raw: bytes, where: object) -> Any:
    """JSON, strictly UTF-8, each key once. Raises MoeplanError for anything else, endless nesting included."""
    nodes = raw.count(b"[") + raw.count(b"{")
    if nodes > NODE_LIMIT:
        raise fail(where, f"{nodes} lists and objects in one JSON text, at most {NODE_LIMIT} allowed")
    try:
        return _DECODER.decode(raw.decode("utf-8"))
    except (ValueError, RecursionError) as bad:
        raise _NotJsonError(str(fail(where, f"not JSON: {str(bad)[:120]}"))) from bad


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(`file: line n`, object) of a JSON-lines file. Raises MoeplanError where a line is not an object."""
    for number, line in lines(path):
        where = f"{path}: line {number}"
        record = parse_json(line, where)
        if not isinstance(record, dict):
            raise fail(where, f"{shown(record)}, expected a JSON object")
        yield where, record


def json_documents(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects of one JSON document (an object, or a list of objects) or of a JSON-lines file, the first line tells."""
    texts = lines(path)
    number, first = next(texts, (0, b""))
    try:
        yield from _records(parse_json(first, path), f"{path}: line {number}")
    except _NotJsonError:
        yield from _records(parse_json(read_whole(path), path), str(path))
        return
    del first
    for number, line in texts:
        yield from _records(parse_json(line, f"{path}: line {number}"), f"{path}: line {number}")


def _records(document: object, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for record in document if isinstance(document, list) else [document]:
        if not isinstance(record, dict):
            raise fail(where, f"{shown(record)}, expected a JSON object")
        yield where, record


def whole(value: object, where: object, low: int, high: int) -> int:
    """A whole number low..high, not a bool or a float. `where` names file and field."""
    if type(value) is not int or not low <= value <= high:
        raise fail(where, f"{shown(value)}, expected a whole number {low}..{high}")
    return value


def id_list(value: object, where: object, low: int = 0) -> list[int]:
    """A list of 1..TOP_K_LIMIT expert ids."""
    if not isinstance(value, list) or not 0 < len(value) <= TOP_K_LIMIT:
        raise fail(where, f"{shown(value)}, expected a list of 1 to {TOP_K_LIMIT} expert ids")
    return [whole(item, where, low, EXPERT_LIMIT - 1) for item in value]


def nested_ids(value: object, where: object) -> Ids:
    """Nested lists [rows][layers][k] of ids, all rows alike, as int32."""
    rows = value if isinstance(value, list) else []
    if not rows or not all(isinstance(row, list) and row and len(row) == len(rows[0]) for row in rows):
        raise fail(where, "expected nested lists [rows][layers][k], all rows alike")
    width = len(id_list(rows[0][0], where))
    if any(len(id_list(cell, where)) != width for row in rows for cell in row):
        raise fail(where, "expected nested lists [rows][layers][k], all alike")
    cells = (cell for row in rows for cell in row)
    flat = np.fromiter(chain.from_iterable(cells), dtype=np.int32, count=len(rows) * len(rows[0]) * width)
    return flat.reshape(len(rows), len(rows[0]), width)


def base64_bytes(text: str, where: object) -> bytes:
    """Strict base64. Raises MoeplanError for stray characters or wrong padding."""
    try:
        return base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, ValueError) as bad:
        raise fail(where, f"not base64: {str(bad)[:80]}") from bad


def as_ids(array: npt.NDArray[Any], where: object, low: int = 0) -> Ids:
    """An integer array as int32, every id within low..EXPERT_LIMIT-1."""
    if array.dtype.kind not in "iu":
        raise fail(where, f"holds {array.dtype}, expected integers")
    if array.size and not low <= int(array.min()) <= int(array.max()) < EXPERT_LIMIT:
        outside = int(array.min()) if int(array.min()) < low else int(array.max())
        raise fail(where, f"expert id {outside} is outside {low}..{EXPERT_LIMIT - 1}")
    return array.astype(np.int32)
