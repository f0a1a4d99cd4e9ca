"""Where a trace contradicts a model card."""

from collections.abc import Iterator

import numpy as np

from moeplan.traffic.check_scan import Scan
from moeplan.traffic.finding import Finding
from moeplan.traffic.model import ModelCard, MoELayer
from moeplan.traffic.trace import RoutingTrace

_REPLICATED = 1.5  # physical / logical experts up to which a larger number reads as replicas, not as another model


def moe_layers(trace: RoutingTrace, card: ModelCard) -> list[MoELayer | None]:
    """The card's MoE layer of each recorded layer, None = the card has none there.

    Layers numbered 0, 1, ... count from the first MoE layer where there are as many as the card has.
    """
    own = card.moe_layers
    if trace.layers == len(own) and (trace.layer_ids == np.arange(trace.layers)).all():
        return list(own)
    by_index = {layer.index: layer for layer in own}
    return [by_index.get(int(index)) for index in trace.layer_ids]


def card_findings(trace: RoutingTrace, card: ModelCard | None, seen: Scan) -> Iterator[Finding]:
    """Experts, top-k and layers that are not the card's. Raises MoeplanError for a dense model."""
    if card is None:
        return
    card.require_moe()
    matched = moe_layers(trace, card)
    rows = trace.rows
    for layer, moe in zip(trace.layer_ids.tolist(), matched, strict=True):
        if moe is None:
            text = f"{card.name} has no experts in layer {layer}"
            yield Finding("card-layer", "error", layer, 0, rows, text, "drop the layer or correct layer_ids")
    known = [moe for moe in matched if moe is not None] or list(card.moe_layers)
    yield from _sizes(trace, known, card, seen)


def _sizes(trace: RoutingTrace, known: list[MoELayer], card: ModelCard, seen: Scan) -> Iterator[Finding]:
    rows = trace.rows
    experts, top_k = {one.shape.experts for one in known}, {one.shape.top_k for one in known}
    shared = {one.shared_experts for one in known}
    used = trace.top_k - int(np.count_nonzero(seen.slot_empty == rows * trace.layers))
    fused = max(shared) > 0 and used in {k + s for k in top_k for s in shared if s}
    if trace.experts not in experts:
        above = max(experts) < trace.experts <= _REPLICATED * max(experts) and not fused
        text = f"{trace.experts} experts, {card.name} has {_some(experts)}"
        if above and int(seen.slot_high.max()) >= max(experts):
            text += f"; ids reach {int(seen.slot_high.max())}: physical slots of replicated experts?"
            yield Finding("physical-ids", "error", None, 0, rows, text, "map them to logical experts when importing")
        else:
            yield Finding("card-experts", "error", None, 0, rows, text, "correct the header or name the right model")
    if used not in top_k:
        text = f"top-{used}, {card.name} has top-{_some(top_k)}"
        if fused:
            text += f" and {_some(shared)} shared: the shared expert was fused into the routed ones"
            yield Finding("fused-shared-expert", "error", None, 0, rows, text, "record with shared-expert fusion off")
        else:
            yield Finding("card-top-k", "error", None, 0, rows, text, "correct the header or name the right model")


def _some(numbers: set[int]) -> str:
    return " or ".join(str(n) for n in sorted(numbers))
