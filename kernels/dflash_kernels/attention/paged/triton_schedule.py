"""How a call of the Triton kernel is cut into programs. Arithmetic on shapes only."""

import dataclasses
from typing import Any

from dflash_kernels.attention.paged.launch import best_splits
from dflash_kernels.core.triton_call import power_of_two

MULTIPROCESSORS = 108  # of an A100, where the device does not say
# Bytes of shared memory that a program may have on every GPU since Ampere (GeForce cards have least).
SHARED_MEMORY = 99 * 1024
FEWEST_TILES = 4  # worth a part of their own
FIRST_WITH_FLOAT8 = 89  # compute capability


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Choices that change speed and rounding only. None: chosen from the shapes.

    Attributes:
      splits: parts each sequence's pages are dealt to.
      rows: query rows of a program, a power of two from 16.
      keys: keys of a tile, a power of two from 16.
      stages: depth of the compiler's pipeline. Page numbers and the copies that follow them take two stages each: tiles are double
        buffered from 5.
      warps: of a program.
    """

    splits: int | None = None
    rows: int | None = None
    keys: int | None = None
    stages: int = 5
    warps: int = 4


@dataclasses.dataclass(frozen=True)
class Launch:
    """Grid, options and constants of one launch of the kernel."""

    grid: tuple[int, int, int]
    warps: int
    stages: int
    constants: dict[str, Any]

    @property
    def splits(self) -> int:
        return self.constants["SPLITS"]


def plan(
    tuning: Tuning, *, b: int, tokens: int, group: int, head_dim: int, page_size: int, kv_heads: int, table_width: int,
    multiprocessors: int, causal: bool, window: tuple[int | None, int | None], soft_cap: float | None, scale: float,
    sinks: bool = False, alibi: str | None = None, k_scale: str | None = None, v_scale: str | None = None,
    float8_bits: bool = False,
) -> Launch:  # fmt: skip
    """Cuts a call into programs."""
    columns = power_of_two(head_dim)
    rows = tuning.rows or min(max(power_of_two(tokens * group), 16), 64)
    keys = tuning.keys or (64 if columns <= 64 or (rows < 64 and columns <= 128) else 32 if columns <= 128 else 16)
    row_blocks = -(-tokens * group // rows)
    splits = tuning.splits
    if splits is None:
        slots = 2 * (multiprocessors or MULTIPROCESSORS)
        least = FEWEST_TILES * keys
        splits = best_splits(
            b * kv_heads * row_blocks, slots, table_width * page_size, least, min(tokens * group, rows)
        )
    left, right = window
    if causal:
        right = 0 if right is None else min(right, 0)
    constants = {
        "TOKENS": tokens, "GROUP": group, "KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "PAGE": page_size, "WIDTH": table_width,
        "ROWS": rows, "KEYS": keys, "COLUMNS": columns, "ROW_BLOCKS": row_blocks, "SPLITS": splits, "SCALE": scale,
        "SOFT_CAP": soft_cap, "LEFT": left, "RIGHT": right, "SINKS": sinks and splits == 1, "ALIBI": alibi, "K_SCALE": k_scale,
        "V_SCALE": v_scale, "FLOAT8_BITS": float8_bits,
    }  # fmt: skip
    return Launch((kv_heads * row_blocks, splits, b), tuning.warps, tuning.stages, constants)
