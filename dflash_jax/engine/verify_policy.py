"""Verify-length policy: how many tokens to verify in the next cycles, by their expected gain for each expected millisecond.

The drafter fills the block it was trained on whatever is chosen here; the target verifies the first so many tokens of it. What is
emitted is the target's own choice either way, so the choice moves time and nothing else.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from dflash_jax.compile.programs import Status
from dflash_jax.decoding.state import Emitted
from dflash_jax.engine.acceptance_estimate import AcceptanceEstimate
from dflash_jax.engine.cycle_costs import CycleCost
from dflash_jax.engine.requests import Request

Kind = Literal["greedy", "sampled"]
# What `load` takes: a number, the whole block, what pays best for all requests, or what pays best for each.
VerifyLength = int | Literal["auto", "per_request"] | None

# Another length must promise this much more before it takes over, and one that can never promise it over a longer one is left out.
MARGIN = 1.03
# Cycles between two looks while little is known: soon enough to stop drafting where it gains nothing.
FIRST_CYCLES = 8
# A program for a better length is compiled once its lack has cost this many seconds: about what compiling it takes.
WORTH_COMPILING_S = 5.0
# Chance of the first proposal before anything is known: high, so that drafting is tried.
FIRST_GUESS = 0.8
# A guess weighs as much as this many observations.
GUESS_WEIGHT = 2.0
# Observations of one place count for at most this many, and half of that after so many cycles without one.
MOST_EVIDENCE = 256.0
HALF_LIFE = 96.0


class Acceptance:
    """Acceptance statistics of one kind of requests: for each place of a block, the chance that its proposal is accepted where
    those before it were. The same observations in the same order give the same expectations.

    Chances of places, not means of lengths: a cycle that verified four tokens says nothing about the tenth proposal, and all it
    can say about the first three. Evidence fades with every cycle: a drafter that was given up on is tried again after a while.

    Args:
      drafts: proposals of a block.
    """

    def __init__(self, drafts: int):
        self.tried, self.stood = np.zeros(drafts), np.zeros(drafts)

    def fade(self, cycles: int) -> None:
        """So many cycles have gone by, whoever ran in them."""
        keep = 0.5 ** (cycles / HALF_LIFE)
        self.tried *= keep
        self.stood *= keep

    def observe(self, accepted: Int[np.ndarray, "n"], verified: int) -> None:
        """Takes in cycles that verified `verified` tokens, the pending one included, of which `accepted` proposals stood."""
        places = np.arange(1, verified)
        tried = np.sum(accepted[:, None] >= places - 1, axis=0)
        stood = np.sum(accepted[:, None] >= places, axis=0)
        total = self.tried[: verified - 1] + tried
        scale = np.minimum(1.0, MOST_EVIDENCE / np.maximum(total, 1.0))
        self.tried[: verified - 1] = total * scale
        self.stood[: verified - 1] = (self.stood[: verified - 1] + stood) * scale

    @property
    def evidence(self) -> float:
        """Cycles that the chance of the first proposal rests on."""
        return float(self.tried[0]) if len(self.tried) else 0.0

    def expected(self) -> Float[np.ndarray, "offered"]:
        """Tokens that a cycle gains on average where it verifies 1, 2, ... tokens.

        The guess for a place of which little is known is the chance of the place before it.
        """
        chance, chances = FIRST_GUESS, []
        for tried, stood in zip(self.tried.tolist(), self.stood.tolist(), strict=True):
            chance = (stood + GUESS_WEIGHT * chance) / (tried + GUESS_WEIGHT)
            chances.append(chance)
        return 1.0 + np.concatenate([[0.0], np.cumsum(np.cumprod(chances))])


class Choice(NamedTuple):
    """What the next cycles verify.

    Attributes:
      wanted: what would be best if every program were there.
      loss_s: seconds that its lack costs in each cycle.
    """

    length: int
    wanted: int
    loss_s: float = 0.0


class Decision(NamedTuple):
    """What `VerifyPolicy.next` says of the next cycles.

    Attributes:
      length: tokens that they verify in each slot.
      cycles: how many of them there are to be.
      compile: a length whose program should be compiled in the background from now on; told once.
    """

    length: int
    cycles: int
    compile: int | None = None


def kind_of(request: Request) -> Kind:
    """Requests whose proposals stand about equally often are of one kind."""
    return "sampled" if request.params.temperature > 0 else "greedy"


class VerifyPolicy:
    """Verify-length policy. The scheduler asks `next` before cycles and tells `observe` what came of them.

    Args:
      offered: the drafter's proposals and the pending token.
      cost: milliseconds of a cycle, where a length is chosen.
      option: a length that is always chosen, up to `offered`; None is the whole block.

    Attributes:
      estimate: what is learnt of single proposals, where lengths follow each request; None elsewhere.
    """

    estimate: AcceptanceEstimate | None = None

    def __init__(self, offered: int, cost: CycleCost | None, option: VerifyLength = None):
        self.offered, self.cost, self.option = offered, cost, option
        self.acceptance: dict[Kind, Acceptance] = {
            "greedy": Acceptance(offered - 1),
            "sampled": Acceptance(offered - 1),
        }
        self.current = min(option, offered) if isinstance(option, int) else offered
        self.cycles = Counter[int]()
        self.missed: dict[object, float] = {}

    def candidates(self, slots: int, context: float) -> tuple[int, ...]:
        """Lengths worth having programs for, in ascending order: a quarter of the block, half of it and one token, where they save
        time, and all of it."""
        return tuple(self.costs(slots, context))

    def costs(self, slots: int, context: float) -> dict[int, float]:
        """Milliseconds of a cycle of each candidate; nothing is known of the only one where there is no choice."""
        if self.cost is None:
            return {self.current: math.nan}
        kept = {self.offered: self.cost.ms(slots, self.offered, context)}
        least = kept[self.offered]
        for length in self.shorter(slots):
            spent = self.cycle_ms(slots, length, context)
            if spent * MARGIN < least:
                kept[length] = least = spent
        return dict(sorted(kept.items()))

    def shares(self, slots: int) -> bool:
        """Whether lengths are means over so many slots."""
        del slots  # of every slot the same is verified
        return False

    def shorter(self, slots: int) -> Sequence[int]:
        """Lengths below the whole block that may be chosen, the longest first."""
        del slots
        return sorted({self.offered // 2, self.offered // 4, 1} - {0, self.offered}, reverse=True)

    def cycle_ms(self, slots: int, length: int, context: float) -> float:
        """Milliseconds of a cycle that verifies so many tokens."""
        assert self.cost is not None, "lengths are chosen by what they cost"
        return self.cost.ms(slots, length, context)

    def rates(self, kinds: Mapping[Kind, int], costs: Mapping[int, float], slots: int) -> dict[int, float]:
        """Expected tokens a millisecond of each candidate, for so many running requests of each kind in so many slots."""
        del slots  # each gets what it is given
        gains = sum((n * self.acceptance[kind].expected() for kind, n in kinds.items()), start=np.zeros(self.offered))
        return {length: float(gains[length - 1]) / spent for length, spent in costs.items()}

    def choose(self, kinds: Mapping[Kind, int], slots: int, context: float, status: Callable[[int], Status]) -> Choice:
        """The length for the next cycles.

        Args:
          kinds: running requests of each kind, at least one.
          slots: of the program, running or not.
          context: mean tokens of a running sequence.
          status: of a length's program, asked of others only where the best one's is not compiled. Where none is compiled or about
            to be, the best length is chosen.
        """
        if self.cost is None:
            return Choice(self.current, self.current)
        costs = self.costs(slots, context)
        rates = self.rates(kinds, costs, slots)

        def best(lengths: Sequence[int]) -> int:
            top = max(lengths, key=lambda n: (rates[n], n))
            held = self.current in lengths and rates[top] < MARGIN * rates[self.current]
            return self.current if held else top

        wanted = best(list(rates))
        found = {wanted: status(wanted)}
        if found[wanted] == "compiled":
            self.current = wanted
            return Choice(wanted, wanted)
        found |= {length: status(length) for length in rates if length != wanted}
        able = [length for length in rates if found[length] == "compiled"]
        able = able or [length for length in rates if found[length] == "pending"]
        self.current = best(able) if able else wanted
        loss = costs[self.current] * max(0.0, 1 - rates[self.current] / rates[wanted])
        return Choice(self.current, wanted, loss / 1e3)

    def next(
        self, kinds: Mapping[Kind, int], slots: int, context: float, cycles: int, status: Callable[[int], Status],
        running: Sequence[int] = (),
    ) -> Decision:  # fmt: skip
        """The next cycles, at most `cycles` of them. Arguments are those of `choose`; `running` are the requests' tickets."""
        if self.cost is None:
            return Decision(self.current, cycles)
        choice = self.choose(kinds, slots, context, status)
        cycles = self.patience(kinds, cycles)
        worth = self.worth_compiling((slots, choice.wanted), choice.loss_s * cycles)
        return Decision(choice.length, cycles, choice.wanted if worth else None)

    def fewer_slots_pay(self, slots: int, fewer: int, context: float, cycles: int) -> bool:
        """Tells once, of calls of `cycles` cycles, that programs for fewer slots are worth compiling."""
        if self.cost is None:
            return False
        saved = self.cycle_ms(slots, self.current, context) - self.cycle_ms(fewer, self.current, context)
        return self.worth_compiling((slots, fewer, self.current), saved / 1e3 * cycles)

    @property
    def learns(self) -> bool:
        """Whether `observe` is to be told what was accepted: nobody asks for it where lengths are not chosen."""
        return self.cost is not None

    def patience(self, kinds: Mapping[Kind, int], cycles: int) -> int:
        """Cycles until the next look, of `cycles` at most: few where little is known about the running requests."""
        thin = any(self.acceptance[kind].evidence < FIRST_CYCLES for kind in kinds)
        return min(cycles, FIRST_CYCLES) if thin and self.cost is not None and self.current > 1 else cycles

    def observe(self, verified: int, accepted: Mapping[Kind, np.ndarray], cycles: int) -> None:
        """Takes in what `cycles` cycles accepted, for each kind one number for each live slot and cycle."""
        self.cycles[verified] += cycles
        for kind, acceptance in self.acceptance.items():
            acceptance.fade(cycles)
            if verified > 1 and len(accepted.get(kind, ())):
                acceptance.observe(accepted[kind], verified)

    def observe_drafts(self, tickets: Mapping[int, int], emitted: Emitted) -> None:
        """Takes in what single proposals came to where lengths follow each request.

        Args:
          tickets: of requests, by their slots.
          emitted: on the host.
        """

    def worth_compiling(self, key: object, seconds: float) -> bool:
        """Adds time lost for want of the program `key`, and tells once when that has become too much."""
        before = self.missed.get(key, 0.0)
        self.missed[key] = before + seconds
        return before < WORTH_COMPILING_S <= self.missed[key]
