"""What is wrong with a routing trace, as data. The table of codes is in docs/trace-format.md."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import log2
from typing import Literal

import numpy as np

from moeplan.traffic.check_card import card_findings
from moeplan.traffic.check_requests import LONE_ROWS, copies, lost_rows, mixed_phase, rankings
from moeplan.traffic.check_scan import Scan, Tally, scan
from moeplan.traffic.finding import Finding
from moeplan.traffic.model import ModelCard
from moeplan.traffic.trace import CHUNK_BYTES, RoutingTrace

COPIES_NAMED = 100
"""Copied requests named one by one; the rest are counted in one finding."""

SURE_ROWS = 64
"""Rows from which a layer of only expert 0 (top-1), or a slot of one expert, is no coincidence."""

_SLOT_BITS = 128  # cells * log2(experts / top_k) from which a slot that never changes is no coincidence
_REPLICA_SHARE = 0.01  # of all slots: fewer ids past the last expert are corruption, not replicas

Dead = Literal["zero", "empty"]


@dataclass(frozen=True, slots=True)
class Check:
    """All findings of a trace, and what a repair needs to know.

    startup_rows: rows at the start to drop; dead_layers: columns; spare_slots: slots that only pad; repeats:
    (request, earlier equal request).
    """

    findings: tuple[Finding, ...]
    startup_rows: int
    dead_layers: tuple[int, ...]
    spare_slots: tuple[int, ...]
    repeats: tuple[tuple[int, int], ...]

    @property
    def ok(self) -> bool:
        """Nothing found."""
        return not self.findings


def check_trace(trace: RoutingTrace, card: ModelCard | None = None, chunk_bytes: int = CHUNK_BYTES) -> Check:
    """Read every row once, in chunks, and list what is wrong (docs/trace-format.md says how each is told)."""
    seen = scan(trace, chunk_bytes)
    dead = _dead_layers(trace, seen)
    spare = tuple(int(s) for s in np.flatnonzero(seen.slot_empty == trace.rows * trace.layers))
    if _nothing(trace, seen, dead):
        none = tuple(_nothing_findings(trace, seen))
        return Check(none + tuple(card_findings(trace, card, seen)), 0, (), (), ())
    startup = _startup(seen)
    repeats = tuple(copies(trace, startup))
    findings = (
        *_run_findings(seen, startup),
        *_layer_findings(trace, seen, dead),
        *_row_findings(seen, spare, trace),
        *_id_findings(trace, seen),
        *card_findings(trace, card, seen),
        *_ranking_findings(trace),
        *_request_findings(trace, repeats),
    )
    empty = {int(trace.layer_ids[column]) for column in dead}
    once: dict[tuple[str, int | None, int, int], Finding] = {}
    for one in findings:
        if one.code != "card-layer" or one.layer not in empty:
            once.setdefault((one.code, one.layer, one.first_row, one.rows), one)
    return Check(tuple(once.values()), startup, tuple(dead), spare, repeats)


def _dead_layers(trace: RoutingTrace, seen: Scan) -> dict[int, Dead]:
    """Columns that hold nothing in any row that holds something: all zero, or all -1."""
    routed = trace.rows - int(seen.unwritten.count[0]) - int(seen.padding.count[0])
    dead: dict[int, Dead] = {}
    for column in range(trace.layers):
        zero, empty = int(seen.zero.count[column]), int(seen.empty.count[column])
        if routed and zero + empty == routed:
            dead[column] = "zero" if zero else "empty"
    if trace.top_k == 1 and trace.rows >= SURE_ROWS:
        dead |= {int(column): "zero" for column in np.flatnonzero(seen.only_zero)}
    return dict(sorted(dead.items()))


def _nothing(trace: RoutingTrace, seen: Scan, dead: dict[int, Dead]) -> bool:
    return int(seen.unwritten.count[0] + seen.padding.count[0]) == trace.rows or len(dead) == trace.layers


def _nothing_findings(trace: RoutingTrace, seen: Scan) -> Iterator[Finding]:
    if int(seen.padding.count[0]) == trace.rows:
        text = "every id is -1: nothing was recorded in any layer"
        for layer in trace.layer_ids.tolist():
            yield Finding("zero-token-layer", "error", layer, 0, trace.rows, text, "record the trace again")
        return
    text = "every expert id is 0: the engine handed out a buffer that it never filled"
    yield Finding("all-zero", "error", None, 0, trace.rows, text, "record again with an engine that fills it")


def _startup(seen: Scan) -> int:
    """Rows at the start that identical runs cover without a break."""
    end = 0
    for first, rows in seen.runs.found:
        if first == end:
            end += rows
    return end


def _run_findings(seen: Scan, startup: int) -> Iterator[Finding]:
    for first, rows in seen.runs.found:
        if first < startup:
            text = f"{rows} identical rows at the start: the engine's dummy or profiling run"
            yield Finding("startup-run", "error", None, first, rows, text, "drop them (--fix)")
        elif rows >= 8 * seen.runs.shortest:
            text = f"{rows} identical rows in a row"
            yield Finding("identical-run", "warning", None, first, rows, text, "find out which request they stand for")


def _layer_findings(trace: RoutingTrace, seen: Scan, dead: dict[int, Dead]) -> Iterator[Finding]:
    layers = trace.layer_ids.tolist()
    if trace.layers > 1 and list(dead) == list(range(1, trace.layers)):
        text = f"only layer {layers[0]} holds routes: every layer was written into the first slot"
        yield Finding("layers-in-slot-0", "error", layers[0], 0, trace.rows, text, "record again with the slot fixed")
        return
    for column, kind in dead.items():
        if kind == "zero":
            text = "every id is 0: a dense layer in a zero-filled buffer, not expert 0"
            yield Finding("dense-layer", "error", layers[column], 0, trace.rows, text, "drop the layer (--fix)")
        else:
            text = "no row has an expert here: a dense layer, or one that was not recorded"
            yield Finding("zero-token-layer", "error", layers[column], 0, trace.rows, text, "drop the layer (--fix)")
    cut = _cut(seen, dead, trace.layers)
    if cut:
        gap = Tally(
            seen.zero.count + seen.empty.count, np.where(seen.zero.count > 0, seen.zero.first, seen.empty.first)
        )
        text = "prompt rows have no route in the last layer: the engine computes it for output rows only"
        remedy = "leave prompt rows of this layer out of every count (--fix masks zeros)"
        yield Finding("last-layer-cut", "warning", layers[-1], int(gap.first[-1]), int(gap.count[-1]), text, remedy)
    for column in np.flatnonzero(seen.zero.count).tolist():
        if column not in dead and not (cut and column == trace.layers - 1):
            text = "every slot is 0 in these rows: never filled"
            first, rows = int(seen.zero.first[column]), int(seen.zero.count[column])
            yield Finding("zero-cells", "error", layers[column], first, rows, text, "mask them with -1 (--fix)")


def _cut(seen: Scan, dead: dict[int, Dead], layers: int) -> bool:
    """Gaps in the last layer alone, two or more, each opening a request."""
    gaps = seen.zero.count + seen.empty.count
    if layers < 2 or layers - 1 in dead or gaps[-1] < 2 or seen.torn:
        return False
    return all(gaps[column] == 0 for column in range(layers - 1) if column not in dead)


def _row_findings(seen: Scan, spare: tuple[int, ...], trace: RoutingTrace) -> Iterator[Finding]:
    first, rows = int(seen.unwritten.first[0]), int(seen.unwritten.count[0])
    if rows:
        text = "rows of zeros in every layer: never filled"
        yield Finding("unwritten-rows", "error", None, first, rows, text, "drop them (--fix)")
    first, rows = int(seen.padding.first[0]), int(seen.padding.count[0])
    if rows:
        yield Finding("padding-rows", "warning", None, first, rows, "rows of only -1", "drop them (--fix)")
    if spare:
        text = f"{len(spare)} of {trace.top_k} slots are -1 everywhere: padding of the top-k axis"
        yield Finding("padded-slots", "warning", None, 0, trace.rows, text, "cut the axis (--fix)")


def _id_findings(trace: RoutingTrace, seen: Scan) -> Iterator[Finding]:
    cells = trace.rows * trace.layers
    steady = (seen.slot_low == seen.slot_high) & (seen.slot_low >= 0) & (trace.rows >= SURE_ROWS)
    steady &= trace.top_k > 1 and cells * log2(trace.experts / trace.top_k) >= _SLOT_BITS
    beyond = seen.slot_outside == cells
    fused = np.flatnonzero(steady | (beyond & (seen.slot_low >= trace.experts)))
    if 0 < fused.size < trace.top_k and (seen.runs.found[:1] != [(0, trace.rows)]):
        text = f"slot {int(fused[0])} names a shared expert in every row: top-k counts it as k + 1"
        yield Finding("fused-shared-expert", "error", None, 0, trace.rows, text, "record with shared-expert fusion off")
    outside, total = int(seen.slot_outside.sum()), cells * trace.top_k
    stray = outside - int(seen.slot_outside[fused].sum())
    high = int(seen.slot_high.max())
    if stray and trace.experts <= high < 2 * trace.experts and stray >= _REPLICA_SHARE * total:
        text = f"ids up to {high} with {trace.experts} experts: physical slots of replicated experts"
        yield from _by_layer(trace, seen.outside, "physical-ids", text, "map them to logical experts when importing")
    elif stray:
        text = f"ids outside -1..{trace.experts - 1}"
        yield from _by_layer(
            trace, seen.outside, "id-out-of-range", text, "find the right number of experts or record again"
        )
    if trace.id_space == "physical":
        text = "ids are physical slots: replicas of one expert count as different experts"
        yield Finding("physical-ids", "error", None, 0, trace.rows, text, "map them to logical experts when importing")
    text = "an expert occurs twice in one row: no router does that"
    yield from _by_layer(
        trace, seen.duplicate, "duplicate-experts", text, "map replicas to logical ids or record again"
    )


def _by_layer(trace: RoutingTrace, tally: Tally, code: str, text: str, remedy: str) -> Iterator[Finding]:
    for column in np.flatnonzero(tally.count).tolist():
        layer, first, rows = int(trace.layer_ids[column]), int(tally.first[column]), int(tally.count[column])
        yield Finding(code, "error", layer, first, rows, text, remedy)


def _ranking_findings(trace: RoutingTrace) -> Iterator[Finding]:
    found = rankings(trace)
    text = (
        f"every {trace.experts // trace.top_k} rows name all {trace.experts} experts once: a whole ranking, read flat"
    )
    yield from _by_layer(
        trace,
        Tally(found.rows, found.first),
        "argsort-artefact",
        text,
        "record again with the stride of the top-k view",
    )


def _request_findings(trace: RoutingTrace, repeats: tuple[tuple[int, int], ...]) -> Iterator[Finding]:
    offsets = trace.request_offsets
    for request, earlier in repeats[:COPIES_NAMED]:
        first, rows = int(offsets[request]), int(offsets[request + 1] - offsets[request])
        text = f"request {request} repeats request {earlier} row by row"
        yield Finding("duplicate-request", "error", None, first, rows, text, "drop it (--fix)")
    if len(repeats) > COPIES_NAMED:
        rest = [request for request, _ in repeats[COPIES_NAMED:]]
        rows = int(np.diff(offsets)[rest].sum())
        text = f"{len(rest)} more requests repeat earlier ones"
        yield Finding("duplicate-request", "error", None, int(offsets[rest[0]]), rows, text, "drop them (--fix)")
    lost = lost_rows(trace)
    if lost is not None and lost.any():
        short = np.flatnonzero(lost)
        sizes = sorted({int(n) for n in lost[short]})
        each = f"{sizes[0]} each" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        text = f"{short.size} requests have other than one row a token; tokens - rows: {each}"
        rows = int(np.abs(lost).sum())
        yield Finding("dropped-rows", "error", None, int(offsets[short[0]]), rows, text, "record in smaller batches")
    first, rows = mixed_phase(trace)
    unknown = trace.provenance.get("request_boundaries") == "unknown"
    if rows:
        text = "prefill rows follow decode rows of the same request: rows of a batch under one request"
        yield Finding("not-separable", "error", None, first, rows, text, "record with one id a request")
    elif unknown or (trace.requests == 1 and trace.phase is None and trace.rows > LONE_ROWS):
        text = "one request for everything: rows of a batch cannot be told apart"
        yield Finding(
            "not-separable", "warning", None, 0, trace.rows, text, "record with one id a request, or the phase"
        )
