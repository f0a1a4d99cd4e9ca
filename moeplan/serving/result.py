"""What a simulated run was like: the mix of steps, and the waiting times as a load generator would report them."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepCount:
    """How many model calls had that many rows. `rows` is what a gate on tokens compares: padding rows count."""

    decode_rows: int
    prefill_rows: int
    steps: int
    padding_rows: int = 0

    @property
    def rows(self) -> int:
        """Rows of one call as the kernels see them."""
        return self.decode_rows + self.prefill_rows + self.padding_rows


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """One finished request: seconds on the run's clock; arrival <= admitted <= first_token <= completion."""

    arrival: float
    admitted: float
    first_token: float
    completion: float
    prompt_tokens: int
    tokens: int


@dataclass(frozen=True, slots=True)
class ServingResult:
    """A finished run. Times in seconds, rates in generated tokens a second.

    decode_tok_s_mean: mean over requests of (n - 1) / (total - TTFT), n generated tokens; other requests' prefill
    inside that window slows it. aggregate_tok_s: all generated tokens / (last end - first start), prefill included.
    tpot_mean_s and decode_tok_s_mean are None where no request generates a second token.
    """

    requests: int
    completed: int
    simulated_tokens: int  # generated tokens only
    steps: int  # model calls: decode steps and prefill chunks
    mix: tuple[StepCount, ...]
    ttft_mean_s: float
    ttft_p95_s: float
    tpot_mean_s: float | None
    decode_tok_s_mean: float | None
    aggregate_tok_s: float
    overloaded: bool
    times: tuple[RequestTimes, ...]  # in order of sending


def percentile(values: Sequence[float], fraction: float) -> float:
    """Linear interpolation between order statistics, 0 = smallest, 1 = largest."""
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarise(
    sent: int, times: Sequence[RequestTimes], counts: dict[tuple[int, int, int], int], overloaded: bool
) -> ServingResult:
    """The result of a run with at least one finished request; counts: (decode, prefill, padding rows) -> calls."""
    ttft = [one.first_token - one.arrival for one in times]
    longer = [(one.completion - one.first_token, one.tokens - 1) for one in times if one.tokens > 1]
    rates = [tokens / window for window, tokens in longer if window > 0]
    tokens = sum(one.tokens for one in times)
    span = max(one.completion for one in times) - min(one.arrival for one in times)
    return ServingResult(
        requests=sent,
        completed=len(times),
        simulated_tokens=tokens,
        steps=sum(counts.values()),
        mix=tuple(StepCount(d, p, steps, pad) for (d, p, pad), steps in sorted(counts.items())),
        ttft_mean_s=sum(ttft) / len(ttft),
        ttft_p95_s=percentile(ttft, 0.95),
        tpot_mean_s=sum(window / tokens for window, tokens in longer) / len(longer) if longer else None,
        decode_tok_s_mean=sum(rates) / len(rates) if rates else None,
        aggregate_tok_s=tokens / span if span > 0 else 0.0,
        overloaded=overloaded,
        times=tuple(times),
    )


def is_overloaded(times: Sequence[RequestTimes], cohort: int) -> bool:
    """Did requests come faster than they could be served?

    True when, from the middle arrival to the last one, somebody was always waiting for a slot, and the queue grew
    by more than one prefill cohort. `times` in order of arrival; admission is first come, first served.
    """
    arrivals = [one.arrival for one in times]
    admitted = [one.admitted for one in times]
    middle = len(times) // 2
    if len(times) < 2 or arrivals[-1] <= arrivals[middle]:
        return False  # a burst: no load was kept up
    always = all(admitted[i] > arrivals[i + 1] for i in range(middle, len(times) - 1))

    def waiting(moment: float) -> int:
        return bisect_right(arrivals, moment) - bisect_right(admitted, moment)

    return always and waiting(arrivals[-1]) > waiting(arrivals[middle]) + cohort
