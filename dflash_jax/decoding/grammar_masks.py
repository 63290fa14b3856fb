"""Grammar masks from the host: which tokens are allowed at every position of a verified block.

What may come at row j depends on the proposals before it, as if they had been emitted. The host gets them from one program, walks
along them in each request's grammar, and gives the masks of all rows to another one (`decoding.masked_cycle`). Nothing is taken
back where a proposal falls: the walk ends where it began, and only what the next block tells as emitted moves a grammar on.

The host knows a grammar's place by a number that is the request's in the device's state. Numbers are drawn anew whenever a request
takes a slot: calls that were started for an earlier stay ask for one that nobody has, and everything is allowed there.
"""

import functools
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from dflash_jax.decoding.token_automata import BITS, TokenAutomaton, thoughtful

NO_GRAMMAR = 0


@dataclass(frozen=True)
class Grammar:
    """A grammar at its beginning, over the tokens of one model.

    Attributes:
      matcher: llguidance's; texts follow copies of it.
      opens, closes: tokens of the marks around thoughts that may come before; None where none may.
      inside: whether a text begins with thoughts.
      table: the same over the model's tokens, where it is regular; None where the host has to be asked.
      reason: why it has no table; empty where it has one.
    """

    matcher: Any
    opens: int | None = None
    closes: int | None = None
    inside: bool = False
    table: TokenAutomaton | None = None
    reason: str = "nobody made one"

    @property
    def automaton(self) -> TokenAutomaton | None:
        """The table with the thoughts before it; None where the host has to be asked."""
        if self.table is None:
            return None
        return self.table if self.closes is None else thoughtful(self.table, self.opens, self.closes, self.inside)


class Follower:
    """The place in its grammar of one text.

    Args:
      emitted: tokens that it has already.
      known: how many those were, where `emitted` are others that lead to the same place; None for as many.

    Attributes:
      number: on the device.
      error: why it cannot go on, where a bound was passed; empty while it can.
    """

    def __init__(self, grammar: Grammar, emitted: Sequence[int] = (), known: int | None = None):
        self.number = next(_NUMBERS)
        self.error = ""
        self._matcher = grammar.matcher.deep_copy()
        self._opens, self._closes, self._inside = grammar.opens, grammar.closes, grammar.inside
        self._known, self._proposed = 0, list[int]()
        self._take(emitted)
        self._known = self._known if known is None else known
        _FOLLOWERS[self.number] = self

    def walk(self, produced: int, ids: Sequence[int]) -> tuple[int, list[int], int | None]:
        """Takes what was emitted since the last call, and tells where the grammar holds in the block that comes.

        Args:
          produced: tokens emitted so far.
          ids: the last of them and the proposals.

        Returns:
          The first row that it holds for; the proposals from there on; and a token that may come at that row besides.
        """
        if (count := produced - self._known) > 0:
            # What a block emits are its first proposals and one token of the target's.
            self._take([*self._proposed[: count - 1], ids[0]])
        self._proposed = list(ids[1:])
        if not self._inside:
            return 0, self._proposed, self._opens if self._known == 0 else None
        ends = self._proposed.index(self._closes) + 1 if self._closes in self._proposed else len(ids)
        return ends, self._proposed[ends:], None

    def _take(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self._inside:
                self._inside = token != self._closes
            elif self._known == 0 and token == self._opens:
                self._inside = True
            elif not self.error and not self._matcher.consume_tokens([token]):
                self.error = self._matcher.get_error() or f"token {token} is not what its grammar goes on with"
            self._known += 1

    def mask_row(self, row: int, proposed: list[int]) -> tuple[Any, int, list[int]]:
        """Arguments with which llguidance fills the masks from `row` on."""
        return self._matcher, row, proposed


_NUMBERS = itertools.count(NO_GRAMMAR + 1)
_FOLLOWERS: weakref.WeakValueDictionary[int, Follower] = weakref.WeakValueDictionary()


def masked(logits: Float[Array, "B T V"], masks: UInt32[Array, "B T W"]) -> Float[Array, "B T V"]:
    """Logits of the tokens whose bits are set, the lowest of each word first, and -inf for others."""
    bits = masks[..., None] >> jnp.arange(BITS, dtype=jnp.uint32) & jnp.uint32(1)
    allowed = bits.reshape(*masks.shape[:2], -1)[:, :, : logits.shape[-1]] > 0
    return jnp.where(allowed, logits, -jnp.inf)


def allows(masks: UInt32[Array, "B T W"], tokens: Int[Array, "B #T n"]) -> Bool[Array, "B T n"]:
    """Whether masks have the bits of these tokens."""
    tokens = jnp.broadcast_to(tokens, (*masks.shape[:2], tokens.shape[-1]))
    words = jnp.take_along_axis(masks, tokens // BITS, axis=-1)
    return (words >> (tokens % BITS).astype(jnp.uint32) & jnp.uint32(1)) > 0


def masks_of(asked: np.ndarray, vocab: int) -> np.ndarray:
    """`[B, T, V / 32]` uint32, as `masked` takes them; rows behind a refused proposal, which emit nothing, are whatever.

    Asked twice it answers the same. It raises nothing: an error would take the whole batch with it.

    Args:
      asked: `[B, 2 + T]` integers: of each slot its grammar's number, the tokens emitted, and the block: the pending token,
        whatever where there is none yet, and the proposals.
    """
    slots, places, words = asked.shape[0], asked.shape[1] - 2, -(-vocab // BITS)
    masks = np.full((slots * places, words), -1, np.int32)
    wanted, besides, followers = [], [], []
    for slot, (number, count, *block) in enumerate(asked.tolist()):
        follower = None if number == NO_GRAMMAR else _FOLLOWERS.get(number)
        if follower is None or follower.error:
            continue
        first, proposed, besides_token = follower.walk(count, block)
        if first < places and not follower.error:
            followers.append(follower)
            wanted.append(follower.mask_row(slot * places + first, proposed))
            besides.append((slot * places + first, besides_token))
    if wanted:
        try:
            _fill(wanted, masks)
        except Exception as error:
            for follower in followers:
                follower.error = str(error) or type(error).__name__
        for row, token in besides:
            if token is not None:
                masks[row, token // BITS] |= np.uint32(1 << token % BITS).astype(np.int32)
    return masks.view(np.uint32).reshape(slots, places, words)


def _fill(asked: list[tuple[Any, int, list[int]]], masks: np.ndarray) -> None:
    """Masks of all rows of all matchers in one call, those without proposals in another one: each call gives Python's lock away,
    and has to win it back."""
    from llguidance import numpy as llguidance  # pyright: ignore[reportMissingImports]

    single = [(matcher, row) for matcher, row, proposed in asked if not proposed]
    if several := [one for one in asked if one[2]]:
        llguidance.fill_next_token_bitmask_par_with_draft_tokens(_executor(), several, masks)
    if single:
        llguidance.fill_next_token_bitmask_par(_executor(), single, masks)


@functools.cache
def _executor() -> Any:
    from llguidance import LLExecutor  # pyright: ignore[reportMissingImports]

    return LLExecutor()
