"""The walk over scores of pairs: each place's candidates after each of the place before."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.models.heads.base import Law, Pick


def walk(scores: Float[Array, "B g C C"], tokens: Int[Array, "B g C"], pick: Pick) -> tuple[Int[Array, "B g"], Law]:
    """The path from the anchor on, as tokens, and its law.

    Each place picks for every candidate of the one before it: then only one pick of each counts, and following the path multiplies
    nothing. Noise is a candidate's own, whatever stands before it: a path is drawn as if each place had waited for the one before.

    Args:
      scores: of candidates, the last axis, after each candidate of the place before; before the first place all of these are the
        anchor.
    """
    picked, logits = pick(0, scores, tokens)
    chosen = [picked[:, 0, 0]]
    for place in range(1, tokens.shape[1]):
        chosen.append(jnp.take_along_axis(picked[:, place], chosen[-1][:, None], axis=1)[:, 0])
    path = jnp.stack(chosen, axis=1)
    before = jnp.concatenate([jnp.zeros_like(path[:, :1]), path[:, :-1]], axis=1)
    law = jnp.take_along_axis(logits, before[:, :, None, None], axis=2)[:, :, 0]
    return jnp.take_along_axis(tokens, path[..., None], axis=-1)[..., 0], Law(law, tokens)
