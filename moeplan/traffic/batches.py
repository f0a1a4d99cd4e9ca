"""Many drawn batches at once: rows per expert [batches, experts], for means that have no formula."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from moeplan.traffic.routing import IdTable, Routing, arm_name, check_cohort, draw_ids, trace_rows
from moeplan.traffic.shape import LayerShape

Cohort = str  # `independent`, `identical`, or with a trace any name that traffic/cohort.py reads
RowTable = npt.NDArray[np.int32]

_SAMPLES = 4800  # batches: the mean number of distinct experts is then good to about 0.1 %
_BUDGET = 3_000_000  # token-expert cells drawn at most; large batches vary less and need fewer samples


def draw_batches(
    routing: Routing, shape: LayerShape, tokens: int, cohort: Cohort, seed: int, settled: bool
) -> RowTable:
    """Rows per expert int32 [batches, experts] of drawn batches, spread evenly over a profile's or trace's layers.

    settled: draw one batch where all batches of the arm are alike but for the names of the experts.
    Raises MoeplanError for an unknown cohort and where the routing does not fit the layer.
    """
    check_cohort(routing, cohort, steps=False)
    if cohort not in ("independent", "identical"):
        routing = replace(routing, name=arm_name(routing.name, cohort), cohort=cohort)
    rows = 1 if cohort == "identical" else tokens
    alike = cohort == "identical" or routing.kind in ("identical", "disjoint")
    wanted = max(1, min(_SAMPLES, _BUDGET // (rows * shape.experts)))
    if settled and alike and routing.trace is None:
        wanted = 1
    found = [_counts(ids, shape.experts) for ids in _drawn(routing, shape, rows, wanted, seed)]
    table = np.concatenate(found)
    return table * tokens if cohort == "identical" else table


def _drawn(routing: Routing, shape: LayerShape, rows: int, wanted: int, seed: int) -> list[IdTable]:
    """Tables [batches, rows, top_k] that hold at least `wanted` batches together."""
    experts, k = shape.experts, shape.top_k
    if routing.trace is not None:
        found = [_trace(routing, shape, rows, wanted, seed)]
    elif routing.kind in ("uniform", "popularity"):  # tokens are independent: one long draw is many batches
        layers = len(routing.popularity.shares) if routing.popularity else 1
        each = -(-wanted // layers)
        found = [
            draw_ids(routing, experts, k, each * rows, seed, layer).reshape(each, rows, k) for layer in range(layers)
        ]
    else:
        found = [draw_ids(routing, experts, k, rows, seed + n)[None] for n in range(wanted)]
    return found


def _trace(routing: Routing, shape: LayerShape, tokens: int, wanted: int, seed: int) -> IdTable:
    """Tables [draws x layers, tokens, top_k]: the layers of one draw come from the same rows."""
    trace, rng = routing.trace, np.random.default_rng(seed)
    assert trace is not None
    rows = trace_rows(routing, (shape.experts, shape.top_k), tokens, -(-wanted // trace.layers), rng)
    ids = np.stack([np.asarray(trace.expert_ids[draw], dtype=np.int32) for draw in rows])
    return ids.swapaxes(1, 2).reshape(-1, tokens, shape.top_k)


def _counts(ids: IdTable, experts: int) -> RowTable:
    """Rows per expert [batches, experts] of ids [batches, tokens, top_k]; -1 belongs to no expert."""
    shifted = ids.reshape(len(ids), -1) + np.arange(len(ids), dtype=np.int64)[:, None] * experts
    used = shifted[ids.reshape(len(ids), -1) >= 0]
    return np.bincount(used, minlength=len(ids) * experts).reshape(len(ids), experts).astype(np.int32)
