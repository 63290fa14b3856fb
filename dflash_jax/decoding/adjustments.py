"""What a request's wishes and its own history change in the logits: biases, refused words, penalties.

Row j of a verified block chooses the token after the pending one and the first j proposals, and counts only where those stand. So
it may see them as if they had been emitted, and what it chooses is what plain decoding would choose there. One pass over all rows
knows what was emitted before the block; the few logits of the block's own proposals, one for each row behind each of them, are
written again with their counts. Nothing is taken back where a proposal falls: only what is emitted enters the history.
"""

from dataclasses import dataclass, replace
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# What a refused token loses among a drafter's logits: more than any of them, and no infinity, as all that it offers may be refused.
_REFUSED_DRAFT = -1e4


@no_type_check  # JAX rebuilds pytrees with shapes and placeholders in place of arrays
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adjustments:
    """Of the B slots.

    Attributes:
      bias: added to logits first of all; -inf refuses a token for good.
      seen: how often the request emitted each token, twice that; and one more where its prompt holds the token.
      presence, frequency, repetition: the penalties; 0, 0 and 1 change nothing.
      words: W sequences of at most L tokens whose last one is refused where the others stand before it, in what was emitted.
        Padded with -1 at their beginnings; all -1 is none.
      tail: the tokens emitted last, -1 where there were fewer.
      grammar: numbers of grammars that the host knows, 0 for none; mode structured asks for what they allow.
    """

    bias: Float[Array, "B V"]
    seen: Int[Array, "B V"]
    presence: Float[Array, "B"]
    frequency: Float[Array, "B"]
    repetition: Float[Array, "B"]
    words: Int[Array, "B W L"]
    tail: Int[Array, "B tail"]
    grammar: Int[Array, "B"]


def adjusted_logits(
    logits: Float[Array, "B T V"], ids: Int[Array, "B T"], adjust: Adjustments
) -> Float[Array, "B T V"]:
    """Logits of a verified block after biases, penalties and refused words.

    Args:
      logits: float32, of the target; refused ones are -inf.
      ids: the tokens that the rows follow: the pending one, which `adjust` knows of, and the proposals, which it does not.
    """
    (b, t, vocab), drafted = logits.shape, ids[:, 1:]
    rows, columns = jnp.arange(b)[:, None, None], jnp.arange(t)[:, None]
    left = penalized(
        logits + adjust.bias[:, None], adjust.seen[:, None], *(each[:, None, None] for each in _penalties(adjust))
    )
    if t > 1:
        behind = jnp.arange(1, t) <= columns  # whether row j follows proposal i
        same = drafted[:, :, None] == drafted[:, None, :]
        more = jnp.sum(behind[None, :, :, None] & same[:, None], axis=2, dtype=jnp.int32)  # copies before row j
        at = (rows, columns, drafted[:, None])
        bias, seen = (jnp.take_along_axis(each, drafted, axis=1)[:, None] for each in (adjust.bias, adjust.seen))
        again = penalized(logits[at] + bias, seen + 2 * more, *(each[:, None, None] for each in _penalties(adjust)))
        # Where a proposal comes twice both write one number: their order does not matter.
        left = left.at[rows, columns, jnp.where(behind, drafted[:, None], vocab)].set(again, mode="drop")
    trail = jnp.concatenate([adjust.tail, drafted], axis=1)
    before = trail[:, columns + jnp.arange(adjust.tail.shape[1])]
    begins, last = adjust.words[:, None, :, :-1], adjust.words[:, None, :, -1]
    stands = jnp.all((begins < 0) | (begins == before[:, :, None]), axis=-1) & (last >= 0)
    return left.at[rows, columns, jnp.where(stands, last, vocab)].set(-jnp.inf, mode="drop")


def penalized(
    logits: Float[Array, "..."],
    seen: Int[Array, "..."],
    presence: Float[Array, "..."],
    frequency: Float[Array, "..."],
    repetition: Float[Array, "..."],
) -> Float[Array, "..."]:
    """Logits less their tokens' penalties, of shapes that broadcast; `seen` as of `Adjustments`.

    Repetition divides positive logits of tokens that the prompt or the text holds, and multiplies others (arXiv 1909.05858,
    section 4.1, with the sign told apart). Presence and frequency take a constant, and one for each time, from those that the text
    holds.
    """
    emitted = (seen >> 1).astype(logits.dtype)
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    left = jnp.where(seen > 0, repeated, logits) - frequency * emitted
    return jnp.where(emitted > 0, left - presence, left)


def proposing_logits(
    logits: Float[Array, "B ... C"], adjust: Adjustments, tokens: Int[Array, "B ... C"] | None = None
) -> Float[Array, "B ... C"]:
    """A drafter's logits under what was emitted before its block: what it proposes is the target's choice more often, and any
    proposal will do. Some are left however many are refused.

    Args:
      tokens: of each column; None where column i is token i.
    """
    spread = (slice(None), *(None,) * (logits.ndim - 2))

    def of_columns(each: Array) -> Array:
        each = each[spread]
        if tokens is None:
            return each
        return jnp.take_along_axis(jnp.broadcast_to(each, (*tokens.shape[:-1], each.shape[-1])), tokens, axis=-1)

    bias = jnp.maximum(of_columns(adjust.bias), _REFUSED_DRAFT)
    penalties = (each[(*spread, None)] for each in _penalties(adjust))
    return penalized(logits + bias, of_columns(adjust.seen), *penalties)


def after(adjust: Adjustments, tokens: Int[Array, "B T"], counts: Int[Array, "B"]) -> Adjustments:
    """`adjust` once the first `counts` of `tokens` have been emitted."""
    b, t = tokens.shape
    emitted = jnp.where(jnp.arange(t) < counts[:, None], tokens, adjust.seen.shape[1])
    seen = adjust.seen.at[jnp.arange(b)[:, None], emitted].add(2, mode="drop")
    trail = jnp.concatenate([adjust.tail, tokens], axis=1)
    places = counts[:, None] + jnp.arange(adjust.tail.shape[1])
    return replace(adjust, seen=seen, tail=jnp.take_along_axis(trail, places, axis=1))


def _penalties(adjust: Adjustments) -> tuple[Array, Array, Array]:
    return adjust.presence, adjust.frequency, adjust.repetition
