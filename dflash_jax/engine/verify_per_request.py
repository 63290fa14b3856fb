"""What cycles verify where slots may share the target's rows: as many tokens of each slot, or so many rows for the best proposals
of all of them, whichever is expected to gain most for each millisecond that it is expected to take.

Which proposals share rows is settled on the device, cycle by cycle, from that cycle's own numbers (`decoding.verify_budget`). Here
it is chosen whether they do, and how many rows there are: so many for each slot on average. That rests on how often each request's
proposals stood (`engine.request_acceptance`). Sharing gains where requests are unlike, and where many slots stand empty. Of equal
requests it gains nothing, and costs what `cycle_costs.SHARED_LAYER_S` says.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from dflash_jax.compile.programs import Status
from dflash_jax.decoding.state import Emitted
from dflash_jax.engine.acceptance_estimate import AcceptanceEstimate
from dflash_jax.engine.cycle_costs import CycleCost
from dflash_jax.engine.request_acceptance import RequestAcceptance
from dflash_jax.engine.verify_policy import FIRST_CYCLES, MARGIN, Decision, Kind, Length, Served, VerifyPolicy

# What sharing gained weighs against what was expected of it as much as if so many tokens had come as expected, and half of it is
# forgotten after so many cycles.
TRUST_TOKENS, TRUST_HALF_LIFE = 256.0, 1024.0
# The law on the device may tell a request's good cycles from its bad ones, which levels of requests know nothing of.
MOST_TRUST = 1.5


class PerRequestPolicy(VerifyPolicy):
    """A `VerifyPolicy` that knows requests one by one.

    Args:
      option: "auto" chooses among common lengths and shared rows, and has rows shared only where that promises `MARGIN` more than
        any common length; "per_request" always has them shared where neither the whole block nor plain decoding is better.
    """

    cost: CycleCost

    def __init__(self, offered: int, cost: CycleCost, option: Literal["auto", "per_request"] = "auto"):
        super().__init__(offered, cost, option)
        self.estimate = self.learnt = AcceptanceEstimate(offered - 1)
        self.requests: dict[Kind, RequestAcceptance] = {
            "greedy": RequestAcceptance(offered - 1),
            "sampled": RequestAcceptance(offered - 1),
        }
        self.running: Mapping[int, Kind] = {}
        self.gained = self.expected = 0.0
        self._shares: dict[int, bool] = {}

    @property
    def forced(self) -> bool:
        """Whether rows are shared wherever they can be."""
        return self.option == "per_request"

    def shares(self, slots: int) -> bool:
        """See `VerifyPolicy.shares`: whether shared rows save time at all."""
        if slots not in self._shares:
            least = min((self.cycle_ms(slots, length, 0.0) for length in self._shared()), default=math.inf)
            self._shares[slots] = MARGIN * least < self.cycle_ms(slots, self.whole, 0.0)
        return self._shares[slots]

    def _shared(self) -> Sequence[Length]:
        """Halves, and what lies between each two of them: costs climb in steps of tiles, and one of these is near to each. Where
        nobody insists, three programs beside those of common lengths have to do."""
        means, length = set[int](), self.offered
        while length > 1:
            means |= {length // 2, 3 * length // 4}
            length //= 2
        means -= {0, 1, self.offered}
        if not self.forced:
            means &= {self.offered // 2, 3 * self.offered // 8, self.offered // 4}
        return [Length(mean, shared=True) for mean in sorted(means, reverse=True)]

    def costs(self, slots: int, context: float) -> dict[Length, float]:
        """See `VerifyPolicy.costs`."""
        if not self.shares(slots):
            return super().costs(slots, context)
        if self.forced:
            return self.saving(slots, context, [*self._shared(), Length(1)])
        return super().costs(slots, context) | self.saving(slots, context, self._shared())

    def rates(self, kinds: Mapping[Kind, int], costs: Mapping[Length, float], slots: int) -> dict[Length, float]:
        """See `VerifyPolicy.rates`."""
        each: list[np.ndarray] = []
        for kind, number in kinds.items():
            tickets = [ticket for ticket, its in self.running.items() if its == kind]
            # Nobody has the ticket -1: of such a request nothing is known.
            each.append(self.requests[kind].survivals((tickets + number * [-1])[:number]))
        survivals = np.concatenate(each)
        count, common = len(survivals), np.concatenate([[0.0], np.cumsum(survivals.sum(axis=0))])
        best = best_gains(survivals)

        def gained(length: Length) -> float:
            if not length.shared:
                return float(common[length.tokens - 1])
            return self.trust * float(best[np.clip(slots * length.tokens - count, 0, len(best) - 1)])

        return {length: (count + gained(length)) / spent for length, spent in costs.items()}

    def best(self, rates: Mapping[Length, float]) -> Length:
        """See `VerifyPolicy.best`. Rows are shared from `MARGIN` more on, and until it is no more."""
        common = {length: rate for length, rate in rates.items() if not length.shared}
        shared = {length: rate for length, rate in rates.items() if length.shared}
        if self.forced or not shared or not common:
            return super().best(rates)
        margin = 1.0 if self.current.shared else MARGIN
        return super().best(shared if max(shared.values()) > margin * max(common.values()) else common)

    @property
    def trust(self) -> float:
        """What shared rows gain of what levels of requests have one expect."""
        most = MOST_TRUST if self.forced else 1.0
        return min(most, (self.gained + TRUST_TOKENS) / (self.expected + TRUST_TOKENS))

    def next(
        self, running: Mapping[int, Kind], slots: int, context: float, cycles: int, status: Callable[[Length], Status]
    ) -> Decision:
        """See `VerifyPolicy.next`."""
        self.running = running
        return super().next(running, slots, context, cycles, status)

    def patience(self, kinds: Mapping[Kind, int], cycles: int) -> int:
        """See `VerifyPolicy.patience`: few where most of several requests are new."""
        known = sum(acceptance.known(self.running) for acceptance in self.requests.values())
        thin = any(self.requests[kind].evidence < FIRST_CYCLES for kind in kinds)
        thin |= 2 * known < len(self.running) > 1
        return min(cycles, FIRST_CYCLES) if thin and self.current.tokens > 1 else cycles

    def look(self, verified: Length, served: Sequence[Served], emitted: Emitted) -> None:
        """See `VerifyPolicy.look`."""
        counts, accepted = np.asarray(emitted.counts), np.asarray(emitted.accepted)
        ran = counts.any(axis=1)
        cycles, slots = int(np.count_nonzero(ran)), [one.slot for one in served]
        self.cycles[verified] += cycles
        live, stood = counts[ran][:, slots] > 0, accepted[ran][:, slots]
        lengths, chances = np.full(stood.shape, verified.tokens), None
        if emitted.odds is not None:
            lengths = np.asarray(emitted.lengths)[ran][:, slots]
            odds = np.asarray(emitted.odds)[ran][:, slots]
            self._trusting(verified, served, counts.shape[1], live, stood)
            chances = self.learnt.chances(odds)
            self.learnt.observe(odds[live], stood[live], lengths[live], cycles=cycles)
        for kind, acceptance in self.requests.items():
            acceptance.fade(cycles)
            mine = [i for i, one in enumerate(served) if one.kind == kind and live[:, i].any()]
            if mine and verified.tokens > 1:
                law = None if chances is None else chances[:, mine]
                told = judged(self.offered - 1, live[:, mine], stood[:, mine], lengths[:, mine], law)
                acceptance.observe([served[i].ticket for i in mine], *told)

    def _trusting(
        self, verified: Length, served: Sequence[Served], slots: int, live: Bool[np.ndarray, "n r"],
        stood: Int[np.ndarray, "n r"],
    ) -> None:  # fmt: skip
        """Compares what shared rows gained in the cycles in which all were there with what was expected of them."""
        whole = live.all(axis=1)
        if not whole.any():
            return
        survivals = np.concatenate([
            acceptance.survivals([one.ticket for one in served if one.kind == kind])
            for kind, acceptance in self.requests.items()
        ])  # fmt: skip
        best, keep = best_gains(survivals), 0.5 ** (len(live) / TRUST_HALF_LIFE)
        expected = best[np.clip(slots * verified.tokens - len(served), 0, len(best) - 1)]
        self.gained = keep * self.gained + float(stood[whole].sum())
        self.expected = keep * self.expected + float(expected) * int(np.count_nonzero(whole))


def judged(
    drafts: int,
    live: Bool[np.ndarray, "n r"],
    stood: Int[np.ndarray, "n r"],
    lengths: Int[np.ndarray, "n r"],
    chances: Float[np.ndarray, "n r g"] | None = None,
) -> tuple[Float[np.ndarray, "r g"], Float[np.ndarray, "r g"]]:
    """How often each place of a request was judged in these cycles, and how often its proposal stood.

    Args:
      lengths: tokens that were verified, the pending one included.
      chances: of shared rows, that each proposal stands. Which were not verified is no accident there, so they count as far as they
        would have been come to, and as having stood by these.
    """
    places, last = np.arange(drafts), lengths[:, :, None] - 1
    held = places < stood[:, :, None]
    seen = held | ((places == stood[:, :, None]) & (places < last))
    tried, good = seen.astype(float), held.astype(float)
    if chances is not None:
        cut = (stood[:, :, None] == last) & (places >= last)
        after = np.cumprod(np.where(places < last, 1.0, chances), axis=2)
        before = np.concatenate([np.ones_like(after[:, :, :1]), after[:, :, :-1]], axis=2)
        tried, good = tried + cut * before, good + cut * after
    each = live[:, :, None]
    return np.sum(tried * each, axis=0), np.sum(good * each, axis=0)


def best_gains(survivals: Float[np.ndarray, "r g"]) -> Float[np.ndarray, "n"]:
    """Proposals that stand on average where the best 0, 1, 2, ... of all are verified."""
    return np.concatenate([[0.0], np.cumsum(-np.sort(-survivals.reshape(-1)))])
