"""The scheduler before a GPU that is a clock: how busy it keeps the device, and how long users wait.

Calls take the host and the device what they take an H200 with Qwen3-4B's shapes where 64 users stream, and so does whoever stands
between the scheduler and them. Nothing is computed and nobody really waits: the same run gives the same figures everywhere.
"""

import heapq
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.decoding.state import Emitted
from dflash_jax.engine import batch, scheduler
from dflash_jax.engine.in_flight import DecodeCall, InFlight
from dflash_jax.engine.requests import Request
from dflash_jax.engine.resources import MAX_CYCLES

MS = 1e-3
# Of the host: a call of each program, a piece's text, and a look at results.
CALLS_MS = {"loop": 3.9, "prefill_chunk": 3.9, "admit_program": 1.7, "resize_program": 0.5}
TEXT_MS, LOOK_MS = 0.1, 0.5
# Of the event loop, which does one thing after the other: a piece on its way to its user, and a request.
PIECE_MS, REQUEST_MS, NETWORK_MS = 0.15, 1.5, 0.5
# Of the device: a cycle of so many slots, a call for prompts and each token of them, first tokens.
CYCLE_MS, PROMPTS_MS, TOKEN_MS, FIRST_MS = {8: 3.5, 64: 15.0}, 1.2, 0.0118, 0.2
TOKENS, PROMPT, BLOCK, GAIN = 128, 128, 16, 6.6  # the last is a mean of draws, which a block and a text's end cut

FIELDS: dict[str, Any] = dict.fromkeys(("tokens", "counts", "accepted"), np.zeros((1,), np.int32))
FIELDS |= dict.fromkeys(("logprobs", "top_ids", "top_logprobs"))
EMITTED = jax.tree.structure(Emitted(**FIELDS))


@dataclass
class World:
    """A clock, what happens at it, and the device.

    Attributes:
      slow: how many times as long everything takes the host.
      left: of each slot, the tokens that it still lacks on the device.
      ready: when results are there.
    """

    slow: float
    now: float = 1000.0
    free: float = 0.0
    idle: float = 0.0
    left: np.ndarray = field(default_factory=lambda: np.zeros((0,), np.int64))
    ready: dict[int, float] = field(default_factory=dict)
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    flag: bool = False

    def __post_init__(self):
        self.count, self.rng = itertools.count(), np.random.default_rng(0)

    def at(self, when: float, do: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when, next(self.count), do))

    def until(self, when: float) -> None:
        while self.events and self.events[0][0] <= when:
            self.now, _, do = heapq.heappop(self.events)
            do()
        self.now = max(self.now, when)

    def host(self, milliseconds: float) -> None:
        self.until(self.now + self.slow * milliseconds * MS)

    def device(self, milliseconds: float) -> float:
        begins = max(self.free, self.now)
        self.idle += begins - self.free if self.free else 0.0
        self.free = begins + milliseconds * MS
        return self.free

    # As the scheduler's `Event`: what is submitted while it waits wakes it.

    def set(self) -> None:
        self.flag = True

    def clear(self) -> None:
        self.flag = False

    def wait(self, timeout: float) -> bool:
        end = self.now + timeout
        while not self.flag and self.events and self.events[0][0] <= end:
            self.until(self.events[0][0])
        if not self.flag:
            self.now = end
        return self.flag

    # As the engine's programs.

    def call(self, function: Callable, static: tuple, donate: tuple[int, ...], *args: Any) -> Any:
        self.host(CALLS_MS[function.__name__])
        return getattr(self, function.__name__)(*args)

    def prefill_chunk(self, _, table, caches, ids, starts, lengths, slots):
        self.device(PROMPTS_MS + TOKEN_MS * ids.size)
        return (caches.target, caches.draft, caches.recurrent), jnp.zeros((len(ids), 1))

    def admit_program(self, _, state, slots, arrays, logits, masks):
        if len(self.left) != len(state.done):
            self.left = np.zeros(state.done.shape, np.int64)
        there = slots < len(self.left)
        self.left[slots[there]] = arrays.remaining[there] - 1
        return state, self._emitted(np.ones((len(slots),), np.int32), self.device(FIRST_MS))

    def loop(self, _, table, state, cycles, until_any, retired, *rest):
        self.left[retired] = 0
        counts, before = np.zeros((MAX_CYCLES, len(self.left)), np.int32), np.count_nonzero(self.left)
        ran = 0
        while ran < cycles and self.left.any() and not (until_any and np.count_nonzero(self.left) < before):
            drawn = np.minimum(self.rng.geometric(1 / GAIN, len(self.left)), BLOCK)
            counts[ran] = np.minimum(drawn, self.left)
            self.left -= counts[ran]
            ran += 1
        return state, self._emitted(counts, self.device(ran * CYCLE_MS[len(self.left)]))

    def resize_program(self, _, state, rows):
        self.left = np.where(rows < 0, 0, self.left[rows])
        return replace(state, done=jnp.zeros((len(rows),), bool))

    def _emitted(self, counts: np.ndarray, ready: float) -> Emitted:
        """With numbers of the host's, which `Emitted` itself would refuse."""
        tokens = np.full((*counts.shape, BLOCK), 300, np.int32)
        self.ready[id(tokens)] = ready
        return jax.tree.unflatten(EMITTED, (tokens, counts, np.maximum(counts - 1, 0)))

    def on_host(self, rows: Emitted, *, logprobs: bool) -> Emitted:
        self.until(max(self.now, self.ready.pop(id(rows.tokens))))
        self.host(LOOK_MS)
        return rows


@dataclass
class Seen:
    """What users saw, in seconds.

    Attributes:
      idle: the share of the time that the device stood still.
    """

    tokens_per_s: float
    first: float
    median: float
    p99: float
    idle: float


@pytest.fixture(scope="module")
def model():
    loaded = dj.load(max_batch=64, max_model_len=512, dtype="float32")
    engine = loaded.engine
    engine.buckets = replace(engine.buckets, batch=(8, 64))
    engine.share_prefixes, engine.goes_ahead = False, True
    return loaded


@pytest.fixture
def serve(model, monkeypatch) -> Callable[..., Seen]:
    """Serves users who ask again once answered, through an event loop or by themselves, each so many times."""

    def run(users: int, *, slow: float = 1.0, alone: bool = False, requests: int = 10) -> Seen:
        world, engine, add = World(slow), model.engine, InFlight.add
        steps = scheduler.Scheduler(engine)

        def added(queued: InFlight, item: Any) -> None:
            """Items have looked at the true clock as they were made."""
            name = "returned" if isinstance(item, DecodeCall) else "started"
            add(queued, replace(item, **{name: world.now}))

        monkeypatch.setattr(InFlight, "add", added)
        monkeypatch.setattr(scheduler.time, "perf_counter", lambda: world.now)
        monkeypatch.setattr(scheduler, "on_host", world.on_host)
        monkeypatch.setattr(batch, "begin_copies", lambda *_, **__: None)
        monkeypatch.setattr(engine.programs, "call", world.call)
        monkeypatch.setattr(engine.programs, "status", lambda _: "compiled")
        monkeypatch.setattr(steps, "_news", world)
        prompt, params = tuple(range(300, 300 + PROMPT)), dj.SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        sent, last, firsts, waits = dict[int, float](), dict[int, float](), list[float](), list[float]()
        left, busy, told, failed = users * requests, world.now, list[tuple[int, bool]](), list[Exception]()

        def tell(ticket: int, ended: bool) -> None:
            firsts.append(world.now - sent[ticket]) if ticket not in last else waits.append(world.now - last[ticket])
            last[ticket] = world.now
            if ended:
                ask()

        def in_turn(milliseconds: float, do: Callable[[], None]) -> None:
            """By the event loop."""
            nonlocal busy
            busy = max(busy, world.now) + slow * milliseconds * MS
            world.at(busy, do)

        def ring() -> None:
            for one in told:
                in_turn(PIECE_MS, lambda one=one: world.at(world.now + NETWORK_MS * MS, lambda: tell(*one)))
            told.clear()

        def sink(ticket: int, update: Any) -> Callable[[], None] | None:
            if isinstance(update, Exception):
                failed.append(update)
                return None
            ended = update.finish_reason is not None
            if alone:
                tell(ticket, ended)
                return None
            world.host(TEXT_MS)
            told.append((ticket, ended))
            return ring

        def submit(asked: float) -> None:
            (ticket,) = steps.tickets(1)
            sent[ticket] = asked
            steps.submit_all({ticket: Request(0, prompt, params)}, sink, draft=True, cycles=4)

        def ask() -> None:
            nonlocal left
            if left == 0:
                return
            left, asked = left - 1, world.now
            if alone:
                submit(asked)
            else:
                arrives = lambda: in_turn(REQUEST_MS, lambda: submit(asked))  # noqa: E731
                world.at(world.now + NETWORK_MS * MS, arrives)

        began = world.now
        for _ in range(users):
            ask()
        while steps.step() or world.events:
            if failed:
                raise failed[0]
            if not steps.step() and world.events:
                world.until(world.events[0][0])
        assert not failed
        monkeypatch.setattr(InFlight, "add", add)
        seconds, waits = world.now - began, sorted(waits)
        return Seen(
            users * requests * TOKENS / seconds, statistics.median(firsts), statistics.median(waits),
            waits[int(0.99 * len(waits))], world.idle / seconds,
        )  # fmt: skip

    return run


def test_many_users_of_a_server_get_what_the_engine_gives(serve):
    """Long cycles stand behind first tokens: the device does not wait for the host, which tells 64 users what they gained."""
    alone, seen = serve(64, alone=True), serve(64)
    assert seen.idle < 0.03
    assert seen.tokens_per_s > 0.95 * alone.tokens_per_s
    assert seen.first < alone.first + 18 * MS
    assert seen.p99 < 2 * seen.median


@pytest.mark.parametrize(("slow", "idle"), [(0.55, 0.02), (1.0, 0.04)])
def test_few_users_get_even_pieces(serve, slow, idle):
    """Calls have as many cycles as keep the host in time, and prompts do not stretch them by much."""
    alone, seen = serve(8, slow=slow, alone=True, requests=20), serve(8, slow=slow, requests=20)
    assert seen.idle < idle
    assert seen.tokens_per_s > 0.93 * alone.tokens_per_s
    assert seen.p99 < 1.6 * seen.median
