"""`recommend`, `verify` and `demo` as typed: documents, texts, exit statuses."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from moeplan.__main__ import main
from moeplan.cost.calibrate import write_fits
from moeplan.traffic.shape import LayerShape
from tests.planning import AFFINE, write_calibration

QWEN = LayerShape(2048, 768, 128, 8, AFFINE, AFFINE, AFFINE)
M1 = ["recommend", "qwen3-30b-a3b-4bit", "--device", "m1-ultra", "--engine", "mlx-lm"]

# Speaks the exec protocol with times of its own (ms, n tokens): `a` 0.5 + n, `b` 4.5 + 0.1 n: they cross at 5 tokens.
PROGRAM = """
import json, sys
for line in sys.stdin:
    ask = json.loads(line)
    if "tokens" not in ask:
        facts = {"paths": ["a", "b"], "device": "pencil", "engine_version": "7"}
        print(json.dumps({"arm": ask["arm"]} | facts), flush=True)
        continue
    n = ask["tokens"]
    layer = 0.5e-3 + 1e-3 * n if ask["path"] == "a" else 4.5e-3 + 0.1e-3 * n
    layer *= 1 + 1e-4 * (ask["round"] % 4)
    answer = {"short_s": ask["chain"][0] * layer, "long_s": ask["chain"][1] * layer, "parity_rms": RMS}
    print(json.dumps({"arm": ask["arm"], "signature": SIGNATURE} | answer), flush=True)
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["moeplan", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return call


def program(folder: Path, rms: str = "0.001", signature: str = '"ran " + ask["path"]') -> str:
    path = folder / "program.py"
    path.write_text(PROGRAM.replace("RMS", rms).replace("SIGNATURE", signature))
    return f"{sys.executable} {path}"


@pytest.fixture
def pencil(run: Any, tmp_path: Path) -> Path:
    """A plan for a program with known times, made by the commands alone."""
    command = ["--runner", "exec", "--command", program(tmp_path)]
    own = ["--model", "tiny-moe-4bit", "--device", "desk", "--tokens", "1-8,16", "--routing", "uniform,identical"]
    status, _, err = run("calibrate", "run", *command, *own, "-o", str(tmp_path / "c"), "--rounds", "4")
    assert status == 0, err
    folder = ["--calibration", str(tmp_path / "c")]
    traffic = ["--clients", "1,4,8", "--prompt-tokens", "8", "--max-tokens", "8", "-o", str(tmp_path / "p")]
    paths = ["--engine", "own", "--path", "a,b"]
    status, out, err = run("recommend", "tiny-moe-4bit", "--device", "desk", *paths, *traffic, *folder, "--json")
    assert status == 0, err
    assert json.loads(out)["gates"][0]["recommended"] == 5
    return tmp_path / "p" / "plan.json"


def test_recommend_prints_one_document_and_writes_the_same(run: Any, tmp_path: Path) -> None:
    status, out, _ = run(*M1, "--json", "-o", str(tmp_path / "plan"))
    plan = json.loads(out)
    assert status == 0
    assert plan == json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert sorted(path.name for path in (tmp_path / "plan").iterdir()) == ["gates.toml", "plan.json", "report.md"]
    assert {"schema", "model", "device", "engine", "keys", "mix", "gates", "declines", "predicted"} <= set(plan)
    assert {
        "name", "variable", "default", "recommended", "below", "above", "gain", "gain_low", "gain_high", "regret",
        "evidence", "reason",
    } <= set(plan["gates"][0])  # fmt: skip
    assert {"tokens", "default_path", "default_s", "path", "seconds", "low", "high"} <= set(plan["predicted"][0])


def test_recommend_says_it_in_words(run: Any, tmp_path: Path) -> None:
    status, out, err = run(*M1, "-o", str(tmp_path))
    assert status == 0
    for text in (out, (tmp_path / "report.md").read_text()):
        assert "slots 64 (kept)" in text
        assert "+4.1 % with `gather_sorted` at 4 tokens" in text
        assert "5..7 tokens" in text
        assert "fitted, not measured" in text
        assert "from 8 tokens on, where the default runs `gather_sorted` too" in text
    assert "not planned" in err


@pytest.mark.parametrize(
    "words",
    [
        ["recommend", "no-such-model", *M1[2:]],
        [*M1[:3], "no-such-device", *M1[4:]],
        [*M1[:5], "no-such-engine"],
        [*M1, "--path", "gather"],
        [*M1, "--clients", "0"],
        [*M1, "--clients", "x"],
        [*M1, "--routing", "sideways"],
        [*M1, "--routing", "disjoint", "--clients", "1", "--tp", "2"],
        [*M1, "--ep", "2"],
        [*M1, "-o", "/proc/nowhere"],
        [*M1[:5], "moeplan-triton"],
        [*M1[:5], "own", "--path", "gather"],
        ["verify", "no-such-plan.json", "--runner", "replay"],
    ],
)
def test_wrong_input_is_one_line_and_status_2(run: Any, words: list[str]) -> None:
    status, out, err = run(*words)
    assert status == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_a_plan_that_holds_is_confirmed(run: Any, pencil: Path, tmp_path: Path) -> None:
    words = ["verify", str(pencil), "--runner", "exec", "--command", program(tmp_path), "--rounds", "4"]
    status, out, _ = run(*words, "--json")
    found = json.loads(out)
    assert (status, found["outcome"]) == (0, "confirmed")
    assert found == json.loads((pencil.parent / "verdict.json").read_text())
    assert {row["tokens"] for row in found["verdicts"]} == {4, 5, 6}
    fields = {"gate", "tokens", "path", "signature", "parity_rms", "predicted_s", "measured_s", "spread", "outcome"}
    for row in found["verdicts"]:
        assert fields <= set(row)
        n = row["tokens"]
        assert row["measured_s"] == pytest.approx(
            0.5e-3 + 1e-3 * n if row["path"] == "a" else 4.5e-3 + 1e-4 * n, rel=1e-3
        )
    assert (pencil.parent / found["raw"]).is_file()
    status, out, _ = run(*words)
    assert "outcome: confirmed" in out


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({"threshold": 3}, "refuted"),
        ({"rms": "0.5"}, "wrong"),
        ({"signature": '"the same"'}, "not reached"),
        (
            {"signature": 'sys.exit("lost") if n == 5 and ask["path"] == "b" else "ran " + ask["path"]'},
            "failed",
        ),
    ],
)
def test_a_plan_that_does_not_hold_ends_with_status_3(
    run: Any, pencil: Path, tmp_path: Path, change: dict[str, Any], outcome: str
) -> None:
    plan = json.loads(pencil.read_text())
    if "threshold" in change:
        plan["gates"][0]["recommended"] = change.pop("threshold")
        pencil.write_text(json.dumps(plan))
    command = program(tmp_path, **change)
    status, out, _ = run("verify", str(pencil), "--runner", "exec", "--command", command, "--rounds", "4", "--json")
    assert (status, json.loads(out)["outcome"]) == (3, outcome)


def test_verify_refuses_another_machine_and_replays_without_one(run: Any, pencil: Path, tmp_path: Path) -> None:
    plan = json.loads(pencil.read_text())
    plan["keys"]["device_reported"] = "ink"
    pencil.write_text(json.dumps(plan))
    status, out, err = run("verify", str(pencil), "--runner", "exec", "--command", program(tmp_path))
    assert (status, out) == (2, "")
    assert "device_reported" in err
    status, out, _ = run("verify", str(pencil), "--runner", "replay", "--calibration", str(tmp_path / "c"), "--json")
    assert status == 0
    assert json.loads(out)["outcome"] == "replayed"


def test_demo_on_a_made_up_calibration(run: Any, tmp_path: Path) -> None:
    """Both engines of the demo, with laws that cross; the shipped calibration has its own test."""
    laws: dict[str, dict[str, Any]] = {
        "triton": {"fused": lambda w: 2e-5 + 1e-6 * w.slots, "grouped:16": lambda w: 6e-5 + 6e-7 * w.distinct},
        "mlx": {"gather": lambda w: 2e-5 + 1e-6 * w.slots, "gather_sorted": lambda w: 5e-5 + 5e-7 * w.slots},
    }
    for runner, own in laws.items():
        write_fits(write_calibration(tmp_path / "c", "h200", runner, QWEN, own, (1, 2, 4, 8, 16, 32, 64)).parent)
    status, out, err = run("demo", "-o", str(tmp_path / "demo"), "--calibration", str(tmp_path / "c"))
    assert status == 0, err
    assert {"plan.json", "report.md", "gates.toml", "mlx-lm"} == {path.name for path in (tmp_path / "demo").iterdir()}
    assert json.loads((tmp_path / "demo" / "plan.json").read_text())["engine"] == "moeplan-triton"
    other = json.loads((tmp_path / "demo" / "mlx-lm" / "plan.json").read_text())
    assert other["engine"] == "mlx-lm"
    assert [gate["name"] for gate in other["gates"]] == ["sort"]
    assert "held-out" in out
    for tokens in (1, 8, 64):
        assert f"\n{tokens} " in out
