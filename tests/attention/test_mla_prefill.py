"""Chunks of a prompt's context by way of the packed attention op: packing, and that a Hopper GPU gets its kernels."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import ragged_attention

from dflash_jax.attention import mla_prefill
from dflash_jax.attention.mla import absorbed_attention
from dflash_jax.attention.mla_prefill import chunked_prefill

from ..devices import h200
from .latent_layer import Layer, make_batch


@pytest.mark.parametrize(("context", "queries"), [([0, 8, 17, 30, 0, 5], [5, 6, 1, 3, 6, 0]), ([19], [4]), ([0], [6])])
@pytest.mark.parametrize("chunk", [24, 1 << 20])
def test_packed_parts_agree_with_float64(monkeypatch, context, queries, chunk: int) -> None:
    """The op's definition stands in for the kernel, so that packing and unpacking are seen; NaN where nothing is to be read."""

    def packed(*args, implementation, **options):
        assert implementation == "mosaic_gpu"
        return ragged_attention(*args, implementation="xla", **options)

    monkeypatch.setattr(mla_prefill, "ragged_attention", packed)
    batch = make_batch(context, queries)
    new = (jnp.asarray(batch.new(array, 6)) for array in (batch.q_nope, batch.q_pe))
    rest = (jnp.asarray(x) for x in (batch.written(), batch.page_table, batch.seq_lens, batch.q_lens))
    out = jax.jit(functools.partial(chunked_prefill, context_chunk=chunk))(batch.layer, *new, *rest)
    np.testing.assert_allclose(out, batch.oracle(6), rtol=0, atol=1e-5)


@pytest.mark.few
def test_a_hopper_gpu_gets_its_kernels() -> None:
    """In the shape of DeepSeek-V2-Lite."""
    heads, rank, rotated = 16, 512, 64

    def array(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    layer = Layer(array(heads, 128, rank), array(heads, 128, rank), 192**-0.5)
    q = array(1, 256, heads, 128), array(1, 256, heads, rotated)
    pages, table, lens = array(9, 1, 64, rank + rotated), array(1, 8, dtype=jnp.int32), array(1, dtype=jnp.int32)
    # Rows expanded and attended to, for the last chunk and in the loop over others.
    calls = [(functools.partial(chunked_prefill, context_chunk=256), 4), (absorbed_attention, 1)]
    with h200():
        for call, least in calls:
            lowered = (
                jax.jit(call).trace(layer, *q, pages, table, lens, lens).lower(lowering_platforms=("cuda",)).as_text()
            )
            assert lowered.count("mosaic_gpu_v2") >= least


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [256, 8192])
def test_published_shapes_on_a_gpu(chunk: int) -> None:
    """bfloat16, 16 heads of 128 + 64, values 128, latent 512: contexts of none, a chunk and more, against float64."""
    context, queries = [0, 256, 700], [300, 17, 256]
    batch = make_batch(
        context, queries, heads=16, nope=128, rotated=64, value=128, rank=512, page_size=64, dtype=jnp.bfloat16
    )
    new = (jnp.asarray(batch.new(array, 300)) for array in (batch.q_nope, batch.q_pe))
    rest = (jnp.asarray(x) for x in (batch.written(), batch.page_table, batch.seq_lens, batch.q_lens))
    out = jax.jit(functools.partial(chunked_prefill, context_chunk=chunk))(batch.layer, *new, *rest)
    narrow = dataclasses.replace(batch, q_lens=np.minimum(batch.q_lens, 20))
    true = narrow.oracle(20)
    rows = np.arange(20) < narrow.q_lens[:, None]
    difference = np.abs(np.asarray(out[:, :20], np.float64) - true)[rows]
    assert difference.max() < 0.02 * np.abs(true).max()
    dead = np.arange(300) >= np.array(queries)[:, None]
    assert (np.asarray(out, np.float32)[dead] == 0).all()
