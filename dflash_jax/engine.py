"""Token ids in, token ids out: slots, pages, admission, and the loop that keeps the device busy. Knows no text.

Life of a request: wait for a slot and for all the pages it can ever need; prefill chunk by chunk into the pages; take its slot
with its first token; run in cycles with the others; leave, and give its pages back. The device runs many cycles for each question
from the host; a slot that frees early is given to the next request that waits.
"""

import itertools
import operator
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dflash_jax.attention.mla import BY_ARITHMETIC, LatentForm
from dflash_jax.cache import PageAllocator, Pages, make_pages, page_bytes
from dflash_jax.config import DecoderConfig
from dflash_jax.decoding.loop import loop
from dflash_jax.decoding.prefill import admit, prefill_chunk
from dflash_jax.decoding.sampling import Mode
from dflash_jax.decoding.state import DecodeState, Emitted, Proposals, Setup
from dflash_jax.errors import CapacityError, DFlashError, PromptError
from dflash_jax.models.dflash_config import DFlashConfig
from dflash_jax.programs import Buckets, Programs, round_up
from dflash_jax.requests import Request, Update, empty_state, request_row
from dflash_jax.sampling_params import SamplingParams

MAX_CYCLES = 32
STOP_WIDTH = 8


@dataclass
class _Running:
    """A request in a slot. `length` mirrors the device's `seq_lens`."""

    request: Request
    pages: list[int]
    length: int


@dataclass
class Engine:
    """Serves requests over one target and, where there is one, its drafter.

    Attributes:
      weights: flat parameters under "target" and "draft", on the device.
      dtype: of activations and pages.
      max_model_len: prompt and produced tokens of one request at most.
      max_batch: slots.
      latent_form: how prompts attend where the target's attention is latent.
      num_pages: pages shared by all requests; 0 is enough for `max_batch` requests of full length.
      allocator: the account of pages; all are free whenever nothing runs.
    """

    target: DecoderConfig
    draft: DFlashConfig | None
    weights: Mapping[str, Mapping[str, Array]]
    dtype: jnp.dtype
    max_model_len: int
    max_batch: int = 8
    page_size: int = 64
    num_pages: int = 0
    max_chunk: int = 512
    proposals: Proposals = "shared_noise"
    # Slots of a block are predicted side by side, each for an average over what the slots before it may hold. Sharpened a little,
    # such an average names the target's choice more often (measured in the shipped drafter's card: x 1.3 is best).
    draft_temperature: float = 0.75
    latent_form: LatentForm = BY_ARITHMETIC
    programs: Programs = field(default_factory=Programs)

    def __post_init__(self):
        # A cycle writes up to a block past the last committed token.
        self.lookahead = 1 if self.draft is None else self.draft.block_size + 1
        self.buckets = Buckets.build(
            max_batch=self.max_batch,
            max_tokens=self.max_model_len + self.lookahead,
            page_size=self.page_size,
            max_chunk=min(self.max_chunk, self.max_model_len),
        )
        if self.num_pages == 0:
            self.num_pages = self.max_batch * self.buckets.width[-1]
        self.allocator = PageAllocator(self.num_pages)
        self._pools: tuple[Pages, Pages] | None = None
        self._busy = False

    @property
    def pool_bytes(self) -> int:
        """Bytes of both models' pages."""
        models = [self.target] if self.draft is None else [self.target, self.draft]
        return self.num_pages * sum(page_bytes(model, self.page_size, self.dtype) for model in models)

    def pages_for(self, request: Request) -> int:
        return -(-(len(request.prompt) + request.params.max_tokens + self.lookahead) // self.page_size)

    def check(self, request: Request) -> None:
        """Raises PromptError or CapacityError for a request that can never run, with the numbers that say why."""
        prompt, wanted = len(request.prompt), request.params.max_tokens
        if prompt == 0:
            raise PromptError("the prompt has no tokens: give at least one (a beginning-of-text token will do)")
        ids = (*request.prompt, *request.params.stop_token_ids)
        if not all(0 <= token < self.target.vocab_size for token in ids):
            wrong = next(token for token in ids if not 0 <= token < self.target.vocab_size)
            raise PromptError(f"token id {wrong} is outside the target's vocabulary of {self.target.vocab_size}")
        if prompt + wanted > self.max_model_len:
            raise CapacityError(
                f"prompt of {prompt} tokens and max_tokens={wanted} need {prompt + wanted}, max_model_len is {self.max_model_len}: "
                "shorten the prompt, lower max_tokens, or load with a larger max_model_len"
            )
        if (pages := self.pages_for(request)) > self.num_pages:
            raise CapacityError(
                f"the request needs {pages} pages of {self.page_size} tokens, the pool has {self.num_pages}: load with a larger "
                "num_pages"
            )

    def run(self, requests: Sequence[Request], *, draft: bool = True, cycles: int = MAX_CYCLES) -> "Run":
        """Starts serving `requests`; iterate the result for updates.

        Args:
          requests: all are checked before any work starts.
          draft: False decodes with the target alone.
          cycles: cycles between two looks at the results; small for streaming, at most 32.

        Raises:
          PromptError, CapacityError: see `check`.
          DFlashError: another run of this engine is not finished.
        """
        for request in requests:
            self.check(request)
        return Run(self, requests, draft=draft and self.draft is not None, cycles=cycles)

    def setup(self, *, mode: Mode, draft: bool, logprobs: bool = False) -> Setup:
        """What the programs for such requests are compiled for."""
        drafter = self.draft if draft else None
        return Setup(self.target, drafter, mode, logprobs, self.proposals, self.draft_temperature, self.latent_form)

    def warmup_jobs(self, setups: Iterable[Setup], batch: Iterable[int] | None = None) -> Iterator[Callable[[], None]]:
        """Functions that compile, one program each, everything requests of these setups can need."""
        prepare, pools = self.programs.prepare, self.take_pools()
        sizes = {round_up(size, self.buckets.batch) for size in (self.buckets.batch if batch is None else batch)}
        scalar, flag = np.int32(0), np.bool_(False)

        def table(rows: int, width: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((rows, width), np.int32)

        for setup in setups:
            for width, chunk in itertools.product(self.buckets.width, self.buckets.chunk):
                if chunk <= round_up(width * self.page_size, self.buckets.chunk):
                    ids = jax.ShapeDtypeStruct((1, chunk), np.int32)
                    step = (self.weights, table(1, width), pools, ids, scalar, scalar)
                    yield partial(prepare, prefill_chunk, (setup.for_prefill(),), (2,), *step)
            request = Request(0, (0,), SamplingParams())
            row = request_row(setup, request, STOP_WIDTH, self.dtype)
            logits = jax.ShapeDtypeStruct((1, 1, self.target.vocab_size), np.float32)
            for size in sorted(sizes):
                state = empty_state(setup, size, STOP_WIDTH, self.dtype, pools)
                yield partial(prepare, _admit, (setup,), (1,), None, state, scalar, row, logits)
                yield partial(prepare, _retire, (), (1,), None, state, np.zeros((size,), bool))
                for width in self.buckets.width:
                    call = (self.weights, table(size, width), state, scalar, flag)
                    yield partial(prepare, loop, (setup, MAX_CYCLES), (2,), *call)

    def take_pools(self) -> tuple[Pages, Pages]:
        """The page pools, made on first use and again when an interrupted call has consumed them."""
        if self._pools is None or any(leaf.is_deleted() for leaf in jax.tree.leaves(self._pools)):
            none = Pages((), ())
            self._pools = (
                make_pages(self.target, self.num_pages, self.page_size, self.dtype),
                none if self.draft is None else make_pages(self.draft, self.num_pages, self.page_size, self.dtype),
            )
        return self._pools


class Run:
    """One pass over a list of requests. Iterating yields `Update`s; closing or leaving early gives every page back."""

    def __init__(self, engine: Engine, requests: Sequence[Request], *, draft: bool, cycles: int):
        self.engine, self.cycles = engine, max(1, min(cycles, MAX_CYCLES))
        modes = {request.mode for request in requests}
        mode: Mode = "full" if "full" in modes else "sampled" if "sampled" in modes else "greedy"
        logprobs = any(request.params.logprobs is not None for request in requests)
        self.setup = engine.setup(mode=mode, draft=draft, logprobs=logprobs)
        self.waiting = deque(requests)
        slots = round_up(max(1, len(requests)), engine.buckets.batch)
        self.slots: list[_Running | None] = [None] * slots
        # -1 is no page: a write there is dropped, a read is masked.
        self.tables = np.full((slots, engine.buckets.width[-1]), -1, np.int32)
        self.cancelled: set[int] = set()
        self.prefill_s = self.decode_s = 0.0
        self._updates = self._serve()

    def __iter__(self) -> Iterator[Update]:
        return self._updates

    def cancel(self, index: int) -> None:
        """Ends the request with this index before its next cycle; no update of it follows."""
        self.cancelled.add(index)

    def close(self) -> None:
        """Ends the run; every page is free afterwards."""
        self._updates.close()

    def _serve(self) -> Generator[Update]:
        engine = self.engine
        if engine._busy:
            raise DFlashError(
                "this model is generating already: finish or close that stream first, or load the model twice"
            )
        engine._busy = True
        try:
            stops = max((len(request.stop_ids) for request in self.waiting), default=0)
            self.stop_width = max(STOP_WIDTH, 1 << (stops - 1).bit_length() if stops else 0)
            self.state = empty_state(self.setup, len(self.slots), self.stop_width, engine.dtype, engine.take_pools())
            while self.waiting or any(self.slots):
                yield from self._admit_waiting()
                self._retire_cancelled()
                if any(self.slots):
                    yield from self._run_cycles()
        finally:
            for slot in range(len(self.slots)):
                self._release(slot)
            engine._busy = False

    def _admit_waiting(self) -> Iterator[Update]:
        """Fills free slots in order of arrival. A request waits until all its pages are free."""
        for slot in range(len(self.slots)):
            while self.slots[slot] is None and self.waiting:
                if self.waiting[0].index in self.cancelled:
                    self.waiting.popleft()
                    continue
                needed = self.engine.pages_for(self.waiting[0])
                if needed > self.engine.allocator.num_free:
                    return
                request = self.waiting.popleft()
                pages = self.engine.allocator.allocate(needed)
                running = self.slots[slot] = _Running(request, pages, len(request.prompt))
                self.tables[slot] = -1
                self.tables[slot, :needed] = pages
                yield self._prefill(slot, running)

    def _prefill(self, slot: int, running: _Running) -> Update:
        engine, request = self.engine, running.request
        started, compiled = time.perf_counter(), engine.programs.compile_s
        prompt, start, logits = np.asarray(request.prompt, np.int32), 0, None
        pages = (self.state.target_pages, self.state.draft_pages)
        while start < len(prompt):
            chunk = prompt[start : start + engine.buckets.chunk[-1]]
            ids = np.zeros((1, round_up(len(chunk), engine.buckets.chunk)), np.int32)
            ids[0, : len(chunk)] = chunk
            table = self._table(start + len(chunk), slot)
            step = (engine.weights, table, pages, ids, np.int32(start), np.int32(len(chunk)))
            pages, logits = engine.programs.call(prefill_chunk, (self.setup.for_prefill(),), (2,), *step)
            self._keep(replace(self.state, target_pages=pages[0], draft_pages=pages[1]))
            start += len(chunk)
        row = request_row(self.setup, request, self.stop_width, engine.dtype)
        state, emitted = engine.programs.call(
            _admit, (self.setup,), (1,), None, self.state, np.int32(slot), row, logits
        )
        self._keep(state)
        host = jax.device_get(emitted)
        spent = time.perf_counter() - started - (engine.programs.compile_s - compiled)
        self.prefill_s += spent
        rows = jax.tree.map(operator.itemgetter(None), host)
        return self._update(slot, running, rows, 0, first=True, seconds=spent)

    def _run_cycles(self) -> Iterator[Update]:
        engine = self.engine
        started, compiled = time.perf_counter(), engine.programs.compile_s
        longest = max(running.length for running in self.slots if running)
        table = self._table(longest + self.cycles * self.setup.width + engine.lookahead)
        call = (engine.weights, table, self.state, np.int32(self.cycles), np.bool_(bool(self.waiting)))
        state, rows = engine.programs.call(loop, (self.setup, MAX_CYCLES), (2,), *call)
        self._keep(state)
        host = jax.device_get(rows)
        spent = time.perf_counter() - started - (engine.programs.compile_s - compiled)
        self.decode_s += spent
        for slot, running in enumerate(self.slots):
            if running is not None:
                update = self._update(slot, running, host, slot, first=False, seconds=spent)
                running.length += sum(update.counts)
                yield update

    def _update(
        self, slot: int, running: _Running, rows: Emitted, column: int, *, first: bool, seconds: float
    ) -> Update:
        """Collects one slot's rows `[cycles, 1, ...]`; gives its pages back if they end it."""
        update = Update.collect(running.request, rows, column, first=first, seconds=seconds)
        running.request.produced += len(update.tokens)
        update.finish(running.request)
        if update.finish_reason is not None:
            self._release(slot)
        return update

    def _retire_cancelled(self) -> None:
        gone = [slot for slot, running in enumerate(self.slots) if running and running.request.index in self.cancelled]
        if gone:
            mask = np.isin(np.arange(len(self.slots)), gone)
            self._keep(self.engine.programs.call(_retire, (), (1,), None, self.state, mask))
            for slot in gone:
                self._release(slot)

    def _release(self, slot: int) -> None:
        running, self.slots[slot] = self.slots[slot], None
        if running is not None:
            self.engine.allocator.free(running.pages)

    def _table(self, tokens: int, slot: int | None = None) -> np.ndarray:
        """Page tables of all slots, or of one, as wide as `tokens` need."""
        width = round_up(-(-tokens // self.engine.page_size), self.engine.buckets.width)
        rows = self.tables if slot is None else self.tables[slot : slot + 1]
        return np.ascontiguousarray(rows[:, :width])

    def _keep(self, state: DecodeState) -> None:
        """The state is the pools' only owner: the engine must know the newest one at every moment."""
        self.state = state
        self.engine._pools = (state.target_pages, state.draft_pages)


def _admit(setup: Setup, _: None, state: DecodeState, slot: Array, row: DecodeState, logits: Array):
    return admit(setup, state, slot, row, logits)


def _retire(_: None, state: DecodeState, mask: Array) -> DecodeState:
    return replace(state, done=state.done | mask)
