"""Matrices stored with input channels first, in words of 32 bits, and groups of them that share scales and zeros: GPTQ's and AWQ's.

X.scales  [G, F], one for each group and output channel
X.qzeros  int32 [G, F * bits / 32], packed along output channels

Some modules may have more bits or other groups than the rest; the tensors' shapes tell.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dflash_jax.checkpoints.quantized.dequantized import Decoder, Matrix, Rows, read_columns, read_spread, scales
from dflash_jax.checkpoints.quantized.packed import unit
from dflash_jax.checkpoints.quantized.release import KEY, Found, group_size, one_of
from dflash_jax.checkpoints.safetensors import Tensor, chunks
from dflash_jax.options import FLOAT_DTYPES

_SUFFIXES = (".qweight", ".qzeros", ".scales", ".g_idx")
SUFFIXES: Mapping[str, str] = dict.fromkeys(_SUFFIXES, ".weight")


@dataclass(frozen=True)
class Grouped(Matrix):
    """A matrix `[F, D]` whose codes stand as `[D, F]`.

    Attributes:
      bits: of a code.
      group: input channels of a group.
      order: the group of each input channel, where a tensor has it.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    shape: tuple[int, ...]
    bits: int
    group: int
    order: Tensor | None = None

    @property
    def stored(self) -> tuple[Tensor, ...]:
        return (self.codes, self.scales, self.zeros, *(() if self.order is None else (self.order,)))

    def rows(self, first: int, last: int) -> Rows:
        grid = scales(self.scales, lambda tensor: read_columns(tensor, first, last))
        spread = read_spread(self.shape[-1], self.group, self.order)
        codes, decode = self.read_codes(first, last)
        zeros = self.read_zeros(first, last).astype(np.float32)
        return Rows(codes, decode, np.ascontiguousarray(grid.T), spread, zeros)

    @abstractmethod
    def read_codes(self, first: int, last: int) -> tuple[np.ndarray, Decoder]:
        """Of output channels `first` to before `last`, and what decodes them; see `Rows`."""

    @abstractmethod
    def read_zeros(self, first: int, last: int) -> np.ndarray:
        """Of the same, whole numbers `[last - first, G]`."""

    def words(self, tensor: Tensor, first: int, last: int) -> tuple[np.ndarray, slice]:
        """The words that hold these columns of a tensor packed along them, and which of their numbers are these columns."""
        numbers, words = unit(self.bits)
        low = first // numbers
        found = read_columns(tensor, low * words, -(-last // numbers) * words)
        return found, slice(first - low * numbers, last - low * numbers)


# Bits, and input channels of a group, None for all.
type Widths = tuple[int, int | None]


def widths_of(said: Mapping[str, Any], key: str, most: Widths, permitted: tuple[int, ...]) -> list[Widths]:
    """Those of modules that a key names with bits or groups of their own; of 16 bits and more none. Raises ConfigError for what is
    not read.

    Args:
      most: what a module has where nothing is said of it.
      permitted: bits.
    """
    modules, found = said.get(key), list[Widths]()
    for name, own in modules.items() if isinstance(modules, Mapping) else ():
        if not isinstance(own, Mapping):
            continue
        bits, where = own.get("bits"), f"{KEY}.{key}.{name}"
        if not (type(bits) is int and bits >= 16):  # nothing of it is quantized then
            bits = most[0] if bits is None else one_of(own, "bits", permitted, where)
            found.append((bits, most[1] if own.get("group_size") is None else group_size(own, where)))
    return [one for one in dict.fromkeys(found) if one != most]


def finder(
    make: Callable[..., Grouped], widths: Sequence[Widths], *, packed_inputs: bool
) -> Callable[[Mapping[str, Tensor], Collection[str], list[str]], dict[str, Found]]:
    """See `Release.find`.

    Args:
      make: the class of the matrices.
      widths: those that modules have, those of most first.
      packed_inputs: whether a word of codes holds input channels, otherwise output channels.
    """
    return partial(_find, make, widths, packed_inputs)


def _find(
    make: Callable[..., Grouped],
    widths: Sequence[Widths],
    packed_inputs: bool,
    tensors: Mapping[str, Tensor],
    lost: Collection[str],
    problems: list[str],
) -> dict[str, Found]:
    found = {}
    for name in tensors:
        module = name.removesuffix(".qweight")
        weight = f"{module}.weight"
        if module == name or weight in lost:
            continue
        parts = {suffix: tensors[module + suffix] for suffix in _SUFFIXES if module + suffix in tensors}
        names = [one.name for one in parts.values()]
        bias = tensors.get(f"{module}.bias")
        if bias is not None and not any(piece.any() for piece in chunks(bias)):
            names.append(bias.name)  # older tools give every module one
        matrix, tried = None, list[list[str]]()
        for one in widths:
            tried.append([])
            matrix = _matrix(make, *one, packed_inputs, module, parts, tried[-1])
            if matrix is not None:
                break
        problems += min(tried, key=len)  # none where they fit, otherwise of those that nearly do
        found[weight] = Found(matrix, names)
    return found


def _matrix(
    make: Callable[..., Grouped],
    bits: int,
    group: int | None,
    packed_inputs: bool,
    module: str,
    parts: Mapping[str, Tensor],
    problems: list[str],
) -> Grouped | None:
    """A module's matrix of these widths; None with what is wrong with its tensors."""
    codes, (numbers, words) = parts[".qweight"], unit(bits)
    if missing := [module + suffix for suffix in (".qzeros", ".scales") if suffix not in parts]:
        problems.append(f"tensor {codes.name} has no {' and no '.join(missing)}; fetch the tensors again")
        return None
    if codes.dtype != "I32" or len(codes.shape) != 2 or not codes.size:
        problems.append(
            f"tensor {codes.name} is {codes.dtype_name} {list(codes.shape)}, expected a matrix of int32 words"
        )
        return None
    if codes.shape[0 if packed_inputs else 1] % words:
        problems.append(
            f"tensor {codes.name} has shape {list(codes.shape)}, expected {numbers} numbers of {bits} bits in each {words} words"
        )
        return None
    inner, outer = codes.shape
    inner, outer = (inner // words * numbers, outer) if packed_inputs else (inner, outer // words * numbers)
    size = group or inner
    groups = -(-inner // size)
    expected = {
        ".qzeros": (("int32",), (groups, -(-outer // numbers) * words)),
        ".scales": (FLOAT_DTYPES, (groups, outer)),
        ".g_idx": (("int32", "int64"), (inner,)),
    }
    wrong = [
        f"tensor {parts[suffix].name} is {parts[suffix].dtype_name} {list(parts[suffix].shape)}, expected {' or '.join(kinds)} "
        f"{list(shape)} beside {codes.name} of shape {list(codes.shape)}; fetch it again"
        for suffix, (kinds, shape) in expected.items()
        if suffix in parts and (parts[suffix].shape != shape or parts[suffix].dtype_name not in kinds)
    ]
    problems += wrong
    if wrong:
        return None
    return make(codes, parts[".scales"], parts[".qzeros"], (outer, inner), bits, size, parts.get(".g_idx"))
