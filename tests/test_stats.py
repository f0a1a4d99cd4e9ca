"""Statistics of traces: laws against plain counting, golden figures of the real gpt-oss-20b trace."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from moeplan.cli import app
from moeplan.errors import MoeplanError
from moeplan.traffic import packed as packed_module
from moeplan.traffic import stats_plot
from moeplan.traffic.cohort import draw_rows, parse_cohort
from moeplan.traffic.load import ExpertLoad
from moeplan.traffic.packed import Packed, pack, popcount
from moeplan.traffic.stats import LAGS, Flow, StatsPlan, block_rows_of, gini, stats_document, top_half_share
from moeplan.traffic.tiles import BlockTable
from moeplan.traffic.trace import RoutingTrace, load_trace

REAL = Path(__file__).resolve().parent.parent / "../shared/data/routing/gpt-oss-20b.decode-topk.npz"


def made(lengths: list[int], experts: int, top_k: int, seed: int = 0, phase: np.ndarray | None = None) -> RoutingTrace:
    """Distinct ids in each row, one slot in ten empty, two layers."""
    rng = np.random.default_rng(seed)
    tokens = sum(lengths)
    ids = np.argsort(rng.random((tokens, 2, experts)), axis=2)[:, :, :top_k].astype(np.int16)
    ids[rng.random(ids.shape) < 0.1] = -1
    return RoutingTrace(
        expert_ids=ids,
        layer_ids=np.array([0, 3]),
        request_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        experts=experts,
        phase=phase,
        domains=None,
        id_space="logical",
        order="set",
        provenance={},
        name="made",
    )


def sets(trace: RoutingTrace, row: int, layer: int) -> set[int]:
    return set(trace.expert_ids[row, layer].tolist()) - {-1}


SHAPES = st.sampled_from([(3, 1), (8, 2), (64, 3), (65, 4), (130, 6), (512, 10)])
LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any)


@settings(deadline=None, max_examples=40)
@given(shape=SHAPES, lengths=LENGTHS, seed=st.integers(0, 99))
def test_unions_are_those_of_plain_sets(shape: tuple[int, int], lengths: list[int], seed: int) -> None:
    trace = made(lengths, *shape, seed)
    rows = np.random.default_rng(seed).integers(0, sum(lengths), (7, 3))
    wanted = [[len(set().union(*(sets(trace, r, layer) for r in draw))) for layer in (0, 1)] for draw in rows.tolist()]
    for keep in (1 << 20, 0):  # masks kept, masks made where they are read
        assert Packed.of(trace, keep).distinct(rows).tolist() == wanted


@given(words=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=9))
def test_both_population_counts_agree_with_python(words: list[int]) -> None:
    masks = np.array(words, dtype=np.uint64)
    assert packed_module._count_by_byte(masks).tolist() == [word.bit_count() for word in words]
    assert popcount(masks[:, None]).tolist() == [word.bit_count() for word in words]


@pytest.mark.parametrize(("ids", "experts"), [([[3]], 3), ([[-2]], 3), ([[255]], 200)])
def test_ids_out_of_range_are_not_packed(ids: list[list[int]], experts: int) -> None:
    with pytest.raises(MoeplanError, match=f"is outside -1..{experts - 1}"):
        pack(np.array(ids), experts)


@settings(deadline=None, max_examples=30)
@given(lengths=LENGTHS, seed=st.integers(0, 99), chunk=st.sampled_from([1, 5, 4096]), phased=st.booleans())
def test_streams_and_popularity_are_those_of_plain_counting(
    lengths: list[int], seed: int, chunk: int, phased: bool
) -> None:
    phase = np.concatenate([np.arange(n) >= n // 3 for n in lengths]).astype(np.uint8) if phased else None
    trace = made(lengths, 9, 3, seed, phase)
    edges = trace.request_offsets.tolist()
    spans = [(a + (b - a) // 3 * phased, b) for a, b in itertools.pairwise(edges)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moeplan.traffic.stats._CHUNK", chunk)
        flow = Flow(Packed.of(trace))
        windows, pooled, means = flow.windows((1, 2, 3, 6)), flow.overlap((1, 4)), flow.overlap((1, 4), by_request=True)
        popularity = flow.popularity
    mine = [row for a, b in spans for row in range(a, b)]
    assert flow.rows == len(mine)
    for layer in (0, 1):
        own = [sets(trace, row, layer) for row in range(sum(lengths))]
        assert np.allclose(popularity[layer], [sum(e in own[row] for row in mine) / len(mine) for e in range(9)])
        for at, size in enumerate((1, 2, 3, 6)):
            seen = [len(set().union(*own[t : t + size])) for a, b in spans for t in range(a, b - size + 1)]
            assert np.allclose(windows[at, layer], np.mean(seen) if seen else np.nan, equal_nan=True)
        for at, lag in enumerate((1, 4)):
            each = [[len(own[t] & own[t + lag]) for t in range(a, b - lag)] for a, b in spans if b - a > lag]
            flat = [x for request in each for x in request]
            assert np.allclose(pooled[at, layer], np.mean(flat) if flat else np.nan, equal_nan=True)
            wanted = np.mean([np.mean(request) for request in each]) if each else np.nan
            assert np.allclose(means[at, layer], wanted, equal_nan=True)


def test_blocks_are_those_of_the_block_table() -> None:
    trace = made([6] * 30, 5, 2)
    plan = StatsPlan(block_rows=(2, 5), block_draws=4, seed=3)
    rows = draw_rows(trace, "independent", 20, 4, np.random.default_rng([3, 1, 20]))
    loads = [ExpertLoad.from_ids(trace.expert_ids[draw, layer], 5) for draw in rows for layer in (0, 1)]
    for found in block_rows_of(Flow(Packed.of(trace)), parse_cohort("independent"), 20, plan):
        tables = [BlockTable.of(load, found["block_rows"]) for load in loads]
        count = sum(table.count for table in tables)
        assert found["blocks"] == pytest.approx(count / 8)
        assert found["pair_count_fraction"] == pytest.approx(sum(table.pairs for table in tables) / count)
        used = sum(table.used_rows for table in tables)
        assert found["occupancy"] == pytest.approx(used / (count * found["block_rows"]))


def test_skew_of_known_distributions() -> None:
    table = np.array([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0], [0.1, 0.4, 0.2, 0.3], [0.0, 0.0, 0.0, 0.0]])
    assert gini(table) == pytest.approx([0.0, 0.75, 0.25, 0.0])
    assert top_half_share(table) == pytest.approx([0.5, 1.0, 0.7, 0.0])


def test_identical_cohort_wakes_top_k_and_a_window_is_a_staggered_cohort() -> None:
    trace = made([40] * 8, 20, 4)
    found = stats_document(trace, StatsPlan(batches=(1, 8), cohort="identical", draws=300, block_tokens=(4,)))
    assert found["distinct"][1]["mean"] == pytest.approx(found["distinct"][0]["mean"], abs=0.1)
    one = stats_document(trace, StatsPlan(batches=(4,), cohort="staggered:1", draws=4000, block_tokens=(4,)))
    window = {row["tokens"]: row["distinct"] for row in one["window"]}
    assert one["distinct"][0]["mean"] == pytest.approx(window[4], rel=0.01)


def test_what_a_small_trace_cannot_give_is_named() -> None:
    trace = made([3, 2], 8, 2)
    found = stats_document(trace, StatsPlan(draws=10))
    assert [row["batch"] for row in found["distinct"]] == [1, 2, 4]
    assert [row["tokens"] for row in found["window"]] == [1, 2]
    assert found["blocks"] == []
    assert any("5 rows, 8 tokens" in line for line in found["notes"])
    mixed = stats_document(trace, StatsPlan(cohort="1xindependent+1xprefill:2", draws=10))
    assert [row["rows"] for row in mixed["distinct"]] == [3]
    assert "records no phase" in mixed["notes"][0]
    with pytest.raises(MoeplanError, match="no domain labels"):
        stats_document(trace, StatsPlan(cohort="same-domain"))


@pytest.fixture(scope="module")
def real() -> dict[str, Any]:
    if not REAL.is_file():
        pytest.skip(f"no routing data at {REAL}")
    return stats_document(load_trace(REAL), StatsPlan())


def test_real_batches_windows_and_formulas(real: dict[str, Any]) -> None:
    rows = [row for row in real["distinct"] if row["batch"] > 1]
    assert real["draws"] >= 5000
    assert [row["mean"] for row in rows] == pytest.approx([7.23, 12.05, 17.87, 23.21, 26.93], rel=0.005)
    assert [round(row["formula"], 2) for row in rows] == [7.24, 12.09, 17.94, 23.21, 26.82]
    assert [round(row["uniform"], 2) for row in rows] == [7.5, 13.24, 21.0, 28.22, 31.55]
    assert rows[1]["p95"] == 15
    assert all(row["p05"] < row["mean"] < row["p95"] for row in rows)
    window = {row["tokens"]: row["distinct"] for row in real["window"]}
    assert [window[n] for n in (2, 4, 8)] == pytest.approx([6.251, 9.339, 12.920], rel=0.0005)


def test_real_streams_skew_and_blocks(real: dict[str, Any]) -> None:
    assert [row["lag"] for row in real["overlap"]] == list(LAGS)
    shared = [round(row["shared_by_request"], 2) for row in real["overlap"]]
    assert shared == [1.72, 1.51, 1.43, 1.34, 1.27, 1.25, 1.23]
    assert round(real["overlap"][0]["chance"], 2) == 0.76
    assert round(real["top_half_share"], 2) == 0.79
    blocks = {(row["tokens"], row["block_rows"]): row for row in real["blocks"]}
    for key, count, pairs, occupancy in (
        ((256, 16), 79.5, 0.384, 0.81),
        ((384, 16), 111.2, 0.418, 0.86),
        ((256, 64), 34.5, 0.095, 0.46),
        ((384, 64), 41.7, 0.226, 0.58),
    ):
        assert blocks[key]["blocks"] == pytest.approx(count, rel=0.01)
        assert blocks[key]["pair_count_fraction"] == pytest.approx(pairs, abs=0.01)
        assert blocks[key]["occupancy"] == pytest.approx(occupancy, abs=0.01)


def saved(folder: Path) -> Path:
    trace = made([9] * 6, 8, 2)
    np.savez(
        folder / "t.npz",
        expert_ids=trace.expert_ids,
        request_offsets=trace.request_offsets,
        num_experts=np.array(8),
    )
    return folder / "t.npz"


def test_the_command_prints_one_document_and_repeats_itself(tmp_path: Path) -> None:
    words = ["trace", "stats", str(saved(tmp_path)), "--draws", "50", "--tokens", "2,4", "--block-tokens", "6"]
    first, again = (CliRunner().invoke(app, [*words, "--json"]) for _ in range(2))
    assert first.exit_code == 0
    assert first.stdout == again.stdout
    found = json.loads(first.stdout)
    assert set(found["distinct"][0]) >= {"batch", "mean", "p05", "p95", "formula", "uniform"}
    assert set(found["window"][0]) >= {"tokens", "distinct"}
    assert set(found["blocks"][0]) >= {"tokens", "block_rows", "blocks", "pair_count_fraction", "occupancy"}
    assert {"gini", "top_half_share"} <= set(found)
    assert "uniform row of each" in CliRunner().invoke(app, words).stdout


def test_a_missing_matplotlib_is_one_line_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(stats_plot, "import_module", absent)
    with pytest.raises(MoeplanError, match="needs matplotlib: pip install"):
        stats_plot.check_plot(tmp_path / "a.png")
    with pytest.raises(MoeplanError, match=r"expected a name that ends in .png"):
        stats_plot.check_plot(tmp_path / "a.jpg")


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_plot_is_written_whole(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    document = stats_document(made([9] * 6, 8, 2), StatsPlan(batches=(1, 2, 4), draws=50, block_tokens=(4,)))
    stats_plot.plot_stats(document, tmp_path / f"a.{suffix}")
    assert [path.name for path in tmp_path.iterdir()] == [f"a.{suffix}"]
    assert (tmp_path / f"a.{suffix}").stat().st_size > 5000
