"""What each path costs at each step size: timed points where they exist, the fit elsewhere, a reason where neither."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from moeplan.cost.fit import block_rows
from moeplan.cost.model import Drivers, Estimate, weakest
from moeplan.errors import MoeplanError
from moeplan.planning.span import LayerGroup
from moeplan.traffic.chance import mean_blocks, mean_distinct
from moeplan.traffic.expect import Case, Cohort, expect
from moeplan.traffic.path import parse_path
from moeplan.traffic.routing import Routing
from moeplan.traffic.shape import LayerShape


@dataclass(frozen=True)
class Assumption:
    """What a price assumes: where the tokens go, who decodes together, whether fits may leave their range.

    points: timed points answer before the fit does.
    """

    routing: Routing
    cohort: Cohort = "independent"
    seed: int = 0
    extrapolate: bool = False
    points: bool = True

    @property
    def arm(self) -> str:
        """The routing arm under which a calibration would have timed this."""
        return "identical" if self.cohort == "identical" else self.routing.name


def mean_drivers(assumption: Assumption, path: str, tokens: int, shape: LayerShape) -> Drivers:
    """Expected slots, distinct experts and padded blocks (of the path's own block rows) of one layer."""
    return _drivers(assumption, block_rows(path), tokens, shape)


@lru_cache(maxsize=16384)
def _drivers(assumption: Assumption, rows: int | None, tokens: int, shape: LayerShape) -> Drivers:
    case = Case(shape, tokens, assumption.routing, assumption.cohort, assumption.seed)
    if case.marginals is None:
        work = expect(parse_path(f"grouped:{rows}" if rows else "gather"), case)
        return Drivers(tokens, work.slots, work.distinct_mean, work.tiles if rows else 0.0)
    distinct = float(np.mean([mean_distinct(shares, tokens) for shares in case.marginals]))
    blocks = distinct if rows and tokens <= rows else 0.0  # no expert can fill a second block
    if rows and tokens > rows:
        blocks = float(np.mean([mean_blocks(shares, tokens, rows) for shares in case.marginals]))
    return Drivers(tokens, float(tokens * shape.top_k), distinct, blocks)


def price(groups: Sequence[LayerGroup], path: str, tokens: int, assumption: Assumption) -> Estimate:
    """Seconds of all MoE layers in one step on that path.

    Raises MoeplanError where a group has neither a timed point nor a fit that reaches that far.
    """
    total: Estimate | None = None
    for group in groups:
        part = layer_price(group, path, tokens, assumption).repeated(group.layers)
        total = part if total is None else total.then(part)
    if total is None:
        raise ValueError("no layer group")
    return total


def layer_price(group: LayerGroup, path: str, tokens: int, assumption: Assumption) -> Estimate:
    """Seconds of one layer: the timed point of that very routing if there is one, else the fit.

    Where the path's time follows nothing but slots, a point of any routing is that point.
    """
    calibration = group.calibration
    points = _points(group, path, tokens, assumption) if assumption.points else []
    if points:
        low, high = min(point.low for point in points), max(point.high for point in points)
        middle = sum(point.seconds for point in points) / len(points)
        return Estimate(middle, low, high, weakest(*(point.source for point in points)))
    drivers = mean_drivers(assumption, path, tokens, group.shape)
    return calibration.estimate(path, drivers, assumption.extrapolate)


def _points(group: LayerGroup, path: str, tokens: int, assumption: Assumption) -> list[Estimate]:
    fit = group.calibration.fits.get(path)
    arms = [assumption.arm]
    if fit is not None and fit.drivers == ("slots",):
        arms += [arm for arm in fit.routings if arm != assumption.arm]
    return [found for arm in arms if (found := group.calibration.measured(path, tokens, arm)) is not None]


@dataclass(frozen=True, slots=True)
class Prices:
    """Times by path and token count; `missing` says why an entry is None (path, tokens) -> reason."""

    tokens: tuple[int, ...]
    times: dict[str, tuple[Estimate | None, ...]]
    missing: dict[tuple[str, int], str]


def price_all(
    groups: Sequence[LayerGroup], paths: Sequence[str], tokens: Sequence[int], assumption: Assumption
) -> Prices:
    """Every path at every token count."""
    times: dict[str, tuple[Estimate | None, ...]] = {}
    missing: dict[tuple[str, int], str] = {}
    for path in paths:
        row: list[Estimate | None] = []
        for count in tokens:
            try:
                row.append(price(groups, path, count, assumption))
            except MoeplanError as bad:
                row.append(None)
                missing[path, count] = str(bad)
        times[path] = tuple(row)
    return Prices(tuple(tokens), times, missing)
