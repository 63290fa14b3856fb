"""llguidance's word on an automaton: what both allow must be the same."""

from typing import Any

import numpy as np

from dflash_jax.decoding.token_automata import FREE, TokenAutomaton
from dflash_jax.text.regular.expressions import NotRegular

MOST_STEPS = 2048  # that are compared beside those that lead to the states


def compare(automaton: TokenAutomaton, matcher: Any) -> int:
    """Compares masks behind one of the shortest texts to every state, and behind one more token from there: of all such steps, or
    as many of them as may be, evenly among them.

    Args:
      matcher: llguidance's at the beginning.

    Returns:
      How many masks were compared.

    Raises:
      NotRegular: one differs.
    """
    from llguidance.numpy import fill_next_token_bitmask  # pyright: ignore[reportMissingImports]

    words = automaton.all_words()
    row = np.zeros((1, words.shape[1]), np.int32)
    follower, compared = matcher.deep_copy(), 0

    def same(state: int) -> None:
        nonlocal compared
        row[:] = -1
        fill_next_token_bitmask(follower, row)
        compared += 1
        if follower.is_error() or not np.array_equal(row[0].view(np.uint32) & words[FREE], words[state]):
            raise NotRegular(f"masks that are not llguidance's behind {automaton.prefix(state)!r:.80}")

    children: dict[int, list[int]] = {}
    for state, (_, before) in enumerate(automaton.prefixes.tolist()):
        if before >= 0:
            children.setdefault(before, []).append(state)
    extra = _steps(automaton)
    left = [(automaton.start, False)]
    while left:
        state, seen = left.pop()
        if seen:
            if state != automaton.start:
                follower.rollback(1)
            continue
        if state != automaton.start and not follower.consume_token(int(automaton.prefixes[state, 0])):
            raise NotRegular(f"a token that llguidance refuses behind {automaton.prefix(state)!r:.80}")
        same(state)
        for token, behind in extra.get(state, ()):
            if not follower.consume_token(token):
                raise NotRegular(f"token {token}, which llguidance refuses behind {automaton.prefix(state)!r:.80}")
            same(behind)
            follower.rollback(1)
        left.append((state, True))
        left += [(child, False) for child in children.get(state, ())]
    return compared


def _steps(automaton: TokenAutomaton) -> dict[int, list[tuple[int, int]]]:
    """Steps that are not on the shortest ways: by states, tokens with the states behind them."""
    _, tokens = np.unique(automaton.classes, return_index=True)
    classes = automaton.classes[tokens]
    behind = automaton.next[:, classes]
    here = behind > FREE
    here[FREE] = False
    states, columns = np.nonzero(here)
    ways = automaton.prefixes[behind[states, columns]]
    more = (ways[:, 0] != tokens[columns]) | (ways[:, 1] != states)
    states, columns = states[more], columns[more]
    chosen = np.unique(np.linspace(0, len(states) - 1, min(len(states), MOST_STEPS)).astype(int)) if len(states) else []
    found: dict[int, list[tuple[int, int]]] = {}
    for place in chosen:
        state, column = int(states[place]), int(columns[place])
        found.setdefault(state, []).append((int(tokens[column]), int(behind[state, column])))
    return found
