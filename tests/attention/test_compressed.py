"""Attention over pages to a window and to compressed rows, against the same without pages: DeepSeek V4's three kinds of layers.

Tokens that do not stand are written over, in stretches that have ended with them and in such as have not; every row that nobody
wrote is NaN.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.attention.dense import dense_attend
from dflash_jax.attention.paged import PagedAttend
from dflash_jax.cache import make_pages
from dflash_jax.models.deepseek_v4 import CompressedAttention, DeepseekV4Config
from dflash_jax.models.layers import Rotary, rotary_tables

from ..compressed_pair import compressed_config

CONFIG = compressed_config()
LENS, LONGEST, BLOCK = np.array([70, 0, 9, 41]), 80, 8


def random_layer(config: DeepseekV4Config, index: int, seed: int = 0) -> CompressedAttention:
    layer, rng = CompressedAttention(config, index), np.random.default_rng(seed)
    for name, matrix in vars(layer).items():
        if hasattr(matrix, "weight"):
            offset = 1.0 if "norm" in name else 0.0
            shape = matrix.weight[...].shape
            matrix.weight[...] = jnp.array(offset + rng.normal(size=shape) * shape[-1] ** -0.5, jnp.float32)
    for compressor in (layer.compressor, layer.index_compressor):
        if compressor is not None:
            compressor.places[...] = jnp.array(rng.normal(size=compressor.places[...].shape), jnp.float32)
    layer.sinks[...] = jnp.array(rng.normal(size=config.num_heads), jnp.float32)
    return layer


def turned(config: DeepseekV4Config, positions: jax.Array) -> Rotary:
    both = [rotary_tables(positions, rope, dim) for rope, dim in config.rotations]
    return Rotary(*(jnp.concatenate(sides, axis=-1) for sides in zip(*both, strict=True)))


def filled(config: DeepseekV4Config, pages: int, size: int):
    pools = make_pages(config, pages, size, jnp.dtype("float32"))
    return jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), pools)


@pytest.mark.few("1-5", "2-16")
@pytest.mark.parametrize(("index", "size"), [(0, 4), (1, 4), (1, 5), (1, 16), (2, 4), (2, 10), (2, 16)])
def test_over_pages_as_without_them(index: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ragged batch in pieces of which any number of tokens stands, and more rows than attend at once."""
    monkeypatch.setattr("dflash_jax.attention.compressed.MOST_ROWS", 3 * BLOCK)
    layer, rng = random_layer(CONFIG, index), np.random.default_rng(index)
    texts = jnp.array(rng.normal(size=(len(LENS), LONGEST, CONFIG.hidden_size)), jnp.float32)
    everywhere = turned(CONFIG, jnp.arange(LONGEST)[None])
    expected = np.asarray(jax.jit(lambda x: layer(x, everywhere, dense_attend())[0])(texts))
    table = rng.permutation(len(LENS) * -(-LONGEST // size)).reshape(len(LENS), -1)
    pages = filled(CONFIG, table.size, size)

    @jax.jit
    def call(x, starts, q_lens, pages):
        positions = starts[:, None] + jnp.arange(BLOCK)
        attend = PagedAttend(jnp.array(table, jnp.int32), positions, q_lens, size)
        return layer(x, turned(CONFIG, positions), attend, pages)

    done = np.zeros(len(LENS), np.int32)
    while (done < LENS).any():
        q_lens = np.minimum(rng.integers(0, BLOCK + 1, len(LENS)), LENS - done).astype(np.int32)
        stand = rng.integers(0, q_lens + 1)
        x = np.full((len(LENS), BLOCK, CONFIG.hidden_size), np.nan, np.float32)
        for row, (first, count, right) in enumerate(zip(done, q_lens, stand, strict=True)):
            x[row, :count] = rng.normal(size=(count, CONFIG.hidden_size))
            x[row, :right] = texts[row, first : first + right]
        out, pages = call(jnp.array(x), jnp.array(done), jnp.array(q_lens), pages)
        for row, (first, right) in enumerate(zip(done, stand, strict=True)):
            np.testing.assert_allclose(out[row, :right], expected[row, first : first + right], atol=2e-5)
        done = done + stand
