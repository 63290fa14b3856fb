"""Attention both ways over packed texts and batches of pictures, against loops in float64."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dflash_jax.attention.encoder import batch_encoder_attention, encoder_attention

from ..kernels.ragged_oracle import make_case, oracle


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


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """Rows `[S, N, H]` over `[S, K, H]` in float64, every row over all."""
    k, v = (np.repeat(x.astype(np.float64), q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("tnh,snh->nts", q.astype(np.float64), k) * scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("nts,snh->tnh", weights / weights.sum(-1, keepdims=True), v)


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
    true = np.stack([attention(*rows, 0.1) for rows in zip(q, k, v, strict=True)])
    np.testing.assert_allclose(np.asarray(out, np.float64).reshape(q.shape), true, rtol=0, atol=allowed)

    bounds = [0, 4, 12, 18]
    out = batch_encoder_attention(*given, head_dim=72, cu_lens=jnp.asarray(bounds, jnp.int32))
    rows = [x.reshape(18, -1, 72) for x in arrays]
    true = np.concatenate([attention(*(x[a:b] for x in rows), 72**-0.5) for a, b in itertools.pairwise(bounds)])
    np.testing.assert_allclose(np.asarray(out, np.float64).reshape(true.shape), true, rtol=0, atol=allowed)


@pytest.mark.parametrize("shape", [(2, 5, 100), (2, 5, 4, 32)])
def test_heads_that_do_not_fit(shape: tuple[int, ...]) -> None:
    x = jnp.zeros(shape)
    with pytest.raises(ValueError, match="are no heads of 64"):
        batch_encoder_attention(x, x, x, head_dim=64)
