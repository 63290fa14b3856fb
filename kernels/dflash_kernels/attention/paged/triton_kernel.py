"""The Triton kernel: attention of a block of query rows over one part of a sequence's pages.

A query row is one (token, head of the group) pair: row `t * group + g` of a KV head, so that every key and value is read once for
all query tokens. Scores stay in registers; the softmax is online, in base 2, in float32. Everything that is known before the launch
is a constant of the program: strides above all, since Triton loads in vectors only what it knows to be aligned.
"""

# Triton is an extra.
# pyright: reportMissingImports=false

from typing import no_type_check

import triton
import triton.language as tl

from dflash_kernels.attention.triton_helpers import LN2, LOG2E, widen


@triton.jit
@no_type_check
def attend(
    q_ptr, k_ptr, v_ptr, table_ptr, seq_ptr, live_ptr, sinks_ptr, slopes_ptr, k_scale_ptr, v_scale_ptr, out_ptr, lse_ptr,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, ROW_BLOCKS: tl.constexpr,
    SPLITS: tl.constexpr, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    SINKS: tl.constexpr, ALIBI: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr, K_BITS: tl.constexpr,
    V_BITS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program of the grid (KV heads x row blocks, splits, B).

    Pointers: q `[B, T, N, H]`; pages `[P, K, p, H]` and `[P, K, p, V]`; table `[B, W]`; seq_lens, q_lens `[B]`; out
    `[B, T, N, splits, V]` and lse `[B, T, N, splits]`, each part normalised over its own keys. Pointers of options that are off
    are never followed.
    LEFT, RIGHT: keys visible on each side of a query's position (causality is RIGHT 0), None for all. SINKS: logits are added here,
    which is right for a single part. ALIBI: "linear" or "sqrt". K_SCALE: "head" or "token"; V_SCALE: "head" or "channel". K_BITS,
    V_BITS: see `widen`.
    """
    head, part, b = tl.program_id(0) // ROW_BLOCKS, tl.program_id(1), tl.program_id(2)
    rows = tl.program_id(0) % ROW_BLOCKS * ROWS + tl.arange(0, ROWS)
    columns, value_columns = tl.arange(0, COLUMNS), tl.arange(0, VALUE_COLUMNS)
    token = rows // GROUP
    query_head = head * GROUP + rows % GROUP
    length, live = tl.load(seq_ptr + b), tl.load(live_ptr + b)
    alive = token < tl.minimum(live, TOKENS)
    position = length - live + token

    places = ((b.to(tl.int64) * TOKENS + token) * (KV_HEADS * GROUP) + query_head)[:, None]
    # A mask that is always true costs instructions all the same.
    inside = columns[None, :] < HEAD_DIM if HEAD_DIM < COLUMNS else tl.full((1, COLUMNS), True, tl.int1)
    inside_values = (
        value_columns[None, :] < VALUE_DIM if VALUE_DIM < VALUE_COLUMNS else tl.full((1, VALUE_COLUMNS), True, tl.int1)
    )
    queries = tl.load(q_ptr + places * HEAD_DIM + columns[None, :], mask=alive[:, None] & inside, other=0.0)

    # Keys that any row of this block sees, in whole tiles, dealt to the parts.
    first_token = tl.program_id(0) % ROW_BLOCKS * ROWS // GROUP
    last_token = tl.minimum(tl.program_id(0) % ROW_BLOCKS * ROWS + ROWS - 1, TOKENS * GROUP - 1) // GROUP
    last_token = tl.minimum(last_token, live - 1)
    start, stop = 0, tl.minimum(length, WIDTH * PAGE)
    if LEFT is not None:
        start = tl.maximum(length - live + first_token - LEFT, 0)
    if RIGHT is not None:
        stop = tl.minimum(stop, length - live + last_token + RIGHT + 1)
    if first_token > last_token:
        stop = 0
    first, last = start // KEYS, tl.cdiv(stop, KEYS)
    share = tl.cdiv(tl.maximum(last - first, 0), SPLITS)
    begin = first + part * share
    end = tl.minimum(begin + share, last)

    # The first and last key that each row sees.
    lowest, highest = position, tl.where(alive, stop - 1, -1)
    if LEFT is not None:
        lowest = position - LEFT
    if RIGHT is not None:
        highest = tl.minimum(highest, position + RIGHT)

    factor = SCALE * LOG2E
    if SOFT_CAP is not None:
        factor = SCALE * 1.0
    if K_SCALE == "head":
        factor = tl.load(k_scale_ptr + head) * factor
    if ALIBI is not None:
        slope = tl.load(slopes_ptr + query_head, mask=rows < TOKENS * GROUP, other=0.0) * LOG2E
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, VALUE_COLUMNS), tl.float32)
    for tile in range(begin, end):
        key = tile * KEYS + tl.arange(0, KEYS)
        there = key < stop
        held = there[:, None] & inside if HEAD_DIM < COLUMNS else there[:, None]
        held_values = there[:, None] & inside_values if VALUE_DIM < VALUE_COLUMNS else there[:, None]
        if PAGE % KEYS == 0:
            # All that takes 64 bits is one number; the rest of the addresses is the same for every tile.
            page = tl.load(table_ptr + b * WIDTH + tile // (PAGE // KEYS)).to(tl.int64)
            first_slot = (page * KV_HEADS + head) * PAGE + tile % (PAGE // KEYS) * KEYS
            slot = first_slot + tl.arange(0, KEYS)
            k_tile, v_tile = k_ptr + first_slot * HEAD_DIM, v_ptr + first_slot * VALUE_DIM
            row = tl.arange(0, KEYS)[:, None]
        else:
            page = tl.load(table_ptr + b * WIDTH + key // PAGE, mask=there, other=0).to(tl.int64)
            slot = (page * KV_HEADS + head) * PAGE + key % PAGE
            k_tile, v_tile = k_ptr, v_ptr
            row = slot[:, None]
        keys = widen(tl.load(k_tile + row * HEAD_DIM + columns[None, :], mask=held, other=0.0), queries.dtype, K_BITS)
        scores = tl.dot(queries, tl.trans(keys)) * factor
        if K_SCALE == "token":
            scores *= tl.load(k_scale_ptr + slot, mask=there, other=0.0)[None, :]
        if SOFT_CAP is not None:
            # The hardware's own tanh keeps eleven bits, too few under a cap of fifty.
            scores = (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2 * LOG2E / SOFT_CAP)))) * (SOFT_CAP * LOG2E)
        if ALIBI is not None:
            behind = (position[:, None] - key[None, :]).to(tl.float32)
            if ALIBI == "sqrt":
                behind = tl.sqrt(tl.maximum(behind, 0.0))
            scores -= slope[:, None] * behind
        visible = key[None, :] <= highest[:, None]
        if LEFT is not None:
            visible &= key[None, :] >= lowest[:, None]
        scores = tl.where(visible, scores, float("-inf"))

        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weights, 1)
        values = tl.load(v_tile + row * VALUE_DIM + value_columns[None, :], mask=held_values, other=0.0)
        values = widen(values, queries.dtype, V_BITS)
        sums = tl.dot(weights.to(values.dtype), values, sums * fade[:, None])
        top = higher

    blind = top == float("-inf")
    of_blind = top
    if SINKS:
        of_blind = tl.load(sinks_ptr + query_head, mask=alive, other=float("-inf"))
        sink = of_blind * LOG2E
        higher = tl.maximum(top, sink)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp2(top - base)
        total = total * fade + tl.exp2(sink - base)
        sums *= fade[:, None]
        top = higher
    outs = sums / tl.where(total > 0, total, 1.0)[:, None]
    if V_SCALE == "head":
        outs *= tl.load(v_scale_ptr + head)
    if V_SCALE == "channel":
        outs *= tl.load(v_scale_ptr + head * VALUE_DIM + value_columns, mask=value_columns < VALUE_DIM, other=0.0)[
            None, :
        ]
    ours = rows < TOKENS * GROUP
    places = places * SPLITS + part
    tl.store(
        out_ptr + places * VALUE_DIM + value_columns[None, :],
        outs.to(out_ptr.dtype.element_ty),
        mask=ours[:, None] & inside_values,
    )
    lse = tl.where(blind, of_blind, (top + tl.log2(total)) * LN2)
    tl.store(lse_ptr + places, lse[:, None], mask=ours[:, None])
