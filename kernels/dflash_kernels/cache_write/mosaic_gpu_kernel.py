"""The Hopper kernel: one CTA norms, rotates and stores a few heads of one token.

The heads of a token are rows of a tile that lives in registers: a row's columns lie within one warp, so its mean square and its
largest value are warp shuffles, and the two halves that a rotation pairs are two tiles of one shape in the same threads. Nothing
passes through shared memory: a CTA waits for its slot, its row and the tables at once, then stores.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.cache_write.kv_formats import INT8_FLOOR, INT8_MAX
from dflash_kernels.quantise.reference import E4M3_MAX

THREADS, WARP, WARPS = 128, 32, 4


@dataclasses.dataclass(frozen=True)
class Segment:
    """Heads that are treated alike.

    Attributes:
      target: name of the array they go to: a pool, `[T, heads, H]`, or the queries `[B, K, t, G, H]` as attention folds them.
      first: index of the first among all heads of a token's row.
      heads: how many.
      norm: name of the norm's weight, or None.
      rotated: whether they turn with the position.
      paged: whether `target` is a pool.
      scale: name of the scale for a quantised pool: `[1]` or `[K]` for float8, `[K, H]` or a pool of scales `[P, K, p]` for int8.
      rows: heads of one CTA, which divide `heads` and, of folded queries with G > 1, divide G.
    """

    target: str
    first: int
    heads: int
    norm: str | None
    rotated: bool
    paged: bool
    scale: str | None = None
    rows: int = 1


def rows_of(heads: int) -> int:
    """Heads of one CTA, of so many that are treated alike."""
    return next(rows for rows in (8, 4, 2, 1) if heads % rows == 0)


def power_of_two_in(number: int) -> int:
    return number & -number


@dataclasses.dataclass(frozen=True)
class Columns:
    """How a head's columns are cut: two halves of what rotates, and the rest."""

    half: int
    head_dim: int

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """(first column, width) of each."""
        rest = self.head_dim - 2 * self.half
        pieces = [(0, self.half), (self.half, self.half), (2 * self.half, rest)]
        return [piece for piece in pieces if piece[1]]

    def layout(self, rows: int, width: int) -> Any:
        """Registers of a `[rows, width]` tile. All pieces give a row to the same lanes, so that their sums add up in place."""
        lanes = min(THREADS // rows, WARP, *(power_of_two_in(piece) for _, piece in self.pieces))
        tile = min(power_of_two_in(width), 4 * lanes)
        rows_of_warp = min(rows, WARP // lanes)
        warps, lane_copies = rows // rows_of_warp, WARP // (rows_of_warp * lanes)
        # Dimensions of one have no place in a tiling.
        tiles = [(rows, tile), (tile // lanes,)]
        lane_dims: tuple[Any, ...] = (-2,)
        warp_dims: tuple[Any, ...] = (-3,)
        if rows_of_warp > 1:
            lane_dims = (-3, -2)
        if rows_of_warp > 1 and warps > 1:
            tiles.insert(1, (rows_of_warp, tile))
            warp_dims = (-5,)
        if lane_copies > 1:
            lane_dims = (plgpu.Replicated(lane_copies), *lane_dims)
        if warps < WARPS:
            warp_dims = (*(warp_dims if warps > 1 else ()), plgpu.Replicated(WARPS // warps))
        return plgpu.Layout.TILED(plgpu.Tiling(tuple(tiles)), warp_dims=warp_dims, lane_dims=lane_dims, vector_dim=-1)


def write(
    segments: tuple[Segment, ...], columns: Columns, eps: float, page_size: int, inputs: dict[str, jax.Array],
    pools: dict[str, jax.Array], q: tuple[int, ...] | None, interpret: Any,
) -> tuple[jax.Array | None, dict[str, jax.Array]]:  # fmt: skip
    """Runs the kernel.

    Args:
      segments: what happens to which heads.
      columns: how a head is cut.
      eps: of the norms.
      page_size: rows of a page.
      inputs: `x [T, heads, H]`, `slots [T]`, `cos` and `sin [T, half]` where something rotates, norm weights and scales.
      pools: what is written in place.
      q: shape of the queries that come out, or None.
      interpret: for tests on the CPU.

    Returns:
      The queries, and the pools.
    """
    names = [*inputs, *pools, *(["q"] if q else [])]
    tokens, groups = inputs["x"].shape[0], sum(segment.heads // segment.rows for segment in segments)

    def body(*refs):
        _Block(dict(zip(names, refs, strict=True)), columns, eps, page_size).run(segments)

    held = {name: jax.new_ref(pool) for name, pool in pools.items()}
    out = plgpu.kernel(
        body, out_type=(jax.ShapeDtypeStruct(q, inputs["x"].dtype),) if q else (),
        grid=(tokens, groups), grid_names=("token", "group"),
        # Sums of a row stay within a warp: no scratch.
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
        interpret=interpret,
    )(*inputs.values(), *held.values())  # fmt: skip
    return out[0] if q else None, {name: jax.freeze(ref) for name, ref in held.items()}


class _Block:
    """One CTA's work."""

    def __init__(self, refs: dict[str, Any], columns: Columns, eps: float, page_size: int):
        self.refs, self.columns, self.eps = refs, columns, eps
        self.token, self.group = lax.axis_index("token"), lax.axis_index("group")
        self.dtype = refs["x"].dtype
        slot = refs["slots"][self.token]
        self.live = slot >= 0
        self.page, self.row = lax.div(slot, jnp.int32(page_size)), lax.rem(slot, jnp.int32(page_size))

    def run(self, segments: tuple[Segment, ...]) -> None:
        begin = 0
        for segment in segments:
            end = begin + segment.heads // segment.rows
            mine = (self.group >= begin) & (self.group < end)

            @pl.when(mine & self.live if segment.paged else mine)
            def _(segment=segment, begin=begin):
                self._segment(segment, (self.group - begin) * segment.rows)

            begin = end

    def _segment(self, segment: Segment, first_head: Any) -> None:
        heads = pl.ds(first_head, segment.rows)
        tiles = self._tiles(segment, pl.ds(segment.first + first_head, segment.rows))
        if segment.scale is not None:
            tiles = self._quantised(segment, heads, tiles)
        target = self.refs[segment.target]
        for tile, (start, width) in zip(tiles, self.columns.pieces, strict=True):
            place = pl.ds(start, width)
            if segment.paged:
                where = target.at[self.page, heads, self.row, place]
            else:
                where = target.at[*self._query_place(target, first_head, segment.rows), place]
            where[...] = tile.astype(target.dtype)

    def _query_place(self, target: Any, first_head: Any, rows: int) -> tuple[Any, ...]:
        """Indices of some heads' queries of this token."""
        if len(target.shape) == 3:
            return self.token, pl.ds(first_head, rows)
        of_sequence, group = (jnp.int32(target.shape[axis]) for axis in (2, 3))
        sequence, token = lax.div(self.token, of_sequence), lax.rem(self.token, of_sequence)
        if target.shape[3] == 1:
            return sequence, pl.ds(first_head, rows), token, 0
        return sequence, lax.div(first_head, group), token, pl.ds(lax.rem(first_head, group), rows)

    def _tiles(self, segment: Segment, heads: Any) -> list[jax.Array]:
        """The heads' pieces, in the projection's dtype."""
        layouts = [self.columns.layout(segment.rows, width) for _, width in self.columns.pieces]
        places = [pl.ds(start, width) for start, width in self.columns.pieces]
        tiles = [
            _load(self.refs["x"].at[self.token, heads, place], layout)
            for place, layout in zip(places, layouts, strict=True)
        ]
        if segment.norm is not None:
            weights = [
                _load(self.refs[segment.norm].at[place], layout.reduce(0))
                for place, layout in zip(places, layouts, strict=True)
            ]
            tiles = self._normed(tiles, weights)
        if not segment.rotated:
            return tiles
        first, second = (tile.astype(jnp.float32) for tile in tiles[:2])
        cos, sin = (
            _along_rows(_load(self.refs[name].at[self.token], layouts[0].reduce(0)), first.shape)
            for name in ("cos", "sin")
        )
        turned = [first * cos - second * sin, second * cos + first * sin]
        return [*(tile.astype(self.dtype) for tile in turned), *tiles[2:]]

    def _normed(self, tiles: list[jax.Array], weights: list[jax.Array]) -> list[jax.Array]:
        wide = [tile.astype(jnp.float32) for tile in tiles]
        total = sum((tile * tile).sum(axis=1) for tile in wide)
        inverse = lax.rsqrt(total * (1 / self.columns.head_dim) + self.eps)
        # The weight multiplies what was rounded; a product of two short floats is exact in float32 and rounds once.
        rounded = [(tile * _along_columns(inverse, tile.shape)).astype(self.dtype) for tile in wide]
        return [
            (tile.astype(jnp.float32) * _along_rows(weight.astype(jnp.float32), tile.shape)).astype(self.dtype)
            for tile, weight in zip(rounded, weights, strict=True)
        ]

    def _quantised(self, segment: Segment, heads: Any, tiles: list[jax.Array]) -> list[jax.Array]:
        """float32 tiles that a cast to the pool's dtype makes exact numbers of."""
        assert segment.scale is not None
        scale = self.refs[segment.scale]
        layouts = [self.columns.layout(segment.rows, width) for _, width in self.columns.pieces]
        wide = [tile.astype(jnp.float32) for tile in tiles]
        if self.refs[segment.target].dtype != jnp.int8:
            if scale.shape == (1,):
                scales = [scale[0]] * len(wide)
            else:
                row = _load(scale.at[heads], layouts[0].reduce(1))
                scales = [_along_columns(row, tile.shape) for tile in wide]
            return [jnp.clip(tile / by, -E4M3_MAX, E4M3_MAX) for tile, by in zip(wide, scales, strict=True)]
        if len(scale.shape) == 2:  # one for each channel
            pieces = zip(self.columns.pieces, layouts, strict=True)
            scales = [_load(scale.at[heads, pl.ds(start, width)], layout) for (start, width), layout in pieces]
        else:
            largest = [jnp.abs(tile).max(axis=1) for tile in wide]
            row = largest[0]
            for other in largest[1:]:
                row = jnp.maximum(row, other)
            row = jnp.maximum(row, INT8_FLOOR) / INT8_MAX
            scale.at[self.page, heads, self.row][...] = row
            scales = [_along_columns(row, tile.shape) for tile in wide]
        rounded = [jnp.round(tile / by) for tile, by in zip(wide, scales, strict=True)]
        return [jnp.clip(tile, -INT8_MAX, INT8_MAX) for tile in rounded]


def _load(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def _along_rows(vector: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(vector, shape, [1])


def _along_columns(vector: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(vector, shape, [0])
