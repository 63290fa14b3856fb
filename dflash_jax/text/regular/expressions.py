"""Regular expressions as trees, and the smallest deterministic automaton over bytes of one.

Thompson's construction, the powerset construction, and Moore's partition refinement. Characters are ranges of code points, which
become ranges of the bytes of UTF-8.
"""

import functools
import itertools
from dataclasses import dataclass

import numpy as np

# Of an automaton before it is made smaller, and steps of its construction.
MOST_STATES, MOST_EDGES = 16_384, 150_000
LAST, _SURROGATES = 0x10FFFF, (0xD800, 0xDFFF)
_LENGTHS = (0x7F, 0x7FF, 0xFFFF, LAST)  # last code points of one byte, of two, and so on


class NotRegular(Exception):
    """No tables are made of a grammar; says why."""


@dataclass(frozen=True)
class Chars:
    """One character.

    Attributes:
      ranges: of code points, both ends among them, in order.
    """

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Cat:
    """One after the other."""

    parts: tuple["Node", ...]


@dataclass(frozen=True)
class Alt:
    """One of several."""

    choices: tuple["Node", ...]


@dataclass(frozen=True)
class Repeat:
    """Some number of times, `most` None as often as one likes."""

    part: "Node"
    least: int
    most: int | None


@dataclass(frozen=True)
class Listed:
    """Items in order with a separator between each two that are there.

    Attributes:
      items: each with whether it has to be there.
    """

    items: tuple[tuple["Node", bool], ...]
    separator: "Node"


@dataclass(frozen=True)
class Until:
    """Any characters up to where `end` first stands, and `end`, which is not empty."""

    end: str


type Node = Chars | Cat | Alt | Repeat | Listed | Until


def chars(*ranges: tuple[int, int]) -> Chars:
    """Characters of these ranges, which may overlap and come in any order."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    return Chars(tuple(merged))


def without(of: Chars, taken: Chars) -> Chars:
    """Characters of one that are not the other's."""
    left = list(of.ranges)
    for low, high in taken.ranges:
        left = [
            part
            for start, end in left
            for part in ((start, min(end, low - 1)), (max(start, high + 1), end))
            if part[0] <= part[1]
        ]
    return Chars(tuple(left))


ANY = Chars(((0, _SURROGATES[0] - 1), (_SURROGATES[1] + 1, LAST)))


def literal(text: str) -> Cat:
    """Just this text."""
    return Cat(tuple(Chars(((ord(one), ord(one)),)) for one in text))


@dataclass(frozen=True)
class ByteAutomaton:
    """State 0 is the first. Every state leads to an end.

    Attributes:
      next: the state behind each byte, -1 for none.
      ends: whether a text may end here.
    """

    next: np.ndarray  # [S, 256] int32
    ends: np.ndarray  # [S] bool


def automaton(node: Node) -> ByteAutomaton:
    """The smallest automaton of a tree's texts.

    Raises:
      NotRegular: it would have too many states, or no text.
    """
    pieces = _Pieces()
    first, last = pieces.state(), pieces.state()
    pieces.add(node, first, last)
    return _smallest(*_deterministic(pieces, first, last))


class _Pieces:
    """An automaton with empty steps."""

    def __init__(self):
        self.empty: list[list[int]] = []
        self.steps: list[list[tuple[int, int, int]]] = []  # first and last byte, and where they lead
        self.edges = 0

    def state(self) -> int:
        self.empty.append([])
        self.steps.append([])
        return len(self.empty) - 1

    def step(self, start: int, low: int, high: int, end: int) -> None:
        self.edges += 1
        if self.edges > MOST_EDGES:
            raise NotRegular(f"more than {MOST_EDGES} steps")
        self.steps[start].append((low, high, end))

    def add(self, node: Node, start: int, end: int) -> None:
        """Lets `node` lead from `start` to `end`."""
        match node:
            case Chars():
                for sequence in _sequences(node):
                    here = start
                    for place, (low, high) in enumerate(sequence):
                        there = end if place == len(sequence) - 1 else self.state()
                        self.step(here, low, high, there)
                        here = there
            case Cat():
                for part in node.parts[:-1]:
                    between = self.state()
                    self.add(part, start, between)
                    start = between
                self.add(node.parts[-1], start, end) if node.parts else self.empty[start].append(end)
            case Alt():
                for choice in node.choices:
                    self.add(choice, start, end)
            case Repeat():
                self._repeat(node, start, end)
            case Listed():
                self._listed(node, start, end)
            case Until():
                self._until(node.end, start, end)

    def _repeat(self, node: Repeat, start: int, end: int) -> None:
        for _ in range(node.least):
            after = self.state()
            self.add(node.part, start, after)
            start = after
        if node.most is None:
            again = self.state()
            self.empty[start].append(again)
            self.add(node.part, again, again)
            self.empty[again].append(end)
            return
        for _ in range(node.most - node.least):
            self.empty[start].append(end)
            after = self.state()
            self.add(node.part, start, after)
            start = after
        self.empty[start].append(end)

    def _listed(self, node: Listed, start: int, end: int) -> None:
        # Two rails: nothing has come yet, and something has.
        none, some = start, self.state()
        for item, needed in node.items:
            entry, after_none, after_some = self.state(), self.state(), self.state()
            self.empty[none].append(entry)
            self.add(node.separator, some, entry)
            self.add(item, entry, after_some)
            if not needed:
                self.empty[none].append(after_none)
                self.empty[some].append(after_some)
            none, some = after_none, after_some
        self.empty[none].append(end)
        self.empty[some].append(end)

    def _until(self, word: str, start: int, end: int) -> None:
        """Each state has seen so many characters of the word, the longest beginning of it that stands at the end (Knuth, Morris and
        Pratt, SIAM J. Comput. 6(2), 1977)."""
        states = [self.state() for _ in word]
        self.empty[start].append(states[0])
        known = {one: chars((ord(one), ord(one))) for one in word}
        others = functools.reduce(without, known.values(), ANY)
        for count, state in enumerate(states):
            self.add(others, state, states[0])
            for one, found in known.items():
                seen = word[:count] + one
                longest = max(size for size in range(len(seen) + 1) if seen.endswith(word[:size]))
                self.add(found, state, end if longest == len(word) else states[longest])


@functools.lru_cache(256)
def _sequences(node: Chars) -> list[list[tuple[int, int]]]:
    if not node.ranges:
        raise NotRegular("a class of no character")
    return [sequence for low, high in node.ranges for sequence in _encoded(low, high)]


def _encoded(low: int, high: int) -> list[list[tuple[int, int]]]:
    """Sequences of ranges of bytes that are the UTF-8 of these code points."""
    if low <= _SURROGATES[1] and high >= _SURROGATES[0]:
        parts = (low, _SURROGATES[0] - 1), (_SURROGATES[1] + 1, high)
        return [sequence for part in parts if part[0] <= part[1] for sequence in _encoded(*part)]
    for last in _LENGTHS:
        if low <= last < high:
            return _encoded(low, last) + _encoded(last + 1, high)
    # Ends whose last bytes are not a whole run are split off.
    for count in range(1, 4):
        mask = (1 << 6 * count) - 1
        if high > 0x7F and low & ~mask != high & ~mask:
            if low & mask:
                return _encoded(low, low | mask) + _encoded((low | mask) + 1, high)
            if high & mask != mask:
                return _encoded(low, (high & ~mask) - 1) + _encoded(high & ~mask, high)
    return [list(zip(chr(low).encode(), chr(high).encode(), strict=True))]


def _deterministic(pieces: _Pieces, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """The powerset construction, over the states that lead somewhere by a byte, and the last one."""
    kept = [bool(steps) or state == last for state, steps in enumerate(pieces.steps)]
    reached: dict[int, frozenset[int]] = {}

    def behind(state: int) -> frozenset[int]:
        if state not in reached:
            seen, left = {state}, [state]
            while left:
                for other in pieces.empty[left.pop()]:
                    if other not in seen:
                        seen.add(other)
                        left.append(other)
            reached[state] = frozenset(one for one in seen if kept[one])
        return reached[state]

    numbers, waiting, rows = {behind(first): 0}, [behind(first)], []
    for states in waiting:
        row, targets = np.full(256, -1, np.int32), dict[frozenset[int], int]()
        edges = [edge for state in states for edge in pieces.steps[state]]
        cuts = sorted({0, 256, *(low for low, _, _ in edges), *(high + 1 for _, high, _ in edges)})
        for begin, stop in itertools.pairwise(cuts):
            ends = frozenset(end for low, high, end in edges if low <= begin <= high)
            if not ends:
                continue
            if ends not in targets:
                union = frozenset().union(*map(behind, ends))
                if union not in numbers:
                    numbers[union] = len(numbers)
                    waiting.append(union)
                    if len(numbers) > MOST_STATES:
                        raise NotRegular(f"more than {MOST_STATES} states over bytes")
                targets[ends] = numbers[union]
            row[begin:stop] = targets[ends]
        rows.append(row)
    return np.stack(rows), np.array([last in states for states in waiting])


def _smallest(follow: np.ndarray, ends: np.ndarray) -> ByteAutomaton:
    """Minimizes the automaton: equal states become one. All lead to an end, for every piece has a text."""
    # Bytes that no state tells apart count once.
    columns, column = np.unique(follow, axis=1, return_inverse=True)
    odd = np.random.default_rng(0).integers(1, 2**62, columns.shape[1] + 1, np.uint64) * np.uint64(2) + np.uint64(1)
    labels, count = ends.astype(np.int64), 0
    while True:
        behind = np.where(columns >= 0, labels[columns] + 1, 0).astype(np.uint64)
        _, refined = np.unique(labels.astype(np.uint64) * odd[0] + behind @ odd[1:], return_inverse=True)
        labels = refined.astype(np.int64)
        if (found := int(labels.max()) + 1) == count:
            break
        count = found
    _, members = np.unique(labels, return_index=True)
    merged = np.where(columns[members] >= 0, labels[columns[members]], -1)
    order, place = [int(labels[0])], {int(labels[0])}  # as they are reached, the first one first
    for state in order:
        for other in dict.fromkeys(merged[state].tolist()):
            if other >= 0 and other not in place:
                place.add(other)
                order.append(other)
    renumber = np.full(count + 1, -1, np.int32)
    renumber[order] = np.arange(count)
    return ByteAutomaton(renumber[merged[order]][:, column.reshape(-1)], ends[members[order]])
