"""Random layers and launches for the tests."""

import numpy as np
import torch

from moeplan.kernels import triton_launch
from moeplan.kernels.formats import from_bf16, random_planes, to_bf16
from moeplan.kernels.reference import moe_layer
from moeplan.kernels.triton_config import fused_tiles, grouped_tiles
from moeplan.kernels.triton_interpret import INTERPRETED
from moeplan.kernels.triton_layer import Call, make_scratch, to_device
from moeplan.traffic.shape import LayerShape, WeightFormat

# float32 outputs, so that no final rounding hides an error. `fused` keeps float32 throughout; `grouped` rounds act to
# bf16 (2^-9 relative, about 1.7e-3 rms) and 4-bit weights once each. The interpreter truncates to bf16 instead of
# rounding, which doubles those errors and adds a bias.
BOUND = {
    ("fused", 4): 5e-5,
    ("fused", 16): 2e-6,
    ("grouped", 4): 1.2e-2 if INTERPRETED else 5e-3,
    ("grouped", 16): 4.5e-3 if INTERPRETED else 2.5e-3,
}
FINAL = 4e-3 if INTERPRETED else 1.9e-3  # one rounding to bf16


def shape_of(form="affine4-g64", experts=8, top_k=2, sizes=(128, 192), activation="swiglu"):
    weights = WeightFormat.parse(form)
    return LayerShape(*sizes, experts, top_k, weights, weights, weights, activation)


def bound(shape, rows):
    return BOUND["grouped" if rows else "fused", shape.up.bits]


class Case:
    """One layer with x, ids, scores, and float64 planes; planes of experts nobody chose are NaN."""

    def __init__(self, shape, tokens, seed=0, ids=None):
        rng = np.random.default_rng([seed, tokens])
        self.shape, self.planes = shape, random_planes(shape, seed)
        self.x = from_bf16(to_bf16(rng.standard_normal((tokens, shape.hidden))))
        uniform = np.argsort(rng.random((tokens, shape.experts)))[:, : shape.top_k]
        self.ids = np.array(uniform if ids is None else ids, np.int32)
        self.scores = rng.random((tokens, shape.top_k)).astype(np.float32)
        self._poison()

    def _poison(self):
        idle = np.setdiff1d(np.arange(self.shape.experts), self.ids)
        for matrix in (self.planes.gate, self.planes.up, self.planes.down):
            for values in (matrix.scales, matrix.biases) if matrix.scales is not None else (matrix.weight,):
                values[idle] = 0x7FC0  # NaN

    def wanted(self):
        return moe_layer(self.x, self.ids, self.scores, self.planes.dense, self.shape.activation)

    def run(self, rows, device, *, kind=torch.float32, residual=None, between=None, ids=None):
        """One layer by `fused` (rows 0) or `grouped:rows` into a NaN output; `between` may spoil the scratch."""
        shape, experts = self.shape, to_device(self.planes, self.shape, device)
        x = torch.from_numpy(self.x).bfloat16().to(device)
        chosen = torch.from_numpy(self.ids if ids is None else ids).to(device)
        out = torch.full(x.shape, float("nan"), dtype=kind, device=device)
        call = Call(x, chosen, torch.from_numpy(self.scores).to(device), out, residual)
        scratch = make_scratch(shape, len(x), rows, device)
        tiles = grouped_tiles(shape, rows) if rows else fused_tiles(shape)
        if rows:
            triton_launch.align(shape, call, scratch, rows)
            triton_launch.grouped_up(experts, call, scratch, tiles.up, rows)
            triton_launch.grouped_down(experts, call, scratch, tiles.down, rows)
        else:
            triton_launch.fused_up(experts, call, scratch, tiles.up)
            triton_launch.fused_down(experts, call, scratch, tiles.down)
        if between is not None:
            between(scratch)
        triton_launch.sum_slots(shape, call, scratch, tiles.combine)
        return out.float().cpu().numpy()

    def row(self, token):
        """The same layer with one token alone."""
        other = object.__new__(Case)
        other.shape, other.planes = self.shape, self.planes
        part = slice(token, token + 1) if isinstance(token, int) else token
        other.x, other.ids, other.scores = self.x[part], self.ids[part], self.scores[part]
        return other
