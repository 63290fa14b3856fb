"""The definition in plain jnp."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from dflash_kernels.sampling.noise import noise_of_all
from dflash_kernels.sampling.search import kept

CANDIDATES = 8


def filtered_choice_reference(
    logits: Float[Array, "M V"],
    keys: UInt32[Array, "R 2"],
    *,
    temperature: Float[Array, "R"],
    min_p: Float[Array, "R"],
    top_k: Int[Array, "R"],
    top_p: Float[Array, "R"],
) -> Int[Array, "R"]:
    """See `filtered_choice`."""
    rows, limits = len(keys), {"min_p": min_p[:, None], "top_k": top_k[:, None], "top_p": top_p[:, None]}
    left = filter_logits(logits[:rows].astype(jnp.float32), temperature[:, None], **limits, rounded=logits.dtype)
    return jnp.argmax(_noisy(left, keys, temperature), axis=-1).astype(jnp.int32)


def drawn_choice_reference(
    logits: Float[Array, "M V"], keys: UInt32[Array, "R 2"], temperature: Float[Array, "R"]
) -> Int[Array, "R"]:
    """See `drawn_choice`."""
    scaled = scaled_logits(logits[: len(keys)].astype(jnp.float32), temperature[:, None])
    return jnp.argmax(_noisy(scaled, keys, temperature), axis=-1).astype(jnp.int32)


def drawn_candidates_reference(
    logits: Float[Array, "M V"], keys: UInt32[Array, "R 2"], temperature: Float[Array, "R"]
) -> Int[Array, "R C"]:
    """See `drawn_candidates`. A group has every eighth token."""
    rows, vocab = len(keys), logits.shape[1]
    scaled = scaled_logits(logits[:rows].astype(jnp.float32), temperature[:, None])
    more = ((0, 0), (0, -vocab % CANDIDATES))
    noisy = jnp.pad(_noisy(scaled, keys, temperature), more, constant_values=-jnp.inf)
    of_groups = jnp.argmax(noisy.reshape(rows, -1, CANDIDATES), axis=1) * CANDIDATES + jnp.arange(CANDIDATES)
    return jnp.where(of_groups < vocab, of_groups, 0).astype(jnp.int32)


def _noisy(
    scaled: Float[Array, "R V"], keys: UInt32[Array, "R 2"], temperature: Float[Array, "R"]
) -> Float[Array, "R V"]:
    return scaled + jnp.where(temperature[:, None] > 0, noise_of_all(keys, scaled.shape[1]), 0.0)


def filter_logits(
    logits: Float[Array, "*R V"],
    temperature: Float[Array, "*#R 1"],
    *,
    min_p: Float[Array, "*#R 1"],
    top_k: Int[Array, "*#R 1"],
    top_p: Float[Array, "*#R 1"],
    rounded: Any,
) -> Float[Array, "*R V"]:
    """Min-p, then top-k, then top-p: `scaled_logits` of what they keep, -inf elsewhere. `rounded`: dtype that holds all logits."""
    if rounded != jnp.float32:
        # XLA may leave a rounding out, and elsewhere not: then another token would be the last one that stays.
        logits = jax.lax.reduce_precision(logits, 8, jnp.finfo(rounded).nmant)
    scaled = scaled_logits(logits, temperature)
    stays = kept(logits, scaled, min_p=min_p, top_k=top_k, top_p=top_p, rounded=jnp.dtype(rounded))
    return jnp.where(stays, scaled, -jnp.inf)


def scaled_logits(logits: Float[Array, "*R V"], temperature: Float[Array, "*#R 1"]) -> Float[Array, "*R V"]:
    """Logits less the largest of their row, over the temperature; as they are where that is 0."""
    # Shifted before it is divided: at a very small temperature every logit would become infinite, and none the greatest.
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    return jnp.where(temperature > 0, shifted / jnp.where(temperature > 0, temperature, 1.0), logits)
