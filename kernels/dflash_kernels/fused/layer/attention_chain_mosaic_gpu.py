"""A layer in one launch on Hopper: what the kernel takes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dflash_kernels.core.device import require_hopper, target
from dflash_kernels.fused.arguments import Heads
from dflash_kernels.fused.layer import mosaic_gpu as products
from dflash_kernels.fused.layer.arguments import Layer
from dflash_kernels.fused.layer.mosaic_gpu_plan import REACH, Attention, attention_plan
from dflash_kernels.fused.layer.plan import Plan, plan

SEEN_PAGE_SIZE = 64  # others are interpreted by the tests
# Keys of the longest sequence in float8 pages: widening them in one CTA of each multiprocessor takes longer than memory, and over
# 32,768 keys attention as launches of its own has been measured to be as fast for 16 tokens and faster for one.
WORTH_NARROW_KEYS = 8192


def attention_chain_mosaic_gpu(*args: Any, **options: Any) -> tuple[Array, Array | None, Array, Array]:
    """See `attention_chain`. Raises NotImplementedError for what it does not take.

    The launch has one CTA for each multiprocessor. They wait for one another, so all of them must be resident at once: nothing else
    that waits for the whole GPU may run beside it.
    """
    require_hopper(causal=True)  # one kernel for masks of either kind
    return launch(*args, ctas=target().multiprocessors, **options)


def refuse(
    sequences: int, tokens: int, dtype: Any, *, group: int, kv_heads: int, head_dim: int, page_size: int, table_width: int,
    itemsize: int = 2, page_dtype: Any = None, **widths: int,
) -> None:  # fmt: skip
    """Raises NotImplementedError, with the reason, where `attention_chain_mosaic_gpu` would or is not worth it."""
    products.refuse(sequences * tokens, dtype, itemsize=itemsize, **widths)
    page_dtype = jnp.dtype(dtype if page_dtype is None else page_dtype)
    if page_dtype not in (dtype, jnp.float8_e4m3fn):
        raise NotImplementedError(f"takes pages of {jnp.dtype(dtype)} or float8_e4m3fn, not {page_dtype}")
    if sequences > 1:
        raise NotImplementedError(f"is known to be faster for one sequence, not {sequences}")
    if page_size != SEEN_PAGE_SIZE:
        raise NotImplementedError(f"has been checked on a GPU with pages of {SEEN_PAGE_SIZE} tokens, not {page_size}")
    if page_dtype != dtype and table_width * page_size > WORTH_NARROW_KEYS:
        longest = table_width * page_size
        raise NotImplementedError(
            f"is known to be faster for up to {WORTH_NARROW_KEYS} keys in {page_dtype}, not {longest}"
        )
    whole = plan(live=sequences * tokens, ctas=target().multiprocessors, eps=0.0, itemsize=itemsize, **widths)
    attention_plan(
        whole, sequences=sequences, group=group, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size,
        table_width=table_width, scale=1.0, page_itemsize=page_dtype.itemsize,
    )  # fmt: skip


def launch(
    heads: Heads,
    layer: Layer,
    exchange: Any,
    *,
    causal: bool,
    scale: float,
    eps: float,
    ctas: int,
    stages: int | None = None,
    splits: int | None = None,
    interpret: Any = None,
) -> tuple[Array, Array | None, Array, Array]:
    """The implementation without the device check: for benchmarks (`stages`, `splits`) and tests on the CPU (`interpret`)."""
    k_pages, v_pages, rows = heads.k_pages, heads.v_pages, heads.qkv.shape[0]
    narrow = heads.k_scale is not None
    products.refuse_dtypes((heads.qkv, *(() if narrow else (k_pages, v_pages)), heads.q_norm, heads.k_norm), layer)
    _, kv_heads, page_size, head_dim = k_pages.shape
    if 2 * heads.cos.shape[1] != head_dim:
        raise NotImplementedError(f"turns whole heads of {head_dim}, not {2 * heads.cos.shape[1]} columns of them")
    sequences, table_width = heads.page_table.shape
    attention, schedule = attention_plan(
        plan(live=rows, ctas=ctas, eps=eps, **layer.sizes()), sequences=sequences,
        group=layer.o.shape[1] // (kv_heads * head_dim), kv_heads=kv_heads, head_dim=head_dim, page_size=page_size,
        table_width=table_width, scale=scale, stages=stages, splits=splits, page_itemsize=k_pages.dtype.itemsize,
    )  # fmt: skip
    products.refuse_stream(schedule, rows, layer.stream)
    inputs = heads.inputs() | layer.inputs()
    if not causal:
        # No part of the plan: a target and its drafter share kernels, which take seconds to lower. Nor an array of its own, which
        # would be one more place that memory is waited for.
        inputs["q_lens"] += attention.tokens * REACH
    stream, projected, pools = _run(attention, schedule, inputs, {"k": k_pages, "v": v_pages}, exchange, interpret)
    return stream, projected, pools["k"], pools["v"]


# Compiled as a function of its own, so that the layers of a model share one trace and one lowering of the kernel.
@functools.partial(jax.jit, static_argnums=(0, 1, 5))
def _run(
    attention: Attention,
    schedule: Plan,
    inputs: dict[str, Array],
    pools: dict[str, Array],
    exchange: Any,
    interpret: Any,
) -> tuple[Array, Array | None, dict[str, Array]]:
    # Not at the top: other machines need neither Pallas nor the time its import takes.
    from dflash_kernels.fused.layer import mosaic_gpu_kernel as kernel

    return kernel.chain(attention, schedule, inputs, pools, exchange, interpret)
