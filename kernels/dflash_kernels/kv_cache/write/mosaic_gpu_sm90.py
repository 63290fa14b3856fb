"""The cache-write kernel for Hopper: one CTA applies RMS norm and RoPE to a few heads of one token and stores them in their pages.

The heads of a token are rows of a tile that lives in registers: a row's columns lie within one warp, so its mean square and its
largest value are warp shuffles, and the two halves that a rotation pairs are two tiles of one shape in the same threads. Nothing
passes through shared memory: a CTA waits for its slot, its row and the tables at once, then stores.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.core.layouts import aliased_ref, freeze_aliased
from dflash_kernels.kv_cache.write.formats import INT8_FLOOR, INT8_MAX
from dflash_kernels.mosaic_gpu.layouts import store
from dflash_kernels.mosaic_gpu.thread_op import kernel
from dflash_kernels.quantize.reference import E4M3_MAX

THREADS, WARP, WARPS = 128, 32, 4


@dataclasses.dataclass(frozen=True)
class Segment:
    """Heads that are treated alike.

    Attributes:
      source: name of the array `[T, heads, H]` they come from.
      target: name of the array they go to: a pool or `[T, heads, H]`.
      first: index of the first among the source's heads.
      heads: how many.
      norm: name of the norm's weight, or None.
      rotated: whether RoPE applies.
      paged: whether `target` is a pool.
      scale: name of the scale for a quantized pool: `[1]` or `[K]` for float8, `[K, H]` or a pool of scales `[P, K, p]` for int8.
    """

    source: str
    target: str
    first: int
    heads: int
    norm: str | None
    rotated: bool
    paged: bool
    scale: str | None = None

    @property
    def rows(self) -> int:
        """Heads of one CTA."""
        return next(rows for rows in (8, 4, 2, 1) if self.heads % rows == 0)


def in_pool(slot: Any, pages: int, page_size: int) -> Any:
    """Whether a slot is one of a pool's: a store anywhere else would land in somebody's memory."""
    return (slot >= 0) & (slot <= min(pages * page_size - 1, 2**31 - 1))


def power_of_two_in(number: int) -> int:
    return number & -number


@dataclasses.dataclass(frozen=True)
class Columns:
    """Split of a head's columns: the two halves of its rotary dims, and the rest."""

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
    pools: dict[str, jax.Array], q: jax.ShapeDtypeStruct | None, interpret: Any, zero_centered: bool = False,
) -> tuple[jax.Array | None, dict[str, jax.Array]]:  # fmt: skip
    """Runs the kernel.

    Args:
      segments: what happens to which heads.
      columns: how a head is cut.
      eps: of the norms.
      page_size: rows of a page.
      inputs: sources `[T or more, heads, H]`, `slots [T]`, `cos` and `sin [T, half]` where RoPE applies, norm weights, scales.
      pools: what is written in place.
      q: the queries `[T, N, H]` that come out, or None.
      interpret: for tests on the CPU.
      zero_centered: weights of norms are offsets from 1.

    Returns:
      The queries, and the pools.
    """
    names = [*inputs, *pools, *(["q"] if q else [])]
    tokens, groups = inputs["slots"].shape[0], sum(segment.heads // segment.rows for segment in segments)
    pages = next(iter(pools.values())).shape[0]

    def body(*refs):
        _Cta(dict(zip(names, refs, strict=True)), columns, eps, pages, page_size, zero_centered).run(segments)

    held = {name: aliased_ref(pool) for name, pool in pools.items()}
    out = kernel(
        body, out_type=(q,) if q else (),
        grid=(tokens, groups), grid_names=("token", "group"),
        # Sums of a row stay within a warp: no scratch.
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
        interpret=interpret,
    )(*inputs.values(), *held.values())  # fmt: skip
    return out[0] if q else None, {name: freeze_aliased(ref) for name, ref in held.items()}


class _Cta:
    """The program of one CTA: finds its token's slot and the segment of its heads."""

    def __init__(
        self, refs: dict[str, Any], columns: Columns, eps: float, pages: int, page_size: int, zero_centered: bool
    ):
        self.refs, self.columns, self.eps, self.zero_centered = refs, columns, eps, zero_centered
        self.token, self.group = lax.axis_index("token"), lax.axis_index("group")
        slot = refs["slots"][self.token]
        self.live = in_pool(slot, pages, page_size)
        self.page, self.row = lax.div(slot, jnp.int32(page_size)), lax.rem(slot, jnp.int32(page_size))

    def run(self, segments: tuple[Segment, ...]) -> None:
        begin = 0
        for segment in segments:
            end = begin + segment.heads // segment.rows

            @pl.when((self.group >= begin) & (self.group < end))
            def _(segment=segment, begin=begin):
                _Heads(self, segment, (self.group - begin) * segment.rows).run()

            begin = end


class _Heads:
    """Program of a CTA for its heads: load, norm, rotate, quantize, store."""

    def __init__(self, cta: _Cta, segment: Segment, first_head: Any):
        self.cta, self.segment, self.first_head = cta, segment, first_head
        self.refs, self.pieces, self.heads = cta.refs, cta.columns.pieces, pl.ds(first_head, segment.rows)
        self.source, self.target = self.refs[segment.source], self.refs[segment.target]
        self.dtype = self.source.dtype
        self.layouts = [cta.columns.layout(segment.rows, width) for _, width in self.pieces]
        self.places = [pl.ds(start, width) for start, width in self.pieces]

    def run(self) -> None:
        # Every load before the first branch on the slot and before the first store, past which nothing moves it.
        tiles, angles, weights, scales = self._projected(), self._angles(), self._weights(), self._fixed_scales()

        def finish():
            self._store(self._quantize(self._rotate(self._norm(tiles, weights), angles), scales))

        if self.segment.paged:
            pl.when(self.cta.live)(finish)
        else:
            finish()

    def _projected(self) -> list[jax.Array]:
        heads = pl.ds(self.segment.first + self.first_head, self.segment.rows)
        return [
            _load(self.source.at[self.cta.token, heads, place], layout)
            for place, layout in zip(self.places, self.layouts, strict=True)
        ]

    def _angles(self) -> list[jax.Array] | None:
        """Cos and sin of the token."""
        if not self.segment.rotated:
            return None
        return [_load(self.refs[name].at[self.cta.token], self.layouts[0].reduce(0)) for name in ("cos", "sin")]

    def _weights(self) -> list[jax.Array] | None:
        if self.segment.norm is None:
            return None
        weight = self.refs[self.segment.norm]
        return [
            _load(weight.at[place], layout.reduce(0)) for place, layout in zip(self.places, self.layouts, strict=True)
        ]

    def _fixed_scales(self) -> list[Any] | None:
        """Scales that divide the pieces; None if nothing divides them, or if their own numbers give the scale."""
        if self.segment.scale is None:
            return None
        scale = self.refs[self.segment.scale]
        if len(scale.shape) == 3:
            return None
        if len(scale.shape) == 2:
            return [
                _load(scale.at[self.heads, place], layout)
                for place, layout in zip(self.places, self.layouts, strict=True)
            ]
        if scale.shape == (1,):
            return [scale[0]] * len(self.pieces)
        row = _load(scale.at[self.heads], self.layouts[0].reduce(1))
        return [_along_columns(row, (self.segment.rows, width)) for _, width in self.pieces]

    def _norm(self, tiles: list[jax.Array], weights: list[jax.Array] | None) -> list[jax.Array]:
        if weights is None:
            return tiles
        wide = [tile.astype(jnp.float32) for tile in tiles]
        total = sum((tile * tile).sum(axis=1) for tile in wide)
        inverse = lax.rsqrt(total * (1 / self.cta.columns.head_dim) + self.cta.eps)
        if self.cta.zero_centered:
            return [
                (
                    tile
                    * _along_columns(inverse, tile.shape)
                    * _along_rows(1.0 + weight.astype(jnp.float32), tile.shape)
                ).astype(self.dtype)
                for tile, weight in zip(wide, weights, strict=True)
            ]
        # The weight multiplies what was rounded; a product of two short floats is exact in float32 and rounds once.
        rounded = [(tile * _along_columns(inverse, tile.shape)).astype(self.dtype) for tile in wide]
        return [
            (tile.astype(jnp.float32) * _along_rows(weight.astype(jnp.float32), tile.shape)).astype(self.dtype)
            for tile, weight in zip(rounded, weights, strict=True)
        ]

    def _rotate(self, tiles: list[jax.Array], angles: list[jax.Array] | None) -> list[jax.Array]:
        if angles is None:
            return tiles
        first, second = (tile.astype(jnp.float32) for tile in tiles[:2])
        cos, sin = (_along_rows(angle, first.shape) for angle in angles)
        rotated = [first * cos - second * sin, second * cos + first * sin]
        return [*(tile.astype(self.dtype) for tile in rotated), *tiles[2:]]

    def _quantize(self, tiles: list[jax.Array], scales: list[Any] | None) -> list[jax.Array]:
        """float32 tiles that a cast to the pool's dtype makes exact numbers of; for other pools the tiles themselves."""
        if self.segment.scale is None:
            return tiles
        wide = [tile.astype(jnp.float32) for tile in tiles]
        if self.target.dtype != jnp.int8:
            assert scales is not None
            return [jnp.clip(tile / by, -E4M3_MAX, E4M3_MAX) for tile, by in zip(wide, scales, strict=True)]
        if scales is None:
            row = functools.reduce(jnp.maximum, [jnp.abs(tile).max(axis=1) for tile in wide])
            row = jnp.maximum(row, INT8_FLOOR) / INT8_MAX
            self.refs[self.segment.scale].at[self.cta.page, self.heads, self.cta.row][...] = row
            scales = [_along_columns(row, tile.shape) for tile in wide]
        rounded = [jnp.round(tile / by) for tile, by in zip(wide, scales, strict=True)]
        return [jnp.clip(tile, -INT8_MAX, INT8_MAX) for tile in rounded]

    def _store(self, tiles: list[jax.Array]) -> None:
        for tile, place in zip(tiles, self.places, strict=True):
            if self.segment.paged:
                where = self.target.at[self.cta.page, self.heads, self.cta.row, place]
            else:
                where = self.target.at[self.cta.token, self.heads, place]
            store(where, tile.astype(self.target.dtype))


def _load(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def _along_rows(vector: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(vector, shape, [1])


def _along_columns(vector: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(vector, shape, [0])
