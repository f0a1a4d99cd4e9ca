"""The step sizes that really occur: simulated closed loops of several client counts, joined."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from moeplan.cost.model import Estimate
from moeplan.errors import MoeplanError
from moeplan.serving.batching import simulate
from moeplan.serving.requests import closed_loop
from moeplan.serving.step import Policy, StepShape


@dataclass(frozen=True, slots=True)
class Traffic:
    """Closed-loop clients, each count simulated for itself; every client sends `rounds` alike requests."""

    clients: tuple[int, ...]
    prompt_tokens: int = 512  # the load of mlxcel's batch bench, 512 / 128 tokens
    max_tokens: int = 128
    max_batch: int = 32  # mlx-lm completion_batch_size
    max_prefill_batch: int = 8  # mlx-lm prefill_batch_size
    rounds: int = 4

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "clients": list(self.clients),
            "prompt_tokens": self.prompt_tokens,
            "max_tokens": self.max_tokens,
            "max_batch": self.max_batch,
            "max_prefill_batch": self.max_prefill_batch,
            "rounds": self.rounds,
        }


def even_price(step: StepShape, first_step: int, steps: int) -> Estimate:
    """One second a call. A closed loop without think time takes the same calls whatever they cost: requests only
    arrive when others end, and those ends are counted in calls."""
    return Estimate(float(steps), float(steps), float(steps), "assumed")


def step_mix(traffic: Traffic) -> dict[int, int]:
    """Rows of a call (padding included) -> calls, summed over the client counts.

    Raises MoeplanError where there is no client count or one is not positive.
    """
    if not traffic.clients:
        raise MoeplanError("--clients: at least one number of clients is needed")
    policy = Policy(max_batch=traffic.max_batch, max_prefill_batch=traffic.max_prefill_batch)
    found: Counter[int] = Counter()
    for clients in traffic.clients:
        load = closed_loop(clients, traffic.prompt_tokens, traffic.max_tokens, traffic.rounds)
        for step in simulate(load, policy, even_price).mix:
            found[step.rows] += step.steps
    return dict(sorted(found.items()))
