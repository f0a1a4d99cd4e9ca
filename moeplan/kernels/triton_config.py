"""Which shapes the Triton paths take, and how they cut them (the fastest of benchmarks/kernels_h200.py --tune
on an H200 with Triton 3.6, at hidden 2048, expert_hidden 768, 128 experts, top 8)."""

from dataclasses import dataclass

from moeplan.kernels.triton_interpret import INTERPRETED
from moeplan.traffic.shape import LayerShape

BLOCK_ROWS = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Tile:
    """How one launch is cut: rows of the weight matrix a program, words or columns a step, warps, stages."""

    rows: int
    step: int
    warps: int
    stages: int = 1
    wide: bool = False  # read group scales once a word instead of broadcasting them


@dataclass(frozen=True, slots=True)
class Tiles:
    """The cuts of a path: gate with up, down, and the columns of a combine program."""

    up: Tile
    down: Tile
    combine: int = 256


def declines(shape: LayerShape, tokens: int) -> str | None:
    """Why the Triton kernels cannot run that, or None; nothing is launched."""
    if shape.gate is None or shape.activation not in ("swiglu", "geglu"):
        return f"activation {shape.activation} {'without' if shape.gate is None else 'with'} a gate is not implemented"
    if len({shape.gate, shape.up, shape.down}) > 1:
        return f"weight formats that differ between projections ({shape.format_name}) are not implemented"
    form = shape.up
    if form.name not in ("bf16", "affine4-g64"):
        return f"weight format {form.name} is not implemented (bf16 and affine4-g64 are)"
    if form.group and (shape.hidden % 64 or shape.expert_hidden % 64):
        return f"hidden {shape.hidden} and expert_hidden {shape.expert_hidden} must be multiples of the group 64"
    if shape.hidden % 8 or shape.expert_hidden % 8:
        return f"hidden {shape.hidden} and expert_hidden {shape.expert_hidden} must be multiples of 8"
    if not 1 <= shape.top_k <= min(32, shape.experts):
        return f"top-{shape.top_k} of {shape.experts} experts is not implemented (at most 32)"
    if not 1 <= tokens <= 65535 // shape.top_k:  # the second dimension of a CUDA grid ends at 65535
        return f"{tokens} tokens of top-{shape.top_k} exceed the launch grid (65535 slots)"
    return None


def fused_tiles(shape: LayerShape) -> Tiles:
    """Cuts of `fused`; the interpreter gets few large programs."""
    if INTERPRETED:
        return Tiles(Tile(128, 64, 1), Tile(128, 64, 1))
    if shape.up.bits == 4:
        return Tiles(Tile(4, _step(shape.hidden // 8, 64), 1), Tile(32, _step(shape.expert_hidden // 8, 32), 2))
    return Tiles(Tile(4, _step(shape.hidden, 512), 1), Tile(16, _step(shape.expert_hidden, 256), 2))


def grouped_tiles(shape: LayerShape, block_rows: int) -> Tiles:
    """Cuts of `grouped` with blocks of that many rows."""
    packed = {
        16: Tiles(Tile(64, 32, 4, 3), Tile(64, 32, 4, 3)),
        32: Tiles(Tile(64, 32, 4, 3), Tile(128, 16, 4, 3)),
        64: Tiles(Tile(128, 32, 8, 2), Tile(256, 32, 8, 2)),
        128: Tiles(Tile(128, 32, 8, 2), Tile(256, 32, 8, 2)),
    }
    plain = {
        16: Tiles(Tile(64, 128, 4, 3), Tile(128, 64, 8, 3)),
        32: Tiles(Tile(128, 64, 4, 3), Tile(256, 64, 8, 3)),
        64: Tiles(Tile(128, 64, 8, 3), Tile(256, 64, 8, 3)),
        128: Tiles(Tile(128, 64, 8, 3), Tile(256, 64, 8, 3)),
    }
    return (packed if shape.up.bits == 4 else plain)[block_rows]


def _step(size: int, most: int) -> int:
    """The power of two from 16 to `most` that wastes least on padding; the larger one where they tie."""
    options = [1 << p for p in range(4, most.bit_length())]
    return min(reversed(options), key=lambda step: -(-size // step) * step)
