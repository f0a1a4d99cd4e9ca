"""Routing as bit masks: one bit an expert, so that a batch is an OR and its distinct experts a population count."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moeplan.errors import MoeplanError
from moeplan.traffic.arrays import read_rows
from moeplan.traffic.trace import RoutingTrace

Masks = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]

_STEP = 1 << 15  # words worked on at once: 256 KiB, which a core's second-level cache holds
_KEEP = 1 << 30  # bytes of masks kept in memory; a longer trace is packed again where it is read


def words_of(experts: int) -> int:
    """64-bit words a mask of that many experts needs."""
    return -(-experts // 64)


def _bits(experts: int) -> Masks:
    """Mask of each expert [experts + 1, words]; the last row, which -1 (padding) indexes, is empty."""
    table = np.zeros((experts + 1, words_of(experts)), dtype=np.uint64)
    each = np.arange(experts)
    table[each, each // 64] = np.left_shift(np.uint64(1), (each % 64).astype(np.uint64))
    return table


def pack(ids: npt.NDArray[np.integer], experts: int) -> Masks:
    """Masks uint64 [..., words] of expert ids [..., top_k]; -1 sets no bit.

    Raises MoeplanError for an id outside -1..experts-1.
    >>> pack(np.array([[0, 3], [65, -1]]), 70).tolist()
    [[9, 0], [0, 2]]
    """
    table, words = _bits(experts), words_of(experts)
    flat = ids.reshape(-1, ids.shape[-1])
    masks = np.zeros((len(flat), words), dtype=np.uint64)
    step = max(1, _STEP // words)
    for start in range(0, len(flat), step):
        part = flat[start : start + step]
        if part.size and not -1 <= int(part.min()) <= int(part.max()) < experts:
            bad = part[(part < -1) | (part >= experts)][0]
            raise MoeplanError(f"expert ids: {bad} is outside -1..{experts - 1}")
        out = masks[start : start + step]
        for slot in range(part.shape[1]):
            np.bitwise_or(out, table[part[:, slot]], out=out)
    return masks.reshape(*ids.shape[:-1], words)


def _count_by_byte(masks: Masks) -> npt.NDArray[np.uint8]:
    """Bits set in each word through a table of the 256 bytes: for numpy before 2.0."""
    table = np.array([bin(byte).count("1") for byte in range(256)], dtype=np.uint8)
    return np.asarray(table[masks[..., None].view(np.uint8)].sum(axis=-1, dtype=np.uint8))


def popcount(masks: Masks) -> npt.NDArray[np.integer]:
    """Experts set [...] of masks [..., words]."""
    counts = np.bitwise_count(masks) if hasattr(np, "bitwise_count") else _count_by_byte(masks)
    return counts[..., 0] if masks.shape[-1] == 1 else counts.sum(axis=-1, dtype=np.uint16)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """The masks of a trace, kept [tokens, layers, words] where they fit in memory, else made where they are read."""

    trace: RoutingTrace
    masks: Masks | None

    @classmethod
    def of(cls, trace: RoutingTrace, keep_bytes: int = _KEEP) -> "Packed":
        """Pack a trace, in pieces. Raises MoeplanError for an id out of range."""
        tokens, layers, words = len(trace.expert_ids), trace.layers, words_of(trace.experts)
        if tokens * layers * words * 8 > keep_bytes:
            return cls(trace, None)
        return cls(trace, pack(trace.expert_ids, trace.experts))

    def between(self, first: int, last: int) -> Masks:
        """Masks [last - first, layers, words] of consecutive rows."""
        if self.masks is not None:
            return self.masks[first:last]
        return pack(read_rows(self.trace.expert_ids, first, last), self.trace.experts)

    def union(self, rows: Rows) -> Masks:
        """OR of the rows of each draw: rows [draws, batch] -> masks [draws, layers, words]."""
        layers, words = self.trace.layers, words_of(self.trace.experts)
        out = np.zeros((len(rows), layers * words), dtype=np.uint64)
        step = max(1, _STEP // (layers * words))
        flat = None if self.masks is None else self.masks.reshape(len(self.masks), -1)
        room = np.empty((step, layers * words), dtype=np.uint64)
        for start in range(0, len(rows), step):
            part, acc = rows[start : start + step], out[start : start + step]
            for column in part.T:
                if flat is not None:
                    each = np.take(flat, column, axis=0, out=room[: len(part)], mode="clip")
                else:
                    each = pack(self.trace.expert_ids[column], self.trace.experts).reshape(len(part), -1)
                np.bitwise_or(acc, each, out=acc)
        return out.reshape(len(rows), layers, words)

    def distinct(self, rows: Rows) -> npt.NDArray[np.integer]:
        """Distinct experts [draws, layers] of the cohorts rows [draws, batch]."""
        return popcount(self.union(rows))
