"""Launches of a fused decoder layer on Hopper: what the kernels take, and where they are worth it."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from dflash_kernels.core.device import require_hopper, target
from dflash_kernels.core.layouts import ColumnBlocks, as_stored
from dflash_kernels.core.rank_exchange import RankExchange
from dflash_kernels.fused.arguments import Heads
from dflash_kernels.fused.layer.arguments import Layer
from dflash_kernels.fused.layer.plan import attention_plan, plan
from dflash_kernels.fused.plan import REACH, ROWS, WORTH, WORTH_ROWS, Attention, Plan

SEEN_PAGE_SIZE = 64  # others are interpreted by the tests
# Keys of the longest sequence in float8 pages: widening them in one CTA of each multiprocessor takes longer than memory, and over
# 32,768 keys attention as launches of its own has been measured to be as fast for 16 tokens and faster for one.
WORTH_8BIT_KEYS = 8192


def layer_chain_mosaic_gpu(*args: Any, **options: Any) -> tuple[Array, Array | None]:
    """See `layer_chain`. Raises NotImplementedError for what it does not take.

    The launch has one CTA for each multiprocessor. They wait for one another, so all of them must be resident at once: nothing else
    that waits for the whole GPU may run beside it.
    """
    require_hopper()
    return launch_products(*args, ctas=target().multiprocessors, **options)


def attention_chain_mosaic_gpu(*args: Any, **options: Any) -> tuple[Array, Array | None, Array, Array]:
    """See `attention_chain`. Raises NotImplementedError for what it does not take; as for `layer_chain_mosaic_gpu`, nothing else
    that waits for the whole GPU may run beside it.
    """
    require_hopper(causal=True)  # one kernel for masks of either kind
    return launch_layer(*args, ctas=target().multiprocessors, **options)


def refuse_products(rows: int, dtype: Any, *, itemsize: int = 2, **widths: Any) -> None:
    """Raises NotImplementedError, with the reason, where `layer_chain_mosaic_gpu` would or is not worth its grid syncs."""
    require_hopper()
    if dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16 throughout, not {dtype}")
    if rows > WORTH_ROWS:
        raise NotImplementedError(f"is known to be faster for up to {WORTH_ROWS} rows, not {rows}")
    products = plan(live=rows, ctas=target().multiprocessors, eps=0.0, itemsize=itemsize, **widths).products
    size = sum(itemsize * product.matrices * product.features * product.depth for product in products)
    if size < WORTH:
        raise NotImplementedError(f"a layer of {size} bytes takes less time than the meetings of all multiprocessors")


def refuse_layer(
    sequences: int, tokens: int, dtype: Any, *, group: int, kv_heads: int, head_dim: int, page_size: int, table_width: int,
    itemsize: int = 2, page_dtype: Any = None, **widths: Any,
) -> None:  # fmt: skip
    """Raises NotImplementedError, with the reason, where `attention_chain_mosaic_gpu` would or is not worth it."""
    refuse_products(sequences * tokens, dtype, itemsize=itemsize, **widths)
    page_dtype = jnp.dtype(dtype if page_dtype is None else page_dtype)
    if page_dtype not in (dtype, jnp.float8_e4m3fn):
        raise NotImplementedError(f"takes pages of {jnp.dtype(dtype)} or float8_e4m3fn, not {page_dtype}")
    if sequences > 1:
        raise NotImplementedError(f"is known to be faster for one sequence, not {sequences}")
    if page_size != SEEN_PAGE_SIZE:
        raise NotImplementedError(f"has been checked on a GPU with pages of {SEEN_PAGE_SIZE} tokens, not {page_size}")
    if page_dtype != dtype and table_width * page_size > WORTH_8BIT_KEYS:
        longest = table_width * page_size
        raise NotImplementedError(
            f"is known to be faster for up to {WORTH_8BIT_KEYS} keys in {page_dtype}, not {longest}"
        )
    whole = plan(live=sequences * tokens, ctas=target().multiprocessors, eps=0.0, itemsize=itemsize, **widths)
    attention_plan(
        whole, sequences=sequences, group=group, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size,
        table_width=table_width, scale=1.0, page_itemsize=page_dtype.itemsize,
    )  # fmt: skip


def launch_products(
    x: Float[Array, "M A"],
    layer: Layer,
    ahead: Shaped[Array, "D A"] | ColumnBlocks | None,
    exchange: Any,
    ranks: RankExchange | None = None,
    *,
    eps: float,
    zero_centered: bool = False,
    axis: str | None = None,
    ctas: int,
    interpret: Any = None,
) -> tuple[Float[Array, "D n"], Float[Array, "M G"] | None]:
    """`layer_chain` without the device check: for tests on the CPU (`interpret`)."""
    _refuse_dtypes((x,), layer)
    made = plan(live=x.shape[0], ctas=ctas, eps=eps, zero_centered=zero_centered, **layer.sizes())
    _refuse_stream(made, x.shape[0], layer.stream)
    if exchange is not None and exchange.shape != (made.mailbox.words,):
        raise ValueError(f"the exchange must have {made.mailbox.words} words for these shapes, not {exchange.shape}")
    _refuse_ranks(made, ranks, axis)
    inputs = {"x": x, **layer.inputs()}
    if ahead is not None:
        inputs["ahead"] = as_stored(ahead)
    return _run_products(made, inputs, exchange, interpret, ranks)


def launch_layer(
    heads: Heads,
    layer: Layer,
    exchange: Any,
    ranks: RankExchange | None = None,
    *,
    causal: bool,
    scale: float,
    eps: float,
    axis: str | None = None,
    ctas: int,
    stages: int | None = None,
    splits: int | None = None,
    interpret: Any = None,
) -> tuple[Array, Array | None, Array, Array]:
    """`attention_chain` without the device check: for benchmarks (`stages`, `splits`) and tests on the CPU (`interpret`)."""
    k_pages, v_pages, rows = heads.k_pages, heads.v_pages, heads.qkv.shape[0]
    stored = () if heads.k_scale is not None else (k_pages, v_pages)
    _refuse_dtypes((heads.qkv, *stored, *heads.norms.values()), layer)
    _, kv_heads, page_size, head_dim = k_pages.shape
    if 2 * heads.cos.shape[1] != head_dim:
        raise NotImplementedError(f"turns whole heads of {head_dim}, not {2 * heads.cos.shape[1]} columns of them")
    sequences, table_width = heads.page_table.shape
    attention, made = attention_plan(
        plan(live=rows, ctas=ctas, eps=eps, **layer.sizes()), sequences=sequences,
        group=layer.o.shape[1] // (kv_heads * head_dim), kv_heads=kv_heads, head_dim=head_dim, page_size=page_size,
        table_width=table_width, scale=scale, stages=stages, splits=splits, page_itemsize=k_pages.dtype.itemsize,
    )  # fmt: skip
    _refuse_stream(made, rows, layer.stream)
    _refuse_ranks(made, ranks, axis)
    inputs = heads.inputs() | layer.inputs()
    if not causal:
        # No part of the plan: a target and its drafter share kernels, which take seconds to lower. Nor an array of its own, which
        # would be one more place that memory is waited for.
        inputs["q_lens"] += attention.tokens * REACH
    pools = {"k": k_pages, "v": v_pages}
    stream, projected, written = _run_layer(attention, made, inputs, pools, exchange, interpret, ranks)
    return stream, projected, written["k"], written["v"]


def _refuse_dtypes(activations: Sequence[Array], layer: Layer) -> None:
    """Raises NotImplementedError for dtypes that no product has."""
    # The stream goes into products before its norm divides it: float16 would overflow.
    weights = [layer.o, layer.gate_up, layer.down, *([] if layer.following is None else [layer.following])]
    norms = [layer.post_norm, *([] if layer.next_norm is None else [layer.next_norm])]
    found, stored = {array.dtype for array in (*activations, *norms)}, {weight.dtype for weight in weights}
    allowed = [jnp.bfloat16] if layer.scales is None else [jnp.int8, jnp.float8_e4m3fn]
    if found != {jnp.dtype(jnp.bfloat16)} or stored not in [{jnp.dtype(dtype)} for dtype in allowed]:
        names = ", ".join(str(array.dtype) for array in (*activations, *norms, *weights))
        raise NotImplementedError(
            f"takes bfloat16 throughout, not {names}, or weights all in int8 or in float8_e4m3fn with scales"
        )


def _refuse_stream(made: Plan, rows: int, stream: Array) -> None:
    """Raises NotImplementedError for a stream of another dtype or of other columns than the launch has."""
    if stream.dtype != jnp.float32:
        raise NotImplementedError(f"takes a stream in float32, as `chain_stream` makes it, not {stream.dtype}")
    if stream.shape[1] != made.tokens:
        raise NotImplementedError(f"takes a stream of {made.tokens} columns for {rows} rows, not {stream.shape[1]}")


def _refuse_ranks(made: Plan, ranks: RankExchange | None, axis: str | None) -> None:
    """Raises NotImplementedError for GPUs that share a layer without memory to meet in."""
    if axis is not None and ranks is None:
        raise NotImplementedError("needs memory for exchanges with the other GPUs")
    if ranks is None:
        return
    if ranks.area.shape[2:] != (places := (2 * made.reducers, ROWS * made.tokens)):
        raise ValueError(f"exchanges of {ranks.area.shape[2:]} places and words must be of {places}")


# Compiled as functions of their own, so that the layers of a model share one trace and one lowering of the kernel. The kernels are
# imported there: other machines need neither Pallas nor the time its import takes.
@functools.partial(jax.jit, static_argnums=(0, 3))
def _run_products(
    made: Plan, inputs: dict[str, Array], exchange: Any, interpret: Any, ranks: RankExchange | None
) -> tuple[Array, Array | None]:
    from dflash_kernels.fused.layer import mosaic_gpu_sm90 as kernel

    return kernel.layer_chain(made, inputs, exchange, ranks, interpret)


@functools.partial(jax.jit, static_argnums=(0, 1, 5))
def _run_layer(
    attention: Attention,
    made: Plan,
    inputs: dict[str, Array],
    pools: dict[str, Array],
    exchange: Any,
    interpret: Any,
    ranks: RankExchange | None,
) -> tuple[Array, Array | None, dict[str, Array]]:
    from dflash_kernels.fused.layer import mosaic_gpu_sm90_attention as kernel

    return kernel.attention_chain(attention, made, inputs, pools, exchange, ranks, interpret)
