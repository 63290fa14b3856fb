"""Weights in blocks of columns: products and chains over them, in the definition, in Pallas's interpreter, lowered for an H200, and
for real (`-m gpu`). What a kernel gives for rows one after the other, it gives for blocks to the bit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import (
    ColumnBlocks,
    attention_chain,
    dense,
    dense_gated,
    dense_onto,
    dense_parts,
    in_column_blocks,
    layer_chain,
    row_by_row,
)
from dflash_kernels.core.layouts import as_stored
from dflash_kernels.fused.layer.mosaic_gpu import launch_products
from dflash_kernels.matmul.dense.mosaic_gpu import launch, launch_onto
from dflash_kernels.matmul.tiling import SHARED_MEMORY, plan
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..devices import custom_calls, h200
from . import test_attention_chain as whole_layer
from . import test_layer_chain as chain
from .attention_chain_cases import QWEN3_4B as HEADS_4B
from .attention_chain_cases import TINY as TINY_HEADS
from .attention_chain_cases import make as make_heads
from .test_dense import FORMS, QWEN3_4B, QWEN3_8B, check, make, whole

EPS = 1e-6
INTERPRET = plgpu.InterpretGPUParams()
MATRICES = "o", "gate_up", "down", "following"


def in_blocks(call: dict[str, Any]) -> dict[str, Any]:
    """A layer's call with its matrices in blocks."""
    return call | {name: in_column_blocks(call[name]) for name in MATRICES if name in call}


def same(ours: Any, theirs: Any) -> None:
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_a_matrix_and_back() -> None:
    matrix = jnp.arange(6 * 192, dtype=jnp.float32).reshape(6, 192)
    blocks = in_column_blocks(matrix)
    assert (blocks.shape, blocks.size, blocks.dtype) == (matrix.shape, matrix.size, matrix.dtype)
    np.testing.assert_array_equal(np.asarray(blocks.blocks[2, 4]), np.asarray(matrix[4, 128:]))
    np.testing.assert_array_equal(np.asarray(blocks.stacked[6 + 4]), np.asarray(matrix[4, 64:128]))
    np.testing.assert_array_equal(np.asarray(row_by_row(blocks)), np.asarray(matrix))
    assert row_by_row(matrix) is matrix is as_stored(matrix)
    assert blocks[...] is blocks
    assert jax.tree.map(lambda leaf: leaf, blocks).shape == matrix.shape


def test_what_has_no_blocks_is_named() -> None:
    with pytest.raises(ValueError, match="whole blocks of 64, not 100"):
        in_column_blocks(jnp.zeros((4, 100)))
    with pytest.raises(TypeError, match=r"has no part 3: take `matrix\(\)`"):
        in_column_blocks(jnp.zeros((4, 64)))[3]
    with pytest.raises(NotImplementedError, match="blocks of 64 columns, not of 32"):
        as_stored(ColumnBlocks(jnp.zeros((2, 4, 32))))
    call = in_blocks(chain.make(2, chain.TINY))
    with pytest.raises(ValueError, match="columns in pairs, not in blocks"):
        layer_chain(**call, scales=(None,) * 4, exchange=None)


@pytest.mark.parametrize("form", FORMS)
def test_the_definitions(form: str) -> None:
    x, weight = make(form, 5, 24, 128)
    same(*(FORMS[form](x, one, implementation="xla") for one in (in_column_blocks(weight), weight)))


@pytest.mark.few("swiglu-40*", "split_k-160*", "store-320*")
@pytest.mark.parametrize(
    ("form", "rows", "features", "depth"),
    [
        # Some of a tile's rows, tiles of rows that overlap, rows that are padded; features in tiles that overlap.
        ("store", 8, 96, 128), ("swiglu", 40, 96, 192), ("split_k", 20, 80, 256), ("store", 72, 80, 128), ("swiglu", 96, 48, 128),
        ("split_k", 160, 96, 256), ("store", 320, 64, 64),
    ],
)  # fmt: skip
def test_agrees_with_float64(form: Any, rows: int, features: int, depth: int) -> None:
    x, weight = make(form, rows, features, depth)
    check(form, x, weight, launch(form, x, in_column_blocks(weight), multiprocessors=3, interpret=INTERPRET)[0])


@pytest.mark.few("split_k")
@pytest.mark.parametrize("form", FORMS)
def test_gives_the_bits_of_rows_one_after_the_other(form: Any) -> None:
    x, weight = make(form, 128, 96, 256)
    how: Any = {"multiprocessors": 3, "interpret": INTERPRET}
    same(*(launch(form, x, one, **how) for one in (in_column_blocks(weight), weight)))


@pytest.mark.few
def test_chains_give_the_bits_of_rows_one_after_the_other() -> None:
    call = chain.make(3, chain.ODD)
    same(*(chain.interpreted(one, 7) for one in (in_blocks(call), call)))
    same(*(layer_chain(**one, exchange=None, implementation="xla") for one in (in_blocks(call), call)))


@pytest.mark.few  # the same of chains without attention follows
def test_a_layer_in_one_launch_gives_the_bits_of_rows_one_after_the_other() -> None:
    call = make_heads(2, [0, 70], [0, 1], TINY_HEADS, page_size=16)
    same(*(whole_layer.interpreted(one, causal=False, ctas=4) for one in (in_blocks(call), call)))
    same(*(attention_chain(**one, exchange=None, implementation="xla") for one in (in_blocks(call), call)))


@pytest.mark.parametrize("rows", [8, 24, 32, 64, 72, 96, 128, 160, 512, 1000, 1024])
@pytest.mark.parametrize("sizes", [QWEN3_4B, QWEN3_8B])
def test_schedule(rows: int, sizes: dict[str, tuple[int, int]]) -> None:
    """Every plan covers its product within the rows that there are."""
    for form in FORMS:
        features, depth = sizes[form]
        made: Any = plan(rows, features, depth, form, multiprocessors=132, blocked=True)  # type: ignore[arg-type]
        assert made.blocked
        assert made.tile_n * made.n_tiles >= features
        assert made.split_k * made.k_tiles * 64 == depth
        assert made.m_tiles * made.tile_m >= rows == made.last_row + made.valid_rows
        assert made.staged or made.valid_rows == made.tile_m
        results = 2 * made.tile_m * made.tile_n * (made.staged > 0)
        assert 128 * made.stages * (made.tile_m + made.tile_w) + results <= SHARED_MEMORY


@pytest.mark.few("sizes0-96")
@pytest.mark.parametrize("rows", [1, 20, 32, 96, 128, 512, 1024])
@pytest.mark.parametrize("sizes", [QWEN3_4B, QWEN3_8B])
def test_lowers_for_an_h200(rows: int, sizes: dict[str, tuple[int, int]]) -> None:
    """Every form at full size and of any rows is a kernel: XLA would copy the weights."""

    def run(x: Any, qkv: Any, gates: Any, wide: Any, down: Any) -> Any:
        stream = jnp.zeros((rows, sizes["split_k"][0]), jnp.bfloat16)
        products = dense(x, in_column_blocks(qkv)), dense_gated(x, in_column_blocks(gates))
        return *products, dense_onto(wide, in_column_blocks(down), stream, stream[0], eps=EPS)

    calls = {form: jax.eval_shape(lambda form=form: make(form, rows, *sizes[form])) for form in FORMS}
    (x, qkv), (_, gates), (wide, down) = (calls[form] for form in ("store", "swiglu", "split_k"))
    assert custom_calls(run, x, qkv, gates, wide, down) == ["mosaic_gpu_v2"] * 4


@pytest.mark.few
@pytest.mark.parametrize("rows", [1, 16])
def test_chains_lower_for_an_h200(rows: int) -> None:
    call = jax.eval_shape(lambda: in_blocks(chain.make(rows, chain.QWEN3_4B)))
    layer: Any = jax.eval_shape(lambda: in_blocks(make_heads(rows, [1091], [rows], HEADS_4B)))

    def run(call: dict[str, Any], layer: dict[str, Any]) -> Any:
        x, arrays = chain.arrays(call)
        exchange = whole_layer.new_exchange(layer, rows, HEADS_4B)
        between = launch_products(x, arrays, arrays.o, exchange[0], eps=EPS, ctas=132)
        return between, attention_chain(**layer, exchange=exchange, eps=EPS, implementation="mosaic_gpu")

    with h200():
        text = jax.jit(run).trace(call, layer).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == 2


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 20, 32, 96, 200, 1024])
@pytest.mark.parametrize("form", FORMS)
def test_full_size_agrees_with_float64(form: str, rows: int) -> None:
    x, weight = make(form, rows, *QWEN3_4B[form])
    call = jax.jit(lambda x, weight: FORMS[form](x, weight, implementation="mosaic_gpu"))
    out = call(x, in_column_blocks(weight))
    check(form, x, weight, out)
    same(out, call(x, in_column_blocks(weight)))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [64, 128, 192, 512])
@pytest.mark.parametrize("form", ["swiglu", "split_k"])
def test_full_size_has_the_bits_of_rows_one_after_the_other(form: str, rows: int) -> None:
    x, weight = make(form, rows, *QWEN3_8B[form])
    call = jax.jit(lambda x, weight: FORMS[form](x, weight, implementation="mosaic_gpu"))
    same(*(call(x, one) for one in (in_column_blocks(weight), weight)))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 16])
def test_full_size_chains(rows: int) -> None:
    call = chain.make(rows, chain.QWEN3_4B)
    same(*(chain.on_gpu(one) for one in (in_blocks(call), call)))


@pytest.mark.gpu
def test_a_full_size_layer_in_one_launch() -> None:
    call = make_heads(16, [1091], [16], HEADS_4B)

    @jax.jit
    def run(call: dict[str, Any]) -> Any:
        return attention_chain(**call, exchange=whole_layer.new_exchange(call, 16, HEADS_4B), eps=EPS)

    same(*(run(one) for one in (in_blocks(call), call)))


@pytest.mark.few("24")
@pytest.mark.parametrize("rows", [24, 512])
def test_ends_in_the_stream(rows: int) -> None:
    """With many rows as well, where rows one after the other are left to XLA."""
    x, weight = make("split_k", rows, 512, 128)
    stream, norm = jnp.ones((rows, 512), jnp.bfloat16), jnp.ones((512,), jnp.bfloat16)
    out = launch_onto(x, in_column_blocks(weight), stream, norm, eps=EPS, multiprocessors=4, interpret=INTERPRET)
    true = np.asarray(stream, np.float64) + whole("store", dense(x, weight, implementation="xla"))
    normed = true / np.sqrt((true**2).mean(-1, keepdims=True) + EPS)
    for found, expected in zip(out, (true, normed), strict=True):
        np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=0.04)
    assert dense_parts(x[:4], in_column_blocks(weight), implementation="xla").shape == (1, 4, 512)
