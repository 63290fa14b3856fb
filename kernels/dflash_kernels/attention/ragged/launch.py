"""Launch planning of ragged attention on Hopper: blocks of query rows, and their order."""

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Int

from dflash_kernels.core.device import MATRIX_ROWS as ROWS
from dflash_kernels.core.device import MULTIPROCESSORS, SHARED_MEMORY

WARPGROUPS = 2  # that compute; a third one copies
BLOCK = ROWS * WARPGROUPS
L2_BYTES = 12 * 2**20  # of keys and values worked on at a time; twice as much was 2 to 5 % slower
FULL = 0.9  # share of the multiprocessors that must have work in the last round of a section
BARRIERS = 1024  # bytes, more than any launch has


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Choices that change speed and rounding only. None: chosen from the shapes.

    Attributes:
      keys: keys of a tile, 64 or 128.
      stages: tiles of keys and values in flight in a CTA, from 2.
      kv_heads_at_once: key heads of a section; a divisor of their number below where this is none.
      ctas: as many as run at a time: one on each multiprocessor.
    """

    keys: int | None = None
    stages: int = 2
    kv_heads_at_once: int | None = None
    ctas: int = MULTIPROCESSORS

    def __post_init__(self):
        at_once = 1 if self.kv_heads_at_once is None else self.kv_heads_at_once
        if self.keys not in (None, 64, 128) or self.stages < 2 or min(at_once, self.ctas) < 1:
            raise ValueError(
                f"takes tiles of 64 or 128 keys, 2 stages or more, and a head and a CTA or more, not {self}"
            )


@dataclasses.dataclass(frozen=True)
class Launch:
    """Everything static about one launch.

    Attributes:
      blocks: most blocks of query rows there can be, for one head; heads, kv_heads, head_dim, value_dim: shapes of the call.
      page_size, table_width: 0 where keys are packed.
      heads_at_once: query heads of a section: its blocks are worked on together, and share the L2.
      ctas: CTAs, each of which works through many blocks.
      separate_out: the output has shared memory of its own rather than the queries'.
    """

    blocks: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    page_size: int
    table_width: int
    heads_at_once: int
    keys: int
    stages: int
    ctas: int
    separate_out: bool
    has_sinks: bool
    has_slopes: bool
    causal: bool
    window: tuple[int | None, int | None]
    soft_cap: float | None
    alibi_sqrt: bool
    scale: float

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def section(self) -> int:
        """Blocks of the heads of a section."""
        return self.blocks * self.heads_at_once

    @property
    def rounds(self) -> int:
        """Blocks that a CTA has of a section, at most."""
        return -(-self.section // self.ctas)

    @property
    def copies(self) -> int:
        """Copies that fill one tile: one for each page in it."""
        return max(self.keys // self.page_size, 1) if self.page_size else 1


def plan(
    tuning: Tuning, *, tokens: int, sequences: int, heads: int, kv_heads: int, head_dim: int, value_dim: int,
    kv_rows: int, page_size: int = 0, table_width: int = 0, **rest,
) -> Launch:  # fmt: skip
    """Cuts a call into CTAs. `kv_rows`: most keys that all sequences together can have."""
    # Queries past the last sequence count as one more of them. Each adds at most one block that is not full.
    blocks = min((tokens + (sequences + 1) * (BLOCK - 1 + 7)) // BLOCK, tokens)
    keys = tuning.keys
    if keys is None:
        # Of larger ones, scores, weights and sums on their way at a time would not fit the registers.
        keys = 128 if head_dim + value_dim <= 320 and value_dim <= 192 else 64
    if page_size and keys % page_size and page_size % keys:
        keys = 64
    kv_bytes, group = kv_rows * (head_dim + value_dim) * 2, heads // kv_heads
    at_once = tuning.kv_heads_at_once
    if at_once is None:
        at_once = _kv_heads_at_once(kv_heads, -(-tokens // BLOCK) * group, kv_bytes)
    else:
        at_once = max(count for count in _divisors(kv_heads) if count <= at_once)
    tiles = tuning.stages * keys * (head_dim + value_dim) * 2
    room = SHARED_MEMORY - BARRIERS - tiles - BLOCK * head_dim * 2
    if room < 0:
        raise ValueError(f"{tuning} with head dims {head_dim} and {value_dim}: {-room} bytes of shared memory too many")
    return Launch(
        blocks=blocks, heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, page_size=page_size,
        table_width=table_width, heads_at_once=at_once * group, keys=keys, stages=tuning.stages,
        ctas=min(blocks * heads, tuning.ctas),
        separate_out=room >= BLOCK * value_dim * 2, **rest,
    )  # fmt: skip


def _kv_heads_at_once(kv_heads: int, blocks: int, kv_bytes: int) -> int:
    """Key heads of a section, of `blocks` blocks and `kv_bytes` each: as many as the L2 holds, more to fill the last round."""

    def filled(count: int) -> float:
        rounds = count * blocks / MULTIPROCESSORS
        return rounds / math.ceil(rounds)

    counts = _divisors(kv_heads)
    least = max((count for count in counts if count * kv_bytes <= L2_BYTES), default=1)
    counts = [count for count in counts if count >= least]
    return next((count for count in counts if filled(count) >= FULL), max(counts, key=filled))


def _divisors(number: int) -> list[int]:
    return [count for count in range(1, number + 1) if number % count == 0]


def block_table(
    launch: Launch, tokens: int, cu_q_lens: Int[Array, "C"], kv_lens: Int[Array, "B"], kv_starts: Int[Array, "B"] | None
) -> tuple[Int[Array, "M 7"], Int[Array, "M"]]:
    """The blocks of one head, those with most keys first, and the order they were brought into.

    A copy into tiled memory starts at a multiple of 8 rows. So a block does, too: its first rows may be the end of the sequence
    before, and so may the first rows of a tile of packed keys.

    Columns of the table: first row of the block, in eights; its own rows, from and to (0 and 0 where there is no such block);
    position in the sequence of its first row; keys of the sequence (no more than its pages hold); the first row of its keys, in
    eights, or (where in pages) its index; and the keys that lie between that row and its own.
    """
    b = kv_lens.shape[0]
    lens = jnp.diff(cu_q_lens, append=jnp.full((1,), tokens, jnp.int32))
    keys = jnp.append(kv_lens, 0)
    held = jnp.minimum(keys, launch.table_width * launch.page_size) if launch.page_size else keys
    origins = jnp.append(jnp.arange(b) if kv_starts is None else kv_starts // 8, 0)
    shifts = jnp.zeros_like(origins) if kv_starts is None else jnp.append(kv_starts % 8, 0)
    counts = block_counts(cu_q_lens, lens)
    ends = jnp.cumsum(counts)
    index = jnp.arange(launch.blocks)
    sequence = jnp.minimum(jnp.sum(ends <= index[:, None], axis=1), b)
    start = cu_q_lens[sequence]
    first = start // 8 * 8 + (index - (ends - counts)[sequence]) * BLOCK
    begin = jnp.clip(start - first, 0, BLOCK)
    end = jnp.clip(start + lens[sequence] - first, 0, BLOCK)
    position = keys[sequence] - lens[sequence] + first - start
    seen = held[sequence]
    if launch.causal:
        seen = jnp.clip(position + end, 0, seen)
    if launch.window[0] is not None:
        seen = jnp.minimum(seen, launch.window[0] + BLOCK)
    there = (index < ends[-1]) & (end > begin)
    order = jnp.argsort(jnp.where(there, -seen, 1))
    begin, end = jnp.where(there, begin, 0), jnp.where(there, end, 0)
    columns = [first // 8, begin, end, position, held[sequence], origins[sequence], shifts[sequence]]
    return jnp.stack(columns, axis=1).astype(jnp.int32)[order], order


def block_counts(starts: Int[Array, "B"], lens: Int[Array, "B"]) -> Int[Array, "B"]:
    """Blocks of each sequence."""
    return jnp.where(lens > 0, -(-(starts % 8 + lens) // BLOCK), 0)
