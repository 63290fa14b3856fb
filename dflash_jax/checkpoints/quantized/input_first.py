"""Experts in NVFP4 with input channels first, as ModelOpt writes gpt-oss's: what a byte and a scale hold goes down a column.

X                 uint8 [E, D/2, F]: two input channels, the first in the lower bits
X_weight_scale    float8_e4m3fn [E, D/16, F]
X_weight_scale_2  float32, one or one for each expert
"""

from dataclasses import dataclass

import numpy as np

from dflash_jax.checkpoints.quantized.dequantized import Matrix, Rows, read, scales
from dflash_jax.checkpoints.quantized.packed import E2M1
from dflash_jax.checkpoints.quantized.scaled import rescaled, second_scale_problem
from dflash_jax.checkpoints.safetensors import Tensor


@dataclass(frozen=True)
class InputFirst(Matrix):
    """A row of `shape [E, D, F]` is an input channel.

    Attributes:
      group: input channels that share a scale.
    """

    codes: Tensor
    scales: Tensor
    whole: Tensor
    shape: tuple[int, ...]
    group: int

    @property
    def stored(self) -> tuple[Tensor, ...]:
        return (self.codes, self.scales, self.whole)

    def rows(self, first: int, last: int) -> Rows:
        width, group = self.shape[-1], self.group
        low, high, top, bottom = first // 2, -(-last // 2), first // group, -(-last // group)
        codes = read(self.codes.part(low * width, (high - low, width)))
        grid = scales(self.scales.part(top * width, (bottom - top, width)))
        grid = rescaled(grid, self.whole, np.arange(top, bottom) * group, self.shape)
        return _Columns(codes, _values, grid, _as_they_are, first=first, group=group)


@dataclass(frozen=True, kw_only=True)
class _Columns(Rows):
    """Rows of which two share a row of codes, and `group` one of scales; the first one's number is `first`."""

    first: int
    group: int

    def numbers(self, first: int, last: int) -> np.ndarray:
        row = np.arange(self.first + first, self.first + last)
        pairs = self.codes[row // 2 - self.first // 2]
        numbers = self.decode(np.where(row[:, None] % 2, pairs >> 4, pairs & 15))
        with np.errstate(over="ignore", invalid="ignore"):
            numbers *= self.scales[row // self.group - self.first // self.group]
        return numbers


def _values(codes: np.ndarray) -> np.ndarray:
    return np.take(E2M1, codes, mode="clip")


def _as_they_are(grid: np.ndarray) -> np.ndarray:
    return grid


def input_first(
    name: str, codes: Tensor, scale: Tensor, whole: Tensor, group: int, problems: list[str]
) -> InputFirst | None:
    """The matrix `name`; None with what is wrong with its tensors. For shapes that `is_input_first` knows."""
    experts, half, width = codes.shape
    if problem := second_scale_problem(scale, whole, (experts,)):
        problems.append(problem)
        return None
    return InputFirst(codes, scale, whole, (experts, 2 * half, width), group)


def is_input_first(codes: Tensor, scale: Tensor, group: int) -> bool:
    """Whether scales are those of columns, and not of rows as well."""
    if len(codes.shape) != 3 or len(scale.shape) != 3 or not codes.size:
        return False
    experts, half, width = codes.shape
    return 2 * half % group == 0 and scale.shape == (experts, 2 * half // group, width)
