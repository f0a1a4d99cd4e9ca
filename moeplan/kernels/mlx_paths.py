"""The expert paths of mlx-lm, unsorted and sorted, as chains of layers that MLX runs on any of its devices.

Twin: kernels/reference.py. The operations and their order are those of mlx-lm 0.32 `SwitchGLU.__call__` and
`_gather_sort` (models/switch_layers.py) and of the weighted sum in `Qwen3MoeSparseMoeBlock` (models/qwen3_moe.py).
Neither path is batch invariant: MLX chooses between a vector kernel and a tile by the number of slots
(mlx/backend/cuda/quantized/quantized.cpp, mlx/backend/metal/quantized.cpp `GatherQMM`).
"""

import hashlib
import inspect
import io
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np

from moeplan.kernels.mlx_weights import AFFINE_STD, Matrix, Weights, activation_type, on_gpu, weights_of
from moeplan.kernels.protocol import Arm, FloatArray, IntArray
from moeplan.traffic.shape import LayerShape, WeightFormat

_GROUPS = (32, 64, 128)  # group sizes of MLX affine quantization (mlx/ops.cpp quantize)


@dataclass(frozen=True, slots=True)
class State:
    """A prepared arm: x0 [tokens, hidden]; per layer ids and scores [tokens, top_k]. It holds no weights."""

    shape: LayerShape
    x0: Any
    ids: tuple[Any, ...]
    scores: tuple[Any, ...]
    signature: str


def _product(x: Any, matrix: Matrix, form: WeightFormat, ids: Any, is_sorted: bool) -> Any:
    import mlx.core as mx

    if len(matrix) == 1:
        return mx.gather_mm(x, matrix[0].swapaxes(-1, -2), rhs_indices=ids, sorted_indices=is_sorted)
    codes, scales, biases = matrix
    return mx.gather_qmm(
        x, codes, scales, biases, rhs_indices=ids, transpose=True,
        group_size=form.group, bits=form.bits, sorted_indices=is_sorted,
    )  # fmt: skip


def _swiglu() -> Callable[[Any, Any], Any]:
    import mlx.core as mx

    return mx.compile(lambda gate, up: gate * mx.sigmoid(gate) * up, shapeless=True)


class ExpertPath:
    """`gather` or, with sorting, `gather_sorted`: up, gate and down by gather_qmm, weighted sum over the slots."""

    batch_invariant = False
    has_reference = True

    def __init__(self, name: str, is_sorted: bool) -> None:
        """A path under the name that engines give it."""
        self.name = name
        self._sorted = is_sorted
        self._act: Callable[[Any, Any], Any] | None = None

    def declines(self, shape: LayerShape, tokens: int) -> str | None:
        """Formats other than affine and bf16 (CPU: f32), other activations than SwiGLU, widths off the groups."""
        if shape.activation != "swiglu" or shape.gate is None:
            return f"activation {shape.activation}: only swiglu with a gate is built"
        if shape.gate != shape.up:
            return f"gate {shape.gate.name} differs from up {shape.up.name}"
        for form, columns in ((shape.up, shape.hidden), (shape.down, shape.expert_hidden)):
            if form.name == "bf16" and not on_gpu():
                return "weight format bf16: gather_mm of MLX's CPU backend takes float32 alone"
            if form.name == ("bf16" if on_gpu() else "f32"):
                continue
            if not form.name.startswith("affine") or form.bits not in AFFINE_STD or form.group not in _GROUPS:
                return f"weight format {form.name}: only affine (bits 2-6, 8; groups 32, 64, 128), bf16 (CPU: f32)"
            if columns % form.group or columns * form.bits % 32:
                return f"{columns} columns do not fill groups of {form.group} and whole 32-bit words"
        return None

    def config_hash(self) -> str:
        """Digest of the functions that build a layer's graph, of MLX's version and of its device."""
        import mlx.core as mx

        parts = [inspect.getsource(part) for part in (type(self)._layer, _product, _swiglu, _gather_sort)]
        parts += [metadata.version("mlx"), str(mx.default_device()), self.name]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def prepare(self, arm: Arm, ids: IntArray) -> State:
        """Weights for the long chain, random inputs and scores of arm.seed, ids on the device."""
        import mlx.core as mx

        layers = arm.chain[1]
        weights = weights_of(arm.shape, layers)
        x_key, score_key = mx.random.split(mx.random.key(arm.seed))
        x0 = mx.random.normal((arm.tokens, arm.shape.hidden), dtype=activation_type(), key=x_key)
        raw = mx.random.normal((layers, arm.tokens, arm.shape.top_k), key=score_key)
        scores = mx.where(mx.array(ids[:layers]) >= 0, mx.softmax(raw, axis=-1), 0.0).astype(x0.dtype)
        device_ids = [mx.array(np.maximum(layer, 0).astype(np.uint32)) for layer in ids[:layers]]
        device_scores = [scores[i] for i in range(layers)]
        mx.eval(x0, device_ids, device_scores)
        made = x0 + self._layer(weights, 0, x0, device_ids[0], device_scores[0])
        return State(arm.shape, x0, tuple(device_ids), tuple(device_scores), self._described(made))

    def run(self, state: State, layers: int) -> float:
        """Seconds from handing the finished graph to MLX until the last output is there.

        The graph is built before the clock starts, as mlx-lm builds the next step while the last one runs; the
        runner's own wall clock sees both.
        """
        import mlx.core as mx

        weights, x = weights_of(state.shape, layers), state.x0
        for i in range(layers):
            x = state.x0 + self._layer(weights, i, x, state.ids[i], state.scores[i])
        start = time.perf_counter()
        mx.eval(x)
        return time.perf_counter() - start

    def layer(self, state: State, x: FloatArray, ids: IntArray, scores: FloatArray) -> FloatArray:
        """Layer 0 alone; x and scores are rounded to the type of the activations."""
        import mlx.core as mx

        kept = mx.array(np.where(ids >= 0, scores, 0.0)).astype(state.x0.dtype)
        device_ids = mx.array(np.maximum(ids, 0).astype(np.uint32))
        out = self._layer(weights_of(state.shape, 1), 0, mx.array(x).astype(state.x0.dtype), device_ids, kept)
        return np.array(out.astype(mx.float32))

    def planes(self, state: State, expert: int) -> tuple[FloatArray | None, FloatArray, FloatArray]:
        """The weights as stored, scales and biases included, expanded in float32."""
        return weights_of(state.shape, 1).plane(expert)

    def signature(self, state: State) -> str:
        """The device and the primitives in the graph of one layer, counted."""
        return state.signature

    def _layer(self, weights: Weights, index: int, x: Any, ids: Any, scores: Any) -> Any:
        layer, shape = weights.layers[index], weights.shape
        self._act = self._act or _swiglu()
        x, slots, order = x[:, None, None, :], ids, None
        if self._sorted:
            x, slots, order = _gather_sort(x, ids)
        up = _product(x, layer.up, shape.up, slots, self._sorted)
        gate = _product(x, layer.gate, shape.up, slots, self._sorted)
        out = _product(self._act(gate, up), layer.down, shape.down, slots, self._sorted)
        if order is not None:
            out = out[order].reshape(*ids.shape, 1, shape.hidden)
        return (out.squeeze(-2) * scores[..., None]).sum(axis=-2)

    def _described(self, out: Any) -> str:
        import mlx.core as mx

        dot = io.StringIO()
        mx.export_to_dot(dot, out)
        counts = Counter(re.findall(r'label ="(\w+)"', dot.getvalue()))
        listed = " ".join(f"{name}={count}" for name, count in sorted(counts.items()))
        kind = f"{'gpu' if on_gpu() else 'cpu'} {str(out.dtype).rpartition('.')[2]}"
        return f"mlx {kind} sorted_indices={self._sorted}: {listed}"


def _gather_sort(x: Any, ids: Any) -> tuple[Any, Any, Any]:
    """Rows in expert order: x [slots, 1, hidden], sorted ids [slots], and the order that undoes it."""
    import mlx.core as mx

    flat = ids.flatten()
    order = mx.argsort(flat)
    return x.flatten(0, -3)[order // ids.shape[-1]], flat[order], mx.argsort(order)


class Link(ExpertPath):
    """The chain with the experts taken out: only the addition that links its layers."""

    batch_invariant = True
    has_reference = False

    def __init__(self) -> None:
        """The path `link`."""
        super().__init__("link", False)

    def _layer(self, weights: Weights, index: int, x: Any, ids: Any, scores: Any) -> Any:
        return x


KERNELS: dict[str, Callable[[], ExpertPath]] = {
    "gather": lambda: ExpertPath("gather", False),
    "gather_sorted": lambda: ExpertPath("gather_sorted", True),
    "link": Link,
}
