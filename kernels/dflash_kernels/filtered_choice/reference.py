"""The definition in jnp."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_kernels.filtered_choice.search import kept


def filtered_choice_reference(
    logits: Float[Array, "R V"],
    noise: Float[Array, "R V"],
    *,
    temperature: Float[Array, "R"],
    min_p: Float[Array, "R"],
    top_k: Int[Array, "R"],
    top_p: Float[Array, "R"],
) -> Int[Array, "R"]:
    """See `filtered_choice`."""
    rounded, samples = logits.dtype, (temperature > 0)[:, None]
    wide = logits.astype(jnp.float32)
    if rounded != jnp.float32:
        # XLA may leave a rounding out, and elsewhere not: then another token would be the last one that stays.
        wide = jax.lax.reduce_precision(wide, 8, jnp.finfo(rounded).nmant)
    scaled = scaled_logits(wide, temperature[:, None])
    limits = {"min_p": min_p[:, None], "top_k": top_k[:, None], "top_p": top_p[:, None]}
    left = jnp.where(kept(wide, scaled, **limits, rounded=jnp.dtype(rounded)), scaled + noise, -jnp.inf)
    return jnp.argmax(jnp.where(samples, left, wide), axis=-1).astype(jnp.int32)


def scaled_logits(logits: Float[Array, "*R V"], temperature: Float[Array, "*#R 1"]) -> Float[Array, "*R V"]:
    """Less the largest of the row and over the temperature; as they are where that is 0."""
    # Shifted before it is divided: at a very small temperature every logit would become infinite, and none the greatest.
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    return jnp.where(temperature > 0, shifted / jnp.where(temperature > 0, temperature, 1.0), logits)
