"""Tiling of an indexer's kernels on Hopper. Arithmetic on shapes only."""

import dataclasses

from dflash_kernels.core.device import MULTIPROCESSORS

KEYS = 64  # of a tile
WIDTH = 128  # numbers of a key
MOST_COLUMNS = 256  # heads of all tokens of a group: the N of a matrix instruction


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Choices that change speed only.

    Attributes:
      columns: heads of all query tokens that one matrix instruction multiplies keys with, at most.
      warpgroups: of a CTA; stages: tiles of keys on their way to each.
      ctas: of a multiprocessor.
    """

    columns: int
    warpgroups: int
    stages: int
    ctas: int


# A thread has half as many sums as there are columns, and the factors of a quarter of them: registers decide on warpgroups. For
# sixteen tokens of 64 heads and 131,072 keys WIDE takes 38.2 us on an H200 and SEVERAL 35.7; a token alone takes 8.7 with four
# stages, 7.3 with two.
WIDE = Tuning(columns=MOST_COLUMNS, warpgroups=2, stages=4, ctas=1)
ALONE = Tuning(columns=64, warpgroups=4, stages=2, ctas=1)
SEVERAL = Tuning(columns=128, warpgroups=4, stages=4, ctas=1)


@dataclasses.dataclass(frozen=True)
class Launch:
    """Everything static about one launch of scores.

    Attributes:
      tokens, heads, page_size, table_width: shapes of the call.
      group: query tokens of a CTA; groups: of a sequence.
      ctas: that share the keys of a sequence.
      warpgroups, stages: of a CTA, and of each of them.
    """

    tokens: int
    heads: int
    page_size: int
    table_width: int
    group: int
    ctas: int
    warpgroups: int
    stages: int

    @property
    def groups(self) -> int:
        return -(-self.tokens // self.group)

    @property
    def columns(self) -> int:
        return self.group * self.heads

    @property
    def tiles(self) -> int:
        """Tiles of keys that the table has room for."""
        return self.table_width * self.page_size // KEYS


def plan(tuning: Tuning | None, *, b: int, tokens: int, heads: int, page_size: int, table_width: int) -> Launch:
    """Cuts a call into CTAs; `tuning` None: by how many tokens and heads there are."""
    if tuning is None:
        tuning = WIDE if heads > SEVERAL.columns else ALONE if tokens == 1 else SEVERAL
    group = max(min(tuning.columns // heads, tokens), 1)
    ctas = max(tuning.ctas * MULTIPROCESSORS // (b * -(-tokens // group)), 1)
    tiles = table_width * page_size // KEYS
    return Launch(
        tokens=tokens, heads=heads, page_size=page_size, table_width=table_width, group=group,
        ctas=min(ctas, -(-tiles // tuning.warpgroups)), warpgroups=tuning.warpgroups, stages=tuning.stages,
    )  # fmt: skip
