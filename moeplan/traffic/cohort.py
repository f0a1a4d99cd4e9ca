"""Cohorts: which rows of a trace meet in one MoE call. Every draw is a table of row numbers [draws, rows].

A cohort of batch B holds B sequences, each giving as many rows as its kind says:

- `independent`: B different requests drawn uniformly, then a uniform row of each;
- `stream:N`: as independent, but N consecutive rows of each (speculative verification); `stream:1` is independent;
- `prefill:N`: N consecutive rows of each, prompt rows where the trace records the phase;
- `same-domain`, `same-domain:NAME`: independent within one domain, drawn by its number of requests;
- `staggered:N`: B clients replay one request N rows apart; `staggered:0` is identical;
- `identical`: one row of one request, B times.

A mixture `8xindependent+2xstream:4+1xprefill:256` is one call whose sequences are all different requests. Where a
trace records the phase, every kind but prefill takes decode rows only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from moeplan.errors import MoeplanError
from moeplan.traffic.trace import RoutingTrace

CohortKind = Literal["independent", "identical", "staggered", "same-domain", "stream", "prefill"]
Rows = npt.NDArray[np.int64]

_EXPECTED = "expected independent, identical, staggered:N, same-domain[:NAME], stream:N or a mixture of NxKIND with +"
_LONGEST = 1_000_000  # rows of one sequence: beyond any context window


@dataclass(frozen=True, slots=True)
class CohortPart:
    """count: sequences, None where the caller's batch decides; number: N of the kind; domain: its name or None."""

    kind: CohortKind
    number: int = 1
    domain: str | None = None
    count: int | None = None

    def rows(self, batch: int) -> int:
        """Rows that this part gives for a batch."""
        count = batch if self.count is None else self.count
        return count * self.number if self.kind in ("stream", "prefill") else count


@dataclass(frozen=True, slots=True)
class Cohort:
    """A cohort by name: one part, or several with their counts fixed."""

    name: str
    parts: tuple[CohortPart, ...]

    @property
    def mixed(self) -> bool:
        """Whether the counts are part of the name, so that no batch size is asked for."""
        return self.parts[0].count is not None

    def rows(self, batch: int = 1) -> int:
        """Rows of one MoE call."""
        return sum(part.rows(batch) for part in self.parts)


def parse_cohort(name: str) -> Cohort:
    """Read a cohort's name. Raises MoeplanError with the name for anything else than the module's list."""
    words = [name] if name.startswith("same-domain:") else name.split("+")
    counted = len(words) > 1 or (words[0].partition("x")[1] == "x" and words[0].partition("x")[0].isdecimal())
    return Cohort(name, tuple(_part(word, counted, name) for word in words))


def _part(word: str, counted: bool, name: str) -> CohortPart:
    count = None
    if counted:
        number, _, word = word.partition("x")
        count = _whole(number, 1, name)
    kind, colon, argument = word.partition(":")
    if kind not in get_args(CohortKind) or (counted and kind in ("identical", "staggered", "same-domain")):
        raise MoeplanError(f"--cohort {name}: {_EXPECTED}" + (" (independent, stream, prefill)" if counted else ""))
    known = cast(CohortKind, kind)
    if known == "same-domain" and (argument or not colon):
        return CohortPart(known, domain=argument or None)
    if known in ("staggered", "stream", "prefill"):
        return CohortPart(known, _whole(argument, 0 if known == "staggered" else 1, name), count=count)
    if colon:
        raise MoeplanError(f"--cohort {name}: {_EXPECTED}")
    return CohortPart(known, count=count)


def _whole(text: str, least: int, name: str) -> int:
    if not (text.isascii() and text.isdecimal()) or not least <= int(text[:8]) <= _LONGEST or len(text) > 7:
        raise MoeplanError(f"--cohort {name}: {text!r} is not a whole number in {least}..{_LONGEST}")
    return int(text)


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """The rows of each request that a phase owns: starts[r] : ends[r], empty where there are none."""

    starts: Rows
    ends: Rows

    @property
    def sizes(self) -> Rows:
        """Rows of each request."""
        return np.asarray(self.ends - self.starts)


def spans_of(trace: RoutingTrace, phase: int | None) -> Spans:
    """Spans of the prefill (0) or decode (1) rows of each request; all rows for None or an unrecorded phase.

    Raises MoeplanError naming the request whose rows of that phase are not consecutive.
    """
    starts, ends = trace.request_offsets[:-1].astype(np.int64), trace.request_offsets[1:].astype(np.int64)
    if phase is None or trace.phase is None:
        return Spans(starts, ends)
    mine = np.flatnonzero(np.asarray(trace.phase) == phase)
    first, last = np.searchsorted(mine, starts), np.searchsorted(mine, ends)
    some = last > first
    left, right = starts.copy(), starts.copy()
    left[some], right[some] = mine[first[some]], mine[last[some] - 1] + 1
    torn = np.flatnonzero(right - left != last - first)
    if torn.size:
        word = "decode" if phase else "prefill"
        raise MoeplanError(f"{trace.name}: phase: the {word} rows of request {torn[0]} are not consecutive")
    return Spans(left, right)


def draw_rows(trace: RoutingTrace, cohort: Cohort | str, batch: int, draws: int, rng: np.random.Generator) -> Rows:
    """Row numbers int64 [draws, rows] of independent draws of a cohort of `batch` sequences.

    A mixture ignores `batch`. Independent rows beyond the number of requests: every request gives one more row a
    round, no row twice. Raises MoeplanError where the trace has too few requests, rows or labels for the cohort.
    """
    asked = parse_cohort(cohort) if isinstance(cohort, str) else cohort
    if batch < 1 or draws < 1:
        raise MoeplanError(f"--cohort {asked.name}: batch {batch} and {draws} draws, both must be at least 1")
    if asked.parts[0].kind == "same-domain":
        return _same_domain(trace, asked, batch, draws, rng)
    if asked.parts[0].kind in ("identical", "staggered"):
        return _replayed(trace, asked, batch, draws, rng)
    if asked.name == "independent" and batch > np.count_nonzero(spans_of(trace, 1).sizes):
        return _in_rounds(trace, batch, draws, rng)
    used = np.empty((draws, 0), dtype=np.int64)
    found = []
    for part in asked.parts:
        spans = spans_of(trace, 0 if part.kind == "prefill" else 1)
        fit = np.flatnonzero(spans.sizes >= part.number)
        count = batch if part.count is None else part.count
        _enough(trace, asked, fit.size, used.shape[1] + count, part.number)
        chosen = different(fit, count, used, rng)
        found.append(_within(spans, chosen, part.number, rng).reshape(draws, -1))
        used = np.concatenate([used, chosen], axis=1)
    return np.concatenate(found, axis=1)


def cohort_rows(trace: RoutingTrace, tokens: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Row numbers [tokens], no row twice: one random row of each of that many different requests.

    With more tokens than requests every request gives one more row a round, until its rows run out.
    """
    offsets = trace.request_offsets
    sizes = np.diff(offsets)
    if tokens <= trace.requests:
        chosen = rng.permutation(np.flatnonzero(sizes))[:tokens]
        return np.asarray(offsets[chosen] + rng.integers(0, sizes[chosen]), dtype=np.int64)
    shuffled = rng.permutation(len(trace.expert_ids))
    by_request = np.argsort(np.searchsorted(offsets, shuffled, side="right"), kind="stable")
    turn = np.empty_like(shuffled)
    turn[by_request] = np.arange(shuffled.size) - np.repeat(offsets[:-1], sizes)
    return shuffled[np.argsort(turn, kind="stable")][:tokens]


def call_rows(trace: RoutingTrace, cohort: str, tokens: int, draws: int, rng: np.random.Generator) -> Rows:
    """Rows int64 [draws, tokens] of calls of exactly that many tokens; the last stream is cut where they do not divide.

    Raises MoeplanError as `draw_rows` does, and where a mixture has another number of rows.
    """
    asked = parse_cohort(cohort)
    if asked.mixed and asked.rows() != tokens:
        raise MoeplanError(f"--cohort {cohort}: a call of {asked.rows()} rows, {tokens} tokens asked for")
    return draw_rows(trace, asked, -(-tokens // asked.rows(1)), draws, rng)[:, :tokens]


def _in_rounds(trace: RoutingTrace, batch: int, draws: int, rng: np.random.Generator) -> Rows:
    """More rows than requests: the rule of `cohort_rows` on the decode rows alone."""
    spans = spans_of(trace, 1)
    mine = np.concatenate([np.arange(a, b) for a, b in zip(spans.starts, spans.ends, strict=True)])
    if batch > mine.size:
        raise MoeplanError(f"{trace.name}: {mine.size} rows, {batch} tokens asked for")
    edges = np.concatenate([[0], np.cumsum(spans.sizes)]).astype(np.int64)
    decode = replace(trace, expert_ids=mine[:, None, None], request_offsets=edges, phase=None)
    return np.stack([mine[cohort_rows(decode, batch, rng)] for _ in range(draws)])


def _enough(trace: RoutingTrace, cohort: Cohort, have: int, need: int, rows: int) -> None:
    if have < need:
        raise MoeplanError(
            f"{trace.name}: --cohort {cohort.name} needs {need} different requests of {rows} rows or more, found {have}"
        )


def _within(spans: Spans, chosen: Rows, number: int, rng: np.random.Generator) -> Rows:
    """`number` consecutive rows from a uniform start in each chosen request: [..., number]."""
    first = spans.starts[chosen] + rng.integers(0, spans.sizes[chosen] - number + 1)
    return np.asarray(first[..., None] + np.arange(number), dtype=np.int64)


def different(pool: Rows, count: int, used: Rows, rng: np.random.Generator) -> Rows:
    """[draws, count] members of `pool`, uniform in order, none twice in a draw and none of its `used` [draws, n].

    The pool holds at least `count` members beside the used ones.
    """
    draws, before = used.shape
    if not before and 2 * count > pool.size:
        return pool[np.argsort(rng.random((draws, pool.size)), axis=1)[:, :count]]
    taken = np.concatenate([used, np.empty((draws, count), dtype=np.int64)], axis=1)
    for at in range(before, before + count):
        redo = np.arange(draws)
        while redo.size:
            taken[redo, at] = pool[rng.integers(0, pool.size, redo.size)]
            redo = redo[(taken[redo, :at] == taken[redo, at : at + 1]).any(axis=1)]
    return taken[:, before:]


def _replayed(trace: RoutingTrace, cohort: Cohort, batch: int, draws: int, rng: np.random.Generator) -> Rows:
    lag = cohort.parts[0].number if cohort.parts[0].kind == "staggered" else 0
    spans = spans_of(trace, 1)
    reach = (batch - 1) * lag + 1
    fit = np.flatnonzero(spans.sizes >= reach)
    _enough(trace, cohort, fit.size, 1, reach)
    chosen = fit[rng.integers(0, fit.size, draws)]
    return _within(spans, chosen, reach, rng)[:, ::lag] if lag else np.repeat(_within(spans, chosen, 1, rng), batch, 1)


def _same_domain(trace: RoutingTrace, cohort: Cohort, batch: int, draws: int, rng: np.random.Generator) -> Rows:
    if trace.domains is None:
        raise MoeplanError(f"{trace.name}: --cohort {cohort.name}: the trace has no domain labels")
    spans, labels = spans_of(trace, 1), np.asarray(trace.domains)
    alive = spans.sizes > 0
    names, sizes = np.unique(labels[alive], return_counts=True)
    wanted = cohort.parts[0].domain
    if wanted is not None and wanted not in names:
        raise MoeplanError(f"{trace.name}: --cohort {cohort.name}: no such domain (known: {_some(names.tolist())})")
    fit = (sizes >= batch) & ((names == wanted) if wanted is not None else True)
    if not fit.any():
        raise MoeplanError(f"{trace.name}: --cohort {cohort.name}: no domain has {batch} requests")
    shares = sizes[fit] / sizes[fit].sum()
    which = rng.choice(np.flatnonzero(fit), size=draws, p=shares)
    rows = np.empty((draws, batch), dtype=np.int64)
    for domain in np.unique(which):
        mine = np.flatnonzero(which == domain)
        pool = np.flatnonzero(alive & (labels == names[domain]))
        chosen = different(pool, batch, np.empty((mine.size, 0), dtype=np.int64), rng)
        rows[mine] = _within(spans, chosen, 1, rng)[..., 0]
    return rows


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
