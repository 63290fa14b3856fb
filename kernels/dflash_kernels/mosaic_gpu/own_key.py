"""One token's attention put together: splits of the keys before it, its own key, and the sink, to an operand of the next product.

The token's own key was written by a CTA of the same launch, where copies by TMA need not find it: it is one more split here, read
as other memory is.
"""

import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from dflash_kernels.core.device import WARPGROUP
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.layouts import TILED
from dflash_kernels.mosaic_gpu.thread_op import GLOBAL, SCALAR, thread_op

_QUAD = 4  # columns of a thread


def _combined(
    parts: Any,
    lses: Any,
    q: Any,
    k_pages: Any,
    v_pages: Any,
    place: list[Any],
    sinks: Any,
    target: Any,
    *,
    scale: float,
) -> None:
    (pages, _, page_size, head_dim), group = k_pages.shape, q.shape[0]
    slot, live, head = place
    own = (slot >= 0) & (slot < pages * page_size) & (live > 0)
    slot = jnp.where(own, slot, 0)
    where = lax.div(slot, page_size), head, lax.rem(slot, page_size)
    key, value = (pool.at[where][...].astype(jnp.float32) for pool in (k_pages, v_pages))
    score = (q[...].astype(jnp.float32) * key).sum(axis=1) * scale
    logits = jnp.concatenate([lses[...][:, :group], jnp.where(own, score, -jnp.inf)[None]])
    values = jnp.concatenate([parts[...], jnp.broadcast_to(value, (1, group, head_dim))])
    top = logits.max(axis=0)
    sunk = jnp.full_like(top, -jnp.inf)
    if sinks is not None:
        sunk = lax.dynamic_slice_in_dim(sinks[...], head * group, group).astype(jnp.float32)
    top = jnp.maximum(top, sunk)
    offset = jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.exp(logits - offset)
    total = weights.sum(axis=0) + jnp.exp(sunk - offset)
    kept = jnp.where(logits[..., None] == -jnp.inf, 0.0, values * weights[..., None]).sum(axis=0)
    row = (kept / jnp.where(total > 0, total, 1.0)[:, None]).reshape(-1).astype(target.dtype)
    columns, width = target.shape[1:]
    for block in range(row.shape[0] // width):
        part = row[block * width : (block + 1) * width]
        # What no row is stored to may be anything.
        target.at[block][...] = jnp.pad(part[None], ((0, columns - 1), (0, 0)), constant_values=jnp.nan)


def _number(area: Any, place: Any) -> Any:
    """A number of float32 or bfloat16 in global memory."""
    size = utils.bytewidth(ir.MemRefType(area.type).element_type)
    if size == 4:
        return th.as_real(th.global_word(area, place))
    return th.bfloat16_at(th.offset(th.address(area), th.mul(place, size)))


@thread_op(
    args=lambda *given, scale: (*[GLOBAL] * 5, SCALAR, None if given[6] is None else GLOBAL, plgpu.RefType(TILED)),
    interpret=_combined,
)
def combine_with_own(
    parts: Any,
    lses: Any,
    q: Any,
    k_pages: Any,
    v_pages: Any,
    place: list[Any],
    sinks: Any,
    target: Any,
    *,
    scale: float,
) -> None:
    """Attention of a KV head's queries to the first row of `target`; then matrix instructions may read it.

    Args:
      parts: `[splits, G, H]` float32, each normalized over its own keys; anything where a split has none.
      lses: `[splits, rows]` float32, natural, -inf where a split has none.
      q: `[G, H]`, two bytes an element, H a multiple of 4 of up to 128.
      k_pages, v_pages: pools `[P, K, p, H]` that hold the token's own key and value.
      place: slot of the token, none where it is negative or past the pool; whether it is real; and the KV head.
      sinks: `[N]` of all heads, float32 or bfloat16, or None.
      target: `[blocks, 8, 64]` in tiles of 8 rows of 128 bytes, of which the first row is not swizzled.
    """
    splits, group, head_dim = th.shape_and_strides(parts)[0]
    lines, of_parts = th.shape_and_strides(lses)[1][0], th.shape_and_strides(parts)[1][0]
    pages, kv_heads, page_size, _ = th.shape_and_strides(k_pages)[0]
    slot, live, head = place
    own = th.every(th.under(slot, min(pages * page_size, 2**31 - 1)), th.compare(live, "sgt", 0))
    slot = th.select(own, slot, th.number(0))
    line = th.widen_index(th.add(th.mul(th.div(slot, page_size), kv_heads), head))
    line = th.mul(th.add(th.mul(line, page_size), th.widen_index(th.rem(slot, page_size))), head_dim)
    _, _, _, rows, width = th.shape_and_strides(target)[0]
    to, minus = th.address(target, space=3), th.real(-math.inf)

    def pair(area: Any, element: Any) -> list[Any]:
        """Four numbers of two bytes in float32."""
        words = th.load(th.add(th.address(area), th.mul(element, 2)), 2, op="ld.global")
        return [th.as_real(half) for word in words for half in (th.shift_left(word, 16), th.bit_and(word, -(1 << 16)))]

    for begin in range(0, group * head_dim, _QUAD * WARPGROUP):
        column = th.add(th.mul(th.thread(), _QUAD), begin)
        inside = th.under(column, group * head_dim)
        column = th.select(inside, column, th.number(0))
        of_head, within = th.div(column, head_dim), th.rem(column, head_dim)
        # All of it is asked for before any is used.
        logits = [th.as_real(th.global_word(lses, th.add(of_head, split * lines))) for split in range(splits)]
        quads = [
            th.load(th.word_address(parts, th.add(column, split * of_parts)), _QUAD, op="ld.global", kind="f32")
            for split in range(splits)
        ]
        inner = th.add(line, th.widen_index(within))
        query = pair(q, th.widen_index(column))
        key, value = (pair(pool, inner) for pool in (k_pages, v_pages))
        score = functools.reduce(th.fadd, (th.fmul(a, b) for a, b in zip(query, key, strict=True)))
        distance = head_dim // _QUAD // 2
        while distance:
            score = th.fadd(score, th.shuffle_xor(score, distance))
            distance //= 2
        logits.append(th.select(own, th.fmul(score, th.real(scale)), minus))
        quads.append(value)
        more = [] if sinks is None else [_number(sinks, th.add(th.mul(head, group), of_head))]
        top = functools.reduce(arith.maximumf, [*logits, *more])
        offset = th.select(arith.cmpf(arith.CmpFPredicate.OEQ, top, minus), th.real(0.0), top)
        weights = [th.exp(th.fsub(one, offset)) for one in [*logits, *more]]
        total = functools.reduce(th.fadd, weights)
        total = th.select(arith.cmpf(arith.CmpFPredicate.OGT, total, th.real(0.0)), total, th.real(1.0))
        sums = [th.real(0.0)] * _QUAD
        for logit, weight, quad in zip(logits, weights, quads, strict=False):
            empty = arith.cmpf(arith.CmpFPredicate.OEQ, logit, minus)
            weighed = (th.select(empty, th.real(0.0), th.fmul(one, weight)) for one in quad)
            sums = [th.fadd(one, other) for one, other in zip(sums, weighed, strict=True)]
        out = [th.fdiv(one, total) for one in sums]
        place_of = th.add(th.mul(th.div(column, width), rows * width), th.rem(column, width))
        text = "{ .reg .b32 a, b; cvt.rn.bf16x2.f32 a, $2, $1; cvt.rn.bf16x2.f32 b, $4, $3; st.shared.v2.b32 [$0], {a, b}; }"
        with th.branch(inside):
            th.inline(text, th.add(to, th.mul(place_of, 2)), *out)
    mgpu.commit_shared()
