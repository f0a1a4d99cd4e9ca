"""The price of a span: from the published M1 Ultra chain to steps, and its refusals."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moeplan.cost.calibrate import Calibration, load_calibration
from moeplan.engines import find_engine
from moeplan.engines.chain import Engine
from moeplan.errors import MoeplanError
from moeplan.planning.prices import Assumption, layer_price, mean_drivers
from moeplan.planning.span import ExpertCost, LayerGroup, LayerPrice, default_path, engine_cost, find_calibration
from moeplan.serving.batching import simulate
from moeplan.serving.requests import closed_loop
from moeplan.serving.step import Policy, StepShape
from moeplan.store import Store
from moeplan.traffic.load import ExpertLoad
from moeplan.traffic.routing import draw_ids, parse_routing
from moeplan.traffic.shape import LayerShape, WeightFormat
from moeplan.traffic.tiles import BlockTable

AFFINE = WeightFormat.parse("affine4-g64")
QWEN = LayerShape(2048, 768, 128, 8, AFFINE, AFFINE, AFFINE)
STORE = Store(calibration=Path(__file__).resolve().parent.parent / "calibration")
UNIFORM = Assumption(parse_routing("uniform", STORE))


def under(assumption: Assumption) -> LayerPrice:
    return lambda group, path, tokens: layer_price(group, path, tokens, assumption)


@pytest.fixture(scope="module")
def m1() -> Calibration:
    return find_calibration(STORE, "m1-ultra", find_engine("mlx-lm", []), QWEN)


@pytest.fixture
def cost(m1: Calibration) -> ExpertCost:
    found, declines = engine_cost([LayerGroup(m1, 48)], find_engine("mlx-lm", []), under(UNIFORM))
    assert declines == ()
    return found


def test_the_engine_finds_its_runners_calibration(m1: Calibration) -> None:
    assert m1.where == load_calibration(STORE, "m1-ultra", "mlx", QWEN).where
    with pytest.raises(MoeplanError, match="m1-ultra"):
        find_calibration(STORE, "m1-ultra", find_engine("moeplan-triton", []), QWEN)


@pytest.mark.parametrize(("rows", "chain_s"), [(1, 3.07e-3), (2, 5.31e-3), (4, 9.71e-3), (8, 17.10e-3)])
def test_48_layers_cost_what_was_published(cost: ExpertCost, rows: int, chain_s: float) -> None:
    # lablup/mlxcel moe-batched-decode-m1ultra-2026-09-04: unsorted below 64 slots, sorted from there on.
    priced = cost(StepShape(rows, padded=rows), 0, 1)
    assert priced.seconds == pytest.approx(chain_s, rel=0.03)
    assert priced.low <= chain_s <= priced.high
    assert priced.source == "published"


def test_a_span_costs_what_its_steps_cost(cost: ExpertCost) -> None:
    step = StepShape(4, context=99, padded=4)
    assert cost(step, 5, 7).seconds == pytest.approx(sum(cost(step, 5 + i, 1).seconds for i in range(7)))


def test_prompts_are_priced_in_chunks_and_decode_steps_are_not(cost: ExpertCost) -> None:
    assert cost.chunk_rows == 8
    prompt = cost(StepShape(0, 0, (19,), 19, 19), 0, 1)
    assert prompt.seconds == pytest.approx(2 * cost.call(8).seconds + cost.call(3).seconds)
    with pytest.raises(MoeplanError, match=r"tokens 9 \(valid 1..8\)"):
        cost(StepShape(9, padded=9), 0, 1)
    beyond = ExpertCost(cost.groups, cost.path_at, under(replace(UNIFORM, extrapolate=True)))
    assert beyond(StepShape(9, padded=9), 0, 1).source == beyond.source == "extrapolated"


def test_padding_rows_are_paid(cost: ExpertCost) -> None:
    assert cost(StepShape(3, padded=4), 0, 1) == cost(StepShape(4, padded=4), 0, 1)


def test_two_groups_add(m1: Calibration, cost: ExpertCost) -> None:
    split = ExpertCost([LayerGroup(m1, 12), LayerGroup(m1, 36)], cost.path_at, cost.layer_price)
    assert split.call(4).seconds == pytest.approx(cost.call(4).seconds)
    assert split.call(4).high == pytest.approx(cost.call(4).high)


def test_default_gates_switch_at_64_slots() -> None:
    at = default_path(find_engine("mlx-lm", []))
    assert [at(rows, QWEN) for rows in (7, 8)] == ["gather", "gather_sorted"]
    two = LayerShape(2048, 768, 8, 2, AFFINE, AFFINE, AFFINE)
    assert [at(rows, two) for rows in (31, 32)] == ["gather", "gather_sorted"]


def test_an_untimed_path_is_declined_and_its_neighbour_stands_in(m1: Calibration) -> None:
    engine = find_engine("own", ["gather", "gather_sorted", "grouped:64"])
    assert isinstance(engine, Engine)
    found, declines = engine_cost([LayerGroup(m1, 48)], engine, under(UNIFORM))
    assert [decline.path for decline in declines] == ["grouped:64"]
    assert found.path_at(4, QWEN) == "gather"


@pytest.mark.parametrize("path", ["gather", "gather_sorted", "grouped:32", "someones_kernel"])
def test_expected_drivers_agree_with_drawn_batches(path: str) -> None:
    drivers = mean_drivers(UNIFORM, path, 40, QWEN)
    uniform = parse_routing("uniform", STORE)
    loads = [ExpertLoad.from_ids(draw_ids(uniform, 128, 8, 40, seed), 128) for seed in range(200)]
    assert drivers.slots == 320
    assert drivers.distinct == pytest.approx(np.mean([load.distinct for load in loads]), rel=0.01)
    rows = {"gather_sorted": 16, "grouped:32": 32}.get(path)
    blocks = np.mean([BlockTable.of(load, rows).count for load in loads]) if rows else 0.0
    assert drivers.blocks == pytest.approx(blocks, rel=0.01)


def test_a_closed_loop_on_it(cost: ExpertCost) -> None:
    done = simulate(closed_loop(4, 512, 128), Policy(16, 4), cost)
    step, prompt = cost.call(4).seconds, cost.split(4 * 511).seconds
    assert done.ttft_mean_s == pytest.approx(prompt + step)
    assert done.tpot_mean_s == pytest.approx(step)
    assert done.aggregate_tok_s == pytest.approx(4 * 128 / (prompt + 128 * step))
