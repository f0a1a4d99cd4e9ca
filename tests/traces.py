"""Traces that are clean, and the ways to spoil them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moeplan.traffic.trace import RoutingTrace

SHAPES = [(8, 1), (8, 2), (32, 4), (60, 4), (60, 6), (128, 8), (257, 8), (512, 10)]
"""(experts, top_k), the six expert counts and six top-k of the acceptance."""

SIZES = (150, 1, 40, 300, 7, 200, 2, 100)


def clean(experts: int, top_k: int, layers: int = 3, seed: int = 0, sizes: tuple[int, ...] = SIZES) -> RoutingTrace:
    """Skewed routing with a memory: a third of the rows of a layer keep most of their experts."""
    rng = np.random.default_rng([experts, top_k, layers, seed])
    rows = sum(sizes)
    heat = rng.gumbel(size=(rows, layers, experts)) + rng.normal(size=(layers, experts))
    noise = rng.gumbel(size=(rows, layers, experts))
    for row in range(1, rows):
        sticky = rng.random(layers) < 1 / 3
        heat[row, sticky] = heat[row - 1, sticky] + 0.3 * noise[row, sticky]
    ids = np.argsort(-heat, axis=2)[:, :, :top_k]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    phase = np.concatenate([np.arange(n) >= n // 3 for n in sizes]).astype(np.uint8)
    narrow = ids.astype(np.uint8 if experts <= 256 else np.uint16)
    return RoutingTrace(narrow, offsets, experts, phase=phase, order="ranked", name=f"clean-{experts}-{top_k}")


def with_ids(trace: RoutingTrace, ids: npt.NDArray[np.integer], **change: object) -> RoutingTrace:
    """The same trace with other ids of as many rows."""
    return replace(trace, expert_ids=ids, **change)  # type: ignore[arg-type]


def signed(trace: RoutingTrace) -> npt.NDArray[np.int16]:
    """A copy of the ids that can hold -1."""
    return trace.expert_ids.astype(np.int16)


def prepend(trace: RoutingTrace, ids: npt.NDArray[np.integer]) -> RoutingTrace:
    """Rows in front, as part of the first request."""
    offsets = trace.request_offsets + len(ids)
    offsets[0] = 0
    whole = np.concatenate([ids.astype(trace.expert_ids.dtype), trace.expert_ids])
    phase = None if trace.phase is None else np.concatenate([np.zeros(len(ids), np.uint8), trace.phase])
    return replace(trace, expert_ids=whole, request_offsets=offsets, phase=phase)


def save_npz(trace: RoutingTrace, path: Path, **more: object) -> Path:
    """The npz layout."""
    arrays: dict[str, object] = {
        "expert_ids": trace.expert_ids,
        "request_offsets": trace.request_offsets,
        "num_experts": trace.experts,
        "layer_ids": trace.layer_ids,
    }
    np.savez_compressed(path, **{key: np.asarray(value) for key, value in (arrays | more).items()})
    return path
