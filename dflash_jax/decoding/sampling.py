"""Choosing tokens. The noise of a token is fixed by its request's seed and its position, whoever asks for it.

A token at position t is `argmax(logits_t + gumbel(seed, t))` (the Gumbel-max form of sampling from softmax). Three things follow:
the text of a seed is the same with and without drafting; a drafter that adds the same noise to its own logits proposes the
target's very choice far more often than with noise of its own; and whatever is proposed, what is emitted is the target's own
sample, so drafting cannot change the law of the text.
"""

import functools
from dataclasses import dataclass
from typing import Any, Literal, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from dflash_jax.decoding.filters import kept

Mode = Literal["greedy", "sampled", "full"]


@no_type_check  # JAX rebuilds pytrees with shapes and placeholders in place of arrays
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RequestArrays:
    """Sampling parameters of the B slots.

    Attributes:
      seed: key data of the request's random stream.
      stop_ids: ids that end a request, padded with -1.
    """

    seed: UInt32[Array, "B 2"]
    temperature: Float[Array, "B"]
    top_p: Float[Array, "B"]
    top_k: Int[Array, "B"]
    min_p: Float[Array, "B"]
    min_tokens: Int[Array, "B"]
    stop_ids: Int[Array, "B E"]


def noise_at(
    seed: UInt32[Array, "B 2"], positions: Int[Array, "B T"], vocab: int, stream: int = 0
) -> Float[Array, "B T V"]:
    """Standard Gumbel noise of the tokens at `positions`; `stream` separates independent uses of one position."""

    def one(key_data: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(key_data, impl="threefry2x32"), position)
        return jax.random.gumbel(jax.random.fold_in(key, stream), (vocab,), jnp.float32, mode="high")

    return jax.vmap(jax.vmap(one, (None, 0)))(seed, positions)


def filtered_logits(
    logits: Float[Array, "B T V"], request: RequestArrays, mode: Mode, rounded: Any = jnp.float32
) -> Float[Array, "B T V"]:
    """Logits after temperature (less their maximum), and in mode full after min_p, top_k and top_p in that order; refused: -inf.

    Rows of temperature 0 are returned unscaled: their argmax is the greedy choice.

    Args:
      rounded: dtype that the product before was rounded to, in which filters compare: one of 16 bits takes half as long.
    """
    if mode == "full" and rounded != jnp.float32:
        # XLA may leave a rounding out, and elsewhere not: then another token would be the last one that stays.
        logits = jax.lax.reduce_precision(logits, 8, jnp.finfo(rounded).nmant)
    temperature = request.temperature[:, None, None]
    # Shifted before it is divided: at a very small temperature every logit would become infinite, and none the greatest.
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    scaled = jnp.where(temperature > 0, shifted / jnp.where(temperature > 0, temperature, 1.0), logits)
    if mode != "full":
        return scaled
    limits = {name: getattr(request, name)[:, None, None] for name in ("min_p", "top_k", "top_p")}
    return jnp.where(kept(logits, scaled, **limits, rounded=jnp.dtype(rounded)), scaled, -jnp.inf)


def without_stops(
    logits: Float[Array, "B T V"], request: RequestArrays, produced: Int[Array, "B"]
) -> Float[Array, "B T V"]:
    """Logits with the stop ids refused wherever choosing one would end a request before its `min_tokens`.

    Row j chooses token number `produced + j` (from 0) of the request.
    """
    b, t, vocab = logits.shape
    early = (produced[:, None] + jnp.arange(t)) < request.min_tokens[:, None]
    ids = jnp.where(request.stop_ids < 0, vocab, request.stop_ids)
    stops = jnp.zeros((b, vocab), bool).at[jnp.arange(b)[:, None], ids].set(True, mode="drop")
    return jnp.where(early[:, :, None] & stops[:, None], -jnp.inf, logits)


def choose(
    logits: Float[Array, "B T V"],
    positions: Int[Array, "B T"],
    request: RequestArrays,
    mode: Mode,
    noise: Float[Array, "B T V"] | None = None,
) -> Int[Array, "B T"]:
    """The token each row of (filtered) logits chooses for its position; ties go to the lowest id.

    `noise` is `noise_at` of these positions, where the caller has it already.
    """
    if mode == "greedy":
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    noisy = logits + (noise_at(request.seed, positions, logits.shape[-1]) if noise is None else noise)
    sampling = (request.temperature > 0)[:, None, None]
    return jnp.argmax(jnp.where(sampling, noisy, logits), axis=-1).astype(jnp.int32)


def is_stop(tokens: Int[Array, "B T"], stop_ids: Int[Array, "B E"]) -> Bool[Array, "B T"]:
    """Whether each token ends its request."""
    # One id after the other: a reduction would be a launch of its own.
    found = [tokens == stop_ids[:, i, None] for i in range(stop_ids.shape[1])]
    return functools.reduce(jnp.logical_or, found, jnp.zeros(tokens.shape, jnp.bool_))
