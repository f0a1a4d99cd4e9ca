"""What a calibration run is asked to do: which runner, which arms, how often."""

import shlex
import sys
from dataclasses import dataclass, field

from moeplan.errors import MoeplanError
from moeplan.kernels.protocol import Arm
from moeplan.store import Store
from moeplan.traffic.shape import LayerShape

RUNNERS = ("mlx", "triton", "python", "exec")
DECODE_CHAIN = (12, 48)  # layers; 48 = the chain of the M1 Ultra tables (docs/cost-model.md), up to 128 tokens
PREFILL_CHAIN = (4, 12)  # above: a layer there is long beside sync and host cost, so fewer layers carry the slope
DECODE_TOKENS = 128
PARITY_BOUND = 1e-2  # relative RMS; bf16 rounds at 2^-9 relative, some seven roundings in a layer give 3e-3 to 5e-3


@dataclass(frozen=True, slots=True)
class RunnerSpec:
    """The child process that runs device code.

    runner: mlx, triton, python (needs kernel, `package.module:object`) or exec (needs command, split as a shell
    would). engine_version: what to record where the child does not say. timeout_s: the longest one arm may take.
    """

    runner: str
    kernel: str = ""
    command: str = ""
    engine_version: str = ""
    timeout_s: float = 900.0

    def argv(self) -> list[str]:
        """The command line of the child. Raises MoeplanError where the spec is incomplete."""
        if self.runner not in RUNNERS:
            raise MoeplanError(f"--runner {self.runner}: expected one of {', '.join(RUNNERS)}")
        if self.runner == "exec":
            try:
                words = shlex.split(self.command)
            except ValueError as bad:
                raise MoeplanError(f"--command {self.command!r}: {bad}") from bad
            if not words:
                raise MoeplanError("--command: --runner exec needs the command of your program")
            return words
        if self.runner == "python" and ":" not in self.kernel:
            raise MoeplanError(f"--kernel {self.kernel!r}: --runner python needs package.module:object")
        words = [sys.executable, "-m", "moeplan.runners.worker", "--runner", self.runner]
        return words + (["--kernel", self.kernel] if self.kernel else [])


@dataclass(frozen=True, slots=True)
class MeasureRequest:
    """Arms to time, each once a round, all interleaved.

    model: a name for the header. store: where the routings named by the arms lie. seed: order of the arms within a
    round (the arms carry their own seeds). cache_bytes: last-level cache, None where unknown. options: anything
    else that must agree when a journal is continued.
    """

    device: str
    model: str
    shape: LayerShape
    arms: tuple[Arm, ...]
    rounds: int = 8
    seed: int = 0
    cache_bytes: float | None = None
    store: Store = field(default_factory=Store)
    options: dict[str, object] = field(default_factory=dict)


def default_chain(tokens: int) -> tuple[int, int]:
    """Short and long chain in layers."""
    return DECODE_CHAIN if tokens <= DECODE_TOKENS else PREFILL_CHAIN


def make_arm(
    path: str, shape: LayerShape, tokens: int, routing: str, seed: int = 0, chain: tuple[int, int] | None = None
) -> Arm:
    """An arm whose id spells out all that distinguishes it, so that equal arms of two runs have equal ids."""
    short, long = chain or default_chain(tokens)
    if not 1 <= short < long:
        raise MoeplanError(f"--chain {short},{long}: expected two layer counts, the shorter first")
    size = f"{shape.hidden}x{shape.expert_hidden}x{shape.experts}k{shape.top_k}-{shape.format_name}-{shape.activation}"
    name = f"{path}/t{tokens}/{routing}/s{seed}/c{short}-{long}/{size}"
    return Arm(name, path, shape, tokens, routing, seed, (short, long))
