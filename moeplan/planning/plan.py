"""Thresholds over a traffic mix: calibration + routing + the steps that really occur -> the plan document."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from moeplan.engines.chain import Engine
from moeplan.errors import Decline, MoeplanError
from moeplan.planning.evidence import LADDER, Findings, Move, fit_row, gate_row, keys, ladder_rows, whole_row
from moeplan.planning.gates import Chain, Choice, Table, choose
from moeplan.planning.mix import Traffic, step_mix
from moeplan.planning.prices import Assumption, Prices, price_all
from moeplan.planning.span import LayerGroup
from moeplan.planning.words import listed

SCHEMA = "moeplan.plan/1"
FLOOR = 0.02  # a change must gain this much at its low end: mlxcel's autotuner switch rule (#906)
_OCTAVE = (1.25, 1.5, 1.75, 2.0)  # above the ladder four sizes an octave, then refined around each threshold
_PARTS = 8  # of the gap around a threshold in each refinement


@dataclass(frozen=True, slots=True)
class Setting:
    """All that a plan rests on. groups: alike layers, the most first. alternatives: to see a gate move under."""

    model: str
    engine: Engine
    groups: tuple[LayerGroup, ...]
    traffic: Traffic
    assumption: Assumption
    alternatives: tuple[Assumption, ...] = ()
    floor: float = FLOOR
    declines: tuple[Decline, ...] = ()


def recommend(setting: Setting) -> dict[str, Any]:
    """The plan document (schema moeplan.plan/1); the same setting gives the same document.

    Times are seconds of all MoE layers in one step. Raises MoeplanError where fewer than two paths of the engine
    are calibrated, or no step size is inside the calibrated range.
    """
    known = set.intersection(*({*group.calibration.paths} for group in setting.groups))
    engine, missing = setting.engine.limited_to(known)
    chain = Chain(engine.gates, setting.groups[0].shape)
    mix = step_mix(setting.traffic)
    table, outside, choice = _settled(chain, setting, mix)
    fits = price_all(setting.groups, chain.paths, table.tokens, replace(setting.assumption, points=False))
    moves = tuple(_move(chain, setting, mix, other) for other in setting.alternatives)
    findings = Findings(chain, table, choice, fits, moves, setting.floor)
    document = {
        "schema": SCHEMA,
        "model": setting.model,
        "device": setting.groups[0].calibration.device.name,
        "engine": engine.name,
        "keys": keys(setting.model, engine.name, setting.groups, chain.paths, setting.assumption),
        "floor": setting.floor,
        "mix": setting.traffic.to_dict() | {"steps": [{"tokens": t, "steps": n} for t, n in mix.items()]},
        "gates": [gate_row(findings, number) for number in range(len(chain.gates))],
        "total": whole_row(findings),
        "predicted": ladder_rows(findings),
        "fits": [fit_row(group, path) for group in setting.groups for path in chain.paths],
        "notes": list(engine.notes),
        "declines": [{"path": no.path, "reason": no.reason} for no in (*setting.declines, *missing, *outside)],
    }
    return {key: rounded(value) for key, value in document.items()}


def rounded(value: Any) -> Any:
    """The same JSON with nine significant digits: processors differ in the sixteenth, plans must not."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list | tuple) else value


def _settled(chain: Chain, setting: Setting, mix: Mapping[int, int]) -> tuple[Table, tuple[Decline, ...], Choice]:
    """Prices and the choice on the grid of `sizes`, refined until each chosen threshold is exact to a token."""
    grid = sizes(setting.groups, mix)
    while True:
        prices = price_all(setting.groups, chain.paths, grid, setting.assumption)
        table, outside = planned(chain, prices, mix)
        choice = choose(chain, table, setting.floor)
        finer = sorted({*grid, *_between(chain, table, choice)})
        if finer == grid:
            return table, outside, choice
        grid = finer


def _between(chain: Chain, table: Table, choice: Choice) -> set[int]:
    """Sizes to look at between two neighbours of the table that run different paths under the chosen thresholds."""
    levels = chain.levels(choice.chosen, table.tokens)
    found: set[int] = set()
    for (a, one), (b, other) in pairwise(zip(table.tokens, levels, strict=True)):
        if one != other:
            found.update(range(a, b, -(-(b - a) // _PARTS)))
    return found


def sizes(groups: Sequence[LayerGroup], mix: Mapping[int, int]) -> list[int]:
    """Token counts to price: 1..64, those of the mix, and more above 64 up to the end of the calibrated range."""
    most = max((fit.valid[1] for group in groups for fit in group.calibration.fits.values()), default=LADDER)
    found = {*range(1, LADDER + 1), *mix}
    octave = LADDER
    while octave < most:
        found.update(size for step in _OCTAVE if (size := int(octave * step)) <= most)
        octave *= 2
    return sorted(found)


def planned(chain: Chain, prices: Prices, mix: Mapping[int, int]) -> tuple[Table, tuple[Decline, ...]]:
    """The sizes at which the engine's own path has a price, and a decline for each path that lacks some.

    Raises MoeplanError where nothing is left.
    """
    levels = chain.levels(chain.defaults, prices.tokens)
    kept = [i for i, level in enumerate(levels) if prices.times[chain.paths[level]][i] is not None]
    if not kept:
        raise MoeplanError(f"no step size can be priced: {next(iter(prices.missing.values()))}")
    table = Table(
        tuple(prices.tokens[i] for i in kept),
        tuple(float(mix.get(prices.tokens[i], 0)) for i in kept),
        {path: tuple(row[i] for i in kept) for path, row in prices.times.items()},
    )
    declines = []
    if lost := [t for t in mix if t not in table.tokens]:
        path = chain.paths[chain.level(chain.defaults, lost[0])]
        share = f"{sum(mix[t] for t in lost)} of {sum(mix.values())} steps are not planned ({listed(lost)} rows)"
        declines.append(Decline(path, f"{share}: {prices.missing[path, lost[0]]}"))
    for path in chain.paths:
        if gone := [t for t in table.tokens if (path, t) in prices.missing]:
            declines.append(Decline(path, f"no choice at {listed(gone)} tokens: {prices.missing[path, gone[0]]}"))
    return table, tuple(declines)


def _move(chain: Chain, setting: Setting, mix: Mapping[int, int], other: Assumption) -> Move:
    """Where the gates would go under another assumption."""
    name = f"{other.routing.name}, {other.cohort} cohort"
    prices = price_all(setting.groups, chain.paths, sizes(setting.groups, mix), other)
    try:
        table, _ = planned(chain, prices, mix)
    except MoeplanError as bad:
        return Move(other, f"{name}: {bad}")
    return Move(other, choose(chain, table, setting.floor))
