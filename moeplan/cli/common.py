"""Options spelled alike everywhere, and the two ways to print."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from moeplan.errors import MoeplanError
from moeplan.store import Store

Json = Annotated[bool, typer.Option("--json", help="Print exactly one JSON document.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of every random draw.")]
Models = Annotated[Path | None, typer.Option("--models", help="Folder of model cards that takes precedence.")]
Traces = Annotated[Path | None, typer.Option("--traces", help="Folder of traces that takes precedence.")]
Calibrations = Annotated[
    Path | None, typer.Option("--calibration", help="Folder of calibrations that takes precedence.")
]

Cohorts = Annotated[
    str,
    typer.Option(
        "--cohort",
        help="independent, identical; with a trace also stream:N, staggered:N, same-domain[:NAME], prefill:N.",
    ),
]


def store(models: Path | None = None, traces: Path | None = None, calibration: Path | None = None) -> Store:
    """The search order for shipped data, with the folders given on the command line first."""
    return Store(models, traces, calibration)


def numbers(text: str, option: str) -> list[int]:
    """`1,2,4` or `1-8` or a mixture -> sorted unique positive integers. Raises MoeplanError naming the option."""
    found: set[int] = set()
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        try:
            first, last = int(low), int(high) if dash else int(low)
        except ValueError:
            raise MoeplanError(f"{option}: {part.strip()!r} is not a whole number or a range") from None
        if not 1 <= first <= last <= 1_000_000:
            raise MoeplanError(f"{option}: {part.strip()!r} is outside 1..1000000")
        found.update(range(first, last + 1))
    return sorted(found)


def emit(document: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def table(headings: list[str], rows: list[list[str]]) -> None:
    """A plain table: words left, numbers right."""
    widths = [max(len(row[i]) for row in [headings, *rows]) for i in range(len(headings))]
    for row in [headings, *rows]:
        cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        typer.echo("  ".join(cells).rstrip())


def note(text: str) -> None:
    """Progress and warnings: stderr, so that stdout stays parseable."""
    typer.echo(text, err=True)


def chain_of(text: str) -> tuple[int, int]:
    """`12,48` -> the layers of the short and the long chain. Raises MoeplanError naming the option."""
    try:
        short, long = (int(word) for word in text.split(","))
    except ValueError:
        raise MoeplanError(f"--chain {text!r}: expected two layer counts such as 12,48") from None
    if not 1 <= short < long <= 10_000:
        raise MoeplanError(f"--chain {text}: expected the shorter chain first, 1 to 10000 layers")
    return short, long


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int, str], None] | None]:
    """A bar on a terminal's stderr, called with (done, total, what comes next); None in a pipe."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda done, total, text: bar.update(task, completed=done, total=total, description=text)
