"""Cache specs of a model's layers: for each token, keys and values of some heads, or one latent row for all of them."""

from dataclasses import dataclass

import jax.numpy as jnp
from dflash_kernels import packed_latent_width

from dflash_jax.config import DecoderConfig
from dflash_jax.quantization.kv_formats import KEY_SCALED, CacheFormat, layer_formats, pool_dtype, value_dtype


@dataclass(frozen=True)
class LayerSpec:
    """One layer's part of a page.

    Attributes:
      heads: key heads; 1 for a latent row.
      dim: entries of each.
      value_dim: entries of each head's value, in a pool of their own; None where a latent row is key and value at once.
      index: entries of an indexer's key, in a pool of its own; 0 where a layer has no indexer.
      wide_index: whether that pool is in the model's dtype whatever the others are.
      window: keys that a query sees, the last ones, its own included; None for all.
      kept: how its numbers are kept; see `quantization.kv_formats`.
    """

    heads: int
    dim: int
    value_dim: int | None
    index: int = 0
    wide_index: bool = False
    window: int | None = None
    kept: str | None = None

    def shape(self, num_pages: int, page_size: int) -> tuple[int, int, int, int]:
        """Shape of the pool of keys."""
        return num_pages, self.heads, page_size, self.dim

    def value_shape(self, num_pages: int, page_size: int) -> tuple[int, int, int, int]:
        """Shape of the pool of values."""
        assert self.value_dim is not None
        return num_pages, self.heads, page_size, self.value_dim

    @property
    def entries(self) -> int:
        """Numbers kept for one token, but for an indexer's key."""
        return self.heads * (self.dim + (self.value_dim or 0))

    def token_bytes(self, dtype: jnp.dtype) -> int:
        """Bytes kept for one token of a model that computes in `dtype`, scales of keys included, but for an indexer's key."""
        keys = self.dim * pool_dtype(self.kept, dtype).itemsize + (4 if self.kept in KEY_SCALED else 0)
        return self.heads * (keys + (self.value_dim or 0) * value_dtype(self.kept, dtype).itemsize)


def layer_specs(config: DecoderConfig, cache_dtype: CacheFormat = None) -> tuple[LayerSpec, ...]:
    """One spec for each layer of `config` with pages; latent where it has a `latent_width`. Entries of packed rows are bytes."""
    latent_width, kept = getattr(config, "latent_width", 0), layer_formats(config, cache_dtype)
    if latent_width:
        rank = getattr(config, "kv_lora_rank", 0)
        packed = packed_latent_width(rank, latent_width - rank) if "fp8_packed" in kept else latent_width
        indexers: tuple[bool, ...] = getattr(config, "indexers", (False,) * config.cached_layers)
        pooled: int = getattr(config, "index_row_width", 0)
        index: int = pooled or getattr(config, "index_head_dim", 0)
        return tuple(
            LayerSpec(
                1, packed if how == "fp8_packed" else latent_width, None, index=index if own else 0, wide_index=pooled > 0,
                kept=how,
            )
            for own, how in zip(indexers, kept, strict=True)
        )  # fmt: skip
    # Where some layers have no pages, those with windows that have come before the others.
    windows = config.windows[: config.cached_layers] or (None,) * config.cached_layers
    return tuple(
        LayerSpec(heads, dim, value_dim, window=window, kept=how)
        for (heads, dim), value_dim, window, how in zip(
            config.key_shapes, config.value_dims, windows, kept, strict=True
        )
    )
