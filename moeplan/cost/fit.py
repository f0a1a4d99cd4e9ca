"""The fitted time of one kernel path: laws with errors, a calibrated band, and the range where they hold."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moeplan.cost.choose import choose
from moeplan.cost.curve import Curve, Piece, Table
from moeplan.cost.forms import COLUMNS, law_from_dict, point, round6, with_errors
from moeplan.cost.holdout import Errors, band_of, interior, relative_errors, summary
from moeplan.cost.model import Drivers, Estimate
from moeplan.cost.points import table_of
from moeplan.cost.samples import Sample
from moeplan.errors import MoeplanError


@dataclass(frozen=True, slots=True)
class Fit:
    """One path on one shape.

    curve: one law, or two that meet at a path switch, perhaps with leftovers.
    holdout: errors at interior token counts, each predicted without any sample of that count; end_points: those of
    the smallest and largest count, which is extrapolation. band: 5 % and 95 % quantile of measured / predicted - 1
    on held-out samples, at median noise; scale: (tokens, noise there over the median). valid: token counts;
    distinct: experts, both as seen.
    cache_resident: samples left out because their weights fit in the last-level cache.
    """

    path: str
    curve: Curve
    valid: tuple[int, int]
    distinct: tuple[float, float]
    routings: tuple[str, ...]
    n: int
    kind: str
    cache_resident: int
    holdout: Errors
    end_points: Errors
    band: tuple[float, float]
    scale: tuple[tuple[int, float], ...]
    spread: float
    candidates: tuple[tuple[str, float], ...]
    warnings: tuple[str, ...] = ()

    @property
    def drivers(self) -> tuple[str, ...]:
        """What the time follows: `distinct`, `slots`, `blocks`, those with a coefficient above zero."""
        used = np.max([piece.law.coefficients for piece in self.curve.pieces], axis=0)
        return tuple(name for name, value in zip(COLUMNS[1:], used[1:], strict=True) if value > 0)

    @property
    def form(self) -> str:
        """The law as text; two pieces with the tokens where they meet."""
        return self.curve.describe

    def band_at(self, tokens: float) -> tuple[float, float]:
        """The band at that token count: wider where repeats scatter more, linear in log tokens between counts."""
        counts, scales = zip(*self.scale, strict=True)
        factor = float(np.interp(math.log(tokens), np.log(counts), scales))
        return max(self.band[0] * factor, -0.9), self.band[1] * factor

    def estimate(self, drivers: Drivers, extrapolate: bool = False) -> Estimate:
        """Seconds of one layer with its 90 % band; between two pieces the band reaches over both.

        Outside the token counts (or, for a law that follows distinct experts, the distinct experts) that were
        timed: MoeplanError, or with `extrapolate` an estimate of source `extrapolated` whose half-width is the
        larger of the band and the worst end-point error, times 1 + 2 log2(how far outside).
        """
        if "blocks" in self.drivers and drivers.slots and not drivers.blocks:
            raise MoeplanError(
                f"path {self.path}: its time follows blocks, and the work of {drivers.tokens} tokens names none"
            )
        seconds, least, most = self.curve.at(drivers.tokens, point(drivers))
        outside = self._outside(drivers)
        if not outside:
            low, high = self.band_at(drivers.tokens)
            return Estimate(seconds, least * (1 + low), most * (1 + high), "fitted")
        what, distance = outside
        if not extrapolate:
            raise MoeplanError(
                f"path {self.path}: {what} is outside the calibrated range (extrapolation not asked for)"
            )
        low, high = self.band_at(drivers.tokens)
        wide = max(-low, high, self.end_points.max) * (1 + 2 * math.log2(distance))
        return Estimate(seconds, seconds / (1 + wide), seconds * (1 + wide), "extrapolated")

    def _outside(self, drivers: Drivers) -> tuple[str, float] | None:
        low, high = self.valid
        if not low <= drivers.tokens <= high:
            far = low / max(drivers.tokens, 1e-9) if drivers.tokens < low else drivers.tokens / high
            return f"tokens {drivers.tokens} (valid {low}..{high})", far
        least, most = self.distinct[0] * 0.99, self.distinct[1] * 1.01
        if "distinct" in self.drivers and not least <= drivers.distinct <= most:
            far = least / max(drivers.distinct, 1e-9) if drivers.distinct < least else drivers.distinct / most
            return f"distinct {drivers.distinct:.4g} (valid {self.distinct[0]:.4g}..{self.distinct[1]:.4g})", far
        return None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON of rounded numbers; `Fit.from_dict` is its inverse."""
        pieces = [{"first": p.first, "last": p.last} | p.law.to_dict() for p in self.curve.pieces]
        return {
            "path": self.path,
            "form": self.form,
            "drivers": list(self.drivers),
            "pieces": pieces,
            "leftovers": [list(node) for node in self.curve.nodes],
            "valid": list(self.valid),
            "distinct": list(self.distinct),
            "routings": list(self.routings),
            "n": self.n,
            "kind": self.kind,
            "cache_resident": self.cache_resident,
            "holdout": self.holdout.to_dict(),
            "end_points": self.end_points.to_dict(),
            "band": list(self.band),
            "scale": [list(node) for node in self.scale],
            "spread": self.spread,
            "candidates": [{"form": form, "holdout_mean": error} for form, error in self.candidates],
            "warnings": list(self.warnings),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Fit":
        """Raises KeyError or TypeError where a field is missing."""
        return cls(
            data["path"],
            Curve(
                tuple(Piece(int(p["first"]), int(p["last"]), law_from_dict(p)) for p in data["pieces"]),
                tuple((t, u, weight) for t, u, weight in data["leftovers"]),
            ),
            (data["valid"][0], data["valid"][1]),
            (data["distinct"][0], data["distinct"][1]),
            tuple(data["routings"]),
            data["n"],
            data["kind"],
            data["cache_resident"],
            Errors(**data["holdout"]),
            Errors(**data["end_points"]),
            (data["band"][0], data["band"][1]),
            tuple((int(tokens), scale) for tokens, scale in data["scale"]),
            data["spread"],
            tuple((row["form"], row["holdout_mean"]) for row in data["candidates"]),
            tuple(data["warnings"]),
        )


def fit_path(samples: Sequence[Sample], read_bandwidth: float | None = None) -> Fit:
    """Fit the samples of one path on one shape; read_bandwidth in bytes a second adds a plausibility check.

    Raises MoeplanError for samples of several paths or shapes, or of fewer than three token counts.
    """
    paths = sorted({sample.path for sample in samples})
    if len(paths) != 1 or len({sample.shape for sample in samples}) != 1:
        raise MoeplanError(f"fit: samples of one path and one shape are needed, not of {', '.join(paths) or 'none'}")
    kept = [sample for sample in samples if not sample.cache_resident]
    if len({sample.tokens for sample in kept}) < 3:
        kept = sorted(samples, key=lambda sample: not sample.cache_resident)
    table = table_of(kept)
    if len(table.counts) < 3:
        raise MoeplanError(f"fit: path {paths[0]}: {len(table.counts)} token counts, at least 3 are needed")
    choice = choose(table)
    inner, ends = interior(table), ~interior(table)
    errors = relative_errors(choice.residuals)
    spread = statistics.median(sample.spread / sample.median for sample in kept)
    return Fit(
        path=paths[0],
        curve=_finished(choice.curve, table),
        valid=(int(table.counts[0]), int(table.counts[-1])),
        distinct=(round6(table.points[:, 1].min()), round6(table.points[:, 1].max())),
        routings=tuple(sorted({sample.routing for sample in kept})),
        n=len(kept),
        kind=kept[0].kind,
        cache_resident=len(samples) - len(kept),
        holdout=summary(errors[inner]),
        end_points=summary(errors[ends]),
        band=band_of(table, choice.residuals, spread),
        scale=tuple((int(n), round6(table.scale[table.tokens == n][0])) for n in table.counts),
        spread=round6(spread),
        candidates=tuple((form, round6(error)) for form, error in choice.candidates),
        warnings=tuple(_warnings(kept, table, read_bandwidth if _reads(choice.curve) else None)),
    )


def _finished(curve: Curve, table: Table) -> Curve:
    """With standard errors, and rounded as it is stored."""
    pieces = []
    for piece in curve.pieces:
        own = table.where((table.tokens >= piece.first) & (table.tokens <= piece.last))
        law = law_from_dict(with_errors(piece.law, own.points, own.seconds, own.weights).to_dict())
        pieces.append(Piece(piece.first, piece.last, law))
    return Curve(tuple(pieces), tuple((round6(t), round6(u), round6(weight)) for t, u, weight in curve.nodes))


def _reads(curve: Curve) -> bool:
    """Whether more work takes more time: a path whose time is constant, such as the bare chain, reads no planes."""
    return any(value > 0 for piece in curve.pieces for value in piece.law.coefficients[1:])


def _warnings(samples: Sequence[Sample], table: Table, bandwidth: float | None) -> list[str]:
    found = []
    if samples[0].cache_resident:
        found.append("too few samples read their weights from memory: cache-resident ones were fitted too")
    if np.ptp(table.points[:, 1] / table.points[:, 2]) < 0.01:
        found.append("slots and distinct experts never differ in these samples: the regime is not identified")
    if bandwidth:
        implied = [(s.distinct * s.shape.plane_bytes / s.median, s) for s in samples]
        rate, worst = max(implied, key=lambda pair: pair[0])
        if rate > bandwidth:
            found.append(
                f"arm {worst.arm}: distinct planes at {rate / 1e9:.0f} GB/s, more than the device reads "
                f"({bandwidth / 1e9:.0f} GB/s): weights were served from a cache"
            )
    return found
