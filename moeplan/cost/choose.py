"""Which form a path follows: decided by leaving out whole token counts, every routing of that count together."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moeplan.cost.forms import COLUMNS, FORMS, Array, Form, Law, loss, solve

# A form with more parameters must be clearly better: its held-out mean error lower by this share of the simpler
# one's, by this much in itself, and by one standard error of the paired difference over the folds. Two pieces more.
_SHARE, _STEP = 0.10, 0.002
_SPLIT_SHARE, _SPLIT_STEP = 0.25, 0.005
_FEWEST = 3  # token counts on each side of a split, and in all


@dataclass(frozen=True, slots=True)
class Table:
    """Points of one path: tokens [n], points [n, 4] in forms.COLUMNS order, seconds [n]."""

    tokens: Array
    points: Array
    seconds: Array

    def where(self, mask: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> "Table":
        """The rows of a mask [n]."""
        return Table(self.tokens[mask], self.points[mask], self.seconds[mask])

    @property
    def counts(self) -> Array:
        """Different token counts, ascending."""
        return np.unique(self.tokens)


@dataclass(frozen=True, slots=True)
class Piece:
    """A law from the first to the last token count that it was fitted on."""

    first: int
    last: int
    law: Law


Pieces = tuple[Piece, ...]
Fitter = Callable[[Table], Pieces]


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen pieces, their held-out residuals [n] (measured / predicted - 1), and every candidate's error."""

    pieces: Pieces
    residuals: Array
    candidates: tuple[tuple[str, float], ...]
    chosen: str


def predict(pieces: Pieces, tokens: Array, points: Array) -> Array:
    """Seconds [n]. Between two pieces, where no count was measured, the two laws are blended linearly in tokens."""
    total = np.zeros(len(tokens))
    for i, piece in enumerate(pieces):
        weight = np.ones(len(tokens))
        if i > 0:
            weight = np.minimum(weight, _ramp(tokens, pieces[i - 1].last, piece.first))
        if i + 1 < len(pieces):
            weight = np.minimum(weight, 1 - _ramp(tokens, piece.last, pieces[i + 1].first))
        if weight.any():
            total += weight * piece.law.seconds(points)
    return total


def _ramp(tokens: Array, low: int, high: int) -> Array:
    return np.clip((tokens - low) / (high - low), 0, 1)


def left_out(fitter: Fitter, table: Table) -> Array:
    """Residuals [n], each from a fit that saw no sample of its token count."""
    residuals = np.zeros(len(table.tokens))
    for count in table.counts:
        out = table.tokens == count
        pieces = fitter(table.where(~out))
        residuals[out] = table.seconds[out] / predict(pieces, table.tokens[out], table.points[out]) - 1
    return residuals


def relative_errors(residuals: Array) -> Array:
    """|predicted / measured - 1| from measured / predicted - 1."""
    return np.abs(1 / (1 + residuals) - 1)


def interior(table: Table) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """Rows between the smallest and the largest token count; leaving out an end is extrapolation."""
    return np.asarray((table.tokens > table.tokens.min()) & (table.tokens < table.tokens.max()))


def whole(form: Form) -> Fitter:
    """Fits one form to everything."""

    def fitter(table: Table) -> Pieces:
        law = solve(form, table.points, table.seconds)
        return (Piece(int(table.tokens.min()), int(table.tokens.max()), law),)

    return fitter


def applicable(table: Table) -> list[Form]:
    """Forms whose drivers vary, are not copies of each other and are few enough for the points and token counts."""
    return [form for form in FORMS if _supported(form, table)]


def _supported(form: Form, table: Table) -> bool:
    columns = [table.points[:, COLUMNS.index(name)] for name in form.drivers]
    if any(column.min() <= 0 for column in columns):
        return False
    for i, column in enumerate(columns):
        if any(np.ptp(column / other) < 1e-3 * (column / other).max() for other in columns[:i]):
            return False
    spare = len(table.counts) if form.smooth else len(np.unique(table.points, axis=0))
    return form.parameters <= max(2, spare // 2)


def split(table: Table) -> Pieces:
    """Two pieces, cut where the information criterion is lowest; each side takes its best sum of terms."""
    counts = table.counts
    best: tuple[float, Pieces] | None = None
    for cut in range(_FEWEST, len(counts) - _FEWEST + 1):
        below = table.where(table.tokens < counts[cut])
        above = table.where(table.tokens >= counts[cut])
        (cost, left), (more, right) = _side(below), _side(above)
        if best is None or round(cost + more, 6) < best[0]:
            best = round(cost + more, 6), (left, right)
    return best[1] if best else whole(FORMS[0])(table)


def _side(table: Table) -> tuple[float, Piece]:
    """(Bayesian information criterion, piece) of the best linear form; 1e-6 relative error counts as exact."""
    best: tuple[float, Law] | None = None
    n = len(table.tokens)
    for form in FORMS:
        if form.smooth or not _supported(form, table):
            continue
        law = solve(form, table.points, table.seconds)
        cost = n * np.log(loss(law, table.points, table.seconds) / n + 1e-12) + form.parameters * np.log(n)
        if best is None or cost < best[0]:
            best = float(cost), law
    if best is None:
        best = 1e9, solve(FORMS[1], table.points, table.seconds)
    return best[0], Piece(int(table.tokens.min()), int(table.tokens.max()), best[1])


def choose(table: Table) -> Choice:
    """The simplest form that no other beats clearly, then two pieces if they beat that clearly."""
    judged = interior(table)
    if len(np.unique(table.tokens[judged])) < _FEWEST:
        judged = np.ones(len(table.tokens), dtype=bool)
    tried: list[tuple[Form, Array, float]] = []
    for form in applicable(table):
        residuals = left_out(whole(form), table)
        tried.append((form, residuals, float(relative_errors(residuals)[judged].mean())))
    tried.sort(key=lambda row: (row[0].parameters, round(row[2], 9)))
    form, residuals, _ = tried[0]
    for other, others, _ in tried[1:]:
        if other.parameters > form.parameters and clearly_better(table, judged, (others, residuals), (_SHARE, _STEP)):
            form, residuals = other, others
    pieces, name = whole(form)(table), form.name
    candidates = [(row[0].name, row[2]) for row in tried]
    if len(table.counts) > 2 * _FEWEST + 1:
        apart = left_out(split, table)
        candidates.append(("two pieces", float(relative_errors(apart)[judged].mean())))
        if clearly_better(table, judged, (apart, residuals), (_SPLIT_SHARE, _SPLIT_STEP)):
            pieces, residuals, name = split(table), apart, "two pieces"
    return Choice(pieces, residuals, tuple(candidates), name)


def clearly_better(
    table: Table,
    judged: "np.ndarray[tuple[int], np.dtype[np.bool_]]",
    residuals: tuple[Array, Array],
    margin: tuple[float, float],
) -> bool:
    """Whether the first residuals beat the second by the margin (share, step) and by a standard error over folds."""
    first, second = (relative_errors(one) for one in residuals)
    folds = [judged & (table.tokens == count) for count in np.unique(table.tokens[judged])]
    old = np.array([second[fold].mean() for fold in folds])
    gain = old - np.array([first[fold].mean() for fold in folds])
    noise = gain.std(ddof=1) / np.sqrt(len(gain)) if len(gain) > 1 else 0.0
    share, step = margin
    return bool(gain.mean() >= max(share * old.mean(), step, noise))
