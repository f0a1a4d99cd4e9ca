"""Work and its expectations: the accepted numbers, published tables, and exact laws on small cases."""

import itertools
import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from moeplan.cli import app
from moeplan.errors import MoeplanError
from moeplan.store import Store
from moeplan.traffic.batches import draw_batches
from moeplan.traffic.chance import distinct_distribution, mean_blocks, mean_distinct, percentile
from moeplan.traffic.expect import Case, expect
from moeplan.traffic.load import ExpertLoad
from moeplan.traffic.partition import Partition
from moeplan.traffic.path import parse_path
from moeplan.traffic.routing import Routing, parse_routing
from moeplan.traffic.shape import LayerShape, WeightFormat
from moeplan.traffic.work import Work, expected_work, work_of

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT.parent / "shared" / "data" / "routing"
STORE = Store(traces=ROOT / "traces")
A4, A6, BF16 = (WeightFormat.parse(name) for name in ("affine4-g64", "affine6-g64", "bf16"))
QWEN = LayerShape(2048, 768, 128, 8, A4, A4, A4)
PATHS = ["gather", "gather_sorted", "fused_per_token", "fused", "dedup", "grouped:16", "grouped:64"]
UNIFORM = Routing("uniform")


def run(*words: str) -> dict[str, object]:
    result = CliRunner().invoke(app, ["work", *words, "--models", str(ROOT / "models"), "--json"])
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def plain(experts: int, top_k: int) -> LayerShape:
    return LayerShape(64, 64, experts, top_k, BF16, BF16, BF16)


def test_accepted_numbers_of_qwen3() -> None:
    document = run("qwen3-30b-a3b-4bit", "--tokens", "1,4")
    assert document["plane_bytes"] == 2_654_208
    rows = document["rows"]
    assert isinstance(rows, list)
    four = {row["path"]: row for row in rows if row["tokens"] == 4}
    gather = four["gather"]
    assert (gather["slots"], round(gather["distinct_mean"], 2), gather["issued_bytes"]) == (32, 29.12, 84_934_656)
    assert gather["unique_bytes"] == round(2_654_208 * 128 * (1 - (1 - 8 / 128) ** 4))
    assert four["grouped:16"]["issued_bytes"] == gather["unique_bytes"]
    assert four["fused_per_token"]["dispatches"] == 4 * four["fused"]["dispatches"]
    names = ["gather", "gather_sorted", "fused_per_token", "fused", "grouped:16", "grouped:64"]
    assert [row["path"] for row in rows] == names * 2


def test_identical_cohort_reads_one_set_of_experts() -> None:
    rows = run("qwen3-30b-a3b-4bit", "--tokens", "4", "--cohort", "identical")["rows"]
    assert isinstance(rows, list)
    assert {row["distinct_mean"] for row in rows} == {8}
    assert next(row for row in rows if row["path"] == "grouped:16")["issued_bytes"] == 8 * 2_654_208


def test_shared_expert_of_deepseek_v3() -> None:
    rows = run("deepseek-v3", "--tokens", "4", "--path", "gather")["rows"]
    assert isinstance(rows, list)
    assert round(rows[0]["distinct_mean"], 2) == 30.53
    assert round(rows[0]["distinct_total_mean"], 2) == 31.53


def test_mixed_planes_of_dots() -> None:
    document = run("dots.llm1-mixed-4-6bit", "--tokens", "1", "--path", "gather")
    assert (document["plane_bytes_min"], document["plane_bytes_max"]) == (9_732_096, 11_173_888)
    rows, groups = document["rows"], document["groups"]
    assert isinstance(rows, list)
    assert isinstance(groups, list)
    assert rows[0]["issued_bytes"] == round(6 * (29 * 11_173_888 + 32 * 9_732_096) / 61)
    assert [group["rows"][0]["issued_bytes"] for group in groups] == [6 * 11_173_888, 6 * 9_732_096]


# Published union table (facts: reference U values), tokens 1, 2, 4, ..., 128, one decimal.
UNIONS = {
    (8, 2): [2, 3.5, 5.5, 7.2, 7.9, 8, 8, 8],
    (32, 4): [4, 7.5, 13.2, 21, 28.2, 31.6, 32, 32],
    (64, 6): [6, 11.4, 20.8, 34.9, 50.8, 61.3, 63.9, 64],
    (64, 8): [8, 15, 26.5, 42, 56.4, 63.1, 64, 64],
    (128, 4): [4, 7.9, 15.3, 28.7, 51, 81.7, 111.2, 125.8],
    (128, 8): [8, 15.5, 29.1, 51.6, 82.4, 111.8, 125.9, 128],
    (256, 8): [8, 15.8, 30.5, 57.4, 102, 163.3, 222.4, 251.6],
    (384, 8): [8, 15.8, 31, 59.5, 109.8, 188.2, 284.2, 358.1],
    (512, 10): [10, 19.8, 38.8, 74.7, 138.6, 239.6, 367.1, 471],
}


@pytest.mark.parametrize(("size", "expected"), list(UNIONS.items()))
def test_published_unions(size: tuple[int, int], expected: list[float]) -> None:
    for power, union in enumerate(expected):
        work = expected_work(parse_path("gather"), plain(*size), 2**power, UNIFORM)
        assert abs(work.distinct_mean - union) < 0.1


@pytest.mark.parametrize(
    ("size", "tokens", "block", "occupancy"),
    [
        ((128, 8), 16, 16, 0.097),
        ((128, 8), 16, 64, 0.024),
        ((128, 8), 64, 32, 0.127),
        ((128, 8), 256, 16, 0.697),
        ((128, 8), 1024, 64, 0.682),
        ((256, 8), 1024, 16, 0.815),
        ((8, 2), 64, 16, 0.698),
        ((8, 2), 256, 64, 0.682),
    ],
)
def test_published_occupancies(size: tuple[int, int], tokens: int, block: int, occupancy: float) -> None:
    work = expected_work(parse_path(f"grouped:{block}"), plain(*size), tokens, UNIFORM)
    assert abs(work.occupancy - occupancy) < 0.0006


def enumerated(experts: int, top_k: int, tokens: int, of: Callable[[ExpertLoad], float]) -> Fraction:
    """The exact mean over all equally likely batches, by listing them."""
    choices = list(itertools.combinations(range(experts), top_k))
    total = Fraction(0)
    for batch in itertools.product(choices, repeat=tokens):
        total += Fraction(of(ExpertLoad.from_ids(np.array(batch), experts)))
    return total / len(choices) ** tokens


@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(4, 2, 1), (4, 2, 3), (5, 1, 4), (3, 3, 2), (5, 3, 3)])
def test_expectations_match_enumeration(experts: int, top_k: int, tokens: int) -> None:
    shape = plain(experts, top_k)
    path = parse_path("grouped:8")
    small = type(path)("grouped:2", "block", path.dispatches, 2)
    work = expected_work(small, shape, tokens, UNIFORM)
    assert work.distinct_mean == pytest.approx(float(enumerated(experts, top_k, tokens, lambda x: x.distinct)))
    tiles = enumerated(experts, top_k, tokens, lambda x: work_of(small, x, shape).tiles)
    assert work.tiles == pytest.approx(float(tiles))
    law = distinct_distribution(experts, top_k, tokens)
    for d in range(experts + 1):
        chance = float(enumerated(experts, top_k, tokens, lambda x, d=d: x.distinct == d))  # type: ignore[misc]
        assert law[d] == pytest.approx(chance, abs=1e-12)


def test_distinct_distribution_is_one_and_has_the_closed_mean() -> None:
    for experts, top_k, tokens in ((128, 8, 4), (512, 10, 64), (32, 4, 500), (16, 1, 3)):
        law = distinct_distribution(experts, top_k, tokens)
        assert law.sum() == pytest.approx(1)
        mean = mean_distinct(np.full(experts, top_k / experts), tokens)
        assert float(law @ np.arange(experts + 1)) == pytest.approx(mean)
    local = distinct_distribution(128, 8, 4, 32)
    assert float(local @ np.arange(33)) == pytest.approx(mean_distinct(np.full(32, 8 / 128), 4))


def test_percentile_is_the_first_value_that_reaches_the_share() -> None:
    assert percentile(np.array([0.5, 0.45, 0.05]), 0.95) == 1
    assert percentile(np.array([0.5, 0.44, 0.06]), 0.95) == 2


def test_block_mean_where_tails_are_cut_and_where_they_are_not() -> None:
    share = np.array([0.25])
    direct = float(np.mean(-(-np.random.default_rng(0).binomial(100_000, 0.25, 20_000) // 64)))
    assert mean_blocks(share, 100_000, 64) == pytest.approx(direct, rel=2e-4)
    assert mean_blocks(np.array([1.0, 0.0]), 100, 16) == pytest.approx(7)


def test_sorted_runs_agree_with_a_direct_simulation() -> None:
    work = expected_work(parse_path("gather_sorted"), QWEN, 64, UNIFORM)
    assert work.drawn == ("tiles", "padded_rows")
    rng = np.random.default_rng(99)
    totals = []
    for _ in range(300):
        ids = np.sort(np.argpartition(rng.random((64, 128)), 7, axis=1)[:, :8].ravel())
        totals.append(sum(len(set(ids[at : at + 16])) for at in range(0, 512, 16)))
    assert work.tiles == pytest.approx(float(np.mean(totals)), rel=0.01)


def test_same_seed_same_numbers() -> None:
    path = parse_path("gather_sorted")
    first, second = (expected_work(path, QWEN, 64, UNIFORM, seed=5) for _ in range(2))
    assert first == second
    assert expected_work(path, QWEN, 64, UNIFORM, seed=6).tiles != first.tiles


def test_popularity_mean_is_the_published_formula() -> None:
    routing = parse_routing("popularity:gpt-oss-20b", STORE)
    for tokens, union in ((2, 7.24), (4, 12.09), (8, 17.94), (16, 23.21), (32, 26.82)):
        work = expected_work(parse_path("fused"), plain(32, 4), tokens, routing)
        assert round(work.distinct_mean, 2) == union
        assert work.drawn == ("distinct_p95",)


@pytest.mark.skipif(not DATA.is_dir(), reason="routing data are not on this machine")
def test_real_trace_unions() -> None:
    routing = parse_routing(f"trace:{DATA / 'gpt-oss-20b.decode-topk.npz'}", STORE)
    for tokens, union in ((2, 7.23), (4, 12.05), (8, 17.87), (16, 23.21)):
        work = expected_work(parse_path("gather"), plain(32, 4), tokens, routing)
        assert abs(work.distinct_mean - union) < 0.1
    assert expected_work(parse_path("gather"), plain(32, 4), 4, routing, "identical").distinct_mean == 4


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("arm", ["balanced", "disjoint", "identical", "uniform"])
def test_expected_work_is_the_mean_of_work(name: str, arm: str) -> None:
    path, tokens = parse_path(name), 12
    routing = Routing(arm)
    table = draw_batches(routing, QWEN, tokens, "independent", 1, False)[:400]
    works = [work_of(path, ExpertLoad(rows, tokens), QWEN) for rows in table]
    mean = expected_work(path, QWEN, tokens, routing)
    assert mean.tiles == pytest.approx(np.mean([one.tiles for one in works]), rel=0.02)
    assert mean.distinct_mean == pytest.approx(np.mean([one.distinct for one in works]), rel=0.02)
    assert mean.issued_bytes == pytest.approx(mean.tiles * QWEN.plane_bytes)
    assert mean.slots == 96


def test_work_adds_and_repeats() -> None:
    one = work_of(parse_path("grouped:16"), ExpertLoad(np.array([3, 0, 20], np.int32), 12), plain(3, 2))
    assert one + one + one == one * 3
    assert sum([one, one], Work()) == one * 2
    assert (one.tiles, one.padded_rows, one.slots, one.distinct) == (3, 25, 23, 2)
    assert one.flops == 2 * 3 * 64 * 64 * 23
    assert one.occupancy == 23 / 48


# Partition


def test_tensor_parallel_slices_the_width() -> None:
    local = Partition(tp=4).local(QWEN)
    assert (local.expert_hidden, local.hidden, local.experts) == (192, 2048, 128)
    assert local.plane_bytes * 4 == QWEN.plane_bytes


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"tp": 5}, "--tp 5: expert_hidden 768 does not divide by 5"),
        ({"tp": 8}, "cuts through the 64-wide scales of down"),
        ({"ep": 3}, "--ep 3: 128 experts do not divide by 3"),
        ({"tp": 0}, "--tp 0: must be at least 1"),
        ({"ep": 4, "rank": 4}, "--rank 4"),
    ],
)
def test_partitions_that_do_not_divide(part: dict[str, int], message: str) -> None:
    with pytest.raises(MoeplanError, match=message):
        Partition(**part).local(QWEN)


def test_ranks_share_the_work_exactly() -> None:
    path = parse_path("grouped:16")
    routing = parse_routing("popularity:gpt-oss-20b", STORE)
    whole = expect(path, Case(plain(32, 4), 16, routing))
    parts = [expect(path, Case(plain(32, 4), 16, routing, part=Partition(ep=4, rank=r))) for r in range(4)]
    for name in ("slots", "distinct_mean", "tiles", "issued_bytes"):
        assert sum(getattr(part, name) for part in parts) == pytest.approx(getattr(whole, name))
    worst = expect(path, Case(plain(32, 4), 16, routing, part=Partition(ep=4, rank=None)))
    assert worst.tiles > max(part.tiles for part in parts)
    assert "tiles" in worst.drawn


def test_uniform_rank_distribution_against_draws() -> None:
    case = Case(QWEN, 16, UNIFORM, part=Partition(ep=8, rank=3))
    exact = expect(parse_path("gather"), case)
    drawn = np.count_nonzero(case.shares(parse_path("gather")), axis=1)
    assert exact.distinct_mean == pytest.approx(drawn.mean(), rel=0.02)
    assert abs(exact.distinct_p95 - np.percentile(drawn, 95, method="inverted_cdf")) <= 1


def test_all_to_all_is_declined_by_name() -> None:
    document = run("qwen3-30b-a3b-4bit", "--tokens", "4", "--ep", "4", "--tp", "2", "--rank", "worst")
    declines = document["declines"]
    assert isinstance(declines, list)
    assert [one["path"] for one in declines] == ["all-to-all", "all-reduce"]
    assert document["plane_bytes"] == 2_654_208 // 2
    assert document["rank"] == "worst"


# Command line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["llama-3.1-8b"], "a dense model has no experts"),
        (["nobody"], "no such card"),
        (["mixtral-8x7b", "--tokens", "0"], "--tokens"),
        (["mixtral-8x7b", "--rank", "best"], "--rank best"),
        (["mixtral-8x7b", "--path", "grouped:7"], "--path grouped:7"),
        (["mixtral-8x7b", "--routing", "disjoint", "--tokens", "5"], "the layer has 8"),
    ],
)
def test_wrong_input_is_one_error(words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["work", *words, "--models", str(ROOT / "models")])
    assert isinstance(result.exception, MoeplanError)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


def test_table_names_every_path() -> None:
    result = CliRunner().invoke(app, ["work", "mixtral-8x7b", "--tokens", "2", "--models", str(ROOT / "models")])
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 7
    assert result.stdout.splitlines()[0].split()[:4] == ["path", "tokens", "slots", "distinct"]


def test_cohorts_of_a_trace_reach_work(tmp_path: Path) -> None:
    ids = np.repeat(np.arange(6, dtype=np.uint8).reshape(6, 1, 1), 4, axis=0)  # request r always takes expert r
    np.savez(tmp_path / "t.npz", expert_ids=ids, request_offsets=np.arange(0, 25, 4), num_experts=8)
    routing = parse_routing(f"trace:{tmp_path / 't.npz'}", Store())
    shape = LayerShape(64, 64, 8, 1, *[WeightFormat.parse("bf16")] * 3)
    wanted = {
        "independent": 4, "stream:2": 2, "stream:3": 2, "stream:4": 1, "staggered:1": 1, "identical": 1,
        "2xindependent+1xstream:2": 3,
    }  # fmt: skip
    for name, distinct in wanted.items():
        assert expected_work(parse_path("fused"), shape, 4, routing, name).distinct_mean == distinct, name
    for name, tokens, reason in (
        ("2xindependent", 4, "a call of 2 rows, 4 tokens"),
        ("odd", 4, "expected"),
    ):
        with pytest.raises(MoeplanError, match=reason):
            expected_work(parse_path("fused"), shape, tokens, routing, name)
    with pytest.raises(MoeplanError, match="trace:FILE"):
        expected_work(parse_path("fused"), shape, 4, parse_routing("uniform", Store()), "stream:2")
