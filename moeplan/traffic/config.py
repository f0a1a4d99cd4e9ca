"""A model's own config.json (Hugging Face or MLX) as a card."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moeplan.errors import MoeplanError
from moeplan.traffic.fields import Fields
from moeplan.traffic.model import ModelCard, MoELayer, SharedRun
from moeplan.traffic.placement import moe_indices
from moeplan.traffic.quantization import Formats, Kind, formats
from moeplan.traffic.shape import Activation, LayerShape

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "top_k_experts",
    "moe_k",
    "moe_topk",
    "num_selected_experts",
)
_ACTIVATION = ("hidden_act", "hidden_activation", "mlp_hidden_act", "activation_function", "dense_act_fn")
# Families whose `intermediate_size` is the width of one expert; in all others it is a dense MLP's.
_PLAIN_WIDTH = {
    "mixtral",
    "olmoe",
    "phimoe",
    "granitemoe",
    "granitemoeshared",
    "gpt_oss",
    "minimax_m2",
    "jamba",
    "llama4",
    "llama4_text",
    "hunyuan_v1_moe",
}
_GATED: dict[str, Activation] = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu",
    "gelu_new": "geglu",
}
_TWO_MATRICES: dict[str, Activation] = {"relu2": "relu2", "relu": "relu"}
_ATTENTION = {
    "heads": ("num_attention_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim", "d_kv"),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_nope_head_dim": ("qk_nope_head_dim",),
    "qk_rope_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
    "sliding_window": ("sliding_window",),
}


def read_config(path: Path) -> ModelCard:
    """Read a config.json. Raises MoeplanError naming file, field and value; a dense model gives a dense card."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as bad:
        raise MoeplanError(f"{path}: cannot read: {getattr(bad, 'strerror', None) or bad}") from bad
    if not isinstance(raw, dict):
        raise MoeplanError(f"{path}: expected an object, found {type(raw).__name__}")
    fields = Fields(raw, path)
    name = path.parent.name if path.name == "config.json" else path.name.removesuffix(".config.json")
    return card_of(fields, name.removesuffix(".json").lower() or "config", f"{path}")


def card_of(fields: Fields, name: str, source: str) -> ModelCard:
    """The card of parsed fields."""
    kind = str(fields.first("model_type") or "unknown")
    experts = fields.one(*_EXPERTS)
    encoder_decoder = bool(fields.first("is_encoder_decoder"))
    layers = _depth(fields, encoder_decoder)
    moe = experts not in (None, 0) and fields.first("enable_moe_block") is not False
    if not moe:
        _refuse_hidden_experts(fields)
    found: tuple[MoELayer, ...] = ()
    notes: list[str] = []
    if moe:
        scheme = formats(fields)
        found = tuple(_encoder_decoder(fields, kind, scheme) if encoder_decoder else _layers(fields, kind, scheme))
        notes += [scheme.note] if scheme.note else []
    extra = fields.first("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
    if extra:
        notes.append(f"{extra} multi-token-prediction layers come on top of the layers and are not counted")
    attention = {key: fields.first(*keys) for key, keys in _ATTENTION.items()}
    tied = fields.first("tie_word_embeddings")
    dense = len(found) < layers and kind != "nemotron_h"
    return ModelCard(
        name=name,
        model_type=kind,
        source=source,
        layers=layers,
        hidden=fields.need("hidden_size", "d_model"),
        moe_layers=found,
        # Llama 4 scales the expert's input by the router's weight; elsewhere the slots' sum is weighted.
        weight_position="input" if kind.startswith("llama4") else "combine",
        dense_hidden=_dense_width(fields) if dense else None,
        vocabulary=fields.whole("vocab_size"),
        tied_embeddings=tied if isinstance(tied, bool) else None,
        attention={key: value for key, value in attention.items() if type(value) is int and value > 0},
        notes=tuple(notes),
    )


def _depth(fields: Fields, encoder_decoder: bool) -> int:
    if not encoder_decoder:
        return fields.need("num_hidden_layers")
    return fields.need("encoder_layers", "num_layers") + fields.need("decoder_layers", "num_decoder_layers")


def _dense_width(fields: Fields) -> int | None:
    value = fields.first("intermediate_size_mlp", "intermediate_size", "d_ff", "decoder_ffn_dim")
    return value if type(value) is int else None


def _refuse_hidden_experts(fields: Fields) -> None:
    """A config that speaks of experts under keys unknown here must not pass for a dense model."""
    for prefix, table in fields.tables:
        for key, value in table.items():
            inner = value.items() if isinstance(value, dict) and key.startswith("ffn") else [(key, value)]
            for name, item in inner:
                if ("expert" in name or name.startswith("moe_")) and item and type(item) is int:
                    raise fields.fail(
                        f"{prefix}{name} = {item!r} but none of {', '.join(_EXPERTS)}: the expert count is missing"
                    )


def _top_k(fields: Fields, kind: str, layers: int) -> list[int]:
    found = fields.per_layer(layers, *_TOP_K)
    if found is None and kind == "nllb-moe":
        return [2] * layers  # the family's router is top-2 by construction and its config has no key for it
    if found is None:
        raise fields.fail(f"{' or '.join(_TOP_K[:4])} is missing")
    return found


def _width(fields: Fields, kind: str, layers: int) -> list[int]:
    found = fields.per_layer(layers, "moe_intermediate_size", "expert_intermediate_size")
    if found is None and kind in _PLAIN_WIDTH:
        found = fields.per_layer(layers, "intermediate_size")
        if found is None:
            raise fields.fail("intermediate_size is missing: no width of an expert")
    if found is None:
        raise fields.fail(
            f"moe_intermediate_size is missing: no width of an expert (intermediate_size of {kind} is not one)"
        )
    return found


def _activation(fields: Fields, kind: str) -> tuple[Activation, bool]:
    """The activation, and whether an expert has a gate matrix."""
    if kind == "gpt_oss":
        return "swiglu_oai", True  # clamped, with alpha 1.702 and up + 1; the config says silu
    name = fields.first(*_ACTIVATION)
    if name in _TWO_MATRICES:
        return _TWO_MATRICES[name], False
    if name is None or name in _GATED:
        return _GATED[name or "silu"], True
    raise fields.fail(f"{fields.name(*_ACTIVATION)} = {name!r} is not understood")


def _shared_counts(fields: Fields, kind: str, layers: int) -> list[int] | None:
    counted = fields.per_layer(
        layers, "n_shared_experts", "moe_num_shared_experts", "num_shared_expert", "num_shared_experts", least=0
    )
    if counted is None and kind.startswith("llama4"):
        return [1] * layers  # implicit: one shared expert of the routed width
    return counted


def _shared(fields: Fields, kind: str, layers: int, widths: list[int]) -> list[tuple[int, int, SharedRun]]:
    """Number, width and way of running of the shared experts of each layer; number 0 where there are none."""
    if kind.startswith("gemma4"):
        return [(1, fields.need("intermediate_size"), "parallel")] * layers
    own = fields.per_layer(
        layers,
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
        least=0,
    )
    counts = _shared_counts(fields, kind, layers)
    if counts is None:
        counts = [1] * layers if own else [0] * layers
    sizes = own if own and any(own) else widths
    if own and not any(own):
        counts = [0] * layers
    return [(count, size, "separate") for count, size in zip(counts, sizes, strict=True)]


@dataclass(frozen=True, slots=True)
class _Expert:
    """What all expert matrices of a config have in common."""

    hidden: int
    scheme: Formats
    activation: Activation
    gated: bool

    @classmethod
    def of(cls, fields: Fields, kind: str, scheme: Formats) -> "_Expert":
        return cls(fields.need("hidden_size", "d_model"), scheme, *_activation(fields, kind))

    def shape(self, place: tuple[int, Kind], width: int, experts: int, top_k: int) -> LayerShape:
        gate = self.scheme.of(*place, "gate") if self.gated else None
        up, down = self.scheme.of(*place, "up"), self.scheme.of(*place, "down")
        return LayerShape(self.hidden, width, experts, top_k, gate, up, down, self.activation)


def _layers(fields: Fields, kind: str, scheme: Formats) -> list[MoELayer]:
    layers, expert = fields.need("num_hidden_layers"), _Expert.of(fields, kind, scheme)
    counts = fields.per_layer(layers, *_EXPERTS) or []
    top_k, widths = _top_k(fields, kind, layers), _width(fields, kind, layers)
    shared = _shared(fields, kind, layers, widths)
    found = []
    for i in moe_indices(fields, layers):
        if top_k[i] > counts[i]:
            raise fields.fail(f"{fields.name(*_TOP_K)} = {top_k[i]} is more than the {counts[i]} experts")
        number, width, run = shared[i]
        shape = expert.shape((i, "routed"), widths[i], counts[i], top_k[i])
        beside = expert.shape((i, "shared"), width, number, number) if number else None
        found.append(MoELayer(i, shape, beside, run))
    return found


def _encoder_decoder(fields: Fields, kind: str, scheme: Formats) -> list[MoELayer]:
    """Switch and NLLB: encoder layers first, then decoder layers. Their first sparse layers differ."""
    expert = _Expert.of(fields, kind, scheme)
    sides: list[tuple[Literal["encoder", "decoder"], int]] = [
        ("encoder", fields.need("encoder_layers", "num_layers")),
        ("decoder", fields.need("decoder_layers", "num_decoder_layers")),
    ]
    experts, top_k = fields.need(*_EXPERTS), _top_k(fields, kind, 1)[0]
    if top_k > experts:
        raise fields.fail(f"{fields.name(*_TOP_K)} = {top_k} is more than the {experts} experts")
    found: list[MoELayer] = []
    base = 0
    for side, depth in sides:
        step, width = fields.need(f"{side}_sparse_step"), fields.need(f"{side}_ffn_dim", "d_ff")
        first = step - 1 if kind == "nllb-moe" else min(1, step - 1)  # nllb: (i + 1) % step == 0; switch: i % step == 1
        indices = range(base + first, base + depth, step)
        _agree(fields, f"num_sparse_{side}_layers", len(indices))
        shape = expert.shape((0, "routed"), width, experts, top_k)
        found += [MoELayer(i, shape) for i in indices]
        base += depth
    return found


def _agree(fields: Fields, key: str, counted: Any) -> None:
    stated = fields.whole(key, least=0)
    if stated is not None and stated != counted:
        raise fields.fail(f"{key} = {stated} disagrees with the {counted} layers of its sparse step")
