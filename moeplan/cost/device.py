"""Facts of a device, each with its kind and its source, from calibration/<device>/device.toml.

    name = "h200"
    title = "NVIDIA H200"
    [read_bandwidth]            # bytes a second that a copy or read kernel reached
    value = 4.2e12
    kind = "measured"
    source = "anchor kernel of calibration/h200/..."
    [last_level_cache]          # bytes
    ...

A fact is any table with `value`, `kind` and `source`; `read_bandwidth` is the one that this module knows by name.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moeplan.errors import MoeplanError
from moeplan.store import Store

_KINDS = ("measured", "published", "assumed")


@dataclass(frozen=True, slots=True)
class Fact:
    """A figure in plain units (bytes, seconds, counts) and where it comes from."""

    value: float
    kind: str
    source: str


@dataclass(frozen=True, slots=True)
class Device:
    """name: the folder under calibration/. facts: by key, as in the file. generation: `gfx950`, `sm_90`,
    `apple-m1`, or empty."""

    name: str
    title: str
    facts: Mapping[str, Fact]
    generation: str = ""

    @property
    def read_bandwidth(self) -> Fact | None:
        """Bytes a second; None where nobody measured or published it."""
        return self.facts.get("read_bandwidth")


def load_device(store: Store, name: str) -> Device:
    """Read calibration/<name>/device.toml. Raises MoeplanError for an unknown device, listing the known ones."""
    for folder in store.folders("calibration"):
        if (folder / name / "device.toml").is_file():
            return read_device(folder / name / "device.toml")
    if store.find("calibration", name):
        return Device(name, name, {})
    raise MoeplanError(f"--device {name}: no such device (known: {', '.join(devices(store)) or 'none'})")


def devices(store: Store) -> list[str]:
    """Names of all folders under calibration/, sorted."""
    return sorted({path.name for folder in store.folders("calibration") for path in folder.iterdir() if path.is_dir()})


def read_device(path: Path) -> Device:
    """Raises MoeplanError naming the file, the field and the value that is wrong."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as bad:
        raise MoeplanError(f"{path}: {bad}") from bad
    name = data.get("name")
    if name != path.parent.name:
        raise MoeplanError(f"{path}: name {name!r} is not the folder's name {path.parent.name!r}")
    facts = {key: _fact(path, key, table) for key, table in data.items() if isinstance(table, dict)}
    return Device(name, str(data.get("title", name)), facts, str(data.get("generation", "")))


def _fact(path: Path, key: str, table: Mapping[str, object]) -> Fact:
    value, kind, source = table.get("value"), table.get("kind"), table.get("source")
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise MoeplanError(f"{path}: {key}.value {value!r} is not a positive number")
    if kind not in _KINDS:
        raise MoeplanError(f"{path}: {key}.kind {kind!r} is none of {', '.join(_KINDS)}")
    if not isinstance(source, str) or not source:
        raise MoeplanError(f"{path}: {key}.source is missing")
    return Fact(float(value), str(kind), source)
