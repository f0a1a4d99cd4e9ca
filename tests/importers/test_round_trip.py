"""Each importer reads back what a file in the foreign layout holds."""

from pathlib import Path

import numpy as np
import pytest

from moeplan.errors import MoeplanError
from moeplan.traffic.check import check_trace
from moeplan.traffic.importers import import_files
from moeplan.traffic.importers.counts import ExpertCounts, save_counts
from moeplan.traffic.importers.detect import detect
from moeplan.traffic.importers.logits import select
from moeplan.traffic.importers.record import Hints
from moeplan.traffic.popularity import load_popularity
from moeplan.traffic.trace import RoutingTrace, load_trace
from tests.importers import foreign

A, B = foreign.ids(9, seed=1), foreign.ids(5, seed=2)
BOTH = np.concatenate([A, B])
KNOWN = Hints(experts=8, top_k=2, layers=3)


def trace_of(path: Path, hints: Hints = KNOWN, form: str | None = None) -> RoutingTrace:
    found = import_files([path], form, hints)
    assert isinstance(found, RoutingTrace)
    return found


def counts_of(path: Path, hints: Hints = KNOWN, form: str | None = None) -> ExpertCounts:
    found = import_files([path], form, hints)
    assert isinstance(found, ExpertCounts)
    return found


def same(trace: RoutingTrace, ids: np.ndarray, offsets: list[int]) -> None:
    np.testing.assert_array_equal(trace.expert_ids, ids)
    assert trace.request_offsets.tolist() == offsets
    assert trace.experts == 8


@pytest.mark.parametrize("kind", ["uint8", "uint16", "lists", "nrlre1"])
def test_vllm(tmp_path: Path, kind: str) -> None:
    def form(part: np.ndarray) -> object:
        if kind == "lists":
            return part.tolist()
        if kind == "nrlre1":
            return f"nrlre1:int32:{'x'.join(map(str, part.shape))}:{foreign.b64(part.tobytes())}"
        return part.astype(kind)

    path = foreign.vllm(tmp_path / "r.jsonl", [form(A), form(B)])
    assert detect(path) == "vllm"
    same(trace_of(path), BOTH, [0, 9, 14])


def test_vllm_arrays_saved_as_files(tmp_path: Path) -> None:
    for name, part in (("a.npy", A), ("b.npy", B)):
        np.save(tmp_path / name, part.astype("u1"))
    assert detect(tmp_path / "a.npy") == "vllm"
    found = import_files([tmp_path / "a.npy", tmp_path / "b.npy"], None, KNOWN)
    assert isinstance(found, RoutingTrace)
    same(found, BOTH, [0, 9, 14])


def test_phase_comes_from_the_token_counts_and_only_from_them(tmp_path: Path) -> None:
    path = foreign.vllm(tmp_path / "r.json", [A.astype("u1")], (6, 4))  # 6 + 4 - 1 rows
    assert trace_of(path).phase is not None
    assert trace_of(path).phase.tolist() == [0] * 6 + [1] * 3
    short = trace_of(foreign.vllm(tmp_path / "l.json", [A.astype("u1")], (9, 4)))  # 12 tokens, 9 rows
    assert (short.phase, short.request_tokens.tolist()) == (None, [12])
    assert "a start offset, or dropped rows" in str(short.provenance)
    odd = trace_of(foreign.vllm(tmp_path / "o.json", [A.astype("u1")], (2, 3)))
    assert (odd.phase, odd.request_tokens) == (None, None)


def test_disagreement_with_the_model_is_noted(tmp_path: Path) -> None:
    path = foreign.vllm(tmp_path / "r.json", [A.astype("u1")])
    found = trace_of(path, Hints(experts=8, top_k=1))
    assert "2 slots a token, --top-k or --model says 1" in str(found.provenance)
    with pytest.raises(MoeplanError, match=r"row 0, layer .: expert id . is outside 0..5"):
        trace_of(path, Hints(experts=6))


def test_dense_layers_are_left_out(tmp_path: Path) -> None:
    wide = np.concatenate([np.zeros_like(A[:, :1]), A], axis=1).astype("u1")
    path = foreign.vllm(tmp_path / "r.json", [wide])
    card = Hints(8, 2, 4, (1, 2, 3), "m")
    for hints in (card, Hints(experts=8)):
        trace = trace_of(path, hints)
        same(trace, A, [0, 9])
        assert trace.layer_ids.tolist() == [1, 2, 3]
    with pytest.raises(MoeplanError, match="4 layers, m has 5 of which 2"):
        trace_of(path, Hints(8, 2, 5, (1, 2), "m"))
    with pytest.raises(MoeplanError, match="never filled"):
        trace_of(foreign.vllm(tmp_path / "z.json", [np.zeros((4, 3, 2), "u1")]))


@pytest.mark.parametrize("openai", [False, True])
def test_sglang_responses(tmp_path: Path, openai: bool) -> None:
    path = foreign.sglang(tmp_path / "r.json", [A, B], openai=openai)
    assert detect(path) == "sglang"
    trace = trace_of(path)
    same(trace, BOTH, [0, 9, 14])
    assert (trace.phase is None) == openai
    if not openai:
        assert trace.phase.tolist() == [0] * 4 + [1] * 5 + [0] * 4 + [1]
    with pytest.raises(MoeplanError, match="--layers or --model"):
        import_files([path], None, Hints(experts=8, top_k=2))


def test_route_jsonl(tmp_path: Path) -> None:
    path = foreign.route_jsonl(tmp_path / "r.jsonl", [A, B])
    assert detect(path) == "route-jsonl"
    trace = trace_of(path, Hints())
    same(trace, BOTH, [0, 9, 14])
    assert trace.layer_ids.tolist() == [1, 3, 4]
    mixed = trace_of(foreign.route_jsonl(tmp_path / "s.jsonl", [A, B], same_request=True), Hints())
    same(mixed, BOTH, [0, 14])
    assert "token_idx comes again" in str(mixed.provenance)


@pytest.mark.parametrize("version", [1, 2])
def test_moe_cache_lab(tmp_path: Path, version: int) -> None:
    part = A.copy()
    if version == 2:
        part[7, 1] = -1  # dropped for capacity
    path = foreign.moe_cache_lab(tmp_path / "r.jsonl", part, 4, version)
    assert detect(path) == "moe-cache-lab"
    trace = trace_of(path, Hints())
    same(trace, part, [0, 9])
    assert trace.phase.tolist() == [0] * 4 + [1] * 5
    assert trace.layer_ids.tolist() == [2, 3, 4]
    assert trace.order == "set"


def naive_sigmoid(logits: np.ndarray, bias: np.ndarray, k: int, groups: int, kept: int) -> list[int]:
    """One row, in words: the best groups by the sum of their two best, then the best experts of those."""
    scores = 1 / (1 + np.exp(-logits)) + bias
    size = len(scores) // groups
    heat = [sum(sorted(scores[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    best = sorted(range(groups), key=lambda g: -heat[g])[:kept]
    allowed = [e for e in range(len(scores)) if e // size in best]
    return sorted(allowed, key=lambda e: -scores[e])[:k]


def test_router_logits(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(3, 7, 8)).astype(np.float32)
    plain = np.argsort(-logits, axis=2)[:, :, :2].transpose(1, 0, 2)
    np.save(tmp_path / "r.npy", logits)
    np.savez_compressed(tmp_path / "r.npz", **{f"layer_{i}": one for i, one in enumerate(logits)})
    for name in ("r.npy", "r.npz"):
        assert detect(tmp_path / name) == "router-logits"
        for rule in ("softmax-topk", "topk-softmax"):
            same(trace_of(tmp_path / name, Hints(top_k=2, rule=rule)), plain, [0, 7])
        with pytest.raises(MoeplanError, match="no top-k rule is known"):
            trace_of(tmp_path / name, Hints(top_k=2))
        with pytest.raises(MoeplanError, match="needs the correction bias"):
            trace_of(tmp_path / name, Hints(top_k=2, rule="sigmoid"))
    bias = rng.normal(size=(3, 8)).astype(np.float32)
    np.savez(tmp_path / "b.npz", e_score_correction_bias=bias, **{f"l{i}": one for i, one in enumerate(logits)})
    for groups, kept in ((1, 1), (4, 2)):
        trace = trace_of(tmp_path / "b.npz", Hints(top_k=2, rule="sigmoid", groups=groups, top_groups=kept))
        expected = [[naive_sigmoid(logits[c, t], bias[c], 2, groups, kept) for c in range(3)] for t in range(7)]
        same(trace, np.array(expected), [0, 7])
        assert not np.array_equal(trace.expert_ids, plain), "the bias must matter"


def test_deepseek_groups_come_from_the_family(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    logits, bias = rng.normal(size=(1, 5, 64)), rng.normal(size=64)
    np.savez(tmp_path / "d.npz", layer_0=logits[0], e_score_correction_bias=bias)
    trace = trace_of(tmp_path / "d.npz", Hints(64, 6, 4, (3,), "d", "deepseek_v3"))
    expected = [naive_sigmoid(row, bias, 6, 8, 4) for row in logits[0]]
    assert trace.expert_ids[:, 0].tolist() == expected
    assert trace.layer_ids.tolist() == [3]
    np.testing.assert_array_equal(select(logits[0], 6, "sigmoid", bias, (8, 4)), expected)


def test_mblt(tmp_path: Path) -> None:
    prompt = [A[:4, 0], A[:4, 1], A[3:4, 2]]  # the last layer computes only the output row
    decode = [[A[t, layer][None] for layer in range(3)] for t in (4, 5)]
    path = foreign.mblt(tmp_path / "r.bin", [prompt, *decode, prompt, decode[0]])
    assert detect(path) == "mblt"
    trace = trace_of(path, Hints())
    first = A[:6].copy()
    first[:3, 2] = -1
    same(trace, np.concatenate([first, first[:5]]), [0, 6, 11])
    assert trace.phase.tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1]
    (tmp_path / "cut.bin").write_bytes(path.read_bytes()[:-6])
    cut = trace_of(tmp_path / "cut.bin", Hints())
    same(cut, np.concatenate([first, first[:4]]), [0, 6, 10])
    assert "tail is cut" in str(cut.provenance)


def histogram(part: np.ndarray) -> np.ndarray:
    return np.stack([np.bincount(part[:, c].reshape(-1), minlength=8) for c in range(part.shape[1])])


def test_moe_trace_csv_gives_counts(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text("".join(f"{c},{e}\n" for row in A for c, cell in enumerate(row) for e in cell))
    assert detect(path) == "moe-trace"
    counts = counts_of(path)
    np.testing.assert_array_equal(counts.counts, histogram(A))
    assert "never co-activation" in str(counts.provenance)
    save_counts(counts, tmp_path / "out")
    profile = load_popularity(tmp_path / "out")
    np.testing.assert_allclose(profile.shares, histogram(A) / len(A))
    assert profile.header["kind"] == "counts"
    with pytest.raises(MoeplanError, match="exists already"):
        save_counts(counts, tmp_path / "out")


def test_imatrix(tmp_path: Path) -> None:
    table = histogram(A).astype(np.float32)
    pairs = [(i + 1, part, row) for i, row in enumerate(table) for part in ("gate", "up")]
    tensors = {f"blk.{layer}.ffn_{part}_exps.weight.counts": row[:, None] for layer, part, row in pairs}
    tensors["blk.0.attn_q.weight.counts"] = np.ones((1, 1), np.float32)
    tensors["blk.0.attn_q.weight.in_sum2"] = np.ones((1, 16), np.float32)
    path = foreign.gguf(tmp_path / "r.gguf", tensors)
    assert detect(path) == "imatrix"
    counts = counts_of(path)
    np.testing.assert_array_equal(counts.counts, histogram(A))
    assert counts.layer_ids == (1, 2, 3)
    assert counts_of(path, Hints()).shares() is None, "without top_k there is no popularity"
    tensors["blk.1.ffn_up_exps.weight.counts"] = table[1][:, None] + 1
    with pytest.raises(MoeplanError, match="layer 1: gate, up and down disagree"):
        counts_of(foreign.gguf(tmp_path / "w.gguf", tensors))


def test_trtllm(tmp_path: Path) -> None:
    table = histogram(A).astype(np.int32)
    tensors = {f"{t}_{c + 2}": table[c] for t in (9, 10) for c in range(3)}
    path = foreign.safetensors(tmp_path / "rank0.safetensors", tensors)
    assert detect(path) == "trtllm"
    (tmp_path / "meta_info.json").write_text('{"num_experts": 8, "num_experts_per_token": 2}')
    counts = counts_of(path, Hints())
    np.testing.assert_array_equal(counts.counts, 2 * histogram(A))
    assert (counts.layer_ids, counts.top_k) == ((2, 3, 4), 2)
    name = tmp_path / "token_selected_experts_rank0.safetensors"
    rows = {f"{t}_{c}": np.ascontiguousarray(part[:, c]) for t, part in enumerate((A, B)) for c in range(3)}
    same(trace_of(foreign.safetensors(name, rows), Hints()), BOTH, [0, 14])
    with pytest.raises(MoeplanError, match="num_experts = 8, the options"):
        counts_of(path, Hints(experts=9))


def recorder(logical: np.ndarray, fold: np.ndarray, **more: object) -> dict[str, object]:
    """A per_token record of physical ids: the last physical place of each logical expert."""
    place = np.stack([[np.flatnonzero(row == e)[-1] for e in range(8)] for row in fold])
    physical = place[np.arange(len(fold))[:, None, None], logical.transpose(1, 0, 2)].astype(np.int32)
    padded = np.full((*physical.shape[:2], 8), -1, np.int32)
    padded[:, :, : physical.shape[2]] = physical
    return {"forward_pass_id": 1, "rank": 0, "gatherer_key": "primary", "topk_ids_of_layer": padded} | more


def test_sglang_recorder_per_token(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    fold = np.stack([rng.permutation(np.r_[0:8, 3, 5]) for _ in range(3)]).astype(np.int64)  # two replicas
    prompts = {"positions": [0, 1, 2, 3, 0, 1], "extend_seq_lens": [4, 2], "forward_mode": 1, "input_ids": [1] * 6}
    decode = {"extend_seq_lens": None, "forward_mode": 2, "misc_objects": []}
    steps = [{"positions": [4 + i, 2 + i], **decode} for i in (0, 1)]
    first = np.concatenate([A[:4], B[:2]])
    records = [recorder(first, fold, **prompts)]
    records += [recorder(np.stack([A[4 + i], B[2 + i]]), fold, **step) for i, step in enumerate(steps)]
    path = foreign.torch_zip(tmp_path / "r.pt", {"records": records, "last_physical_to_logical_map": fold})
    assert detect(path) == "sglang-recorder"
    trace = trace_of(path, Hints())
    same(trace, np.concatenate([A[:6], B[:4]]), [0, 6, 10])
    assert trace.phase.tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 1, 1]
    assert trace.id_space == "logical"


def test_sglang_recorder_counts(tmp_path: Path) -> None:
    fold = np.array([[0, 1, 2, 3, 4, 5, 6, 7, 7, 0]] * 3)
    physical = np.zeros((3, 10), np.int32)
    physical[:, :8] = histogram(A)
    physical[:, 8] = physical[:, 7] // 2
    physical[:, 7] -= physical[:, 8]
    record = {"forward_pass_id": 0, "rank": 0, "gatherer_key": "primary", "global_physical_count": physical}
    path = foreign.torch_zip(tmp_path / "p.pt", {"records": [record, record], "last_physical_to_logical_map": fold})
    np.testing.assert_array_equal(counts_of(path).counts, 2 * histogram(A))
    stat = np.zeros((4, 3, 8), np.int32)  # a ring buffer with two rows never written
    stat[:2] = histogram(A)
    value = {"rank": 0, "logical_count": stat, "average_utilization_rate_over_window": 0.5}
    np.testing.assert_array_equal(counts_of(foreign.torch_zip(tmp_path / "s.pt", value)).counts, 2 * histogram(A))


REAL = Path(__file__).parents[2] / "../shared/data/routing/gpt-oss-20b.decode-topk.npz"


@pytest.mark.skipif(not REAL.exists(), reason="the real trace is not here")
def test_real_routing_survives_every_token_level_format(tmp_path: Path) -> None:
    whole = load_trace(REAL)
    ends = whole.request_offsets[:4]
    ids = np.asarray(whole.expert_ids[: ends[-1]]).astype(np.int32)
    parts = np.split(ids, ends[1:-1])
    hints = Hints(32, 4, 24, tuple(range(24)), "gpt-oss-20b")
    files = [
        foreign.vllm(tmp_path / "v.jsonl", [part.astype("u1") for part in parts]),
        foreign.sglang(tmp_path / "s.json", parts),
        foreign.mblt(tmp_path / "m.bin", [[part[:, c] for c in range(24)] for part in parts], 32),
    ]
    for path in files:
        trace = trace_of(path, hints)
        np.testing.assert_array_equal(trace.expert_ids, ids)
        if path.suffix != ".bin":  # passes without a decode step between them are chunks of one prompt
            assert trace.request_offsets.tolist() == ends.tolist()
            assert not check_trace(trace).findings
