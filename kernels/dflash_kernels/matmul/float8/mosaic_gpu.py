"""Products of float8 on Hopper: what the kernels take.

The kernel is that of `dense` with blocks of as many bytes, half as many instructions and scales at the end. Measured on an H200 in
cycles of 32 sequences, 512 rows, beside bfloat16: gate and up of a 4B model 45 us in place of 75, of 8B 70 in place of 130, the
head 283 and 429 in place of 503 and 789; rows rounded 2 to 6 us, the stream's sum and norm as long as without rounding. A cycle
of 8B takes 15.9 ms in place of 17.1 with the drafter alone in float8, 11.0 with both models, of 4B 10.3 and 7.7 in place of 10.9;
eight sequences of 4B, 128 rows, 4.17 and 3.40 in place of 4.39.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dflash_kernels.core.device import require_hopper, target
from dflash_kernels.matmul.dense.mosaic_gpu import FEWEST, better_of, first_of_best
from dflash_kernels.matmul.dense.tiling import BLOCK, ROWS, SOME_ROWS, Form, Plan, best_plan
from dflash_kernels.matmul.float8.reference import Float8Rows

MOST = 2048
WIDTH = 512  # of rows that are rounded: a multiple of this


def float8_rows_mosaic_gpu(x: Array, *, paired: bool = False) -> Float8Rows:
    """See `float8_rows`."""
    require_hopper()
    if not paired:
        raise NotImplementedError("takes columns in pairs")
    return rows_launch(x)


def float8_dense_mosaic_gpu(
    x: Float8Rows, weight: Array, scales: Array, dtype: jnp.dtype, *, live: Array | None = None
) -> Array:
    """See `float8_dense`."""
    require_hopper()
    return launch("plain", x, weight, scales, dtype, live=live, multiprocessors=target().multiprocessors)[0]


def float8_gated_mosaic_gpu(x: Float8Rows, weight: Array, scales: Array, dtype: jnp.dtype) -> Array:
    """See `float8_gated`."""
    require_hopper()
    return launch("gated", x, weight, scales, dtype, multiprocessors=target().multiprocessors)[0]


def float8_best_mosaic_gpu(x: Float8Rows, weight: Array, scales: Array, dtype: jnp.dtype) -> Array:
    """See `float8_best`."""
    require_hopper()
    return best(x, weight, scales, dtype, multiprocessors=target().multiprocessors)


def float8_candidates_mosaic_gpu(x: Float8Rows, weight: Array, scales: Array, count: int) -> Array:
    """See `float8_candidates`."""
    require_hopper()
    return candidates(x, weight, scales, count, multiprocessors=target().multiprocessors)


def float8_onto_mosaic_gpu(
    x: Float8Rows, weight: Array, scales: Array, stream: Array, norm: Array, *, eps: float, paired: bool
) -> tuple[Array, Float8Rows]:
    """See `float8_onto`."""
    require_hopper()
    if not paired:
        raise NotImplementedError("takes columns in pairs")
    return onto(x, weight, scales, stream, norm, eps=eps, multiprocessors=target().multiprocessors)


def refuse(rows: int, dtype: Any, depth: int) -> None:
    """Raises NotImplementedError, with the reason, where the kernels do not take a product of these sizes."""
    if dtype != jnp.bfloat16:
        raise NotImplementedError(f"gives bfloat16, not {dtype}")
    if not ROWS // 2 < rows <= MOST:
        raise NotImplementedError(f"takes more than {ROWS // 2} and at most {MOST} rows, not {rows}")
    if depth % (2 * BLOCK):
        raise NotImplementedError(f"takes a depth of whole blocks of {2 * BLOCK}, not {depth}")


def launch(
    form: Form, x: Float8Rows, weight: Array, scales: Array, dtype: Any, *, multiprocessors: int,
    live: Array | None = None, rounded: Any = jnp.bfloat16, interpret: Any = None,
) -> tuple[Array, ...]:  # fmt: skip
    """The kernel without the device check: for tests on the CPU (`interpret`). `rounded`: dtype that "best" compares in."""
    rows, features = x.values.shape[0], weight.shape[0] // (2 if form == "gated" else 1)
    # The best of some rows leave those of a tile out that are not there.
    some_rows = form == "best" and rows < ROWS
    refuse(ROWS if some_rows else rows, dtype, weight.shape[1])
    if features % 16:
        raise NotImplementedError(f"takes a multiple of 16 features, not {features}")
    whole = rows + -rows % (FEWEST if some_rows else ROWS)
    some = live is not None and rows > SOME_ROWS and rows % SOME_ROWS == 0
    schedule = best_plan(
        whole, features, weight.shape[1], form, multiprocessors=multiprocessors, some=some, itemsize=1,
        rounded=jnp.dtype(rounded),
    )  # fmt: skip
    x = Float8Rows(jnp.pad(x.values, ((0, whole - rows), (0, 0))), jnp.pad(x.scales, (0, max(whole, ROWS) - rows)))
    found = _run(schedule, *x, weight, scales, live.reshape(1) if live is not None and some else None, interpret)
    return tuple(part[:, :rows] if form == "best" else part[..., :rows, :] for part in found)


# Compiled as a function of its own, so that the layers of a model share one trace and one lowering of the kernel.
@functools.partial(jax.jit, static_argnums=(0, 6))
def _run(
    schedule: Plan, x: Array, of_rows: Array, weight: Array, of_features: Array, live: Array | None, interpret: Any
) -> tuple[Array, ...]:
    # Not at the top: other machines need neither Pallas nor the time its import takes.
    from dflash_kernels.matmul.dense import mosaic_gpu_sm90 as kernel

    return tuple(kernel.dense(schedule, x, weight, live, interpret, (of_rows, of_features)))


def best(
    x: Float8Rows, weight: Array, scales: Array, dtype: Any, *, multiprocessors: int, interpret: Any = None
) -> Array:
    """`float8_best` without the device check."""
    found = launch("best", x, weight, scales, dtype, multiprocessors=multiprocessors, interpret=interpret)
    return first_of_best(found, x.values.shape[0])


def candidates(
    x: Float8Rows, weight: Array, scales: Array, count: int, *, multiprocessors: int, interpret: Any = None
) -> Array:
    """`float8_candidates` without the device check: bests of CTAs, whose tiles take turns, in `count` groups."""
    how: Any = {"multiprocessors": multiprocessors, "interpret": interpret}
    x = Float8Rows(x.values, jnp.ones_like(x.scales))  # whatever a row is scaled by, its best stays its best
    found = launch("best", x, weight, scales, jnp.bfloat16, rounded=jnp.float32, **how)
    more = ((0, -found[0].shape[0] % count), (0, 0))
    nothing = jnp.float32(-jnp.inf), jnp.int32(0)
    grouped = [
        jnp.pad(part[:, : x.values.shape[0]], more, constant_values=of_none).reshape(-1, count, x.values.shape[0])
        for part, of_none in zip(found, nothing, strict=True)
    ]
    return jax.lax.reduce(tuple(grouped), nothing, better_of, (0,))[1].T


def onto(
    x: Float8Rows, weight: Array, scales: Array, stream: Array, norm: Array, *, eps: float, multiprocessors: int,
    interpret: Any = None,
) -> tuple[Array, Float8Rows]:  # fmt: skip
    """`float8_onto` without the device check."""
    refuse_rows(stream)
    if norm.dtype != stream.dtype:
        raise NotImplementedError(f"takes a norm's weight in the stream's dtype, {stream.dtype}, not {norm.dtype}")
    (parts,) = launch(
        "parts", x, weight, scales, stream.dtype, multiprocessors=multiprocessors, interpret=interpret
    )  # fmt: skip
    return _add_norm(parts, stream, norm, eps, interpret)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _add_norm(parts: Array, stream: Array, norm: Array, eps: float, interpret: Any) -> tuple[Array, Float8Rows]:
    from dflash_kernels.matmul.float8 import mosaic_gpu_rows as kernel

    stream, words, scales = kernel.add_norm(parts, stream, norm, eps=eps, interpret=interpret)
    return stream, _rows(words, scales)


@functools.partial(jax.jit, static_argnames=("interpret",))
def rows_launch(x: Array, *, interpret: Any = None) -> Float8Rows:
    """`float8_rows` in pairs without the device check."""
    from dflash_kernels.matmul.float8 import mosaic_gpu_rows as kernel

    refuse_rows(x)
    return _rows(*kernel.rows(x, interpret=interpret))


def refuse_rows(x: Array) -> None:
    """Raises NotImplementedError, with the reason, for rows that the kernels do not round."""
    if x.shape[1] % WIDTH or x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16 rows of a multiple of {WIDTH}, not {x.dtype} of {x.shape[1]}")


def _rows(words: Array, scales: Array) -> Float8Rows:
    values = jax.lax.bitcast_convert_type(words, jnp.float8_e4m3fn)
    return Float8Rows(values.reshape(words.shape[0], -1), scales)
