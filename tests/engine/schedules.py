"""Random schedules: requests that arrive, share beginnings, are cancelled, lose their pages or see the run interrupted."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from dflash_jax.cache import PageAllocator
from dflash_jax.engine import Engine, Scheduler
from dflash_jax.engine.batch import Batch
from dflash_jax.engine.in_flight import InFlight
from dflash_jax.engine.requests import Request
from dflash_jax.engine.slots import Slots
from dflash_jax.engine.verify_policy import VerifyLength
from dflash_jax.sampling_params import SamplingParams


@dataclass(frozen=True)
class Text:
    """A prompt, how it is to be continued, and the tokens that follow it when it is served alone."""

    prompt: tuple[int, ...]
    params: SamplingParams
    expected: tuple[int, ...]


@dataclass
class Outcome:
    """What a schedule made happen."""

    preemptions: int = 0
    found: int = 0
    cancelled: int = 0
    interrupted: int = 0
    moved: int = 0
    behind: int = 0
    together: int = 0
    shared: int = 0


def alone(engine: Engine, prompt: list[int], params: SamplingParams) -> Text:
    """Served alone, by the target alone, with no page shared."""
    shares, engine.share_prefixes = engine.share_prefixes, False
    tokens = [
        token for update in engine.run([Request(0, tuple(prompt), params)], draft=False) for token in update.tokens
    ]
    engine.share_prefixes = shares
    return Text(tuple(prompt), params, tuple(tokens))


def make_texts(engine: Engine, prompts: list[list[int]], tokens: int) -> list[Text]:
    """Every prompt greedy and sampled."""
    each = [SamplingParams(max_tokens=tokens), SamplingParams(max_tokens=tokens, temperature=0.9, seed=11)]
    return [alone(engine, prompt, params) for prompt in prompts for params in each]


class Interrupter:
    """Raises KeyboardInterrupt at one of the parts of the scheduler's steps, before or after it is done; `behind` tells whether
    cycles were in flight then."""

    def __init__(self, patch: pytest.MonkeyPatch, engine: Engine, at: int):
        self.left, self.behind, self.engine = at, False, engine
        places = [(engine.programs, "call"), (engine, "keep_pools")]
        places += [(Slots, name) for name in ("resize", "leave", "publish", "enter")]
        places += [(InFlight, name) for name in ("add", "take", "seconds")] + [(Batch, "serve"), (Batch, "retire")]
        places += [
            (Scheduler, name)
            for name in (
                "_admit",
                "_make_room",
                "_account",
                "_send",
                "_plan_behind",
                "_drain",
                "_queue",
                "_ready_batch",
            )
        ]
        for owner, name in places:
            patch.setattr(owner, name, self.wrapped(getattr(owner, name)))

    def wrapped(self, step):
        def interrupted(*args, **kwargs):
            before, self.left = self.left, self.left - 2
            if before == 0:
                self.interrupt()
            result = step(*args, **kwargs)
            if before == 1:
                self.interrupt()
            return result

        return interrupted

    def interrupt(self):
        self.behind = bool(self.engine.scheduler.inflight.calls)
        raise KeyboardInterrupt


def batch_of(engine: Engine) -> Batch:
    """What runs."""
    assert engine.scheduler.batch is not None
    return engine.scheduler.batch


def watch_waiting(patch: pytest.MonkeyPatch, engine: Engine, outcome: Outcome) -> None:
    """Fails where prompts get more than one chunk between two calls of the loop that somebody who decodes waits for. Counts calls
    with pieces of several prompts, and those for cycles that read shared pages once."""
    call, spent = engine.programs.call, [0]

    def watched(function, static, donate, *args):
        outcome.together += function.__name__ == "admit_program" and np.sum(args[2] < batch_of(engine).size) > 1
        if function.__name__ == "loop":
            spent[0] = 0
            outcome.shared += args[-1] is not None
        elif function.__name__ == "prefill_chunk" and batch_of(engine).slots.decoding:
            spent[0] += args[3].size
            assert spent[0] <= engine.max_chunk, "a running sequence waits longer than one chunk"
        return call(function, static, donate, *args)

    patch.setattr(engine.programs, "call", watched)


def ended_by_a_token(rng: random.Random, text: Text) -> Text:
    """The same, ended by one of its own tokens."""
    stop = rng.choice(text.expected)
    ends = text.expected.index(stop) + 1
    return Text(text.prompt, replace(text.params, stop_token_ids=(stop,)), text.expected[:ends])


def play(
    engine: Engine, texts: list[Text], seed: int, *, interrupt: bool = False, lengths: Sequence[VerifyLength] = (None,),
    ahead: bool = False, cascade: bool | None = None,
) -> Outcome:  # fmt: skip
    """One schedule; fails unless every request that was not cancelled has the tokens it has alone, no running one waits longer than
    a chunk, and every page is back.

    Args:
      lengths: one of these is verified in the next cycles, another one each time.
      ahead: prompts and cycles are started before the results of others are looked at. Some requests are ended by a token, and
        more are cancelled.
      cascade: of the engine.
    """
    rng, outcome = random.Random(seed), Outcome()
    chosen = [rng.choice(texts) for _ in range(rng.randint(2, 7))]
    chosen[0] = rng.choice([text for text in texts if text.params.temperature > 0])  # one mode, one set of programs
    longest = max(len(text.expected) for text in texts)
    if ahead:
        chosen = [ended_by_a_token(rng, text) if rng.random() < 0.3 else text for text in chosen]
    requests = [
        Request(i, text.prompt, replace(text.params, max_tokens=rng.randint(1, longest)))
        for i, text in enumerate(chosen)
    ]
    needed = max(engine.pages_for(len(request.prompt) + request.params.max_tokens) for request in requests)
    # The pools stay as they are, so that nothing is compiled again; the account knows fewer pages.
    engine.take_pools()
    engine.allocator = PageAllocator(min(engine.num_pages, needed + rng.choice([0, 1, 2, 4, 8, 40])))
    arrived = rng.randint(1, len(requests))
    engine.goes_ahead, engine.cascade = ahead, cascade
    cycles, slots = rng.choice([1, 2, 3] if ahead else [1, 1, 1, 2, 5, 32]), rng.randint(2 if ahead else 1, 4)
    run = engine.run(requests[:arrived], cycles=cycles, slots=slots)
    got = {request.index: [] for request in requests}
    ended, cancelled, slots, before = set(), set(), 0, engine.scheduler.stats
    with pytest.MonkeyPatch.context() as patch:
        try:
            watch_waiting(patch, engine, outcome)
            if interrupt:
                Interrupter(patch, engine, rng.randint(0, 160))
            for update in run:
                assert update.index not in cancelled | ended
                outcome.behind += bool(engine.scheduler.inflight.calls)
                now = batch_of(engine).size
                outcome.moved, slots = outcome.moved + (slots not in (0, now)), now
                engine.verify_length = random.Random(hash((seed, update.index, len(got[update.index])))).choice(lengths)
                got[update.index] += update.tokens
                if update.finish_reason is not None:
                    ended.add(update.index)
                if rng.random() < (0.08 if ahead else 0.03):
                    cancelled.add(victim := rng.choice(requests[:arrived]).index)
                    run.cancel(victim)
                while arrived < len(requests) and (rng.random() < 0.4 or len(ended | cancelled) == arrived):
                    run.add(requests[arrived])
                    arrived += 1
        except KeyboardInterrupt:
            outcome.interrupted = 1
    run.close()
    engine.verify_length = engine.goes_ahead = engine.cascade = None
    for pool in engine.groups:
        pool.allocator.check_integrity()
        assert pool.allocator.num_free == pool.allocator.num_pages
    for request, text in zip(requests, chosen, strict=True):
        expected = list(text.expected[: request.params.max_tokens])
        if request.index in ended:
            assert got[request.index] == expected
        else:
            assert outcome.interrupted or request.index in cancelled or request.index >= arrived
            assert got[request.index] == expected[: len(got[request.index])]
    after, outcome.cancelled = engine.scheduler.stats, len(cancelled - ended)
    outcome.preemptions = after.preemptions - before.preemptions
    outcome.found = (after.cached_tokens - before.cached_tokens) // engine.page_size
    return outcome
