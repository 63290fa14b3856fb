"""The Hopper kernel that adds to the residual stream and norms it: one warpgroup a row."""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

LANES = 128  # threads of a warpgroup
VECTOR = 4  # neighbouring entries of one thread


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


def _body(parts, before, weight, stream, normed, *, eps: float):
    row, width = lax.axis_index("row"), before.shape[1]
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=VECTOR)

    def load(ref):
        return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

    total = load(before.at[row])
    for part in range(parts.shape[0]):
        total = total + load(parts.at[part, row])
    rounded = total.astype(stream.dtype)
    stream.at[row][...] = rounded
    wide = rounded.astype(jnp.float32)
    factor = lax.rsqrt((wide * wide).sum() * (1 / width) + eps)
    normed.at[row][...] = (load(weight) * (wide * factor).astype(normed.dtype).astype(jnp.float32)).astype(normed.dtype)
