"""Tiling of the GEMM kernel: tile shapes, split-K, pipeline stages and the persistent grid, as pure arithmetic.

`y[M, N] = x[M, K] @ w[N, K].T`; with gate and up the weight has 2 N rows. What the choices rest on is told in docs/matmul.md.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

SWIZZLE_BYTES = 128  # of a row of a k-tile: one swizzled row of shared memory
BLOCK = 64  # columns of a k-tile where numbers have two bytes
WGMMA_M = 64  # rows of one matrix instruction, and of a tile at least
LIVE_TILE_M = 128  # rows of a tile where only the first rows of a product are asked for
TILE_MS = 64, 128, 256
CONSUMERS = 2  # warpgroups that multiply
STORE_COLUMNS = 64  # columns that fill a swizzle
SHARED_MEMORY = 224 * 1024
FEWEST_ROWS = 8  # that one copy may bring
FEWEST_STAGES = 5  # of a ring beside which there is room to stage results
MANY_ROWS = 512  # from which on tall tiles and a producer of one warp pay
# An LM head of few rows waits for memory: narrow tiles leave room for more k-tiles in flight.
HEAD_TILE_N, HEAD_ROWS, HEAD_FEATURES = 128, 128, 2**15

type Epilogue = Literal["store", "split_k", "swiglu", "argmax"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static shapes and schedule of one launch.

    Attributes:
      m, n, k: of the product; gate and up have `n` weight rows each.
      epilogue: what becomes of a tile's accumulator, see `out_types`.
      tile_m: 64, or a multiple of 128.
      tile_n: features of a tile; gate and up have so many each.
      split_k: parts of K with a tile each.
      ctas: persistent CTAs, at most one for each multiprocessor.
      stages: k-tiles of the ring in shared memory.
      out_dtype: of results, and what "argmax" compares in.
      staged: columns of the swizzled tiles in which results leave through shared memory; 0 where they leave from registers.
      one_warp: one warp of the producer alone starts copies, for fewer instructions.
      itemsize: bytes of a number of both operands; operands of one byte have row scales.
      blocked: weights lie in column blocks (`dflash_kernels.core.layouts`).
    """

    m: int
    n: int
    k: int
    epilogue: Epilogue
    tile_m: int
    tile_n: int
    split_k: int
    ctas: int
    stages: int
    out_dtype: Any
    staged: int = 0
    one_warp: bool = False
    itemsize: int = 2
    blocked: bool = False

    @property
    def tile_k(self) -> int:
        """Columns of a k-tile."""
        return SWIZZLE_BYTES // self.itemsize

    @property
    def matrices(self) -> int:
        """2 with gate and up, else 1."""
        return 2 if self.epilogue == "swiglu" else 1

    @property
    def tile_w(self) -> int:
        """Weight rows of a tile."""
        return self.tile_n * self.matrices

    @property
    def m_tiles(self) -> int:
        return -(-self.m // self.tile_m)

    @property
    def valid_rows(self) -> int:
        """Valid rows of a tile, the first ones. The others are not written; those of an "argmax" are undefined."""
        return min(self.m, self.tile_m)

    @property
    def last_row(self) -> int:
        """First row of the last tile: it overlaps the one before where M is no multiple of the tile, and both write the same."""
        return max(self.m - self.tile_m, 0)

    @property
    def n_tiles(self) -> int:
        return -(-self.n // self.tile_n)

    @property
    def tiles(self) -> int:
        return self.m_tiles * self.split_k * self.n_tiles

    @property
    def k_tiles(self) -> int:
        """The number of steps along the depth of one tile."""
        return self.k // self.tile_k // self.split_k

    @property
    def in_twos(self) -> bool:
        """Whether k-tiles are asked for two at a time, as soon as both have an empty stage.

        A stage is empty when the k-tile after its own has come: with two stages nothing would ever follow.
        """
        return self.epilogue == "swiglu" and not self.one_warp and self.k_tiles % 2 == 0 and self.stages > 2

    @property
    def split_m(self) -> int:
        """1 where the consumers share a tile's rows, 0 where they share its features."""
        return int(self.tile_m > WGMMA_M)

    @property
    def wg_m(self) -> int:
        """Rows of one consumer."""
        return self.tile_m // CONSUMERS if self.split_m else self.tile_m

    @property
    def wg_n(self) -> int:
        """Features of one consumer."""
        return self.tile_n if self.split_m else self.tile_n // CONSUMERS

    @property
    def wg_w(self) -> int:
        """Weight rows of one consumer."""
        return self.wg_n * self.matrices

    @property
    def w_copies(self) -> tuple[tuple[int, int, int], ...]:
        """Copies of a k-tile of weights: row in the weights before the tile's first feature is added, row in the stage, rows.

        A consumer's gate rows and up rows lie side by side.
        """
        if self.matrices == 1:
            return ((0, 0, self.tile_n),)
        halves = range(1 if self.split_m else CONSUMERS)
        return tuple(
            (
                matrix * self.n + half * self.wg_n,
                half * self.wg_w + matrix * self.wg_n,
                self.wg_n,
            )
            for half in halves
            for matrix in range(self.matrices)
        )

    def out_types(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """store: the product; split_k: partial products `[split_k, M, N]`; swiglu: silu(gate) * up; argmax: of each row the largest
        product among every consumer's features, and its feature.
        """
        if self.epilogue == "argmax":
            candidates = self.ctas // self.m_tiles * (1 if self.split_m else CONSUMERS)
            shape = candidates, self.m_tiles * self.tile_m
            return jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32)
        shape = self.m, self.n
        return (jax.ShapeDtypeStruct((self.split_k, *shape) if self.epilogue == "split_k" else shape, self.out_dtype),)


def reduce_candidates(found: tuple[Array, ...], rows: int) -> Int[Array, "M"]:
    """The argmax of the first `rows` rows from candidates `[C, M]`, products and their features; the first of equal ones."""
    best = tuple(part[:, :rows] for part in found)
    return jax.lax.reduce(best, (jnp.float32(-jnp.inf), jnp.int32(0)), larger_of, (0,))[1]


def larger_of(ours: tuple[Array, Array], theirs: tuple[Array, Array]) -> tuple[Array, Array]:
    """The larger of two values with its index; of equal ones the one with the lower index."""
    first = (ours[0] > theirs[0]) | ((ours[0] == theirs[0]) & (ours[1] < theirs[1]))
    return jnp.where(first, ours[0], theirs[0]), jnp.where(first, ours[1], theirs[1])


@functools.lru_cache(maxsize=256)
def plan(
    m: int, n: int, k: int, epilogue: Epilogue, *, multiprocessors: int, out_dtype: Any = jnp.bfloat16,
    live: bool = False, itemsize: int = 2, blocked: bool = False,
) -> Plan:  # fmt: skip
    """The plan of the least estimated time.

    Args:
      live: only the first rows are asked for, how many is known when the kernel runs: tiles of few rows, which keep all
        multiprocessors busy for any number.
      blocked: weights in column blocks, and any multiple of 8 rows.
    """
    if blocked:
        return dataclasses.replace(_cheapest(m, n, k, epilogue, multiprocessors, out_dtype), blocked=True)
    if live:
        few = candidates(LIVE_TILE_M, n, k, epilogue, multiprocessors, out_dtype, (LIVE_TILE_M,), itemsize)
        return min((dataclasses.replace(made, m=m) for made in few), key=_estimate)
    return _cheapest(m, n, k, epilogue, multiprocessors, out_dtype, itemsize)


def _cheapest(
    m: int, n: int, k: int, epilogue: Epilogue, multiprocessors: int, out_dtype: Any, itemsize: int = 2
) -> Plan:
    return min(candidates(m, n, k, epilogue, multiprocessors, out_dtype, TILE_MS, itemsize), key=_estimate)


def candidates(
    m: int, n: int, k: int, epilogue: Epilogue, multiprocessors: int, out_dtype: Any, tile_ms: tuple[int, ...],
    itemsize: int,
) -> list[Plan]:  # fmt: skip
    """All plans that fit shared memory and registers, with tiles of so many rows."""
    matrices, made = 2 if epilogue == "swiglu" else 1, []
    for tile_m in tile_ms:
        for split_k in (1, 2, 4) if epilogue == "split_k" else (1,):
            # Tall tiles leave "argmax" too few registers for its comparisons.
            if (
                (max(m, WGMMA_M) % tile_m if m % WGMMA_M == 0 or m < WGMMA_M else tile_m > m)
                or k % (split_k * (SWIZZLE_BYTES // itemsize))
                or (epilogue == "argmax" and tile_m > 128)
            ):
                continue
            # An accumulator takes a register of each of 128 threads for 64 rows and 2 features.
            tall = 192 if m >= MANY_ROWS else 160
            head = epilogue == "argmax" or (epilogue == "store" and n >= HEAD_FEATURES)
            widest = tall if tile_m == 256 else HEAD_TILE_N if head and m <= HEAD_ROWS else 256
            unit = 8 if tile_m > WGMMA_M else 8 * CONSUMERS
            # Valid rows alone leave through shared memory, in columns that divide by 16.
            ragged = m < tile_m and epilogue != "argmax"
            of_tiles = [
                tiled(
                    m, n, k, epilogue, multiprocessors=multiprocessors, tile_m=tile_m, tile_n=tile_n,
                    split_k=split_k, out_dtype=out_dtype, itemsize=itemsize,
                    one_warp=epilogue == "swiglu" and m >= MANY_ROWS and tile_n % (STORE_COLUMNS // 2) == 0,
                )
                for tile_n in range(unit, min(widest // matrices, n) + 1, unit)
            ]  # fmt: skip
            made += [plan for plan in of_tiles if plan.staged or not ragged]
    return made


def tiled(
    m: int, n: int, k: int, epilogue: Epilogue, *, multiprocessors: int, tile_m: int, tile_n: int, split_k: int = 1,
    out_dtype: Any = jnp.bfloat16, one_warp: bool = False, itemsize: int = 2,
) -> Plan:  # fmt: skip
    """The plan of given tiles: as many stages as fit, results staged where enough of them are left."""
    made = Plan(m, n, k, epilogue, tile_m, tile_n, split_k, 1, 1, out_dtype, 0, one_warp, itemsize)
    stage, results = SWIZZLE_BYTES * (tile_m + made.tile_w), tile_m * tile_n * jnp.dtype(out_dtype).itemsize
    staged = 0 if epilogue == "argmax" else next((wide for wide in (64, 32, 16) if made.wg_n % wide == 0), 0)
    if not one_warp and (SHARED_MEMORY - results) // stage < FEWEST_STAGES:
        staged = 0
    stages = min(8, (SHARED_MEMORY - results * (staged > 0)) // stage)
    ctas = min(made.tiles, multiprocessors)
    made = dataclasses.replace(made, stages=stages, staged=staged)
    if epilogue == "argmax":  # the same number for all rows: a CTA stays with its rows
        ctas = max(ctas // made.m_tiles, 1) * made.m_tiles
    return dataclasses.replace(made, ctas=ctas)


def cublas_pays(m: int, n: int, k: int, *, multiprocessors: int) -> bool:
    """Whether XLA's product with the residual added is faster: where tiles of whole swizzles, without split-K, fill the GPU."""
    if m < MANY_ROWS:
        return False
    made = plan(m, n, k, "split_k", multiprocessors=multiprocessors)
    return made.split_k == 1 and made.tile_n % STORE_COLUMNS == 0


def _estimate(plan: Plan) -> float:
    """Microseconds: the slowest of the matrix units, shared memory, the way into a multiprocessor, and memory."""
    waves, k_bytes, wide = -(-plan.tiles // plan.ctas), plan.k // plan.split_k * plan.itemsize, plan.tile_w
    products = plan.tile_m * wide * k_bytes / 5.7e6
    # Each consumer reads its rows once for every 64 of them, and its features.
    operands = (plan.wg_m + plan.wg_m // WGMMA_M * plan.wg_w) * CONSUMERS * k_bytes / 210e3
    arriving = (plan.valid_rows + wide) * k_bytes / 95e3
    streamed = plan.n * plan.matrices * plan.k * plan.itemsize / 4.2e6
    if plan.m < WGMMA_M:  # nothing but memory counts: a last wave must leave none of it idle
        streamed *= waves * plan.ctas / plan.tiles
    written = plan.split_k * plan.m * plan.n * 8 / 5e6 if plan.split_k > 1 else 0.0
    return max(waves * max(products, operands, arriving), streamed) + written + 0.5 * waves
