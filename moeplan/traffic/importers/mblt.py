"""MBLT: little-endian int32 words. Magic, version 1, experts, then records `layer, k, n_tokens, ids[n_tokens * k]`.

Records follow the graph, so layers rise within a pass. llama.cpp computes only the output rows of the last layer:
they are the last rows of their pass, the others are padding there. The tail may be cut: an unfinished pass is left
out and noted. A prompt may take several passes; a pass of several tokens after a decode pass begins a new request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moeplan.traffic.importers.reading import CELL_LIMIT, LAYER_LIMIT, TOP_K_LIMIT, Ids, as_ids, fail, file_size
from moeplan.traffic.importers.record import Draft, Hints, Request, check_experts
from moeplan.traffic.trace import RoutingTrace

MAGIC = 0x544C424D  # "MBLT"
_HEADER, _RECORD = 3, 3


@dataclass(slots=True)
class _Pass:
    layers: list[int]
    parts: list[Ids]

    @property
    def tokens(self) -> int:
        return max(len(part) for part in self.parts)


def _words(path: Path) -> tuple[npt.NDArray[np.int32], int]:
    size = file_size(path)
    if size < 4 * _HEADER:
        raise fail(path, f"{size} bytes, too short for an MBLT header")
    words = np.memmap(path, "<i4", "r", shape=(size // 4,))
    if int(words[0]) != MAGIC or int(words[1]) != 1:
        raise fail(path, f"magic {int(words[0]):#x}, version {int(words[1])}, expected {MAGIC:#x}, 1")
    return words, size % 4


def _passes(path: Path) -> tuple[list[_Pass], int, bool]:
    """(passes, experts, whether the tail is cut)."""
    words, odd = _words(path)
    experts = check_experts(int(words[2]), f"{path}: n_expert")
    passes: list[_Pass] = []
    at, cells = _HEADER, 0
    while at + _RECORD <= len(words):
        layer, top_k, tokens = (int(word) for word in words[at : at + _RECORD])
        where = f"{path}: word {at}"
        if not (0 <= layer < LAYER_LIMIT and 0 < top_k <= min(TOP_K_LIMIT, experts) and 0 < tokens <= CELL_LIMIT):
            raise fail(where, f"layer {layer}, k {top_k}, n_tokens {tokens} are no record of {experts} experts")
        end = at + _RECORD + tokens * top_k
        if end > len(words):
            break
        cells += tokens * top_k + 64  # 64: the Python objects that hold a record
        if cells > CELL_LIMIT:
            raise fail(path, f"more than {CELL_LIMIT} expert ids")
        ids = as_ids(np.asarray(words[at + _RECORD : end]), where).reshape(tokens, top_k)
        if not passes or layer <= passes[-1].layers[-1]:
            passes.append(_Pass([], []))
        passes[-1].layers.append(layer)
        passes[-1].parts.append(ids)
        at = end
    return passes, experts, at < len(words) or odd > 0


def _table(one: _Pass, top_k: int, path: Path) -> Ids:
    """[tokens, layers, k] of a pass; a layer with fewer rows has the last ones."""
    ids = np.full((one.tokens, len(one.parts), top_k), -1, dtype=np.int32)
    for column, part in enumerate(one.parts):
        if part.shape[1] != top_k or (len(part) < one.tokens and column + 1 < len(one.parts)):
            raise fail(path, f"layer {one.layers[column]}: {part.shape} beside {one.tokens} tokens of top-{top_k}")
        ids[one.tokens - len(part) :, column] = part
    return ids


def _requests(passes: Sequence[_Pass], top_k: int, path: Path) -> list[Request]:
    groups: list[list[_Pass]] = []
    decoded = True
    for one in passes:
        if (one.tokens > 1 and decoded) or not groups:
            groups.append([])
        decoded = one.tokens == 1
        groups[-1].append(one)
    if sum(one.tokens * len(one.parts) * top_k for one in passes) > CELL_LIMIT:
        raise fail(path, f"more than {CELL_LIMIT} expert ids")
    return [
        Request(
            np.concatenate([_table(one, top_k, path) for one in group]),
            np.concatenate([np.full(one.tokens, one.tokens == 1, dtype=np.uint8) for one in group]),
        )
        for group in groups
    ]


def read(paths: Sequence[Path], hints: Hints) -> RoutingTrace:
    """One or more logs of the same model."""
    draft, requests = Draft("mblt", paths, hints), []
    for path in paths:
        passes, experts, cut = _passes(path)
        if passes and len(passes[-1].layers) < len(passes[0].layers):
            passes, cut = passes[:-1], True
        if not passes:
            raise fail(path, "holds no complete pass")
        layers = passes[0].layers
        if any(one.layers != layers for one in passes) or draft.layer_ids not in (None, layers):
            raise fail(path, "passes disagree on the layers")
        if draft.experts not in (None, experts):
            raise fail(path, f"n_expert = {experts}, another file has {draft.experts}")
        draft.layer_ids, draft.experts = layers, experts
        if cut:
            draft.notes.append(f"{path.name}: the tail is cut, its unfinished pass is left out")
        requests += _requests(passes, passes[0].parts[0].shape[1], path)
    return draft.finish(requests)
