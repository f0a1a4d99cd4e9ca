"""The shapes that a kernel's time can take, and how one is fitted to points: small, non-negative, deterministic.

A law is seconds = a + b*distinct + c*slots + d*blocks, or the smooth maximum (p-norm) of such terms. Every
coefficient is at least zero and has a meaning: a = launches, latency and other cost that no row adds to; b = one
expert's plane from memory; c = what every (token, expert) pair costs; d = what every padded block costs.
All errors are relative. A solution comes from non-negative linear least squares on a grid of the few values that
enter non-linearly (the power and, in a smooth maximum, the added constant), so that it is the same everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moeplan.cost.model import Drivers

Array = npt.NDArray[np.float64]
COLUMNS = ("constant", "distinct", "slots", "blocks")
_POWERS = (1.5, 2.0, 3.0, 6.0)  # 1 adds the terms, 6 is within 12 % of a hard maximum where two terms are equal
_GRID = 16  # steps of the two-level grid for the added constant: 1/256 of the fastest point


@dataclass(frozen=True, slots=True)
class Form:
    """Which terms a law has. smooth: the terms meet in a p-norm; floor: the constant is one of them, not added."""

    drivers: tuple[str, ...]
    smooth: bool = False
    floor: bool = False

    @property
    def parameters(self) -> int:
        """Number of fitted values; the power counts."""
        return 1 + len(self.drivers) + self.smooth

    @property
    def name(self) -> str:
        """`a + b*distinct`, `a + max(b*distinct, c*slots)`, `max(a, c*slots)`."""
        letters = {"distinct": "b", "slots": "c", "blocks": "d"}
        terms = [f"{letters[driver]}*{driver}" for driver in self.drivers]
        if self.floor:
            return f"max({', '.join(['a', *terms])})"
        return f"a + max({', '.join(terms)})" if self.smooth else " + ".join(["a", *terms])


FORMS = (
    Form(("distinct",)),
    Form(("slots",)),
    Form(("blocks",)),
    Form(("distinct", "slots")),
    Form(("distinct", "blocks")),
    Form(("slots", "blocks")),
    Form(("distinct",), smooth=True, floor=True),
    Form(("slots",), smooth=True, floor=True),
    Form(("blocks",), smooth=True, floor=True),
    Form(("distinct", "slots", "blocks")),
    Form(("distinct", "slots"), smooth=True),
    Form(("distinct", "blocks"), smooth=True),
    Form(("distinct", "slots"), smooth=True, floor=True),
    Form(("distinct", "blocks"), smooth=True, floor=True),
    Form(("distinct", "slots", "blocks"), smooth=True),
)


@dataclass(frozen=True, slots=True)
class Law:
    """A form with its numbers. coefficients: seconds, and seconds a unit of each driver, in COLUMNS order."""

    form: Form
    coefficients: tuple[float, float, float, float]
    power: float = 1.0
    errors: tuple[float | None, float | None, float | None, float | None] = (None, None, None, None)

    def seconds(self, points: Array) -> Array:
        """Predicted seconds of points [n, 4] in COLUMNS order."""
        terms = points * np.asarray(self.coefficients)
        if not self.form.smooth:
            return np.asarray(terms.sum(axis=1))
        inside = terms if self.form.floor else terms[:, 1:]
        largest = np.maximum(inside.max(axis=1), 1e-300)
        norm = largest * ((inside / largest[:, None]) ** self.power).sum(axis=1) ** (1 / self.power)
        return np.asarray(norm if self.form.floor else norm + terms[:, 0])

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, numbers rounded to six significant digits; `law_from_dict` is its inverse."""
        rows = [
            {"driver": name, "value": round6(value), "standard_error": None if error is None else round6(error)}
            for name, value, error in zip(COLUMNS, self.coefficients, self.errors, strict=True)
            if name == "constant" or name in self.form.drivers
        ]
        shape = {"drivers": list(self.form.drivers), "smooth": self.form.smooth, "floor": self.form.floor}
        return {"form": self.form.name, "power": self.power, "coefficients": rows} | shape


def law_from_dict(data: dict[str, Any]) -> Law:
    """Read what `Law.to_dict` wrote. Raises KeyError or TypeError where a field is missing."""
    rows = {row["driver"]: row for row in data["coefficients"]}
    values = tuple(float(rows[name]["value"]) if name in rows else 0.0 for name in COLUMNS)
    errors = tuple(rows[name]["standard_error"] if name in rows else None for name in COLUMNS)
    form = Form(tuple(data["drivers"]), bool(data["smooth"]), bool(data["floor"]))
    return Law(form, values, float(data["power"]), errors)  # type: ignore[arg-type]


def round6(value: float) -> float:
    """Six significant digits: what a fit is good for, and the same on every build of numpy and scipy."""
    return float(f"{value:.6g}")


def point(drivers: Drivers) -> tuple[float, float, float, float]:
    """One row in COLUMNS order."""
    return (1.0, float(drivers.distinct), float(drivers.slots), float(drivers.blocks))


def solve(form: Form, points: Array, seconds: Array) -> Law:
    """The law of that form with the least sum of squared relative errors on points [n, 4] and seconds [n]."""
    if not form.smooth:
        return Law(form, _linear(form, points, seconds))
    laws = [_smooth(form, points, seconds, power) for power in _POWERS]
    return laws[int(np.argmin([round6(loss(law, points, seconds)) for law in laws]))]


def loss(law: Law, points: Array, seconds: Array) -> float:
    """Sum of squared relative errors."""
    return float((((law.seconds(points) / seconds) - 1) ** 2).sum())


def _columns(form: Form, constant: bool) -> list[int]:
    return [i for i, name in enumerate(COLUMNS) if name in form.drivers or (constant and i == 0)]


def _nonnegative(matrix: Array, target: Array) -> Array:
    from scipy.optimize import nnls

    scale = np.maximum(matrix.max(axis=0), 1e-300)
    found, _ = nnls(matrix / scale, target)
    return np.asarray(found / scale)


def _spread(columns: Sequence[int], values: Array, constant: float = 0.0) -> tuple[float, float, float, float]:
    full = [constant, 0.0, 0.0, 0.0]
    for column, value in zip(columns, values, strict=True):
        full[column] = float(value)
    return (full[0], full[1], full[2], full[3])


def _linear(form: Form, points: Array, seconds: Array) -> tuple[float, float, float, float]:
    columns = _columns(form, constant=True)
    return _spread(columns, _nonnegative(points[:, columns] / seconds[:, None], np.ones(len(seconds))))


def _smooth(form: Form, points: Array, seconds: Array, power: float) -> Law:
    """Powers of the coefficients are linear: (t - a)^p = sum (c x)^p; weights make the errors of t relative."""
    columns = _columns(form, constant=form.floor)
    fastest = float(seconds.min())

    def at(constant: float) -> Law:
        rest = (seconds - constant) / fastest
        weight = 1 / (power * rest ** (power - 1) * seconds / fastest)
        matrix = points[:, columns] ** power * weight[:, None]
        values = _nonnegative(matrix, rest**power * weight) ** (1 / power) * fastest
        return Law(form, _spread(columns, values, constant), power)

    if form.floor:
        return at(0.0)
    best, step = 0.0, fastest / _GRID
    for _ in range(2):
        tries = [best + k * step for k in range(-_GRID, _GRID) if 0 <= best + k * step <= 0.98 * fastest]
        losses = [round6(loss(at(constant), points, seconds)) for constant in tries]
        best, step = tries[int(np.argmin(losses))], step / _GRID
    return at(best)


def with_errors(law: Law, points: Array, seconds: Array) -> Law:
    """The same law with standard errors: s^2 (J'J)^-1 of the relative residuals; none on a bound or without spare
    points. The power is taken as given."""
    values = np.asarray(law.coefficients)
    free = [i for i in range(4) if values[i] > 0]
    spare = len(seconds) - len(free) - law.form.smooth
    if spare < 1 or not free:
        return law
    columns = []
    for i in free:
        moved = values.copy()
        moved[i] *= 1 + 1e-4
        shifted = Law(law.form, tuple(moved), law.power)
        columns.append((shifted.seconds(points) - law.seconds(points)) / (values[i] * 1e-4) / seconds)
    jacobian = np.stack(columns, axis=1)
    scale = np.sqrt((jacobian**2).sum(axis=0))
    inverse = np.linalg.pinv((jacobian / scale).T @ (jacobian / scale), rcond=1e-10) / np.outer(scale, scale)
    sigma = np.sqrt(np.maximum(np.diag(inverse), 0) * loss(law, points, seconds) / spare)
    errors: list[float | None] = [None, None, None, None]
    for i, error in zip(free, sigma, strict=True):
        errors[i] = float(error)
    return Law(law.form, law.coefficients, law.power, tuple(errors))  # type: ignore[arg-type]
