"""Verdicts: judged on samples made by hand, replayed, and on real kernels (MLX on the CPU, a C program)."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from moeplan import report
from moeplan.cost.calibrate import write_fits
from moeplan.cost.samples import Sample, SampleFile
from moeplan.engines import find_engine
from moeplan.errors import MoeplanError
from moeplan.kernels.protocol import Arm
from moeplan.planning.mix import Traffic
from moeplan.planning.plan import recommend
from moeplan.planning.prices import Assumption
from moeplan.planning.prove import Trial, prove
from moeplan.planning.setting import choose_engine, make_setting
from moeplan.planning.verify import OUTCOMES, arms_of, combine, crossings, judge, refuse
from moeplan.runners.arms import grid
from moeplan.runners.session import measure
from moeplan.runners.spec import MeasureRequest, RunnerSpec
from moeplan.store import Store
from moeplan.traffic.routing import Routing
from tests.planning import TINY, write_calibration

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def plan_of(gates: Sequence[dict[str, Any]], **keys: Any) -> dict[str, Any]:
    """A plan document with as much in it as verify reads."""
    rows = [{"variable": "tokens", "source": "test", "evidence": []} | gate for gate in gates]
    facts = {
        "shape": TINY.to_dict(), "layers": [48], "routing": "uniform", "cohort": "independent", "device": "box",
        "runner": "triton", "engine_version": "1.0", "device_reported": "a box", "driver": "d1",
        "config_hashes": {}, "signatures": {},
    } | keys  # fmt: skip
    return {"schema": "moeplan.plan/1", "model": "m", "device": "box", "floor": 0.02, "keys": facts, "gates": rows}


def moved(recommended: int | None = 5, default: int | None = 2) -> dict[str, Any]:
    return {"name": "g", "below": "a", "above": "b", "default": default, "recommended": recommended}


def sample(arm: Arm, seconds: float, spread: float = 0.0, **changes: Any) -> Sample:
    """Eight rounds whose half interquartile range is `spread`."""
    layers = [seconds + (0.8 if i % 2 else -0.8) * spread * (1 + i // 2 * 0.0) for i in range(8)]
    facts: dict[str, Any] = {"signature": f"kernel {arm.path}", "parity_rms": 0.001} | changes
    return Sample(
        arm.id, arm.path, arm.shape, arm.tokens, arm.routing, arm.seed, (0, 1), 8.0, 8.0, {},
        (0.0,) * 8, tuple(layers), **facts,
    )  # fmt: skip


def verdict(
    times: dict[tuple[str, int], float | None],
    plan: dict[str, Any] | None = None,
    spread: float = 0.0,
    seeds: Sequence[int] = (1,),
    **changes: Any,
) -> dict[str, Any]:
    """Judge a plan on these times; None = the arm failed. `by_draw` adds seconds to path b, a value a seed."""
    plan = plan or plan_of([moved()])
    found, _ = crossings(plan)
    arms = arms_of(plan, found, seeds, (1, 2))
    samples, failed = [], {}
    for arm in arms:
        seconds = times[arm.path, arm.tokens]
        if seconds is not None and arm.path == "b" and "by_draw" in changes:
            seconds += changes["by_draw"][seeds.index(arm.seed)]
        if seconds is None:
            failed[arm.id] = changes.get("reason", "killed by SIGABRT")
        else:
            own = {
                key: value[arm.path]
                for key, value in changes.items()
                if key not in ("reason", "by_draw") and arm.path in value
            }
            samples.append(sample(arm, seconds, spread, **own))
    return judge(plan, SampleFile(Path("x"), {}, tuple(samples), failed), arms)


GOOD = {("a", 4): 1.0, ("b", 4): 1.1, ("a", 5): 1.2, ("b", 5): 1.1, ("a", 6): 1.4, ("b", 6): 1.1}


def test_a_plan_that_holds_is_confirmed_row_by_row() -> None:
    found = verdict(GOOD)
    assert found["outcome"] == "confirmed"
    assert [(row["tokens"], row["path"], row["role"]) for row in found["verdicts"]] == [
        (4, "a", "recommended"), (4, "b", "other"), (5, "b", "recommended"), (5, "a", "other"),
        (6, "b", "recommended"), (6, "a", "other"),
    ]  # fmt: skip
    assert {row["outcome"] for row in found["verdicts"]} == {"confirmed"}
    assert found["verdicts"][0]["measured_s"] == 1.0


def test_slower_beyond_the_noise_is_refuted_and_within_it_is_not() -> None:
    assert verdict(GOOD | {("b", 4): 0.9})["outcome"] == "refuted"
    assert verdict(GOOD | {("b", 4): 0.998})["outcome"] == "confirmed"  # 0.2 % is below the resolution
    same = {key: 1.0 for key in GOOD}
    assert verdict(same)["outcome"] == "within noise"
    assert verdict(GOOD | {("b", 4): 0.95}, spread=0.08)["outcome"] == "confirmed"
    assert verdict(GOOD, spread=0.5)["outcome"] == "within noise"


def test_a_lead_must_hold_over_the_routing_draws() -> None:
    slower = GOOD | {("b", 4): 0.96}  # 4 % faster than the recommended path, if every draw agrees
    assert verdict(slower, seeds=(1, 2, 3), by_draw=(0.0, 0.001, -0.001))["outcome"] == "refuted"
    found = verdict(slower, seeds=(1, 2, 3), by_draw=(-0.03, 0.09, -0.06))
    assert [row["outcome"] for row in found["verdicts"]][:2] == ["within noise"] * 2
    assert found["verdicts"][1]["draws_s"] == pytest.approx([0.93, 1.05, 0.90])
    assert found["verdicts"][1]["measured_s"] == pytest.approx(0.96)


def test_a_default_that_was_kept_may_lose_the_floor_but_no_more() -> None:
    kept = plan_of([moved(5, 5)])
    assert verdict(GOOD | {("b", 4): 0.985}, kept)["outcome"] == "confirmed"
    assert verdict(GOOD | {("b", 4): 0.985})["outcome"] == "refuted"
    assert verdict(GOOD | {("b", 4): 0.9}, kept)["outcome"] == "refuted"


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"signature": {"b": "kernel a"}}, "not reached"),
        ({"signature": {"b": ""}}, "not reached"),
        ({"parity_rms": {"b": 0.5}}, "wrong"),
        ({"parity_rms": {"b": float("nan")}}, "wrong"),
    ],
)
def test_a_time_without_proof_is_no_time(changes: dict[str, Any], outcome: str) -> None:
    assert verdict(GOOD, **changes)["outcome"] == outcome


def test_another_kernel_than_the_calibrated_one_is_not_reached() -> None:
    known = plan_of([moved()], signatures={"a": ["kernel a"], "b": ["kernel b of 16"]})
    assert verdict(GOOD, known, signature={"b": "kernel b of 64"})["outcome"] == "not reached"
    assert verdict(GOOD, known, signature={"b": "kernel b of 16"})["outcome"] == "confirmed"


def test_lost_arms_are_failed_and_lost_parity_is_wrong() -> None:
    assert verdict(GOOD | {("b", 5): None})["outcome"] == "failed"
    assert verdict(GOOD | {("b", 5): None}, reason="parity: relative RMS 0.5")["outcome"] == "wrong"


def test_the_worst_outcome_counts_and_one_win_confirms() -> None:
    assert combine(["within noise", "confirmed", "within noise"]) == "confirmed"
    assert combine(["confirmed", "refuted"]) == "refuted"
    for outcome in OUTCOMES:
        assert combine([outcome]) == outcome
        assert combine([outcome, "wrong"]) == "wrong"


def test_crossings_in_tokens_whatever_the_gate_counts() -> None:
    slots = moved(27, 64) | {"variable": "slots"}  # top 4: 24 slots at 6 tokens, 28 at 7
    found, _ = crossings(plan_of([slots]))
    assert (found[0].first, found[0].tokens, found[0].kept) == (7, (6, 7, 8), False)
    assert found[0].sides(6) == ("a", "b")
    assert found[0].sides(7) == ("b", "a")


def test_gates_that_decide_nothing_are_not_tried() -> None:
    for gate, word in ((moved(None, None), "never"), (moved(1), "every size")):
        found, idle = crossings(plan_of([gate]))
        assert not found
        assert word in idle[0]["reason"]
    behind = {"name": "h", "below": "b", "above": "c", "default": 3, "recommended": 3}
    found, idle = crossings(plan_of([moved(8), behind]))  # at 8 tokens the chain goes from a to c at once
    assert [(c.gate, c.low, c.high) for c in found] == [("g", "a", "c")]
    assert idle[0]["gate"] == "h"


HERE = {"runner": "triton", "engine_version": "1.0", "device_reported": "a box", "driver": "d1"}


@pytest.mark.parametrize("key", sorted(HERE))
def test_another_machine_is_refused(key: str) -> None:
    plan = plan_of([moved()])
    refuse(plan, HERE, None)
    with pytest.raises(MoeplanError, match=key):
        refuse(plan, HERE | {key: "other"}, None)


def test_a_published_calibration_wants_the_device_named() -> None:
    plan = plan_of([moved()], device_reported=None, driver="")
    refuse(plan, HERE, "box")
    for device in (None, "other"):
        with pytest.raises(MoeplanError, match="--device"):
            refuse(plan, HERE, device)


BROKEN = ("{", "[]", "{}", json.dumps(plan_of([{"name": "g"}])), json.dumps(plan_of([moved()]) | {"keys": {}}))


@pytest.mark.parametrize("text", BROKEN)
def test_what_is_no_plan_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(MoeplanError) as bad:
        prove(path, Trial(None))
    assert str(path) in str(bad.value)


def planned(calibration: Path, model: str, engine: str, paths: list[str], output: Path, device: str = "box") -> Path:
    setting = make_setting(
        Store(calibration=calibration), model, device, choose_engine(engine, paths, None), Traffic((1, 4, 8), 16, 16),
        Assumption(Routing("uniform")),
    )  # fmt: skip
    report.write_plan(output, recommend(setting))
    return output / "plan.json"


def test_replay_answers_from_stored_samples_and_confirms_nothing(tmp_path: Path) -> None:
    laws = {"fused": lambda w: 1e-5 + 1e-6 * w.slots, "grouped:16": lambda w: 4e-5 + 1e-7 * w.slots}
    write_fits(write_calibration(tmp_path / "c", "box", "triton", TINY, laws, range(1, 13)).parent)
    plan = planned(tmp_path / "c", "tiny-moe-4bit", "moeplan-triton", [], tmp_path / "p")
    assert json.loads(plan.read_text())["gates"][0]["recommended"] == 9  # 4 slots a token: 36 slots > 33.3
    found = prove(plan, Trial(None, Store(calibration=tmp_path / "c")))
    assert found["outcome"] == "replayed"
    assert {row["tokens"] for row in found["verdicts"]} == {8, 9, 10}
    assert all(row["measured_s"] == pytest.approx(row["predicted_s"], rel=0.01) for row in found["verdicts"])
    assert json.loads((tmp_path / "p" / "verdict.json").read_text()) == found


def calibrated(folder: Path, spec: RunnerSpec, paths: list[str], tokens: Sequence[int], rounds: int) -> Path:
    """A real run of the calibrator into a folder, with stored fits."""
    arms = grid(paths, TINY, tokens, ("uniform", "identical"), 0, (1, 4))
    request = MeasureRequest("box", "tiny-moe-4bit", TINY, arms, rounds)
    from moeplan.runners.session import describe

    directory = folder / "box" / f"{spec.runner}-{describe(spec)['engine_version']}"
    measure(spec, request, directory / "tiny-moe-4bit.jsonl")
    write_fits(directory)
    return folder


def holds(found: dict[str, Any], paths: set[str]) -> None:
    """Parity held, the right kernels ran, and the outcome is a measurement's. No times: this machine is shared."""
    assert found["outcome"] in ("confirmed", "refuted", "within noise"), found
    assert {row["path"] for row in found["verdicts"]} == paths
    for row in found["verdicts"]:
        assert row["parity_rms"] <= 1e-2
        assert row["signature"]
        assert row["measured_s"] > 0
        assert row["rounds"] == 4
    assert found["runner"] != "replay"


def test_real_mlx_kernels_on_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("mlx.core")
    spec = RunnerSpec("mlx")
    calibrated(tmp_path / "c", spec, ["gather", "gather_sorted"], (1, 2, 17), 4)
    plan = planned(tmp_path / "c", "tiny-moe-4bit", "mlx-lm", [], tmp_path / "p")
    if not crossings(json.loads(plan.read_text()))[0]:  # whatever was measured, sort from 16 tokens on
        text = json.loads(plan.read_text())
        text["gates"][0]["recommended"] = 64
        plan.write_text(json.dumps(text))
    found = prove(plan, Trial(spec, Store(calibration=tmp_path / "c"), 4, (1, 4), draws=2))
    holds(found, {"gather", "gather_sorted"})
    other = json.loads(plan.read_text())
    other["keys"]["engine_version"] = "0.0.1"
    plan.write_text(json.dumps(other))
    with pytest.raises(MoeplanError, match="engine_version"):
        prove(plan, Trial(spec))


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_c_program_gets_its_gate_and_is_verified(tmp_path: Path) -> None:
    program = tmp_path / "toy"
    subprocess.run(["cc", "-O3", str(EXAMPLES / "toy_kernel.c"), "-o", str(program), "-lm"], check=True)
    spec = RunnerSpec("exec", command=str(program))
    paths = ["per_slot", "decode_first"]
    calibrated(tmp_path / "c", spec, paths, (1, 2, 4, 8, 16, 24), 4)
    plan = planned(tmp_path / "c", "tiny-moe-4bit", "own", paths, tmp_path / "p")
    text = json.loads(plan.read_text())
    gate = text["gates"][0]
    assert (gate["below"], gate["above"], gate["default"]) == ("per_slot", "decode_first", None)
    assert gate["evidence"]
    if gate["recommended"] in (None, 1):  # a noisy machine: the crossing is tried all the same
        gate["recommended"] = 8
        plan.write_text(json.dumps(text))
    trial = Trial(spec, Store(calibration=tmp_path / "c"), 4, (1, 4), draws=2)
    holds(prove(plan, trial), set(paths))
    first = (plan.parent / "verify.jsonl").read_text()
    holds(prove(plan, trial), set(paths))  # a finished run starts anew
    assert (plan.parent / "verify.jsonl").read_text() != first


def test_engines_are_found_by_runner() -> None:
    assert choose_engine("own", ["a", "b"], "exec").runners == ("exec",)
    with pytest.raises(MoeplanError, match="runner"):
        choose_engine("mlx-lm", [], "triton")
    assert find_engine("mlx-lm", []).runners == ("mlx",)
