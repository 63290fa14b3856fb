"""Cascade attention over shared prefixes: whose they are, and what it saves to read their pages once (`attention.cascade`).

Pages are the same where a prompt found what another one left (`engine.slots`), so they are full, and before every query of whoever
has them. Which program runs is known from the batch: where nothing is shared it is the one that knows nothing of sharing, and there
is one for requests that share one beginning, and one for up to `GROUPS` groups of such.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int

from dflash_jax.cache.specs import LayerSpec
from dflash_jax.engine.cycle_costs import BANDWIDTH
from dflash_jax.engine.verify_auto import WORTH_COMPILING_S

# Seconds that a layer's attention in two parts takes beyond what both read and multiply: launches, and results of both joined. So
# many that nothing was lost where it is chosen (`benchmarks/cascade.py`: eight sequences that share 2,048 tokens gain nothing).
PARTS_S = 18e-6
# Products a second of a kernel's matrix instructions, which take queries of one sequence 64 at a time.
ARITHMETIC, ROWS = 4.0e14, 64
# Groups of requests that a program reads beginnings of. Seconds of a layer's attention that bringing queries to their groups and
# results back takes beside the bytes of both, four operations: reckoned, no GPU has timed it.
GROUPS, GATHERS_S = 4, 12e-6
# What programs read once: what one group of requests begins with, or what several do.
type Sharing = Literal["group", "groups"]


class Sharers(NamedTuple):
    """Sequences that begin with the same tokens: how many sequences, and how many tokens."""

    members: int
    tokens: int


@dataclass(frozen=True)
class LayerCost:
    """Bytes and operations of a layer's attention.

    Attributes:
      token: bytes of one token's keys and values.
      heads, kv_heads, dim: of one layer, on one device.
    """

    token: float
    heads: int
    kv_heads: int
    dim: int

    def saved_s(self, groups: Sequence[Sharers], slots: int, queries: int) -> float:
        """Seconds saved where these groups among `slots` sequences, of so many queries each, read what they share once each.

        For every group all queries are multiplied, as if no kernel left out those of others.
        """
        group, saved = self.heads // self.kv_heads, -PARTS_S
        for sharers in groups:
            saved += self._seconds(sharers.members, sharers.members * _padded(queries * group), sharers.tokens)
            saved -= self._seconds(1, _padded(slots * queries * group), sharers.tokens)
        return saved if len(groups) < 2 else saved - self._gathered_s(slots * queries)

    def _gathered_s(self, rows: int) -> float:
        """Queries that are written to their groups' places and read there, and results likewise, of two bytes each."""
        return GATHERS_S + 2 * 2 * GROUPS * rows * self.heads * self.dim * 2 / BANDWIDTH

    def _seconds(self, times: int, rows: int, tokens: int) -> float:
        """Keys read so many times, by `rows` query rows of each key head."""
        products = 4.0 * rows * self.kv_heads * self.dim * tokens
        return max(times * tokens * self.token / BANDWIDTH, products / ARITHMETIC)


def _padded(rows: int) -> int:
    return -(-rows // ROWS) * ROWS


@dataclass
class CascadePolicy:
    """Whether cycles read shared pages once.

    Attributes:
      target, draft: layers that can: those of heads that see all of a context.
      block: queries of each slot while drafting.
      asked: True reads them once wherever two requests share a page; None where it saves time.
    """

    target: tuple[LayerCost, ...]
    draft: tuple[LayerCost, ...]
    block: int
    asked: bool | None = None
    _missed: dict[object, float] = field(default_factory=dict)

    def saved_s(self, groups: Sequence[Sharers], slots: int, verified: int) -> float:
        """Seconds of a cycle that verifies `verified` tokens of each slot."""
        saved = sum(layer.saved_s(groups, slots, verified) for layer in self.target)
        if verified > 1:
            saved += sum(layer.saved_s(groups, slots, self.block) for layer in self.draft)
        return saved

    def worth_compiling(self, key: object, seconds: float) -> bool:
        """Adds time lost for want of the program `key`, and tells once when that has become too much."""
        before = self._missed.get(key, 0.0)
        self._missed[key] = before + seconds
        return before < WORTH_COMPILING_S <= self._missed[key]


def layer_costs(
    specs: Sequence[LayerSpec], page_bytes: Iterable[int], heads: int, page_size: int
) -> tuple[LayerCost, ...]:
    """Costs of one model's layers that can read shared pages once; none for latent rows.

    Args:
      page_bytes: of each layer.
      heads: query heads.
    """
    return tuple(
        LayerCost(size / page_size, heads, spec.heads, spec.dim)
        for spec, size in zip(specs, page_bytes, strict=True)
        if spec.value_dim is not None and spec.window is None
    )


def common_pages(
    table: Int[np.ndarray, "B W"], whole: Int[np.ndarray, "B"], most: int = GROUPS
) -> list[list[tuple[np.ndarray, int]]]:
    """The beginnings that save most readings of pages: of one group of sequences, of up to two, and so on to `most`, as long as one
    more group saves more. Of each group the sequences and the pages that they share.

    Rows that begin alike stand side by side once they are sorted, so groups are stretches of them: what the first rows save at best
    by so many groups follows from what fewer rows save by one group less.

    Args:
      table: of sequences that have queries.
      whole: full pages before each one's queries.
    """
    count = len(table)
    if count < 2:
        return []
    # What lies behind a row's full pages is like nobody's.
    alone = -2 - np.arange(count, dtype=table.dtype)[:, None]
    rows = np.ascontiguousarray(np.where(np.arange(table.shape[1]) < whole[:, None], table, alone))
    # Rows side by side that begin alike: any order of whole rows will do.
    order = np.argsort(rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1]))).ravel(), kind="stable")
    same = rows[order][1:] == rows[order][:-1]
    alike = np.where(same.all(axis=1), rows.shape[1], np.argmin(same, axis=1))
    # By groups and by first rows: what they save at best, and where the group begins that ends there; -1 where none does.
    saved, begun = (np.full((most + 1, count + 1), value, np.int64) for value in (0, -1))
    for first in range(count + 1):
        if first:
            none_ends = saved[:, first - 1] >= saved[:, first]
            begun[none_ends, first] = -1
            saved[none_ends, first] = saved[none_ends, first - 1]
        least = np.minimum.accumulate(alike[first:])
        found = saved[:-1, first, None] + least * np.arange(1, len(least) + 1)
        better = found > saved[1:, first + 2 :]
        np.copyto(saved[1:, first + 2 :], found, where=better)
        np.copyto(begun[1:, first + 2 :], first, where=better)
    choices = []
    for groups in range(1, most + 1):
        if saved[groups, count] == saved[groups - 1, count]:
            break
        choices.append(list(_traced(begun, groups, order, alike)))
    return choices


def _traced(begun: np.ndarray, groups: int, order: np.ndarray, alike: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """The groups that `begun` leads back to from all rows on."""
    end = len(order)
    while end and groups:
        first = int(begun[groups, end])
        if first < 0:
            end -= 1
            continue
        if pages := int(alike[first : end - 1].min()):
            yield order[first:end], pages
        groups, end = groups - 1, first


def shared_argument(
    groups: Sequence[tuple[np.ndarray, int]], slots: np.ndarray, size: int
) -> Int[np.ndarray, "*groups B"]:
    """The argument `shared` of `decoding.cycle.cycle` for so many slots: `slots` are those of the rows that groups name."""
    told = np.zeros((1 if len(groups) == 1 else GROUPS, size), np.int32)
    for row, (members, pages) in zip(told, groups, strict=False):
        row[slots[members]] = pages
    return told[0] if len(groups) == 1 else told
