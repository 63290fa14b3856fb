"""The state of a decode loop: one pytree of device arrays, donated to every program that changes it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.attention.mla import BY_ARITHMETIC, LatentForm
from dflash_jax.cache.groups import tables_of
from dflash_jax.cache.pages import Pages
from dflash_jax.cache.recurrent import State
from dflash_jax.config import DecoderConfig
from dflash_jax.decoding.adjustments import Adjustments
from dflash_jax.decoding.draft_window import columns
from dflash_jax.decoding.sampling import Mode, RequestArrays
from dflash_jax.execution.plan import (
    CallShape,
    ContextPlan,
    ExecutionPlan,
    PageShape,
    choose,
    choose_context,
    weight_format,
)
from dflash_jax.models.dflash_config import DFlashConfig
from dflash_jax.models.registry import layer_traits
from dflash_jax.parallel.ranks import share_config
from dflash_jax.quantization.weights import Weight

Weights = Mapping[str, Mapping[str, Weight]]
Proposals = Literal["shared_noise", "argmax", "rejection"]


class Plans(NamedTuple):
    """Execution plans of one cycle: the target's pass over the verified tokens, the drafter's block, and its context."""

    target: ExecutionPlan
    draft: ExecutionPlan | None = None
    context: ContextPlan | None = None


@dataclass(frozen=True)
class Setup:
    """Static configuration of a compiled program. Every change of a field, of B or of the page table's width compiles again.

    Attributes:
      target, draft: configurations; draft None is plain decoding.
      mode: greedy; sampled adds temperature; full adds filters and min_tokens; adjusted adds biases, penalties and refused words;
        regular adds grammars that are tables, structured those that the host is asked for.
      sampling: whether a request may sample; read in modes from adjusted on, which are greedy without.
      logprobs: whether log-probabilities come back.
      proposals: how a drafter proposes where a request samples: its own logits plus the target's noise, its argmax, or its own
        sample judged by block verification.
      draft_temperature: divides the drafter's logits before noise is added, on top of the request's temperature.
      draft_window: tokens before a block that the drafter sees, the last ones, in whole pages; None for all.
      form: how a prompt attends where the target's attention is latent.
      imposed_acceptance: tokens each cycle gains on average, whatever the target chooses; several: slots by turns. Only
        `dflash_jax.bench` sets it.
      verified: tokens the target verifies in a cycle where that is fewer than the drafter offers; 1 drafts nothing and keeps the
        drafter's pages up to date, so that drafting can begin again at any time.
      per_request: `verified` is what slots have on average: the target's rows, so many times the slots, go to the proposals that
        are most likely to stand, whichever slots' those are (`decoding.verify_budget`).
      ranks: devices that share the models. Programs are traced for a rank's share (`of_rank`).
      pictures: whether prompts may hold pictures: then each slot has a shift of its positions (`DecodeState.shift`).
      dealt: of those the ones that have a part each of every page of the target's; 1 where each has whole pages. A page of the page
        table is then so many of the drafter's pages, one after the other (`draft_table`).
      interleave: tokens of a sequence on one of these before the next one's begin; None for a page of one.
      exact: whether a token's bits may depend on nothing but its request: not on its place among the rows, nor on what stands in
        the others. Programs take no way that depends on what they are given, and `loop` is told which slots draft.
    """

    target: DecoderConfig
    draft: DFlashConfig | None = None
    mode: Mode = "greedy"
    logprobs: bool = False
    proposals: Proposals = "shared_noise"
    draft_temperature: float = 1.0
    draft_window: int | None = None
    form: LatentForm = BY_ARITHMETIC
    imposed_acceptance: float | tuple[float, ...] | None = None
    verified: int | None = None
    per_request: bool = False
    ranks: int = 1
    dealt: int = 1
    interleave: int | None = None
    sampling: bool = True
    exact: bool = False
    pictures: bool = False

    def of_rank(self) -> "Setup":
        """The same for a rank, whose models have its share of heads; itself on one device."""
        if self.ranks == 1:
            return self
        draft = None if self.draft is None else share_config(self.draft, self.ranks)
        return replace(self, target=share_config(self.target, self.ranks), draft=draft)

    def for_prefill(self, *, scored: bool = False) -> "Setup":
        """The fields a prefill depends on: every way of sampling shares its programs. `scored` is for `prefill_scored`."""
        return Setup(
            target=self.target, draft=self.draft, form=self.form, logprobs=scored, ranks=self.ranks, dealt=self.dealt,
            interleave=self.interleave, exact=self.exact,
        )  # fmt: skip

    def verifying(self, length: int, *, per_request: bool = False) -> "Setup":
        """The same with so many tokens verified in a cycle, at most all that are offered; `per_request`: of each slot on average,
        where that is neither the pending one alone nor all."""
        verified = None if length >= self.offered else length
        return replace(self, verified=verified, per_request=per_request and 1 < length < self.offered)

    def draft_table(self, page_table: Any) -> Any:
        """The page table of the drafter, whose heads have pages that a kernel takes, or `cache.groups.LayerTables`."""
        if self.dealt == 1:
            return tables_of(page_table, "draft")
        pages = page_table[:, :, None] * self.dealt + jnp.arange(self.dealt)
        return pages.reshape(page_table.shape[0], -1)

    @property
    def greedy(self) -> bool:
        """Whether every request takes the greatest of its logits: no noise is drawn and nothing is filtered."""
        return self.mode == "greedy" or not self.sampling

    @property
    def by_law(self) -> bool:
        """Whether proposals are judged by the law that they were drawn from."""
        return self.proposals == "rejection" and not self.greedy

    @property
    def drafting(self) -> DFlashConfig | None:
        """The drafter as cycles run it."""
        if self.draft is None or self.draft.head is None or not self.by_law:
            return self.draft
        return replace(self.draft, head=self.draft.head.of_all_tokens())

    @property
    def taps(self) -> tuple[int, ...]:
        return () if self.draft is None else self.draft.target_layer_ids

    @property
    def offered(self) -> int:
        """The pending token and all that the drafter proposes after it: the most that one cycle can gain."""
        return 1 if self.draft is None else self.draft.num_drafts + 1

    @property
    def length(self) -> int:
        """Tokens the target verifies in one cycle, of each slot or, with `per_request`, of slots on average."""
        return self.offered if self.verified is None else min(self.verified, self.offered)

    @property
    def width(self) -> int:
        """Tokens of one slot that the target verifies in one cycle at most (T): the pending one and the first proposals."""
        return self.offered if self.per_request else self.length

    @property
    def signs(self) -> int:
        """Of each proposal (`DFlashConfig.signs`), s."""
        return 1 if self.draft is None else self.draft.signs

    def verified_shape(self, slots: int) -> tuple[int, int]:
        """Sequences and tokens of each in the target's pass; where slots may differ, their tokens side by side are one."""
        return (1, slots * self.length) if self.per_request else (slots, self.width)

    def plans(
        self, weights: Mapping[str, Mapping[str, Any]], slots: int, table_width: int, pools: tuple[Pages, Pages]
    ) -> Plans:
        """The execution plans of a cycle of `slots` sequences, on the device that is traced for.

        Args:
          weights: flat parameters under "target" and, with a drafter, "draft"; shapes will do.
          table_width: columns of the page table.
          pools: of the target and the drafter; shapes will do.
        """
        # Rows side by side attend by a call of their own: for the plan that is one of a sequence without pages.
        pages = None if self.per_request or self.dealt > 1 else page_shape(pools[0], table_width)
        target = self.target_plan(weights, self.verified_shape(slots), pages, loops=True)
        if self.draft is None:
            return Plans(target)
        dtype = _dtype(weights)
        context = choose_context(weights["draft"], slots * self.width, dtype, drafts=self.width > 1)
        if self.width == 1:
            return Plans(target, None, context)
        table_width *= self.dealt
        seen = min(table_width, self.seen_pages(pools[1].page_size) or table_width)
        block = CallShape(slots, self.draft.block_size, dtype, page_shape(pools[1], seen))
        draft = choose(layer_traits(self.draft), block, weight_format(weights["draft"]), ranks=self.ranks, loops=True)
        return Plans(target, draft, context)

    def target_plan(
        self, weights: Mapping[str, Mapping[str, Any]], shape: tuple[int, int], pages: PageShape | None,
        *, loops: bool = False,
    ) -> ExecutionPlan:  # fmt: skip
        """The plan of a target's pass over `shape`, sequences and tokens of each; `pages` as of `CallShape`, `loops` as of
        `choose`."""
        call = CallShape(*shape, _dtype(weights), pages)
        beside = None if self.draft is None else weight_format(weights["draft"])
        return choose(
            layer_traits(self.target),
            call,
            weight_format(weights["target"]),
            beside=beside,
            ranks=self.ranks,
            loops=loops,
            exact=self.exact,
        )

    def seen_pages(self, page_size: int) -> int | None:
        """Columns of a page table that a drafter with a window sees at most; None without one."""
        if self.draft is None or self.draft_window is None:
            return None
        return columns(self.draft_window, self.draft.block_size, page_size)


def attending_heads(config: DecoderConfig, plan: ExecutionPlan, *, exact: bool = False) -> tuple[int, int] | None:
    """Query and key heads of layers that attend by calls of their own, not within a layer's kernel and not to latent rows; None
    also where layers differ in them, and where no schedule may follow the lengths (`exact`)."""
    traits = layer_traits(config)
    alike = traits.full_heads is None and not traits.uneven_heads
    apart = not exact and traits.attention == "heads" and plan.attention == "apart" and alike
    return (traits.heads, traits.kv_heads) if apart else None


def page_shape(pages: Pages, table_width: int) -> PageShape | None:
    """Pools as a plan asks for them; None for latent ones, and where layers keep their numbers in different ways."""
    kinds = {jnp.dtype(pool.dtype) for pool in pages.k}
    return PageShape(pages.page_size, table_width, *kinds) if pages.v and len(kinds) == 1 else None


def _dtype(weights: Mapping[str, Mapping[str, Any]]) -> jnp.dtype:
    """Dtype of activations: that of the target's embeddings."""
    return jnp.dtype(weights["target"]["embed.weight"].dtype)


@no_type_check  # JAX rebuilds pytrees with shapes and placeholders in place of arrays
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """B slots between two cycles.

    Attributes:
      pending: emitted last, not yet in the target's pages; stands at position `seq_lens`.
      seq_lens: tokens in the target's pages.
      features: tapped features of the tokens committed last cycle, zeros elsewhere. Between two programs there are as many rows
        as the drafter offers tokens, within a loop as many as are verified.
      fresh: how many of those rows are real; they belong to the positions just before `seq_lens` and are not yet in the
        drafter's pages.
      produced: tokens emitted so far, the pending one included.
      remaining: tokens that may still be emitted.
      done: finished or empty slots; they change nothing and read nothing.
      recurrent: states of the target's gated delta nets, after `seq_lens` tokens; () where it has none.
      adjust: in modes from adjusted on what changes logits; None elsewhere.
      shift: what is added to where the target's tokens stand among the keys to give what they turn by: a picture takes fewer
        positions than tokens. The drafter's turn by where they stand. None where prompts hold no pictures.
    """

    pending: Int[Array, "B"]
    seq_lens: Int[Array, "B"]
    features: Float[Array, "B T nD"]
    fresh: Int[Array, "B"]
    produced: Int[Array, "B"]
    remaining: Int[Array, "B"]
    done: Bool[Array, "B"]
    request: RequestArrays
    target_pages: Pages
    draft_pages: Pages
    recurrent: tuple[State, ...] = ()
    adjust: Adjustments | None = None
    shift: Int[Array, "B"] | None = None


_NUMBERS = ("pending", "seq_lens", "fresh", "produced", "remaining", "done")


def apart(state: DecodeState) -> tuple[Int[Array, "B 6"], DecodeState]:
    """The slots' numbers in one array, `done` last, and what is left: a loop changes them by one operation, not by six."""
    numbers = jnp.stack([getattr(state, name).astype(jnp.int32) for name in _NUMBERS], axis=1)
    return numbers, replace(state, **dict.fromkeys(_NUMBERS))


def together(numbers: Int[Array, "B 6"], rest: DecodeState) -> DecodeState:
    """The state that `apart` took apart."""
    named = dict(zip(_NUMBERS, numbers.T, strict=True))
    return replace(rest, **named | {"done": named["done"] > 0})


@no_type_check  # JAX rebuilds pytrees with shapes and placeholders in place of arrays
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Emitted:
    """Outputs of cycles; with a leading axis of cycles after a loop.

    Attributes:
      tokens: emitted tokens, valid up to `counts`.
      counts: tokens emitted by each slot; 0 for done slots, at least 1 otherwise.
      accepted: proposals that stood before max_tokens and stop ids cut the row.
      logprobs: log-probability of each emitted token, 1 where not asked for.
      top_ids, top_logprobs: the most probable tokens at each place; width 0 where not asked for.
      lengths, odds: of each slot the tokens that were verified, and of its proposals the log-odds of their laws' most probable
        tokens, then those that a head gives itself which estimates them, where both follow each request; else None.
    """

    tokens: Int[Array, "B T"]
    counts: Int[Array, "B"]
    accepted: Int[Array, "B"]
    logprobs: Float[Array, "B T"]
    top_ids: Int[Array, "B T k"]
    top_logprobs: Float[Array, "B T k"]
    lengths: Int[Array, "B"] | None = None
    odds: Float[Array, "B F"] | None = None


def without_pools(state: DecodeState) -> DecodeState:
    """The part of a state that belongs to slots, recurrent states included; pages belong to sequences, wherever those sit."""
    none = Pages((), ())
    return replace(state, target_pages=none, draft_pages=none)


def resize(state: DecodeState, rows: Int[Array, "C"]) -> DecodeState:
    """A state of C slots that hold the sequences of slots `rows`; -1 is an empty slot. Both states are without pools."""
    taken = jax.tree.map(lambda leaf: leaf[jnp.maximum(rows, 0)], state)
    return replace(taken, done=taken.done | (rows < 0))
