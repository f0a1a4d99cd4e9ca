"""The JSON documents of `model show`, `model list` and `work`: plain dictionaries, field names as published."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from moeplan.traffic.card import format_layers
from moeplan.traffic.expect import Case, Cohort, ExpectedWork, expect
from moeplan.traffic.model import ModelCard, MoELayer
from moeplan.traffic.partition import Partition
from moeplan.traffic.path import PathSpec
from moeplan.traffic.routing import Routing
from moeplan.traffic.shape import LayerShape

DEFAULT_PATHS = ("gather", "gather_sorted", "fused_per_token", "fused", "grouped:16", "grouped:64")


def _same(values: Iterable[Any]) -> Any:
    """The value that all share, or None where they differ or there are none."""
    found = set(values)
    return found.pop() if len(found) == 1 else None


def _planes(shapes: Sequence[LayerShape]) -> dict[str, int | None]:
    planes = [shape.plane_bytes for shape in shapes]
    if not planes:
        return {"plane_bytes": None}
    return {"plane_bytes": _same(planes), "plane_bytes_min": min(planes), "plane_bytes_max": max(planes)}


def _layer(layer: MoELayer) -> dict[str, Any]:
    shape = layer.shape
    formats = {"gate": shape.gate, "up": shape.up, "down": shape.down}
    return {
        "layer": layer.index,
        **{f"{key}_bits": form.bits if form else None for key, form in formats.items()},
        **{key: form.name if form else None for key, form in formats.items()},
        "expert_hidden": shape.expert_hidden,
        "experts": shape.experts,
        "top_k": shape.top_k,
        "shared_experts": layer.shared_experts,
        "plane_bytes": shape.plane_bytes,
    }


def _shared(layers: Sequence[MoELayer]) -> dict[str, Any] | None:
    first = next((layer for layer in layers if layer.shared), None)
    if first is None or first.shared is None:
        return None
    whole = [layer.shared.plane_bytes * layer.shared.experts for layer in layers if layer.shared]
    return {
        "experts": first.shared_experts,
        "expert_hidden": first.shared.expert_hidden,
        "run": first.shared_run,
        "bytes_min": min(whole),
        "bytes_max": max(whole),
    }


def show_document(card: ModelCard) -> dict[str, Any]:
    """`model show`: geometry and bytes. Fields that differ from layer to layer are null and listed in `layers`."""
    layers = card.moe_layers
    shapes = [layer.shape for layer in layers]
    dense = {"experts": 0, "top_k": 0, "expert_hidden": None, "activation": None, "format": None}
    same = {
        "experts": _same(shape.experts for shape in shapes),
        "top_k": _same(shape.top_k for shape in shapes),
        "expert_hidden": _same(shape.expert_hidden for shape in shapes),
        "activation": _same(shape.activation for shape in shapes),
        "format": _same(shape.format_name for shape in shapes),
    }
    return {
        "name": card.name,
        "model_type": card.model_type,
        "source": card.source,
        "moe_layers": len(layers),
        "all_layers": card.layers,
        "hidden": card.hidden,
        **(same if layers else dense),
        "shared_experts": _same(layer.shared_experts for layer in layers) if layers else 0,
        "shared": _shared(layers),
        "weight_position": card.weight_position if layers else None,
        **_planes(shapes),
        "groups": [
            {
                "layers": format_layers([layer.index for layer in group]),
                "format": group[0].shape.format_name,
                "plane_bytes": group[0].shape.plane_bytes,
            }
            for group in card.alike()
        ],
        "layers": [_layer(layer) for layer in layers],
        "dense_hidden": card.dense_hidden,
        "vocabulary": card.vocabulary,
        "tied_embeddings": card.tied_embeddings,
        "attention": dict(card.attention),
        "notes": list(card.notes),
    }


def list_entry(card: ModelCard) -> dict[str, Any]:
    """One line of `model list`."""
    document = show_document(card)
    keys = ("name", "moe_layers", "experts", "top_k", "shared_experts", "hidden", "expert_hidden", "format")
    planes = {key: document.get(key) for key in ("plane_bytes", "plane_bytes_min", "plane_bytes_max")}
    return {key: document[key] for key in keys} | planes | {"source": card.source}


def _number(value: float) -> int | float:
    """Whole where it is whole to a millionth, so that exact counts read as integers."""
    return round(value) if abs(value - round(value)) < 1e-6 else round(value, 6)


def _row(works: Sequence[tuple[ExpectedWork, int, int]]) -> dict[str, Any]:
    """One path and token count, a mean over MoE layers: (work, shared experts, layers) of each group."""
    layers = sum(count for _, _, count in works)
    first = works[0][0]

    def mean(name: str) -> float:
        return sum(float(getattr(work, name)) * count for work, _, count in works) / layers

    distinct, slots, padded = mean("distinct_mean"), mean("slots"), mean("padded_rows")
    shared = sum(number * count for _, number, count in works) / layers
    return {
        "path": first.path,
        "tokens": first.tokens,
        "slots": _number(slots),
        "distinct_mean": _number(distinct),
        "distinct_p95": max(work.distinct_p95 for work, _, _ in works),
        "distinct_total_mean": _number(distinct + shared),
        "unique_bytes": round(mean("unique_bytes")),
        "issued_bytes": round(mean("issued_bytes")),
        "dispatches": first.dispatches,
        "tiles": _number(mean("tiles")),
        "padded_rows": _number(padded),
        "occupancy": _number(slots / (slots + padded)) if slots else 0,
        "drawn": sorted({name for work, _, _ in works for name in work.drawn}),
    }


def work_document(
    card: ModelCard, paths: Sequence[PathSpec], tokens: Sequence[int], asked: tuple[Routing, Cohort, int, Partition]
) -> dict[str, Any]:
    """`work`: expected work of one MoE layer, a mean over the MoE layers where they differ.

    asked: routing, cohort, seed and the rank's part. Bytes are of routed experts; `shared` is read once besides.
    Raises MoeplanError for a dense model and where routing or partition do not fit.
    """
    routing, cohort, seed, part = asked
    layers = card.require_moe()
    groups = card.alike()
    rows: list[dict[str, Any]] = []
    inner: list[list[dict[str, Any]]] = [[] for _ in groups]
    for n in tokens:
        cases = [Case(group[0].shape, n, routing, cohort, seed, part) for group in groups]
        for path in paths:
            works = [
                (expect(path, case), group[0].shared_experts, len(group))
                for case, group in zip(cases, groups, strict=True)
            ]
            rows.append(_row(works))
            for found, work in zip(inner, works, strict=True):
                found.append(_row([work]))
    shape = groups[0][0].shape
    notes = [note for note in (routing.note(shape.experts, shape.top_k),) if note]
    local = [part.local(layer.shape) for layer in layers]
    return {
        "model": card.name,
        **_planes(local),
        "moe_layers": len(layers),
        "routing": routing.name,
        "cohort": cohort,
        "seed": seed,
        "tp": part.tp,
        "ep": part.ep,
        "rank": "worst" if part.rank is None else part.rank,
        "shared": _shared(layers),
        "rows": rows,
        "groups": [
            {
                "layers": format_layers([layer.index for layer in group]),
                "plane_bytes": part.local(group[0].shape).plane_bytes,
                "rows": found,
            }
            for group, found in zip(groups, inner, strict=True)
        ]
        if len(groups) > 1
        else [],
        "declines": [asdict(decline) for decline in part.declines()],
        "notes": notes,
    }
