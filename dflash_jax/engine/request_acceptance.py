"""How often proposals of each single request stand, from what its cycles accepted.

A proposal at place k of request r is reckoned to stand, where those before it do, with chance sigmoid(b_k + d_r): places have their
difficulty and requests their level, as items and persons have in Rasch's model. Levels are those of a normal law whose width is
learnt: of requests that differ by no more than chance lets them it is next to nothing, and all are reckoned alike.

The typical request is one of many requests, not of many cycles: those whose proposals fall stay longest, and in the end they run
alone.

Source: Rasch, Probabilistic Models for Some Intelligence and Attainment Tests (1960), fitted by steps of Newton's method; the width
by moments (DerSimonian and Laird, Meta-analysis in clinical trials, Controlled Clinical Trials 7, 1986).
"""

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float

# Chance of the first proposal before anything is known: high, so that drafting is tried.
FIRST_GUESS = 0.8
# A guess weighs as much as this many observations. Those of one place count for at most so many, and the cycles of one of many
# requests for as many as it takes to tell it from others.
GUESS_WEIGHT, MOST_EVIDENCE, OWN_EVIDENCE = 2.0, 256.0, 32.0
# Cycles after which what was seen counts half.
HALF_LIFE = 96.0
# Requests that are remembered beside those that run, and how far levels spread before two are known.
REMEMBERED, FIRST_SPREAD = 64, 1.0
LEAST_SPREAD, MOST_SPREAD = 1e-3, 9.0
# Cycles between two fits, at least.
FIT_CYCLES = 4
# Steps of a fit, which begins where the last one ended, at most; the one it may end with; and the largest, for data that a line
# parts, as is how far from one half places may come.
MOST_STEPS, SMALL_STEP, LARGEST_STEP, MOST_LOG_ODDS = 5, 0.1, 1.5, 7.0
# Observations below which a request says nothing of how far levels spread.
TELLING = 0.25


class RequestAcceptance:
    """What is known of requests of one kind. The same observations in the same order give the same chances.

    Args:
      drafts: proposals of a block.
    """

    def __init__(self, drafts: int):
        self.drafts = drafts
        self.rows: dict[int, int] = {}  # by tickets, the one that was seen last at the end
        self.tried, self.stood = np.zeros((0, drafts)), np.zeros((0, drafts))
        self.levels = np.zeros(0)
        guess = float(np.log(FIRST_GUESS / (1 - FIRST_GUESS)))
        self.places, self.spread = np.full(drafts, guess), FIRST_SPREAD
        self._unfitted = 0

    def fade(self, cycles: int) -> None:
        """So many cycles have gone by, whoever ran in them."""
        keep = 0.5 ** (cycles / HALF_LIFE)
        self.tried *= keep
        self.stood *= keep
        self._unfitted += cycles

    def observe(self, tickets: Sequence[int], tried: Float[np.ndarray, "n g"], stood: Float[np.ndarray, "n g"]) -> None:
        """Takes in how often proposals of requests were judged, and how often they stood."""
        rows = self._rows_of(tickets)
        tried, stood = self.tried[rows] + tried, self.stood[rows] + stood
        most = max(OWN_EVIDENCE, MOST_EVIDENCE / len(rows))
        keep = np.minimum(1.0, most / np.maximum(tried[:, :1], 1.0))
        self.tried[rows], self.stood[rows] = keep * tried, keep * stood

    @property
    def evidence(self) -> float:
        """Cycles that the chance of the first proposal rests on."""
        return float(self.tried[:, 0].sum()) if self.drafts else 0.0

    def known(self, tickets: Iterable[int]) -> int:
        """How many of these requests something was seen of."""
        return sum(ticket in self.rows for ticket in tickets)

    def survivals(self, tickets: Sequence[int]) -> Float[np.ndarray, "n g"]:
        """The chance of each proposal of these requests to stand with all before it."""
        self._fit()
        rows = np.array([self.rows.get(ticket, -1) for ticket in tickets], np.int64)
        seen = rows >= 0
        levels, weights = np.zeros(len(rows)), np.zeros(len(rows))
        levels[seen] = self.levels[rows[seen]]
        weights[seen], _ = self._slopes(levels[seen], self.tried[rows[seen]], self.stood[rows[seen]], axis=1)
        # What is not known of a level is as if it were one of two, as far from the likeliest as its law is wide.
        wide = 1 / np.sqrt(weights + 1 / self.spread)
        low, high = (
            np.cumprod(_sigmoid(node[:, None] + self.places), axis=1) for node in (levels - wide, levels + wide)
        )
        return (low + high) / 2

    def _rows_of(self, tickets: Sequence[int]) -> np.ndarray:
        for ticket in tickets:
            row = self.rows.pop(ticket, None)
            if row is None:
                if len(self.rows) < len(self.levels):
                    row = len(self.rows)
                elif len(self.rows) >= len(tickets) + REMEMBERED:
                    row = self.rows.pop(next(iter(self.rows)))
                else:
                    row, more = len(self.rows), ((0, REMEMBERED), (0, 0))
                    self.tried, self.stood = np.pad(self.tried, more), np.pad(self.stood, more)
                    self.levels = np.pad(self.levels, more[0])
                self.tried[row] = self.stood[row] = self.levels[row] = 0.0
            self.rows[ticket] = row
        return np.array([self.rows[ticket] for ticket in tickets], np.int64)

    def _fit(self) -> None:
        """Steps until they are small: one, where little has changed."""
        if self._unfitted < FIT_CYCLES or not self.rows:
            return
        self._unfitted = 0
        for _ in range(MOST_STEPS):
            if self._step(len(self.rows)) < SMALL_STEP:
                break

    def _step(self, count: int) -> float:
        """One of Newton's method for levels, then for places; returns how far the latter went."""
        tried, stood, levels = self.tried[:count], self.stood[:count], self.levels[:count]
        weight, pull = self._slopes(levels, tried, stood, axis=1)
        telling = weight > TELLING
        if np.count_nonzero(telling) > 1:
            # Where their own observations alone would have levels be, and how far these spread beyond what chance does.
            noise = 1 / weight[telling]
            own = levels[telling] + np.clip(pull[telling] * noise, -LARGEST_STEP, LARGEST_STEP)
            share = 1 / (noise + self.spread)
            beyond = (own - np.average(own, weights=share)) ** 2 - noise
            self.spread = float(np.clip(np.average(beyond, weights=share), LEAST_SPREAD, MOST_SPREAD))
        step = (pull - levels / self.spread) / (weight + 1 / self.spread)
        levels += np.clip(step, -LARGEST_STEP, LARGEST_STEP)
        if np.any(telling):
            middle = levels[telling].mean()
            levels -= middle
            self.places += middle
        scale = np.minimum(1.0, MOST_EVIDENCE / np.maximum(tried.sum(axis=0), 1.0))
        weight, pull = self._slopes(levels, tried, stood, axis=0)
        typical = _sigmoid(self.places)
        # The guess for a place is the chance of the place before it.
        guess = np.concatenate([[FIRST_GUESS], typical[:-1]])
        pull = scale * pull + GUESS_WEIGHT * (guess - typical)
        weight = scale * weight + GUESS_WEIGHT * typical * (1 - typical)
        step = np.clip(pull / np.maximum(weight, 1e-3), -LARGEST_STEP, LARGEST_STEP)
        self.places = np.clip(self.places + step, -MOST_LOG_ODDS, MOST_LOG_ODDS)
        return float(np.max(np.abs(step), initial=0.0))

    def _slopes(
        self,
        levels: Float[np.ndarray, "n"],
        tried: Float[np.ndarray, "n g"],
        stood: Float[np.ndarray, "n g"],
        *,
        axis: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Second and first derivative of the observations' log-likelihood, the former's sign turned."""
        chance = _sigmoid(levels[:, None] + self.places)
        return np.sum(tried * chance * (1 - chance), axis=axis), np.sum(stood - tried * chance, axis=axis)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))
