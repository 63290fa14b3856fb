"""Attention both ways over packed texts and batches of pictures, against loops in float64."""

import functools
import inspect
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dflash_jax.attention.standalone.encoder import batch_encoder_attention, encoder_attention

from ..devices import custom_calls
from ..kernels.ragged_oracle import make_case, oracle
from .dense_oracle import assert_as_good_as, dense_oracle


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize(("head_dim", "value_dim", "group"), [(64, 64, 2), (72, 72, 1), (80, 48, 3)])
def test_packed_texts(window: int | None, head_dim: int, value_dim: int, group: int) -> None:
    """An empty text among them, NaN in the padding; a window of w reaches w - 1 to both sides."""
    reach = None if window is None else (window - 1, window - 1)
    case = make_case(
        [7, 0, 13, 1], head_dim=head_dim, value_dim=value_dim, group=group, padding=(5, 5), causal=False, window=reach
    )
    q, k, v, cu_lens, _ = case.dense()
    out = np.asarray(jax.jit(lambda *arrays: encoder_attention(*arrays, window=window))(q, k, v, cu_lens))
    np.testing.assert_allclose(out, oracle(case)[0], rtol=0, atol=4e-6)
    assert not out[case.cu_q_lens[-1] :].any()


def test_a_token_sees_what_comes_after_it() -> None:
    """And the first of a window of two tokens only its neighbour: written out by hand."""
    q = jnp.zeros((3, 1, 16))
    v = jnp.asarray(np.arange(3.0, dtype=np.float32)[:, None, None] * np.ones((3, 1, 16), np.float32))
    bounds = jnp.array([0, 3], jnp.int32)
    assert encoder_attention(q, q, v, bounds)[:, 0, 0].tolist() == [1.0, 1.0, 1.0]
    assert encoder_attention(q, q, v, bounds, window=2)[:, 0, 0].tolist() == [0.5, 1.0, 1.5]
    assert encoder_attention(q, q, v, bounds, window=1)[:, 0, 0].tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(ValueError, match="a window of 0 holds not even the token itself"):
        encoder_attention(q, q, v, bounds, window=0)


@pytest.mark.parametrize("flat", [False, True], ids=["heads", "flat"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_batches_of_pictures(flat: bool, dtype: Any) -> None:
    """Six heads over two, in the shape they came in; with `cu_lens` a picture may be part of a row or run over several."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((2, 9, heads, 72)).astype(dtype) for heads in (6, 2, 2)]
    q, k, v = arrays
    given = [jnp.asarray(x.reshape(2, 9, -1) if flat else x) for x in arrays]
    allowed = 4e-6 if dtype == np.float32 else 2e-2

    out = batch_encoder_attention(*given, head_dim=72, scale=0.1)
    assert out.shape == given[0].shape
    assert out.dtype == dtype
    true = np.stack([dense_oracle(*rows, scale=0.1) for rows in zip(q, k, v, strict=True)])
    np.testing.assert_allclose(np.asarray(out, np.float64).reshape(q.shape), true, rtol=0, atol=allowed)

    bounds = [0, 4, 12, 18]
    out = batch_encoder_attention(*given, head_dim=72, cu_lens=jnp.asarray(bounds, jnp.int32))
    rows = [x.reshape(18, -1, 72) for x in arrays]
    true = np.concatenate(
        [dense_oracle(*(x[a:b] for x in rows), scale=72**-0.5) for a, b in itertools.pairwise(bounds)]
    )
    np.testing.assert_allclose(np.asarray(out, np.float64).reshape(true.shape), true, rtol=0, atol=allowed)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 65])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bfloat16", "float16"])
def test_texts_of_real_sizes_on_a_gpu(window: int | None, dtype: Any) -> None:
    """ModernBERT's twelve heads of 64 and its local layers' reach; texts of one token and of none, NaN in the padding."""
    lens = [512, 1, 0, 1024, 777, 64]
    rng, cu_lens = np.random.default_rng(1), np.cumsum([0, *lens])
    q, k, v = (rng.standard_normal((sum(lens) + 50, 12, 64), np.float32).astype(dtype) for _ in range(3))
    q *= np.asarray(4, dtype)
    for array in (q, k, v):
        array[cu_lens[-1] :] = np.nan
    given = [jnp.asarray(array) for array in (q, k, v, cu_lens.astype(np.int32))]
    out, reference = (encoder_attention(*given, window=window, implementation=name) for name in (None, "xla"))
    true = np.zeros(q.shape)
    for first, last in itertools.pairwise(cu_lens):
        apart = np.abs(np.arange(last - first)[:, None] - np.arange(last - first))
        seen = None if window is None else apart < window
        true[first:last] = dense_oracle(q[first:last], k[first:last], v[first:last], seen, scale=64**-0.5)
    assert_as_good_as(out, reference, true)
    assert not np.asarray(out)[cu_lens[-1] :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [72, 80])
def test_pictures_of_real_sizes_on_a_gpu(head_dim: int) -> None:
    """Sixteen heads in the flat rows of a projection: SigLIP's 729 patches, and Qwen2-VL's heads in pictures of any size."""
    rng = np.random.default_rng(head_dim)
    q, k, v = (rng.standard_normal((3, 729, 16 * head_dim), np.float32).astype(ml_dtypes.bfloat16) for _ in range(3))
    bounds = None if head_dim == 72 else [0, 64, 900, 901, 3 * 729]
    options = {"head_dim": head_dim, "cu_lens": None if bounds is None else jnp.asarray(bounds, jnp.int32)}
    given = [jnp.asarray(array) for array in (q, k, v)]
    out, reference = (batch_encoder_attention(*given, **options, implementation=name) for name in (None, "xla"))
    rows = [array.reshape(3 * 729, 16, head_dim) for array in (q, k, v)]
    edges = itertools.pairwise(bounds or [0, 729, 1458, 2187])
    true = [dense_oracle(*(x[a:b] for x in rows), scale=head_dim**-0.5) for a, b in edges]
    assert_as_good_as(out, reference, np.concatenate(true).reshape(q.shape))


@pytest.mark.few("72")
@pytest.mark.parametrize("head_dim", [64, 72, 80])
def test_a_kernel_on_an_h200(head_dim: int) -> None:
    x, bounds = jax.ShapeDtypeStruct((2187, 16, head_dim), jnp.bfloat16), jax.ShapeDtypeStruct((6,), jnp.int32)
    assert custom_calls(functools.partial(encoder_attention, window=65), x, x, x, bounds) == ["mosaic_gpu_v2"]


def test_eight_bits_are_refused() -> None:
    x = jnp.zeros((5, 2, 64))
    with pytest.raises(ValueError, match=r"k must be .*: multiply it with its scale and cast it"):
        encoder_attention(x, x.astype(jnp.float8_e4m3fn), x, jnp.array([0, 5], jnp.int32))


@pytest.mark.parametrize("shape", [(2, 5, 100), (2, 5, 4, 32)])
def test_heads_that_do_not_fit(shape: tuple[int, ...]) -> None:
    x = jnp.zeros(shape)
    with pytest.raises(ValueError, match="are no heads of 64"):
        batch_encoder_attention(x, x, x, head_dim=64)


def test_keys_of_other_tokens_are_refused():
    q, k = jnp.ones((2, 3, 4, 16)), jnp.ones((2, 5, 4, 16))
    attend = inspect.unwrap(batch_encoder_attention)
    for keys, values in ((k, k), (q, k), (k, q), (q[:1], q[:1])):
        with pytest.raises(ValueError, match=r"must begin with the same batch and tokens \[B, S\].*cross_attention"):
            attend(q, keys, values, head_dim=16)
