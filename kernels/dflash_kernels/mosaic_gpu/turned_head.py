"""A head of 64 numbers of a few tokens, rotated and put where it belongs: among the queries, or into the pages.

The halves that a rotation pairs are in different warps' registers: a head passes through shared memory once.
"""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dflash_kernels.core.device import MATRIX_ROWS, WARPGROUP
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.thread_op import GLOBAL, MATRIX, SCALAR, thread_op

_HALF = MATRIX_ROWS // 2


def _stored(
    target: Any,
    product: Any,
    _memory: Any,
    cos: Any,
    sin: Any,
    slots: Any,
    head: Any,
    *,
    tokens: int,
    turns: bool,
    paged: bool,
) -> None:
    first, second = product[:_HALF, :tokens].T, product[_HALF:, :tokens].T
    if turns:
        c, s = cos[...], sin[...]
        first, second = first * c - second * s, second * c + first * s
    found = jnp.concatenate([first, second], axis=1).astype(target.dtype)
    if not paged:
        target.at[:, head][...] = found
        return
    pages, _, page_size, _ = target.shape
    for token in range(tokens):
        slot = slots[token]

        @pl.when((slot >= 0) & (slot < pages * page_size))
        def _(token: int = token, slot: Any = slot) -> None:
            target.at[lax.div(slot, page_size), head, lax.rem(slot, page_size)][...] = found[token]


@thread_op(args=(GLOBAL, MATRIX, GLOBAL, GLOBAL, GLOBAL, GLOBAL, SCALAR), interpret=_stored)
def store_head(
    target: Any,
    product: Any,
    memory: Any,
    cos: Any,
    sin: Any,
    slots: Any,
    head: Any,
    *,
    tokens: int,
    turns: bool,
    paged: bool,
) -> None:
    """Rotates a head of some tokens and writes it.

    Args:
      target: `[M, N, 64]`, or a pool `[P, K, p, 64]` where it is `paged`: a slot that is none of its writes nothing.
      product: `[64, columns]` float32, a token a column.
      memory: as much shared memory.
      cos, sin: `[M, 32]` float32; slots: `[M]` int32; head: which one of the target's.
    """
    columns, shape = product.shape[1], th.shape_and_strides(target)[0]
    to, base = th.address(memory, space=3), th.address(target)

    def keep(value: Any, position: Any) -> None:
        row, column = (th.index_word(place) for place in position)
        th.store_shared(to, th.add(th.mul(row, columns), column), th.bits(value))

    product.foreach(keep)
    th.warpgroup_barrier()
    for begin in range(0, tokens * _HALF, WARPGROUP):
        pair = th.add(th.thread(), begin)
        inside = th.under(pair, tokens * _HALF)
        pair = th.select(inside, pair, th.number(0))
        token, column = th.div(pair, _HALF), th.rem(pair, _HALF)
        places = [th.add(th.mul(th.add(column, more), columns), token) for more in (0, _HALF)]
        first, second = (th.as_real(th.shared_word(to, place)) for place in places)
        if turns:
            c, s = (th.as_real(th.global_word(table, pair)) for table in (cos, sin))
            first, second = (
                th.fsub(th.fmul(first, c), th.fmul(second, s)),
                th.fadd(th.fmul(second, c), th.fmul(first, s)),
            )
        if paged:
            pages, heads, page_size, _ = shape
            slot = th.global_word(slots, token)
            inside = th.every(inside, th.under(slot, min(pages * page_size, 2**31 - 1)))
            slot = th.select(inside, slot, th.number(0))
            line = th.add(th.mul(th.div(slot, page_size), heads), head)
            line = th.add(th.mul(th.widen_index(line), page_size), th.widen_index(th.rem(slot, page_size)))
        else:
            line = th.widen_index(th.add(th.mul(token, shape[1]), head))
        start = th.add(base, th.mul(th.add(th.mul(line, MATRIX_ROWS), th.widen_index(column)), 2))
        with th.branch(inside):
            for more, value in ((0, first), (_HALF, second)):
                text = "{ .reg .b16 h; cvt.rn.bf16.f32 h, $1; st.global.b16 [$0], h; }"
                th.inline(text, th.add(start, 2 * more), value)
