"""`measure`: interleaving, resuming, lost arms. The child is a small program with made-up times."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.cost.samples import lines, load
from moeplan.errors import MoeplanError
from moeplan.kernels.protocol import Arm
from moeplan.runners import session
from moeplan.runners.arms import BLOCK_ROWS, draw, drivers, filled, grid
from moeplan.runners.session import describe, measure
from moeplan.runners.spec import MeasureRequest, RunnerSpec, default_chain, make_arm
from moeplan.store import Store
from moeplan.traffic.routing import parse_routing
from moeplan.traffic.shape import LayerShape, WeightFormat

ROOT = Path(__file__).resolve().parent.parent
FORM = WeightFormat.parse("affine4-g64")
SHAPE = LayerShape(128, 64, 16, 4, FORM, FORM, FORM)

FAKE = """
import json, os, sys, time
asked = 0
for line in sys.stdin:
    arm = json.loads(line)
    answer = {"arm": arm["arm"], "short_s": 1e-3, "long_s": 3e-3, "signature": "fake", "config_hash": "1"}
    if arm["path"] == "describe":
        answer = {"arm": "describe", "paths": ["good"], "engine_version": "7"}
    elif arm["path"] == "anchor":
        answer = {"arm": "anchor", "anchor": {"copy_bytes_per_s": 1e9}, "clocks": None}
    else:
        size = os.path.getsize(arm["ids_file"])
        assert size == 4 * arm["layers"] * arm["tokens"] * arm["shape"]["top_k"], size
        asked += 1
    BEHAVIOUR
    print(json.dumps(answer), flush=True)
"""


def spec(folder: Path, behaviour: str = "pass", **more: Any) -> RunnerSpec:
    program = folder / "fake.py"
    program.write_text(FAKE.replace("BEHAVIOUR", behaviour))
    return RunnerSpec("exec", command=f"{sys.executable} {program}", **more)


def request(tokens: list[int], rounds: int = 2, **more: Any) -> MeasureRequest:
    arms = grid(["good"], SHAPE, tokens, ["uniform"], chain=(2, 4))
    return MeasureRequest("dev", "model", SHAPE, arms, rounds, **more)


def times(path: Path) -> list[tuple[str, int]]:
    return [(line["arm"], line["round"]) for line in lines(path) if line["type"] == "time"]


def test_every_arm_once_a_round_in_a_shuffled_order_that_the_seed_repeats(tmp_path: Path) -> None:
    orders = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        found = measure(spec(tmp_path), request([1, 2, 3, 4, 5], 3, seed=seed), tmp_path / name)
        assert len(found.samples) == 5
        assert all(len(sample.short_s) == 3 for sample in found.samples)
        assert len(found.rounds) == 3
        order = times(tmp_path / name)
        assert [round_ for _, round_ in order] == [0] * 5 + [1] * 5 + [2] * 5
        assert set(Counter(order).values()) == {1}
        orders.append([arm for arm, _ in order])
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[0][:5] != orders[0][5:10]


def test_header_and_arm_lines_hold_what_reproduces_them(tmp_path: Path) -> None:
    found = measure(spec(tmp_path), request([3], cache_bytes=1e6), tmp_path / "j")
    header = found.header
    assert (header["device"], header["engine"], header["engine_version"], header["model"]) == (
        "dev",
        "exec",
        "7",
        "model",
    )
    assert {"driver", "host", "date", "environment", "options"} <= header.keys()
    arm = next(line for line in lines(tmp_path / "j") if line["type"] == "arm")
    again = make_arm(arm["path"], SHAPE, arm["tokens"], arm["routing"], arm["seed"], tuple(arm["chain"]))
    assert again.id == arm["arm"]
    ids = draw(again, parse_routing(arm["routing"], Store()))
    assert drivers(again, ids, 1e6)["ids_sha256"] == arm["ids_sha256"]


def test_arms_of_two_shapes_share_a_journal(tmp_path: Path) -> None:
    other = replace(SHAPE, hidden=256)
    both = replace(request([1], 1), arms=tuple(make_arm("good", s, 1, "uniform", 0, (2, 4)) for s in (SHAPE, other)))
    found = measure(spec(tmp_path), both, tmp_path / "j")
    assert {sample.shape for sample in found.samples} == {SHAPE, other}


def test_a_stretched_profile_says_so_in_its_arm_line(tmp_path: Path) -> None:
    arm = make_arm("good", SHAPE, 2, "popularity:gpt-oss-20b", 0, (2, 4))
    measure(spec(tmp_path), replace(request([1], 1), arms=(arm,)), tmp_path / "j")
    (line,) = (line for line in lines(tmp_path / "j") if line["type"] == "arm")
    assert "stretched" in line["routing_note"]


def test_a_second_run_measures_only_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "j"
    measure(spec(tmp_path), request([1, 2], 2), path)
    before = path.read_bytes()
    measure(spec(tmp_path), request([1, 2], 2), path)
    assert path.read_bytes() == before
    measure(spec(tmp_path), request([1, 2, 4], 3), path)
    assert path.read_bytes().startswith(before)
    assert set(Counter(times(path)).values()) == {1}
    assert len(times(path)) == 9


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"device": "other"}, "device"),
        ({"model": "other"}, "model"),
        ({"seed": 5}, "options"),
        ({"options": {"clock": "fixed"}}, "options"),
        ({"shape": replace(SHAPE, experts=8)}, "shape"),
    ],
)
def test_a_journal_of_other_conditions_is_refused(tmp_path: Path, change: dict[str, Any], key: str) -> None:
    path = tmp_path / "j"
    measure(spec(tmp_path), request([1], 1), path)
    before = path.read_bytes()
    with pytest.raises(MoeplanError, match=rf"j: {key}: the journal has"):
        measure(spec(tmp_path), replace(request([1], 2), **change), path)
    assert path.read_bytes() == before


def test_a_changed_kernel_is_refused(tmp_path: Path) -> None:
    measure(spec(tmp_path), request([1], 1), tmp_path / "j")
    with pytest.raises(MoeplanError, match="config_hash of arm good/t1"):
        measure(spec(tmp_path, "answer['config_hash'] = '2'"), request([1], 2), tmp_path / "j")


LOSSES = {
    "os.abort()": "killed by SIGABRT",
    "os.kill(os.getpid(), 11)": "killed by SIGSEGV",
    "sys.exit('out of luck')": "ended with exit status 1: out of luck",
    "print('what?', flush=True)": "answered 'what?'",
    "answer['arm'] = 'another'": "is no answer to arm good/t2",
    "time.sleep(60)": "no answer within 2 s",
    "answer['long_s'] = 0": "long_s 0 is not a time",
    "answer['short_s'] = 'soon'": "short_s 'soon' is not a time",
    "answer['short_s'] = float('nan')": "short_s nan is not a time",
    "del answer['long_s']": "long_s None is not a time",
    "answer['parity_rms'] = 0.02": "parity: relative RMS 0.02",
    "answer['parity_rms'] = float('nan')": "parity: relative RMS nan",
    "answer = {'arm': arm['arm'], 'error': 'illegal address'}": "illegal address",
}


@pytest.mark.parametrize("behaviour", LOSSES)
def test_a_lost_arm_costs_only_itself(tmp_path: Path, behaviour: str) -> None:
    one_arm = f"if arm.get('tokens') == 2:\n        {behaviour}"
    found = measure(spec(tmp_path, one_arm, timeout_s=2.0), request([1, 2, 3], 2), tmp_path / "j")
    assert sorted((sample.tokens, len(sample.short_s)) for sample in found.samples) == [(1, 2), (3, 2)]
    ((arm, reason),) = found.failed.items()
    assert arm.startswith("good/t2/")
    assert LOSSES[behaviour] in reason


def test_an_arm_lost_in_a_later_round_is_dropped_and_stays_dropped(tmp_path: Path) -> None:
    path = tmp_path / "j"
    dies = "if arm.get('tokens') == 2 and arm['round'] == 1:\n        os.abort()"
    found = measure(spec(tmp_path, dies), request([1, 2], 3), path)
    assert [sample.tokens for sample in found.samples] == [1]
    before = path.read_bytes()
    measure(spec(tmp_path, "pass"), request([1, 2], 3), path)
    assert path.read_bytes() == before


def test_a_decline_is_an_answer_not_a_failure(tmp_path: Path) -> None:
    says_no = "if arm.get('tokens') == 2:\n        answer = {'arm': arm['arm'], 'declined': 'odd'}"
    found = measure(spec(tmp_path, says_no), request([1, 2], 2), tmp_path / "j")
    assert list(found.declined.values()) == ["odd"]
    assert not found.failed
    assert [sample.tokens for sample in found.samples] == [1]


def test_progress_reaches_its_end(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    measure(spec(tmp_path), request([1, 2], 2), tmp_path / "j", lambda done, total, _: seen.append((done, total)))
    assert seen == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (RunnerSpec("exec"), "--command"),
        (RunnerSpec("exec", command="'"), "--command"),
        (RunnerSpec("exec", command="/no/such/program"), "cannot run: No such file"),
        (RunnerSpec("exec", command="false"), "asked to describe itself: ended with exit status 1"),
        (RunnerSpec("python", kernel="nothing"), "--kernel"),
        (RunnerSpec("python", kernel="no.such:Thing"), "No module named"),
        (RunnerSpec("metal"), "--runner metal"),
    ],
)
def test_a_runner_that_cannot_start_is_one_error(tmp_path: Path, bad: RunnerSpec, message: str) -> None:
    with pytest.raises(MoeplanError, match=message):
        measure(bad, request([1]), tmp_path / "j")
    assert not (tmp_path / "j").exists()


def test_killed_half_way_and_started_again(tmp_path: Path) -> None:
    slow = spec(tmp_path, "time.sleep(0.02)")
    command = [
        sys.executable, "-m", "moeplan", "calibrate", "run", "--runner", "exec", "--command", slow.command,
        "--device", "dev", "--model", "tiny-moe-4bit", "--tokens", "1-6", "--routing", "uniform", "--rounds", "5",
        "--chain", "2,4", "-o", str(tmp_path / "out"), "--json",
    ]  # fmt: skip
    path = tmp_path / "out" / "dev" / "exec-7" / "tiny-moe-4bit.jsonl"
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_bytes().count(b'"type": "time"') > 8):
        assert process.poll() is None, "finished before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = path.read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert path.read_bytes().startswith(kept)
    assert len(times(path)) == 30
    assert set(Counter(times(path)).values()) == {1}
    assert len(json.loads(done.stdout)["samples"]) == 6
    assert "round" not in done.stderr, "a progress bar in a pipe"


def test_an_unwritable_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    command = [
        sys.executable, "-m", "moeplan", "calibrate", "run", "--runner", "exec", "--command", "true", "--device", "d",
        "--model", "tiny-moe-4bit", "-o", str(tmp_path / "file" / "below"),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: -o ")
    assert done.stderr.count("\n") == 1


def loads(arm: Arm) -> dict[str, Any]:
    return drivers(arm, draw(arm, parse_routing(arm.routing, Store())), None)


@settings(deadline=None, max_examples=50)
@given(tokens=st.integers(1, 40), routing=st.sampled_from(["uniform", "identical", "balanced"]), seed=st.integers(0, 9))
def test_drivers_obey_the_bounds_of_any_routing(tokens: int, routing: str, seed: int) -> None:
    arm = make_arm("good", SHAPE, tokens, routing, seed, (2, 5))
    found = loads(arm)
    assert found["slots"] == tokens * 4
    most = min(16, tokens * 4)
    assert found["distinct"] == {"identical": 4, "balanced": most}.get(routing, found["distinct"])
    assert 4 <= found["distinct"] <= most
    ids = draw(arm, parse_routing(routing, Store()))
    for rows in BLOCK_ROWS:
        counts = [np.bincount(layer.ravel(), minlength=16) for layer in ids[2:]]
        assert found["blocks"][str(rows)] == np.mean([sum(-(-int(c) // rows) for c in count) for count in counts])


def test_layers_are_drawn_for_themselves() -> None:
    ids = draw(make_arm("good", SHAPE, 3, "identical", 0, (2, 9)), parse_routing("identical", Store()))
    assert (ids == ids[:, :1]).all()
    assert len({tuple(layer[0]) for layer in ids}) > 1


def test_disjoint_turns_into_balanced_where_it_cannot_be() -> None:
    arms = grid(["a", "b"], SHAPE, [1, 4, 5, 8], ["disjoint", "balanced"])
    assert {(arm.tokens, arm.routing) for arm in arms} == {
        (1, "disjoint"), (4, "disjoint"), (1, "balanced"), (4, "balanced"), (5, "balanced"), (8, "balanced"),
    }  # fmt: skip
    assert len(arms) == len({arm.id for arm in arms}) == 12


def test_cache_residency_is_four_caches_of_the_short_chain() -> None:
    arm = make_arm("good", SHAPE, 2, "balanced", 0, (3, 9))
    touched = 3 * 8 * SHAPE.plane_bytes
    ids = draw(arm, parse_routing("balanced", Store()))
    assert drivers(arm, ids, touched / 4)["cache_resident"] is False
    assert drivers(arm, ids, touched / 4 + 1)["cache_resident"] is True
    assert drivers(arm, ids, None)["cache_resident"] is None


@settings(deadline=None, max_examples=25)
@given(tokens=st.integers(1, 20), cache=st.floats(1e5, 5e6), seed=st.integers(0, 3))
def test_filled_chains_are_never_flagged(tokens: int, cache: float, seed: int) -> None:
    routing = parse_routing("uniform", Store())
    arm = filled(make_arm("good", SHAPE, tokens, "uniform", seed), routing, cache)
    assert drivers(arm, draw(arm, routing), cache)["cache_resident"] is False
    assert arm.chain == default_chain(tokens) or arm.chain[1] == 2 * arm.chain[0]


def test_an_impossible_chain_is_refused() -> None:
    with pytest.raises(MoeplanError, match="--chain 4,4"):
        make_arm("good", SHAPE, 1, "uniform", 0, (4, 4))


def test_a_journal_of_another_driver_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure(spec(tmp_path), request([1], 1), tmp_path / "j")
    monkeypatch.setattr(session, "driver", lambda: "580.1")
    with pytest.raises(MoeplanError, match=r"driver: the journal has None, this run '580.1'"):
        measure(spec(tmp_path), request([1], 2), tmp_path / "j")
    assert len(load(tmp_path / "j").samples) == 1


def test_a_runner_without_its_device_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(MoeplanError, match=r"^--runner triton: no CUDA device"):
        describe(RunnerSpec("triton"))
