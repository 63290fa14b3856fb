"""Grammars as automata over the tokens of a model.

Tokens that lead from every state to the same one are a class, so an automaton is a table of states and classes.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

BITS = 32  # tokens of a word of a mask
FREE = 0  # the state in which everything is allowed, and which is never left
MOST_STATES, MOST_CLASSES = 4096, 1024


@dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """A grammar over the tokens of one model, on the host.

    Attributes:
      next: behind each state and class of tokens the state, -1 where the token is refused; state 0 is `FREE`.
      classes: of every token.
      start: the first state.
      prefixes: of each state the token that leads to it and the state before, of one of the shortest ways from the first one.
    """

    next: np.ndarray  # [S, C] int16
    classes: np.ndarray  # [V] int16
    start: int
    prefixes: np.ndarray  # [S, 2] int32

    @property
    def states(self) -> int:
        return len(self.next)

    def walk(self, tokens: Iterable[int]) -> int:
        """The state behind tokens that it allows."""
        state = self.start
        for token in tokens:
            state = max(FREE, int(self.next[state, self.classes[token]]))
        return state

    def prefix(self, state: int) -> list[int]:
        """Tokens that lead to a state."""
        tokens = list[int]()
        while state not in (self.start, FREE):
            token, state = self.prefixes[state].tolist()
            tokens.append(token)
        return tokens[::-1]

    def allowed(self, state: int) -> np.ndarray:
        """Whether each token may come. `[V]` bool."""
        return (self.next[state] >= 0)[self.classes]

    def all_words(self) -> np.ndarray:
        """Masks of the tokens allowed in every state, as `grammar_masks.masked` takes them: `[S, V / 32]` uint32."""
        bytes_of = np.zeros((self.states, -(-len(self.classes) // BITS) * BITS // 8), np.uint8)
        allowed, classes = self.next >= 0, self.classes.astype(np.intp)
        for state, row in enumerate(allowed):
            bits = np.packbits(row[classes], bitorder="little")
            bytes_of[state, : len(bits)] = bits
        return bytes_of.view(np.uint32)

    def with_thoughts(self, opens: int | None, closes: int, *, inside: bool) -> "TokenAutomaton":
        """The same with thoughts before it, see `grammar_masks.Grammar`: of anything, until the token that closes them.

        Raises:
          ValueError: it would have more states or classes than there may be.
        """
        marks = list(dict.fromkeys(mark for mark in (opens, closes) if mark is not None))
        (states, count), classes = self.next.shape, self.classes.copy()
        if states + 2 > MOST_STATES or count + len(marks) > MOST_CLASSES:
            raise ValueError("no room for thoughts")
        classes[marks] = np.arange(count, count + len(marks))
        thinking, first = states, states + 1
        table = np.concatenate([self.next, self.next[:, self.classes[marks]]], axis=1)
        table = np.concatenate([table, np.full((1, table.shape[1]), thinking, np.int16), table[self.start, None]])
        table[thinking, classes[closes]] = self.start
        if opens is not None:
            table[first, classes[opens]] = thinking
        return made(table, classes, thinking if inside else first)


@functools.lru_cache(256)
def thoughtful(automaton: TokenAutomaton, opens: int | None, closes: int, inside: bool) -> TokenAutomaton | None:
    """`TokenAutomaton.with_thoughts`, the same one each time; None where there is no room for them."""
    try:
        return automaton.with_thoughts(opens, closes, inside=inside)
    except ValueError:
        return None


def made(table: np.ndarray, classes: np.ndarray, start: int) -> TokenAutomaton:
    """With the shortest ways to its states."""
    named, tokens = np.unique(classes, return_index=True)
    of_class = np.full(table.shape[1], -1)
    of_class[named] = tokens
    prefixes, reached = np.full((len(table), 2), -1, np.int32), np.zeros(len(table), bool)
    reached[[FREE, start]] = True
    front = np.array([start])
    while len(front):
        behind = np.where(of_class >= 0, table[front], -1)
        states, first = np.unique(behind, return_index=True)
        new = (states > FREE) & ~reached[np.maximum(states, 0)]
        rows, columns = np.divmod(first[new], table.shape[1])
        front, before = states[new].astype(np.int64), front
        prefixes[front] = np.stack([of_class[columns], before[rows]], axis=1)
        reached[front] = True
    return TokenAutomaton(table.astype(np.int16), classes.astype(np.int16), start, prefixes)
