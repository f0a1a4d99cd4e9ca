"""The worked examples of docs/bring-your-own-kernel.md, run as the page says, and a Python kernel that aborts."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.numpy_kernel import NumpyKernel
from moeplan.cost.samples import load
from moeplan.kernels.protocol import Arm, IntArray
from moeplan.runners import host
from moeplan.runners.anchor import anchor
from moeplan.runners.arms import draw, request_line
from moeplan.runners.session import describe, measure
from moeplan.runners.spec import MeasureRequest, RunnerSpec, make_arm
from moeplan.runners.worker import Worker
from moeplan.store import Store
from moeplan.traffic.routing import parse_routing
from moeplan.traffic.shape import LayerShape, WeightFormat

ROOT = Path(__file__).resolve().parent.parent
FORM = WeightFormat.parse("f32")
SHAPE = LayerShape(32, 16, 8, 2, FORM, FORM, FORM)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    program = tmp_path_factory.mktemp("toy") / "toy_kernel"
    source = ROOT / "examples" / "toy_kernel.c"
    subprocess.run([compiler, "-O3", "-Wall", "-Werror", "-o", program, source, "-lm"], check=True)
    return program


def calibrate(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, "-m", "moeplan", "calibrate", "run", "--device", "toy", "--model", "tiny-moe-4bit",
        "--routing", "uniform", "--rounds", "2", "--chain", "1,3", "-o", str(folder), *words,
    ]  # fmt: skip
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_c_program_names_its_paths_and_is_calibrated(toy: Path, tmp_path: Path) -> None:
    assert describe(RunnerSpec("exec", command=str(toy)))["paths"] == ["per_slot", "decode_first"]
    done = calibrate(tmp_path, "--runner", "exec", "--command", str(toy), "--tokens", "1,5", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert {(row["path"], row["tokens"]) for row in document["samples"]} == {
        (path, tokens) for path in ("per_slot", "decode_first") for tokens in (1, 5)
    }
    assert document["lost"] == []
    for sample in load(Path(document["journal"])).samples:
        assert sample.signature == f"toy {sample.path}"
        assert sample.parity_rms is not None
        assert 0 < sample.parity_rms < 1e-4  # sums of float32, not a copied number


def test_the_c_program_really_follows_the_ids(toy: Path, tmp_path: Path) -> None:
    """Its work grows with the layers and the tokens of the ids file: the answer to too short a file is no answer."""
    (tmp_path / "ids").write_bytes(b"")
    arm = {"arm": "a", "chain": [1, 3], "ids_file": str(tmp_path / "ids"), "path": "per_slot", "tokens": 1}
    arm["shape"] = {"experts": 16, "hidden": 8, "top_k": 2}  # type: ignore[assignment]
    line = json.dumps(arm, sort_keys=True) + "\n"
    done = subprocess.run([toy], input=line, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""


def test_the_numpy_kernel_is_calibrated(tmp_path: Path) -> None:
    kernel = "examples.numpy_kernel:NumpyKernel"
    done = calibrate(tmp_path, "--runner", "python", "--kernel", kernel, "--tokens", "1,3")
    assert done.returncode == 0, done.stderr
    found = load(tmp_path / "toy" / "python-local" / "tiny-moe-4bit.jsonl")
    assert {(sample.path, sample.tokens) for sample in found.samples} == {("numpy", 1), ("numpy", 3)}
    assert all(sample.parity_rms is not None and sample.parity_rms < 1e-5 for sample in found.samples)


@pytest.mark.parametrize(("name", "comment"), [("numpy_kernel.py", r'"""'), ("toy_kernel.c", r"/\*|#include")])
def test_the_examples_stay_under_thirty_lines(name: str, comment: str) -> None:
    text = (ROOT / "examples" / name).read_text(encoding="utf-8").splitlines()
    assert len([line for line in text if line.strip() and not re.match(comment, line)]) < 30


ABORTING = """
import os
from examples.numpy_kernel import NumpyKernel

class Fragile(NumpyKernel):
    name = "fragile"

    def declines(self, shape, tokens):
        return "seven is odd" if tokens == 7 else None

    def run(self, state, layers):
        if len(state[1]) == 2:
            os.abort()
        print("noise on standard output")
        super().run(state, layers)

    def layer(self, state, x, ids, scores):
        y = super().layer(state, x, ids, scores)
        return y * 1.5 if len(x) == 3 else y
"""


def test_a_kernel_that_aborts_declines_or_is_wrong_costs_one_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fragile.py").write_text(ABORTING)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    arms = tuple(make_arm("fragile", SHAPE, tokens, "uniform", 0, (1, 2)) for tokens in (1, 2, 3, 4, 7))
    request = MeasureRequest("toy", "toy", SHAPE, arms, rounds=2)
    found = measure(RunnerSpec("python", kernel="fragile:Fragile"), request, tmp_path / "j")
    assert sorted((sample.tokens, len(sample.short_s)) for sample in found.samples) == [(1, 2), (4, 2)]
    reasons = {arm.split("/")[1]: reason for arm, reason in found.failed.items()}
    assert reasons.keys() == {"t2", "t3"}
    assert "killed by SIGABRT" in reasons["t2"]
    assert "parity: relative RMS" in reasons["t3"]
    assert list(found.declined.values()) == ["seven is odd"]


class Counting(NumpyKernel):  # type: ignore[misc]
    def __init__(self) -> None:
        self.prepared = 0
        self.lengths: list[int] = []

    def prepare(self, arm: Arm, ids: IntArray) -> Any:
        self.prepared += 1
        return super().prepare(arm, ids)

    def run(self, state: Any, layers: int) -> float:
        self.lengths.append(layers)
        return layers * 1.0  # one second a layer, slow enough not to be warmed up again


def test_the_worker_prepares_once_warms_up_once_and_keeps_the_kernels_own_seconds(tmp_path: Path) -> None:
    kernel = Counting()
    worker = Worker("python", {"numpy": lambda: kernel}, {})
    arm = make_arm("numpy", SHAPE, 2, "uniform", 0, (2, 5))
    (tmp_path / "ids").write_bytes(draw(arm, parse_routing("uniform", Store())).tobytes())
    answers = [worker.answer(request_line(arm, str(tmp_path / "ids"), round_)) for round_ in range(3)]
    assert kernel.prepared == 1
    assert kernel.lengths == [5, 2, 2, 5, 2, 5, 2, 5]
    for answer in answers:
        assert (answer["short_s"], answer["long_s"]) == (2.0, 5.0)
        assert 0 < answer["wall_long_s"] < 1
        assert answer["parity_rms"] < 1e-5
    assert worker.answer(request_line(replace(arm, path="other"), "", 0))["declined"].startswith("no path 'other'")
    assert "error" in worker.answer({"arm": "broken", "path": "numpy"})


def test_the_anchor_is_a_real_copy() -> None:
    found = anchor("python")
    assert found["anchor_bytes"] == 1 << 27
    assert found["copy_bytes_per_s"] > found["anchor_bytes"] / 60
    assert found["read_bytes_per_s"] > found["anchor_bytes"] / 60


def test_clocks_are_read_where_there_is_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert host.clocks() is None
    assert host.driver() is None
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '1980, 3201, 0x0000000000000004, 34, [N/A]'\n")
    tool.chmod(0o755)
    assert host.clocks() == {
        "sm_mhz": 1980.0, "memory_mhz": 3201.0, "throttle_reasons": "0x0000000000000004", "temperature_c": 34.0,
        "power_w": None,
    }  # fmt: skip
    assert host.driver() is None  # five values for one question: not understood, so not told
