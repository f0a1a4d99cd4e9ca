"""Synthetic traces: exact popularity, fitted streams, honest labels."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from typer.testing import CliRunner

from moeplan.cli import app
from moeplan.errors import MoeplanError
from moeplan.store import Store
from moeplan.traffic.chance import mean_distinct
from moeplan.traffic.cohort import parse_cohort
from moeplan.traffic.packed import Packed
from moeplan.traffic.recipe import (
    Recipe,
    load_streams,
    recipe_of_profile,
    recipe_of_trace,
    save_streams,
    skewed,
    synth_document,
    synthesize,
)
from moeplan.traffic.stats import LAGS, Flow, StatsPlan, distinct_row, stats_document
from moeplan.traffic.synth import Stream, biases, draw_layer, fit_stream, inclusion, overlap_curve
from moeplan.traffic.trace import load_trace

ROOT = Path(__file__).resolve().parent.parent
REAL = ROOT / "../shared/data/routing/gpt-oss-20b.decode-topk.npz"
STORE = Store(traces=ROOT / "traces")
CALM = Stream(0.3, 0.15, 0.9, 0.35, 0.3)


def test_inclusion_of_two_experts_is_the_closed_form() -> None:
    """P(b0 + z0 > b1 + z1) = Phi((b0 - b1) / sqrt 2)."""
    for gap in (0.0, 0.7, 3.0):
        found = inclusion(np.array([[gap, 0.0]]), 1)[0]
        assert found == pytest.approx([norm.cdf(gap / math.sqrt(2)), norm.cdf(-gap / math.sqrt(2))], abs=1e-9)


@settings(deadline=None, max_examples=25)
@given(weights=st.lists(st.floats(0.05, 1.0), min_size=3, max_size=12), data=st.data())
def test_biases_give_back_the_popularity(weights: list[float], data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, len(weights) - 1))
    wanted = skewed(np.array([weights]), top_k, 0.9)  # scaled to the sum top_k, none above 1
    found = inclusion(biases(wanted, top_k), top_k)
    assert found.sum() == pytest.approx(top_k, abs=1e-6)
    assert np.abs(found - wanted).max() < (1e-5 if wanted.max() < 0.999 else 5e-3)


def test_inclusion_counts_every_subset() -> None:
    """At any threshold the leave-one-out count is the sum over all subsets: checked by drawing 200,000 tokens."""
    bias = np.array([[0.5, -0.3, 0.0, 1.2, -1.0]])
    score = bias + np.random.default_rng(0).standard_normal((200_000, 5))
    for top_k in (1, 2, 4):
        drawn = np.bincount(np.argsort(-score, axis=1)[:, :top_k].ravel(), minlength=5) / len(score)
        assert inclusion(bias, top_k)[0] == pytest.approx(drawn, abs=0.005)


def test_overlap_curve_runs_from_chance_to_all() -> None:
    shares = skewed(np.linspace(0.1, 1.0, 16)[None], 4, 1.5)
    curve = overlap_curve(biases(shares, 4)[0], 4, np.random.default_rng(0))
    assert curve[0] == pytest.approx((shares**2).sum(), abs=0.05)
    assert curve[-1] == 4.0
    assert (np.diff(curve) > 0).all()


@pytest.mark.parametrize("stream", [Stream(0.2, 0.3, 0.9, 0.1, 0.2), Stream(0.5, 0.0, 0.95, 0.4, 0.35), CALM])
def test_a_stream_is_found_again_from_its_overlaps(stream: Stream) -> None:
    curve = np.linspace(0.5, 4.0, 16) ** 1.1
    from moeplan.traffic.synth import _GRID

    lags = np.array(LAGS, dtype=np.float64)
    found = fit_stream(curve, lags, np.interp(stream.correlation(lags), _GRID, curve))
    assert found.correlation(lags) == pytest.approx(stream.correlation(lags), abs=0.01)
    assert found.lasting == pytest.approx(stream.lasting, abs=0.03)


def test_rows_hold_distinct_ids_whatever_the_lengths() -> None:
    lengths = np.array([1, 7, 3, 12, 1])
    ids = draw_layer(np.zeros(9), CALM, 4, lengths, np.random.default_rng(0))
    assert ids.shape == (24, 4)
    assert (np.diff(np.sort(ids, axis=1), axis=1) > 0).all()
    assert ids.max() < 9


def test_a_stream_without_memory_is_independent_and_a_lasting_one_never_changes() -> None:
    lengths = np.full(200, 8)
    chance, fixed = Stream(0.0, 0.0, 0.9, 0.0, 0.3), Stream(1.0, 0.0, 0.9, 0.0, 0.3)
    shares = skewed(np.linspace(0.2, 1.0, 12)[None], 3, 1.0)
    recipe = Recipe("made", shares, 3, 10_000, (chance,), "given")
    flow = Flow(Packed.of(synthesize(recipe, lengths, 0)))
    assert flow.overlap((1, 4)).mean(axis=1) == pytest.approx([(shares**2).sum()] * 2, abs=0.08)
    still = synthesize(Recipe("made", shares, 3, 10_000, (fixed,), "given"), lengths, 0)
    assert Flow(Packed.of(still)).overlap((1, 4)).mean(axis=1).tolist() == [3.0, 3.0]


def test_a_synthetic_gpt_oss_is_like_the_real_one() -> None:
    """Batch means within 1 % and windows within 5 % of the real trace's figures, from the shipped profile alone."""
    recipe = recipe_of_profile("gpt-oss-20b", STORE, allow_thin=False)
    flow = Flow(Packed.of(synthesize(recipe, np.full(160, 96), seed=1)))
    real = {2: 7.23, 4: 12.05, 8: 17.87, 16: 23.21, 32: 26.93}
    for batch, mean in real.items():
        found = distinct_row(flow, parse_cohort("independent"), batch, 1000, 0)["mean"]
        assert found == pytest.approx(mean, rel=0.01), batch
    assert flow.windows((2, 4, 8)).mean(axis=1) == pytest.approx([6.251, 9.339, 12.920], rel=0.05)
    shared = flow.overlap(LAGS).mean(axis=1)
    assert shared == pytest.approx([1.72, 1.51, 1.43, 1.34, 1.27, 1.25, 1.23], rel=0.05)
    assert np.abs(flow.popularity - recipe.shares).mean() < 0.02
    assert not recipe.notes


def test_the_shipped_streams_come_from_the_real_trace() -> None:
    if not REAL.is_file():
        pytest.skip(f"no routing data at {REAL}")
    fitted = recipe_of_trace(load_trace(REAL), allow_thin=False, seed=0)
    shipped = recipe_of_profile("gpt-oss-20b", STORE, allow_thin=False)
    for mine, theirs in zip(fitted.streams, shipped.streams, strict=True):
        assert mine.correlation(LAGS) == pytest.approx(theirs.correlation(LAGS), abs=1e-4)
    assert fitted.overlap == pytest.approx(shipped.overlap, rel=1e-4)
    assert fitted.window == pytest.approx(shipped.window, rel=1e-4)


def test_a_trace_made_from_a_synthetic_trace_is_like_it() -> None:
    shares = skewed(np.linspace(0.1, 1.0, 24)[None].repeat(2, axis=0), 4, 1.2)
    first = synthesize(Recipe("made", shares, 4, 10_000, (CALM, CALM), "given"), np.full(100, 100), 0)
    again = recipe_of_trace(first, allow_thin=False, seed=0)
    assert again.shares == pytest.approx(first_shares := Flow(Packed.of(first)).popularity, abs=1e-6)
    assert first_shares.sum(axis=1) == pytest.approx([4, 4])
    for stream in again.streams:
        assert stream.correlation(LAGS) == pytest.approx(CALM.correlation(LAGS), abs=0.06)


@given(skew=st.floats(0.0, 4.0))
def test_skew_moves_the_distinct_count_one_way(skew: float) -> None:
    shares = np.array([[0.9, 0.6, 0.5, 0.4, 0.35, 0.25]])
    bent, more = skewed(shares, 3, skew), skewed(shares, 3, skew + 0.5)
    for one in (bent, more):
        assert one.sum() == pytest.approx(3)
        assert (one <= 1).all()
    assert mean_distinct(more[0], 4) <= mean_distinct(bent[0], 4) + 1e-9
    assert skewed(shares, 3, 0.0) == pytest.approx(np.full((1, 6), 0.5))


def test_the_same_seed_gives_the_same_ids_and_another_does_not() -> None:
    recipe = Recipe("made", np.full((2, 8), 0.25), 2, 10_000, (CALM, CALM), "given")
    one, two, other = (synthesize(recipe, np.array([5, 9]), seed).expert_ids for seed in (3, 3, 4))
    assert (one == two).all()
    assert (one != other).any()
    assert (one[:, 0] != one[:, 1]).any()


def profile(folder: Path, tokens: int) -> Store:
    (folder / "own").mkdir(parents=True)
    (folder / "own" / "header.toml").write_text(f"tokens = {tokens}\nlayers = 2\nexperts = 8\ntop_k = 2\n")
    np.savez(folder / "own" / "popularity.npz", popularity=np.full((2, 8), 0.25))
    return Store(traces=folder)


def test_a_thin_profile_is_refused_or_labelled_everywhere(tmp_path: Path) -> None:
    store = profile(tmp_path, 1999)
    with pytest.raises(MoeplanError, match="own: tokens = 1999, fewer than 2000"):
        recipe_of_profile("own", store, allow_thin=False)
    recipe = recipe_of_profile("own", store, allow_thin=True)
    trace = synthesize(recipe, np.full(40, 20), 0)
    assert "thin" in trace.name
    assert any("1999 tokens" in line for line in trace.provenance["notes"])
    seen = stats_document(trace, StatsPlan(batches=(2,), draws=20, block_tokens=(4,)))["notes"]
    assert seen[0] == "synthetic trace, made from own"
    assert any("1999 tokens" in line for line in seen)
    found = synth_document(recipe, trace, 0)
    assert found["thin"] is True
    assert any("1999 tokens" in line for line in found["notes"])
    assert not any("thin:" in line for line in recipe_of_profile("own", profile(tmp_path / "b", 2000), False).notes)


def test_borrowed_streams_are_called_assumed(tmp_path: Path) -> None:
    recipe = recipe_of_profile("own", profile(tmp_path, 5000), allow_thin=False)
    assert recipe.stream_source == "assumed: the mean layer of gpt-oss-20b"
    assert recipe.notes
    assert not recipe.overlap
    with pytest.raises(MoeplanError, match=r"--stream olmoe-1b-7b: no traces/olmoe-1b-7b/stream\.toml"):
        recipe_of_profile("own", Store(traces=tmp_path), False, "olmoe-1b-7b")


def test_streams_survive_their_file_and_wrong_ones_are_refused(tmp_path: Path) -> None:
    recipe = Recipe("m", np.full((1, 4), 0.5), 2, 9, (CALM,), "x", overlap={1: 1.5}, window={2: 3.25})
    save_streams(recipe, tmp_path / "stream.toml", {"model": "m"})
    assert load_streams(tmp_path / "stream.toml") == ((CALM,), {1: 1.5}, {2: 3.25})
    good = (tmp_path / "stream.toml").read_text()
    for old, new in (("lasting = 0.3", "lasting = 0.9"), ("medium = 0.15\n", ""), ("short = 0.35", "short = nan")):
        assert old in good
        (tmp_path / "bad.toml").write_text(good.replace(old, new))
        with pytest.raises(MoeplanError, match=r"bad\.toml"):
            load_streams(tmp_path / "bad.toml")


def test_the_command_writes_a_trace_that_loads_and_repeats_itself(tmp_path: Path) -> None:
    words = ["trace", "synth", "mixtral-8x7b", "--requests", "30", "--length", "40", "--json", "--seed", "5"]
    documents = []
    for name in ("a", "b"):
        result = CliRunner().invoke(app, [*words, "-o", str(tmp_path / name), "--traces", str(ROOT / "traces")])
        assert result.exit_code == 0, result.output
        documents.append(json.loads(result.stdout))
    first, second = (load_trace(tmp_path / name) for name in ("a", "b"))
    assert (first.expert_ids == second.expert_ids).all()
    assert first.expert_ids.shape == (1200, 3, 2)
    assert first.provenance["kind"] == "synthetic"
    assert documents[0]["distinct"] == documents[1]["distinct"]
    assert CliRunner().invoke(app, ["trace", "check", str(tmp_path / "a")]).exit_code == 0
    for row, batch in itertools.product(documents[0]["distinct"], (2, 4)):
        assert row["batch"] != batch or row["mean"] == pytest.approx(row["wanted"], rel=0.05)
    refused = CliRunner().invoke(app, [*words, "-o", str(tmp_path / "a"), "--traces", str(ROOT / "traces")])
    assert isinstance(refused.exception, MoeplanError)
    assert "exists already" in str(refused.exception)
