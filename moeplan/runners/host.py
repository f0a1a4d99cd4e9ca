"""Facts of the machine: processor, GPU driver, clocks and throttle reasons, where they can be read."""

import platform
import subprocess
from pathlib import Path
from typing import Any

_CLOCKS = {  # our key: nvidia-smi --help-query-gpu
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "throttle_reasons": "clocks_throttle_reasons.active",
    "temperature_c": "temperature.gpu",
    "power_w": "power.draw",
}


def host() -> str:
    """Processor model and number of processors: `AMD EPYC, 2 cpus`."""
    import os

    return f"{_processor()}, {os.cpu_count()} cpus"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def nvidia_smi(fields: dict[str, str]) -> dict[str, Any] | None:
    """The first GPU's values of `fields` (our key -> query name), numbers where they are; None without a GPU."""
    query = ["nvidia-smi", f"--query-gpu={','.join(fields.values())}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    words = [word.strip() for word in done.stdout.splitlines()[0].split(",")] if done.stdout.strip() else []
    return {key: _number(word) for key, word in zip(fields, words, strict=True)} if len(words) == len(fields) else None


def clocks() -> dict[str, Any] | None:
    """Clocks (MHz), throttle reasons (bit mask), temperature and power of the first NVIDIA GPU, or None."""
    return nvidia_smi(_CLOCKS)


def driver() -> str | None:
    """The NVIDIA driver's version, or None."""
    found = nvidia_smi({"driver": "driver_version"})
    return str(found["driver"]) if found else None


def _number(word: str) -> float | str | None:
    try:
        return float(word)
    except ValueError:
        return None if word.startswith("[") else word  # [N/A], [Not Supported]
