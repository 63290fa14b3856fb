"""Groups of layers that see equally far back: each keeps its pages in pools of its own, by a page table of its own.

A layer with a sliding window needs no page that every query to come sees past. Where all layers kept such pages alike, those of its
pages would stand in the pool unread, as long as the request runs. So layers with one window are a group: its page table has no page
in columns that have fallen out of the window, and a sequence of any length holds a bounded number of its pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, no_type_check

import jax
from jaxtyping import Array, Int

from dflash_jax.cache.allocator import PageAllocator

# Kernels read keys in tiles of at most so many, each from a multiple of its size on: one with a key that is seen is read whole.
TILE = 128


ROLES = ("target", "draft")


@dataclass(frozen=True)
class PageGroup:
    """Layers of a target and its drafter whose pages are kept equally long.

    Attributes:
      reach: keys that a query sees at most, the last ones, its own included; None for all.
      target, draft: the layers, by their places among those with pages.
      columns: pages that one sequence holds at most.
    """

    reach: int | None
    target: tuple[int, ...]
    draft: tuple[int, ...]
    columns: int


def page_groups(
    target: Sequence[int | None], draft: Sequence[int | None], *, ahead: int, width: int, page_size: int
) -> tuple[PageGroup, ...]:
    """The groups of a target's and a drafter's layers, those that see farthest first.

    Args:
      target, draft: what each layer with pages sees, as `PageGroup.reach` says it.
      ahead: tokens after those that are in the pages for good that pages are held for at most.
      width: pages of the longest sequence: a window that holds as many is none.
    """

    def columns(reach: int | None) -> int:
        return width if reach is None else min(width, columns_held(reach, ahead, page_size))

    ours, theirs = ([None if columns(reach) == width else reach for reach in side] for side in (target, draft))

    def of(side: list[int | None], reach: int | None) -> tuple[int, ...]:
        return tuple(i for i, own in enumerate(side) if own == reach)

    reaches = sorted({*ours, *theirs}, key=lambda reach: (reach is not None, -(reach or 0)))
    return tuple(PageGroup(reach, of(ours, reach), of(theirs, reach), columns(reach)) for reach in reaches)


@dataclass(frozen=True)
class GroupPool:
    """A group with the account of its pages."""

    group: PageGroup
    allocator: PageAllocator

    def leading(self, keys: Sequence[bytes]) -> int:
        """The number of `keys`, from the first one on, that a request may begin with, if it has the pages before a window."""
        if self.group.reach is not None:
            return len(keys)
        return next((place for place, key in enumerate(keys) if not self.allocator.knows(key)), len(keys))


def first_column(reach: int | None, tokens: int, fresh: int, page_size: int) -> int:
    """The first page that a sequence's queries to come may read or write.

    Args:
      tokens: in the pages for good: no query to come is before them, whatever is rejected.
      fresh: how many of these the drafter's pages may lack.
    """
    if reach is None:
        return 0
    return max(0, tokens - max(reach - 1, fresh)) // TILE * TILE // page_size


def columns_held(reach: int, ahead: int, page_size: int) -> int:
    """Pages from `first_column` on to `ahead` tokens past those that are there for good, wherever these end."""
    return -(-(reach - 1 + ahead + TILE - 1) // page_size) + 1


@no_type_check  # JAX rebuilds pytrees with shapes and placeholders in place of arrays
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerTables:
    """Page tables, or slots, of one model's layers.

    Attributes:
      tables: of groups, all of one shape.
      groups: each layer's group, static.
    """

    tables: tuple[Int[Array, "B W"], ...]
    groups: tuple[int, ...] = field(metadata={"static": True})


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PageTables:
    """Page tables of several groups, which programs take in place of the one that all layers share; -1 stands for no page.

    Attributes:
      tables: of groups, all of one shape.
      target, draft: each layer's group, static.
    """

    tables: tuple[Int[Array, "B W"], ...]
    target: tuple[int, ...] = field(metadata={"static": True})
    draft: tuple[int, ...] = field(metadata={"static": True})


def join_tables(groups: Sequence[PageGroup], tables: Sequence[Any]) -> Any:
    """Page-table argument of a program: the table of the only group, or `PageTables`."""
    if len(groups) == 1:
        return tables[0]
    of_layer = [
        {layer: place for place, group in enumerate(groups) for layer in getattr(group, role)} for role in ROLES
    ]
    return PageTables(tuple(tables), *(tuple(own[layer] for layer in range(len(own))) for own in of_layer))


def tables_of(page_table: Any, role: str) -> Any:
    """The page tables of the layers of "target" or "draft": one array where all of them share one, else `LayerTables`."""
    if not isinstance(page_table, PageTables):
        return page_table
    groups = getattr(page_table, role)
    if len({*groups}) == 1:
        return page_table.tables[groups[0]]
    return LayerTables(page_table.tables, groups)


def of_layer(tables: Any, index: int) -> Any:
    """A layer's own of `LayerTables`; what all layers share as it is."""
    return tables.tables[tables.groups[index]] if isinstance(tables, LayerTables) else tables


def table_width(page_table: Any) -> int:
    """Columns of a page table, or of each of several."""
    return jax.tree.leaves(page_table)[0].shape[1]
