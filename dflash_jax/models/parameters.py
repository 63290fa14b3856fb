"""Declaration of weights: what a model holds, and which Hugging Face tensors each array is made of.

A family declares its parameters once, as a tuple of `Parameter`. Everything else is derived from it: the reader's check of a
checkpoint, the converter's plan, random initialisation, the way back to Hugging Face names, and parameter counts.

Parameters live in a flat `dict[str, Array]` keyed by `Parameter.name`. Matrices keep the Hugging Face layout `[out, in]`, so a
fused projection is its sources' rows one after the other and nothing is ever transposed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Source:
    """One tensor of a Hugging Face checkpoint, by its canonical name."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Parameter:
    """One array of a model: its sources' rows stacked along axis 0.

    Attributes:
      name: dotted path in the module tree, for example `layers.0.attn.qkv_proj.weight`.
      sources: the tensors it is made of, in row order; all agree on every axis but the first.
      dtype: None for the model's dtype, otherwise the fixed dtype of this array.
    """

    name: str
    sources: tuple[Source, ...]
    dtype: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.sources[0].shape
        if len(self.sources) == 1:
            return first
        return (sum(source.shape[0] for source in self.sources), *first[1:])

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def single(name: str, source: str, shape: tuple[int, ...], dtype: str | None = None) -> Parameter:
    """A parameter that is one tensor of the checkpoint, unchanged."""
    return Parameter(name, (Source(source, shape),), dtype)


def count(parameters: Sequence[Parameter]) -> int:
    """Number of weights, each counted once."""
    return sum(parameter.size for parameter in parameters)


def to_huggingface(
    parameters: Sequence[Parameter], params: Mapping[str, jax.Array | np.ndarray]
) -> dict[str, np.ndarray]:
    """The checkpoint tensors that `params` was made of, bit for bit (in the dtype of `params`)."""
    tensors: dict[str, np.ndarray] = {}
    for parameter in parameters:
        array = np.asarray(params[parameter.name])
        row = 0
        for source in parameter.sources:
            if len(parameter.sources) == 1:
                tensors[source.name] = array
            else:
                tensors[source.name] = array[row : row + source.shape[0]]
                row += source.shape[0]
    return tensors


def init_params(
    parameters: Sequence[Parameter], key: jax.Array, dtype: str | jnp.dtype = "float32"
) -> dict[str, jax.Array]:
    """Random weights in the declared shapes, for training from scratch, tests and timing.

    Norm weights are 1, biases and sinks 0, embeddings normal * 0.02, other matrices normal * fan_in ** -0.5.

    Not for `jit`: as it stands a shape is compiled once, while one program for the matrices of a whole model takes a minute.
    """
    params = {}
    for index, parameter in enumerate(parameters):
        kind = jnp.dtype(parameter.dtype or dtype)
        leaf = parameter.name.rsplit(".", 1)[-1]
        if jnp.issubdtype(kind, jnp.integer) or leaf in ("bias", "sinks"):
            params[parameter.name] = jnp.zeros(parameter.shape, kind)
        elif len(parameter.shape) == 1 and leaf == "weight":
            params[parameter.name] = jnp.ones(parameter.shape, kind)
        else:
            scale = 0.02 if parameter.name.startswith(("embed", "mask")) else parameter.shape[-1] ** -0.5
            normal = jax.random.normal(jax.random.fold_in(key, index), parameter.shape, kind)
            params[parameter.name] = normal * jnp.asarray(scale, kind)
    return params
