"""Laws that every simulated run obeys, and a plain loop that must give the very same run.

Costs and arrivals are multiples of 2^-12 s, so that sums are exact and equal means equal.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeplan.serving.batching import simulate
from moeplan.serving.requests import Arrivals, ClosedLoop, Load, Request, poisson
from moeplan.serving.result import RequestTimes
from moeplan.serving.step import Policy, Span, StepShape

TICK = 2.0**-6


@dataclass(frozen=True)
class Time:
    seconds: float


def dyadic(step: StepShape, first_step: int, steps: int) -> Time:
    """Fixed, per-row and growing-context terms and a noise that is a function of the step's number."""
    noise = sum((number * 7 + step.padded) % 5 for number in range(first_step, first_step + steps))
    context = step.context * steps + step.decode_rows * steps * (steps - 1) // 2
    return Time(TICK * (steps * (3 + step.padded) + noise) + 2.0**-12 * context)


requests = st.builds(
    Request, st.integers(1, 30), st.integers(1, 12), st.integers(0, 400).map(lambda ticks: ticks * TICK)
)
policies = st.builds(
    Policy,
    max_batch=st.integers(1, 5),
    max_prefill_batch=st.integers(1, 4),
    prefill_step=st.integers(1, 16),
    decode_first=st.booleans(),
    pad_prompts=st.booleans(),
    last_token_alone=st.booleans(),
)


@st.composite
def loads(draw: st.DrawFn) -> Load:
    some = tuple(draw(st.lists(requests, min_size=1, max_size=12)))
    if draw(st.booleans()):
        return Arrivals(tuple(sorted(some, key=lambda request: request.arrival_s)))
    return ClosedLoop(draw(st.integers(1, 5)), some, draw(st.integers(0, 8)) * TICK)


# The oracle: one loop over single calls, a sorted list of what is yet to come, no events and no jumps.


@dataclass
class Sequence:
    request: Request
    client: int | None
    arrival: float
    admitted: float = -1.0
    first: float = -1.0
    end: float = -1.0
    prefilled: int = 0
    generated: int = 0


class Plain:
    def __init__(self, load: Load, policy: Policy) -> None:
        self.load, self.policy = load, policy
        self.now, self.step = 0.0, 0
        self.sent: list[Sequence] = []
        self.queue: list[Sequence] = []
        self.prompts: list[Sequence] = []
        self.batch: list[Sequence] = []
        if isinstance(load, Arrivals):
            self.future = [(r.arrival_s, i, r, None) for i, r in enumerate(load.requests)]
            self.pool: list[Request] = []
        else:
            self.pool = list(load.requests)
            self.future = []
            for client in range(load.clients):
                self.send_later(0.0, client)

    def send_later(self, when: float, client: int | None) -> None:
        """A client's next request is chosen when it is sent; here at the latest possible moment, in `arrive`."""
        if client is not None:
            self.future.append((when, client, None, client))

    def arrive(self) -> None:
        due = [item for item in self.future if item[0] <= self.now]
        self.future = [item for item in self.future if item[0] > self.now]
        for when, _, request, client in sorted(due, key=lambda item: item[0]):
            if request is None and not self.pool:
                continue
            self.sent.append(Sequence(request or self.pool.pop(0), client, when))
            self.queue.append(self.sent[-1])

    def admit(self) -> None:
        self.arrive()
        while self.queue and len(self.prompts) < self.policy.max_prefill_batch:
            if len(self.prompts) + len(self.batch) >= self.policy.max_batch:
                break
            self.queue[0].admitted = self.now
            self.prompts.append(self.queue.pop(0))

    def call(self, shape: StepShape) -> None:
        self.now += dyadic(shape, self.step, 1).seconds
        self.step += 1

    def gain(self, sequences: list[Sequence]) -> None:
        """One more token each."""
        for sequence in sequences:
            sequence.generated += 1
            if sequence.generated == 1:
                sequence.first = self.now
        for sequence in sequences:
            if sequence.generated == sequence.request.max_tokens:
                sequence.end = self.now
                think = self.load.think_s if isinstance(self.load, ClosedLoop) else 0.0
                self.send_later(self.now + think, sequence.client)
        self.batch = [s for s in self.batch + [s for s in sequences if s.generated == 1] if s.end < 0]

    def decode(self) -> None:
        context = sum(s.request.prompt_tokens + s.generated for s in self.batch)
        self.call(StepShape(len(self.batch), context=context, padded=len(self.batch)))
        self.gain(list(self.batch))

    def prefill(self) -> None:
        held_back = int(self.policy.last_token_alone)
        last = [s for s in self.prompts if held_back and s.request.prompt_tokens - s.prefilled == 1]
        if last:
            self.call(StepShape(len(last), context=sum(s.request.prompt_tokens for s in last), padded=len(last)))
            self.prompts = [s for s in self.prompts if s not in last]
            self.gain(last)
            self.arrive()
        if self.prompts:
            sizes = []
            for s in self.prompts:
                sizes.append(min(self.policy.prefill_step, s.request.prompt_tokens - held_back - s.prefilled))
                s.prefilled += sizes[-1]
            padded = len(sizes) * max(sizes) if self.policy.pad_prompts else sum(sizes)
            self.call(StepShape(0, 0, tuple(sizes), sum(s.prefilled for s in self.prompts), padded))
            ready = [s for s in self.prompts if s.prefilled == s.request.prompt_tokens]
            self.prompts = [s for s in self.prompts if s not in ready]
            self.gain(ready)

    def run(self) -> list[RequestTimes]:
        while True:
            self.admit()
            if not self.batch and not self.prompts:
                if not self.future:
                    break
                self.now = min(item[0] for item in self.future)
            elif self.batch and (self.policy.decode_first or not self.prompts):
                self.decode()
                self.admit()
                if self.policy.decode_first and self.prompts:
                    self.prefill()
            else:
                self.prefill()
        return [
            RequestTimes(s.arrival, s.admitted, s.first, s.end, s.request.prompt_tokens, s.generated) for s in self.sent
        ]


def by_arrival(times: list[RequestTimes]) -> list[tuple[float, ...]]:
    """Two clients that send at one instant may swap places in either program."""
    return sorted((t.arrival, t.admitted, t.first_token, t.completion, t.prompt_tokens, t.tokens) for t in times)


@settings(max_examples=300, deadline=None)
@given(loads(), policies)
def test_simpy_and_a_plain_loop_give_the_same_run(load: Load, policy: Policy) -> None:
    plain = Plain(load, policy)
    wanted = plain.run()
    done = simulate(load, policy, dyadic)
    assert done.steps == plain.step
    assert by_arrival(list(done.times)) == by_arrival(wanted)


@settings(max_examples=200, deadline=None)
@given(loads(), policies)
def test_jumped_equals_stepped(load: Load, policy: Policy) -> None:
    jumped, stepped = (simulate(load, policy, dyadic, jump) for jump in (True, False))
    assert jumped == stepped


@settings(max_examples=150, deadline=None)
@given(loads(), policies)
def test_conservation_and_order(load: Load, policy: Policy) -> None:
    log: list[Span] = []
    done = simulate(load, policy, dyadic, log=log)
    sent = load.requests
    assert done.requests == done.completed == len(sent)
    assert done.simulated_tokens == sum(request.max_tokens for request in sent)
    assert sorted((t.prompt_tokens, t.tokens) for t in done.times) == sorted(
        (r.prompt_tokens, r.max_tokens) for r in sent
    )
    rows = sum((count.decode_rows + count.prefill_rows) * count.steps for count in done.mix)
    assert rows == sum(request.prompt_tokens + request.max_tokens - 1 for request in sent)
    assert done.steps == sum(count.steps for count in done.mix) == sum(span.steps for span in log)
    for t in done.times:
        assert t.arrival <= t.admitted < t.first_token <= t.completion
    for before, after in pairwise(log):
        assert before.start + before.seconds <= after.start
        assert before.first_step + before.steps == after.first_step
    for span in log:
        assert span.shape.decode_rows <= policy.max_batch
        assert len(span.shape.prefill_chunks) <= policy.max_prefill_batch


@settings(max_examples=100, deadline=None)
@given(loads(), policies)
def test_littles_law_is_exact(load: Load, policy: Policy) -> None:
    """Sequences in decode, integrated over the engine's calls = time in decode, summed over the requests."""

    def free_prompts(step: StepShape, first_step: int, steps: int) -> Time:
        return dyadic(step, first_step, steps) if step.decode_rows else Time(0.0)

    log: list[Span] = []
    done = simulate(load, replace(policy, last_token_alone=False), free_prompts, log=log)
    area = sum(span.shape.decode_rows * span.seconds for span in log)
    assert area == sum(t.completion - t.first_token for t in done.times)


@settings(max_examples=100, deadline=None)
@given(loads(), policies)
def test_nobody_waits_beside_a_free_engine(load: Load, policy: Policy) -> None:
    """Work conservation: between two calls the clock stands still unless the system is empty."""
    log: list[Span] = []
    done = simulate(load, policy, dyadic, log=log)
    for before, after in pairwise(log):
        gap = before.start + before.seconds
        if after.start > gap:
            assert all(t.completion <= gap or t.arrival >= after.start for t in done.times)


def mean_sojourn(tokens: Callable[[np.random.Generator], np.ndarray], rate: float, count: int) -> float:
    """One server, one slot, steps of 1/64 s, prompts of one token: a request takes its tokens in steps."""
    draws = tokens(np.random.default_rng(5)).tolist()
    arrivals = poisson(rate, count, 1, 1, seed=11).requests
    load = Arrivals(tuple(replace(r, max_tokens=n) for r, n in zip(arrivals, draws, strict=True)))
    policy = Policy(max_batch=1, max_prefill_batch=1)
    done = simulate(load, policy, lambda step, first_step, steps: Time(steps * TICK))
    return float(np.mean([t.completion - t.arrival for t in done.times]))


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_mm1_and_md1_limits(load: float) -> None:
    count, service = 20_000, 1.0  # 64 tokens of 1/64 s
    rate = load / service
    # Geometric tokens have variance m^2 - m: Pollaczek-Khinchine with that second moment, and M/D/1 with none.
    exponential = mean_sojourn(lambda rng: rng.geometric(1 / 64, count), rate, count)
    second = service**2 * (2 - 1 / 64)
    assert exponential == pytest.approx(service + rate * second / (2 * (1 - load)), rel=0.04)
    assert exponential == pytest.approx(service / (1 - load), rel=0.05)  # M/M/1 itself
    constant = mean_sojourn(lambda rng: np.full(count, 64), rate, count)
    assert constant == pytest.approx(service + load * service / (2 * (1 - load)), rel=0.03)


def test_same_seed_same_bytes() -> None:
    def run(seed: int) -> str:
        return repr(asdict(simulate(poisson(2.0, 200, 20, 9, seed), Policy(4, 2), dyadic)))

    assert run(3) == run(3)
    assert run(3) != run(4)
