"""vLLM responses with `routed_experts`: base64 .npy, nested lists (older builds), the `nrlre1:` wrapping, a .npy file.

`choices[i].routed_experts` is [tokens - 1, layers, k], uint8 up to 256 experts, uint16 above (vLLM PR #28284); the
layer axis counts dense layers too and is zero there.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moeplan.traffic.importers.arrays import npy_array, npy_file
from moeplan.traffic.importers.reading import (
    Ids,
    as_ids,
    base64_bytes,
    fail,
    json_documents,
    nested_ids,
    shown,
)
from moeplan.traffic.importers.record import Draft, Hints, Request, moe_columns, response_request
from moeplan.traffic.trace import RoutingTrace

_WIDTHS = {"uint8": 1, "uint16": 2, "int16": 2, "int32": 4, "int64": 8}


def decode(value: object, where: object) -> Ids:
    """One `routed_experts` value as int32 [rows, layers, k]."""
    if isinstance(value, list):
        return nested_ids(value, where)
    if not isinstance(value, str):
        raise fail(where, f"{shown(value)}, expected base64 text or nested lists")
    if value.startswith("nrlre1:"):
        return _wrapped(value, where)
    return _plain(npy_array(base64_bytes(value, where), where), where)


def _plain(array: npt.NDArray[Any], where: object) -> Ids:
    if array.dtype.name not in ("uint8", "uint16"):
        raise fail(where, f"holds {array.dtype}, expected uint8 or uint16")
    return _three_axes(as_ids(array, where), where)


def _wrapped(value: str, where: object) -> Ids:
    """`nrlre1:<dtype>:<SxLxK>:<base64>`, as NeMo-RL passes it on."""
    parts = value.split(":", 3)
    sizes = parts[2].split("x") if len(parts) == 4 else []
    if len(sizes) != 3 or not all(size.isascii() and size.isdecimal() and len(size) < 12 for size in sizes):
        raise fail(where, f"{shown(value)}, expected nrlre1:dtype:SxLxK:base64")
    if parts[1] not in _WIDTHS:
        raise fail(where, f"dtype {shown(parts[1])}, expected one of {', '.join(_WIDTHS)}")
    rows, layers, top_k = (int(size) for size in sizes)
    raw = base64_bytes(parts[3], where)
    if len(raw) != rows * layers * top_k * _WIDTHS[parts[1]]:
        raise fail(where, f"shape {parts[2]} of {parts[1]} does not take {len(raw)} bytes")
    flat = np.frombuffer(raw, np.dtype(parts[1]).newbyteorder("<"))
    return _three_axes(as_ids(flat, where).reshape(rows, layers, top_k), where)


def _three_axes(ids: Ids, where: object) -> Ids:
    if ids.ndim != 3 or 0 in ids.shape[1:]:
        raise fail(where, f"shape {ids.shape}, expected [rows, layers, k]")
    return ids


def _request(choice: dict[str, Any], usage: dict[str, Any], alone: bool, where: str) -> Request:
    ids = decode(choice["routed_experts"], f"{where}: routed_experts")
    known = (usage.get("prompt_tokens"), usage.get("completion_tokens")) if alone else (None, None)
    return response_request(ids, *known)


def read(paths: Sequence[Path], hints: Hints) -> RoutingTrace:
    """Responses of the completions, chat or generate endpoints: JSON, a list, or JSON lines; or .npy files.

    A choice, or a .npy file, is a request.
    """
    requests, missing = [], 0
    draft = Draft("vllm", paths, hints)
    for path in paths:
        if path.suffix == ".npy":  # one request's `CompletionOutput.routed_experts`, saved as it is
            requests.append(Request(_plain(npy_file(path), path)))
            continue
        for where, response in json_documents(path):
            choices, usage = response.get("choices"), response.get("usage")
            if not isinstance(choices, list) or not all(isinstance(one, dict) for one in choices):
                raise fail(where, "choices is not a list of objects: not a vLLM response")
            have = [one for one in choices if one.get("routed_experts") is not None]
            missing += len(choices) - len(have)
            usage = usage if isinstance(usage, dict) else {}
            requests += [_request(one, usage, len(choices) == 1, where) for one in have]
    if not requests:
        raise fail(draft.path, "no choice holds routed_experts: was the server started to return them?")
    if missing:
        draft.notes.append(f"{missing} choices without routed_experts left out")
    return draft.finish(moe_columns(draft, requests))
