"""From a projection to heads in one launch on Hopper: what the kernel takes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dflash_kernels.attention_chain.mosaic_gpu_plan import HEAD_DIM, KEYS, MOST_TOKENS, Attention
from dflash_kernels.device import refuse_other_than_hopper
from dflash_kernels.paged_attention.mosaic_gpu_schedule import MULTIPROCESSORS, Launch, Tuning, plan
from dflash_kernels.qkv_attention.heads import Heads


def qkv_attention_mosaic_gpu(*args: Any, **options: Any) -> tuple[Array, Array, Array]:
    """See `qkv_attention`. Raises NotImplementedError for what it does not take."""
    refuse_other_than_hopper(causal=options["causal"])
    return launch(*args, **options)


def refuse(
    sequences: int, tokens: int, dtype: Any, *, group: int, kv_heads: int, head_dim: int, turned: int, page_size: int,
    table_width: int, causal: bool,
) -> None:  # fmt: skip
    """Raises NotImplementedError, with the reason, where `qkv_attention_mosaic_gpu` would or is not worth it."""
    refuse_other_than_hopper(causal=causal)
    if dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16 throughout, not {jnp.dtype(dtype)}")
    whole = _planned(sequences, tokens, group, kv_heads, head_dim, turned, page_size, table_width, causal, 1.0, None)
    if whole is None:
        raise NotImplementedError(
            f"takes calls that fill the GPU with one CTA or two for each head, not {sequences} sequences"
        )


def launch(
    heads: Heads,
    *,
    causal: bool,
    scale: float,
    eps: float,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> tuple[Array, Array, Array]:
    """The implementation without the device check: for benchmarks (`tuning`) and tests on the CPU (`interpret`)."""
    given = (heads.qkv, heads.k_pages, heads.v_pages, heads.q_norm, heads.k_norm)
    if any(array.dtype != jnp.bfloat16 for array in given):
        raise NotImplementedError(f"takes bfloat16 throughout, not {', '.join(str(array.dtype) for array in given)}")
    (b, table_width), (_, kv_heads, page_size, head_dim) = heads.page_table.shape, heads.k_pages.shape
    rows, width = heads.qkv.shape
    made = _planned(
        b, rows // b, width // head_dim // kv_heads - 2, kv_heads, head_dim, 2 * heads.cos.shape[1], page_size, table_width,
        causal, scale, tuning,
    )  # fmt: skip
    if made is None:
        raise NotImplementedError(f"takes calls that fill the GPU with one CTA or two for each head, not {b} sequences")
    return _run(made, eps, heads.inputs(), {"k": heads.k_pages, "v": heads.v_pages}, interpret)


def _planned(
    sequences: int, tokens: int, group: int, kv_heads: int, head_dim: int, turned: int, page_size: int, table_width: int,
    causal: bool, scale: float, tuning: Tuning | None,
) -> tuple[Launch, Attention] | None:  # fmt: skip
    """None where more than two CTAs would share a head's keys."""
    if head_dim != HEAD_DIM or turned != head_dim:
        raise NotImplementedError(f"turns whole heads of {HEAD_DIM}, not {turned} columns of {head_dim}")
    if page_size != KEYS:
        raise NotImplementedError(f"takes pages of {KEYS} tokens, not {page_size}")
    if tokens > MOST_TOKENS or tokens * group > KEYS:
        raise NotImplementedError(
            f"takes {MOST_TOKENS} tokens and {KEYS} query rows at most, not {tokens} and {tokens * group}"
        )
    shapes: dict[str, Any] = {
        "tokens": tokens,
        "group": group,
        "kv_heads": kv_heads,
        "page_size": page_size,
        "table_width": table_width,
    }
    # Measured: more on its way to a multiprocessor makes others wait for their first tiles.
    stages = 3 if sequences * kv_heads <= MULTIPROCESSORS else 2
    tunings = (Tuning(stages=stages, together=False), Tuning(stages=2, together=True)) if tuning is None else (tuning,)
    for choice in tunings:
        made = plan(
            choice, b=sequences, head_dim=head_dim, has_sinks=False, causal=causal, window=(None, None), soft_cap=None,
            scale=scale, alibi_sqrt=False, **shapes,
        )  # fmt: skip
        if made.direct or made.pair:
            splits = made.splits
            # 32 sequences take 47.2 us a layer with the hint and 49.4 without, eight 17.3 and 18.0.
            made = dataclasses.replace(made, once=True)
            return made, Attention(sequences=sequences, splits=splits, stages=made.stages, scale=scale, **shapes)
    return None


# Compiled as a function of its own, so that the layers of a model share one trace and one lowering of the kernel.
@functools.partial(jax.jit, static_argnums=(0, 1, 4))
def _run(
    made: tuple[Launch, Attention], eps: float, inputs: dict[str, Array], pools: dict[str, Array], interpret: Any
) -> tuple[Array, Array, Array]:
    # Not at the top: other machines need neither Pallas nor the time its import takes.
    from dflash_kernels.qkv_attention import mosaic_gpu_kernel as kernel

    return kernel.attention(*made, eps, inputs, pools, interpret)
