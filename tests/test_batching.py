"""The simulator against runs worked out by hand."""

from dataclasses import dataclass, replace

import pytest

from moeplan.errors import MoeplanError
from moeplan.serving.batching import simulate
from moeplan.serving.requests import Arrivals, ClosedLoop, Request, closed_loop
from moeplan.serving.result import RequestTimes, StepCount, is_overloaded, percentile
from moeplan.serving.step import Policy, Span, StepShape

PLAIN = Policy(max_batch=4, max_prefill_batch=4, prefill_step=512, last_token_alone=False)


@dataclass(frozen=True)
class Time:
    seconds: float


def a_second_a_row(step: StepShape, first_step: int, steps: int) -> Time:
    return Time(float(step.padded * steps))


def a_second_a_step(step: StepShape, first_step: int, steps: int) -> Time:
    return Time(float(steps))


def test_one_client_one_request() -> None:
    done = simulate(closed_loop(1, 10, 5), PLAIN, a_second_a_row)
    assert (done.requests, done.completed, done.simulated_tokens, done.steps) == (1, 1, 5, 5)
    assert done.mix == (StepCount(0, 10, 1), StepCount(1, 0, 4))
    assert (done.ttft_mean_s, done.ttft_p95_s, done.tpot_mean_s) == (10.0, 10.0, 1.0)
    assert done.decode_tok_s_mean == 1.0
    assert done.aggregate_tok_s == 5 / 14  # prefill is inside the window
    assert done.times == (RequestTimes(0.0, 0.0, 10.0, 14.0, 10, 5),)
    assert not done.overloaded


def test_a_published_ladder_cell_is_reproduced_from_its_own_rates() -> None:
    # lablup/mlxcel metal_m5max_batch_2026-09-04.csv: 4 clients, 512 + 128 tokens, TTFT 379.2 ms and 65.5 tok/s a
    # request go with 220.9 tok/s in aggregate: the definitions of the three rates are the harness's own.
    def cost(step: StepShape, first_step: int, steps: int) -> Time:
        return Time(steps / 65.5 if step.decode_rows else 0.3792)

    done = simulate(closed_loop(4, 512, 128), PLAIN, cost)
    assert done.aggregate_tok_s == pytest.approx(220.9, abs=0.05)
    assert done.decode_tok_s_mean == pytest.approx(65.5)
    assert done.ttft_mean_s == pytest.approx(0.3792)


def test_last_prompt_token_alone_as_mlx_lm_runs_it() -> None:
    log: list[Span] = []
    simulate(closed_loop(2, 1025, 2), replace(PLAIN, last_token_alone=True), a_second_a_step, log=log)
    calls = [(span.shape.decode_rows, span.shape.prefill_chunks, span.shape.context) for span in log]
    assert calls == [(0, (512, 512), 1024), (0, (512, 512), 2048), (2, (), 2050), (2, (), 2052)]


def test_chunks_are_padded_to_the_longest_and_counted_as_padding() -> None:
    mixed = ClosedLoop(2, (Request(3, 1), Request(8, 1)))
    padded = simulate(mixed, replace(PLAIN, prefill_step=4), a_second_a_step)
    assert padded.mix == (StepCount(0, 4, 1), StepCount(0, 7, 1, 1))
    assert [count.rows for count in padded.mix] == [4, 8]
    packed = simulate(mixed, replace(PLAIN, prefill_step=4, pad_prompts=False), a_second_a_step)
    assert packed.mix == (StepCount(0, 4, 1), StepCount(0, 7, 1))
    assert (packed.tpot_mean_s, packed.decode_tok_s_mean) == (None, None)


def test_decode_first_interleaves_and_prefill_first_does_not() -> None:
    late = Arrivals((Request(1, 6, 0.0), Request(12, 1, 1.0)))
    policy = replace(PLAIN, prefill_step=4)
    log: list[Span] = []
    simulate(late, policy, a_second_a_step, log=log)
    assert [span.shape.decode_rows for span in log] == [0, 1, 0, 1, 0, 1, 0, 1]
    log.clear()
    simulate(late, replace(policy, decode_first=False), a_second_a_step, log=log)
    assert [(span.shape.decode_rows, span.steps) for span in log] == [(0, 1), (0, 1), (0, 1), (0, 1), (1, 5)]


@pytest.mark.parametrize(("arrival", "admitted"), [(3.0, 3.0), (3.25, 4.0), (4.0, 4.0)])
def test_a_request_at_a_step_boundary_joins_that_step(arrival: float, admitted: float) -> None:
    load = Arrivals((Request(1, 10, 0.0), Request(1, 1, arrival)))
    for jump in (True, False):
        assert simulate(load, PLAIN, a_second_a_step, jump).times[1].admitted == admitted


def test_the_boundary_looks_at_the_clock_not_at_who_woke_first() -> None:
    # The third request's timer is set at 2.5, after the engine set its own for 3.0; it still joins at 3.0.
    load = Arrivals((Request(1, 10, 0.0), Request(1, 10, 2.5), Request(1, 1, 3.0)))
    for jump in (True, False):
        done = simulate(load, PLAIN, a_second_a_step, jump)
        assert [one.admitted for one in done.times] == [0.0, 3.0, 3.0]


def test_full_slots_make_the_next_one_wait_for_a_completion() -> None:
    load = Arrivals((Request(1, 5, 0.0), Request(1, 2, 1.0)))
    done = simulate(load, replace(PLAIN, max_batch=1), a_second_a_step)
    assert (done.times[0].completion, done.times[1].admitted, done.times[1].completion) == (5.0, 5.0, 7.0)


def test_clients_send_again_at_the_boundary_of_their_answer() -> None:
    done = simulate(closed_loop(2, 1, 3, rounds=3), PLAIN, a_second_a_step)
    assert [one.arrival for one in done.times] == [0.0, 0.0, 3.0, 3.0, 6.0, 6.0]
    assert {count.decode_rows for count in done.mix} == {0, 2}
    thinking = simulate(closed_loop(1, 1, 3, rounds=2, think_s=0.5), PLAIN, a_second_a_step)
    assert [one.arrival for one in thinking.times] == [0.0, 3.5]


def test_overload_is_a_queue_that_grows() -> None:
    def stream(gap: float) -> Arrivals:
        return Arrivals(tuple(Request(1, 4, gap * i) for i in range(200)))

    policy = replace(PLAIN, max_batch=1, max_prefill_batch=1)  # one request takes 4 s
    assert not simulate(stream(4.5), policy, a_second_a_step).overloaded
    assert simulate(stream(3.5), policy, a_second_a_step).overloaded
    assert not simulate(stream(0.0), policy, a_second_a_step).overloaded  # a burst, not a load
    assert not simulate(closed_loop(50, 1, 4, 3), policy, a_second_a_step).overloaded  # clients wait for their answers
    assert not is_overloaded([], 1)


def test_percentile_interpolates() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile([7.0], 0.95) == 7.0


def test_nonsense_is_refused() -> None:
    with pytest.raises(MoeplanError, match="max_batch: 0"):
        Policy(max_batch=0)
    with pytest.raises(MoeplanError, match="none to simulate"):
        simulate(Arrivals(()), PLAIN, a_second_a_step)
    with pytest.raises(ValueError, match="nan seconds"):
        simulate(closed_loop(1, 1, 1), PLAIN, lambda step, first_step, steps: Time(float("nan")))
