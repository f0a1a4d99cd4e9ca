"""A few rows of a kernel's layer against the float64 reference, on fresh random inputs."""

import hashlib
from typing import Any

import numpy as np

from moeplan.kernels.formats import from_bf16, to_bf16
from moeplan.kernels.protocol import Arm, FloatArray, IntArray, Kernel
from moeplan.kernels.reference import moe_layer, relative_rms

ROWS = 3  # rows compared: first, middle and last token; a row already needs top_k whole planes in float64


def fresh_inputs(arm: Arm, ids: IntArray) -> tuple[FloatArray, FloatArray]:
    """x [tokens, hidden], standard normal, and scores [tokens, top_k] that sum to 1 over the slots in use.

    Both are rounded to bf16, so that a kernel that reads bf16 reads the very numbers of the reference.
    """
    seed = int.from_bytes(hashlib.sha256(arm.id.encode()).digest()[:8], "little")
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((arm.tokens, arm.shape.hidden))
    raw = np.where(ids >= 0, np.exp(rng.standard_normal(ids.shape)), 0.0)
    scores = raw / np.maximum(raw.sum(axis=1, keepdims=True), 1e-30)  # a row of padding alone stays at zero
    return from_bf16(to_bf16(x)), from_bf16(to_bf16(scores))


def parity(kernel: Kernel, state: Any, arm: Arm, ids: IntArray) -> float:
    """Relative RMS of the kernel's layer 0 on ids [tokens, top_k] against the reference, over up to ROWS rows."""
    x, scores = fresh_inputs(arm, ids)
    out = np.asarray(kernel.layer(state, x, ids, scores))
    if out.shape != x.shape:
        raise ValueError(f"layer returned {out.shape}, expected {x.shape}")
    rows = np.unique(np.linspace(0, arm.tokens - 1, ROWS).astype(int))
    wanted = moe_layer(
        x[rows], ids[rows], scores[rows], lambda expert: kernel.planes(state, expert), arm.shape.activation
    )
    return relative_rms(out[rows], wanted)
