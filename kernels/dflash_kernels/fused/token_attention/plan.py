"""Tiling of one token's attention with the products before and after it: CTAs, splits, stages. Arithmetic on shapes only."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from dflash_kernels.core.device import MATRIX_ROWS as TILE
from dflash_kernels.core.device import SHARED_MEMORY, require_page_size
from dflash_kernels.matmul.few_tiling import BLOCK, RowNorm

HEAD_DIM = 64
COLUMNS = 8  # of a product: the token and what fills a matrix instruction
# Tiles of keys of one CTA. A CTA attends with one warpgroup, which more tiles than that would keep longer than memory takes for the
# output projection.
MOST_TILES = 4
# Blocks of the output projection on their way to a CTA while its ring fills. Whatever it reads besides waits behind them, also
# where CTAs wait for one another; with so many, memory works at its full rate. CTAs that project nothing begin with them at once
# and leave memory to the heads, for which all wait.
IN_FLIGHT, IN_FLIGHT_BESIDE = 6, 2
SOME_NORM = RowNorm(0.0)  # changes nothing about what fits
APART = 32  # words from one counter to the next: all CTAs of a KV head look at theirs again and again
_RESERVED = 4096  # bytes: barriers, and what reductions of rows need
_TILE_BYTES = TILE * BLOCK * 2


@dataclasses.dataclass(frozen=True)
class Keys:
    """Launch over the pages as `mosaic_gpu.paged_kv.Launch` describes it: of the keys before the token, which takes its own from
    what it has just written.

    Attributes:
      splits: CTAs of a KV head, which take turns at its tiles; stages: tiles in flight.
    """

    group: int
    page_size: int
    table_width: int
    kv_heads: int
    splits: int
    stages: int
    window: tuple[int | None, int | None]
    rows: int = TILE
    block_rows: int = TILE
    keys: int = TILE
    head_dim: int = HEAD_DIM
    width: int = HEAD_DIM
    warpgroups: int = 1
    min_tiles: int = 1
    items: int = 0
    causal: bool = True
    evict_first: bool = False

    @property
    def copies(self) -> int:
        """Copies that fill one tile: one for each page in it."""
        return max(self.keys // self.page_size, 1)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about one launch.

    Attributes:
      hidden: D.
      keys: the launch over the pages.
      scale: of scores.
      norm: of the stream.
      stages: of the ring of weights, each 64 rows of 64 columns.
    """

    hidden: int
    keys: Keys
    scale: float
    norm: RowNorm
    stages: int

    @property
    def group(self) -> int:
        return self.keys.group

    @property
    def kv_heads(self) -> int:
        return self.keys.kv_heads

    @property
    def heads(self) -> int:
        return self.group * self.kv_heads

    @property
    def splits(self) -> int:
        return self.keys.splits

    @property
    def makers(self) -> int:
        """CTAs of a KV head that have a tile of the first projection: one for each of its heads."""
        return self.group + 2

    @property
    def projected_blocks(self) -> int:
        """Steps of a tile of the first projection."""
        return self.hidden // BLOCK

    @property
    def output_blocks(self) -> int:
        """Steps of a tile of the output projection, of which a CTA has the columns of its KV head."""
        return self.group * HEAD_DIM // BLOCK

    @property
    def output_tiles(self) -> int:
        return self.hidden // TILE

    @property
    def resident_blocks(self) -> int:
        """Blocks of the products' right operand that shared memory has room for."""
        return max(self.projected_blocks, self.output_blocks)


def counters(kv_heads: int) -> int:
    """Words of the counters: of each KV head one for the heads that are projected and one for its splits."""
    return 2 * kv_heads * APART


def plan(
    dtype: Any, *, heads: int, kv_heads: int, head_dim: int, turned: int, page_size: int, table_width: int, page_dtype: Any,
    hidden: int, window: tuple[int | None, int | None], ctas: int, scale: float = 1.0, norm: RowNorm = SOME_NORM,
) -> Plan:  # fmt: skip
    """Raises NotImplementedError with the reason for what does not tile.

    Args:
      turned: columns of a head that turn with the position.
      ctas: that may wait for one another: one for each multiprocessor.
    """
    if dtype != jnp.bfloat16 or page_dtype != dtype:
        raise NotImplementedError(
            f"takes bfloat16 throughout, not {jnp.dtype(dtype)} and pages of {jnp.dtype(page_dtype)}"
        )
    if head_dim != HEAD_DIM or turned != head_dim:
        raise NotImplementedError(f"turns whole heads of {HEAD_DIM}, not {turned} columns of {head_dim}")
    if hidden % TILE:
        raise NotImplementedError(f"takes rows of whole {TILE}s, not {hidden}")
    require_page_size(page_size)
    left, right = window
    if right not in (None, 0) or (left is not None and left < 0):
        raise NotImplementedError(f"takes windows to the left, not {window}")
    splits, group = ctas // kv_heads, heads // kv_heads
    if splits < group + 2:
        raise NotImplementedError(
            f"has a CTA for each of a KV head's {group + 2} heads, more than {ctas} multiprocessors over {kv_heads}"
        )
    seen = table_width * page_size if left is None else min(table_width * page_size, left + TILE)
    tiles = -(-seen // (TILE * splits))
    if tiles > MOST_TILES:
        raise NotImplementedError(
            f"{seen} keys are {tiles} tiles of {splits} CTAs each: attention is worth a launch of its own"
        )
    # Positions and lengths leave the token itself out.
    before = None if left is None else left - 1
    keys = Keys(group, page_size, table_width, kv_heads, splits, min(tiles, 2), (before, None))
    made = Plan(hidden, keys, scale, norm, 0)
    room = SHARED_MEMORY - _RESERVED - made.resident_blocks * COLUMNS * BLOCK * 2 - TILE * COLUMNS * 4
    room -= TILE * HEAD_DIM * 2 * (1 + 2 * keys.stages)  # queries, keys and values
    stages = room // _TILE_BYTES
    # All blocks of a tile of the output projection are multiplied before any is given back.
    if stages < max(2 * IN_FLIGHT, made.output_blocks):
        raise NotImplementedError(f"rows of {hidden} leave no room for weights of {group} heads")
    return dataclasses.replace(made, stages=stages)
