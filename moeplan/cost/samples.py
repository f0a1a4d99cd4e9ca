"""Raw measured times, kept as they were taken: one append-only journal of JSON lines a run.

Line types: `header` (first), `arm` (what is timed), `round` (clocks, anchor), `time` (one round of one arm),
`failed` (an arm that was lost, with the reason), `declined` (an arm that its kernel does not do). A torn last line,
left by a killed run, is dropped.
History: moeplan.samples/1 is the first format.
"""

import json
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moeplan.errors import MoeplanError
from moeplan.traffic.shape import LayerShape

SCHEMA = "moeplan.samples/1"


@dataclass(frozen=True, slots=True)
class Sample:
    """All rounds of one arm.

    chain: layers of the short and the long chain; short_s, long_s: raw seconds a round, equally long.
    slots, distinct: per layer, means over the layers between the two chain lengths. blocks: block rows -> mean
    number of padded blocks. kind: `measured` here, or `published` by somebody else.
    """

    arm: str
    path: str
    shape: LayerShape
    tokens: int
    routing: str
    seed: int
    chain: tuple[int, int]
    slots: float
    distinct: float
    blocks: dict[int, float]
    short_s: tuple[float, ...]
    long_s: tuple[float, ...]
    kind: str = "measured"
    cache_resident: bool = False
    signature: str = ""
    config_hash: str = ""
    parity_rms: float | None = None

    def layer_seconds(self) -> list[float]:
        """Seconds of one layer, a value a round: the slope between the two chain lengths."""
        span = self.chain[1] - self.chain[0]
        return [(long - short) / span for short, long in zip(self.short_s, self.long_s, strict=True)]

    @property
    def median(self) -> float:
        """Median layer time in seconds."""
        return statistics.median(self.layer_seconds())

    @property
    def spread(self) -> float:
        """Half the interquartile range of the layer time in seconds; 0 with fewer than four rounds."""
        values = self.layer_seconds()
        if len(values) < 4:
            return 0.0
        low, _, high = statistics.quantiles(values, n=4)
        return (high - low) / 2

    @property
    def intercept(self) -> float:
        """Median sync and host seconds of a chain: what is left at zero layers."""
        return statistics.median(
            [short - self.chain[0] * layer for short, layer in zip(self.short_s, self.layer_seconds(), strict=True)]
        )


@dataclass(frozen=True, slots=True)
class SampleFile:
    """One journal, read: header, samples, arms that failed or were declined (arm -> reason), round lines."""

    path: Path
    header: dict[str, Any]
    samples: tuple[Sample, ...]
    failed: dict[str, str] = field(default_factory=dict)
    rounds: tuple[dict[str, Any], ...] = ()
    declined: dict[str, str] = field(default_factory=dict)


class Journal:
    """Appends lines to a sample file, each flushed to the disk before the next measurement starts."""

    def __init__(self, path: Path) -> None:
        """Open for appending; a torn last line is cut off first. Raises MoeplanError where it cannot be written."""
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        except OSError as bad:
            raise MoeplanError(f"{path}: cannot write: {bad.strerror or bad}") from bad
        try:
            _lock(self._file.fileno())
        except OSError as bad:
            self._file.close()
            raise MoeplanError(f"{path}: another run is writing this journal") from bad
        self._drop_torn_line()

    def write(self, type_: str, **fields: Any) -> None:
        """Append one line of that type and force it to the disk."""
        self._file.write(json.dumps({"type": type_} | fields, sort_keys=True) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _drop_torn_line(self) -> None:
        if self.path.exists():
            data = self.path.read_bytes()
            if data and not data.endswith(b"\n"):
                with self.path.open("r+b") as file:
                    file.truncate(data.rfind(b"\n") + 1)


def _lock(file: int) -> None:
    """Exclusive until the file is closed, where the system has such locks. Raises OSError."""
    try:
        import fcntl
    except ImportError:
        return
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a journal. Raises MoeplanError naming the file and the line that is not JSON."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as bad:
        raise MoeplanError(f"{path}: cannot read: {bad}") from bad
    rows = text.split("\n")
    for number, row in enumerate(rows[:-1], 1):
        try:
            line = json.loads(row)
            if not isinstance(line, dict) or "type" not in line:
                raise ValueError("no type")
        except ValueError as bad:
            raise MoeplanError(f"{path}: line {number}: {bad}") from bad
        yield line


def load(path: Path) -> SampleFile:
    """Read a journal. Raises MoeplanError for a missing header, an unknown schema or a malformed line."""
    header: dict[str, Any] | None = None
    arms: dict[str, dict[str, Any]] = {}
    times: dict[str, list[tuple[float, float]]] = {}
    failed: dict[str, str] = {}
    declined: dict[str, str] = {}
    rounds: list[dict[str, Any]] = []
    try:
        for line in lines(path):
            match line["type"]:
                case "header":
                    header = header or line
                case "arm":
                    arms[line["arm"]] = line
                case "time":
                    times.setdefault(line["arm"], []).append((float(line["short_s"]), float(line["long_s"])))
                case "failed":
                    failed[line["arm"]] = line["reason"]
                case "declined":
                    declined[line["arm"]] = line["reason"]
                case "round":
                    rounds.append(line)
        if header is None or header.get("schema") != SCHEMA:
            raise MoeplanError(f"{path}: schema: {header.get('schema') if header else None!r} is not {SCHEMA}")
        samples = tuple(_sample(header, arms[arm], pairs) for arm, pairs in times.items() if arm not in failed)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as bad:
        raise MoeplanError(f"{path}: malformed sample file: {bad!r}") from bad
    return SampleFile(path, header, samples, failed, tuple(rounds), declined)


def _sample(header: dict[str, Any], arm: dict[str, Any], pairs: list[tuple[float, float]]) -> Sample:
    return Sample(
        arm=arm["arm"],
        path=arm["path"],
        shape=LayerShape.from_dict(arm.get("shape") or header["shape"]),
        tokens=int(arm["tokens"]),
        routing=arm["routing"],
        seed=int(arm["seed"]),
        chain=(int(arm["chain"][0]), int(arm["chain"][1])),
        slots=float(arm["slots"]),
        distinct=float(arm["distinct"]),
        blocks={int(rows): float(count) for rows, count in arm.get("blocks", {}).items()},
        short_s=tuple(short for short, _ in pairs),
        long_s=tuple(long for _, long in pairs),
        kind=header.get("kind", "measured"),
        cache_resident=bool(arm.get("cache_resident", False)),
        signature=arm.get("signature", ""),
        config_hash=arm.get("config_hash", ""),
        parity_rms=arm.get("parity_rms"),
    )
