"""What a drafter's own confidence says of its proposals: a logistic law that is fitted while requests are served.

A proposal at place k is reckoned to stand with chance sigmoid(w f + b_k), f the log-odds of its law's most probable token. The
slope is shared by all places and the intercepts by all requests. Where a block ends is the one place at which a proposal is seen
to fall; what stands behind it was never judged.

Source: Newton's method for logistic regression (Hastie, Tibshirani, Friedman, The Elements of Statistical Learning, section 4.4.1),
whose matrix is an arrowhead here: one slope coupled with intercepts that are not coupled with each other.
"""

import numpy as np
from jaxtyping import Bool, Float, Int

# Before anything was seen: about what drafters of several families turned out to have.
FIRST_SLOPE, FIRST_INTERCEPT = 0.5, -0.2
# Cycles between two steps, and before the first one: from there on twice as many each time, as who expects too little of a drafter
# may soon ask nothing of it any more.
REFIT_CYCLES, FIRST_CYCLES = 100, 8
# Added to the diagonal; what a step is shrunk by where observations are few; and its largest, for data that a line parts.
RIDGE, SHRINKAGE, LARGEST_STEP = 1e-3, 50.0, 2.0


class AcceptanceEstimate:
    """The law's parameters, and what was observed since they last changed.

    Args:
      drafts: proposals of a block.

    Attributes:
      slope, intercepts: w and b.
    """

    def __init__(self, drafts: int):
        self.slope, self.intercepts = FIRST_SLOPE, np.full(drafts, FIRST_INTERCEPT)
        self._seen: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._cycles, self._wanted = 0, FIRST_CYCLES

    @property
    def parameters(self) -> Float[np.ndarray, "T"]:
        """As programs take them, float32: the slope, then the intercepts."""
        return np.concatenate([[self.slope], self.intercepts]).astype(np.float32)

    def chances(self, odds: Float[np.ndarray, "... g"]) -> Float[np.ndarray, "... g"]:
        """That each proposal stands where those before it do."""
        return 1 / (1 + np.exp(-(self.slope * odds + self.intercepts)))

    def observe(
        self,
        odds: Float[np.ndarray, "n g"],
        accepted: Int[np.ndarray, "n"],
        verified: Int[np.ndarray, "n"],
        *,
        cycles: int,
    ) -> None:
        """Takes in blocks of `cycles` cycles, and makes a step once there were enough of them.

        Args:
          accepted: proposals that stood.
          verified: tokens that were verified, the pending one included.
        """
        places = np.arange(odds.shape[1])
        stood = places < accepted[:, None]
        judged = stood | ((places == accepted[:, None]) & (places < verified[:, None] - 1))
        self._seen.append((odds.astype(np.float64), stood, judged))
        self._cycles += cycles
        if self._cycles >= self._wanted:
            odds, stood, judged = (np.concatenate(each) for each in zip(*self._seen, strict=True))
            self._seen, self._cycles, self._wanted = [], 0, min(2 * self._wanted, REFIT_CYCLES)
            self.step(odds, stood, judged)

    def step(
        self, odds: Float[np.ndarray, "n g"], stood: Bool[np.ndarray, "n g"], judged: Bool[np.ndarray, "n g"]
    ) -> None:
        """One damped step of Newton's method; the slope stays at 0 or above: confidence is no bad sign."""
        chance = self.chances(odds)
        wrong = np.where(judged, stood - chance, 0.0)
        weight = np.where(judged, chance * (1 - chance), 0.0)
        counts = judged.sum(axis=0)
        corner, diagonal = np.sum(weight * odds**2) + RIDGE, weight.sum(axis=0) + RIDGE
        edge, by_place = np.sum(weight * odds, axis=0), wrong.sum(axis=0)
        rest = corner - np.sum(edge**2 / diagonal)
        slope = (np.sum(wrong * odds) - np.sum(edge * by_place / diagonal)) / rest
        slope *= counts.sum() / (counts.sum() + SHRINKAGE)
        slope = np.clip(slope, max(-LARGEST_STEP, -self.slope), LARGEST_STEP)
        intercepts = (by_place - edge * slope) / diagonal * counts / (counts + SHRINKAGE)
        self.slope += float(slope)
        self.intercepts = self.intercepts + np.clip(intercepts, -LARGEST_STEP, LARGEST_STEP)
