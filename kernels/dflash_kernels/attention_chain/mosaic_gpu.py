"""A layer in one launch on Hopper: what the kernel takes."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from dflash_kernels.attention_chain.mosaic_gpu_plan import Attention, attention_plan
from dflash_kernels.device import refuse_other_than_hopper
from dflash_kernels.layer_chain import mosaic_gpu as products
from dflash_kernels.layer_chain.mosaic_gpu_plan import Plan, plan
from dflash_kernels.target import target

# Keys of the longest sequence: two tiles for each of its CTAs, which are on their way at once. More have not been measured to be
# faster than attention as a launch of its own, and neither have several sequences.
WORTH_KEYS = 2048
SEEN_PAGE_SIZE = 64  # others are interpreted by the tests


def attention_chain_mosaic_gpu(*args: Any, **options: Any) -> tuple[Array, Array | None, Array, Array]:
    """See `attention_chain`. Raises NotImplementedError for what it does not take.

    The launch has one CTA for each multiprocessor. They wait for one another, so all of them must be resident at once: nothing else
    that waits for the whole GPU may run beside it.
    """
    refuse_other_than_hopper(causal=options["causal"])
    return launch(*args, ctas=target().multiprocessors, **options)


def refuse(
    sequences: int, tokens: int, dtype: Any, *, group: int, kv_heads: int, head_dim: int, page_size: int, table_width: int,
    itemsize: int = 2, **widths: int,
) -> None:  # fmt: skip
    """Raises NotImplementedError, with the reason, where `attention_chain_mosaic_gpu` would or is not worth it."""
    products.refuse(sequences * tokens, dtype, itemsize=itemsize, **widths)
    if sequences > 1:
        raise NotImplementedError(f"is known to be faster for one sequence, not {sequences}")
    if page_size != SEEN_PAGE_SIZE:
        raise NotImplementedError(f"has been checked on a GPU with pages of {SEEN_PAGE_SIZE} tokens, not {page_size}")
    if table_width * page_size > WORTH_KEYS:
        raise NotImplementedError(f"is known to be faster for up to {WORTH_KEYS} keys, not {table_width * page_size}")
    whole = plan(live=sequences * tokens, ctas=target().multiprocessors, eps=0.0, itemsize=itemsize, **widths)
    attention_plan(
        whole, sequences=sequences, group=group, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size,
        table_width=table_width, causal=True, scale=1.0,
    )  # fmt: skip


def launch(
    k_pages: Float[Array, "P K p H"],
    v_pages: Float[Array, "P K p H"],
    qkv: Float[Array, "M E"],
    page_table: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    q_lens: Int[Array, "B"],
    cos: Float[Array, "M half"],
    sin: Float[Array, "M half"],
    q_norm: Float[Array, "H"],
    k_norm: Float[Array, "H"],
    stream: Float[Array, "D n"],
    o: Shaped[Array, "D A"],
    post_norm: Float[Array, "D"],
    gate_up: Shaped[Array, "twoF D"],
    down: Shaped[Array, "D F"],
    next_norm: Float[Array, "D"] | None,
    following: Shaped[Array, "G D"] | None,
    exchange: Any,
    *,
    causal: bool,
    scale: float,
    eps: float,
    ctas: int,
    scales: Sequence[Array | None] | None = None,
    stages: int | None = None,
    splits: int | None = None,
    interpret: Any = None,
) -> tuple[Array, Array | None, Array, Array]:
    """The implementation without the device check: for benchmarks (`stages`, `splits`) and tests on the CPU (`interpret`)."""
    products.refuse_dtypes(scales, (qkv, k_pages, v_pages, q_norm, k_norm), (o, gate_up, down))
    _, kv_heads, page_size, head_dim = k_pages.shape
    if 2 * cos.shape[1] != head_dim:
        raise NotImplementedError(f"turns whole heads of {head_dim}, not {2 * cos.shape[1]} columns of them")
    whole = plan(
        live=qkv.shape[0], hidden=o.shape[0], heads_width=o.shape[1], inner=down.shape[1],
        next_width=None if following is None else following.shape[0], ctas=ctas, eps=eps,
        itemsize=o.dtype.itemsize,
    )  # fmt: skip
    attention, schedule = attention_plan(
        whole, sequences=page_table.shape[0], group=o.shape[1] // (kv_heads * head_dim), kv_heads=kv_heads, head_dim=head_dim,
        page_size=page_size, table_width=page_table.shape[1], causal=causal, scale=scale, stages=stages, splits=splits,
    )  # fmt: skip
    if stream.shape[1] != schedule.tokens:
        raise NotImplementedError(
            f"takes a stream of {schedule.tokens} columns for {qkv.shape[0]} rows, not {stream.shape[1]}"
        )
    inputs = {
        "qkv": qkv.reshape(qkv.shape[0], -1, head_dim), "cos": cos.astype(jnp.float32), "sin": sin.astype(jnp.float32),
        "q_norm": q_norm, "k_norm": k_norm, "table": page_table.astype(jnp.int32), "seq_lens": seq_lens.astype(jnp.int32),
        "q_lens": q_lens.astype(jnp.int32), "before": stream, "o": o, "gate_up": gate_up, "down": down, "post_norm": post_norm,
    }  # fmt: skip
    if following is not None and next_norm is not None:
        inputs |= {"next": following, "next_norm": next_norm}
    inputs |= products.named_scales(inputs, scales)
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
    from dflash_kernels.attention_chain import mosaic_gpu_kernel as kernel

    return kernel.chain(attention, schedule, inputs, pools, exchange, interpret)
