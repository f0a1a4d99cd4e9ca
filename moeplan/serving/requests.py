"""Who asks, and when: closed-loop clients, Poisson arrivals, replayed request files."""

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from moeplan.errors import MoeplanError


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and its answer, in tokens (both at least 1). arrival_s counts from the first request's arrival."""

    prompt_tokens: int
    max_tokens: int
    arrival_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """N clients that take the requests in order; each sends its next one think_s after its last answer ended.

    The requests' own arrival times play no part.
    """

    clients: int
    requests: tuple[Request, ...]
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests that come at their own times, whoever waits. Sorted by arrival."""

    requests: tuple[Request, ...]


Load = ClosedLoop | Arrivals


def closed_loop(clients: int, prompt_tokens: int, max_tokens: int, rounds: int = 1, think_s: float = 0.0) -> ClosedLoop:
    """N clients that each send `rounds` alike requests. Raises MoeplanError naming the value that is not positive."""
    _positive(clients=clients, prompt_tokens=prompt_tokens, max_tokens=max_tokens, rounds=rounds)
    if not 0 <= think_s < math.inf:
        raise MoeplanError(f"think_s: {think_s} is not a time")
    return ClosedLoop(clients, (Request(prompt_tokens, max_tokens),) * (clients * rounds), think_s)


def poisson(rate: float, count: int, prompt_tokens: int, max_tokens: int, seed: int) -> Arrivals:
    """`count` alike requests with independent exponential gaps of mean 1/rate seconds, the first one at 0.

    The same seed gives the same times. Raises MoeplanError naming the value that is not positive.
    """
    import numpy as np

    _positive(count=count, prompt_tokens=prompt_tokens, max_tokens=max_tokens)
    if not 0 < rate < math.inf:
        raise MoeplanError(f"rate: {rate} is not a positive number of requests a second")
    gaps = np.random.default_rng(seed).exponential(1 / rate, count - 1)
    times = [0.0, *np.cumsum(gaps).tolist()]
    return Arrivals(tuple(Request(prompt_tokens, max_tokens, time) for time in times))


@dataclass(frozen=True, slots=True)
class Form:
    """Column names of one kind of request file, and its ticks a second (None: a calendar time, read in ns)."""

    name: str
    arrival: str
    ticks: int | None
    prompt: str
    answer: str


# Azure Public Dataset 2023; Mooncake FAST'25 (JSONL, and its lengths as CSV); vidur; LLMServingSim 2.0.
FORMS = (
    Form("azure", "TIMESTAMP", None, "ContextTokens", "GeneratedTokens"),
    Form("mooncake", "timestamp", 1000, "input_length", "output_length"),
    Form("mooncake-lengths", "timestamp_ms", 1000, "input_length", "output_length"),
    Form("vidur", "arrived_at", 1, "num_prefill_tokens", "num_decode_tokens"),
    Form("llmservingsim", "arrival_time_ns", 10**9, "input_toks", "output_toks"),
)


def read_requests(path: Path, timed: bool = True) -> Arrivals:
    """A request file of one of FORMS, CSV or JSON lines, told apart by its column names; sorted by arrival from 0.

    timed=False also takes files without arrival times (all become 0), enough for a closed loop.
    Raises MoeplanError with file, line, field and value.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = _json_rows(path, file) if path.suffix in (".jsonl", ".json") else _csv_rows(path, file)
            found = list(_requests(path, rows, timed))
    except OSError as bad:
        raise MoeplanError(f"{path}: cannot read: {bad.strerror or bad}") from bad
    except UnicodeDecodeError as bad:
        raise MoeplanError(f"{path}: not UTF-8 text (byte {bad.start})") from bad
    if not found:
        raise MoeplanError(f"{path}: holds no request")
    start = min(arrival for arrival, _, _, _ in found)
    requests = (Request(prompt, answer, (arrival - start) / ticks) for arrival, ticks, prompt, answer in found)
    return Arrivals(tuple(sorted(requests, key=lambda request: request.arrival_s)))


Row = dict[str, object]


def _csv_rows(path: Path, file: Iterator[str]) -> Iterator[tuple[int, Row]]:
    reader = csv.reader(file)
    header = [name.strip() for name in next(reader, [])]
    for cells in reader:
        if cells and len(cells) != len(header):
            raise MoeplanError(f"{path}:{reader.line_num}: {len(cells)} fields under a heading of {len(header)}")
        if cells:
            yield reader.line_num, dict(zip(header, cells, strict=True))


def _json_rows(path: Path, file: Iterator[str]) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as bad:
            raise MoeplanError(f"{path}:{number}: not JSON: {bad}") from bad
        if not isinstance(row, dict):
            raise MoeplanError(f"{path}:{number}: not a JSON object")
        yield number, row


def _form(path: Path, row: Row, timed: bool) -> Form:
    by_length = [form for form in FORMS if form.prompt in row and form.answer in row]
    if not by_length:
        raise MoeplanError(f"{path}: unknown columns {', '.join(map(repr, row))} (known: {_known()})")
    with_times = [form for form in by_length if form.arrival in row]
    if not with_times and timed:
        wanted = " or ".join(form.arrival for form in by_length)
        raise MoeplanError(f"{path}: no arrival times (column {wanted}): it can only feed closed-loop clients")
    return (with_times or by_length)[0]


def _known() -> str:
    return "; ".join(f"{form.name}: {form.arrival},{form.prompt},{form.answer}" for form in FORMS)


def _requests(path: Path, rows: Iterator[tuple[int, Row]], timed: bool) -> Iterator[tuple[float, int, int, int]]:
    """Arrival in ticks, ticks a second, prompt tokens, answer tokens."""
    form: Form | None = None
    for number, row in rows:
        form = form or _form(path, row, timed)
        where = f"{path}:{number}"
        prompt, answer = _count(where, form.prompt, row), _count(where, form.answer, row)
        if not (timed or form.arrival in row):
            yield 0, 1, prompt, answer
        elif form.ticks is None:
            yield _moment(where, form.arrival, row), 10**9, prompt, answer
        else:
            yield _number(where, form.arrival, row), form.ticks, prompt, answer


def _moment(where: str, field: str, row: Row) -> int:
    """Nanoseconds since the year 1 of a calendar time: `datetime` alone would drop the 7th digit."""
    text = str(row.get(field, "")).strip()
    whole, _, fraction = text.partition(".")
    try:
        if fraction and not (fraction.isascii() and fraction.isdigit() and len(fraction) <= 9):
            raise ValueError(fraction)
        since = datetime.strptime(whole, "%Y-%m-%d %H:%M:%S") - datetime.min
        return (since.days * 86400 + since.seconds) * 10**9 + int((fraction or "0").ljust(9, "0"))
    except ValueError:
        raise MoeplanError(f"{where}: {field}: {text!r} is not a time like 2023-11-16 18:15:46.6805900") from None


def _number(where: str, field: str, row: Row) -> float:
    value = row.get(field)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
        return value  # nanoseconds since 1970 do not fit a float
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or isinstance(value, bool):
        raise MoeplanError(f"{where}: {field}: {value!r} is not a number")
    return number


def _count(where: str, field: str, row: Row) -> int:
    number = _number(where, field, row)
    if number < 1 or number != int(number):
        raise MoeplanError(f"{where}: {field}: {row.get(field)!r} is not a whole number of at least 1")
    return int(number)


def _positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise MoeplanError(f"{name}: {value} is not at least 1")
