"""What the checker asks of requests: copies, lost rows, boundaries that mean nothing, rankings read as choices."""

import hashlib
from dataclasses import dataclass
from math import lgamma, log

import numpy as np
import numpy.typing as npt

from moeplan.traffic.arrays import read_rows
from moeplan.traffic.check_scan import row_bits
from moeplan.traffic.trace import CHUNK_BYTES, RoutingTrace

COPY_ROWS = 4
COPY_BITS = 128
"""A request of COPY_ROWS rows or more that uniform routing would repeat once in 2^COPY_BITS counts as a copy."""

LONE_ROWS = 4096
"""Rows without a phase from which one request for everything is not believed."""

RANKING_BITS = 64
_WIDEST = 1 << 24  # ids of one block; the widest real one, 94 layers of 512 experts, has 48,128
_LOOKED_AT = 4096  # requests searched for rankings: an engine that writes them does so in every request


def copies(trace: RoutingTrace, begin: int = 0) -> list[tuple[int, int]]:
    """(request, earlier request with the very same rows) for requests from row `begin` on."""
    starts, sizes = trace.request_offsets[:-1], np.diff(trace.request_offsets)
    telling = sizes * trace.layers * row_bits(trace.experts, trace.top_k) >= COPY_BITS
    chosen = np.flatnonzero(telling & (sizes >= COPY_ROWS) & (starts >= begin))
    _, group, members = np.unique(sizes[chosen], return_inverse=True, return_counts=True)
    chosen = chosen[members[group] > 1]
    digests = np.empty((chosen.size, 2), np.uint64)
    each = max(1, CHUNK_BYTES // (trace.layers * trace.top_k * trace.expert_ids.dtype.itemsize))
    for place, request in enumerate(chosen.tolist()):
        first, last = (int(n) for n in trace.request_offsets[request : request + 2])
        digest = hashlib.blake2b(digest_size=16)
        for row in range(first, last, each):
            digest.update(np.ascontiguousarray(read_rows(trace.expert_ids, row, min(last, row + each))).data)
        digests[place] = np.frombuffer(digest.digest(), np.uint64)
    order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: the first of equals comes first
    fresh = np.ones(order.size, dtype=bool)
    fresh[1:] = (digests[order[1:]] != digests[order[:-1]]).any(axis=1)
    original = order[np.maximum.accumulate(np.where(fresh, np.arange(order.size), 0))]
    pairs = zip(chosen[order[~fresh]].tolist(), chosen[original[~fresh]].tolist(), strict=True)
    return sorted(pairs)


def lost_rows(trace: RoutingTrace) -> npt.NDArray[np.int64] | None:
    """Tokens - rows of each request, where the tokens are known."""
    if trace.request_tokens is None:
        return None
    return np.asarray(trace.request_tokens - np.diff(trace.request_offsets), dtype=np.int64)


def mixed_phase(trace: RoutingTrace) -> tuple[int, int]:
    """(first row, rows) of prefill rows that follow a decode row of their own request; (-1, 0) where there is none."""
    if trace.phase is None:
        return -1, 0
    first, count, before = -1, 0, 0
    for row in range(0, trace.rows, CHUNK_BYTES):
        phase = np.asarray(read_rows(trace.phase, row, row + CHUNK_BYTES))
        falls = np.diff(phase.astype(np.int8), prepend=np.int8(before)) < 0
        low, high = np.searchsorted(trace.request_offsets, (row, row + len(phase)))
        falls[trace.request_offsets[low:high] - row] = False
        before = int(phase[-1])
        if falls.any() and first < 0:
            first = row + int(falls.argmax())
        count += int(np.count_nonzero(falls))
    return first, count


@dataclass(frozen=True, slots=True)
class Rankings:
    """By layer: rows that lie in blocks of experts / top_k rows which name every expert once, and the first one."""

    rows: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]


def rankings(trace: RoutingTrace) -> Rankings:
    """Search the start of requests for whole rankings cut into rows.

    A flat read of a [tokens, experts] ranking as [tokens, top_k] yields blocks of experts / top_k rows that each
    name every expert exactly once. Blocks count from a request's first row until one fails; a request is believed
    to hold rankings where independent uniform rows would look so once in 2^RANKING_BITS (after allowing for the
    choice of layers).
    """
    rows, firsts = np.zeros(trace.layers, np.int64), np.full(trace.layers, -1, np.int64)
    found = Rankings(rows, firsts)
    block, rest = divmod(trace.experts, trace.top_k)
    if rest or block < 2 or trace.layers * trace.experts > _WIDEST:
        return found
    bits = _ranking_bits(trace.experts, trace.top_k, block)
    sizes = np.diff(trace.request_offsets)
    chosen = np.flatnonzero(sizes >= block)
    if chosen.size > _LOOKED_AT:
        chosen = chosen[np.linspace(0, chosen.size - 1, _LOOKED_AT).astype(np.int64)]
    for request in chosen.tolist():
        start = int(trace.request_offsets[request])
        blocks = _blocks(trace, start, int(sizes[request]) // block, block)
        if blocks.sum() * bits < RANKING_BITS + trace.layers:
            continue
        firsts[(firsts < 0) & (blocks > 0)] = start
        rows += blocks * block
    return found


def _ranking_bits(experts: int, top_k: int, block: int) -> float:
    """-log2 of the chance that `block` independent uniform sets of top_k cover all experts."""
    ways = (lgamma(experts + 1) - block * lgamma(top_k + 1)) / log(2)
    return block * row_bits(experts, top_k) - ways


def _blocks(trace: RoutingTrace, start: int, most: int, block: int) -> npt.NDArray[np.int64]:
    """Blocks by layer, from row `start` on, before the first that does not name every expert once."""
    count = np.zeros(trace.layers, np.int64)
    going = np.ones(trace.layers, dtype=bool)
    whole = np.arange(trace.experts)
    done, step = 0, 1
    limit = max(1, CHUNK_BYTES // (8 * trace.layers * trace.experts))
    while done < most and going.any():
        number = min(step, most - done, limit)
        ids = np.asarray(read_rows(trace.expert_ids, start + done * block, start + (done + number) * block))
        picked = ids.reshape(number, block, trace.layers, -1).swapaxes(1, 2).reshape(number, trace.layers, -1)
        hits = (np.sort(picked, axis=2) == whole).all(axis=2)
        unbroken = np.logical_and.accumulate(hits & going, axis=0)
        count += unbroken.sum(axis=0)
        going &= hits.all(axis=0)
        done, step = done + number, step * 8
    return count
