# mypy: ignore-errors
# ruff: noqa: N803, N806, PLR0913, PLR0917  (kernel language: untyped, constants upper case, many pointers)
"""`fused`: one program per slot and tile of rows, so a plane is read once a slot; row-wise batch invariant.

Launch A: gate, up and activation -> act [slots, expert_hidden] float32. Launch B: down times the score ->
partial [slots, hidden] float32. Launch C: `triton_common.combine`. No kernel knows the number of tokens: it is
the last dimension of the grid and nothing else.
"""

import triton
import triton.language as tl

from moeplan.kernels.triton_common import activated, group_tile, inverse_unit, load_tile, raised_code, stands_high


@triton.jit
def fused_gate_up_affine4(x, ids, wg, sg, bg, wu, su, bu, act, KW: tl.constexpr, N: tl.constexpr,
                          TOP_K: tl.constexpr, SPAN: tl.constexpr, GEGLU: tl.constexpr,
                          BN: tl.constexpr, W: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """x: bf16 [tokens, 8 KW] seen as int64 [tokens, 2 KW]; act: float32 [slots, 8, N / 8] (planes)."""
    slot = tl.program_id(1).to(tl.int64)
    expert = tl.load(ids + slot).to(tl.int64)
    if expert < 0:
        return
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    ok = rows < N
    EVEN: tl.constexpr = (KW % W == 0) and (N % BN == 0)
    x += slot // TOP_K * (2 * KW)
    wg += expert * (N * KW)
    wu += expert * (N * KW)
    groups = expert * (N * (KW // SPAN))
    gate = tl.full([BN, W], 0.0, tl.float32)
    up = tl.full([BN, W], 0.0, tl.float32)
    for first in tl.static_range(0, KW, W):
        word = first + tl.arange(0, W)
        inside = ok[:, None] & (word < KW)[None, :]
        at = rows[:, None] * KW + word[None, :]
        codes_g = load_tile(wg + at, inside, EVEN)
        codes_u = load_tile(wu + at, inside, EVEN)
        g = tl.full([BN, W], 0.0, tl.float32)
        u = tl.full([BN, W], 0.0, tl.float32)
        total = tl.full([W], 0.0, tl.float32)
        excess = tl.full([W], 0.0, tl.float32)
        for j in tl.static_range(8):
            four = load_tile(x + 2 * word + j // 4, word < KW, KW % W == 0)
            two = (four >> (j % 4 // 2 * 32)).to(tl.int32)
            one = (two << 16) if j % 2 == 0 else (two & -65536)
            value = one.to(tl.float32, bitcast=True)
            total += value
            value *= inverse_unit(j)
            if stands_high(j):
                g += raised_code(codes_g, j) * value[None, :]
                u += raised_code(codes_u, j) * value[None, :]
                excess += 8388608.0 * value
            else:
                g += (raised_code(codes_g, j) - 8388608.0) * value[None, :]
                u += (raised_code(codes_u, j) - 8388608.0) * value[None, :]
        scale = group_tile(sg + groups, rows, ok, first, KW // SPAN, SPAN, BN, W, EVEN, WIDE)
        gate += (g - excess) * scale + group_tile(
            bg + groups, rows, ok, first, KW // SPAN, SPAN, BN, W, EVEN, WIDE
        ) * total
        scale = group_tile(su + groups, rows, ok, first, KW // SPAN, SPAN, BN, W, EVEN, WIDE)
        up += (u - excess) * scale + group_tile(
            bu + groups, rows, ok, first, KW // SPAN, SPAN, BN, W, EVEN, WIDE
        ) * total
    hidden = activated(tl.sum(gate, 1), tl.sum(up, 1), GEGLU)
    tl.store(act + slot * N + rows % 8 * (N // 8) + rows // 8, hidden, mask=ok)


@triton.jit
def fused_down_affine4(act, ids, scores, wd, sd, bd, partial, KW: tl.constexpr, N: tl.constexpr,
                       SPAN: tl.constexpr, BN: tl.constexpr, W: tl.constexpr,
                       WIDE: tl.constexpr):  # fmt: skip
    """act: float32 [slots, 8, KW] (planes); partial: float32 [slots, N], multiplied with the score."""
    slot = tl.program_id(1).to(tl.int64)
    expert = tl.load(ids + slot).to(tl.int64)
    if expert < 0:
        return
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    ok = rows < N
    EVEN: tl.constexpr = (KW % W == 0) and (N % BN == 0)
    act += slot * (8 * KW)
    wd += expert * (N * KW)
    groups = expert * (N * (KW // SPAN))
    down = tl.full([BN, W], 0.0, tl.float32)
    for first in tl.static_range(0, KW, W):
        word = first + tl.arange(0, W)
        codes = load_tile(wd + rows[:, None] * KW + word[None, :], ok[:, None] & (word < KW)[None, :], EVEN)
        d = tl.full([BN, W], 0.0, tl.float32)
        total = tl.full([W], 0.0, tl.float32)
        excess = tl.full([W], 0.0, tl.float32)
        for j in tl.static_range(8):
            value = load_tile(act + j * KW + word, word < KW, KW % W == 0)
            total += value
            value *= inverse_unit(j)
            if stands_high(j):
                d += raised_code(codes, j) * value[None, :]
                excess += 8388608.0 * value
            else:
                d += (raised_code(codes, j) - 8388608.0) * value[None, :]
        scale = group_tile(sd + groups, rows, ok, first, KW // SPAN, SPAN, BN, W, EVEN, WIDE)
        down += (d - excess) * scale + group_tile(
            bd + groups, rows, ok, first, KW // SPAN, SPAN, BN, W, EVEN, WIDE
        ) * total
    tl.store(partial + slot * N + rows, tl.sum(down, 1) * tl.load(scores + slot), mask=ok)


@triton.jit
def fused_gate_up_bf16(x, ids, wg, wu, act, K: tl.constexpr, N: tl.constexpr, TOP_K: tl.constexpr,
                       GEGLU: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """x: bf16 [tokens, K]; act: float32 [slots, N]."""
    slot = tl.program_id(1).to(tl.int64)
    expert = tl.load(ids + slot).to(tl.int64)
    if expert < 0:
        return
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    ok = rows < N
    EVEN: tl.constexpr = (K % BK == 0) and (N % BN == 0)
    wg += expert * (N * K)
    wu += expert * (N * K)
    gate = tl.full([BN, BK], 0.0, tl.float32)
    up = tl.full([BN, BK], 0.0, tl.float32)
    for first in tl.static_range(0, K, BK):
        column = first + tl.arange(0, BK)
        inside = ok[:, None] & (column < K)[None, :]
        at = rows[:, None] * K + column[None, :]
        value = load_tile(x + slot // TOP_K * K + column, column < K, K % BK == 0).to(tl.float32)[None, :]
        gate += load_tile(wg + at, inside, EVEN).to(tl.float32) * value
        up += load_tile(wu + at, inside, EVEN).to(tl.float32) * value
    tl.store(act + slot * N + rows, activated(tl.sum(gate, 1), tl.sum(up, 1), GEGLU), mask=ok)


@triton.jit
def fused_down_bf16(act, ids, scores, wd, partial, K: tl.constexpr, N: tl.constexpr, BN: tl.constexpr,
                    BK: tl.constexpr):  # fmt: skip
    """act: float32 [slots, K]; partial: float32 [slots, N], multiplied with the score."""
    slot = tl.program_id(1).to(tl.int64)
    expert = tl.load(ids + slot).to(tl.int64)
    if expert < 0:
        return
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    ok = rows < N
    EVEN: tl.constexpr = (K % BK == 0) and (N % BN == 0)
    wd += expert * (N * K)
    down = tl.full([BN, BK], 0.0, tl.float32)
    for first in tl.static_range(0, K, BK):
        column = first + tl.arange(0, BK)
        value = load_tile(act + slot * K + column, column < K, K % BK == 0)[None, :]
        inside = ok[:, None] & (column < K)[None, :]
        down += load_tile(wd + rows[:, None] * K + column[None, :], inside, EVEN).to(tl.float32) * value
    tl.store(partial + slot * N + rows, tl.sum(down, 1) * tl.load(scores + slot), mask=ok)
