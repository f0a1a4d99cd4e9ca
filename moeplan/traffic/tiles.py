"""Tiles: the rows that share one plane read. Sorted blocks pad each expert; runs cut one sorted slot list."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moeplan.traffic.load import ExpertLoad
from moeplan.traffic.path import PathSpec


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """The blocks that an aligned (sorted and padded) kernel runs.

    blocks: int32 [experts], ceil(rows / block_rows); used_rows: rows that are not padding.
    >>> BlockTable.of(ExpertLoad(np.array([3, 0, 17], np.int32), 20), 16).blocks.tolist()
    [1, 0, 2]
    """

    blocks: npt.NDArray[np.int32]
    block_rows: int
    used_rows: int

    @classmethod
    def of(cls, load: ExpertLoad, block_rows: int) -> "BlockTable":
        """Cut a load into blocks of `block_rows` rows."""
        return cls((-(-load.rows // block_rows)).astype(np.int32), block_rows, load.slots)

    @property
    def count(self) -> int:
        """Blocks in all: one plane read each."""
        return int(self.blocks.sum())

    @property
    def padded_rows(self) -> int:
        """Rows computed for nothing."""
        return self.count * self.block_rows - self.used_rows

    @property
    def occupancy(self) -> float:
        """Useful rows a computed row; 0 where there is no block."""
        return self.used_rows / (self.count * self.block_rows) if self.count else 0.0

    @property
    def pairs(self) -> int:
        """Adjacent blocks of one expert that could share a plane read: floor(blocks / 2) an expert."""
        return int((self.blocks // 2).sum())

    @property
    def leaders(self) -> int:
        """Plane reads left when every pair is merged."""
        return self.count - self.pairs

    @property
    def pair_count_fraction(self) -> float:
        """Pairs / blocks: the share of plane reads that pairing removes."""
        return self.pairs / self.count if self.count else 0.0

    @property
    def paired_block_fraction(self) -> float:
        """2 * pairs / blocks: the share of blocks that sit in a pair."""
        return 2 * self.pair_count_fraction


def run_reads(rows: npt.NDArray[np.int32], tile_rows: int) -> npt.NDArray[np.int64]:
    """Plane reads [...] of a kernel that walks one sorted slot list in tiles and reads each expert once a tile.

    rows [..., experts]. A tile boundary strictly inside an expert's run makes that expert be read again, so the
    count is distinct + such boundaries (MLX Metal `gather_qmm_rhs`, 16-row tiles).
    """
    ends = np.cumsum(rows, axis=-1, dtype=np.int64)
    tiles = (ends - 1) // tile_rows - (ends - rows) // tile_rows + 1
    return np.asarray(np.where(rows > 0, tiles, 0).sum(axis=-1))


def sorts(path: PathSpec, slots: npt.ArrayLike, experts: int) -> npt.NDArray[np.bool_]:
    """Whether a path that shares planes only on long sorted lists does so here (`PathSpec.sorted_from`)."""
    count = np.asarray(slots)
    if path.sorted_from is None:
        return np.ones(count.shape, dtype=bool)
    return np.asarray((count >= path.sorted_from[0]) & (count // experts >= path.sorted_from[1]))


def tile_counts(path: PathSpec, rows: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Tiles (= plane reads) and padded rows [...] of a path on rows per expert [..., experts]."""
    slots = rows.sum(axis=-1, dtype=np.int64)
    if path.reuse == "slot":
        return slots, np.zeros_like(slots)
    if path.reuse == "distinct":
        distinct = np.count_nonzero(rows, axis=-1)
        return np.asarray(distinct, dtype=np.int64), np.zeros_like(slots)
    if path.runs:
        tiles = run_reads(rows, path.block_rows)
    else:
        tiles = np.asarray((-(-rows // path.block_rows)).sum(axis=-1, dtype=np.int64))
    shared = sorts(path, slots, rows.shape[-1])
    padded = tiles * path.block_rows - slots
    return np.where(shared, tiles, slots), np.where(shared, padded, 0)


def tiles_of(path: PathSpec, load: ExpertLoad) -> tuple[int, int]:
    """Tiles (= plane reads) and padded rows of a path on one load."""
    tiles, padded = tile_counts(path, load.rows)
    return int(tiles), int(padded)
