"""Many drawn batches at once: rows per expert [batches, experts], for means that have no formula."""

from typing import Literal

import numpy as np
import numpy.typing as npt

from moeplan.errors import MoeplanError
from moeplan.traffic.routing import IdTable, Routing, cohort_rows, draw_ids
from moeplan.traffic.shape import LayerShape

Cohort = Literal["independent", "identical"]
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
    if cohort not in ("independent", "identical"):
        raise MoeplanError(f"--cohort {cohort}: expected independent or identical")
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
        found = [_trace(routing, (experts, k), rows, seed + n) for n in range(-(-wanted // routing.trace.layers))]
    elif routing.kind in ("uniform", "popularity"):  # tokens are independent: one long draw is many batches
        layers = len(routing.popularity.shares) if routing.popularity else 1
        each = -(-wanted // layers)
        found = [
            draw_ids(routing, experts, k, each * rows, seed, layer).reshape(each, rows, k) for layer in range(layers)
        ]
    else:
        found = [draw_ids(routing, experts, k, rows, seed + n)[None] for n in range(wanted)]
    return found


def _trace(routing: Routing, size: tuple[int, int], tokens: int, seed: int) -> IdTable:
    """All layers of one cohort [layers, tokens, top_k]."""
    trace = routing.trace
    assert trace is not None
    draw_ids(routing, *size, tokens, seed)  # raises where the trace does not fit the model
    rows = cohort_rows(trace, tokens, np.random.default_rng(seed))
    return np.asarray(trace.expert_ids[rows].swapaxes(0, 1), dtype=np.int32)


def _counts(ids: IdTable, experts: int) -> RowTable:
    """Rows per expert [batches, experts] of ids [batches, tokens, top_k]; -1 belongs to no expert."""
    shifted = ids.reshape(len(ids), -1) + np.arange(len(ids), dtype=np.int64)[:, None] * experts
    used = shifted[ids.reshape(len(ids), -1) >= 0]
    return np.bincount(used, minlength=len(ids) * experts).reshape(len(ids), experts).astype(np.int32)
