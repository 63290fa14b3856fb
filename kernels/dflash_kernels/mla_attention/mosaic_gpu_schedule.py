"""How a call of the Hopper kernel is cut into CTAs. Arithmetic on shapes only."""

import dataclasses
import math

import jax.numpy as jnp

STORED = jnp.float8_e4m3fn  # dtype of quantised rows
ROWS = 64  # query rows of a CTA: the M of a Hopper matrix instruction
KEYS = 64  # keys of a tile
RANK, ROTATED = 512, 64  # the widths that the kernel's registers and shared memory are laid out for
HALF = RANK // 2  # value columns of a warpgroup
MULTIPROCESSORS = 132
MOST_SPLITS = 66


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Choices that change speed and rounding only. None: chosen from the shapes.

    Attributes:
      splits: parts each sequence's rows are dealt to.
      min_tiles: fewest tiles of 64 keys worth a part of their own.
      cluster: two CTAs with different rows of the same sequence fetch its latents together, where rows fill pairs of CTAs.
    """

    splits: int | None = None
    min_tiles: int = 1
    cluster: bool = False


@dataclasses.dataclass(frozen=True)
class Launch:
    """Everything static about one launch.

    Attributes:
      tokens, heads, page_size, table_width: shapes of the call.
      rows: query rows of one sequence as they lie in memory, `tokens * heads` padded to a multiple of 8 where fewer than 64.
      row_tiles: CTAs that they are spread over. The last one starts early enough to be full.
      splits: parts that a sequence's visible rows are dealt to; min_tiles: fewest tiles worth a part of their own.
      cluster: CTAs that fetch their latents together, 1 or 2.
      quantised: rows are e4m3 numbers.
    """

    tokens: int
    heads: int
    page_size: int
    table_width: int
    rows: int
    row_tiles: int
    splits: int
    min_tiles: int
    cluster: int
    quantised: bool
    causal: bool
    scale: float

    @property
    def copies(self) -> int:
        """Copies that fill one tile's part: one for each page in it."""
        return max(KEYS // self.page_size, 1)

    @property
    def tile_rows(self) -> int:
        """Query rows of a CTA that exist in memory."""
        return min(self.rows, ROWS)

    @property
    def direct(self) -> bool:
        """Whether CTAs write the output itself rather than float32 partial results."""
        return self.splits == 1


def plan(
    tuning: Tuning, *, b: int, tokens: int, heads: int, page_size: int, table_width: int, quantised: bool, causal: bool,
    scale: float,
) -> Launch:  # fmt: skip
    """Cuts a call into CTAs."""
    rows = tokens * heads
    rows = rows if rows >= ROWS else -(-rows // 8) * 8
    row_tiles = -(-rows // ROWS)
    splits = tuning.splits
    if splits is None:
        splits = best_splits(b * row_tiles, table_width * page_size, min(rows, ROWS))
    return Launch(
        tokens=tokens, heads=heads, page_size=page_size, table_width=table_width, rows=rows, row_tiles=row_tiles,
        splits=splits, min_tiles=tuning.min_tiles, cluster=2 if tuning.cluster and row_tiles % 2 == 0 else 1,
        quantised=quantised, causal=causal, scale=scale,
    )  # fmt: skip


def best_splits(ctas: int, longest: int, rows: int) -> int:
    """Parts of a sequence that cost least, for `ctas` CTAs of whole sequences, one at a time on each multiprocessor.

    A wave of CTAs that leaves multiprocessors empty wastes them; a part costs the bytes of its float32 result, written and
    read, against those of the latents of `longest` tokens.
    """
    most = max(min(MOST_SPLITS, longest // KEYS), 1)

    def cost(splits: int) -> float:
        waves = ctas * splits / MULTIPROCESSORS
        merging = 0.0 if splits == 1 else splits * rows * 2 * RANK * 4 / (longest * (RANK + ROTATED) * 2)
        return math.ceil(waves) / waves + 0.1 * merging

    return min(range(1, most + 1), key=cost)
