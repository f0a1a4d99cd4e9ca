"""Synthetic routing traces: a popularity, a lasting preference of each request and a short memory, a layer.

Expert e of a layer scores bias_e + z_e(t); a token takes the top_k scores. z_e is standard normal,

    z = sqrt(lasting) R + sqrt(medium) M(t) + sqrt(short) S(t) + sqrt(rest) N(t),

with R drawn once a request, M and S first-order autoregressive (correlation `decay` a token) and N fresh. Its variance
is 1 whatever the shares are, so the biases alone set the popularity and the correlation at lag d,
c(d) = lasting + medium * medium_decay^d + short * short_decay^d, alone sets the overlap. Biases are solved exactly
(a Poisson binomial over the other experts); shares are fitted to measured overlaps. Layers are independent of each
other, a simplification: real layers are not.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatTable = npt.NDArray[np.float64]
IdTable = npt.NDArray[np.integer]

_NODES = 128  # thresholds of the quadrature; the rectangle rule is exact to rounding on smooth tails
_REACH = 8.0  # standard normals stay within this many deviations
_ROUNDS = 60  # bias updates at most; each about halves the error
_TIGHT = 1e-6  # largest error of a probability at which the biases are done
_CELLS = 1 << 21  # floats of one leave-one-out table
_PAIRS = 6000  # drawn pairs a correlation: the overlap is then good to about 0.01 expert
_GRID = np.concatenate([np.linspace(0.0, 0.9, 13), [0.95, 0.98, 1.0]])  # correlations at which overlap is drawn
_MEDIUM = (0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98)  # decays tried
_SHORT = (0.05, 0.2, 0.35, 0.5, 0.65)


@dataclass(frozen=True, slots=True)
class Stream:
    """Stream parameters of one layer: shares of the score's variance, and correlations a token."""

    lasting: float
    medium: float
    medium_decay: float
    short: float
    short_decay: float

    def correlation(self, lag: npt.ArrayLike) -> FloatTable:
        """Correlation of a score with itself `lag` tokens later in one request."""
        d = np.asarray(lag, dtype=np.float64)
        return np.asarray(self.lasting + self.medium * self.medium_decay**d + self.short * self.short_decay**d)


def inclusion(bias: FloatTable, top_k: int) -> FloatTable:
    """Exact chance [layers, experts] that an expert is among the top_k of bias + standard normal scores.

    P(e in) = integral of e's density at u times P(fewer than top_k of the others lie above u), on a grid of u; the
    others' count is a Poisson binomial, its leave-one-out form the product of a left and a right partial table.
    """
    layers, experts = bias.shape
    step = max(1, _CELLS // (experts * _NODES * top_k))
    parts = [_inclusion(bias[at : at + step], top_k) for at in range(0, layers, step)]
    return np.concatenate(parts)


def _inclusion(bias: FloatTable, top_k: int) -> FloatTable:
    from scipy.special import ndtr

    layers, experts = bias.shape
    low, high = bias.min(axis=1) - _REACH, bias.max(axis=1) + _REACH
    grid = low[:, None] + (high - low)[:, None] * np.linspace(0.0, 1.0, _NODES)
    away = grid[:, None, :] - bias[:, :, None]  # [layers, experts, nodes]
    above = ndtr(-away)
    left = np.zeros((experts + 1, layers, _NODES, top_k))  # P(n of the experts before e lie above u)
    left[0, ..., 0] = 1.0
    for e in range(experts):
        left[e + 1] = _one_more(left[e], above[:, e])
    right = np.zeros((layers, _NODES, top_k))
    right[..., 0] = 1.0
    chance = np.empty_like(bias)
    for e in reversed(range(experts)):
        upto = np.cumsum(right, axis=-1)[..., ::-1]  # P(at most top_k - 1 - n of the experts after e)
        below = np.einsum("lnk,lnk->ln", left[e], upto)
        density = np.exp(-0.5 * away[:, e] ** 2) / np.sqrt(2 * np.pi)
        chance[:, e] = np.sum(density * below, axis=1) * (grid[:, 1] - grid[:, 0])
        right = _one_more(right, above[:, e])
    return chance


def _one_more(table: FloatTable, above: FloatTable) -> FloatTable:
    after = table * (1.0 - above)[..., None]
    after[..., 1:] += table[..., :-1] * above[..., None]
    return after


def biases(shares: FloatTable, top_k: int) -> FloatTable:
    """Score biases [layers, experts] whose top_k picks each expert with chance `shares` [layers, experts]."""
    from scipy.special import ndtri

    wanted = ndtri(np.clip(shares, 1e-7, 1 - 1e-7))
    bias = wanted - wanted.mean(axis=1, keepdims=True)
    for _ in range(_ROUNDS):
        found = inclusion(bias, top_k)
        if np.abs(found - shares).max() < _TIGHT:
            break
        bias = bias + 1.2 * (wanted - ndtri(np.clip(found, 1e-9, 1 - 1e-9)))
    return np.asarray(bias)


def overlap_curve(bias: FloatTable, top_k: int, rng: np.random.Generator) -> FloatTable:
    """Mean shared experts [correlations of the grid] of two tokens of one layer, drawn; rises with correlation."""
    first, other = rng.standard_normal((2, _PAIRS, bias.size))
    chosen = _mark(first + bias, top_k)
    found = [np.count_nonzero(chosen & _mark(c * first + np.sqrt(1 - c * c) * other + bias, top_k)) for c in _GRID]
    return np.asarray(np.maximum.accumulate(np.array(found) / _PAIRS))


def _mark(score: FloatTable, top_k: int) -> npt.NDArray[np.bool_]:
    at = np.argpartition(score, -top_k, axis=1)[:, -top_k:]
    marks = np.zeros(score.shape, dtype=bool)
    np.put_along_axis(marks, at, True, axis=1)
    return marks


def fit_stream(curve: FloatTable, lags: FloatTable, overlap: FloatTable) -> Stream:
    """The shares that best give one layer's overlap at the lags: non-negative least squares over a grid of decays."""
    from scipy.optimize import nnls

    wanted = np.interp(overlap, curve, _GRID)
    best, found = np.inf, Stream(0.0, 0.0, 0.0, 0.0, 0.0)
    for medium in _MEDIUM:
        for short in _SHORT:
            design = np.stack([np.ones_like(lags), medium**lags, short**lags], axis=1)
            shares, off = nnls(design, wanted)
            if off < best and shares.sum() <= 1.0:
                best, found = off, Stream(shares[0], shares[1], medium, shares[2], short)
    return found


def fit_streams(bias: FloatTable, top_k: int, lags: tuple[int, ...], overlap: FloatTable, seed: int) -> list[Stream]:
    """Streams of each layer from measured overlaps [lags, layers]."""
    at = np.array(lags, dtype=np.float64)
    return [
        fit_stream(overlap_curve(row, top_k, np.random.default_rng([seed, 1, layer])), at, overlap[:, layer])
        for layer, row in enumerate(bias)
    ]


def draw_layer(
    bias: FloatTable, stream: Stream, top_k: int, lengths: npt.NDArray[np.int64], rng: np.random.Generator
) -> IdTable:
    """Ids [sum of lengths, top_k] of one layer, request after request; unordered within a row."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    order = np.argsort(-lengths, kind="stable")  # the longest first: those still running are a prefix
    size = (lengths.size, bias.size)
    s = stream
    rest = max(0.0, 1.0 - s.lasting - s.medium - s.short)

    def fresh(rows: int, variance: float) -> npt.NDArray[np.float32]:
        return rng.standard_normal((rows, size[1]), dtype=np.float32) * np.float32(np.sqrt(variance))

    base = bias.astype(np.float32) + fresh(size[0], s.lasting)
    medium, short = fresh(size[0], s.medium), fresh(size[0], s.short)
    ids = np.empty((offsets[-1], top_k), dtype=np.int16 if bias.size > 256 else np.uint8)
    for t in range(int(lengths.max())):
        n = int(np.searchsorted(-lengths[order], -t, side="left"))  # requests longer than t
        if t:
            medium = medium[:n] * np.float32(s.medium_decay) + fresh(n, s.medium * (1 - s.medium_decay**2))
            short = short[:n] * np.float32(s.short_decay) + fresh(n, s.short * (1 - s.short_decay**2))
        score = base[:n] + medium[:n] + short[:n] + fresh(n, rest)
        ids[offsets[order[:n]] + t] = np.argpartition(score, -top_k, axis=1)[:, -top_k:]
    return ids


def draw_ids_of(
    bias: FloatTable, streams: list[Stream], top_k: int, lengths: npt.NDArray[np.int64], seed: int
) -> IdTable:
    """Ids [sum of lengths, layers, top_k]; the same arguments give the same ids, whatever the other layers are."""
    layers = [
        draw_layer(row, stream, top_k, lengths, np.random.default_rng([seed, 2, layer]))
        for layer, (row, stream) in enumerate(zip(bias, streams, strict=True))
    ]
    return np.stack(layers, axis=1)
