"""Sampling, by Gumbel-max. The noise of a token is fixed by its request's seed and its position, whoever asks for it.

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
from dflash_kernels import drawn_choice, drawn_refusal, filter_logits, filtered_choice, noise_of_all, scaled_logits
from jaxtyping import Array, Bool, Float, Int, UInt32

Mode = Literal["greedy", "sampled", "full", "adjusted", "regular", "structured"]


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


class Noise:
    """Standard Gumbel noise of the tokens at some positions, all of which is made where somebody asks for all of it.

    Attributes:
      keys: of each position, from which kernels make the noise of the tokens that need it.
    """

    def __init__(self, keys: UInt32[Array, "B T 2"], vocab: int):
        self.keys, self.vocab = keys, vocab

    @functools.cached_property
    def table(self) -> Float[Array, "B T V"]:
        return noise_of_all(self.keys, self.vocab)


def noise_keys(
    seed: UInt32[Array, "B 2"], positions: Int[Array, "B T"], stream: int = 0, since: Int[Array, "B"] | None = None
) -> UInt32[Array, "B T 2"]:
    """Keys of the noise at `positions`; for the other arguments see `noise_at`."""

    def key(key_data: Array, position: Array, first: Array | None) -> Array:
        found = jax.random.fold_in(jax.random.wrap_key_data(key_data, impl="threefry2x32"), position)
        found = jax.random.fold_in(found, stream)
        return jax.random.key_data(found if first is None else jax.random.fold_in(found, first))

    return jax.vmap(jax.vmap(key, (None, 0, None)))(seed, positions, since)


def noise_at(
    seed: UInt32[Array, "B 2"],
    positions: Int[Array, "B T"],
    vocab: int,
    stream: int = 0,
    since: Int[Array, "B"] | None = None,
) -> Float[Array, "B T V"]:
    """Standard Gumbel noise of all tokens at `positions`; `stream` separates independent uses of one position.

    Args:
      since: the first position of a cycle, for noise that another cycle which comes to the same position has none of.
    """
    return noise_of_all(noise_keys(seed, positions, stream, since), vocab)


def filtered_logits(
    logits: Float[Array, "B T V"], request: RequestArrays, mode: Mode, rounded: Any = jnp.float32
) -> Float[Array, "B T V"]:
    """Logits after temperature (less their maximum), and after min_p, top_k and top_p in that order in modes that filter; what
    they refuse is -inf.

    Rows of temperature 0 are returned unscaled: their argmax is the greedy choice.

    Args:
      rounded: dtype that the product before was rounded to, in which filters compare: one of 16 bits takes half as long.
    """
    temperature = request.temperature[:, None, None]
    if mode in ("greedy", "sampled"):
        return scaled_logits(logits, temperature)
    limits = {name: getattr(request, name)[:, None, None] for name in ("min_p", "top_k", "top_p")}
    return filter_logits(logits, temperature, **limits, rounded=rounded)


def without_stops(
    logits: Float[Array, "B T V"], request: RequestArrays, produced: Int[Array, "B"]
) -> Float[Array, "B T V"]:
    """Logits with the stop ids refused wherever choosing one would end a request before its `min_tokens`.

    Row j chooses token number `produced + j` (from 0) of the request.
    """
    b, t, vocab = logits.shape
    early = (produced[:, None] + jnp.arange(t)) < request.min_tokens[:, None]
    refused = early[:, :, None] & (request.stop_ids >= 0)[:, None]
    # Written where they are: a mask of all tokens would take a pass over the logits.
    places = jnp.where(refused, request.stop_ids[:, None], vocab)
    rows, columns = jnp.arange(b)[:, None, None], jnp.arange(t)[:, None]
    return logits.at[rows, columns, places].set(-jnp.inf, mode="drop")


def sample(
    logits: Float[Array, "B T V"],
    positions: Int[Array, "B T"],
    request: RequestArrays,
    mode: Mode,
    noise: Noise | None = None,
) -> Int[Array, "B T"]:
    """The token each row of the target's logits chooses for its position, filters and all; ties go to the lowest id.

    Args:
      logits: of the dtype that the product before was rounded to, in which filters compare, or float32. In modes from adjusted on
        they are no such numbers any more.
      noise: of these positions, where the caller has it already.
    """
    if mode == "greedy":
        return choose(logits, positions, request, mode)
    b, t, vocab = logits.shape
    noise = Noise(noise_keys(request.seed, positions), vocab) if noise is None else noise
    if drawn_refusal(logits) is not None:
        rounded, logits = logits.dtype, logits.astype(jnp.float32)
        return choose(filtered_logits(logits, request, mode, rounded), positions, request, mode, noise.table)
    rows, keys = logits.reshape(b * t, vocab), noise.keys.reshape(b * t, 2)
    of_rows = [jnp.repeat(each, t) for each in (request.temperature, request.min_p, request.top_k, request.top_p)]
    if mode == "sampled":
        return drawn_choice(rows, keys, of_rows[0]).reshape(b, t)
    limits = dict(zip(("temperature", "min_p", "top_k", "top_p"), of_rows, strict=True))
    return filtered_choice(rows, keys, **limits).reshape(b, t)


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
