"""The shapes that a kernel's time can take, and how one is fitted to points: small, non-negative, deterministic.

A law is seconds = a + b*distinct + c*slots + d*blocks, or a plus the smooth maximum (p-norm) of such terms, or the
larger of a host floor h and a sum. Every coefficient is at least zero and has a meaning: a = launches, latency and
other cost that no row adds to; b = one expert's plane from memory; c = what every (token, expert) pair costs; d =
what every padded block costs; h = the least time in which the host issues a layer. All errors are relative and
weighted. A solution comes from non-negative linear least squares on a grid of the few values that enter
non-linearly (power and added constant of a smooth maximum, host floor), so that it is the same everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from moeplan.cost.model import Drivers

Array = npt.NDArray[np.float64]
COLUMNS = ("constant", "distinct", "slots", "blocks")
_POWERS = (1.5, 2.0, 3.0, 6.0)  # 1 adds the terms, 6 is within 12 % of a hard maximum where two terms are equal
_GRID = 16  # steps of the two-level grid for the added constant: 1/256 of the fastest point
_FLOORS = 1.06 ** np.arange(-4, 20)  # host floors tried, times the fastest point; 6 % apart
_ROUNDS = 4  # times the points under a floor are told from the others


@dataclass(frozen=True, slots=True)
class Form:
    """Which terms a law has. smooth: the drivers' terms meet in a p-norm; host: not below a fitted host floor."""

    drivers: tuple[str, ...]
    smooth: bool = False
    host: bool = False

    @property
    def parameters(self) -> int:
        """Number of fitted values; the power and the floor count."""
        return 1 + len(self.drivers) + self.smooth + self.host

    @property
    def name(self) -> str:
        """`a + b*distinct`, `a + max(b*distinct, c*slots)`, `max(h, a + c*slots)`."""
        letters = {"distinct": "b", "slots": "c", "blocks": "d"}
        terms = [f"{letters[driver]}*{driver}" for driver in self.drivers]
        total = f"a + max({', '.join(terms)})" if self.smooth else " + ".join(["a", *terms])
        return f"max(h, {total})" if self.host else total


FORMS = (
    Form(()),
    Form(("distinct",)),
    Form(("slots",)),
    Form(("blocks",)),
    Form(("distinct", "slots")),
    Form(("distinct", "blocks")),
    Form(("slots", "blocks")),
    Form(("distinct",), host=True),
    Form(("slots",), host=True),
    Form(("blocks",), host=True),
    Form(("distinct", "slots", "blocks")),
    Form(("distinct", "slots"), smooth=True),
    Form(("distinct", "blocks"), smooth=True),
    Form(("distinct", "slots"), host=True),
    Form(("distinct", "blocks"), host=True),
    Form(("slots", "blocks"), host=True),
    Form(("distinct", "slots", "blocks"), smooth=True),
)


@dataclass(frozen=True, slots=True)
class Law:
    """A form with its numbers. coefficients: seconds, and seconds a unit of each driver, in COLUMNS order; floor:
    seconds of the host floor, 0 where there is none."""

    form: Form
    coefficients: tuple[float, float, float, float]
    power: float = 1.0
    floor: float = 0.0
    errors: tuple[float | None, float | None, float | None, float | None] = (None, None, None, None)

    def seconds(self, points: Array) -> Array:
        """Predicted seconds of points [n, 4] in COLUMNS order."""
        terms = points * np.asarray(self.coefficients)
        if self.form.smooth:
            inside = terms[:, 1:]
            largest = np.maximum(inside.max(axis=1), 1e-300)
            norm = ((inside / largest[:, None]) ** self.power).sum(axis=1) ** (1 / self.power)
            return np.asarray(largest * norm + terms[:, 0])
        return np.asarray(np.maximum(terms.sum(axis=1), self.floor))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, numbers rounded to six significant digits; `law_from_dict` is its inverse."""
        rows = [
            {"driver": name, "value": round6(value), "standard_error": None if error is None else round6(error)}
            for name, value, error in zip(COLUMNS, self.coefficients, self.errors, strict=True)
            if name == "constant" or name in self.form.drivers
        ]
        shape = {"drivers": list(self.form.drivers), "smooth": self.form.smooth, "host": self.form.host}
        return {"form": self.form.name, "power": self.power, "floor": round6(self.floor), "coefficients": rows} | shape


def law_from_dict(data: dict[str, Any]) -> Law:
    """Read what `Law.to_dict` wrote. Raises KeyError or TypeError where a field is missing."""
    rows = {row["driver"]: row for row in data["coefficients"]}
    values = tuple(float(rows[name]["value"]) if name in rows else 0.0 for name in COLUMNS)
    errors = tuple(rows[name]["standard_error"] if name in rows else None for name in COLUMNS)
    form = Form(tuple(data["drivers"]), bool(data["smooth"]), bool(data["host"]))
    return Law(form, values, float(data["power"]), float(data["floor"]), errors)  # type: ignore[arg-type]


def round6(value: float) -> float:
    """Six significant digits: what a fit is good for, and the same on every build of numpy and scipy."""
    return float(f"{value:.6g}")


def point(drivers: Drivers) -> tuple[float, float, float, float]:
    """One row in COLUMNS order."""
    return (1.0, float(drivers.distinct), float(drivers.slots), float(drivers.blocks))


def solve(form: Form, points: Array, seconds: Array, weights: Array | None = None) -> Law:
    """The law of that form with the least sum of squared weighted relative errors.

    points [n, 4] in COLUMNS order, seconds [n], weights [n] on relative errors (all one where left out).
    """
    weights = np.ones(len(seconds)) if weights is None else weights
    if form.host:
        laws = [_floored(form, (points, seconds, weights), float(seconds.min() * floor)) for floor in _FLOORS]
    elif form.smooth:
        laws = [_smooth(form, (points, seconds, weights), power) for power in _POWERS]
    else:
        return Law(form, _linear(form, points, seconds, weights))
    return laws[int(np.argmin([round6(loss(law, points, seconds, weights)) for law in laws]))]


def loss(law: Law, points: Array, seconds: Array, weights: Array | None = None) -> float:
    """Sum of squared weighted relative errors."""
    errors = law.seconds(points) / seconds - 1
    return float(((errors if weights is None else errors * weights) ** 2).sum())


def _columns(form: Form, constant: bool) -> list[int]:
    return [i for i, name in enumerate(COLUMNS) if name in form.drivers or (constant and i == 0)]


def _nonnegative(matrix: Array, target: Array) -> Array:
    from scipy.optimize import nnls

    scale = np.maximum(matrix.max(axis=0), 1e-300)
    found, _ = nnls(matrix / scale, target)
    return np.asarray(found / scale)


def _full(columns: Sequence[int], values: Array, constant: float = 0.0) -> tuple[float, float, float, float]:
    full = [constant, 0.0, 0.0, 0.0]
    for column, value in zip(columns, values, strict=True):
        full[column] = float(value)
    return (full[0], full[1], full[2], full[3])


def _linear(form: Form, points: Array, seconds: Array, weights: Array) -> tuple[float, float, float, float]:
    columns = _columns(form, constant=True)
    return _full(columns, _nonnegative(points[:, columns] * (weights / seconds)[:, None], weights))


def _floored(form: Form, data: tuple[Array, Array, Array], floor: float) -> Law:
    """A sum fitted to the points that it, and not the floor, decides; which those are is settled in a few rounds."""
    points, seconds, weights = data
    above = seconds > floor
    law = Law(form, (0.0, 0.0, 0.0, 0.0), floor=floor)
    for _ in range(_ROUNDS):
        if above.sum() < form.parameters:
            break
        law = Law(form, _linear(form, points[above], seconds[above], weights[above]), floor=floor)
        above = (points * np.asarray(law.coefficients)).sum(axis=1) > floor
    return law


def _smooth(form: Form, data: tuple[Array, Array, Array], power: float) -> Law:
    """Powers of the coefficients are linear: (t - a)^p = sum (c x)^p; weights make the errors of t relative."""
    points, seconds, weights = data
    columns = _columns(form, constant=False)
    fastest = float(seconds.min())

    def at(constant: float) -> Law:
        rest = (seconds - constant) / fastest
        weight = weights / (power * rest ** (power - 1) * seconds / fastest)
        matrix = points[:, columns] ** power * weight[:, None]
        values = _nonnegative(matrix, rest**power * weight) ** (1 / power) * fastest
        return Law(form, _full(columns, values, constant), power)

    best, step = 0.0, fastest / _GRID
    for _ in range(2):
        tries = [best + k * step for k in range(-_GRID, _GRID) if 0 <= best + k * step <= 0.98 * fastest]
        losses = [round6(loss(at(constant), points, seconds, weights)) for constant in tries]
        best, step = tries[int(np.argmin(losses))], step / _GRID
    return at(best)


def with_errors(law: Law, points: Array, seconds: Array, weights: Array) -> Law:
    """The same law with standard errors: s^2 (J'J)^-1 of the weighted relative residuals; none on a bound or without
    spare points. Power and floor are taken as given."""
    values = np.asarray(law.coefficients)
    free = [i for i in range(4) if values[i] > 0]
    spare = len(seconds) - len(free) - law.form.smooth - law.form.host
    if spare < 1 or not free:
        return law
    columns = []
    for i in free:
        moved = values.copy()
        moved[i] *= 1 + 1e-4
        shifted = replace(law, coefficients=tuple(moved))
        with np.errstate(all="ignore"):  # a coefficient near the smallest float gives no slope: no error is stated
            columns.append((shifted.seconds(points) - law.seconds(points)) / (values[i] * 1e-4) * weights / seconds)
    if not np.isfinite(columns).all():
        return law
    jacobian = np.stack(columns, axis=1)
    scale = np.maximum(np.sqrt((jacobian**2).sum(axis=0)), 1e-300)
    with np.errstate(all="ignore"):
        inverse = np.linalg.pinv((jacobian / scale).T @ (jacobian / scale), rcond=1e-10) / np.outer(scale, scale)
    sigma = np.sqrt(np.maximum(np.diag(inverse), 0) * loss(law, points, seconds, weights) / spare)
    errors: list[float | None] = [None, None, None, None]
    for i, error in zip(free, sigma, strict=True):
        errors[i] = float(error) if np.isfinite(error) else None
    return replace(law, errors=(errors[0], errors[1], errors[2], errors[3]))
