"""Tensors whose numbers are made while they are read, of codes and scales:

    number[r, c] = (code[r, c] - zero[r, index[c]]) * scale[r, index[c]]

in float32. Codes and zeros are whole numbers of at most eight bits, float8 or E2M1, so their difference is exact, and each number
is rounded once there and once more to the dtype that it is wanted in. Where scales are products themselves, or codes stand for
numbers of a table, there are as many roundings as in the library that writes the format.

A `Matrix` knows where codes, scales and zeros of some rows stand in the files. To everybody else it is a `Dequantized`: a `Tensor`
of float32, of which any part can be read, holding the codes of no more than `SLAB` numbers at a time.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod

import ml_dtypes
import numpy as np

from dflash_jax.checkpoints.prefetch import wait_until_read
from dflash_jax.checkpoints.safetensors import CHUNK_BYTES, DTYPES, Tensor, fill
from dflash_jax.errors import CheckpointError
from dflash_jax.options import FLOAT_DTYPES

SLAB = 8 << 20  # numbers
# Columns are read row by row where they are fewer than one in so many, and out of whole rows otherwise, so many bytes at a time:
# a request for some bytes takes as long as 20 kB.
_FEW, _BAND_BYTES = 16, 1 << 20
_EXPONENTS = ("F8_E8M0", "U8")  # dtypes of scales that are bare exponents: 2 ** (byte - 127)
_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)

type Decoder = Callable[[np.ndarray], np.ndarray]
type Spread = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Rows:
    """Some rows of a quantized matrix, as they were read.

    Attributes:
      codes: uint8 `[n, bytes]`.
      decode: codes of some rows as new float32 `[m, D]`.
      scales: float32 `[n, G]`.
      spread: numbers of G groups as each column's, `[n, D]`, or `[n, 1]` where all are in one.
      zeros: float32 `[n, G]`; None for zeros.
      factor: what all numbers are multiplied with after their scales; None for nothing.
    """

    codes: np.ndarray
    decode: Decoder
    scales: np.ndarray
    spread: Spread
    zeros: np.ndarray | None = None
    factor: np.float32 | None = None

    def numbers(self, first: int, last: int) -> np.ndarray:
        """Rows `first` to before `last` of these, float32 `[last - first, D]`."""
        numbers = self.decode(self.codes[first:last])
        if self.zeros is not None:
            numbers -= self.spread(self.zeros[first:last])
        with np.errstate(over="ignore", invalid="ignore"):  # whoever reads them looks for those that are not finite
            numbers *= self.spread(self.scales[first:last])
        if self.factor is not None:
            numbers *= self.factor
        return numbers


class Matrix(ABC):
    """Where a quantized matrix stands.

    Attributes:
      shape: of what it stands for; all axes but the last one count as rows.
    """

    shape: tuple[int, ...]

    @property
    @abstractmethod
    def stored(self) -> tuple[Tensor, ...]:
        """The tensors it is made of, that of codes first."""

    @abstractmethod
    def rows(self, first: int, last: int) -> Rows:
        """Reads rows `first` to before `last`. Raises CheckpointError for scales that are no numbers, or files cut short."""


@dataclass(frozen=True)
class Dequantized(Tensor):
    """A tensor, or a part of one, that a quantized matrix stands for; `dtype` is "F32", and `offset` that of the codes.

    Attributes:
      first: number of the matrix that it begins with.
      kept: see `Tensor.kept_name`.
    """

    matrix: Matrix
    first: int
    kept: str

    @classmethod
    def of(cls, name: str, matrix: Matrix, kept: str) -> "Dequantized":
        """The whole matrix as a tensor."""
        codes = matrix.stored[0]
        return cls(name, "F32", matrix.shape, codes.path, codes.offset, matrix, 0, kept)

    @property
    def stored(self) -> tuple[Tensor, ...]:
        return self.matrix.stored

    @property
    def stored_name(self) -> str:
        codes = self.stored[0]
        return (
            codes.dtype_name if codes.dtype.startswith("F") else f"{8 * codes.nbytes // prod(self.matrix.shape)} bits"
        )

    @property
    def kept_name(self) -> str:
        return self.kept

    def part(self, begin: int, shape: tuple[int, ...]) -> "Dequantized":
        return replace(self, shape=shape, first=self.first + begin)

    def pieces(self, chunk_bytes: int, into: np.ndarray | None = None) -> Iterator[np.ndarray]:
        width, end, position = self.matrix.shape[-1], self.first + self.size, 0
        at_once, step = max(1, SLAB // max(width, 1)), max(1, chunk_bytes // (4 * max(width, 1)))
        last_row = -(-end // width) if self.size else 0
        for top in range(self.first // max(width, 1), last_row, at_once):
            bottom = min(top + at_once, last_row)
            rows = self.matrix.rows(top, bottom)
            for row in range(top, bottom, step):
                numbers = rows.numbers(row - top, min(row + step, bottom) - top).reshape(-1)
                piece = numbers[max(0, self.first - row * width) : end - row * width]
                if into is not None:
                    into[position : position + piece.size] = piece
                    piece = into[position : position + piece.size]
                position += piece.size
                yield piece


def float8(codes: np.ndarray) -> np.ndarray:
    """Numbers in float8_e4m3fn."""
    return np.take(_E4M3, codes, mode="clip")


def signed_bytes(codes: np.ndarray) -> np.ndarray:
    """Whole numbers from -128 to 127, in two's complement."""
    return codes.view(np.int8).astype(np.float32)


def read(tensor: Tensor) -> np.ndarray:
    """A tensor's values in new memory."""
    if tensor.dtype == "F8_E8M0":
        tensor = replace(tensor, dtype="U8")
    array = np.empty(tensor.size, DTYPES[tensor.dtype])
    for _ in tensor.pieces(CHUNK_BYTES, array):
        pass
    return array.reshape(tensor.shape)


def read_columns(tensor: Tensor, first: int, last: int) -> np.ndarray:
    """Columns `first` to before `last` of a tensor `[R, C]`, in new memory `[R, last - first]`."""
    height, width = tensor.shape
    array = np.empty((height, last - first), DTYPES[tensor.dtype])
    if _FEW * (last - first) >= width:
        band = max(1, _BAND_BYTES // (width * array.itemsize))
        for top in range(0, height, band):
            count = min(band, height - top)
            array[top : top + count] = read(tensor.part(top * width, (count, width)))[:, first:last]
        return array
    wait_until_read(tensor.path, tensor.offset, tensor.nbytes)
    with tensor.path.open("rb", buffering=0) as file:
        for row in range(height):
            file.seek(tensor.offset + (row * width + first) * array.itemsize)
            fill(array[row], file, tensor)
    return array


def is_scale_dtype(tensor: Tensor) -> bool:
    """Whether `scales` reads this dtype."""
    return tensor.dtype_name in FLOAT_DTYPES or tensor.dtype in _EXPONENTS


def scales(tensor: Tensor, read_values: Callable[[Tensor], np.ndarray] = read) -> np.ndarray:
    """Scales in float32, exactly.

    Raises:
      CheckpointError: one of them is not finite.
    """
    values = read_values(tensor)
    if tensor.dtype in _EXPONENTS:
        with np.errstate(over="ignore"):
            wide = np.ldexp(np.float32(1), values.astype(np.int32) - 127)  # infinite for 255, which is no number
    else:
        wide = values.astype(np.float32)
    if not np.isfinite(wide).all():
        raise CheckpointError(
            str(tensor.path),
            f"tensor {tensor.name} holds scales that are not finite: the file is damaged, fetch it again",
        )
    return wide


def read_spread(width: int, group: int, order: Tensor | None = None) -> Spread:
    """What gives each of `width` columns its group's number: groups of so many in a row, or as a tensor has them.

    Raises:
      CheckpointError: the tensor names a group that has no scale.
    """
    if order is not None:
        index, groups = read(order).astype(np.intp), -(-width // group)
        if index.min() < -1 or index.max() >= groups:
            raise CheckpointError(
                str(order.path),
                f"tensor {order.name} names groups {index.min()} .. {index.max()}, expected 0 .. {groups - 1}: the file is "
                "damaged, fetch it again",
            )
        if index.min() >= 0:  # compressed-tensors has -1 for columns in order
            return lambda grid: np.take(grid, index, axis=1)
    if group >= width:
        return lambda grid: grid
    return lambda grid: np.repeat(grid, group, axis=1)[:, :width]
