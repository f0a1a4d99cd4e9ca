"""From arrays and a header, both untrusted, to a routing trace."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from moeplan.errors import MoeplanError
from moeplan.traffic.arrays import read_rows
from moeplan.traffic.trace import CHUNK_BYTES, EXPERT_LIMIT, Ids, IdSpace, Order, RoutingTrace


def whole(path: Path, arrays: Mapping[str, npt.NDArray[Any]], about: Mapping[str, Any]) -> RoutingTrace:
    """A trace from its arrays and what its header says (`experts, name, id_space, order, domains, provenance`).

    Raises MoeplanError naming file, field and value.
    """
    ids, edges = _kinds(path, arrays), arrays["request_offsets"]
    if 0 in ids.shape:
        raise MoeplanError(f"{path}: expert_ids is empty: shape {ids.shape}")
    if ids.nbytes // len(ids) > CHUNK_BYTES:
        raise MoeplanError(f"{path}: expert_ids has rows of more than {CHUNK_BYTES} bytes: shape {ids.shape}")
    experts = about["experts"]
    if experts > EXPERT_LIMIT:
        raise MoeplanError(f"{path}: num_experts = {experts}, at most {EXPERT_LIMIT}")
    if not 0 < ids.shape[2] <= experts:
        raise MoeplanError(f"{path}: num_experts = {experts} with {ids.shape[2]} slots a token")
    offsets = edges.astype(np.int64)
    if offsets.size < 2 or offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) < 0).any():
        raise MoeplanError(f"{path}: request_offsets must rise from 0 to {len(ids)}, found {_ends(offsets)}")
    sizes = {"layer_ids": ids.shape[1], "phase": len(ids), "request_tokens": offsets.size - 1}
    for key, size in sizes.items():
        if key in arrays and len(arrays[key]) != size:
            raise MoeplanError(f"{path}: {key} has {len(arrays[key])} entries, expected {size}")
    _words(path, about)
    phase = arrays.get("phase")
    _phases(path, phase)
    layer_ids = np.asarray(arrays.get("layer_ids", np.arange(ids.shape[1])), dtype=np.int64)
    if np.unique(layer_ids).size != layer_ids.size or (layer_ids < 0).any():
        raise MoeplanError(f"{path}: layer_ids must be different and not negative")
    tokens = arrays.get("request_tokens")
    return RoutingTrace(
        expert_ids=ids,
        request_offsets=offsets,
        experts=experts,
        layer_ids=layer_ids,
        phase=None if phase is None else phase.astype(np.uint8, copy=False),
        domains=about.get("domains"),
        id_space=cast(IdSpace, about["id_space"]),
        order=cast(Order, about["order"]),
        provenance=about.get("provenance") or {},
        name=about["name"],
        request_tokens=None if tokens is None else tokens.astype(np.int64),
        source=str(path),
    )


def _kinds(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> Ids:
    expected = {"expert_ids": 3, "request_offsets": 1, "layer_ids": 1, "phase": 1, "request_tokens": 1}
    for key, axes in expected.items():
        array = arrays.get(key)
        if array is not None and array.ndim != axes:
            raise MoeplanError(f"{path}: {key} has {array.ndim} axes, expected {axes}")
        if array is not None and array.dtype.kind not in "iu":
            raise MoeplanError(f"{path}: {key} holds {array.dtype}, expected integers")
    return arrays["expert_ids"]


def _words(path: Path, about: Mapping[str, Any]) -> None:
    for key, words in (("id_space", ("logical", "physical")), ("order", ("ranked", "set"))):
        if about[key] not in words:
            raise MoeplanError(f"{path}: {key} = {str(about[key])[:40]!r}, expected {words[0]} or {words[1]}")


def _phases(path: Path, phase: npt.NDArray[np.integer] | None) -> None:
    for first in range(0, 0 if phase is None else len(phase), CHUNK_BYTES):
        part = read_rows(cast(Ids, phase), first, first + CHUNK_BYTES)
        if int(part.min()) < 0 or int(part.max()) > 1:
            raise MoeplanError(f"{path}: phase must be 0 (prefill) or 1 (decode)")


def meta_of(text: str, requests: int) -> tuple[dict[str, Any], tuple[str, ...] | None]:
    """Provenance and domains from an npz's `meta_json`: an object, or a list of one object a request.

    Of such a list the labels `domain`, else `dataset`, else `category`, are kept where every request has one.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}, None
    if isinstance(found, dict):
        return found, None
    if isinstance(found, list) and len(found) == requests:
        for key in ("domain", "dataset", "category"):
            labels = [one.get(key) if isinstance(one, dict) else None for one in found]
            if all(isinstance(label, str) for label in labels):
                return {}, tuple(cast(list[str], labels))
    return {}, None


def _ends(edges: npt.NDArray[np.int64]) -> str:
    return f"{edges.size} entries" + (f" from {edges[0]} to {edges[-1]}" if edges.size else "")
