"""MXFP4 in tiles: four-bit experts' matrices as the kernel of `mxfp4_mixture` copies and widens them. No bit is lost.

A tile is 64 rows times 64 columns in one piece of 2,176 bytes, the numbers and their scales: one linear copy brings it. Every
thread of a warpgroup finds the numbers that a matrix instruction wants of it in sixteen neighbouring bytes, in places from where
shifts and masks bring them to those of a bfloat16. Of a gated matrix, each sixteen rows of a tile are eight gates above their eight
ups, so that one thread has both.

Source of the format: "OCP Microscaling Formats (MX) Specification", version 1.0, sections 5.3 and 6.3.
"""

import functools
import operator
from dataclasses import dataclass, field
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt8

TILE = 64  # rows, and columns, of a tile
BLOCK = 32  # numbers that share a scale
PIECES, PIECE = 4, 136  # 32-bit words of a tile: 512 of numbers, then 32 of scales
# The kernel's numbers are times 2 to the minus this, so that one bfloat16 is a scale times what a number's place leaves to make up.
SHIFT = 32
MXFP4_MOST_SCALE = 254 - 126 + SHIFT  # the largest scale for which there is such a factor: 2^33
_FACTOR = 126 - SHIFT
# A thread's word has four pairs of numbers. What is left of it after each of these rotations to the left and masks, joined, is a
# pair with its bits where those of two bfloat16 are: a sign, the last two bits of an exponent, the first one of a fraction.
PAIRS = (
    ((0, 0x81C081C0),),
    ((4, 0x81C081C0),),
    ((10, 0x81C081C0),),
    ((6, 0x00400040), (14, 0x81808180)),
)


@no_type_check  # JAX rebuilds pytrees with shapes and placeholders in place of arrays
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mxfp4Tiles:
    """A matrix of each expert in tiles.

    Attributes:
      words: numbers and scales; tiles of rows, in them tiles of columns.
      gated: rows are gates and ups in turns.
      dtype: of what is read from it.
    """

    words: Int32[Array, "E tiles units 4 136"]
    gated: bool = field(metadata={"static": True})
    dtype: jnp.dtype = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, rows and columns."""
        count, tiles, units = self.words.shape[:3]
        return count, tiles * TILE, units * TILE

    def __getitem__(self, all_of_it: Any) -> "Mxfp4Tiles":
        """Itself for `...`, as a module's parameter is read."""
        if all_of_it is not Ellipsis:
            raise TypeError(f"a matrix in tiles of MXFP4 has no part {all_of_it!r}: take `numbers()`")
        return self

    def blocks_and_scales(self) -> tuple[UInt8[Array, "*E F n 16"], UInt8[Array, "*E F n"]]:
        """The bytes that it was made of; of one expert where `words` are."""
        if self.words.ndim == 4:
            return _released(self.words, gated=self.gated)
        return jax.vmap(lambda words: _released(words, gated=self.gated))(self.words)


def mxfp4_tiles(
    blocks: UInt8[Array, "E F n 16"], scales: UInt8[Array, "E F n"], *, gated: bool, dtype: Any
) -> Mxfp4Tiles:
    """Stores matrices in tiles, a copy; an expert's at a time, so that little memory is needed beside.

    Args:
      blocks: two numbers in a byte, the first one in its lower half.
      scales: biased exponents, `MXFP4_MOST_SCALE` at most.
      gated: rows are gates and ups in turns.
      dtype: of what is read from it.

    Raises:
      ValueError: rows or columns are not whole tiles.
    """
    rows, columns = scales.shape[1], scales.shape[2] * BLOCK
    if rows % TILE or columns % TILE:
        raise ValueError(f"rows and columns must be whole tiles of {TILE}, not {rows} and {columns}")
    words = jax.lax.map(lambda one: _tiled(*one, gated=gated), (blocks, scales))
    return Mxfp4Tiles(words, gated, jnp.dtype(dtype))


def _tiled(blocks: Array, scales: Array, *, gated: bool) -> Array:
    """One expert's tiles `[tiles, units, 4, 136]`."""
    rows, of_row = scales.shape
    tiles, units = rows // TILE, of_row * BLOCK // TILE
    codes = jnp.stack([blocks & 15, blocks >> 4], axis=-1).astype(jnp.uint32)
    # Rows as warp, half and row of eight; columns as step, half, lane of four and which of two.
    codes = _halves_first(codes.reshape(tiles, 4, 16, units, 4, 2, 4, 2), gated)
    factors = _halves_first((scales + jnp.uint8(_FACTOR)).astype(jnp.uint32).reshape(tiles, 4, 16, units, 2), gated)
    numbers = jnp.zeros((), jnp.uint32)
    for slot, parts in enumerate(PAIRS):
        half, group = slot % 2, slot // 2
        code = codes[:, :, half, :, :, :, group]  # tile, warp, row, unit, step, lane, which
        placed = (code >> 3) << 15 | (code & 7) << 6
        pair = placed[..., 0] | placed[..., 1] << 16
        for turn, mask in parts:
            numbers |= _rotated(pair & jnp.uint32(mask), -turn)
    numbers = jnp.transpose(numbers, (0, 3, 1, 2, 5, 4)).reshape(tiles, units, 512)
    scale = jnp.zeros((), jnp.uint32)
    for half in range(2):
        for block in range(2):
            scale |= factors[:, :, half, :, :, block] << (8 * (2 * half + block))
    scale = jnp.transpose(scale, (0, 3, 1, 2)).reshape(tiles, units, 32)
    words = jnp.concatenate([numbers, scale], axis=-1).reshape(tiles, units, PIECES, PIECE)
    return jax.lax.bitcast_convert_type(words, jnp.int32)


def _rotated(words: Array, turn: int) -> Array:
    """Words of 32 bits, rotated to the left."""
    turn %= 32
    return words << turn | words >> (32 - turn) if turn else words


def _halves_first(rows: Array, gated: bool) -> Array:
    """Sixteen rows, axis 2, as two halves of eight: gates and ups, or the first ones and the others."""
    shape = rows.shape
    if gated:
        return jnp.swapaxes(rows.reshape(*shape[:2], 8, 2, *shape[3:]), 2, 3)
    return rows.reshape(*shape[:2], 2, 8, *shape[3:])


def tile_codes(words: Int32[Array, "*n 4 136"]) -> tuple[Array, Array]:
    """Numbers of tiles as codes `[..., 64, 64]`, and factors of their scales `[..., 64, 2]`, uint8, rows in a tile's order."""
    flat = jax.lax.bitcast_convert_type(words, jnp.uint32).reshape(*words.shape[:-2], PIECES * PIECE)
    front = flat.shape[:-1]
    numbers, scale = flat[..., :512].reshape(*front, 4, 8, 4, 4), flat[..., 512:].reshape(*front, 4, 8)
    slots = []
    for parts in PAIRS:
        pair = functools.reduce(operator.or_, (_rotated(numbers, turn) & jnp.uint32(mask) for turn, mask in parts))
        both = jnp.stack([pair, pair >> 16], axis=-1)
        slots.append((both >> 15 & 1) << 3 | both >> 6 & 7)
    halves = [jnp.stack(slots[half::2], axis=-1) for half in range(2)]  # warp, row, lane, step, which, group
    codes = jnp.stack(halves, axis=-6)  # warp, row, half, ...
    axes = (*range(len(front)), *(len(front) + axis for axis in (0, 2, 1, 4, 6, 3, 5)))
    codes = jnp.transpose(jnp.moveaxis(codes, -6, len(front) + 2), axes)
    factors = jnp.stack(
        [jnp.stack([(scale >> (8 * (2 * half + block))) & 255 for block in range(2)], axis=-1) for half in range(2)],
        axis=-3,
    )
    shaped = codes.reshape(*front, TILE, TILE), factors.reshape(*front, TILE, 2)
    return shaped[0].astype(jnp.uint8), shaped[1].astype(jnp.uint8)


def _released(words: Array, *, gated: bool) -> tuple[Array, Array]:
    """One expert's blocks and scales."""
    codes, factors = tile_codes(words)
    tiles, units = words.shape[:2]

    def rows(tiled: Array) -> Array:
        tiled = jnp.swapaxes(tiled, 1, 2)  # tile, row, unit, column
        if gated:
            tiled = jnp.swapaxes(tiled.reshape(tiles, 4, 2, 8, *tiled.shape[2:]), 2, 3)
        return tiled.reshape(tiles * TILE, -1)

    codes, scales = rows(codes), rows(factors) - jnp.uint8(_FACTOR)
    pairs = codes.reshape(codes.shape[0], units * TILE // BLOCK, BLOCK // 2, 2)
    return pairs[..., 0] | pairs[..., 1] << 4, scales


def code_numbers(codes: Any) -> Any:
    """Values of codes of four bits without a scale, float32."""
    size = (codes & 7).astype(jnp.int32)
    normal = (1 + 0.5 * (size & 1)) * (1 << (size >> 1)) * 0.5
    return jnp.where(size < 2, 0.5 * size, normal) * jnp.where(codes > 7, -1.0, 1.0)


def tile_numbers(words: Any) -> Any:
    """Tiles `[..., 4, 136]` as float32 `[..., 64, 64]`, times 2 to the minus `SHIFT`."""
    codes, factors = tile_codes(words)
    scales = jax.lax.bitcast_convert_type(factors.astype(jnp.int32) << 23, jnp.float32)
    return code_numbers(codes) * jnp.repeat(scales * 2.0**-126, BLOCK, axis=-1)


def mxfp4_numbers(
    blocks: UInt8[Array, "*F n 16"], scales: UInt8[Array, "*F n"], dtype: Any = jnp.float32
) -> Float[Array, "*F D"]:
    """The numbers as products, for the reference and the interpreter: exact where neither number nor scale is at float32's ends."""
    codes = jnp.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, BLOCK)
    wide = jnp.ldexp(code_numbers(codes), scales.astype(jnp.int32)[..., None] - 127)
    return wide.reshape(*scales.shape[:-1], -1).astype(dtype)
