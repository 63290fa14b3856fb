"""How many rows the target verifies in the next cycles where requests share them: what the best proposals are expected to gain for
each millisecond that so many rows are expected to take.

Which proposals those are is settled on the device, cycle by cycle (`decoding.verify_budget`). Here only their number is chosen,
from what the last cycles' proposals were worth, as a mean length: so many rows for each slot. Only cycles in which slots share rows
say what a single proposal is worth: the whole block of all slots is verified as ever, and where nothing in between can pay, lengths
are chosen as for `verify_length="auto"`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from dflash_jax.compile.programs import Status
from dflash_jax.decoding.state import Emitted
from dflash_jax.engine.acceptance_estimate import AcceptanceEstimate
from dflash_jax.engine.cycle_costs import CycleCost
from dflash_jax.engine.verify_policy import FIRST_CYCLES, MARGIN, Choice, Decision, Kind, VerifyPolicy

# Cycles of a request that are looked back at, and cycles after which half of what they say of a proposal is forgotten.
REMEMBERED = 8
FORGETTING = 512.0
# Cycles of whole blocks after which a request is looked at again.
LOOK_AGAIN = 128


class Recent(NamedTuple):
    """What a request's last proposals were.

    Attributes:
      odds: `[n, g]`, of the last cycles; n at most `REMEMBERED`.
      at: cycles that the policy had seen then.
    """

    odds: np.ndarray
    at: int


class PerRequestPolicy(VerifyPolicy):
    """A `VerifyPolicy` whose lengths are means over slots.

    Requests of which nothing is known are reckoned to have every proposal stand, and what is known of others comes to be worth as
    little: a drafter that was given up on is tried again after a while.
    """

    cost: CycleCost

    def __init__(self, offered: int, cost: CycleCost):
        super().__init__(offered, cost, "per_request")
        self.estimate = self.learnt = AcceptanceEstimate(offered - 1)
        self.recent: dict[int, Recent] = {}
        self.running: Sequence[int] = ()
        self.now = 0
        self.looking = self.sharing = False
        self._shares: dict[int, bool] = {}

    def shares(self, slots: int) -> bool:
        """See `VerifyPolicy.shares`: whether some length between the pending token and the whole block saves time."""
        if slots not in self._shares:
            costs = {length: self._shared_ms(slots, length, 0.0) for length in self._means() if length > 1}
            self._shares[slots] = MARGIN * min(costs.values(), default=math.inf) < self.cost.ms(
                slots, self.offered, 0.0
            )
        return self._shares[slots]

    def shorter(self, slots: int) -> Sequence[int]:
        """See `VerifyPolicy.shorter`."""
        return self._means() if self.shares(slots) else super().shorter(slots)

    def _means(self) -> Sequence[int]:
        """Halves, and what lies between each two of them: costs climb in steps of tiles, and one of these is near to each."""
        lengths, length = {1}, self.offered
        while length > 1:
            lengths |= {length // 2, 3 * length // 4}
            length //= 2
        return sorted(lengths - {0, self.offered}, reverse=True)

    def cycle_ms(self, slots: int, length: int, context: float) -> float:
        """See `VerifyPolicy.cycle_ms`."""
        shared = 1 < length < self.offered and self.shares(slots)
        return self._shared_ms(slots, length, context) if shared else super().cycle_ms(slots, length, context)

    def _shared_ms(self, slots: int, length: int, context: float) -> float:
        """Whatever is verified, all proposals are made."""
        return self.cost.ms(slots, length, context, proposed=self.offered)

    def rates(self, kinds: Mapping[Kind, int], costs: Mapping[int, float], slots: int) -> dict[int, float]:
        """See `VerifyPolicy.rates`."""
        if not self.shares(slots):
            return super().rates(kinds, costs, slots)
        count = sum(kinds.values())
        gains = best_gains(self._worths(count))
        most = len(gains) - 1

        def gained(length: int) -> float:
            return 0.0 if length == 1 else float(gains[min(max(slots * length - count, 0), most)])

        return {length: (count + gained(length)) / spent for length, spent in costs.items()}

    def choose(self, kinds: Mapping[Kind, int], slots: int, context: float, status: Callable[[int], Status]) -> Choice:
        """See `VerifyPolicy.choose`. Where a request is to be looked at that the best length says nothing of, as many rows are
        shared as may be; whichever are, all proposals are seen."""
        chosen, self.looking = super().choose(kinds, slots, context, status), False
        self.sharing = self.shares(slots)
        costs = self.costs(slots, context) if self.sharing else {}
        shared = [length for length in costs if 1 < length < self.offered]
        if not shared or chosen.length in shared or not self._unseen(chosen.length):
            return chosen
        look = max(shared)
        self.looking = status(look) == "compiled"
        if self.looking:
            self.current = look
            return Choice(look, look)
        at_most = costs[self.offered] - min(costs[length] for length in shared)
        return chosen if chosen.wanted in shared else Choice(chosen.length, look, at_most / 1e3)

    def _unseen(self, length: int) -> bool:
        """Whether nothing is known of a running request, or nothing of late where so many tokens are whole blocks, which would not
        tell."""
        if any(ticket not in self.recent for ticket in self.running):
            return True
        return length == self.offered and any(self.now - recent.at >= LOOK_AGAIN for recent in self.recent.values())

    def next(
        self, kinds: Mapping[Kind, int], slots: int, context: float, cycles: int, status: Callable[[int], Status],
        running: Sequence[int] = (),
    ) -> Decision:  # fmt: skip
        """See `VerifyPolicy.next`."""
        self.running = running
        self.recent = {ticket: self.recent[ticket] for ticket in running if ticket in self.recent}
        return super().next(kinds, slots, context, cycles, status)

    def patience(self, kinds: Mapping[Kind, int], cycles: int) -> int:
        """See `VerifyPolicy.patience`: few where a request has not been seen, or not for long."""
        if not self.sharing or not (self.recent or self.looking):
            return super().patience(kinds, cycles)
        if not 1 < self.current < self.offered:
            return cycles
        known = sum(self.now - recent.at < FORGETTING / 8 for recent in self.recent.values())
        return min(cycles, FIRST_CYCLES) if self.looking or known < sum(kinds.values()) else cycles

    def observe(self, verified: int, accepted: Mapping[Kind, np.ndarray], cycles: int) -> None:
        """See `VerifyPolicy.observe`; of proposals `observe_drafts` is told."""
        super().observe(verified, accepted, cycles)
        self.now += cycles

    def observe_drafts(self, tickets: Mapping[int, int], emitted: Emitted) -> None:
        """See `VerifyPolicy.observe_drafts`."""
        counts, odds = np.asarray(emitted.counts), np.asarray(emitted.odds)
        accepted, lengths, columns = np.asarray(emitted.accepted), np.asarray(emitted.lengths), list(tickets)
        ran = counts[:, columns] > 0
        told = odds[:, columns][ran], accepted[:, columns][ran], lengths[:, columns][ran]
        self.learnt.observe(*told, cycles=int(np.count_nonzero(counts.any(axis=1))))
        for column, ticket in tickets.items():
            own = odds[counts[:, column] > 0, column][-REMEMBERED:]
            if len(own):
                self.recent[ticket] = Recent(own, self.now)

    def _worths(self, count: int) -> Float[np.ndarray, "cycles requests g"]:
        """The chance of each proposal to stand with all before it, in as many cycles as are looked back at."""
        worths = np.ones((REMEMBERED, count, self.offered - 1))
        for row, ticket in enumerate(self.running[:count]):
            if (recent := self.recent.get(ticket)) is not None:
                chances = self.learnt.chances(recent.odds[np.arange(REMEMBERED) % len(recent.odds)])
                known = 0.5 ** ((self.now - recent.at) / FORGETTING)
                worths[:, row] = np.cumprod(1 - known * (1 - chances), axis=-1)
        return worths


def best_gains(worths: Float[np.ndarray, "cycles requests g"]) -> Float[np.ndarray, "n"]:
    """Proposals that stand on average where the best 0, 1, 2, ... of each cycle are verified."""
    flat = -np.sort(-worths.reshape(len(worths), -1), axis=1)
    return np.concatenate([[0.0], np.cumsum(flat, axis=1).mean(axis=0)])
