"""The house rules that a machine can keep: light start, one direction of imports, no stray words."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("mlx", "torch", "triton", "scipy", "pandas", "matplotlib", "simpy")


@pytest.mark.parametrize("words", [["--help"], ["work", "--help"], ["calibrate", "--help"], ["recommend", "--help"]])
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    program = (
        "import sys\n"
        f"sys.argv = ['moeplan', *{words!r}]\n"
        "from moeplan.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        f"print('HEAVY', sorted(set({HEAVY!r}) & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_every_command_is_reachable_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "moeplan", "--help"], capture_output=True, text=True, check=True)
    for command in ("demo", "model", "work", "simulate", "calibrate", "recommend", "verify"):
        assert command in done.stdout


@pytest.mark.parametrize("words", [["--nonsense"], ["mixtral-8x7b", "--seed", "-1"], ["mixtral-8x7b", "--seed", "x"]])
def test_usage_error_is_one_line(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "moeplan", "work", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def device_imports(tree: ast.Module) -> list[str]:
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return [name for name in names if name.split(".")[0] in ("mlx", "torch", "triton", "mlx_lm")]


def test_device_code_lives_under_kernels_and_runners() -> None:
    seen = 0
    for path in (ROOT / "moeplan").rglob("*.py"):
        found = device_imports(ast.parse(path.read_text()))
        seen += bool(found)
        assert not found or path.parent.name in ("kernels", "runners"), f"{path}: {found}"
    assert seen, "the test sees no device import at all: it is broken"
