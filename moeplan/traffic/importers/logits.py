"""Router logits (.npy, .npz) to expert ids, with the rule of the model's family.

`softmax-topk` and `topk-softmax` order experts by the logit itself, since softmax keeps the order; they differ only
in the weights. `sigmoid` orders by sigmoid(logit) + correction bias within the best groups, where a group's score
is the sum of its two best (DeepSeek-V3 technical report, section 2.1.2; `noaux_tc`): the highest logits are not it.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moeplan.traffic.importers.arrays import Archive, npy_array, npy_file
from moeplan.traffic.importers.reading import CELL_LIMIT, LAYER_LIMIT, TOP_K_LIMIT, Ids, fail
from moeplan.traffic.importers.record import Draft, Hints, Request, check_experts
from moeplan.traffic.trace import RoutingTrace

Floats = npt.NDArray[np.float64]
RULES = ("softmax-topk", "topk-softmax", "sigmoid")
# Families by model_type, read from transformers' routers; groups from the models' config.json (n_group, topk_group).
_SOFTMAX_FIRST = {"mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"}
_TOPK_FIRST = {"gpt_oss"}
_SIGMOID = {"deepseek_v3": (8, 4), "kimi_k2": (1, 1), "glm4_moe": (1, 1), "dots1": (1, 1), "minimax_m2": (1, 1)}
_FAMILIES = {"softmax-topk": _SOFTMAX_FIRST, "topk-softmax": _TOPK_FIRST, "sigmoid": set(_SIGMOID)}
_BIAS = ("e_score_correction_bias", "bias")
_CELLS = 1 << 22  # logits worked on at once: bounds memory


def select(logits: Floats, top_k: int, rule: str, bias: Floats | None = None, groups: tuple[int, int] = (1, 1)) -> Ids:
    """Expert ids int32 [rows, top_k], best first, of logits [rows, experts]; equal scores go to the lower id.

    groups: (n_group, topk_group), for `sigmoid` only. bias: [experts], needed for `sigmoid`.
    """
    scores = logits
    if rule == "sigmoid":
        scores = 0.5 * (1 + np.tanh(0.5 * logits)) + (0.0 if bias is None else bias)
        scores = _best_groups(scores, *groups)
    return np.argsort(-scores, axis=1, kind="stable")[:, :top_k].astype(np.int32)


def _best_groups(scores: Floats, groups: int, kept: int) -> Floats:
    """Scores with every group but the best `kept` at -inf."""
    if groups == kept:
        return scores
    grouped = scores.reshape(len(scores), groups, -1)
    heat = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
    best = np.argsort(-heat, axis=1, kind="stable")[:, :kept]
    mask = np.zeros((len(scores), groups), dtype=bool)
    np.put_along_axis(mask, best, True, axis=1)
    return np.where(mask[:, :, None], grouped, -np.inf).reshape(scores.shape)


def _rule(hints: Hints, path: Path) -> tuple[str, tuple[int, int]]:
    family = hints.model_type
    rule = hints.rule or next((name for name in RULES if family in _FAMILIES[name]), None)
    if rule is None:
        raise fail(path, f"{family or 'no --model'}: no top-k rule is known, give --rule {'|'.join(RULES)}")
    if rule not in RULES:
        raise fail(path, f"--rule {rule}: expected one of {', '.join(RULES)}")
    groups, kept = _SIGMOID.get(family, (1, 1)) if rule == "sigmoid" else (1, 1)
    return rule, (hints.groups or groups, hints.top_groups or kept)


def _layers(path: Path) -> tuple[list[npt.NDArray[Any]], npt.NDArray[Any] | None]:
    """The [tokens, experts] logits of each layer, and the bias if the file holds one."""
    if path.suffix != ".npz":
        array = npy_file(path)
        if array.ndim not in (2, 3):
            raise fail(path, f"shape {array.shape}, expected [tokens, experts] or [layers, tokens, experts]")
        return [array] if array.ndim == 2 else list(array) if len(array) < LAYER_LIMIT else [], None
    archive = Archive(path)
    named = {name.removesuffix(".npy"): name for name in archive.names if name.endswith(".npy")}
    bias = next((key for key in _BIAS if key in named), None)
    order = {key: re.search(r"(\d{1,4})$", key) for key in named if key != bias}
    odd = next((key for key, digits in order.items() if digits is None), None)
    if odd is not None and len(order) > 1:
        raise fail(path, f"array {odd[:60]!r}: expected names that end in the layer number")
    keys = sorted(order, key=lambda key: int(m[1]) if (m := order[key]) else 0)
    arrays = [npy_array(archive.read(named[key]), f"{path}: {key[:60]}") for key in keys]
    if len(arrays) == 1 and arrays[0].ndim == 3:
        arrays = list(arrays[0]) if len(arrays[0]) < LAYER_LIMIT else []
    return arrays, None if bias is None else npy_array(archive.read(named[bias]), f"{path}: {bias}")


def _check(arrays: Sequence[npt.NDArray[Any]], hints: Hints, path: Path) -> tuple[int, int, int]:
    """(tokens, experts, top_k)."""
    shape = arrays[0].shape if arrays else ()
    if len(shape) != 2 or 0 in shape or len(arrays) >= LAYER_LIMIT or any(one.shape != shape for one in arrays):
        raise fail(path, f"{len(arrays)} layers, the first {shape}: expected arrays [tokens, experts], all alike")
    if any(one.dtype.kind != "f" or one.dtype.itemsize > 8 for one in arrays):
        raise fail(path, f"holds {arrays[0].dtype}, expected floating-point logits")
    top_k = hints.need("top_k", path)
    if not 0 < top_k <= min(TOP_K_LIMIT, check_experts(shape[1], path)):
        raise fail(path, f"top_k = {top_k} of {shape[1]} experts")
    if shape[0] * len(arrays) * top_k > CELL_LIMIT:
        raise fail(path, f"more than {CELL_LIMIT} expert ids")
    return shape[0], shape[1], top_k


def _bias_of(given: npt.NDArray[Any] | None, layers: int, experts: int, path: Path) -> Floats:
    if given is None:
        raise fail(path, f"the sigmoid rule needs the correction bias: an .npz with {_BIAS[0]} [layers, experts]")
    if given.dtype.kind != "f" or given.shape not in ((layers, experts), (experts,)) or not np.isfinite(given).all():
        raise fail(path, f"{_BIAS[0]} is {given.dtype} {given.shape}, expected finite floats {(layers, experts)}")
    return np.broadcast_to(given.astype(np.float64), (layers, experts))


def _one(path: Path, draft: Draft) -> Request:
    arrays, given = _layers(path)
    tokens, experts, top_k = _check(arrays, draft.hints, path)
    rule, groups = _rule(draft.hints, path)
    if not 0 < groups[1] <= groups[0] or experts % groups[0] or (groups != (1, 1) and experts // groups[0] < 2):
        raise fail(path, f"{groups[1]} of {groups[0]} groups do not fit {experts} experts")
    if top_k > experts // groups[0] * groups[1]:
        raise fail(path, f"top_k = {top_k} is more than {groups[1]} of {groups[0]} groups hold")
    bias = _bias_of(given, len(arrays), experts, path) if rule == "sigmoid" else None
    ids = np.empty((tokens, len(arrays), top_k), dtype=np.int32)
    step = max(1, _CELLS // experts)
    for layer, array in enumerate(arrays):
        for start in range(0, tokens, step):
            part = array[start : start + step]
            if not np.isfinite(part).all():
                raise fail(path, f"layer {layer}: logits that are not finite from row {start} on")
            own = None if bias is None else bias[layer]
            ids[start : start + step, layer] = select(part.astype(np.float64), top_k, rule, own, groups)
    if draft.experts not in (None, experts):
        raise fail(path, f"{experts} experts, another file has {draft.experts}")
    draft.experts = experts
    note = f"ids chosen by {rule}" + (f", {groups[1]} of {groups[0]} groups" if rule == "sigmoid" else "")
    draft.notes = [note]
    return Request(ids)


def read(paths: Sequence[Path], hints: Hints) -> RoutingTrace:
    """Each file is one request: one array a MoE layer (.npz, names end in the layer number) or them stacked (.npy)."""
    draft = Draft("router-logits", paths, hints, order="ranked")
    requests = [_one(path, draft) for path in paths]
    moe, layers = hints.moe_layers, requests[0].ids.shape[1]
    if moe is not None and layers != len(moe):
        raise fail(draft.path, f"logits of {layers} layers, {hints.model} has {len(moe)} with experts")
    draft.layer_ids = moe
    return draft.finish(requests)
