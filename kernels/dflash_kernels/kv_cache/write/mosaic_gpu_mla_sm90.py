"""The cache-write kernel of MLA for Hopper: RMS norm, interleaved RoPE and the write of a latent row, and RoPE of the queries.

A CTA has one token's latent row, or the rotary dims of a few of its heads. A thread gets the neighbour of its own number by way of
shared memory, read one place to the left and to the right of where it was written.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.core.layouts import aliased_ref, freeze_aliased
from dflash_kernels.kv_cache.write.mosaic_gpu_sm90 import Columns, in_pool
from dflash_kernels.mosaic_gpu.layouts import store
from dflash_kernels.mosaic_gpu.thread_op import kernel
from dflash_kernels.quantize.reference import E4M3, E4M3_MAX


def write(
    pool: jax.Array, rows: jax.Array, q: jax.Array, slots: jax.Array, cos: jax.Array, sin: jax.Array, norm: jax.Array,
    scale: jax.Array, eps: float, interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The queries and the pool, see `mla_write`."""
    (tokens, heads, head_dim), (half, rank), page_size = q.shape, (cos.shape[1], norm.shape[0]), pool.shape[2]
    rotary, at_once = 2 * half, next(count for count in (8, 4, 2, 1) if heads % count == 0)

    def load(ref: Any, layout: Any) -> jax.Array:
        return plgpu.load(ref, layout=layout, optimized=False)

    def rotated_pairs(numbers: jax.Array, angles: list[jax.Array], staged: Any) -> jax.Array:
        """Interleaved RoPE: swaps adjacent elements by way of `staged`."""
        shape = numbers.shape
        staged.at[:, pl.ds(8, rotary)][...] = numbers
        plgpu.commit_smem()
        before, after = (load(staged.at[:, pl.ds(start, rotary)], one_each(shape[0])) for start in (7, 9))
        odd = lax.rem(plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 1), one_each(shape[0])), 2) == 1
        cos, sin = (lax.broadcast_in_dim(angle, shape, [1]) for angle in angles)
        partner = jnp.where(odd, before.astype(jnp.float32), -after.astype(jnp.float32))
        return (numbers.astype(jnp.float32) * cos + partner * sin).astype(rows.dtype)

    def one_each(count: int) -> Any:
        """Registers of a `[count, rotary]` tile of which a thread has single numbers."""
        return plgpu.Layout.TILED(
            plgpu.Tiling(((count, 32), (1,))), warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1
        )

    def body(rows_ref, slots_ref, cos_ref, sin_ref, norm_ref, scale_ref, q_ref, pool_ref, staged):
        token, group = lax.axis_index("token"), lax.axis_index("group")

        def stored(numbers: jax.Array) -> jax.Array:
            if pool.dtype == E4M3:
                numbers = jnp.clip(numbers.astype(jnp.float32) / scale_ref[0], -E4M3_MAX, E4M3_MAX)
            return numbers.astype(pool.dtype)

        def angles(layout: Any) -> list[jax.Array]:
            return [load(ref.at[token], layout.reduce(0)) for ref in (cos_ref, sin_ref)]

        @pl.when(group == 0)
        def _():
            layout, narrow = Columns(0, rank).layout(1, rank), one_each(1)
            # Every load before the first branch on the slot, past which nothing moves it.
            slot = slots_ref[token]
            latent = load(rows_ref.at[token, pl.ds(0, 1), pl.ds(0, rank)], layout)
            rotated = load(rows_ref.at[token, pl.ds(0, 1), pl.ds(rank, rotary)], narrow)
            weight = load(norm_ref.at[pl.ds(0, 1)], layout).astype(jnp.float32)
            angle = angles(narrow)
            wide = latent.astype(jnp.float32)
            inverse = lax.rsqrt((wide * wide).sum(axis=1) * (1 / rank) + eps)
            rounded = (wide * lax.broadcast_in_dim(inverse, wide.shape, [0])).astype(rows.dtype)
            normed = (rounded.astype(jnp.float32) * weight).astype(rows.dtype)
            rotated = rotated_pairs(rotated, angle, staged.at[pl.ds(0, 1)])

            @pl.when(in_pool(slot, pool.shape[0], page_size))
            def _():
                page, row = lax.div(slot, jnp.int32(page_size)), lax.rem(slot, jnp.int32(page_size))
                store(pool_ref.at[page, pl.ds(0, 1), row, pl.ds(0, rank)], stored(normed))
                store(pool_ref.at[page, pl.ds(0, 1), row, pl.ds(rank, rotary)], stored(rotated))

        @pl.when(group > 0)
        def _():
            layout, own = one_each(at_once), pl.ds((group - 1) * at_once, at_once)
            place = q_ref.at[token, own, pl.ds(head_dim - rotary, rotary)]
            store(place, rotated_pairs(load(place, layout), angles(layout), staged))

    queries, held = aliased_ref(q), aliased_ref(pool)
    both = (jnp.repeat(table.astype(jnp.float32), 2, axis=1) for table in (cos, sin))
    kernel(
        body,
        out_type=(),
        scratch_types=[plgpu.SMEM((at_once, 2 * rotary), rows.dtype, transforms=())],
        grid=(tokens, 1 + heads // at_once), grid_names=("token", "group"),
        # Sums of a row stay within a warp: no scratch.
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
        interpret=interpret,
    )(
        rows[:, None], slots.astype(jnp.int32), *both, norm[None], scale.reshape(1).astype(jnp.float32), queries, held,
    )  # fmt: skip
    return freeze_aliased(queries), freeze_aliased(held)
