"""Products of a few rows on Hopper, stored as rows: the epilogue of `matmul.few_rows_sm90`."""

from typing import Any

import jax
import jax.numpy as jnp

from dflash_kernels.core.device import MATRIX_ROWS as TILE
from dflash_kernels.matmul.few_rows_sm90 import stream
from dflash_kernels.matmul.few_tiling import Plan
from dflash_kernels.mosaic_gpu.layouts import store_transposed


def few_linear(plan: Plan, x: jax.Array, weight: jax.Array, bias: jax.Array | None, interpret: Any = None) -> jax.Array:
    """See `few_linear` in `matmul.few.api`."""
    if plan.parts:
        out = jax.ShapeDtypeStruct((plan.split, plan.rows, plan.features), jnp.float32)
    else:
        out = jax.ShapeDtypeStruct((plan.rows, plan.features), x.dtype)

    def store(refs: dict[str, Any], product: Any, tile: Any, part: Any) -> None:
        target = refs["out"].at[part] if plan.parts else refs["out"]
        store_transposed(target, tile * TILE, product, rows=TILE, tokens=plan.rows)

    given = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    return stream("few_linear", plan, given, {"out": out}, store, interpret=interpret)[0]
