"""Calibrations on disk: find the one of a device, engine and shape; fit it; keep the fits beside it.

Layout: calibration/<device>/<engine>-<version>/<model>.jsonl, journals of cost/samples.py, and fits.json, which is
derived from them: it names the digest of every journal and is ignored (and fitted anew) where one has changed.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeplan.cost.device import Device, Fact, load_device, read_device
from moeplan.cost.fit import Fit, fit_path
from moeplan.cost.model import Drivers, Estimate
from moeplan.cost.samples import Sample, SampleFile, load
from moeplan.errors import MoeplanError
from moeplan.provenance import disagreements
from moeplan.store import Store, read_json, write_json
from moeplan.traffic.shape import LayerShape

SCHEMA = "moeplan.fits/1"


@dataclass(frozen=True, slots=True)
class Calibration:
    """What is known about one engine version on one device for one layer shape.

    header: of the first journal. unfitted: path -> why there is no fit (its measured points still answer).
    """

    device: Device
    engine: str
    engine_version: str
    directory: Path
    shape: LayerShape
    header: Mapping[str, Any]
    samples: tuple[Sample, ...]
    fits: Mapping[str, Fit]
    unfitted: Mapping[str, str]

    @property
    def paths(self) -> list[str]:
        """Every path that was timed, sorted."""
        return sorted({sample.path for sample in self.samples})

    @property
    def where(self) -> str:
        """`m1-ultra/mlx-0.32.2`."""
        return f"{self.device.name}/{self.directory.name}"

    def estimate(self, path: str, drivers: Drivers, extrapolate: bool = False) -> Estimate:
        """Fitted seconds of one layer. Raises MoeplanError for a path without a fit, or outside its range."""
        if path in self.unfitted:
            raise MoeplanError(f"calibration {self.where}: no fit of path {path}: {self.unfitted[path]}")
        if path not in self.fits:
            raise MoeplanError(f"calibration {self.where}: path {path} was not timed (timed: {', '.join(self.paths)})")
        return self.fits[path].estimate(drivers, extrapolate)

    def measured(self, path: str, tokens: int, routing: str) -> Estimate | None:
        """The timed point itself, or None where that was not timed (or only with its weights in the cache).

        Median of all rounds of all seeds with their 5..95 % range. Below four rounds, as in a published table, there
        is no such range and the band is that of the path's fit.
        """
        found = [
            sample
            for sample in self.samples
            if (sample.path, sample.tokens, sample.routing) == (path, tokens, routing) and not sample.cache_resident
        ]
        if not found:
            return None
        import numpy as np

        values = np.array([value for sample in found for value in sample.layer_seconds()])
        low, middle, high = (float(value) for value in np.quantile(values, [0.05, 0.5, 0.95]))
        if not (0 < middle < float("inf")):
            return None  # timer noise larger than the layer is no time
        low = max(low, 0.0)
        if len(values) < 4 and path in self.fits:
            band = self.fits[path].band_at(tokens)
            low, high = min(low, middle * (1 + band[0])), max(high, middle * (1 + band[1]))
        return Estimate(middle, low, high, found[0].kind)


def load_calibration(store: Store, device: str, engine: str, shape: LayerShape) -> Calibration:
    """The calibration of that engine on that device for a layer of equal shape.

    engine: `mlx` takes the newest version that has the shape, `mlx-0.32.2` that one. Folders are searched in the
    store's order. Raises MoeplanError: unknown device or engine, no such shape (both list what there is), a header
    that names another device than its folder, journals of one folder that disagree in what must agree.
    """
    facts = load_device(store, device)
    there: list[str] = []
    engines: set[str] = set()
    for folder in store.folders("calibration"):
        versions = [d for d in (folder / device).iterdir() if d.is_dir()] if (folder / device).is_dir() else []
        for directory in sorted(versions, key=_version, reverse=True):
            files = [read_journal(path, device) for path in journals(directory)]
            engines.update(str(file.header["engine"]) for file in files)
            files = [file for file in files if engine in (file.header["engine"], directory.name)]
            matching = [file for file in files if any(sample.shape == shape for sample in file.samples)]
            if matching:
                return _calibration(facts, directory, matching, shape)
            there += [f"{directory.name} {describe(s)}" for s in _shapes(files)]
    if there:
        raise MoeplanError(
            f"--device {device}: no {engine} calibration of {describe(shape)} (there are: {'; '.join(there)})"
        )
    known = ", ".join(sorted(engines)) or "none"
    raise MoeplanError(f"--device {device}: no calibration of engine {engine} (engines: {known})")


def engines_of(store: Store, device: str) -> list[str]:
    """Names under which something is calibrated on that device, sorted. Raises MoeplanError for an unknown device."""
    load_device(store, device)
    found: set[str] = set()
    for folder in store.folders("calibration"):
        for directory in sorted((folder / device).iterdir()) if (folder / device).is_dir() else []:
            found.update(str(read_journal(path, device).header["engine"]) for path in journals(directory))
    return sorted(found)


def write_fits(directory: Path) -> Path:
    """Fit every journal of a folder and write fits.json; the same journals give the same bytes.

    Raises MoeplanError where there is no journal or one is malformed.
    """
    files = [read_journal(path) for path in journals(directory)]
    if not files:
        raise MoeplanError(f"{directory}: no calibration journal (*.jsonl) here")
    bandwidth = _bandwidth(directory)
    fits, unfitted = [], []
    for shape in _shapes(files):
        found, missing = fit_all(_samples(files, shape), bandwidth)
        models = sorted({str(file.header.get("model", file.path.stem)) for file in files if shape in _shapes([file])})
        fits += [{"shape": shape.to_dict(), "models": models} | fit.to_dict() for fit in found.values()]
        unfitted += [{"shape": shape.to_dict(), "path": path, "reason": reason} for path, reason in missing.items()]
    document = {"schema": SCHEMA, "sources": _digests(directory), "fits": fits, "unfitted": unfitted}
    write_json(directory / "fits.json", document)
    return directory / "fits.json"


def fit_all(samples: tuple[Sample, ...], bandwidth: float | None = None) -> tuple[dict[str, Fit], dict[str, str]]:
    """(path -> fit, path -> why there is none) of the samples of one shape."""
    fits: dict[str, Fit] = {}
    missing: dict[str, str] = {}
    for path in sorted({sample.path for sample in samples}):
        try:
            fits[path] = fit_path([sample for sample in samples if sample.path == path], bandwidth)
        except MoeplanError as bad:
            missing[path] = str(bad)
    return fits, missing


def journals(directory: Path) -> list[Path]:
    """The sample journals of a folder, sorted by name."""
    return sorted(directory.glob("*.jsonl"))


def read_journal(path: Path, device: str | None = None) -> SampleFile:
    """Read a journal; raises MoeplanError where it lacks device or engine, or names another device than asked."""
    file = load(path)
    for key in ("device", "engine", "engine_version"):
        if key not in file.header:
            raise MoeplanError(f"{path}: header: {key} is missing")
    if device is not None and file.header["device"] != device:
        raise MoeplanError(f"{path}: header: device {file.header['device']!r} is not the folder's device {device!r}")
    return file


def describe(shape: LayerShape) -> str:
    """`128x8 experts, 2048x768, affine4-g64, swiglu`."""
    size = f"{shape.experts}x{shape.top_k} experts, {shape.hidden}x{shape.expert_hidden}"
    return f"{size}, {shape.format_name}, {shape.activation}"


def _calibration(facts: Device, directory: Path, files: list[SampleFile], shape: LayerShape) -> Calibration:
    samples = _samples(files, shape)
    stored = _stored(directory, shape)
    rate = facts.read_bandwidth
    fits, missing = stored if stored else fit_all(samples, rate.value if rate else None)
    header = files[0].header
    return Calibration(
        facts, str(header["engine"]), str(header["engine_version"]), directory, shape, header, samples, fits, missing
    )


def _samples(files: list[SampleFile], shape: LayerShape) -> tuple[Sample, ...]:
    used = [file for file in files if any(sample.shape == shape for sample in file.samples)]
    for other in used[1:]:
        if wrong := disagreements(used[0].header, other.header):
            raise MoeplanError(f"{other.path}: does not go with {used[0].path.name}: {wrong[0]}")
    return tuple(sample for file in used for sample in file.samples if sample.shape == shape)


def _shapes(files: list[SampleFile]) -> list[LayerShape]:
    return sorted({sample.shape for file in files for sample in file.samples}, key=lambda s: json.dumps(s.to_dict()))


def _stored(directory: Path, shape: LayerShape) -> tuple[dict[str, Fit], dict[str, str]] | None:
    path = directory / "fits.json"
    if not path.is_file():
        return None
    document = read_json(path)
    try:
        if document["schema"] != SCHEMA or document["sources"] != _digests(directory):
            return None
        fits = [Fit.from_dict(row) for row in document["fits"] if row["shape"] == shape.to_dict()]
        missing = {row["path"]: row["reason"] for row in document["unfitted"] if row["shape"] == shape.to_dict()}
    except (KeyError, TypeError, IndexError) as bad:
        raise MoeplanError(f"{path}: malformed: {bad!r}; run `moeplan calibrate fit {directory}`") from bad
    return {fit.path: fit for fit in fits}, missing


def _digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in journals(directory)}


def _bandwidth(directory: Path) -> float | None:
    path = directory.resolve().parent / "device.toml"
    fact: Fact | None = read_device(path).read_bandwidth if path.is_file() else None
    return fact.value if fact else None


def _version(directory: Path) -> tuple[tuple[int, str], ...]:
    """Sort key of `mlx-0.32.10` that puts 10 after 9."""
    parts = directory.name.replace("-", ".").replace("+", ".").split(".")
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in parts)
