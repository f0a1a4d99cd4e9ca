"""Held-out errors: every sample of a token count is predicted by a fit that saw none of them."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from moeplan.cost.curve import Fitter, Mask, Table
from moeplan.cost.forms import Array, round6


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors |predicted / measured - 1| of n samples."""

    mean: float
    median: float
    p90: float
    max: float
    n: int

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"mean": self.mean, "median": self.median, "p90": self.p90, "max": self.max, "n": self.n}


def left_out(fitter: Fitter, table: Table) -> Array:
    """Residuals [n], each from a fit that saw no sample of its token count."""
    residuals = np.zeros(len(table.tokens))
    for count in table.counts:
        out = table.tokens == count
        curve = fitter(table.where(~out))
        residuals[out] = table.seconds[out] / curve.seconds(table.tokens[out], table.points[out]) - 1
    return residuals


def relative_errors(residuals: Array) -> Array:
    """|predicted / measured - 1| from measured / predicted - 1."""
    return np.abs(1 / (1 + residuals) - 1)


def interior(table: Table) -> Mask:
    """Rows between the smallest and the largest token count; leaving out an end is extrapolation."""
    return np.asarray((table.tokens > table.tokens.min()) & (table.tokens < table.tokens.max()))


def summary(errors: Array) -> Errors:
    """Mean, median, 90th percentile and maximum, rounded."""
    values = (errors.mean(), np.median(errors), np.quantile(errors, 0.9), errors.max())
    mean, median, p90, largest = (round6(float(value)) for value in values)
    return Errors(mean, median, p90, largest, len(errors))


def band_of(table: Table, residuals: Array, spread: float = 0.0) -> tuple[float, float]:
    """5 % and 95 % of held-out residuals over their point's `scale`, as order statistics of n + 1.

    To be multiplied by the scale of the tokens asked for; never narrower than the repeat spread. Interior token
    counts only, where there are at least eight residuals. Fewer than 19 residuals cannot hold a 5 % tail: the band is
    then at least Student's t (folds - 1 degrees of freedom) times their root mean square.
    """
    even = residuals / table.scale
    inner = even[interior(table)]
    used = inner if len(inner) >= 8 else even
    ordered, n = np.sort(used), len(used)
    low = float(ordered[max(math.floor((n + 1) * 0.05), 1) - 1])
    high = float(ordered[min(math.ceil((n + 1) * 0.95), n) - 1])
    if n < 19:
        from scipy.special import stdtrit

        wide = float(stdtrit(max(len(table.counts) - 1, 1), 0.95) * math.sqrt(float((used**2).mean())))
        low, high = min(low, -wide), max(high, wide)
    return round6(max(min(low, -spread), -0.9)), round6(max(high, spread))
