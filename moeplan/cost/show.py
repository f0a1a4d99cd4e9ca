"""What a device's calibrations hold, as plain rows."""

from pathlib import Path
from typing import Any

from moeplan.cost.calibrate import describe, journals, load_calibration, read_journal
from moeplan.cost.device import load_device
from moeplan.cost.samples import Sample, SampleFile
from moeplan.errors import MoeplanError
from moeplan.store import Store
from moeplan.traffic.shape import LayerShape


def calibration_summary(store: Store, device: str) -> dict[str, Any]:
    """Rows of `calibrate show`: `paths` (one a timed point), `fits`, `failed` and `declined` arms, notes.

    floor_s: distinct planes of the routing timed over the device's read bandwidth, None where that is unknown.
    Raises MoeplanError for an unknown device or one without journals.
    """
    rate = load_device(store, device).read_bandwidth
    document: dict[str, Any] = {"device": device, "paths": [], "fits": [], "failed": [], "declined": [], "notes": []}
    for directory in _directories(store, device):
        shapes: set[LayerShape] = set()
        for file in [read_journal(path, device) for path in journals(directory)]:
            common = _labels(file)
            document["paths"] += [common | _point(sample, rate.value if rate else None) for sample in file.samples]
            for kind, arms in (("failed", file.failed), ("declined", file.declined)):
                document[kind] += [common | {"arm": arm, "reason": reason} for arm, reason in sorted(arms.items())]
            for shape in sorted({sample.shape for sample in file.samples} - shapes, key=describe):
                shapes.add(shape)
                for fit in load_calibration(store, device, directory.name, shape).fits.values():
                    row = fit.to_dict() | {"shape": shape.to_dict(), "format": shape.format_name}
                    held = {"holdout_mean": fit.holdout.mean, "holdout_p90": fit.holdout.p90}
                    document["fits"].append(common | row | held)
    if not document["paths"]:
        raise MoeplanError(f"--device {device}: no calibration journal")
    if rate:
        document["notes"].append(f"floor_s uses {rate.value / 1e9:.0f} GB/s ({rate.kind}: {rate.source})")
    return document


def _directories(store: Store, device: str) -> list[Path]:
    """Engine folders of a device; of two with one name the first in the store's order."""
    found: dict[str, Path] = {}
    for folder in store.folders("calibration"):
        for directory in sorted((folder / device).iterdir()) if (folder / device).is_dir() else []:
            if directory.is_dir():
                found.setdefault(directory.name, directory)
    return list(found.values())


def _labels(file: SampleFile) -> dict[str, Any]:
    return {
        "runner": file.header["engine"],
        "engine_version": file.header["engine_version"],
        "model": file.header.get("model", file.path.stem),
        "kind": file.header.get("kind", "measured"),
    }


def _point(sample: Sample, bandwidth: float | None) -> dict[str, Any]:
    return {
        "path": sample.path,
        "format": sample.shape.format_name,
        "shape": sample.shape.to_dict(),
        "routing": sample.routing,
        "seed": sample.seed,
        "tokens": sample.tokens,
        "median_s": sample.median,
        "spread_s": sample.spread,
        "rounds": len(sample.long_s),
        "floor_s": sample.distinct * sample.shape.plane_bytes / bandwidth if bandwidth else None,
        "kernel_hash": sample.config_hash,
        "signature": sample.signature,
        "cache_resident": sample.cache_resident,
        "parity_rms": sample.parity_rms,
    }
