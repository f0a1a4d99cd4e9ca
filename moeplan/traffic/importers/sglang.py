"""SGLang responses with `routed_experts`: base64 of raw int32, flat, shape [seqlen - 1 - start, layers, k].

`/generate` puts it in `meta_info.routed_experts`, the OpenAI endpoints in `choices[i].sgl_ext.routed_experts`. The
shape is not in the response: layers (dense ones too) and k come from the model.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moeplan.traffic.importers.reading import TOP_K_LIMIT, Ids, as_ids, base64_bytes, fail, json_documents, shown
from moeplan.traffic.importers.record import Draft, Hints, check_layer, moe_columns, response_request
from moeplan.traffic.trace import RoutingTrace


def decode(value: object, layers: int, top_k: int, where: object) -> Ids:
    """One `routed_experts` text as int32 [rows, layers, k]."""
    if not isinstance(value, str):
        raise fail(where, f"{shown(value)}, expected base64 text")
    raw = base64_bytes(value, where)
    if len(raw) % (4 * layers * top_k):
        raise fail(where, f"{len(raw)} bytes are no whole number of rows of {layers} layers of top-{top_k} int32")
    return as_ids(np.frombuffer(raw, "<i4"), where).reshape(-1, layers, top_k)


def _found(response: dict[str, Any], where: str) -> Iterator[tuple[object, object, object]]:
    """(text, prompt tokens, generated tokens) of each sequence in a response."""
    meta, choices, usage = (response.get(key) for key in ("meta_info", "choices", "usage"))
    if isinstance(meta, dict):
        yield meta.get("routed_experts"), meta.get("prompt_tokens"), meta.get("completion_tokens")
        return
    if not isinstance(choices, list) or not all(isinstance(one, dict) for one in choices):
        raise fail(where, "neither meta_info nor a list of choices: not an SGLang response")
    counts = usage if isinstance(usage, dict) and len(choices) == 1 else {}
    for choice in choices:
        extra = choice.get("sgl_ext")
        text = extra.get("routed_experts") if isinstance(extra, dict) else None
        yield text, counts.get("prompt_tokens"), counts.get("completion_tokens")


def read(paths: Sequence[Path], hints: Hints) -> RoutingTrace:
    """Responses of `/generate` or the OpenAI endpoints: JSON, a list, or JSON lines; a sequence is a request."""
    layers, top_k = hints.need("layers", paths[0]), hints.need("top_k", paths[0])
    check_layer(layers - 1, paths[0])
    if not 0 < top_k <= TOP_K_LIMIT:
        raise fail(paths[0], f"top_k = {top_k}, expected 1..{TOP_K_LIMIT}")
    draft = Draft("sglang", paths, hints)
    requests, missing = [], 0
    for path in paths:
        for where, response in json_documents(path):
            for text, prompt, generated in _found(response, where):
                if text is None:
                    missing += 1
                    continue
                ids = decode(text, layers, top_k, f"{where}: routed_experts")
                requests.append(response_request(ids, prompt, generated))
    if not requests:
        raise fail(draft.path, "no sequence holds routed_experts: was the server started to return them?")
    if missing:
        draft.notes.append(f"{missing} sequences without routed_experts left out")
    return draft.finish(moe_columns(draft, requests))
