"""Thresholds of a chain of gates over a mix of step sizes: which path runs, what it costs, which choice is best."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from moeplan.cost.model import Estimate
from moeplan.engines.chain import Gate
from moeplan.traffic.shape import LayerShape

_TIMED = ("measured", "adjusted")  # the errors of timed points are independent of each other
Thresholds = tuple[int | None, ...]
Cost = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Table:
    """What every path costs at every step size.

    tokens: ascending, each once. weights: steps of the mix with that many rows, 0 where it is only looked at.
    times: path -> estimate a token count, None where nothing is known about that path there.
    """

    tokens: tuple[int, ...]
    weights: tuple[float, ...]
    times: Mapping[str, tuple[Estimate | None, ...]]


@dataclass(frozen=True, slots=True)
class Chain:
    """The gates of an engine on one layer shape."""

    gates: tuple[Gate, ...]
    shape: LayerShape

    @property
    def defaults(self) -> Thresholds:
        """The engine's own thresholds."""
        return tuple(gate.threshold for gate in self.gates)

    @property
    def paths(self) -> tuple[str, ...]:
        """Level -> path; the level is the number of gates passed."""
        return (self.gates[0].below, *(gate.above for gate in self.gates))

    def level(self, thresholds: Thresholds, tokens: int) -> int:
        """Gates passed at that token count: the first one that holds decides."""
        for level, (gate, threshold) in enumerate(zip(self.gates, thresholds, strict=True)):
            if threshold is None or gate.value(tokens, self.shape) < threshold:
                return level
        return len(self.gates)

    def levels(self, thresholds: Thresholds, tokens: Sequence[int]) -> tuple[int, ...]:
        """`level` at each token count."""
        return tuple(self.level(thresholds, count) for count in tokens)


def optimise(chain: Chain, table: Table, kept: frozenset[int] = frozenset()) -> Thresholds:
    """Thresholds with the least total time of the mix; gates in `kept` stay at their default.

    Exact: dynamic programming over token counts and levels (a batch that grows never goes back a level). Equal mixes
    are told apart by the mean slowdown over all token counts of the table, equal plans by staying at the default.
    The default must be priced everywhere in the table, so a solution exists that is never worse than it.
    """
    back: list[list[int]] = []
    costs: list[Cost | None] = []
    for place in range(len(table.tokens)):
        row = _reach(chain, table, kept, (costs, place))
        costs = [cost for cost, _ in row]
        back.append([origin for _, origin in row])
    best = min((cost, level) for level, cost in enumerate(costs) if cost is not None)
    levels = [best[1]]
    for origins in reversed(back[1:]):
        levels.append(origins[levels[-1]])
    return _thresholds(chain, table, kept, tuple(reversed(levels)))


def _reach(
    chain: Chain, table: Table, kept: frozenset[int], state: tuple[list[Cost | None], int]
) -> list[tuple[Cost | None, int]]:
    """For each level at a place: the least cost up to there and the level before."""
    before, place = state
    row: list[tuple[Cost | None, int]] = []
    for level in range(len(chain.paths)):
        cost = _cost(chain, table, place, level)
        if cost is None or not _allowed(chain, kept, table.tokens[place], level):
            row.append((None, 0))
            continue
        if place == 0:
            row.append((cost, 0))
            continue
        steps = table.tokens[place - 1], table.tokens[place]
        origins = [
            ((old[0] + cost[0], old[1] + cost[1]), origin)
            for origin, old in enumerate(before[: level + 1])
            if old is not None and (origin == level or origin in kept or _rises(chain, origin, steps))
        ]
        row.append(min(origins, key=lambda one: one[0]) if origins else (None, 0))
    return row


def _cost(chain: Chain, table: Table, place: int, level: int) -> Cost | None:
    time = table.times[chain.paths[level]][place]
    if time is None:
        return None
    fastest = min(found.seconds for path in chain.paths if (found := table.times[path][place]) is not None)
    return table.weights[place] * time.seconds, time.seconds / fastest


def _allowed(chain: Chain, kept: frozenset[int], tokens: int, level: int) -> bool:
    """Can a batch of that size stop at that level while the kept gates stand at their defaults?"""
    for number in kept:
        gate = chain.gates[number]
        passed = gate.threshold is not None and gate.value(tokens, chain.shape) >= gate.threshold
        if (level == number) if passed else (level > number):
            return False
    return True


def _rises(chain: Chain, number: int, tokens: tuple[int, int]) -> bool:
    """Whether the gate's variable can tell the two sizes apart."""
    low, high = (chain.gates[number].value(count, chain.shape) for count in tokens)
    return low < high


def _thresholds(chain: Chain, table: Table, kept: frozenset[int], levels: tuple[int, ...]) -> Thresholds:
    """The thresholds that give those levels; a default that gives them too is left alone."""
    found: list[int | None] = []
    for number, gate in enumerate(chain.gates):
        place = next((i for i, level in enumerate(levels) if level > number), None)
        if number in kept:
            found.append(gate.threshold)
        elif place is None:
            past = gate.value(table.tokens[-1], chain.shape) + 1
            found.append(None if gate.threshold is None else max(gate.threshold, past))
        else:
            found.append(gate.value(table.tokens[place], chain.shape))
    for number, default in enumerate(chain.defaults):
        tried = (*found[:number], default, *found[number + 1 :])
        if chain.levels(tried, table.tokens) == levels:
            found[number] = default
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Gain:
    """Default time / recommended time - 1 over the steps whose path changes, weighted by the mix, with its band."""

    middle: float
    low: float
    high: float
    tokens: tuple[int, ...]


def gain(chain: Chain, table: Table, default: Thresholds, chosen: Thresholds) -> Gain:
    """Compare two settings over the steps that they send to different paths.

    Errors of one path's fit are fully correlated, those of its timed points are not, and different paths are free of
    each other: the band spans all combinations of every path at its low or its high end. Steps that one of the two
    settings sends to a path without a price there do not count.
    """
    sides = zip(chain.levels(default, table.tokens), chain.levels(chosen, table.tokens), strict=True)
    old: dict[str, list[tuple[float, Estimate]]] = {}
    new: dict[str, list[tuple[float, Estimate]]] = {}
    tokens = []
    for place, (before, after) in enumerate(sides):
        weight, (first, second) = table.weights[place], (chain.paths[before], chain.paths[after])
        one, other = table.times[first][place], table.times[second][place]
        if weight > 0 and before != after and one is not None and other is not None:
            old.setdefault(first, []).append((weight, one))
            new.setdefault(second, []).append((weight, other))
            tokens.append(table.tokens[place])
    if not tokens:
        return Gain(0.0, 0.0, 0.0, ())
    paths = sorted({*old, *new})
    sums = [{path: _sum(rows) for path, rows in side.items()} for side in (old, new)]

    def ratio(ends: Sequence[int]) -> float:
        over, under = (
            sum(side[path][end] for path, end in zip(paths, ends, strict=True) if path in side) for side in sums
        )
        return over / under - 1

    corners = [ratio(ends) for ends in product((0, 2), repeat=len(paths))]
    return Gain(ratio([1] * len(paths)), min(corners), max(corners), tuple(tokens))


def _sum(rows: Sequence[tuple[float, Estimate]]) -> tuple[float, float, float]:
    """Low end, middle and high end of a weighted sum of one path's times: bands of timed points add as roots of
    squares, all others as they are."""
    middle = sum(weight * time.seconds for weight, time in rows)
    ends = []
    for name in ("low", "high"):
        off = [(weight * abs(float(getattr(time, name)) - time.seconds), time.source) for weight, time in rows]
        together = sum(part for part, source in off if source not in _TIMED)
        ends.append(together + math.sqrt(sum(part**2 for part, source in off if source in _TIMED)))
    return middle - ends[0], middle, middle + ends[1]


def total(chain: Chain, table: Table, thresholds: Thresholds) -> float:
    """Seconds of the whole mix. Raises ValueError where a step of the mix goes to a path without a price."""
    seconds = 0.0
    for place, level in enumerate(chain.levels(thresholds, table.tokens)):
        time = table.times[chain.paths[level]][place]
        if time is None and table.weights[place] > 0:
            raise ValueError(f"{table.tokens[place]} tokens: no time of {chain.paths[level]}")
        seconds += table.weights[place] * (time.seconds if time else 0.0)
    return seconds


@dataclass(frozen=True, slots=True)
class Choice:
    """best: the optimum whatever it gains. chosen: with every gate back at its default whose gain is not sure.
    gains: of each gate alone in `best` or in `chosen`, the others as chosen (`reverted` names which).
    """

    best: Thresholds
    chosen: Thresholds
    gains: tuple[Gain, ...]


def choose(chain: Chain, table: Table, floor: float) -> Choice:
    """The optimum, from which gates return to their default, the least certain first, until the low end of every
    gain clears the floor; the rest is chosen anew each time. A higher floor goes further along the same way, so it
    never plans a faster mix; it may change another gate than a lower one does.
    """
    kept: frozenset[int] = frozenset()
    best = optimise(chain, table)
    chosen = best
    gains: dict[int, Gain] = {}
    while True:
        moved = [n for n in range(len(chain.gates)) if chosen[n] != chain.gates[n].threshold]
        found = {n: gain(chain, table, _with(chosen, n, chain.gates[n].threshold), chosen) for n in moved}
        gains |= found
        weak = min(found, key=lambda n: (_surety(found[n]), n), default=None)
        if weak is None or _surety(found[weak]) >= floor:
            none = Gain(0.0, 0.0, 0.0, ())
            return Choice(best, chosen, tuple(gains.get(n, none) for n in range(len(chain.gates))))
        kept |= {weak}
        chosen = optimise(chain, table, kept)


def _surety(found: Gain) -> float:
    """The low end; a gate that changes no step of the mix has nothing to be sure of."""
    return found.low if found.tokens else float("-inf")


def _with(thresholds: Thresholds, number: int, threshold: int | None) -> Thresholds:
    return (*thresholds[:number], threshold, *thresholds[number + 1 :])
