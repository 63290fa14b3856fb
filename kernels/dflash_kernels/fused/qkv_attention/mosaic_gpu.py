"""Launch of fused QKV attention on Hopper: what the kernel takes, and how its splits are chosen."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dflash_kernels.attention.paged.launch import KERNEL_COMBINES_FRAGMENTS, Launch, Tuning, plan
from dflash_kernels.core.device import MULTIPROCESSORS, require_hopper
from dflash_kernels.fused.arguments import Heads
from dflash_kernels.fused.plan import HEAD_DIM, KEYS, MOST_TOKENS, Attention


def qkv_attention_mosaic_gpu(*args: Any, **options: Any) -> tuple[Array, Array, Array]:
    """See `qkv_attention`. Raises NotImplementedError for what it does not take."""
    require_hopper(causal=options["causal"])
    return launch(*args, **options)


def refuse(
    sequences: int, tokens: int, dtype: Any, *, group: int, kv_heads: int, head_dim: int, turned: int, page_size: int,
    table_width: int, causal: bool,
) -> None:  # fmt: skip
    """Raises NotImplementedError, with the reason, where `qkv_attention_mosaic_gpu` would or is not worth it."""
    require_hopper(causal=causal)
    if dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16 throughout, not {jnp.dtype(dtype)}")
    if sequences == 1:
        raise NotImplementedError("is not known to be faster for one sequence")
    _planned(sequences, tokens, group, kv_heads, head_dim, turned, page_size, table_width, causal, 1.0, None)


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
    given = (heads.qkv, heads.k_pages, heads.v_pages, *heads.norms.values())
    if any(array.dtype != jnp.bfloat16 for array in given):
        raise NotImplementedError(f"takes bfloat16 throughout, not {', '.join(str(array.dtype) for array in given)}")
    (b, table_width), (_, kv_heads, page_size, head_dim) = heads.page_table.shape, heads.k_pages.shape
    rows, width = heads.qkv.shape
    made = _planned(
        b, rows // b, width // head_dim // kv_heads - 2, kv_heads, head_dim, 2 * heads.cos.shape[1], page_size, table_width,
        causal, scale, tuning,
    )  # fmt: skip
    return _run(made, eps, heads.inputs(), {"k": heads.k_pages, "v": heads.v_pages}, interpret)


def _planned(
    sequences: int, tokens: int, group: int, kv_heads: int, head_dim: int, turned: int, page_size: int, table_width: int,
    causal: bool, scale: float, tuning: Tuning | None,
) -> tuple[Launch, Attention]:  # fmt: skip
    """One CTA for each head where those fill the GPU; two of a cluster where those do; or more, and a launch that puts parts
    together.
    """
    if head_dim != HEAD_DIM or turned != head_dim:
        raise NotImplementedError(f"turns whole heads of {HEAD_DIM}, not {turned} columns of {head_dim}")
    if page_size != KEYS:
        raise NotImplementedError(f"takes pages of {KEYS} tokens, not {page_size}")
    if tokens > MOST_TOKENS or tokens * group > KEYS:
        raise NotImplementedError(
            f"takes {MOST_TOKENS} tokens and {KEYS} query rows at most, not {tokens} and {tokens * group}"
        )
    cut = functools.partial(
        plan, b=sequences, tokens=tokens, group=group, head_dim=head_dim, page_size=page_size, kv_heads=kv_heads,
        table_width=table_width, has_sinks=False, causal=causal, window=(None, None), soft_cap=None, scale=scale, alibi_sqrt=False,
    )  # fmt: skip
    # Measured: more on its way to a multiprocessor makes others wait for their first tiles.
    stages = 3 if sequences * kv_heads <= MULTIPROCESSORS else 2
    made = cut(tuning or Tuning(stages=stages, together=False))
    if tuning is None and not made.direct:
        # By turns on one H200, a cycle of four sequences of 4B takes 3.46 ms in parts (with two stages), 3.48 with pairs on half of
        # the GPU, and 3.50 as operations apart; one of two 3.30, 3.39 and 3.30.
        pair = cut(Tuning(stages=2, together=True))
        made = pair if pair.pair else made
    # 32 sequences take 47.2 us a layer with the hint and 49.4 without, eight 17.3 and 18.0.
    fragments = not made.direct and not made.pair and made.splits >= KERNEL_COMBINES_FRAGMENTS
    # Clusters of more than two would need another kernel: their parts are put together afterwards.
    made = dataclasses.replace(made, evict_first=True, fragments=fragments, together=made.pair)
    return made, Attention(
        sequences=sequences, tokens=tokens, group=group, kv_heads=kv_heads, page_size=page_size, table_width=table_width,
        splits=made.splits, stages=made.stages, scale=scale,
    )  # fmt: skip


# Compiled as a function of its own, so that the layers of a model share one trace and one lowering of the kernel.
@functools.partial(jax.jit, static_argnums=(0, 1, 4))
def _run(
    made: tuple[Launch, Attention], eps: float, inputs: dict[str, Array], pools: dict[str, Array], interpret: Any
) -> tuple[Array, Array, Array]:
    # Not at the top: other machines need neither Pallas nor the time its import takes.
    from dflash_kernels.fused.qkv_attention import mosaic_gpu_sm90 as kernel

    return kernel.attention(*made, eps, inputs, pools, interpret)
