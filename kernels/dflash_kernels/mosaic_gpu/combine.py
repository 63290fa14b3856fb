"""Putting the parts of a split sequence together: weights from the parts' lse, sinks once, rows back in token order."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from dflash_kernels.attention.paged.mosaic_gpu_ops import LOG2E

LANES = 128  # threads of a warpgroup


def merged_lse(
    parts_lse: Float[Array, "B K splits rows"],
    q_lens: Int[Array, "B"],
    sinks: Float[Array, "N"] | None,
    tokens: int,
    group: int,
) -> Float[Array, "B T N"]:
    """Natural-log sum of exponentials over all parts and the sink; -inf in rows past `q_lens`."""
    b, kv_heads, _, _ = parts_lse.shape
    lse = jax.nn.logsumexp(parts_lse[..., : tokens * group], axis=2).reshape(b, kv_heads, tokens, group)
    lse = jnp.moveaxis(lse, 1, 2).reshape(b, tokens, -1)
    if sinks is not None:
        lse = jnp.where((jnp.arange(tokens) < q_lens[:, None])[..., None], jnp.logaddexp(lse, sinks), -jnp.inf)
    return lse


def merge_xla(
    parts: Float[Array, "B K splits rows H"],
    parts_lse: Float[Array, "B K splits blocks"],
    sinks: Float[Array, "N"] | None,
    tokens: int,
    group: int,
    dtype: Any,
) -> Float[Array, "B T N H"]:
    """Written split by split instead of as a reduction, and weights for each number, so that XLA makes one launch of it: those of
    rows would have one of their own.
    """
    b, kv_heads, splits, _, head_dim = parts.shape
    rows = tokens * group
    logits = [parts_lse[:, :, split, :rows] for split in range(splits)]
    if sinks is not None:
        logits.append(jnp.broadcast_to(jnp.tile(sinks.reshape(kv_heads, group), tokens), (b, kv_heads, rows)))
    logits = [jnp.broadcast_to(one[..., None], (b, kv_heads, rows, head_dim)) for one in logits]
    top = functools.reduce(jnp.maximum, logits)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weights = [jnp.exp(logit - top) for logit in logits]
    total = functools.reduce(jnp.add, weights)
    # Empty parts were never written: what lies there is skipped, not weighted.
    kept = [jnp.where(weights[split] > 0, parts[:, :, split, :rows] * weights[split], 0.0) for split in range(splits)]
    out = functools.reduce(jnp.add, kept) / jnp.where(total > 0, total, 1.0)
    out = jnp.moveaxis(out.reshape(b, kv_heads, tokens, group, head_dim), 1, 2)
    return out.reshape(b, tokens, kv_heads * group, head_dim).astype(dtype)


def kernel_merges(group: int, head_dim: int) -> bool:
    """Whether rows of one token fill whole warpgroups, as `merge_kernel` needs."""
    at_once = max(LANES // head_dim, 1)
    return at_once * head_dim % LANES == 0 and group % at_once == 0


def merge_kernel(
    parts: Float[Array, "B K splits rows H"],
    parts_lse: Float[Array, "B K splits blocks"],
    sinks: Float[Array, "N"] | None,
    tokens: int,
    group: int,
    dtype: Any,
    interpret: Any = None,
) -> Float[Array, "B T N H"]:
    """One CTA for each query row, or two heads' rows where a row is half a warpgroup wide.

    All parts are loaded before the first is used, so a CTA waits for memory once.
    """
    b, kv_heads, splits, _, head_dim = parts.shape
    at_once = max(LANES // head_dim, 1)
    width = at_once * head_dim
    blocks = group // at_once

    def body(parts_ref, lse_ref, *rest):
        sinks_ref, out_ref = rest if sinks is not None else (None, *rest)
        batch, head, block = lax.axis_index("b"), lax.axis_index("head"), lax.axis_index("block")
        values = [parts_ref[batch, head, split, pl.ds(block * width, width)] for split in range(splits)]
        row, of_group = block * at_once, lax.rem(block, jnp.int32(blocks)) * at_once
        factors = []
        for step in range(at_once):
            logits = [lse_ref[batch, head, split, row + step] for split in range(splits)]
            sink = None if sinks_ref is None else sinks_ref[head * group + of_group + step]
            factors.append(_factors(logits, sink))
        out = jnp.zeros((width,), jnp.float32)
        for split, value in enumerate(values):
            factor = jnp.broadcast_to(factors[0][split], out.shape)
            for step in range(1, at_once):
                later = lax.iota(jnp.int32, width) >= step * head_dim
                factor = jnp.where(later, jnp.broadcast_to(factors[step][split], out.shape), factor)
            # Empty parts were never written: what lies there is skipped, not weighted.
            out += jnp.where(factor != 0, value * factor, 0.0)
        out_ref[batch, lax.div(block, jnp.int32(blocks)), head, lax.rem(block, jnp.int32(blocks))] = out.astype(dtype)

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((b, tokens, kv_heads, blocks, width), dtype),
        grid=(b, kv_heads, tokens * blocks), grid_names=("b", "head", "block"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(parts.reshape(b, kv_heads, splits, -1), parts_lse, *(() if sinks is None else (sinks,)))  # fmt: skip
    return out.reshape(b, tokens, kv_heads * group, head_dim)


def merge_by_lanes(
    parts: Float[Array, "B K splits rows H"],
    parts_lse: Float[Array, "B K splits blocks"],
    sinks: Float[Array, "N"] | None,
    tokens: int,
    group: int,
    dtype: Any,
) -> Float[Array, "B T N H"]:
    """`merge_kernel` of parts that `mosaic_gpu_ops.store_part_by_lanes` wrote: a thread has four columns of a row.

    One sequence of 4,096 keys takes 10.46 us with 16 queries, and 10.94 with both in token order; with parts in float16 10.44.
    """
    b, kv_heads, _, rows, head_dim = parts.shape
    units = rows // 8 * (head_dim // 16)

    def body(parts_ref, lse_ref, *rest):
        from dflash_kernels.mosaic_gpu import paged_parts as lanes

        sinks_ref, out_ref = rest if sinks is not None else (None, *rest)
        batch, head, block = lax.axis_index("b"), lax.axis_index("head"), lax.axis_index("block")
        given = [parts_ref.at[batch, head], lse_ref.at[batch, head], out_ref.at[batch].at[:, head]]
        given += [] if sinks_ref is None else [sinks_ref.at[head]]

        @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT(()), *[plgpu.RefType()] * len(given)))
        def merge(_ctx, block, *refs):
            lanes.merge(block, *refs, rows=tokens * group)

        merge(block, *given)

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((b, tokens, kv_heads, group, head_dim), dtype),
        grid=(b, kv_heads, -(-units // 4)), grid_names=("b", "head", "block"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(parts, parts_lse, *(() if sinks is None else (sinks.reshape(kv_heads, group),)))  # fmt: skip
    return out.reshape(b, tokens, kv_heads * group, head_dim)


def _factors(logits: list[Array], sink: Array | None) -> list[Array]:
    """Weight of each part of one row: scalars that add up to 1, less the sink's share."""
    top = functools.reduce(jnp.maximum, logits if sink is None else [*logits, sink])
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weights = [jnp.exp2((logit - top) * LOG2E) for logit in logits]
    total = functools.reduce(jnp.add, weights if sink is None else [*weights, jnp.exp2((sink - top) * LOG2E)])
    share = 1 / jnp.where(total == 0, 1.0, total)
    return [weight * share for weight in weights]
