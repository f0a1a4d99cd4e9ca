"""Random expert weights in MLX's own layouts, shared by all paths and arms of a process.

Activations are bf16 on a GPU and float32 on the CPU: there MLX sums in the type of the activations, which leaves bf16
3.5 % off (measured, MLX 0.32.4, 256 columns), and its gather_mm takes float32 alone.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np

from moeplan.kernels.protocol import FloatArray
from moeplan.traffic.shape import LayerShape, WeightFormat

AFFINE_STD = {bits: ((4**bits - 1) / 12) ** 0.5 for bits in (2, 3, 4, 5, 6, 8)}  # std of uniform codes 0..2^bits-1
_SETS_KEPT = 2  # weight sets held at once: one is 16 GB at 48 layers of Qwen3-30B-A3B 4-bit
_PLANES_KEPT = 64  # float32 planes held for parity: 19 MB each at that shape

Matrix = tuple[Any, ...]  # (codes, scales, biases) or (weights,), each with a leading axis of experts


def on_gpu() -> bool:
    """Whether MLX's default device is a GPU."""
    import mlx.core as mx

    return bool(mx.default_device().type == mx.gpu)


def activation_type() -> Any:
    """bf16 on a GPU, float32 on the CPU."""
    import mlx.core as mx

    return mx.bfloat16 if on_gpu() else mx.float32


def _matrix(size: tuple[int, int, int], form: WeightFormat, key: Any) -> Matrix:
    """Random weights [experts, rows, columns] of standard deviation columns^-1/2, built in the packed layout."""
    import mlx.core as mx

    experts, rows, columns = size
    if not form.group:
        kind = mx.float32 if form.name == "f32" else mx.bfloat16
        return (mx.random.normal(size, dtype=kind, scale=columns**-0.5, key=key),)
    codes_key, scales_key = mx.random.split(key)
    packed = (experts, rows, columns * form.bits // 8)
    codes = mx.random.randint(0, 256, packed, dtype=mx.uint8, key=codes_key).view(mx.uint32)
    step = columns**-0.5 / AFFINE_STD[form.bits]
    spread = mx.random.uniform(0.5, 1.5, (experts, rows, columns // form.group), key=scales_key)
    scales = (step * spread).astype(mx.bfloat16)
    biases = scales * (-(2**form.bits - 1) / 2)  # minus the middle code: the weights are centred
    return codes, scales.astype(activation_type()), biases.astype(activation_type())


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer."""

    gate: Matrix
    up: Matrix
    down: Matrix


class Weights:
    """Random weights of one shape, layer by layer, made when first needed; layer l is always the same."""

    def __init__(self, shape: LayerShape) -> None:
        """No layer yet."""
        self.shape = shape
        self.layers: list[Layer] = []
        self.planes: OrderedDict[int, tuple[FloatArray, FloatArray, FloatArray]] = OrderedDict()

    def grow(self, layers: int) -> None:
        """Make layers until there are that many."""
        import mlx.core as mx

        shape = self.shape
        across = (shape.experts, shape.expert_hidden, shape.hidden)
        back = (shape.experts, shape.hidden, shape.expert_hidden)
        while len(self.layers) < layers:
            keys = mx.random.split(mx.random.key(len(self.layers)), 3)
            made = [
                _matrix(size, form, key)
                for size, form, key in zip((across, across, back), (shape.up, shape.up, shape.down), keys, strict=True)
            ]
            mx.eval(made)
            self.layers.append(Layer(*made))

    def plane(self, expert: int) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Gate, up, down of layer 0 as float32; the last few are kept."""
        if expert not in self.planes:
            layer, shape = self.layers[0], self.shape
            pairs = ((layer.gate, shape.up), (layer.up, shape.up), (layer.down, shape.down))
            gate, up, down = (_dequantized(matrix, form, expert) for matrix, form in pairs)
            self.planes[expert] = (gate, up, down)
            while len(self.planes) > _PLANES_KEPT:
                self.planes.popitem(last=False)
        return self.planes[expert]


def _dequantized(matrix: Matrix, form: WeightFormat, expert: int) -> FloatArray:
    import mlx.core as mx

    if len(matrix) == 1:
        return np.array(matrix[0][expert].astype(mx.float32))
    codes, scales, biases = (part[expert] for part in matrix)
    exact = mx.dequantize(
        codes, scales.astype(mx.float32), biases.astype(mx.float32), group_size=form.group, bits=form.bits
    )
    return np.array(exact)


_sets: OrderedDict[LayerShape, Weights] = OrderedDict()


def weights_of(shape: LayerShape, layers: int) -> Weights:
    """The weights of at least that many layers, shared by all paths; the least recently used set gives way."""
    if shape not in _sets:
        while len(_sets) >= _SETS_KEPT:
            _sets.popitem(last=False)
        _sets[shape] = Weights(shape)
    _sets.move_to_end(shape)
    _sets[shape].grow(layers)
    return _sets[shape]
