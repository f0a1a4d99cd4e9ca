"""The safe repairs of a trace: what can go without guessing what should have been there."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moeplan.errors import MoeplanError
from moeplan.traffic.check import Check, check_trace
from moeplan.traffic.check_scan import Mask, cells
from moeplan.traffic.model import ModelCard
from moeplan.traffic.trace import CHUNK_BYTES, Ids, RoutingTrace

REPAIRABLE = (
    "startup-run",
    "dense-layer",
    "zero-token-layer",
    "zero-cells",
    "last-layer-cut",
    "unwritten-rows",
    "padding-rows",
    "padded-slots",
    "duplicate-request",
)


@dataclass(frozen=True, slots=True)
class Fixed:
    """What a repair wrote: `removed` in words, and the check of the result (None: nothing to repair, none written)."""

    removed: tuple[str, ...]
    check: Check | None


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """startup rows, repeated requests as row ranges [n, 2] in order, and the columns and slots that stay."""

    trace: RoutingTrace
    startup: int
    repeats: npt.NDArray[np.int64]
    columns: list[int]
    slots: list[int]
    dtype: np.dtype[np.integer]

    def pieces(self, size: int = CHUNK_BYTES) -> Iterator[tuple[int, Mask, Ids]]:
        """(first row, rows kept, their ids) in order; cells of zeros become -1."""
        for first, ids in self.trace.chunks(size):
            zero, empty = cells(np.ascontiguousarray(np.moveaxis(ids, 2, 0)))
            keep = np.asarray(~(zero | empty).all(axis=1), dtype=np.bool_)
            keep[: max(0, self.startup - first)] = False
            low = np.searchsorted(self.repeats[:, 1], first, side="right")
            high = np.searchsorted(self.repeats[:, 0], first + len(keep))
            for start, end in self.repeats[low:high]:
                keep[max(0, start - first) : max(0, end - first)] = False
            kept = ids[keep][:, self.columns][:, :, self.slots].astype(self.dtype)
            kept[zero[keep][:, self.columns]] = -1 if self.dtype.kind == "i" else 0
            yield first, keep, kept


def fix_trace(trace: RoutingTrace, found: Check, folder: Path, card: ModelCard | None = None) -> Fixed:
    """Write a cleaned copy to a canonical directory, read in chunks, and check it.

    Removed: the identical start-up run, rows and layers without a route, slots that only pad, repeated requests,
    requests left without rows; cells of zeros become -1. Nothing is invented: what has no safe repair stays.
    Raises MoeplanError where the folder exists or no row is left.
    """
    from moeplan.traffic.trace_files import write_folder

    if folder.exists():
        raise MoeplanError(f"{folder}: exists already")
    codes = {one.code for one in found.findings}
    if codes & {"all-zero"} or (codes == {"zero-token-layer"} and len(found.findings) >= trace.layers):
        raise MoeplanError(f"{trace.source}: no route is left to keep")
    cut = _cut(trace, found, bool(codes & {"zero-cells", "last-layer-cut"}))
    if not codes & set(REPAIRABLE):
        return Fixed((), None)
    kept = np.zeros(trace.request_offsets.size, np.int64)  # rows kept before each request's first row
    total = 0
    for first, keep, _ in cut.pieces():
        low, high = np.searchsorted(trace.request_offsets, (first, first + len(keep)))
        kept[low:high] = total + np.concatenate([[0], np.cumsum(keep)])[trace.request_offsets[low:high] - first]
        total += int(np.count_nonzero(keep))
        kept[high:] = total
    if not total:
        raise MoeplanError(f"{trace.source}: no route is left to keep")
    removed = _words(trace, found, cut, total)
    if not removed:
        return Fixed((), None)
    write_folder(_shell(cut, kept, removed), folder, (ids for _, _, ids in cut.pieces()))
    from moeplan.traffic.trace import open_trace

    return Fixed(removed, check_trace(open_trace(folder), card))


def _cut(trace: RoutingTrace, found: Check, masks: bool) -> _Cut:
    offsets = trace.request_offsets
    repeats = np.array([offsets[r : r + 2] for r, _ in found.repeats], dtype=np.int64).reshape(-1, 2)
    columns = [column for column in range(trace.layers) if column not in found.dead_layers]
    slots = [slot for slot in range(trace.top_k) if slot not in found.spare_slots]
    dtype = trace.expert_ids.dtype
    if masks and dtype.kind == "u":
        dtype = np.dtype({1: "<i2", 2: "<i4"}.get(dtype.itemsize, "<i8"))
    return _Cut(trace, found.startup_rows, repeats, columns, slots, dtype)


def _shell(cut: _Cut, kept: npt.NDArray[np.int64], removed: tuple[str, ...]) -> RoutingTrace:
    """The cleaned trace but for its ids, whose place a view of one zero keeps."""
    trace = cut.trace
    sizes = np.diff(kept)
    stays = sizes > 0
    shape = (int(kept[-1]), len(cut.columns), len(cut.slots))
    lost = np.diff(trace.request_offsets) - sizes
    tokens, domains = trace.request_tokens, trace.domains
    phase = None
    if trace.phase is not None:
        phase = np.concatenate([trace.phase[first : first + len(keep)][keep] for first, keep, _ in cut.pieces()])
    return replace(
        trace,
        expert_ids=np.broadcast_to(np.zeros((), cut.dtype), shape),
        request_offsets=np.concatenate([[0], np.cumsum(sizes[stays])]),
        layer_ids=trace.layer_ids[cut.columns],
        phase=phase,
        domains=None if domains is None else tuple(domains[r] for r in np.flatnonzero(stays)),
        request_tokens=None if tokens is None else (tokens - lost)[stays],
        provenance={**trace.provenance, "repairs": list(removed)},
    )


def _words(trace: RoutingTrace, found: Check, cut: _Cut, total: int) -> tuple[str, ...]:
    words = []
    by_code: dict[str, int] = {}
    for one in found.findings:
        by_code[one.code] = by_code.get(one.code, 0) + one.rows
    if cut.startup:
        words.append(f"rows 0..{cut.startup - 1}: identical start-up run")
    layers = [int(trace.layer_ids[column]) for column in found.dead_layers]
    if layers:
        words.append(f"layers {', '.join(map(str, layers))}: no route")
    if found.spare_slots:
        words.append(f"slots {', '.join(map(str, found.spare_slots))}: padding of the top-k axis")
    for code, text in (("unwritten-rows", "rows of zeros"), ("padding-rows", "rows of only -1")):
        if code in by_code:
            words.append(f"{by_code[code]} {text}")
    if len(cut.repeats):
        words.append(f"{len(cut.repeats)} repeated requests, {int(np.diff(cut.repeats).sum())} rows")
    if by_code.get("zero-cells") or ("last-layer-cut" in by_code and cut.dtype.kind == "i"):
        words.append("cells of zeros became -1")
    return (*words, f"{total} of {trace.rows} rows are left") if words else ()
