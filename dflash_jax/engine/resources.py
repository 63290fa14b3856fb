"""Engine core: the models, their compiled programs and their KV pools. Decides which requests can run at all."""

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dflash_jax.attention.mla import ABSORBED, BY_ARITHMETIC, LatentForm
from dflash_jax.cache import CacheScales, PageAllocator, Pages, layer_specs, make_pages
from dflash_jax.cache.groups import ROLES, GroupPool, PageGroup, page_groups
from dflash_jax.cache.pages import layer_bytes
from dflash_jax.cache.recurrent import State, make_states, state_bytes
from dflash_jax.cache.snapshots import SnapshotAccount, snapshot_places
from dflash_jax.checkpoints.calibration import calibrate
from dflash_jax.compile.over_ranks import share_pools
from dflash_jax.compile.programs import Programs, Status
from dflash_jax.config import DecoderConfig
from dflash_jax.decoding.grammar_tables import Shelf
from dflash_jax.decoding.sampling import Mode
from dflash_jax.decoding.state import Proposals, Setup
from dflash_jax.engine.acceptance_estimate import AcceptanceEstimate
from dflash_jax.engine.buckets import Buckets, round_up
from dflash_jax.engine.cascade import CascadePolicy, layer_costs
from dflash_jax.engine.cycle_costs import CycleCost, cycle_cost
from dflash_jax.engine.requests import ADJUSTING, LONGEST_WORD, MOST_WORDS, Needs, Request
from dflash_jax.engine.verify_auto import AutoPolicy
from dflash_jax.engine.verify_policy import Length, VerifyLength, VerifyPolicy
from dflash_jax.errors import CapacityError, ParameterError, PromptError
from dflash_jax.models.dflash_config import DFlashConfig
from dflash_jax.models.registry import layer_traits
from dflash_jax.parallel.ranks import held, pool_config, share_config
from dflash_jax.quantization.kv_formats import CacheFormat, quantized_format, repeated_scales
from dflash_jax.quantization.weights import Weight

MAX_CYCLES = 32
# Of the first prompts that come, so many and so many tokens of each find the scales of pages: all of one attend at once.
TRAFFIC_PROMPTS, TRAFFIC_TOKENS = 8, 512
# Calls in flight: one that runs, and one behind it.
MOST_IN_FLIGHT = 2
# While a prompt is prefilled, the others get so many cycles for each chunk: about the time that the chunk takes.
CYCLES_PER_CHUNK = 4
# Tokens of prompts that one program takes: more of them at once gain no more.
LARGEST_PART = 512
# However short it is, a part of a prompt reads all weights: it costs as much as one of so many tokens.
LEAST_TOKENS = 256


class Company(NamedTuple):
    """Properties that all requests of a batch share.

    Attributes:
      draft: whether programs hold the drafter.
      needs: where texts are exact, what tells their programs from others': no two programs are known to give a row the same bits.
    """

    draft: bool
    needs: Needs | None = None


@dataclass
class Resources:
    """One target, its drafter where there is one, compiled programs, and page pools.

    Attributes:
      weights: flat parameters under "target" and "draft", on the device; their shapes until they are read, to compile ahead.
      dtype: of activations and pages.
      max_model_len: prompt and produced tokens of one request at most.
      max_batch: slots.
      page_size: tokens of a page; where ranks have a part each of the target's, of all those together. The drafter's pages then are
        as large as such a part, and so many times more.
      interleave: tokens of a sequence that lie on one of these ranks before the next one's begin; None for a page of one.
      max_chunk: tokens of prompts, of one or of several, that are prefilled at most between two cycles.
      num_pages: pages shared by all requests, of the group that sees farthest; 0 is enough for `max_batch` requests of full length.
      window_pages: pages of each further group (`cache.groups`), whose layers see no more than a window; () is enough for
        `max_batch` requests.
      slides: whether layers with windows give back the pages that no query sees any more; False keeps all layers' pages alike.
      latent_form: how prompts attend where the target's attention is latent.
      scales_from_traffic: whether the scales are still to be found, on the first prompts that come.
      cache_dtype, cache_scales: how the target's pages are kept; see `quantization.kv_formats`.
      query_dtype: "fp8" rounds queries of latent attention too, on scales of `cache_scales`.
      scale_range: what scales aim at that are found on traffic; see `calibrate`.
      draft_cache_dtype: how the drafter's are, None, "fp8" or "fp8_e5m2" with scales of 1.
      verify_length: tokens that the target verifies in a cycle: "auto" chooses by what cycles cost and how many proposals of
        each request stand, an integer stays, None is the whole block. A length up to 1 token drafts nothing. Where requests share
        rows, as "per_request" has it wherever that can be, it is settled on the device which of them have more.
      draft_window: see `Setup`.
      exact: whether texts depend on nothing but their requests, bit by bit; see `Setup` and docs/exactness.md. All slots and the
        widest tables always run, prompts in as many pieces as a call has, and nothing but pages of prompts is found again.
      imposed_acceptance: see `Setup`. None except while `dflash_jax.bench` measures; `generate` and `stream` refuse to run with it.
      share_prefixes: whether a request uses pages again that hold the beginning of its prompt; never for a target with states
        that keeps no snapshots of them.
      state_snapshots: copies of one slot's states that are kept for prompts to come; of use to a target with states alone.
      snapshot_tokens: tokens of a prompt that a snapshot must save at least.
      pictures: whether prompts may hold pictures, for which the target turns heads on three axes.
      goes_ahead: whether the next cycles may be started before the results of the last ones are looked at; see
        `engine.scheduler.InFlight`. None does so on GPUs, once calls have been seen to return while the device works.
      late_dispatch: whether the next call is left for late where requests have just ended, so that those which follow them are in
        it (`engine.scheduler.Scheduler`), and who may follow is told first. Where each user asks again once answered, the device
        stands still less; others lose nothing.
      cascade: whether requests that begin with the same pages attend to these once (`engine.cascade`): None where that saves time
        on a GPU; True wherever two share a page, waiting for the programs; False never.
      groups: layers whose pages are kept equally long, with the accounts of these; all are free whenever nothing runs.
    """

    target: DecoderConfig
    draft: DFlashConfig | None
    weights: Mapping[str, Mapping[str, Weight | jax.ShapeDtypeStruct]] = field(repr=False)
    dtype: jnp.dtype
    max_model_len: int
    max_batch: int = 8
    page_size: int = 64
    num_pages: int = 0
    window_pages: tuple[int, ...] = ()
    slides: bool = True
    interleave: int | None = None
    max_chunk: int = 2048
    proposals: Proposals = "shared_noise"
    draft_window: int | None = None
    latent_form: LatentForm = BY_ARITHMETIC
    cache_dtype: CacheFormat = None
    query_dtype: str | None = None
    scale_range: tuple[float, float, float] | None = None
    draft_cache_dtype: str | None = None
    cache_scales: CacheScales | None = None
    scales_from_traffic: bool = False
    share_prefixes: bool = True
    state_snapshots: int = 0
    snapshot_tokens: int = LEAST_TOKENS
    verify_length: VerifyLength = None
    exact: bool = False
    imposed_acceptance: float | tuple[float, ...] | None = None
    pictures: bool = False
    goes_ahead: bool | None = None
    late_dispatch: bool = True
    cascade: bool | None = None
    programs: Programs = field(default_factory=Programs)

    def __post_init__(self):
        self.draft = None if self.draft is None else self.draft.fitted(self.target)
        # A cycle writes up to a block past the last committed token.
        self.lookahead = 1 if self.draft is None else self.draft.block_size + 1
        self.buckets = Buckets.build(
            max_batch=self.max_batch,
            max_tokens=self.max_model_len + self.lookahead,
            page_size=self.page_size,
            longest=self.max_model_len,
            max_chunk=min(self.max_chunk, LARGEST_PART),
            dense=getattr(self.target, "index_topk", 0),
            one_shape=self.exact,
        )
        first, *others = groups = self._page_groups()
        if self.num_pages == 0:
            self.num_pages = self.max_batch * first.columns
        if len(self.window_pages) != len(others):
            self.window_pages = tuple(self.max_batch * group.columns for group in others)
        counts = (self.num_pages, *self.window_pages)
        self.groups = tuple(GroupPool(group, PageAllocator(count)) for group, count in zip(groups, counts, strict=True))
        self.snapshots = SnapshotAccount(self.state_snapshots if self.state_bytes else 0)
        self._pools: tuple[Pages, Pages] | None = None
        self._kept_states: tuple[State, ...] = ()
        # One thread may compile ahead, and make pools for it, while another one begins to serve.
        self.taking, self.busy = threading.Lock(), False
        self._filled_by = self.weights
        self._lengths: VerifyPolicy | None = None
        self._cascades: CascadePolicy | None = None
        self._keys: dict[tuple, tuple] = {}  # of programs, by shorter names

    def __copy__(self) -> "Resources":
        """Shares weights and programs; fresh KV pools and prefix cache."""
        return replace(self)

    @property
    def tp(self) -> int:
        """Devices that share the models."""
        return 1 if self.programs.ranks is None else self.programs.ranks.count

    def _page_groups(self) -> tuple[PageGroup, ...]:
        """Groups of layers that share page tables."""
        slides = self.slides and self.dealt == 1
        target, draft = (
            [] if config is None else [spec.window if slides else None for spec in layer_specs(config)]
            for config in (self.target, self.draft)
        )
        if self.draft_window is not None and slides:
            # It sees the last pages of a sequence alone, those that hold so many tokens before its block.
            draft = [min(self.draft_window + 1, window or self.draft_window + 1) for window in draft]
        offered = 1 if self.draft is None else self.draft.num_drafts + 1
        # Cycles behind cycles whose results nobody has seen, and a block; or a part of a prompt.
        cycles = MOST_IN_FLIGHT * MAX_CYCLES * offered + self.lookahead
        ahead = max(cycles, self.buckets.chunk)
        return page_groups(target, draft, ahead=ahead, width=self.buckets.width[-1], page_size=self.page_size)

    @property
    def allocator(self) -> PageAllocator:
        """The account of the pages of the group that sees farthest."""
        return self.groups[0].allocator

    @allocator.setter
    def allocator(self, allocator: PageAllocator) -> None:
        self.groups = (replace(self.groups[0], allocator=allocator), *self.groups[1:])

    @property
    def _layer_bytes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bytes of one page of each layer of the target and the drafter, of what each device holds of it."""
        ours = layer_bytes(
            share_config(self.target, self.tp), self.page_size // self.dealt, self.dtype, cache_dtype=self.cache_dtype
        )
        if self.draft is None:
            return ours, ()
        theirs = share_config(self.draft, self.tp)
        return ours, layer_bytes(theirs, self.page_size, self.dtype, cache_dtype=self.draft_cache_dtype)

    @property
    def cascade_policy(self) -> CascadePolicy | None:
        """Policy that decides whether cycles read shared pages once; None if none do, as with `exact`."""
        if (
            self.exact
            or self.dealt > 1
            or self.cascade is False
            or not self.shares
            or (self.cascade is None and jax.default_backend() != "gpu")
        ):
            return None
        if self._cascades is None or self._cascades.asked != self.cascade:
            configs = [share_config(one, self.tp) for one in (self.target, self.draft) if one is not None]
            costs = [
                layer_costs(layer_specs(config), sizes, config.num_heads, self.page_size)
                for config, sizes in zip(configs, self._layer_bytes, strict=False)
            ]
            # A drafter with a window sees the last pages alone.
            theirs = costs[1] if self.draft is not None and self.draft_window is None else ()
            block = 0 if self.draft is None else self.draft.block_size
            self._cascades = CascadePolicy(costs[0], theirs, block, self.cascade)
        return self._cascades if self._cascades.target else None

    @property
    def group_bytes(self) -> tuple[int, ...]:
        """Bytes of one page of each group over both models, of what each device holds of it."""
        ours, theirs = self._layer_bytes
        return tuple(
            sum(ours[i] for i in pool.group.target) + sum(theirs[i] for i in pool.group.draft) for pool in self.groups
        )

    @property
    def dealt(self) -> int:
        """Devices that have a part each of every page of the target's."""
        return 1 if self.programs.ranks is None else self.programs.ranks.dealt

    @property
    def state_bytes(self) -> int:
        """Bytes of one slot's recurrent states; 0 for a target without."""
        return state_bytes(share_config(self.target, self.tp), self.dtype)

    @property
    def shares(self) -> bool:
        """Whether requests find what others have left in pages. A page without the state at its end is no beginning of a prompt."""
        return self.share_prefixes and (not self.state_bytes or self.snapshots.count > 0)

    def snapshot_places(self, cached: int, shared: int, length: int) -> list[int]:
        """See `dflash_jax.cache.snapshots.snapshot_places`."""
        if not self.snapshots.count or not self.share_prefixes:
            return []
        # A prompt of full length leaves four on its way: a pool of a few for each slot then holds those of several.
        every = max(2 * self.snapshot_tokens, self.max_model_len // 4)
        every = -(-every // self.page_size) * self.page_size
        return snapshot_places(cached, shared, length, self.page_size, apart=self.snapshot_tokens, every=every)

    @property
    def pool_bytes(self) -> int:
        return sum(size * pool.allocator.num_pages for size, pool in zip(self.group_bytes, self.groups, strict=True))

    @property
    def longest(self) -> int:
        """Tokens of the longest request that the pages hold."""
        bounded = self.groups[0].group.reach is not None
        return self.max_model_len if bounded else min(self.max_model_len, self.num_pages * self.page_size)

    def pages_for(self, tokens: int) -> int:
        """Pages of a sequence with so many tokens before its next cycle, the cycle's own included."""
        return -(-(tokens + self.lookahead) // self.page_size)

    def width_of(self, tokens: int) -> int:
        """Columns of a page table that holds so many tokens: a bucket."""
        return round_up(-(-tokens // self.page_size), self.buckets.width)

    def check(self, request: Request) -> None:
        """Raises PromptError, ParameterError or CapacityError for a request that can never run, with the numbers that say why."""
        prompt, wanted = len(request.prompt), request.params.max_tokens
        if prompt == 0:
            raise PromptError(
                "the prompt is empty: give a text, or at least one token id (one that begins a text will do)"
            )
        vocabulary, params = range(self.target.vocab_size), request.params
        if wrong := [token for token in request.prompt if token not in vocabulary]:
            raise PromptError(
                f"token id {wrong[0]} is outside the target's vocabulary, whose ids go from 0 to {len(vocabulary) - 1}: give ids "
                "of its own tokenizer"
            )
        if wrong := [token for token in params.stop_token_ids if token not in vocabulary]:
            raise ParameterError(
                f"stop_token_ids must be inside the target's vocabulary of {len(vocabulary)} tokens, got {wrong[0]}"
            )
        if params.min_tokens > 0 and len({token for token in request.stop_ids if token in vocabulary}) == len(
            vocabulary
        ):
            raise ParameterError(
                f"min_tokens={params.min_tokens} forbids every one of the target's {len(vocabulary)} tokens, because each ends a "
                "text: lower it to 0, or name fewer stop_token_ids"
            )
        if request.pictures is not None and not self.pictures:
            raise PromptError(
                "the prompt holds pictures, and the model has no vision tower that was loaded: leave them out"
            )
        if request.adjusts:
            self._check_adjustments(request)
        if request.grammar is not None and self.tp > 1 and (request.mode != "regular" or jax.process_count() > 1):
            why = request.grammar.reason or "on several hosts"
            raise ParameterError(
                f"this structured text asks the host in every cycle ({why:.200}), which tp={self.tp} does not do: load with tp=1"
            )
        if params.structured is not None and request.grammar is None:
            raise ParameterError(
                "structured needs a grammar over the model's tokens: give the request model.grammars.compiled of it"
            )
        self.check_length(prompt, wanted)
        if (pages := min(self.pages_for(prompt + wanted), self.groups[0].group.columns)) > self.num_pages:
            raise CapacityError(
                f"the request needs up to {pages} pages of {self.page_size} tokens, the pool has {self.num_pages}: load with a "
                "larger num_pages"
            )

    def check_length(self, prompt: int, wanted: int) -> None:
        """Raises CapacityError for a prompt of so many tokens and so many more that the model does not take together."""
        if prompt + wanted > self.max_model_len:
            most = self.target.max_position
            if self.max_model_len < most:
                way_out = f": shorten the prompt, lower max_tokens, or load with a larger max_model_len, {most} at most"
            else:
                way_out = ", the model's own: shorten the prompt or lower max_tokens"
            raise CapacityError(
                f"prompt of {prompt} token{'s' * (prompt != 1)} and max_tokens={wanted} need {prompt + wanted}, max_model_len is "
                f"{self.max_model_len}{way_out}"
            )

    def _check_adjustments(self, request: Request) -> None:
        params, vocabulary = request.params, range(self.target.vocab_size)
        named = {
            "logit_bias": dict(params.logit_bias), "allowed_token_ids": params.allowed_token_ids or (),
            "bad_words": [token for word in request.refused for token in word],
        }  # fmt: skip
        for name, ids in named.items():
            if wrong := [token for token in ids if token not in vocabulary]:
                raise ParameterError(
                    f"{name} must be inside the target's vocabulary of {len(vocabulary)} tokens, got {wrong[0]}"
                )
        several = [word for word in request.refused if len(word) > 1]
        longest = max(map(len, several), default=0)
        if len(several) > MOST_WORDS or longest > LONGEST_WORD:
            raise ParameterError(
                f"bad_words may have at most {MOST_WORDS} sequences of several tokens, of {LONGEST_WORD} tokens each, got "
                f"{len(several)}, the longest of {longest}; a text may be two, one for each way that it is begun"
            )
        # Of a sequence of several, the last one may be refused at any place.
        refused = {word[-1] for word in request.refused} | (set(request.stop_ids) if params.min_tokens > 0 else set())
        allowed = vocabulary if params.allowed_token_ids is None else params.allowed_token_ids
        if refused.issuperset(allowed):
            raise ParameterError(
                f"{'allowed_token_ids leave' if params.allowed_token_ids is not None else 'bad_words leave'} no token that could "
                f"come at every place: the last tokens of bad_words{' and what min_tokens forbids' if params.min_tokens else ''} "
                f"are all that is left of {len(allowed)}"
            )

    @property
    def draft_temperature(self) -> float:
        """Temperature of a drafter's logits before noise is added.

        Slots of a block are predicted side by side, each for an average over what the slots before it may hold. Sharpened a little,
        such an average names the target's choice more often (measured in the card of `tests/data/dflash`: x 1.3 is best). A head
        knows what stands before a place: of the drafter that ships, sharpened so, 2.60 tokens of a cycle in place of 2.66 at
        temperature 0.7, and 1.93 in place of 1.95 at 1.
        """
        return 0.75 if self.draft is None or self.draft.head is None else 1.0

    def setup(self, *, mode: Mode, draft: bool, logprobs: bool = False, sampling: bool = True) -> Setup:
        """Setup of the programs for such requests; `sampling` matters to modes that are greedy without it."""
        if self.exact:
            # Who drafts is told to each call, and all who sample do so by the form that filters.
            draft, sampling, mode = True, True, "full" if mode == "sampled" else mode
        drafter = self.draft if draft else None
        return Setup(
            self.target, drafter, mode, logprobs, self.proposals, self.draft_temperature,
            form=ABSORBED if self.exact else self.latent_form,
            draft_window=None if drafter is None else self.draft_window,
            imposed_acceptance=None if drafter is None else self.imposed_acceptance, ranks=self.tp,
            dealt=self.dealt, interleave=self.interleave, sampling=sampling or mode not in ADJUSTING, exact=self.exact,
            pictures=self.pictures,
        )  # fmt: skip

    def company(self, draft: bool, needs: Needs) -> Company:
        """Company of a request: only requests of one company share a batch."""
        if not self.exact:
            return Company(draft)
        mode: Mode = "full" if needs.mode == "sampled" else needs.mode
        return Company(self.draft is not None, needs._replace(mode=mode, sampling=True))

    @property
    def verify_policy(self) -> VerifyPolicy:
        """Who chooses the verified length, with what was learnt from all cycles since `verify_length` was last set."""
        if self.draft is None:
            return VerifyPolicy(1)
        if self._lengths is None or self._lengths.option != self.verify_length:
            offered, option = self.draft.num_drafts + 1, self.verify_length
            if isinstance(option, str):
                cost = self._cycle_cost(self.draft)
                # Where sharing was measured: dense layers with attention, on one GPU.
                dense = cost.target.experts == 0.0 and cost.target.state == 0.0
                self._lengths = AutoPolicy(
                    offered, cost, option, sharing=dense and self.tp == 1, signs=self.draft.signs
                )
            else:
                self._lengths = VerifyPolicy(offered, option)
        return self._lengths

    def _cycle_cost(self, draft: DFlashConfig) -> CycleCost:
        """Cost model of cycles on each device that shares the models."""
        if self.tp == 1:
            return cycle_cost(self.target, draft, self.weights, self.draft_window)
        own = {role: held(table) for role, table in self.weights.items()}
        return cycle_cost(share_config(self.target, self.tp), share_config(draft, self.tp), own, self.draft_window)

    def verifying(self, setup: Setup, length: Length, slots: int) -> Setup:
        """What cycles are compiled for that verify so much. Rows that too few slots would share are each slot's own."""
        shared = length.shared and setup.draft is not None and self.verify_policy.shares(slots)
        return setup.verifying(length.tokens, per_request=shared)

    @property
    def estimate(self) -> np.ndarray:
        """What programs that verify per request take; see `AcceptanceEstimate.parameters`."""
        learnt = self.verify_policy.estimate
        # Chosen before somebody set another length: what was learnt then is gone.
        if learnt is None:
            drafts, signs = (0, 1) if self.draft is None else (self.draft.num_drafts, self.draft.signs)
            learnt = AcceptanceEstimate(drafts, signs)
        return learnt.parameters

    def verify_lengths(self, setup: Setup, slots: int) -> tuple[Length, ...]:
        """Verified lengths that may be chosen with so many slots."""
        if setup.draft is None:
            return (Length(setup.offered),)
        kind = "greedy" if setup.greedy else "sampled"
        return self.verify_policy.candidates(slots, self.max_model_len / 2, kind)

    def program_status(self, name: tuple, arguments: Callable[[], tuple]) -> Status:
        """Whether a program is compiled.

        Args:
          name: tells it from all others of this engine; short, for it is asked for between two calls of the device.
          arguments: what `Programs.prepare` takes for it, found out once: that takes long.
        """
        if name not in self._keys:
            self._keys[name] = self.programs.key(*arguments())
        return self.programs.status(self._keys[name])

    def take_pools(self) -> tuple[Pages, Pages]:
        """The page pools, made on first use and again when an interrupted call has consumed them."""
        with self.taking:
            return self._newest_pools()

    def ready_pools(self) -> None:
        """Makes the page pools before anybody takes them; leaves them to a run that has them."""
        with self.taking:
            if not self.busy:
                self._newest_pools()

    def _newest_pools(self) -> tuple[Pages, Pages]:
        lost = _lost(self._pools)
        if lost or self._filled_by is not self.weights:
            # First of all: after an interrupt nobody may find in new pools what was in the old ones.
            for pool in self.groups:
                pool.allocator.forget()
            self.snapshots.forget()
            self._pools = self._make_pools() if lost else self._pools
            self._filled_by = self.weights
        if self.snapshots.count and _lost(self._kept_states):
            self.snapshots.forget()
            self._kept_states = self._make_states()
        assert self._pools is not None
        return self._pools

    def pool_shapes(self) -> tuple[Pages, Pages]:
        """The page pools' shapes in place of the arrays."""
        return jax.eval_shape(self._zeroed_pools)

    def _make_pools(self) -> tuple[Pages, Pages]:
        return self._made("pools", self._zeroed_pools)

    def _make_states(self) -> tuple[State, ...]:
        return self._made("states", partial(make_states, self.target, self.snapshots.count, self.dtype))

    def _made[T](self, name: str, make: Callable[[], T]) -> T:
        """Pools or states, made where they stay: no device has room for all."""
        if self.programs.ranks is None:
            return make()
        return self.programs.made(name, make, share_pools(self.programs.ranks, jax.eval_shape(make)))

    @property
    def makers(self) -> dict[str, Callable[[], Any]]:
        """Functions that make arrays shared by ranks, by the names of `Programs.made`."""
        return {"pools": self._make_pools, "states": self._make_states}

    def _zeroed_pools(self) -> tuple[Pages, Pages]:
        target, draft = pool_config(self.target, self.tp), self.draft
        scales = None if self.cache_scales is None else repeated_scales(self.cache_scales, self.target, target)
        options: Any = {"cache_dtype": self.cache_dtype, "scales": scales}
        options |= {"float8_queries": self.query_dtype is not None}
        counts = {
            role: {
                i: count
                for pool, count in zip(self.groups, (self.num_pages, *self.window_pages), strict=True)
                for i in getattr(pool.group, role)
            }
            for role in ROLES
        }
        ours, theirs = ([own[i] for i in range(len(own))] for own in counts.values())
        dealt, heads = self.dealt, layer_traits(self.target).attention == "heads"
        return (
            # Latent rows are cut along a page's tokens, and a key head is whose part of a page it is.
            make_pages(target, ours, self.page_size // (dealt if heads else 1), self.dtype, **options),
            Pages((), ())
            if draft is None
            else make_pages(
                pool_config(draft, self.tp),
                [count * dealt for count in theirs],
                self.page_size // dealt,
                self.dtype,
                cache_dtype=self.draft_cache_dtype,
            ),
        )

    def find_scales(self, prompts: Iterable[Sequence[int]]) -> None:
        """Scales of the target's pages by what these prompts keep there, where they are still to be found. Nobody's requests run.

        Raises:
          ParameterError: a layer's numbers are not finite.
        """
        if not self.scales_from_traffic:
            return
        texts = [prompt[:TRAFFIC_TOKENS] for prompt in itertools.islice(prompts, TRAFFIC_PROMPTS)]
        kind = "int8" if quantized_format(self.cache_dtype) == "int8" else "fp8"
        params: Any = self.weights["target"]
        scales = calibrate(
            self.target, params, texts, cache_dtype=kind, reach=self.scale_range, ranks=self.programs.ranks
        )
        with self.taking:
            self.cache_scales, self.scales_from_traffic = scales, False
            self.lose_pools()  # they hold the scales

    def lose_pools(self) -> None:
        """The device failed: what its last program returned may be its error in place of numbers, to whoever reads it."""
        self._pools, self._kept_states = None, ()

    @cached_property
    def shelf(self) -> Shelf:
        """Device tables of the grammars in use."""
        ranks = self.programs.ranks
        everywhere = None if ranks is None else NamedSharding(ranks.mesh, PartitionSpec())
        return Shelf(self.target.vocab_size, partial(jax.device_put, device=everywhere))

    @property
    def kept_states(self) -> tuple[State, ...]:
        """The pool of snapshots, one row each; made with the page pools."""
        return self._kept_states

    def keep_states(self, states: tuple[State, ...]) -> None:
        """The pool of snapshots as the newest program returned it: it has consumed the one before."""
        self._kept_states = states

    def keep_pools(self, target: Pages, draft: Pages) -> None:
        """The pools as the newest program returned them: it has consumed the ones before."""
        self._pools = (target, draft)


def _lost(arrays: Any) -> bool:
    """Whether there are no such arrays, or an interrupted call has consumed them."""
    leaves = jax.tree.leaves(arrays)
    return not leaves or any(leaf.is_deleted() for leaf in leaves)
