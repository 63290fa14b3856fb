"""Tiling and split-KV of a latent attention call on Hopper: how it is cut into CTAs. Arithmetic on shapes only."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from dflash_kernels.core.device import MATRIX_ROWS as ROWS
from dflash_kernels.core.device import MULTIPROCESSORS

STORED = jnp.float8_e4m3fn  # dtype of 8-bit rows
KEYS = 64  # keys of a tile
RANK, ROTATED = 512, 64  # the widths that the kernel's registers and shared memory are laid out for
PARTS = jnp.float16  # dtype of partial outputs, each row of each half under a factor of its own
NARROW_ROWS = 16  # query rows of a CTA of one warpgroup, for 8-bit rows under few queries
HALF = RANK // 2  # value columns of a warpgroup
MOST_SPLITS = 66
# Microseconds: of a CTA's beginning and end, of a tile of keys, of combining at all, and of one CTA's split in it.
STARTING, TILE, MERGING, PART = 2.0, 1.5, 3.0, 0.05


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Choices that change speed and rounding only. None: chosen from the shapes.

    Attributes:
      splits: CTAs that share a sequence's rows (split-KV).
      min_tiles: fewest tiles of 64 keys worth a split.
    """

    splits: int | None = None
    min_tiles: int = 2

    def __post_init__(self):
        if min(1 if self.splits is None else self.splits, self.min_tiles) < 1:
            raise ValueError(f"takes a part and a tile or more, not {self}")


@dataclasses.dataclass(frozen=True)
class Launch:
    """Everything static about one launch.

    Attributes:
      tokens, heads, page_size, table_width: shapes of the call.
      rows: query rows of one sequence as they lie in memory, `tokens * heads` padded to a multiple of 8.
      row_tiles: CTAs that they are spread over. The last one starts early enough to be full.
      splits: CTAs that share a sequence's visible rows; min_tiles: fewest tiles worth a split.
      quantized: rows are e4m3 numbers.
      ordered: sequences begin from the longest to the shortest, where not all CTAs run at once.
      limited: sequences have a fewest and a most of rows that their queries see.
      selected: each sequence is one query token, and its table names rows of the pool, one by one.
    """

    tokens: int
    heads: int
    page_size: int
    table_width: int
    rows: int
    row_tiles: int
    splits: int
    min_tiles: int
    quantized: bool
    ordered: bool
    causal: bool
    scale: float
    limited: bool = False
    selected: bool = False

    @property
    def copies(self) -> int:
        """Copies that fill one tile's part: one for each page in it."""
        return max(KEYS // self.page_size, 1)

    @property
    def tile_rows(self) -> int:
        """Query rows of a CTA that exist in memory."""
        return min(self.rows, ROWS)

    @property
    def narrow(self) -> bool:
        """Whether the kernel for float8 rows under few queries takes the call."""
        return self.quantized and self.tokens * self.heads <= NARROW_ROWS

    @property
    def direct(self) -> bool:
        """Whether CTAs write the output itself rather than partial results."""
        return self.splits == 1


def plan(
    tuning: Tuning, *, b: int, tokens: int, heads: int, page_size: int, table_width: int, quantized: bool, causal: bool,
    scale: float, limited: bool = False, selected: bool = False,
) -> Launch:  # fmt: skip
    """Cuts a call into CTAs."""
    rows = -(-tokens * heads // 8) * 8
    row_tiles = -(-rows // ROWS)
    splits = tuning.splits
    if splits is None:
        splits = best_splits(b * row_tiles, table_width * page_size)
    return Launch(
        tokens=tokens, heads=heads, page_size=page_size, table_width=table_width, rows=rows, row_tiles=row_tiles,
        splits=splits, min_tiles=tuning.min_tiles, quantized=quantized,
        ordered=b > 1 and b * splits * row_tiles > MULTIPROCESSORS and not selected, causal=causal, scale=scale,
        limited=limited, selected=selected,
    )  # fmt: skip


def longest_first(seq_lens: Int[Array, "B"]) -> Int[Array, "B"]:
    """Indices of sequences from the longest to the shortest, equal ones as they come.

    Two small reductions rather than a sort, and the same ones for all layers, so that a compiled step does them once.
    """
    index = jnp.arange(seq_lens.shape[0], dtype=jnp.int32)
    longer = seq_lens[None, :] > seq_lens[:, None]
    earlier = (seq_lens[None, :] == seq_lens[:, None]) & (index[None, :] < index[:, None])
    place = jnp.sum(longer | earlier, axis=1)
    return jnp.sum(jnp.where(place[None, :] == index[:, None], index[None, :], 0), axis=1, dtype=jnp.int32)


def best_splits(ctas: int, longest: int) -> int:
    """Parts of a sequence that take least time, for `ctas` CTAs of whole sequences of `longest` rows, one at a time on each
    multiprocessor.

    The times are measured on an H200. The results of a split are written and read again, 64 rows of it in about a thirtieth
    of the time that a tile of keys takes.
    """
    tiles = max(-(-longest // KEYS), 1)

    def microseconds(splits: int) -> float:
        waves = -(-ctas * splits // MULTIPROCESSORS)
        pairs = -(-tiles // (2 * splits))
        attending = waves * (STARTING + 2 * TILE * pairs)
        return attending if splits == 1 else attending + MERGING + PART * ctas * splits

    return min(range(1, min(MOST_SPLITS, tiles) + 1), key=microseconds)
