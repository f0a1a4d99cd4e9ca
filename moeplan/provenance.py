"""Where a number comes from, and what must agree before two sets of numbers may be mixed."""

import hashlib
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

MUST_AGREE = ("device", "engine", "engine_version", "driver", "host")
"""Keys whose values must be equal in two sample files that are compared or merged."""


def commit() -> dict[str, Any]:
    """The commit of the checkout and whether it is dirty, or the installed version where there is no checkout."""
    root = Path(__file__).resolve().parent.parent
    if (root / ".git").exists():
        try:
            head = _git(root, "rev-parse", "HEAD")
            return {"commit": head, "dirty": bool(_git(root, "status", "--porcelain", "--untracked-files=no"))}
        except (OSError, subprocess.CalledProcessError):
            pass
    return {"version": metadata.version("moeplan")} if _installed() else {"version": "unknown"}


def environment() -> dict[str, Any]:
    """The host facts every calibration run records: python, system, processor, commit, digest of this code."""
    system = {"python": platform.python_version(), "system": platform.platform(), "processor": platform.machine()}
    return system | commit() | {"source_sha256": source_digest()}


def source_digest() -> str:
    """SHA-256 over moeplan's own Python files: tells which code measured where no commit can be asked."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def disagreements(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The MUST_AGREE keys that differ, as `key: a != b`."""
    return [f"{key}: {one.get(key)} != {other.get(key)}" for key in MUST_AGREE if one.get(key) != other.get(key)]


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _installed() -> bool:
    try:
        metadata.version("moeplan")
    except metadata.PackageNotFoundError:
        return False
    return True
