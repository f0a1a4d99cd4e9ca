"""Plans: the published M1 Ultra table, and synthetic calibrations whose best thresholds are known."""

import json
from dataclasses import replace
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeplan import report
from moeplan.cost.calibrate import write_fits
from moeplan.cost.model import Drivers
from moeplan.engines import find_engine
from moeplan.engines.chain import Engine
from moeplan.errors import MoeplanError
from moeplan.planning.mix import Traffic
from moeplan.planning.plan import Setting, recommend
from moeplan.planning.prices import Assumption, layer_price, mean_drivers, median_band
from moeplan.planning.setting import make_setting
from moeplan.planning.verify import routing_arm
from moeplan.store import Store
from moeplan.traffic.path import parse_path
from moeplan.traffic.routing import Routing, parse_routing
from moeplan.traffic.work import expected_work
from tests.planning import TINY, write_calibration

UNIFORM = Assumption(Routing("uniform"))
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def m1(clients: tuple[int, ...] = (1, 2, 4, 8, 16), **changes: Any) -> dict[str, Any]:
    setting = make_setting(
        Store(), "qwen3-30b-a3b-4bit", "m1-ultra", find_engine("mlx-lm", []), Traffic(clients), UNIFORM
    )
    return recommend(replace(setting, **changes))


def fused(work: Drivers) -> float:
    return 20e-6 + 2e-6 * work.slots


def grouped(work: Drivers) -> float:
    return 60e-6 + 4e-6 * work.distinct


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration folder whose fits are stored, so that they are made once."""
    folder = tmp_path_factory.mktemp("calibration")
    laws = {"fused": fused, "grouped:16": grouped, "grouped:64": lambda work: 2 * grouped(work)}
    write_fits(write_calibration(folder, "box", "triton", TINY, laws, SIZES).parent)
    return folder


def synthetic(folder: Path, engine: Engine | None = None) -> Setting:
    store, traffic = Store(calibration=folder), Traffic((1, 2, 4, 8, 16, 32), 32, 16)
    return make_setting(store, "tiny-moe-4bit", "box", engine or find_engine("moeplan-triton", []), traffic, UNIFORM)


def expected_crossing() -> int:
    """The first token count at which the blocks are faster, by the very laws of the synthetic calibration."""
    for tokens in range(1, 65):
        work = expected_work(parse_path("gather"), TINY, tokens, UNIFORM.routing)
        drivers = Drivers(tokens, work.slots, work.distinct_mean)
        if grouped(drivers) < fused(drivers):
            return tokens
    raise AssertionError


def test_m1_ultra_break_even_and_stakes() -> None:
    plan = m1()
    gate = plan["gates"][0]
    assert (gate["name"], gate["variable"], gate["default"]) == ("sort", "slots", 64)
    assert gate["break_even"] == pytest.approx(27, abs=1)
    assert gate["break_even_tokens"] == pytest.approx(3.4, abs=0.1)
    stakes = {row["tokens"]: row for row in gate["stakes"]}
    assert sorted(stakes) == [4, 5, 6, 7]  # from 8 tokens on the default sorts too
    assert (stakes[4]["source"], stakes[5]["source"]) == ("published", "fitted")
    assert stakes[4]["gain"] == pytest.approx(0.04, abs=0.005)
    assert [stakes[n]["saving"] for n in (5, 7)] == pytest.approx([0.06, 0.09], abs=0.005)
    assert gate["optimum"]["threshold"] == 32
    assert gate["optimum"]["gain_low"] < plan["floor"]
    assert gate["recommended"] == 64
    assert (gate["gain"], gate["gain_low"], gate["gain_high"]) == (0, 0, 0)
    assert [row["optimum"] for row in gate["robustness"]] == [32, 32, 32]  # time follows slots there


def test_m1_ultra_sizes_outside_the_table_are_declined_or_extrapolated() -> None:
    plan = m1()
    assert plan["predicted"][-1]["tokens"] == 8
    assert any("not planned" in no["reason"] and "16" in no["reason"] for no in plan["declines"])
    wide = m1(assumption=replace(UNIFORM, extrapolate=True))
    assert {row["source"] for row in wide["predicted"] if row["tokens"] > 8} == {"extrapolated"}
    only = m1((16,))
    assert only["total"]["gain"] == 0


def test_m1_ultra_without_a_floor_moves_to_32_slots() -> None:
    gate = m1(floor=-1.0)["gates"][0]
    assert (gate["recommended"], gate["first_tokens"], gate["changed_tokens"]) == (32, 4, [4])
    assert gate["gain"] == pytest.approx(0.0969 / 0.09305 - 1, abs=1e-4)


def test_the_crossing_of_a_synthetic_calibration_is_found(box: Path) -> None:
    plan = recommend(synthetic(box))
    cap, rows = plan["gates"]
    assert (cap["name"], cap["default"], cap["recommended"]) == ("n_tokens", 2, expected_crossing())
    assert cap["gain_low"] > plan["floor"]
    assert cap["gain_low"] < cap["gain"] < cap["gain_high"]
    assert abs(cap["break_even_tokens"] - expected_crossing()) < 1
    assert (rows["below"], rows["above"], rows["recommended"]) == ("grouped:16", "grouped:64", 97)
    assert plan["total"]["recommended_s"] < plan["total"]["default_s"]
    assert plan["total"]["regret"] == pytest.approx(0, abs=1e-3)
    assert [no["path"] for no in plan["declines"][:2]] == ["grouped:32", "grouped:128"]
    by_tokens = {row["tokens"]: row for row in plan["predicted"]}
    assert by_tokens[3]["default_path"] == "grouped:16"
    assert by_tokens[3]["path"] == "fused"
    assert set(range(1, 65)) <= set(by_tokens)


def test_skew_and_cohort_move_the_gate(box: Path) -> None:
    """Fewer distinct experts make the blocks pay earlier: identical requests first of all."""
    setting = synthetic(box)
    routings = {(row["routing"], row["cohort"]): row["optimum"] for row in recommend(setting)["gates"][0]["robustness"]}
    assert routings["uniform", "identical"] < routings["uniform", "independent"]
    own = recommend(replace(setting, assumption=replace(UNIFORM, cohort="identical")))
    assert own["keys"]["cohort"] == "identical"
    assert own["gates"][0]["optimum"]["threshold"] == routings["uniform", "identical"]


@pytest.fixture
def streams(tmp_path: Path) -> Path:
    """40 requests of 12 rows; each stays with one of four sets of experts, so that its own rows wake nothing new."""
    ids = np.arange(16, dtype=np.uint8).reshape(4, 1, 4)[np.repeat(np.arange(40) % 4, 12)]
    np.savez(tmp_path / "t.npz", expert_ids=ids, request_offsets=np.arange(0, 481, 12), num_experts=16)
    return tmp_path / "t.npz"


def test_a_cohort_of_a_trace_reaches_the_plan_and_moves_its_gate(box: Path, streams: Path) -> None:
    where, engine, traffic = Store(calibration=box), find_engine("moeplan-triton", []), Traffic((1, 2, 4, 8), 16, 8)
    plans = {}
    for cohort in ("independent", "stream:4", "staggered:1"):
        assumption = Assumption(parse_routing(f"trace:{streams}", where), cohort)
        plans[cohort] = recommend(make_setting(where, "tiny-moe-4bit", "box", engine, traffic, assumption))
    crossings = {cohort: plan["gates"][0]["break_even_tokens"] for cohort, plan in plans.items()}
    assert crossings["stream:4"] < crossings["independent"]
    # 60 us + 4 us x 4 distinct = 20 us + 2 us x 4 slots a token: one request's rows wake one set
    assert crossings["staggered:1"] == pytest.approx(7.0, abs=0.05)
    assert plans["stream:4"]["keys"]["cohort"] == "stream:4"
    assert routing_arm(plans["stream:4"]) == f"trace:{streams}@stream:4"
    timed = {row["source"] for row in plans["stream:4"]["predicted"] if row["path"] == "grouped:16"}
    assert timed == {"fitted"}  # no point of that cohort was timed


@pytest.mark.parametrize(
    ("routing", "cohort", "words"),
    [
        ("uniform", "stream:4", "needs --routing trace:FILE; uniform knows no requests"),
        ("uniform", "odd", "expected independent, identical"),
        ("trace:{}", "2xindependent+1xstream:2", "a mixture has 4 rows and no other number"),
        ("trace:{}@stream:2", "stream:4", "names a cohort already"),
        ("trace:{}@2xindependent", "independent", "a mixture has 2 rows"),
    ],
)
def test_a_cohort_that_the_routing_cannot_show_is_refused(
    box: Path, streams: Path, routing: str, cohort: str, words: str
) -> None:
    where = Store(calibration=box)
    assumption = Assumption(parse_routing(routing.format(streams), where), cohort)
    with pytest.raises(MoeplanError, match=words):
        make_setting(where, "tiny-moe-4bit", "box", find_engine("moeplan-triton", []), Traffic((1,)), assumption)


def test_the_same_inputs_give_the_same_bytes(box: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        report.write_plan(tmp_path / name, recommend(synthetic(box)))
    for file in ("plan.json", "report.md", "gates.toml"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_changed_samples_change_the_digest(tmp_path: Path) -> None:
    own, found = find_engine("own", ["fused", "grouped:16"]), []
    for jitter in (0.001, 0.002):
        folder = tmp_path / str(jitter)
        write_calibration(folder, "box", "triton", TINY, {"fused": fused, "grouped:16": grouped}, (1, 2, 3, 4), jitter)
        found.append(recommend(replace(synthetic(folder, own), alternatives=()))["keys"])
    one, two = found
    assert one["fits_sha256"] != two["fits_sha256"]
    assert {**one, "fits_sha256": ""} == {**two, "fits_sha256": ""}
    assert one["config_hashes"]["fused"] == ["hash of fused"]
    assert one["signatures"]["grouped:16"] == ["kernel grouped of 16, grid #"]


def test_brought_kernels_are_planned_like_any_other(box: Path) -> None:
    plan = recommend(synthetic(box, find_engine("own", ["fused", "grouped:16"])))
    gate = plan["gates"][0]
    assert (gate["default"], gate["recommended"]) == (None, expected_crossing())
    assert plan["keys"]["runner"] == "triton"
    with pytest.raises(MoeplanError, match="other"):
        recommend(synthetic(box, find_engine("own", ["fused", "other"])))


def test_timed_points_answer_with_the_band_of_their_median(box: Path) -> None:
    group = synthetic(box).groups[0]
    samples = [s for s in group.calibration.samples if (s.path, s.tokens, s.routing) == ("grouped:16", 8, "uniform")]
    found = layer_price(group, "grouped:16", 8, UNIFORM)
    assert (found.source, found.seconds) == ("measured", samples[0].median)
    assert layer_price(group, "grouped:16", 8, replace(UNIFORM, points=False)).source == "fitted"
    assert layer_price(group, "grouped:16", 9, UNIFORM).source == "fitted"


@pytest.mark.parametrize(("n", "ends"), [(4, None), (5, (0, 4)), (8, (1, 6)), (20, (5, 14))])
def test_order_statistics_around_a_median(n: int, ends: tuple[int, int] | None) -> None:
    """Against counting: the share of coin tosses in which the median lies outside must be at most a tenth."""
    found = median_band([float(value) for value in reversed(range(n))])
    assert found == ends
    if ends:
        outside = [heads for heads in range(n + 1) if not ends[0] < heads < n - ends[0]]
        assert sum(comb(n, heads) for heads in outside) / 2**n <= 0.1


def test_the_plan_is_json_and_the_report_holds_the_gates(box: Path) -> None:
    plan = recommend(synthetic(box))
    assert json.loads(json.dumps(plan, allow_nan=False)) == plan
    text = report.markdown(plan)
    assert f"tokens 2 -> {plan['gates'][0]['recommended']}" in text
    assert "97 (kept)" in text
    import tomllib

    gates = tomllib.loads(report.toml(plan))
    assert gates["n_tokens"]["threshold"] == plan["gates"][0]["recommended"]


def test_mean_drivers_are_those_of_expected_work() -> None:
    for name, path in (("uniform", "gather"), ("uniform", "grouped:16"), ("popularity:gpt-oss-20b", "grouped:16")):
        assumption = Assumption(parse_routing(name, Store()))
        for tokens in (1, 16, 17, 100):
            work = expected_work(parse_path(path), TINY, tokens, assumption.routing)
            found = mean_drivers(assumption, path, tokens, TINY)
            assert (found.slots, found.distinct) == pytest.approx((work.slots, work.distinct_mean))
            assert found.blocks == pytest.approx(work.blocks if path != "gather" else 0.0)


def test_unknown_things_are_one_line() -> None:
    mlx = find_engine("mlx-lm", [])
    for model, device in (("qwen3-30b-a3b-4bit", "no-such"), ("no-such", "m1-ultra"), ("llama-3.1-8b", "m1-ultra")):
        with pytest.raises(MoeplanError) as bad:
            make_setting(Store(), model, device, mlx, Traffic((1,)), UNIFORM)
        assert "\n" not in str(bad.value)
    with pytest.raises(MoeplanError, match="clients"):
        m1(())
