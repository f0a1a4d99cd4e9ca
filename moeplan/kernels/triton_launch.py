"""The launches of each Triton path. None allocates or synchronises, so all can be captured in a CUDA graph."""

from moeplan.kernels import triton_fused as fused
from moeplan.kernels import triton_grouped as grouped
from moeplan.kernels.triton_common import combine
from moeplan.kernels.triton_config import Tile, Tiles
from moeplan.kernels.triton_layer import Call, DeviceExperts, Scratch, most_blocks
from moeplan.traffic.shape import LayerShape


def fused_up(experts: DeviceExperts, call: Call, scratch: Scratch, tile: Tile) -> str:
    """Gate, up and activation, a plane read a slot; returns the kernel's name, as every launch here."""
    import torch

    shape, out = experts.shape, scratch.act
    grid = (_up(shape.expert_hidden, tile.rows), call.ids.numel())
    weights = (*experts.gate.tensors(), *experts.up.tensors())
    common = {"N": shape.expert_hidden, "TOP_K": shape.top_k, "GEGLU": shape.activation == "geglu"}
    if shape.up.bits == 4:
        x, span = call.x.view(torch.int64), shape.up.group // 8
        fused.fused_gate_up_affine4[grid](
            x, call.ids, *weights, out, KW=shape.hidden // 8, SPAN=span, **common, **_packed(tile)
        )
        return str(fused.fused_gate_up_affine4.__name__)
    fused.fused_gate_up_bf16[grid](call.x, call.ids, *weights, out, K=shape.hidden, **common, **_plain(tile))
    return str(fused.fused_gate_up_bf16.__name__)


def fused_down(experts: DeviceExperts, call: Call, scratch: Scratch, tile: Tile) -> str:
    """Down times the score, a plane read a slot."""
    shape = experts.shape
    grid = (_up(shape.hidden, tile.rows), call.ids.numel())
    pointers = (scratch.act, call.ids, call.scores, *experts.down.tensors(), scratch.partial)
    if shape.up.bits == 4:
        sizes = {"KW": shape.expert_hidden // 8, "N": shape.hidden, "SPAN": shape.up.group // 8}
        fused.fused_down_affine4[grid](*pointers, **sizes, **_packed(tile))
        return str(fused.fused_down_affine4.__name__)
    fused.fused_down_bf16[grid](*pointers, K=shape.expert_hidden, N=shape.hidden, **_plain(tile))
    return str(fused.fused_down_bf16.__name__)


def align(shape: LayerShape, call: Call, scratch: Scratch, block_rows: int) -> str:
    """The block table, and x by nibble planes where the weights are 4-bit."""
    packed = shape.up.bits == 4
    grid = (shape.experts + (call.ids.shape[0] if packed else 0),)
    grouped.align[grid](
        call.ids,
        scratch.order,
        scratch.block_expert,
        scratch.count,
        call.x,
        scratch.planes,
        call.ids.numel(),
        E=shape.experts,
        BINS=_power(shape.experts + 1),
        BM=block_rows,
        CHUNK=512,
        K=shape.hidden,
        WORDS=_power(shape.hidden // 8) if packed else 0,
        num_warps=4,
    )
    return str(grouped.align.__name__)


def grouped_up(experts: DeviceExperts, call: Call, scratch: Scratch, tile: Tile, block_rows: int) -> str:
    """Gate, up and activation as block products; the grid holds the most blocks that can occur."""
    shape = experts.shape
    grid = (_up(shape.expert_hidden, tile.rows), most_blocks(call.ids.numel(), shape.experts, block_rows))
    table = (scratch.order, scratch.block_expert, scratch.count)
    pointers = (*table, *experts.gate.tensors(), *experts.up.tensors(), scratch.act)
    common = {"N": shape.expert_hidden, "TOP_K": shape.top_k, "GEGLU": shape.activation == "geglu", "BM": block_rows}
    if shape.up.bits == 4:
        sizes = {"KW": shape.hidden // 8, "SPAN": shape.up.group // 8}
        grouped.grouped_gate_up_affine4[grid](scratch.planes, *pointers, **sizes, **common, **_packed(tile))
        return str(grouped.grouped_gate_up_affine4.__name__)
    grouped.grouped_gate_up_bf16[grid](call.x, *pointers, K=shape.hidden, **common, **_plain(tile))
    return str(grouped.grouped_gate_up_bf16.__name__)


def grouped_down(experts: DeviceExperts, call: Call, scratch: Scratch, tile: Tile, block_rows: int) -> str:
    """Down times the score as block products."""
    shape = experts.shape
    grid = (_up(shape.hidden, tile.rows), most_blocks(call.ids.numel(), shape.experts, block_rows))
    table = (scratch.order, scratch.block_expert, scratch.count)
    pointers = (scratch.act, *table, call.scores, *experts.down.tensors(), scratch.partial)
    if shape.up.bits == 4:
        sizes = {"KW": shape.expert_hidden // 8, "N": shape.hidden, "SPAN": shape.up.group // 8, "BM": block_rows}
        grouped.grouped_down_affine4[grid](*pointers, **sizes, **_packed(tile))
        return str(grouped.grouped_down_affine4.__name__)
    grouped.grouped_down_bf16[grid](*pointers, K=shape.expert_hidden, N=shape.hidden, BM=block_rows, **_plain(tile))
    return str(grouped.grouped_down_bf16.__name__)


def sum_slots(shape: LayerShape, call: Call, scratch: Scratch, block: int) -> str:
    """The last launch of every path: the sum over a token's slots, the residual, the rounding."""
    combine[(_up(shape.hidden, block), call.ids.shape[0])](
        scratch.partial,
        call.ids,
        call.out if call.residual is None else call.residual,
        call.out,
        H=shape.hidden,
        TOP_K=shape.top_k,
        RESIDUAL=call.residual is not None,
        BLOCK=block,
        num_warps=max(1, min(4, block // 128)),
    )
    return str(combine.__name__)


def run_fused(experts: DeviceExperts, call: Call, scratch: Scratch, tiles: Tiles) -> tuple[str, ...]:
    """Three launches; returns their names in order."""
    first = fused_up(experts, call, scratch, tiles.up)
    second = fused_down(experts, call, scratch, tiles.down)
    return first, second, sum_slots(experts.shape, call, scratch, tiles.combine)


def run_grouped(experts: DeviceExperts, call: Call, scratch: Scratch, tiles: Tiles, block_rows: int) -> tuple[str, ...]:
    """Four launches; returns their names in order."""
    table = align(experts.shape, call, scratch, block_rows)
    first = grouped_up(experts, call, scratch, tiles.up, block_rows)
    second = grouped_down(experts, call, scratch, tiles.down, block_rows)
    return table, first, second, sum_slots(experts.shape, call, scratch, tiles.combine)


def _packed(tile: Tile) -> dict[str, int | bool]:
    return {"BN": tile.rows, "W": tile.step, "WIDE": tile.wide, "num_warps": tile.warps, "num_stages": tile.stages}


def _plain(tile: Tile) -> dict[str, int]:
    return {"BN": tile.rows, "BK": tile.step, "num_warps": tile.warps, "num_stages": tile.stages}


def _up(size: int, part: int) -> int:
    return -(-size // part)


def _power(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()
