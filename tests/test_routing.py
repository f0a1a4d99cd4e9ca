"""Routing arms, popularity profiles and trace files."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from moeplan.errors import MoeplanError
from moeplan.store import Store
from moeplan.traffic.cohort import cohort_rows
from moeplan.traffic.load import ExpertLoad
from moeplan.traffic.popularity import Popularity, load_popularity
from moeplan.traffic.routing import Routing, draw_ids, draw_systematic, parse_routing
from moeplan.traffic.trace import load_trace

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT.parent / "shared" / "data" / "routing"
STORE = Store(traces=ROOT / "traces")
UNIFORM = [[3, 2], [3, 5], [4, 5]]
POPULAR = [[15, 8, 7, 27], [16, 9, 4, 25]]


def write_trace(path: Path, **change: object) -> Path:
    rng = np.random.default_rng(1)
    ids = np.argsort(rng.random((12, 2, 8)), axis=2)[:, :, :2].astype(np.uint8)
    arrays: dict[str, object] = {"expert_ids": ids, "request_offsets": np.array([0, 5, 9, 12]), "num_experts": 8}
    arrays |= change
    np.savez(path, **{key: np.asarray(value) for key, value in arrays.items() if value is not None})
    return path


def test_arms_have_the_load_they_promise() -> None:
    def distinct(name: str, tokens: int) -> int:
        return ExpertLoad.from_ids(draw_ids(Routing(name), 128, 8, tokens, 3), 128).distinct

    assert [distinct("identical", n) for n in (1, 4, 100)] == [8, 8, 8]
    assert [distinct("disjoint", n) for n in (1, 4, 16)] == [8, 32, 128]
    assert [distinct("balanced", n) for n in (1, 16, 50)] == [8, 128, 128]
    rows = ExpertLoad.from_ids(draw_ids(Routing("balanced"), 128, 8, 50, 3), 128).rows
    assert set(rows.tolist()) == {3, 4}


def test_disjoint_refuses_more_tokens_than_experts_allow() -> None:
    with pytest.raises(MoeplanError, match="17 tokens of top-8 need 136 experts, the layer has 128"):
        draw_ids(Routing("disjoint"), 128, 8, 17, 0)


@pytest.mark.parametrize("name", ["uniform:", "popularity", "trace", "popularity:", "random", "uniform:x", ""])
def test_unknown_arms_are_refused(name: str) -> None:
    with pytest.raises(MoeplanError, match="--routing"):
        parse_routing(name, STORE)


def test_unknown_profile_names_the_known_ones() -> None:
    with pytest.raises(MoeplanError, match="gpt-oss-20b"):
        parse_routing("popularity:nobody", STORE)


def test_golden_draw_of_every_seed_is_stable() -> None:
    # Pinned: calibration journals name their batches by routing and seed.
    assert draw_ids(Routing("uniform"), 8, 2, 3, 0).tolist() == UNIFORM
    assert draw_ids(parse_routing("popularity:gpt-oss-20b", STORE), 32, 4, 2, 0).tolist() == POPULAR


def test_large_draws_are_cut_in_parts_without_loss() -> None:
    ids = draw_ids(Routing("uniform"), 4096, 1, 3000, 0)  # more cells than one part holds
    assert ids.shape == (3000, 1)
    assert len(np.unique(ids)) > 2000


def test_systematic_sampling_hits_certain_experts_always_and_empty_ones_never() -> None:
    shares = np.array([1.0, 0.0, 0.5, 0.5, 1.0])
    ids = draw_systematic(shares, 500, np.random.default_rng(0))
    rows = ExpertLoad.from_ids(ids, 5).rows
    assert rows[[0, 1, 4]].tolist() == [500, 0, 500]
    assert abs(int(rows[2]) - 250) < 60  # five standard deviations of a fair coin


def test_shipped_profiles_are_sound() -> None:
    for name in ("gpt-oss-20b", "gemma-4-26b-a4b", "olmoe-1b-7b", "mixtral-8x7b"):
        profile = load_popularity(ROOT / "traces" / name)
        assert profile.header["tokens"] >= 2000
        assert {"source", "repository", "commit", "licence"} <= set(profile.header)
        assert np.allclose(profile.shares.sum(axis=1), profile.top_k)


def test_profile_fits_other_sizes_and_says_so() -> None:
    routing = parse_routing("popularity:gpt-oss-20b", STORE)
    assert routing.note(32, 4) is None
    assert "stretched" in (routing.note(128, 8) or "")
    assert "scaled" in (routing.note(32, 6) or "")
    assert routing.popularity is not None
    own = routing.popularity.shares[0]
    assert np.allclose(routing.popularity.layer(0, 32, 4), own)
    wide = routing.popularity.layer(0, 128, 16)  # four times the experts, four times the picks: each split in four
    assert np.allclose(np.sort(wide), np.sort(np.repeat(own, 4)))


def test_profile_shares_are_capped_at_one() -> None:
    shares = np.array([[0.9, 0.5, 0.3, 0.3]])
    fitted = Popularity("x", shares, 2, {}).layer(0, 4, 3)
    assert np.isclose(fitted.sum(), 3)
    assert fitted.max() == 1.0
    assert np.isclose(fitted[1] / fitted[2], 0.5 / 0.3)


@pytest.mark.parametrize(
    ("table", "header", "message"),
    [
        (np.full((1, 4), 0.5), "layers = 2\nexperts = 4\ntop_k = 2\n", "expected floats"),
        (np.full((1, 4), 0.5), "layers = 1\nexperts = 4\n", "top_k = None"),
        (np.full((1, 4), 0.4), "layers = 1\nexperts = 4\ntop_k = 2\n", "does not sum to 2"),
        (np.array([[1.5, 0.5, 0, 0]]), "layers = 1\nexperts = 4\ntop_k = 2\n", "must lie in 0..1"),
        (np.array([[1, 1, 0, 0]]), "layers = 1\nexperts = 4\ntop_k = 2\n", "expected floats"),
    ],
)
def test_defective_profiles_are_refused(tmp_path: Path, table: object, header: str, message: str) -> None:
    (tmp_path / "header.toml").write_text(header)
    np.savez(tmp_path / "popularity.npz", popularity=np.asarray(table))
    with pytest.raises(MoeplanError, match=message):
        load_popularity(tmp_path)


def test_trace_rows_come_from_different_requests(tmp_path: Path) -> None:
    routing = parse_routing(f"trace:{write_trace(tmp_path / 't.npz')}", STORE)
    assert routing.trace is not None
    for seed in range(20):
        rows = cohort_rows(routing.trace, 3, np.random.default_rng(seed))
        assert sorted(np.searchsorted([0, 5, 9, 12], rows, side="right").tolist()) == [1, 2, 3]
    everything = cohort_rows(routing.trace, 12, np.random.default_rng(0))
    assert sorted(everything.tolist()) == list(range(12))
    with pytest.raises(MoeplanError, match="12 rows, 13 tokens"):
        draw_ids(routing, 8, 2, 13, 0)
    with pytest.raises(MoeplanError, match="top-2 of 8 experts, the model has top-4 of 8"):
        draw_ids(routing, 8, 4, 2, 0)


def test_layers_of_one_seed_are_the_same_rows(tmp_path: Path) -> None:
    routing = parse_routing(f"trace:{write_trace(tmp_path / 't.npz')}", STORE)
    assert routing.trace is not None
    both = [draw_ids(routing, 8, 2, 3, 7, layer) for layer in (0, 1)]
    pairs = np.stack(both, axis=1)
    known = {row.tobytes() for row in routing.trace.expert_ids.astype(np.int32)}
    assert all(row.tobytes() in known for row in pairs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": None}, "no array 'num_experts'"),
        ({"expert_ids": np.zeros((3, 2), np.uint8)}, "expert_ids has 2 axes, expected 3"),
        ({"expert_ids": np.full((12, 2, 2), 8, np.uint8)}, r"expert_ids\[0, 0, 0\] = 8 is outside -1..7"),
        ({"expert_ids": np.full((12, 2, 2), -2, np.int16)}, r"= -2 is outside -1..7"),
        ({"expert_ids": np.zeros((12, 2, 2))}, "holds float64, expected integers"),
        ({"expert_ids": np.zeros((0, 2, 2), np.uint8)}, "is empty"),
        ({"expert_ids": np.zeros((12, 2, 9), np.uint8)}, "num_experts = 8 with 9 slots"),
        ({"request_offsets": np.array([0, 5, 11])}, "must rise from 0 to 12, found 3 entries from 0 to 11"),
        ({"request_offsets": np.array([0, 9, 5, 12])}, "must rise"),
        ({"request_offsets": np.array([], np.int64)}, "found 0 entries"),
        ({"num_experts": np.array([8])}, "num_experts has 1 axes"),
    ],
)
def test_defective_traces_are_refused_in_one_line(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(MoeplanError, match=message) as caught:
        load_trace(write_trace(tmp_path / "t.npz", **change))
    assert "t.npz" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_padding_is_allowed(tmp_path: Path) -> None:
    ids = np.full((12, 2, 2), -1, np.int16)
    routing = Routing("trace:x", trace=load_trace(write_trace(tmp_path / "t.npz", expert_ids=ids)))
    assert (draw_ids(routing, 8, 2, 3, 0) == -1).all()


@pytest.mark.parametrize("keep", [0, 10, 200, -30])
def test_truncated_files_are_refused(tmp_path: Path, keep: int) -> None:
    path = write_trace(tmp_path / "t.npz")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(MoeplanError, match=r"t\.npz: .*not a readable npz") as caught:
        load_trace(path)
    assert "\n" not in str(caught.value)


def test_corrupt_member_is_refused(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.npz")
    raw = bytearray(path.read_bytes())
    at = raw.find(b"NUMPY") + 130
    raw[at] ^= 0xFF
    path.write_bytes(bytes(raw))
    with pytest.raises(MoeplanError, match=r"t\.npz: expert_ids: not a readable npz"):
        load_trace(path)


class Trap:
    """Opens a file for writing when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.marker), "w")


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    path, marker = write_trace(tmp_path / "t.npz"), tmp_path / "sprung"
    buffer = io.BytesIO()
    np.save(buffer, np.array([Trap(marker)], dtype=object), allow_pickle=True)
    with zipfile.ZipFile(path) as source:
        members = {name: source.read(name) for name in source.namelist()}
    members["expert_ids.npy"] = buffer.getvalue()
    with zipfile.ZipFile(path, "w") as target:
        for name, data in members.items():
            target.writestr(name, data)
    with pytest.raises(MoeplanError, match="expert_ids: not a readable npz"):
        load_trace(path)
    assert not marker.exists()


def test_missing_and_foreign_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MoeplanError, match="no such file"):
        parse_routing(f"trace:{tmp_path / 'none.npz'}", STORE)
    text = tmp_path / "t.npz"
    text.write_text("not a zip")
    with pytest.raises(MoeplanError, match="not a readable npz"):
        load_trace(text)


@pytest.mark.skipif(not DATA.is_dir(), reason="routing data are not on this machine")
def test_real_trace_agrees_with_its_published_union() -> None:
    routing = parse_routing(f"trace:{DATA / 'gpt-oss-20b.decode-topk.npz'}", STORE)
    loads = [
        ExpertLoad.from_ids(draw_ids(routing, 32, 4, 8, seed, layer), 32).distinct
        for seed in range(100)
        for layer in range(24)
    ]
    assert abs(float(np.mean(loads)) - 17.87) < 0.15  # facts: 17.87 over 8,000 draws


@pytest.mark.skipif(not DATA.is_dir(), reason="routing data are not on this machine")
def test_shipped_profiles_regenerate_unchanged(tmp_path: Path) -> None:
    import runpy

    derive = runpy.run_path(str(ROOT / "benchmarks" / "derive_popularity.py"))
    derive["main"](DATA, tmp_path)
    for made in sorted(tmp_path.glob("*/*")):
        kept = ROOT / "traces" / made.relative_to(tmp_path)
        if made.suffix == ".npz":
            with np.load(made) as a, np.load(kept) as b:
                assert np.array_equal(a["popularity"], b["popularity"])
        else:
            assert made.read_text() == kept.read_text()


def test_a_trace_arm_carries_its_cohort(tmp_path: Path) -> None:
    ids = np.arange(24, dtype=np.uint8).reshape(24, 1, 1) % 6
    file = tmp_path / "a@b.npz"  # the name of a file may hold the mark of a cohort
    np.savez(file, expert_ids=ids, request_offsets=np.arange(0, 25, 6), num_experts=6)
    assert parse_routing(f"trace:{file}", Store()).cohort == "independent"
    arm = parse_routing(f"trace:{file}@stream:5", Store())
    assert (arm.name, arm.kind, arm.cohort) == (f"trace:{file}@stream:5", "trace", "stream:5")
    rows = draw_ids(arm, 6, 1, 8, seed=3)[:, 0]
    assert (np.diff(rows[:5]) % 6 == 1).all()
    assert (np.diff(rows[5:]) % 6 == 1).all()  # the second stream is cut to three rows
    for name in ("odd", "stream:x", ""):
        with pytest.raises(MoeplanError, match=r"--cohort|no such file"):
            parse_routing(f"trace:{file}@{name}", Store())
