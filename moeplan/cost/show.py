"""What a device's calibrations hold, as plain rows."""

from typing import Any

from moeplan.cost.calibrate import describe, journals, load_calibration, read_journal
from moeplan.cost.device import load_device
from moeplan.errors import MoeplanError
from moeplan.store import Store


def calibration_summary(store: Store, device: str) -> dict[str, Any]:
    """Rows of `calibrate show`: `paths` (one a timed point), `fits`, `failed` arms and notes; seconds, bytes.

    floor_s: distinct planes of the routing timed over the device's read bandwidth, None where that is unknown.
    Raises MoeplanError for an unknown device or one without journals.
    """
    facts = load_device(store, device)
    rate = facts.read_bandwidth
    paths, fits, failed, seen = [], [], [], set()
    for folder in store.folders("calibration"):
        for directory in sorted((folder / device).iterdir()) if (folder / device).is_dir() else []:
            if not directory.is_dir() or directory.name in seen:
                continue
            seen.add(directory.name)
            for journal in journals(directory):
                file = read_journal(journal, device)
                header = file.header
                common = {
                    "runner": header["engine"],
                    "engine_version": header["engine_version"],
                    "model": header.get("model", journal.stem),
                    "kind": header.get("kind", "measured"),
                }
                for sample in file.samples:
                    paths.append(
                        common
                        | {
                            "path": sample.path,
                            "format": sample.shape.format_name,
                            "shape": sample.shape.to_dict(),
                            "routing": sample.routing,
                            "tokens": sample.tokens,
                            "median_s": sample.median,
                            "spread_s": sample.spread,
                            "rounds": len(sample.long_s),
                            "floor_s": sample.distinct * sample.shape.plane_bytes / rate.value if rate else None,
                            "kernel_hash": sample.config_hash,
                            "signature": sample.signature,
                            "cache_resident": sample.cache_resident,
                            "parity_rms": sample.parity_rms,
                        }
                    )
                failed += [common | {"arm": arm, "reason": reason} for arm, reason in sorted(file.failed.items())]
                for shape in sorted({sample.shape for sample in file.samples}, key=describe):
                    found = load_calibration(store, device, directory.name, shape)
                    for fit in found.fits.values():
                        row = common | {"shape": shape.to_dict(), "holdout_mean": fit.holdout.mean}
                        fits.append(row | {"holdout_p90": fit.holdout.p90} | fit.to_dict())
    if not paths:
        raise MoeplanError(f"--device {device}: no calibration journal")
    notes = [f"floor_s uses {rate.value / 1e9:.0f} GB/s ({rate.kind}: {rate.source})"] if rate else []
    return {"device": device, "paths": paths, "fits": fits, "failed": failed, "notes": notes}
