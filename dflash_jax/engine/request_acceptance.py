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
# A guess weighs as much as this many observations, and those of one place for at most so many.
GUESS_WEIGHT, MOST_EVIDENCE = 2.0, 256.0
# Cycles after which what was seen counts half.
HALF_LIFE = 96.0
# Requests that are remembered beside those that run, and how far levels spread before two are known.
REMEMBERED, FIRST_SPREAD = 64, 1.0
LEAST_SPREAD, MOST_SPREAD = 1e-3, 9.0
# Of a step, for data that a line parts; and how far from one half places may come.
LARGEST_STEP, MOST_LOG_ODDS = 1.5, 7.0
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
        self._fresh = False

    def fade(self, cycles: int) -> None:
        """So many cycles have gone by, whoever ran in them."""
        keep = 0.5 ** (cycles / HALF_LIFE)
        self.tried *= keep
        self.stood *= keep
        self._fresh = True

    def observe(self, tickets: Sequence[int], tried: Float[np.ndarray, "n g"], stood: Float[np.ndarray, "n g"]) -> None:
        """Takes in how often proposals of requests were judged, and how often they stood."""
        rows = self._rows_of(tickets)
        self.tried[rows] += tried
        self.stood[rows] += stood
        self._fresh = True

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
        weights[seen] = self._weights(self.levels[rows[seen]], self.tried[rows[seen]])
        # What is not known of a level is as if it were one of two, as far from the likeliest as its law is wide.
        wide = 1 / np.sqrt(weights + 1 / self.spread)
        nodes = levels[:, None] + np.stack([wide, -wide], axis=1)
        return np.cumprod(_sigmoid(nodes[:, :, None] + self.places), axis=2).mean(axis=1)

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

    def _weights(self, levels: Float[np.ndarray, "n"], tried: Float[np.ndarray, "n g"]) -> Float[np.ndarray, "n"]:
        chance = _sigmoid(levels[:, None] + self.places)
        return np.sum(tried * chance * (1 - chance), axis=1)

    def _fit(self) -> None:
        if not self._fresh or not self.rows:
            return
        self._fresh = False
        count = len(self.rows)
        tried, stood = self.tried[:count], self.stood[:count]
        scale = np.minimum(1.0, MOST_EVIDENCE / np.maximum(tried.sum(axis=0), 1.0))
        chance = _sigmoid(self.levels[:count, None] + self.places)
        slack, left = tried * chance * (1 - chance), stood - tried * chance
        weight, pull = slack.sum(axis=1), left.sum(axis=1)
        # Where the request's own observations alone would have its level be, and how far levels spread beyond what chance does.
        telling = weight > TELLING
        if np.count_nonzero(telling) > 1:
            own = self.levels[:count][telling] + np.clip(pull[telling] / weight[telling], -LARGEST_STEP, LARGEST_STEP)
            noise = 1 / weight[telling]
            share = 1 / (noise + self.spread)
            middle = np.average(own, weights=share)
            spread = np.average((own - middle) ** 2 - noise, weights=share)
            self.spread = float(np.clip(spread, LEAST_SPREAD, MOST_SPREAD))
        step = (pull - self.levels[:count] / self.spread) / (weight + 1 / self.spread)
        self.levels[:count] += np.clip(step, -LARGEST_STEP, LARGEST_STEP)
        if np.any(telling):
            middle = self.levels[:count][telling].mean()
            self.levels[:count] -= middle
            self.places += middle
        chance = _sigmoid(self.levels[:count, None] + self.places)
        slack, left = tried * chance * (1 - chance), stood - tried * chance
        typical = _sigmoid(self.places)
        guess = np.concatenate([[FIRST_GUESS], typical[:-1]])
        pull = scale * left.sum(axis=0) + GUESS_WEIGHT * (guess - typical)
        weight = scale * slack.sum(axis=0) + GUESS_WEIGHT * typical * (1 - typical)
        self.places += np.clip(pull / np.maximum(weight, 1e-3), -LARGEST_STEP, LARGEST_STEP)
        self.places = np.clip(self.places, -MOST_LOG_ODDS, MOST_LOG_ODDS)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))
