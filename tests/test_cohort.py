"""Cohorts draw the rows that their names say, uniformly, and refuse what a trace cannot give."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.errors import MoeplanError
from moeplan.traffic.cohort import different, draw_rows, parse_cohort, spans_of
from moeplan.traffic.trace import RoutingTrace


def made(lengths: list[int], phase: list[int] | None = None, domains: tuple[str, ...] | None = None) -> RoutingTrace:
    tokens = sum(lengths)
    return RoutingTrace(
        expert_ids=np.arange(tokens * 2).reshape(tokens, 1, 2) % 8,
        layer_ids=np.arange(1),
        request_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        experts=8,
        phase=None if phase is None else np.array(phase, dtype=np.uint8),
        domains=domains,
        id_space="logical",
        order="set",
        provenance={},
        name="made",
    )


def owners(trace: RoutingTrace, rows: np.ndarray) -> np.ndarray:
    return np.searchsorted(trace.request_offsets, rows, side="right") - 1


LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=12)


@given(lengths=LENGTHS, batch=st.integers(1, 6), width=st.integers(1, 4), seed=st.integers(0, 99))
def test_streams_are_consecutive_rows_of_different_requests(
    lengths: list[int], batch: int, width: int, seed: int
) -> None:
    trace = made([*lengths, 1])
    able = sum(length >= width for length in [*lengths, 1])
    if able < batch:
        with pytest.raises(MoeplanError, match=f"found {able}"):
            draw_rows(trace, f"{batch}xstream:{width}", 1, 3, np.random.default_rng(seed))
        return
    rows = draw_rows(trace, f"stream:{width}", batch, 3, np.random.default_rng(seed)).reshape(3, batch, width)
    assert (np.diff(rows, axis=2) == 1).all()
    own = owners(trace, rows)
    assert (own == own[:, :, :1]).all()
    assert all(len(set(draw[:, 0].tolist())) == batch for draw in own)


def test_stream_of_one_row_is_the_independent_cohort() -> None:
    trace = made([3, 5, 2, 7])
    one, other = (draw_rows(trace, name, 3, 50, np.random.default_rng(4)) for name in ("stream:1", "independent"))
    assert (one == other).all()


def test_independent_rows_follow_the_stated_rule() -> None:
    """A row of a request of n rows has chance batch / requests / n: four standard deviations of room."""
    lengths, draws = [1, 2, 5, 10], 20_000
    trace = made(lengths)
    for batch in (1, 2, 3):
        counts = np.bincount(
            draw_rows(trace, "independent", batch, draws, np.random.default_rng(batch)).ravel(), minlength=18
        )
        wanted = np.repeat([draws * batch / 4 / n for n in lengths], lengths)
        assert (np.abs(counts - wanted) <= 4 * np.sqrt(wanted)).all()


def test_every_ordered_choice_is_equally_likely_in_both_ways_of_drawing() -> None:
    pool, none = np.array([2, 3, 5, 7, 11]), np.empty((30_000, 0), dtype=np.int64)
    for count in (2, 3):  # by rejection, by sorting
        seen = Counter(map(tuple, different(pool, count, none, np.random.default_rng(1)).tolist()))
        choices = 20 if count == 2 else 60
        assert len(seen) == choices
        assert max(abs(n - 30_000 / choices) for n in seen.values()) < 5 * np.sqrt(30_000 / choices)


def test_more_independent_rows_than_requests_take_no_row_twice() -> None:
    trace = made([4, 1, 6])
    for draw in draw_rows(trace, "independent", 9, 5, np.random.default_rng(0)):
        assert len(set(draw.tolist())) == 9
        each = np.bincount(owners(trace, draw), minlength=3)
        assert each.tolist() == [4, 1, 4]  # a row a round from each request that still has one
    phased = made([4, 4], phase=[0, 1, 1, 1, 0, 0, 1, 1])
    assert sorted(draw_rows(phased, "independent", 5, 1, np.random.default_rng(0))[0].tolist()) == [1, 2, 3, 6, 7]
    with pytest.raises(MoeplanError, match="11 rows, 12 tokens"):
        draw_rows(trace, "independent", 12, 1, np.random.default_rng(0))


@pytest.mark.parametrize(("lag", "batch"), [(0, 5), (1, 4), (3, 3)])
def test_replayed_requests_keep_their_lag(lag: int, batch: int) -> None:
    trace = made([9, 2, 12])
    rows = draw_rows(trace, f"staggered:{lag}", batch, 40, np.random.default_rng(2))
    assert rows.shape == (40, batch)
    assert (np.diff(rows, axis=1) == lag).all()
    assert (owners(trace, rows) == owners(trace, rows[:, :1])).all()
    assert len(np.unique(rows[:, 0])) > 5
    if not lag:
        assert (rows == draw_rows(trace, "identical", batch, 40, np.random.default_rng(2))).all()


def test_same_domain_stays_in_one_domain_large_enough() -> None:
    labels = ("code", "math", "code", "math", "code", "rare")
    trace = made([3] * 6, domains=labels)
    rows = draw_rows(trace, "same-domain", 2, 4000, np.random.default_rng(0))
    met = np.array(labels)[owners(trace, rows)]
    assert (met == met[:, :1]).all()
    assert (owners(trace, rows)[:, 0] != owners(trace, rows)[:, 1]).all()
    shares = Counter(met[:, 0].tolist())
    assert set(shares) == {"code", "math"}  # rare has one request
    assert abs(shares["code"] / 4000 - 0.6) < 0.04
    assert set(
        np.array(labels)[owners(trace, draw_rows(trace, "same-domain:math", 2, 9, np.random.default_rng(0)))].ravel()
    ) == {"math"}
    for name, batch, word in (("same-domain:art", 2, "no such domain"), ("same-domain", 4, "no domain has 4")):
        with pytest.raises(MoeplanError, match=word):
            draw_rows(trace, name, batch, 1, np.random.default_rng(0))
    with pytest.raises(MoeplanError, match="no domain labels"):
        draw_rows(made([3]), "same-domain", 1, 1, np.random.default_rng(0))


def test_a_mixture_takes_decode_and_prompt_rows_of_different_requests() -> None:
    trace = made([8] * 9, phase=[0, 0, 0, 0, 0, 1, 1, 1] * 9)
    cohort = parse_cohort("3xindependent+2xstream:2+1xprefill:4")
    assert (cohort.mixed, cohort.rows()) == (True, 11)
    rows = draw_rows(trace, cohort, 1, 200, np.random.default_rng(0))
    assert rows.shape == (200, 11)
    assert trace.phase is not None
    assert (trace.phase[rows[:, :7]] == 1).all()
    assert (trace.phase[rows[:, 7:]] == 0).all()
    heads = owners(trace, rows[:, [0, 1, 2, 3, 5, 7]])
    assert all(len(set(row)) == 6 for row in heads.tolist())
    assert (np.diff(rows[:, 7:]) == 1).all()
    with pytest.raises(MoeplanError, match="needs 10 different requests"):
        draw_rows(trace, "5xindependent+5xstream:3", 1, 1, np.random.default_rng(0))


def test_a_phase_that_returns_within_a_request_is_refused() -> None:
    trace = made([4, 3], phase=[0, 1, 1, 1, 1, 0, 1])
    with pytest.raises(MoeplanError, match="decode rows of request 1 are not consecutive"):
        spans_of(trace, 1)
    assert spans_of(trace, 0).sizes.tolist() == [1, 1]
    assert spans_of(trace, None).sizes.tolist() == [4, 3]


@pytest.mark.parametrize(
    "name",
    ["", "lockstep", "stream", "stream:0", "stream:x", "stream:-1", "staggered", "independent:3", "identical:1",
     "2xidentical", "independent+stream:2", "0xindependent", "2xstream:2+", "same-domain:", "stream:99999999999"],
)  # fmt: skip
def test_other_names_are_refused_by_name(name: str) -> None:
    with pytest.raises(MoeplanError, match="--cohort"):
        parse_cohort(name)
