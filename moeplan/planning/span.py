"""Where queues meet experts: the price of a span of model calls, from calibrated layers and a choice of paths.

Expert layers only: attention, head and host are not included.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from moeplan.cost.calibrate import Calibration
from moeplan.cost.fit import block_rows
from moeplan.cost.model import Drivers, Estimate
from moeplan.errors import MoeplanError
from moeplan.serving.step import StepShape
from moeplan.traffic.expect import Cohort
from moeplan.traffic.path import parse_path
from moeplan.traffic.routing import Routing
from moeplan.traffic.shape import LayerShape
from moeplan.traffic.work import expected_work

SCOPE = "expert path only: attention, head and host are not included"

PathAt = Callable[[int, LayerShape], str]  # tokens, shape -> path: an engine's gates
DriversAt = Callable[[str, int, LayerShape], Drivers]  # path, tokens, shape


def expected_drivers(routing: Routing, cohort: Cohort = "independent", seed: int = 0) -> DriversAt:
    """Expected drivers of one layer under that routing, each computed once.

    Blocks are those that calibration journals keep: padded per expert, of the path's own block rows.
    """

    @lru_cache(maxsize=4096)
    def of(path: str, tokens: int, shape: LayerShape) -> Drivers:
        rows = block_rows(path)
        work = expected_work(parse_path(f"grouped:{rows}" if rows else "gather"), shape, tokens, routing, cohort, seed)
        return Drivers(tokens, work.slots, work.distinct_mean, work.blocks if rows else 0.0)

    return of


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Alike MoE layers and the calibration that prices them."""

    calibration: Calibration
    layers: int

    @property
    def shape(self) -> LayerShape:
        """Of one layer."""
        return self.calibration.shape


@dataclass(slots=True)
class ExpertCost:
    """`span_cost` of all MoE layers of a model, at expected routing: every step of a span costs the same.

    path_at chooses the path from the rows of the call, padding included. A call with prompt rows beyond the
    calibrated sizes is priced as several calls inside them (`chunk_rows`); decode steps beyond them are refused,
    or extrapolated and labelled so.
    """

    groups: Sequence[LayerGroup]
    path_at: PathAt
    drivers_at: DriversAt
    extrapolate: bool = False
    _calls: dict[int, Estimate] = field(default_factory=dict)
    _largest: int | None = None

    def __call__(self, step: StepShape, first_step: int, steps: int) -> Estimate:
        """Seconds of `steps` such calls. Raises MoeplanError outside the calibrated range."""
        rows = step.padded or step.rows
        priced = self.split(rows) if step.prefill_chunks else self.call(rows)
        return priced.repeated(steps)

    def call(self, rows: int) -> Estimate:
        """One call of that many rows through all MoE layers."""
        if rows not in self._calls:
            parts = [self.layer(group, rows).repeated(group.layers) for group in self.groups]
            total = parts[0]
            for part in parts[1:]:
                total = total.then(part)
            self._calls[rows] = total
        return self._calls[rows]

    def layer(self, group: LayerGroup, rows: int) -> Estimate:
        """One layer on the path that the gates choose."""
        path = self.path_at(rows, group.shape)
        return group.calibration.estimate(path, self.drivers_at(path, rows, group.shape), self.extrapolate)

    def split(self, rows: int) -> Estimate:
        """Whole chunks of `chunk_rows`, then the rest."""
        whole, rest = divmod(rows, self.chunk_rows)
        if not whole:
            return self.call(rest)
        total = self.call(self.chunk_rows).repeated(whole)
        return total.then(self.call(rest)) if rest else total

    @property
    def chunk_rows(self) -> int:
        """The most rows that every group's chosen path was timed at. Raises MoeplanError where there are none."""
        if self._largest is None:
            self._largest = min(self.timed_rows(group) for group in self.groups)
        return self._largest

    def timed_rows(self, group: LayerGroup) -> int:
        """The most rows at which the path chosen there is calibrated."""
        fits = group.calibration.fits
        for rows in sorted({fit.valid[1] for fit in fits.values()}, reverse=True):
            path = self.path_at(rows, group.shape)
            if path in fits and fits[path].valid[0] <= rows <= fits[path].valid[1]:
                return rows
        timed = ", ".join(f"{path} {fit.valid[0]}..{fit.valid[1]}" for path, fit in fits.items()) or "none"
        raise MoeplanError(
            f"calibration {group.calibration.where}: no size at which the chosen path is calibrated (fits: {timed})"
        )
