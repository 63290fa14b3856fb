"""Cycles on the device: a `while_loop` around the one `cycle`, so that Python is asked once for many tokens."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.compile.programs import compiled_with
from dflash_jax.decoding.cycle import commit_context, cycle, cycle_plans, cycle_workspaces, in_one_graph
from dflash_jax.decoding.grammar_tables import GrammarTables
from dflash_jax.decoding.state import DecodeState, Emitted, Setup, Weights, apart, together
from dflash_jax.execution.plan import ONE_GRAPH, choose_context
from dflash_jax.models.registry import bind
from dflash_jax.sampling_params import MAX_LOGPROBS


def loop_options(
    setup: Setup, max_cycles: int, weights: Any, page_table: Any, state: Any, *rest: Any
) -> dict[str, Any]:
    """XLA options of `loop` for these arguments on a GPU, which may be shapes: those of its target's plan."""
    plans = cycle_plans(setup, weights, page_table, state)
    graph = () if in_one_graph(setup, plans) else ONE_GRAPH
    return {name: value for name, value in plans.target.xla_options if name not in graph}


@compiled_with(loop_options)
def loop(
    setup: Setup,
    max_cycles: int,
    weights: Weights,
    page_table: Any,
    state: DecodeState,
    cycles: Int[Array, ""],
    until_any: Bool[Array, ""],
    retired: Bool[Array, "B"],
    estimate: Float[Array, "E"] | None = None,
    shared: Int[Array, "*groups B"] | None = None,
    drafts: Bool[Array, "B"] | None = None,
    tables: GrammarTables | None = None,
) -> tuple[DecodeState, Emitted]:
    """Runs up to `cycles` (at most `max_cycles`, static) cycles and returns what each gave out, cycles first.

    Stops early when every slot is done, or, with `until_any`, as soon as another one is: its place can be given to a request
    that waits. Rows of cycles that did not run have counts of 0. Slots in `retired` are done from the start: their requests were
    cancelled or have lost their pages. `estimate`, `shared`, `drafts` and `tables`: see `cycle`.
    """
    state = narrowed(setup, weights, page_table, replace(state, done=state.done | retired))
    slots = state.done.shape[0]
    numbers, rest = apart(state)
    empty = _packed(no_rows(setup, max_cycles, slots))
    done_before = jnp.sum(state.done)
    workspaces = cycle_workspaces(setup, weights, page_table, state)

    def finished(state):
        done = jnp.sum(state.done)
        return (done == slots) | (until_any & (done > done_before))

    def more(carry):
        return (carry[0] < jnp.minimum(cycles, max_cycles)) & ~carry[1]

    def body(carry):
        index, _, numbers, rest, rows = carry
        state, emitted = cycle(
            setup, weights, page_table, together(numbers, rest), workspaces, estimate, shared, drafts, tables
        )
        set_row = partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
        # Counted beside what a cycle writes last: in the condition it would come after that.
        return index + 1, finished(state), *apart(state), jax.tree.map(set_row, rows, _packed(emitted))

    first = jnp.int32(0), finished(state), numbers, rest, empty
    *_, numbers, rest, rows = jax.lax.while_loop(more, body, first)
    return widened(setup, together(numbers, rest)), _unpacked(rows, no_rows(setup, max_cycles, slots))


def _packed(emitted: Emitted) -> tuple[Array, ...]:
    """Whole numbers in one array, which one operation writes; log-probabilities and what is told of each request only where there
    are some."""
    numbers = [emitted.tokens, emitted.counts[..., None], emitted.accepted[..., None]]
    numbers += [] if emitted.lengths is None else [emitted.lengths[..., None]]
    asked = (emitted.logprobs, emitted.top_ids, emitted.top_logprobs) if emitted.top_ids.shape[-1] else ()
    return (jnp.concatenate(numbers, axis=-1), *asked, *(() if emitted.odds is None else (emitted.odds,)))


def _unpacked(rows: tuple[Array, ...], empty: Emitted) -> Emitted:
    numbers, *asked = rows
    width = empty.tokens.shape[-1]
    told = () if empty.odds is None else (numbers[..., width + 2], asked.pop())
    asked = asked or (empty.logprobs, empty.top_ids, empty.top_logprobs)
    return Emitted(numbers[..., :width], numbers[..., width], numbers[..., width + 1], *asked, *told)


def narrowed(setup: Setup, weights: Weights, page_table: Any, state: DecodeState) -> DecodeState:
    """`state` with room for the features of `setup.width` tokens: those of the last cycle, which may have been wider, go to the
    drafter's pages at once."""
    if setup.draft is None or setup.width == setup.offered:
        return state
    rows, dtype = state.done.shape[0] * setup.offered, state.features.dtype
    plan = choose_context(weights["draft"], rows, dtype)
    draft_pages = commit_context(bind(setup.draft, weights["draft"]), state, setup.draft_table(page_table), plan)
    features = jnp.zeros_like(state.features[:, : setup.width])
    return replace(state, features=features, fresh=jnp.zeros_like(state.fresh), draft_pages=draft_pages)


def widened(setup: Setup, state: DecodeState) -> DecodeState:
    """`state` with as many rows of features as the drafter offers tokens, as it is between two programs."""
    more_rows = (0, 0), (0, setup.offered - state.features.shape[1]), (0, 0)
    return replace(state, features=jnp.pad(state.features, more_rows))


def no_rows(setup: Setup, cycles: int, slots: int) -> Emitted:
    """The `Emitted` of cycles that did not run."""
    rows, top = (cycles, slots, setup.width), min(MAX_LOGPROBS, setup.target.vocab_size) if setup.logprobs else 0
    return Emitted(
        tokens=jnp.zeros(rows, jnp.int32),
        counts=jnp.zeros(rows[:2], jnp.int32),
        accepted=jnp.zeros(rows[:2], jnp.int32),
        logprobs=jnp.ones(rows, jnp.float32),
        top_ids=jnp.zeros((*rows, top), jnp.int32),
        top_logprobs=jnp.zeros((*rows, top), jnp.float32),
        lengths=jnp.zeros(rows[:2], jnp.int32) if setup.per_request else None,
        odds=jnp.zeros((*rows[:2], setup.signs * (setup.width - 1)), jnp.float32) if setup.per_request else None,
    )
