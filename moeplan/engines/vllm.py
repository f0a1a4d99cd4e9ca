"""vLLM's Triton experts without a tuned file: naive assignment for few slots, then blocks by the default rule."""

from moeplan.engines.rules import Predicate, Rule, RuleBook

_FILE = "vLLM 0.33.0 vllm/model_executor/layers/fused_moe/fused_moe.py"


def _rows(name: str, most: int) -> tuple[Predicate, ...]:
    return (Predicate(name, "tokens", "<=", most, f"{_FILE}, get_default_config: BLOCK_SIZE_M"),)


BOOKS = (
    RuleBook(
        "vllm",
        "cuda",
        (
            Rule(
                "naive:16",
                (
                    Predicate("naive assignment", "slots_times_4_over_experts", "<=", 1,
                              f"{_FILE}, `M * topk * 4 <= E`: one block a slot, no align"),
                    *_rows("block rows 16", 32),
                ),
            ),
            Rule("grouped:16", _rows("block rows 16", 32)),
            Rule("grouped:32", _rows("block rows 32", 96)),
            Rule("grouped:64", _rows("block rows 64", 512)),
            Rule("grouped:128"),
        ),
        ("vllm", "VLLM"),
        (
            "a tuned file E=...,N=...,device_name=....json replaces the block rows: the entry of the nearest token"
            f" count is taken, without a fallback ({_FILE}, get_moe_configs and try_get_optimal_moe_config)",
        ),
    ),
)  # fmt: skip
