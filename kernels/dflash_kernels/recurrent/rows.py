"""Rows that a convolution along tokens reads, as recurrent mixers keep them: of verified tokens, and of prompts in pieces.

A slot keeps the k rows before its next token, as far as the convolution's taps reach. Letters: B slots, T tokens, C channels, n
pieces of up to L tokens.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num


def summed_taps(rows: Float[Array, "B R C"], taps: Float[Array, "C taps"], *, apart: int = 1) -> Float[Array, "B T C"]:
    """Each token's float32 sum over itself and those before, of rows that begin `(taps - 1) * apart` tokens early.

    `apart`: tokens from one tap to the next.
    """
    count = taps.shape[1]
    length = rows.shape[1] - (count - 1) * apart
    wide, weights = rows.astype(jnp.float32), taps.astype(jnp.float32)
    parts = [wide[:, tap * apart : tap * apart + length] * weights[:, tap] for tap in range(count)]
    return sum(parts[1:], parts[0])


def folded_rows(kept: Num[Array, "B k C"], rows: Num[Array, "B T C"], counts: Int[Array, "B"]) -> Num[Array, "B k C"]:
    """The rows before a slot's next token after the first `counts[b]` of T tokens, in the dtype of those that it has `kept`."""
    both = jnp.concatenate([kept, rows.astype(kept.dtype)], axis=1)
    places = counts[:, None] + jnp.arange(kept.shape[1])
    return jnp.take_along_axis(both, places[..., None], axis=1)


def prompt_rows(
    rows: Num[Array, "n L C"],
    kept: Num[Array, "B k C"],
    *,
    slots: Int[Array, "n"],
    follows: Bool[Array, "n"],
    fresh: Bool[Array, "n"],
    lengths: Int[Array, "n"],
) -> tuple[Num[Array, "n kL C"], Num[Array, "n k C"], Int[Array, "n"]]:
    """Rows of pieces of prompts behind the k rows before each, the last k of each, and the slots that these are for.

    Args:
      rows: those past a piece's length count as 0.
      kept: of slots, the rows before their next token.

    Returns:
      As the slot of a piece that another one goes on from, and of one without tokens or a slot, one past the last.
    """
    rows = jnp.where((jnp.arange(rows.shape[1]) < lengths[:, None])[..., None], rows, 0)
    there, inside = kept.shape[0], _inside(slots, kept)
    own = _of_slots(kept, slots, inside, fresh).astype(rows.dtype)

    def row(before: Array, told: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        own, rows, goes_on, length = told
        rows = jnp.concatenate([jnp.where(goes_on, before, own), rows])
        after = jax.lax.dynamic_slice_in_dim(rows, length, before.shape[0])
        return after, (rows, after)

    _, (rows, after) = jax.lax.scan(row, jnp.zeros_like(own[0]), (own, rows, follows, lengths))
    last = ~jnp.append(follows[1:] & (lengths[1:] > 0), jnp.array([False]))
    return rows, after.astype(kept.dtype), jnp.where(inside & (lengths > 0) & last, slots, there)


def before_prompts(
    kept: Float[Array, "B ..."], slots: Int[Array, "n"], fresh: Bool[Array, "n"]
) -> Float[Array, "n ..."]:
    """What slots have kept, for each piece that goes on from it; zeros for those of new prompts and of no slot."""
    return _of_slots(kept, slots, _inside(slots, kept), fresh)


def _inside(slots: Int[Array, "n"], kept: Num[Array, "B ..."]) -> Bool[Array, "n"]:
    return (slots >= 0) & (slots < kept.shape[0])


def _of_slots(kept: Array, slots: Array, inside: Array, fresh: Array) -> Num[Array, "n ..."]:
    known = jnp.expand_dims(inside & ~fresh, range(1, kept.ndim))
    return jnp.where(known, kept[jnp.where(inside, slots, 0)], 0)
