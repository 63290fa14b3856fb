"""W8A8 products on Hopper: what the kernels support, and their launches. The kernel is that of `dense`, with row scales."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dflash_kernels.core.device import require_hopper, target
from dflash_kernels.matmul.float8.reference import Float8Rows
from dflash_kernels.matmul.tiling import (
    BLOCK,
    FEWEST_ROWS,
    LIVE_TILE_M,
    WGMMA_M,
    Epilogue,
    Plan,
    larger_of,
    plan,
    reduce_candidates,
)

MOST_ROWS = 2048
ROW_WIDTH = 512  # rows of row kernels: a multiple of this


def float8_rows_mosaic_gpu(x: Array, *, paired: bool = False) -> Float8Rows:
    """See `float8_rows`."""
    require_hopper()
    if not paired:
        raise NotImplementedError("takes interleaved columns")
    return launch_rows(x)


def float8_dense_mosaic_gpu(
    x: Float8Rows, weight: Array, scales: Array, dtype: jnp.dtype, *, live: Array | None = None
) -> Array:
    """See `float8_dense`."""
    require_hopper()
    return launch("store", x, weight, scales, dtype, live=live, multiprocessors=target().multiprocessors)[0]


def float8_gated_mosaic_gpu(x: Float8Rows, weight: Array, scales: Array, dtype: jnp.dtype) -> Array:
    """See `float8_gated`."""
    require_hopper()
    return launch("swiglu", x, weight, scales, dtype, multiprocessors=target().multiprocessors)[0]


def float8_best_mosaic_gpu(x: Float8Rows, weight: Array, scales: Array, dtype: jnp.dtype) -> Array:
    """See `float8_best`."""
    require_hopper()
    return launch_best(x, weight, scales, dtype, multiprocessors=target().multiprocessors)


def float8_candidates_mosaic_gpu(x: Float8Rows, weight: Array, scales: Array, count: int) -> Array:
    """See `float8_candidates`."""
    require_hopper()
    return launch_candidates(x, weight, scales, count, multiprocessors=target().multiprocessors)


def float8_onto_mosaic_gpu(
    x: Float8Rows, weight: Array, scales: Array, stream: Array, norm: Array, *, eps: float, paired: bool,
    zero_centered: bool = False,
) -> tuple[Array, Float8Rows]:  # fmt: skip
    """See `float8_onto`."""
    require_hopper()
    if not paired:
        raise NotImplementedError("takes interleaved columns")
    return launch_onto(
        x, weight, scales, stream, norm, eps=eps, zero_centered=zero_centered, multiprocessors=target().multiprocessors
    )


def require_product(rows: int, dtype: Any, depth: int) -> None:
    """Raises NotImplementedError, with the reason, where the kernels do not support a product of these sizes."""
    if dtype != jnp.bfloat16:
        raise NotImplementedError(f"gives bfloat16, not {dtype}")
    if not WGMMA_M // 2 < rows <= MOST_ROWS:
        raise NotImplementedError(f"takes more than {WGMMA_M // 2} and at most {MOST_ROWS} rows, not {rows}")
    if depth % (2 * BLOCK):
        raise NotImplementedError(f"takes a depth of whole blocks of {2 * BLOCK}, not {depth}")


def launch(
    epilogue: Epilogue, x: Float8Rows, weight: Array, scales: Array, dtype: Any, *, multiprocessors: int,
    live: Array | None = None, compared: Any = jnp.bfloat16, interpret: Any = None,
) -> tuple[Array, ...]:  # fmt: skip
    """The kernel without the device check: for tests on the CPU (`interpret`). `compared`: dtype that "argmax" compares in."""
    m, features = x.values.shape[0], weight.shape[0] // (2 if epilogue == "swiglu" else 1)
    # The argmax leaves out the rows of a tile that are padding; a store writes none in whole copies.
    ragged = m < WGMMA_M and (epilogue == "argmax" or (epilogue == "store" and m % FEWEST_ROWS == 0))
    require_product(WGMMA_M if ragged else m, dtype, weight.shape[1])
    if features % 16:
        raise NotImplementedError(f"takes a multiple of 16 features, not {features}")
    whole = m + -m % (FEWEST_ROWS if ragged else WGMMA_M)
    some = live is not None and m > LIVE_TILE_M and m % LIVE_TILE_M == 0
    schedule = plan(
        whole, features, weight.shape[1], epilogue, multiprocessors=multiprocessors, live=some, itemsize=1,
        out_dtype=jnp.dtype(compared),
    )  # fmt: skip
    x = Float8Rows(jnp.pad(x.values, ((0, whole - m), (0, 0))), jnp.pad(x.scales, (0, max(whole, WGMMA_M) - m)))
    found = _run(schedule, *x, weight, scales, live.reshape(1) if live is not None and some else None, interpret)
    return tuple(part[:, :m] if epilogue == "argmax" else part[..., :m, :] for part in found)


# Compiled as a function of its own, so that the layers of a model share one trace and one lowering of the kernel.
@functools.partial(jax.jit, static_argnums=(0, 6))
def _run(
    schedule: Plan, x: Array, x_scales: Array, weight: Array, w_scales: Array, live: Array | None, interpret: Any
) -> tuple[Array, ...]:
    # Not at the top: other machines need neither Pallas nor the time its import takes.
    from dflash_kernels.matmul.gemm_sm90 import gemm

    return tuple(gemm(schedule, x, weight, live, interpret, (x_scales, w_scales)))


def launch_best(
    x: Float8Rows, weight: Array, scales: Array, dtype: Any, *, multiprocessors: int, interpret: Any = None
) -> Array:
    """`float8_best` without the device check."""
    found = launch("argmax", x, weight, scales, dtype, multiprocessors=multiprocessors, interpret=interpret)
    return reduce_candidates(found, x.values.shape[0])


def launch_candidates(
    x: Float8Rows, weight: Array, scales: Array, count: int, *, multiprocessors: int, interpret: Any = None
) -> Array:
    """`float8_candidates` without the device check: the best features of each CTA, in `count` groups of CTAs."""
    how: Any = {"multiprocessors": multiprocessors, "interpret": interpret}
    x = Float8Rows(x.values, jnp.ones_like(x.scales))  # whatever a row is scaled by, its best stays its best
    found = launch("argmax", x, weight, scales, jnp.bfloat16, compared=jnp.float32, **how)
    more = ((0, -found[0].shape[0] % count), (0, 0))
    nothing = jnp.float32(-jnp.inf), jnp.int32(0)
    grouped = [
        jnp.pad(part[:, : x.values.shape[0]], more, constant_values=of_none).reshape(-1, count, x.values.shape[0])
        for part, of_none in zip(found, nothing, strict=True)
    ]
    return jax.lax.reduce(tuple(grouped), nothing, larger_of, (0,))[1].T


def launch_onto(
    x: Float8Rows, weight: Array, scales: Array, stream: Array, norm: Array, *, eps: float, multiprocessors: int,
    zero_centered: bool = False, interpret: Any = None,
) -> tuple[Array, Float8Rows]:  # fmt: skip
    """`float8_onto` without the device check."""
    _require_rows(stream)
    if norm.dtype != stream.dtype:
        raise NotImplementedError(f"takes a norm's weight in the stream's dtype, {stream.dtype}, not {norm.dtype}")
    (parts,) = launch(
        "split_k", x, weight, scales, stream.dtype, multiprocessors=multiprocessors, interpret=interpret
    )  # fmt: skip
    return _add_norm(parts, stream, norm, eps, zero_centered, interpret)


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _add_norm(
    parts: Array, stream: Array, norm: Array, eps: float, zero_centered: bool, interpret: Any
) -> tuple[Array, Float8Rows]:
    from dflash_kernels.matmul import row_norm_sm90 as kernel

    stream, words, scales = kernel.add_norm_float8(
        parts, stream, norm, eps=eps, zero_centered=zero_centered, interpret=interpret
    )
    return stream, _rows(words, scales)


@functools.partial(jax.jit, static_argnames=("interpret",))
def launch_rows(x: Array, *, interpret: Any = None) -> Float8Rows:
    """`float8_rows` with interleaved columns, without the device check."""
    from dflash_kernels.matmul import row_norm_sm90 as kernel

    _require_rows(x)
    return _rows(*kernel.float8_rows(x, interpret=interpret))


def _require_rows(x: Array) -> None:
    """Raises NotImplementedError, with the reason, for rows that the kernels do not quantize."""
    if x.shape[1] % ROW_WIDTH or x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16 rows of a multiple of {ROW_WIDTH}, not {x.dtype} of {x.shape[1]}")


def _rows(words: Array, scales: Array) -> Float8Rows:
    values = jax.lax.bitcast_convert_type(words, jnp.float8_e4m3fn)
    return Float8Rows(values.reshape(words.shape[0], -1), scales)
