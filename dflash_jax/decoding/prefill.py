"""Prompts: the target's and the drafter's pages are filled chunk by chunk, then the first token is chosen."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.attention.paged import PagedAttend, write_context
from dflash_jax.cache.pages import Pages
from dflash_jax.decoding.cycle import Weights, log_probabilities
from dflash_jax.decoding.sampling import choose, filtered_logits, is_stop, without_stops
from dflash_jax.decoding.state import DecodeState, Emitted, Setup
from dflash_jax.models.binding import bind


def prefill_chunk(
    setup: Setup,
    weights: Weights,
    page_table: Int[Array, "1 W"],
    pages: tuple[Pages, Pages],
    ids: Int[Array, "1 T"],
    start: Int[Array, ""],
    length: Int[Array, ""],
) -> tuple[tuple[Pages, Pages], Float[Array, "1 1 V"]]:
    """Target and drafter pages with tokens `start .. start + length` of one prompt, and the logits after the last of them.

    `ids` is padded to a bucket; rows past `length` write nothing. The drafter's context is written at once, from the same
    features: its pages are always as long as the target's once a prompt is in.
    """
    target = bind(setup.target, weights["target"])
    rows = jnp.arange(ids.shape[1])
    positions = (start + rows)[None]
    with jax.named_scope("prefill"):
        attend = PagedAttend(pages[0], page_table, positions, length[None], setup.form)
        hidden, features = target(ids, positions, attend, setup.taps)
        logits = target.logits(jax.lax.dynamic_slice_in_dim(hidden, length - 1, 1, axis=1))
    draft_pages = pages[1]
    if setup.draft is not None:
        drafter = bind(setup.draft, weights["draft"])
        live = (rows < length)[None]
        features = jnp.where(live[:, :, None], features, jnp.zeros((), features.dtype))
        draft_pages = write_context(
            drafter, draft_pages, page_table, drafter.context_products(features), positions, live
        )
    return (attend.pages, draft_pages), logits


def admit(
    setup: Setup, state: DecodeState, slot: Int[Array, ""], row: DecodeState, logits: Float[Array, "1 1 V"]
) -> tuple[DecodeState, Emitted]:
    """Places a prefilled request into a slot and emits its first token, unless it had emitted some before.

    Args:
      state: B slots; its pages pass through.
      slot: index to fill.
      row: the request as a state of one slot (its pages are ignored): `seq_lens` tokens of it are in the pages, `produced` were
        emitted, `remaining` may be; `pending` is the last one emitted, or -1 where the first is to be chosen here.
      logits: of the last token in the pages.
    """
    request = row.request
    filtered = without_stops(logits, request, row.produced) if setup.mode == "full" else logits
    filtered = filtered if setup.mode == "greedy" else filtered_logits(filtered, request, setup.mode)
    token = choose(filtered, row.seq_lens[:, None], request, setup.mode)
    resumed = row.pending >= 0
    gained = jnp.where(resumed, 0, 1).astype(jnp.int32)
    ended = is_stop(token, request.stop_ids)[:, 0] | (row.remaining <= 1)
    row = DecodeState(
        pending=jnp.where(resumed, row.pending, token[:, 0]), seq_lens=row.seq_lens, features=row.features,
        fresh=jnp.zeros_like(gained), produced=row.produced + gained, remaining=row.remaining - gained,
        done=ended & ~resumed, request=request, target_pages=state.target_pages, draft_pages=state.draft_pages,
    )  # fmt: skip

    def place(whole: Array, part: Array) -> Array:
        return whole if whole is part else whole.at[slot].set(part[0])

    placed = jax.tree.map(place, state, row)
    return placed, Emitted(token, gained, jnp.zeros_like(gained), *log_probabilities(setup, logits, token))
