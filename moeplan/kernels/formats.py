"""Weight storage in numpy: bf16 as uint16, and MLX's affine packing (codes in uint32 words, lowest bits first)."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moeplan.errors import MoeplanError
from moeplan.traffic.shape import LayerShape, WeightFormat

Words = npt.NDArray[np.uint32]
Halves = npt.NDArray[np.uint16]
Dense = npt.NDArray[np.float64]


def to_bf16(values: npt.ArrayLike) -> Halves:
    """Bits of bfloat16, round to nearest, ties to even; NaN stays NaN, overflow becomes infinity."""
    bits = np.ascontiguousarray(np.asarray(values, np.float32)).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, ((bits >> 16) | 0x40).astype(np.uint16), rounded)


def from_bf16(bits: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """float32 of bfloat16 bits (uint16), exact."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def _per_word(bits: int) -> int:
    if bits not in (4, 8):
        raise MoeplanError(f"affine packing: {bits}-bit codes are not supported (4 and 8 are)")
    return 32 // bits


def pack(codes: npt.ArrayLike, bits: int) -> Words:
    """Codes [..., K] in 0..2^bits - 1 to words [..., K * bits / 32]; code i of a word sits at bit i * bits.

    Raises MoeplanError for bits other than 4 and 8, a K that does not fill whole words, or a code out of range.
    """
    per, values = _per_word(bits), np.asarray(codes)
    if values.shape[-1] % per:
        raise MoeplanError(f"affine packing: {values.shape[-1]} codes do not fill whole words of {per}")
    if values.size and (values.min() < 0 or values.max() >= 1 << bits):
        raise MoeplanError(f"affine packing: a code lies outside 0..{(1 << bits) - 1}")
    parts = values.astype(np.uint32).reshape(*values.shape[:-1], -1, per)
    shifts = np.arange(per, dtype=np.uint32) * np.uint32(bits)
    return np.asarray(np.bitwise_or.reduce(parts << shifts, axis=-1), np.uint32)


def unpack(words: Words, bits: int) -> npt.NDArray[np.uint32]:
    """The inverse of `pack`: words [..., W] to codes [..., W * 32 / bits]."""
    per = _per_word(bits)
    shifts = np.arange(per, dtype=np.uint32) * np.uint32(bits)
    codes = (np.asarray(words, np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return np.asarray(codes, np.uint32).reshape(*words.shape[:-1], words.shape[-1] * per)


def dequantize(words: Words, scales: npt.NDArray[Any], biases: npt.NDArray[Any], bits: int, group: int) -> Dense:
    """w = scale * code + bias in float64; scales and biases are real numbers [..., K / group]."""
    codes = unpack(words, bits).astype(np.float64)
    if codes.shape[-1] != scales.shape[-1] * group or scales.shape != biases.shape:
        raise MoeplanError(f"affine packing: {codes.shape[-1]} codes with {scales.shape[-1]} groups of {group}")
    scale = np.repeat(np.asarray(scales, np.float64), group, axis=-1)
    return scale * codes + np.repeat(np.asarray(biases, np.float64), group, axis=-1)


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """One matrix of every expert: bf16 bits [E, N, K], or words [E, N, K * bits / 32] with bf16 scales and biases."""

    format: WeightFormat
    weight: npt.NDArray[Any]  # uint16 (bf16) or uint32 (affine)
    scales: Halves | None = None  # [E, N, K / group]
    biases: Halves | None = None

    def dense(self, expert: int) -> Dense:
        """The weights of one expert as kernels must read them: float64 [N, K], exact."""
        if self.scales is None or self.biases is None:
            return from_bf16(self.weight[expert]).astype(np.float64)
        scales, biases = from_bf16(self.scales[expert]), from_bf16(self.biases[expert])
        return dequantize(self.weight[expert], scales, biases, self.format.bits, self.format.group)


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """The planes of one layer."""

    gate: Matrix | None
    up: Matrix
    down: Matrix

    def dense(self, expert: int) -> tuple[Dense | None, Dense, Dense]:
        """Gate, up and down of one expert: the `planes` callable of `reference.moe_layer`."""
        return self.gate.dense(expert) if self.gate else None, self.up.dense(expert), self.down.dense(expert)


def code_std(bits: int) -> float:
    """Standard deviation of a code drawn evenly from 0..2^bits - 1."""
    return float(np.sqrt(((1 << bits) ** 2 - 1) / 12.0))


def random_planes(shape: LayerShape, seed: int) -> Experts:
    """Random planes whose matrices have zero mean and a standard deviation of about 1 / sqrt(fan_in).

    Codes are even in 0..2^bits - 1; the bias of a group is -(2^bits - 1) / 2 * scale, both jittered by up to 10 %
    a group, so that a kernel which mixes up groups is caught. Raises MoeplanError for other formats than bf16 and
    affine 4 and 8 bits.
    """
    rng = np.random.default_rng(seed)
    wide, narrow = (
        (shape.experts, shape.expert_hidden, shape.hidden),
        (shape.experts, shape.hidden, shape.expert_hidden),
    )
    gate = _draw(rng, shape.gate, wide) if shape.gate else None
    return Experts(gate, _draw(rng, shape.up, wide), _draw(rng, shape.down, narrow))


def _draw(rng: np.random.Generator, form: WeightFormat, size: tuple[int, int, int]) -> Matrix:
    experts, rows, fan_in = size
    if form.name == "bf16":
        return Matrix(form, to_bf16(rng.standard_normal(size, dtype=np.float32) / np.float32(np.sqrt(fan_in))))
    if not form.name.startswith("affine") or form.bits not in (4, 8):
        raise MoeplanError(f"random planes: weight format {form.name!r} is not supported (bf16, affine4, affine8)")
    if fan_in % form.group:
        raise MoeplanError(f"random planes: {fan_in} inputs are not a multiple of the group {form.group}")
    per = _per_word(form.bits)
    words = rng.integers(0, 1 << 32, size=(experts, rows, fan_in // per), dtype=np.uint32)
    groups = (experts, rows, fan_in // form.group)
    base = 1.0 / (np.sqrt(fan_in) * code_std(form.bits))
    scales = base * rng.uniform(0.9, 1.1, groups)
    biases = -0.5 * ((1 << form.bits) - 1) * scales * rng.uniform(0.98, 1.02, groups)
    return Matrix(form, words, to_bf16(scales), to_bf16(biases))
