"""A kernel path as data: how often it reads a plane, in what rows it works, what it launches."""

import re
from dataclasses import dataclass
from typing import Literal

from moeplan.errors import MoeplanError

Reuse = Literal["slot", "block", "distinct"]


@dataclass(frozen=True, slots=True)
class PathSpec:
    """One way to run the experts of a layer.

    reuse: a plane is read once a slot, once a block of `block_rows` sorted rows, or once a distinct expert.
    dispatches: launches a layer; `dispatches_per_token` more for every token.
    sorted_from: (slots, slots an expert): the block reuse starts there and it reads per slot below, as MLX's
    Metal backend does (facts: mlx `GatherQMM::eval_gpu`, B >= 16 and B / E >= 4).
    """

    name: str
    reuse: Reuse
    dispatches: int
    block_rows: int = 1
    dispatches_per_token: int = 0
    weight_position: Literal["input", "down", "combine"] = "combine"
    sorted_from: tuple[int, int] | None = None
    runs: bool = False  # blocks are cut from one sorted slot list, not padded an expert

    def launches(self, tokens: int) -> int:
        """Dispatches of one layer at that token count."""
        return self.dispatches + self.dispatches_per_token * tokens


# Launch counts, the weighted sum over k counted as one in each: mlx-lm SwitchGLU (three gather_qmm, the compiled
# activation, the sum; sorting adds two argsorts, two row gathers and one un-sort); mlxcel's fused kernel (two launches
# and the sum, for each token where it serves one at a time); moeplan's Triton `grouped` (align, gate+up, down, sum).
_FIXED = {
    "gather": PathSpec("gather", "slot", 5),
    "gather_sorted": PathSpec("gather_sorted", "block", 10, 16, sorted_from=(16, 4), runs=True),
    "fused_per_token": PathSpec("fused_per_token", "slot", 0, dispatches_per_token=3, weight_position="down"),
    "fused": PathSpec("fused", "slot", 3),
    "dedup": PathSpec("dedup", "distinct", 3),
}


def parse_path(name: str) -> PathSpec:
    """`gather`, `gather_sorted`, `fused_per_token`, `fused`, `dedup`, `grouped:BLOCK`.

    Raises MoeplanError for any other name or a block that is not a power of two from 8 to 256.
    """
    if name in _FIXED:
        return _FIXED[name]
    if match := re.match(r"grouped:(\d+)$", name):
        rows = int(match[1])
        if rows & (rows - 1) or not 8 <= rows <= 256:
            raise MoeplanError(f"--path {name}: block rows must be a power of two from 8 to 256")
        return PathSpec(name, "block", 4, rows)
    raise MoeplanError(f"--path {name}: unknown path (known: {', '.join(_FIXED)}, grouped:BLOCK)")
