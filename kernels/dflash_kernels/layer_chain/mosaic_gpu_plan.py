"""How a chain of products is cut into tiles, one CTA to a multiprocessor. Arithmetic on shapes only."""

import dataclasses

BLOCK = 64  # columns of one copy: 128 bytes of bfloat16, one swizzled row of shared memory
ROWS = 64  # weight rows of one matrix instruction
MOST_ROWS = 64  # most tokens of a launch
SHARED_MEMORY = 227 * 1024
SPARE = 6 * 1024  # barriers and the scratch of reductions


@dataclasses.dataclass(frozen=True)
class Product:
    """One matrix `[parts * features, depth]` times the activations of all tokens.

    Attributes:
      parts: 2 where gate and up rows of the same features are multiplied by the same CTA.
      rows: weight rows of a part in one tile; tiles: CTAs side by side, the last one shifted back to end with the matrix.
      splits: CTAs that share the depth of a tile.
      blocks: blocks of the depth in one slot of the ring; steps: slots that a CTA takes.
    """

    name: str
    features: int
    depth: int
    parts: int
    rows: int
    splits: int
    blocks: int

    @property
    def tiles(self) -> int:
        return -(-self.features // self.rows)

    @property
    def ctas(self) -> int:
        return self.tiles * self.splits

    @property
    def steps(self) -> int:
        return self.depth // (self.splits * self.blocks * BLOCK)

    @property
    def units(self) -> int:
        """Slots of activations that a CTA takes: two blocks each where that comes out even."""
        return self.steps // 2 if self.blocks == 1 and self.steps % 2 == 0 else self.steps

    @property
    def unit_blocks(self) -> int:
        return self.steps * self.blocks // self.units

    @property
    def copies(self) -> int:
        """Copies that fill one slot."""
        return self.parts * self.blocks

    @property
    def slot_rows(self) -> int:
        """Rows of a slot that instructions read; with less than 64 weight rows those after them belong to nobody."""
        return (self.copies - 1) * self.rows + max(self.rows, ROWS)

    @property
    def offsets(self) -> tuple[int, ...]:
        """First rows of the instructions that cover a part; the last one overlaps where 64 does not divide the rows."""
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
    lead: int = 0
    flight: int = 0

    @property
    def blocks(self) -> int:
        """Most blocks of one slot of activations."""
        return max(product.unit_blocks for product in self.products)

    @property
    def reducers(self) -> int:
        """CTAs that add the parts of a split product, 64 features each."""
        return self.hidden // ROWS


def padded_rows(live: int) -> int:
    """Tokens of a launch: what the matrix instruction and the copies of activations take."""
    return next((tokens for tokens in (8, 16, 32, 64) if live <= tokens), live)


def plan(
    *, live: int, hidden: int, heads_width: int, inner: int, next_width: int | None, ctas: int, eps: float
) -> Plan:
    """Raises NotImplementedError with the reason for shapes that do not tile."""
    if not 0 < live <= MOST_ROWS:
        raise NotImplementedError(f"takes 1 to {MOST_ROWS} rows, not {live}")
    for name, size in {"hidden": hidden, "heads": heads_width, "inner": inner, "next": next_width or BLOCK}.items():
        if size % BLOCK:
            raise NotImplementedError(f"takes widths that {BLOCK} divides, not {name} {size}")
    if hidden // ROWS > ctas:
        raise NotImplementedError(f"hidden {hidden} needs {hidden // ROWS} multiprocessors to add up, there are {ctas}")
    products = [
        split_product("o", hidden, heads_width, ctas), whole_product("gate_up", inner, hidden, 2, ctas),
        split_product("down", hidden, inner, ctas),
    ]  # fmt: skip
    if next_width is not None:
        products.append(whole_product("next", next_width, hidden, 1, ctas))
    tokens = padded_rows(live)
    slot_rows = max(product.slot_rows for product in products)
    x_slots = 8 if tokens <= 16 else 4
    slots = (SHARED_MEMORY - SPARE - x_slots * 2 * tokens * BLOCK * 2) // (slot_rows * BLOCK * 2)
    if slots < 2:
        raise NotImplementedError(f"tiles of {slot_rows} rows do not fit into shared memory twice")
    return Plan(live, tokens, hidden, tuple(products), ctas, min(slots, 16), slot_rows, x_slots, eps)


def whole_product(name: str, features: int, depth: int, parts: int, ctas: int) -> Product:
    """Every CTA has its own rows over the whole depth."""
    rows = max(-(-features // ctas // 8) * 8, 8)
    blocks = 2 if parts == 1 and depth % (2 * BLOCK) == 0 else 1
    return Product(name, features, depth, parts, rows, 1, blocks)


def split_product(name: str, features: int, depth: int, ctas: int) -> Product:
    """Rows and a part of the depth for every CTA: as many CTAs as possible, then as few parts."""
    blocks = 2 if depth % (2 * BLOCK) == 0 else 1
    found = []
    for rows in range(ROWS, 2 * ROWS + 1, 8):
        for splits in range(1, 9):
            even = features % rows == 0 and depth % (splits * blocks * BLOCK) == 0
            if even and features // rows * splits <= ctas:
                found.append((features // rows * splits, -splits, rows))
    if not found:
        raise NotImplementedError(f"{name} [{features}, {depth}] does not tile over {ctas} multiprocessors")
    _, splits, rows = max(found)
    return Product(name, features, depth, 1, rows, -splits, blocks)
