# mypy: ignore-errors
# ruff: noqa: N803, PLR0913, PLR0917, PLR1714, SIM108  (kernel language: untyped, constants upper case, many pointers)
"""Pieces shared by the Triton kernels: guarded loads, 4-bit codes, activations, the sum over a token's experts.

Affine weights: a packed word holds eight codes along the input axis. A kernel loads a word once and walks the
eight nibbles in a static loop; inputs are laid out by nibble ("planes": element 8 w + j at [j, w]), so that
nothing is reshaped in registers.
"""

import triton
import triton.language as tl

from moeplan.kernels.triton_interpret import INTERPRETED, repair

repair()
_EMULATED = tl.constexpr(INTERPRETED)


@triton.jit
def load_tile(pointers, ok, EVEN: tl.constexpr):
    """Load, masked with zeros unless EVEN says that the tile always fits."""
    if EVEN:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=ok, other=0)


@triton.jit
def raised_code(words, J: tl.constexpr):
    """2^23 + code J of each word / inverse_unit(J), as float32 (exact).

    The nibble is left where it stands in the mantissa of 2^23: one logic operation instead of a conversion.
    Nibbles 5 to 7 stand too high and are shifted by three places first.
    """
    if J < 5:
        low = words
        mask: tl.constexpr = 15 << (4 * J)
    else:
        low = words >> 12
        mask: tl.constexpr = 15 << (4 * J - 12)
    if _EMULATED:
        bits = (low & mask) | 0x4B000000
    elif mask == 0xF:  # 0xEA: (a & b) | c; the compiler would spend two operations on it
        bits = _asm("lop3.b32 $0, $1, 0xF, 0x4B000000, 0xEA;", low)
    elif mask == 0xF0:
        bits = _asm("lop3.b32 $0, $1, 0xF0, 0x4B000000, 0xEA;", low)
    elif mask == 0xF00:
        bits = _asm("lop3.b32 $0, $1, 0xF00, 0x4B000000, 0xEA;", low)
    elif mask == 0xF000:
        bits = _asm("lop3.b32 $0, $1, 0xF000, 0x4B000000, 0xEA;", low)
    else:
        bits = _asm("lop3.b32 $0, $1, 0xF0000, 0x4B000000, 0xEA;", low)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _asm(TEXT: tl.constexpr, word):
    return tl.inline_asm_elementwise(TEXT, "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def inverse_unit(J: tl.constexpr):
    """The value of one code step is 1 / inverse_unit in `raised_code`."""
    if J < 5:
        return 1.0 / (1 << (4 * J))
    else:
        return 1.0 / (1 << (4 * J - 12))


@triton.jit
def stands_high(J: tl.constexpr):
    """Whether 2^23 may be taken away after the products: then it is at most 2048 code steps, which float32 bears."""
    return (J == 3) or (J == 4) or (J == 6) or (J == 7)


@triton.jit
def group_tile(base, rows, ok, first, GROUPS, SPAN: tl.constexpr, BN: tl.constexpr, W: tl.constexpr,
               EVEN: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Per-group values of rows [BN] and words first .. first + W, float32 [BN, W]; SPAN words share a group.

    WIDE reads one value a word (repeats come from L1); otherwise each is read once and broadcast.
    """
    if WIDE:
        group = (first + tl.arange(0, W)) // SPAN
        inside = ok[:, None] & (group < GROUPS)[None, :]
        return load_tile(base + rows[:, None] * GROUPS + group[None, :], inside, EVEN).to(tl.float32)
    else:
        group = first // SPAN + tl.arange(0, W // SPAN)
        inside = ok[:, None] & (group < GROUPS)[None, :]
        small = load_tile(base + rows[:, None] * GROUPS + group[None, :], inside, EVEN).to(tl.float32)
        return tl.reshape(tl.broadcast_to(small[:, :, None], [BN, W // SPAN, SPAN]), [BN, W])


@triton.jit
def product(left, right, total):
    """total + left @ right, bf16 factors and float32 sums; the interpreter has no bf16 product, so it widens."""
    if _EMULATED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total)
    else:
        return tl.dot(left, right, total)


@triton.jit
def activated(gate, up, GEGLU: tl.constexpr):
    """silu(gate) * up, or gelu(gate) * up by the tanh approximation: 0.5 (1 + tanh z) = sigmoid(2 z)."""
    if GEGLU:
        z = gate * (1.5957691216057308 + 0.07135481627159996 * gate * gate)  # 2 sqrt(2/pi), and that times 0.044715
    else:
        z = gate
    return gate / (1.0 + tl.exp(-z)) * up


@triton.jit
def combine(partial, ids, residual, out, H: tl.constexpr, TOP_K: tl.constexpr, RESIDUAL: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    """out[t] = residual[t] + sum over a token's slots, in slot order, in float32, with one final rounding."""
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = column < H
    total = tl.full([BLOCK], 0.0, tl.float32)
    for s in tl.static_range(TOP_K):
        slot = token * TOP_K + s
        end = tl.where(tl.load(ids + slot) >= 0, H, 0)  # an unused slot was never written
        total += tl.load(partial + slot * H + column, mask=column < end, other=0.0)
    if RESIDUAL:
        total += tl.load(residual + token * H + column, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + token * H + column, total.to(out.dtype.element_ty), mask=ok)
