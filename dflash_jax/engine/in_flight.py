"""Calls in flight: prompts and cycles that were started on the device and whose results the host has not read.

`InFlight` also times them, and so says how much is started before the next results are read.
"""

import math
import sys
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax

from dflash_jax.decoding.state import Emitted, Setup
from dflash_jax.engine.resources import CYCLES_PER_CHUNK, LEAST_TOKENS, MAX_CYCLES, MOST_IN_FLIGHT, Resources
from dflash_jax.engine.slots import Job

# Cycles of a call that stands before a prompt, or before one that may come, at first. Prompts have the time beside so many at
# least.
FEW_CYCLES = 2
# One cycle is a call where it takes the device so many times as long as the call the host. Elsewhere the cycles of a call take
# about as long as the host for a prompt, its first token, the next cycles and what these gave: so many calls for cycles.
LONG_CYCLE, HOST_CALLS = 2.0, 3.5
# Seconds that results take to the host at most which are there when they are asked for and were copied ahead.
READY_S = 1e-3
# Of a call on the device, the part behind which the next one is made at the latest: how long it takes is only guessed.
LATEST = 0.7
# Where requests come while others run: prompts and the cycles behind them together, of the time that those cycles take alone, about
# at most.
STRETCH = 1.35


class Row(NamedTuple):
    """Place of a request's results among those of a call.

    Attributes:
      stay: the request's stay in a slot that they belong to.
      column: of the call's rows.
    """

    job: Job
    stay: int
    column: int

    @property
    def here(self) -> bool:
        """Whether somebody waits for them: the request has kept its slot since."""
        return self.job.stay == self.stay


@dataclass(frozen=True)
class PrefillResult:
    """First tokens of requests whose prompts are on their way to the pages.

    Attributes:
      logprobs: whether `emitted` holds log-probabilities.
      started: the clock then.
      tokens: of prompts, in this call and those that were started behind the call before; 0 where nobody counted them.
    """

    rows: list[Row]
    emitted: Emitted
    logprobs: bool
    started: float = field(default_factory=time.perf_counter)
    tokens: int = 0

    def gains(self) -> list[tuple[Job, int, int]]:
        """Requests that wait for it, with the tokens that each gains at least, and those that cycles may give it."""
        return [(row.job, 1, 0) for row in self.rows if row.here]


@dataclass(frozen=True)
class DecodeCall:
    """Cycles on the device.

    Attributes:
      emitted: what the cycles give out.
      cycles: how many of them at most.
      width: columns of the page table.
      started, compiled: the clock, and seconds spent compiling until then.
      returned: the clock when the call was on its way.
      tokens: of prompts that were started behind the call before.
    """

    rows: list[Row]
    emitted: Emitted
    setup: Setup
    cycles: int
    width: int
    started: float
    compiled: float
    returned: float = field(default_factory=time.perf_counter)
    tokens: int = 0

    def gains(self) -> list[tuple[Job, int, int]]:
        """See `PrefillResult.gains`."""
        return [(row.job, self.cycles, self.cycles * self.setup.width) for row in self.rows if row.here]


class InFlight:
    """Overlap scheduling: calls that were started before the results of those ahead of them were looked at.

    A call of some hundred arrays, the way back of its results and whoever reads them take the host about 3 ms, as long as a cycle.
    So a prompt or cycles are queued behind those whose results are awaited, wherever nothing but these results could change what
    they do. Requests that have ended meanwhile are done on the device and change nothing in it; where all have, cycles end at once.
    Their pages may be given to others before the device is done with them: who gets them writes to them later on the same device.
    While cycles are in flight, sequences stay in their slots and none is preempted.

    Attributes:
      online: whether requests come while others run; then little is queued before the next one.
      returns_early: whether calls have been seen to return while the device works.
      held: seconds that the host spent in `Scheduler._await_company` since results came last.
    """

    def __init__(self, core: Resources):
        self.programs = core.programs
        self.returns_early = False
        self.clear()

    def clear(self) -> None:
        """Nothing is in flight, and no call has been timed."""
        self.items: deque[PrefillResult | DecodeCall] = deque()
        self.online = False
        self.few = FEW_CYCLES
        self.held = 0.0
        self._read = 0.0, 0.0
        self._tokens = 0  # of prompts, behind the last of the items
        # Seconds of a cycle at least, of a token of a prompt, and of the host for a call.
        self._pace = self._prompt_pace = self._busy = 0.0
        self._rate = (
            0.0  # a cycle's time by that of its call, over the last calls: one alone may have waited for Python
        )

    @property
    def calls(self) -> list[DecodeCall]:
        return [item for item in self.items if isinstance(item, DecodeCall)]

    @property
    def long(self) -> bool:
        """Whether a cycle takes the device far longer than its call the host."""
        return self._rate > LONG_CYCLE

    @property
    def full(self) -> bool:
        """One call runs and one is behind it. First tokens have cycles behind them beside that where cycles are long: prompts take
        the device less time than the host to see to the results of many and to call again. So they have where a call takes the host
        longer than a cycle the device, which would stand still. Between the two nothing is gained: who follows a request that has
        ended would wait for more cycles."""
        fast = 1 <= self._rate <= LONG_CYCLE or not self._rate
        behind = bool(self.items) and isinstance(self.items[-1], PrefillResult) and not fast
        return len(self.items) >= MOST_IN_FLIGHT and not behind

    @property
    def _least(self) -> int:
        """Cycles of a call behind which the next one comes in time; not more than streams have."""
        if self.long or not self._rate:
            return 1
        return min(CYCLES_PER_CHUNK, math.ceil(HOST_CALLS / self._rate))

    def compute(self, tokens: int) -> None:
        """Counts tokens of prompts that were started."""
        self._tokens += tokens

    def add(self, item: PrefillResult | DecodeCall) -> None:
        item, self._tokens = replace(item, tokens=self._tokens), 0
        for job, due, coming in item.gains():
            job.due += due
            job.coming += coming
        self.items.append(item)

    def take(self) -> PrefillResult | DecodeCall:
        """Removes and returns the item that was started first."""
        item = self.items.popleft()
        for job, due, coming in item.gains():
            job.due -= due
            job.coming -= coming
        return item

    def seen(self) -> tuple[float, float]:
        """When results came before, and seconds spent compiling until then; those of now are remembered."""
        before, self._read = self._read, (time.perf_counter(), self.programs.compile_s)
        return before

    def seconds(self, call: DecodeCall, waited: float, *, watch: bool = True) -> float:
        """Time of a call whose results have just come, from the end of what was before it; compilation excluded.

        Args:
          waited: seconds that the host waited for them.
          watch: find out whether calls return early.
        """
        began, before = max((call.started, call.compiled), self.seen())
        now, compiled = self._read
        spent = now - began - (compiled - before)
        busy = call.returned - call.started - (compiled - call.compiled)
        self._pace, self._busy = max(0.0, spent - call.tokens * self._prompt_pace) / call.cycles, busy
        rate = min(self._pace / max(busy, 1e-6), 4 * LONG_CYCLE)
        self._rate = 0.75 * self._rate + 0.25 * rate if self._rate else rate
        waited, self.held = waited + self.held, 0.0
        if self.long and self.calls:  # the device has enough to do: the host keeps up
            self.few = max(self.few // 2, 1)
        elif waited < min(READY_S, 0.3 * spent):  # as long as copies take: the device may have waited for the host
            if call.cycles >= self.few:  # fewer, behind a prompt say, tell nothing of so many
                self.few = min(2 * self.few, MAX_CYCLES)
        elif spent - waited < 0.3 * self._pace * call.cycles:  # what half of them take is more than the host does
            self.few = max(self.few // 2, 1)
        self.few = max(self.few, self._least)
        if watch and jax.default_backend() == "gpu" and call.cycles >= min(self.few, FEW_CYCLES):
            # Not where a call keeps the host busy: results would come later, and no sooner. One cycle alone may take the device
            # less time than its call the host, which tells nothing.
            self.returns_early = busy < 0.75 * spent
        return spent

    def first_seconds(self, item: PrefillResult) -> None:
        """Remembers how long the prompts took whose first tokens have just come."""
        before, _ = self.seen()
        if item.tokens:
            self._prompt_pace = (self._read[0] - max(item.started, before)) / item.tokens

    @property
    def latest(self) -> float:
        """The clock at which the call behind the one that runs has to be made, for the device not to wait; 0 where nobody knows."""
        if len(self.items) != 1:
            return 0.0
        (item,) = self.items
        takes = item.tokens * self._prompt_pace + (item.cycles * self._pace if isinstance(item, DecodeCall) else 0.0)
        began = max(self._read[0], item.started)
        return 0.0 if not takes else began + min(LATEST * takes, takes - 2 * self._busy)

    def tokens_between(self, cycles: int) -> int:
        """Tokens of prompts between two calls for cycles, at most so many and `few`, that leave time for one cycle within the
        `STRETCH` of what the cycles take; those of one call at least, and any number where nobody knows.

        A single cycle leaves time as `FEW_CYCLES` do: slots that stand empty would wait for it too long.
        """
        if not (self._pace and self._prompt_pace):
            return sys.maxsize
        few = max(FEW_CYCLES, min(cycles, self.few))
        return max(LEAST_TOKENS, int((STRETCH * few - 1) * self._pace / self._prompt_pace))

    def cycles_behind(self, tokens: int, cycles: int) -> int:
        """Cycles behind so many tokens of prompts, at most so many and `few`: who decodes waits for both, `STRETCH` times as long
        as for the cycles without a prompt."""
        few = min(cycles, self.few)
        taken = tokens * self._prompt_pace / self._pace if self._pace else 0.0
        return max(1, min(few, int(STRETCH * few - taken)))
