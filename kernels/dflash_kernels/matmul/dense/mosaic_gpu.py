"""Products on Hopper: what the kernels take."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_kernels.core.device import require_hopper, target
from dflash_kernels.core.layouts import ColumnBlocks, as_stored
from dflash_kernels.matmul.dense.reference import dense_reference, dense_scores
from dflash_kernels.matmul.dense.tiling import BLOCK, ROWS, SOME_ROWS, Form, Plan, best_plan, pays_onto
from dflash_kernels.norm.mosaic_gpu import norm_rows_launch

PLAIN_ROWS = 256
SCORED_ROWS = 16
FEWEST = 8  # rows that one copy may bring
FEW_ROWS = 32  # of which, and of some more, XLA makes parts and then another launch


type Weight = Array | ColumnBlocks


def dense_mosaic_gpu(x: Array, weight: Weight, *, live: Array | None = None) -> Array:
    """See `dense`."""
    require_hopper()
    blocked = isinstance(weight, ColumnBlocks)  # which nothing else multiplies without a copy
    if x.shape[0] > PLAIN_ROWS and not blocked and (live is None or x.shape[0] % SOME_ROWS):
        raise NotImplementedError(
            f"products of more than {PLAIN_ROWS} rows with nothing after them are faster elsewhere"
        )
    return launch("plain", x, weight, live=live, multiprocessors=target().multiprocessors)[0]


def dense_gated_mosaic_gpu(x: Array, weight: Weight) -> Array:
    """See `dense_gated`."""
    require_hopper()
    return launch("gated", x, weight, multiprocessors=target().multiprocessors)[0]


def dense_parts_mosaic_gpu(x: Array, weight: Weight, *, live: Array | None = None) -> Array:
    """See `dense_parts`."""
    require_hopper()
    return launch("parts", x, weight, live=live, multiprocessors=target().multiprocessors)[0]


def dense_onto_mosaic_gpu(x: Array, weight: Weight, stream: Array, norm: Array, *, eps: float) -> tuple[Array, Array]:
    """See `dense_onto`."""
    require_hopper()
    return onto(x, weight, stream, norm, eps=eps, multiprocessors=target().multiprocessors)


def dense_best_mosaic_gpu(x: Array, weight: Array) -> Array:
    """See `dense_best`."""
    require_hopper()
    return best(x, weight, multiprocessors=target().multiprocessors)


def onto(
    x: Array, weight: Weight, stream: Array, norm: Array, *, eps: float, multiprocessors: int, interpret: Any = None
) -> tuple[Array, Array]:
    """`dense_onto` without the device check: XLA's product with the stream added where that pays, parts elsewhere."""
    blocked = isinstance(weight, ColumnBlocks)
    refuse(x.shape[0], x.dtype, weight.shape[1], blocked=blocked)
    alike = x.dtype == weight.dtype == stream.dtype
    if alike and not blocked and pays_onto(x.shape[0], *weight.shape, multiprocessors=multiprocessors):
        # One call of cuBLAS, where XLA has no products of its own to choose from (`dflash_jax.compile.programs`).
        stream = stream + dense_reference(x, weight)
        return stream, norm_rows_launch(stream, norm, eps=eps, interpret=interpret)
    (parts,) = launch("parts", x, weight, multiprocessors=multiprocessors, interpret=interpret)
    return add_norm_launch(parts, stream, norm, eps=eps, interpret=interpret)


def best(
    x: Float[Array, "M D"], weight: Float[Array, "F D"], *, multiprocessors: int, interpret: Any = None
) -> Int[Array, "M"]:
    """`dense_best` without the device check."""
    rows = x.shape[0]
    if rows < FEWEST:
        raise NotImplementedError(f"{rows} rows are padded to {FEWEST}: other products are as fast")
    padded = jnp.pad(x, ((0, -rows % (ROWS if rows > ROWS else FEWEST)), (0, 0)))
    found = launch("best", padded, weight, multiprocessors=multiprocessors, interpret=interpret)
    return first_of_best(found, rows)


def first_of_best(found: tuple[Array, ...], rows: int) -> Int[Array, "M"]:
    """Of the candidates of some features each `[C, M]`, largest products and their places, the first of the largest."""
    best = tuple(part[:, :rows] for part in found)
    return jax.lax.reduce(best, (jnp.float32(-jnp.inf), jnp.int32(0)), better_of, (0,))[1]


def better_of(ours: tuple[Array, Array], theirs: tuple[Array, Array]) -> tuple[Array, Array]:
    """Of two values and their places the larger, of equal ones the one whose place is first."""
    first = (ours[0] > theirs[0]) | ((ours[0] == theirs[0]) & (ours[1] < theirs[1]))
    return jnp.where(first, ours[0], theirs[0]), jnp.where(first, ours[1], theirs[1])


def refuse(rows: int, dtype: Any, depth: int, *, blocked: bool = False) -> None:
    """Raises NotImplementedError, with the reason, where the kernels do not take a product of these sizes, or XLA is faster, which
    does not take weights in blocks of columns.
    """
    if dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16, not {dtype}")
    # Of 1,024 rows, eight layers of Qwen3-4B take 3.9 +- 0.7 % less with these kernels, and cuBLAS for o and down, than by XLA
    # alone; by the same products 36 layers would take 5 % less than twice 512. Nobody calls with so many.
    few = FEW_ROWS <= rows < ROWS and rows % FEWEST == 0
    if not blocked and not few and (rows % ROWS or rows > 8 * ROWS):
        raise NotImplementedError(
            f"takes {FEW_ROWS} to {8 * ROWS} rows, from {ROWS} on in steps of {ROWS} and before of {FEWEST}, not {rows}"
        )
    if depth % BLOCK:
        raise NotImplementedError(f"takes a depth of whole blocks of {BLOCK}, not {depth}")


def launch(
    form: Form, x: Array, weight: Weight, *, live: Array | None = None, multiprocessors: int, interpret: Any = None
) -> tuple[Array, ...]:
    """The kernel without the device check: for tests on the CPU (`interpret`)."""
    if not isinstance(weight, jax.Array | ColumnBlocks) or weight.dtype != x.dtype:
        raise NotImplementedError(f"takes weights in x's dtype, not {weight.dtype}")
    blocked = isinstance(weight, ColumnBlocks)
    # The best of some rows leave those of a tile out that are not there.
    refuse(max(x.shape[0], ROWS) if form == "best" else x.shape[0], x.dtype, weight.shape[1], blocked=blocked)
    features = weight.shape[0] // (2 if form == "gated" else 1)
    if features % 16:
        raise NotImplementedError(f"takes a multiple of 16 features, not {features}")
    sizes: Any = (features, weight.shape[1], form)
    if blocked:
        rows, whole = x.shape[0], x.shape[0] + -x.shape[0] % FEWEST
        schedule = best_plan(whole, *sizes, multiprocessors=multiprocessors, blocked=True)
        found = _run(schedule, jnp.pad(x, ((0, whole - rows), (0, 0))), as_stored(weight), None, interpret)
        return found if form == "best" else tuple(part[..., :rows, :] for part in found)
    some = live is not None and x.shape[0] > SOME_ROWS and x.shape[0] % SOME_ROWS == 0
    schedule = best_plan(x.shape[0], *sizes, multiprocessors=multiprocessors, some=some)
    return _run(schedule, x, weight, live.reshape(1) if live is not None and some else None, interpret)


# Compiled as a function of its own, so that the layers of a model share one trace and one lowering of the kernel.
@functools.partial(jax.jit, static_argnums=(0, 4))
def _run(schedule: Plan, x: Array, weight: Array, live: Array | None, interpret: Any) -> tuple[Array, ...]:
    # Not at the top: other machines need neither Pallas nor the time its import takes.
    from dflash_kernels.matmul.dense import mosaic_gpu_sm90 as kernel

    return tuple(kernel.dense(schedule, x, weight, live, interpret))


def add_norm_mosaic_gpu(parts: Array, stream: Array, weight: Array, *, eps: float) -> tuple[Array, Array]:
    """See `add_norm`."""
    require_hopper()
    return add_norm_launch(parts, stream, weight, eps=eps)


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def add_norm_launch(
    parts: Array, stream: Array, weight: Array, *, eps: float, interpret: Any = None
) -> tuple[Array, Array]:
    """`add_norm` without the device check."""
    from dflash_kernels.matmul.dense import add_norm as kernel

    _refuse_width(stream, weight)
    added, normed = kernel.add_norm(parts, stream, weight, eps=eps, interpret=interpret)
    return added, normed


def add_norm_scores_mosaic_gpu(
    parts: Array, stream: Array, weight: Array, scorer: Array, *, eps: float
) -> tuple[Array, Array, Array]:
    """See `add_norm_scores`."""
    require_hopper()
    return add_norm_scores_launch(parts, stream, weight, scorer, eps=eps)


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def add_norm_scores_launch(
    parts: Array, stream: Array, weight: Array, scorer: Array, *, eps: float, interpret: Any = None
) -> tuple[Array, Array, Array]:
    """`add_norm_scores` without the device check."""
    from dflash_kernels.matmul.dense import add_norm as kernel

    # Each row reads the whole scorer: with many, a product after the norm reads less.
    if stream.shape[0] > SCORED_ROWS or scorer.shape[0] % kernel.SCORES or scorer.dtype != stream.dtype:
        stream, normed = add_norm_launch(parts, stream, weight, eps=eps, interpret=interpret)
        return stream, normed, dense_scores(normed, scorer)
    _refuse_width(stream, weight)
    stream, normed, scores = kernel.add_norm_scores(parts, stream, weight, scorer, eps=eps, interpret=interpret)
    return stream, normed, scores


def _refuse_width(stream: Array, weight: Array) -> None:
    from dflash_kernels.matmul.dense import add_norm as kernel

    if weight.dtype != stream.dtype:
        raise NotImplementedError(f"takes a norm's weight in the stream's dtype, {stream.dtype}, not {weight.dtype}")
    if stream.shape[1] % (kernel.LANES * kernel.VECTOR) or stream.dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"takes bfloat16 rows of a multiple of {kernel.LANES * kernel.VECTOR}, not {stream.dtype} of {stream.shape[1]}"
        )
