"""Derive the shipped model cards from a folder of published config.json files.

    python benchmarks/derive_cards.py CONFIGS models

Every card is what `moeplan model show CONFIG` reads, with the source line below and, where the copy of the config
does not say how the published weights are stored, their dtype.
"""

import sys
from dataclasses import replace
from pathlib import Path

from moeplan.store import write_text
from moeplan.traffic.card import card_toml
from moeplan.traffic.config import read_config
from moeplan.traffic.model import ModelCard
from moeplan.traffic.shape import LayerShape, WeightFormat

AIC = "ai-dynamo/aiconfigurator @ 095f58a5, aic-core/src/aiconfigurator_core/model_configs/"
LRC = "ljcleo/moe-lrc @ 7b3ca466, model/"
RECIPE = "mlx-lm mixed_4_6 recipe on 62 layers: down is 6 bit where i < L/8, i >= 7L/8 or (i - L/8) % 3 == 2"
CARDS = {  # card: (config file, where it was read)
    "qwen3-30b-a3b": ("Qwen3-30B-A3B", AIC + "Qwen--Qwen3-30B-A3B_config.json"),
    "qwen3-30b-a3b-4bit": (
        "DERIVED.qwen3-30b-a3b-4bit-mlx.uniform",
        AIC + "Qwen--Qwen3-30B-A3B_config.json, with the MLX quantization group 64, 4 bit",
    ),
    "qwen3-235b-a22b": ("Qwen3-235B-A22B", AIC + "Qwen--Qwen3-235B-A22B_config.json"),
    "qwen3-next-80b-a3b": (
        "Qwen3-Next-80B-A3B",
        "alibaba/InferSim @ f2293dab, hf_configs/qwen3-next-80B-A3B_config.json",
    ),
    "qwen3.5-35b-a3b": ("Qwen3.5-35B-A3B", AIC + "Qwen--Qwen3.5-35B-A3B_config.json"),
    "qwen1.5-moe-a2.7b": ("Qwen1.5-MoE-A2.7B", LRC + "qwen/config.json"),
    "mixtral-8x7b": ("Mixtral-8x7B-v0.1", AIC + "mistralai--Mixtral-8x7B-v0.1_config.json"),
    "mixtral-8x22b": ("Mixtral-8x22B-v0.1", AIC + "mistralai--Mixtral-8x22B-v0.1_config.json"),
    "deepseek-v2-lite": (
        "DeepSeek-V2-Lite",
        "inference-sim/inference-sim @ f90a1e3a, model_configs/deepseek-v2-lite/config.json",
    ),
    "deepseek-v3": ("DeepSeek-V3", AIC + "deepseek-ai--DeepSeek-V3_config.json"),
    "kimi-k2": ("Kimi-K2-Instruct", AIC + "moonshotai--Kimi-K2-Instruct_config.json"),
    "glm-4.5-air": ("GLM-4.5-Air", "a printed Glm4MoeConfig in a public training log; re-typed"),
    "glm-4.5": ("GLM-4.5-or-4.7.trimmed", "a public test fixture of GLM-4.7, same dimensions; trimmed"),
    "dots.llm1": ("dots.llm1-mixed-4-6bit.trimmed", "lablup/mlxcel, Rust test constant DOTS1_CONFIG; trimmed"),
    "dots.llm1-mixed-4-6bit": ("DERIVED.dots.llm1-mixed_4_6-recipe", f"lablup/mlxcel DOTS1_CONFIG; {RECIPE}"),
    "gpt-oss-20b": ("gpt-oss-20b", AIC + "openai--gpt-oss-20b_config.json"),
    "gpt-oss-120b": ("gpt-oss-120b", AIC + "openai--gpt-oss-120b_config.json"),
    "olmoe-1b-7b": ("OLMoE-1B-7B", LRC + "olmoe/config.json"),
    "gemma-4-26b-a4b": ("gemma-4-26B-A4B", AIC + "google--gemma-4-26B-A4B_config.json"),
    "llama-4-scout": ("Llama-4-Scout-17B-16E", AIC + "meta-llama--Llama-4-Scout-17B-16E-Instruct_config.json"),
    "llama-4-maverick": (
        "Llama-4-Maverick-17B-128E",
        AIC + "meta-llama--Llama-4-Maverick-17B-128E-Instruct_config.json",
    ),
    "minimax-m2.5": ("MiniMax-M2.5", AIC + "MiniMaxAI--MiniMax-M2.5_config.json"),
    "phi-3.5-moe": ("Phi-3.5-MoE", LRC + "phi/config.json"),
    "granite-3.1-3b-a800m": ("granite-3.1-3b-a800m-instruct.trimmed", "a public planner's test fixture; trimmed"),
    "ernie-4.5-21b-a3b": ("ERNIE-4.5-21B-A3B.trimmed", "two public test fixtures that agree; trimmed"),
    "hunyuan-a13b": ("Hunyuan-A13B.trimmed", "public test fixture HUNYUAN_MOE_LIST_CONFIG; trimmed"),
    "nemotron-3-nano-30b-a3b": (
        "Nemotron-3-Nano-30B-A3B",
        AIC + "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16_config.json",
    ),
    "llama-3.1-8b": ("Llama-3.1-8B", AIC + "meta-llama--Meta-Llama-3.1-8B_config.json"),
    "qwen2.5-0.5b": (
        "Qwen2.5-0.5B-Instruct",
        "infinityarpan/qwen-25-api @ 88ec35fc, models/Qwen2.5-0.5B-Instruct/config.json; re-typed",
    ),
}
# The copies read say float32 (re-saved) or 4 bit (a quantized copy); the published weights are bf16.
AS_BF16 = {"olmoe-1b-7b": "the copy read says float32", "dots.llm1": "the copy read is a 4-bit one"}


def as_bf16(card: ModelCard, why: str) -> ModelCard:
    plain = WeightFormat.parse("bf16")

    def cast(shape: LayerShape) -> LayerShape:
        return replace(shape, gate=plain if shape.gate else None, up=plain, down=plain)

    layers = [
        replace(one, shape=cast(one.shape), shared=cast(one.shared) if one.shared else None) for one in card.moe_layers
    ]
    note = f"published weights are bf16; {why}"
    return replace(card, moe_layers=tuple(layers), notes=(*card.notes, note))


def main(configs: Path, models: Path) -> None:
    for name, (file, source) in CARDS.items():
        card = replace(read_config(configs / f"{file}.config.json"), name=name, source=f"config.json: {source}")
        if name in AS_BF16:
            card = as_bf16(card, AS_BF16[name])
        write_text(models / f"{name}.toml", card_toml(card))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
