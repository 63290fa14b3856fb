"""Chunked prefill: pages of target and drafter are filled, and scored where asked; then the first token is chosen."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from dflash_jax.attention.paged import PagedAttend, write_context
from dflash_jax.attention.recurrent import committed, prefilling
from dflash_jax.cache.groups import table_width, tables_of
from dflash_jax.cache.pages import Pages
from dflash_jax.cache.recurrent import State
from dflash_jax.compile.programs import compiled_with
from dflash_jax.decoding.adjustments import adjusted_logits, after
from dflash_jax.decoding.cycle import log_probabilities
from dflash_jax.decoding.grammar_masks import masked
from dflash_jax.decoding.grammar_tables import GrammarTables, states_after, table_masks
from dflash_jax.decoding.sampling import is_stop, sample, without_stops
from dflash_jax.decoding.state import DecodeState, Emitted, Setup, Weights, attending_heads, page_shape
from dflash_jax.execution.draft_context import context_products
from dflash_jax.execution.plan import EXACT_PRODUCTS
from dflash_jax.execution.runner import Planned
from dflash_jax.models.registry import bind
from dflash_jax.parallel.collectives import added_in_order

# Positions whose logits are alive at a time where a prompt is scored: 78 MB of a vocabulary of 152k.
SCORED_AT_ONCE = 128


class Caches(NamedTuple):
    """Caches that prefill writes: pages of the target and the drafter, and states of slots where the target has such."""

    target: Pages
    draft: Pages
    recurrent: tuple[State, ...] = ()


class Pictured(NamedTuple):
    """Inputs of prompts with pictures beside their tokens.

    Attributes:
      positions: what each token turns by, in time, by row and by column.
      placed: of which tokens the embedding is a row of a picture.
      rows: those rows, at the places of their tokens.
    """

    positions: Int[Array, "n T 3"]
    placed: Bool[Array, "n T"]
    rows: Float[Array, "n T D"]


class Scores(NamedTuple):
    """Log-probabilities of prompt tokens from the target's unfiltered logits; see `Emitted`."""

    logprobs: Float[Array, "n T"]
    top_ids: Int[Array, "n T k"]
    top_logprobs: Float[Array, "n T k"]


def _options(setup: Setup, *_: Any) -> dict[str, Any]:
    return EXACT_PRODUCTS if setup.exact else {}


@compiled_with(_options)
def prefill_chunk(
    setup: Setup,
    weights: Weights,
    page_table: Any,
    caches: Caches,
    ids: Int[Array, "n T"],
    starts: Int[Array, "n"],
    lengths: Int[Array, "n"],
    slots: Int[Array, "n"],
    pictured: Pictured | None = None,
) -> tuple[Caches, Float[Array, "n 1 V"]]:
    """Prefill of pieces of prompts, one in each row: the caches with their tokens, and the logits after the last token of each.

    Row i holds tokens `starts[i] .. starts[i] + lengths[i]` of the sequence with page table `page_table[i]`, padded to T; what is
    past `lengths[i]` writes nothing. Tables are `[n, W]` int32, or `cache.groups.PageTables` of such. Several rows may be pieces of
    one prompt: every layer writes the keys of all of them before one of them attends, and states go on from row to row, so the
    pieces of a prompt are rows in order, all full but its last. `slots` are the rows' slots, by which only states are kept; past
    the last one for rows that nobody needs. The drafter's context is written at once, from the same features: its pages are always
    as long as the target's once a prompt is in. `pictured` is for calls of which some prompt has pictures.
    """
    caches, _, logits = _filled(setup, weights, page_table, caches, ids, starts, lengths, slots, pictured)
    return caches, logits


@compiled_with(_options)
def prefill_scored(
    setup: Setup,
    weights: Weights,
    page_table: Any,
    caches: Caches,
    ids: Int[Array, "n T"],
    starts: Int[Array, "n"],
    lengths: Int[Array, "n"],
    slots: Int[Array, "n"],
    following: Int[Array, "n T"],
    pictured: Pictured | None = None,
) -> tuple[Caches, Float[Array, "n 1 V"], Scores]:
    """As `prefill_chunk`, with the scores of the tokens `following` those of `ids`, each at the place of the one before it."""
    caches, hidden, logits = _filled(setup, weights, page_table, caches, ids, starts, lengths, slots, pictured)
    target, (n, t) = bind(setup.target, weights["target"]), ids.shape
    part = min(n * t, SCORED_AT_ONCE)

    def parts(each: Array) -> Array:
        flat = each.reshape(n * t, *each.shape[2:])
        padded = jnp.pad(flat, ((0, -(n * t) % part), *((0, 0),) * (flat.ndim - 1)))
        return padded.reshape(-1, 1, part, *flat.shape[1:])

    def score(of: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        return log_probabilities(setup, target.logits(of[0]), of[1])

    with jax.named_scope("score"):
        found = jax.lax.map(score, (parts(hidden), parts(following)))
        whole = (each.reshape(-1, *each.shape[3:])[: n * t].reshape(n, t, *each.shape[3:]) for each in found)
    return caches, logits, Scores(*whole)


def _filled(
    setup: Setup,
    weights: Weights,
    page_table: Any,
    caches: Caches,
    ids: Int[Array, "n T"],
    starts: Int[Array, "n"],
    lengths: Int[Array, "n"],
    slots: Int[Array, "n"],
    pictured: Pictured | None,
) -> tuple[Caches, Float[Array, "n T D"], Float[Array, "n 1 V"]]:
    """See `prefill_chunk`; with the hidden states of all tokens."""
    target = bind(setup.target, weights["target"])
    rows = jnp.arange(ids.shape[1])
    positions = starts[:, None] + rows
    with jax.named_scope("prefill"), added_in_order(setup.exact):
        related = ids.shape[0] > 1
        shape = None if related or setup.dealt > 1 else page_shape(caches.target, table_width(page_table))
        run = Planned(setup.target_plan(weights, (ids.shape[0], ids.shape[1]), shape))
        heads = attending_heads(setup.target, run.plan, exact=setup.exact)
        page_size, states = caches.target.page_size, caches.recurrent
        attend = PagedAttend(
            tables_of(page_table, "target"), positions, lengths, page_size, setup.form, related=related, heads=heads,
            dealt=setup.dealt, interleave=setup.interleave, exact=setup.exact,
        )  # fmt: skip
        attend, cache = prefilling(attend, caches.target, states, slots, starts, lengths)
        turned = positions if pictured is None else pictured.positions
        given = None if pictured is None else (pictured.placed, pictured.rows)
        hidden, features, cache = target(ids, turned, attend, setup.taps, run, cache, given)
        target_pages, states = committed(cache, lengths)
        if setup.exact:
            hidden = jax.lax.optimization_barrier(hidden)  # the same layers whether a prompt is scored or not
        last = jnp.maximum(lengths - 1, 0)[:, None, None]
        logits = target.logits(jnp.take_along_axis(hidden, last, axis=1))
    draft_pages = caches.draft
    if setup.draft is not None:
        drafter = bind(setup.draft, weights["draft"])
        live = rows < lengths[:, None]
        features = jnp.where(live[:, :, None], features, jnp.zeros((), features.dtype))
        draft_pages = write_context(
            drafter,
            draft_pages,
            setup.draft_table(page_table),
            context_products(drafter, features),
            positions,
            live,
        )
    return Caches(target_pages, draft_pages, states), hidden, logits


def admit(
    setup: Setup,
    state: DecodeState,
    slots: Int[Array, "n"],
    rows: DecodeState,
    logits: Float[Array, "n 1 V"],
    masks: UInt32[Array, "n 1 W"] | None = None,
    tables: GrammarTables | None = None,
) -> tuple[DecodeState, Emitted]:
    """Places prefilled requests into slots and emits their first tokens, unless they had emitted some before.

    Args:
      state: B slots; its pages, which may be none, and the states of gated delta nets pass through.
      slots: index to fill for each row; B for a row that nobody needs.
      rows: the requests as a state of n slots (its pages and features are ignored): `seq_lens` tokens of each are in the pages,
        `produced` were emitted, `remaining` may be; `pending` is the last one emitted, or -1 where the first is to be chosen here.
      logits: of the last token in the pages.
      masks: in mode structured what grammars allow, see `decoding.grammar_masks.masked`.
      tables: in mode regular those of the grammars whose states `rows` hold, behind what was emitted.
    """
    request = rows.request
    left = logits
    if setup.mode == "full":  # in the dtype that the product gave, which filters compare in
        left = without_stops(logits.astype(state.features.dtype), request, rows.produced)
    elif rows.adjust is not None:
        left = adjusted_logits(without_stops(logits, request, rows.produced), rows.pending[:, None], rows.adjust)
        if tables is not None:
            masks = table_masks(tables, rows.adjust.grammar[:, None])
        left = left if masks is None else masked(left, masks)
    token = sample(left, rows.seq_lens[:, None], request, "greedy" if setup.greedy else setup.mode)
    resumed = rows.pending >= 0
    gained = jnp.where(resumed, 0, 1).astype(jnp.int32)
    ended = is_stop(token, request.stop_ids)[:, 0] | (rows.remaining <= 1)
    adjust = None if rows.adjust is None else after(rows.adjust, token, gained)
    if adjust is not None and tables is not None:
        adjust = replace(adjust, grammar=states_after(tables, adjust.grammar[:, None], token, gained))
    rows = DecodeState(
        pending=jnp.where(resumed, rows.pending, token[:, 0]), seq_lens=rows.seq_lens, features=state.features,
        fresh=jnp.zeros_like(gained), produced=rows.produced + gained, remaining=rows.remaining - gained,
        done=ended & ~resumed, request=request, target_pages=state.target_pages, draft_pages=state.draft_pages,
        recurrent=state.recurrent, adjust=adjust,
        shift=rows.shift,
    )  # fmt: skip

    def place(whole: Array, part: Array) -> Array:
        return whole if whole is part else whole.at[slots].set(part, mode="drop")

    placed = jax.tree.map(place, state, rows)
    return placed, Emitted(token, gained, jnp.zeros_like(gained), *log_probabilities(setup, logits, token))
