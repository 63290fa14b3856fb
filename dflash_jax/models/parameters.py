"""Declaration of weights: what a model holds, and which Hugging Face tensors each array is made of.

A family declares its parameters once, as a tuple of `Parameter`. Everything else is derived from it: the reader's check of a
checkpoint, the converter's plan, random initialisation, the way back to Hugging Face names, and parameter counts.

Parameters live in a flat `dict[str, Array]` keyed by `Parameter.name`. Matrices keep the Hugging Face layout `[out, in]`, so a
fused projection is its sources' rows one after the other and nothing is ever transposed. Where a checkpoint mixes the rows of
several projections in one tensor, each takes its runs of rows.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.parallel.cut import Cut
from dflash_jax.parallel.ranks import Ranks
from dflash_jax.quantization.mxfp4 import BLOCK

_CODES = 1.55  # binary logarithm of the deviation of MXFP4's numbers, all alike often, without a scale


@dataclass(frozen=True)
class Source:
    """One tensor of a Hugging Face checkpoint, by its canonical name, or some of its rows.

    Attributes:
      shape: of the whole tensor.
      runs: the rows that are taken, as first row and count of each run; None for all.
      kept: shape of what is taken where that is another one, with the same numbers in the same order.
    """

    name: str
    shape: tuple[int, ...]
    runs: tuple[tuple[int, int], ...] | None = None
    kept: tuple[int, ...] | None = None

    @property
    def taken(self) -> tuple[int, ...]:
        """Shape of what is taken."""
        if self.kept is not None:
            return self.kept
        return self.shape if self.runs is None else (sum(count for _, count in self.runs), *self.shape[1:])

    def write(self, tensor: np.ndarray, rows: np.ndarray) -> None:
        """Puts `rows`, of shape `taken`, back to where they came from in `tensor`, of shape `shape`."""
        if self.runs is None:
            tensor[...] = rows.reshape(self.shape)
            return
        position = 0
        for first, count in self.runs:
            tensor[first : first + count] = rows[position : position + count]
            position += count


def grouped(name: str, shape: tuple[int, ...], groups: int, sizes: Sequence[int]) -> tuple[Source, ...]:
    """Sources of a tensor whose rows come in `groups` equal groups, each with `sizes` rows of one projection after the other."""
    rows, sources, start = sum(sizes), [], 0
    for size in sizes:
        sources.append(Source(name, shape, tuple((group * rows + start, size) for group in range(groups))))
        start += size
    return tuple(sources)


@dataclass(frozen=True)
class Parameter:
    """One array of a model: its sources' rows stacked along axis 0.

    Attributes:
      name: dotted path in the module tree, for example `layers.0.attn.qkv_proj.weight`.
      sources: the tensors it is made of, in row order; all agree on every axis but the first.
      dtype: None for the model's dtype, otherwise the fixed dtype of this array.
      weights: that one of its numbers stands for: two in a byte of four-bit ones, none in a scale.
      cut: what of it goes to which of several GPUs; None where each has all of it.
    """

    name: str
    sources: tuple[Source, ...]
    dtype: str | None = None
    weights: int = 1
    cut: Cut | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.sources[0].taken
        if len(self.sources) == 1:
            return first
        return (sum(source.taken[0] for source in self.sources), *first[1:])

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def single(
    name: str,
    source: str,
    shape: tuple[int, ...],
    dtype: str | None = None,
    *,
    weights: int = 1,
    cut: Cut | None = None,
) -> Parameter:
    """A parameter that is one tensor of the checkpoint, unchanged."""
    return Parameter(name, (Source(source, shape),), dtype, weights, cut)


def count(parameters: Sequence[Parameter]) -> int:
    """Number of weights, each counted once."""
    return sum(parameter.size * parameter.weights for parameter in parameters)


def to_huggingface(
    parameters: Sequence[Parameter], params: Mapping[str, jax.Array | np.ndarray]
) -> dict[str, np.ndarray]:
    """The checkpoint tensors that `params` was made of, bit for bit (in the dtype of `params`)."""
    tensors: dict[str, np.ndarray] = {}
    for parameter in parameters:
        array = np.asarray(params[parameter.name])
        row = 0
        for source in parameter.sources:
            rows = array if len(parameter.sources) == 1 else array[row : row + source.taken[0]]
            row += source.taken[0] if source.taken else 0
            if source.runs is None:
                tensors[source.name] = rows.reshape(source.shape)
            else:
                whole = tensors.setdefault(source.name, np.empty(source.shape, array.dtype))
                source.write(whole, rows)
    return tensors


def init_params(
    parameters: Sequence[Parameter], key: jax.Array, dtype: str | jnp.dtype = "float32", *, ranks: Ranks | None = None
) -> dict[str, jax.Array]:
    """Random weights in the declared shapes, for training from scratch, tests and timing.

    `ranks`: devices that share them; each draws its share, so that none has room for all of them.

    Norm weights and scales are 1, biases, sinks and norms' offsets 0, embeddings normal * 0.02, other matrices
    normal * fan_in ** -0.5; of those in MXFP4, bits are random, and scales of a size that makes their numbers about as large.

    Not for `jit`: as it stands a shape is compiled once, while one program for the matrices of a whole model takes a minute.
    """
    params = {}
    for index, parameter in enumerate(parameters):
        kind = jnp.dtype(parameter.dtype or dtype)
        if ranks is None:
            params[parameter.name] = _drawn(
                jax.random.fold_in(key, index), _law(parameter, kind), parameter.shape, kind
            )
            continue
        made = ranks.share_of(parameter, kind)
        draw = _jitted_draw(_law(parameter, kind), made.shape, kind, made.sharding)
        params[parameter.name] = draw(jax.random.fold_in(key, index))
    return params


@functools.cache
def _jitted_draw(
    law: float | str, shape: tuple[int, ...], kind: jnp.dtype, sharding: Any
) -> Callable[[jax.Array], jax.Array]:
    """Function that draws each device's share: one program for all arrays of a shape."""
    return jax.jit(functools.partial(_drawn, law=law, shape=shape, kind=kind), out_shardings=sharding)


def _law(parameter: Parameter, kind: jnp.dtype) -> float | Literal["zeros", "ones", "bits"]:
    """The deviation of a random array, or what it is all of; of scales in MXFP4, the binary logarithm of that."""
    leaf = parameter.name.rsplit(".", 1)[-1]
    if kind == jnp.uint8:
        return "bits" if leaf == "blocks" else -0.5 * math.log2(parameter.shape[-1] * BLOCK) - _CODES
    if jnp.issubdtype(kind, jnp.integer) or leaf in ("bias", "sinks", "offset"):
        return "zeros"
    if len(parameter.shape) == 1 and leaf in ("weight", "scale", "scalar", "expert_scale"):
        return "ones"
    return 0.02 if parameter.name.startswith(("embed", "mask")) else parameter.shape[-1] ** -0.5


def _drawn(key: jax.Array, law: float | str, shape: tuple[int, ...], kind: jnp.dtype) -> jax.Array:
    if law == "bits":
        return jax.random.bits(key, shape, kind)
    if isinstance(law, str):
        return jnp.zeros(shape, kind) if law == "zeros" else jnp.ones(shape, kind)
    if kind == jnp.uint8:
        return jnp.full(shape, 127 + round(law), kind)
    return jax.random.normal(key, shape, kind) * jnp.asarray(law, kind)
