"""Two matrix products with an RMS norm between them, fused. Checks shapes, then dispatches."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_kernels.core.device import target
from dflash_kernels.core.dispatch import first_fitting
from dflash_kernels.core.layouts import EMPTY
from dflash_kernels.core.validation import check_axes, check_floats
from dflash_kernels.fused.linear_pair import mosaic_gpu
from dflash_kernels.fused.linear_pair.reference import linear_chain_reference
from dflash_kernels.fused.plan import LINE

IMPLEMENTATIONS = {"mosaic_gpu": mosaic_gpu.linear_chain_mosaic_gpu, "xla": linear_chain_reference}


def linear_chain_refusal(rows: int, dtype: Any, *, depth: int, hidden: int, features: int) -> str | None:
    """Why `linear_chain` has nothing faster than separate operations for calls of these sizes; None where it has."""
    try:
        mosaic_gpu.refuse(rows, dtype, depth=depth, hidden=hidden, features=features)
    except NotImplementedError as reason:
        return str(reason)
    return None


def linear_chain_exchange(rows: int, *, depth: int, hidden: int, features: int) -> Int[Array, "w"]:
    """First value of the cross-CTA mailbox of `linear_chain`, which the caller makes a Ref of, for calls of these sizes."""
    ctas = max(target().multiprocessors, 1)
    words = mosaic_gpu.plan(rows, depth, hidden, features, ctas=ctas, eps=0.0).mailbox
    # Counts of launches are 0 at first, places of results are empty.
    return jnp.where(jnp.arange(words.words) < words.ctas * LINE, 0, EMPTY)


def linear_chain(
    x: Float[Array, "M nD"],
    first: Float[Array, "D nD"],
    norm: Float[Array, "D"],
    second: Float[Array, "F D"],
    *,
    exchange: Any,
    eps: float,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "M F"]:
    """Two matrix products with an RMS norm between them, fused for a few tokens: `second` times the norm of `first` times x.

    Args:
      x: bfloat16, float16 or float32.
      first, second: weights `[rows, columns]`; norm: weight of the norm between them.
      exchange: the mailbox, a Ref of `linear_chain_exchange`, passed to one call after the other.
      eps: added to the mean square.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Raises:
      ValueError: shapes do not agree.
      NoImplementationError: nothing named takes these arguments.
    """
    check_axes(x=(x, "M nD"), first=(first, "D nD"), norm=(norm, "D"), second=(second, "F D"))
    check_floats(x=x, first=first, norm=norm, second=second)
    hidden = first.shape[0]
    if x.shape[1] != first.shape[1] or second.shape[1] != hidden or norm.shape != (hidden,):
        raise ValueError(f"x {x.shape}, first {first.shape}, norm {norm.shape} and second {second.shape} do not fit")
    with jax.named_scope("linear_chain"):
        return first_fitting("linear_chain", IMPLEMENTATIONS, implementation, x, first, norm, second, exchange, eps=eps)
