"""Cards and config.json: every spelling, every refusal, and the published table of shapes."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moeplan.cli import app
from moeplan.errors import MoeplanError
from moeplan.store import Store
from moeplan.traffic.card import card_toml, format_layers, parse_layers, read_card
from moeplan.traffic.config import read_config
from moeplan.traffic.documents import show_document
from moeplan.traffic.model import ModelCard, load_card

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT.parent / "shared" / "data" / "configs"
STORE = Store(models=ROOT / "models")
QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "intermediate_size": 6144,
    "num_hidden_layers": 4,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "dtype": "bfloat16",
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 2,
    "torch_dtype": "bfloat16",
}


def card(tmp_path: Path, base: dict[str, Any] = QWEN, **change: Any) -> ModelCard:
    fields = {key: value for key, value in (base | change).items() if value != "absent"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    return read_config(path)


def indices(found: ModelCard) -> list[int]:
    return [layer.index for layer in found.moe_layers]


# The shipped cards against the published table: hidden, layers, MoE layers, E, k, width, shared, expert M parameters

TABLE = {
    "qwen3-30b-a3b": (2048, 48, 48, 128, 8, 768, 0, 4.72),
    "qwen3-30b-a3b-4bit": (2048, 48, 48, 128, 8, 768, 0, 4.72),
    "qwen3-235b-a22b": (4096, 94, 94, 128, 8, 1536, 0, 18.87),
    "qwen3-next-80b-a3b": (2048, 48, 48, 512, 10, 512, 1, 3.15),
    "qwen3.5-35b-a3b": (2048, 40, 40, 256, 8, 512, 1, 3.15),
    "qwen1.5-moe-a2.7b": (2048, 24, 24, 60, 4, 1408, 1, 8.65),
    "mixtral-8x7b": (4096, 32, 32, 8, 2, 14336, 0, 176.16),
    "mixtral-8x22b": (6144, 56, 56, 8, 2, 16384, 0, 301.99),
    "deepseek-v2-lite": (2048, 27, 26, 64, 6, 1408, 2, 8.65),
    "deepseek-v3": (7168, 61, 58, 256, 8, 2048, 1, 44.04),
    "kimi-k2": (7168, 61, 60, 384, 8, 2048, 1, 44.04),
    "glm-4.5-air": (4096, 46, 45, 128, 8, 1408, 1, 17.30),
    "glm-4.5": (5120, 92, 89, 160, 8, 1536, 1, 23.59),
    "dots.llm1": (4096, 62, 61, 128, 6, 1408, 2, 17.30),
    "dots.llm1-mixed-4-6bit": (4096, 62, 61, 128, 6, 1408, 2, 17.30),
    "gpt-oss-20b": (2880, 24, 24, 32, 4, 2880, 0, 24.88),
    "gpt-oss-120b": (2880, 36, 36, 128, 4, 2880, 0, 24.88),
    "olmoe-1b-7b": (2048, 16, 16, 64, 8, 1024, 0, 6.29),
    "gemma-4-26b-a4b": (2816, 30, 30, 128, 8, 704, 0, 5.95),
    "llama-4-scout": (5120, 48, 48, 16, 1, 8192, 1, 125.83),
    "llama-4-maverick": (5120, 48, 24, 128, 1, 8192, 1, 125.83),
    "minimax-m2.5": (3072, 62, 62, 256, 8, 1536, 0, 14.16),
    "phi-3.5-moe": (4096, 32, 32, 16, 2, 6400, 0, 78.64),
    "granite-3.1-3b-a800m": (1536, 32, 32, 40, 8, 512, 0, 2.36),
    "ernie-4.5-21b-a3b": (2560, 28, 27, 64, 6, 1536, 2, 11.80),
    "hunyuan-a13b": (4096, 32, 32, 64, 8, 3072, 1, 37.75),
    "nemotron-3-nano-30b-a3b": (2688, 52, 23, 128, 6, 1856, 1, 9.98),
    "llama-3.1-8b": (4096, 32, 0, 0, 0, None, 0, None),
    "qwen2.5-0.5b": (896, 24, 0, 0, 0, None, 0, None),
}


@pytest.mark.parametrize(("name", "row"), list(TABLE.items()))
def test_shipped_card_matches_the_published_table(name: str, row: tuple[Any, ...]) -> None:
    found = load_card(name, STORE)
    document = show_document(found)
    keys = ("hidden", "all_layers", "moe_layers", "experts", "top_k", "expert_hidden", "shared_experts")
    assert tuple(document[key] for key in keys) == row[:7]
    if row[7] is not None:
        assert round(found.moe_layers[0].shape.plane_weights / 1e6, 2) == row[7]
    assert found.source.startswith("config.json: ")


def test_every_shipped_card_reads_and_names_its_source() -> None:
    for path in sorted((ROOT / "models").glob("*.toml")):
        found = read_card(path)
        assert found.name == path.stem
        assert found.source


@pytest.mark.parametrize(
    ("name", "planes"),
    [
        ("qwen3-30b-a3b-4bit", [2_654_208]),
        ("qwen3-30b-a3b", [9_437_184]),
        ("dots.llm1-mixed-4-6bit", [11_173_888, 9_732_096]),
        ("mixtral-8x7b", [352_321_536]),
        ("gpt-oss-120b", [13_219_200]),
        ("olmoe-1b-7b", [12_582_912]),
        ("nemotron-3-nano-30b-a3b", [19_955_712]),
        ("deepseek-v3", [3 * 7168 * 2048 + 4 * 3 * 56 * 16]),  # one float32 a 128 x 128 block
    ],
)
def test_plane_bytes(name: str, planes: list[int]) -> None:
    assert [shape.plane_bytes for shape, _ in load_card(name, STORE).groups()] == planes


def test_facts_of_single_families() -> None:
    gemma, llama, oss = (load_card(name, STORE) for name in ("gemma-4-26b-a4b", "llama-4-maverick", "gpt-oss-20b"))
    assert gemma.moe_layers[0].shape.activation == "geglu"
    assert gemma.moe_layers[0].shared_run == "parallel"
    assert gemma.moe_layers[0].shared is not None
    assert gemma.moe_layers[0].shared.expert_hidden == 2112
    assert indices(llama) == list(range(1, 48, 2))
    assert (llama.weight_position, llama.dense_hidden) == ("input", 16384)
    assert (oss.moe_layers[0].shape.activation, oss.moe_layers[0].shape.format_name) == ("swiglu_oai", "mxfp4")
    nemotron = load_card("nemotron-3-nano-30b-a3b", STORE).moe_layers[0]
    assert (nemotron.shape.gate, nemotron.shape.activation) == (None, "relu2")
    assert nemotron.shared is not None
    assert (nemotron.shared.expert_hidden, nemotron.shared.gate) == (3712, None)


# Spellings


@pytest.mark.parametrize(
    "change",
    [
        {"num_experts": "absent", "num_local_experts": 16},
        {"num_experts": "absent", "n_routed_experts": 16},
        {"num_experts": "absent", "moe_num_experts": 16},
        {"num_local_experts": 16},
        {"num_experts_per_tok": "absent", "experts_per_token": 2},
        {"num_experts_per_tok": "absent", "top_k_experts": 2},
        {"num_experts_per_tok": "absent", "moe_k": 2},
        {"num_experts_per_tok": "absent", "moe_topk": [2, 2, 2, 2]},
        {"moe_topk": [2, 2, 2, 2]},
        {"moe_intermediate_size": [128, 128, 128, 128]},
        {"dtype": "absent", "torch_dtype": "bfloat16"},
        {"dtype": "torch.bfloat16"},
    ],
)
def test_spellings_mean_the_same(tmp_path: Path, change: dict[str, Any]) -> None:
    assert card(tmp_path, **change).groups() == card(tmp_path).groups()


def test_nested_text_config(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "outer", "text_config": QWEN, "vision_config": {"hidden_size": 9}}))
    assert read_config(path).groups() == card(tmp_path).groups()


@pytest.mark.parametrize(
    ("base", "change", "layers"),
    [
        (QWEN, {}, [0, 1, 2, 3]),
        (QWEN, {"decoder_sparse_step": 2}, [1, 3]),
        (QWEN, {"decoder_sparse_step": 1, "mlp_only_layers": [0, 2]}, [1, 3]),
        (DEEPSEEK, {}, [2, 3, 4, 5]),
        (DEEPSEEK, {"moe_layer_freq": 2}, [2, 4]),
        (DEEPSEEK, {"first_k_dense_replace": "absent", "moe_layer_freq": [0, 1, 1, 0, 1, 1]}, [1, 2, 4, 5]),
        (QWEN, {"interleave_moe_layer_step": 2}, [1, 3]),
        (QWEN, {"moe_layers": [1, 3], "interleave_moe_layer_step": 2}, [1, 3]),
        (QWEN, {"moe_layer_start_index": 1, "moe_layer_interval": 1, "moe_layer_end_index": None}, [1, 2, 3]),
        (QWEN, {"moe_layer_start_index": 1, "moe_layer_end_index": -1}, [1, 2, 3]),
        (QWEN, {"moe_layer_start_index": 0, "moe_layer_interval": 2, "moe_layer_end_index": 2}, [1]),
        (QWEN, {"expert_layer_period": 2, "expert_layer_offset": 1}, [1, 3]),
        (QWEN, {"hybrid_override_pattern": "ME*E"}, [1, 3]),
    ],
)
def test_which_layers_are_moe(tmp_path: Path, base: dict[str, Any], change: dict[str, Any], layers: list[int]) -> None:
    assert indices(card(tmp_path, base, **change)) == layers


@pytest.mark.parametrize(
    ("change", "shared"),
    [
        ({}, None),
        ({"n_shared_experts": 2}, (2, 128)),
        ({"moe_num_shared_experts": 2}, (2, 128)),
        ({"num_shared_expert": [1, 1, 1, 1]}, (1, 128)),
        ({"shared_expert_intermediate_size": 512}, (1, 512)),
        ({"shared_expert_intermediate_size": 0}, None),
        ({"n_shared_experts": 1, "moe_shared_expert_intermediate_size": 384}, (1, 384)),
        ({"model_type": "llama4_text"}, (1, 128)),
    ],
)
def test_shared_experts(tmp_path: Path, change: dict[str, Any], shared: tuple[int, int] | None) -> None:
    own = card(tmp_path, **change).moe_layers[0].shared
    assert (own and (own.experts, own.expert_hidden)) == shared


def test_per_layer_lists_may_differ(tmp_path: Path) -> None:
    found = card(tmp_path, moe_intermediate_size=[128, 128, 192, 192], moe_topk=[2, 2, 2, 4], num_experts_per_tok=None)
    assert [(shape.expert_hidden, shape.top_k, n) for shape, n in found.groups()] == [
        (128, 2, 2),
        (192, 2, 1),
        (192, 4, 1),
    ]
    document = show_document(found)
    assert (document["expert_hidden"], document["top_k"], document["plane_bytes"]) == (None, None, None)
    assert document["plane_bytes_min"] < document["plane_bytes_max"]


def test_prediction_layers_are_noted_not_counted(tmp_path: Path) -> None:
    found = card(tmp_path, num_nextn_predict_layers=1)
    assert len(found.moe_layers) == 4
    assert "1 multi-token-prediction" in found.notes[0]


# Quantization


def test_mlx_overrides_by_module_path(tmp_path: Path) -> None:
    six, eight = {"group_size": 64, "bits": 6}, {"group_size": 64, "bits": 8}
    scheme = {
        "group_size": 64,
        "bits": 4,
        "model.layers.0.mlp.gate": eight,  # the router, not an expert
        "model.layers.0.self_attn.v_proj": six,
        "model.layers.1.mlp.switch_mlp.down_proj": six,
        "language_model.model.layers.2.mlp.experts.gate_up_proj": eight,
        "model.layers.3.mlp.shared_experts.down_proj": six,
        "model.layers.3.mlp.switch_mlp.up_proj": False,
        "lm_head": eight,
    }
    found = card(tmp_path, quantization=scheme, quantization_config=scheme, n_shared_experts=1).moe_layers
    names = [[form.name for form in (one.shape.gate, one.shape.up, one.shape.down) if form] for one in found]
    four = "affine4-g64"
    assert names == [
        [four, four, four],
        [four, four, "affine6-g64"],
        ["affine8-g64", "affine8-g64", four],
        [four, "bf16", four],
    ]
    shared = [one.shared.down.name for one in found if one.shared]
    assert shared == [four, four, four, "affine6-g64"]


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        ({"group_size": 32, "bits": 4, "mode": "mxfp4"}, "mxfp4"),
        ({"group_size": 32, "bits": 8, "mode": "mxfp8"}, "mxfp8"),
        ({"group_size": 16, "bits": 4, "mode": "nvfp4"}, "nvfp4"),
        ({"group_size": 32, "bits": 8}, "affine8-g32"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8-e4m3-b128x128"),
        ({"quant_method": "fp8"}, "fp8-e4m3"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}, "mxfp4"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["gate", "lm_head"]}, "fp8-e4m3"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.*.mlp.experts"]}, "bf16"),
    ],
)
def test_schemes(tmp_path: Path, scheme: dict[str, Any], name: str) -> None:
    groups = card(tmp_path, quantization_config=scheme).groups()
    assert [shape.format_name for shape, _ in groups] == [name]


def test_layers_kept_from_conversion(tmp_path: Path) -> None:
    scheme = {"quant_method": "fp8", "ignored_layers": ["model.layers.2.mlp.experts", "model.layers.3"]}
    found = card(tmp_path, quantization_config=scheme).moe_layers
    assert [one.shape.format_name for one in found] == ["fp8-e4m3", "fp8-e4m3", "bf16", "bf16"]


def test_mxfp4_converts_routed_experts_alone(tmp_path: Path) -> None:
    layer = card(tmp_path, quantization_config={"quant_method": "mxfp4"}, n_shared_experts=1).moe_layers[0]
    assert layer.shared is not None
    assert (layer.shape.format_name, layer.shared.format_name) == ("mxfp4", "bf16")


# Refusals


@pytest.mark.parametrize(
    ("base", "change", "parts"),
    [
        (QWEN, {"num_local_experts": 8}, ["num_experts = 16", "num_local_experts = 8"]),
        (QWEN, {"experts_per_token": 4}, ["num_experts_per_tok = 2", "experts_per_token = 4"]),
        (QWEN, {"dtype": "bfloat16", "torch_dtype": "float16"}, ["dtype = 'bfloat16'", "torch_dtype = 'float16'"]),
        (QWEN, {"num_experts_per_tok": 17}, ["num_experts_per_tok = 17 is more than the 16 experts"]),
        (QWEN, {"num_experts_per_tok": 0}, ["num_experts_per_tok = 0"]),
        (QWEN, {"num_experts_per_tok": "absent"}, ["num_experts_per_tok", "is missing"]),
        (QWEN, {"moe_intermediate_size": "absent"}, ["moe_intermediate_size is missing"]),
        (QWEN, {"moe_intermediate_size": [128, 128]}, ["moe_intermediate_size has 2 entries, num_hidden_layers = 4"]),
        (
            QWEN,
            {"model_type": "mixtral", "moe_intermediate_size": "absent", "intermediate_size": "absent"},
            ["missing"],
        ),
        (QWEN, {"moe_intermediate_size": "768"}, ["moe_intermediate_size = '768'"]),
        (QWEN, {"moe_intermediate_size": True}, ["moe_intermediate_size = True"]),
        (QWEN, {"hidden_size": "absent"}, ["hidden_size", "is missing"]),
        (QWEN, {"num_hidden_layers": "absent"}, ["num_hidden_layers is missing"]),
        (QWEN, {"num_experts": "absent", "moe_topk": 2}, ["the expert count is missing"]),
        (QWEN, {"num_experts": "absent", "num_experts_per_tok": "absent", "ffn_config": {"moe_num": 1}}, ["moe_num"]),
        (QWEN, {"moe_layers": [0], "interleave_moe_layer_step": 2}, ["moe_layers", "interleave_moe_layer_step"]),
        (QWEN, {"mlp_only_layers": [0, 1, 2, 3]}, ["no layer is left"]),
        (QWEN, {"mlp_only_layers": [4]}, ["mlp_only_layers = [4]"]),
        (QWEN, {"hybrid_override_pattern": "ME"}, ["2 entries, num_hidden_layers = 4"]),
        (QWEN, {"moe_layer_end_index": 9}, ["moe_layer_end_index = 9"]),
        (QWEN, {"hidden_act": "tanh"}, ["hidden_act = 'tanh'"]),
        (QWEN, {"dtype": "int8"}, ["dtype = 'int8'"]),
        (QWEN, {"text_config": 3}, ["text_config = 3"]),
        (QWEN, {"quantization": {"bits": 7, "group_size": 0}}, ["group_size = 0"]),
        (QWEN, {"quantization": {"bits": 9, "group_size": 64}}, ["quantization.bits = 9"]),
        (QWEN, {"quantization": {"mode": "fp3"}}, ["mode = 'fp3'"]),
        (QWEN, {"quantization": {"mode": "mxfp4", "group_size": 64}}, ["mxfp4 has group_size 32"]),
        (QWEN, {"quantization": {"bits": 4}, "quantization_config": {"bits": 8}}, ["quantization = ", "disagrees"]),
        (QWEN, {"quantization_config": {"quant_method": "awq"}}, ["'awq' is not understood"]),
        (QWEN, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}, ["weight_block_size"]),
        (QWEN, {"text_config": {"num_experts": 8}}, ["text_config.num_experts = 8", "num_experts = 16"]),
    ],
)
def test_refusals_name_file_field_and_value(
    tmp_path: Path, base: dict[str, Any], change: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(MoeplanError) as caught:
        card(tmp_path, base, **change)
    text = str(caught.value)
    assert "config.json" in text
    assert "\n" not in text
    for part in parts:
        assert part in text


@pytest.mark.parametrize("text", ["", "[1]", "{", "null"])
def test_not_a_config(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(MoeplanError, match=r"config\.json"):
        read_config(path)


def test_zero_experts_is_dense(tmp_path: Path) -> None:
    found = card(tmp_path, num_experts=0, num_experts_per_tok="absent", moe_intermediate_size="absent")
    assert (found.moe_layers, found.dense_hidden) == ((), 6144)


# Cards


@pytest.mark.parametrize("name", list(TABLE))
def test_cards_survive_writing_and_reading(tmp_path: Path, name: str) -> None:
    found = load_card(name, STORE)
    path = tmp_path / "card.toml"
    path.write_text(card_toml(found))
    assert read_card(path) == found
    assert path.read_text() == (ROOT / "models" / f"{name}.toml").read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("experts = 128", "expert = 128", "unknown field expert = 128"),
        ("experts = 128", "", "experts is missing"),
        ("top_k = 8", "top_k = 129", "top_k = 129 is more than experts = 128"),
        ("top_k = 8", 'top_k = "8"', "top_k = '8', expected a positive whole number"),
        ('up = "affine4-g64"', 'up = "q4"', "up: unknown weight format 'q4'"),
        ('"0-47"', '"0-48"', "must name layers below 48"),
        ('"0-47"', '"3-1"', "layers = '3-1' must rise"),
        ('"0-47"', '"a"', "layers = 'a', expected a list such as"),
        ('"swiglu"', '"silu"', "activation = 'silu', expected one of"),
        ("hidden = 2048", "hidden = 0", "hidden = 0, expected a positive"),
        ("[[moe]]", "[[moe]", "cannot read"),
    ],
)
def test_defective_cards_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (ROOT / "models" / "qwen3-30b-a3b-4bit.toml").read_text()
    assert old in text
    path = tmp_path / "own.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(MoeplanError) as caught:
        read_card(path)
    assert message in str(caught.value)
    assert "own.toml" in str(caught.value)


def test_layer_lists() -> None:
    assert parse_layers("0-2,5,7-8", "x") == [0, 1, 2, 5, 7, 8]
    assert format_layers([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


def test_names_folders_and_case(tmp_path: Path) -> None:
    assert load_card("Qwen3-30B-A3B", STORE).name == "qwen3-30b-a3b"
    card(tmp_path)
    assert len(load_card(str(tmp_path), STORE).moe_layers) == 4
    with pytest.raises(MoeplanError, match=r"did you mean .*qwen3-30b-a3b"):
        load_card("qwen3-30b", STORE)
    with pytest.raises(MoeplanError, match="cannot read"):
        load_card(str(tmp_path / "none.json"), STORE)


def test_own_folder_takes_precedence(tmp_path: Path) -> None:
    text = (ROOT / "models" / "mixtral-8x7b.toml").read_text().replace("top_k = 2", "top_k = 3")
    (tmp_path / "mixtral-8x7b.toml").write_text(text)
    assert load_card("mixtral-8x7b", Store(models=tmp_path)).moe_layers[0].shape.top_k == 3


# Real configs and the command line


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="published configs are not on this machine")
def test_all_published_configs_load() -> None:
    files = sorted(CONFIGS.glob("*.json"))
    assert len(files) == 38
    dense = {path.name for path in files if not read_config(path).moe_layers}
    assert dense == {"Llama-3.1-8B.config.json", "Qwen2.5-0.5B-Instruct.config.json"}


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="published configs are not on this machine")
def test_encoder_decoders() -> None:
    switch, nllb = (read_config(CONFIGS / f"{name}.config.json") for name in ("switch-base-128", "nllb-moe-54b"))
    assert indices(switch) == list(range(1, 24, 2))
    assert indices(nllb) == [3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43, 47]
    assert (switch.moe_layers[0].shape.top_k, nllb.moe_layers[0].shape.top_k) == (1, 2)
    assert switch.moe_layers[0].shape.gate is None


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="published configs are not on this machine")
def test_shipped_cards_regenerate_unchanged(tmp_path: Path) -> None:
    import runpy

    runpy.run_path(str(ROOT / "benchmarks" / "derive_cards.py"))["main"](CONFIGS, tmp_path)
    made = {path.stem: path.read_text() for path in tmp_path.glob("*.toml")}
    assert made == {name: (ROOT / "models" / f"{name}.toml").read_text() for name in TABLE}


def invoke(*words: str) -> str:
    result = CliRunner().invoke(app, ["model", *words, "--models", str(ROOT / "models")])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_show_has_the_published_fields() -> None:
    document = json.loads(invoke("show", "dots.llm1-mixed-4-6bit", "--json"))
    assert (document["plane_bytes_min"], document["plane_bytes_max"]) == (9_732_096, 11_173_888)
    assert (document["moe_layers"], document["shared_experts"], document["hidden"]) == (61, 2, 4096)
    first = {key: document["layers"][0][key] for key in ("layer", "gate_bits", "up_bits", "down_bits", "plane_bytes")}
    assert first == {"layer": 1, "gate_bits": 4, "up_bits": 4, "down_bits": 6, "plane_bytes": 11_173_888}
    assert len(document["layers"]) == 61
    assert "11,173,888 bytes a plane" in invoke("show", "dots.llm1-mixed-4-6bit")
    assert json.loads(invoke("show", "llama-3.1-8b", "--json"))["moe_layers"] == 0


def test_list_names_every_card(tmp_path: Path) -> None:
    document = json.loads(invoke("list", "--json"))
    assert {row["name"] for row in document["models"]} >= set(TABLE)
    assert invoke("list").splitlines()[0].startswith("model")
    (tmp_path / "broken.toml").write_text("name = 3")
    result = CliRunner().invoke(app, ["model", "list", "--models", str(tmp_path)])
    assert result.exit_code == 0
    assert "skipped" in result.stderr
    assert "broken.toml" in result.stderr
