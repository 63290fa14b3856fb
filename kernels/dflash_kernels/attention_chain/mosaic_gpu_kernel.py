"""The Hopper kernel: attention over pages, then the chain of products, by one persistent CTA on every multiprocessor."""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.attention_chain.mosaic_gpu_plan import HEAD_DIM, KEYS, Attention
from dflash_kernels.attention_chain.mosaic_gpu_share import ATTEND, MERGE, AttendingShare
from dflash_kernels.layer_chain import mosaic_gpu_kernel as products
from dflash_kernels.layer_chain.mosaic_gpu_plan import Plan


def scratch(attention: Attention, plan: Plan, dtype: Any, weights: Any, interpret: Any) -> dict[str, Any]:
    """Shared memory and barriers of one CTA. Weights of one byte have a ring of the same bytes as keys and values, `rings`."""
    filled = plgpu.Barrier(num_arrivals=attention.copies, num_barriers=attention.stages)
    freed = plgpu.Barrier(num_barriers=attention.stages)
    buffers = {
        "new_sm": plgpu.SMEM((2, attention.staged, HEAD_DIM), dtype), "asked": plgpu.Barrier(), "attended": plgpu.Barrier(),
        "k_in": filled, "v_in": filled, "k_out": freed, "v_out": freed,
    }  # fmt: skip
    if interpret is not None:
        buffers["p_sm"] = plgpu.SMEM((KEYS, KEYS), dtype)
    buffers = products.scratch(plan, dtype, weights, interpret) | buffers
    if weights == dtype:
        return buffers
    rings = buffers.pop("w_sm"), products.ring(plan, dtype)
    return buffers | ({"rings": plgpu.RefUnion(*rings)} if interpret is None else {"w_sm": rings[0], "kv_sm": rings[1]})


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
        and `q_lens [B]` int32, and what the chain of products takes but for `x`.
      pools: `k` and `v`, `[P, K, p, H]`, written in place.
      exchange: Refs of the products' exchange, of attention's parts `[ctas, rows, H]` and their lse `[ctas, 64]`, and of the heads
        `[live, N * H / 2]`, int32, EMPTY at first. No other launch uses them at the same time.

    Returns:
      The residual stream `[hidden, tokens]` float32, the next projection `[live, features]` or None, and the pools.
    """
    dtype, outputs = inputs["qkv"].dtype, results(attention, plan, inputs["qkv"].dtype)
    held = {name: jax.new_ref(pool) for name, pool in pools.items()}
    names = [*inputs, *held]
    options: dict[str, Any] = {
        "grid": (plan.ctas,), "grid_names": ("cta",), "num_threads": 4 if plan.narrow else 3, "thread_name": "wg",
        "scratch_types": scratch(attention, plan, dtype, inputs["o"].dtype, interpret),
        "compiler_params": plgpu.CompilerParams(approx_math=True),
    }  # fmt: skip

    def body(*refs, run, named, rings=None, **buffers):
        if rings is not None:
            buffers |= {"w_sm": rings[0], "kv_sm": rings[1]}
        buffers = {"kv_sm": buffers["w_sm"]} | buffers
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
    written = {name: jax.freeze(ref) for name, ref in held.items()}
    return found["stream"], found["projected"] if "next" in inputs else None, written
