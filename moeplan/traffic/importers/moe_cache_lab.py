"""moe-cache-lab.routing-jsonl, versions 1 and 2: one request a file, closed records, order checked, never repaired.

Version 2 tells encoder from decoder; the decoder's events are imported, since batching concerns decoding.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moeplan.traffic.importers.events import Events
from moeplan.traffic.importers.reading import EXPERT_LIMIT, LAYER_LIMIT, fail, id_list, json_lines, shown, whole
from moeplan.traffic.importers.record import Draft, Hints, Request
from moeplan.traffic.trace import RoutingTrace

FORMAT = "moe-cache-lab.routing-jsonl"
_TEXTS = {"source_text", "generated_text", "capture_method", "created_at", "transformers_version", "model_revision"}
_META = {"record_type", "format", "format_version", "model_id", *_TEXTS}
_EVENT = {"record_type", "phase", "token_position", "layer", "selected_experts", "selected_probabilities", "token_id"}
_META_OF = {1: _META | {"num_experts", "experts_per_token"}, 2: _META | {"routing_stages"}}
_EVENT_OF = {1: _EVENT, 2: _EVENT | {"routing_stage", "assignment_state", "unassigned_reason"}}
_PROFILE = {"routing_stage", "num_experts", "assigned_experts_per_token", "allows_unassigned"}
_PHASES = {"prompt": 0, "generated": 1, "decoder_prompt": 0, "decoder_generated": 1}


def _closed(record: dict[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(record) - known)
    if unknown:
        raise fail(where, f"unknown field {shown(unknown[0])}")


class _File:
    """One file: its version, what the metadata promise, and the order its events must keep."""

    def __init__(self, record: dict[str, Any], where: str) -> None:
        version = record.get("format_version")
        if record.get("record_type") != "metadata" or record.get("format") != FORMAT:
            raise fail(where, f"the first record is not the metadata of {FORMAT}")
        if type(version) is not int or version not in _META_OF:
            raise fail(where, f"format_version = {shown(version)}, expected 1 or 2")
        _closed(record, _META_OF[version], where)
        self.version, self.where = version, where
        model = record.get("model_id")
        if not isinstance(model, str) or not model:
            raise fail(where, f"model_id = {shown(model)}, expected text")
        self.model = model[:200]
        profile = record if version == 1 else self._decoder(record.get("routing_stages"))
        width = "experts_per_token" if version == 1 else "assigned_experts_per_token"
        self.experts = self._optional(profile, "num_experts", EXPERT_LIMIT)
        self.top_k = self._optional(profile, width, EXPERT_LIMIT)
        self.drops = profile.get("allows_unassigned") is True
        self.last: tuple[int, int, int] = (-1, -1, -1)
        self.prompt_end = -1
        self.encoder = 0
        self.tokens: dict[int, tuple[int, int]] = {}  # position -> (row, phase)

    def _decoder(self, stages: object) -> dict[str, Any]:
        found = [one for one in stages if isinstance(one, dict)] if isinstance(stages, list) else []
        for one in found:
            _closed(one, _PROFILE, f"{self.where}: routing_stages")
        decoder = [one for one in found if one.get("routing_stage") == "decoder"]
        if len(decoder) != 1:
            raise fail(self.where, "routing_stages has no decoder: nothing to decode")
        return decoder[0]

    def _optional(self, record: dict[str, Any], key: str, high: int) -> int | None:
        value = record.get(key)
        if value is None and self.version == 1:
            return None
        return whole(value, f"{self.where}: {key}", 1, high)

    def event(self, record: dict[str, Any], where: str) -> tuple[int, int, list[int]] | None:
        """(token position, layer, ids), no ids for a dropped token; None for an encoder's event."""
        if record.get("record_type") != "routing_selection":
            raise fail(where, f"record_type = {shown(record.get('record_type'))}, expected routing_selection")
        _closed(record, _EVENT_OF[self.version], where)
        if self.version == 2 and record.get("routing_stage") == "encoder" and record.get("phase") == "source":
            self.encoder += 1
            return None
        position = whole(record.get("token_position"), f"{where}: token_position", 0, 1 << 40)
        layer = whole(record.get("layer"), f"{where}: layer", 0, LAYER_LIMIT - 1)
        self._order(record.get("phase"), position, layer, where)
        return position, layer, self._ids(record, where)

    def _order(self, name: object, position: int, layer: int, where: str) -> None:
        phase = _PHASES.get(name) if isinstance(name, str) and ("_" in name) == (self.version == 2) else None
        if phase is None:
            raise fail(where, f"phase = {shown(name)} is not one of version {self.version}")
        key = (0, layer, position) if phase == 0 else (1, position, layer)  # layer-major, then token-major
        if key <= self.last or (phase == 1 and position <= self.prompt_end):
            raise fail(where, f"token {position}, layer {layer} out of order")
        self.last = key
        if phase == 0:
            self.prompt_end = max(self.prompt_end, position)
        self.tokens.setdefault(position, (len(self.tokens), phase))

    def _ids(self, record: dict[str, Any], where: str) -> list[int]:
        chosen, state = record.get("selected_experts"), record.get("assignment_state", "assigned")
        if state == "unassigned" and chosen == [] and self.drops:
            return []
        if state != "assigned" or (self.version == 2 and "assignment_state" not in record):
            raise fail(where, f"assignment_state = {shown(record.get('assignment_state'))} does not fit its experts")
        ids = id_list(chosen, f"{where}: selected_experts")
        if len(set(ids)) != len(ids) or len(ids) != (self.top_k or len(ids)):
            raise fail(where, f"selected_experts has {len(ids)} entries, expected {self.top_k or 'no expert twice'}")
        return ids


def _one(path: Path, draft: Draft) -> tuple[Request, list[int]]:
    file: _File | None = None
    events = Events(path)
    for where, record in json_lines(path):
        if file is None:
            file = _File(record, where)
        elif (found := file.event(record, where)) is not None:
            position, layer, chosen = found
            events.add(file.tokens[position][0], layer, chosen)
    if file is None or not file.tokens:
        raise fail(path, "holds no decoder routing event")
    if draft.experts not in (None, file.experts):
        raise fail(path, f"num_experts = {file.experts}, another file has {draft.experts}")
    draft.experts, draft.model = file.experts, file.model
    if file.encoder:
        draft.notes.append(f"{path.name}: {file.encoder} encoder events left out")
    ids, layers = events.dense(len(file.tokens))
    order = np.argsort(list(file.tokens), kind="stable")
    phase = np.array([phase for _, phase in file.tokens.values()], dtype=np.uint8)
    return Request(ids[order], phase[order]), layers


def read(paths: Sequence[Path], hints: Hints) -> RoutingTrace:
    """One request a file."""
    draft = Draft("moe-cache-lab", paths, hints)
    found = [_one(path, draft) for path in paths]
    draft.layer_ids = found[0][1]
    if any(layers != draft.layer_ids for _, layers in found):
        raise fail(draft.path, "files disagree on the layers")
    return draft.finish([request for request, _ in found])
