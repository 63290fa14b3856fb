"""What block verification does with one block (arXiv 2403.10444, algorithm 2), in float64, with nothing drawn."""

import itertools
from collections.abc import Callable, Iterator

import numpy as np

type Laws = Callable[[tuple[int, ...]], np.ndarray]  # of the token after a prefix


def outcomes(proposals: tuple[int, ...], p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Chances `[g + 1, V]` that so many proposals stand and this token comes after them.

    Args:
      p, q: laws `[g + 1, V]` and `[g, V]` of the tokens after the first proposals, the target's and the drafter's.
    """
    drafts = len(proposals)
    weights = np.ones(drafts + 1)
    for place, token in enumerate(proposals):
        weights[place + 1] = min(1.0, weights[place] * p[place, token] / q[place, token])
    chances, after = np.zeros(drafts + 1), np.zeros_like(p)
    for place in range(drafts + 1):
        left = p[place] if place == drafts else np.maximum(weights[place] * p[place] - q[place], 0.0)
        chances[place] = weights[place] if place == drafts else 0.0
        if place < drafts and left.sum() > 0:
            chances[place] = left.sum() / (left.sum() + 1 - weights[place])
        after[place] = left / left.sum() if left.sum() > 0 else p[place]
    chances[0] = 1.0
    later = np.append(np.cumprod(1 - chances[:0:-1])[::-1], 1.0)
    return (chances * later)[:, None] * after


def one_by_one(proposals: tuple[int, ...], p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The same where each proposal is judged by itself (arXiv 2211.17192)."""
    drafts, stood, result = len(proposals), 1.0, np.zeros_like(p)
    for place in range(drafts):
        left = np.maximum(p[place] - q[place], 0.0)
        stands = min(1.0, p[place, proposals[place]] / q[place, proposals[place]])
        if stands < 1:
            result[place] = stood * (1 - stands) * left / left.sum()
        stood *= stands
    result[drafts] = stood * p[drafts]
    return result


def blocks(
    p: Laws, q: Laws, end: Callable[[tuple[int, ...]], bool]
) -> Iterator[tuple[tuple[int, ...], float, np.ndarray, np.ndarray]]:
    """Every block that can be drafted, its chance, and the laws along it. It ends where `end` says so of its tokens."""

    def walk(prefix: tuple[int, ...], chance: float) -> Iterator[tuple[tuple[int, ...], float]]:
        if end(prefix):
            yield prefix, chance
            return
        for token, likely in enumerate(q(prefix)):
            if likely > 0:
                yield from walk((*prefix, token), chance * likely)

    for block, chance in walk((), 1.0):
        prefixes = [block[:place] for place in range(len(block) + 1)]
        ours, theirs = np.array([p(one) for one in prefixes]), [q(one) for one in prefixes[:-1]]
        yield block, chance, ours, np.array(theirs).reshape(len(block), ours.shape[1])


def text_law(
    p: Laws, q: Laws, end: Callable[[tuple[int, ...]], bool], tokens: int, rule: Callable = outcomes
) -> np.ndarray:
    """The law of the first `tokens` of a text, by one block and then tokens of the target's."""
    vocab = len(p(()))
    law = np.zeros((vocab,) * tokens)

    def spread(prefix: tuple[int, ...], chance: float) -> None:
        if len(prefix) >= tokens:
            law[prefix[:tokens]] += chance
        elif chance > 0:
            for token, likely in enumerate(p(prefix)):
                spread((*prefix, token), chance * likely)

    for block, chance, ours, theirs in blocks(p, q, end):
        for (stood, token), likely in np.ndenumerate(rule(block, ours, theirs)):
            spread((*block[:stood], token), chance * likely)
    return law


def target_law(p: Laws, tokens: int) -> np.ndarray:
    """The law of the first `tokens` of a text without a drafter."""
    vocab = len(p(()))
    law = np.zeros((vocab,) * tokens)
    for text in itertools.product(range(vocab), repeat=tokens):
        law[text] = np.prod([p(text[:place])[text[place]] for place in range(tokens)])
    return law


def mean_standing(p: Laws, q: Laws, end: Callable[[tuple[int, ...]], bool], rule: Callable = outcomes) -> float:
    """How many proposals of a block stand on average."""
    return sum(
        chance * rule(block, ours, theirs).sum(axis=1) @ np.arange(len(block) + 1)
        for block, chance, ours, theirs in blocks(p, q, end)
    )
