"""Reference of `mxfp4_mixture` in jnp."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_kernels.core.mxfp4 import Mxfp4Tiles, mxfp4_numbers
from dflash_kernels.fused.experts.plan_mxfp4 import CHOICE, Gate
from dflash_kernels.fused.experts.reference import chosen, share_of_choices


def mxfp4_mixture_reference(
    logits: Float[Array, "T A"],
    x: Float[Array, "T D"],
    gate_up: Mxfp4Tiles,
    gate_up_bias: Float[Array, "E twoF"],
    down: Mxfp4Tiles,
    down_bias: Float[Array, "E D"],
    *,
    taken: int,
    gate: Gate,
    first: Int[Array, ""] | None = None,
    exchange: Any = None,
) -> Float[Array, "k T D"]:
    """See `mxfp4_mixture`; all experts are dequantized."""
    del exchange
    experts, weights = chosen(logits, taken, CHOICE)
    if first is not None:
        experts, weights = share_of_choices(experts, weights, first, gate_up.shape[0])
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    wide: dict[str, Any] = {"precision": precision, "preferred_element_type": jnp.float32}
    into, out_of = (mxfp4_numbers(*matrix.blocks_and_scales(), x.dtype) for matrix in (gate_up, down))
    both = jnp.einsum("td,tkfd->tkf", x, into[experts], **wide) + gate_up_bias[experts].astype(jnp.float32)
    gates, ups = jnp.minimum(both[..., 0::2], gate.limit), jnp.clip(both[..., 1::2], -gate.limit, gate.limit)
    inner = ((ups + 1) * gates * jax.nn.sigmoid(gate.alpha * gates)).astype(x.dtype)
    out = jnp.einsum("tkf,tkdf->ktd", inner, out_of[experts], **wide)
    return (out + jnp.swapaxes(down_bias[experts], 0, 1).astype(jnp.float32)) * weights.T[..., None]
