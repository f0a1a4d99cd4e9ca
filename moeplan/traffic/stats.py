"""What a routing trace does to a batch: distinct experts, streams, skew and sorted blocks. All layers pooled."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from moeplan.errors import MoeplanError
from moeplan.traffic.arrays import read_rows
from moeplan.traffic.chance import mean_distinct
from moeplan.traffic.cohort import Cohort, Rows, Spans, draw_rows, parse_cohort, spans_of
from moeplan.traffic.packed import Masks, Packed, popcount
from moeplan.traffic.trace import RoutingTrace

FloatTable = npt.NDArray[np.float64]
LAGS = (1, 2, 4, 8, 16, 32, 64)
DRAW_RULE = "B different requests drawn uniformly, then a uniform row of each; mean over layers and draws"

_CHUNK = 4096  # rows packed and counted at once, with a look ahead


@dataclass(frozen=True, slots=True)
class StatsPlan:
    """What to compute. draws: cohorts a batch size (acceptance needs 5,000); block_draws: cohorts a block count."""

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    windows: tuple[int, ...] = (1, 2, 4, 8, 16)
    block_tokens: tuple[int, ...] = (64, 128, 256, 384)
    block_rows: tuple[int, ...] = (16, 32, 64, 128)
    cohort: str = "independent"
    draws: int = 5000
    block_draws: int = 200
    seed: int = 0


@dataclass(frozen=True)
class Flow:
    """A trace's decode rows (all rows where no phase is recorded), read in chunks."""

    packed: Packed

    @property
    def trace(self) -> RoutingTrace:
        """The trace itself."""
        return self.packed.trace

    @cached_property
    def spans(self) -> Spans:
        """The rows of each request that count."""
        return spans_of(self.trace, 1)

    @cached_property
    def rows(self) -> int:
        """Rows that count."""
        return int(self.spans.sizes.sum())

    def place(self, first: int, last: int) -> tuple[Rows, Rows]:
        """For each row of first:last the rows left in its span (0 where it does not count) and the span's size."""
        at = np.arange(first, last)
        request = np.searchsorted(self.trace.request_offsets, at, side="right") - 1
        left = np.where(at >= self.spans.starts[request], self.spans.ends[request] - at, 0)
        return np.maximum(left, 0), self.spans.sizes[request]

    def chunks(self, ahead: int = 0) -> Iterator[tuple[Masks, Rows, Rows]]:
        """(masks of a chunk and of `ahead` rows beyond, then `place` of the chunk's rows)."""
        total = len(self.trace.expert_ids)
        for first in range(0, total, _CHUNK):
            last = min(total, first + _CHUNK)
            yield self.packed.between(first, min(total, last + ahead)), *self.place(first, last)

    @cached_property
    def popularity(self) -> FloatTable:
        """Share of rows that pick each expert [layers, experts]."""
        trace, size = self.trace, self.trace.experts + 1
        counts = np.zeros(trace.layers * size, dtype=np.int64)
        shift = (np.arange(trace.layers, dtype=np.int32) * size + 1)[:, None]
        for first in range(0, len(trace.expert_ids), _CHUNK):
            ids = read_rows(trace.expert_ids, first, first + _CHUNK).astype(np.int32)
            inside = self.place(first, first + len(ids))[0] > 0
            counts += np.bincount((ids[inside] + shift).reshape(-1), minlength=counts.size)
        return counts.reshape(trace.layers, size)[:, 1:] / max(1, self.rows)

    def windows(self, sizes: tuple[int, ...]) -> FloatTable:
        """Mean distinct experts [sizes, layers] of that many consecutive rows: all windows of all requests pooled."""
        total, number = np.zeros((len(sizes), self.trace.layers)), np.zeros(len(sizes))
        for masks, left, _ in self.chunks(max(sizes) - 1):
            for at, size in enumerate(sizes):
                good = left >= size
                total[at] += _weighed(_union_ahead(masks, size), good.astype(np.float64))
                number[at] += np.count_nonzero(good)
        return _divide(total, number)

    def overlap(self, lags: tuple[int, ...], by_request: bool = False) -> FloatTable:
        """Mean experts [lags, layers] that a row shares with the row `lag` later in its request.

        All pairs pooled, or the mean over requests of each request's mean: long repetitive requests count less.
        """
        total, number = np.zeros((len(lags), self.trace.layers)), np.zeros(len(lags))
        for masks, left, size in self.chunks(max(lags)):
            for at, lag in enumerate(lags):
                weight = (left > lag) / (np.maximum(size - lag, 1) if by_request else 1)
                total[at] += _weighed(masks[:-lag] & masks[lag:], weight)
                number[at] += weight.sum()
        return _divide(total, number)


def _divide(total: FloatTable, number: FloatTable) -> FloatTable:
    """NaN where no request is long enough."""
    return np.where(number[:, None] > 0, total / np.where(number > 0, number, 1)[:, None], np.nan)


def _weighed(masks: Masks, weight: FloatTable) -> FloatTable:
    """Weighted sum over rows of the bits set [layers]; rows beyond either end weigh nothing."""
    counts = popcount(masks[: len(weight)])
    return np.asarray(weight[: len(counts)] @ counts.astype(np.float64))


def _union_ahead(masks: Masks, size: int) -> Masks:
    """OR of each row and the size - 1 rows after it, by doubling; an overlap of the halves does no harm."""
    reach, now = 1, masks
    while 2 * reach <= size:
        now = now[:-reach] | now[reach:]
        reach *= 2
    more = size - reach
    return now[:-more] | now[more:] if more else now


def gini(popularity: FloatTable) -> FloatTable:
    """Gini coefficient [layers] of each layer's shares: 0 even, 1 - 1/experts all on one."""
    ordered = np.sort(popularity, axis=-1)
    n = ordered.shape[-1]
    weight = 2 * np.arange(1, n + 1) - n - 1
    total = ordered.sum(axis=-1)
    return np.asarray(np.where(total > 0, ordered @ weight / (n * np.where(total > 0, total, 1)), 0.0))


def top_half_share(popularity: FloatTable) -> FloatTable:
    """Share of the picks [layers] that the hottest half of the experts takes (the smaller half of an odd number)."""
    ordered = np.sort(popularity, axis=-1)[:, ::-1]
    total = ordered.sum(axis=-1)
    return np.asarray(ordered[:, : ordered.shape[1] // 2].sum(axis=-1) / np.where(total > 0, total, 1))


def distinct_row(flow: Flow, cohort: Cohort, batch: int, draws: int, seed: int) -> dict[str, Any]:
    """Distinct experts of a cohort: mean, 5th and 95th percentile over layers and draws, beside the two formulas.

    formula: tokens that choose independently by the layer's popularity; uniform: by k / experts.
    """
    trace = flow.trace
    counts = flow.packed.distinct(draw_rows(trace, cohort, batch, draws, np.random.default_rng([seed, 0, batch])))
    histogram = np.bincount(counts.reshape(-1), minlength=trace.experts + 1)
    steps, rows = np.cumsum(histogram), cohort.rows(batch)
    return {
        "batch": batch,
        "rows": rows,
        "mean": float(histogram @ np.arange(histogram.size) / steps[-1]),
        "p05": int(np.searchsorted(steps, 0.05 * steps[-1])),
        "p95": int(np.searchsorted(steps, 0.95 * steps[-1])),
        "formula": float(np.mean([mean_distinct(p, rows) for p in flow.popularity])),
        "uniform": mean_distinct(np.full(trace.experts, trace.top_k / trace.experts), rows),
    }


def block_rows_of(flow: Flow, cohort: Cohort, tokens: int, plan: StatsPlan) -> list[dict[str, Any]]:
    """Sorted blocks of a cohort, a layer: mean blocks, and pairs / blocks and rows / padded rows of the sums."""
    trace = flow.trace
    draws = draw_rows(trace, cohort, tokens, plan.block_draws, np.random.default_rng([plan.seed, 1, tokens]))
    shift = (np.arange(trace.layers, dtype=np.int32) * (trace.experts + 1) + 1)[:, None]
    size = trace.layers * (trace.experts + 1)
    blocks, pairs, used = np.zeros(len(plan.block_rows)), np.zeros(len(plan.block_rows)), 0
    for rows in draws:
        ids = np.asarray(trace.expert_ids[rows], dtype=np.int32) + shift
        load = np.bincount(ids.reshape(-1), minlength=size).reshape(trace.layers, -1)[:, 1:]
        used += int(load.sum())
        for at, height in enumerate(plan.block_rows):
            each = -(-load // height)
            blocks[at] += each.sum()
            pairs[at] += (each // 2).sum()
    layers = len(draws) * trace.layers
    return [
        {
            "tokens": draws.shape[1],
            "block_rows": height,
            "blocks": float(blocks[at] / layers),
            "pair_count_fraction": float(pairs[at] / max(1.0, blocks[at])),
            "occupancy": float(used / max(1.0, blocks[at] * height)),
        }
        for at, height in enumerate(plan.block_rows)
    ]


def labels(trace: RoutingTrace, cohort: Cohort) -> list[str]:
    """What every result must say: a synthetic trace, made from what, thin or assumed; prompt rows not told apart."""
    about, notes = trace.provenance, []
    if about.get("kind") == "synthetic":
        more = about.get("notes")
        notes = [f"synthetic trace, made from {about.get('source')}", *(more if isinstance(more, list) else [])]
    if trace.phase is None and any(part.kind == "prefill" for part in cohort.parts):
        notes.append(f"{trace.name} records no phase: the prefill rows of --cohort {cohort.name} may be decode rows")
    return [str(line) for line in notes]


def stats_document(trace: RoutingTrace, plan: StatsPlan) -> dict[str, Any]:
    """The document of `trace stats`. What the trace is too small for is left out and named under `notes`.

    Raises MoeplanError for an unknown cohort and where no batch size can be drawn.
    """
    flow, cohort = Flow(Packed.of(trace)), parse_cohort(plan.cohort)
    notes, distinct, blocks = labels(trace, cohort), [], []
    for batch in (1,) if cohort.mixed else plan.batches:
        try:
            distinct.append(distinct_row(flow, cohort, batch, plan.draws, plan.seed))
        except MoeplanError as refused:
            notes.append(str(refused))
    if not distinct:
        raise MoeplanError(notes[-1])
    for tokens in (1,) if cohort.mixed else plan.block_tokens:
        try:
            blocks += block_rows_of(flow, cohort, tokens, plan)
        except MoeplanError as refused:
            notes.append(str(refused))
    shares = flow.popularity
    chance = float((shares**2).sum(axis=1).mean())
    pooled, by_request = flow.overlap(LAGS).mean(axis=1), flow.overlap(LAGS, by_request=True).mean(axis=1)
    window = flow.windows(plan.windows).mean(axis=1)
    return {
        "name": trace.name,
        "rows": flow.rows,
        "requests": trace.requests,
        "layers": trace.layers,
        "experts": trace.experts,
        "top_k": trace.top_k,
        "cohort": cohort.name,
        "draws": plan.draws,
        "draw_rule": DRAW_RULE if cohort.name == "independent" else f"cohort {cohort.name}; mean over layers and draws",
        "seed": plan.seed,
        "distinct": distinct,
        "window": [
            {"tokens": n, "distinct": float(x)} for n, x in zip(plan.windows, window, strict=True) if np.isfinite(x)
        ],
        "overlap": [
            {"lag": n, "shared": float(x), "shared_by_request": float(y), "chance": chance}
            for n, x, y in zip(LAGS, pooled, by_request, strict=True)
            if np.isfinite(x)
        ],
        "blocks": blocks,
        "gini": float(gini(shares).mean()),
        "top_half_share": float(top_half_share(shares).mean()),
        "per_layer": [
            {"layer": int(layer), "gini": float(g), "top_half_share": float(h), "popularity": p.round(6).tolist()}
            for layer, g, h, p in zip(trace.layer_ids, gini(shares), top_half_share(shares), shares, strict=True)
        ],
        "notes": notes,
    }
