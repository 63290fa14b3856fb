"""How a call of the Hopper kernel is dealt to its CTAs."""

import dataclasses
import math

ROWS, COLUMNS = 128, 128  # of a tile of the product
SLAB = 64  # numbers of a row that are copied at a time: 128 bytes
MULTIPROCESSORS = 132


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Choices that change speed only.

    Attributes:
      stages: slabs of rows in flight in a CTA, two or more.
      out_slots: pieces of a tile that a warpgroup has on their way out.
      cluster: CTAs that read rows together, each a part of them for all.
    """

    stages: int = 5
    out_slots: int = 1
    cluster: int = 2


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about one launch.

    Attributes:
      heads, rank, page_size, sequences: shapes of the call.
      stride: rows of a sequence in the result: whole tiles.
      groups: CTAs that share the tiles of rows of one unit, which is the keys or the values of a head.
    """

    heads: int
    rank: int
    page_size: int
    sequences: int
    stride: int
    groups: int
    stages: int
    out_slots: int
    cluster: int

    @property
    def units(self) -> int:
        return 2 * self.heads

    @property
    def slabs(self) -> int:
        """Of a latent; the rotated part is one more."""
        return self.rank // SLAB

    @property
    def piece(self) -> int:
        """Rows of one copy: they lie in one page."""
        return math.gcd(self.page_size, ROWS)


def plan(tuning: Tuning, *, heads: int, rank: int, page_size: int, sequences: int, rows: int) -> Plan:
    stride = -(-rows // ROWS) * ROWS
    groups = max(1, min(MULTIPROCESSORS // (2 * heads), sequences * stride // ROWS))
    return Plan(
        heads=heads, rank=rank, page_size=page_size, sequences=sequences, stride=stride, groups=groups,
        stages=min(tuning.stages, rank // SLAB), out_slots=tuning.out_slots,
        cluster=tuning.cluster if heads % tuning.cluster == 0 else 1,
    )  # fmt: skip
