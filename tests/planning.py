"""Small worlds for the tests of the planning code: shapes, tables, and calibrations whose laws are known."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from moeplan.cost.model import Drivers, Estimate
from moeplan.engines.chain import Gate
from moeplan.planning.gates import Chain, Table
from moeplan.planning.prices import Assumption, mean_drivers
from moeplan.traffic.routing import Routing
from moeplan.traffic.shape import LayerShape, WeightFormat

AFFINE = WeightFormat.parse("affine4-g64")
TINY = LayerShape(256, 256, 16, 4, AFFINE, AFFINE, AFFINE)  # models/tiny-moe-4bit.toml
Law = Callable[[Drivers], float]


def shape(experts: int = 8, top_k: int = 2) -> LayerShape:
    return LayerShape(64, 64, experts, top_k, AFFINE, AFFINE, AFFINE)


def gate(name: str, variable: str, threshold: int | None, below: str, above: str) -> Gate:
    return Gate(name, variable, threshold, below, above, "test")  # type: ignore[arg-type]


def exact(seconds: float, wide: float = 0.0, source: str = "fitted") -> Estimate:
    return Estimate(seconds, seconds * (1 - wide), seconds * (1 + wide), source)


def table(rows: Mapping[int, tuple[float, Sequence[float | None]]], paths: Sequence[str], wide: float = 0.0) -> Table:
    """tokens -> (weight, seconds of each path)."""
    times = {
        path: tuple(None if row[i] is None else exact(row[i], wide) for _, row in rows.values())  # type: ignore[arg-type]
        for i, path in enumerate(paths)
    }
    return Table(tuple(rows), tuple(weight for weight, _ in rows.values()), times)


def two(threshold: int | None = 4, variable: str = "tokens") -> Chain:
    return Chain((gate("g", variable, threshold, "a", "b"),), shape())


def write_calibration(  # noqa: PLR0917
    folder: Path,
    device: str,
    runner: str,
    layer: LayerShape,
    laws: Mapping[str, Law],
    tokens: Sequence[int],
    jitter: float = 0.001,
) -> Path:
    """A journal whose layer times follow the laws, with uniform and identical arms and five rounds of jitter."""
    rng = np.random.default_rng(0)
    path = folder / device / f"{runner}-1.0" / "model.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {
        "type": "header", "schema": "moeplan.samples/1", "kind": "measured", "device": device, "engine": runner,
        "engine_version": "1.0", "driver": "d1", "host": "h1", "model": "model", "shape": layer.to_dict(),
        "device_reported": f"a {device}",
    }  # fmt: skip
    lines = [header]
    for routing, cohort in (("uniform", "independent"), ("identical", "identical")):
        assumption = Assumption(Routing("uniform"), cohort)  # type: ignore[arg-type]
        for name, law in laws.items():
            for count in tokens:
                drivers = mean_drivers(assumption, name, count, layer)
                arm = f"{name}/t{count}/{routing}"
                facts = {
                    "type": "arm", "arm": arm, "path": name, "tokens": count, "routing": routing, "seed": 0,
                    "chain": [4, 12], "slots": drivers.slots, "distinct": drivers.distinct,
                    "blocks": {"16": drivers.blocks, "32": drivers.blocks, "64": drivers.blocks},
                    "signature": f"kernel {name.replace(':', ' of ')}, grid {count}",
                    "config_hash": f"hash of {name}", "parity_rms": 0.001,
                }  # fmt: skip
                lines.append(facts)
                for round_ in range(5):
                    layer_s = law(drivers) * (1 + jitter * float(rng.standard_normal()))
                    times = {"short_s": 1e-5 + 4 * layer_s, "long_s": 1e-5 + 12 * layer_s}
                    lines.append({"type": "time", "arm": arm, "round": round_, **times})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
