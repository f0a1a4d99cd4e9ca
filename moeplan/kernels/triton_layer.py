"""One MoE layer on a device: weights as tensors, scratch, and the launches of each path."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from moeplan.kernels import formats
from moeplan.kernels import triton_fused as fused
from moeplan.kernels import triton_grouped as grouped
from moeplan.kernels.triton_common import combine
from moeplan.kernels.triton_config import Tiles
from moeplan.traffic.shape import LayerShape, WeightFormat

Tensor = Any  # torch.Tensor; torch is imported late and is not typed here
Names = tuple[str, ...]


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


def run_fused(experts: DeviceExperts, call: Call, scratch: Scratch, tiles: Tiles) -> Names:
    """Three launches, no synchronisation; returns the names of the kernels launched."""
    import torch

    shape, up, down = experts.shape, tiles.up, tiles.down
    slots, hidden, inner = call.ids.numel(), shape.hidden, shape.expert_hidden
    pointers = (*experts.gate.tensors(), *experts.up.tensors(), scratch.act)
    grids = (_up(inner, up.rows), slots), (_up(hidden, down.rows), slots)
    geglu = shape.activation == "geglu"
    if shape.up.bits == 4:
        span, x = shape.up.group // 8, call.x.view(torch.int64)
        first, second = fused.fused_gate_up_affine4, fused.fused_down_affine4
        first[grids[0]](
            x, call.ids, *pointers, KW=hidden // 8, N=inner, TOP_K=shape.top_k, SPAN=span, GEGLU=geglu,
            BN=up.rows, W=up.step, WIDE=up.wide, num_warps=up.warps, num_stages=up.stages)  # fmt: skip
        second[grids[1]](
            scratch.act, call.ids, call.scores, *experts.down.tensors(), scratch.partial, KW=inner // 8, N=hidden,
            SPAN=span, BN=down.rows, W=down.step, WIDE=down.wide,
            num_warps=down.warps, num_stages=down.stages)  # fmt: skip
    else:
        first, second = fused.fused_gate_up_bf16, fused.fused_down_bf16
        first[grids[0]](
            call.x, call.ids, *pointers, K=hidden, N=inner, TOP_K=shape.top_k, GEGLU=geglu,
            BN=up.rows, BK=up.step, num_warps=up.warps, num_stages=up.stages)  # fmt: skip
        second[grids[1]](
            scratch.act, call.ids, call.scores, *experts.down.tensors(), scratch.partial, K=inner, N=hidden,
            BN=down.rows, BK=down.step, num_warps=down.warps, num_stages=down.stages)  # fmt: skip
    run_combine(shape, call, scratch, tiles.combine)
    return first.__name__, second.__name__, combine.__name__


def run_combine(shape: LayerShape, call: Call, scratch: Scratch, block: int) -> None:
    """The last launch of every path."""
    residual = call.out if call.residual is None else call.residual
    combine[(_up(shape.hidden, block), call.ids.shape[0])](
        scratch.partial, call.ids, residual, call.out, H=shape.hidden, TOP_K=shape.top_k,
        RESIDUAL=call.residual is not None, BLOCK=block, num_warps=max(1, min(4, block // 128)))  # fmt: skip


def run_align(shape: LayerShape, call: Call, scratch: Scratch, block_rows: int) -> None:
    """The first launch of `grouped`: the block table, and x by nibble planes where the weights are 4-bit."""
    slots, packed = call.ids.numel(), shape.up.bits == 4
    grid = (shape.experts + (call.ids.shape[0] if packed else 0),)
    grouped.align[grid](
        call.ids, scratch.order, scratch.block_expert, scratch.count, call.x, scratch.planes, slots, E=shape.experts,
        BINS=_power(shape.experts + 1), BM=block_rows, CHUNK=512, K=shape.hidden,
        WORDS=_power(shape.hidden // 8) if packed else 0, num_warps=4)  # fmt: skip


def run_grouped(experts: DeviceExperts, call: Call, scratch: Scratch, tiles: Tiles, block_rows: int) -> Names:
    """Four launches, no synchronisation: the grid is padded to the most blocks possible. Returns their names."""
    shape, up, down = experts.shape, tiles.up, tiles.down
    hidden, inner, slots = shape.hidden, shape.expert_hidden, call.ids.numel()
    blocks = most_blocks(slots, shape.experts, block_rows)
    run_align(shape, call, scratch, block_rows)
    table = (scratch.order, scratch.block_expert, scratch.count)
    weights = (*experts.gate.tensors(), *experts.up.tensors(), scratch.act)
    last = (*table, call.scores, *experts.down.tensors(), scratch.partial)
    grids = (_up(inner, up.rows), blocks), (_up(hidden, down.rows), blocks)
    geglu = shape.activation == "geglu"
    if shape.up.bits == 4:
        span = shape.up.group // 8
        first, second = grouped.grouped_gate_up_affine4, grouped.grouped_down_affine4
        first[grids[0]](
            scratch.planes, *table, *weights, KW=hidden // 8, N=inner, TOP_K=shape.top_k, SPAN=span, GEGLU=geglu,
            BM=block_rows, BN=up.rows, W=up.step, WIDE=up.wide, num_warps=up.warps, num_stages=up.stages)  # fmt: skip
        second[grids[1]](
            scratch.act, *last, KW=inner // 8, N=hidden, SPAN=span, BM=block_rows, BN=down.rows, W=down.step,
            WIDE=down.wide, num_warps=down.warps, num_stages=down.stages)  # fmt: skip
    else:
        first, second = grouped.grouped_gate_up_bf16, grouped.grouped_down_bf16
        first[grids[0]](
            call.x, *table, *weights, K=hidden, N=inner, TOP_K=shape.top_k, GEGLU=geglu,
            BM=block_rows, BN=up.rows, BK=up.step, num_warps=up.warps, num_stages=up.stages)  # fmt: skip
        second[grids[1]](
            scratch.act, *last, K=inner, N=hidden, BM=block_rows, BN=down.rows, BK=down.step,
            num_warps=down.warps, num_stages=down.stages)  # fmt: skip
    run_combine(shape, call, scratch, tiles.combine)
    return grouped.align.__name__, first.__name__, second.__name__, combine.__name__


def _up(size: int, part: int) -> int:
    return -(-size // part)


def _power(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()
