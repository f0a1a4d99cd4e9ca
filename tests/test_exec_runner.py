"""The worked examples of docs/bring-your-own-kernel.md, run as the page says, and a Python kernel that aborts."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moeplan.cost.samples import load
from moeplan.runners.session import describe, measure
from moeplan.runners.spec import MeasureRequest, RunnerSpec, make_arm
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
