"""TensorRT-LLM `ExpertStatistic`: `rank{r}.safetensors` with int32 [experts] under "{iteration}_{layer}".

`meta_info.json` beside the file gives num_experts and num_experts_per_token. The variant
`token_selected_experts_rank{r}.safetensors` holds [tokens, k] under each key: token-level, so it becomes a trace.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moeplan.traffic.importers.counts import TABLE_LIMIT, ExpertCounts, IntTable, expert_counts
from moeplan.traffic.importers.reading import (
    CELL_LIMIT,
    EXPERT_LIMIT,
    LAYER_LIMIT,
    TOP_K_LIMIT,
    as_ids,
    fail,
    file_size,
    parse_json,
    read_whole,
    shown,
    whole,
)
from moeplan.traffic.importers.record import Draft, Hints, Request
from moeplan.traffic.trace import RoutingTrace

_HEADER_LIMIT = 1 << 26  # safetensors itself allows 100 MB; parsed JSON takes many times its text
_DTYPES = {"I32": "<i4", "I64": "<i8"}  # the integer types these statistics are written in
_KEY = re.compile(r"(\d{1,9})_(\d{1,4})")


@dataclass(frozen=True, slots=True)
class _Entry:
    where: str
    dtype: str
    shape: tuple[int, ...]
    start: int


def _entry(raw: npt.NDArray[np.uint8], base: int, name: str, value: object, path: Path) -> _Entry:
    where = f"{path}: {name[:60]}"
    table: Mapping[str, Any] = value if isinstance(value, dict) else {}
    dtype, shape, ends = (table.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise fail(where, f"dtype {shown(dtype)}, expected one of {', '.join(_DTYPES)}")
    if not isinstance(shape, list) or len(shape) not in (1, 2):
        raise fail(where, f"shape {shown(shape)}, expected [experts] or [tokens, k]")
    sizes = tuple(whole(size, f"{where}: shape", 0, 1 << 40) for size in shape)
    if not isinstance(ends, list) or len(ends) != 2:
        raise fail(where, "data_offsets is not a pair")
    start, end = (whole(one, f"{where}: data_offsets", 0, raw.size - base) for one in ends)
    claimed = math.prod(sizes) * np.dtype(_DTYPES[dtype]).itemsize
    if end - start != claimed:
        raise fail(where, f"shape {sizes} claims {claimed} bytes, data_offsets span {end - start}")
    return _Entry(where, _DTYPES[dtype], sizes, base + start)


def _tensors(path: Path) -> tuple[npt.NDArray[np.uint8], dict[tuple[int, int], _Entry]]:
    """The mapped file and its entries by (iteration, layer)."""
    size = file_size(path)
    if size < 8:
        raise fail(path, f"{size} bytes, too short for safetensors")
    raw = np.memmap(path, np.uint8, "r")
    length = int.from_bytes(raw[:8].tobytes(), "little")
    if length > min(size - 8, _HEADER_LIMIT):
        raise fail(path, f"a safetensors header of {length} bytes in a file of {size}, at most {_HEADER_LIMIT}")
    header = parse_json(raw[8 : 8 + length].tobytes(), path)
    if not isinstance(header, dict):
        raise fail(path, "a safetensors header that is no JSON object")
    found = {}
    for name, value in header.items():
        if name == "__metadata__":
            continue
        match = _KEY.fullmatch(name)
        if match is None or int(match[2]) >= LAYER_LIMIT:
            raise fail(path, f"tensor {shown(name)}, expected iteration_layer")
        found[int(match[1]), int(match[2])] = _entry(raw, 8 + length, name, value, path)
    if not found or len({len(one.shape) for one in found.values()}) != 1:
        raise fail(path, "holds no tensors, or counts beside token tables")
    return raw, found


def _values(raw: npt.NDArray[np.uint8], entry: _Entry) -> npt.NDArray[Any]:
    size = math.prod(entry.shape) * np.dtype(entry.dtype).itemsize
    return np.frombuffer(raw[entry.start : entry.start + size].tobytes(), entry.dtype).reshape(entry.shape)


def _meta(path: Path, hints: Hints) -> Hints:
    """Hints completed, or contradicted, by the `meta_info.json` beside the file."""
    beside = path.parent / "meta_info.json"
    if not beside.is_file():
        return hints
    table = parse_json(read_whole(beside), beside)
    if not isinstance(table, dict):
        raise fail(beside, "not a JSON object")
    experts = whole(table.get("num_experts"), f"{beside}: num_experts", 1, EXPERT_LIMIT)
    top_k = whole(table.get("num_experts_per_token"), f"{beside}: num_experts_per_token", 1, TOP_K_LIMIT)
    for name, told, known in (("num_experts", hints.experts, experts), ("num_experts_per_token", hints.top_k, top_k)):
        if told not in (None, known):
            raise fail(beside, f"{name} = {known}, the options or --model say {told}")
    return replace(hints, experts=experts, top_k=top_k)


def _add(total: dict[int, IntTable], path: Path) -> None:
    raw, found = _tensors(path)
    for (_, layer), entry in found.items():
        row = _values(raw, entry)
        if row.ndim != 1 or not 0 < row.size <= EXPERT_LIMIT or int(row.min()) < 0:
            raise fail(entry.where, f"shape {entry.shape} with negative counts, or too many experts")
        if int(row.max()) > 2**40:
            raise fail(entry.where, f"a count of {int(row.max())}")
        if layer in total and total[layer].size != row.size:
            raise fail(entry.where, f"{row.size} experts, {total[layer].size} elsewhere")
        if (len(total) + 1) * row.size > TABLE_LIMIT:
            raise fail(path, f"more than {TABLE_LIMIT} counts")
        total[layer] = total[layer] + row if layer in total else row.astype(np.int64)


def _requests(path: Path, draft: Draft) -> list[Request]:
    """One request a file: iterations in order, all layers with the same tokens. Rows are of batches: a note says so."""
    raw, found = _tensors(path)
    layers = sorted({layer for _, layer in found})
    parts, cells = [], 0
    for turn in sorted({turn for turn, _ in found}):
        entries = [found.get((turn, layer)) for layer in layers]
        shapes = {one.shape for one in entries if one is not None}
        if None in entries or len(shapes) != 1:
            raise fail(path, f"iteration {turn}: layers missing, or with different numbers of tokens")
        tokens, top_k = next(iter(shapes))
        cells += tokens * top_k * len(layers)
        if cells > CELL_LIMIT or not 0 < top_k <= TOP_K_LIMIT:
            raise fail(path, f"iteration {turn}: {tokens} tokens of top-{top_k}")
        table = [as_ids(_values(raw, one), one.where, -1) for one in entries if one is not None]
        parts.append(np.stack(table, axis=1))
    if draft.layer_ids not in (None, layers):
        raise fail(path, "files disagree on the layers")
    if len({part.shape[2] for part in parts}) != 1:
        raise fail(path, "iterations disagree on k")
    draft.layer_ids = layers
    return [Request(np.concatenate(parts))]


def read(paths: Sequence[Path], hints: Hints) -> RoutingTrace | ExpertCounts:
    """Ranks are added up; token tables of a rank are one request each."""
    paths = [path for path in paths if path.name != "meta_info.json"] or paths
    hints = _meta(paths[0], hints)
    _, first = _tensors(paths[0])
    if len(next(iter(first.values())).shape) == 1:
        total: dict[int, IntTable] = {}
        for path in paths:
            _add(total, path)
        return expert_counts("trtllm", paths, total, hints)
    draft = Draft("trtllm", paths, hints)
    requests = []
    for path in paths:
        _, found = _tensors(path)
        if len(next(iter(found.values())).shape) != 2:
            raise fail(path, "counts beside token tables: import them apart")
        requests += _requests(path, draft)
    draft.notes.append("rows of batches: requests cannot be told apart")
    return draft.finish(requests)
