"""Proposals of a draft head: how columns of its scores are picked where requests are greedy, and where they sample.

Shared noise is the target's at a place, the same for a token whichever candidates stand beside it. Samples of the head's own have
noise of their own, and rejection judges them by the law that is given back.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.decoding.sampling import filtered_logits, noise_at
from dflash_jax.decoding.state import DecodeState, Setup
from dflash_jax.models.heads import Law, Pick


def head_proposals(
    setup: Setup,
    drafter: Any,
    hidden: Float[Array, "B g D"],
    head_weight: Any,
    positions: Int[Array, "B g"],
    state: DecodeState,
    noise: Float[Array, "B g V"] | None = None,
) -> tuple[Int[Array, "B g"], Law]:
    """One token for each place, by the drafter's head, and the law that it was picked from.

    Args:
      hidden: of the slots that propose; `head_weight`: the target's LM head, or the drafter's copy of it.
      positions: of the tokens that are proposed.
      noise: the target's at these positions, where requests sample.
    """
    pick = picker(setup, positions, state, noise)
    return drafter.head.propose(hidden, drafter.base(hidden, head_weight), state.pending, pick)


def picker(setup: Setup, positions: Int[Array, "B g"], state: DecodeState, noise: Float[Array, "B g V"] | None) -> Pick:
    """The `Pick` of a cycle: as `decoding.cycle.propose` of the scores of any number of cases."""
    request = state.request

    def pick(
        first: int, scores: Float[Array, "B n P C"], tokens: Int[Array, "B n C"] | None
    ) -> tuple[Int[Array, "B n P"], Float[Array, "B n P C"]]:
        if setup.mode == "greedy" or setup.proposals == "argmax":
            return jnp.argmax(scores, axis=-1).astype(jnp.int32), scores
        slots, places, cases, columns = scores.shape
        rows = scores.reshape(slots, places * cases, columns)
        here = slice(first, first + places)
        if setup.proposals == "shared_noise" and noise is not None:
            logits = filtered_logits(rows, request, "sampled") / setup.draft_temperature
            drawn = noise[:, here] if tokens is None else jnp.take_along_axis(noise[:, here], tokens, axis=-1)
        else:
            logits = filtered_logits(rows, request, setup.mode)
            drawn = noise_at(request.seed, positions[:, here], columns, stream=1)
        logits = logits.reshape(scores.shape)
        sampling = (request.temperature > 0)[:, None, None, None]
        picked = jnp.argmax(jnp.where(sampling, logits + drawn[:, :, None], logits), axis=-1)
        return picked.astype(jnp.int32), logits

    return pick
