"""Laws of the optimiser, on random chains and times; each against a search through all thresholds or a property."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.cost.model import Estimate
from moeplan.planning.gates import Chain, Table, choose, gain, optimise, total
from moeplan.planning.mix import Traffic, even_price, step_mix
from moeplan.serving.batching import simulate
from moeplan.serving.requests import closed_loop
from moeplan.serving.step import Policy, StepShape
from tests.planning import gate, shape

PATHS = "abcd"
VARIABLES = ("tokens", "slots", "slots_per_expert")


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Chain, Table]:
    """A chain of one to three gates and times at two to six sizes; the default's path always has a price."""
    count = draw(st.integers(1, 3))
    layer = shape(draw(st.sampled_from([4, 8, 16])), draw(st.integers(1, 4)))
    gates = []
    for number in range(count):
        variable = draw(st.sampled_from(VARIABLES))
        threshold = draw(st.none() | st.integers(0, 40))
        gates.append(gate(f"g{number}", variable, threshold, PATHS[number], PATHS[number + 1]))
    chain = Chain(tuple(gates), layer)
    tokens = tuple(sorted(draw(st.sets(st.integers(1, 24), min_size=2, max_size=6))))
    weights = tuple(float(draw(st.integers(0, 5))) for _ in tokens)
    times: dict[str, tuple[Estimate | None, ...]] = {}
    levels = chain.levels(chain.defaults, tokens)
    for level, path in enumerate(chain.paths):
        row: list[Estimate | None] = []
        for place in range(len(tokens)):
            if levels[place] != level and draw(st.integers(0, 7)) == 0:
                row.append(None)
                continue
            seconds, wide = draw(st.integers(50, 150)) / 100, draw(st.integers(0, 10)) / 100
            row.append(Estimate(seconds, seconds * (1 - wide), seconds * (1 + wide), "fitted"))
        times[path] = tuple(row)
    return chain, Table(tokens, weights, times)


def cost(chain: Chain, table: Table, thresholds: tuple[int | None, ...]) -> tuple[float, float] | None:
    """(mix, ladder) by plain addition; None where a path has no price."""
    mix = ladder = 0.0
    for place, level in enumerate(chain.levels(thresholds, table.tokens)):
        time = table.times[chain.paths[level]][place]
        if time is None:
            return None
        known = [row[place] for row in table.times.values()]
        mix += table.weights[place] * time.seconds
        ladder += time.seconds / min(one.seconds for one in known if one is not None)
    return mix, ladder


def everything(chain: Chain, table: Table, kept: frozenset[int]) -> list[tuple[float, float]]:
    """The cost of every setting of thresholds that differ at the table's sizes."""
    options = []
    for number, own in enumerate(chain.gates):
        values = {own.value(tokens, chain.shape) for tokens in table.tokens}
        options.append([own.threshold] if number in kept else [*values, None])
    found = [cost(chain, table, thresholds) for thresholds in product(*options)]
    return [one for one in found if one is not None]


@settings(max_examples=150, deadline=None)
@given(worlds(), st.sets(st.integers(0, 2)))
def test_the_optimiser_agrees_with_a_search_through_all_thresholds(world: tuple[Chain, Table], kept: set[int]) -> None:
    chain, table = world
    held = frozenset(number for number in kept if number < len(chain.gates))
    chosen = optimise(chain, table, held)
    assert all(chosen[number] == chain.gates[number].threshold for number in held)
    mine, best = cost(chain, table, chosen), everything(chain, table, held)
    assert mine is not None
    assert mine[0] == pytest.approx(min(one[0] for one in best), rel=1e-12)
    equal = [one[1] for one in best if one[0] <= mine[0] * (1 + 1e-12)]
    assert mine[1] == pytest.approx(min(equal), rel=1e-9)


@settings(max_examples=150, deadline=None)
@given(worlds(), st.integers(0, 30))
def test_never_worse_than_the_default_and_every_change_is_sure(world: tuple[Chain, Table], floor: int) -> None:
    chain, table = world
    choice = choose(chain, table, floor / 100)
    default = total(chain, table, chain.defaults)
    assert total(chain, table, choice.chosen) <= default * (1 + 1e-12)
    for number, found in enumerate(choice.gains):
        assert found.low <= found.middle <= found.high
        if choice.chosen[number] != chain.gates[number].threshold:
            assert found.low >= floor / 100
            assert found.tokens


@settings(max_examples=150, deadline=None)
@given(worlds(), st.integers(0, 30), st.integers(0, 30))
def test_a_higher_floor_never_plans_a_faster_mix(world: tuple[Chain, Table], one: int, other: int) -> None:
    chain, table = world
    low, high = (choose(chain, table, floor / 100).chosen for floor in sorted((one, other)))
    assert total(chain, table, low) <= total(chain, table, high) * (1 + 1e-12)


@settings(max_examples=100, deadline=None)
@given(worlds())
def test_a_floor_above_every_gain_changes_no_gate(world: tuple[Chain, Table]) -> None:
    chain, table = world
    assert choose(chain, table, 1e9).chosen == chain.defaults


@settings(max_examples=100, deadline=None)
@given(worlds())
def test_a_growing_batch_never_goes_back(world: tuple[Chain, Table]) -> None:
    chain, table = world
    levels = chain.levels(optimise(chain, table), range(1, 60))
    assert list(levels) == sorted(levels)


@settings(max_examples=100, deadline=None)
@given(worlds())
def test_no_gain_over_itself_and_gains_invert(world: tuple[Chain, Table]) -> None:
    chain, table = world
    chosen = optimise(chain, table)
    assert gain(chain, table, chosen, chosen).tokens == ()
    there, back = gain(chain, table, chain.defaults, chosen), gain(chain, table, chosen, chain.defaults)
    assert (1 + there.middle) * (1 + back.middle) == pytest.approx(1)
    assert (1 + there.low) * (1 + back.high) == pytest.approx(1)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 40), st.integers(1, 20), st.integers(1, 8), st.floats(1e-6, 10))
def test_the_mix_of_a_closed_loop_does_not_depend_on_prices(
    clients: int, prompt: int, answer: int, batch: int, scale: float
) -> None:
    def by_rows(step: StepShape, first_step: int, steps: int) -> Estimate:
        price = scale * (step.rows**2 + 1) * steps
        return Estimate(price, price, price, "assumed")

    load, policy = closed_loop(clients, prompt, answer, 3), Policy(max_batch=batch)
    assert simulate(load, policy, by_rows).mix == simulate(load, policy, even_price).mix
    joined = step_mix(Traffic((clients, clients + 1), prompt, answer, batch, rounds=3))
    assert sum(joined.values()) == sum(
        simulate(closed_loop(n, prompt, answer, 3), Policy(max_batch=batch), even_price).steps
        for n in (clients, clients + 1)
    )
