"""How many proposals stand, learnt from the cycles so far: for each place of a block, the chance that its proposal stands where
those before it did.

Chances of places, not means of lengths: a cycle that verified four tokens says nothing about the tenth proposal, and all it can say
about the first three. Evidence fades with every cycle, so that a drafter which was given up on is tried again after a while.
"""

import numpy as np
from jaxtyping import Float, Int

# Chance of the first proposal before anything is known: high, so that drafting is tried.
FIRST_GUESS = 0.8
# A guess weighs as much as this many observations.
GUESS_WEIGHT = 2.0
# Observations of one place count for at most this many, and half of that after so many cycles without one.
MOST_EVIDENCE = 256.0
HALF_LIFE = 96.0


class Acceptance:
    """Statistics of one kind of requests. The same observations in the same order give the same expectations.

    Args:
      drafts: proposals of a block.
    """

    def __init__(self, drafts: int):
        self.tried, self.stood = np.zeros(drafts), np.zeros(drafts)

    def fade(self, cycles: int) -> None:
        """So many cycles have gone by, whoever ran in them."""
        keep = 0.5 ** (cycles / HALF_LIFE)
        self.tried *= keep
        self.stood *= keep

    def observe(self, accepted: Int[np.ndarray, "n"], verified: int) -> None:
        """Takes in cycles that verified `verified` tokens, the pending one included, of which `accepted` proposals stood."""
        places = np.arange(1, verified)
        tried = np.sum(accepted[:, None] >= places - 1, axis=0)
        stood = np.sum(accepted[:, None] >= places, axis=0)
        total = self.tried[: verified - 1] + tried
        scale = np.minimum(1.0, MOST_EVIDENCE / np.maximum(total, 1.0))
        self.tried[: verified - 1] = total * scale
        self.stood[: verified - 1] = (self.stood[: verified - 1] + stood) * scale

    @property
    def evidence(self) -> float:
        """Cycles that the chance of the first proposal rests on."""
        return float(self.tried[0]) if len(self.tried) else 0.0

    def expected(self) -> Float[np.ndarray, "offered"]:
        """Tokens that a cycle gains on average where it verifies 1, 2, ... tokens.

        The guess for a place of which little is known is the chance of the place before it.
        """
        chance, chances = FIRST_GUESS, []
        for tried, stood in zip(self.tried.tolist(), self.stood.tolist(), strict=True):
            chance = (stood + GUESS_WEIGHT * chance) / (tried + GUESS_WEIGHT)
            chances.append(chance)
        return 1.0 + np.concatenate([[0.0], np.cumsum(np.cumprod(chances))])
