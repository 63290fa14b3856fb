"""The Hopper kernel: attention over pages, then the chain of products, by one persistent CTA on every multiprocessor."""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.core.layouts import aliased_ref, freeze_aliased
from dflash_kernels.fused.layer import mosaic_gpu_sm90 as products
from dflash_kernels.fused.layer.attention_chain_mosaic_gpu_share import ATTEND, MERGE, AttendingShare
from dflash_kernels.fused.layer.mosaic_gpu_plan import HEAD_DIM, KEYS, TILE_ROWS, Attention
from dflash_kernels.fused.layer.plan import BLOCK, Plan
from dflash_kernels.mosaic_gpu.layouts import tiled


def scratch(attention: Attention, plan: Plan, dtype: Any, weights: Any, interpret: Any) -> dict[str, Any]:
    """Shared memory and barriers of one CTA. Tiles of keys and values lie in the memory of the weights' ring, `rings`."""
    narrow, stages = attention.narrow_stages, attention.stages
    freed = plgpu.Barrier(num_barriers=stages)
    filled = freed if narrow else plgpu.Barrier(num_arrivals=attention.copies, num_barriers=stages)
    kind = jnp.float16 if narrow else dtype
    buffers = {
        "new_sm": plgpu.SMEM((2, attention.staged, HEAD_DIM), kind), "asked": plgpu.Barrier(), "attended": plgpu.Barrier(),
        "k_in": filled, "v_in": filled, "k_out": freed, "v_out": freed,
    }  # fmt: skip
    if interpret is not None:
        buffers["p_sm"] = plgpu.SMEM((KEYS, KEYS), kind)
    buffers = products.scratch(plan, dtype, weights, interpret) | buffers
    rings = {"kv_sm": plgpu.SMEM((attention.tiles(plan), TILE_ROWS, BLOCK), kind, transforms=tiled(kind))}
    if narrow:
        arrived = plgpu.Barrier(num_arrivals=attention.copies, num_barriers=narrow)
        buffers |= {"k_narrow_in": arrived, "v_narrow_in": arrived}
        shape = (2 * attention.tiles(plan), KEYS, HEAD_DIM)
        rings["narrow_sm"] = plgpu.SMEM(shape, jnp.float8_e4m3fn, transforms=tiled(jnp.float8_e4m3fn))
    if interpret is not None:
        return buffers | rings
    return buffers | {"rings": plgpu.RefUnion(buffers.pop("w_sm"), *rings.values())}


def results(attention: Attention, plan: Plan, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """What the kernel writes; all but `stream` and `projected` matter only inside of it. Parts of attention go through Refs of the
    caller's, but under the interpreter.
    """
    heads = attention.kv_heads * attention.group * HEAD_DIM
    return products.results(plan, dtype) | {
        "x": jax.ShapeDtypeStruct((plan.live, heads), dtype),
        "attended": jax.ShapeDtypeStruct((attention.items, attention.rows, HEAD_DIM), jnp.float32),
        "lses": jax.ShapeDtypeStruct((attention.items, KEYS), jnp.float32),
    }


def chain(
    attention: Attention, plan: Plan, inputs: dict[str, jax.Array], pools: dict[str, jax.Array], exchange: Any,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array | None, dict[str, jax.Array]]:  # fmt: skip
    """Runs the kernel.

    Args:
      attention, plan: shapes and schedule.
      inputs: `qkv [B * T, N + 2 K, H]`, `cos` and `sin [B * T, H / 2]` float32, `q_norm`, `k_norm`, `table [B, W]`, `seq_lens`
        and `q_lens [B]` int32 (with REACH times how many tokens after its own a token sees), for float8 pools `k_scale` and
        `v_scale [K]` float32, and what the chain of products takes but for `x`.
      pools: `k` and `v`, `[P, K, p, H]`, written in place.
      exchange: Refs of the products' exchange, of attention's parts `[ctas, rows, H]` and their lse `[ctas, 64]`, and of the heads
        `[live, N * H / 2]`, int32, EMPTY at first. No other launch uses them at the same time.

    Returns:
      The residual stream `[hidden, tokens]` float32, the next projection `[live, features]` or None, and the pools.
    """
    dtype, outputs = inputs["qkv"].dtype, results(attention, plan, inputs["qkv"].dtype)
    held = {name: aliased_ref(pool) for name, pool in pools.items()}
    names = [*inputs, *held]
    options: dict[str, Any] = {
        "grid": (plan.ctas,), "grid_names": ("cta",), "num_threads": 3, "thread_name": "wg",
        "scratch_types": scratch(attention, plan, dtype, inputs["o"].dtype, interpret),
        "compiler_params": plgpu.CompilerParams(approx_math=True),
    }  # fmt: skip

    def body(*refs, run, named, rings=None, **buffers):
        if rings is not None:
            buffers |= dict(zip(("w_sm", "kv_sm", "narrow_sm"), rings, strict=False))
        AttendingShare(attention, plan, run, dict(zip(named, refs, strict=True)), buffers, interpret).run()

    first = (ATTEND, MERGE)
    if interpret is None:
        outputs = {name: outputs[name] for name in ("stream", "projected")}
        named = (*names, "exchange", "attended", "lses", "x", *outputs)
        whole = functools.partial(body, run=(*first, *plan.products), named=named)
        out = plgpu.kernel(whole, out_type=tuple(outputs.values()), **options)(
            *inputs.values(), *held.values(), *exchange
        )
        found = dict(zip(outputs, out, strict=True))
    else:
        # The interpreter cannot make CTAs wait for each other: one launch for each stage, which share their results.
        shared = [jax.new_ref(jnp.full(out.shape, jnp.nan, out.dtype)) for out in outputs.values()]
        for stage in (*first, *products.interpreted_stages(plan)):
            one = functools.partial(body, run=(stage,), named=(*names, *outputs))
            plgpu.kernel(one, out_type=(), interpret=interpret, **options)(*inputs.values(), *held.values(), *shared)
        found = {name: ref[...] for name, ref in zip(outputs, shared, strict=True)}
    written = {name: freeze_aliased(ref) for name, ref in held.items()}
    return found["stream"], found["projected"] if "next" in inputs else None, written
