"""Every defect is found with its code and place; clean traces raise no finding; repairs remove what they say."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moeplan.errors import MoeplanError
from moeplan.store import Store
from moeplan.traffic.check import check_trace
from moeplan.traffic.fix import fix_trace
from moeplan.traffic.model import load_card
from moeplan.traffic.trace import RoutingTrace, load_trace, open_trace, save_trace
from tests.traces import SHAPES, SIZES, clean, prepend, save_npz, signed, with_ids

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT.parent / "shared" / "data" / "routing"
STORE = Store(models=ROOT / "models")
ROWS = sum(SIZES)
STARTS = np.concatenate([[0], np.cumsum(SIZES)]).tolist()

Place = tuple[str, int | None, int, int]  # code, layer, first row, rows


def places(trace: RoutingTrace, model: str | None = None) -> list[Place]:
    card = load_card(model, STORE) if model else None
    return [(one.code, one.layer, one.first_row, one.rows) for one in check_trace(trace, card).findings]


@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize(("experts", "top_k"), SHAPES)
def test_clean_traces_raise_no_finding(experts: int, top_k: int, layers: int) -> None:
    for seed in range(3):
        assert places(clean(experts, top_k, layers, seed)) == []


@pytest.mark.parametrize(("experts", "top_k"), SHAPES)
@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_the_order_of_the_slots_is_no_defect(experts: int, top_k: int, order: str) -> None:
    trace = clean(experts, top_k)
    ids = np.sort(trace.expert_ids, axis=2)
    if order == "shuffled":
        ids = np.random.default_rng(0).permuted(ids, axis=2)
    assert places(with_ids(trace, ids, phase=None, order="set")) == []


@pytest.mark.parametrize(("experts", "top_k"), SHAPES)
def test_uniform_independent_rows_are_clean(experts: int, top_k: int) -> None:
    rng = np.random.default_rng(5)
    ids = rng.random((800, 2, experts)).argsort(axis=2)[:, :, :top_k].astype(np.int32)
    assert places(RoutingTrace(ids, np.arange(0, 801, 10), experts)) == []
    assert places(RoutingTrace(ids, np.arange(801), experts)) == []
    assert places(RoutingTrace(ids, np.array([0, 800]), experts)) == []


def test_scattered_padding_is_allowed() -> None:
    trace = clean(32, 4)
    ids = signed(trace)
    ids[::7, 1, 3] = -1
    ids[5, 2] = -1
    ids[9::11, 1] = -1
    assert places(with_ids(trace, ids)) == []


@pytest.mark.skipif(not DATA.is_dir(), reason="routing data are not beside this checkout")
@pytest.mark.parametrize("name", ["gpt-oss-20b.decode-topk.npz", "gpt-oss-20b.decode-topk-probs-24req.npz"])
def test_the_real_trace_passes(name: str) -> None:
    assert places(open_trace(DATA / name), "gpt-oss-20b") == []


# --- one fixture a defect ---


@pytest.mark.parametrize(("experts", "top_k"), SHAPES)
@pytest.mark.parametrize("row", ["first ids", "other ids"])
def test_startup_run(experts: int, top_k: int, row: str) -> None:
    start = np.arange(top_k) if row == "first ids" and top_k > 1 else (np.arange(top_k) * 3 + 5) % experts
    trace = prepend(clean(experts, top_k), np.broadcast_to(start, (400, 3, top_k)))
    assert places(trace) == [("startup-run", None, 0, 400)]


def test_two_startup_runs_and_a_late_one() -> None:
    first, second = np.arange(4), np.array([9, 3, 30, 1])
    dummy = np.concatenate([np.broadcast_to(first, (300, 3, 4)), np.broadcast_to(second, (500, 3, 4))])
    assert places(prepend(clean(32, 4), dummy)) == [("startup-run", None, 0, 300), ("startup-run", None, 300, 500)]
    trace = clean(32, 4, sizes=(20, 600, 9))
    ids = trace.expert_ids.copy()
    ids[100:500] = ids[100]
    assert places(with_ids(trace, ids)) == [("identical-run", None, 100, 400)]


def test_short_repeats_are_no_run() -> None:
    trace = clean(32, 4)
    ids = trace.expert_ids.copy()
    ids[:20] = ids[0]
    ids[60:90] = ids[60]
    assert places(with_ids(trace, ids)) == []


@pytest.mark.parametrize(("experts", "top_k"), [(32, 4), (60, 4), (128, 8), (8, 2), (8, 1), (60, 6), (512, 8)])
def test_rankings_read_flat(experts: int, top_k: int) -> None:
    rng = np.random.default_rng(2)
    trace = clean(experts, top_k, sizes=(max(640, 2 * experts // top_k), 64))
    tokens = len(trace.expert_ids) // (experts // top_k) - 64 // (experts // top_k)
    ids = trace.expert_ids.copy()
    ranked = np.stack([[rng.permutation(experts) for _ in range(tokens)] for _ in range(3)])
    flat = ranked.reshape(3, -1, top_k)[:, : int(trace.request_offsets[1])]
    ids[: flat.shape[1]] = flat.swapaxes(0, 1)
    block = experts // top_k
    rows = flat.shape[1] // block * block
    assert places(with_ids(trace, ids)) == [("argsort-artefact", layer, 0, rows) for layer in range(3)]
    one = trace.expert_ids.copy()
    one[: flat.shape[1], 1] = flat[1]
    assert places(with_ids(trace, one)) == [("argsort-artefact", 1, 0, rows)]


@pytest.mark.parametrize(("experts", "top_k"), SHAPES)
def test_all_zero(experts: int, top_k: int) -> None:
    trace = clean(experts, top_k)
    assert places(with_ids(trace, np.zeros_like(trace.expert_ids))) == [("all-zero", None, 0, ROWS)]


@pytest.mark.parametrize(("experts", "top_k"), SHAPES)
@pytest.mark.parametrize("fill", [0, -1])
def test_every_layer_in_slot_0(experts: int, top_k: int, fill: int) -> None:
    trace = clean(experts, top_k)
    ids = signed(trace)
    ids[:, 1:] = fill
    assert places(with_ids(trace, ids)) == [("layers-in-slot-0", 0, 0, ROWS)]


@pytest.mark.parametrize(("experts", "top_k"), SHAPES)
def test_dense_and_unrecorded_layers(experts: int, top_k: int) -> None:
    trace = clean(experts, top_k, layers=4)
    ids = signed(trace)
    ids[:, 0] = 0
    ids[:, 2] = -1
    layers = np.array([3, 4, 6, 7])
    expected = [("dense-layer", 3, 0, ROWS), ("zero-token-layer", 6, 0, ROWS)]
    assert places(with_ids(trace, ids, layer_ids=layers)) == expected
    empty = np.full_like(ids, -1)
    assert places(with_ids(trace, empty)) == [("zero-token-layer", layer, 0, ROWS) for layer in range(4)]


def test_dropped_rows() -> None:
    trace = clean(32, 4)
    tokens = np.diff(trace.request_offsets)
    assert places(replace(trace, request_tokens=tokens)) == []
    short = tokens.copy()
    short[[2, 5]] += 3
    assert places(replace(trace, request_tokens=short)) == [("dropped-rows", None, STARTS[2], 6)]


@pytest.mark.parametrize("share", [1, 4])
def test_physical_ids(share: int) -> None:
    trace = clean(32, 4)
    ids = trace.expert_ids.copy()
    replica = (ids < share) & (np.arange(ROWS)[:, None, None] % 2 == 1)
    ids[replica] += 32
    rows = replica.any(axis=2)
    expected = [("physical-ids", layer, int(rows[:, layer].argmax()), int(rows[:, layer].sum())) for layer in range(3)]
    assert places(with_ids(trace, ids)) == expected
    declared = with_ids(trace, ids, experts=36, id_space="physical")
    assert places(declared) == [("physical-ids", None, 0, ROWS)]
    assert ("physical-ids", None, 0, ROWS) in places(with_ids(trace, ids, experts=36), "gpt-oss-20b")


def test_fused_shared_expert() -> None:
    trace = clean(32, 4)
    fused = np.concatenate([trace.expert_ids, np.full((ROWS, 3, 1), 32, np.uint8)], axis=2)
    assert places(with_ids(trace, fused)) == [("fused-shared-expert", None, 0, ROWS)]
    assert places(with_ids(trace, fused, experts=33)) == [("fused-shared-expert", None, 0, ROWS)]


def test_fused_shared_expert_by_the_card() -> None:
    card = load_card("qwen3-next-80b-a3b", STORE)
    shape, shared = card.moe_layers[0].shape, card.moe_layers[0].shared_experts
    trace = clean(shape.experts, shape.top_k)
    assert check_trace(trace, card).ok
    extra = np.full((ROWS, 3, shared), shape.experts, np.uint16)
    fused = with_ids(trace, np.concatenate([trace.expert_ids, extra], axis=2), experts=shape.experts + shared)
    assert {one.code for one in check_trace(fused, card).findings} >= {"fused-shared-expert"}


@pytest.mark.parametrize(("experts", "top_k"), [(8, 1), (8, 2), (32, 4), (60, 6)])
def test_padding_of_the_slots(experts: int, top_k: int) -> None:
    trace = clean(experts, top_k)
    wide = np.full((ROWS, 3, 8), -1, np.int16)
    wide[:, :, :top_k] = trace.expert_ids
    assert places(with_ids(trace, wide)) == [("padded-slots", None, 0, ROWS)]


@pytest.mark.parametrize(("experts", "top_k"), SHAPES)
@pytest.mark.parametrize("fill", [0, -1])
def test_last_layer_holds_one_row_a_prompt(experts: int, top_k: int, fill: int) -> None:
    if top_k == 1 and fill == 0:
        return  # one slot of 0 is expert 0: nothing tells it apart
    trace = clean(experts, top_k)
    ids = signed(trace)
    gaps = 0
    for start, size in zip(STARTS[:-1], SIZES, strict=True):
        ids[start : start + max(0, size // 3 - 1), -1] = fill
        gaps += max(0, size // 3 - 1)
    assert places(with_ids(trace, ids)) == [("last-layer-cut", 2, 0, gaps)]
    assert places(with_ids(trace, ids, phase=None)) == [("last-layer-cut", 2, 0, gaps)]


def test_rows_of_a_batch_under_one_request() -> None:
    trace = clean(32, 4)
    one = replace(trace, request_offsets=np.array([0, ROWS]))
    falls = sum(size > 2 for size in SIZES[1:])
    later = int(np.flatnonzero(np.diff(trace.phase.astype(int)) < 0)[0]) + 1 if trace.phase is not None else 0
    assert places(one) == [("not-separable", None, later, falls)]
    assert places(replace(one, phase=None)) == []
    unknown = replace(one, phase=None, provenance={"request_boundaries": "unknown"})
    assert places(unknown) == [("not-separable", None, 0, ROWS)]
    long = clean(32, 4, sizes=(5000,))
    assert places(long) == []
    assert places(replace(long, phase=None)) == [("not-separable", None, 0, 5000)]


@pytest.mark.parametrize(("experts", "top_k"), SHAPES)
def test_duplicate_requests(experts: int, top_k: int) -> None:
    trace = clean(experts, top_k)
    ids = np.concatenate([trace.expert_ids, trace.expert_ids[STARTS[3] : STARTS[4]], trace.expert_ids[:150]])
    phase = np.zeros(len(ids), np.uint8)
    offsets = np.concatenate([trace.request_offsets, [ROWS + 300, ROWS + 450]])
    twice = with_ids(trace, ids, request_offsets=offsets, phase=phase)
    assert places(twice) == [("duplicate-request", None, ROWS, 300), ("duplicate-request", None, ROWS + 300, 150)]


def test_many_copies_are_counted_in_one_finding() -> None:
    ids = np.tile(clean(32, 4, sizes=(6,)).expert_ids, (150, 1, 1))
    found = check_trace(RoutingTrace(ids, np.arange(0, 901, 6), 32))
    assert len(found.findings) == 101
    assert (found.findings[-1].rows, found.findings[-1].first_row) == (49 * 6, 606)


@pytest.mark.parametrize(("experts", "top_k"), [shape for shape in SHAPES if shape[1] > 1])
def test_duplicate_experts(experts: int, top_k: int) -> None:
    trace = clean(experts, top_k)
    ids = trace.expert_ids.copy()
    ids[[17, 400], 1, 0] = ids[[17, 400], 1, top_k - 1]
    ids[30, 2, 1] = ids[30, 2, 0]
    assert places(with_ids(trace, ids)) == [("duplicate-experts", 1, 17, 2), ("duplicate-experts", 2, 30, 1)]


def test_duplicates_among_many_slots() -> None:
    trace = clean(64, 20)
    assert places(trace) == []
    ids = trace.expert_ids.copy()
    ids[9, 1, 19] = ids[9, 1, 0]
    assert places(with_ids(trace, ids)) == [("duplicate-experts", 1, 9, 1)]


@pytest.mark.parametrize(("experts", "top_k"), SHAPES)
def test_ids_out_of_range(experts: int, top_k: int) -> None:
    trace = clean(experts, top_k)
    ids = signed(trace)
    ids[3, 0, 0], ids[700, 2, top_k - 1], ids[701, 2, 0] = experts, -2, 3000
    assert places(with_ids(trace, ids)) == [("id-out-of-range", 0, 3, 1), ("id-out-of-range", 2, 700, 2)]


def test_unwritten_and_padding_rows_and_cells() -> None:
    trace = clean(32, 4)
    ids = signed(trace)
    ids[100:110] = 0
    ids[790:] = -1
    ids[20:23, 1] = 0
    expected = [("zero-cells", 1, 20, 3), ("unwritten-rows", None, 100, 10), ("padding-rows", None, 790, 10)]
    assert places(with_ids(trace, ids)) == expected


def test_contradictions_of_the_card() -> None:
    assert places(clean(32, 4), "gpt-oss-20b") == []
    assert places(clean(32, 2), "gpt-oss-20b") == [("card-top-k", None, 0, ROWS)]
    assert places(clean(60, 4), "gpt-oss-20b") == [("card-experts", None, 0, ROWS)]
    assert places(replace(clean(32, 4), layer_ids=np.array([4, 24, 5])), "gpt-oss-20b") == [("card-layer", 24, 0, ROWS)]
    assert places(clean(64, 6, layers=2), "deepseek-v2-lite") == [("card-layer", 0, 0, ROWS)]
    ids = clean(64, 6, layers=2).expert_ids.copy()
    ids[:, 0] = 0  # the dense layer in a zero-filled buffer: one defect, not two
    assert places(with_ids(clean(64, 6, layers=2), ids), "deepseek-v2-lite") == [("dense-layer", 0, 0, ROWS)]
    unnumbered = load_card("deepseek-v2-lite", STORE).moe_layers
    assert places(clean(64, 6, layers=len(unnumbered)), "deepseek-v2-lite") == []


# --- repairs ---


def test_repaired_traces_equal_the_clean_rows(tmp_path: Path) -> None:
    trace = clean(32, 4)
    dummy = np.broadcast_to(np.array([9, 3, 30, 1]), (200, 3, 4))
    spoiled = prepend(trace, dummy)
    fixed = fix_trace(spoiled, check_trace(spoiled), tmp_path / "out")
    assert fixed.check is not None
    assert fixed.check.ok
    assert fixed.removed == ("rows 0..199: identical start-up run", f"{ROWS} of {ROWS + 200} rows are left")
    back = load_trace(tmp_path / "out")
    assert (np.asarray(back.expert_ids) == trace.expert_ids).all()
    assert (back.request_offsets == trace.request_offsets).all()
    assert back.phase is not None
    assert trace.phase is not None
    assert (np.asarray(back.phase) == trace.phase).all()
    assert back.provenance["repairs"] == list(fixed.removed)


def test_all_repairs_at_once(tmp_path: Path) -> None:
    trace = clean(32, 4, layers=4)
    ids = np.full((ROWS + 300, 4, 6), -1, np.int16)
    ids[:ROWS, :, :4] = trace.expert_ids
    ids[ROWS:, :, :4] = trace.expert_ids[STARTS[3] : STARTS[4]]
    ids[160:165] = -1
    ids[60:62, 3, :4] = 0
    ids[:, 2] = -1
    offsets = np.concatenate([trace.request_offsets, [ROWS + 300]])
    labels = tuple(f"label {r}" for r in range(9))
    spoiled = replace(trace, expert_ids=ids, request_offsets=offsets, domains=labels, phase=None)
    spoiled = replace(spoiled, request_tokens=np.diff(offsets))
    found = check_trace(spoiled)
    codes = ["zero-token-layer", "zero-cells", "padding-rows", "padded-slots", "duplicate-request"]
    assert [one.code for one in found.findings] == codes
    fixed = fix_trace(spoiled, found, tmp_path / "out")
    assert fixed.check is not None
    assert fixed.check.findings == ()
    back = load_trace(tmp_path / "out")
    keep = np.ones(ROWS, dtype=bool)
    keep[160:165] = False
    expected = signed(trace)
    expected[60:62, 3] = -1
    assert (np.asarray(back.expert_ids) == expected[keep][:, [0, 1, 3]]).all()
    assert back.layer_ids.tolist() == [0, 1, 3]
    assert back.domains == labels[:8]
    sizes = np.array(SIZES)
    sizes[2] -= 5
    assert np.diff(back.request_offsets).tolist() == sizes.tolist()
    assert back.request_tokens is not None
    assert back.request_tokens.tolist() == sizes.tolist()


def test_what_has_no_safe_repair_stays(tmp_path: Path) -> None:
    trace = clean(32, 4)
    ids = trace.expert_ids.copy()
    ids[17, 1, 0] = ids[17, 1, 1]
    spoiled = with_ids(trace, ids)
    fixed = fix_trace(spoiled, check_trace(spoiled), tmp_path / "out")
    assert fixed.removed == ()
    assert fixed.check is None
    assert not (tmp_path / "out").exists()
    zero = with_ids(trace, np.zeros_like(ids))
    with pytest.raises(MoeplanError, match="no route is left"):
        fix_trace(zero, check_trace(zero), tmp_path / "out")
    constant = with_ids(trace, np.broadcast_to(ids[:1], ids.shape))
    with pytest.raises(MoeplanError, match="no route is left"):
        fix_trace(constant, check_trace(constant), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# --- the command ---


def command(*words: object) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "moeplan", "trace", "check", *map(str, words)]
    return subprocess.run(program, capture_output=True, text=True, check=False)


def test_the_command_answers_with_its_status(tmp_path: Path) -> None:
    trace = clean(32, 4, layers=24)
    save_trace(trace, tmp_path / "good")
    done = command(tmp_path / "good", "--model", "gpt-oss-20b", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["ok"]
    assert document["findings"] == []
    assert [document[key] for key in ("rows", "layers", "top_k", "experts")] == [ROWS, 24, 4, 32]
    bad = save_npz(prepend(trace, np.broadcast_to(np.arange(4), (500, 24, 4))), tmp_path / "bad.npz")
    done = command(bad, "--json", "--fix", tmp_path / "out")
    assert done.returncode == 3
    document = json.loads(done.stdout)
    (finding,) = document["findings"]
    assert list(finding) == ["code", "severity", "layer", "first_row", "rows", "message", "remedy"]
    assert (finding["code"], finding["layer"], finding["first_row"], finding["rows"]) == ("startup-run", None, 0, 500)
    assert document["fixed"]["ok"]
    assert command(tmp_path / "out").returncode == 0
    again = command(bad, "--fix", tmp_path / "out")
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)


def test_the_document_lists_every_code() -> None:
    """docs/trace-format.md names each code once, with the severities that the source gives it."""
    rows = [
        line.split("|") for line in (ROOT / "docs/trace-format.md").read_text().splitlines() if line.startswith("| `")
    ]
    told: dict[str, str] = {}
    for cells in rows:
        if cells[2].strip() in ("error", "warning", "error or warning"):
            told |= {word.strip(" `"): cells[2].strip() for word in cells[1].split(",")}
    source = "".join(path.read_text() for path in (ROOT / "moeplan/traffic").glob("check*.py"))
    pairs = set(re.findall(r'Finding\(\s*"([a-z0-9-]+)",\s*"(error|warning)"', source))
    pairs |= {(code, "error") for code in re.findall(r'"([a-z]+(?:-[a-z0-9]+)+)",\s*text', source)}
    given: dict[str, set[str]] = {}
    for code, severity in pairs:
        given.setdefault(code, set()).add(severity)
    assert {code: " or ".join(sorted(kinds)) for code, kinds in given.items()} == told
