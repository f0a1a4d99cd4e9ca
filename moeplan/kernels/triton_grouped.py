# mypy: ignore-errors
# ruff: noqa: N803, N806, PLR0913, PLR0917  (kernel language: untyped, constants upper case, many pointers)
"""`grouped:B`: slots sorted by expert in padded blocks of B rows; a plane is read once a block.

Launch 1: `align` (histogram, stable sort, block table, and x by nibble planes). Launch 2: gate, up and activation
as block products. Launch 3: down times the score -> partial [slots, hidden] float32. Launch 4: `combine`. The grid
is padded to the most blocks that the token count allows; programs beyond the real count leave at once. Weights are
the left factor of each product, so that codes are turned into bf16 in the registers that feed the tensor
cores. Padding rows are not read and not stored.
Within one token count a result is deterministic; it is not promised to be the same in another batch.
"""

import triton
import triton.language as tl

from moeplan.kernels.triton_common import (
    activated,
    group_tile,
    inverse_unit,
    load_tile,
    product,
    raised_code,
    stands_high,
)


@triton.jit(do_not_specialize=["slots"])
def align(ids, order, block_expert, count, x, planes, slots, E: tl.constexpr, BINS: tl.constexpr,
          BM: tl.constexpr, CHUNK: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr):  # fmt: skip
    """Program e < E writes the blocks of expert e; program E + t lays row t of x out by nibble planes.

    order int32 [blocks * BM]: slots by expert, each expert's in slot order and padded with -1 to whole blocks;
    block_expert int32 [blocks]; count int32 [1]: blocks in use (what lies beyond them is not written). Ids outside
    0..E-1 are dropped. WORDS: K / 8 rounded up to a power of two, or 0 for no planes.
    """
    expert = tl.program_id(0)
    if expert >= E:
        row = (expert - E).to(tl.int64) * K
        word = tl.arange(0, WORDS if WORDS else 1)[:, None]
        nibble = tl.arange(0, 8)[None, :]
        values = tl.load(x + row + word * 8 + nibble, mask=word < K // 8, other=0.0)
        tl.store(planes + row + nibble * (K // 8) + word, values, mask=word < K // 8)
    else:
        bins = tl.arange(0, BINS)
        counts = tl.full([BINS], 0, tl.int32)
        for start in range(0, slots, CHUNK):
            slot = start + tl.arange(0, CHUNK)
            chosen = tl.load(ids + slot, mask=slot < slots, other=-1)
            counts += tl.histogram(tl.where((chosen < 0) | (chosen >= E), E, chosen), BINS)
        blocks = tl.where(bins < E, (counts + BM - 1) // BM, 0)
        first = tl.sum(tl.where(bins < expert, blocks, 0))
        mine = tl.sum(tl.where(bins == expert, blocks, 0))
        done = first * BM
        for start in range(0, slots, CHUNK):
            slot = start + tl.arange(0, CHUNK)
            own = (tl.load(ids + slot, mask=slot < slots, other=-1) == expert).to(tl.int32)
            tl.store(order + done + tl.cumsum(own, 0) - 1, slot, mask=own > 0)
            done += tl.sum(own)
        pad = done + tl.arange(0, BM)
        tl.store(order + pad, tl.full([BM], -1, tl.int32), mask=pad < (first + mine) * BM)
        for start in range(0, mine, 32):
            block = start + tl.arange(0, 32)
            tl.store(block_expert + first + block, tl.full([32], 0, tl.int32) + expert, mask=block < mine)
        if expert == E - 1:
            tl.store(count, first + mine)


@triton.jit
def weight_tile(words, scale, bias, J: tl.constexpr):
    """scale * code + bias as bf16: computed in float32, rounded once."""
    if stands_high(J):
        return (raised_code(words, J) * (scale * inverse_unit(J)) + (bias - 8388608.0 * inverse_unit(J) * scale)).to(
            tl.bfloat16
        )
    else:
        return ((raised_code(words, J) - 8388608.0) * (scale * inverse_unit(J)) + bias).to(tl.bfloat16)


@triton.jit
def grouped_gate_up_affine4(planes, order, block_expert, count, wg, sg, bg, wu, su, bu, act,
                            KW: tl.constexpr, N: tl.constexpr, TOP_K: tl.constexpr, SPAN: tl.constexpr,
                            GEGLU: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, W: tl.constexpr,
                            WIDE: tl.constexpr):  # fmt: skip
    """planes: bf16 [tokens, 8, KW]; act: bf16 [slots, 8, N / 8] (planes of the next product)."""
    block = tl.program_id(1)
    if block >= tl.load(count):
        return
    expert = tl.load(block_expert + block).to(tl.int64)
    slot = tl.load(order + block * BM + tl.arange(0, BM)).to(tl.int64)
    used = slot >= 0  # padding rows read nothing: one shared row would be a hot spot in the cache
    token = tl.where(used, slot, 0) // TOP_K
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    ok = rows < N
    EVEN: tl.constexpr = (KW % W == 0) and (N % BN == 0)
    wg += expert * (N * KW)
    wu += expert * (N * KW)
    groups = expert * (N * (KW // SPAN))
    gate = tl.full([BN, BM], 0.0, tl.float32)
    up = tl.full([BN, BM], 0.0, tl.float32)
    for first in range(0, KW, W):
        word = first + tl.arange(0, W)
        inside = ok[:, None] & (word < KW)[None, :]
        at = rows[:, None] * KW + word[None, :]
        codes_g = load_tile(wg + at, inside, EVEN)
        codes_u = load_tile(wu + at, inside, EVEN)
        scale_g = group_tile(sg + groups, rows, ok, first, KW // SPAN, SPAN, BN, W, EVEN, WIDE)
        bias_g = group_tile(bg + groups, rows, ok, first, KW // SPAN, SPAN, BN, W, EVEN, WIDE)
        scale_u = group_tile(su + groups, rows, ok, first, KW // SPAN, SPAN, BN, W, EVEN, WIDE)
        bias_u = group_tile(bu + groups, rows, ok, first, KW // SPAN, SPAN, BN, W, EVEN, WIDE)
        for j in tl.static_range(8):
            here = planes + token[None, :] * (8 * KW) + j * KW + word[:, None]
            value = tl.load(here, mask=used[None, :] & (word < KW)[:, None], other=0.0)
            gate = product(weight_tile(codes_g, scale_g, bias_g, j), value, gate)
            up = product(weight_tile(codes_u, scale_u, bias_u, j), value, up)
    hidden = activated(gate, up, GEGLU).to(tl.bfloat16)
    at = slot[None, :] * N + (rows % 8 * (N // 8) + rows // 8)[:, None]
    tl.store(act + at, hidden, mask=ok[:, None] & used[None, :])


@triton.jit
def grouped_down_affine4(act, order, block_expert, count, scores, wd, sd, bd, partial, KW: tl.constexpr,
                         N: tl.constexpr, SPAN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                         W: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """act: bf16 [slots, 8, KW]; partial: float32 [slots, N], multiplied with the score."""
    block = tl.program_id(1)
    if block >= tl.load(count):
        return
    expert = tl.load(block_expert + block).to(tl.int64)
    slot = tl.load(order + block * BM + tl.arange(0, BM)).to(tl.int64)
    used = slot >= 0
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    ok = rows < N
    EVEN: tl.constexpr = (KW % W == 0) and (N % BN == 0)
    wd += expert * (N * KW)
    groups = expert * (N * (KW // SPAN))
    down = tl.full([BN, BM], 0.0, tl.float32)
    for first in range(0, KW, W):
        word = first + tl.arange(0, W)
        codes = load_tile(wd + rows[:, None] * KW + word[None, :], ok[:, None] & (word < KW)[None, :], EVEN)
        scale = group_tile(sd + groups, rows, ok, first, KW // SPAN, SPAN, BN, W, EVEN, WIDE)
        bias = group_tile(bd + groups, rows, ok, first, KW // SPAN, SPAN, BN, W, EVEN, WIDE)
        for j in tl.static_range(8):
            here = act + tl.where(used, slot, 0)[None, :] * (8 * KW) + j * KW + word[:, None]
            value = tl.load(here, mask=used[None, :] & (word < KW)[:, None], other=0.0)
            down = product(weight_tile(codes, scale, bias, j), value, down)
    weight = tl.load(scores + slot, mask=used, other=0.0)
    at = slot[None, :] * N + rows[:, None]
    tl.store(partial + at, down * weight[None, :], mask=ok[:, None] & used[None, :])


@triton.jit
def grouped_gate_up_bf16(x, order, block_expert, count, wg, wu, act, K: tl.constexpr, N: tl.constexpr,
                         TOP_K: tl.constexpr, GEGLU: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                         BK: tl.constexpr):  # fmt: skip
    """x: bf16 [tokens, K]; act: bf16 [slots, N]."""
    block = tl.program_id(1)
    if block >= tl.load(count):
        return
    expert = tl.load(block_expert + block).to(tl.int64)
    slot = tl.load(order + block * BM + tl.arange(0, BM)).to(tl.int64)
    used = slot >= 0  # padding rows read nothing: one shared row would be a hot spot in the cache
    token = tl.where(used, slot, 0) // TOP_K
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    ok = rows < N
    EVEN: tl.constexpr = (K % BK == 0) and (N % BN == 0)
    wg += expert * (N * K)
    wu += expert * (N * K)
    gate = tl.full([BN, BM], 0.0, tl.float32)
    up = tl.full([BN, BM], 0.0, tl.float32)
    for first in range(0, K, BK):
        column = first + tl.arange(0, BK)
        inside = ok[:, None] & (column < K)[None, :]
        at = rows[:, None] * K + column[None, :]
        here = x + token[None, :] * K + column[:, None]
        value = tl.load(here, mask=used[None, :] & (column < K)[:, None], other=0.0)
        gate = product(load_tile(wg + at, inside, EVEN), value, gate)
        up = product(load_tile(wu + at, inside, EVEN), value, up)
    hidden = activated(gate, up, GEGLU).to(tl.bfloat16)
    tl.store(act + slot[None, :] * N + rows[:, None], hidden, mask=ok[:, None] & used[None, :])


@triton.jit
def grouped_down_bf16(act, order, block_expert, count, scores, wd, partial, K: tl.constexpr,
                      N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                      BK: tl.constexpr):  # fmt: skip
    """act: bf16 [slots, K]; partial: float32 [slots, N], multiplied with the score."""
    block = tl.program_id(1)
    if block >= tl.load(count):
        return
    expert = tl.load(block_expert + block).to(tl.int64)
    slot = tl.load(order + block * BM + tl.arange(0, BM)).to(tl.int64)
    used = slot >= 0
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    ok = rows < N
    EVEN: tl.constexpr = (K % BK == 0) and (N % BN == 0)
    wd += expert * (N * K)
    down = tl.full([BN, BM], 0.0, tl.float32)
    for first in range(0, K, BK):
        column = first + tl.arange(0, BK)
        weights = load_tile(wd + rows[:, None] * K + column[None, :], ok[:, None] & (column < K)[None, :], EVEN)
        here = act + tl.where(used, slot, 0)[None, :] * K + column[:, None]
        value = tl.load(here, mask=used[None, :] & (column < K)[:, None], other=0.0)
        down = product(weights, value, down)
    weight = tl.load(scores + slot, mask=used, other=0.0)
    tl.store(partial + slot[None, :] * N + rows[:, None], down * weight[None, :],
             mask=ok[:, None] & used[None, :])  # fmt: skip
