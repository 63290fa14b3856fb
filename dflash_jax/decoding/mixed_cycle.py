"""A cycle and pieces of prompts as one program: the target runs once over the blocks that are verified and the pieces side by side.

A cycle of few rows waits for weights, which the rows of a prompt read anyway. What each kind of rows becomes is that of
`decoding.cycle` and `decoding.prefill`.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.attention.mixed import MixedAttend, side_by_side, taken_apart
from dflash_jax.compile.programs import compiled_with
from dflash_jax.decoding.cycle import Rows, block_attend, drafted, drawn_noise, judged
from dflash_jax.decoding.grammar_tables import GrammarTables
from dflash_jax.decoding.loop import narrowed, widened
from dflash_jax.decoding.prefill import last_logits, pieces_attend, with_context
from dflash_jax.decoding.state import DecodeState, Emitted, Setup, Weights
from dflash_jax.execution.plan import ExecutionPlan
from dflash_jax.execution.runner import Planned
from dflash_jax.models.registry import bind


def _plan(setup: Setup, weights: Any, state: Any, ids: Any) -> ExecutionPlan:
    rows = state.done.shape[0] * setup.width + ids.shape[0] * ids.shape[1]
    return setup.target_plan(weights, (1, rows), None)


def _options(
    setup: Setup, weights: Any, page_table: Any, state: Any, retired: Any, piece_table: Any, ids: Any, *_: Any
) -> dict[str, Any]:
    return dict(_plan(setup, weights, state, ids).xla_options)


@compiled_with(_options)
def mixed_cycle(
    setup: Setup,
    weights: Weights,
    page_table: Any,
    state: DecodeState,
    retired: Bool[Array, "B"],
    piece_table: Any,
    ids: Int[Array, "n T"],
    starts: Int[Array, "n"],
    lengths: Int[Array, "n"],
    tables: GrammarTables | None = None,
) -> tuple[DecodeState, Emitted, Float[Array, "n 1 V"]]:
    """One cycle, and pieces of prompts of sequences that are in no live slot.

    Args:
      setup: of a target whose layers all have pages, and of cycles that verify the same number of tokens of each slot.
      page_table, state, retired, tables: as of `loop`.
      piece_table, ids, starts, lengths: as of `prefill_chunk`.

    Returns:
      The state, whose pages hold the pieces; what the cycle gave out, with a leading axis of one; and the logits after the last
      token of each piece.
    """
    state = narrowed(setup, weights, page_table, replace(state, done=state.done | retired))
    noise = drawn_noise(setup, state)
    state, block = drafted(setup, weights, page_table, state, noise)
    plan, target = _plan(setup, weights, state, ids), bind(setup.target, weights["target"])
    with jax.named_scope("verify_and_prefill"):
        positions = starts[:, None] + jnp.arange(ids.shape[1])
        turned, verifies, cache = block_attend(setup, plan, page_table, state, block)
        prefills = pieces_attend(setup, plan, piece_table, cache, positions, lengths)
        shapes = block.ids.shape, ids.shape
        hidden, features, pages = target(
            side_by_side([block.ids, ids]), side_by_side([turned, positions]), MixedAttend((verifies, prefills), shapes),
            setup.taps, Planned(plan), cache,
        )  # fmt: skip
        (verified, filled), (committed, context) = (taken_apart(rows, shapes) for rows in (hidden, features))
        logits = last_logits(target, filled, lengths)
    draft_pages = with_context(setup, weights, piece_table, state.draft_pages, context, positions, lengths)
    state = replace(state, target_pages=pages, draft_pages=draft_pages)
    state, emitted = judged(setup, weights, state, block, Rows(verified, committed, ()), noise, tables=tables)
    return widened(setup, state), jax.tree.map(lambda leaf: leaf[None], emitted), logits
