"""SGLang's expert distribution recorder, `expert_distribution_recorder_*.pt`: modes per_token, per_pass and stat.

per_token (`topk_ids_of_layer` [layers, tokens, 8], -1 unused) gives a trace; per_pass (`global_physical_count`
[layers, P]) and stat (`logical_count` [steps, layers, E]) give counts. Physical ids become logical ones by
`last_physical_to_logical_map` [layers, P].
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moeplan.traffic.importers.arrays import Archive
from moeplan.traffic.importers.counts import TABLE_LIMIT, ExpertCounts, IntTable, expert_counts
from moeplan.traffic.importers.inert import Tensor, TorchFile
from moeplan.traffic.importers.reading import CELL_LIMIT, EXPERT_LIMIT, LAYER_LIMIT, Ids, fail
from moeplan.traffic.importers.record import Draft, Hints, Request
from moeplan.traffic.trace import RoutingTrace

_EXTEND, _DECODE = 1, 2  # ForwardMode of SGLang; the numbers moved between versions, other modes keep no phase


class _File:
    """One dump: its records and the map from physical to logical experts."""

    def __init__(self, path: Path) -> None:
        self.path, self.torch = path, TorchFile(Archive(path))
        found = self.torch.object
        if not isinstance(found, dict):
            raise fail(path, "holds no dict: not a recorder dump")
        self.dump: dict[Any, Any] = found
        records = found.get("records", [])
        if not isinstance(records, list) or not all(isinstance(one, dict) for one in records):
            raise fail(path, "records is not a list of dicts")
        self.records: list[dict[Any, Any]] = records
        self.map: npt.NDArray[np.int64] | None = None
        if "logical_count" not in found:
            table = self.torch.array(found.get("last_physical_to_logical_map"), 2, "last_physical_to_logical_map")
            self.map = table.astype(np.int64)
            if not 0 <= int(table.min()) <= int(table.max()) < EXPERT_LIMIT or len(table) >= LAYER_LIMIT:
                raise fail(path, "last_physical_to_logical_map: an id below 0 or too large")

    def mapping(self) -> npt.NDArray[np.int64]:
        """[layers, P] logical ids."""
        if self.map is None:
            raise fail(self.path, "last_physical_to_logical_map is missing")
        return self.map

    @property
    def experts(self) -> int:
        """Logical experts: every one has a place in every layer."""
        return int(self.mapping().max()) + 1

    def is_per_token(self) -> bool:
        """Whether the records hold ids of tokens."""
        return bool(self.records) and all("topk_ids_of_layer" in one for one in self.records)


def _logical(file: _File, ids: npt.NDArray[Any], number: int) -> Ids:
    """Physical ids [layers, tokens, slots] -> logical int32 [tokens, layers, slots], unused slots at the end."""
    table = file.mapping()
    if len(ids) != len(table) or int(ids.min()) < -1 or int(ids.max()) >= table.shape[1]:
        found = f"ids {int(ids.min())}..{int(ids.max())} of {len(ids)} layers"
        raise fail(file.path, f"records[{number}]: {found} beside last_physical_to_logical_map {table.shape}")
    logical = np.where(ids < 0, -1, table[np.arange(len(ids))[:, None, None], np.maximum(ids, 0)])
    return np.asarray(logical.transpose(1, 0, 2), dtype=np.int32)


def _whole_list(value: object, total: int) -> list[int] | None:
    """A list of natural numbers, or None."""
    if not isinstance(value, list) or not all(type(one) is int and 0 <= one <= total for one in value):
        return None
    return value


class _Linker:
    """Rows to requests. The dump stores no request ids: a prompt segment begins one, a decode row at position p
    continues the request that ended at p - 1, the first in batch order where several did."""

    def __init__(self) -> None:
        self.owner: list[int] = []
        self.open: dict[int, list[int]] = {}  # next position -> requests
        self.count = 0
        self.guessed = 0

    def segment(self, start: int, rows: int) -> None:
        """A run of prompt positions: continues a chunked prompt, else begins a request."""
        number = self._take(start) if start else self._new()
        self.owner += [number] * rows
        self.open.setdefault(start + rows, []).append(number)

    def _new(self) -> int:
        self.count += 1
        return self.count - 1

    def _take(self, position: int) -> int:
        waiting = self.open.get(position, [])
        self.guessed += len(waiting) > 1
        return waiting.pop(0) if waiting else self._new()

    def batch(self, positions: list[int]) -> None:
        """Decode rows, one a request."""
        numbers = [self._take(position) for position in positions]
        for number, position in zip(numbers, positions, strict=True):
            self.owner.append(number)
            self.open.setdefault(position + 1, []).append(number)


def _link(linker: _Linker, record: dict[Any, Any], rows: int) -> int | None:
    """Assign the rows of one pass; the phase they have in common, or None."""
    positions = _whole_list(record.get("positions"), 1 << 40)
    lengths = _whole_list(record.get("extend_seq_lens"), rows)
    if positions is None or len(positions) != rows:
        for _ in range(rows):  # anonymous rows: each a request of its own
            linker.owner.append(linker._new())
        return None
    if record.get("forward_mode") == _EXTEND and lengths is not None and sum(lengths) == rows:
        at = 0
        for length in lengths:
            if length:
                linker.segment(positions[at], length)
            at += length
        return 0
    linker.batch(positions)
    return 1 if record.get("forward_mode") == _DECODE else None


def _tokens(file: _File, draft: Draft) -> list[Request]:
    linker, tables, phases, cells = _Linker(), [], [], 0
    for number, record in enumerate(file.records):
        if isinstance(record["topk_ids_of_layer"], Tensor) and 0 in record["topk_ids_of_layer"].size:
            continue  # an idle pass
        ids = file.torch.array(record["topk_ids_of_layer"], 3, f"records[{number}]: topk_ids_of_layer")
        cells += ids.size
        if cells > CELL_LIMIT:
            raise fail(file.path, f"more than {CELL_LIMIT} expert ids")
        table = _logical(file, ids, number)
        phase = _link(linker, record, len(table))
        tables.append(table)
        phases += [phase] * len(table)
    if len({table.shape[2] for table in tables}) != 1:
        raise fail(file.path, "records disagree on the slots of topk_ids_of_layer, or hold no token")
    ids = np.concatenate(tables)
    filled = np.flatnonzero((ids >= 0).any(axis=(0, 2)))
    slots = np.flatnonzero((ids >= 0).any(axis=(0, 1)))
    if not filled.size:
        raise fail(file.path, "every id is -1: nothing was recorded")
    ids = ids[:, filled][:, :, : int(slots[-1]) + 1]
    if draft.layer_ids not in (None, filled.tolist()):
        raise fail(file.path, "files disagree on the layers")
    draft.layer_ids = filled.tolist()
    if linker.guessed:
        draft.notes.append(f"{file.path.name}: {linker.guessed} rows fit several requests: batch order taken")
    order = np.argsort(linker.owner, kind="stable")
    ends = np.cumsum(np.bincount(linker.owner))[:-1]
    known = None if None in phases else np.array(phases, dtype=np.uint8)[order]
    parts = np.split(ids[order], ends)
    own = [None] * len(parts) if known is None else np.split(known, ends)
    return [Request(part, phase) for part, phase in zip(parts, own, strict=True)]


def _pass_counts(file: _File) -> IntTable:
    """[layers, E] summed over passes, replicas of an expert together."""
    table = file.mapping()
    total = np.zeros(table.shape, dtype=np.int64)
    for number, record in enumerate(file.records):
        where = f"records[{number}]: global_physical_count"
        part = file.torch.array(record.get("global_physical_count"), 2, where)
        if part.shape != table.shape or int(part.min()) < 0 or int(part.max()) > 2**40:
            raise fail(f"{file.path}: {where}", f"shape {part.shape} beside the map's {table.shape}, or a wrong count")
        total += part
    counts = np.zeros((len(table), file.experts), dtype=np.int64)
    np.add.at(counts, (np.arange(len(table))[:, None], table), total)
    return counts


def _stat_counts(file: _File) -> IntTable:
    counts = file.torch.array(file.dump.get("logical_count"), 3, "logical_count")
    if int(counts.min()) < 0 or int(counts.max()) > 2**40 or counts.shape[1] >= LAYER_LIMIT:
        raise fail(file.path, "logical_count: a count below 0 or too large, or too many layers")
    return np.asarray(counts.astype(np.int64).sum(axis=0))


def read(paths: Sequence[Path], hints: Hints) -> RoutingTrace | ExpertCounts:
    """Dumps of one mode, added up: under tensor parallelism every rank sees the same tokens, so pass one rank's."""
    files = [_File(path) for path in paths]
    modes = {"stat" if one.map is None else "token" if one.is_per_token() else "pass" for one in files}
    if len(modes) != 1:
        raise fail(paths[0], "files of different recorder modes")
    if modes == {"token"}:
        draft = Draft("sglang-recorder", paths, hints)
        requests = []
        for file in files:
            if draft.experts not in (None, file.experts):
                raise fail(file.path, f"{file.experts} experts, another file has {draft.experts}")
            draft.experts = file.experts
            requests += _tokens(file, draft)
        draft.notes.append("requests rebuilt from positions: the dump has no request ids")
        return draft.finish(requests)
    tables = [_stat_counts(file) if file.map is None else _pass_counts(file) for file in files]
    if len({table.shape for table in tables}) != 1 or tables[0].size > TABLE_LIMIT:
        raise fail(paths[0], f"files disagree on [layers, experts], or more than {TABLE_LIMIT} counts")
    total = np.sum(tables, axis=0)
    return expert_counts("sglang-recorder", paths, dict(enumerate(total)), hints)
