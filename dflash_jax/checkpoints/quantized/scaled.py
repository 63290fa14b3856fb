"""Matrices with a grid of scales: one for all, for each row, or for each block of rows and columns. Blocks at the edges are cut off
where they end. Scales in float8 have a scale of their own, of a matrix, or of each expert's: NVFP4's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from dflash_jax.checkpoints.quantized.dequantized import (
    Decoder,
    Matrix,
    Rows,
    is_scale_dtype,
    read,
    read_spread,
    scales,
)
from dflash_jax.checkpoints.safetensors import Tensor
from dflash_jax.errors import CheckpointError
from dflash_jax.options import FLOAT_DTYPES

# Rows and columns that share a scale; None for all of an axis.
type Block = tuple[int | None, int | None]
PER_TENSOR: Block = (None, None)
PER_ROW: Block = (1, None)


@dataclass(frozen=True)
class Scaled(Matrix):
    """Rows of codes stand one after the other.

    Attributes:
      shape: `[..., F, D]`.
      height: rows after which the grid of scales begins anew, for the next expert.
      block: rows and columns of a block.
      zeros: zeros of rows from one to before another of the grid, `[n, G]`; None for none.
      order: the group of each column, where a tensor has it.
      whole: what the grid's scales are multiplied with before they are used, one or one for each expert; None for nothing.
      inverse: whether they are divided by it instead.
      factor: see `Rows`.
    """

    codes: Tensor
    scales: Tensor
    decode: Decoder
    shape: tuple[int, ...]
    height: int
    block: tuple[int, int]
    zeros: Callable[[int, int], np.ndarray] | None = None
    order: Tensor | None = None
    whole: Tensor | None = None
    inverse: bool = False
    factor: np.float32 | None = None

    @property
    def stored(self) -> tuple[Tensor, ...]:
        return (self.codes, self.scales, *(one for one in (self.order, self.whole) if one is not None))

    def rows(self, first: int, last: int) -> Rows:
        wide = self.codes.shape[-1]
        codes = read(self.codes.part(first * wide, (last - first, wide))).view(np.uint8)
        block_rows, block_columns = self.block
        groups = -(-self.shape[-1] // block_columns)
        row = np.arange(first, last)
        place = row // self.height * -(-self.height // block_rows) + row % self.height // block_rows
        low, high = int(place[0]), int(place[-1]) + 1
        grid = scales(self.scales.part(low * groups, (high - low, groups)))[place - low]
        if self.whole is not None:
            grid = rescaled(grid, self.whole, row, self.shape, inverse=self.inverse)
        zeros = None if self.zeros is None else self.zeros(low, high)[place - low]
        spread = read_spread(self.shape[-1], block_columns, self.order)
        return Rows(codes, self.decode, grid, spread, zeros, self.factor)


def scaled(
    name: str,
    shape: tuple[int, ...],
    codes: Tensor,
    scale: Tensor,
    decode: Decoder,
    blocks: Sequence[Block],
    problems: list[str],
    **more: object,
) -> Scaled | None:
    """The matrix `name` of `shape` with one of these blocks, as its scales' shape tells; None with a problem where none fits.

    Args:
      more: further attributes of `Scaled`; with `whole`, scales are in float8.
    """
    if len(shape) < 2 or not prod(shape):
        problems.append(f"tensor {codes.name} has shape {list(codes.shape)}, expected a matrix; fetch it again")
        return None
    *lead, height, width = shape
    whole = more.get("whole")
    if isinstance(whole, Tensor):
        if problem := second_scale_problem(scale, whole, lead):
            problems.append(problem)
            return None
    elif not is_scale_dtype(scale):
        problems.append(
            f"tensor {scale.name} has dtype {scale.dtype_name}, expected scales in float32, bfloat16 or float16"
        )
        return None
    expected = []
    for block_rows, block_columns in blocks:
        rows, columns = block_rows or height, block_columns or width
        wanted = (*lead, -(-height // rows), -(-width // columns))
        if _trimmed(scale.shape) == _trimmed(wanted):
            return Scaled(codes, scale, decode, shape, height, (rows, columns), **more)  # type: ignore[arg-type]
        if (block_rows, block_columns) == PER_TENSOR and scale.size == 1:
            count = prod(lead) * height
            return Scaled(codes, scale, decode, shape, count, (count, width), **more)  # type: ignore[arg-type]
        expected.append(list(wanted))
    problems.append(
        f"tensor {scale.name} has shape {list(scale.shape)}, expected {' or '.join(map(str, expected))} for {name} of shape "
        f"{list(shape)}; fetch it again"
    )
    return None


def second_scale_problem(scale: Tensor, whole: Tensor, experts: Sequence[int]) -> str | None:
    """What is wrong with scales in float8 and what they are scaled with, one or one for each of these experts."""
    if scale.dtype != "F8_E4M3":
        return f"tensor {scale.name} has dtype {scale.dtype_name}, expected scales in float8_e4m3fn"
    if whole.dtype_name in FLOAT_DTYPES and whole.size in (1, prod(experts)):
        return None
    each = f", or one for each of {prod(experts)} experts" if experts else ""
    return f"tensor {whole.name} is {whole.dtype_name} {list(whole.shape)}, expected one scale{each} in float32"


def rescaled(
    grid: np.ndarray, whole: Tensor, row: np.ndarray, shape: tuple[int, ...], *, inverse: bool = False
) -> np.ndarray:
    """Scales of these rows of a matrix of `shape`, multiplied with what scales them, or divided by it.

    Raises:
      CheckpointError: that is not positive.
    """
    values = scales(whole).reshape(-1)
    if not (values > 0).all():
        raise CheckpointError(
            str(whole.path),
            f"tensor {whole.name} holds a scale that is not positive: the file is damaged, fetch it again",
        )
    if values.size > 1:
        values = values[row // (prod(shape[:-1]) // values.size), None]
    with np.errstate(over="ignore"):
        return grid / values if inverse else grid * values


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without ones at the end, which some tools leave out."""
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape
