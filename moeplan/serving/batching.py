"""Continuous batching as a simpy simulation: who waits, who runs, and the steps that really occur. No experts here."""

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from moeplan.errors import MoeplanError
from moeplan.serving.requests import Arrivals, ClosedLoop, Load, Request
from moeplan.serving.result import RequestTimes, ServingResult, is_overloaded, summarise
from moeplan.serving.step import Policy, Span, SpanCost, StepShape


def simulate(
    load: Load, policy: Policy, span_cost: SpanCost, jump: bool = True, log: list[Span] | None = None
) -> ServingResult:
    """Run the load to its end.

    jump: price all decode steps up to the next event in one call; off, one call a step (same result, slower).
    log: every span is appended to it. Raises MoeplanError for an empty load.
    """
    import simpy

    if not load.requests:
        raise MoeplanError("requests: none to simulate")
    engine = _Engine(simpy.Environment(), policy, span_cost, jump, log, simpy.Interrupt)
    if isinstance(load, ClosedLoop):
        shared = iter(load.requests)
        for _ in range(min(load.clients, len(load.requests))):
            engine.env.process(_client(engine, shared, load.think_s))
    else:
        engine.env.process(_arrivals(engine, load))
    engine.process = engine.env.process(engine.serve())
    engine.env.run()
    return _result(engine, load)


def _result(engine: "_Engine", load: Load) -> ServingResult:
    times = [
        RequestTimes(j.arrival, j.admitted, j.first_token, j.completion, j.request.prompt_tokens, j.request.max_tokens)
        for j in engine.jobs
        if j.completion >= 0
    ]
    overloaded = isinstance(load, Arrivals) and is_overloaded(times, engine.policy.max_prefill_batch)
    return summarise(len(engine.jobs), times, engine.counts, overloaded)


def _client(engine: "_Engine", requests: Iterator[Request], think_s: float) -> Generator[Any, Any, None]:
    for request in requests:
        done = engine.env.event()
        engine.submit(request, engine.env.now, done)
        yield done
        if think_s:
            yield engine.env.timeout(think_s)


def _arrivals(engine: "_Engine", load: Arrivals) -> Generator[Any, Any, None]:
    for request in load.requests:
        if request.arrival_s > engine.env.now:
            yield engine.env.timeout(request.arrival_s - engine.env.now)
        engine.submit(request, engine.env.now, None)


_LAST = 2  # simpy's URGENT is 0 and NORMAL is 1: a step boundary comes after every arrival of the same instant


@dataclass(slots=True)
class _Job:
    number: int
    request: Request
    arrival: float
    done: Any  # the client's event, None for open arrivals
    admitted: float = -1.0
    first_token: float = -1.0
    completion: float = -1.0
    prefilled: int = 0


@dataclass(slots=True)
class _Engine:
    """The server process. `waiting` -> `prefilling` -> `running` -> finished."""

    env: Any
    policy: Policy
    span_cost: SpanCost
    jump: bool
    log: list[Span] | None
    interrupted: type[BaseException]  # simpy's, which is imported late
    process: Any = None
    wake: Any = None  # set while nothing is to be done
    interruptible: bool = False  # a jump is under way that an arrival may cut short
    jobs: list[_Job] = field(default_factory=list)
    waiting: deque[_Job] = field(default_factory=deque)
    prefilling: list[_Job] = field(default_factory=list)
    running: list[tuple[int, int, _Job]] = field(default_factory=list)  # heap: last decode step, number
    context: int = 0  # cache rows that the next decode step reads
    decoded: int = 0  # decode steps of the running batch so far
    step: int = 0  # calls so far
    counts: Counter[tuple[int, int, int]] = field(default_factory=Counter)

    def submit(self, request: Request, now: float, done: Any) -> None:
        """Queue a request; wake an idle engine, or cut a jump at the next boundary where a slot is free."""
        job = _Job(len(self.jobs), request, now, done)
        self.jobs.append(job)
        self.waiting.append(job)
        if self.wake is not None:
            self.wake.succeed()
            self.wake = None
        elif self.interruptible:
            self.interruptible = False
            self.process.interrupt()

    def serve(self) -> Generator[Any, Any, None]:
        """Tick for ever; the simulation ends when no event is left."""
        while True:
            self.admit()
            if not (self.running or self.prefilling):
                self.wake = self.env.event()
                yield self.wake
                yield self.boundary(0.0)
                continue
            if self.running and (self.policy.decode_first or not self.prefilling):
                yield from self.decode()
                self.admit()
                if not self.policy.decode_first:
                    continue
            if self.prefilling:
                yield from self.prefill()

    def admit(self) -> None:
        """Move waiting requests into the prompt batch, first come first served, as far as slots allow."""
        while self.waiting and self.room():
            job = self.waiting.popleft()
            job.admitted = self.env.now
            self.prefilling.append(job)

    def room(self) -> bool:
        """May one more request start its prefill now?"""
        policy, busy = self.policy, len(self.prefilling)
        return busy < policy.max_prefill_batch and busy + len(self.running) < policy.max_batch

    def boundary(self, delay: float) -> Any:
        """An event after `delay` seconds, later than all others of its instant."""
        event = self.env.event()
        event._ok, event._value = True, None
        self.env.schedule(event, priority=_LAST, delay=delay)
        return event

    def price(self, shape: StepShape, steps: int) -> float:
        """Seconds of a span that starts with the next step. Raises ValueError for a price that is no time."""
        seconds = self.span_cost(shape, self.step, steps).seconds
        if not 0 <= seconds < math.inf:
            raise ValueError(f"span_cost: {seconds} seconds for {shape}")
        return seconds

    def decode(self) -> Generator[Any, Any, None]:
        """Decode steps up to the next event: one while prompts are in work, else to the first that ends."""
        rows = len(self.running)
        shape = StepShape(rows, context=self.context, padded=rows, cohort=self.policy.cohort)
        steps = 1 if self.prefilling or not self.jump else self.running[0][0] - self.decoded
        start, seconds = self.env.now, self.price(shape, steps)
        self.interruptible = steps > 1 and self.room()
        try:
            yield self.boundary(seconds)
            self.interruptible = False
        except self.interrupted:
            elapsed = self.env.now - start
            steps = 1 + bisect_left(range(1, steps), elapsed, key=lambda n: self.price(shape, n))
            seconds = self.price(shape, steps)
            yield self.boundary(max(0.0, start + seconds - self.env.now))
        self.record(start, steps, shape, seconds)
        self.decoded += steps
        self.context += rows * steps
        yield from self.finish()

    def finish(self) -> Generator[Any, Any, None]:
        """Let sequences leave that have all their tokens, and their clients send again at this very boundary."""
        answered = False
        while self.running and self.running[0][0] <= self.decoded:
            job = heappop(self.running)[2]
            self.context -= job.request.prompt_tokens + job.request.max_tokens
            answered |= self.complete(job)
        if answered:
            yield self.boundary(0.0)

    def complete(self, job: _Job) -> bool:
        """Note the end; True if a client was told."""
        job.completion = self.env.now
        if job.done is None:
            return False
        job.done.succeed()
        return True

    def prefill(self) -> Generator[Any, Any, None]:
        """One call for prompts that have only their last token left (where the policy runs it alone), one chunk."""
        alone = self.policy.last_token_alone
        ready = [job for job in self.prefilling if alone and job.request.prompt_tokens - job.prefilled == 1]
        if ready:
            context = sum(job.request.prompt_tokens for job in ready)
            shape = StepShape(len(ready), context=context, padded=len(ready), cohort=self.policy.cohort)
            yield from self.call(shape)
            yield from self.start(ready)
        left = [job.request.prompt_tokens - job.prefilled - alone for job in self.prefilling]
        chunks = [min(self.policy.prefill_step, tokens) for tokens in left]
        if not chunks:
            return
        padded = max(chunks) * len(chunks) if self.policy.pad_prompts else sum(chunks)
        context = sum(job.prefilled for job in self.prefilling) + sum(chunks)
        yield from self.call(StepShape(0, 0, tuple(chunks), context, padded, self.policy.cohort))
        for job, chunk in zip(self.prefilling, chunks, strict=True):
            job.prefilled += chunk
        yield from self.start([job for job in self.prefilling if job.prefilled == job.request.prompt_tokens])

    def call(self, shape: StepShape) -> Generator[Any, Any, None]:
        """One model call that nothing cuts short."""
        start, seconds = self.env.now, self.price(shape, 1)
        yield self.boundary(seconds)
        self.record(start, 1, shape, seconds)

    def start(self, ready: list[_Job]) -> Generator[Any, Any, None]:
        """First tokens are there: those prompts join the running batch, or end with their only token."""
        answered = False
        for job in ready:
            self.prefilling.remove(job)
            job.first_token = self.env.now
            if job.request.max_tokens == 1:
                answered |= self.complete(job)
                continue
            heappush(self.running, (self.decoded + job.request.max_tokens - 1, job.number, job))
            self.context += job.request.prompt_tokens + 1
        if answered:
            yield self.boundary(0.0)

    def record(self, start: float, steps: int, shape: StepShape, seconds: float) -> None:
        """Count and log a finished span."""
        filled = sum(shape.prefill_chunks)
        self.counts[shape.decode_rows, filled, shape.padded - shape.rows] += steps
        if self.log is not None:
            self.log.append(Span(start, self.step, steps, shape, seconds))
        self.step += steps
