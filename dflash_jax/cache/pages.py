"""Page pools: for each layer a key pool `[P, K, p, H]` and, but for latent rows, a value pool; a pytree that programs donate."""

from dataclasses import dataclass
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.cache.specs import layer_specs
from dflash_jax.config import DecoderConfig


@no_type_check  # JAX rebuilds pytrees with shapes and placeholders in place of arrays
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pages:
    """Key and value pools of all layers of one model.

    Attributes:
      k: keys; for a model with latent attention its rows, `[P, 1, p, R + r]`.
      v: values; () for a model with latent attention.
    """

    k: tuple[Float[Array, "P K p H"], ...]
    v: tuple[Float[Array, "P K p H"], ...]

    @property
    def page_size(self) -> int:
        return self.k[0].shape[2]


def make_pages(config: DecoderConfig, num_pages: int, page_size: int, dtype: jnp.dtype) -> Pages:
    """Zeroed pools of `num_pages` pages for every layer of `config`."""
    specs = layer_specs(config)
    k, v = (
        tuple(
            jax.device_put(jnp.zeros(spec.shape(num_pages, page_size), dtype)) for spec in specs if keys or spec.values
        )
        for keys in (True, False)
    )
    return Pages(k, v)


def page_bytes(config: DecoderConfig, page_size: int, dtype: jnp.dtype) -> int:
    """Bytes one page takes over all layers of `config`, keys and values."""
    return sum(spec.entries for spec in layer_specs(config)) * page_size * jnp.dtype(dtype).itemsize


def slots_of(
    page_table: Int[Array, "B W"], positions: Int[Array, "B T"], live: Bool[Array, "B T"], page_size: int
) -> Int[Array, "B T"]:
    """Slot of each position: `page * page_size + row`, -1 where not live or past the table."""
    column = positions // page_size
    inside = live & (column < page_table.shape[1])
    page = jnp.take_along_axis(page_table, jnp.clip(column, 0, page_table.shape[1] - 1), axis=1)
    return jnp.where(inside, page * page_size + positions % page_size, -1)
