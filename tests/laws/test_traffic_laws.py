"""Laws of traffic: what must hold for every load, routing and shape."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.errors import MoeplanError
from moeplan.traffic.chance import distinct_distribution, mean_blocks, mean_distinct
from moeplan.traffic.expect import expected_work
from moeplan.traffic.load import ExpertLoad
from moeplan.traffic.partition import Partition
from moeplan.traffic.path import parse_path
from moeplan.traffic.popularity import Popularity
from moeplan.traffic.routing import Routing, draw_ids, draw_systematic
from moeplan.traffic.shape import LayerShape, WeightFormat
from moeplan.traffic.tiles import BlockTable, run_reads, tile_counts
from moeplan.traffic.work import work_of

NAMES = ["gather", "gather_sorted", "fused_per_token", "fused", "dedup", "grouped:8", "grouped:64"]
loads = st.lists(st.integers(0, 200), min_size=1, max_size=40).map(lambda rows: np.array(rows, np.int32))
sizes = st.integers(1, 40).flatmap(lambda e: st.tuples(st.just(e), st.integers(1, e)))
formats = st.sampled_from(["bf16", "affine4-g64", "affine6-g32", "mxfp4", "fp8-e4m3-b128x128"])


@st.composite
def shapes(draw: st.DrawFn) -> LayerShape:
    experts, top_k = draw(sizes)
    gate, up, down = (WeightFormat.parse(draw(formats)) for _ in range(3))
    return LayerShape(128 * draw(st.integers(1, 4)), 128 * draw(st.integers(1, 8)), experts, top_k, gate, up, down)


@given(loads, st.integers(1, 70))
def test_runs_read_distinct_plus_cut_boundaries(rows: np.ndarray, tile: int) -> None:
    owner = np.repeat(np.arange(rows.size), rows)
    by_hand = sum(len(set(owner[at : at + tile].tolist())) for at in range(0, owner.size, tile))
    assert int(run_reads(rows, tile)) == by_hand
    cut = sum(owner[at - 1] == owner[at] for at in range(tile, owner.size, tile))
    assert by_hand == np.count_nonzero(rows) + cut


@given(loads, st.integers(1, 70))
def test_blocks_hold_all_rows_and_no_spare_block(rows: np.ndarray, height: int) -> None:
    table = BlockTable.of(ExpertLoad(rows, 1), height)
    assert (table.blocks * height >= rows).all()
    assert ((table.blocks - 1) * height < rows).all()
    assert table.count == table.leaders + table.pairs
    assert np.count_nonzero(rows) <= table.leaders <= table.count
    assert 0 <= table.pair_count_fraction <= 0.5
    assert table.padded_rows == table.count * height - rows.sum()


@given(loads, st.sampled_from(NAMES), shapes())
def test_reads_lie_between_distinct_and_slots(rows: np.ndarray, name: str, shape: LayerShape) -> None:
    path, load = parse_path(name), ExpertLoad(rows, int(rows.sum()))
    work = work_of(path, load, shape)
    assert load.distinct <= work.tiles <= load.slots
    assert work.unique_weight_bytes <= work.issued_weight_bytes == work.tiles * shape.plane_bytes
    assert work.padded_rows >= 0
    if path.block_rows > 1 and work.padded_rows:
        assert work.slots + work.padded_rows == work.tiles * path.block_rows


@given(st.lists(loads.filter(lambda r: r.size == 1), min_size=1, max_size=5), st.sampled_from(NAMES))
def test_tiles_of_a_table_are_those_of_its_rows(tables: list[np.ndarray], name: str) -> None:
    path, table = parse_path(name), np.stack(tables)
    tiles, padded = tile_counts(path, table)
    for i, rows in enumerate(table):
        assert (int(tiles[i]), int(padded[i])) == tuple(int(x) for x in tile_counts(path, rows))


@given(sizes, st.integers(1, 60), st.sampled_from(["uniform", "balanced", "identical"]), st.integers(0, 2**32))
def test_every_row_holds_distinct_experts(size: tuple[int, int], tokens: int, arm: str, seed: int) -> None:
    ids = draw_ids(Routing(arm), *size, tokens, seed)
    assert ids.shape == (tokens, size[1])
    assert ids.dtype == np.int32
    assert all(len(set(row)) == size[1] for row in ids.tolist())
    assert np.array_equal(ids, draw_ids(Routing(arm), *size, tokens, seed))
    load = ExpertLoad.from_ids(ids, size[0])
    assert load.slots == tokens * size[1]
    if arm == "balanced":
        assert int(load.rows.max() - load.rows.min()) <= 1
    if arm == "identical":
        assert load.distinct == size[1]


@st.composite
def profiles(draw: st.DrawFn) -> Popularity:
    experts, top_k = draw(sizes)
    heat = np.array(draw(st.lists(st.floats(0.001, 1), min_size=experts, max_size=experts)))
    flat = Popularity("x", heat[None], top_k, {})
    return Popularity("x", flat.layer(0, experts, top_k)[None], top_k, {})


@given(profiles(), sizes)
def test_fitted_profiles_are_inclusion_probabilities(profile: Popularity, size: tuple[int, int]) -> None:
    fitted = profile.layer(0, *size)
    assert fitted.shape == (size[0],)
    assert abs(fitted.sum() - size[1]) < 1e-9
    assert (fitted >= 0).all()
    assert (fitted <= 1).all()


@given(profiles(), st.integers(1, 50), st.integers(0, 1000))
def test_systematic_draws_hold_top_k_distinct_experts(profile: Popularity, tokens: int, seed: int) -> None:
    shares = profile.shares[0]
    ids = draw_systematic(shares, tokens, np.random.default_rng(seed))
    assert ids.shape == (tokens, profile.top_k)
    assert all(len(set(row)) == profile.top_k for row in ids.tolist())


def test_systematic_draws_have_the_asked_probabilities() -> None:
    rng = np.random.default_rng(3)
    shares = Popularity("x", rng.random((1, 24)) ** 3, 5, {}).layer(0, 24, 5)
    tokens = 40_000
    rows = ExpertLoad.from_ids(draw_systematic(shares, tokens, rng), 24).rows
    sigma = np.sqrt(tokens * shares * (1 - shares)) + 1e-9
    assert (np.abs(rows - tokens * shares) <= 5 * sigma).all()


@given(sizes, st.integers(1, 200))
def test_uniform_union_lies_between_skew_and_balance(size: tuple[int, int], tokens: int) -> None:
    experts, top_k = size
    law = distinct_distribution(experts, top_k, tokens)
    assert abs(law.sum() - 1) < 1e-9
    mean = mean_distinct(np.full(experts, top_k / experts), tokens)
    assert top_k - 1e-9 <= mean <= min(experts, tokens * top_k) + 1e-9
    assert abs(float(law @ np.arange(experts + 1)) - mean) < 1e-6 * experts


@given(profiles(), st.integers(1, 300))
def test_skew_never_widens_the_union(profile: Popularity, tokens: int) -> None:
    shares = profile.shares[0]
    even = np.full(shares.size, shares.mean())
    assert mean_distinct(shares, tokens) <= mean_distinct(even, tokens) + 1e-9


@given(profiles(), st.integers(1, 2000), st.integers(1, 100))
def test_mean_blocks_lie_between_rows_and_rows_plus_distinct(profile: Popularity, tokens: int, height: int) -> None:
    shares = profile.shares[0]
    blocks, slots, distinct = mean_blocks(shares, tokens, height), tokens * shares.sum(), mean_distinct(shares, tokens)
    slack = 1e-6 * slots
    assert slots / height - slack <= blocks <= slots / height + distinct + slack
    assert distinct - slack <= blocks


@settings(max_examples=30, deadline=None)
@given(shapes(), st.integers(1, 64), st.sampled_from(["gather", "fused", "dedup", "grouped:16"]))
def test_more_tokens_never_read_less(shape: LayerShape, tokens: int, name: str) -> None:
    path = parse_path(name)
    one, more = (expected_work(path, shape, n, Routing("uniform")) for n in (tokens, tokens + 1))
    for field in ("slots", "distinct_mean", "distinct_p95", "unique_bytes", "issued_bytes", "tiles"):
        assert getattr(one, field) <= getattr(more, field) * (1 + 1e-12)


@given(shapes(), st.sampled_from([1, 2, 4]))
def test_slices_of_a_plane_add_up(shape: LayerShape, tp: int) -> None:
    try:
        local = Partition(tp=tp).local(shape)
    except MoeplanError as refused:
        assert "cuts through" in str(refused) or "does not divide" in str(refused)  # noqa: PT017 - both are answers
        return
    assert local.plane_weights * tp == shape.plane_weights
    assert local.plane_bytes * tp == shape.plane_bytes
