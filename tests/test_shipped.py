"""What is shipped agrees with itself: plans follow from calibrations, verdicts belong to plans, fits to journals."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

from moeplan.cost.samples import load
from moeplan.planning.plan import recommend
from moeplan.planning.setting import demo_settings
from moeplan.planning.verify import arms_of, crossings, judge, routing_arm
from moeplan.store import Store

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "reports" / "2026-12-01-h200-triton"
JOURNALS = sorted((ROOT / "calibration").rglob("*.jsonl"))


def alike(one: Any, other: Any, where: str = "plan") -> None:
    """Equal but for float rounding: the shipped plan was made on another processor."""
    if isinstance(one, float) and isinstance(other, float):
        assert math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-7), f"{where}: {one} != {other}"
    elif isinstance(one, dict) and isinstance(other, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            alike(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list) and isinstance(other, list):
        assert len(one) == len(other), where
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            alike(a, b, f"{where}[{number}]")
    else:
        assert one == other, f"{where}: {one!r} != {other!r}"


def test_the_verified_plan_follows_from_the_shipped_calibration() -> None:
    shipped = json.loads((REPORT / "plan.json").read_text())
    alike(recommend(demo_settings(Store())[0]), shipped)
    with pytest.raises(AssertionError):
        alike(shipped | {"floor": 0.03}, shipped)


def test_the_verdict_is_of_that_plan_and_follows_from_its_raw_times() -> None:
    verdict = json.loads((REPORT / "verdict.json").read_text())
    assert verdict["plan_sha256"] == hashlib.sha256((REPORT / "plan.json").read_bytes()).hexdigest()
    plan = json.loads((REPORT / "plan.json").read_text())
    raw = load(REPORT / verdict["raw"])
    seeds = sorted({sample.seed for sample in raw.samples})
    arms = arms_of(plan, crossings(plan)[0], seeds, None)
    assert {arm.routing for arm in arms} == {routing_arm(plan)}
    again = judge(plan, raw, arms)
    alike(
        {key: again[key] for key in ("verdicts", "gates", "outcome")},
        {key: verdict[key] for key in ("verdicts", "gates", "outcome")},
    )
    assert raw.header["device_reported"] == plan["keys"]["device_reported"]


def test_the_crossing_from_fused_to_grouped_was_confirmed() -> None:
    verdict = json.loads((REPORT / "verdict.json").read_text())
    gate = next(row for row in verdict["gates"] if row["gate"] == "n_tokens")
    assert gate["outcome"] == "confirmed"
    assert verdict["runner"] == "triton"


@pytest.mark.parametrize("path", JOURNALS, ids=lambda path: f"{path.parts[-3]}-{path.parts[-2]}-{path.stem}")
def test_journals_hold_raw_times_and_parity(path: Path) -> None:
    found = load(path)
    assert found.samples
    assert found.header["kind"] in ("measured", "published")
    if found.header["kind"] == "measured":
        for sample in found.samples:
            assert len(sample.long_s) >= 4, sample.arm
            assert sample.signature, sample.arm
            assert sample.path == "link" or (sample.parity_rms or 1.0) <= 1e-2, sample.arm


def test_triton_calibrations_are_of_the_kernels_in_the_tree() -> None:
    from moeplan.kernels.triton_paths import KERNELS

    now = {path: make().config_hash() for path, make in KERNELS.items()}
    journals = sorted((ROOT / "calibration" / "h200").glob("triton-*/*.jsonl"))
    assert journals
    for journal in journals:
        for sample in load(journal).samples:
            assert sample.config_hash == now[sample.path], f"{journal}: {sample.path} was measured with other sources"
