"""QKV projection of a few rows on Hopper, a head's 64 rows of weights a CTA: it rotates the head and puts it where it belongs.

The epilogue, `mosaic_gpu.turned_head`, is shared with the launch that goes on with attention (`fused.token_attention`).
"""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.core.device import MATRIX_ROWS
from dflash_kernels.core.layouts import aliased_ref, freeze_aliased
from dflash_kernels.matmul.few_rows_sm90 import stream
from dflash_kernels.matmul.few_tiling import Plan
from dflash_kernels.mosaic_gpu.turned_head import store_head


def few_qkv_write(
    plan: Plan, given: dict[str, jax.Array], k_pages: jax.Array, v_pages: jax.Array, interpret: Any = None
) -> tuple[jax.Array, ...]:
    """See `few_qkv_write` in `fused.few_qkv.api`; `given` are its other arrays by name."""
    _, kv_heads, _, head_dim = k_pages.shape
    heads = plan.features // head_dim - 2 * kv_heads
    pools = {"k": aliased_ref(k_pages), "v": aliased_ref(v_pages)}
    out = jax.ShapeDtypeStruct((plan.rows, heads, head_dim), k_pages.dtype)

    def store(refs: dict[str, Any], product: Any, tile: Any, _part: Any) -> None:
        def one(name: str, head: Any, **how: Any) -> None:
            tables = [refs[each] for each in ("cos", "sin", "slots")]
            store_head(refs[name], product, refs["head_sm"], *tables, head, tokens=plan.rows, **how)

        keys = tile - heads
        pl.when(keys < 0)(lambda: one("q", tile, turns=True, paged=False))
        pl.when((keys >= 0) & (keys < kv_heads))(lambda: one("k", keys, turns=True, paged=True))
        pl.when(keys >= kv_heads)(lambda: one("v", keys - kv_heads, turns=False, paged=True))

    scratch = {"head_sm": plgpu.SMEM((MATRIX_ROWS, plan.columns), jnp.float32)}
    outs = {"q": out} | ({} if plan.norm is None else {"stream": jax.typeof(given["x"])})
    q, *rest = stream("few_qkv_write", plan, given | pools, outs, store, scratch=scratch, interpret=interpret)
    return q, freeze_aliased(pools["k"]), freeze_aliased(pools["v"]), *rest
