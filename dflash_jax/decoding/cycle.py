"""The speculative cycle (`cycle`): write the context, draft a block, verify it, accept a prefix, commit.

Source: arXiv 2602.06036, section 4. Plain decoding is the same code without a drafter: a block of the pending token alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
from dflash_kernels import RankExchange, drawn_choice, drawn_refusal
from jaxtyping import Array, Bool, Float, Int, UInt32

from dflash_jax.attention.paged import PagedAttend, write_context
from dflash_jax.attention.ragged import Packing, RaggedAttend, packing
from dflash_jax.attention.recurrent import apart, folded, verifying
from dflash_jax.cache.groups import table_width, tables_of
from dflash_jax.decoding.accept import accept_imposed, accept_matching, accept_rejection, first_true, imposed_chances
from dflash_jax.decoding.adjustments import Adjustments, adjusted_best, adjusted_logits, after, proposing_logits
from dflash_jax.decoding.draft_window import last_pages
from dflash_jax.decoding.grammar_masks import masked
from dflash_jax.decoding.grammar_tables import GrammarTables, block_states, states_after, table_masks
from dflash_jax.decoding.head_proposals import last_features, picker, with_noise
from dflash_jax.decoding.sampling import (
    Noise,
    choose,
    filtered_logits,
    is_stop,
    noise_at,
    noise_keys,
    sample,
    without_stops,
)
from dflash_jax.decoding.state import DecodeState, Emitted, Plans, Setup, Weights, attending_heads
from dflash_jax.decoding.verify_budget import MOST_LOG_ODDS, budget, log_odds, survivals
from dflash_jax.execution.draft_context import context_products, make_context_workspace
from dflash_jax.execution.draft_head import best_by_index, best_proposals, drawn_by_index, draws_by_index, shortlist
from dflash_jax.execution.persistent import make_workspace
from dflash_jax.execution.plan import ContextPlan
from dflash_jax.execution.runner import LAYER_BY_LAYER, Planned
from dflash_jax.models.dflash import HEAD_INDEX, SHARED_HEAD
from dflash_jax.models.heads import Law
from dflash_jax.models.largest import largest
from dflash_jax.models.registry import bind
from dflash_jax.parallel.collectives import added_in_order, exchanging_in, pair_exchange
from dflash_jax.quantization.weights import Quantized
from dflash_jax.sampling_params import MAX_LOGPROBS


class Workspaces(NamedTuple):
    """Device memory through which a model's kernels pass results and which outlives a cycle; `pairs`: the exchange of ranks' best
    rows of a head."""

    target: Any = None
    draft: Any = None
    context: Any = None
    pairs: RankExchange | None = None


def cycle(
    setup: Setup,
    weights: Weights,
    page_table: Any,
    state: DecodeState,
    workspaces: Workspaces = Workspaces(),  # noqa: B008 - of constants
    estimate: Float[Array, "E"] | None = None,
    shared: Int[Array, "*groups B"] | None = None,
    drafts: Bool[Array, "B"] | None = None,
    tables: GrammarTables | None = None,
) -> tuple[DecodeState, Emitted]:
    """Every live slot gains between 1 and T tokens; done slots stay as they are. Mode structured has `decoding.masked_cycle`.

    Args:
      setup: static.
      weights: flat parameters under "target" and, with a drafter, "draft".
      page_table: `[B, W]` int32, wide enough for `seq_lens + T` tokens of every live slot, or `cache.groups.PageTables` of such.
      state: donated by the caller's jit.
      workspaces: of `cycle_workspaces`, from one cycle to the next; without them every cycle fills its own.
      estimate: of `decoding.verify_budget.survivals`; only setups that verify per request ask for it.
      shared: pages that a slot's sequence begins with and shares, the same number for all that do, 0 for the others: attention
        reads them once. A row of such for each of several groups; None where nothing is read so.
      drafts: of exact setups: in slots that do not draft no proposal stands. They are verified all the same, in the shape and the
        program of those that do.
      tables: of the grammars of mode regular.
    """
    noise = drawn_noise(setup, state)
    with exchanging_in(workspaces.pairs), added_in_order(setup.exact):
        state, block = drafted(setup, weights, page_table, state, noise, workspaces, estimate, shared)
        state, rows = verified(setup, weights, page_table, state, block, workspaces, shared)
        return judged(setup, weights, state, block, rows, noise, drafts=drafts, tables=tables)


@no_type_check  # JAX rebuilds pytrees with shapes and placeholders in place of arrays
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Block:
    """The block to verify: the pending tokens and the proposals after them.

    Attributes:
      logits, law: what proposals were drawn from, where rejection judges them by it.
      lengths, odds, pack: of `shared_rows`, where slots share the target's rows.
    """

    ids: Int[Array, "B T"]
    logits: Float[Array, "B g V"] | None = None
    law: Law | None = None
    lengths: Int[Array, "B"] | None = None
    odds: Float[Array, "B F"] | None = None
    pack: Packing | None = None


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """The target's results for a block: hidden states, tapped features, and factors of its gated delta nets' states."""

    hidden: Float[Array, "... D"]
    features: Float[Array, "B T nD"]
    factors: Any


def drawn_noise(setup: Setup, state: DecodeState) -> Noise | None:
    """Drafter and target add the same noise."""
    if setup.greedy:
        return None
    return Noise(noise_keys(state.request.seed, emitted_at(setup, state)), setup.target.vocab_size)


def emitted_at(setup: Setup, state: DecodeState) -> Int[Array, "B T"]:
    """Position of the token that row j of the logits chooses."""
    return state.seq_lens[:, None] + 1 + jnp.arange(setup.width)


def drafted(
    setup: Setup,
    weights: Weights,
    page_table: Any,
    state: DecodeState,
    noise: Noise | None,
    workspaces: Workspaces = Workspaces(),  # noqa: B008 - of constants
    estimate: Float[Array, "E"] | None = None,
    shared: Int[Array, "*groups B"] | None = None,
) -> tuple[DecodeState, Block]:
    """Writes the drafter's context and proposes what comes after the pending tokens."""
    plans, draft_table = cycle_plans(setup, weights, page_table, state), setup.draft_table(page_table)
    target = bind(setup.target, weights["target"])
    positions = emitted_at(setup, state)
    ids, draft_logits, draft_law, draft_pages = state.pending[:, None], None, None, state.draft_pages
    told, lengths, odds, pack = None, None, None, None
    if setup.drafting is not None:
        drafter = bind(setup.drafting, weights["draft"])
        draft_pages = commit_context(drafter, state, draft_table, plans.context, workspaces.context)
        if plans.draft is not None:
            run = Planned(plans.draft, workspaces.draft)
            # A drafter with a window sees the last pages alone.
            theirs = shared if setup.draft_window is None else None
            block, draft_pages = draft_block(
                drafter, target, draft_pages, draft_table, state, run, setup.draft_window, theirs
            )
            with jax.named_scope("propose"):
                proposing = drafter.proposing(block)[:, : setup.width - 1]
                head, index = weights["draft"].get(SHARED_HEAD, target.head_weight), weights["draft"].get(HEAD_INDEX)
                listed = None
                if drafter.head is not None or (setup.mode == "greedy" and setup.per_request):
                    listed = shortlist(drafter.config.head, proposing, head, index, drafter.head_rows)
                if drafter.head is not None:
                    draft_noise = None if noise is None else noise.table[:, :-1]
                    judged = drafter.judged(
                        block,
                        setup.width - 1,
                        state.pending,
                        head,
                        target.embed.weight[...],
                        last_features(state),
                        listed,
                    )
                    pick = picker(setup, positions[:, :-1], state, draft_noise)
                    judged = with_noise(setup, state, judged, draft_noise)
                    proposals, draft_law = drafter.head.propose(judged, pick)
                    if setup.per_request and drafter.config.head.confident:
                        before = jnp.concatenate([state.pending[:, None], proposals[:, :-1]], axis=1)
                        told = drafter.head.log_odds(judged, before)
                elif setup.greedy and not setup.per_request:
                    whole = setup.width == setup.offered
                    rows = (
                        block if whole else proposing
                    )  # to leave the anchors' rows out would take a copy of the others
                    if state.adjust is None:
                        proposals = best_proposals(drafter, rows, head, index)
                    else:
                        proposals = adjusted_proposals(drafter, rows, head, index, state.adjust)
                    proposals = drafter.proposing(proposals) if whole else proposals
                elif listed is not None:
                    draft_law = Law(*listed)
                    first = jnp.argmax(draft_law.logits, axis=-1, keepdims=True)
                    proposals = jnp.take_along_axis(listed[1], first, axis=-1)[..., 0]
                elif shares_noise(setup) and draws_by_index(drafter.config, proposing, head, index, drafter.head_rows):
                    assert noise is not None, "not greedy"
                    temperature = state.request.temperature * setup.draft_temperature
                    proposals = drawn_by_index(proposing, head, index, noise.keys[:, :-1], temperature)
                else:
                    draft_logits = drafter.logits(proposing, head)
                    if state.adjust is not None:
                        draft_logits = proposing_logits(draft_logits, state.adjust)
                    rounded = draft_logits.astype(proposing.dtype) if plain_logits(drafter.config) else draft_logits
                    if shares_noise(setup) and drawn_refusal(rounded) is None:
                        assert noise is not None, "not greedy"
                        proposals = drawn_proposals(setup, rounded, state, noise.keys[:, :-1])
                    else:
                        draft_noise = None if noise is None else noise.table[:, :-1]
                        proposals = propose(setup, draft_logits, positions[:, :-1], state, draft_noise)
            if setup.per_request:
                with jax.named_scope("budget"):
                    odds, lengths, pack = shared_rows(setup, draft_law, draft_logits, state, estimate, told)
            # A barrier: what makes proposals would be done once more where they are judged, and not in one launch.
            ids = jax.lax.optimization_barrier(jnp.concatenate([ids, proposals], axis=1))
    # Who verifies without rejection asks for no law.
    kept = (draft_logits, draft_law) if setup.by_law else (None, None)
    block = Block(ids, *kept, lengths, odds, pack)
    return replace(state, draft_pages=draft_pages), block


def verified(
    setup: Setup,
    weights: Weights,
    page_table: Any,
    state: DecodeState,
    block: Block,
    workspaces: Workspaces = Workspaces(),  # noqa: B008 - of constants
    shared: Int[Array, "*groups B"] | None = None,
) -> tuple[DecodeState, Rows]:
    """Runs the target over a block, which is in its pages then."""
    plans, live, ids, pack = cycle_plans(setup, weights, page_table, state), ~state.done, block.ids, block.pack
    target = bind(setup.target, weights["target"])
    with jax.named_scope("verify"):
        positions = state.seq_lens[:, None] + jnp.arange(setup.width)
        turned = positions if state.shift is None else positions + state.shift[:, None]
        lengths = jnp.where(live, setup.width, 0) if block.lengths is None else block.lengths
        pages, heads = state.target_pages, attending_heads(setup.target, plans.target, exact=setup.exact)
        table, size = tables_of(page_table, "target"), pages.page_size
        options = {"heads": heads, "narrow": pages.narrow, "shared": shared}
        options |= {"dealt": setup.dealt, "interleave": setup.interleave, "exact": setup.exact}
        attend = PagedAttend(table, positions, lengths, size, **options)
        attend, cache = verifying(attend, pages, state.recurrent, live)
        run = Planned(plans.target, workspaces.target)
        if pack is None:
            hidden, features, cache = target(ids, turned, attend, setup.taps, run, cache)
        else:
            rows, attend = (pack.packed(ids), pack.packed(turned)), RaggedAttend(attend, pack)
            hidden, features, cache = target(*rows, attend, setup.taps, run, cache)
            features = pack.unpacked(features)
    pages, states, factors = apart(cache)
    return replace(state, target_pages=pages, recurrent=states), Rows(hidden, features, factors)


def judged(
    setup: Setup,
    weights: Weights,
    state: DecodeState,
    block: Block,
    rows: Rows,
    noise: Noise | None,
    masks: UInt32[Array, "B T W"] | None = None,
    drafts: Bool[Array, "B"] | None = None,
    tables: GrammarTables | None = None,
) -> tuple[DecodeState, Emitted]:
    """Accepts a prefix of each block and commits it.

    Args:
      masks: what grammars allow, see `decoding.grammar_masks.masked`; None for everything.
      drafts, tables: see `cycle`; with tables there are no other masks.
    """
    live, places, positions = ~state.done, jnp.arange(setup.width), emitted_at(setup, state)
    target = bind(setup.target, weights["target"])
    ids, pack, hidden = block.ids, block.pack, rows.hidden
    grammar_states = None
    if tables is not None:
        assert state.adjust is not None, "states of mode regular hold grammars"
        with jax.named_scope("grammar"):
            grammar_states = block_states(tables, state.adjust.grammar, ids)
            # A barrier: masks would be made once more for each of those that read them.
            masks = jax.lax.optimization_barrier(table_masks(tables, grammar_states))
    with jax.named_scope("verify"):
        of_slots = pack.unpacked if pack is not None else lambda rows: rows
        if setup.exact:
            # What tokens are chosen from is one product in every mode, and nothing of the layers is fused with it.
            hidden = jax.lax.optimization_barrier(hidden)
        # The greatest logits alone are found without writing all of them.
        best_alone = setup.mode == "greedy" and not setup.logprobs and not setup.exact
        raw = None if best_alone else of_slots(target.logits(hidden))

    with jax.named_scope("accept"):
        chosen, logits = _chosen(setup, target, state, ids, of_slots, (hidden, raw), positions, noise, masks)
        accepted, tokens = _accepted(setup, state, block, chosen, logits, positions, drafts)
    with jax.named_scope("commit"):
        next_state, counts = _committed(state, rows, accepted, tokens, live, places, (tables, grammar_states))
    emitted = Emitted(tokens, counts, jnp.where(live, accepted, 0), *log_probabilities(setup, raw, tokens))
    return next_state, emitted if block.odds is None else replace(emitted, lengths=block.lengths, odds=block.odds)


def _chosen(
    setup: Setup,
    target: Any,
    state: DecodeState,
    ids: Int[Array, "B T"],
    of_slots: Callable[[Array], Array],
    found: tuple[Array, Array | None],
    positions: Int[Array, "B T"],
    noise: Noise | None,
    masks: UInt32[Array, "B T W"] | None,
) -> tuple[Int[Array, "B T"], Float[Array, "B T V"] | None]:
    """The target's own token at each place of a block, and the logits that it was chosen from, None where those are not written.

    Args:
      found: hidden states, and their logits or None.
    """
    hidden, raw = found
    logits = raw
    if raw is not None and setup.mode == "full":
        # In the product's dtype again, which filters compare in.
        logits = without_stops(raw.astype(hidden.dtype), state.request, state.produced)
    elif raw is not None and setup.mode == "sampled" and plain_logits(target):
        logits = raw.astype(hidden.dtype)
    if logits is None:
        chosen = of_slots(target.best(hidden))
    elif state.adjust is not None and setup.greedy:
        # A soft cap gives numbers that the product's dtype has not.
        exact = logits if target.logit_softcap else logits.astype(hidden.dtype)
        exact = without_stops(exact, state.request, state.produced)
        chosen = adjusted_best(exact, ids, state.adjust, masks)
    else:
        if state.adjust is not None:
            logits = adjusted_logits(without_stops(logits, state.request, state.produced), ids, state.adjust)
            logits = logits if masks is None else masked(logits, masks)
        chosen = sample(logits, positions, state.request, setup.mode, noise)
    return chosen, logits


def _accepted(
    setup: Setup,
    state: DecodeState,
    block: Block,
    chosen: Int[Array, "B T"],
    logits: Float[Array, "B T V"] | None,
    positions: Int[Array, "B T"],
    drafts: Bool[Array, "B"] | None,
) -> tuple[Int[Array, "B"], Int[Array, "B T"]]:
    """The number of accepted proposals of each block, and the tokens to emit: those, and the target's next one."""
    ids, judged_rows = block.ids, None if block.pack is None else block.lengths
    accepted, tokens = accept_matching(ids[:, 1:], chosen, judged_rows)
    if logits is not None and setup.by_law:
        draft_law = block.law
        if block.logits is not None:
            draft_law = Law(filtered_logits(block.logits, state.request, setup.mode))
        if draft_law is not None:
            law = filtered_logits(logits.astype(jnp.float32), state.request, setup.mode, logits.dtype)
            sampled = accept_rejection(ids[:, 1:], draft_law, law, positions, state.request, judged_rows)
            sampling = state.request.temperature > 0
            accepted = jnp.where(sampling, sampled[0], accepted)
            tokens = jnp.where(sampling[:, None], sampled[1], tokens)
    if setup.imposed_acceptance is not None:
        chances = imposed_chances(setup.imposed_acceptance, setup.offered - 1, ids.shape[0])
        accepted, tokens = accept_imposed(ids[:, 1:], chosen, state.pending, state.seq_lens, chances, judged_rows)
    if drafts is not None:
        accepted, tokens = jnp.where(drafts, accepted, 0), jnp.where(drafts[:, None], tokens, chosen)
    return accepted, tokens


def _committed(
    state: DecodeState,
    rows: Rows,
    accepted: Int[Array, "B"],
    tokens: Int[Array, "B T"],
    live: Bool[Array, "B"],
    places: Int[Array, "T"],
    grammars: tuple[GrammarTables | None, Array | None],
) -> tuple[DecodeState, Int[Array, "B"]]:
    """The state after the accepted tokens, and the number that each slot emits.

    Args:
      grammars: tables, and the states behind each place of the block; None without.
    """
    tables, grammar_states = grammars
    # A row ends at the first stop id it emits, and where max_tokens is reached.
    stops = is_stop(tokens, state.request.stop_ids)
    counts = first_true((stops | (places >= accepted[:, None]))[:, :-1]) + 1
    stopped = jnp.take_along_axis(stops, counts[:, None] - 1, axis=1)[:, 0]
    ended = stopped | (counts >= state.remaining)
    counts = jnp.where(live, jnp.minimum(counts, state.remaining), 0).astype(jnp.int32)
    last = jnp.take_along_axis(tokens, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
    keep = (places < counts[:, None])[:, :, None]
    adjust = None if state.adjust is None else after(state.adjust, tokens, counts)
    if adjust is not None and tables is not None and grammar_states is not None:
        adjust = replace(adjust, grammar=states_after(tables, grammar_states, tokens, counts))
    next_state = DecodeState(
        pending=jnp.where(live, last, state.pending),
        seq_lens=state.seq_lens + counts,
        features=jnp.where(keep, rows.features, jnp.zeros((), rows.features.dtype)),
        fresh=counts,
        produced=state.produced + counts,
        remaining=state.remaining - counts,
        done=state.done | ended,
        request=state.request,
        target_pages=state.target_pages,
        draft_pages=state.draft_pages,
        recurrent=folded(state.recurrent, rows.factors, counts),
        adjust=adjust,
        shift=state.shift,
    )
    return next_state, counts


def shared_rows(
    setup: Setup,
    law: Law | None,
    logits: Float[Array, "B g V"] | None,
    state: DecodeState,
    estimate: Float[Array, "E"] | None,
    told: Float[Array, "B g"] | None = None,
) -> tuple[Float[Array, "B F"], Int[Array, "B"], Packing]:
    """Where slots share the target's rows: their proposals' log-odds, the tokens to verify of each, and where those lie.

    Args:
      law: that a draft head's proposals are from; without one `logits` are the drafter's.
      told: log-odds that a head gives its proposals itself. They come back behind those of laws.
    """
    live, slots = ~state.done, state.done.shape[0]
    if law is None:
        assert logits is not None, "a drafter gives a law or logits"
        law = Law(filtered_logits(logits, state.request, "sampled"))
    odds = log_odds(law.logits)
    told = None if told is None else told.clip(-MOST_LOG_ODDS, MOST_LOG_ODDS)
    if setup.imposed_acceptance is not None:
        # A drafter that knows how good it is; its own law, which says nothing here, is read all the same, for it takes time.
        chances = imposed_chances(setup.imposed_acceptance, setup.offered - 1, slots)
        known = jax.scipy.special.logit(chances)[:, None].clip(-MOST_LOG_ODDS, MOST_LOG_ODDS)
        odds = jnp.where(jnp.isnan(odds), odds, known)
        told = None if told is None else jnp.where(jnp.isnan(told), told, known)
    assert estimate is not None, "whoever verifies per request has an estimate"
    _, rows = setup.verified_shape(slots)
    lengths = budget(survivals(odds, estimate, told), live, rows)
    both = odds if told is None else jnp.concatenate([odds, told], axis=1)
    return both, lengths, packing(lengths, rows, setup.width)


def cycle_plans(setup: Setup, weights: Any, page_table: Any, state: Any) -> Plans:
    """Execution plans of a cycle of these arguments, which may be shapes."""
    return setup.plans(weights, state.done.shape[0], table_width(page_table), (state.target_pages, state.draft_pages))


def cycle_workspaces(setup: Setup, weights: Weights, page_table: Any, state: DecodeState) -> Workspaces:
    """Workspaces for cycles of these shapes. Both models use the same where they can: they take turns."""
    plans, slots = cycle_plans(setup, weights, page_table, state), state.done.shape[0]
    target = bind(setup.target, weights["target"])
    ids = jax.ShapeDtypeStruct(setup.verified_shape(slots), jnp.int32)
    ours = make_workspace(plans.target, target.layers, jax.eval_shape(target.embed, ids))
    pairs = pair_exchange(slots * _most_tokens(setup)) if plans.target.exchange else None
    if setup.draft is None or plans.draft is None or plans.context is None:
        return Workspaces(ours, pairs=pairs)
    drafter = bind(setup.draft, weights["draft"])
    context = make_context_workspace(plans.context, drafter, slots * setup.width)
    x = jax.eval_shape(drafter.block_embeddings, state.pending, target.embed.weight[...])
    theirs = make_workspace(plans.draft, drafter.layers, x)
    return Workspaces(ours, ours if _alike(ours, theirs) else theirs, context, pairs)


def _most_tokens(setup: Setup) -> int:
    """The largest number of a slot's tokens for which a head's best rows are computed at once."""
    return max(setup.offered, 0 if setup.draft is None else setup.draft.block_size)


def in_one_graph(setup: Setup, plans: Plans) -> bool:
    """Whether a loop of such cycles is one CUDA graph."""
    return graph_refusal(setup, plans) is None


def graph_refusal(setup: Setup, plans: Plans) -> str | None:
    """Why a loop of such cycles has collectives of JAX's in it, which a graph does not hold; None where it has none."""
    if setup.ranks == 1:
        return None
    for model, plan in (("target", plans.target), ("drafter", plans.draft)):
        if plan is not None and not plan.exchange:
            return f"layers of the {model} add up by collectives: {plan.refused('exchange')}"
    if setup.dealt > 1:
        return "pages are dealt out: queries are gathered, and what was found for them"
    if setup.mode != "greedy" or setup.logprobs or setup.per_request:
        return "logits are gathered where tokens are drawn, constrained or judged one by one, or log-probabilities told"
    if setup.exact and not getattr(setup.target, "tie_embeddings", False):
        return "exact texts are chosen from whole logits, which are gathered"
    if setup.draft is not None and setup.draft.head is not None:
        return "the draft head gathers logits"
    return None


def _alike(ours: Any, theirs: Any) -> bool:
    found = [jax.tree.map(lambda ref: ref.shape, refs) for refs in (ours, theirs)]
    return found[0] == found[1]


def commit_context(
    drafter, state: DecodeState, page_table: Any, plan: ContextPlan | None = None, workspace: Any = None
):
    """The drafter's pages with the keys and values of the tokens committed last cycle; what was rejected writes nothing."""
    with jax.named_scope("context"):
        slots, width = state.features.shape[:2]
        first, counts, places = state.seq_lens - state.fresh, jnp.where(state.done, 0, state.fresh), jnp.arange(width)
        if plan is None or plan.form != "packed":
            products = context_products(drafter, state.features, decodes=True, workspace=workspace)
            live = places < counts[:, None]
            return write_context(drafter, state.draft_pages, page_table, products, first[:, None] + places, live)
        # Side by side, as sequences of one token each: nothing is multiplied for the places after the last of them.
        ends, rows = jnp.cumsum(counts), jnp.arange(slots * width)
        slot = jnp.minimum(jnp.sum(rows[:, None] >= ends, axis=1), slots - 1)
        place = jnp.minimum(rows - (ends - counts)[slot], width - 1)
        products = context_products(drafter, state.features[slot, place], decodes=True, live=ends[-1])
        positions, live = (first[slot] + place)[:, None], (rows < ends[-1])[:, None]
        tables = jax.tree.map(lambda table: table[slot], page_table)
        return write_context(drafter, state.draft_pages, tables, products[:, None], positions, live)


def draft_block(
    drafter, target, draft_pages, page_table: Any, state: DecodeState, run: Planned = LAYER_BY_LAYER,
    window: int | None = None, shared: Int[Array, "*groups B"] | None = None,
):  # fmt: skip
    """The drafter's hidden states of a block that begins with the pending token, and its pages.

    The drafter always fills the block it was trained on: each slot attends to all of them, and to the committed tokens, with
    `window` to the last ones.
    The block's own keys go to the slots after the committed ones. No later query sees them: the next cycle's context and block
    overwrite every slot below its own lengths.
    """
    with jax.named_scope("draft"):
        size = drafter.config.block_size
        positions = state.seq_lens[:, None] + jnp.arange(size)
        table, before = _seen_pages(drafter, draft_pages, page_table, state, window)
        live = jnp.where(state.done, 0, size)
        heads = attending_heads(drafter.config, run.plan)
        where = table, positions - before[:, None], live, draft_pages.page_size
        attend = PagedAttend(*where, heads=heads, narrow=draft_pages.narrow, shared=shared)
        return drafter.block(state.pending, target.embed.weight[...], positions, attend, run, draft_pages)


def _seen_pages(drafter, draft_pages, page_table: Any, state: DecodeState, window: int | None):
    sizes = {"block": drafter.config.block_size, "page_size": draft_pages.page_size}
    return last_pages(page_table, state.seq_lens, window=window, **sizes)


def adjusted_proposals(
    drafter, hidden: Float[Array, "B g D"], head: Any, index: Any, adjust: Adjustments
) -> Int[Array, "B g"]:
    """The best token at each place under what was emitted before the block, by the index of a whole head where there is one."""
    if index is None or isinstance(head, Quantized) or len(head) < drafter.head_rows:
        logits = proposing_logits(drafter.logits(hidden, head), adjust)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return best_by_index(hidden, head, index, regard=lambda *found: proposing_logits(found[0], adjust, found[1]))


def plain_logits(of: Any) -> bool:
    """Whether logits are what a product with the LM head gives, so that they lose nothing in its dtype."""
    return of.logit_scale == getattr(of, "head_scale", 1.0) == 1.0 and not of.logit_softcap


def shares_noise(setup: Setup) -> bool:
    """Whether proposals are drawn with the target's noise, and nothing else is asked of the logits that they are drawn from."""
    return setup.proposals == "shared_noise" and setup.mode in ("sampled", "full") and not setup.per_request


def drawn_proposals(
    setup: Setup, logits: Float[Array, "B g V"], state: DecodeState, keys: UInt32[Array, "B g 2"]
) -> Int[Array, "B g"]:
    """`propose` with shared noise by the kernel that makes the noise it needs."""
    b, g, vocab = logits.shape
    temperature = jnp.repeat(state.request.temperature * setup.draft_temperature, g)
    return drawn_choice(logits.reshape(b * g, vocab), keys.reshape(b * g, 2), temperature).reshape(b, g)


def propose(
    setup: Setup,
    logits: Float[Array, "B g V"],
    positions: Int[Array, "B g"],
    state: DecodeState,
    noise: Float[Array, "B g V"] | None = None,
) -> Int[Array, "B g"]:
    """One token for each place where requests sample. Any choice is lossless; how often it is the target's decides the speed.

    `noise` is the target's at these positions, where the caller has it already.
    """
    if setup.proposals == "argmax":
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if setup.proposals == "shared_noise":
        # Filtered as the target's are they stand as often: of the pair that ships 3.99 tokens a cycle for 4.01 at temperature 0.7
        # with top_p 0.8 and top_k 20, 2.26 for 2.24 at 1 with top_p 0.9.
        scaled = filtered_logits(logits, state.request, "sampled") / setup.draft_temperature
        return choose(scaled, positions, state.request, setup.mode, noise)
    drafted = filtered_logits(logits, state.request, setup.mode)
    noisy = drafted + noise_at(state.request.seed, positions, logits.shape[-1], stream=1, since=positions[:, 0])
    sampling = (state.request.temperature > 0)[:, None, None]
    return jnp.argmax(jnp.where(sampling, noisy, drafted), axis=-1).astype(jnp.int32)


def log_probabilities(
    setup: Setup, raw: Float[Array, "B T V"] | None, tokens: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Int[Array, "B T k"], Float[Array, "B T k"]]:
    """Log-probabilities of the emitted tokens and of the most probable ones, from the target's unfiltered logits."""
    if raw is None or not setup.logprobs:
        empty = jnp.zeros((*tokens.shape, 0), jnp.float32)
        # Nobody reads them. Ones, which no log-probability is, and no NaN: `jax_debug_nans` looks at all that programs give back.
        return jnp.ones(tokens.shape, jnp.float32), empty.astype(jnp.int32), empty
    top, ids = largest(raw, min(MAX_LOGPROBS, raw.shape[-1]))
    most, chosen = top[..., :1], jnp.take_along_axis(raw, tokens[:, :, None], axis=-1)
    total = jnp.log(jnp.sum(jnp.exp(raw - most), axis=-1, keepdims=True))
    # In the order of `log_softmax`, whose table nobody needs.
    return (chosen - most - total)[..., 0], ids, top - most - total
