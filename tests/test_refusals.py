"""Inputs that once passed, ended in a traceback, or lost a file."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moeplan.cost.calibrate import load_calibration
from moeplan.cost.samples import SampleFile
from moeplan.errors import MoeplanError
from moeplan.planning.prove import Trial, prove
from moeplan.planning.verify import judge
from moeplan.runners.arms import grid
from moeplan.runners.session import measure
from moeplan.runners.spec import MeasureRequest, RunnerSpec
from moeplan.store import Store
from moeplan.traffic.model import load_card
from tests.planning import TINY, write_calibration
from tests.test_verify import moved, plan_of


def test_a_time_that_is_not_positive_is_no_measured_point(tmp_path: Path) -> None:
    path = write_calibration(tmp_path, "box", "triton", TINY, {"p": lambda w: 1e-5 + 1e-6 * w.slots}, (1, 2, 3, 4))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if row["type"] == "time" and row["arm"] == "p/t2/uniform":
            row["long_s"] = row["short_s"] * 0.9
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_calibration(Store(calibration=tmp_path), "box", "triton", TINY)
    assert found.measured("p", 2, "uniform") is None
    assert found.measured("p", 3, "uniform") is not None


def test_a_trace_that_changed_is_not_the_same_arm(tmp_path: Path) -> None:
    def trace(first: int) -> None:
        ids = np.tile(np.arange(first, first + 4, dtype=np.uint8), (40, 1, 1))
        np.savez(tmp_path / "t.npz", expert_ids=ids, request_offsets=np.arange(0, 41, 4), num_experts=16)

    trace(0)
    arms = grid(["numpy"], TINY, (2,), (f"trace:{tmp_path / 't.npz'}",), 0, (1, 2))
    spec = RunnerSpec("python", kernel="examples.numpy_kernel:NumpyKernel")
    request = MeasureRequest("box", "m", TINY, arms, 1)
    measure(spec, request, tmp_path / "j.jsonl")
    before = (tmp_path / "j.jsonl").read_text()
    trace(4)
    with pytest.raises(MoeplanError, match="draws other experts"):
        measure(spec, replace(request, rounds=2), tmp_path / "j.jsonl")
    assert (tmp_path / "j.jsonl").read_text().startswith(before)


def test_a_verify_that_fails_leaves_the_last_verdict(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(plan_of([moved()], runner="exec")))
    for name in ("verdict.json", "verify.jsonl"):
        (tmp_path / name).write_text("old")
    with pytest.raises(MoeplanError):
        prove(plan, Trial(RunnerSpec("exec", command="false")))
    assert [(tmp_path / name).read_text() for name in ("verdict.json", "verify.jsonl")] == ["old", "old"]


def test_a_plan_without_a_crossing_was_not_tried() -> None:
    nothing = SampleFile(Path("x"), {}, ())
    assert judge(plan_of([moved(None, None)]), nothing, ())["outcome"] == "not tried"
    assert judge(plan_of([moved(None, None)]), nothing, (), replayed=True)["outcome"] == "replayed"


@pytest.mark.parametrize("keys", [{"layers": 5}, {"layers": [0]}, {"config_hashes": 5}, {"signatures": 5}])
def test_a_broken_plan_is_found_before_any_kernel_runs(tmp_path: Path, keys: dict[str, object]) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(plan_of([moved() | {"evidence": [5]}], **keys)))
    with pytest.raises(MoeplanError, match="not a complete plan"):
        prove(plan, Trial(RunnerSpec("exec", command="false")))


WRONG_TYPES = [{"hidden_act": ["silu"]}, {"quantization": {"mode": ["affine"], "bits": 4, "group_size": 64}}]


@pytest.mark.parametrize("change", WRONG_TYPES)
def test_a_config_of_the_wrong_types_is_one_line(tmp_path: Path, change: dict[str, object]) -> None:
    config = json.loads((Path(__file__).parent.parent / "examples/own-model/config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(MoeplanError, match=r"config\.json"):
        load_card(str(tmp_path / "config.json"), Store())


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--device", "../out"], "--device"),
        (["--device", "/abs"], "--device"),
        (["--path", "nope"], "--path nope"),
        (["--chain", "1,99999999999"], "--chain"),
    ],
)
def test_names_and_sizes_of_a_calibration_run(tmp_path: Path, words: list[str], named: str) -> None:
    given = {"--device": "box", "--chain": "1,2"} | dict([words])
    options = [word for pair in given.items() for word in pair]
    kernel = ["--runner", "python", "--kernel", "examples.numpy_kernel:NumpyKernel"]
    command = [sys.executable, "-m", "moeplan", "calibrate", "run", *kernel, "--model", "tiny-moe-4bit"]
    command += ["-o", str(tmp_path / "o"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert named in done.stderr
    assert not list(tmp_path.glob("o/*/*"))
