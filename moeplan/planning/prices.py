"""What each path costs at each step size: timed points where they exist, the fit elsewhere, a reason where neither."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb
from statistics import median

import numpy as np

from moeplan.cost.model import Drivers, Estimate, weakest
from moeplan.cost.points import block_rows, drivers_of
from moeplan.errors import MoeplanError
from moeplan.planning.span import LayerGroup
from moeplan.traffic.chance import mean_blocks, mean_distinct
from moeplan.traffic.expect import Case, Cohort, expect
from moeplan.traffic.path import parse_path
from moeplan.traffic.routing import Routing, arm_name
from moeplan.traffic.shape import LayerShape

_MOVED = 1e-3  # a point moved by less than the last printed digit is still the measured one


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
        return arm_name(self.routing.name, self.cohort)


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
    point = _point(group, path, tokens, assumption) if assumption.points else None
    if point is not None:
        return point
    drivers = mean_drivers(assumption, path, tokens, group.shape)
    return calibration.estimate(path, drivers, assumption.extrapolate)


def _point(group: LayerGroup, path: str, tokens: int, assumption: Assumption) -> Estimate | None:
    """Median of all rounds with its band; below five rounds the band that the calibration gives its points.

    A random routing was timed on the draws of one seed, whose distinct experts and blocks lie a few percent off
    their mean. The fit moves such a point to the mean; its source is then `adjusted`.
    """
    calibration = group.calibration
    fit = calibration.fits.get(path)
    arms = [assumption.arm]
    if fit is not None and set(fit.drivers) <= {"slots"}:
        arms += [arm for arm in fit.routings if arm != assumption.arm]
    points = [found for arm in arms if (found := calibration.measured(path, tokens, arm)) is not None]
    if not points:
        return None
    wanted = mean_drivers(assumption, path, tokens, group.shape)
    values, moved = [], 0.0
    for sample in calibration.samples:
        if (sample.path, sample.tokens) == (path, tokens) and sample.routing in arms and not sample.cache_resident:
            factor = 1.0 if fit is None else fit.estimate(wanted).seconds / fit.estimate(drivers_of(sample)).seconds
            values += [seconds * factor for seconds in sample.layer_seconds()]
            moved = max(moved, abs(factor - 1))
    source = "adjusted" if moved > _MOVED else weakest(*(point.source for point in points))
    if edges := median_band(values):
        return Estimate(median(values), *edges, source)
    return Estimate(median(values), min(point.low for point in points), max(point.high for point in points), source)


def median_band(values: Sequence[float]) -> tuple[float, float] | None:
    """The narrowest pair of order statistics that holds the median with at least 90 %; None below five values.

    The number of values below the true median is binomial with one half, whatever their distribution.
    """
    n = len(values)
    outside = [sum(comb(n, below) for below in range(k + 1)) / 2**n for k in range(n)]
    inside = [k for k in range(n // 2) if 2 * outside[k] <= 0.10]
    if not inside:
        return None
    ordered = sorted(values)
    return ordered[inside[-1]], ordered[n - 1 - inside[-1]]


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
