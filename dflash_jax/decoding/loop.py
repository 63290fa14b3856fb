"""Cycles on the device: a `while_loop` around the one `cycle`, so that Python is asked once for many tokens."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dflash_jax.decoding.cycle import Weights, cycle
from dflash_jax.decoding.state import DecodeState, Emitted, Setup


def loop(
    setup: Setup,
    max_cycles: int,
    weights: Weights,
    page_table: Int[Array, "B W"],
    state: DecodeState,
    cycles: Int[Array, ""],
    until_any: Bool[Array, ""],
) -> tuple[DecodeState, Emitted]:
    """Runs up to `cycles` (at most `max_cycles`, static) cycles and returns what each gave out, cycles first.

    Stops early when every slot is done, or, with `until_any`, as soon as another one is: its place can be given to a request
    that waits. Rows of cycles that did not run have counts of 0.
    """
    _, shapes = jax.eval_shape(lambda s: cycle(setup, weights, page_table, s), state)
    empty = jax.tree.map(lambda leaf: jnp.zeros((max_cycles, *leaf.shape), leaf.dtype), shapes)
    done_before = jnp.sum(state.done)

    def more(carry):
        index, state, _ = carry
        finished = jnp.all(state.done) | (until_any & (jnp.sum(state.done) > done_before))
        return (index < jnp.minimum(cycles, max_cycles)) & ~finished

    def body(carry):
        index, state, rows = carry
        state, emitted = cycle(setup, weights, page_table, state)
        return index + 1, state, jax.tree.map(lambda all_rows, row: all_rows.at[index].set(row), rows, emitted)

    _, state, rows = jax.lax.while_loop(more, body, (jnp.int32(0), state, empty))
    return state, rows
