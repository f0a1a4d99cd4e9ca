"""Expected work of a path: exact where a formula exists, a seeded mean over drawn batches where none does."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from moeplan.traffic.batches import Cohort, RowTable, draw_batches
from moeplan.traffic.chance import FloatArray, distinct_distribution, mean_blocks, mean_distinct, percentile
from moeplan.traffic.partition import Partition
from moeplan.traffic.path import PathSpec
from moeplan.traffic.routing import Routing
from moeplan.traffic.shape import LayerShape
from moeplan.traffic.tiles import sorts, tile_counts

__all__ = ["Case", "Cohort", "ExpectedWork", "expect", "expected_work"]

_COLUMNS = ("slots", "distinct", "tiles", "padded_rows")


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
        if self.cohort != "independent" or self.part.rank is None:
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
    def samples(self) -> RowTable:
        """Drawn batches: rows of every rank's experts [batches, ranks, experts of a rank]."""
        part = self.part
        table = draw_batches(self.routing, self.shape, self.tokens, self.cohort, self.seed, part.ep == 1)
        return table.reshape(len(table), part.ep, -1)

    def shares(self, path: PathSpec) -> RowTable:
        """Drawn rows [batches, experts of a rank]: of the rank asked for, or of the one that reads most planes."""
        if self.part.rank is not None:
            return np.asarray(self.samples[:, self.part.rank])
        worst = np.argmax(tile_counts(path, self.samples)[0], axis=1)
        return np.asarray(self.samples[np.arange(len(worst)), worst])


def _p95(values: npt.NDArray[np.integer]) -> int:
    return int(np.percentile(values, 95, method="inverted_cdf"))


def _mean(values: list[FloatArray], of: Callable[[FloatArray], float]) -> float:
    return float(np.mean([of(row) for row in values]))


def expect(path: PathSpec, case: Case) -> ExpectedWork:
    """Expected work of one layer. Exact for uniform and popularity routing, except what `drawn` names."""
    shape, n, drawn = case.local, case.tokens, []
    if case.marginals is None:
        rows = case.shares(path)
        columns = [rows.sum(axis=1), np.count_nonzero(rows, axis=1), *tile_counts(path, rows)]
        slots, distinct, tiles, padded = (float(np.mean(column)) for column in columns)
        p95 = _p95(columns[1])
        drawn = [name for name, x in zip(_COLUMNS, columns, strict=True) if np.min(x) < np.max(x)]
    else:
        slots = n * _mean(case.marginals, lambda p: float(p.sum()))
        distinct = _mean(case.marginals, lambda p: mean_distinct(p, n))
        if case.routing.kind == "uniform":
            local = case.marginals[0].size
            p95 = percentile(distinct_distribution(shape.experts, shape.top_k, n, local), 0.95)
        else:
            p95 = _p95(np.count_nonzero(case.shares(path), axis=1))
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
        tiles, padded = tile_counts(path, case.shares(path))
        return float(tiles.mean()), float(padded.mean()), True
    blocks = _mean(marginals, lambda p: mean_blocks(p, case.tokens, path.block_rows))
    return blocks, blocks * path.block_rows - slots, False


def expected_work(
    path: PathSpec, shape: LayerShape, tokens: int, routing: Routing, cohort: Cohort = "independent", seed: int = 0
) -> ExpectedWork:
    """Expected work of one whole layer. Raises MoeplanError for a cohort or routing that does not apply."""
    return expect(path, Case(shape, tokens, routing, cohort, seed))
