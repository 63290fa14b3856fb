"""Attention's steps in a chain as Pallas calls them, and what stands for them in its interpreter."""

# Pallas declares what it inlines with the context that it passes itself.
# pyright: reportAbstractUsage=false, reportCallIssue=false, reportPrivateImportUsage=false

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.fused.plan import HEAD_DIM, KEYS, Attention
from dflash_kernels.mosaic_gpu.layouts import TILED, tiled
from dflash_kernels.quantize.reference import to_e4m3

_GMEM, _SCALAR, _TILES = plgpu.RefType(), plgpu.Layout.WG_SPLAT(()), plgpu.RefType(TILED)
_BLOCK = HEAD_DIM // 2


def blocks(ring, slot):
    """A slot's rows as the blocks of 64 columns of a tile of 64 rows."""
    return [ring.at[slot, pl.ds(block * KEYS, KEYS)] for block in range(2)]


def load_queries(attention: Attention, eps: float, refs, ring, slot: int, sequence, head, interpret: Any) -> None:
    """Normed, turned queries of a KV head to a slot of the ring; rows past the live ones hold anything finite or of themselves."""
    target = ring.at[slot, pl.ds(0, 2 * KEYS)]
    if interpret is not None:
        tokens, group = attention.tokens, attention.group
        held = refs["qkv"].at[pl.ds(sequence * tokens, tokens), pl.ds(head * group, group)][...]
        turned = _normed_and_turned(attention, eps, refs, held, "q_norm", sequence).reshape(attention.rows, HEAD_DIM)
        turned = jnp.pad(turned, ((0, KEYS - attention.rows), (0, 0))).astype(ring.dtype)
        for block, place in enumerate(blocks(ring, slot)):
            place[...] = turned[:, block * _BLOCK : (block + 1) * _BLOCK]
        plgpu.commit_smem()
        return

    from dflash_kernels.fused import heads

    @plgpu.inline_mgpu(arg_types=(*[_GMEM] * 4, *[_SCALAR] * 2, _TILES))
    def load(_ctx, *operands):
        (*found, target) = operands
        heads.put_queries(attention, eps, heads.ask_for_queries(attention, *found), target)

    load(refs["qkv"], refs["cos"], refs["sin"], refs["q_norm"], sequence, head, target)


def stage_new(attention: Attention, eps: float, refs, staged, sequence, head, first, low, high, interpret: Any) -> None:
    """New keys and values of a head to `staged [2, tokens, H]`, and to the pages those at positions `low` to `high - 1`.

    `staged` None: to the pages alone. `first`: position of the first new token.
    """
    if interpret is not None:
        tokens, queries = attention.tokens, attention.kv_heads * attention.group
        for which, (name, start) in enumerate((("k", queries), ("v", queries + attention.kv_heads))):
            held = refs["qkv"].at[pl.ds(sequence * tokens, tokens), pl.ds(start + head, 1)][...]
            if name == "k":
                held = _normed_and_turned(attention, eps, refs, held, "k_norm", sequence)
            held = held.reshape(tokens, HEAD_DIM)
            if attention.narrow_stages:
                held = to_e4m3(held.astype(jnp.float32) / refs[f"{name}_scale"][head])
            if staged is not None:
                staged.at[which][...] = jnp.pad(held.astype(staged.dtype), ((0, attention.staged - tokens), (0, 0)))
            for token in range(tokens):

                @pl.when((first + token >= low) & (first + token < high))
                def _(token=token, name=name, held=held):
                    position = first + token
                    page = refs["table"][sequence, lax.div(position, jnp.int32(attention.page_size))]
                    row = lax.rem(position, jnp.int32(attention.page_size))
                    refs[name].at[page, head, row][...] = held[token]

        return

    from dflash_kernels.fused import heads

    kept = [] if staged is None else [staged]
    scales = ("k_scale", "v_scale") if attention.narrow_stages else ()

    @plgpu.inline_mgpu(arg_types=(*[_GMEM] * (7 + len(kept) + len(scales)), *[_SCALAR] * 5))
    def stage(_ctx, qkv, cos, sin, weight, table, k, v, *rest):
        (*more, sequence, head, first, low, high) = rest
        scales, (*more,) = (more[:2], more[2:]) if attention.narrow_stages else (None, more)
        where, limits = more[0] if more else None, (first, low, high)
        heads.stage_new(attention, eps, qkv, cos, sin, weight, table, (k, v), where, sequence, head, limits, scales)

    names = ("qkv", "cos", "sin", "k_norm", "table", "k", "v", *scales)
    stage(*[refs[name] for name in names], *kept, sequence, head, first, low, high)


def widen(source, ring, slot, interpret: Any) -> None:
    """A tile of float8 to a slot of the ring; then products may read it, and copies fill the source."""
    if interpret is not None:
        wide = source[...].astype(ring.dtype)
        for block, place in enumerate(blocks(ring, slot)):
            place[...] = wide[:, block * _BLOCK : (block + 1) * _BLOCK]
        plgpu.commit_smem()
        return

    from dflash_kernels.mosaic_gpu import convert as widening

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(tiled(source.dtype)), _TILES))
    def put(_ctx, source, target):
        widening.widen_tile(source, target)

    put(source, ring.at[slot, pl.ds(0, 2 * KEYS)])


def order_copies(interpret: Any) -> None:
    """Copies to shared memory that begin afterwards find what the CTA's threads have stored in global memory before."""
    if interpret is not None:
        return

    from dflash_kernels.fused import heads

    plgpu.inline_mgpu()(lambda _ctx: heads.order_copies())()


def overlay(attention: Attention, staged, which: int, ring, slot, first, live, interpret: Any) -> None:
    """Puts staged rows where a tile has the new tokens, the first one at row `first`; zeroes values from row `live` on."""
    if interpret is not None:
        rows = lax.broadcasted_iota(jnp.int32, (KEYS, _BLOCK), 0)
        new = staged.at[which][...]
        for block, place in enumerate(blocks(ring, slot)):
            held = place[...]
            for token in range(attention.tokens):
                mine = (rows == first + token) & (rows < live)
                held = jnp.where(mine, new[token, block * _BLOCK : (block + 1) * _BLOCK], held)
            place[...] = jnp.where(rows < live, held, jnp.zeros_like(held)) if which else held
        plgpu.commit_smem()
        return

    from dflash_kernels.fused import heads

    @plgpu.inline_mgpu(arg_types=(_GMEM, _TILES, *[_SCALAR] * 2))
    def put(_ctx, staged, target, first, live):
        heads.overlay(attention, staged, which, target, first, live)

    put(staged, ring.at[slot, pl.ds(0, 2 * KEYS)], first, live)


def leave_part(attention: Attention, refs, item, blocks_of_part, lse, interpret: Any) -> None:
    """Leaves a part, two blocks of 64 columns, and its lse for `put_together`."""
    if interpret is not None:
        refs["lses"].at[item][...] = lse
        for block, tile in enumerate(blocks_of_part):
            refs["attended"].at[item, :, pl.ds(block * _BLOCK, _BLOCK)][...] = tile[: attention.rows]
        return

    from dflash_kernels.mosaic_gpu import combine as parts

    @plgpu.inline_mgpu(arg_types=(_GMEM, _GMEM, *[plgpu.Layout.WGMMA] * 2, plgpu.Layout.WGMMA.reduce(1)))
    def leave(_ctx, target, lses, low, high, lse):
        parts.store_split(target, lses, low, lse, 0, attention.rows)
        parts.store_split(target, lses, high, None, _BLOCK, attention.rows)

    leave(refs["attended"].at[item], refs["lses"].at[item], *blocks_of_part, lse)


def put_together(attention: Attention, refs, first_item, sequence, head, split, busy, interpret: Any) -> None:
    """Writes some rows of a head's output, the sum of its parts, of which `busy` have keys."""
    if interpret is not None:
        tokens, group = attention.tokens, attention.group

        @pl.when(split == 0)
        def _():
            there = lax.broadcasted_iota(jnp.int32, (attention.splits, attention.rows), 0) < busy
            lses = refs["lses"].at[pl.ds(first_item, attention.splits)][...][:, : attention.rows]
            lses = jnp.where(there, lses, -jnp.inf)
            parts = refs["attended"].at[pl.ds(first_item, attention.splits)][...]
            top = lses.max(axis=0)
            weights = jnp.exp(lses - jnp.where(top == -jnp.inf, 0.0, top))
            total = weights.sum(axis=0)
            held = jnp.where(there[..., None], weights[..., None] * parts, 0.0).sum(axis=0)
            held = held / jnp.where(total > 0, total, 1.0)[:, None]
            held = held.reshape(tokens, group * HEAD_DIM).astype(refs["x"].dtype)
            place = refs["x"].at[pl.ds(sequence * tokens, tokens), pl.ds(head * (group * HEAD_DIM), group * HEAD_DIM)]
            place[...] = held

        return

    from dflash_kernels.mosaic_gpu import combine as parts

    @plgpu.inline_mgpu(arg_types=(*[_GMEM] * 3, *[_SCALAR] * 5))
    def merge(_ctx, *operands):
        parts.combine_mailbox(_split_heads(attention), *operands)

    merge(refs["attended"], refs["lses"], refs["x"], first_item, sequence, head, split, busy)


def _split_heads(attention: Attention):
    from dflash_kernels.mosaic_gpu.combine import SplitHeads

    return SplitHeads(attention.tokens, attention.group, attention.splits, HEAD_DIM, attention.paired)


def empty_heads(attention: Attention, heads, sequence, head, split) -> None:
    """Makes the words EMPTY that `put_together` has written."""
    from dflash_kernels.mosaic_gpu import combine as parts

    @plgpu.inline_mgpu(arg_types=(_GMEM, *[_SCALAR] * 3))
    def clear(_ctx, *operands):
        parts.empty_heads(_split_heads(attention), *operands)

    clear(heads, sequence, head, split)


def _normed_and_turned(attention: Attention, eps: float, refs, held, norm: str, sequence):
    """`[T, heads, H]` in the interpreter."""
    wide = held.astype(jnp.float32)
    wide = wide * lax.rsqrt((wide * wide).mean(axis=-1, keepdims=True) + eps)
    wide = (refs[norm][...] * wide.astype(held.dtype)).astype(jnp.float32)
    angles = [refs[name].at[pl.ds(sequence * attention.tokens, attention.tokens)][...] for name in ("cos", "sin")]
    cos, sin = (angle[:, None] for angle in angles)
    first, second = wide[..., :_BLOCK], wide[..., _BLOCK:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(held.dtype)
