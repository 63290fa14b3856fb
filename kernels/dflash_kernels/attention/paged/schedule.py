"""Tile scheduler of attention over pages: work items from the lengths as they are, computed once and shared by all layers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_kernels.core.device import HOPPER, MULTIPROCESSORS, target

TILE, ROWS = 64, 64  # keys and query rows of a tile
# CTAs that read as fast as memory gives, one on a multiprocessor of a Hopper GPU. Twice as many fit and are slower: more parts.
SLOTS = MULTIPROCESSORS
# With more sequences than these CTAs short ones keep a GPU busy while a long one is read; shorter ones are never read for long.
FULL, LONG = 2 * SLOTS, 8192
# Fewest tiles worth a part, and most parts of a sequence: the last CTA to finish reads all parts' results, rows times parts.
LEAST, MOST_OF_FEW_ROWS, MOST = 4, 32, 16
FEW_ROWS = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedSchedule:
    """Work items, splits of sequences, in the order in which CTAs take them.

    Attributes:
      items: int32 `[I, 3]`: sequence, split, splits of that sequence; 0 splits where nothing is left to do.
      arrived: Ref of int32 `[B * K]`, all 0 before and after each call: splits of a sequence's head that are finished.
    """

    items: Int[Array, "I 3"]
    arrived: Any


def schedule_helps(sequences: int, *, heads: int, kv_heads: int, tokens: int, longest: int) -> bool:
    """Whether to make a schedule: the device that is traced for uses it, and sequences of up to `longest` keys can be so much
    longer than others that it pays. Where all are alike, it costs a few percent of a call (docs/attention.md).
    """
    few = 1 < sequences <= FULL // kv_heads and tokens * heads // kv_heads <= ROWS
    return few and longest >= LONG and target().capability == HOPPER


def paged_schedule(
    seq_lens: Int[Array, "B"], *, heads: int, kv_heads: int, tokens: int, narrow: bool = False, ctas: int = SLOTS
) -> PagedSchedule:
    """Splits of about equal length, `ctas` of them or so, for `paged_attention` with `tokens` queries of each sequence; twice as
    many over pages of eight bits (`narrow`), whose CTAs share a multiprocessor.

    Sequences of several splits come first, so that short ones fill the gaps they leave. Make one wherever lengths change, at the
    same level of tracing as the calls that share it: its counters are a Ref.
    """
    b, slots = seq_lens.shape[0], max(ctas * (2 if narrow else 1) // kv_heads, 1)
    tiles = (seq_lens.astype(jnp.int32) + (TILE - 1)) // TILE
    share = jnp.maximum((tiles.sum() + (slots - 1)) // slots, LEAST)
    # To the nearest: rounded up, a sequence barely longer than its share would leave half a part. No more than slots + b in all.
    parts = jnp.clip((2 * tiles + share) // (2 * share), 1, most_splits(tokens * heads // kv_heads))
    divided = parts > 1
    among = jnp.where(divided, jnp.cumsum(jnp.where(divided, parts, 0)), jnp.cumsum(jnp.where(divided, 0, 1)))
    start = among - parts + jnp.where(divided, 0, jnp.where(divided, parts, 0).sum())
    item = jnp.arange(slots + b, dtype=jnp.int32)[:, None]
    own = (item >= start) & (item < start + parts)
    columns = (jnp.arange(b, dtype=jnp.int32), item - start, parts)
    items = jnp.stack([jnp.where(own, column, 0).sum(1) for column in columns], axis=1).astype(jnp.int32)
    return PagedSchedule(items, jax.new_ref(jnp.zeros((b * kv_heads,), jnp.int32)))


def lse_of_items(items: Int[Array, "I 3"], lse: Float[Array, "I K rows"], sequences: int) -> Float[Array, "B K rows"]:
    """Log-sum-exp of each sequence's splits together; `items` of a schedule, `lse` of each of its splits."""
    own = _owners(items, sequences)[..., None, None]
    return jax.nn.logsumexp(jnp.where(own, lse, -jnp.inf), axis=1)


def places_of_items(items: Int[Array, "I 3"], sequences: int) -> Int[Array, "B 2"]:
    """First item and number of items of each sequence, whose splits follow one another."""
    first = _owners(items, sequences) & (items[:, 1] == 0)
    return jnp.stack([jnp.where(first, each, 0).sum(1) for each in (jnp.arange(len(items)), items[:, 2])], axis=1)


def most_splits(rows: int) -> int:
    """Most splits of a sequence with `rows` query rows of a KV head."""
    return MOST_OF_FEW_ROWS if rows <= FEW_ROWS else MOST


def _owners(items: Int[Array, "I 3"], sequences: int) -> Any:
    """`[B, I]`, whether a split is a sequence's."""
    return (items[:, 0] == jnp.arange(sequences)[:, None]) & (items[:, 2] > 0)
