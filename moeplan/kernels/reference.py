"""One MoE layer in float64: the value every kernel is compared with."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from moeplan.errors import MoeplanError

Array = npt.NDArray[np.float64]
Planes = Callable[[int], tuple[npt.NDArray[Any] | None, npt.NDArray[Any], npt.NDArray[Any]]]


def silu(x: Array) -> Array:
    """x / (1 + exp(-x)), without overflow for large negative x."""
    half: Array = 0.5 * x
    return half * (1.0 + np.tanh(half))


def gelu_tanh(x: Array) -> Array:
    """The tanh approximation of GELU (Hendrycks and Gimpel 2016), which Gemma and MLX's `gelu_approx` use."""
    inner: Array = np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1.0 + np.tanh(inner))


def activate(gate: Array | None, up: Array, activation: str) -> Array:
    """`swiglu`: silu(gate) * up; `geglu`: gelu_tanh(gate) * up; `relu2`: max(up, 0)^2, times gate if there is one.

    Raises MoeplanError for another activation, or a gated one without a gate.
    """
    if activation == "relu2":
        squared = np.maximum(up, 0.0) ** 2
        return squared if gate is None else squared * gate
    gated = {"swiglu": silu, "geglu": gelu_tanh}
    if activation not in gated or gate is None:
        raise MoeplanError(f"reference: activation {activation!r} with gate {gate is not None} is not defined")
    return gated[activation](gate) * up


def moe_layer(x: npt.ArrayLike, ids: npt.ArrayLike, scores: npt.ArrayLike, planes: Planes, activation: str) -> Array:
    """y[t] = sum over slots s of scores[t, s] * down(act(gate(x[t]), up(x[t]))) with the planes of ids[t, s].

    x [tokens, hidden], ids and scores [tokens, top_k]; planes(expert) -> (gate | None, up, down) with gate and up
    [expert_hidden, hidden] and down [hidden, expert_hidden]. Each chosen expert is asked for once, no other is
    touched; an id of -1 adds nothing. Returns float64 [tokens, hidden].
    """
    rows, chosen, weights = np.asarray(x, np.float64), np.asarray(ids), np.asarray(scores, np.float64)
    out = np.zeros_like(rows)
    for expert in _distinct(chosen):
        gate, up, down = (None if p is None else np.asarray(p, np.float64) for p in planes(expert))
        token, slot = np.nonzero(chosen == expert)
        if up is None or down is None:
            raise MoeplanError(f"reference: planes({expert}) must give up and down")
        picked = rows[token]
        hidden = activate(None if gate is None else picked @ gate.T, picked @ up.T, activation)
        np.add.at(out, token, weights[token, slot][:, None] * (hidden @ down.T))
    return out


def _distinct(ids: npt.NDArray[Any]) -> Iterable[int]:
    return (int(e) for e in np.unique(ids) if e >= 0)


def relative_rms(out: npt.ArrayLike, ref: npt.ArrayLike) -> float:
    """||out - ref|| / ||ref|| over all elements; infinite where out holds a NaN, an infinity or another shape."""
    a, b = np.asarray(out, np.float64), np.asarray(ref, np.float64)
    if a.shape != b.shape or not np.isfinite(a).all():
        return float("inf")
    size = float(np.linalg.norm(b))
    error = float(np.linalg.norm(a - b))
    return error / size if size else (0.0 if error == 0.0 else float("inf"))
