"""How a chain of products is cut into tiles, one CTA to a multiprocessor. Arithmetic on shapes only."""

import dataclasses

BLOCK = 64  # columns of one copy: 128 bytes of bfloat16, one swizzled row of shared memory
COPIES = 2  # blocks that fill one slot of weights: 256 bytes of each row
FLIGHT = 3  # slots of weights that a CTA asks for at once; 64 KiB instead, four or five slots of small ones: 1.6 us more a layer
ROWS = 64  # weight rows of one matrix instruction
MOST_ROWS = 64  # most tokens of a launch
LEAST_WIDTH = 128  # that widths are multiples of
SHARED_MEMORY = 227 * 1024
LINE = 32  # words of 128 bytes
SPARE = 6 * 1024  # barriers and the scratch of reductions


@dataclasses.dataclass(frozen=True)
class Product:
    """One matrix `[parts * features, depth]` times the activations of all tokens.

    Attributes:
      parts: 2 where gate and up rows of the same features are multiplied by the same CTA.
      rows: weight rows of a part in one tile; tiles: CTAs side by side, the last one shifted back to end with the matrix.
      splits: CTAs that share the depth of a tile.
      itemsize: bytes of a weight.
    """

    name: str
    features: int
    depth: int
    parts: int
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
    def steps(self) -> int:
        """Slots of the whole depth, gate and up rows in turn; the CTAs that share it take as many each, or one more."""
        return self.parts * self.depth // (COPIES * self.columns)

    @property
    def slot_rows(self) -> int:
        """Rows of a slot that instructions read; with less than 64 weight rows those after them belong to nobody."""
        return (COPIES - 1) * self.rows + max(self.rows, ROWS)

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Parts and offsets of the tiles of a CTA's results."""
        return [(part, offset) for part in range(self.parts) for offset in self.offsets]

    @property
    def offsets(self) -> tuple[int, ...]:
        """First rows of the tiles that cover a part; the last one overlaps where 64 does not divide the rows."""
        if self.rows <= ROWS:
            return (0,)
        return (*range(0, self.rows - ROWS, ROWS), self.rows - ROWS)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about one launch.

    Attributes:
      live: tokens of the call; tokens: the same, padded to what the matrix instruction takes.
      hidden: width of the residual stream.
      products: output projection, gate and up, down, and the next layer's projection where there is one.
      ctas: CTAs of the launch, all of them resident at once.
      slots, slot_rows: the ring of weight tiles; x_slots: the ring of activations.
    """

    live: int
    tokens: int
    hidden: int
    products: tuple[Product, ...]
    ctas: int
    slots: int
    slot_rows: int
    x_slots: int
    eps: float

    @property
    def owners(self) -> int:
        """CTAs that add up a split product and the residual stream, 64 features each."""
        return self.hidden // ROWS

    @property
    def x_blocks(self) -> int:
        """Blocks of activations in one slot: what a slot of weights is multiplied with."""
        return COPIES * self.products[0].columns // BLOCK

    @property
    def narrow(self) -> bool:
        """Whether weights are one byte: activations are then two digits of one byte each, in the order of their columns."""
        return self.products[0].itemsize == 1

    @property
    def kept_bytes(self) -> int:
        """Shared memory of the ring of activations, and of what their digits are times where they have any."""
        ring = self.x_slots * self.x_blocks * self.tokens * BLOCK * 2
        return ring + (self.x_slots * self.tokens * 4 if self.narrow else 0)

    @property
    def x_group(self) -> int:
        """Slots of activations that are taken from other CTAs at once: up to eight vectors of each thread."""
        # Half the ring at most: a group waits for all its slots, and the last one of the group before is given back only when the
        # first of this one is multiplied.
        return max(min(self.x_slots // 2, COPIES * ROWS // (self.x_blocks * self.tokens)), 1)

    @property
    def exchange(self) -> "Exchange":
        # Of gate and up, and where there are none, nothing.
        inner = next((product.features for product in self.products if product.name == "gate_up"), 0)
        return Exchange(self.ctas, self.tokens, self.hidden, inner)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Where in global memory CTAs hand results to one another, in words of four bytes.

    A line for each CTA's counts of launches comes first, then two areas alike, which launches take turns with. An area holds, for
    the output projection and for the down projection one after the other: float32 parts of sums, as many tiles of `64 x tokens` as
    there are CTAs; sums of squares of 64 features each; the normed stream `[tokens, hidden]` in bfloat16. Last come the gated
    activations `[tokens, inner]` in bfloat16.
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
    def stage(self) -> int:
        """Words of one of the two projections."""
        return self.scaled + self.tokens * self.hidden // 2

    @property
    def gated(self) -> int:
        return 2 * self.stage

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


def padded_rows(live: int) -> int:
    """Tokens of a launch: what the matrix instruction and the copies of activations take."""
    return next((tokens for tokens in (8, 16, 32, 64) if live <= tokens), live)


def plan(
    *,
    live: int,
    hidden: int,
    heads_width: int,
    inner: int,
    next_width: int | None,
    ctas: int,
    eps: float,
    itemsize: int = 2,
) -> Plan:
    """Raises NotImplementedError with the reason for shapes that do not tile."""
    if not 0 < live <= MOST_ROWS:
        raise NotImplementedError(f"takes 1 to {MOST_ROWS} rows, not {live}")
    widths, even = {"hidden": hidden, "heads": heads_width, "inner": inner}, COPIES * BLOCK * 2 // itemsize
    for name, size in widths.items():
        if size % even:
            raise NotImplementedError(f"takes widths that {even} divides, not {name} {size}")
    if hidden // ROWS > ctas:
        raise NotImplementedError(f"hidden {hidden} needs {hidden // ROWS} multiprocessors to add up, there are {ctas}")
    if next_width is not None and next_width % LEAST_WIDTH:
        raise NotImplementedError(f"takes widths that {LEAST_WIDTH} divides, not next {next_width}")
    products = [
        split_product("o", hidden, heads_width, ctas, itemsize), whole_product("gate_up", inner, hidden, 2, ctas, itemsize),
        split_product("down", hidden, inner, ctas, itemsize),
    ]  # fmt: skip
    if next_width is not None:
        products.append(whole_product("next", next_width, hidden, 1, ctas, itemsize))
    return room(Plan(live, padded_rows(live), hidden, tuple(products), ctas, 0, 0, 0, eps))


def room(whole: Plan) -> Plan:
    """The plan with rings as large as memory allows. Raises NotImplementedError where it has none."""
    slot_rows = max(product.slot_rows for product in whole.products)
    x_slots = (8 if whole.tokens <= 16 else 4) * whole.products[0].itemsize // 2
    whole = dataclasses.replace(whole, slot_rows=slot_rows, x_slots=x_slots)
    slots = (SHARED_MEMORY - SPARE - whole.kept_bytes) // (slot_rows * BLOCK * 2)
    if slots < 2:
        raise NotImplementedError(f"tiles of {slot_rows} rows do not fit into shared memory twice")
    return dataclasses.replace(whole, slots=min(slots, 16))


def whole_product(name: str, features: int, depth: int, parts: int, ctas: int, itemsize: int = 2) -> Product:
    """Every CTA has its own rows over the whole depth."""
    rows = max(-(-features // ctas // 8) * 8, 8)
    return Product(name, features, depth, parts, rows, 1, itemsize)


def split_product(name: str, features: int, depth: int, ctas: int, itemsize: int = 2) -> Product:
    """64 rows and a part of the depth for every CTA."""
    splits = min(ctas // (features // ROWS), depth * itemsize // (COPIES * BLOCK * 2))
    return Product(name, features, depth, 1, ROWS, splits, itemsize)
