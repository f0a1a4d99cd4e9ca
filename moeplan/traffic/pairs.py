"""Pairs of adjacent sorted blocks of one expert: how many a block table or a routing has."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moeplan.errors import MoeplanError
from moeplan.traffic.chance import mean_blocks, mean_distinct, mean_pairs
from moeplan.traffic.expect import Case
from moeplan.traffic.path import parse_path

_MOST = 1_000_000  # experts, and blocks of one expert: far beyond any launch


@dataclass(frozen=True, slots=True)
class PairCounts:
    """Counts of one MoE layer: whole numbers of a given table, means over draws or expectations otherwise.

    blocks: sorted blocks up to the padded count, ids of -1 left out. distinct: experts with a block.

    >>> counts = PairCounts.of(parse_blocks("173x1,84x2,2x3"))
    >>> counts.blocks, counts.pairs, counts.leaders, counts.solos
    (347.0, 86.0, 261.0, 175.0)
    """

    blocks: float
    pairs: float
    distinct: float

    @classmethod
    def of(cls, blocks: npt.NDArray[np.integer]) -> "PairCounts":
        """From blocks per expert [..., experts]: the mean over all leading axes."""
        each = np.atleast_2d(blocks)
        sums = (each.sum(axis=-1), (each // 2).sum(axis=-1), np.count_nonzero(each, axis=-1))
        return cls(*(float(np.mean(column)) for column in sums))

    @classmethod
    def expected(cls, case: Case, block_rows: int) -> "PairCounts":
        """One layer of a case: exact where its tokens choose independently, a mean over seeded draws elsewhere."""
        if case.marginals is None:
            rows = case.shares(parse_path(f"grouped:{block_rows}"))
            return cls.of(-(-rows // block_rows))
        sums = [
            (mean_blocks(p, case.tokens, block_rows), mean_pairs(p, case.tokens, block_rows)) for p in case.marginals
        ]
        distinct = np.mean([mean_distinct(p, case.tokens) for p in case.marginals])
        blocks, pairs = np.mean(sums, axis=0)
        return cls(float(blocks), float(pairs), float(distinct))

    @property
    def leaders(self) -> float:
        """Tiles when every pair is merged: plane reads left."""
        return self.blocks - self.pairs

    @property
    def solos(self) -> float:
        """Blocks in no pair: leaders that must not store a second half."""
        return self.blocks - 2 * self.pairs

    @property
    def pair_count_fraction(self) -> float:
        """Pairs / blocks: the share of plane reads that pairing removes. Of means: the ratio of the means."""
        return self.pairs / self.blocks if self.blocks else 0.0

    @property
    def paired_block_fraction(self) -> float:
        """2 * pairs / blocks: the share of blocks that sit in a pair."""
        return 2 * self.pair_count_fraction

    @property
    def traffic_ceiling(self) -> float:
        """Plane reads before / after: the most that pairing can gain if no cache serves the second read."""
        return 1 / (1 - self.pair_count_fraction)


def parse_blocks(text: str) -> npt.NDArray[np.int64]:
    """Blocks per expert int64 [experts] of `173x1,84x2,2x3`: 173 experts of one block, 84 of two, 2 of three.

    Raises MoeplanError naming the part that is no such count.
    """
    found = []
    for part in text.split(","):
        experts, _, blocks = part.strip().partition("x")
        if not all(word.isascii() and word.isdecimal() and len(word) < 8 for word in (experts, blocks)):
            raise MoeplanError(f"--blocks {text}: {part.strip()!r} is not EXPERTSxBLOCKS, e.g. 173x1,84x2")
        found.append((int(experts), int(blocks)))
    if not 1 <= sum(experts for experts, _ in found) <= _MOST or max(blocks for _, blocks in found) > _MOST:
        raise MoeplanError(f"--blocks {text}: 1..{_MOST} experts of at most {_MOST} blocks")
    table = np.concatenate([np.full(experts, blocks, dtype=np.int64) for experts, blocks in found])
    if not table.any():
        raise MoeplanError(f"--blocks {text}: no expert has a block")
    return table


def blocks_of_ids(expert_of_block: npt.NDArray[np.integer], padded_rows: int, block_rows: int) -> npt.NDArray[np.int64]:
    """Blocks per expert int64 [experts] of a sorted block -> expert table [blocks], as an align kernel writes it.

    Entries past padded_rows / block_rows and ids of -1 do not count. Raises MoeplanError where the used part is not
    sorted, so that blocks of one expert need not be adjacent, or is shorter than the padded count says.
    """
    used, rest = divmod(padded_rows, block_rows)
    if rest or not 0 <= used <= expert_of_block.size:
        raise MoeplanError(
            f"padded rows {padded_rows}: expected a multiple of {block_rows} up to {expert_of_block.size * block_rows}"
        )
    ids = expert_of_block[:used]
    ids = ids[ids >= 0]
    if np.any(np.diff(ids) < 0):
        raise MoeplanError(
            f"block {int(np.flatnonzero(np.diff(ids) < 0)[0]) + 1}: the experts of the blocks are not sorted"
        )
    return np.bincount(ids).astype(np.int64)
