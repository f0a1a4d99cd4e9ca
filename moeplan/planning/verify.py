"""Does a plan hold? Both paths at gate - 1, gate and gate + 1: parity, which path ran, interleaved times."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from moeplan.cost.samples import Sample, SampleFile
from moeplan.engines.chain import Gate
from moeplan.errors import MoeplanError
from moeplan.kernels.protocol import Arm
from moeplan.planning.evidence import fits_template
from moeplan.planning.gates import Chain, Thresholds
from moeplan.runners.spec import PARITY_BOUND, make_arm
from moeplan.traffic.routing import arm_name
from moeplan.traffic.shape import LayerShape

SCHEMA = "moeplan.verdict/1"
PLAN_SCHEMA = "moeplan.plan/1"
RESOLUTION = 0.005  # differences below half a percent are not told apart: the regret a plan may have against the best
OUTCOMES = ("confirmed", "replayed", "within noise", "refuted", "not reached", "failed", "wrong")  # best to worst
REFUSED = OUTCOMES[3:]
_MUST_MATCH = ("runner", "engine_version", "device_reported", "driver")


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where a gate is to be tried: `low` is the path that the plan runs below `first` tokens, `high` from there on.

    kept: the plan left the engine's default alone, so `high` below it or `low` above it may be faster by the floor.
    """

    gate: str
    first: int
    low: str
    high: str
    tokens: tuple[int, ...]
    kept: bool

    def sides(self, tokens: int) -> tuple[str, str]:
        """The recommended path there, and the other one."""
        return (self.low, self.high) if tokens < self.first else (self.high, self.low)


def crossings(plan: Mapping[str, Any]) -> tuple[tuple[Crossing, ...], tuple[dict[str, str], ...]]:
    """The crossings of a plan, and the gates that have none with the reason.

    Raises MoeplanError where the document is not a plan or lacks a field.
    """
    if plan.get("schema") != PLAN_SCHEMA:
        raise MoeplanError(f"schema: {plan.get('schema')!r} is not {PLAN_SCHEMA}")
    try:
        chain, thresholds = _chain(plan)
        found, idle = [], []
        for gate, row, threshold in zip(chain.gates, plan["gates"], thresholds, strict=True):
            first = None if threshold is None else gate.first_tokens(threshold, chain.shape)
            before, after = ("", "") if first is None else _around(chain, thresholds, first)
            if first is None or first == 1 or before == after:
                why = "never passed" if first is None else "passed at every size" if first == 1 else "decides nothing"
                idle.append({"gate": gate.name, "reason": f"{why} under the recommended thresholds"})
                continue
            tokens = (first - 1, first, first + 1)
            found.append(Crossing(gate.name, first, before, after, tokens, row["default"] == threshold))
    except (KeyError, TypeError, ValueError) as bad:
        raise MoeplanError(f"not a complete plan: {bad!r}") from bad
    return tuple(found), tuple(idle)


def _chain(plan: Mapping[str, Any]) -> tuple[Chain, Thresholds]:
    gates = [
        Gate(row["name"], row["variable"], row["default"], row["below"], row["above"], row["source"])
        for row in plan["gates"]
    ]
    chain = Chain(tuple(gates), LayerShape.from_dict(plan["keys"]["shape"]))
    return chain, tuple(row["recommended"] for row in plan["gates"])


def _around(chain: Chain, thresholds: Thresholds, first: int) -> tuple[str, str]:
    return tuple(chain.paths[chain.level(thresholds, max(1, tokens))] for tokens in (first - 1, first))  # type: ignore[return-value]


def arms_of(
    plan: Mapping[str, Any], found: Sequence[Crossing], seeds: Sequence[int], chain: tuple[int, int] | None
) -> tuple[Arm, ...]:
    """Both paths of every crossing at its token counts, on the plan's own routing, once a seed; each arm once."""
    shape = LayerShape.from_dict(plan["keys"]["shape"])
    arms: dict[str, Arm] = {}
    for crossing in found:
        for tokens in crossing.tokens:
            for path in (crossing.low, crossing.high):
                for seed in seeds:
                    arm = make_arm(path, shape, tokens, routing_arm(plan), seed, chain)
                    arms.setdefault(arm.id, arm)
    return tuple(arms.values())


def routing_arm(plan: Mapping[str, Any]) -> str:
    """The routing that the plan assumes, with its cohort, as an arm."""
    return arm_name(str(plan["keys"]["routing"]), str(plan["keys"]["cohort"]))


def refuse(plan: Mapping[str, Any], here: Mapping[str, Any], device: str | None) -> None:
    """Raises MoeplanError where this machine is not the plan's.

    here: runner, engine_version, device_reported and driver of the machine. Where the calibration did not record
    what the device reports of itself (a published table), the user must name the device.
    """
    keys = plan["keys"]
    for key in _MUST_MATCH:
        if keys.get(key) and keys[key] != here.get(key):
            raise MoeplanError(f"plan keys: {key}: the plan is for {keys[key]!r}, this machine has {here.get(key)!r}")
    if device is not None and device != keys["device"]:
        raise MoeplanError(f"--device {device}: the plan is for {keys['device']!r}")
    if device is None and not keys.get("device_reported"):
        raise MoeplanError(
            f"plan keys: device: the plan is for {keys['device']!r}, whose calibration does not say how such a device"
            f" reports itself; give --device {keys['device']} if this is one"
        )


def judge(plan: Mapping[str, Any], measured: SampleFile, arms: Sequence[Arm], replayed: bool = False) -> dict[str, Any]:
    """Rows, an outcome for each gate, and the worst of them as the plan's. Times are seconds of one layer.

    replayed: the samples are old ones; every outcome is then `replayed`.
    """
    found, idle = crossings(plan)
    draws = _draws(measured, arms)
    rows: list[dict[str, Any]] = []
    gates: list[dict[str, Any]] = []
    for crossing in found:
        places = []
        for tokens in crossing.tokens:
            sides = crossing.sides(tokens)
            pair = (draws[sides[0], tokens], draws[sides[1], tokens])
            outcome, note = _place(crossing, pair, plan)
            outcome = "replayed" if replayed else outcome
            places.append(outcome)
            for role, path, side in zip(("recommended", "other"), sides, pair, strict=True):
                row = {"gate": crossing.gate, "tokens": tokens, "path": path, "role": role}
                figures = _figures(side, _predicted(plan, path, tokens))
                rows.append(row | figures | {"outcome": outcome, "note": note})
        gates.append({"gate": crossing.gate, "first_tokens": crossing.first, "outcome": combine(places)})
    whole = combine([str(gate["outcome"]) for gate in gates]) if gates else "replayed" if replayed else "not tried"
    return {"verdicts": rows, "gates": gates, "not_tried": list(idle), "outcome": whole}


Draw = Sample | str
"""One path at one token count on one routing draw: its sample, or why there is none."""


def _draws(measured: SampleFile, arms: Sequence[Arm]) -> dict[tuple[str, int], list[Draw]]:
    """By path and tokens, in the order of the arms' seeds, so that two paths pair up draw by draw."""
    samples = {sample.arm: sample for sample in measured.samples}
    lost = measured.failed | measured.declined
    found: dict[tuple[str, int], list[Draw]] = {}
    for arm in sorted(arms, key=lambda arm: arm.seed):
        found.setdefault((arm.path, arm.tokens), []).append(samples.get(arm.id) or lost.get(arm.id, "not measured"))
    return found


def combine(places: Sequence[str]) -> str:
    """Of several outcomes: the worst; but nothing that loses and one that wins beyond the noise is a confirmation."""
    worst = max(places, key=OUTCOMES.index)
    return "confirmed" if worst == "within noise" and "confirmed" in places else worst


def _place(crossing: Crossing, pair: tuple[list[Draw], list[Draw]], plan: Mapping[str, Any]) -> tuple[str, str]:
    """The outcome at one token count, and what led to it."""
    if reasons := [draw for side in pair for draw in side if isinstance(draw, str)]:
        return ("wrong" if reasons[0].startswith("parity") else "failed"), reasons[0]
    best, other = ([draw for draw in side if isinstance(draw, Sample)] for side in pair)
    if wrong := [s for s in (*best, *other) if s.parity_rms is not None and not s.parity_rms <= PARITY_BOUND]:
        return "wrong", f"parity of {wrong[0].path}: relative RMS {wrong[0].parity_rms}, bound {PARITY_BOUND}"
    known = plan["keys"].get("signatures", {})
    if unreached := [why for one, two in zip(best, other, strict=True) if (why := _unreached(one, two, known))]:
        return "not reached", unreached[0]
    ahead, noise = lead(best, other)
    base = mean(sample.median for sample in best)
    text = f"{ahead / base * 100:+.2f} % ahead, noise {noise / base * 100:.2f} %"
    allowed = float(plan["floor"]) * mean(sample.median for sample in other) if crossing.kept else 0.0
    if ahead > noise:
        return "confirmed", text
    return ("refuted" if -ahead > noise + allowed else "within noise"), text


def lead(best: Sequence[Sample], other: Sequence[Sample]) -> tuple[float, float]:
    """Seconds by which `best` is ahead, mean over the routing draws, and the seconds such a lead must exceed.

    The draws pair up: both paths saw the same ids. The noise is the largest of the timing spread (half interquartile
    ranges of both, mean over the draws), the 90 % band of the mean over draws (Student's t), and the resolution.
    """
    leads = [two.median - one.median for one, two in zip(best, other, strict=True)]
    timing = mean(math.hypot(one.spread, two.spread) for one, two in zip(best, other, strict=True))
    least = RESOLUTION * min(mean(sample.median for sample in side) for side in (best, other))
    scatter = 0.0
    if len(leads) > 1:
        from scipy.stats import t

        scatter = float(t.ppf(0.95, len(leads) - 1)) * stdev(leads) / math.sqrt(len(leads))
    return mean(leads), max(timing, scatter, least)


def _unreached(best: Sample, other: Sample, known: Mapping[str, Sequence[str]]) -> str | None:
    """Why the signatures do not prove that the two paths ran that were asked for, or None."""
    for sample in (best, other):
        if not sample.signature:
            return f"{sample.path} gives no signature: nothing proves that it ran"
        wanted = known.get(sample.path)
        if wanted and not any(fits_template(sample.signature, template) for template in wanted):
            return f"{sample.path} ran as {sample.signature!r}, calibrated as {wanted[0]!r}"
    if best.signature == other.signature:
        return f"{best.path} and {other.path} have the same signature {best.signature!r}"
    return None


def _figures(side: Sequence[Draw], predicted: float | None) -> dict[str, Any]:
    """Means over the draws; the worst parity; `draws_s` has the median of each draw."""
    samples = [draw for draw in side if isinstance(draw, Sample)]
    errors = [sample.parity_rms for sample in samples if sample.parity_rms is not None]
    return {
        "signature": samples[0].signature if samples else None,
        "parity_rms": max(errors) if errors else None,
        "predicted_s": predicted,
        "measured_s": mean(sample.median for sample in samples) if samples else None,
        "spread": mean(sample.spread for sample in samples) if samples else None,
        "draws_s": [sample.median for sample in samples],
        "rounds": min((len(sample.long_s) for sample in samples), default=0),
    }


def _predicted(plan: Mapping[str, Any], path: str, tokens: int) -> float | None:
    """Seconds of one layer as the plan has them; None outside its evidence, or where the layers are not alike."""
    if len(plan["keys"]["layers"]) != 1:
        return None
    for gate in plan["gates"]:
        side = "below" if gate["below"] == path else "above" if gate["above"] == path else None
        for row in gate["evidence"] if side else []:
            if row["tokens"] == tokens:
                return float(row[side]["seconds"]) / int(plan["keys"]["layers"][0])
    return None
