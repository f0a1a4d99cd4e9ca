"""Which form a path follows: decided by leaving out whole token counts, every routing of that count together."""

from dataclasses import dataclass

import numpy as np

from moeplan.cost.curve import Curve, Fitter, Mask, Piece, Table, leftover
from moeplan.cost.forms import COLUMNS, FORMS, Array, Form, Law, loss, solve
from moeplan.cost.holdout import interior, left_out, relative_errors

# A form with more parameters must be clearly better: its held-out mean error lower by this share of the simpler
# one's, by this much in itself, and by one standard error of the paired difference over the folds. Two pieces and
# leftovers must be better still.
_FORM = (0.10, 0.002)
_MORE = (0.25, 0.005)
_FEWEST = 3  # token counts on each side of a split, and in all


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen curve, its held-out residuals [n] (measured / predicted - 1), and every candidate's error."""

    curve: Curve
    residuals: Array
    candidates: tuple[tuple[str, float], ...]


def whole(form: Form) -> Fitter:
    """Fits one form to everything."""

    def fitter(table: Table) -> Curve:
        law = solve(form, table.points, table.seconds, table.weights)
        return Curve((Piece(int(table.tokens.min()), int(table.tokens.max()), law),))

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
    spare = len(table.counts) if form.smooth or form.host else len(np.unique(table.points, axis=0))
    return form.parameters <= max(2, spare // 2)


def split(table: Table) -> Curve:
    """Two pieces, cut where the information criterion is lowest; each side takes its best sum of terms."""
    counts = table.counts
    best: tuple[float, Curve] | None = None
    for cut in range(_FEWEST, len(counts) - _FEWEST + 1):
        below = table.where(table.tokens < counts[cut])
        above = table.where(table.tokens >= counts[cut])
        (cost, left), (more, right) = _side(below), _side(above)
        if best is None or round(cost + more, 6) < best[0]:
            best = round(cost + more, 6), Curve((left, right))
    return best[1] if best else whole(FORMS[0])(table)


def _side(table: Table) -> tuple[float, Piece]:
    """(Bayesian information criterion, piece) of the best linear form; 1e-6 relative error counts as exact."""
    best: tuple[float, Law] | None = None
    n = len(table.tokens)
    for form in FORMS:
        if form.smooth or form.host or not _supported(form, table):
            continue
        law = solve(form, table.points, table.seconds, table.weights)
        cost = n * np.log(loss(law, table.points, table.seconds, table.weights) / n + 1e-12) + form.parameters * np.log(
            n
        )
        if best is None or cost < best[0]:
            best = float(cost), law
    if best is None:
        best = 1e9, solve(FORMS[0], table.points, table.seconds, table.weights)
    return best[0], Piece(int(table.tokens.min()), int(table.tokens.max()), best[1])


def choose(table: Table) -> Choice:
    """The simplest form that no other beats clearly; then two pieces, then leftovers, if they beat that clearly."""
    judged = interior(table)
    if len(np.unique(table.tokens[judged])) < _FEWEST:
        judged = np.ones(len(table.tokens), dtype=bool)
    tried = [(form, left_out(whole(form), table)) for form in applicable(table)]
    error = {form: weighted_error(table, judged, residuals) for form, residuals in tried}
    tried.sort(key=lambda row: (row[0].parameters, round(error[row[0]], 9)))
    form, residuals = tried[0]
    for other, others in tried[1:]:
        if other.parameters > form.parameters and clearly_better(table, judged, (others, residuals), _FORM):
            form, residuals = other, others
    fitter = whole(form)
    candidates = [(form.name, error[form]) for form, _ in tried]
    for name, rival, allowed in (("two pieces", split, 2 * _FEWEST + 1), ("leftovers", None, 2 * _FEWEST)):
        if len(table.counts) <= allowed:
            continue
        attempt = rival or leftover(fitter)
        others = left_out(attempt, table)
        candidates.append((name, weighted_error(table, judged, others)))
        if clearly_better(table, judged, (others, residuals), _MORE):
            fitter, residuals = attempt, others
    return Choice(fitter(table), residuals, tuple(candidates))


def weighted_error(table: Table, judged: Mask, residuals: Array) -> float:
    """Mean held-out error, noisy points counting less."""
    return float(np.average(relative_errors(residuals)[judged], weights=table.weights[judged]))


def clearly_better(
    table: Table,
    judged: Mask,
    residuals: tuple[Array, Array],
    margin: tuple[float, float],
) -> bool:
    """Whether the first residuals beat the second by the margin (share, step) and by a standard error over folds."""
    first, second = (relative_errors(one) * table.weights / table.weights[judged].mean() for one in residuals)
    folds = [judged & (table.tokens == count) for count in np.unique(table.tokens[judged])]
    old = np.array([second[fold].mean() for fold in folds])
    gain = old - np.array([first[fold].mean() for fold in folds])
    noise = gain.std(ddof=1) / np.sqrt(len(gain)) if len(gain) > 1 else 0.0
    share, step = margin
    return bool(gain.mean() >= max(share * old.mean(), step, noise))
