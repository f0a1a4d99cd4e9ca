"""Recorded ids against ids worked out by hand from the router, on tiny random models of several mlx-lm families."""

import importlib
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from moeplan.cli import app
from moeplan.errors import MoeplanError
from moeplan.runners.record import Sampling, load_local, record
from moeplan.runners.tap import tapped
from moeplan.traffic.trace import RoutingTrace, load_trace, save_trace

mx = pytest.importorskip("mlx.core", reason="MLX is not installed")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'moeplan[mlx-lm]'")
    from mlx import nn
    from mlx.utils import tree_map_with_path
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear, SwitchMLP

VOCAB, HIDDEN = 61, 16
Floats = np.ndarray


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


def top(scores: Floats, k: int) -> Floats:
    return np.sort(np.argsort(-scores, axis=-1)[:, :k], axis=-1)


def softmax(x: Floats) -> Floats:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def wide(array: Any) -> Floats:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def plain(block: Any, x: Floats, k: int) -> Floats:
    return top(x @ wide(block.gate.weight).T, k)


def with_bias(block: Any, x: Floats, k: int) -> Floats:
    return top(x @ wide(block.router.weight).T + wide(block.router.bias), k)


def by_linear(block: Any, x: Floats, k: int) -> Floats:
    router = block.router
    return top(x @ wide(getattr(router, "layer", router).weight).T, k)


def best_groups(scores: Floats, strength: Callable[[Floats], Floats], groups: int, kept: int) -> Floats:
    parts = scores.reshape(len(scores), groups, -1)
    weak = np.argsort(strength(parts), axis=-1)[:, : groups - kept]
    np.put_along_axis(parts, weak[..., None], 0.0, axis=1)
    return parts.reshape(scores.shape)


def limited_softmax(block: Any, x: Floats, k: int) -> Floats:
    scores = softmax(x @ wide(block.gate.weight).T)
    return top(best_groups(scores, lambda parts: parts.max(axis=-1), 4, 2), k)


def limited_sigmoid(block: Any, x: Floats, k: int) -> Floats:
    scores = 1 / (1 + np.exp(-(x @ wide(block.gate.weight).T))) + wide(block.gate.e_score_correction_bias)
    return top(best_groups(scores, lambda parts: np.sort(parts, axis=-1)[..., -2:].sum(axis=-1), 4, 2), k)


@dataclass(frozen=True)
class Family:
    """module: of mlx_lm.models; block: attribute of a layer; ids: layers with experts; route: the router by hand."""

    module: str
    block: str
    ids: tuple[int, ...]
    experts: int
    top_k: int
    route: Callable[[Any, Floats, int], Floats]
    args: dict[str, Any]


SMALL = {
    "hidden_size": HIDDEN, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": VOCAB,
    "intermediate_size": 12, "moe_intermediate_size": 12, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "max_position_embeddings": 64, "head_dim": 8, "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
LATENT = {
    "q_lora_rank": None, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 8,
    "n_routed_experts": 16, "num_experts_per_tok": 3, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "num_hidden_layers": 3, "n_group": 4, "topk_group": 2,
    "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
}  # fmt: skip
FAMILIES = [
    Family("qwen3_moe", "mlp", (0, 2), 12, 4, plain, {
        "num_hidden_layers": 3, "num_experts": 12, "num_experts_per_tok": 4, "decoder_sparse_step": 1,
        "mlp_only_layers": [1], "norm_topk_prob": True}),
    Family("olmoe", "mlp", (0, 1), 9, 3, plain, {"num_hidden_layers": 2, "num_experts": 9, "num_experts_per_tok": 3}),
    Family("mixtral", "block_sparse_moe", (0, 1), 6, 2, plain, {
        "num_hidden_layers": 2, "num_local_experts": 6, "num_experts_per_tok": 2}),
    Family("gpt_oss", "mlp", (0, 1), 8, 4, with_bias, {
        "num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 4, "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"]}),
    Family("deepseek_v2", "mlp", (1, 2), 16, 3, limited_softmax, LATENT | {"topk_method": "group_limited_greedy"}),
    Family("deepseek_v3", "mlp", (1, 2), 16, 3, limited_sigmoid, LATENT | {"scoring_func": "sigmoid"}),
    Family("nemotron_h", "mixer", (1, 3), 16, 3, limited_sigmoid, {
        "hybrid_override_pattern": ["M", "E", "*", "E"], "mamba_num_heads": 2, "mamba_head_dim": 8,
        "mamba_proj_bias": False, "ssm_state_size": 8, "conv_kernel": 3, "n_groups": 1, "mlp_bias": False,
        "layer_norm_epsilon": 1e-5, "use_bias": False, "use_conv_bias": True, "n_routed_experts": 16,
        "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
        "routed_scaling_factor": 1.0}),
    Family("qwen3_next", "mlp", (0, 1), 10, 4, plain, {
        "num_hidden_layers": 2, "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "linear_conv_kernel_dim": 3, "num_experts": 10, "num_experts_per_tok": 4,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "shared_expert_intermediate_size": 12,
        "partial_rotary_factor": 0.5, "full_attention_interval": 2, "norm_topk_prob": True}),
    Family("llama4", "feed_forward", (1, 3), 6, 1, by_linear, {"text_config": SMALL | {
        "model_type": "llama4_text", "num_hidden_layers": 4, "attention_chunk_size": 64, "intermediate_size_mlp": 12,
        "interleave_moe_layer_step": 2, "num_local_experts": 6, "num_experts_per_tok": 1, "rope_scaling": None,
        "use_qk_norm": True}}),
    Family("granitemoe", "block_sparse_moe", (0, 1), 8, 3, by_linear, {
        "num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 3, "logits_scaling": 2.0,
        "attention_multiplier": 0.3, "embedding_multiplier": 2.0, "residual_multiplier": 0.5}),
    Family("phixtral", "moe", (0, 1), 5, 2, plain, {
        "num_vocab": VOCAB, "model_dim": HIDDEN, "num_heads": 2, "num_layers": 2, "rotary_dim": 4,
        "num_local_experts": 5, "num_experts_per_tok": 2}),
]  # fmt: skip
QWEN = FAMILIES[0]


def build(family: Family, seed: int = 0) -> Any:
    module = importlib.import_module(f"mlx_lm.models.{family.module}")
    model = module.Model(module.ModelArgs.from_dict(SMALL | family.args | {"model_type": family.module}))
    key = [mx.random.key(seed)]

    def fresh(path: str, old: Any) -> Any:
        key[0], now = mx.random.split(key[0])
        return mx.random.normal(old.shape, key=now) * (0.1 if "correction" in path else 0.5)  # scores decide, not bias

    model.update(tree_map_with_path(fresh, model.parameters()))
    mx.eval(model.parameters())
    model.eval()
    return model


def prompts(*lengths: int, seed: int = 1) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n).tolist() for n in lengths]


def by_hand(model: Any, family: Family, prompt: list[int], max_tokens: int) -> list[Floats]:
    """Sets [tokens, k] of each MoE layer: greedy tokens and block inputs from whole passes without a cache."""
    tokens = list(prompt)
    for _ in range(max_tokens - 1):
        tokens.append(int(mx.argmax(model(mx.array([tokens]))[0, -1])))
    blocks = [getattr(model.layers[i], family.block) for i in family.ids]
    seen: dict[int, Any] = {}
    kind = type(blocks[0])
    original = kind.__call__

    def call(self: Any, x: Any, *rest: Any) -> Any:
        seen[id(self)] = x
        return original(self, x, *rest)

    kind.__call__ = call
    try:
        mx.eval(model(mx.array([tokens])))
    finally:
        kind.__call__ = original
    return [family.route(block, wide(seen[id(block)])[0], family.top_k) for block in blocks]


def request(trace: RoutingTrace, r: int) -> Floats:
    return np.sort(trace.expert_ids[trace.request_offsets[r] : trace.request_offsets[r + 1]].astype(int), axis=-1)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.module)
def test_recorded_ids_are_the_routers(family: Family) -> None:
    model, batches = build(family), [prompts(5, 3, 5), prompts(1, seed=2)]
    trace = record(model, batches, 4)
    assert trace.layer_ids.tolist() == list(family.ids)
    assert (trace.experts, trace.top_k, trace.order) == (family.experts, family.top_k, "set")
    assert np.diff(trace.request_offsets).tolist() == [8, 6, 8, 4]
    for r, prompt in enumerate(prompt for batch in batches for prompt in batch):
        wanted = by_hand(model, family, prompt, 4)
        assert len({tuple(row) for row in wanted[0]}) > 1 or len(prompt) == 1, "a router that never moves proves little"
        for column, rows in enumerate(wanted):
            np.testing.assert_array_equal(request(trace, r)[:, column], rows)


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_rows_phases_and_boundaries_are_exact(max_tokens: int) -> None:
    lengths = [7, 2, 7, 1, 2]
    trace = record(build(QWEN), [prompts(*lengths)], max_tokens)
    assert trace.phase is not None
    assert trace.request_tokens is not None
    assert trace.request_tokens.tolist() == [n + max_tokens - 1 for n in lengths]
    assert trace.rows == sum(lengths) + 5 * (max_tokens - 1)
    for r, length in enumerate(lengths):
        phase = trace.phase[trace.request_offsets[r] : trace.request_offsets[r + 1]]
        assert phase.tolist() == [0] * length + [1] * (max_tokens - 1)


def test_batching_changes_no_request() -> None:
    model, some = build(QWEN), prompts(4, 6, 4, 4, 6)
    together, alone = record(model, [some], 5), record(model, [[one] for one in some], 5)
    np.testing.assert_array_equal(together.request_offsets, alone.request_offsets)
    np.testing.assert_array_equal(np.sort(together.expert_ids), np.sort(alone.expert_ids))


def test_long_prompts_go_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    model, some = build(QWEN), prompts(11, 11, 10)
    whole = record(model, [some], 3)
    monkeypatch.setattr("moeplan.runners.record.PREFILL_STEP", 4)
    pieces = record(model, [some], 3)
    np.testing.assert_array_equal(np.sort(whole.expert_ids), np.sort(pieces.expert_ids))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.module)
def test_results_are_unchanged_and_hooks_go(family: Family) -> None:
    model, tokens = build(family), mx.array(prompts(40, 40))
    modules = [m for _, m in model.named_modules() if isinstance(m, SwitchGLU | SwitchMLP)]
    kinds, before = [type(m) for m in modules], model(tokens)
    state = mx.random.state[0].tolist()
    with tapped(model) as tap:
        during = model(tokens)
        assert tap.take(80).shape == (80, len(family.ids), family.top_k)
        assert not any(type(m) is kind for m, kind in zip(modules, kinds, strict=True))
    record(model, [prompts(3)], 2, Sampling(temperature=1.0))
    assert mx.array_equal(before, during)
    assert mx.array_equal(before, model(tokens))
    assert [type(m) for m in modules] == kinds
    assert mx.random.state[0].tolist() == state


def test_hooks_go_after_a_failure() -> None:
    model = build(QWEN)
    kind = type(model.layers[0].mlp.switch_mlp)

    def fail() -> None:
        with tapped(model):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert type(model.layers[0].mlp.switch_mlp) is kind is SwitchGLU


def test_quantized_experts() -> None:
    family = Family(
        "qwen3_moe", "mlp", (0, 1), 8, 2, plain,
        QWEN.args | {"hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2, "mlp_only_layers": [],
                     "num_experts": 8, "num_experts_per_tok": 2},
    )  # fmt: skip
    model = build(family)
    nn.quantize(model, 32, 4, class_predicate=lambda path, module: isinstance(module, SwitchLinear))
    assert isinstance(model.layers[0].mlp.switch_mlp.up_proj, QuantizedSwitchLinear)
    some = prompts(6)
    trace = record(model, [some], 3)
    for column, rows in enumerate(by_hand(model, family, some[0], 3)):
        np.testing.assert_array_equal(request(trace, 0)[:, column], rows)


def test_a_compiled_layer_is_refused_not_lost() -> None:
    model = build(QWEN)
    model.layers[2].mlp.__class__ = _compiled(type(model.layers[2].mlp))
    with pytest.raises(MoeplanError, match=r"layer 2: its expert ids have no values; .*MLX_DISABLE_COMPILE"):
        record(model, [prompts(4)], 2)
    mx.eval(model(mx.array(prompts(4)[:1])[:, -1:], cache=make_prompt_cache(model)))
    with pytest.raises(MoeplanError, match=r"layer 2: .*MLX_DISABLE_COMPILE"):
        record(model, [prompts(1)], 2)
    wanted = record(build(QWEN), [prompts(4)], 3)
    mx.disable_compile()
    try:
        found = record(model, [prompts(4)], 3)
    finally:
        mx.enable_compile()
    np.testing.assert_array_equal(np.sort(found.expert_ids), np.sort(wanted.expert_ids))


def _compiled(base: type) -> type:
    def call(self: Any, x: Any) -> Any:
        if not hasattr(self, "_fast"):
            object.__setattr__(self, "_fast", mx.compile(lambda y: base.__call__(self, y)))
        return self._fast(x)

    return type(base.__name__, (base,), {"__call__": call})


def test_a_layer_called_twice_is_refused() -> None:
    model = build(QWEN)
    base = type(model.layers[0].mlp)
    model.layers[0].mlp.__class__ = type(
        base.__name__, (base,), {"__call__": lambda self, x: base.__call__(self, base.__call__(self, x))}
    )
    with pytest.raises(MoeplanError, match="layer 0: its experts were called 2 times"):
        record(model, [prompts(4)], 2)


def test_a_stop_token_ends_its_request_only() -> None:
    model, some = build(QWEN), prompts(5, 5, 5)
    free = [_greedy(model, prompt, 6) for prompt in some]
    stop = free[1][2]
    trace = record(model, [some], 6, Sampling(stop=frozenset([stop])))
    wanted = [5 + (tokens.index(stop) if stop in tokens else 5) for tokens in free]
    assert np.diff(trace.request_offsets).tolist() == wanted
    assert min(wanted) < 10
    whole = record(model, [some], 6)
    for r, rows in enumerate(wanted):
        np.testing.assert_array_equal(request(trace, r), request(whole, r)[:rows])


def _greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(mx.argmax(model(mx.array([tokens]))[0, -1])))
    return tokens[len(prompt) :]


def test_seeds_draw_alike_and_differently() -> None:
    model, some = build(QWEN), [prompts(4, 4)]
    first, again, other = (record(model, some, 12, Sampling(1.0, seed)) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first.expert_ids, again.expert_ids)
    assert (np.sort(first.expert_ids) != np.sort(other.expert_ids)).any()


def test_refusals() -> None:
    model = build(QWEN)
    for batches, tokens, match in (
        ([], 3, "no prompt"),
        ([[[1], []]], 3, "prompt 1 has no tokens"),
        ([[[VOCAB]]], 3, f"token {VOCAB} is outside"),
        ([[[1]]], 0, "max_tokens = 0"),
    ):
        with pytest.raises(MoeplanError, match=match):
            record(model, batches, tokens)
    for how in (Sampling(float("inf")), Sampling(float("nan")), Sampling(-1.0), Sampling(seed=-1)):
        with pytest.raises(MoeplanError, match="expected finite, not negative"):
            record(model, [[[1]]], 1, how)
    with tapped(model), pytest.raises(MoeplanError, match="recorded already"):
        record(model, [[[1]]], 1)
    model.layers[0].mlp.zero_expert_num = 2
    with pytest.raises(MoeplanError, match="qwen3_moe: zero-computation experts"):
        record(model, [[[1]]], 1)
    llama4 = build(next(family for family in FAMILIES if family.module == "llama4"))
    with pytest.raises(MoeplanError, match=f"token {VOCAB} is outside the vocabulary of {VOCAB}"):
        record(llama4, [[[VOCAB]]], 1)
    dense = Family("llama", "mlp", (), 0, 0, plain, {"num_hidden_layers": 1})
    with pytest.raises(MoeplanError, match="llama: no layer of the model calls SwitchGLU"):
        record(build(dense), [[[1]]], 1)


def test_saved_and_checked(tmp_path: Path) -> None:
    from moeplan.traffic.check import check_trace

    trace = record(build(QWEN), [prompts(6, 6, 9)], 5)
    save_trace(trace, tmp_path / "t")
    back = load_trace(tmp_path / "t")
    np.testing.assert_array_equal(back.expert_ids, trace.expert_ids)
    assert back.layer_ids.tolist() == [0, 2]
    assert back.provenance["model_type"] == "qwen3_moe"
    assert [one.code for one in check_trace(back).findings] == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder as mlx-lm writes it, with a tokenizer of words w0, w1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path / "model"
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w60").save_pretrained(path)
    model = build(QWEN)
    model.save_weights(str(path / "model.safetensors"))
    (path / "config.json").write_text(json.dumps(SMALL | QWEN.args | {"model_type": "qwen3_moe", "eos_token_id": 60}))
    return path


def text(tokens: list[int]) -> str:
    return " ".join(f"w{t}" for t in tokens)


@pytest.mark.filterwarnings("ignore")
def test_command(folder: Path, tmp_path: Path) -> None:
    some, out = prompts(5, 3), tmp_path / "out"
    lines = [json.dumps({"prompt": text(one), "domain": name}) for one, name in zip(some, ("a", "b"), strict=True)]
    (tmp_path / "p.jsonl").write_text("\n".join(lines) + "\n")
    common = ["trace", "record", "--model", str(folder), "--max-tokens", "3"]
    done = CliRunner().invoke(app, [*common, "--prompts", str(tmp_path / "p.jsonl"), "-o", str(out), "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    wanted = record(build(QWEN), [[one] for one in some], 3, Sampling(stop=frozenset([60])))
    trace = load_trace(out)
    np.testing.assert_array_equal(trace.expert_ids, wanted.expert_ids)
    assert trace.domains == ("a", "b")
    assert (document["prefill_rows"], document["rows"], document["layer_ids"]) == (8, wanted.rows, [0, 2])
    again = CliRunner().invoke(app, [*common, "--prompt", text(some[0]), "-o", str(out)])
    assert isinstance(again.exception, MoeplanError)
    assert str(again.exception) == f"--output {out}: exists already"


@pytest.mark.filterwarnings("ignore")
def test_folders_that_cannot_be_loaded(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(MoeplanError, match=r"nowhere/config\.json: cannot read"):
        load_local(tmp_path / "nowhere")
    for change, match in (
        ({"model_file": "x.py"}, "code of a model is not run"),
        ({"model_type": "nonesuch"}, "nonesuch not supported"),
        ({"num_experts": 5}, "cannot load it"),
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(MoeplanError, match=match) as caught:
            load_local(folder)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "name", "match"),
    [
        ("\n \n", "p.txt", "no prompt in it"),
        ('{"prompt": 3}', "p.jsonl", "line 1: expected an object"),
        ("[" * 100_000, "p.jsonl", "line 1: expected an object"),
    ],
)
def test_prompt_files_are_refused_in_one_line(content: str, name: str, match: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(content)
    words = ["trace", "record", "--model", str(tmp_path), "-o", str(tmp_path / "o"), "--prompts", str(file)]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, MoeplanError)
    assert match in str(done.exception)
