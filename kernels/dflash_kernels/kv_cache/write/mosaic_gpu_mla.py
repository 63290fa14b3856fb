"""Between MLA's projections and its attention on Hopper: norm, rotations and the write of a latent row, in one launch.

A CTA has one token's row, or the rotated parts of a few of its heads. A rotation turns neighbours: a thread gets the number next to
its own by way of shared memory, read one place to the left and to the right of where it was written.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from dflash_kernels.core.device import require_hopper
from dflash_kernels.core.layouts import aliased_ref, freeze_aliased
from dflash_kernels.quantize.reference import E4M3, E4M3_MAX


def mla_write_mosaic_gpu(*args: Any, **options: Any) -> tuple[Array, Array]:
    """See `mla_write`. Raises NotImplementedError for what it does not take."""
    require_hopper()
    return launch_mla(*args, **options)


def launch_mla(
    latent_pages: Shaped[Array, "P 1 p stored"],
    rows: Float[Array, "T C"],
    q: Float[Array, "T N H"],
    slots: Int[Array, "T"],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    norm: Float[Array, "R"],
    scale: Float[Array, ""],
    *,
    eps: float,
    interleaved: bool,
    interpret: Any = None,
) -> tuple[Float[Array, "T N H"], Shaped[Array, "P 1 p stored"]]:
    """The implementation without the device check: for tests on the CPU (`interpret`)."""
    if not interleaved:
        raise NotImplementedError("takes rotations of neighbours (interleaved) only")
    # Float32 compiles, but gives wrong numbers on an H200 and then ends the process.
    if rows.dtype not in (jnp.bfloat16, jnp.float16) or {q.dtype, norm.dtype} != {rows.dtype}:
        raise NotImplementedError(
            f"takes bfloat16 or float16 throughout, not rows of {rows.dtype} with q {q.dtype} and norm {norm.dtype}; the "
            "implementation xla takes those"
        )
    if latent_pages.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32, E4M3):
        raise NotImplementedError(f"takes no pool of {latent_pages.dtype}")
    rank, half = norm.shape[0], cos.shape[1]
    if rank % 64 or half % 16 or q.shape[2] % 2:
        raise NotImplementedError(
            f"takes latents of a multiple of 64 and turning parts of a multiple of 32, not {rank} and {2 * half}"
        )
    if rows.shape[0] == 0:
        raise NotImplementedError("takes one token or more")
    return _write(latent_pages, rows, q, slots, cos, sin, norm, scale, eps=eps, interpret=interpret)


# Compiled as a function of its own, so that the layers of a model share one trace and one lowering of the kernel.
@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def _write(
    pool: Array, rows: Array, q: Array, slots: Array, cos: Array, sin: Array, norm: Array, scale: Array, *, eps: float,
    interpret: Any,
) -> tuple[Array, Array]:  # fmt: skip
    # Not at the top: other machines need neither Pallas nor the time its import takes.
    from jax import lax
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from dflash_kernels.kv_cache.write.mosaic_gpu_sm90 import Columns, in_pool
    from dflash_kernels.mosaic_gpu.layouts import store

    (tokens, heads, head_dim), (half, rank), page_size = q.shape, (cos.shape[1], norm.shape[0]), pool.shape[2]
    turning, at_once = 2 * half, next(count for count in (8, 4, 2, 1) if heads % count == 0)

    def load(ref: Any, layout: Any) -> jax.Array:
        return plgpu.load(ref, layout=layout, optimized=False)

    def turned(numbers: jax.Array, angles: list[jax.Array], staged: Any) -> jax.Array:
        """Numbers at even places with the ones after them, those at odd places with the ones before."""
        shape = numbers.shape
        staged.at[:, pl.ds(8, turning)][...] = numbers
        plgpu.commit_smem()
        before, after = (load(staged.at[:, pl.ds(start, turning)], one_each(shape[0])) for start in (7, 9))
        odd = lax.rem(plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 1), one_each(shape[0])), 2) == 1
        cos, sin = (lax.broadcast_in_dim(angle, shape, [1]) for angle in angles)
        partner = jnp.where(odd, before.astype(jnp.float32), -after.astype(jnp.float32))
        return (numbers.astype(jnp.float32) * cos + partner * sin).astype(rows.dtype)

    def one_each(count: int) -> Any:
        """Registers of a `[count, turning]` tile of which a thread has single numbers."""
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
            rotated = load(rows_ref.at[token, pl.ds(0, 1), pl.ds(rank, turning)], narrow)
            weight = load(norm_ref.at[pl.ds(0, 1)], layout).astype(jnp.float32)
            angle = angles(narrow)
            wide = latent.astype(jnp.float32)
            inverse = lax.rsqrt((wide * wide).sum(axis=1) * (1 / rank) + eps)
            rounded = (wide * lax.broadcast_in_dim(inverse, wide.shape, [0])).astype(rows.dtype)
            normed = (rounded.astype(jnp.float32) * weight).astype(rows.dtype)
            rotated = turned(rotated, angle, staged.at[pl.ds(0, 1)])

            @pl.when(in_pool(slot, pool.shape[0], page_size))
            def _():
                page, row = lax.div(slot, jnp.int32(page_size)), lax.rem(slot, jnp.int32(page_size))
                store(pool_ref.at[page, pl.ds(0, 1), row, pl.ds(0, rank)], stored(normed))
                store(pool_ref.at[page, pl.ds(0, 1), row, pl.ds(rank, turning)], stored(rotated))

        @pl.when(group > 0)
        def _():
            layout, own = one_each(at_once), pl.ds((group - 1) * at_once, at_once)
            place = q_ref.at[token, own, pl.ds(head_dim - turning, turning)]
            store(place, turned(load(place, layout), angles(layout), staged))

    queries, held = aliased_ref(q), aliased_ref(pool)
    both = (jnp.repeat(table.astype(jnp.float32), 2, axis=1) for table in (cos, sin))
    plgpu.kernel(
        body,
        out_type=(),
        scratch_types=[plgpu.SMEM((at_once, 2 * turning), rows.dtype, transforms=())],
        grid=(tokens, 1 + heads // at_once), grid_names=("token", "group"),
        # Sums of a row stay within a warp: no scratch.
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
        interpret=interpret,
    )(
        rows[:, None], slots.astype(jnp.int32), *both, norm[None], scale.reshape(1).astype(jnp.float32), queries, held,
    )  # fmt: skip
    return freeze_aliased(queries), freeze_aliased(held)
