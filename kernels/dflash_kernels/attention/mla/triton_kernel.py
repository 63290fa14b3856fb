"""The Triton kernel of absorbed latent attention: a block of query rows over one part of a sequence's pages.

A query row is one (token, head) pair, and all of them read the same latent rows. A tile of latents is loaded once, as keys and as
values; the rotated part of the keys is a tile and a product of its own, since Triton's tiles are powers of two wide.
"""

# Triton is an extra.
# pyright: reportMissingImports=false

from typing import no_type_check

import triton
import triton.language as tl

from dflash_kernels.attention.triton_helpers import LN2, LOG2E, widen


@triton.jit
@no_type_check  # keeps the tests' shape checker from wrapping a function that Triton has to read
def attend(
    q_ptr, pool_ptr, table_ptr, seq_ptr, live_ptr, scale_ptr, out_ptr, lse_ptr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr, ROTATED: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, RANK_PADDED: tl.constexpr, ROTATED_PADDED: tl.constexpr, SPLITS: tl.constexpr,
    SCALE: tl.constexpr, CAUSAL: tl.constexpr, SCALED: tl.constexpr, FLOAT8_BITS: tl.constexpr,
):  # fmt: skip
    """One program of the grid (row blocks, splits, B).

    Pointers: q `[B, T, N, R + r]`; pool `[P, 1, p, R + r]`; table `[B, W]`; seq_lens, q_lens `[B]`; scale one float32, looked at
    where SCALED; out `[B, T, N, splits, R]` and lse `[B, T, N, splits]`, each part normalised over its own keys.
    """
    part, b = tl.program_id(1), tl.program_id(2)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column, rotated = tl.arange(0, RANK_PADDED)[None, :], tl.arange(0, ROTATED_PADDED)[None, :]
    token = rows // HEADS
    length, live = tl.load(seq_ptr + b), tl.load(live_ptr + b)
    alive = token < tl.minimum(live, TOKENS)
    place = (b.to(tl.int64) * (TOKENS * HEADS) + rows)[:, None]
    query = q_ptr + place * (RANK + ROTATED)
    q_latent = tl.load(query + column, mask=alive[:, None] & (column < RANK), other=0.0)
    q_rotated = tl.load(query + RANK + rotated, mask=alive[:, None] & (rotated < ROTATED), other=0.0)

    # Keys that any row of this block sees, in whole tiles, dealt to the parts.
    first_token = tl.program_id(0) * ROWS // HEADS
    last_token = tl.minimum(tl.minimum(tl.program_id(0) * ROWS + ROWS, TOKENS * HEADS) - 1, live * HEADS - 1) // HEADS
    stop = tl.minimum(length, WIDTH * PAGE)
    highest = tl.where(alive, stop - 1, -1)
    if CAUSAL:
        highest = tl.minimum(highest, length - live + token)
        stop = tl.minimum(stop, length - live + last_token + 1)
    if first_token >= live:
        stop = 0
    last = tl.cdiv(tl.maximum(stop, 0), KEYS)
    share = tl.cdiv(last, SPLITS)
    begin = part * share
    end = tl.minimum(begin + share, last)

    factor = SCALE * LOG2E
    if SCALED:
        factor = tl.load(scale_ptr) * factor
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, RANK_PADDED), tl.float32)
    for tile in range(begin, end):
        key = tile * KEYS + tl.arange(0, KEYS)
        there = (key < stop)[:, None]
        if PAGE % KEYS == 0:
            page = tl.load(table_ptr + b * WIDTH + tile // (PAGE // KEYS)).to(tl.int64)
            source = pool_ptr + (page * PAGE + tile % (PAGE // KEYS) * KEYS) * (RANK + ROTATED)
            slot = tl.arange(0, KEYS)[:, None]
        else:
            page = tl.load(table_ptr + b * WIDTH + key // PAGE, mask=key < stop, other=0).to(tl.int64)
            source = pool_ptr
            slot = (page * PAGE + key % PAGE)[:, None]
        slot *= RANK + ROTATED
        latents = widen(
            tl.load(source + slot + column, mask=there & (column < RANK), other=0.0), q_latent.dtype, FLOAT8_BITS
        )
        turned = tl.load(source + slot + RANK + rotated, mask=there & (rotated < ROTATED), other=0.0)
        turned = widen(turned, q_latent.dtype, FLOAT8_BITS)
        scores = tl.dot(q_rotated, tl.trans(turned))
        scores = tl.dot(q_latent, tl.trans(latents), scores) * factor
        scores = tl.where(key[None, :] <= highest[:, None], scores, float("-inf"))

        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weights, 1)
        sums = tl.dot(weights.to(latents.dtype), latents, sums * fade[:, None])
        top = higher

    outs = sums / tl.where(total > 0, total, 1.0)[:, None]
    if SCALED:
        outs *= tl.load(scale_ptr)
    ours = (rows < TOKENS * HEADS)[:, None]
    place = place * SPLITS + part
    tl.store(out_ptr + place * RANK + column, outs.to(out_ptr.dtype.element_ty), mask=ours & (column < RANK))
    tl.store(lse_ptr + place, ((top + tl.log2(total)) * LN2)[:, None], mask=ours)
