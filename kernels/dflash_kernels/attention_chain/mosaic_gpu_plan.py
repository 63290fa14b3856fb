"""How attention is dealt to the CTAs of a chain, and what it borrows of their memory. Arithmetic on shapes only."""

import dataclasses

from dflash_kernels.layer_chain.mosaic_gpu_plan import BLOCK, MOST_ROWS, SHARED_MEMORY, SPARE, Plan

HEAD_DIM = 128  # two blocks of columns; a head turns as a whole, one block with the other
KEYS = 64  # of a tile
MOST_TOKENS = 16  # of a sequence: their keys are normed by one warpgroup at once
MOST_SPLITS = 16  # parts whose results one thread reads at once
LEAST_SLOTS = 2  # of the ring that weights keep while attention has the others
QUADS = 128  # groups of four columns that a warpgroup puts together at once


@dataclasses.dataclass(frozen=True)
class Attention:
    """Everything static about the attention of one launch.

    Attributes:
      sequences, tokens, group, kv_heads, page_size, table_width: shapes of the call.
      splits: CTAs that share the keys of a sequence's head.
      stages: tiles of keys and of values in flight; each takes a slot of the weights' ring until attention is done, and the queries
        take one more.
    """

    sequences: int
    tokens: int
    group: int
    kv_heads: int
    page_size: int
    table_width: int
    splits: int
    stages: int
    causal: bool
    scale: float

    @property
    def rows(self) -> int:
        """Query rows of a KV head: row `t * group + g` is one token's head."""
        return self.tokens * self.group

    @property
    def items(self) -> int:
        """CTAs that attend."""
        return self.sequences * self.kv_heads * self.splits

    @property
    def borrowed(self) -> int:
        """Slots of the ring, its last ones."""
        return 1 + 2 * self.stages

    @property
    def copies(self) -> int:
        """Copies that fill one tile: one for each page in it and block of columns."""
        return 2 * max(KEYS // self.page_size, 1)

    @property
    def staged(self) -> int:
        """Rows of new keys in shared memory."""
        return -(-self.tokens // 8) * 8

    @property
    def quads(self) -> int:
        """Groups of four columns of a head's output."""
        return self.rows * HEAD_DIM // 4

    @property
    def mergers(self) -> int:
        """CTAs of a head that put parts together."""
        return min(-(-self.quads // QUADS), self.splits)


def attention_plan(
    plan: Plan, *, sequences: int, group: int, kv_heads: int, head_dim: int, page_size: int, table_width: int, causal: bool,
    scale: float, stages: int | None = None, splits: int | None = None,
) -> tuple[Attention, Plan]:  # fmt: skip
    """Attention's share of a chain, and the chain with what memory it leaves.

    Raises NotImplementedError with the reason for what does not fit in.
    """
    if head_dim != HEAD_DIM:
        raise NotImplementedError(f"takes head dim {HEAD_DIM}, not {head_dim}")
    tokens = plan.live // sequences
    if tokens > MOST_TOKENS or tokens * group > MOST_ROWS:
        raise NotImplementedError(f"takes {MOST_TOKENS} tokens of {MOST_ROWS} heads a KV head, not {tokens} of {group}")
    if page_size % KEYS and (KEYS % page_size or page_size < 8):
        raise NotImplementedError(f"takes page sizes 8, 16, 32 and multiples of 64, not {page_size}")
    if sequences * kv_heads > plan.ctas:
        raise NotImplementedError(f"takes {plan.ctas} KV heads of all sequences, not {sequences * kv_heads}")
    if splits is None:
        splits = min(plan.ctas // (sequences * kv_heads), MOST_SPLITS)
    if stages is None:
        stages = 1 if table_width * page_size <= KEYS * splits else 2
    attention = Attention(
        sequences, tokens, group, kv_heads, page_size, table_width, splits, stages, causal, float(scale)
    )
    taken = SPARE + 2 * 2 * attention.staged * HEAD_DIM + plan.kept_bytes
    slot_rows = max(plan.slot_rows, 2 * KEYS)
    slots = min((SHARED_MEMORY - taken) // (slot_rows * BLOCK * 2), plan.slots)
    if slots < attention.borrowed + LEAST_SLOTS:
        raise NotImplementedError(f"{slots} slots of {slot_rows} weight rows leave attention no room")
    return attention, dataclasses.replace(plan, slots=slots, slot_rows=slot_rows)
