"""How attention is dealt to the CTAs of a chain, and what it borrows of their memory. Arithmetic on shapes only."""

import dataclasses

from dflash_kernels.fused.layer.plan import BLOCK, MOST_ROWS, SHARED_MEMORY, SPARE, Plan

HEAD_DIM = 128  # two blocks of columns; a head turns as a whole, one block with the other
KEYS = 64  # of a tile
MOST_TOKENS = 16  # of a sequence: their keys are normed by one warpgroup at once
MOST_SPLITS = 16  # parts whose results one thread reads at once
MOST_STAGES = 4  # tiles of keys and of values in flight, where memory has the room
WIDE_STAGES = 2  # tiles of float8 pages that are widened before they are needed
LEAST_SLOTS = 1  # of the ring that weights keep while attention has the others
TILE_ROWS = 2 * KEYS  # rows of 128 bytes that a tile of keys or values takes, a block of columns after the other
REACH = 2**16  # a sequence's new tokens, and this times how many tokens after its own each of them sees
QUADS = 128  # groups of four columns that a warpgroup puts together at once


@dataclasses.dataclass(frozen=True)
class Attention:
    """Everything static about the attention of one launch.

    Attributes:
      sequences, tokens, group, kv_heads, page_size, table_width: shapes of the call.
      splits: CTAs that share the keys of a sequence's head.
      stages: tiles of keys and of values as products take them. Until attention is done, they and the queries have the end of the
        memory of the weights' ring.
      narrow_stages: tiles of one byte a number in flight, which become those; 0 where pages hold what products take.
      paired: whether outputs lie in the order of weights of one byte, columns in pairs.
    """

    sequences: int
    tokens: int
    group: int
    kv_heads: int
    page_size: int
    table_width: int
    splits: int
    stages: int
    scale: float
    narrow_stages: int = 0
    paired: bool = False

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
        """Tiles in shared memory: keys, values, and the queries."""
        return 1 + 2 * self.stages + self.narrow_stages

    def tiles(self, plan: Plan) -> int:
        """Tiles that the memory of the weights' ring has room for; the last ones are borrowed."""
        return plan.slots * plan.slot_rows // TILE_ROWS

    def kept(self, plan: Plan) -> int:
        """Slots of weights before the first borrowed tile."""
        return (self.tiles(plan) - self.borrowed) * TILE_ROWS // plan.slot_rows

    @property
    def copies(self) -> int:
        """Copies that fill one tile: one for each page in it and block of columns."""
        return (1 if self.narrow_stages else 2) * max(KEYS // self.page_size, 1)

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
    plan: Plan, *, sequences: int, group: int, kv_heads: int, head_dim: int, page_size: int, table_width: int,
    scale: float, stages: int | None = None, splits: int | None = None, page_itemsize: int = 2,
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
    if stages is not None:
        choices = [stages]
    else:
        # A short sequence's tiles are all on their way at once; more stages than memory has room for are not missed.
        choices = list(range(min(-(-table_width * page_size // (KEYS * splits)), MOST_STAGES), 0, -1))
    taken = SPARE + 2 * 2 * (-(-tokens // 8) * 8) * HEAD_DIM + plan.kept_bytes
    left = dataclasses.replace(plan, slots=min((SHARED_MEMORY - taken) // (plan.slot_rows * BLOCK * 2), plan.slots))
    for count in choices:
        wide, narrow = (count, 0) if page_itemsize == 2 else (min(count, WIDE_STAGES), count)
        attention = Attention(
            sequences, tokens, group, kv_heads, page_size, table_width, splits, wide, float(scale), narrow, plan.narrow
        )
        if attention.kept(left) >= LEAST_SLOTS:
            return attention, left
    raise NotImplementedError(f"{left.slots} slots of {left.slot_rows} weight rows leave attention no room")
