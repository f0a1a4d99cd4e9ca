"""The time of one MoE layer or of all of them in a step, by term, with what limits it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moeplan.cost.model import Drivers, Estimate
from moeplan.cost.points import BARE_CHAIN
from moeplan.cost.terms import LEFTOVERS, NAMES, Term, split
from moeplan.errors import MoeplanError
from moeplan.planning.prices import Assumption, layer_price, mean_drivers, price
from moeplan.planning.span import SCOPE, LayerGroup

BEYOND = "timed beyond the fit"


def estimate_document(
    groups: Sequence[LayerGroup], path: str, tokens: int, assumption: Assumption, step: bool
) -> dict[str, Any]:
    """The `estimate` document of one path. step: all MoE layers; else one layer of the largest group.

    A timed point answers for itself; its terms are those of the fit there, and what it differs by is a term too.
    Raises MoeplanError where a group has neither a timed point nor a fit that reaches that far.
    """
    asked = groups if step else groups[:1]
    total: Estimate | None = None
    sums: dict[str, float] = {}
    for group in asked:
        times = group.layers if step else 1
        one = layer_price(group, path, tokens, assumption)
        for term in _terms(group, path, mean_drivers(assumption, path, tokens, group.shape), one):
            sums[term.name] = sums.get(term.name, 0.0) + times * term.seconds
        part = one.repeated(times)
        total = part if total is None else total.then(part)
    assert total is not None
    first = groups[0]
    drivers = mean_drivers(assumption, path, tokens, first.shape)
    largest = max(sums, key=lambda name: sums[name])
    return {
        "device": first.calibration.device.name,
        "calibration": first.calibration.where,
        "path": path,
        "tokens": tokens,
        "routing": assumption.routing.name,
        "cohort": assumption.cohort,
        "layers": sum(group.layers for group in asked) if step else 1,
        "seconds": total.seconds,
        "low": total.low,
        "high": total.high,
        "source": total.source,
        "limited_by": largest,
        "limit": _limit(first, largest, drivers, sums[largest] / (sum(g.layers for g in asked) if step else 1)),
        "terms": [
            {
                "name": name,
                "seconds": value,
                "share": value / total.seconds,
                "source": total.source if name == BEYOND else "fitted",
            }
            for name, value in sums.items()
        ],
        "drivers": {"slots": drivers.slots, "distinct": drivers.distinct, "blocks": drivers.blocks or None},
        "floor_s": _floor(first, drivers),
        "scope": SCOPE,
    }


def _terms(group: LayerGroup, path: str, drivers: Drivers, one: Estimate) -> list[Term]:
    fit = group.calibration.fits.get(path)
    if fit is None:
        return [Term("timed, no fit", one.seconds)]
    terms = list(split(fit, drivers))
    rest = one.seconds - sum(term.seconds for term in terms)
    if abs(rest) > 1e-9 * one.seconds:
        terms.append(Term(BEYOND, rest))
    return terms


def _floor(group: LayerGroup, drivers: Drivers) -> float | None:
    """Seconds a layer in which the distinct planes alone could be read."""
    rate = group.calibration.device.read_bandwidth
    return None if rate is None else drivers.distinct * group.shape.plane_bytes / rate.value


def _limit(group: LayerGroup, name: str, drivers: Drivers, seconds: float) -> str:
    """What the largest term is worth, a layer, in the units of its resource."""
    counts = {NAMES["slots"]: drivers.slots, NAMES["blocks"]: drivers.blocks}
    if name == NAMES["distinct"]:
        rate = drivers.distinct * group.shape.plane_bytes / seconds
        peak = group.calibration.device.read_bandwidth
        of = "" if peak is None else f" of {peak.value / 1e12:.2f} TB/s ({peak.kind})"
        return f"{drivers.distinct:.1f} planes at {rate / 1e12:.2f}{of or ' TB/s'}"
    if counts.get(name):
        return f"{counts[name]:.1f} {name} at {seconds / counts[name] * 1e6:.2f} us each"
    return "nothing that grows with the batch" if name not in (LEFTOVERS, BEYOND) else "no term of the law"


@dataclass(frozen=True, slots=True)
class Priced:
    """A path of one runner and the seconds of all MoE layers on it."""

    groups: tuple[LayerGroup, ...]
    path: str
    seconds: float


def priced(
    runners: Sequence[tuple[LayerGroup, ...]], path: str | None, tokens: int, assumption: Assumption
) -> list[Priced]:
    """Every calibrated path (or that one) of every runner that has a price at that size, fastest first.

    Raises the first MoeplanError where none has.
    """
    found: list[Priced] = []
    failures: list[MoeplanError] = []
    for groups in runners:
        timed = set.intersection(*(set(group.calibration.paths) for group in groups)) - {BARE_CHAIN}
        for name in sorted(timed) if path is None else [path]:
            try:
                found.append(Priced(groups, name, price(groups, name, tokens, assumption).seconds))
            except MoeplanError as bad:
                failures.append(bad)
    if not found:
        raise failures[0] if failures else MoeplanError("estimate: no kernel path was timed for this layer")
    return sorted(found, key=lambda one: one.seconds)
