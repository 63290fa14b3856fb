"""A cycle as three programs: the host says between drafting and judging what grammars allow.

What may come at row j of a block depends on the proposals before it, which the host learns when they are drafted. It walks along
them while the target verifies, so masks are there when rows are judged, and the device waits for nobody.
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from dflash_jax.compile.programs import compiled_with
from dflash_jax.decoding.cycle import Block, Rows, cycle_plans, drafted, drawn_noise, judged, verified
from dflash_jax.decoding.grammar_masks import NO_GRAMMAR
from dflash_jax.decoding.loop import narrowed, widened
from dflash_jax.decoding.state import DecodeState, Emitted, Setup, Weights
from dflash_jax.execution.plan import EXACT_PRODUCTS


def _options(setup: Setup, weights: Any, page_table: Any, state: Any, *rest: Any) -> dict[str, Any]:
    return dict(cycle_plans(setup, weights, page_table, state).target.xla_options)


@compiled_with(_options)
def draft_block(
    setup: Setup,
    weights: Weights,
    page_table: Any,
    state: DecodeState,
    retired: Bool[Array, "B"],
    estimate: Float[Array, "E"] | None = None,
    shared: Int[Array, "*groups B"] | None = None,
) -> tuple[DecodeState, Int[Array, "B told"], Block]:
    """The first part: see `cycle.drafted`; slots in `retired` are done.

    Returns:
      The state; of each slot what the host is asked: whether it is done, the number of its grammar, tokens emitted so far, and the
      block; and the block.
    """
    state = narrowed(setup, weights, page_table, replace(state, done=state.done | retired))
    noise = drawn_noise(setup, state)
    state, block = drafted(setup, weights, page_table, state, noise, estimate=estimate, shared=shared)
    assert state.adjust is not None, "states of mode structured hold grammars"
    grammars = jnp.where(state.done, NO_GRAMMAR, state.adjust.grammar)
    told = [state.done.astype(jnp.int32), grammars, state.produced]
    return widened(setup, state), jnp.concatenate([jnp.stack(told, axis=1), block.ids], axis=1), block


@compiled_with(_options)
def verify_block(
    setup: Setup,
    weights: Weights,
    page_table: Any,
    state: DecodeState,
    block: Block,
    shared: Int[Array, "*groups B"] | None = None,
) -> tuple[DecodeState, Rows]:
    """The second: see `cycle.verified`."""
    return verified(setup, weights, page_table, state, block, shared=shared)


@compiled_with(lambda setup, *_: EXACT_PRODUCTS if setup.exact else {})
def judge_block(
    setup: Setup,
    weights: Weights,
    state: DecodeState,
    block: Block,
    rows: Rows,
    masks: UInt32[Array, "B T W"],
    drafts: Bool[Array, "B"] | None = None,
) -> tuple[DecodeState, Emitted]:
    """The third: see `cycle.judged`."""
    state, emitted = judged(setup, weights, state, block, rows, drawn_noise(setup, state), masks, drafts)
    return widened(setup, state), emitted
