"""From an arm to expert ids, and from ids to the integers that its journal line keeps. No device, no clock."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from moeplan.kernels.protocol import Arm, IntArray
from moeplan.runners.spec import make_arm
from moeplan.traffic.load import ExpertLoad
from moeplan.traffic.routing import Routing, draw_ids
from moeplan.traffic.shape import LayerShape
from moeplan.traffic.tiles import BlockTable

BLOCK_ROWS = (16, 32, 64, 128)  # the block heights that grouped kernels use (vLLM's and SGLang's default configs)
CACHE_MULTIPLE = 4  # a chain that touches less than this many last-level caches is flagged
PROBED_LAYERS = 16  # layers whose distinct experts stand for those of a longer chain
PROBE_MARGIN = 1.05  # their mean may lie a little above the longer chain's
DEFAULT_ROUTINGS = ("identical", "disjoint", "uniform")


def grid(
    paths: Sequence[str],
    shape: LayerShape,
    tokens: Sequence[int],
    routings: Sequence[str] = DEFAULT_ROUTINGS,
    seed: int = 0,
    chain: tuple[int, int] | None = None,
) -> tuple[Arm, ...]:
    """Every path at every token count on every routing.

    `disjoint` above experts // top_k tokens becomes `balanced` and is labelled so; an arm is never listed twice.
    """
    found: dict[str, Arm] = {}
    for path in paths:
        for count in tokens:
            for name in routings:
                fits = name != "disjoint" or count <= shape.experts // shape.top_k
                arm = make_arm(path, shape, count, name if fits else "balanced", seed, chain)
                found.setdefault(arm.id, arm)
    return tuple(found.values())


def draw(arm: Arm, routing: Routing) -> IntArray:
    """Expert ids int32 [arm.chain[1], tokens, top_k]; each layer is drawn for itself."""
    layers = range(arm.chain[1])
    rows = [
        draw_ids(routing, arm.shape.experts, arm.shape.top_k, arm.tokens, arm.seed, layer=layer) for layer in layers
    ]
    return np.stack(rows).astype("<i4")


def filled(arm: Arm, routing: Routing, cache_bytes: float) -> Arm:
    """The arm with chains that pass enough planes through the cache not to be flagged; twice that is the long one.

    Where the arm's own chains do that already they stay.
    """
    probe = make_arm(arm.path, arm.shape, arm.tokens, arm.routing, arm.seed, (1, PROBED_LAYERS))
    loads = [ExpertLoad.from_ids(layer, arm.shape.experts) for layer in draw(probe, routing)]
    a_layer = float(np.mean([load.distinct for load in loads])) * arm.shape.plane_bytes
    short = math.ceil(PROBE_MARGIN * CACHE_MULTIPLE * cache_bytes / a_layer)
    if short <= arm.chain[0]:
        return arm
    return make_arm(arm.path, arm.shape, arm.tokens, arm.routing, arm.seed, (short, 2 * short))


def drivers(arm: Arm, ids: IntArray, cache_bytes: float | None) -> dict[str, Any]:
    """What the journal keeps of ids: means a layer over the layers between the two chain lengths, and a digest.

    cache_resident is judged on the short chain: in alternation with the long one, its bytes are the least that
    pass through the cache before a plane is read again. None where the cache is unknown.
    """
    loads = [ExpertLoad.from_ids(layer, arm.shape.experts) for layer in ids]
    timed = loads[arm.chain[0] :]
    touched = sum(load.distinct for load in loads[: arm.chain[0]]) * arm.shape.plane_bytes
    return {
        "slots": float(np.mean([load.slots for load in timed])),
        "distinct": float(np.mean([load.distinct for load in timed])),
        "blocks": {
            str(rows): float(np.mean([BlockTable.of(load, rows).count for load in timed])) for rows in BLOCK_ROWS
        },
        "bytes_touched": touched,
        "cache_resident": None if cache_bytes is None else touched < CACHE_MULTIPLE * cache_bytes,
        "ids_sha256": hashlib.sha256(np.ascontiguousarray(ids, "<i4").tobytes()).hexdigest(),
    }


def request_line(arm: Arm, ids_file: str, round_: int) -> dict[str, Any]:
    """One arm as the child reads it: the line of the exec protocol (docs/bring-your-own-kernel.md)."""
    return {
        "arm": arm.id,
        "path": arm.path,
        "shape": arm.shape.to_dict(),
        "tokens": arm.tokens,
        "routing": arm.routing,
        "seed": arm.seed,
        "chain": list(arm.chain),
        "layers": arm.chain[1],
        "ids_file": ids_file,
        "round": round_,
    }
