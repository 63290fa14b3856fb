"""Weights in eight bits: one scale for each row of a matrix, products in the activations' dtype.

A decode step of a few rows takes as long as its weights take to read, so half the bytes are nearly half the time. What a row of the
matrix multiplies is not rounded: `y_f = scale_f * sum_d x_d w_fd`, with w_fd a whole number (int8) or a float8 one.
Source: weight-only, row-wise quantization as in LLM.int8(), arXiv 2208.07339, section 2.1, with activations left alone.

With many rows a step takes as long as its products, and float8 times float8 is twice as fast as anything times sixteen bits. So
"fp8_dynamic" rounds what is multiplied as well where rows are many, each row by its own largest number; few rows are left alone.

A gated delta net's projection ends with the rows of its gates, whose errors add up over a text: a decay that is too slow by a
hundredth is so for every token. Published float8 releases leave them in sixteen bits. Here they are two numbers of eight bits each,
the second one of what the first rounds off, so that the projection stays one matrix of one format.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from dflash_kernels import (
    INTERLEAVE_BLOCK,
    ColumnBlocks,
    Float8Rows,
    Mxfp4Tiles,
    deinterleave_columns,
    float8_best,
    float8_dense,
    float8_rows,
    interleave_columns,
    quantized_linear,
)
from jaxtyping import Array, Float, Int

from dflash_jax.options import AttentionOutput, WeightDtype
from dflash_jax.parallel.collectives import largest_of_ranks
from dflash_jax.parallel.ranks import Ranks, held_shape
from dflash_jax.quantization.attention_output import output_product
from dflash_jax.quantization.mxfp4 import Mxfp4

# What a weight becomes, and the largest number of that dtype.
_FORMATS: Mapping[str, tuple[Any, float]] = {
    "int8": (jnp.int8, 127.0), "fp8": (jnp.float8_e4m3fn, 448.0), "fp8_dynamic": (jnp.float8_e4m3fn, 448.0)
}  # fmt: skip
MANY_ROWS = 64  # from which on "fp8_dynamic" rounds rows: fewer wait for the weights alone
# Matrices that are only ever multiplied through `models.layers.linear`, or looked up by row. Norms, routers, experts and the
# up-projections that latent attention takes apart stay as they are.
_SUFFIXES = (
    "qkv_proj.weight", "q_proj.weight", "q_b_proj.weight", "kv_a_proj.weight", "qkv_a_proj.weight", "o_proj.weight",
    "delta.in_proj.weight", "delta.out_proj.weight", "mlp.gate_up_proj.weight", "mlp.down_proj.weight",
    "shared.gate_up_proj.weight", "shared.down_proj.weight", "lm_head.weight", "embed.weight", "fc.weight",
    "context_kv_proj.weight",
)  # fmt: skip
# The matrix that ends with rows of gates, and an array beside it that has a number for each head: a head has two gates.
_GATED, _OF_HEADS = "delta.in_proj.weight", "delta.a_log"


@no_type_check  # JAX rebuilds pytrees with shapes and placeholders in place of arrays
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """A matrix in eight bits, of F stored rows.

    Attributes:
      values: int8 or float8_e4m3fn.
      scales: of each row.
      dtype: of what is read from it.
      paired: columns of `values` are stored in pairs, as the Hopper kernel of the product reads them best.
      dynamic: rows that it multiplies are rounded to float8 where they are many.
      outputs: the format that rows it multiplies are put into however many they are, see `quantization.attention_output`.
      output_scale: the scale of all such rows, where the format has one.
      doubled: so many rows, the last ones, are a sum of two: what the first rounds off is a row behind all others.
    """

    values: Int[Array, "F D"] | Float[Array, "F D"]
    scales: Float[Array, "F"]
    dtype: jnp.dtype = field(metadata={"static": True})
    paired: bool = field(default=False, metadata={"static": True})
    dynamic: bool = field(default=False, metadata={"static": True})
    outputs: AttentionOutput | None = field(default=None, metadata={"static": True})
    output_scale: Float[Array, ""] | None = None
    doubled: int = field(default=0, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape[0] - self.doubled, *self.values.shape[1:]

    def __getitem__(self, rows: Any) -> Any:
        """Some rows, dequantized; the matrix itself for `...`, as a module's parameter is read."""
        if rows is Ellipsis:
            return self
        if self.doubled:
            whole = replace(self, dtype=jnp.dtype(jnp.float32), doubled=0)[:]
            return summed_rows(whole.T, self).T[rows].astype(self.dtype)
        values = deinterleave_columns(self.values[rows]) if self.paired else self.values[rows]
        wide = values.astype(jnp.float32) * self.scales[rows][..., None]
        return wide.astype(self.dtype)


type Weight = Array | Quantized | ColumnBlocks | Mxfp4 | Mxfp4Tiles


def quantize(matrix: Float[Array, "F D"], kind: WeightDtype, *, across: bool = False, doubled: int = 0) -> Quantized:
    """The nearest matrix in eight bits whose rows' largest entries are kept; a row of zeros stays one.

    Args:
      across: ranks have columns of the same rows, whose largest entries are those of all ranks.
      doubled: see `Quantized`.
    """
    wide = matrix.astype(jnp.float32)
    values, scales = _nearest(wide, kind, across=across)
    if doubled:
        left = wide[-doubled:] - values[-doubled:].astype(jnp.float32) * scales[-doubled:, None]
        more = _nearest(left, kind, across=across)
        values, scales = (jnp.concatenate(both) for both in zip((values, scales), more, strict=True))
    paired = matrix.shape[1] % INTERLEAVE_BLOCK == 0
    values = interleave_columns(values) if paired else values
    return Quantized(values, scales, jnp.dtype(matrix.dtype), paired, kind == "fp8_dynamic", doubled=doubled)


_quantized = jax.jit(quantize, static_argnames=("kind", "doubled"))


def rounding_jobs(weights: Mapping[str, Mapping[str, Any]]) -> list[Callable[[], Any]]:
    """Jobs that compile the programs of `quantize_weights` for weights of these shapes, if one device has them all."""
    every = (one for table in weights.values() for one in table.values() if isinstance(one, Quantized))
    alone = [one for one in every if getattr(one.values, "sharding", None) is None]
    cases = {(one.shape, one.dtype, _kind(one), one.doubled) for one in alone}
    return [partial(_compile, *case) for case in sorted(cases, key=str)]


def _compile(shape: tuple[int, ...], dtype: jnp.dtype, kind: WeightDtype, doubled: int) -> None:
    _quantized.lower(jax.ShapeDtypeStruct(shape, dtype), kind=kind, doubled=doubled).compile()


def _kind(matrix: Quantized) -> WeightDtype:
    if matrix.values.dtype == jnp.int8:
        return "int8"
    return "fp8_dynamic" if matrix.dynamic else "fp8"


def _nearest(wide: Float[Array, "F D"], kind: WeightDtype, *, across: bool) -> tuple[Array, Float[Array, "F"]]:
    """The numbers of eight bits nearest to a matrix in float32, and the scale of each row."""
    dtype, largest = _FORMATS[kind]
    top = jnp.max(jnp.abs(wide), axis=1)
    top = largest_of_ranks(top) if across else top
    scales = jnp.where(top > 0, top, 1.0) / largest
    scaled = wide / scales[:, None]
    return jnp.round(scaled).astype(dtype) if kind == "int8" else scaled.astype(dtype), scales


def summed_rows(products: Float[Array, "... Fd"], weight: Weight) -> Float[Array, "... F"]:
    """Products with all stored rows of a weight as those with the matrix that they stand for: of doubled rows the sums."""
    if not isinstance(weight, Quantized) or not weight.doubled:
        return products
    rows, more = weight.shape[0], weight.doubled
    last = products[..., rows - more : rows] + products[..., rows:]
    return jnp.concatenate([products[..., : rows - more], last], axis=-1)


def product(x: Float[Array, "... D"], matrix: Quantized, live: Int[Array, ""] | None = None) -> Float[Array, "... F"]:
    """`x` times the dequantized rows: the product accumulates in float32 and is scaled before it is rounded.

    `live`: so many rows from the first on are asked for: the others may be anything.
    """
    rows = x.reshape(-1, x.shape[-1])
    if matrix.outputs is not None:
        products = output_product(rows, matrix)
    elif rounds(matrix, len(rows)):
        products = float8_dense(rounded(rows, matrix), matrix.values, matrix.scales, x.dtype, live=live)
    else:
        products = quantized_linear(rows, matrix.values, matrix.scales, paired=matrix.paired)
    return summed_rows(products, matrix).reshape(*x.shape[:-1], -1)


def best_product(x: Float[Array, "... D"], matrix: Quantized) -> Int[Array, "..."]:
    """The row of the matrix with the largest `product`, the first of equal ones."""
    rows = x.reshape(-1, x.shape[-1])
    if not rounds(matrix, len(rows)):
        return jnp.argmax(product(x, matrix), axis=-1).astype(jnp.int32)
    return float8_best(rounded(rows, matrix), matrix.values, matrix.scales, x.dtype).reshape(x.shape[:-1])


def rounds(weight: Weight, rows: int) -> bool:
    """Whether so many rows are rounded before they are multiplied with a weight."""
    return isinstance(weight, Quantized) and weight.dynamic and rows >= MANY_ROWS


def rounded(rows: Float[Array, "M D"], matrix: Quantized) -> Float8Rows:
    """Rows as a matrix that rounds them takes them."""
    return float8_rows(rows, paired=matrix.paired)


def quantize_weights(params: dict[str, Array], kind: WeightDtype) -> dict[str, Weight]:
    """A model's parameters with its large matrices in eight bits, taken out of `params` one by one: no two copies at a time.

    What stays as it is moves as well. Norms left between the places of large matrices would cut the memory that becomes free into
    pieces, too small for the pages that are planned there.
    """
    result, rounded_one = dict[str, Weight](), rounding(params, kind)
    for name in list(params):
        array = params.pop(name)
        result[name] = rounded_one(name, array) if _is_rounded(name) else jnp.copy(array)
    return result


def quantize_shares(params: dict[str, Array], kind: WeightDtype, ranks: Ranks) -> dict[str, Weight]:
    """`quantize_weights` of arrays that ranks share: the same model is rounded in the same way for any number of them."""
    result, rounded_one = dict[str, Weight](), rounding(params, kind, ranks)
    for name in list(params):
        result[name] = rounded_one(name, params.pop(name))
    return result


def rounding(
    params: Mapping[str, Any], kind: WeightDtype, ranks: Ranks | None = None
) -> Callable[[str, Array], Weight]:
    """Function from a model's parameter, given by name, to its stored form: large matrices in eight bits.

    Args:
      params: arrays or shapes, of which gates are counted.
      ranks: devices that share them: the same model is rounded in the same way for any number of them.
    """
    doubled = _doubled_rows(params)

    def rounded_one(name: str, array: Array) -> Weight:
        if not _is_rounded(name):
            return array
        if ranks is None:
            return _quantized(array, kind=kind, doubled=doubled.get(name, 0))
        return _rounded_share(array, kind, ranks, doubled.get(name, 0))

    return rounded_one


def _is_rounded(name: str) -> bool:
    return name.endswith(_SUFFIXES) and ".experts." not in name


def _doubled_rows(params: Mapping[str, Any]) -> dict[str, int]:
    """The number of rows that a rank doubles of each matrix that ends with gates."""
    gated = {name: name.removesuffix(_GATED) + _OF_HEADS for name in params if name.endswith(_GATED)}
    return {name: 2 * held_shape(params[of_heads])[0] for name, of_heads in gated.items()}


def _rounded_share(array: Array, kind: WeightDtype, ranks: Ranks, doubled: int) -> Quantized:
    axis = ranks.axis_of(array)
    own = jax.ShapeDtypeStruct(held_shape(array), array.dtype)
    values, scales = _share_rounder(kind, ranks, axis, doubled)(array)
    return replace(jax.eval_shape(partial(quantize, kind=kind, doubled=doubled), own), values=values, scales=scales)


@cache
def _share_rounder(
    kind: WeightDtype, ranks: Ranks, axis: int | None, doubled: int
) -> Callable[[Array], tuple[Array, Array]]:
    """Function that rounds a matrix cut along `axis`: one for all matrices, compiled once for each shape."""

    def rounded_share(matrix: Array) -> tuple[Array, Array]:
        made = quantize(matrix, kind, across=axis == 1, doubled=doubled)
        return made.values, made.scales

    cut, whole = (ranks.whole if axis is None else ranks.along(axis)).spec, ranks.whole.spec
    outputs = cut, cut if axis == 0 else whole
    return jax.jit(jax.shard_map(rounded_share, mesh=ranks.mesh, in_specs=(cut,), out_specs=outputs, check_vma=False))
