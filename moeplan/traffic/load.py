"""How many rows each expert of one layer receives: the only thing a kernel's work depends on."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moeplan.errors import MoeplanError

Ids = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLoad:
    """Rows per expert of one layer for one batch.

    rows: int32 [experts]; tokens: rows of the batch; padding: slots with id -1, which belong to no expert.
    >>> ExpertLoad.from_ids(np.array([[0, 2], [2, -1]]), 4).rows.tolist()
    [1, 0, 2, 0]
    """

    rows: npt.NDArray[np.int32]
    tokens: int
    padding: int = 0

    @classmethod
    def from_ids(cls, ids: Ids, experts: int) -> "ExpertLoad":
        """Count ids [tokens, top_k] (-1 = padding). Raises MoeplanError for an id outside -1..experts-1."""
        if ids.ndim != 2:
            raise MoeplanError(f"expert ids: expected [tokens, top_k], found {ids.ndim} axes")
        flat = ids.reshape(-1)
        if flat.size and not -1 <= int(flat.min()) <= int(flat.max()) < experts:
            bad = flat[(flat < -1) | (flat >= experts)][0]
            raise MoeplanError(f"expert ids: {bad} is outside -1..{experts - 1}")
        used = flat[flat >= 0]
        rows = np.bincount(used, minlength=experts).astype(np.int32)
        return cls(rows, ids.shape[0], int(flat.size - used.size))

    @property
    def experts(self) -> int:
        """Number of experts, used or not."""
        return int(self.rows.size)

    @property
    def slots(self) -> int:
        """(token, expert) pairs to compute."""
        return int(self.rows.sum())

    @property
    def distinct(self) -> int:
        """Experts with at least one row."""
        return int(np.count_nonzero(self.rows))

    def local(self, ranks: int, rank: int) -> "ExpertLoad":
        """What expert-parallel rank `rank` of `ranks` computes: experts are dealt in equal contiguous runs."""
        if self.experts % ranks or not 0 <= rank < ranks:
            raise MoeplanError(f"--ep {ranks} --rank {rank}: {self.experts} experts need a divisor and a rank below it")
        share = self.experts // ranks
        return ExpertLoad(self.rows[rank * share : (rank + 1) * share], self.tokens, self.padding)
