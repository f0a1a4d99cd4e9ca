"""A routing trace: which experts each token of each layer really took. Files are never unpickled.

Layouts: docs/trace-format.md. `open_trace` accepts what has the right structure; `load_trace` also reads every id.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from moeplan.errors import MoeplanError
from moeplan.traffic.arrays import load_arrays, read_rows

__all__ = ["IdSpace", "Order", "RoutingTrace", "load_arrays", "load_trace", "open_trace", "save_trace"]

IdSpace = Literal["logical", "physical"]
Order = Literal["ranked", "set"]
Ids = npt.NDArray[np.integer]

CHUNK_BYTES = 1 << 24
"""Bytes of expert ids read at once."""


EXPERT_LIMIT = 1 << 20
"""Far above any model: a header with more is wrong."""


@dataclass(frozen=True, slots=True, eq=False)
class RoutingTrace:
    """Request r owns rows request_offsets[r]:request_offsets[r + 1].

    expert_ids: integer [tokens, layers, top_k], an array or a memory map, -1 = padding; layer_ids int64 [layers],
    the model's layer numbers (default 0, 1, ...); phase uint8 [tokens], 0 prefill, 1 decode, or None; domains: one
    label a request, or None; order of the slots: `ranked` by weight or a `set`; request_tokens int64 [requests]: the
    tokens that went through the layers, where known; source: what errors name (default: name).
    """

    expert_ids: Ids
    request_offsets: npt.NDArray[np.int64]
    experts: int
    layer_ids: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    phase: npt.NDArray[np.uint8] | None = None
    domains: tuple[str, ...] | None = None
    id_space: IdSpace = "logical"
    order: Order = "set"
    provenance: Mapping[str, Any] = field(default_factory=dict)
    name: str = "trace"
    request_tokens: npt.NDArray[np.int64] | None = None
    source: str = ""

    def __post_init__(self) -> None:
        """Fill in the layer numbers and the source where they were left out."""
        if not self.layer_ids.size:
            object.__setattr__(self, "layer_ids", np.arange(self.expert_ids.shape[1], dtype=np.int64))
        if not self.source:
            object.__setattr__(self, "source", self.name)

    @property
    def rows(self) -> int:
        """Rows: one a token."""
        return len(self.expert_ids)

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

    def chunks(self, size: int = CHUNK_BYTES) -> Iterator[tuple[int, Ids]]:
        """(first row, ids [rows, layers, top_k]) in order, about `size` bytes each: memory does not grow with rows."""
        each = max(1, size // max(1, self.layers * self.top_k * self.expert_ids.dtype.itemsize))
        for first in range(0, self.rows, each):
            yield first, read_rows(self.expert_ids, first, first + each)


def load_trace(path: Path) -> RoutingTrace:
    """Read a canonical directory (ids stay in their file) or npz, and every id in it.

    Raises MoeplanError naming file, field and value: see `open_trace`; also an id outside -1..experts-1.
    """
    trace = open_trace(path)
    for first, ids in trace.chunks():
        if (ids.dtype.kind == "u" or int(ids.min()) >= -1) and int(ids.max()) < trace.experts:
            continue
        wrong = (ids >= trace.experts) | (ids < -1) if ids.dtype.kind == "i" else ids >= trace.experts
        row, layer, slot = (int(i) for i in np.argwhere(wrong)[0])
        where = [first + row, layer, slot]
        raise MoeplanError(f"{path}: expert_ids{where} = {ids[row, layer, slot]} is outside -1..{trace.experts - 1}")
    return trace


def open_trace(path: Path) -> RoutingTrace:
    """Read a canonical directory or npz without looking at the ids.

    Raises MoeplanError naming file, field and value: missing or unreadable arrays, wrong dimensions, types or
    lengths, no rows, request offsets that do not rise from 0 to the number of rows, an unknown version.
    """
    from moeplan.traffic import trace_files

    return trace_files.read_folder(path) if path.is_dir() else trace_files.read_npz(path)


def save_trace(trace: RoutingTrace, folder: Path) -> None:
    """Write the canonical directory: to a temporary name beside it, then renamed.

    Raises MoeplanError where the folder exists or cannot be written.
    """
    from moeplan.traffic import trace_files

    trace_files.write_folder(trace, folder)
