"""When a cycle and pieces of prompts run as one program (`decoding.mixed_cycle`), and how many pieces.

A cycle of few rows takes as long as its weights are read, however few rows there are, and a prompt's pieces as long as their rows
are multiplied. Together they take about what all rows take. Cycles of many rows gain nothing.
"""

from dataclasses import dataclass, field

from dflash_jax.cache.specs import layer_specs
from dflash_jax.config import DecoderConfig
from dflash_jax.engine.buckets import Buckets, round_up
from dflash_jax.engine.cycle_costs import LAYER_S, Stack
from dflash_jax.engine.verify_policy import WORTH_COMPILING_S
from dflash_jax.models.registry import layer_traits

# Pieces beside a cycle at most.
MOST_PIECES = 8
# Tokens of the longest prompt whose pieces ride: what stands before a piece is read once for each, and once for a longer part that
# is computed alone.
LONGEST = 2048
# Seconds of a layer that are not saved: both kinds of rows attend by calls of their own, and are taken apart for these.
APART_S = 15e-6
# Of the time of both, the part that must be saved.
LEAST_SAVED = 0.05


@dataclass
class MixingPolicy:
    """Whether pieces of prompts ride with cycles.

    Attributes:
      target: the target's layers as the memory sees them.
      asked: True has them ride wherever they can, waiting for the programs; None where that saves time.
    """

    target: Stack
    asked: bool | None = None
    _missed: dict[object, float] = field(default_factory=dict)

    def saved_s(self, verified: int, rows: int) -> float:
        """Seconds that one pass saves over a cycle that verifies so many rows and another of so many rows of prompts; 0 where that
        is little of what both take."""
        apart = self.target.seconds(verified, 0.0) + self.target.seconds(rows, 0.0)
        together = self.target.seconds(verified + rows, 0.0) + self.target.layers * min(APART_S, LAYER_S)
        return apart - together if apart - together > LEAST_SAVED * apart else 0.0

    def riding(self, verified: int, buckets: Buckets) -> tuple[int, ...]:
        """Numbers of pieces that may ride with a cycle of so many rows."""
        sizes = [rows for rows in buckets.pieces if rows <= MOST_PIECES] or buckets.pieces[:1]
        return tuple(rows for rows in sizes if self.asked is True or self.saved_s(verified, rows * buckets.piece) > 0)

    def pieces(self, verified: int, lacks: int, buckets: Buckets) -> int:
        """Pieces of a program with a cycle of so many rows, where prompts lack so many; 0 where that saves nothing."""
        riding = self.riding(verified, buckets)
        return round_up(lacks, riding) if riding else 0

    def worth_compiling(self, key: object, seconds: float) -> bool:
        """Adds time lost for want of the program `key`, and tells once when that has become too much."""
        before = self._missed.get(key, 0.0)
        self._missed[key] = before + seconds
        return before < WORTH_COMPILING_S <= self._missed[key]


def mixing_refusal(target: DecoderConfig, *, exact: bool, ranks: int) -> str | None:
    """Why pieces of prompts of this target never ride with cycles; None where they may."""
    traits = layer_traits(target)
    if exact:
        return "a row's bits may depend on no other row, and programs of one shape alone run"
    if ranks > 1:
        return "devices that share a target exchange in programs of a decode loop alone"
    if traits.delta is not None or traits.convolved:
        return "tokens of a sequence are mixed outside of attention, by operations that know one kind of rows"
    if any(spec.index for spec in layer_specs(target)):
        return "layers take over the keys that an indexer before them chose, for one kind of rows"
    return None
