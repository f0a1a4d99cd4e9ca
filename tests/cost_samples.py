"""Samples with a known law, for the tests of fits and calibrations."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from moeplan.cost.samples import Sample
from moeplan.traffic.shape import LayerShape, WeightFormat

EXPERTS, TOP_K = 128, 8
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def shape(name: str = "affine4-g64", hidden: int = 2048) -> LayerShape:
    stored = WeightFormat.parse(name)
    return LayerShape(hidden, 768, EXPERTS, TOP_K, stored, stored, stored)


def distinct(routing: str, tokens: int, experts: int = EXPERTS, top_k: int = TOP_K) -> float:
    if routing == "identical":
        return float(top_k)
    if routing in ("disjoint", "balanced"):
        return float(min(experts, top_k * tokens))
    return experts * (1 - (1 - top_k / experts) ** tokens)  # uniform


def sample(path: str, tokens: int, routing: str, layer_s: float, **more: Any) -> Sample:
    """One arm whose layer takes `layer_s` in every round, or times `wobble` [rounds]."""
    wobble = more.pop("wobble", (1.0,))
    fields: dict[str, Any] = {
        "arm": f"{path}/{tokens}/{routing}/{more.get('seed', 0)}",
        "path": path,
        "shape": shape(),
        "tokens": tokens,
        "routing": routing,
        "seed": 0,
        "chain": (12, 48),
        "slots": float(TOP_K * tokens),
        "distinct": distinct(routing, tokens),
        "blocks": {},
        "short_s": tuple(1e-4 + 12 * layer_s * factor for factor in wobble),
        "long_s": tuple(1e-4 + 48 * layer_s * factor for factor in wobble),
    }
    return Sample(**(fields | more))


def samples(
    law: Callable[[int, float, float], float],
    counts: Iterable[int] = COUNTS,
    routings: Iterable[str] = ("identical", "disjoint", "uniform"),
    noise: float = 0.0,
    seed: int = 0,
) -> list[Sample]:
    """Arms of path `gather` from law(tokens, distinct, slots) with log-normal noise on every arm."""
    rng = np.random.default_rng(seed)
    return [
        sample(
            "gather",
            tokens,
            routing,
            law(tokens, distinct(routing, tokens), TOP_K * tokens) * float(np.exp(noise * rng.standard_normal())),
        )
        for tokens in counts
        for routing in routings
    ]


def write_journal(path: Path, arms: Iterable[Sample], **header: Any) -> Path:
    """A journal as a calibration run leaves it."""
    found = list(arms)
    lines: list[dict[str, Any]] = [
        {
            "type": "header",
            "schema": "moeplan.samples/1",
            "device": "toy",
            "engine": "mlx",
            "engine_version": "1.0",
            "model": path.stem,
            "shape": found[0].shape.to_dict(),
        }
        | header
    ]
    for arm in found:
        keys = ("arm", "path", "tokens", "routing", "seed", "slots", "distinct", "cache_resident")
        row = {key: getattr(arm, key) for key in keys} | {"chain": list(arm.chain), "type": "arm"}
        lines.append(row | {"blocks": {str(rows): count for rows, count in arm.blocks.items()}})
        for short, long in zip(arm.short_s, arm.long_s, strict=True):
            lines.append({"type": "time", "arm": arm.arm, "short_s": short, "long_s": long})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line, sort_keys=True) + "\n" for line in lines))
    return path
