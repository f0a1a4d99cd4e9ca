"""Which part of a MoE layer a profile shows: pairing applies to the decode stage 1 (gate and up) alone."""

import re
from collections.abc import Sequence

# Kernel names as engines spell them: AITER `mfma_moe1` / `mfma_moe2`, CUTLASS and TensorRT-LLM `gemm1` / `gemm2`,
# vLLM `moe_sum`, `w13` / `w2`. A descriptor producer (`_blkmap_kernel`), sort, align and quantization are of no stage.
_FIRST = re.compile(r"moe1|stage1|gate_?up|gemm1|w13", re.I)
_SECOND = re.compile(r"moe2|stage2|down|gemm2|w2(?!\d)", re.I)
_REDUCE = re.compile(r"reduce|moe_sum|combine", re.I)


def why_not_stage_one(stage: int | None, phase: str | None, kernels: Sequence[str]) -> str | None:
    """Why pairing does not apply to this segment, or None.

    stage 1 or 2, phase `decode` or `prefill`, kernels: names in the scored segment. What is not given is taken as
    stage 1 of decode, but kernels, once given, must show it.

    >>> why_not_stage_one(None, None, ["mfma_moe1", "_blkmap_kernel"])
    >>> why_not_stage_one(2, None, [])
    'stage 2 stays on the original blocks: its tiles are not widened'
    """
    if stage == 2:
        return "stage 2 stays on the original blocks: its tiles are not widened"
    if phase == "prefill":
        return "prefill is mostly bound by arithmetic: pairing is a decode measure"
    if not kernels:
        return None
    first = [name for name in kernels if _FIRST.search(name)]
    if reduce := [name for name in kernels if _REDUCE.search(name)]:
        return f"kernel {reduce[0]} reduces over the top-k experts: the segment is not stage 1 alone"
    if second := [name for name in kernels if _SECOND.search(name)]:
        return f"kernel {second[0]} is of stage 2" + (f", {first[0]} of stage 1: ambiguous" if first else "")
    return None if first else f"no kernel of {', '.join(kernels)} is known as stage 1: ambiguous"
