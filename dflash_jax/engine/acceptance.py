"""Acceptance rates by position, and whether a drafter is of any use to the requests that it drafts for."""

import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping

# Cycles that are looked at before anything is said of a drafter, and tokens a cycle below which something is.
RECENT_CYCLES = 200
LOW_TOKENS_PER_CYCLE = 1.2


def acceptance_by_position(cycles: Mapping[tuple[int, int], int]) -> tuple[float, ...]:
    """Acceptance rates by position of a block: the share of the cycles with a draft there in which that draft was accepted.

    Args:
      cycles: how many there were by the drafts that one offered and the first so many of them that were accepted. A cycle offers
        the drafts that were verified; where an accepted one ended the text, those up to it alone, as nothing is known of the
        others. A draft behind a refused one was offered and not accepted.
    """
    shares = []
    for place in range(1, max((drafts for drafts, _ in cycles), default=0) + 1):
        offered = sum(count for (drafts, _), count in cycles.items() if drafts >= place)
        shares.append(sum(count for (_, stood), count in cycles.items() if stood >= place) / offered)
    return tuple(shares)


class DraftRecord:
    """Acceptance of the drafts of all requests of `generate` and `stream`, from all threads."""

    def __init__(self):
        self._lock = threading.Lock()
        self._cycles = Counter[tuple[int, int]]()
        self._recent: deque[int] = deque(maxlen=RECENT_CYCLES)
        self._told = False

    def observe(self, cycles: Iterable[tuple[int, int]]) -> float | None:
        """Takes in cycles: the drafts that each offered, and those accepted.

        Returns:
          Once, when the last `RECENT_CYCLES` cycles that offered drafts gained fewer than `LOW_TOKENS_PER_CYCLE` tokens: how many.
        """
        with self._lock:
            for drafts, stood in cycles:
                self._cycles[drafts, stood] += 1
                if drafts:
                    self._recent.append(stood)
            mean = 1 + sum(self._recent) / RECENT_CYCLES
            if self._told or len(self._recent) < RECENT_CYCLES or mean >= LOW_TOKENS_PER_CYCLE:
                return None
            self._told = True
            return mean

    @property
    def by_position(self) -> tuple[float, ...]:
        """See `acceptance_by_position`; empty before the first cycle that offered a draft."""
        with self._lock:
            return acceptance_by_position(self._cycles)


def low_acceptance(mean: float) -> str:
    """Warning for a drafter that gains so few tokens a cycle."""
    return (
        f"the drafter's tokens are hardly ever accepted: {mean:.2f} tokens a cycle over the last {RECENT_CYCLES}, and 1 is what "
        "the target gains alone. Texts are right all the same, draft=False is quicker. Likely causes: the chat template lets the "
        "model think where the drafter learnt answers without thinking (chat_options={'enable_thinking': False}); prompts come "
        "without the chat template, or with another one than it learnt (chat=True); it was trained for another target; the target "
        "is quantized and it was trained for the full weights; its window (draft_window) is too short; a high temperature leaves "
        "the next token open. "
        "model.acceptance_by_position tells which drafts stand"
    )
