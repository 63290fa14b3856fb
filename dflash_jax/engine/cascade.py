"""Requests that begin with the same pages: which they are, and what it saves to read those once (`attention.cascade`).

Pages are the same where a prompt found what another one left (`engine.slots`), so they are full, and before every query of whoever
has them. Which program runs is known from the batch: where nothing is shared it is the one that knows nothing of sharing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int

from dflash_jax.cache.specs import LayerSpec
from dflash_jax.engine.cycle_costs import BANDWIDTH
from dflash_jax.engine.verify_policy import WORTH_COMPILING_S

# Seconds that a layer's attention in two parts takes beyond what both read and multiply: launches, and results of both joined. So
# many that nothing was lost where it is chosen (`benchmarks/cascade.py`: eight sequences that share 2,048 tokens gain nothing).
PARTS_S = 18e-6
# Products a second of a kernel's matrix instructions, which take queries of one sequence 64 at a time.
ARITHMETIC, ROWS = 4.0e14, 64


@dataclass(frozen=True)
class LayerCost:
    """What a layer's attention reads and multiplies.

    Attributes:
      token: bytes of one token's keys and values.
      heads, kv_heads, dim: of one layer, on one device.
    """

    token: float
    heads: int
    kv_heads: int
    dim: int

    def saved_s(self, pages_of: int, slots: int, queries: int, tokens: int) -> float:
        """Seconds saved where `pages_of` sequences among `slots`, of so many queries each, begin with the same tokens."""
        group = self.heads // self.kv_heads
        alone = self._seconds(pages_of, pages_of * _padded(queries * group), tokens)
        return alone - self._seconds(1, _padded(slots * queries * group), tokens) - PARTS_S

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

    def saved_s(self, sharers: int, slots: int, verified: int, tokens: int) -> float:
        """Seconds of a cycle that verifies `verified` tokens of each slot."""
        saved = sum(layer.saved_s(sharers, slots, verified, tokens) for layer in self.target)
        if verified > 1:
            saved += sum(layer.saved_s(sharers, slots, self.block, tokens) for layer in self.draft)
        return saved

    def worth_compiling(self, key: object, seconds: float) -> bool:
        """Adds time lost for want of the program `key`, and tells once when that has become too much."""
        before = self._missed.get(key, 0.0)
        self._missed[key] = before + seconds
        return before < WORTH_COMPILING_S <= self._missed[key]


def layer_costs(
    specs: Sequence[LayerSpec], page_bytes: Iterable[int], heads: int, page_size: int
) -> tuple[LayerCost, ...]:
    """Of the layers of one model that can read shared pages once; none of latent rows.

    Args:
      page_bytes: of each layer.
      heads: query heads.
    """
    return tuple(
        LayerCost(size / page_size, heads, spec.heads, spec.dim)
        for spec, size in zip(specs, page_bytes, strict=True)
        if spec.value_dim is not None and spec.window is None
    )


def common_pages(table: Int[np.ndarray, "B W"], whole: Int[np.ndarray, "B"]) -> tuple[np.ndarray, int]:
    """The beginning that saves most readings of pages: the sequences that share it, and its pages; 0 pages where there is none.

    Args:
      table: of sequences that have queries.
      whole: full pages before each one's queries.
    """
    nobody = np.zeros((0,), np.int64)
    if len(table) < 2:
        return nobody, 0
    # What lies behind a row's full pages is like nobody's.
    alone = -2 - np.arange(len(table), dtype=table.dtype)[:, None]
    rows = np.ascontiguousarray(np.where(np.arange(table.shape[1]) < whole[:, None], table, alone))
    # Rows side by side that begin alike: any order of whole rows will do.
    order = np.argsort(rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1]))).ravel(), kind="stable")
    same = rows[order][1:] == rows[order][:-1]
    alike = np.where(same.all(axis=1), rows.shape[1], np.argmin(same, axis=1))
    best, found, pages = 0, nobody, 0
    for first in range(len(alike)):
        least = np.minimum.accumulate(alike[first:])
        if least[0] == 0:
            continue
        gains = least * np.arange(1, len(least) + 1)
        if gains.max() > best:
            last = int(gains.argmax())
            best, found, pages = int(gains[last]), order[first : first + last + 2], int(least[last])
    return found, pages
