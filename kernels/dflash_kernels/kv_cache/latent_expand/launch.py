"""Launch planning of latent expansion on Hopper: tiles, stages and clusters from shapes alone."""

import dataclasses
import math

from dflash_kernels.core.device import MULTIPROCESSORS

ROWS, COLUMNS = 128, 128  # of a tile of the product
SLAB = 64  # numbers of a row in one k-tile: 128 bytes


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Choices that change speed only.

    Attributes:
      stages: k-tiles of rows in flight in a CTA, two or more.
      out_slots: pieces of a tile that a consumer has on their way out.
      cluster: CTAs that share rows by TMA multicast, each of which copies a part of them.
    """

    stages: int = 5
    out_slots: int = 1
    cluster: int = 2


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static shapes and schedule of one launch.

    Attributes:
      heads, rank, page_size, sequences: shapes of the call.
      stride: rows of a sequence in the result: whole tiles.
      groups: CTAs that share the row tiles of one unit, which is the keys or the values of a head.
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
        """K-tiles of a latent; the rotary part is one more."""
        return self.rank // SLAB

    @property
    def piece(self) -> int:
        """Rows of one copy: they lie in one page."""
        return math.gcd(self.page_size, ROWS)


def plan(tuning: Tuning, *, heads: int, rank: int, page_size: int, sequences: int, rows: int) -> Plan:
    """The plan of a call; `rows` of each sequence in the result."""
    stride = -(-rows // ROWS) * ROWS
    groups = max(1, min(MULTIPROCESSORS // (2 * heads), sequences * stride // ROWS))
    return Plan(
        heads=heads, rank=rank, page_size=page_size, sequences=sequences, stride=stride, groups=groups,
        stages=min(tuning.stages, rank // SLAB), out_slots=tuning.out_slots,
        cluster=tuning.cluster if heads % tuning.cluster == 0 else 1,
    )  # fmt: skip
