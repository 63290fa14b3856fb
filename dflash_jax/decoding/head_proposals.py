"""Proposals of a draft head: how columns of its scores are picked where requests are greedy, and where they sample.

Shared noise is the target's at a place, the same for a token whichever candidates stand beside it. Samples of the head's own have
noise of their own, and rejection judges them by the law that is given back.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.decoding.adjustments import proposing_logits
from dflash_jax.decoding.sampling import filtered_logits, noise_at
from dflash_jax.decoding.state import DecodeState, Setup
from dflash_jax.models.heads import Block, Pick


def last_features(state: DecodeState) -> Float[Array, "B nD"]:
    """Tapped features of each sequence's last committed token; zeros right after a prompt, whose features are in pages already."""
    at = jnp.maximum(state.fresh - 1, 0)[:, None, None]
    last = jnp.take_along_axis(state.features, at, axis=1)[:, 0]
    return jnp.where((state.fresh > 0)[:, None], last, jnp.zeros((), last.dtype))


def with_noise(setup: Setup, state: DecodeState, block: Block, noise: Float[Array, "B g V"] | None) -> Block:
    """The block whose candidates are chosen under the noise that they will be drawn with, where that is the target's.

    The target's token is the best under this noise, and may be none of the best without it: with the pair that ships in float32,
    32 candidates, 32 prompts and temperature 1, 1.93 tokens a cycle in place of 1.79.
    """
    if noise is None or setup.greedy or setup.proposals != "shared_noise":
        return block
    scale = (state.request.temperature * setup.draft_temperature)[:, None, None]
    return block._replace(noise=block.named(noise) * scale)


def picker(setup: Setup, positions: Int[Array, "B g"], state: DecodeState, noise: Float[Array, "B g V"] | None) -> Pick:
    """The `Pick` of a cycle: as `decoding.cycle.propose` of the scores of any number of cases."""
    request = state.request

    def pick(
        first: int, scores: Float[Array, "B n P C"], tokens: Int[Array, "B n C"] | None
    ) -> tuple[Int[Array, "B n P"], Float[Array, "B n P C"]]:
        if state.adjust is not None:
            listed = None if tokens is None else tokens[:, :, None]
            scores = proposing_logits(scores, state.adjust, listed)
        if setup.greedy or setup.proposals == "argmax":
            return jnp.argmax(scores, axis=-1).astype(jnp.int32), scores
        slots, places, cases, columns = scores.shape
        rows = scores.reshape(slots, places * cases, columns)
        here = slice(first, first + places)
        if setup.proposals == "shared_noise" and noise is not None:
            logits = filtered_logits(rows, request, "sampled") / setup.draft_temperature
            drawn = noise[:, here] if tokens is None else jnp.take_along_axis(noise[:, here], tokens, axis=-1)
        else:
            logits = filtered_logits(rows, request, setup.mode)
            drawn = noise_at(request.seed, positions[:, here], columns, stream=1, since=positions[:, 0])
        logits = logits.reshape(scores.shape)
        sampling = (request.temperature > 0)[:, None, None, None]
        picked = jnp.argmax(jnp.where(sampling, logits + drawn[:, :, None], logits), axis=-1)
        return picked.astype(jnp.int32), logits

    return pick
