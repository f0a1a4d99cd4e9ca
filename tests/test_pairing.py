"""Paired sort-blocks: the document's own table, laws of the counts, gates, resources, skill cards."""

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from moeplan.cli import app
from moeplan.errors import MoeplanError
from moeplan.planning.segment import why_not_stage_one
from moeplan.planning.skill_card import read_card
from moeplan.store import Store
from moeplan.traffic.expect import Case
from moeplan.traffic.load import ExpertLoad
from moeplan.traffic.pairs import PairCounts, blocks_of_ids, parse_blocks
from moeplan.traffic.routing import draw_ids, parse_routing
from moeplan.traffic.shape import LayerShape, WeightFormat
from moeplan.traffic.tiles import BlockTable

REFERENCE = "173x1,84x2,2x3"
BF16 = WeightFormat.parse("bf16")
CARD = """A title

---
id: a_card
match:
  gens: [gfx950]
  dtypes: [mxfp4, fp8_e4m3]
  regimes: [decode]
expects: {isolated_speedup_min: 1.2}
validation:
  gpu: gfx950 / MI355X
  measured: {isolated: 'Backend 0.2.2, 3 runs'}
---
text
"""


def run(*words: str, code: int = 0) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["pairing", *words, "--json"])
    assert done.exit_code == code, done.output
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_the_reference_table_on_its_card() -> None:
    found = run("--blocks", REFERENCE, "--device", "mi355x")
    assert [found[name] for name in ("blocks", "pairs", "leaders", "solos", "distinct")] == [347, 86, 261, 175, 259]
    assert round(found["pair_count_fraction"], 4) == 0.2478
    assert round(found["paired_block_fraction"], 4) == 0.4957
    assert round(found["traffic_ceiling"], 4) == 1.3295
    assert (found["lds_bytes_base"], found["lds_bytes_paired"], found["lds_limit"]) == (66048, 132096, 163840)
    assert found["workgroups_per_unit"] == {"base": 2, "paired": 1}
    assert found["uniform"] is None
    assert [gate["holds"] for gate in found["gates"]] == [True, True, None]
    assert found["verdict"] == "mixed / unknown"
    assert "FlyDSL" in found["row_bytes_source"]
    assert set(found["predicted"].values()) == {None}


def test_a_doubled_128_row_tile_does_not_build() -> None:
    found = run("--blocks", REFERENCE, "--device", "mi355x", "--tile-rows", "128", code=3)
    assert found["verdict"] == "does not build"
    assert "264,192 > 163,840" in found["reason"]
    measured = run("--blocks", REFERENCE, "--device", "mi355x", "--tile-rows", "128", "--ablation", "2,1,0.1", code=3)
    assert measured["verdict"] == "does not build"


def test_few_pairs_are_not_worth_it() -> None:
    found = run("--blocks", "340x1,7x2", "--device", "mi355x", code=3)
    assert (round(found["pair_count_fraction"], 4), round(found["traffic_ceiling"], 4)) == (0.0198, 1.0202)
    assert found["verdict"] == "do not pair"


@pytest.mark.parametrize(
    ("arm", "verdict", "code"), [("192.706,171.34,3.158", "pair", 0), ("192.706,171.34,20", "do not pair", 3)]
)
def test_a_measured_pair_of_arms_decides_with_the_producer_in_it(arm: str, verdict: str, code: int) -> None:
    found = run("--blocks", REFERENCE, "--device", "mi355x", "--ablation", arm, code=code)
    base, paired, producer = map(float, arm.split(","))
    assert found["measured"]["gain"] == pytest.approx(base / (paired + producer) - 1)
    assert found["verdict"] == verdict


def test_counters_bound_what_repeated_reads_can_cost() -> None:
    size = ("--columns", "4096", "--hidden", "7168", "--format", "mxfp4", "--device", "mi355x", "--blocks", REFERENCE)
    plane = WeightFormat.parse("mxfp4").bytes(4096, 7168)
    once = run(*size, "--counters", f"{259 * plane},600", code=3)  # a cache served every second read
    assert (once["verdict"], once["gates"][2]["holds"]) == ("do not pair", False)
    all_of_them = run(*size, "--counters", f"{347 * plane},800")
    assert all_of_them["gates"][2]["holds"] is None
    saved = 86 * plane / 8e12
    assert f"{800e-6 / (800e-6 - saved):.3f}x" in all_of_them["gates"][2]["reason"]
    assert all_of_them["bytes"]["unpaired"] == 347 * plane


def test_scheduling_rounds_of_an_exact_and_a_worst_case_grid() -> None:
    size = ("--columns", "512", "--tile-columns", "256", "--device", "mi355x", "--blocks", REFERENCE)
    assert run(*size)["rounds"] == {"unpaired": 2, "leaders": 3, "worst_case_grid": 3}  # 694/512, 522/256, 694/256
    wide = run("--columns", "1024", *size[2:], "--tp", "2")
    assert wide["rounds"] == {"unpaired": 2, "leaders": 3, "worst_case_grid": 3}
    assert set(run("--device", "mi355x", "--blocks", REFERENCE)["rounds"].values()) == {None}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--stage", "2"), "original blocks"),
        (("--phase", "prefill"), "arithmetic"),
        (("--kernels", "mfma_moe2_x"), "of stage 2"),
        (("--kernels", "mfma_moe1,mfma_moe2"), "ambiguous"),
        (("--kernels", "mfma_moe1,topk_reduce"), "top-k"),
        (("--kernels", "gemm_kernel"), "ambiguous"),
    ],
)
def test_other_segments_are_not_applicable(words: tuple[str, ...], reason: str) -> None:
    found = run("--blocks", REFERENCE, "--device", "mi355x", *words, code=3)
    assert found["verdict"] == "not applicable"
    assert reason in found["reason"]


def test_stage_one_is_known_by_its_kernels() -> None:
    assert why_not_stage_one(1, "decode", ["mfma_moe1_am2_bmap", "_blkmap_kernel"]) is None
    assert run("--blocks", REFERENCE, "--device", "mi355x")["segment"]["assumed"] is True
    named = run("--blocks", REFERENCE, "--device", "mi355x", "--kernels", "mfma_moe1")
    assert named["segment"]["assumed"] is False


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40).filter(any))
def test_counts_are_those_of_the_blocks_one_by_one(blocks: list[int]) -> None:
    counts = PairCounts.of(np.array(blocks))
    table = [expert for expert, number in enumerate(blocks) for _ in range(number)]
    pairs, at = 0, 0
    while at < len(table):  # walk the sorted table as the descriptor producer does
        both = at + 1 < len(table) and table[at] == table[at + 1]
        pairs += both
        at += 1 + both
    assert (counts.blocks, counts.pairs, counts.distinct) == (len(table), pairs, len(set(table)))
    assert counts.leaders == counts.pairs + counts.solos
    assert counts.distinct <= counts.leaders <= counts.blocks
    assert 1 <= counts.traffic_ceiling <= 2
    assert (blocks_of_ids(np.array(table), len(table) * 64, 64) == np.trim_zeros(blocks, "b")).all()


@pytest.mark.parametrize("arm", ["uniform", "popularity:gpt-oss-20b"])
@pytest.mark.parametrize(("tokens", "rows"), [(40, 16), (256, 16), (256, 64)])
def test_expected_pairs_agree_with_drawn_batches(arm: str, tokens: int, rows: int) -> None:
    routing = parse_routing(arm, Store())
    shape = LayerShape(1, 1, 32, 4, BF16, BF16, BF16)
    expected = PairCounts.expected(Case(shape, tokens, routing), rows)
    layers = 24
    tables = [
        BlockTable.of(ExpertLoad.from_ids(draw_ids(routing, 32, 4, tokens, seed, layer), 32), rows)
        for seed in range(20)
        for layer in range(layers)
    ]
    assert expected.blocks == pytest.approx(np.mean([table.count for table in tables]), rel=0.01)
    assert expected.pairs == pytest.approx(np.mean([table.pairs for table in tables]), rel=0.03, abs=0.03)


@pytest.mark.parametrize(
    ("experts", "tokens", "rows", "fraction"),
    [(128, 256, 16, 0.303), (128, 256, 64, 0.0), (128, 1024, 64, 0.318), (256, 1024, 64, 0.0), (256, 1024, 32, 0.312)],
)
def test_the_derived_table_of_uniform_pairs(experts: int, tokens: int, rows: int, fraction: float) -> None:
    words = ("--routing", "uniform", "--experts", str(experts), "--top-k", "8", "--tokens", str(tokens))
    found = run(*words, "--block-rows", str(rows), "--device", "h200", code=0 if fraction else 3)
    assert round(found["pair_count_fraction"], 3) == fraction
    assert found["uniform"]["pair_count_fraction"] == found["pair_count_fraction"]


def test_expert_parallel_ranks_and_the_uniform_twin_of_a_table() -> None:
    words = ("--routing", "uniform", "--experts", "128", "--top-k", "8", "--tokens", "1024", "--device", "mi355x")
    whole, part = run(*words), run(*words, "--ep", "4", "--rank", "1")
    assert part["blocks"] == pytest.approx(whole["blocks"] / 4)
    assert run(*words, "--ep", "4")["blocks"] > part["blocks"]  # the rank with most blocks
    twin = run("--blocks", REFERENCE, *words[2:])["uniform"]
    assert twin["blocks"] == whole["blocks"]


def test_entries_past_the_padded_count_and_minus_one_never_count() -> None:
    table = np.array([0, 0, 2, -1, 2, 7, 7])
    assert blocks_of_ids(table, 4 * 64, 64).tolist() == [2, 0, 1]
    assert blocks_of_ids(np.array([0, 0, 2, 2]), 4 * 64, 64).tolist() == [2, 0, 2]
    for padded, words in ((63, "multiple"), (8 * 64, "up to"), (7 * 64 + 1, "multiple")):
        with pytest.raises(MoeplanError, match=words):
            blocks_of_ids(table, padded, 64)
    with pytest.raises(MoeplanError, match="block 1: the experts of the blocks are not sorted"):
        blocks_of_ids(np.array([3, 1]), 128, 64)


@pytest.mark.parametrize("text", ["", "x", "3", "3x", "-1x2", "2x1,", "1.5x2", "0x4", "4x0", "99999999x1", "2x9999999"])
def test_block_tables_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(MoeplanError, match="--blocks"):
        parse_blocks(text)


@pytest.mark.parametrize(
    "words",
    [
        ("--device", "mi355x"),
        ("--device", "mi355x", "--blocks", "2x1", "--routing", "uniform"),
        ("--device", "none", "--blocks", "2x1"),
        ("--device", "mi355x", "--routing", "uniform", "--tokens", "4"),
        ("--device", "mi355x", "--popularity", "gpt-oss-20b"),
        ("--device", "mi355x", "--blocks", "2x1", "--block-rows", "48"),
        ("--device", "mi355x", "--blocks", "2x1", "--ablation", "1,2"),
        ("--device", "mi355x", "--blocks", "2x1", "--ablation", "1,2,nan"),
        ("--device", "mi355x", "--blocks", "2x1", "--format", "int3"),
        ("--device", "mi355x", "--blocks", "2x1", "--ep", "2"),
        ("--device", "mi355x", "--blocks", "2x1", "--columns", "100", "--tp", "3"),
    ],
)
def test_bad_questions_are_one_line(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    done = CliRunner().invoke(app, ["pairing", *words])
    assert isinstance(done.exception, MoeplanError)
    assert "\n" not in str(done.exception)


@pytest.fixture
def card(tmp_path: Path) -> Path:
    pytest.importorskip("yaml")
    (tmp_path / "card.txt").write_text(CARD)
    return tmp_path / "card.txt"


def test_a_card_has_two_answers(card: Path) -> None:
    words = ("--blocks", REFERENCE, "--device", "mi355x", "--format", "mxfp4", "--card", str(card))
    found = run(*words, "--ablation", "130,100,4", "--installed", "0.2.2")["card"]
    assert (found["mechanism"]["applies"], found["numbers"]["hold"]) == (True, True)
    other = run(*words, "--ablation", "130,100,4", "--installed", "0.3.0")["card"]
    assert (other["mechanism"]["applies"], other["numbers"]["hold"]) == (True, False)
    assert "0.2.2" in other["numbers"]["reason"]
    assert "0.3.0" in other["numbers"]["reason"]
    unknown = run(*words)["card"]
    assert (unknown["mechanism"]["applies"], unknown["numbers"]["hold"]) == (None, None)
    weaker = run(*words, "--ablation", "110,100,4", code=3)  # 1.058x: over 1.05, under the card's 1.2
    assert (weaker["verdict"], weaker["card"]["mechanism"]["applies"]) == ("do not pair", False)


def test_a_card_does_not_match_another_device_or_format(card: Path) -> None:
    words = ("--blocks", REFERENCE, "--card", str(card))
    elsewhere = run(*words, "--device", "h200", "--format", "mxfp4", "--installed", "0.2.2")["card"]
    assert (elsewhere["mechanism"]["applies"], elsewhere["numbers"]["hold"]) == (False, False)
    assert {one["field"]: one["holds"] for one in elsewhere["match"]}["gens"] is False
    bf16 = run(*words, "--device", "mi355x", "--format", "bf16")["card"]
    assert bf16["mechanism"]["applies"] is False


FRONTS = ("match: [", "id: a", "- 1", "!!python/object:os.x {}", "match: {}\nexpects: {isolated_speedup_min: fast}",
          "match: {}\nexpects: {isolated_speedup_min: .nan}")  # fmt: skip


@pytest.mark.parametrize("text", ["", "no matter", *(f"---\n{front}\n---\n" for front in FRONTS)])
def test_broken_cards_are_one_line(tmp_path: Path, text: str) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "card.md"
    path.write_text(text)
    with pytest.raises(MoeplanError) as bad:
        read_card(path)
    assert str(path) in str(bad.value)
    assert "\n" not in str(bad.value)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_card_or_one_line(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    pytest.importorskip("yaml")
    path = tmp_path_factory.mktemp("cards") / "card.md"
    path.write_bytes(b"---\n" + data + b"\n---\n")
    with contextlib.suppress(MoeplanError):  # anything else than one line fails the test
        read_card(path)
