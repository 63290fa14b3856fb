"""Page pools: for each layer one key pool and one value pool `[P, K, p, H]`, as a pytree that programs donate."""

from dataclasses import dataclass
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.config import DecoderConfig


@no_type_check  # JAX rebuilds pytrees with shapes and placeholders in place of arrays
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pages:
    """Key and value pools of all layers of one model."""

    k: tuple[Float[Array, "P K p H"], ...]
    v: tuple[Float[Array, "P K p H"], ...]

    @property
    def page_size(self) -> int:
        return self.k[0].shape[2]


def make_pages(config: DecoderConfig, num_pages: int, page_size: int, dtype: jnp.dtype) -> Pages:
    """Zeroed pools of `num_pages` pages for every layer of `config`."""
    shape = (num_pages, config.num_kv_heads, page_size, config.head_dim)
    k, v = (tuple(jax.device_put(jnp.zeros(shape, dtype)) for _ in range(config.num_layers)) for _ in range(2))
    return Pages(k, v)


def page_bytes(config: DecoderConfig, page_size: int, dtype: jnp.dtype) -> int:
    """Bytes one page takes over all layers of `config`, keys and values."""
    return 2 * config.num_layers * config.num_kv_heads * page_size * config.head_dim * jnp.dtype(dtype).itemsize


def slots_of(
    page_table: Int[Array, "B W"], positions: Int[Array, "B T"], live: Bool[Array, "B T"], page_size: int
) -> Int[Array, "B T"]:
    """Slot of each position: `page * page_size + row`, -1 where not live or past the table."""
    column = positions // page_size
    inside = live & (column < page_table.shape[1])
    page = jnp.take_along_axis(page_table, jnp.clip(column, 0, page_table.shape[1] - 1), axis=1)
    return jnp.where(inside, page * page_size + positions % page_size, -1)
