"""What each layer of a model keeps for a token: keys and values of some heads, or one latent row for all of them."""

from dataclasses import dataclass

from dflash_kernels import packed_latent_width

from dflash_jax.config import DecoderConfig


@dataclass(frozen=True)
class LayerSpec:
    """One layer's part of a page.

    Attributes:
      heads: key heads; 1 for a latent row.
      dim: entries of each.
      values: whether a value pool of the same shape stands beside the key pool. A latent row is key and value at once.
      index: entries of an indexer's key, in a pool of its own; 0 where a layer has no indexer.
      window: keys that a query sees, the last ones, its own included; None for all.
    """

    heads: int
    dim: int
    values: bool = True
    index: int = 0
    window: int | None = None

    def shape(self, num_pages: int, page_size: int) -> tuple[int, int, int, int]:
        return num_pages, self.heads, page_size, self.dim

    @property
    def entries(self) -> int:
        """Numbers kept for one token, but for an indexer's key."""
        return self.heads * self.dim * (2 if self.values else 1)


def layer_specs(config: DecoderConfig, cache_dtype: str | None = None) -> tuple[LayerSpec, ...]:
    """One spec for each layer of `config` with pages; latent where it has a `latent_width`. Entries of packed rows are bytes."""
    latent_width = getattr(config, "latent_width", 0)
    if latent_width:
        rank = getattr(config, "kv_lora_rank", 0)
        width = packed_latent_width(rank, latent_width - rank) if cache_dtype == "fp8_packed" else latent_width
        indexers: tuple[bool, ...] = getattr(config, "indexers", (False,) * config.cached_layers)
        index: int = getattr(config, "index_head_dim", 0)
        return tuple(LayerSpec(1, width, values=False, index=index if own else 0) for own in indexers)
    # Where some layers have no pages, those with windows that have come before the others.
    windows = config.windows[: config.cached_layers] or (None,) * config.cached_layers
    return tuple(
        LayerSpec(heads, dim, window=window) for (heads, dim), window in zip(config.key_shapes, windows, strict=True)
    )
