"""Logits processors of a request: logit bias, bad words, and penalties by its own history.

Row j of a verified block chooses the token after the pending one and the first j proposals, and counts only where those stand. So
it may see them as if they had been emitted, and what it chooses is what plain decoding would choose there. One pass over all rows
knows what was emitted before the block; the few logits of the block's own proposals, one for each row behind each of them, are
written again with their counts. Nothing is taken back where a proposal falls: only what is emitted enters the history.
"""

from dataclasses import dataclass, replace
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from dflash_jax.decoding.grammar_masks import allows, masked

# What a refused token loses among a drafter's logits: more than any of them, and no infinity, as all that it offers may be refused.
_REFUSED_DRAFT = -1e4
# Tokens of a part in which the best of a row is looked for: as many as keep a block of threads busy.
SHORTEST_PART, LONGEST_PART = 256, 2048


@no_type_check  # JAX rebuilds pytrees with shapes and placeholders in place of arrays
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adjustments:
    """Logits processors of the B slots.

    Attributes:
      bias: added to logits first of all; -inf refuses a token for good.
      seen: how often the request emitted each token, twice that; and one more where its prompt holds the token.
      presence, frequency, repetition: the penalties; 0, 0 and 1 change nothing.
      words: W sequences of at most L tokens whose last one is refused where the others stand before it, in what was emitted.
        Padded with -1 at their beginnings; all -1 is none.
      tail: the tokens emitted last, -1 where there were fewer.
      grammar: in mode structured numbers of grammars that the host knows, and is asked what they allow; in mode regular states of
        `decoding.grammar_tables.GrammarTables` behind the pending tokens; 0 for none.
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
    rows, columns, vocab = *_places(logits), logits.shape[-1]
    left = _known(logits, adjust)
    if ids.shape[1] > 1:
        own, at = _own(logits, ids, adjust)
        # Where a proposal comes twice both write one number: their order does not matter.
        left = left.at[rows, columns, at].set(own, mode="drop")
    return left.at[rows, columns, _ended_words(ids, adjust, vocab)].set(-jnp.inf, mode="drop")


def adjusted_best(
    logits: Float[Array, "B T V"],
    ids: Int[Array, "B T"],
    adjust: Adjustments,
    masks: UInt32[Array, "B T W"] | None = None,
) -> Int[Array, "B T"]:
    """The token of the greatest of `adjusted_logits` in each row, the first of equal ones; no such logits are written.

    One pass over the logits, as the product before gave them, finds the best of all but the block's own proposals, whose few logits
    are looked at apart.

    Args:
      logits: in the product's dtype; adjusted ones are compared in float32.
      masks: see `decoding.grammar_masks.masked`; None allows everything.
    """
    rows, columns, (*_, vocab) = *_places(logits), logits.shape
    logits = logits.at[rows, columns, _ended_words(ids, adjust, vocab)].set(-jnp.inf, mode="drop")
    own, at = _own(logits, ids, adjust)
    others = logits.at[rows, columns, at].set(-jnp.inf, mode="drop") if ids.shape[1] > 1 else logits
    counts = at < vocab if masks is None else (at < vocab) & allows(masks, ids[:, None, 1:])
    own = jnp.where(counts, own, -jnp.inf)
    known = _known(others.astype(jnp.float32), adjust)
    best, token = _greatest(known if masks is None else masked(known, masks))
    # One proposal after the other, which goes into one launch: a reduction would be one of its own.
    for place in range(ids.shape[1] - 1):
        its, proposal = own[..., place], ids[:, place + 1, None]
        better = (its > best) | ((its == best) & (proposal < token))
        best, token = jnp.where(better, its, best), jnp.where(better, proposal, token)
    return token


def _greatest(rows: Float[Array, "*R V"]) -> tuple[Float[Array, "*R"], Int[Array, "*R"]]:
    """The greatest of each row, and where it stands first: of each part of a row, then of those.

    With 152k tokens a cycle of one user with penalties takes 3.32 ms so and 3.40 with one reduction, of eight 3.55 and 3.57 (H200,
    one run).
    """
    places = jax.lax.broadcasted_iota(jnp.int32, rows.shape, rows.ndim - 1)
    parts = (*rows.shape[:-1], -1, part_of(rows.shape[-1]))
    return _first(*_first(rows.reshape(parts), places.reshape(parts)))


def part_of(vocab: int) -> int:
    """The largest divisor of so many tokens up to `LONGEST_PART`, all of them where that would make many short parts."""
    longest = max(size for size in range(1, LONGEST_PART + 1) if vocab % size == 0)
    return vocab if longest < SHORTEST_PART else longest


def _first(values: Float[Array, "*R N"], places: Int[Array, "*R N"]) -> tuple[Float[Array, "*R"], Int[Array, "*R"]]:
    """The greatest value of each row and its place, the first of equal ones."""

    def greater(one: Any, other: Any) -> Any:
        ahead = (one[0] > other[0]) | ((one[0] == other[0]) & (one[1] < other[1]))
        return jnp.where(ahead, one[0], other[0]), jnp.where(ahead, one[1], other[1])

    least = jnp.array(-jnp.inf, values.dtype), jnp.int32(jnp.iinfo(jnp.int32).max)
    best, place = jax.lax.reduce((values, places), least, greater, (values.ndim - 1,))
    return best, place


def _places(logits: Float[Array, "B T V"]) -> tuple[Int[Array, "B 1 1"], Int[Array, "T 1"]]:
    b, t, _ = logits.shape
    return jnp.arange(b)[:, None, None], jnp.arange(t)[:, None]


def _known(logits: Float[Array, "B T V"], adjust: Adjustments) -> Float[Array, "B T V"]:
    """Logits after biases and the penalties of what was emitted before the block."""
    penalties = (each[:, None, None] for each in _penalties(adjust))
    return penalized(logits + adjust.bias[:, None], adjust.seen[:, None], *penalties)


def _own(
    logits: Float[Array, "B T V"], ids: Int[Array, "B T"], adjust: Adjustments
) -> tuple[Float[Array, "B T g"], Int[Array, "B T g"]]:
    """Adjusted logits of the block's own proposals in each row, and their ids; V for a proposal that does not stand before the
    row."""
    (rows, columns), drafted, places = _places(logits), ids[:, 1:], ids.shape[1]
    behind = jnp.arange(1, places) <= columns  # whether row j follows proposal i
    same = drafted[:, :, None] == drafted[:, None, :]
    more = jnp.sum(behind[None, :, :, None] & same[:, None], axis=2, dtype=jnp.int32)  # copies before row j
    bias, seen = (jnp.take_along_axis(each, drafted, axis=1)[:, None] for each in (adjust.bias, adjust.seen))
    raw = logits[rows, columns, drafted[:, None]].astype(jnp.float32)
    own = penalized(raw + bias, seen + 2 * more, *(each[:, None, None] for each in _penalties(adjust)))
    return own, jnp.where(behind, drafted[:, None], logits.shape[-1])


def _ended_words(ids: Int[Array, "B T"], adjust: Adjustments, vocab: int) -> Int[Array, "B T W"]:
    """Last tokens, in each row, of the refused words whose other tokens stand before it; `vocab` for all other words."""
    columns = jnp.arange(ids.shape[1])[:, None]
    trail = jnp.concatenate([adjust.tail, ids[:, 1:]], axis=1)
    before = trail[:, columns + jnp.arange(adjust.tail.shape[1])]
    begins, last = adjust.words[:, None, :, :-1], adjust.words[:, None, :, -1]
    stands = jnp.all((begins < 0) | (begins == before[:, :, None]), axis=-1) & (last >= 0)
    return jnp.where(stands, last, vocab)


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
    slots = jnp.arange(logits.shape[0])[(*spread, None)]

    def of_columns(each: Array) -> Array:
        return each[spread] if tokens is None else each[slots, tokens]

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
