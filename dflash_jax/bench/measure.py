"""So many users, each sending a request as soon as the last one is answered: throughput, waiting times, acceptance.

Compilation is in no figure: what a run of so many users can call is compiled first, side by side, and every user is served once
before requests are timed.
"""

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from dflash_jax.bench.workload import Workload
from dflash_jax.compile.programs import start_compiling
from dflash_jax.decoding.state import Setup
from dflash_jax.engine import Engine, Run
from dflash_jax.engine.acceptance import acceptance_by_position
from dflash_jax.engine.requests import Needs, Request
from dflash_jax.engine.verify_auto import AutoPolicy
from dflash_jax.engine.verify_policy import Length
from dflash_jax.engine.warmup import Jobs
from dflash_jax.errors import ParameterError
from dflash_jax.model import Model
from dflash_jax.sampling_params import SamplingParams

PERCENTILES = (50, 90, 99)
# Cycles between two looks at the results: what `stream` does.
CYCLES = 4
# Lengths that at best gain less than this share of what the best one does are not compiled for an imposed acceptance.
UNLIKELY = 0.8


@dataclass(frozen=True)
class Figures:
    """One row of a benchmark.

    Attributes:
      workload, requests, concurrency, prompt_tokens, max_tokens: what ran; prompt tokens are a mean.
      temperature, top_p, top_k, min_p: what tokens were drawn from.
      draft: whether a drafter drafted.
      imposed_acceptance: tokens a cycle was told to gain, where that was imposed: such tokens are no model's text.
      tokens_per_s: all produced tokens over the whole time, prompts included.
      time_to_first_token_ms: percentiles over requests, from sending to the first token.
      inter_token_ms: percentiles over tokens after the first; tokens that arrive together share the time since the last ones.
      longest_wait_ms: the longest that anybody waited for the next tokens after the first.
      tokens_per_cycle: mean; 0 without a cycle.
      verify_lengths: cycles of the timed run by the number of tokens they verified of each slot; empty without a drafter.
      shared_lengths: those in which slots shared rows, by the number on average.
      acceptance_by_position: see `Stats`; empty without a cycle that drafted.
      peak_bytes: most device memory in use so far in this process, where the device tells.
      compile_s: compilation before the timed run.
    """

    workload: str
    requests: int
    concurrency: int
    prompt_tokens: float
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    draft: bool
    imposed_acceptance: float | tuple[float, ...] | None
    tokens_per_s: float
    time_to_first_token_ms: dict[str, float]
    inter_token_ms: dict[str, float]
    longest_wait_ms: float
    tokens_per_cycle: float
    verify_lengths: dict[int, int]
    shared_lengths: dict[int, int]
    acceptance_by_position: list[float]
    peak_bytes: int | None
    compile_s: float

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)


@dataclass
class _Trace:
    """Times that one request's user observed."""

    sent: float
    arrivals: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    counts: list[int] = dataclasses.field(default_factory=list)
    drafts: list[tuple[int, int]] = dataclasses.field(default_factory=list)


def measure(
    model: Model,
    workload: Workload,
    *,
    concurrency: int,
    requests: int,
    draft: bool,
    imposed_acceptance: float | tuple[float, ...] | None = None,
) -> Figures:
    """Serves `requests` requests with `concurrency` users and reports what they saw.

    Args:
      imposed_acceptance: mean tokens a cycle is made to gain whatever the target thinks, to time shapes whose weights are random;
        several are those of slots by turns.

    Raises:
      ParameterError: more users than slots or than requests, or an acceptance that a block cannot hold.
      PromptError, CapacityError: a request can never run.
    """
    engine = model.engine
    if not 1 <= concurrency <= min(engine.max_batch, requests):
        raise ParameterError(
            f"concurrency must be from 1 to the model's max_batch={engine.max_batch} and to requests={requests}, got {concurrency}"
        )
    if imposed_acceptance is not None:
        check_imposed(imposed_acceptance, 1 if model.draft is None or not draft else model.draft.num_drafts + 1)
    before, began = engine.programs.compile_s, time.perf_counter()
    for compiled in start_compiling(
        programs(model, workload, concurrency=concurrency, draft=draft, imposed_acceptance=imposed_acceptance)
    ):
        compiled.result()
    before -= time.perf_counter() - began
    shared, engine.share_prefixes = engine.share_prefixes, False  # or the timed prompts would be found in the pages
    engine.imposed_acceptance = imposed_acceptance
    try:
        # The lengths to verify are learnt here too, as they are by whoever serves for longer than a benchmark.
        _serve(model, workload, concurrency, max(2, concurrency), draft)
        verified = Counter(engine.verify_policy.cycles)
        warm, started = engine.programs.compile_s, time.perf_counter()
        traces = _serve(model, workload, concurrency, requests, draft)
        seconds = time.perf_counter() - started - (engine.programs.compile_s - warm)
        verified = engine.verify_policy.cycles - verified
    finally:
        engine.imposed_acceptance, engine.share_prefixes = None, shared
    counts = [count for trace in traces for count in trace.counts]
    waits = [wait for trace in traces for wait in _waits(trace)]
    drafts = model.draft.num_drafts if model.draft is not None and draft else 0
    memory = jax.local_devices()[0].memory_stats() or {}
    return Figures(
        workload=workload.name,
        requests=requests,
        concurrency=concurrency,
        prompt_tokens=round(float(np.mean([len(prompt) for prompt in workload.prompts])), 1),
        max_tokens=workload.max_tokens,
        **workload.law,
        draft=draft,
        imposed_acceptance=imposed_acceptance,
        tokens_per_s=round(sum(size for trace in traces for _, size in trace.arrivals) / seconds, 1),
        time_to_first_token_ms=_percentiles([trace.arrivals[0][0] - trace.sent for trace in traces]),
        inter_token_ms=_percentiles([wait / tokens for wait, tokens in waits for _ in range(tokens)]),
        longest_wait_ms=round(max((wait for wait, _ in waits), default=0.0) * 1e3, 3),
        tokens_per_cycle=round(float(np.mean(counts)), 3) if counts else 0.0,
        verify_lengths=_by_tokens(verified, shared=False) if drafts else {},
        shared_lengths=_by_tokens(verified, shared=True) if drafts else {},
        acceptance_by_position=[
            round(share, 4)
            for share in acceptance_by_position(Counter(cycle for trace in traces for cycle in trace.drafts))
        ],
        peak_bytes=memory.get("peak_bytes_in_use"),
        compile_s=round(engine.programs.compile_s - before, 1),
    )


def check_imposed(acceptance: float | tuple[float, ...], longest: int) -> None:
    """Raises ParameterError for an imposed acceptance that cycles of at most `longest` tokens cannot have."""
    for one in acceptance if isinstance(acceptance, tuple) else (acceptance,):
        if not 1 <= one <= longest:
            raise ParameterError(f"imposed acceptance must be from 1 to {longest}, got {one}")


def programs(
    model: Model,
    workload: Workload,
    *,
    concurrency: int,
    draft: bool,
    imposed_acceptance: float | tuple[float, ...] | None = None,
) -> list[Callable[[], object]]:
    """Functions that compile, one program each, all that `measure` with these arguments can need: what prompts are prefilled by,
    and cycles of every length that is likely to be verified."""
    engine, users = model.engine, concurrency
    requests = list(_requests(workload, max(users, len(workload.prompts))))
    needs = Needs.of(request.needs for request in requests)
    # As while it measures: prompts of some targets are cut where others may go on from them.
    shared, engine.share_prefixes = engine.share_prefixes, False
    engine.imposed_acceptance = imposed_acceptance
    try:
        setup = engine.setup(mode=needs.mode, draft=draft, logprobs=needs.logprobs, sampling=needs.sampling)
        first = list(_run(model, requests, draft, users).first_jobs())
    finally:
        engine.imposed_acceptance, engine.share_prefixes = None, shared
    sizes = [len(prompt) + engine.lookahead for prompt in workload.prompts]
    ends = engine.width_of(min(sizes)), engine.width_of(max(sizes) + workload.max_tokens)
    lengths = _likely(engine, setup, users, float(np.mean(sizes)), imposed_acceptance)
    setups = [engine.verifying(setup, length, users) for length in lengths]
    widths = [width for width in engine.buckets.width if ends[0] <= width <= ends[1]]
    loops = [Jobs(engine, setup, needs.stop_width).loop(users, width) for setup in setups for width in widths]
    return [*first, *_prompts(engine, Jobs(engine, setup, needs.stop_width), workload, users), *loops]


def _prompts(engine: Engine, jobs: Jobs, workload: Workload, users: int) -> list[Callable[[], None]]:
    """Jobs that compile the prefill of each prompt, part by part, and of as many ends and prompts together as may arrive."""
    lengths = {len(prompt) for prompt in workload.prompts}
    buckets, parts, lasts = engine.buckets, set[tuple[int, tuple[int, int]]](), set[int]()
    for length in lengths:
        filled = last = 0
        while filled < length:
            last = length - filled
            rows, size = buckets.prompts([last])
            filled += rows * size
            parts.add((engine.width_of(min(filled, length)), (rows, size)))
        lasts.add(last)
    first, least = min(lasts), min(lengths)
    if users > 1 and buckets.room([first]) >= least:
        together = [(rows, buckets.piece) for rows in buckets.pieces if rows >= buckets.count([first, least])]
        parts |= {(engine.width_of(length), shape) for length in lengths for shape in together}
    prefills = [jobs.prefill(width, *shape, users) for width, shape in sorted(parts)]
    return [*prefills, *(jobs.admit(users, rows) for rows in sorted({rows for _, (rows, _) in parts}))]


def _likely(
    engine: Engine, setup: Setup, users: int, context: float, imposed: float | tuple[float, ...] | None
) -> Sequence[Length]:
    """Lengths that may be verified; where one acceptance is imposed, those that do not gain far less for their time."""
    lengths, policy = engine.verify_lengths(setup, users), engine.verify_policy
    if not isinstance(policy, AutoPolicy) or imposed is None or isinstance(imposed, tuple):
        return lengths
    common = [length for length in lengths if not length.shared]
    rates = {length: min(length.tokens, imposed) / policy.cycle_ms(users, length, context) for length in common}
    # Where slots stand empty, those that are taken may have all rows.
    return [length for length in lengths if length.shared or rates[length] > UNLIKELY * max(rates.values())]


def _by_tokens(verified: Counter[Length], *, shared: bool) -> dict[int, int]:
    return {length.tokens: cycles for length, cycles in sorted(verified.items()) if length.shared == shared}


def _run(model: Model, requests: list[Request], draft: bool, users: int) -> Run:
    return model.engine.run(requests, draft=draft, cycles=CYCLES, slots=users)


def _serve(model: Model, workload: Workload, concurrency: int, requests: int, draft: bool) -> list[_Trace]:
    coming = _requests(workload, requests)
    first = list(itertools.islice(coming, concurrency))
    run = _run(model, first, draft, concurrency)
    traces = {request.index: _Trace(time.perf_counter()) for request in first}
    try:
        for update in run:
            now, trace = time.perf_counter(), traces[update.index]
            trace.arrivals.append((now, len(update.tokens)))
            trace.counts += update.counts
            trace.drafts += update.drafts
            if update.finish_reason is not None and (request := next(coming, None)) is not None:
                traces[request.index] = _Trace(now)
                run.add(request)
    finally:
        run.close()
    return list(traces.values())


def _requests(workload: Workload, count: int) -> Iterator[Request]:
    for index in range(count):
        params = SamplingParams(max_tokens=workload.max_tokens, **workload.law, seed=index, ignore_eos=True)
        yield Request(index, workload.prompts[index % len(workload.prompts)], params)


def _waits(trace: _Trace) -> Iterator[tuple[float, int]]:
    """Seconds until tokens came, and how many they were, from the second arrival on."""
    for (before, _), (now, tokens) in itertools.pairwise(trace.arrivals):
        yield now - before, tokens


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds; empty where nothing was measured."""
    if not len(seconds):
        return {}
    return {f"p{p}": round(float(np.percentile(seconds, p)) * 1e3, 3) for p in PERCENTILES}
