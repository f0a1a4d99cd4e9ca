"""Which form a path follows: decided by leaving out whole token counts, every routing of that count together."""

from dataclasses import dataclass
from functools import partial

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


def split(table: Table, near: int | None = None) -> Curve:
    """Two pieces, cut where the information criterion is lowest; each side takes its best sum of terms.

    near: look only at the five cuts about that token count.
    """
    counts = table.counts
    cuts = range(_FEWEST, len(counts) - _FEWEST + 1)
    if near is not None:
        middle = int(np.searchsorted(counts, near))
        cuts = range(max(cuts.start, middle - 2), min(cuts.stop, middle + 3))
    best: tuple[float, Curve] | None = None
    for cut in cuts:
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
        misfit = loss(law, table.points, table.seconds, table.weights) / n + 1e-12
        cost = n * np.log(misfit) + form.parameters * np.log(n)
        if best is None or cost < best[0]:
            best = float(cost), law
    if best is None:
        best = 1e9, solve(FORMS[0], table.points, table.seconds, table.weights)
    return best[0], Piece(int(table.tokens.min()), int(table.tokens.max()), best[1])


def choose(table: Table) -> Choice:
    """The simplest form that no other beats clearly; then two pieces, then leftovers, if they beat that clearly.

    A slow form is tried only where its error on the very points it was fitted to is already clearly lower than the
    best held-out error so far: what it has left out it cannot predict better than what it has seen.
    """
    judged = interior(table)
    if len(np.unique(table.tokens[judged])) < _FEWEST:
        judged = np.ones(len(table.tokens), dtype=bool)
    tried: list[tuple[Form, Array, float]] = []
    for form in sorted(applicable(table), key=lambda form: (form.smooth or form.host, form.parameters)):
        best = min((row[2] for row in tried), default=np.inf)
        if not (form.smooth or form.host) or _promising(whole(form), table, judged, best * (1 - _FORM[0])):
            residuals = left_out(whole(form), table)
            tried.append((form, residuals, weighted_error(table, judged, residuals)))
    tried.sort(key=lambda row: (row[0].parameters, round(row[2], 9)))
    form, residuals, error = tried[0]
    for other, others, wrong in tried[1:]:
        if other.parameters > form.parameters and clearly_better(table, judged, (others, residuals), _FORM):
            form, residuals, error = other, others, wrong
    fitter = whole(form)
    candidates = [(row[0].name, row[2]) for row in tried]
    if len(table.counts) > 2 * _FEWEST + 1:
        apart = partial(split, near=split(table).pieces[-1].first)
        if _promising(apart, table, judged, error * (1 - _MORE[0])):
            others = left_out(apart, table)
            candidates.append(("two pieces", weighted_error(table, judged, others)))
            if clearly_better(table, judged, (others, residuals), _MORE):
                fitter, residuals = apart, others
    if len(table.counts) > 2 * _FEWEST:
        others = left_out(leftover(fitter), table)
        candidates.append(("leftovers", weighted_error(table, judged, others)))
        if clearly_better(table, judged, (others, residuals), _MORE):
            fitter, residuals = leftover(fitter), others
    return Choice(fitter(table), residuals, tuple(candidates))


def _promising(fitter: Fitter, table: Table, judged: Mask, below: float) -> bool:
    """Whether the error on the points fitted is below that."""
    residuals = table.seconds / fitter(table).seconds(table.tokens, table.points) - 1
    return weighted_error(table, judged, residuals) < below


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
