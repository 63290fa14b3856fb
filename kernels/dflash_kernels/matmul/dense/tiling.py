"""How the Hopper kernel cuts a product into tiles."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

BLOCK = 64  # columns of one copy where numbers have two bytes: 128 bytes
ROWS = 64  # of a tile at least
SOME_ROWS = 128  # of a tile where a product is of some of its rows
HEIGHTS = 64, 128, 256  # of tiles
MULTIPLIERS = 2  # warpgroups that multiply
WHOLE = 64  # columns that fill a swizzle
SHARED = 224 * 1024
# Of a ring beside which results have room. With such room for all results, gate and up of 256 rows with three slots among them, a
# cycle of 16 sequences of 4B took 6.10 ms in place of 5.97.
LEAST_SLOTS = 5
MANY_ROWS = 512  # of which tall tiles and few instructions have been measured to pay
# Heads of few rows wait for memory: narrow tiles leave room for seven blocks on their way, wide ones for four. Of 128 rows and 4B's
# head that is 187 us in place of 192 on an H200, in float8 101 in place of 106.
FEW_BEST, FEW_BEST_ROWS = 128, 128

type Form = Literal["plain", "parts", "gated", "best"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Shapes and schedule.

    Attributes:
      rows, features, depth: of the product `[rows, depth] x [features, depth]`; gate and up have `features` each.
      form: see `results`.
      tile_rows: 64, or a multiple of 128.
      step: features of a tile; gate and up have so many each.
      splits: parts of the depth.
      ctas: at most one for each multiprocessor.
      slots: of the ring.
      rounded: dtype of results, and that "best" compares in.
      staged: columns of the tiles in which results leave through shared memory; 0 where they leave from registers.
      lean: few instructions: one warp alone starts copies.
      itemsize: bytes of a number of both operands; those of one byte have scales of their rows.
      blocked: weights lie in blocks of columns (`dflash_kernels.core.layouts`).
    """

    rows: int
    features: int
    depth: int
    form: Form
    tile_rows: int
    step: int
    splits: int
    ctas: int
    slots: int
    rounded: Any
    staged: int = 0
    lean: bool = False
    itemsize: int = 2
    blocked: bool = False

    @property
    def block(self) -> int:
        """Columns of one copy."""
        return 2 * BLOCK // self.itemsize

    @property
    def parts(self) -> int:
        return 2 if self.form == "gated" else 1

    @property
    def tile_features(self) -> int:
        return self.step * self.parts

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // self.tile_rows)

    @property
    def present(self) -> int:
        """Rows of a tile that there are: the first ones. "best" gives anything for the others, all else leaves them out."""
        return min(self.rows, self.tile_rows)

    @property
    def last_row(self) -> int:
        """Where the last tile begins: it overlaps the one before where rows are no whole tiles, and both write the same."""
        return max(self.rows - self.tile_rows, 0)

    @property
    def feature_tiles(self) -> int:
        return -(-self.features // self.step)

    @property
    def tiles(self) -> int:
        return self.row_tiles * self.splits * self.feature_tiles

    @property
    def steps(self) -> int:
        """Blocks of one tile."""
        return self.depth // self.block // self.splits

    @property
    def pairs(self) -> bool:
        """Whether blocks are asked for two at a time, as soon as there is room for both.

        A slot is free when the block after its own has come: with two of them nothing would ever follow.
        """
        return self.form == "gated" and not self.lean and self.steps % 2 == 0 and self.slots > 2

    @property
    def by_rows(self) -> int:
        """1 where warpgroups share a tile's rows, 0 where they share its features."""
        return int(self.tile_rows > ROWS)

    @property
    def own_rows(self) -> int:
        """Of one warpgroup."""
        return self.tile_rows // MULTIPLIERS if self.by_rows else self.tile_rows

    @property
    def own_step(self) -> int:
        return self.step if self.by_rows else self.step // MULTIPLIERS

    @property
    def own_features(self) -> int:
        return self.own_step * self.parts

    @property
    def pieces(self) -> tuple[tuple[int, int, int], ...]:
        """Copies of a block of weights: row in the weights before the tile's first feature is added, row in the block, rows.

        A warpgroup's gate rows and up rows lie side by side.
        """
        if self.parts == 1:
            return ((0, 0, self.step),)
        halves = range(1 if self.by_rows else MULTIPLIERS)
        return tuple(
            (
                part * self.features + half * self.own_step,
                half * self.own_features + part * self.own_step,
                self.own_step,
            )
            for half in halves
            for part in range(self.parts)
        )

    def results(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """plain: the product; parts: parts of it, one after the other; gated: silu(gate) * up; best: the largest product of every
        warpgroup's features and row, and its feature.
        """
        if self.form == "best":
            candidates = self.ctas // self.row_tiles * (1 if self.by_rows else MULTIPLIERS)
            shape = candidates, self.row_tiles * self.tile_rows
            return jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32)
        shape = self.rows, self.features
        return (jax.ShapeDtypeStruct((self.splits, *shape) if self.form == "parts" else shape, self.rounded),)


def plan(
    rows: int, features: int, depth: int, form: Form, *, multiprocessors: int, tile_rows: int, step: int, splits: int = 1,
    rounded: Any = jnp.bfloat16, lean: bool = False, itemsize: int = 2,
) -> Plan:  # fmt: skip
    """A plan of the given tiles."""
    made = Plan(rows, features, depth, form, tile_rows, step, splits, 1, 1, rounded, 0, lean, itemsize)
    block, results = 2 * BLOCK * (tile_rows + made.tile_features), tile_rows * step * jnp.dtype(rounded).itemsize
    staged = 0 if form == "best" else next((wide for wide in (64, 32, 16) if made.own_step % wide == 0), 0)
    if not lean and (SHARED - results) // block < LEAST_SLOTS:
        staged = 0
    slots, ctas = min(8, (SHARED - results * (staged > 0)) // block), min(made.tiles, multiprocessors)
    made = dataclasses.replace(made, slots=slots, staged=staged)
    if form == "best":  # the same number for all rows: a CTA stays with its rows
        ctas = max(ctas // made.row_tiles, 1) * made.row_tiles
    return dataclasses.replace(made, ctas=ctas)


@functools.lru_cache(maxsize=256)
def best_plan(
    rows: int, features: int, depth: int, form: Form, *, multiprocessors: int, rounded: Any = jnp.bfloat16,
    some: bool = False, itemsize: int = 2, blocked: bool = False,
) -> Plan:  # fmt: skip
    """The plan of the least estimated time. With `some`, those of few rows at once: they keep all multiprocessors busy.

    `blocked`: of weights in blocks of columns, and of any multiple of 8 rows.
    """
    if blocked:
        return dataclasses.replace(_least(rows, features, depth, form, multiprocessors, rounded), blocked=True)
    if some:
        few = _plans(SOME_ROWS, features, depth, form, multiprocessors, rounded, (SOME_ROWS,), itemsize)
        return min((dataclasses.replace(plan, rows=rows) for plan in few), key=_estimate)
    return _least(rows, features, depth, form, multiprocessors, rounded, itemsize)


def _least(
    rows: int, features: int, depth: int, form: Form, multiprocessors: int, rounded: Any, itemsize: int = 2
) -> Plan:
    return min(_plans(rows, features, depth, form, multiprocessors, rounded, HEIGHTS, itemsize), key=_estimate)


def _plans(
    rows: int, features: int, depth: int, form: Form, multiprocessors: int, rounded: Any, heights: tuple[int, ...],
    itemsize: int,
) -> list[Plan]:  # fmt: skip
    """All that fit, with tiles of so many rows."""
    parts, made = 2 if form == "gated" else 1, []
    for tile_rows in heights:
        for splits in (1, 2, 4) if form == "parts" else (1,):
            # Tall tiles leave "best" too few registers for its comparisons.
            if (
                (max(rows, ROWS) % tile_rows if rows % ROWS == 0 or rows < ROWS else tile_rows > rows)
                or depth % (splits * (2 * BLOCK // itemsize))
                or (form == "best" and tile_rows > 128)
            ):
                continue
            # An accumulator takes a register of each of 128 threads for 64 rows and 2 features.
            tall = 192 if rows >= MANY_ROWS else 160
            widest = tall if tile_rows == 256 else FEW_BEST if form == "best" and rows <= FEW_BEST_ROWS else 256
            unit = 8 if tile_rows > ROWS else 8 * MULTIPLIERS
            # Of some of a tile's rows results leave through shared memory, in columns that divide by 16.
            part_of_tile = rows < tile_rows and form != "best"
            of_tiles = [
                plan(
                    rows, features, depth, form, multiprocessors=multiprocessors, tile_rows=tile_rows, step=step,
                    splits=splits, rounded=rounded, itemsize=itemsize,
                    lean=form == "gated" and rows >= MANY_ROWS and step % (WHOLE // 2) == 0,
                )
                for step in range(unit, min(widest // parts, features) + 1, unit)
            ]  # fmt: skip
            made += [plan for plan in of_tiles if plan.staged or not part_of_tile]
    return made


def pays_onto(rows: int, features: int, depth: int, *, multiprocessors: int) -> bool:
    """Whether XLA's product with the stream added is faster: where tiles of whole swizzles, the depth in one part, fill the GPU."""
    if rows < MANY_ROWS:
        return False
    parts = best_plan(rows, features, depth, "parts", multiprocessors=multiprocessors)
    return parts.splits == 1 and parts.step % WHOLE == 0


def _estimate(plan: Plan) -> float:
    """Microseconds: the slowest of the matrix units, shared memory, the way into a multiprocessor, and memory."""
    turns, depth, wide = -(-plan.tiles // plan.ctas), plan.depth // plan.splits * plan.itemsize, plan.tile_features
    products = plan.tile_rows * wide * depth / 5.7e6
    # Each warpgroup reads its rows once for every 64 of them, and its features.
    operands = (plan.own_rows + plan.own_rows // ROWS * plan.own_features) * MULTIPLIERS * depth / 210e3
    arriving = (plan.present + wide) * depth / 95e3
    streamed = plan.features * plan.parts * plan.depth * plan.itemsize / 4.2e6
    if plan.rows < ROWS:  # nothing but memory counts: a last turn must leave none of it idle
        streamed *= turns * plan.ctas / plan.tiles
    written = plan.splits * plan.rows * plan.features * 8 / 5e6 if plan.splits > 1 else 0.0
    return max(turns * max(products, operands, arriving), streamed) + written + 0.5 * turns
