"""Every `console` block of README and docs is run and its output compared; `...` stands for any text.

A block whose fence says `console no-run` is shown only (it needs hardware); it must still name a real command.
"""

import fnmatch
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```console([^\n]*)\n(.*?)^```", re.M | re.S)


def documents() -> list[tuple[str, str]]:
    """(name, all runnable blocks of that document in order): later blocks use what earlier ones wrote."""
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        texts = [m[2] for m in FENCE.finditer(path.read_text(encoding="utf-8")) if "no-run" not in m[1]]
        if texts:
            found.append((path.name, "".join(texts)))
    return found


def steps(text: str) -> list[tuple[str, str]]:
    """(command, expected output) pairs of a block; a command may continue after a backslash."""
    text = text.replace("\\\n", " ")
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif found:
            found[-1][1].append(line)
    return [(command, "\n".join(lines).strip()) for command, lines in found]


def matches(expected: str, got: str) -> bool:
    pattern = "".join(f"[{c}]" if c in "*?[" else c for c in expected).replace("...", "*")
    return fnmatch.fnmatchcase(got, pattern)


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = shlex.split(command)
    if words[0] == "moeplan":
        words = [sys.executable, "-m", "moeplan", *words[1:]]
    env = os.environ | {"COLUMNS": "120", "PYTHONPATH": str(ROOT)}
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)


RUNNABLE = [pytest.param(text, id=name) for name, text in documents()]


@pytest.mark.parametrize("text", RUNNABLE)
def test_the_documents_show_what_the_program_prints(text: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for command, expected in steps(text):
        done = run(command, tmp_path)
        assert done.returncode in (0, 3), f"$ {command}\n{done.stdout}{done.stderr}"
        tail = [line.rstrip() for line in done.stdout.strip().splitlines()]
        assert not expected or matches(expected, "\n".join(tail)), f"$ {command}\n" + "\n".join(tail)


def test_the_matcher_can_fail() -> None:
    assert matches("a ... c", "a b c")
    assert matches("[1]", "[1]")
    assert not matches("a ... c", "a b d")
    assert not matches("[1]", "1")


def test_there_are_examples_to_run() -> None:
    assert RUNNABLE
