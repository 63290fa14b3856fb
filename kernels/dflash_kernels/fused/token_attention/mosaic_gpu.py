"""Attention of one token with its projections on Hopper: what the kernel takes, and its launch."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dflash_kernels.core.device import require_hopper, target
from dflash_kernels.fused.token_attention.plan import Plan, counters, plan
from dflash_kernels.matmul.few_tiling import RowNorm


def refuse(dtype: Any, **sizes: Any) -> None:
    """Raises NotImplementedError, with the reason, where `token_attention_mosaic_gpu` would; `sizes` as of `plan`."""
    require_hopper(causal=True)
    plan(dtype, **sizes, ctas=target().multiprocessors)


def token_attention_mosaic_gpu(*args: Any, **options: Any) -> tuple[Array, ...]:
    """See `token_attention`. Raises NotImplementedError for what it does not take.

    CTAs wait for one another, so all of them must be resident at once: nothing else that waits for the whole GPU may run beside it.
    """
    require_hopper(causal=True)
    return launch(*args, **options, ctas=target().multiprocessors)


def launch(
    k_pages: Array, v_pages: Array, x: Array, qkv: Any, output: Any, page_table: Array, seq_lens: Array, q_lens: Array,
    slots: Array, cos: Array, sin: Array, added: Any, sinks: Array | None, exchange: Any, *,
    window: tuple[int | None, int | None], scale: float, ctas: int, interpret: Any = None,
) -> tuple[Array, ...]:  # fmt: skip
    """The implementation without the device check: for tests on the CPU (`interpret`)."""
    weights = (*qkv, *output, added.weight, v_pages)
    if any(one is not None and one.dtype != x.dtype for one in weights):
        raise NotImplementedError(f"takes weights and pages in x's dtype, {x.dtype}")
    _, kv_heads, page_size, head_dim = k_pages.shape
    schedule = plan(
        x.dtype, heads=output[0].shape[1] // head_dim, kv_heads=kv_heads, head_dim=head_dim, turned=2 * cos.shape[1],
        page_size=page_size, table_width=page_table.shape[1], page_dtype=k_pages.dtype, hidden=x.shape[1], window=window,
        ctas=ctas, scale=scale, norm=RowNorm(*added[2:]),
    )  # fmt: skip
    given = {"x": x, "added": added.parts, "norm": added.weight, "qkv": qkv[0], "o": output[0]}
    given |= {name: bias for name, bias in (("qkv_bias", qkv[1]), ("o_bias", output[1])) if bias is not None}
    if sinks is not None:  # a launch of XLA's less where they are as weights are
        given["sinks"] = sinks if sinks.dtype == x.dtype else sinks.astype(jnp.float32)
    given |= {"cos": cos.astype(jnp.float32), "sin": sin.astype(jnp.float32)}
    lengths = {"table": page_table, "seq_lens": seq_lens - q_lens, "q_lens": q_lens, "slots": slots}
    given |= {name: one.astype(jnp.int32) for name, one in lengths.items()}
    exchange = jax.new_ref(jnp.zeros((counters(kv_heads),), jnp.int32)) if exchange is None else exchange
    return _run(schedule, given, k_pages, v_pages, exchange, interpret)


# Compiled as a function of its own, so that the layers of a model share one trace and one lowering of the kernel.
@functools.partial(jax.jit, static_argnums=(0, 5))
def _run(
    schedule: Plan, given: dict[str, Array], k_pages: Array, v_pages: Array, exchange: Any, interpret: Any
) -> tuple[Array, ...]:
    # Not at the top: other machines need neither Pallas nor the time its import takes.
    from dflash_kernels.fused.token_attention.mosaic_gpu_sm90 import token_attention

    return token_attention(schedule, given, k_pages, v_pages, exchange, interpret)
