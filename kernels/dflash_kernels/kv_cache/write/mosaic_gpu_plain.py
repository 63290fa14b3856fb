"""Writes of finished rows on Hopper: the kernel of `qkv_write` with nothing to do on the way."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from dflash_kernels.core.device import require_hopper


def cache_write_mosaic_gpu(
    k_pages: Shaped[Array, "P K p H"],
    v_pages: Shaped[Array, "P K p H"],
    k: Shaped[Array, "T K H"],
    v: Shaped[Array, "T K H"],
    slots: Int[Array, "T"],
) -> tuple[Shaped[Array, "P K p H"], Shaped[Array, "P K p H"]]:
    """See `cache_write`. Raises NotImplementedError for what it does not take."""
    require_hopper()
    k_pages, v_pages = launch((k_pages, v_pages), (k, v), slots)
    return k_pages, v_pages


def latent_write_mosaic_gpu(
    latent_pages: Shaped[Array, "P 1 p C"], latents: Shaped[Array, "T C"], slots: Int[Array, "S"]
) -> Shaped[Array, "P 1 p C"]:
    """See `latent_write`. Raises NotImplementedError for what it does not take."""
    require_hopper()
    return launch((latent_pages,), (latents[:, None],), slots)[0]


def launch(
    pools: tuple[Shaped[Array, "P K p H"], ...],
    rows: tuple[Shaped[Array, "T K H"], ...],
    slots: Int[Array, "S"],
    *,
    interpret: Any = None,
) -> tuple[Shaped[Array, "P K p H"], ...]:
    """The implementation without the device check: for tests on the CPU (`interpret`)."""
    for pool, new in zip(pools, rows, strict=True):
        floats = all(jnp.issubdtype(x.dtype, jnp.floating) and jnp.dtype(x.dtype).itemsize > 1 for x in (pool, new))
        if pool.dtype != new.dtype and not floats:
            raise NotImplementedError(f"takes no rows of {new.dtype} for a pool of {pool.dtype}")
        if pool.shape[3] % 8:
            raise NotImplementedError(f"takes rows of a multiple of 8 numbers, not {pool.shape[3]}")
    if slots.shape[0] == 0:
        raise NotImplementedError("takes one token or more")
    return _write(pools, rows, slots, interpret=interpret)


# Compiled as a function of its own, so that the layers of a model share one trace and one lowering of the kernel.
@functools.partial(jax.jit, static_argnames="interpret")
def _write(pools: tuple[Array, ...], rows: tuple[Array, ...], slots: Array, *, interpret: Any) -> tuple[Array, ...]:
    # Not at the top: other machines need neither Pallas nor the time its import takes.
    from dflash_kernels.kv_cache.write import mosaic_gpu_sm90 as kernel

    _, heads, page_size, width = pools[0].shape
    inputs = {f"rows{i}": new for i, new in enumerate(rows)} | {"slots": slots.astype(jnp.int32)}
    segments = tuple(
        kernel.Segment(f"rows{i}", f"pool{i}", 0, heads, None, False, paged=True) for i in range(len(pools))
    )
    held = {f"pool{i}": pool for i, pool in enumerate(pools)}
    _, held = kernel.write(segments, kernel.Columns(width // 2, width), 0.0, page_size, inputs, held, None, interpret)
    return tuple(held.values())
