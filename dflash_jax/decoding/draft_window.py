"""Draft window: of a long sequence the drafter sees its last tokens alone, where one is set.

Keys carry their positions, so a sequence that begins later is one of fewer pages: the drafter attends through the last columns of a
page table, by the same operations as without a window. What is left out is whole pages, and no text depends on it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dflash_jax.cache.groups import table_width


def last_pages(
    page_table: Any, seq_lens: Int[Array, "B"], *, window: int | None, block: int, page_size: int
) -> tuple[Any, Int[Array, "B"]]:
    """The columns that hold the last `window` tokens of sequences and a block after them, and how many tokens lie before those.

    Between `window` and `window + page_size - 1` tokens are left of a longer sequence. A table with no more columns than that takes
    is given back as it is, and so is any without a window.

    Args:
      page_table: `[B, W]`, or `cache.groups.LayerTables` of such.
      seq_lens: tokens before the block.
      block: tokens after them.
    """
    if window is None or (width := columns(window, block, page_size)) >= table_width(page_table):
        return page_table, jnp.zeros_like(seq_lens)
    first = jnp.maximum(seq_lens - window, 0) // page_size
    # Past a sequence's last page nothing is read: any entry will do.
    places = jnp.minimum(first[:, None] + jnp.arange(width), table_width(page_table) - 1)
    seen = jax.tree.map(lambda table: jnp.take_along_axis(table, places, axis=1), page_table)
    return seen, first * page_size


def columns(window: int, block: int, page_size: int) -> int:
    """Pages that so many tokens and a block after them lie in at most, wherever they begin."""
    return -(-(page_size - 1 + window + block) // page_size)
