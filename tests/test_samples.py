"""The journal: what is written is read back, a killed run loses nothing, a damaged file is one clear error."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.cost.samples import SCHEMA, Journal, SampleFile, lines, load
from moeplan.errors import MoeplanError
from moeplan.traffic.shape import LayerShape, WeightFormat

FORM = WeightFormat.parse("affine4-g64")
SHAPE = LayerShape(256, 128, 16, 4, FORM, FORM, FORM)
ARM: dict[str, Any] = {
    "path": "gather", "tokens": 2, "routing": "uniform", "seed": 0, "chain": [12, 48], "slots": 8.0, "distinct": 6.5,
    "blocks": {"16": 6.5}, "signature": "s", "config_hash": "h", "parity_rms": 1e-3, "cache_resident": True,
}  # fmt: skip


def journal(path: Path, times: list[tuple[float, float]], **arm: Any) -> SampleFile:
    out = Journal(path)
    out.write("header", schema=SCHEMA, shape=SHAPE.to_dict(), kind="measured", device="d")
    out.write("arm", arm="a", **(ARM | arm))
    out.write("round", round=0, clocks=None)
    for round_, (short, long) in enumerate(times):
        out.write("time", arm="a", round=round_, short_s=short, long_s=long)
    out.close()
    return load(path)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    found = journal(tmp_path / "deep" / "j.jsonl", [(0.1, 0.3), (0.2, 0.5)])
    (sample,) = found.samples
    assert (sample.arm, sample.path, sample.tokens, sample.chain) == ("a", "gather", 2, (12, 48))
    assert sample.shape == SHAPE
    assert (sample.short_s, sample.long_s) == ((0.1, 0.2), (0.3, 0.5))
    assert (sample.slots, sample.distinct, sample.blocks) == (8.0, 6.5, {16: 6.5})
    assert (sample.signature, sample.config_hash, sample.parity_rms) == ("s", "h", 1e-3)
    assert sample.cache_resident
    assert found.rounds[0]["clocks"] is None


def test_an_unknown_cache_is_not_called_resident(tmp_path: Path) -> None:
    assert not journal(tmp_path / "j", [(1, 2)], cache_resident=None).samples[0].cache_resident


@settings(deadline=None, max_examples=50)
@given(
    layer=st.floats(1e-7, 1e-2),
    host=st.floats(0, 1e-2),
    chain=st.tuples(st.integers(1, 40), st.integers(1, 200)),
    rounds=st.integers(1, 6),
)
def test_slope_and_intercept_recover_a_straight_line(
    tmp_path_factory: pytest.TempPathFactory, layer: float, host: float, chain: tuple[int, int], rounds: int
) -> None:
    short, long = chain[0], chain[0] + chain[1]
    times = [(host + short * layer, host + long * layer)] * rounds
    sample = journal(tmp_path_factory.mktemp("j") / "j", times, chain=[short, long]).samples[0]
    size = host + long * layer
    assert sample.median == pytest.approx(layer, abs=1e-12 * size)
    assert sample.intercept == pytest.approx(host, abs=1e-9 * size)
    assert sample.spread == pytest.approx(0, abs=1e-12 * size)


def test_spread_is_half_the_interquartile_range(tmp_path: Path) -> None:
    sample = journal(tmp_path / "j", [(0, 36.0 * t) for t in (1, 2, 3, 4, 5, 6, 7)]).samples[0]
    assert sample.median == 4
    assert sample.spread == pytest.approx((6 - 2) / 2)  # exclusive quartiles of 1..7 are 2 and 6


def test_failed_and_declined_arms_are_no_samples(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal(path, [(1, 2)])
    more = Journal(path)
    more.write("failed", arm="a", reason="killed by SIGABRT")
    more.write("declined", arm="b", reason="too wide")
    more.close()
    found = load(path)
    assert not found.samples
    assert found.failed == {"a": "killed by SIGABRT"}
    assert found.declined == {"b": "too wide"}


@settings(deadline=None, max_examples=50)
@given(cut=st.integers(0, 2000))
def test_a_file_cut_anywhere_keeps_its_whole_lines(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("j") / "j"
    journal(path, [(1, 2), (3, 4)])
    whole = path.read_bytes()
    path.write_bytes(whole[: min(cut, len(whole))])
    kept = whole[: min(cut, len(whole))].split(b"\n")[:-1]
    assert len(list(lines(path))) == len(kept)
    again = Journal(path)
    again.write("round", round=9)
    again.close()
    assert path.read_bytes().split(b"\n")[:-2] == kept
    assert list(lines(path))[-1]["round"] == 9


HEADER = f'{{"type": "header", "schema": "{SCHEMA}"}}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "schema: None"),
        ('{"type": "header", "schema": "moeplan.samples/99"}\n', "schema: 'moeplan.samples/99'"),
        ('{"type": "header"\n', "line 1"),
        ("[1]\n", "line 1: no type"),
        (HEADER + '{"type": "time", "arm": "a", "short_s": "x", "long_s": 1}\n', "'x'"),
        (HEADER + '{"type": "time", "arm": "a", "short_s": 1, "long_s": 1}\n', "'a'"),
    ],
)
def test_a_damaged_file_is_one_error_with_its_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(MoeplanError) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_two_runs_cannot_write_one_journal(tmp_path: Path) -> None:
    first = Journal(tmp_path / "j")
    with pytest.raises(MoeplanError, match="another run is writing"):
        Journal(tmp_path / "j")
    first.close()
    Journal(tmp_path / "j").close()


def test_a_missing_file_and_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(MoeplanError, match="cannot read"):
        load(tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(MoeplanError, match="cannot write"):
        Journal(tmp_path / "file" / "j.jsonl")
