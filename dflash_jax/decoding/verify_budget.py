"""Verify budget shared by requests: a cycle verifies the draft tokens most likely to stand, whichever requests' they are.

A proposal stands only where all before it do, so what counts is the chance that so many stand, which falls from place to place: of
all pairs of a request and a place the best ones are a prefix of each request's block. How likely a proposal is to stand is read off
the law that it is drawn from, and off what a head says of its place, never off the drawn token. What turns these into a chance is
learnt by `engine.acceptance_estimate`.

Both may depend on tokens that were drawn at places before, as a Markov head's law does. Texts keep their law all the same: chances
fall along a block, so the best pairs are found one after the other, and the chance of the next pair of each request is known from
tokens of pairs that were chosen before it. Whether a pair is chosen thus says nothing of the token drawn there. It would where a
chance depends on its own place's token, or on that of a place behind.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Of a feature: a chance further from one half than this says no more.
MOST_LOG_ODDS = 40.0


def log_odds(logits: Float[Array, "B g C"]) -> Float[Array, "B g"]:
    """log(q / (1 - q)) of the most probable token of each law, at most `MOST_LOG_ODDS` either way.

    Args:
      logits: of the laws; any column may be -inf, not all of a row.
    """
    top = jnp.argmax(logits, axis=-1, keepdims=True)
    less = logits.astype(jnp.float32)
    less -= jnp.max(less, axis=-1, keepdims=True)
    # Without the largest, whose 1 would hide the others' digits.
    others = jnp.where(jnp.arange(logits.shape[-1]) == top, 0.0, jnp.exp(less))
    return jnp.clip(-jnp.log(jnp.sum(others, axis=-1)), -MOST_LOG_ODDS, MOST_LOG_ODDS)


def survivals(
    odds: Float[Array, "B g"], estimate: Float[Array, "E"], told: Float[Array, "B g"] | None = None
) -> Float[Array, "B g"]:
    """The chance that each proposal and all before it stand.

    Args:
      odds: of `log_odds`.
      estimate: slopes of the logistic law, one, or two with `told`; then the intercepts of places.
      told: log-odds that a head gives itself.
    """
    signs = estimate[0] * odds if told is None else estimate[0] * odds + estimate[1] * told
    return jnp.cumprod(jax.nn.sigmoid(signs + estimate[1 if told is None else 2 :]), axis=1)


def budget(survival: Float[Array, "B g"], live: Bool[Array, "B"], rows: int) -> Int[Array, "B"]:
    """Tokens to verify in each slot, `rows` of them together at most: the pending one, and its share of the best proposals.

    Of equal proposals those of earlier places come first, then those of earlier slots. Slots that are not live get 0.

    Args:
      survival: never rising along a row. No number is none.
      rows: at least as many as slots.
    """
    places = survival.shape[1]
    # Places first, so that the order of equal ones is that of their indices.
    flat = jnp.where(live[:, None] & ~jnp.isnan(survival), survival, -1.0).T.reshape(-1)
    index = jnp.arange(flat.shape[0])
    # Compared all with all: no more than some thousand, and a sort would be launches of its own.
    ahead = (flat > flat[:, None]) | ((flat == flat[:, None]) & (index < index[:, None]))
    rank = jnp.sum(ahead, axis=1, dtype=jnp.int32)
    free = rows - jnp.sum(live, dtype=jnp.int32)
    taken = ((rank < free) & (flat >= 0)).reshape(places, -1)
    return jnp.where(live, 1 + jnp.sum(taken, axis=0, dtype=jnp.int32), 0)
