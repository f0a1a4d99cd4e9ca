"""The rows of a plan document: keys that must agree, fits, gates with both sides' times, the ladder, the whole."""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from moeplan.cost.model import Estimate, weakest
from moeplan.planning.gates import Chain, Choice, Gain, Table, gain, total
from moeplan.planning.prices import Assumption, Prices
from moeplan.planning.span import LayerGroup

LADDER = 64  # decode batches that are listed one by one
_NUMBER = re.compile(r"\d+")
_NONE = Gain(0.0, 0.0, 0.0, ())


@dataclass(frozen=True, slots=True)
class Move:
    """The choice under another assumption, or why there is none."""

    assumption: Assumption
    choice: Choice | str


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that the rows are made of. fits: the same prices without the timed points."""

    chain: Chain
    table: Table
    choice: Choice
    fits: Prices
    moves: tuple[Move, ...]
    floor: float


def keys(
    model: str, engine: str, groups: Sequence[LayerGroup], paths: Sequence[str], assumption: Assumption
) -> dict[str, Any]:
    """What must agree for the plan to hold."""
    first = groups[0].calibration
    samples = [sample for group in groups for sample in group.calibration.samples]
    timed = [(sample.path, sample.config_hash) for sample in samples]
    seen = [(sample.path, sample.signature) for sample in samples]
    fits = [group.calibration.fits[path] for group in groups for path in paths if path in group.calibration.fits]
    text = json.dumps([fit.to_dict() for fit in fits], sort_keys=True)
    return {
        "device": first.device.name,
        "device_reported": first.header.get("device_reported"),
        "engine": engine,
        "runner": first.engine,
        "engine_version": first.engine_version,
        "driver": first.header.get("driver", ""),
        "host": first.header.get("host", ""),
        "kind": first.header.get("kind", "measured"),
        "model": model,
        "shape": first.shape.to_dict(),
        "layers": [group.layers for group in groups],
        "config_hashes": {path: sorted({found for name, found in timed if name == path} - {""}) for path in paths},
        "signatures": {path: templates(found for name, found in seen if name == path) for path in paths},
        "routing": assumption.routing.name,
        "cohort": assumption.cohort,
        "seed": assumption.seed,
        "extrapolate": assumption.extrapolate,
        "fits_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }


def fit_row(group: LayerGroup, path: str) -> dict[str, Any]:
    """How well a path is known."""
    fit = group.calibration.fits.get(path)
    if fit is None:
        return {"path": path, "reason": group.calibration.unfitted.get(path, "not timed")}
    return {
        "path": path,
        "form": fit.form,
        "kind": fit.kind,
        "valid": list(fit.valid),
        "band": list(fit.band),
        "holdout_mean": fit.holdout.mean,
        "holdout_p90": fit.holdout.p90,
        "holdout_max": fit.holdout.max,
        "n": fit.n,
        "warnings": list(fit.warnings),
    }


def whole_row(found: Findings) -> dict[str, Any]:
    """Seconds of all planned steps of the mix, and what the changes gain together."""
    chain, table, chosen = found.chain, found.table, found.choice.chosen
    best = 0.0
    for i, weight in enumerate(table.weights):
        best += weight * min(time.seconds for path in chain.paths if (time := table.times[path][i]) is not None)
    default, new = total(chain, table, chain.defaults), total(chain, table, chosen)
    return {
        "steps": int(sum(table.weights)),
        "default_s": default,
        "recommended_s": new,
        "best_s": best,
        "gain": default / new - 1 if new else 0.0,
        "regret": new / best - 1 if best else 0.0,
        "default_regret": default / best - 1 if best else 0.0,
        "changed": _gain(gain(chain, table, chain.defaults, chosen)),
    }


def gate_row(found: Findings, number: int) -> dict[str, Any]:
    """One gate. `gain` is that of the recommended threshold over the default, so 0 where the default is kept;
    `optimum` is what the mix alone would choose, and its gain."""
    chain, gate = found.chain, found.chain.gates[number]
    best, chosen, gained = found.choice.best[number], found.choice.chosen[number], found.choice.gains[number]
    even = break_even(found.fits, gate.below, gate.above)
    a_token = {"tokens": 1.0, "slots": chain.shape.top_k, "slots_per_expert": chain.shape.top_k / chain.shape.experts}
    return {
        "name": gate.name,
        "variable": gate.variable,
        "comparison": ">=",
        "default": gate.threshold,
        "recommended": chosen,
        "default_tokens": None if gate.threshold is None else gate.first_tokens(gate.threshold, chain.shape),
        "first_tokens": None if chosen is None else gate.first_tokens(chosen, chain.shape),
        "below": gate.below,
        "above": gate.above,
        **_gain(gained if chosen != gate.threshold else _NONE),
        "regret": _regret(found, number),
        "optimum": {"threshold": best} | _gain(gained),
        "break_even": None if even is None else even * a_token[gate.variable],
        "break_even_tokens": even,
        "reason": _reason(found, number),
        "stakes": _stakes(found, number),
        "robustness": [_robust(move, number) for move in found.moves],
        "evidence": _evidence(found, number),
        "source": gate.source,
        "host_visible": gate.host_visible,
    }


def ladder_rows(found: Findings) -> list[dict[str, Any]]:
    """Default and recommended path at 1..64 tokens and at every larger size of the mix."""
    chain, table, rows = found.chain, found.table, []
    for i, tokens in enumerate(table.tokens):
        before = chain.paths[chain.level(chain.defaults, tokens)]
        after = chain.paths[chain.level(found.choice.chosen, tokens)]
        old, new = table.times[before][i], table.times[after][i]
        if (tokens <= LADDER or table.weights[i]) and old is not None and new is not None:
            row = {"tokens": tokens, "default_path": before, "default_s": old.seconds, "path": after}
            rows.append(row | _time(new) | {"steps": int(table.weights[i])})
    return rows


def break_even(fits: Prices, below: str, above: str) -> float | None:
    """Tokens from which `above` stays faster, linear between two counts; None without such a crossing."""
    found: float | None = None
    last: tuple[int, float] | None = None
    for tokens, one, other in zip(fits.tokens, fits.times[below], fits.times[above], strict=True):
        if one is None or other is None:
            continue
        lead = one.seconds - other.seconds
        if lead <= 0:
            found = None
        elif last is not None and last[1] <= 0:
            found = last[0] + (tokens - last[0]) * -last[1] / (lead - last[1])
        last = tokens, lead
    return found


def templates(signatures: Iterable[str]) -> list[str]:
    """Signatures of one path with `#` for every number that changes with the arm; numbers that never do are kept.

    >>> templates(["tile 16, grid 4", "tile 16, grid 8"])
    ['tile 16, grid #']
    """
    found: dict[str, list[list[str]]] = {}
    for signature in sorted({*signatures} - {""}):
        found.setdefault(_NUMBER.sub("#", signature), []).append(_NUMBER.findall(signature))
    lines = []
    for plain, numbers in sorted(found.items()):
        kept = [column[0] if len(set(column)) == 1 else "#" for column in zip(*numbers, strict=True)]
        parts = plain.split("#")
        lines.append(parts[0] + "".join(number + part for number, part in zip(kept, parts[1:], strict=True)))
    return lines


def fits_template(signature: str, template: str) -> bool:
    """Whether a signature is one of those that a template stands for."""
    return re.fullmatch(r"\d+".join(re.escape(part) for part in template.split("#")), signature) is not None


def _gain(found: Gain) -> dict[str, Any]:
    return {"gain": found.middle, "gain_low": found.low, "gain_high": found.high, "changed_tokens": list(found.tokens)}


def _time(time: Estimate) -> dict[str, Any]:
    return {"seconds": time.seconds, "low": time.low, "high": time.high, "source": time.source}


def _robust(move: Move, number: int) -> dict[str, Any]:
    name = {"routing": move.assumption.routing.name, "cohort": move.assumption.cohort}
    if isinstance(move.choice, str):
        return name | {"reason": move.choice}
    choice = move.choice
    return name | {"optimum": choice.best[number], "recommended": choice.chosen[number]} | _gain(choice.gains[number])


def _reason(found: Findings, number: int) -> str:
    gained, best = found.choice.gains[number], found.choice.best[number]
    default, chosen = found.chain.gates[number].threshold, found.choice.chosen[number]
    low = f"low end {gained.low * 100:+.1f} %, floor {found.floor * 100:.1f} %"
    if chosen != default:
        return f"changed: the gain clears the floor ({low})"
    if best == default:
        return "kept: the default is the optimum of this mix"
    if not gained.tokens:
        return f"kept: {best} is faster only at step sizes that this mix does not have"
    past = found.chain.gates[number].value(found.table.tokens[-1], found.chain.shape)
    where = f"{best}" if best is None or best <= past else f"{best}, beyond every size known,"
    return f"kept: a gain of {gained.middle * 100:+.1f} % by moving to {where} is not sure ({low})"


def _evidence(found: Findings, number: int) -> list[dict[str, Any]]:
    """Both sides of a gate at every token count where both have a price."""
    gate, table, rows = found.chain.gates[number], found.table, []
    for i, tokens in enumerate(table.tokens):
        below, above = table.times[gate.below][i], table.times[gate.above][i]
        if below is not None and above is not None:
            row = {"tokens": tokens, "value": gate.value(tokens, found.chain.shape)}
            sides = {"below": _time(below), "above": _time(above)}
            rows.append(row | sides | {"gain": below.seconds / above.seconds - 1})
    return rows


def _stakes(found: Findings, number: int) -> list[dict[str, Any]]:
    """Where the default runs the slower side: gain, and share of the time saved, by running the other one."""
    gate, rows = found.chain.gates[number], []
    for row in _evidence(found, number):
        passed = gate.threshold is not None and row["value"] >= gate.threshold
        slow, fast = (row["above"], row["below"]) if passed else (row["below"], row["above"])
        if fast["seconds"] < slow["seconds"]:
            gained = {"gain": slow["seconds"] / fast["seconds"] - 1, "saving": 1 - fast["seconds"] / slow["seconds"]}
            source = weakest(slow["source"], fast["source"])
            rows.append(
                {"tokens": row["tokens"], "path": gate.below if passed else gate.above, "source": source} | gained
            )
    return rows


def _regret(found: Findings, number: int) -> float:
    """Time lost against the faster of the gate's two paths, over the steps of the mix that run one of them."""
    chain, table, gate = found.chain, found.table, found.chain.gates[number]
    spent = best = 0.0
    for i, level in enumerate(chain.levels(found.choice.chosen, table.tokens)):
        below, above = table.times[gate.below][i], table.times[gate.above][i]
        if level in (number, number + 1) and below is not None and above is not None:
            spent += table.weights[i] * (below if level == number else above).seconds
            best += table.weights[i] * min(below.seconds, above.seconds)
    return spent / best - 1 if best else 0.0
