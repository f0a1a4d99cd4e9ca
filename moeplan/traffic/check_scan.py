"""One pass over a trace in chunks: what the checker counts. Memory does not grow with the number of rows."""

from dataclasses import dataclass, field
from math import lgamma, log

import numpy as np
import numpy.typing as npt

from moeplan.traffic.trace import CHUNK_BYTES, Ids, RoutingTrace

Mask = npt.NDArray[np.bool_]
Planes = npt.NDArray[np.integer]

RUN_ROWS = 32
RUN_BITS = 512
"""A run of identical rows is reported from RUN_ROWS rows that uniform routing would repeat once in 2^RUN_BITS."""


_PAIRED = 16  # slots up to which comparing all pairs is quicker than sorting


def row_bits(experts: int, top_k: int) -> float:
    """log2 of the number of sets that one layer can choose: how much a row of it tells rows apart."""
    k = min(top_k, experts)
    return (lgamma(experts + 1) - lgamma(k + 1) - lgamma(experts - k + 1)) / log(2)


@dataclass(slots=True)
class Tally:
    """Rows that hold something, by layer: how many, and the first one (-1 = none)."""

    count: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]

    @classmethod
    def of(cls, layers: int) -> "Tally":
        """Nothing counted yet."""
        return cls(np.zeros(layers, np.int64), np.full(layers, -1, np.int64))

    def add(self, mask: Mask, first_row: int) -> None:
        """mask [rows, layers] of the rows from first_row on."""
        if not mask.any():
            return
        count = np.count_nonzero(mask, axis=0)
        new = (self.first < 0) & (count > 0)
        self.first[new] = first_row + mask.argmax(axis=0)[new]
        self.count += count


@dataclass(slots=True)
class Runs:
    """Maximal runs of identical rows (first row, rows) of `shortest` rows or more; rows without a route end a run."""

    shortest: int
    found: list[tuple[int, int]] = field(default_factory=list)
    start: int = 0
    last: Ids | None = None

    def add(self, ids: Ids, routed: Mask, first_row: int) -> None:
        """Rows [rows, layers, k] from first_row on, routed [rows]: which of them name an expert."""
        flat = ids.reshape(len(ids), -1)
        same = np.zeros(len(flat), dtype=bool)
        same[1:] = _same_rows(flat) & routed[1:]
        same[0] = self.last is not None and bool(routed[0]) and bool((flat[0] == self.last).all())
        self.last = flat[-1].copy()
        for at in np.flatnonzero(~same):
            self.close(first_row + int(at))

    def close(self, row: int) -> None:
        """The run ends before this row."""
        if row - self.start >= self.shortest:
            self.found.append((self.start, row - self.start))
        self.start = row


def _same_rows(flat: Ids) -> Mask:
    words = np.ascontiguousarray(flat)
    width = words.shape[1] * words.itemsize
    if width % 8 == 0:
        words = words.view(np.uint64)
    return np.asarray((words[1:] == words[:-1]).all(axis=1))


@dataclass(slots=True)
class Scan:
    """Counts of a whole trace. A cell is the k slots of one row and layer; unrouted rows are left out of zero, empty.

    outside, duplicate, zero (every slot 0, k > 1), empty (every slot -1): by layer; unwritten (every cell zero or
    empty, one at least zero) and padding (every slot -1): rows; slot_empty, slot_outside: cells by slot;
    slot_low, slot_high: smallest and largest id by slot; only_zero: layers of a top-1 trace that name expert 0 alone;
    torn: gaps of the last layer that no gap or request start
    precedes.
    """

    outside: Tally
    duplicate: Tally
    zero: Tally
    empty: Tally
    unwritten: Tally
    padding: Tally
    runs: Runs
    slot_empty: npt.NDArray[np.int64]
    slot_outside: npt.NDArray[np.int64]
    slot_low: npt.NDArray[np.int64]
    slot_high: npt.NDArray[np.int64]
    only_zero: Mask
    torn: int = 0
    gap_before: bool = False


def _start(trace: RoutingTrace) -> Scan:
    layers, k, far = trace.layers, trace.top_k, np.iinfo(np.int64)
    bits = max(1.0, layers * row_bits(trace.experts, k))
    return Scan(
        outside=Tally.of(layers),
        duplicate=Tally.of(layers),
        zero=Tally.of(layers),
        empty=Tally.of(layers),
        unwritten=Tally.of(1),
        padding=Tally.of(1),
        runs=Runs(max(RUN_ROWS, int(RUN_BITS / bits) + 2)),
        slot_empty=np.zeros(k, np.int64),
        slot_outside=np.zeros(k, np.int64),
        slot_low=np.full(k, far.max, np.int64),
        slot_high=np.full(k, far.min, np.int64),
        only_zero=np.full(layers, k == 1),
    )


def scan(trace: RoutingTrace, size: int = CHUNK_BYTES) -> Scan:
    """Count everything in one pass, `size` bytes of ids at a time; the result does not depend on `size`."""
    found = _start(trace)
    for first, ids in trace.chunks(size):
        planes = np.ascontiguousarray(np.moveaxis(ids, 2, 0))
        _slots(found, planes, trace.experts, first)
        if found.only_zero.any():
            found.only_zero &= (planes[0] == 0).all(axis=0)
        routed = _cells(found, planes, trace, first)
        found.runs.add(ids, routed, first)
    found.runs.close(trace.rows)
    return found


def _slots(found: Scan, planes: Planes, experts: int, first: int) -> None:
    """Ids out of range, and what each slot holds."""
    low = planes.min(axis=(1, 2)).astype(np.int64)
    high = np.array([min(int(n), np.iinfo(np.int64).max) for n in planes.max(axis=(1, 2))], dtype=np.int64)
    np.minimum(found.slot_low, low, out=found.slot_low)
    np.maximum(found.slot_high, high, out=found.slot_high)
    wrong = np.zeros(planes.shape[1:], dtype=bool)
    for slot in np.flatnonzero((low < -1) | (high >= experts)):
        bad = (planes[slot] >= experts) | (planes[slot] < -1)
        found.slot_outside[slot] += np.count_nonzero(bad)
        wrong |= bad
    found.outside.add(wrong, first)
    for slot in np.flatnonzero(low < 0):
        found.slot_empty[slot] += np.count_nonzero(planes[slot] == -1)


def cells(planes: Planes) -> tuple[Mask, Mask]:
    """zero and empty [rows, layers] of planes [k, rows, layers].

    zero: only 0 and -1, 0 at least twice; one slot of 0 is an answer. empty: only -1.
    """
    if planes.dtype.kind == "u" or int(planes.min()) >= 0:
        none = np.zeros(planes.shape[1:], dtype=bool)
        return (np.asarray(np.bitwise_or.reduce(planes, axis=0) == 0) if len(planes) > 1 else none), none
    highest = planes.max(axis=0)
    zero = (highest == 0) & (np.count_nonzero(planes == 0, axis=0) > 1)
    return np.asarray(zero), np.asarray(np.bitwise_and.reduce(planes, axis=0) == -1)


def _cells(found: Scan, planes: Planes, trace: RoutingTrace, first: int) -> Mask:
    """Zero, empty and duplicate cells; returns which rows name an expert at all."""
    zero, empty = cells(planes)
    gap = zero | empty
    unrouted = np.asarray(gap.all(axis=1), dtype=np.bool_)
    padding = np.asarray(empty.all(axis=1), dtype=np.bool_)
    found.padding.add(padding[:, None], first)
    found.unwritten.add((unrouted & ~padding)[:, None], first)
    zero[unrouted] = False
    empty[unrouted] = False
    found.zero.add(zero, first)
    found.empty.add(empty, first)
    found.duplicate.add(_duplicates(planes) & ~gap, first)
    _tear(found, zero[:, -1] | empty[:, -1], trace, first)
    return ~unrouted


def _tear(found: Scan, gap: Mask, trace: RoutingTrace, first: int) -> None:
    before = np.concatenate([[found.gap_before], gap[:-1]])
    if gap.any():
        low, high = np.searchsorted(trace.request_offsets, (first, first + len(gap)))
        begins = np.zeros(len(gap), dtype=bool)
        begins[trace.request_offsets[low:high] - first] = True
        found.torn += int(np.count_nonzero(gap & ~begins & ~before))
    found.gap_before = bool(gap[-1])


def _duplicates(planes: Planes) -> Mask:
    """Cells [rows, layers] in which an expert occurs twice."""
    twice = np.zeros(planes.shape[1:], dtype=bool)
    signed = planes.dtype.kind == "i"
    if len(planes) > _PAIRED:
        ordered = np.sort(planes, axis=0)
        return np.asarray(((ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)).any(axis=0))
    for slot in range(1, len(planes)):
        for other in range(slot):
            same = planes[slot] == planes[other]
            if signed:
                same &= planes[slot] >= 0
            twice |= same
    return twice
