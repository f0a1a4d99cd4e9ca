"""One MoE layer on a device: weights as tensors, scratch buffers, and the tensors of one call."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from moeplan.kernels import formats
from moeplan.traffic.shape import LayerShape, WeightFormat

Tensor = Any  # torch.Tensor; torch is imported late and is not typed here


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMatrix:
    """A matrix of every expert: bf16 [E, N, K], or int32 words [E, N, K / 8] with bf16 scales, biases [E, N, K / G]."""

    format: WeightFormat
    weight: Tensor
    scales: Tensor | None = None
    biases: Tensor | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        """The kernel's pointer arguments, in order."""
        return (self.weight,) if self.scales is None else (self.weight, self.scales, self.biases)

    def dense(self, expert: int) -> formats.Dense:
        """The weights of one expert as the kernels read them: float64 [N, K]."""
        parts = [formats.Matrix(self.format, _bits(self.weight[expert])[None])]
        if self.scales is not None and self.biases is not None:
            scales, biases = _bits(self.scales[expert])[None], _bits(self.biases[expert])[None]
            parts = [formats.Matrix(self.format, parts[0].weight, scales, biases)]
        return parts[0].dense(0)


def _bits(tensor: Tensor) -> Any:
    import torch

    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).cpu().numpy().view(np.uint16)
    return tensor.cpu().numpy().view(np.uint32)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceExperts:
    """The planes of one layer on a device."""

    shape: LayerShape
    gate: DeviceMatrix
    up: DeviceMatrix
    down: DeviceMatrix

    def dense(self, expert: int) -> tuple[formats.Dense, formats.Dense, formats.Dense]:
        """Gate, up and down of one expert, float64."""
        return self.gate.dense(expert), self.up.dense(expert), self.down.dense(expert)


def to_device(planes: formats.Experts, shape: LayerShape, device: str) -> DeviceExperts:
    """The same planes as tensors; they must have a gate."""
    import torch

    def move(matrix: formats.Matrix) -> DeviceMatrix:
        if matrix.scales is None or matrix.biases is None:
            return DeviceMatrix(matrix.format, half(matrix.weight))
        words = torch.from_numpy(matrix.weight.view(np.int32)).to(device)
        return DeviceMatrix(matrix.format, words, half(matrix.scales), half(matrix.biases))

    def half(bits: formats.Halves) -> Tensor:
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).to(device)

    assert planes.gate is not None
    return DeviceExperts(shape, move(planes.gate), move(planes.up), move(planes.down))


@dataclass(frozen=True, slots=True, eq=False)
class Scratch:
    """Buffers of one token count, allocated once: launches allocate nothing and can be captured."""

    act: Tensor  # [slots, expert_hidden], float32 (fused) or bf16 (grouped)
    partial: Tensor  # float32 [slots, hidden]
    order: Tensor | None = None  # grouped: see triton_grouped.align
    block_expert: Tensor | None = None
    count: Tensor | None = None
    planes: Tensor | None = None


def most_blocks(slots: int, experts: int, block_rows: int) -> int:
    """The largest possible sum of ceil(rows / block_rows) over experts with `slots` rows in all."""
    some = min(slots, experts)
    return some + (slots - some) // block_rows


def make_scratch(shape: LayerShape, tokens: int, block_rows: int, device: str) -> Scratch:
    """Buffers for `fused` (block_rows 0) or `grouped`, filled with NaN (or an impossible id) to show unwritten use."""
    import torch

    slots = tokens * shape.top_k
    act = torch.full((slots, shape.expert_hidden), float("nan"), device=device)
    partial = torch.full((slots, shape.hidden), float("nan"), device=device)
    if not block_rows:
        return Scratch(act, partial)
    blocks = most_blocks(slots, shape.experts, block_rows)
    order, expert_of, count = (
        torch.full((size,), 1 << 30, dtype=torch.int32, device=device) for size in (blocks * block_rows, blocks, 1)
    )
    planes = torch.full((tokens, shape.hidden), float("nan"), device=device).bfloat16()
    return Scratch(act.bfloat16(), partial, order, expert_of, count, planes)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """The tensors of one layer: x bf16 [tokens, hidden], ids int32 and scores float32 [tokens, top_k], out."""

    x: Tensor
    ids: Tensor
    scores: Tensor
    out: Tensor  # bf16 or float32 [tokens, hidden]
    residual: Tensor | None = None  # bf16 [tokens, hidden], added before the final rounding
