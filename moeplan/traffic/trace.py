"""A routing trace: which experts each token of each layer really took. Files are never unpickled."""

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moeplan.errors import MoeplanError

_BROKEN = (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError)


@dataclass(frozen=True, slots=True, eq=False)
class RoutingTrace:
    """expert_ids: integer [tokens, layers, top_k], -1 = padding; request r owns rows offsets[r]:offsets[r + 1]."""

    expert_ids: npt.NDArray[np.integer]
    request_offsets: npt.NDArray[np.int64]
    experts: int
    source: str

    @property
    def layers(self) -> int:
        """MoE layers recorded."""
        return int(self.expert_ids.shape[1])

    @property
    def top_k(self) -> int:
        """Slots a token."""
        return int(self.expert_ids.shape[2])

    @property
    def requests(self) -> int:
        """Requests with at least one row."""
        return int(np.count_nonzero(np.diff(self.request_offsets)))


def load_arrays(path: Path, keys: tuple[str, ...]) -> dict[str, npt.NDArray[Any]]:
    """The named arrays of an npz file, read without pickle.

    Raises MoeplanError naming the file and the key: missing, truncated, not an npz, an array of objects.
    """
    if not path.is_file():
        raise MoeplanError(f"{path}: no such file")
    found: dict[str, npt.NDArray[Any]] = {}
    key = "archive"
    try:
        with zipfile.ZipFile(path) as archive:
            present = {name.removesuffix(".npy") for name in archive.namelist()}
        for key in keys:
            if key not in present:
                raise MoeplanError(f"{path}: no array {key!r} (found {', '.join(sorted(present)) or 'none'})")
        with np.load(path, allow_pickle=False) as arrays:
            for key in keys:
                found[key] = arrays[key]
    except _BROKEN as bad:
        reason = " ".join(str(bad).split()) or type(bad).__name__
        raise MoeplanError(f"{path}: {key}: not a readable npz: {reason}") from bad
    return found


def load_trace(path: Path) -> RoutingTrace:
    """Read the canonical npz: `expert_ids [T, L, k]`, `request_offsets [R + 1]`, `num_experts`.

    Raises MoeplanError naming file, field and value for a missing key, wrong dimensions or types, an id outside
    -1..num_experts-1, and offsets that do not run from 0 up to T.
    """
    arrays = load_arrays(path, ("expert_ids", "request_offsets", "num_experts"))
    ids, offsets, number = (arrays[key] for key in ("expert_ids", "request_offsets", "num_experts"))
    for key, array, axes in (("expert_ids", ids, 3), ("request_offsets", offsets, 1), ("num_experts", number, 0)):
        if array.ndim != axes:
            raise MoeplanError(f"{path}: {key} has {array.ndim} axes, expected {axes}")
        if not np.issubdtype(array.dtype, np.integer):
            raise MoeplanError(f"{path}: {key} holds {array.dtype}, expected integers")
    if 0 in ids.shape:
        raise MoeplanError(f"{path}: expert_ids is empty: shape {ids.shape}")
    experts = int(number)
    if not 0 < ids.shape[2] <= experts:
        raise MoeplanError(f"{path}: num_experts = {experts} with {ids.shape[2]} slots a token")
    wrong = (ids >= experts) | (ids < -1) if ids.dtype.kind == "i" else ids >= experts
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise MoeplanError(f"{path}: expert_ids{list(at)} = {ids[at]} is outside -1..{experts - 1}")
    edges = offsets.astype(np.int64)
    if edges.size < 2 or edges[0] != 0 or edges[-1] != len(ids) or (np.diff(edges) < 0).any():
        raise MoeplanError(f"{path}: request_offsets must rise from 0 to {len(ids)}, found {_ends(edges)}")
    return RoutingTrace(ids, edges, experts, str(path))


def _ends(edges: npt.NDArray[np.int64]) -> str:
    return f"{edges.size} entries" + (f" from {edges[0]} to {edges[-1]}" if edges.size else "")
