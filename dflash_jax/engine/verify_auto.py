"""What cycles verify where slots may share the target's rows: as many tokens of each slot, or so many rows for the best proposals
of all of them, whichever is expected to gain most for each millisecond that it is expected to take.

Which proposals share rows is settled on the device, cycle by cycle, from that cycle's own numbers (`decoding.verify_budget`). Here
it is chosen whether they do, and how many rows there are: so many for each slot on average. That rests on how often each request's
proposals stood (`engine.request_acceptance`). Sharing gains where requests are unlike, and where many slots stand empty. Of equal
requests it gains nothing, and costs what `cycle_costs.SHARED_LAYER_S` says.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from dflash_jax.compile.programs import Status
from dflash_jax.decoding.state import Emitted
from dflash_jax.engine.acceptance_estimate import AcceptanceEstimate
from dflash_jax.engine.cycle_costs import CycleCost
from dflash_jax.engine.request_acceptance import RequestAcceptance
from dflash_jax.engine.verify_policy import Decision, Kind, Length, Served, VerifyPolicy

# Another length must promise this much more before it takes over, and one that can never promise it over a longer one is left out.
MARGIN = 1.03
# Cycles between two looks while little is known: soon enough to stop drafting where it gains nothing.
FIRST_CYCLES = 8
# A program for a better length is compiled once its lack has cost this many seconds: about what compiling it takes.
WORTH_COMPILING_S = 5.0
# What sharing gained weighs against what was expected of it as much as if so many tokens had come as expected, and half of it is
# forgotten after so many cycles.
TRUST_TOKENS, TRUST_HALF_LIFE = 256.0, 1024.0
# The law on the device may tell a request's good cycles from its bad ones, which levels of requests know nothing of.
MOST_TRUST = 1.5


class Choice(NamedTuple):
    """What the next cycles verify.

    Attributes:
      wanted: what would be best if every program were there.
      loss_s: seconds that its lack costs in each cycle.
    """

    length: Length
    wanted: Length
    loss_s: float = 0.0


class AutoPolicy(VerifyPolicy):
    """A `VerifyPolicy` that chooses what is expected to gain most, and knows requests one by one.

    Args:
      cost: milliseconds of a cycle.
      option: "auto" chooses among common lengths and shared rows, and has rows shared only where all requests are greedy and that
        promises `MARGIN` more than any common length; "per_request" always has them shared where neither the whole block nor plain
        decoding is better.
      sharing: whether "auto" may have rows shared.
      signs: of each proposal (`DFlashConfig.signs`).
    """

    def __init__(
        self,
        offered: int,
        cost: CycleCost,
        option: Literal["auto", "per_request"] = "auto",
        *,
        sharing: bool = True,
        signs: int = 1,
    ):
        super().__init__(offered, option)
        self.sharing = sharing or option == "per_request"
        self.cost, self.forced, self.whole = cost, option == "per_request", Length(offered)
        self.estimate = self.learnt = AcceptanceEstimate(offered - 1, signs)
        self.requests: dict[Kind, RequestAcceptance] = {
            "greedy": RequestAcceptance(offered - 1),
            "sampled": RequestAcceptance(offered - 1),
        }
        self.running: Mapping[int, Kind] = {}
        # What shared rows were last reckoned to gain in a cycle, of how many requests; and what came of it.
        self._promised: tuple[int, dict[Length, float]] = 0, {}
        self.gained = self.expected = 0.0
        self.missed: dict[object, float] = {}
        self._shares: dict[int, bool] = {}
        self._shared = self._means()

    def candidates(self, slots: int, context: float, kind: Kind = "greedy") -> tuple[Length, ...]:
        """See `VerifyPolicy.candidates`: lengths that save time, and the whole block."""
        return tuple(sorted(self.costs(slots, context, [kind])))

    def shares(self, slots: int) -> bool:
        """See `VerifyPolicy.shares`: whether shared rows save time at all."""
        if not self.sharing:
            return False
        if slots not in self._shares:
            least = min((self.cycle_ms(slots, length, 0.0) for length in self._shared), default=math.inf)
            self._shares[slots] = MARGIN * least < self.cycle_ms(slots, self.whole, 0.0)
        return self._shares[slots]

    def _means(self) -> Sequence[Length]:
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

    def costs(self, slots: int, context: float, kinds: Iterable[Kind] = ("greedy",)) -> dict[Length, float]:
        """Milliseconds of a cycle of each candidate: all of the block, half of it, a quarter and one token, of each slot, and means
        over slots."""
        shared = self._shared if self.shares(slots) else []
        if not self.forced and "sampled" in kinds:
            # All logits of all slots are needed: a table that takes longer to make from shared rows.
            shared = []
        if self.forced and shared:
            return self._saving(slots, context, [*shared, Length(1)])
        common = sorted({self.offered // 2, self.offered // 4, 1} - {0, self.offered}, reverse=True)
        return self._saving(slots, context, map(Length, common)) | self._saving(slots, context, shared)

    def _saving(self, slots: int, context: float, shorter: Iterable[Length]) -> dict[Length, float]:
        """Milliseconds of a cycle of a whole block, and of those of `shorter` lengths, the longest first, that save time."""
        kept = {self.whole: self.cycle_ms(slots, self.whole, context)}
        least = kept[self.whole]
        for length in shorter:
            spent = self.cycle_ms(slots, length, context)
            if spent * MARGIN < least:
                kept[length] = least = spent
        return kept

    def cycle_ms(self, slots: int, length: Length, context: float) -> float:
        """Milliseconds of a cycle that verifies so much. Where rows are shared all proposals are made, whatever is verified."""
        return self.cost.ms(slots, length.tokens, context, proposed=self.offered if length.shared else None)

    def rates(self, kinds: Mapping[Kind, int], costs: Mapping[Length, float], slots: int) -> dict[Length, float]:
        """Expected tokens a millisecond of each candidate, for so many running requests of each kind in so many slots."""
        each: list[np.ndarray] = []
        for kind, number in kinds.items():
            tickets = [ticket for ticket, its in self.running.items() if its == kind]
            # Nobody has the ticket -1: of such a request nothing is known.
            each.append(self.requests[kind].survivals((tickets + number * [-1])[:number]))
        survivals = np.concatenate(each)
        count, common = len(survivals), np.concatenate([[0.0], np.cumsum(survivals.sum(axis=0))])
        best = best_gains(survivals) if any(length.shared for length in costs) else np.zeros(1)

        def gained(length: Length) -> float:
            if not length.shared:
                return float(common[length.tokens - 1])
            return float(best[min(max(slots * length.tokens - count, 0), len(best) - 1)])

        gains, trust = {length: gained(length) for length in costs}, self.trust
        self._promised = count, {length: gain for length, gain in gains.items() if length.shared}
        return {
            length: (count + gains[length] * (trust if length.shared else 1.0)) / spent
            for length, spent in costs.items()
        }

    @property
    def trust(self) -> float:
        """What shared rows gain of what levels of requests have one expect."""
        most = MOST_TRUST if self.forced else 1.0
        return min(most, (self.gained + TRUST_TOKENS) / (self.expected + TRUST_TOKENS))

    def best(self, rates: Mapping[Length, float]) -> Length:
        """The length of the highest rate, or the present one where that is hardly lower. Rows are shared from `MARGIN` more than
        any common length on, and until it is no more."""
        common = {length: rate for length, rate in rates.items() if not length.shared}
        shared = {length: rate for length, rate in rates.items() if length.shared}
        if not self.forced and shared and common:
            margin = 1.0 if self.current.shared else MARGIN
            rates = shared if max(shared.values()) > margin * max(common.values()) else common
        top = max(rates, key=lambda length: (rates[length], length))
        return self.current if rates[top] < MARGIN * rates.get(self.current, 0.0) else top

    def choose(
        self, kinds: Mapping[Kind, int], slots: int, context: float, status: Callable[[Length], Status]
    ) -> Choice:
        """The length for the next cycles.

        Args:
          kinds: running requests of each kind, at least one; the other arguments are those of `next`.
          status: asked of others only where the best one's program is not compiled. Where none is compiled or about to be, the best
            length is chosen.
        """
        costs = self.costs(slots, context, kinds)
        rates = self.rates(kinds, costs, slots)
        wanted = self.best(rates)
        found = {wanted: status(wanted)}
        if found[wanted] == "compiled":
            self.current = wanted
            return Choice(wanted, wanted)
        found |= {length: status(length) for length in rates if length != wanted}
        able = {length: rate for length, rate in rates.items() if found[length] == "compiled"}
        able = able or {length: rate for length, rate in rates.items() if found[length] == "pending"}
        self.current = self.best(able) if able else wanted
        loss = costs[self.current] * max(0.0, 1 - rates[self.current] / rates[wanted])
        return Choice(self.current, wanted, loss / 1e3)

    def first(self, kind: Kind, slots: int, context: float) -> Length:
        """See `VerifyPolicy.first`."""
        self.running = {}
        return self.best(self.rates({kind: 1}, self.costs(slots, context, [kind]), slots))

    def next(
        self, running: Mapping[int, Kind], slots: int, context: float, cycles: int, status: Callable[[Length], Status]
    ) -> Decision:
        """See `VerifyPolicy.next`."""
        self.running, kinds = running, Counter(running.values())
        choice = self.choose(kinds, slots, context, status)
        cycles = self.patience(kinds, cycles)
        worth = self.worth_compiling((slots, choice.wanted), choice.loss_s * cycles)
        return Decision(choice.length, cycles, choice.wanted if worth else None)

    def patience(self, kinds: Mapping[Kind, int], cycles: int) -> int:
        """Cycles until the next look, of `cycles` at most: few where little is known about the running requests, or most of several
        are new."""
        known = sum(acceptance.known(self.running) for acceptance in self.requests.values())
        thin = any(self.requests[kind].evidence < FIRST_CYCLES for kind in kinds)
        thin |= 2 * known < len(self.running) > 1
        return min(cycles, FIRST_CYCLES) if thin and self.current.tokens > 1 else cycles

    def with_slots(self, slots: int, context: float) -> Length:
        """See `VerifyPolicy.with_slots`: the present length, or the next longer one that may be chosen there."""
        found = self.candidates(slots, context)
        longer = (length for length in found if not length.shared and length.tokens >= self.current.tokens)
        return self.current if self.current in found else next(longer, self.whole)

    def fewer_slots_pay(self, slots: int, fewer: int, context: float, cycles: int) -> bool:
        """See `VerifyPolicy.fewer_slots_pay`."""
        then = self.with_slots(fewer, context)
        saved = self.cycle_ms(slots, self.current, context) - self.cycle_ms(fewer, then, context)
        return self.worth_compiling((slots, fewer, self.current), saved / 1e3 * cycles)

    def worth_compiling(self, key: object, seconds: float) -> bool:
        """Adds time lost for want of the program `key`, and tells once when that has become too much."""
        before = self.missed.get(key, 0.0)
        self.missed[key] = before + seconds
        return before < WORTH_COMPILING_S <= self.missed[key]

    def look(self, verified: Length, served: Sequence[Served], emitted: Emitted) -> None:
        """See `VerifyPolicy.look`."""
        super().look(verified, served, emitted)
        counts, accepted = np.asarray(emitted.counts), np.asarray(emitted.accepted)
        ran, slots = counts.any(axis=1), [one.slot for one in served]
        cycles, live, stood = int(np.count_nonzero(ran)), counts[ran][:, slots] > 0, accepted[ran][:, slots]
        lengths, chances = np.full(stood.shape, verified.tokens), None
        if emitted.odds is not None:
            lengths = np.asarray(emitted.lengths)[ran][:, slots]
            odds = np.asarray(emitted.odds)[ran][:, slots]
            self._trusting(verified, live, stood)
            chances = self.learnt.chances(odds)
            self.learnt.observe(odds[live], stood[live], lengths[live], cycles=cycles)
        there = live.any(axis=0).tolist()
        for kind, acceptance in self.requests.items():
            acceptance.fade(cycles)
            mine = [i for i, one in enumerate(served) if one.kind == kind and there[i]]
            if mine and verified.tokens > 1:
                law = None if chances is None else chances[:, mine]
                told = judged(self.offered - 1, live[:, mine], stood[:, mine], lengths[:, mine], law)
                acceptance.observe([served[i].ticket for i in mine], *told)

    def _trusting(self, verified: Length, live: Bool[np.ndarray, "n r"], stood: Int[np.ndarray, "n r"]) -> None:
        """Compares what shared rows gained in the cycles in which all were there with what was expected of them."""
        count, promised = self._promised
        whole = live.all(axis=1)
        if live.shape[1] != count or verified not in promised or not whole.any():
            return
        keep = 0.5 ** (len(live) / TRUST_HALF_LIFE)
        self.gained = keep * self.gained + float(stood[whole].sum())
        self.expected = keep * self.expected + promised[verified] * int(np.count_nonzero(whole))


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
