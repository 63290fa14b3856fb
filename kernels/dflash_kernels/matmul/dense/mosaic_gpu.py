"""Dense products on Hopper: what the kernels support, and their launches."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_kernels.core.device import require_hopper, target
from dflash_kernels.core.layouts import ColumnBlocks, as_stored
from dflash_kernels.matmul.dense.reference import biased_scores, dense_reference
from dflash_kernels.matmul.row_product import RowPlan, row_plan
from dflash_kernels.matmul.tiling import (
    BLOCK,
    FEWEST_ROWS,
    LIVE_TILE_M,
    WGMMA_M,
    Epilogue,
    Plan,
    cublas_pays,
    plan,
    reduce_candidates,
)

STORE_ROWS = 256  # from here on a product with nothing after it is faster elsewhere
SCORED_ROWS = 16
FEW_ROWS = 32  # of which, and of some more, XLA makes split-K and then another launch
ROW_WIDTH, PADDED_WIDTH = (
    512,
    64,
)  # rows of row kernels: a multiple of the first, or of the second where they are padded


type Weight = Array | ColumnBlocks


def dense_mosaic_gpu(x: Array, weight: Weight, *, live: Array | None = None) -> Array:
    """See `dense`."""
    require_hopper()
    blocked = isinstance(weight, ColumnBlocks)  # which nothing else multiplies without a copy
    if x.shape[0] > STORE_ROWS and not blocked and (live is None or x.shape[0] % LIVE_TILE_M):
        raise NotImplementedError(
            f"products of more than {STORE_ROWS} rows with nothing after them are faster elsewhere"
        )
    return launch("store", x, weight, live=live, multiprocessors=target().multiprocessors)[0]


def dense_gated_mosaic_gpu(x: Array, weight: Weight) -> Array:
    """See `dense_gated`."""
    require_hopper()
    return launch("swiglu", x, weight, multiprocessors=target().multiprocessors)[0]


def dense_parts_mosaic_gpu(x: Array, weight: Weight, *, live: Array | None = None) -> Array:
    """See `dense_parts`."""
    require_hopper()
    return launch("split_k", x, weight, live=live, multiprocessors=target().multiprocessors)[0]


def dense_onto_mosaic_gpu(
    x: Array, weight: Weight, stream: Array, norm: Array, *, eps: float, zero_centered: bool = False
) -> tuple[Array, Array]:
    """See `dense_onto`."""
    require_hopper()
    return launch_onto(
        x, weight, stream, norm, eps=eps, zero_centered=zero_centered, multiprocessors=target().multiprocessors
    )  # fmt: skip


def dense_best_mosaic_gpu(x: Array, weight: Array) -> Array:
    """See `dense_best`."""
    require_hopper()
    return launch_best(x, weight, multiprocessors=target().multiprocessors)


def add_norm_mosaic_gpu(
    parts: Array, stream: Array, weight: Array, *, eps: float, zero_centered: bool = False, rounds_last: bool = False
) -> tuple[Array, Array]:
    """See `add_norm`."""
    require_hopper()
    return launch_add_norm(parts, stream, weight, eps=eps, zero_centered=zero_centered, rounds_last=rounds_last)


def add_norm_scores_mosaic_gpu(
    parts: Array, stream: Array, weight: Array, scorer: Array, bias: Array | None, **how: Any
) -> tuple[Array, Array, Array]:
    """See `add_norm_scores`."""
    require_hopper()
    return launch_add_norm_scores(parts, stream, weight, scorer, bias, **how)


def add_norm_dense_mosaic_gpu(
    parts: Array, stream: Array, weight: Array, matrix: Array, **how: Any
) -> tuple[Array, Array]:
    """See `add_norm_dense`."""
    require_hopper()
    return launch_add_norm_dense(parts, stream, weight, matrix, **how, multiprocessors=target().multiprocessors)


def require_row(rows: int, dtype: Any, *, features: int, depth: int, multiprocessors: int) -> RowPlan:
    """The plan of `add_norm_dense`. Raises NotImplementedError with the reason for what the kernel does not support."""
    if dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16, not {dtype}")
    if rows != 1:
        raise NotImplementedError(f"takes one row, not {rows}: every CTA norms for itself")
    if depth % ROW_WIDTH:
        raise NotImplementedError(f"takes a depth in {ROW_WIDTH}s, not {depth}")
    return row_plan(features, depth, multiprocessors)


def require_product(rows: int, dtype: Any, depth: int, *, blocked: bool = False) -> None:
    """Raises NotImplementedError, with the reason, where the kernels do not support a product of these sizes, or XLA is faster,
    which does not take weights in column blocks.
    """
    if dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16, not {dtype}")
    few = FEW_ROWS <= rows < WGMMA_M and rows % FEWEST_ROWS == 0
    if not blocked and not few and (rows % WGMMA_M or rows > 8 * WGMMA_M):
        raise NotImplementedError(
            f"takes {FEW_ROWS} to {8 * WGMMA_M} rows, from {WGMMA_M} on in steps of {WGMMA_M} and before of {FEWEST_ROWS}, not "
            f"{rows}"
        )
    if depth % BLOCK:
        raise NotImplementedError(f"takes a depth of whole blocks of {BLOCK}, not {depth}")


def launch(
    epilogue: Epilogue, x: Array, weight: Weight, *, live: Array | None = None, multiprocessors: int,
    interpret: Any = None,
) -> tuple[Array, ...]:  # fmt: skip
    """The kernel without the device check: for tests on the CPU (`interpret`)."""
    if not isinstance(weight, jax.Array | ColumnBlocks) or weight.dtype != x.dtype:
        raise NotImplementedError(f"takes weights in x's dtype, not {weight.dtype}")
    m, blocked = x.shape[0], isinstance(weight, ColumnBlocks)
    # The argmax leaves out the rows of a tile that are padding.
    require_product(max(m, WGMMA_M) if epilogue == "argmax" else m, x.dtype, weight.shape[1], blocked=blocked)
    features = weight.shape[0] // (2 if epilogue == "swiglu" else 1)
    if features % 16:
        raise NotImplementedError(f"takes a multiple of 16 features, not {features}")
    sizes: Any = (features, weight.shape[1], epilogue)
    if blocked:
        whole = m + -m % FEWEST_ROWS
        schedule = plan(whole, *sizes, multiprocessors=multiprocessors, blocked=True)
        found = _run(schedule, jnp.pad(x, ((0, whole - m), (0, 0))), as_stored(weight), None, interpret)
        return found if epilogue == "argmax" else tuple(part[..., :m, :] for part in found)
    some = live is not None and m > LIVE_TILE_M and m % LIVE_TILE_M == 0
    schedule = plan(m, *sizes, multiprocessors=multiprocessors, live=some)
    return _run(schedule, x, weight, live.reshape(1) if live is not None and some else None, interpret)


# Compiled as a function of its own, so that the layers of a model share one trace and one lowering of the kernel.
@functools.partial(jax.jit, static_argnums=(0, 4))
def _run(schedule: Plan, x: Array, weight: Array, live: Array | None, interpret: Any) -> tuple[Array, ...]:
    # Not at the top: other machines need neither Pallas nor the time its import takes.
    from dflash_kernels.matmul.gemm_sm90 import gemm

    return tuple(gemm(schedule, x, weight, live, interpret))


def launch_onto(
    x: Array, weight: Weight, stream: Array, norm: Array, *, eps: float, zero_centered: bool = False, multiprocessors: int,
    interpret: Any = None,
) -> tuple[Array, Array]:  # fmt: skip
    """`dense_onto` without the device check: XLA's product with the residual added where that pays, split-K elsewhere."""
    blocked = isinstance(weight, ColumnBlocks)
    require_product(x.shape[0], x.dtype, weight.shape[1], blocked=blocked)
    alike = x.dtype == weight.dtype == stream.dtype
    if alike and not blocked and cublas_pays(x.shape[0], *weight.shape, multiprocessors=multiprocessors):
        # One call of cuBLAS, where XLA has no products of its own to choose from (`dflash_jax.compile.programs`).
        stream = stream + dense_reference(x, weight)
        return stream, _norm_rows(stream, norm, eps=eps, zero_centered=zero_centered, interpret=interpret)
    (parts,) = launch("split_k", x, weight, multiprocessors=multiprocessors, interpret=interpret)
    return launch_add_norm(parts, stream, norm, eps=eps, zero_centered=zero_centered, interpret=interpret)


def launch_best(
    x: Float[Array, "M D"], weight: Float[Array, "F D"], *, multiprocessors: int, interpret: Any = None
) -> Int[Array, "M"]:
    """`dense_best` without the device check."""
    rows = x.shape[0]
    if rows < FEWEST_ROWS:
        raise NotImplementedError(f"{rows} rows are padded to {FEWEST_ROWS}: other products are as fast")
    padded = jnp.pad(x, ((0, -rows % (WGMMA_M if rows > WGMMA_M else FEWEST_ROWS)), (0, 0)))
    found = launch("argmax", padded, weight, multiprocessors=multiprocessors, interpret=interpret)
    return reduce_candidates(found, rows)


_HOW = ("eps", "zero_centered", "rounds_last", "interpret")


@functools.partial(jax.jit, static_argnames=_HOW)
def launch_add_norm(
    parts: Array, stream: Array, weight: Array, *, eps: float, zero_centered: bool = False, rounds_last: bool = False,
    interpret: Any = None,
) -> tuple[Array, Array]:  # fmt: skip
    """`add_norm` without the device check."""
    from dflash_kernels.matmul import row_norm_sm90 as kernel

    _require_width(stream, weight, padded=True)
    how: Any = {"eps": eps, "zero_centered": zero_centered, "rounds_last": rounds_last, "interpret": interpret}
    return kernel.add_norm(parts, stream, weight, **how)


@functools.partial(jax.jit, static_argnames=_HOW)
def launch_add_norm_scores(
    parts: Array, stream: Array, weight: Array, scorer: Array, bias: Array | None = None, *, eps: float,
    zero_centered: bool = False, rounds_last: bool = False, interpret: Any = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """`add_norm_scores` without the device check."""
    from dflash_kernels.matmul import row_norm_sm90 as kernel

    how: Any = {"eps": eps, "zero_centered": zero_centered, "rounds_last": rounds_last, "interpret": interpret}
    # Each row reads the whole scorer: with many, a product after the norm reads less.
    if stream.shape[0] > SCORED_ROWS or scorer.dtype != stream.dtype:
        stream, normed = launch_add_norm(parts, stream, weight, **how)
        return stream, normed, biased_scores(normed, scorer, bias)
    _require_width(stream, weight, padded=True)
    return kernel.add_norm_scores(parts, stream, weight, scorer, bias, **how)


@functools.partial(jax.jit, static_argnames=("eps", "zero_centered", "rounds_last", "multiprocessors", "interpret"))
def launch_add_norm_dense(
    parts: Array, stream: Array, weight: Array, matrix: Array, *, eps: float, zero_centered: bool = False,
    rounds_last: bool = False, multiprocessors: int, interpret: Any = None,
) -> tuple[Array, Array]:  # fmt: skip
    """`add_norm_dense` without the device check."""
    if not isinstance(matrix, jax.Array) or matrix.dtype != stream.dtype:
        raise NotImplementedError(f"takes a matrix in the stream's dtype, not {matrix.dtype}")
    features, depth = matrix.shape
    plan = require_row(
        stream.shape[0], stream.dtype, features=features, depth=depth, multiprocessors=multiprocessors
    )  # fmt: skip
    _require_width(stream, weight)
    from dflash_kernels.matmul import row_product_sm90 as kernel

    how: Any = {"eps": eps, "zero_centered": zero_centered, "rounds_last": rounds_last, "interpret": interpret}
    return kernel.add_norm_product(plan, parts, stream, weight, matrix, **how)


@functools.partial(jax.jit, static_argnames=("eps", "zero_centered", "interpret"))
def _norm_rows(rows: Array, weight: Array, *, eps: float, zero_centered: bool = False, interpret: Any = None) -> Array:
    from dflash_kernels.matmul import row_norm_sm90 as kernel

    _require_width(rows, weight)
    return kernel.norm_rows(rows, weight, eps, interpret, zero_centered=zero_centered)


def _require_width(stream: Array, weight: Array, *, padded: bool = False) -> None:
    """`padded`: the kernel pads rows."""
    if weight.dtype != stream.dtype:
        raise NotImplementedError(f"takes a norm's weight in the stream's dtype, {stream.dtype}, not {weight.dtype}")
    width, more = stream.shape[1], -stream.shape[1] % ROW_WIDTH
    fits = more == 0 or (padded and width % PADDED_WIDTH == 0 and 10 * more <= width)
    if not fits or stream.dtype != jnp.bfloat16:
        also = f", or of {PADDED_WIDTH} a tenth below one" if padded else ""
        raise NotImplementedError(
            f"takes bfloat16 rows of a multiple of {ROW_WIDTH}{also}, not {stream.dtype} of {width}"
        )
