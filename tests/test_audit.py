"""What engines do: their own gates at each token count, the gate that decided, and what relaxing one reaches."""

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from moeplan.cli import app
from moeplan.engines import ENGINES
from moeplan.engines.books import AUDITED, rule_book
from moeplan.engines.rules import call_facts, decide
from moeplan.errors import MoeplanError
from moeplan.planning.gates import Chain
from moeplan.traffic.shape import LayerShape, WeightFormat
from tests.planning import AFFINE

QWEN = LayerShape(2048, 768, 128, 8, AFFINE, AFFINE, AFFINE)


def run(*words: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["audit", *words, "--json"])
    assert done.exit_code == 0, done.exception
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_mlxcel_on_qwen3() -> None:
    found = run("qwen3-30b-a3b-4bit", "--engine", "mlxcel", "--tokens", "1,2,4,8")
    assert [row["path"] for row in found["rows"]] == ["fused", "gather", "gather", "gather_sorted"]
    for row in found["rows"][1:]:
        assert row["declined"][0]["gate"] == "token gate"  # 768 is under the Dff cap of 4096
        assert "Dff" not in json.dumps(row["declined"])
    assert found["rows"][2]["declined"][1]["reason"] == "slots 32, not >= 64"
    caps = {gate["name"]: gate for gate in found["gates"]}
    assert (caps["Dff cap"]["value"], caps["Dff cap"]["env"]) == (4096, "MLXCEL_FUSED_MOE_MAX_DFF")
    assert all(gate["source"] for gate in found["gates"])
    assert found["rows"][0]["seconds"] is None


def test_relaxing_the_call_site_alone_reaches_nothing() -> None:
    (relaxed,) = run("qwen3-30b-a3b-4bit", "--engine", "mlxcel", "--relax", "token gate=8")["relaxed"]
    assert (relaxed["outcome"], relaxed["stopped_by"], relaxed["place"]) == ("not reached", "kernel rows", "kernel")
    assert relaxed["tokens"] == 2
    (sort,) = run("qwen3-30b-a3b-4bit", "--engine", "mlxcel", "--relax", "sort=16")["relaxed"]
    assert sort["outcome"] == "reached"
    (same,) = run("qwen3-30b-a3b-4bit", "--engine", "mlxcel", "--relax", "token gate=1")["relaxed"]
    assert same["outcome"] == "changes nothing"


@pytest.mark.parametrize(
    ("change", "gate"),
    [
        ({"expert_hidden": 4608}, "Dff cap"),
        ({"up": WeightFormat.parse("affine8-g64")}, "gate and up bits"),
        ({"down": WeightFormat.parse("affine3-g64")}, "down bits"),
        ({"down": WeightFormat.parse("affine4-g32")}, "group sizes"),
        ({"down": WeightFormat.parse("affine6-g64"), "expert_hidden": 776}, "6-bit down width"),
        ({"gate": None, "activation": "relu2"}, "activation"),
        ({"gate": WeightFormat.parse("mxfp4"), "up": WeightFormat.parse("mxfp4")}, "mode"),
    ],
)
def test_mlxcel_declines_what_its_kernel_does_not_take(change: dict[str, Any], gate: str) -> None:
    shape = replace(QWEN, **change)
    done = decide(rule_book("mlxcel", "metal", shape), call_facts(shape, 1))
    assert (done.path, done.declined[0].predicate.name) == ("gather", gate)


def test_mixed_widths_of_dots_are_taken() -> None:
    mixed = replace(QWEN, expert_hidden=1408, down=WeightFormat.parse("affine6-g64"))
    assert decide(rule_book("mlxcel", "metal", mixed), call_facts(mixed, 1)).path == "fused"
    wide = replace(QWEN, expert_hidden=6400)
    assert decide(rule_book("mlxcel", "cuda", wide), call_facts(wide, 1)).path == "fused"
    assert decide(rule_book("mlxcel", "metal", wide), call_facts(wide, 1)).path == "gather"


@pytest.mark.parametrize(
    ("experts", "top_k", "first"),
    [(8, 2, 16), (32, 4, 32), (64, 8, 32), (64, 6, 43), (128, 8, 64), (128, 4, 128), (256, 8, 128), (512, 10, 205)],
)
def test_the_sorted_metal_kernel_starts_where_mlx_says(experts: int, top_k: int, first: int) -> None:
    """First token count of gather_qmm_rhs: slots >= max(16, 4 E), behind mlx-lm's own 64 slots."""
    shape = replace(QWEN, experts=experts, top_k=top_k)
    book = rule_book("mlx-lm", "metal", shape)
    kernels = {n: decide(book, call_facts(shape, n)).kernel for n in range(1, 300)}
    expected = max(first, -(-64 // top_k))
    assert min(n for n, kernel in kernels.items() if kernel == "gather_qmm_rhs") == expected


@pytest.mark.parametrize(
    ("experts", "top_k", "last"), [(128, 8, 4), (256, 8, 8), (512, 10, 12), (32, 4, 2), (64, 6, 2), (8, 2, 1)]
)
def test_the_naive_assignment_of_vllm_ends_where_its_rule_says(experts: int, top_k: int, last: int) -> None:
    shape = replace(QWEN, experts=experts, top_k=top_k)
    book = rule_book("vllm", None, shape)
    paths = [decide(book, call_facts(shape, n)).path for n in range(1, 40)]
    assert paths.count("naive:16") == last
    assert [decide(book, call_facts(shape, n)).path for n in (33, 97, 513)] == [
        "grouped:32",
        "grouped:64",
        "grouped:128",
    ]


def test_rules_and_chain_of_one_engine_agree() -> None:
    chain = Chain(ENGINES["mlx-lm"].gates, QWEN)
    for backend in ("metal", "cuda"):
        for n in range(1, 200):
            path = decide(rule_book("mlx-lm", backend, QWEN), call_facts(QWEN, n)).path
            assert path == chain.paths[chain.level(chain.defaults, n)]


@pytest.mark.parametrize("engine", AUDITED)
def test_every_engine_decides_every_size_with_sources(engine: str) -> None:
    book = rule_book(engine, None, QWEN)
    assert all(one.source.partition(" ")[0] for one in book.predicates)
    assert all(decide(book, call_facts(QWEN, n)).path for n in range(1, 3000, 7))


def test_times_come_from_the_calibration_of_the_device() -> None:
    found = run("qwen3-30b-a3b-4bit", "--engine", "mlx-lm", "--device", "h200", "--tokens", "4")
    row = found["rows"][0]
    assert (found["backend"], row["path"], row["best_path"]) == ("cuda", "gather", "fused")
    assert row["regret"] == pytest.approx(row["seconds"] / row["best_seconds"] - 1)
    assert row["source"] == "measured"
    bare = run("mixtral-8x7b", "--engine", "vllm", "--device", "h200")
    assert "no triton calibration" in bare["times_reason"]


@pytest.mark.parametrize(
    "words",
    [
        ("--engine", "tgi"),
        ("--engine", "vllm", "--backend", "metal"),
        ("--engine", "mlxcel", "--relax", "token gate"),
        ("--engine", "mlxcel", "--relax", "no such=4"),
        ("--engine", "mlxcel", "--relax", "kernel rows=4"),
        ("--engine", "mlxcel", "--tokens", "0"),
        ("--engine", "mlxcel", "--device", "none"),
    ],
)
def test_bad_questions_are_one_line(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, ["audit", "qwen3-30b-a3b-4bit", *words])
    assert isinstance(done.exception, MoeplanError)
    assert "\n" not in str(done.exception)
