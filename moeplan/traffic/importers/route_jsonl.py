"""Route loggers of engines: JSON lines of `{"type": "route", "req_id", "token_idx", "layer", "topk_ids", ...}`.

An optional first line `{"type": "meta", ...}` names the model. Loggers number the rows of a batch, so a token index
may come again: then a new pass begins, and its rows are rows of their own.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moeplan.traffic.importers.events import Events
from moeplan.traffic.importers.reading import CELL_LIMIT, LAYER_LIMIT, fail, id_list, json_lines, shown, whole
from moeplan.traffic.importers.record import Draft, Hints, Request, check_experts
from moeplan.traffic.trace import RoutingTrace

_TOKEN_LIMIT = 1 << 40
_META_EXPERTS = ("num_experts", "n_experts", "experts")


class _Rows:
    """Row numbers in order of first appearance; a token whose newest row has the layer already begins a new row."""

    def __init__(self) -> None:
        self.newest: dict[tuple[int, int], int] = {}
        self.layers: list[int] = []  # of each row, the layers it has as bits
        self.owner: list[int] = []
        self.requests: dict[object, int] = {}

    def of(self, request: object, token: int, layer: int) -> int:
        number = self.requests.setdefault(request, len(self.requests))
        row = self.newest.get((number, token))
        if row is None or self.layers[row] >> layer & 1:
            row = self.newest[number, token] = len(self.owner)
            self.owner.append(number)
            self.layers.append(0)
        self.layers[row] |= 1 << layer
        return row


def _meta(record: dict[str, Any], draft: Draft, where: str) -> None:
    model = record.get("model_id")
    draft.model = model[:200] if isinstance(model, str) else draft.model
    for key in _META_EXPERTS:
        if record.get(key) is not None:
            draft.experts = check_experts(whole(record[key], f"{where}: {key}", 1, CELL_LIMIT), where)


def read(paths: Sequence[Path], hints: Hints) -> RoutingTrace:
    """One or more logs; each `req_id` of each file is a request, rows in the order of their first event."""
    draft, rows, events = Draft("route-jsonl", paths, hints), _Rows(), Events(paths[0])
    for number, path in enumerate(paths):
        for where, record in json_lines(path):
            kind = record.get("type")
            if kind == "meta":
                _meta(record, draft, where)
                continue
            if kind != "route":
                raise fail(where, f"type = {shown(kind)}, expected meta or route")
            request = record.get("req_id", "")
            if not isinstance(request, str | int):
                raise fail(where, f"req_id = {shown(request)}, expected text or a number")
            token = whole(record.get("token_idx"), f"{where}: token_idx", 0, _TOKEN_LIMIT)
            layer = whole(record.get("layer"), f"{where}: layer", 0, LAYER_LIMIT - 1)
            events.add(rows.of((number, request), token, layer), layer, id_list(record.get("topk_ids"), where))
    ids, draft.layer_ids = events.dense(len(rows.owner))
    if len(rows.newest) < len(rows.owner):
        draft.notes.append("token_idx comes again within a request: rows of batches, requests cannot be told apart")
    if (ids < 0).any():
        draft.notes.append("tokens not logged in every layer: the gaps are padding")
    owner = np.array(rows.owner)
    order = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner))[:-1]
    return draft.finish([Request(part) for part in np.split(ids[order], ends)])
