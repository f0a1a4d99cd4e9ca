"""What a kernel must offer so that moeplan can calibrate, plan with and verify it.

A kernel computes one MoE layer: y[t] = sum over slots s of scores[t, s] * down(act(gate(x[t])) * up(x[t])) with
the planes of expert ids[t, s]. Padding slots carry id -1 and add nothing.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from moeplan.traffic.shape import LayerShape

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Arm:
    """One thing to time: a path at a token count, on a routing, as two dependent chains of layers."""

    id: str
    path: str
    shape: LayerShape
    tokens: int
    routing: str
    seed: int
    chain: tuple[int, int]  # layers of the short and of the long chain


class Kernel(Protocol):
    """A kernel path brought by an engine. `--kernel package.module:object` names an instance (or a factory).

    `run` may return the seconds that its own device clock saw; where it returns None the runner's wall clock
    around the call counts, so `run` must not return before the work is finished.

    Optional attributes: `batch_invariant` (bool: each row has the bits of that row run alone; kept in the journal),
    `has_reference` (False for a chain that computes no experts: parity is then not checked) and `version` (str).
    """

    name: str

    def declines(self, shape: LayerShape, tokens: int) -> str | None:
        """Why this kernel cannot run that, or None. Called before anything is launched."""

    def config_hash(self) -> str:
        """A digest of the source and of every setting that changes the generated code."""

    def prepare(self, arm: Arm, ids: IntArray) -> Any:
        """Build weights, inputs and graphs for ids [layers, tokens, top_k]; layers >= arm.chain[1]."""

    def run(self, state: Any, layers: int) -> float | None:
        """Run a dependent chain of that many layers (each input depends on the last output) to its end."""

    def layer(self, state: Any, x: FloatArray, ids: IntArray, scores: FloatArray) -> FloatArray:
        """Layer 0 alone on x [tokens, hidden], ids and scores [tokens, top_k]; returns [tokens, hidden]."""

    def planes(self, state: Any, expert: int) -> tuple[FloatArray | None, FloatArray, FloatArray]:
        """Gate, up [expert_hidden, hidden] and down [hidden, expert_hidden] of layer 0 as the kernel reads them."""

    def signature(self, state: Any) -> str:
        """What really ran: kernel names, tile rows, launches. `verify` rejects a time with the wrong one."""
