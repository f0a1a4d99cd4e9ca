"""Points of one path, and a curve through them: a law, two laws that meet, and what they leave over."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moeplan.cost.forms import Array, Law

Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class Table:
    """Points of one path: tokens [n], points [n, 4] in forms.COLUMNS order, seconds [n].

    noise [n]: expected relative error of a point, repeats and misfit together; all alike where left out.
    """

    tokens: Array
    points: Array
    seconds: Array
    noise: Array | None = None

    def where(self, mask: Mask) -> "Table":
        """The rows of a mask [n]."""
        noise = None if self.noise is None else self.noise[mask]
        return Table(self.tokens[mask], self.points[mask], self.seconds[mask], noise)

    @property
    def counts(self) -> Array:
        """Different token counts, ascending."""
        return np.unique(self.tokens)

    @property
    def scale(self) -> Array:
        """Noise over its median [n]."""
        return np.ones(len(self.tokens)) if self.noise is None else self.noise / np.median(self.noise)

    @property
    def weights(self) -> Array:
        """On relative errors [n]: least noise over noise."""
        return np.asarray(self.scale.min() / self.scale)


@dataclass(frozen=True, slots=True)
class Piece:
    """A law from the first to the last token count that it was fitted on."""

    first: int
    last: int
    law: Law


@dataclass(frozen=True, slots=True)
class Curve:
    """One law, or two pieces that meet at a path switch; nodes carry what the laws leave over, where that is used.

    nodes: (log2 tokens, log2 distinct, weight) of every fitted point; see `leftover`.
    """

    pieces: tuple[Piece, ...]
    nodes: tuple[tuple[float, float, float], ...] = ()

    @property
    def describe(self) -> str:
        """The law as text; two pieces with the tokens where they meet."""
        first, *rest = self.pieces
        text = first.law.form.name + "".join(f"; from {piece.first} tokens: {piece.law.form.name}" for piece in rest)
        return f"({text}) * leftovers" if self.nodes else text

    def seconds(self, tokens: Array, points: Array) -> Array:
        """Seconds [n]. Between two pieces, where no count was measured, the laws are blended linearly in tokens."""
        total = np.zeros(len(tokens))
        for i, piece in enumerate(self.pieces):
            weight = np.ones(len(tokens))
            if i > 0:
                weight = np.minimum(weight, _ramp(tokens, self.pieces[i - 1].last, piece.first))
            if i + 1 < len(self.pieces):
                weight = np.minimum(weight, 1 - _ramp(tokens, piece.last, self.pieces[i + 1].first))
            if weight.any():
                total += weight * piece.law.seconds(points)
        if not self.nodes:
            return total
        nodes = np.array(self.nodes)
        left: Array = _kernel(_place(tokens, points), nodes[:, :2]) @ nodes[:, 2]
        scaled: Array = total * np.exp(left)
        return scaled

    def at(self, tokens: float, row: tuple[float, float, float, float]) -> tuple[float, float, float]:
        """(seconds, least, most) of one point: where two pieces are blended, what each alone would say."""
        count, points = np.array([float(tokens)]), np.array([row])
        near = [
            piece
            for i, piece in enumerate(self.pieces)
            if (i == 0 or tokens > self.pieces[i - 1].last)
            and (i + 1 == len(self.pieces) or tokens < self.pieces[i + 1].first)
        ]
        alone = [float(Curve((piece,), self.nodes).seconds(count, points)[0]) for piece in near]
        blended = float(self.seconds(count, points)[0])
        return blended, min(alone), max(alone)


Fitter = Callable[[Table], Curve]


def _ramp(tokens: Array, low: int, high: int) -> Array:
    return np.clip((tokens - low) / (high - low), 0, 1)


def _place(tokens: Array, points: Array) -> Array:
    return np.asarray(np.log2(np.stack([tokens, np.maximum(points[:, 1], 1e-9)], axis=1)))


def _kernel(here: Array, there: Array) -> Array:
    """Covariance over noise: 10 shared by all routings of a token count, 10 more by equal distinct experts; both
    fall by e over 4 doublings. Chosen on public kernel tables (docs/cost-model.md); assumed elsewhere."""
    away: Array = np.abs(here[:, None, :] - there[None, :, :]) / 4
    covariance: Array = 10 * np.exp(-away[:, :, 0]) * (1 + np.exp(-away[:, :, 1]))
    return covariance


def leftover(fitter: Fitter) -> Fitter:
    """The same curve times the interpolated residuals of its own points.

    Kriging of log(measured / law) in log2 tokens and log2 distinct with an exponential covariance, which does not
    smooth a jump away (Matheron 1963). Far from every point the law alone is left.
    """

    def fitter_with(table: Table) -> Curve:
        curve = fitter(table)
        left = np.log(table.seconds / curve.seconds(table.tokens, table.points))
        place = _place(table.tokens, table.points)
        weights = np.linalg.solve(_kernel(place, place) + np.diag(table.weights**-2), left)
        rows = [(float(t), float(u), float(w)) for (t, u), w in zip(place, weights, strict=True)]
        return Curve(curve.pieces, tuple(rows))

    return fitter_with
