"""Formats of KV pools: the model's dtype, or eight bits with scales that calibration finds.

    None           the model's dtype
    "fp8"          float8_e4m3fn. Keys and values are divided by a scale of their head, latent rows by one scale of their layer.
    "fp8_e5m2"     the same in float8_e5m2, keys and values of heads only, on scales of 1: a range of 57,344 for a bit of precision.
    "int8"         keys and values of heads only. A key is divided by a scale of its token and head, which stands beside the pages;
                   values by one scale of their head and channel, which calibration has to find.
    "int8_keys"    the same for keys; values in the model's dtype. Needs no calibration.
    "fp8_packed"   latent rows only: float8_e4m3fn with a float32 scale for every 128 numbers of a row, the rotated part in
                   bfloat16. Needs no calibration; 656 bytes for DeepSeek's 576 numbers.

Whatever attends reads what the pool holds, new tokens included, so that a token's result does not depend on how its prompt was cut.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from dflash_kernels import LATENT_TILE
from jaxtyping import Float

from dflash_jax.config import DecoderConfig
from dflash_jax.errors import ParameterError

# A scale puts the largest number seen in calibration here (`load(scale_range)`); e4m3 ends at 448: twice as large ones still fit.
CALIBRATED_TO = 200.0
# The same for a channel of int8 values, which end at 127: a quarter more still fits, and finer steps are worth more than room.
INT8_CALIBRATED_TO = 100.0


# Formats whose numbers are multiplied with scales that stand beside the pools.
SCALED = ("fp8", "fp8_e5m2", "int8", "int8_keys")
# Those with a scale of each key, in pages of their own.
KEY_SCALED = ("int8", "int8_keys")


@dataclass(frozen=True)
class CacheScales:
    """Scales of every layer's keys and values, each `[K]` float32; for a latent row one number `[]` in `k`, and none in `v`; for
    int8 pools none in `k`, and `[K, V]` in `v`, or none with other values. In `q` one number `[]` for queries of latent rows, or
    none where they were not looked at.
    """

    k: tuple[np.ndarray, ...]
    v: tuple[np.ndarray, ...] = ()
    q: tuple[np.ndarray, ...] = ()


type CacheFormat = str | tuple[str | None, ...] | None
"""One format for all layers with pages, or each layer's own: one that is quantized, and None where layers are left out of it."""


def cached_places(config: DecoderConfig) -> Sequence[int]:
    """The places among all layers of those with pages."""
    return getattr(config, "full_layers", range(config.cached_layers))


def layer_formats(config: DecoderConfig, cache_dtype: CacheFormat) -> tuple[str | None, ...]:
    """The format of each layer with pages."""
    return cache_dtype if isinstance(cache_dtype, tuple) else (cache_dtype,) * config.cached_layers


def quantized_format(cache_dtype: CacheFormat) -> str | None:
    """The format of the layers that are not left out."""
    return next(filter(None, cache_dtype), None) if isinstance(cache_dtype, tuple) else cache_dtype


def without_layers(config: DecoderConfig, cache_dtype: str | None, skip: Sequence[int | str]) -> CacheFormat:
    """`cache_dtype` for all layers with pages but those in `skip`: places from 0 on among all layers, or "sliding_window" and
    "full_attention" for the layers with a window and for those without.

    Raises:
      ParameterError: a place or a kind that no layer with pages has, or all that have some.
    """
    if not skip:
        return cache_dtype
    places = cached_places(config)
    kinds = [
        "full_attention" if not config.windows or config.windows[place] is None else "sliding_window"
        for place in places
    ]
    names = [{place, str(place), kind} for place, kind in zip(places, kinds, strict=True)]
    if unknown := [name for name in skip if not any(name in own for own in names)]:
        raise ParameterError(
            f"cache_dtype_skip_layers names {unknown[0]!r}, which no layer with pages is: these are "
            f"{places[0]} to {places[-1]} of {config.num_layers}, {' and '.join(dict.fromkeys(kinds))}"
        )
    kept = tuple(None if own & {*skip} else cache_dtype for own in names)
    if not any(kept):
        raise ParameterError(
            f"cache_dtype_skip_layers leaves no layer of {len(kept)} for cache_dtype={cache_dtype!r}: leave both out"
        )
    return kept


def check_query_dtype(config: DecoderConfig, query_dtype: str | None) -> None:
    """Raises ParameterError unless queries of `config` over float8 pages can be rounded so."""
    if query_dtype is None:
        return
    if not getattr(config, "kv_lora_rank", 0):
        raise ParameterError(
            f"query_dtype={query_dtype!r} is for latent attention, this target keeps keys and values of heads: leave it out"
        )
    if getattr(config, "index_topk", 0):
        raise ParameterError(
            f"query_dtype={query_dtype!r} is for attention to all rows, here an indexer chooses some: leave it out"
        )


def check_cache_dtype(config: DecoderConfig, cache_dtype: str | None) -> None:
    """Raises ParameterError unless pools of `config` can be kept so."""
    rank = getattr(config, "kv_lora_rank", 0)
    if cache_dtype not in (None, *SCALED, "fp8_packed"):
        raise ParameterError(
            'cache_dtype must be None, "auto", "fp8", "fp8_e5m2", "int8", "int8_keys" or "fp8_packed", one for keys and values of '
            f"all layers, got {cache_dtype!r}"
        )
    if cache_dtype in (*KEY_SCALED, "fp8_e5m2") and rank:
        raise ParameterError(
            f'cache_dtype="{cache_dtype}" is for keys and values of heads, this target has latent rows: take "fp8" or "fp8_packed"'
        )
    if cache_dtype is not None and getattr(config, "index_block", 0):
        raise ParameterError(
            f'cache_dtype="{cache_dtype}" was not tried with an indexer of blocks, which reads pages another way: leave it out'
        )
    if cache_dtype is not None and getattr(config, "kda", None) is not None:
        raise ParameterError(f'cache_dtype="{cache_dtype}" was not tried beside Kimi delta attention: leave it out')
    if cache_dtype is not None and getattr(config, "conv_shapes", ()):
        raise ParameterError(
            f'cache_dtype="{cache_dtype}" was not tried with attention that has a bias by distance: leave it out'
        )
    if cache_dtype is not None and getattr(config, "kept_rows", ()):
        raise ParameterError(f'cache_dtype="{cache_dtype}" was not tried with compressed keys: leave it out')
    if cache_dtype == "fp8_packed" and (not rank or rank % LATENT_TILE):
        kept = f"kv_lora_rank {rank}" if rank else "keys and values of heads"
        raise ParameterError(
            f'cache_dtype="fp8_packed" needs latent rows with a kv_lora_rank that is a multiple of {LATENT_TILE}, this target has '
            f'{kept}: take cache_dtype="fp8"'
        )


def pool_dtype(cache_dtype: str | None, dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of a layer's pools, of its keys where values have another, for a model that computes in `dtype`."""
    return jnp.dtype(
        {
            "fp8": jnp.float8_e4m3fn,
            "fp8_e5m2": jnp.float8_e5m2,
            "fp8_packed": jnp.uint8,
            "int8": jnp.int8,
            "int8_keys": jnp.int8,
        }.get(cache_dtype or "", dtype)
    )


def value_dtype(cache_dtype: str | None, dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of a layer's values for a model that computes in `dtype`."""
    return jnp.dtype(dtype) if cache_dtype == "int8_keys" else pool_dtype(cache_dtype, dtype)


def index_dtype(cache_dtype: str | None, dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of indexers' keys: float8 with a scale for each (`dflash_kernels.index_encode`), as the releases are served.

    A model in float32 with pages in float32 keeps them so.
    """
    exact = cache_dtype is None and dtype == jnp.float32
    return jnp.dtype(jnp.float32 if exact else jnp.float8_e4m3fn)


def default_scales(config: DecoderConfig, cache_dtype: CacheFormat = "fp8") -> CacheScales:
    """All 1: right where the norms before the cache keep numbers well below 448, as they do in the released models.

    For int8 pools that is good for nothing but their shapes.
    """
    cache_dtype = quantized_format(cache_dtype)
    if cache_dtype == "int8_keys":
        return CacheScales(())
    if cache_dtype == "int8":
        shapes = zip(config.key_shapes, config.value_dims, strict=True)
        return CacheScales((), tuple(np.ones((heads, dim), np.float32) for (heads, _), dim in shapes))
    if getattr(config, "latent_width", 0):
        return CacheScales((np.ones((), np.float32),) * config.cached_layers)
    ones = tuple(np.ones(heads, np.float32) for heads, _ in config.key_shapes)
    return CacheScales(ones, ones)


def repeated_scales(scales: CacheScales, config: DecoderConfig, held: DecoderConfig) -> CacheScales:
    """Scales of `config` as pools of `held` take them, in which several devices hold the same key head: each head's as often."""

    def often(side: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        shapes = zip(side, config.key_shapes, held.key_shapes, strict=bool(side))
        return tuple(
            np.repeat(one, wide // heads, axis=0) if one.ndim else one for one, (heads, _), (wide, _) in shapes
        )

    return CacheScales(often(scales.k), often(scales.v), scales.q)


def scale_for(largest: Float[np.ndarray, "..."], what: str, reach: float = CALIBRATED_TO) -> Float[np.ndarray, "..."]:
    """Scales for numbers up to `largest`: powers of two, so that dividing and multiplying by them is exact.

    Where nothing but zeros was seen the scale is 1, never 0.

    Args:
      reach: the number of float8 that the largest lies at, or below.

    Raises:
      ParameterError: a number is not finite.
    """
    largest = _finite(largest, what)
    wanted = np.where(largest > 0, largest, reach) / reach
    # Kept inside float32 whatever was seen.
    exponents = np.clip([math.ceil(math.log2(value)) for value in wanted.reshape(-1)], -120, 120)
    return np.asarray(np.exp2(exponents).reshape(largest.shape), np.float32)


def channel_scales_for(largest: Float[np.ndarray, "K H"], what: str) -> Float[np.ndarray, "K H"]:
    """Scales of int8 values up to `largest` in each channel; 1 where nothing but zeros was seen.

    Raises:
      ParameterError: a number is not finite.
    """
    largest = _finite(largest, what)
    scales = np.where(largest > 0, largest, INT8_CALIBRATED_TO) / INT8_CALIBRATED_TO
    # Kept inside float32, and above what it would count as zero.
    return np.clip(scales, 2.0**-120, 2.0**120).astype(np.float32)


def _finite(largest: Float[np.ndarray, "..."], what: str) -> Float[np.ndarray, "..."]:
    largest = np.asarray(largest, np.float64)
    if not np.isfinite(largest).all():
        raise ParameterError(
            f"{what}: calibration met a number that is not finite, whose scale would spoil the whole pool; check the weights "
            "(dflash-convert --verify hash), or load in bfloat16 or float32"
        )
    return largest
