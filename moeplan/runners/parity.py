"""A few rows of a kernel's layer against the float64 reference, on fresh random inputs."""

import hashlib
from typing import Any

import numpy as np

from moeplan.kernels.protocol import Arm, FloatArray, IntArray, Kernel

ROWS = 3  # rows compared: first, middle and last token; a row already needs top_k whole planes in float64


def bf16_rounded(values: FloatArray) -> FloatArray:
    """Rounded to the nearest bf16 (ties to even), kept as float32, so that every kernel reads the same numbers."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + (0x7FFF + (bits >> 16 & 1))) & np.uint32(0xFFFF0000)).view(np.float32)


def fresh_inputs(arm: Arm, ids: IntArray) -> tuple[FloatArray, FloatArray]:
    """x [tokens, hidden], standard normal, and scores [tokens, top_k] that sum to 1 over the slots in use."""
    seed = int.from_bytes(hashlib.sha256(arm.id.encode()).digest()[:8], "little")
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((arm.tokens, arm.shape.hidden)).astype(np.float32)
    raw = np.where(ids >= 0, np.exp(rng.standard_normal(ids.shape)), 0.0)
    scores = raw / np.maximum(raw.sum(axis=1, keepdims=True), 1e-30)
    return bf16_rounded(x), bf16_rounded(scores.astype(np.float32))


def parity(kernel: Kernel, state: Any, arm: Arm, ids: IntArray) -> float:
    """Relative RMS of the kernel's layer 0 on ids [tokens, top_k] against the reference, over up to ROWS rows."""
    x, scores = fresh_inputs(arm, ids)
    out = np.asarray(kernel.layer(state, x, ids, scores))
    if out.shape != x.shape:
        raise ValueError(f"layer returned {out.shape}, expected {x.shape}")
    rows = np.unique(np.linspace(0, arm.tokens - 1, ROWS).astype(int))
    used = ids[rows]
    planes = {int(expert): kernel.planes(state, int(expert)) for expert in np.unique(used[used >= 0])}
    from moeplan.kernels.reference import moe_layer, relative_rms

    wanted = moe_layer(x[rows], used, scores[rows], planes, arm.shape.activation)
    return float(relative_rms(out[rows], wanted))
