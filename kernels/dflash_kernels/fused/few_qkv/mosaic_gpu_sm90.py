"""QKV projection of a few rows on Hopper, a head's 64 rows of weights a CTA: it rotates the head and puts it where it belongs.

The halves that a rotation pairs are in different warps' registers: a head passes through shared memory once.
"""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.core.device import MATRIX_ROWS, WARPGROUP
from dflash_kernels.core.layouts import aliased_ref, freeze_aliased
from dflash_kernels.matmul.few_rows_sm90 import stream
from dflash_kernels.matmul.few_tiling import Plan
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.thread_op import GLOBAL, MATRIX, SCALAR, thread_op

_HALF = MATRIX_ROWS // 2


def few_qkv_write(
    plan: Plan, given: dict[str, jax.Array], k_pages: jax.Array, v_pages: jax.Array, interpret: Any = None
) -> tuple[jax.Array, ...]:
    """See `few_qkv_write` in `fused.few_qkv.api`; `given` are its other arrays by name."""
    _, kv_heads, _, head_dim = k_pages.shape
    heads = plan.features // head_dim - 2 * kv_heads
    pools = {"k": aliased_ref(k_pages), "v": aliased_ref(v_pages)}
    out = jax.ShapeDtypeStruct((plan.rows, heads, head_dim), k_pages.dtype)

    def store(refs: dict[str, Any], product: Any, tile: Any, _part: Any) -> None:
        def one(name: str, head: Any, **how: Any) -> None:
            tables = [refs[each] for each in ("cos", "sin", "slots")]
            _store_head(refs[name], product, refs["head_sm"], *tables, head, tokens=plan.rows, **how)

        keys = tile - heads
        pl.when(keys < 0)(lambda: one("q", tile, turns=True, paged=False))
        pl.when((keys >= 0) & (keys < kv_heads))(lambda: one("k", keys, turns=True, paged=True))
        pl.when(keys >= kv_heads)(lambda: one("v", keys - kv_heads, turns=False, paged=True))

    scratch = {"head_sm": plgpu.SMEM((MATRIX_ROWS, plan.columns), jnp.float32)}
    outs = {"q": out} | ({} if plan.norm is None else {"stream": jax.typeof(given["x"])})
    q, *rest = stream("few_qkv_write", plan, given | pools, outs, store, scratch=scratch, interpret=interpret)
    return q, freeze_aliased(pools["k"]), freeze_aliased(pools["v"]), *rest


def _store_head_interpreted(
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


@thread_op(args=(GLOBAL, MATRIX, GLOBAL, GLOBAL, GLOBAL, GLOBAL, SCALAR), interpret=_store_head_interpreted)
def _store_head(
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
