"""Expected work of a path: exact where a formula exists, a seeded mean over drawn batches where none does."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from moeplan.errors import MoeplanError
from moeplan.traffic.chance import FloatArray, distinct_distribution, mean_blocks, mean_distinct, percentile
from moeplan.traffic.load import ExpertLoad
from moeplan.traffic.partition import Partition
from moeplan.traffic.path import PathSpec
from moeplan.traffic.routing import IdTable, Routing, cohort_rows, draw_ids
from moeplan.traffic.shape import LayerShape
from moeplan.traffic.tiles import sorts, tiles_of

Cohort = Literal["independent", "identical"]

_SAMPLES = 4800  # batches drawn where no formula exists: the mean of distinct is then good to about 0.1 %
_COLUMNS = ("slots", "distinct", "tiles", "padded_rows")
_BUDGET = 10_000_000  # token-expert cells drawn at most; large batches vary less and need fewer samples


@dataclass(frozen=True, slots=True)
class ExpectedWork:
    """Expected work of one MoE layer, routed experts only.

    `drawn` names what is a mean over seeded draws (`distinct` = mean and 95th percentile), bytes and occupancy
    following their parts; everything else is exact.
    """

    path: str
    tokens: int
    slots: float
    distinct_mean: float
    distinct_p95: int
    unique_bytes: float
    issued_bytes: float
    dispatches: int
    tiles: float
    padded_rows: float
    occupancy: float
    drawn: tuple[str, ...]

    @property
    def blocks(self) -> float:
        """Sorted blocks of a block path: its tiles."""
        return self.tiles


@dataclass(frozen=True)
class Case:
    """One layer, one batch size, one routing, one rank. Draws are made once and shared by all paths."""

    shape: LayerShape
    tokens: int
    routing: Routing
    cohort: Cohort = "independent"
    seed: int = 0
    part: Partition = field(default_factory=Partition)

    @cached_property
    def local(self) -> LayerShape:
        """The layer that the rank computes."""
        return self.part.local(self.shape)

    @cached_property
    def marginals(self) -> list[FloatArray] | None:
        """Chance of each local expert, a layer: what the closed forms need. None where they do not apply."""
        if self.cohort == "identical" or self.part.rank is None:
            return None
        experts, k = self.shape.experts, self.shape.top_k
        share = experts // self.part.ep
        mine = slice(self.part.rank * share, (self.part.rank + 1) * share)
        if self.routing.kind == "uniform":
            return [np.full(share, k / experts)]
        if self.routing.popularity is None:
            return None
        own = self.routing.popularity
        return [own.layer(layer, experts, k)[mine] for layer in range(len(own.shares))]

    @cached_property
    def samples(self) -> list[ExpertLoad]:
        """Global loads of drawn batches, spread evenly over the layers of the profile or trace."""
        return [ExpertLoad.from_ids(ids, self.shape.experts) for ids in self._batches()]

    def _batches(self) -> Iterator[IdTable]:
        routing, experts, k = self.routing, self.shape.experts, self.shape.top_k
        rows = 1 if self.cohort == "identical" else self.tokens
        layers = len(routing.popularity.shares) if routing.popularity else 1
        if routing.trace is not None:
            layers = routing.trace.layers
        settled = self.cohort == "identical" or routing.kind in ("identical", "disjoint")
        if settled and self.part.ep == 1 and routing.trace is None:
            wanted = 1
        else:
            wanted = max(1, min(_SAMPLES, _BUDGET // (rows * experts)))
        draws = -(-wanted // layers)
        for draw in range(draws):
            if routing.trace is not None:
                found = _trace_layers(routing, (experts, k), rows, self.seed + draw)
            else:
                found = (draw_ids(routing, experts, k, rows, self.seed + draw, layer) for layer in range(layers))
            yield from (np.tile(ids, (self.tokens, 1)) if rows != self.tokens else ids for ids in found)

    def shares(self, path: PathSpec) -> list[ExpertLoad]:
        """Local loads: of the rank asked for, or of the one with the most planes to read on that path."""
        part = self.part
        if part.rank is not None:
            return [load.local(part.ep, part.rank) for load in self.samples]
        ranks = [[load.local(part.ep, rank) for rank in range(part.ep)] for load in self.samples]
        return [max(loads, key=lambda one: (tiles_of(path, one)[0], one.slots)) for loads in ranks]


def _trace_layers(routing: Routing, size: tuple[int, int], tokens: int, seed: int) -> Iterator[IdTable]:
    trace = routing.trace
    assert trace is not None
    yield draw_ids(routing, size[0], size[1], tokens, seed)  # raises where the trace does not fit the model
    rows = cohort_rows(trace, tokens, np.random.default_rng(seed))
    yield from (np.asarray(trace.expert_ids[rows, layer], dtype=np.int32) for layer in range(1, trace.layers))


def _mean(values: list[FloatArray], of: Callable[[FloatArray], float]) -> float:
    return float(np.mean([of(row) for row in values]))


def expect(path: PathSpec, case: Case) -> ExpectedWork:
    """Expected work of one layer. Exact for uniform and popularity routing, except what `drawn` names."""
    shape, n, drawn = case.local, case.tokens, []
    if case.marginals is None:
        loads = case.shares(path)
        table = np.array([(load.slots, load.distinct, *tiles_of(path, load)) for load in loads])
        slots, distinct, tiles, padded = (float(x) for x in table.mean(axis=0))
        p95 = int(np.percentile(table[:, 1], 95, method="inverted_cdf"))
        varies = table.min(axis=0) < table.max(axis=0)
        drawn = [name for name, moves in zip(_COLUMNS, varies, strict=True) if moves]
    else:
        slots = n * _mean(case.marginals, lambda p: float(p.sum()))
        distinct = _mean(case.marginals, lambda p: mean_distinct(p, n))
        if case.routing.kind == "uniform":
            local = case.marginals[0].size
            p95 = percentile(distinct_distribution(shape.experts, shape.top_k, n, local), 0.95)
        else:
            counts = [load.distinct for load in case.shares(path)]
            p95 = int(np.percentile(counts, 95, method="inverted_cdf"))
            drawn.append("distinct_p95")
        tiles, padded, from_draws = _tiles(path, case, slots, distinct)
        drawn += ["tiles", "padded_rows"] if from_draws else []
    return ExpectedWork(
        path.name,
        n,
        slots,
        distinct,
        p95,
        distinct * shape.plane_bytes,
        tiles * shape.plane_bytes,
        path.launches(n),
        tiles,
        padded,
        slots / (slots + padded) if slots else 0.0,
        tuple(drawn),
    )


def _tiles(path: PathSpec, case: Case, slots: float, distinct: float) -> tuple[float, float, bool]:
    """Expected tiles and padded rows, and whether they had to be drawn."""
    marginals = case.marginals
    assert marginals is not None
    if path.reuse == "slot":
        return slots, 0.0, False
    if path.reuse == "distinct":
        return distinct, 0.0, False
    whole = case.part.ep == 1  # every batch has the same number of slots
    if whole and not sorts(path, round(slots), case.shape.experts):
        return slots, 0.0, False
    if path.runs or path.sorted_from:
        tiles, padded = np.mean([tiles_of(path, load) for load in case.shares(path)], axis=0)
        return float(tiles), float(padded), True
    blocks = _mean(marginals, lambda p: mean_blocks(p, case.tokens, path.block_rows))
    return blocks, blocks * path.block_rows - slots, False


def expected_work(
    path: PathSpec, shape: LayerShape, tokens: int, routing: Routing, cohort: Cohort = "independent", seed: int = 0
) -> ExpectedWork:
    """Expected work of one whole layer. Raises MoeplanError for a cohort or routing that does not apply."""
    if cohort not in ("independent", "identical"):
        raise MoeplanError(f"--cohort {cohort}: expected independent or identical")
    return expect(path, Case(shape, tokens, routing, cohort, seed))
