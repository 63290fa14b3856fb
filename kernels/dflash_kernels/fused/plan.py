"""Tiling of the persistent fused kernels: tiles and split-K of a chain of products, splits of the attention in front of it, shared
memory and the cross-CTA mailbox. Arithmetic on shapes only.
"""

import dataclasses

from dflash_kernels.core.device import SHARED_MEMORY, WARPGROUP

BLOCK = 64  # columns of one copy: 128 bytes of bfloat16, one swizzled row of shared memory
COPIES = 2  # blocks that fill one stage of weights: 256 bytes of each row
IN_FLIGHT = (
    3  # stages of weights that a CTA asks for at once; with more requests everybody else's wait longer for memory
)
ROWS = 64  # weight rows of one matrix instruction
MOST_ROWS = 64  # most tokens of a launch
LEAST_WIDTH = 32  # that the width of the last product is a multiple of
LINE = 32  # words of 128 bytes
WORTH = 64 * 2**20  # bytes of weights: with fewer, products take less time than the meetings of all multiprocessors
WORTH_ROWS = 16  # more have not been measured to be faster than separate operations
SPARE = 6 * 1024  # bytes of barriers and of the scratch of reductions

HEAD_DIM = 128  # two blocks of columns; RoPE rotates a head as a whole, one block with the other
KEYS = 64  # of a tile
MOST_TOKENS = 16  # of a sequence: one warpgroup norms their keys at once
MOST_SPLITS = 16  # splits whose results one thread reads at once
MOST_STAGES = 4  # tiles of keys and of values in flight, where memory has the room
WIDENED_STAGES = 2  # tiles of float8 pages that are widened before they are needed
LEAST_STAGES = 1  # of the weights' ring that stay the weights' while attention has the others
TILE_ROWS = 2 * KEYS  # rows of 128 bytes that a tile of keys or values takes, a block of columns after the other
REACH = (
    2**16
)  # `q_lens` of a launch hold the number of new tokens, and this times how many tokens after its own each of them sees


@dataclasses.dataclass(frozen=True)
class Product:
    """One weight matrix `[matrices * features, depth]` times the activations of all tokens.

    Attributes:
      matrices: 2 where the same CTA multiplies gate and up rows of the same features.
      rows: weight rows of one of them in one tile; the last tile is shifted back to end with the matrix.
      splits: split-K, CTAs that share the depth of a tile.
      itemsize: bytes of a weight.
    """

    name: str
    features: int
    depth: int
    matrices: int
    rows: int
    splits: int
    itemsize: int = 2

    @property
    def columns(self) -> int:
        """Columns of one copy of weights."""
        return BLOCK * 2 // self.itemsize

    @property
    def tiles(self) -> int:
        return -(-self.features // self.rows)

    @property
    def ctas(self) -> int:
        return self.tiles * self.splits

    @property
    def k_tiles(self) -> int:
        """Stages of the whole depth, gate and up rows in turn; the CTAs that share it take as many each, or one more."""
        return self.matrices * self.depth // (COPIES * self.columns)

    @property
    def stage_rows(self) -> int:
        """Rows of a stage that instructions read; with less than 64 weight rows those after them are undefined."""
        return (COPIES - 1) * self.rows + max(self.rows, ROWS)

    @property
    def accumulators(self) -> list[tuple[int, int]]:
        """Matrix and row offset of each of a CTA's accumulators."""
        return [(matrix, offset) for matrix in range(self.matrices) for offset in self.offsets]

    @property
    def offsets(self) -> tuple[int, ...]:
        """First rows of the accumulators that cover a tile; the last one overlaps where 64 does not divide the rows."""
        if self.rows <= ROWS:
            return (0,)
        return (*range(0, self.rows - ROWS, ROWS), self.rows - ROWS)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about one launch of a chain of products.

    Attributes:
      live: tokens of the call; tokens: the same, padded to what the matrix instruction takes.
      hidden: width of the residual stream.
      products: of a layer the output projection, gate and up, down, and the next layer's projection where there is one.
      ctas: CTAs of the launch, all of them resident at once.
      stages, stage_rows: of the ring of weights; x_stages: of the ring of activations.
      zero_centered: weights of norms are offsets from 1.
    """

    live: int
    tokens: int
    hidden: int
    products: tuple[Product, ...]
    ctas: int
    stages: int
    stage_rows: int
    x_stages: int
    eps: float
    zero_centered: bool = False

    @property
    def reducers(self) -> int:
        """CTAs that add up the splits of a product and the residual stream, 64 features each."""
        return self.hidden // ROWS

    @property
    def x_blocks(self) -> int:
        """Blocks of activations in one stage: what a stage of weights is multiplied with."""
        return COPIES * self.products[0].columns // BLOCK

    @property
    def is_8bit(self) -> bool:
        """Whether weights are one byte: activations are then hi and lo numbers of one byte each, with interleaved columns."""
        return self.products[0].itemsize == 1

    @property
    def kept_bytes(self) -> int:
        """Shared memory of everything but the ring of weights."""
        scales = self.x_stages * self.tokens * 4 if self.is_8bit else 0
        return self.x_stages * self.x_blocks * self.tokens * BLOCK * 2 + scales

    @property
    def x_group(self) -> int:
        """Stages of activations that a CTA takes from the mailbox at once: up to eight vectors of each thread."""
        # Half the ring at most: a group waits for all its stages, and the last one of the group before is given back only when
        # the first of this one is multiplied.
        return max(min(self.x_stages // 2, COPIES * ROWS // (self.x_blocks * self.tokens)), 1)

    @property
    def mailbox(self) -> "MailboxLayout":
        # Of gate and up, and where there are none, nothing.
        inner = next((product.features for product in self.products if product.name == "gate_up"), 0)
        return MailboxLayout(self.ctas, self.tokens, self.hidden, inner)


@dataclasses.dataclass(frozen=True)
class MailboxLayout:
    """Layout of the cross-CTA mailbox of a chain of products, in words of four bytes of global memory.

    A line for each CTA's counts of launches comes first, then two areas alike, which launches take turns with. An area holds, for
    the output projection and for the down projection one after the other: split-K partial sums in float32, as many tiles of
    `64 x tokens` as there are CTAs; sums of squares of 64 features each; the normed stream `[tokens, hidden]` in bfloat16. Last
    come the gated activations `[tokens, inner]` in bfloat16.
    """

    ctas: int
    tokens: int
    hidden: int
    inner: int

    @property
    def tile(self) -> int:
        return ROWS * self.tokens

    @property
    def squares(self) -> int:
        return self.ctas * self.tile

    @property
    def scaled(self) -> int:
        return self.squares + self.hidden // ROWS * self.tokens

    @property
    def projection(self) -> int:
        """Words of one of the two projections."""
        return self.scaled + self.tokens * self.hidden // 2

    @property
    def gated(self) -> int:
        return 2 * self.projection

    @property
    def share(self) -> int:
        """Words of an area that one CTA makes empty."""
        words = self.gated + self.tokens * self.inner // 2
        return -(-words // (self.ctas * LINE)) * LINE

    def area(self, turn):
        """The first word of the area of launches with this number's parity."""
        return self.ctas * LINE + turn * (self.ctas * self.share)

    @property
    def words(self) -> int:
        return self.area(2)


@dataclasses.dataclass(frozen=True)
class Attention:
    """Everything static about the attention of one launch.

    Attributes:
      sequences, tokens, group, kv_heads, page_size, table_width: shapes of the call; `group` query heads share a KV head.
      splits: split-KV, CTAs that share the keys of a sequence's head.
      stages: tiles of keys and of values as products take them. In a chain of products they and the queries have the end of the
        memory of the weights' ring until attention is done.
      stages_8bit: tiles of one byte a number in flight, which are widened to those; 0 where pages hold what products take.
      interleaved: whether outputs lie with interleaved columns, as weights of one byte do.
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
    stages_8bit: int = 0
    interleaved: bool = False

    @property
    def rows(self) -> int:
        """Query rows of a KV head: row `t * group + g` is one token's head."""
        return self.tokens * self.group

    @property
    def work_items(self) -> int:
        """CTAs that attend."""
        return self.sequences * self.kv_heads * self.splits

    @property
    def borrowed(self) -> int:
        """Tiles in shared memory: keys, values, and the queries."""
        return 1 + 2 * self.stages + self.stages_8bit

    def tiles(self, plan: Plan) -> int:
        """Tiles that the memory of the weights' ring has room for; the last ones are borrowed."""
        return plan.stages * plan.stage_rows // TILE_ROWS

    def kept(self, plan: Plan) -> int:
        """Stages of weights before the first borrowed tile."""
        return (self.tiles(plan) - self.borrowed) * TILE_ROWS // plan.stage_rows

    @property
    def copies(self) -> int:
        """Copies that fill one tile: one for each page in it and block of columns."""
        return (1 if self.stages_8bit else 2) * max(KEYS // self.page_size, 1)

    @property
    def staged(self) -> int:
        """Rows of new keys in shared memory."""
        return -(-self.tokens // 8) * 8

    @property
    def combiners(self) -> int:
        """CTAs of a head that combine its splits: each puts four columns in each thread."""
        return min(-(-(self.rows * HEAD_DIM // 4) // WARPGROUP), self.splits)


def padded_rows(live: int) -> int:
    """Tokens of a launch: what the matrix instruction and the copies of activations take."""
    return next((tokens for tokens in (8, 16, 32, 64) if live <= tokens), live)


def unsplit(name: str, features: int, depth: int, matrices: int, ctas: int, itemsize: int = 2) -> Product:
    """A product whose CTAs have their own rows over the whole depth."""
    rows = max(-(-features // ctas // 8) * 8, 8)
    return Product(name, features, depth, matrices, rows, 1, itemsize)


def split_k(name: str, features: int, depth: int, ctas: int, itemsize: int = 2) -> Product:
    """A product whose CTAs have 64 rows and a part of the depth."""
    splits = min(ctas // (features // ROWS), depth * itemsize // (COPIES * BLOCK * 2))
    return Product(name, features, depth, 1, ROWS, splits, itemsize)


def with_stages(whole: Plan) -> Plan:
    """The plan with rings as large as memory allows. Raises NotImplementedError where it has no room for two stages."""
    stage_rows = max(product.stage_rows for product in whole.products)
    x_stages = (8 if whole.tokens <= 16 else 4) * whole.products[0].itemsize // 2
    whole = dataclasses.replace(whole, stage_rows=stage_rows, x_stages=x_stages)
    stages = (SHARED_MEMORY - SPARE - whole.kept_bytes) // (stage_rows * BLOCK * 2)
    if stages < 2:
        raise NotImplementedError(f"tiles of {stage_rows} rows do not fit into shared memory twice")
    return dataclasses.replace(whole, stages=min(stages, 16))
