"""Long chunks of several sequences by the op for packed prompts: the same as by the op for decoding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import paged_attention

from dflash_jax.attention.prefill import attend_to_pages, long_chunks

from ..devices import h200


@pytest.mark.few("3-*")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sequences", [1, 3])
def test_chunks_agree_with_the_op_for_decoding(sequences: int, causal: bool) -> None:
    rng = np.random.default_rng(sequences)
    q = jnp.asarray(rng.standard_normal((sequences, 9, 4, 16)), jnp.float32)
    pools = (jnp.asarray(rng.standard_normal((12, 2, 8, 16)), jnp.float32) for _ in range(2))
    table = jnp.asarray(rng.permutation(12)[: 4 * sequences].reshape(sequences, 4), jnp.int32)
    seq_lens, q_lens = (jnp.asarray(lens[:sequences], jnp.int32) for lens in ([29, 0, 9], [6, 0, 9]))
    sinks, options = (
        jnp.linspace(-1.0, 1.0, 4),
        {"causal": causal, "window": (12, 4), "scale": 0.3, "implementation": "xla"},
    )
    arrays = (q, *pools, table, seq_lens)
    chunks = long_chunks(*arrays, q_lens=q_lens, sinks=sinks, **options)
    expected = paged_attention(*arrays, q_lens=q_lens, sinks=sinks, **options)
    np.testing.assert_allclose(chunks, expected, rtol=0, atol=2e-6)


@pytest.mark.few("64-16-*", "1-512-float32-False")
@pytest.mark.parametrize(
    ("sequences", "tokens", "dtype", "taken"),
    [
        (1, 512, jnp.bfloat16, True),
        (8, 128, jnp.bfloat16, True),
        (1, 128, jnp.bfloat16, False),
        (64, 16, jnp.bfloat16, False),
        (1, 512, jnp.float32, False),
    ],
)
def test_chunks_that_fill_a_hopper_gpu_take_the_kernel_for_prompts(
    sequences: int, tokens: int, dtype: type, taken: bool
) -> None:
    q, pool = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((sequences, tokens, 32, 128), (9, 8, 64, 128)))
    table, lens = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((sequences, 4), (sequences,)))
    with h200():
        traced = jax.jit(attend_to_pages).trace(q, pool, pool, table, lens, q_lens=lens)
        text = traced.lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    assert ("ragged_paged_attention" in text) == taken
