"""Exact expectations of an expert load whose tokens choose independently."""

from functools import lru_cache
from math import comb

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_SETTLED = 1e-12  # probability left outside the top state at which more tokens change nothing


def mean_distinct(shares: FloatArray, tokens: int) -> float:
    """Sum over experts of 1 - (1 - p)^tokens: exact for any routing whose tokens are independent draws.

    >>> round(mean_distinct(np.full(128, 8 / 128), 4), 2)
    29.12
    """
    return float(np.sum(1.0 - (1.0 - shares) ** tokens))


def mean_blocks(shares: FloatArray, tokens: int, block_rows: int) -> float:
    """Sum over experts of E[ceil(n / block_rows)] with n ~ binomial(tokens, p): n > m B for m = 0, 1, ..."""
    return mean_passed(shares, tokens, 0, block_rows)


def mean_pairs(shares: FloatArray, tokens: int, block_rows: int) -> float:
    """Sum over experts of E[floor(ceil(n / block_rows) / 2)]: a pair is full once n > m B for m = 1, 3, 5, ...

    >>> uniform = np.full(128, 8 / 128)
    >>> round(mean_pairs(uniform, 1024, 64) / mean_blocks(uniform, 1024, 64), 3)
    0.318
    """
    return mean_passed(shares, tokens, block_rows, 2 * block_rows)


def mean_passed(shares: FloatArray, tokens: int, first: int, step: int) -> float:
    """Expected number of the edges first, first + step, ... that lie below n ~ binomial(tokens, p), over all experts.

    It is the sum of the upper tails P(n > edge). Tails more than twelve standard deviations off the mean are 0 or 1
    to machine precision and are not evaluated.
    """
    from scipy.special import betainc

    values, copies = np.unique(shares, return_counts=True)
    total = 0.0
    for p, number in zip(values, copies, strict=True):
        reach = 12.0 * float(np.sqrt(tokens * p * (1.0 - p))) + 40.0
        sure = max(0, int((tokens * p - reach - first) // step))
        last = min(tokens, int(tokens * p + reach) + 1)
        edges = np.arange(first + sure * step, last, step, dtype=np.float64)
        total += float(number) * (sure + float(np.sum(betainc(edges + 1.0, tokens - edges, p))))
    return total


@lru_cache(maxsize=16)
def _steps(experts: int, top_k: int, local: int) -> FloatArray:
    """Probability [distinct so far, new ones] that a uniform token adds that many of the `local` experts."""
    table = np.zeros((local + 1, top_k + 1))
    whole = comb(experts, top_k)
    for seen in range(local + 1):
        for new in range(min(top_k, local - seen) + 1):
            table[seen, new] = comb(local - seen, new) * comb(experts - local + seen, top_k - new) / whole
    return table


@lru_cache(maxsize=256)
def distinct_distribution(experts: int, top_k: int, tokens: int, local: int | None = None) -> FloatArray:
    """P(distinct = d) for d = 0..local after `tokens` uniform tokens; `local` of the experts count (default all).

    A Markov chain over the number seen, one hypergeometric step a token; it stops when all have surely been seen.
    """
    size = experts if local is None else local
    step = _steps(experts, top_k, size)
    now = np.zeros(size + 1)
    now[0] = 1.0
    for _ in range(tokens):
        after = now * step[:, 0]
        for new in range(1, min(top_k, size) + 1):
            after[new:] += now[:-new] * step[:-new, new]
        now = after
        if 1.0 - now[-1] < _SETTLED:
            break
    return now


def percentile(distribution: FloatArray, share: float) -> int:
    """The smallest value whose cumulative probability reaches `share`."""
    return int(np.searchsorted(np.cumsum(distribution), share - 1e-12))
