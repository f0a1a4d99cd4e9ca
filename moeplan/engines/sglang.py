"""SGLang's Triton experts without a tuned file, 16-bit weights: 16-row blocks up to one token an expert, then 64."""

from moeplan.engines.rules import Predicate, Rule, RuleBook

_FILE = "SGLang 0.5.23 python/sglang/srt/layers/moe/moe_runner/triton_utils/fused_moe_triton_config.py"


def rule_book(experts: int) -> RuleBook:
    """The rules for that many experts: the gate compares tokens with experts."""
    few = Predicate("block rows 16", "tokens", "<=", experts, f"{_FILE}, get_default_config: `M <= E`")
    return RuleBook(
        "sglang",
        "cuda",
        (Rule("grouped:16", (few,)), Rule("grouped:64")),
        ("SGLang", "sglang"),
        ("a tuned file of the installed Triton version replaces them (configs/triton_X_Y_Z, nearest token count)",),
    )
