"""What the fits of a calibration are worth: held-out errors and coverage, beside plain baselines.

Every number is about token counts that the fit did not see. The form of a fit was chosen on these same folds, so its
error is a little flattered; the baselines choose nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moeplan.cost.calibrate import journals, read_journal
from moeplan.cost.choose import choose, whole
from moeplan.cost.curve import Mask, Table
from moeplan.cost.forms import Array, Form
from moeplan.cost.holdout import band_of, interior, left_out, relative_errors, summary
from moeplan.cost.points import BARE_CHAIN, in_order, table_of
from moeplan.cost.samples import Sample
from moeplan.errors import MoeplanError

_ONE_SHAPE = "a shape hold-out needs at least 4 shapes of one path; this calibration has fewer"
_BASELINES = ("linear in tokens", "a + b*distinct", "slots")


@dataclass(frozen=True, slots=True)
class Judged:
    """One path on one shape: labels, its form, and per sample the held-out residuals; NaN where a baseline has none."""

    labels: dict[str, Any]
    form: str
    table: Table
    routings: tuple[str, ...]
    residuals: Array
    baselines: dict[str, Array]
    covered: Array  # 1 inside its band, 0 outside; the band is that of the other folds
    half_width: Array


def accuracy(directories: Sequence[Path], tokens_max: int | None = None) -> dict[str, Any]:
    """The `accuracy` document of some calibration folders; held-out samples up to `tokens_max` tokens are judged.

    Raises MoeplanError where no path has the three token counts that a fit needs.
    """
    judged = [one for directory in directories for one in _judge_all(directory)]
    if not judged:
        raise MoeplanError(f"{directories[0]}: no path with at least 3 token counts")
    pairs = [(one, _counted(one.table, tokens_max)) for one in judged]
    return {
        "pooled": {
            "token_holdout": _errors([one.residuals[mask] for one, mask in pairs]),
            "shape_holdout": None,
            "shape_holdout_reason": _ONE_SHAPE,
            "coverage90": _mean([one.covered[mask] for one, mask in pairs]),
            "half_width_median": _median([one.half_width[mask] for one, mask in pairs]),
        },
        "tables": [_row(one, mask) for one, mask in pairs],
        "baselines": [_baseline(name, pairs) for name in _BASELINES],
    }


def _judge_all(directory: Path) -> list[Judged]:
    found = []
    for file in [read_journal(path) for path in journals(directory)]:
        groups: dict[tuple[Any, str], list[Sample]] = {}
        for sample in file.samples:
            if not sample.cache_resident and sample.path != BARE_CHAIN:
                groups.setdefault((sample.shape, sample.path), []).append(sample)
        for (shape, path), samples in sorted(groups.items(), key=lambda item: (item[0][1], repr(item[0][0]))):
            if len({sample.tokens for sample in samples}) >= 3:
                labels = {
                    "system": file.header["device"],
                    "framework": file.header["engine"],
                    "version": file.header["engine_version"],
                    "kernel_source": path,
                    "dtype": shape.format_name,
                    "model": file.header.get("model", file.path.stem),
                }
                found.append(_judge(labels, samples))
    return found


def _judge(labels: dict[str, Any], samples: list[Sample]) -> Judged:
    ordered = in_order(samples)
    table = table_of(ordered)
    choice = choose(table)
    routings = tuple(sample.routing for sample in ordered)
    baselines = {
        "linear in tokens": _interpolated(table, routings),
        "a + b*distinct": left_out(whole(Form(("distinct",))), table),
        "slots": left_out(whole(Form(("slots",))), table),
    }
    covered, half = np.zeros(len(ordered)), np.zeros(len(ordered))
    for count in table.counts:
        out = table.tokens == count
        low, high = band_of(table.where(~out), choice.residuals[~out]) if len(table.counts) > 3 else (np.nan, np.nan)
        even = choice.residuals[out] / table.scale[out]
        covered[out] = (even >= low) & (even <= high)
        half[out] = (high - low) / 2 * table.scale[out]
    form = choice.curve.describe
    return Judged(labels, form, table, routings, choice.residuals, baselines, covered, half)


def _interpolated(table: Table, routings: Sequence[str]) -> Array:
    """Residuals of a straight line in tokens between the neighbouring counts of the same routing."""
    residuals = np.full(len(table.tokens), np.nan)
    names = np.array(routings)
    for i, count in enumerate(table.tokens):
        same = (names == names[i]) & (table.tokens != count)
        known = np.unique(table.tokens[same])
        if len(known) and known[0] < count < known[-1]:
            means = [table.seconds[same & (table.tokens == one)].mean() for one in known]
            residuals[i] = table.seconds[i] / np.interp(count, known, means) - 1
    return residuals


def _counted(table: Table, tokens_max: int | None) -> Mask:
    inner = interior(table)
    return inner if tokens_max is None else np.asarray(inner & (table.tokens <= tokens_max))


def _row(one: Judged, mask: Mask) -> dict[str, Any]:
    even = np.array([name in ("balanced", "disjoint") for name in one.routings])
    return one.labels | {
        "form": one.form,
        "shapes": 1,
        "n": len(one.residuals),
        "token_holdout": _errors([one.residuals[mask]]),
        "shape_holdout": None,
        "end_points": _errors([one.residuals[~interior(one.table)]]),
        "coverage90": _mean([one.covered[mask]]),
        "half_width_median": _median([one.half_width[mask]]),
        "balanced": {"token_holdout": _errors([one.residuals[mask & even]])},
        "cause": None,
    }


def _baseline(name: str, pairs: list[tuple[Judged, Mask]]) -> dict[str, Any]:
    beaten, of = 0, 0
    for one, mask in pairs:
        known = mask & ~np.isnan(one.baselines[name])
        if known.any():
            of += 1
            own, other = (relative_errors(r[known]).mean() for r in (one.residuals, one.baselines[name]))
            beaten += bool(own <= other)
    errors = _errors([one.baselines[name][mask & ~np.isnan(one.baselines[name])] for one, mask in pairs])
    return {"name": name, "token_holdout": errors, "shape_holdout": None, "tables_beaten": beaten, "tables": of}


def _errors(residuals: Sequence[Array]) -> dict[str, Any] | None:
    every = np.concatenate(residuals)
    return summary(relative_errors(every)).to_dict() if len(every) else None


def _mean(values: Sequence[Array]) -> float | None:
    every = np.concatenate(values)
    return float(every.mean()) if len(every) and not np.isnan(every).any() else None


def _median(values: Sequence[Array]) -> float | None:
    every = np.concatenate(values)
    return float(np.median(every)) if len(every) and not np.isnan(every).any() else None
