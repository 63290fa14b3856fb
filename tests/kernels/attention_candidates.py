"""The implementations of paged attention that its tests run, and how close to float64 they must come."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import paged_attention

from .attention_oracle import Case, oracle


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An implementation and what it takes; what it refuses is its own tests' business."""

    name: str
    dtype: Any
    head_dims: tuple[int, ...]
    page_sizes: tuple[int, ...]
    narrow_head_dims: tuple[int, ...] = (64, 128, 72, 80)


XLA = Candidate("xla", np.float32, (64, 72, 80, 128, 16), (16, 32, 64, 5, 1, 61))
HOPPER = Candidate(
    "mosaic_gpu", jnp.bfloat16, (64, 72, 80, 96, 128, 192, 256), (16, 32, 64, 8, 128), (64, 128, 256, 192)
)  # fmt: skip
TRITON = Candidate("triton", jnp.bfloat16, (64, 72, 80, 96, 128, 192, 256), (16, 32, 64, 128, 5, 61))
CANDIDATES = (
    pytest.param(XLA, id="xla"),
    pytest.param(XLA, id="xla-on-gpu", marks=pytest.mark.gpu),
    pytest.param(HOPPER, id="mosaic_gpu", marks=pytest.mark.gpu),
    pytest.param(TRITON, id="triton", marks=pytest.mark.gpu),
)


@functools.partial(jax.jit, static_argnames=("causal", "window", "soft_cap", "scale", "alibi_sqrt", "implementation"))
def call(q, k_pages, v_pages, page_table, seq_lens, q_lens, sinks=None, **options):
    return paged_attention(
        q, k_pages, v_pages, page_table, seq_lens, q_lens=q_lens, sinks=sinks, return_lse=True, **options
    )


def run(case: Case, candidate: Candidate) -> tuple[np.ndarray, np.ndarray]:
    out, lse = call(*case.arrays(), **case.options, implementation=candidate.name)
    assert out.dtype == case.q.dtype
    assert lse.dtype == jnp.float32
    return np.asarray(out), np.asarray(lse)


def rounding(dtype: Any, values: np.ndarray) -> float:
    """Allowed error of outputs: float32 sums, or one rounding of the output and one of the weights."""
    largest = max(float(np.abs(values.astype(np.float64)).max()), 1.0)
    return largest * (2e-6 if dtype == np.float32 else float(jnp.finfo(dtype).eps))


def check(case: Case, candidate: Candidate) -> tuple[np.ndarray, np.ndarray]:
    """The results, once they agree with float64."""
    (out, lse), (true_out, true_lse) = run(case, candidate), oracle(case)
    np.testing.assert_allclose(out.astype(np.float64), true_out, rtol=0, atol=rounding(case.q.dtype, true_out))
    # The Hopper kernel's exponentials and logarithms are the GPU's approximate ones.
    lse_error = 2e-6 if case.q.dtype == np.float32 else 1e-4 if candidate is HOPPER else 1e-5
    np.testing.assert_allclose(lse, true_lse, rtol=lse_error, atol=lse_error)
    return out, lse


def same_bits(ours: tuple[np.ndarray, ...], theirs: tuple[np.ndarray, ...]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(ours, theirs, strict=True))
