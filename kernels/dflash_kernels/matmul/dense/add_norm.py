"""The Hopper kernel that adds to the residual stream and norms it: one warpgroup a row."""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LANES = 128  # threads of a warpgroup
VECTOR = 4  # neighbouring entries of one thread
SCORES = 4  # of one row in one CTA


def add_norm(
    parts: jax.Array, stream: jax.Array, weight: jax.Array, *, eps: float, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """`stream + sum(parts)` and its norm; `parts [S, M, D]`, `stream [M, D]`."""
    rows, width = stream.shape
    out = jax.ShapeDtypeStruct((rows, width), stream.dtype)
    body: Any = functools.partial(_body, eps=eps)
    body.__name__ = "add_norm"  # what profilers show
    kernel = plgpu.kernel(
        body, out_type=(out, out), grid=(rows,), grid_names=("row",),
        compiler_params=plgpu.CompilerParams(approx_math=True), **({} if interpret is None else {"interpret": interpret}),
    )  # fmt: skip
    return kernel(parts, stream, weight)


def add_norm_scores(
    parts: jax.Array, stream: jax.Array, weight: jax.Array, scorer: jax.Array, *, eps: float, interpret: Any = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`add_norm`, and the norm's products with the rows of `scorer [E, D]`. Each CTA takes some of these, and norms for itself."""
    rows, width = stream.shape
    out, count = jax.ShapeDtypeStruct((rows, width), stream.dtype), scorer.shape[0]
    body: Any = functools.partial(_scoring_body, eps=eps)
    body.__name__ = "add_norm_scores"
    kernel = plgpu.kernel(
        body, out_type=(out, out, jax.ShapeDtypeStruct((rows, count), jnp.float32)), grid=(rows, count // SCORES),
        grid_names=("row", "part"), compiler_params=plgpu.CompilerParams(approx_math=True),
        **({} if interpret is None else {"interpret": interpret}),
    )  # fmt: skip
    return kernel(parts, stream, weight, scorer)


def _scoring_body(parts, before, weight, scorer, stream, normed, scores, *, eps: float):
    row, first = lax.axis_index("row"), lax.axis_index("part") * SCORES
    # Asked for before anything else: they do not depend on what the kernel before leaves.
    against = [load(scorer.at[first + place]) for place in range(SCORES)]
    rounded, scaled = normed_row(parts, before, weight, row, eps)

    @pl.when(first == 0)
    def _():
        stream.at[row][...] = rounded
        normed.at[row][...] = scaled

    for place, other in enumerate(against):
        scores[row, first + place] = (other * scaled.astype(jnp.float32)).sum()


def _body(parts, before, weight, stream, normed, *, eps: float):
    row = lax.axis_index("row")
    rounded, scaled = normed_row(parts, before, weight, row, eps)
    stream.at[row][...] = rounded
    normed.at[row][...] = scaled


def load(ref):
    """A row in float32, `VECTOR` neighbouring entries a thread."""
    layout = plgpu.Layout.WG_STRIDED(ref.shape, vec_size=VECTOR)
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def normed_row(parts, before, weight, row, eps: float):
    """One row of the stream with the parts added, and its norm."""
    total = load(before.at[row])
    for part in range(parts.shape[0]):
        total = total + load(parts.at[part, row])
    rounded = total.astype(before.dtype)
    wide = rounded.astype(jnp.float32)
    factor = lax.rsqrt((wide * wide).sum() * (1 / before.shape[1]) + eps)
    return rounded, (load(weight) * (wide * factor).astype(before.dtype).astype(jnp.float32)).astype(before.dtype)
