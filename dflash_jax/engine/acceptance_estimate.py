"""What a drafter's own confidence says of its proposals: a logistic law that is fitted while requests are served.

A proposal at place k is reckoned to stand with chance sigmoid(w f + b_k), f the log-odds of its law's most probable token; where
a head estimates that chance itself, with chance sigmoid(w f + v c + b_k), c the log-odds that it gives. Slopes are shared by all
places and the intercepts by all requests. Where a block ends is the one place at which a proposal is seen to fall; what stands
behind it was never judged.

Source: Newton's method for logistic regression (Hastie, Tibshirani, Friedman, The Elements of Statistical Learning, section 4.4.1),
whose matrix is an arrowhead here: a slope or two coupled with intercepts that are not coupled with each other.
"""

import numpy as np
from jaxtyping import Bool, Float, Int

# Before anything was seen: about what drafters of several families turned out to have. Of two signs, halfway between that and a
# head that is right.
FIRST_SLOPES, FIRST_INTERCEPT = {1: (0.5,), 2: (0.25, 0.5)}, -0.2
# Cycles between two steps, and before the first one: from there on twice as many each time, as who expects too little of a drafter
# may soon ask nothing of it any more.
REFIT_CYCLES, FIRST_CYCLES = 100, 8
# Added to the diagonal; what a step is shrunk by where observations are few; and its largest, for data that a line parts.
RIDGE, SHRINKAGE, LARGEST_STEP = 1e-3, 50.0, 2.0


class AcceptanceEstimate:
    """The law's parameters, and what was observed since they last changed.

    Args:
      drafts: proposals of a block (g).
      signs: log-odds of each proposal (s): of its law, and the ones that a head gives (`DFlashConfig.signs`).

    Attributes:
      slopes, intercepts: w and v, and b.
    """

    def __init__(self, drafts: int, signs: int = 1):
        self.slopes, self.intercepts = np.array(FIRST_SLOPES[signs]), np.full(drafts, FIRST_INTERCEPT)
        self._seen: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._cycles, self._wanted = 0, FIRST_CYCLES

    @property
    def parameters(self) -> Float[np.ndarray, "E"]:
        """As programs take them, float32: the slopes, then the intercepts."""
        return np.concatenate([self.slopes, self.intercepts]).astype(np.float32)

    def chances(self, odds: Float[np.ndarray, "... F"]) -> Float[np.ndarray, "... g"]:
        """That each proposal stands where those before it do. `odds` are all proposals' first signs, then their second ones."""
        signs = self._apart(odds)
        return 1 / (1 + np.exp(-(np.einsum("...sg,s->...g", signs, self.slopes) + self.intercepts)))

    def _apart(self, odds: Float[np.ndarray, "... F"]) -> Float[np.ndarray, "... s g"]:
        return odds.reshape(*odds.shape[:-1], len(self.slopes), len(self.intercepts))

    def observe(
        self,
        odds: Float[np.ndarray, "n F"],
        accepted: Int[np.ndarray, "n"],
        verified: Int[np.ndarray, "n"],
        *,
        cycles: int,
    ) -> None:
        """Takes in blocks of `cycles` cycles, and makes a step once there were enough of them.

        Args:
          odds: as of `chances`.
          accepted: proposals that stood.
          verified: tokens that were verified, the pending one included.
        """
        places = np.arange(len(self.intercepts))
        stood = places < accepted[:, None]
        judged = stood | ((places == accepted[:, None]) & (places < verified[:, None] - 1))
        self._seen.append((odds.astype(np.float64), stood, judged))
        self._cycles += cycles
        if self._cycles >= self._wanted:
            odds, stood, judged = (np.concatenate(each) for each in zip(*self._seen, strict=True))
            self._seen, self._cycles, self._wanted = [], 0, min(2 * self._wanted, REFIT_CYCLES)
            self.step(odds, stood, judged)

    def step(
        self, odds: Float[np.ndarray, "n F"], stood: Bool[np.ndarray, "n g"], judged: Bool[np.ndarray, "n g"]
    ) -> None:
        """One damped step of Newton's method; slopes stay at 0 or above: confidence is no bad sign."""
        chance, signs = self.chances(odds), self._apart(odds)
        wrong = np.where(judged, stood - chance, 0.0)
        weight = np.where(judged, chance * (1 - chance), 0.0)
        counts = judged.sum(axis=0)
        weighted, diagonal = signs * weight[:, None], weight.sum(axis=0) + RIDGE
        corner = np.einsum("nsg,ntg->st", weighted, signs) + RIDGE * np.eye(len(self.slopes))
        edge, by_place = weighted.sum(axis=0), wrong.sum(axis=0)
        rest = corner - (edge / diagonal) @ edge.T
        slopes = np.linalg.solve(rest, np.einsum("ng,nsg->s", wrong, signs) - edge @ (by_place / diagonal))
        slopes *= counts.sum() / (counts.sum() + SHRINKAGE)
        slopes = np.clip(slopes, np.maximum(-LARGEST_STEP, -self.slopes), LARGEST_STEP)
        intercepts = (by_place - slopes @ edge) / diagonal * counts / (counts + SHRINKAGE)
        self.slopes = self.slopes + slopes
        self.intercepts = self.intercepts + np.clip(intercepts, -LARGEST_STEP, LARGEST_STEP)
