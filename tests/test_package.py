"""`pip install .` carries models, traces and calibrations, and runs the same commands away from the checkout."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def moeplan(installed: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, "-P", "-m", "moeplan", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_installed_package_runs_away_from_the_checkout(installed: Path, tmp_path: Path) -> None:
    where = subprocess.run(
        [sys.executable, "-P", "-c", "import moeplan; print(moeplan.__file__)"],
        env=os.environ | {"PYTHONPATH": str(installed)}, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Path(where.stdout.strip()).is_relative_to(installed)
    shown = moeplan(installed, tmp_path, "model", "show", "qwen3-30b-a3b-4bit", "--json")
    assert json.loads(shown.stdout)["plane_bytes"] == 2_654_208
    calibration = moeplan(installed, tmp_path, "calibrate", "show", "--device", "m1-ultra", "--json")
    assert json.loads(calibration.stdout)["device"] == "m1-ultra", calibration.stderr
    work = moeplan(
        installed,
        tmp_path,
        "work",
        "qwen3-30b-a3b-4bit",
        "--tokens",
        "2",
        "--routing",
        "popularity:gpt-oss-20b",
        "--json",
    )
    assert work.returncode == 0, work.stderr


def test_the_current_folder_takes_precedence(installed: Path, tmp_path: Path) -> None:
    card = (ROOT / "models" / "qwen3-30b-a3b-4bit.toml").read_text(encoding="utf-8")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.toml").write_text(card.replace("qwen3-30b-a3b-4bit", "mine"), encoding="utf-8")
    shown = moeplan(installed, tmp_path, "model", "show", "mine", "--json")
    assert json.loads(shown.stdout)["name"] == "mine"
    absent = moeplan(installed, tmp_path, "model", "show", "mine", "--models", str(tmp_path / "nowhere"))
    assert absent.returncode == 2
    assert absent.stderr.count("\n") == 1
