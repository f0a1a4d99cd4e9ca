"""docs/invariants.md names tests that exist, each invariant once."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "invariants.md").read_text(encoding="utf-8")


def test_every_named_test_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)
    assert len(named) >= 30
    for file, name in named:
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.M), f"{file}::{name}"


def test_numbers_run_without_a_gap_and_every_row_names_a_test() -> None:
    rows = re.findall(r"^\| INV-(\d+) \|.*$", TEXT, re.M)
    assert [int(number) for number in rows] == list(range(1, len(rows) + 1))
    assert all("`tests/" in line for line in TEXT.splitlines() if line.startswith("| INV-"))
