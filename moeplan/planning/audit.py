"""What an engine does at each token count, which gate decided, and what that costs against the best known path."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moeplan.cost.device import Device
from moeplan.cost.model import Estimate
from moeplan.engines.rules import Decision, Predicate, RuleBook, call_facts, decide
from moeplan.errors import MoeplanError
from moeplan.planning.estimate import priced
from moeplan.planning.prices import Assumption, price
from moeplan.planning.span import LayerGroup
from moeplan.traffic.shape import LayerShape

_BACKENDS = {"apple": "metal", "sm_": "cuda", "gfx": "rocm"}


def backend_of(device: Device) -> str | None:
    """The backend that a device's generation names, None where it names none."""
    return next((name for start, name in _BACKENDS.items() if device.generation.startswith(start)), None)


@dataclass(frozen=True, slots=True)
class Costs:
    """Calibrated layers of one device, one tuple for every runner, and what the prices assume."""

    runners: Sequence[tuple[LayerGroup, ...]]
    assumption: Assumption


def audit_document(
    book: RuleBook, shape: LayerShape, tokens: Sequence[int], costs: Costs | None, relax: Mapping[str, int]
) -> dict[str, Any]:
    """The `audit` document of one layer shape; times are seconds of all MoE layers, None where nothing is calibrated.

    relax: call-site gates with another value; each is `reached` where its path runs up to there, else `not reached`
    with the gate that stops it. Raises MoeplanError for a gate that the engine does not have.
    """
    changed = book
    for name, value in relax.items():
        changed = changed.relaxed(name, value)
    return {
        "engine": book.engine,
        "backend": book.backend,
        "rows": [_row(decide(changed, call_facts(shape, n)), n, book, costs) for n in tokens],
        "relaxed": [_relaxed(book, name, value, shape) for name, value in relax.items()],
        "gates": [_gate(one) for one in book.predicates],
        "notes": list(book.notes),
    }


def _gate(one: Predicate) -> dict[str, Any]:
    value = list(one.value) if isinstance(one.value, tuple) else one.value
    about = {"name": one.name, "variable": one.variable, "op": one.op, "value": value}
    return about | {"place": one.place, "source": one.source, "env": one.env or None}


def _row(done: Decision, tokens: int, book: RuleBook, costs: Costs | None) -> dict[str, Any]:
    decided = done.declined[-1].predicate if done.declined else (done.admitted[0] if done.admitted else None)
    own, best = _times(done.path, tokens, book, costs)
    return {
        "tokens": tokens,
        "path": done.path,
        "kernel": done.kernel or None,
        "decided_by": None if decided is None else decided.name,
        "declined": [
            {"path": no.path, "gate": no.predicate.name, "place": no.predicate.place, "reason": no.text,
             "source": no.predicate.source}
            for no in done.declined
        ],
        "seconds": None if own is None else own.seconds,
        "source": None if own is None else own.source,
        "best_path": None if best is None else best[0],
        "best_seconds": None if best is None else best[1],
        "regret": None if own is None or best is None else own.seconds / best[1] - 1,
    }  # fmt: skip


def _times(
    path: str, tokens: int, book: RuleBook, costs: Costs | None
) -> tuple[Estimate | None, tuple[str, float] | None]:
    """Time of the engine's path in its own runners' calibration, and the fastest of all that is calibrated."""
    if costs is None:
        return None, None
    own = None
    for groups in costs.runners:
        if groups[0].calibration.engine in book.runners:
            try:
                own = price(groups, path, tokens, costs.assumption)
                break
            except MoeplanError:
                continue
    try:
        first = priced(costs.runners, None, tokens, costs.assumption)[0]
    except MoeplanError:
        return own, None
    return own, (first.path, first.seconds)


def _relaxed(book: RuleBook, name: str, value: int, shape: LayerShape) -> dict[str, Any]:
    """Whether the path behind one relaxed gate runs at every size that the gate alone now lets through."""
    changed = book.relaxed(name, value)
    rule = next(one for one in book.rules if any(p.name == name and p.place == "call site" for p in one.predicates))
    new = next(p for one in changed.rules if one.path == rule.path for p in one.predicates if p.name == name)
    old = next(p for p in rule.predicates if p.name == name)
    opened = [n for n in range(1, 513) if new.holds(call_facts(shape, n)) and not old.holds(call_facts(shape, n))]
    for tokens in opened:
        done = decide(changed, call_facts(shape, tokens))
        stop = next((no for no in done.declined if no.path == rule.path), None)
        if stop is not None:
            return {
                "gate": name, "value": value, "path": rule.path, "outcome": "not reached", "tokens": tokens,
                "stopped_by": stop.predicate.name, "place": stop.predicate.place, "reason": stop.text,
                "source": stop.predicate.source,
            }  # fmt: skip
    about = {"gate": name, "value": value, "path": rule.path, "tokens": opened[-1] if opened else None}
    return about | {"outcome": "reached" if opened else "changes nothing"}
