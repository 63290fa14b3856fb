"""Page pools: for each layer a key pool `[P, K, p, H]` and, but for latent rows, a value pool; a pytree that programs donate.

An indexer's keys are a pool beside that of its layer's latent rows, with one page table and one life: both follow from the same
tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from dflash_jax.cache.specs import LayerSpec, layer_specs
from dflash_jax.config import DecoderConfig
from dflash_jax.quantization.kv_formats import (
    KEY_SCALED,
    SCALED,
    CacheFormat,
    CacheScales,
    default_scales,
    index_dtype,
    pool_dtype,
    quantized_format,
    value_dtype,
)


@no_type_check  # JAX rebuilds pytrees with shapes and placeholders in place of arrays
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pages:
    """Key and value pools of all layers of one model.

    Attributes:
      k: keys; for a model with latent attention its rows, `[P, 1, p, R + r]` (or their bytes where rows are packed).
      v: values; () for a model with latent attention.
      k_scale, v_scale: what a float8 pool's numbers are to be multiplied with, `[K]` or for latent rows `[]`; of int8 pools the
        keys' `[P, K, p]`, written with them, and the values' `[K, H]`; None for layers left out, () where all pools are others.
      q_scale: what queries over float8 latent rows are rounded to float8 on, `[]`; None for layers left out,
        () where they stay.
      index: keys of those layers that have an indexer, `[P, 1, p, E]`; () where none has.
      index_scale: of float8 ones, `[P, 1, p]`, written with them; () of others.
    """

    k: tuple[Shaped[Array, "P K p H"], ...]
    v: tuple[Shaped[Array, "P K p H"], ...]
    k_scale: tuple[Float[Array, "..."] | None, ...] = ()
    v_scale: tuple[Float[Array, "..."] | None, ...] = ()
    index: tuple[Shaped[Array, "P 1 p E"], ...] = ()
    index_scale: tuple[Float[Array, "P 1 p"], ...] = ()
    q_scale: tuple[Float[Array, ""] | None, ...] = ()

    @property
    def page_size(self) -> int:
        return self.k[0].shape[2]

    @property
    def narrow(self) -> bool:
        """Whether all layers' keys are of eight bits."""
        return all(pool.dtype.itemsize == 1 for pool in self.k)

    def with_layer(self, layer: int, **pools: Array) -> "Pages":
        """The same pools but for those of one layer, by its place in each of them, named as the attributes are."""
        changed = {
            name: (*getattr(self, name)[:layer], pool, *getattr(self, name)[layer + 1 :])
            for name, pool in pools.items()
        }
        return replace(self, **changed)


def make_pages(
    config: DecoderConfig,
    num_pages: int | Sequence[int],
    page_size: int,
    dtype: jnp.dtype,
    *,
    cache_dtype: CacheFormat = None,
    scales: CacheScales | None = None,
    float8_queries: bool = False,
) -> Pages:
    """Zeroed pools of `num_pages` pages for every layer of `config`, whose model computes in `dtype`.

    Args:
      num_pages: of every layer alike, or of each one with pages.
      cache_dtype: see `cache.formats`.
      scales: of float8 and int8 pools; None for `default_scales`.
      float8_queries: whether queries over float8 latent rows are rounded too.
    """
    specs, kept = layer_specs(config, cache_dtype), quantized_format(cache_dtype)
    counts = [num_pages] * len(specs) if isinstance(num_pages, int) else num_pages
    sized = list(zip(specs, counts, strict=True))
    k = tuple(jnp.zeros(spec.shape(count, page_size), pool_dtype(spec.kept, dtype)) for spec, count in sized)
    v = tuple(
        jnp.zeros(spec.value_shape(count, page_size), value_dtype(spec.kept, dtype))
        for spec, count in sized
        if spec.value_dim is not None
    )
    k, v = jax.device_put((k, v))
    index, index_scale = _index_pools(specs, counts, page_size, _index_kind(specs, kept, dtype))
    if kept not in SCALED:
        return Pages(k, v, index=index, index_scale=index_scale)
    scales = scales or default_scales(config, kept)
    rows = [jnp.zeros(pool.shape[:3] if spec.kept else (), jnp.float32) for pool, spec in zip(k, specs, strict=True)]
    k_scale, v_scale = (
        tuple(
            None if spec.kept is None else jax.device_put(jnp.array(scale))
            for spec, scale in zip(specs, side, strict=True)
        )
        if side
        else ()
        for side in (rows if kept in KEY_SCALED else scales.k, scales.v)
    )
    of_queries = scales.q or (np.ones((), np.float32),) * len(specs)
    q_scale = tuple(
        None if spec.kept is None else jax.device_put(jnp.array(scale))
        for spec, scale in zip(specs, of_queries, strict=True)
        if float8_queries
    )
    return Pages(k, v, k_scale, v_scale, index, index_scale, q_scale)


def _index_kind(specs: Sequence[LayerSpec], kept: str | None, dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of indexers' pools."""
    return jnp.dtype(dtype) if any(spec.wide_index for spec in specs) else index_dtype(kept, dtype)


def _index_pools(
    specs: tuple[LayerSpec, ...], counts: Sequence[int], page_size: int, kind: jnp.dtype
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Pools of indexers' keys and, where they are float8, of their scales."""
    shapes = [(count, 1, page_size, spec.index) for spec, count in zip(specs, counts, strict=True) if spec.index]
    keys = tuple(jax.device_put(jnp.zeros(shape, kind)) for shape in shapes)
    if kind != jnp.float8_e4m3fn:
        return keys, ()
    return keys, tuple(jax.device_put(jnp.zeros(shape[:3], jnp.float32)) for shape in shapes)


def pool_axes(pages: Pages, *, deal: bool = False) -> Any:
    """`Pages` with, in place of each array, the axis along which ranks share it: the one that key heads are on; of latent rows,
    which are all heads', that of a page's tokens where those are dealt out, else -1."""
    if not pages.v:
        return jax.tree.map(lambda leaf: 2 if deal and leaf.ndim == 4 else -1, pages)
    scales = 1 if any(scale is not None and scale.ndim > 1 for scale in pages.k_scale) else 0
    axes = {"k": 1, "v": 1, "k_scale": scales, "v_scale": 0}
    found: dict[str, Any] = {
        name: tuple(None if leaf is None else axis for leaf in getattr(pages, name)) for name, axis in axes.items()
    }
    return Pages(**found)


def page_bytes(config: DecoderConfig, page_size: int, dtype: jnp.dtype, *, cache_dtype: CacheFormat = None) -> int:
    """Bytes one page takes over all layers of `config`, keys and values, indexers' keys, and the scales of int8 and index keys."""
    return sum(layer_bytes(config, page_size, dtype, cache_dtype=cache_dtype))


def layer_bytes(
    config: DecoderConfig, page_size: int, dtype: jnp.dtype, *, cache_dtype: CacheFormat = None
) -> tuple[int, ...]:
    """Bytes one page takes in each layer of `config` with pages; see `page_bytes`."""
    specs = layer_specs(config, cache_dtype)
    kind = _index_kind(specs, quantized_format(cache_dtype), dtype)
    return tuple(page_size * (spec.token_bytes(dtype) + index_bytes((spec,), kind)) for spec in specs)


def index_bytes(specs: tuple[LayerSpec, ...], kind: jnp.dtype) -> int:
    """Bytes of one token's index keys in all layers, scales included."""
    scale = 4 if kind == jnp.float8_e4m3fn else 0
    return sum(spec.index * kind.itemsize + scale for spec in specs if spec.index)


def slots_of(
    page_table: Int[Array, "B W"], positions: Int[Array, "B T"], live: Bool[Array, "B T"], page_size: int
) -> Int[Array, "B T"]:
    """Slot of each position: `page * page_size + row`, -1 where not live or past the table."""
    column = positions // page_size
    inside = live & (column < page_table.shape[1])
    page = jnp.take_along_axis(page_table, jnp.clip(column, 0, page_table.shape[1] - 1), axis=1)
    return jnp.where(inside, page * page_size + positions % page_size, -1)
