"""`moeplan trace import` from the shell."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from moeplan.errors import MoeplanError
from moeplan.traffic.trace import load_trace
from tests.importers import foreign

A = foreign.ids(9, seed=1)


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moeplan", "trace", "import", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_trace_and_its_document(tmp_path: Path) -> None:
    path = foreign.vllm(tmp_path / "r.jsonl", [A.astype("u1")])
    done = run(path, "--experts", "8", "-o", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["kind"], document["format"], document["rows"], document["top_k"]) == ("trace", "vllm", 9, 2)
    np.testing.assert_array_equal(load_trace(tmp_path / "out").expert_ids, A)
    again = run(path, "--experts", "8", "-o", tmp_path / "out")
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)


def test_counts_are_marked(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text("0,1\n0,2\n")
    done = run(path, "--format", "moe-trace", "--experts", "8", "--top-k", "2", "-o", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["kind"], document["pairs"], document["tokens"]) == ("counts", 2, 1)
    header = tomllib.loads((tmp_path / "out" / "header.toml").read_text())
    assert (header["format"], header["kind"]) == ("moeplan-counts", "counts")
    assert header["provenance"]["files"] == ["r.csv"]
    with pytest.raises(MoeplanError, match="moeplan-counts"):
        load_trace(tmp_path / "out")
    assert "never co-activation" in done.stderr


def test_a_card_gives_layers_and_contradictions_are_refused(tmp_path: Path) -> None:
    ids = foreign.ids(4, 24, 4, 32)
    path = foreign.sglang(tmp_path / "r.json", [ids], prompt=2)
    done = run(path, "--model", "gpt-oss-20b", "-o", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["layers"] == 24
    wrong = run(path, "--model", "gpt-oss-20b", "--experts", "64", "-o", tmp_path / "x")
    assert wrong.stderr == "error: --experts 64: --model gpt-oss-20b has 32\n"
    unknown = run(path, "--format", "nonsense", "-o", tmp_path / "x")
    assert unknown.stderr.startswith("error: --format nonsense: expected one of vllm, ")
