"""A layer's products on Hopper: output projection, SwiGLU feed-forward and the next layer's projection by one persistent kernel.

The CTA program is `gemm_chain`'s.
"""

from typing import Any

import jax

from dflash_kernels.core.layouts import interleave_columns
from dflash_kernels.core.rank_exchange import RankExchange
from dflash_kernels.fused import gemm_chain
from dflash_kernels.fused.plan import Plan
from dflash_kernels.mosaic_gpu.mailbox import given_or_own


def layer_chain(
    plan: Plan, inputs: dict[str, jax.Array], mailbox: Any, ranks: RankExchange | None = None, interpret: Any = None
) -> tuple[jax.Array, jax.Array | None]:
    """Runs the kernel.

    Args:
      plan: shapes and tiling.
      inputs: `x [live, heads]`, `before [hidden, tokens]` float32, weights `o`, `gate_up`, `down`, `next`, norms `post_norm`,
        `next_norm`, and for weights of one byte, their columns interleaved, the scales of their rows `o_scales` and so on.
      mailbox: Ref of int32 as `MailboxLayout` describes it, that no other launch uses at the same time.
      ranks: memory for exchanges with the GPUs that share the layer, 64 features of o's and of down's product at a place each.

    Returns:
      The residual stream `[hidden, tokens]` float32, and the next projection `[live, features]`, None without `next`.
    """
    dtype = inputs["x"].dtype
    if plan.is_8bit:
        inputs = inputs | {"x": interleave_columns(inputs["x"])}

    inputs, mailboxes = gemm_chain.with_ranks(inputs, {"mailbox": given_or_own(mailbox, plan.mailbox.words)}, ranks)
    found = gemm_chain.launch(
        gemm_chain.program(plan), "layer_chain", plan, plan.products, inputs, mailboxes, dtype,
        gemm_chain.scratch(plan, dtype, inputs["o"].dtype), interpret,
    )  # fmt: skip
    return found["stream"], found["projected"] if "next" in inputs else None
