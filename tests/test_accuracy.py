"""Held-out accuracy of a calibration beside its baselines."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moeplan.cost.accuracy import accuracy
from moeplan.errors import MoeplanError
from tests.cost_samples import COUNTS, samples, write_journal


def test_fit_beats_the_wrong_regime_and_is_covered(tmp_path: Path) -> None:
    arms = samples(lambda n, u, s: 30e-6 + 1.9e-6 * u, noise=0.02, counts=COUNTS)
    write_journal(tmp_path / "mlx-1.0/moe.jsonl", arms)
    document = accuracy([tmp_path / "mlx-1.0"])
    held = document["pooled"]["token_holdout"]
    assert held["n"] == 3 * (len(COUNTS) - 2)
    assert 0.005 < held["mean"] < 0.03, "noise of 2 % cannot be predicted, and nothing else is left"
    assert held["median"] <= held["p90"] <= held["max"]
    assert 0.75 <= document["pooled"]["coverage90"] <= 1
    assert 0.02 < document["pooled"]["half_width_median"] < 0.08
    lines = {one["name"]: one for one in document["baselines"]}
    assert lines["slots"]["token_holdout"]["mean"] > 5 * held["mean"]
    assert lines["a + b*distinct"]["token_holdout"]["mean"] == pytest.approx(held["mean"], rel=0.2)
    assert lines["slots"]["tables_beaten"] == lines["slots"]["tables"] == 1
    [table] = document["tables"]
    assert table["balanced"]["token_holdout"]["n"] == len(COUNTS) - 2
    assert table["shape_holdout"] is None


def test_straight_line_between_neighbours_is_exact_for_slots(tmp_path: Path) -> None:
    write_journal(tmp_path / "moe.jsonl", samples(lambda n, u, s: 5e-6 + 1e-6 * s, counts=(1, 2, 4, 8)))
    document = accuracy([tmp_path])
    line = next(one for one in document["baselines"] if one["name"] == "linear in tokens")
    assert line["token_holdout"]["max"] < 1e-6
    few = accuracy([tmp_path], tokens_max=2)
    assert few["pooled"]["token_holdout"]["n"] == 3


def test_the_bare_chain_is_not_judged(tmp_path: Path) -> None:
    arms = samples(lambda n, u, s: 5e-6 + 1e-6 * s, counts=(1, 2, 4, 8))
    chain = [replace(one, path="link", arm="link" + one.arm, long_s=(0.1,)) for one in arms]
    write_journal(tmp_path / "moe.jsonl", arms + chain)
    assert [one["kernel_source"] for one in accuracy([tmp_path])["tables"]] == ["gather"]


def test_too_few_token_counts(tmp_path: Path) -> None:
    write_journal(tmp_path / "moe.jsonl", samples(lambda n, u, s: 5e-6, counts=(1, 2)))
    with pytest.raises(MoeplanError, match="no path with at least 3 token counts"):
        accuracy([tmp_path])


def test_command(tmp_path: Path) -> None:
    write_journal(tmp_path / "moe.jsonl", samples(lambda n, u, s: 5e-6 + 1e-6 * s, counts=(1, 2, 4, 8)))
    words = [sys.executable, "-m", "moeplan", "accuracy", str(tmp_path)]
    done = subprocess.run([*words, "--json"], capture_output=True, text=True, check=True)
    document = json.loads(done.stdout)
    assert {"pooled", "tables", "baselines"} <= set(document)
    wanted = {"system", "framework", "version", "kernel_source", "dtype", "shapes", "n", "token_holdout", "end_points"}
    assert wanted | {"shape_holdout", "coverage90", "balanced", "cause"} <= set(document["tables"][0])
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "baseline: slots" in text
