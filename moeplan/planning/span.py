"""Where queues meet experts: the price of a span of model calls, from calibrated layers and a choice of paths.

Expert layers only: attention, head and host are not included.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moeplan.cost.calibrate import Calibration, load_calibration
from moeplan.cost.model import Estimate, weakest
from moeplan.engines.chain import Engine
from moeplan.errors import Decline, MoeplanError
from moeplan.planning.gates import Chain
from moeplan.serving.step import StepShape
from moeplan.store import Store
from moeplan.traffic.shape import LayerShape

SCOPE = "expert path only: attention, head and host are not included"

PathAt = Callable[[int, LayerShape], str]  # tokens, shape -> path: an engine's gates


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Alike MoE layers and the calibration that prices them."""

    calibration: Calibration
    layers: int

    @property
    def shape(self) -> LayerShape:
        """Of one layer."""
        return self.calibration.shape


LayerPrice = Callable[[LayerGroup, str, int], Estimate]  # group, path, tokens -> one layer


@dataclass(slots=True)
class ExpertCost:
    """`span_cost` of all MoE layers of a model, at expected routing: every step of a span costs the same.

    path_at chooses the path from the rows of the call, padding included. A call with prompt rows beyond the
    calibrated sizes is priced as several calls inside them (`chunk_rows`); decode steps beyond them are what
    layer_price makes of them: refused, or extrapolated and labelled so.
    """

    groups: Sequence[LayerGroup]
    path_at: PathAt
    layer_price: LayerPrice
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
        return self.layer_price(group, self.path_at(rows, group.shape), rows)

    def split(self, rows: int) -> Estimate:
        """Whole chunks of `chunk_rows`, then the rest."""
        whole, rest = divmod(rows, self.chunk_rows)
        if not whole:
            return self.call(rest)
        total = self.call(self.chunk_rows).repeated(whole)
        return total.then(self.call(rest)) if rest else total

    @property
    def source(self) -> str:
        """The weakest origin among the calls priced so far; `fitted` before the first one."""
        return weakest(*(call.source for call in self._calls.values())) if self._calls else "fitted"

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


def default_path(engine: Engine) -> PathAt:
    """The path that the engine's own gates choose."""

    def at(tokens: int, shape: LayerShape) -> str:
        chain = Chain(engine.gates, shape)
        return chain.paths[chain.level(chain.defaults, tokens)]

    return at


def find_calibration(store: Store, device: str, engine: Engine, shape: LayerShape) -> Calibration:
    """The calibration of the first of the engine's runners that has one. Raises the first one's MoeplanError."""
    failures = []
    for runner in engine.runners:
        try:
            return load_calibration(store, device, runner, shape)
        except MoeplanError as bad:
            failures.append(bad)
    raise failures[0]


def engine_cost(
    groups: Sequence[LayerGroup], engine: Engine, layer_price: LayerPrice
) -> tuple[ExpertCost, tuple[Decline, ...]]:
    """The engine under its default gates, and the paths it would run that nobody timed (a neighbour stands in)."""
    timed = set.intersection(*(set(group.calibration.fits) for group in groups))
    declines: tuple[Decline, ...] = ()
    if not timed.issuperset(engine.paths):
        engine, declines = engine.limited_to(timed)
    return ExpertCost(groups, default_path(engine), layer_price), declines
