"""The code around a prompt's chunks in every implementation: rows before the convolution, tokens, where states come from and go."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_kernels.recurrent.delta_rule.inputs import (
    KEPT,
    DeltaShape,
    DeltaState,
    DeltaWeights,
    Tokens,
    tokens_of,
    with_earlier,
)
from dflash_kernels.recurrent.delta_rule.reference import last_rows

CHUNK = 64


class Prompts(NamedTuple):
    """Rows of prompts before their chunks are computed; `L` is padded to whole chunks in `tokens`."""

    projected: Float[Array, "n L W"]  # zeros past a row's length
    tokens: Tokens  # those past a row's length change nothing
    known: Bool[Array, "n"]  # rows that begin with their slot's state, if they follow none
    sources: Int[Array, "n"]  # their slots; 0 for others
    targets: Int[Array, "n"]  # slots that rows leave their state to; past the last one where they leave none
    live: Bool[Array, "n L"]
    conv: Float[Array, "n 3 C"]  # the convolution's rows after each row


def prompts_of(
    projected: Float[Array, "n L W"],
    weights: DeltaWeights,
    state: DeltaState,
    shape: DeltaShape,
    size: int,
    *,
    slots: Int[Array, "n"],
    follows: Bool[Array, "n"],
    fresh: Bool[Array, "n"],
    lengths: Int[Array, "n"],
) -> Prompts:
    """Rows of `delta_prefill`, in chunks of `size` tokens."""
    length, slots_there = projected.shape[1], state.s.shape[0]
    inside = (slots >= 0) & (slots < slots_there)
    known = inside & ~fresh
    sources = jnp.where(known, slots, 0)
    held = jnp.where(known[:, None, None], state.conv[sources], 0).astype(state.conv.dtype)

    live = jnp.arange(length) < lengths[:, None]
    projected = jnp.where(live[..., None], projected, 0)  # NaN in a row's padding would spread through products
    rows = with_earlier(projected, earlier_rows(projected[..., : shape.channels], held, follows))
    conv = last_rows(rows, lengths).astype(state.conv.dtype)
    more = -length % size
    padded, rows = (jnp.pad(x, ((0, 0), (0, more), (0, 0))) for x in (projected, rows))
    tokens = tokens_of(rows, padded, weights, shape, jnp.pad(live, ((0, 0), (0, more))))

    goes_on = jnp.append(follows[1:] & (lengths[1:] > 0), jnp.array([False]))
    targets = jnp.where(inside & (lengths > 0) & ~goes_on, slots, slots_there)
    return Prompts(projected, tokens, known, sources, targets, live, conv)


def earlier_rows(
    rows: Float[Array, "n L C"], held: Float[Array, "n 3 C"], follows: Bool[Array, "n"]
) -> Float[Array, "n 3 C"]:
    """The three rows before each row's first token: of rows that it follows, which are full, and of what stood before the first of
    them, `held`. A row may have fewer than three tokens.
    """
    n, length, _ = rows.shape
    begins = jax.lax.cummax(jnp.where(follows, 0, jnp.arange(n)))[:, None]
    since = (jnp.arange(n)[:, None] - begins) * length + jnp.arange(-KEPT, 0)  # tokens since the first row began
    flat = rows.reshape(n * length, -1)[jnp.maximum(begins * length + since, 0)]
    before = held.astype(rows.dtype)[begins, jnp.minimum(since + KEPT, KEPT - 1)]
    return jnp.where((since >= 0)[..., None], flat, before)
