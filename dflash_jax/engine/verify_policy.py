"""Verify-length policy: how many tokens the next cycles verify, and the answer where it is always the same one.

The drafter fills the block it was trained on whatever is chosen; the target verifies the first so many tokens of it. What is
emitted is the target's own choice either way, so the choice moves time and nothing else. Who chooses by what pays is
`engine.verify_auto.AutoPolicy`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from dflash_jax.compile.programs import Status
from dflash_jax.decoding.state import Emitted
from dflash_jax.engine.acceptance_estimate import AcceptanceEstimate
from dflash_jax.engine.requests import Request

Kind = Literal["greedy", "sampled"]
# What `load` takes: a number, the whole block, what pays best, or what pays best of rows that requests share.
VerifyLength = int | Literal["auto", "per_request"] | None


class Length(NamedTuple):
    """What a cycle verifies: so many tokens of each slot, or of slots on average where they share the target's rows."""

    tokens: int
    shared: bool = False


class Decision(NamedTuple):
    """What `VerifyPolicy.next` says of the next cycles.

    Attributes:
      length: what they verify.
      cycles: how many of them there are to be.
      compile: a length whose program should be compiled in the background from now on; told once.
    """

    length: Length
    cycles: int
    compile: Length | None = None


class Served(NamedTuple):
    """A request that cycles were for."""

    ticket: int
    slot: int
    kind: Kind


def kind_of(request: Request) -> Kind:
    """Requests whose proposals stand about equally often are of one kind."""
    return "sampled" if request.params.temperature > 0 else "greedy"


class VerifyPolicy:
    """Verify-length policy. The scheduler asks `next` before cycles and tells `look` what came of them. This one says the same
    always.

    Args:
      offered: the drafter's proposals and the pending token.
      option: as `load` was asked: a length, up to `offered`; None is the whole block.

    Attributes:
      current: what was chosen last.
      cycles: that ran, by what they verified.
      estimate: what is learnt of single proposals, where rows may be shared.
    """

    estimate: AcceptanceEstimate | None = None

    def __init__(self, offered: int, option: VerifyLength = None):
        self.offered, self.option = offered, option
        self.current = Length(min(option, offered) if isinstance(option, int) else offered)
        self.cycles = Counter[Length]()

    def candidates(self, slots: int, context: float, kind: Kind = "greedy") -> tuple[Length, ...]:
        """Lengths worth having programs for, in ascending order.

        Args:
          context: mean tokens of a sequence.
          kind: "sampled" where some requests may sample.
        """
        del slots, context, kind
        return (self.current,)

    def shares(self, slots: int) -> bool:
        """Whether so many slots may share rows."""
        del slots
        return False

    def first(self, kind: Kind, slots: int, context: float) -> Length:
        """The length of the first cycles, of one request in so many slots."""
        del kind, slots, context
        return self.current

    def next(
        self, running: Mapping[int, Kind], slots: int, context: float, cycles: int, status: Callable[[Length], Status]
    ) -> Decision:
        """The next cycles, at most `cycles` of them.

        Args:
          running: kinds of requests, at least one, by their tickets.
          slots: of the program, running or not.
          context: mean tokens of a running sequence.
          status: of a length's program.
        """
        del running, slots, context, status
        return Decision(self.current, cycles)

    def with_slots(self, slots: int, context: float) -> Length:
        """What cycles of so many slots would verify if they went on as those of more do now."""
        del slots, context
        return self.current

    def fewer_slots_pay(self, slots: int, fewer: int, context: float, cycles: int) -> bool:
        """Tells once, of calls of `cycles` cycles, that programs for fewer slots are worth compiling."""
        del slots, fewer, context, cycles
        return False

    def look(self, verified: Length, served: Sequence[Served], emitted: Emitted) -> None:
        """Takes in what came of cycles.

        Args:
          emitted: on the host. Where nothing is chosen only its counts are read: the device would wait for the rest.
        """
        del served
        self.cycles[verified] += int(np.count_nonzero(np.asarray(emitted.counts).any(axis=1)))
