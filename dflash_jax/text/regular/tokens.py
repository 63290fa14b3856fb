"""An automaton over bytes as one over the tokens of a vocabulary.

From every state the tokens are followed along the tree of their bytes, all at once, and only as far as the automaton goes. Tokens
that lead from every state to the same one are found by the sum of a random number for each step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_jax.decoding.token_automata import MOST_CLASSES, MOST_STATES, TokenAutomaton, made
from dflash_jax.text.regular.expressions import ByteAutomaton, NotRegular

MOST_STEPS = 12_000_000  # of a state along a byte of a token
MOST_FORCED = 8192  # tokens before texts that are forced
LONGEST = 256  # bytes of a token


@dataclass(frozen=True)
class Level:
    """Beginnings of tokens of one length, those that go on from one beginning side by side.

    Attributes:
      byte: the last one of each.
      first, count: where those that go on from each are in the next level, and how many.
      whole: whether it is a token.
    """

    byte: np.ndarray
    first: np.ndarray
    count: np.ndarray
    whole: np.ndarray


@dataclass(frozen=True)
class Vocabulary:
    """The tree of a vocabulary's bytes.

    Attributes:
      levels: of one byte, of two, and so on.
      leaves: of every token where it is among all levels' beginnings, -1 for tokens without bytes.
      twins: beginnings that are several tokens, and the leaves of the others, which are behind all beginnings.
      ends: tokens that end a text.
    """

    levels: list[Level]
    leaves: np.ndarray
    twins: np.ndarray  # [n, 2], in order
    ends: tuple[int, ...]

    @property
    def count(self) -> int:
        """Leaves at most."""
        return sum(len(level.byte) for level in self.levels) + len(self.twins)

    @classmethod
    def of(cls, tokens: Sequence[bytes], ends: Iterable[int]) -> "Vocabulary":
        """From the bytes of every token; those that no text holds, special ones and the ends, have none."""
        lengths = np.array([len(token) if len(token) <= LONGEST else 0 for token in tokens])
        text = np.zeros((len(tokens), max(1, lengths.max(initial=0))), np.uint8)
        size, short = text.shape[1], (token if n else b"" for token, n in zip(tokens, lengths, strict=True))
        flat = b"".join(token.ljust(size, b"\0") for token in short)
        text = np.frombuffer(flat, np.uint8).reshape(text.shape)
        leaves, levels = np.full(len(tokens), -1), list[Level]()
        alive, parents, begun = np.flatnonzero(lengths), np.zeros(np.count_nonzero(lengths), np.int64), 0
        before = 1
        for place in range(text.shape[1]):
            if not len(alive):
                break
            nodes, node = np.unique(parents * 256 + text[alive, place], return_inverse=True)
            if levels:
                owners = nodes >> 8
                levels[-1].first[:] = np.searchsorted(owners, np.arange(before))
                levels[-1].count[:] = np.bincount(owners, minlength=before)
            ending = lengths[alive] == place + 1
            whole = np.zeros(len(nodes), bool)
            whole[node[ending]] = True
            leaves[alive[ending]] = begun + node[ending]
            none = np.zeros(len(nodes), np.int64)
            levels.append(Level((nodes & 255).astype(np.uint8), none, none.copy(), whole))
            alive, parents, begun, before = alive[~ending], node[~ending], begun + len(nodes), len(nodes)
        order = np.argsort(leaves, kind="stable")
        later = order[1:][(leaves[order[1:]] == leaves[order[:-1]]) & (leaves[order[1:]] >= 0)]
        twins = np.stack([leaves[later], begun + np.arange(len(later))], axis=1)
        leaves[later] = twins[:, 1]
        return cls(levels, leaves, twins, tuple(ends))


def vocabulary_of(tokens: Any, size: int, ends: Iterable[int]) -> Vocabulary:
    """Vocabulary of llguidance's tokenizer."""
    ends = tuple(ends)
    found = [b"" if tokens.is_special_token(one) else tokens.decode_bytes([one]) for one in range(size)]
    for end in ends:
        found[end] = b""
    return Vocabulary.of(found, ends)


def token_automaton(over_bytes: ByteAutomaton, vocabulary: Vocabulary, matcher: Any) -> TokenAutomaton:
    """Where only one text can follow, llguidance allows the token alone that this text is usually written with. Which one depends
    on the token before: such states are one for each token that is forced there.

    Args:
      matcher: llguidance's at the beginning of the same grammar, which is asked what it forces.

    Raises:
      NotRegular: it would have too many states or classes, or take too long to find.
    """
    if len(over_bytes.ends) > 2 * MOST_STATES:
        raise NotRegular(f"{len(over_bytes.ends)} states over bytes")
    states, tokens, behind = _forced(over_bytes, _Steps(over_bytes.next, vocabulary), _Forcing(matcher))
    count, size = len(states), len(vocabulary.leaves)
    if count + 1 > MOST_STATES:
        raise NotRegular(f"{count} states, more than {MOST_STATES - 1}")
    origin = np.repeat(np.arange(count), [len(each) for each in tokens])
    leaf, target = np.concatenate(tokens), np.concatenate(behind)
    odd = np.random.default_rng(0).integers(1, 2**63, (2, count), np.uint64) * np.uint64(2) + np.uint64(1)
    sums = np.zeros(vocabulary.count + 1, np.uint64)
    np.add.at(sums, leaf, (odd[0][origin] ^ (odd[1][target] >> np.uint64(29))) * odd[1][target])
    # Class 0 is refused everywhere; the last one is of the ends.
    names, class_of = np.unique(sums, return_inverse=True)
    classes = len(names)
    if classes + 1 > MOST_CLASSES:
        raise NotRegular(f"{classes + 1} classes of tokens, more than {MOST_CLASSES}")
    table = np.full((count + 1, classes + 1), -1, np.int16)
    one_of = np.full(classes, -1)
    one_of[class_of[leaf]] = leaf
    shown = one_of[class_of[leaf]] == leaf
    table[origin[shown] + 1, class_of[leaf[shown]]] = target[shown] + 1
    table[0] = 0
    table[1:, classes] = np.where(over_bytes.ends[states], 0, -1)
    of_tokens = np.where(vocabulary.leaves >= 0, class_of[vocabulary.leaves], 0).astype(np.int16)
    of_tokens[list(vocabulary.ends)] = classes
    assert len(of_tokens) == size, "a class for every token"
    return made(table, of_tokens, 1)


class _Forcing:
    """Tokens that llguidance forces behind a text."""

    def __init__(self, matcher: Any):
        self._matcher, self._found = matcher.deep_copy(), dict[tuple[int, int], int]()

    def token(self, state: int, text: Sequence[int]) -> int:
        """The token that has to follow, -1 where none has; it depends on the state over bytes and the last token."""
        key = state, text[-1] if text else -1
        if key not in self._found:
            if len(self._found) > MOST_FORCED:
                raise NotRegular(f"more than {MOST_FORCED} tokens before what is forced")
            self._matcher.reset()
            if not self._matcher.try_consume_tokens(list(text)) == len(text):
                raise NotRegular(f"{text[-8:]} at the end of a text that llguidance refuses")
            self._found[key] = (self._matcher.compute_ff_tokens() or [-1])[0]
        return self._found[key]


def _forced(
    over_bytes: ByteAutomaton, steps: "_Steps", forcing: _Forcing
) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """States over tokens, as they are reached: the state over bytes of each, and its steps, leaves with states behind them."""
    narrow = ((over_bytes.next >= 0).sum(axis=1) == 1) & ~over_bytes.ends
    numbers, waiting, texts = dict[tuple[int, int], int](), list[tuple[int, int]](), list[tuple[int, int]]()
    plain = np.full(len(narrow), -1)  # numbers of the states where nothing is forced
    all_leaves, all_behind = list[np.ndarray](), list[np.ndarray]()

    def text(state: int) -> list[int]:
        found = list[int]()
        while state > 0:
            token, state = texts[state]
            found.append(token)
        return found[::-1]

    def number(of: tuple[int, int], token: int, before: int) -> int:
        if of not in numbers:
            numbers[of] = len(waiting)
            waiting.append(of)
            texts.append((token, before))
            if len(waiting) > MOST_STATES:
                raise NotRegular(f"more than {MOST_STATES - 1} states")
        return numbers[of]

    number((0, forcing.token(0, ()) if narrow[0] else -1), -1, -1)
    plain[0] = -1 if narrow[0] else 0
    for here, (state, forced) in enumerate(waiting):
        leaves, behind = steps.of(state)
        if forced >= 0:
            chosen = leaves == steps.vocabulary.leaves[forced]
            leaves, behind = leaves[chosen], behind[chosen]
        targets = np.where(narrow[behind], -1, plain[behind])
        for other in np.unique(behind[(targets < 0) & ~narrow[behind]]).tolist():
            leaf = leaves[np.argmax(behind == other)]
            plain[other] = number((other, -1), int(steps.token_of[leaf]), here)
        targets = np.where(narrow[behind], -1, plain[behind])
        if len(places := np.flatnonzero(narrow[behind])):
            before = text(here)
            for place in places.tolist():
                other, token = int(behind[place]), int(steps.token_of[leaves[place]])
                targets[place] = number((other, forcing.token(other, [*before, token])), token, here)
        all_leaves.append(leaves)
        all_behind.append(targets)
    return np.array([state for state, _ in waiting]), all_leaves, all_behind


class _Steps:
    """From every state over bytes the tokens that it allows, and the states behind them.

    Attributes:
      token_of: the token of each leaf, -1 for beginnings that are none.
    """

    def __init__(self, follow: np.ndarray, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self.token_of = np.full(vocabulary.count, -1)
        there = np.flatnonzero(vocabulary.leaves >= 0)
        self.token_of[vocabulary.leaves[there]] = there
        self._found = self._follow_all(follow)

    def of(self, state: int) -> tuple[np.ndarray, np.ndarray]:
        """Leaves and the states behind them."""
        bounds, leaves, behind = self._found
        place = slice(bounds[state], bounds[state + 1])
        return leaves[place], behind[place]

    def _follow_all(self, follow: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All states' steps, one state's behind the other's, and where each begins."""
        origin = behind = np.arange(len(follow), dtype=np.int32)
        node, found, steps, begun = np.zeros(len(follow), np.int64), [], 0, 0
        first, count = np.zeros(1, np.int64), np.array([len(self.vocabulary.levels[0].byte)])
        for level in self.vocabulary.levels:
            counts = count[node]
            steps += (total := int(counts.sum()))
            if steps > MOST_STEPS:
                raise NotRegular(f"more than {MOST_STEPS} steps along tokens")
            child = np.arange(total) - np.repeat(np.cumsum(counts) - counts - first[node], counts)
            origin, behind = np.repeat(origin, counts), follow[np.repeat(behind, counts), level.byte[child]]
            alive = behind >= 0
            origin, behind, node = origin[alive], behind[alive], child[alive]
            whole = level.whole[node]
            found.append((origin[whole], node[whole] + begun, behind[whole]))
            begun, first, count = begun + len(level.byte), level.first, level.count
        origins, leaves, targets = (np.concatenate(column) for column in zip(*found, strict=True))
        same = self.vocabulary.twins
        first, last = (np.searchsorted(same[:, 0], leaves, side) for side in ("left", "right"))
        twin = np.repeat(np.arange(len(leaves)), last - first)
        if len(twin):
            own = np.arange(len(twin)) - np.repeat(np.cumsum(last - first) - last, last - first)
            origins, targets = np.concatenate([origins, origins[twin]]), np.concatenate([targets, targets[twin]])
            leaves = np.concatenate([leaves, same[own, 1]])
        order = np.argsort(origins.astype(np.uint16), kind="stable")
        bounds = np.concatenate([[0], np.cumsum(np.bincount(origins, minlength=len(follow)))])
        return bounds, leaves[order], targets[order]
