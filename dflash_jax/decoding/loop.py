"""Cycles on the device: a `while_loop` around the one `cycle`, so that Python is asked once for many tokens."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dflash_jax.decoding.cycle import Weights, commit_context, cycle, cycle_exchanges
from dflash_jax.decoding.state import DecodeState, Emitted, Setup
from dflash_jax.models.binding import bind
from dflash_jax.sampling_params import MAX_LOGPROBS


def loop(
    setup: Setup,
    max_cycles: int,
    weights: Weights,
    page_table: Int[Array, "B W"],
    state: DecodeState,
    cycles: Int[Array, ""],
    until_any: Bool[Array, ""],
    retired: Bool[Array, "B"],
) -> tuple[DecodeState, Emitted]:
    """Runs up to `cycles` (at most `max_cycles`, static) cycles and returns what each gave out, cycles first.

    Stops early when every slot is done, or, with `until_any`, as soon as another one is: its place can be given to a request
    that waits. Rows of cycles that did not run have counts of 0. Slots in `retired` are done from the start: their requests were
    cancelled or have lost their pages.
    """
    state = narrowed(setup, weights, page_table, replace(state, done=state.done | retired))
    empty = no_rows(setup, max_cycles, state.done.shape[0])
    done_before = jnp.sum(state.done)
    exchanges = cycle_exchanges(setup, weights, page_table, state)

    def more(carry):
        index, state, _ = carry
        finished = jnp.all(state.done) | (until_any & (jnp.sum(state.done) > done_before))
        return (index < jnp.minimum(cycles, max_cycles)) & ~finished

    def body(carry):
        index, state, rows = carry
        state, emitted = cycle(setup, weights, page_table, state, exchanges)
        return index + 1, state, jax.tree.map(lambda all_rows, row: all_rows.at[index].set(row), rows, emitted)

    _, state, rows = jax.lax.while_loop(more, body, (jnp.int32(0), state, empty))
    rest = ((0, 0), (0, setup.offered - setup.width), (0, 0))
    return replace(state, features=jnp.pad(state.features, rest)), rows


def narrowed(setup: Setup, weights: Weights, page_table: Int[Array, "B W"], state: DecodeState) -> DecodeState:
    """`state` with room for the features of `setup.width` tokens: those of the last cycle, which may have been wider, go to the
    drafter's pages at once."""
    if setup.draft is None or setup.width == setup.offered:
        return state
    draft_pages = commit_context(bind(setup.draft, weights["draft"]), state, page_table)
    features = jnp.zeros_like(state.features[:, : setup.width])
    return replace(state, features=features, fresh=jnp.zeros_like(state.fresh), draft_pages=draft_pages)


def no_rows(setup: Setup, cycles: int, slots: int) -> Emitted:
    """What cycles that did not run gave out."""
    rows, top = (cycles, slots, setup.width), min(MAX_LOGPROBS, setup.target.vocab_size) if setup.logprobs else 0
    return Emitted(
        tokens=jnp.zeros(rows, jnp.int32),
        counts=jnp.zeros(rows[:2], jnp.int32),
        accepted=jnp.zeros(rows[:2], jnp.int32),
        logprobs=jnp.zeros(rows, jnp.float32),
        top_ids=jnp.zeros((*rows, top), jnp.int32),
        top_logprobs=jnp.zeros((*rows, top), jnp.float32),
    )
