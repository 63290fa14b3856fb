"""Tiling and split-KV of a paged attention call on Hopper: how it is cut into CTAs. Arithmetic on shapes only."""

import dataclasses
from typing import Any

from dflash_kernels.attention.split_kv import best_splits
from dflash_kernels.core.device import HALF_SHARED_MEMORY, MULTIPROCESSORS, SHARED_MEMORY
from dflash_kernels.core.device import MATRIX_ROWS as ROWS

BARRIERS = 512  # bytes, more than any launch has
SWAPPED = 128  # threads of a CTA that swap with the other one's
# Splits from which on a kernel of our own combines them faster than XLA, whose fusion takes them one after the other: as rows, and
# as fragments, where XLA needs two launches.
KERNEL_COMBINES, KERNEL_COMBINES_FRAGMENTS = 8, 4
ONE_SPLIT = 192  # keys in a window's reach that are not worth a second launch
MOST_TOGETHER = 8  # CTAs of a cluster that every GPU can launch


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Choices that change speed and rounding only. None: chosen from the shapes.

    Attributes:
      splits: CTAs that share a sequence's pages (split-KV).
      stages: of the ring of keys and values.
      keys: keys of a tile, 64 or 128; 32 or 64 of heads wider than 256.
      min_tiles: fewest tiles worth a split.
      merge: who combines the splits afterwards, "kernel" or "xla".
      together: a cluster of up to eight, the CTAs of a sequence's splits, combines them itself.
      paired: of heads wider than 256, whether two CTAs of a cluster have half of the columns each.
    """

    splits: int | None = None
    stages: int | None = None
    keys: int | None = None
    min_tiles: int = 1
    merge: str | None = None
    together: bool | None = None
    paired: bool | None = None

    def __post_init__(self):
        stages, splits = (1 if number is None else number for number in (self.stages, self.splits))
        if self.keys not in (None, 32, 64, 128) or min(stages, splits, self.min_tiles) < 1:
            raise ValueError(f"takes tiles of 32, 64 or 128 keys, and a stage, a part and a tile or more, not {self}")
        if self.merge not in (None, "kernel", "xla"):
            raise ValueError(f'merge is "kernel", "xla" or None, not {self.merge!r}')


@dataclasses.dataclass(frozen=True)
class Launch:
    """Everything static about one launch.

    Attributes:
      tokens, group, head_dim, page_size, table_width, kv_heads: shapes of the call.
      warpgroups: of one CTA, which share its keys and values; rows: query rows of each (M).
      row_blocks: CTAs that the rows of one KV head are spread over.
      keys: keys of a tile; stages: tiles in flight.
      splits: CTAs that share a sequence's visible pages; min_tiles: fewest tiles worth a split.
      direct: write the output itself (one split) rather than float32 partial results.
      together: CTAs of a cluster write the output, combined from the splits in their shared memories.
      items: work items of a `PagedSchedule`; the last CTA of a sequence's to finish combines its splits. 0 without one.
      evict_first: pages are copied with a hint that they are read once.
      fragments: splits are stored as the fragments that threads hold (`combine.store_fragments`).
      halves: two warpgroups share query rows, and each has half of the columns.
      paired: these are warpgroups of two CTAs, a cluster.
      flows: products of two tiles are on their way at a time.
      invariant: over 8-bit pages, whether a row's bits depend on no other row and not on how many keys there are.
    """

    tokens: int
    group: int
    head_dim: int
    page_size: int
    table_width: int
    kv_heads: int
    warpgroups: int
    rows: int
    row_blocks: int
    keys: int
    stages: int
    splits: int
    min_tiles: int
    direct: bool
    causal: bool
    window: tuple[int | None, int | None]
    soft_cap: float | None
    scale: float
    alibi_sqrt: bool = False
    together: bool = False
    items: int = 0
    evict_first: bool = False
    fragments: bool = False
    halves: bool = False
    paired: bool = False
    flows: bool = False
    invariant: bool = False

    @property
    def combines(self) -> bool:
        """Whether the launch combines the splits itself."""
        return self.together or self.items > 0

    @property
    def unstaged(self) -> bool:
        """Whether results leave from registers alone: memory for them would leave no room for a third stage of heads of 256."""
        return self.halves or (self.head_dim == 256 and self.stages > 2 and not self.combines)

    def traced_for(self, interpret: Any) -> "Launch":
        """The same for Pallas' interpreter, if that runs it: its CTAs share no memory, and its copies have no hints."""
        if interpret is None:
            return self
        row_blocks = -(-self.tokens * self.group // ROWS) if self.paired else self.row_blocks
        return dataclasses.replace(self, paired=False, row_blocks=row_blocks, together=False, evict_first=False)

    @property
    def pair(self) -> bool:
        """Whether a cluster of two exchanges halves and writes the output."""
        return self.together and self.splits == 2

    @property
    def block_rows(self) -> int:
        return self.rows if self.halves and not self.paired else self.warpgroups * self.rows

    @property
    def width(self) -> int:
        """Columns that a row has in shared memory: matrix instructions take sixteen at a time."""
        return -(-self.head_dim // 16) * 16

    @property
    def copies(self) -> int:
        """Copies that fill one tile: one for each page in it."""
        return max(self.keys // self.page_size, 1)


def plan(
    tuning: Tuning, *, b: int, tokens: int, group: int, head_dim: int, page_size: int, kv_heads: int, table_width: int,
    has_sinks: bool, items: int = 0, **mask: Any,
) -> Launch:  # fmt: skip
    """Cuts a call into CTAs, `items` for each KV head where a schedule says which and the shapes are such as it takes.

    Raises ValueError for a tuning that asks for fewer than two stages or for tiles of 32 keys.
    """
    if tuning.keys == 32 or tuning.stages == 1:
        raise ValueError(f"takes tiles of 64 or 128 keys and two stages or more with heads of {head_dim}, not {tuning}")
    tiles = -(-tokens * group // ROWS)
    width = -(-head_dim // 16) * 16
    # Two warpgroups of wider heads would not fit into shared memory, and do not share rows that are padded.
    warpgroups = min(tiles, 2 if head_dim <= 128 and width == head_dim else 1)
    row_blocks = -(-tiles // warpgroups)
    keys = tuning.keys or 64
    if page_size > keys and page_size % keys:
        keys = 64
    ctas = b * kv_heads * row_blocks
    per_multiprocessor = 2 if warpgroups == 1 and keys == 64 and head_dim <= 128 else 1
    splits = tuning.splits
    if splits is None and _seen(tokens, table_width * page_size, mask["window"]) <= ONE_SPLIT:
        splits = 1
    elif splits is None:
        splits = best_splits(
            ctas, MULTIPROCESSORS, table_width * page_size, keys, min(tokens * group, warpgroups * ROWS)
        )
    # A block that starts or ends inside a token's group of rows has no place in the output until splits are combined, and a token's
    # rows can only be copied from where TMA can read: every 128 bytes of shared memory, two bytes an element.
    whole_tokens = tiles == 1 or ROWS % group == 0
    if not takes_items(tokens * group, head_dim, has_sinks):
        items = 0
    direct = not items and splits == 1 and whole_tokens and group * head_dim % 64 == 0
    # Splits on their way to being combined stay in the L2 then; where there are none the hint gains nothing (docs/attention.md).
    evict_first = not direct
    # Measured: pairs gain where splits are large, larger clusters lose (docs/attention.md).
    possible = 2 <= splits <= MOST_TOGETHER and not has_sinks and tiles == 1 and head_dim in (64, 128)
    together = (
        not items
        and possible
        and (splits == 2 and tokens * group > ROWS // 2 if tuning.together is None else tuning.together)
    )
    stages = tuning.stages
    if stages is None:
        # Splits leave from registers, but room for one makes two stages of what would be three, which are slower.
        queries = warpgroups * ROWS * width * (4 if direct else 6) + (keys * width * 4 if width > head_dim else 0)
        budget = HALF_SHARED_MEMORY if per_multiprocessor == 2 else SHARED_MEMORY
        stages = max(min((budget - queries - BARRIERS) // (keys * head_dim * 4), 4), 2)
    return Launch(
        tokens=tokens, group=group, head_dim=head_dim, page_size=page_size, table_width=table_width, kv_heads=kv_heads,
        warpgroups=warpgroups, rows=ROWS, row_blocks=row_blocks, keys=keys, stages=stages, splits=splits,
        min_tiles=tuning.min_tiles, direct=direct, together=together, items=items, evict_first=evict_first, **mask,
    )  # fmt: skip


def _seen(tokens: int, longest: int, window: tuple[int | None, int | None]) -> int:
    """Keys that some token of a call sees, at most."""
    return longest if window[0] is None else min(longest, window[0] + tokens)


def takes_items(rows: int, head_dim: int, has_sinks: bool) -> bool:
    """Whether the splits of calls of that kind can be combined by their own CTAs."""
    return rows <= ROWS and head_dim in (64, 128) and not has_sinks


def plan_wide(
    tuning: Tuning, *, b: int, tokens: int, group: int, head_dim: int, page_size: int, kv_heads: int, table_width: int,
    has_sinks: bool, items: int = 0, **mask: Any,
) -> Launch:  # fmt: skip
    """Cuts a call with heads wider than 256 into CTAs of two warpgroups that share 64 query rows; a schedule is not followed.

    Raises ValueError for a tuning that asks for tiles of 128 keys.
    """
    del items
    tiles, keys = -(-tokens * group // ROWS), tuning.keys or 64
    # Two CTAs that share keys have twice the rows for each that they read, and were no faster (docs/attention.md).
    paired = bool(tuning.paired)
    row_blocks = -(-tiles // 2) if paired else tiles
    if keys > ROWS:
        raise ValueError(f"takes tiles of 32 or 64 keys with heads of {head_dim}, not {tuning}")
    splits = tuning.splits
    if splits is None:
        ctas, rows = b * kv_heads * row_blocks * (2 if paired else 1), min(tokens * group, ROWS)
        splits = best_splits(ctas, MULTIPROCESSORS, table_width * page_size, keys, rows)
    direct = splits == 1 and not has_sinks and (tiles == 1 or ROWS % group == 0)
    stages = tuning.stages
    if stages is None:
        held = ROWS * head_dim * 2 + 2 * ROWS * keys * 4  # queries, and scores of half of the columns
        stage = keys * head_dim * (2 if paired else 4)
        stages = max(min((SHARED_MEMORY - held - BARRIERS) // stage, 4), 1)
    return Launch(
        tokens=tokens, group=group, head_dim=head_dim, page_size=page_size, table_width=table_width, kv_heads=kv_heads,
        warpgroups=2, rows=ROWS, row_blocks=row_blocks, keys=keys, stages=stages, splits=splits, min_tiles=tuning.min_tiles,
        direct=direct, halves=True, paired=paired, flows=paired, evict_first=row_blocks == 1, **mask,
    )  # fmt: skip


def plan_narrow(
    tuning: Tuning, *, b: int, tokens: int, group: int, head_dim: int, page_size: int, kv_heads: int, table_width: int,
    has_sinks: bool, items: int = 0, invariant: bool = False, **mask: Any,
) -> Launch:  # fmt: skip
    """Cuts a call over 8-bit pages into CTAs of one warpgroup, two to a multiprocessor; `items` as for `plan`."""
    # Sixteen columns are the narrowest tile of weights; wider heads leave registers for half the rows.
    rows = min(-(-tokens * group // 16) * 16, ROWS if head_dim <= 128 else ROWS // 2)
    row_blocks = -(-tokens * group // rows)
    if row_blocks > 1 or has_sinks or head_dim == 192 or (head_dim == 64 and group % 2):
        items = 0  # rows that are combined fill whole warpgroups
    splits = tuning.splits
    if splits is None:
        splits = best_splits(
            b * kv_heads * row_blocks, 2 * MULTIPROCESSORS, table_width * page_size, 64, min(tokens * group, rows)
        )
    stages = tuning.stages
    if stages is None:
        # Queries, weights and 1 KiB for sums beside the ring; what was tried besides is in docs/attention.md.
        budget = HALF_SHARED_MEMORY - BARRIERS - 1024 - rows * (head_dim * 2 + 4 + 3 * 64 * 2)
        stages = max(min(budget // (64 * (head_dim * 2 + 4)), 6), 2)
    return Launch(
        tokens=tokens, group=group, head_dim=head_dim, page_size=page_size, table_width=table_width, kv_heads=kv_heads,
        warpgroups=1, rows=rows, row_blocks=row_blocks, keys=64, stages=stages, splits=splits, min_tiles=tuning.min_tiles,
        direct=not items and splits == 1 and not has_sinks, items=items, evict_first=True, invariant=invariant, **mask,
    )  # fmt: skip
