"""The shape of a model call, what prices it, and the policy that forms it."""

from dataclasses import dataclass
from typing import Protocol

from moeplan.errors import MoeplanError


@dataclass(frozen=True, slots=True)
class StepShape:
    """One model call as its price depends on it.

    context: cache rows read, summed over the sequences, each one's own new rows included; in a span of decode steps
    it is the first step's, and every further step reads decode_rows more. padded: rows the kernels see.
    """

    decode_rows: int
    verify_rows: int = 0
    prefill_chunks: tuple[int, ...] = ()  # prompt tokens of each prompt in the call
    context: int = 0
    padded: int = 0
    cohort: str = "independent"

    @property
    def rows(self) -> int:
        """Rows without padding."""
        return self.decode_rows + self.verify_rows + sum(self.prefill_chunks)


class Priced(Protocol):
    """A price: anything with seconds."""

    @property
    def seconds(self) -> float:
        """Of the whole span."""


class SpanCost(Protocol):
    """The one callable where queues and experts meet."""

    def __call__(self, step: StepShape, first_step: int, steps: int) -> Priced:
        """Price `steps` alike steps with the numbers first_step, first_step + 1, ...

        A span must cost what its steps cost one by one, up to rounding, each with its own grown context.
        """


@dataclass(frozen=True, slots=True)
class Policy:
    """How an engine forms its steps; the defaults follow mlx-lm's BatchGenerator (mlx_lm/generate.py).

    A tick is one decode step of all running sequences, then one chunk of the prompt batch; with decode_first off
    the prompt batch is finished before the next decode step. mlx-lm lets a prompt batch overshoot its completion
    batch; here max_batch bounds running and prefilling sequences together.
    """

    max_batch: int = 32  # decode slots; mlx-lm completion_batch_size
    max_prefill_batch: int = 8  # prompts prefilled together; mlx-lm prefill_batch_size
    prefill_step: int = 2048  # tokens of each prompt a call; mlx-lm prefill_step_size
    decode_first: bool = True
    pad_prompts: bool = True  # chunks of one call are padded to the longest
    last_token_alone: bool = True  # the last prompt token runs in a call of one row a sequence, giving the first token
    cohort: str = "independent"

    def __post_init__(self) -> None:
        """Raises MoeplanError naming the field."""
        for name in ("max_batch", "max_prefill_batch", "prefill_step"):
            if getattr(self, name) < 1:
                raise MoeplanError(f"{name}: {getattr(self, name)} is not at least 1")


@dataclass(frozen=True, slots=True)
class Span:
    """A log entry: `steps` alike calls from start on, taking `seconds` together."""

    start: float
    first_step: int
    steps: int
    shape: StepShape
    seconds: float
