"""A predicted time split into the terms of its law: what each costs, and which resource that is."""

from dataclasses import dataclass

import numpy as np

from moeplan.cost.curve import Curve
from moeplan.cost.fit import Fit
from moeplan.cost.forms import COLUMNS, Law, point
from moeplan.cost.model import Drivers

# The driver of a term and what its cost stands for: the meanings of cost/forms.py.
NAMES = {
    "constant": "launches and latency",
    "distinct": "expert planes",
    "slots": "slots",
    "blocks": "padded blocks",
}
HOST, LEFTOVERS = "host floor", "leftovers"


@dataclass(frozen=True, slots=True)
class Term:
    """One addend of a time in seconds; leftovers may be negative."""

    name: str
    seconds: float


def split(fit: Fit, drivers: Drivers) -> tuple[Term, ...]:
    """The fitted seconds of one layer by term, in the order of the law; they add up to the estimate.

    Terms that meet in a smooth maximum share it by what each moves: x_i dT/dx_i, which add up to T since the p-norm
    is homogeneous (Euler). Under a host floor, the floor is the whole. What interpolated leftovers add is a term.
    """
    count, row = np.array([float(drivers.tokens)]), np.array([point(drivers)])
    plain = Curve(fit.curve.pieces)
    shares = _weights(fit.curve, float(drivers.tokens))
    sums: dict[str, float] = {}
    for piece, weight in zip(fit.curve.pieces, shares, strict=True):
        if weight:
            for term in _of_law(piece.law, row[0]):
                sums[term.name] = sums.get(term.name, 0.0) + weight * term.seconds
    found = [Term(name, value) for name, value in sums.items()]
    if fit.curve.nodes:
        left = float(fit.curve.seconds(count, row)[0] - plain.seconds(count, row)[0])
        found.append(Term(LEFTOVERS, left))
    return tuple(found)


def _weights(curve: Curve, tokens: float) -> list[float]:
    """How much each piece counts there: 1 or 0, and a blend between two pieces."""
    first, *rest = curve.pieces
    if not rest:
        return [1.0]
    after = float(np.clip((tokens - first.last) / (rest[0].first - first.last), 0, 1))
    return [1 - after, after]


def _of_law(law: Law, row: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[Term]:
    values = row * np.asarray(law.coefficients)
    if law.form.host and values.sum() < law.floor:
        return [Term(HOST, law.floor)]
    if law.form.smooth:
        inside = values[1:]
        norm = float(law.seconds(row[None, :])[0] - values[0])
        largest = max(float(inside.max()), 1e-300)
        parts = (inside / largest) ** law.power
        values[1:] = norm * parts / parts.sum() if parts.sum() else 0.0
    used = [i for i, name in enumerate(COLUMNS) if name == "constant" or name in law.form.drivers]
    return [Term(NAMES[COLUMNS[i]], float(values[i])) for i in used]
