"""Quantized outputs of latent attention, which the output projection, in float8 itself, multiplies (`load(attention_output)`).

    "fp8"         float8 on one scale of the layer
    "fp8_groups"  float8 in groups of 128 columns, or of 64, on scales that are bare exponents, in column order
    "nvfp4"       four bits, an e4m3 scale for each 16 columns, swizzled, and one scale of the layer

The scale of a layer follows from its weights, so that no text has to be seen and none can pass it. Attention gives averages of
values, a value is a row of the up-projection times a normed latent, and a latent of R numbers is at most sqrt(R) long before the
norm's weight is on it (Cauchy and Schwarz). Most numbers lie far below, where float8 is as fine as above.

A row's scales are its own or the layer's: rows that pad a batch reach none.
"""

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from dflash_kernels import output_linear, quantize_output
from jaxtyping import Array, Float

from dflash_jax.config import DecoderConfig
from dflash_jax.errors import ParameterError
from dflash_jax.options import AttentionOutput
from dflash_jax.parallel.ranks import Ranks

_E4M3_MOST, _E2M1_MOST = 448.0, 6.0
# Numbers may have been rounded to eight bits in the cache before they are averaged.
_ROOM = 1.07
_PROJECTION = "o_proj.weight"
# Columns of a row that a format needs as a multiple.
_WHOLE = {"fp8": 1, "fp8_groups": 64, "nvfp4": 16}


def check_attention_output(config: DecoderConfig, kind: AttentionOutput | None, ranks: int) -> None:
    """Raises ParameterError unless the attention of `config`, shared by so many GPUs, gives what can be kept so."""
    rank, heads, width = (getattr(config, name, 0) for name in ("kv_lora_rank", "num_heads", "v_head_dim"))
    if kind is None:
        return
    if not rank:
        raise ParameterError(
            f"attention_output={kind!r} is for latent attention, and this target's has keys and values of heads: leave it out"
        )
    if (columns := heads * width // ranks) % _WHOLE[kind]:
        raise ParameterError(
            f"attention_output={kind!r} needs a multiple of {_WHOLE[kind]} columns, this target's attention gives {columns}"
            f"{'' if ranks == 1 else ' on each GPU'}: take 'fp8'"
        )


def with_outputs(
    config: DecoderConfig, weights: Mapping[str, Any], kind: AttentionOutput | None, ranks: Ranks | None = None
) -> dict[str, Any]:
    """A target's weights, whose output projections round what they multiply to this format; None leaves all as they are.

    `ranks`: devices that share them.
    """
    if kind is None:
        return {**weights}
    sizes: Any = config
    find = functools.partial(layer_scale, nope=sizes.qk_nope_head_dim, value=sizes.v_head_dim)
    find = jax.jit(find, out_shardings=None if ranks is None else ranks.whole)

    def rounding(attention: str) -> Any:
        latent = (weights[attention + name] for name in ("kv_b_proj.weight", "kv_a_norm.weight"))
        scale = None if kind == "fp8_groups" else find(*latent)
        return replace(weights[attention + _PROJECTION], outputs=kind, output_scale=scale)

    projections = [name for name in weights if name.endswith(f".attn.{_PROJECTION}")]
    return {**weights} | {name: rounding(name.removesuffix(_PROJECTION)) for name in projections}


def layer_scale(up: Float[Array, "NPV R"], norm: Float[Array, "R"], *, nope: int, value: int) -> Float[Array, ""]:
    """The largest number that attention can give, as a part of float8's largest one; 1 where it can give nothing but zeros."""
    rows = up.reshape(-1, nope + value, up.shape[1])[:, nope:].astype(jnp.float32) * norm.astype(jnp.float32)
    longest = jnp.sqrt(jnp.max(jnp.sum(rows * rows, axis=-1)) * up.shape[1])
    return jnp.where(longest > 0, longest * (_ROOM / _E4M3_MOST), 1.0)


def output_product(rows: Float[Array, "M D"], matrix: Any) -> Float[Array, "M F"]:
    """Rows in a matrix's format, multiplied; see the module. `matrix`: a `Quantized` with `outputs`."""
    (m, d), shaped = rows.shape, jax.ShapeDtypeStruct
    output, scale, blocks = shaped((m, d), jnp.float8_e4m3fn), matrix.output_scale, None
    in_columns = matrix.outputs == "fp8_groups"
    if in_columns:
        # Of a byte for each row, and a column begins at a multiple of 16.
        blocks = shaped((d // (128 if d % 128 == 0 else 64), m + -m % 16), jnp.uint8)
    elif matrix.outputs == "nvfp4":
        output, scale = shaped((m, d // 2), jnp.uint8), _E2M1_MOST / scale
        blocks = shaped((-(-m // 128), -(-d // 64), 32, 4, 4), jnp.float8_e4m3fn)
    kept = quantize_output(rows, output, scale=scale, block_scales=blocks, column_order=in_columns)
    return output_linear(kept, matrix.values, matrix.scales, rows.dtype, paired=matrix.paired, column_order=in_columns)
