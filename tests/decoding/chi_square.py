"""Pearson's chi-square test, for tests that must not need SciPy."""

import jax
import numpy as np


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    """Probability of counts at least this far from `law` if they were drawn from it; cells expected below 5 are merged.

    An observation in a cell of probability 0 gives 0.
    """
    counts, law = np.asarray(counts, np.float64).ravel(), np.asarray(law, np.float64).ravel()
    assert counts.shape == law.shape
    assert abs(law.sum() - 1) < 1e-6
    if counts[law == 0].any():
        return 0.0
    expected = law * counts.sum()
    small = expected < 5
    if expected[small].sum() > 0:
        counts = np.append(counts[~small], counts[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    else:
        counts, expected = counts[~small], expected[~small]
    statistic = np.sum((counts - expected) ** 2 / expected)
    return float(jax.scipy.special.gammaincc((len(counts) - 1) / 2, statistic / 2))


def count(tokens: np.ndarray, vocab: int) -> np.ndarray:
    """How often each row of `tokens [n, places]` came up, as an array `[vocab] * places`."""
    tokens = np.asarray(tokens)
    flat = np.ravel_multi_index(tuple(tokens.T), (vocab,) * tokens.shape[1])
    return np.bincount(flat, minlength=vocab ** tokens.shape[1]).reshape((vocab,) * tokens.shape[1])
