"""Attention in float64, all heads of a sequence at once: fast enough for the sizes of real models."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from ..kernels.attention_oracle import Case


def dense_oracle(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray | None = None, *, scale: float,
    soft_cap: float | None = None, sinks: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """`[T, N, V]` of queries `[T, N, H]` over `[S, K, H]` and `[S, K, V]`; `seen [T, S]`: which keys, all where None."""
    (t, n, h), (s, kv_heads, _) = q.shape, k.shape
    if not t * s:
        return np.zeros((t, n, v.shape[2]))
    grouped = q.astype(np.float64).reshape(t, kv_heads, n // kv_heads, h)
    scores = np.einsum("tkgh,skh->kgts", grouped, k.astype(np.float64), optimize=True) * scale
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    if seen is not None:
        scores = np.where(seen, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    of_heads = None if sinks is None else sinks.astype(np.float64).reshape(kv_heads, -1, 1, 1)
    top = top if of_heads is None else np.maximum(top, of_heads)
    top = np.where(np.isfinite(top), top, 0.0)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True) + (0.0 if of_heads is None else np.exp(of_heads - top))
    weights /= np.where(total > 0, total, 1.0)
    return np.einsum("kgts,skv->tkgv", weights, v.astype(np.float64), optimize=True).reshape(t, n, -1)


def paged_oracle(case: Case) -> np.ndarray:
    """What `attention_oracle.oracle` gives out for a case without windows and ALiBi, for large ones."""
    out = np.zeros((*case.q.shape[:3], case.v_pages.shape[3]))
    options: dict[str, Any] = {name: case.options.get(name) for name in ("soft_cap", "sinks")}
    for row, (length, count) in enumerate(zip(case.seq_lens, case.q_lens, strict=True)):
        positions = length - count + np.arange(count)
        seen = np.arange(length) <= positions[:, None] if case.options.get("causal", True) else None
        keys, values = (_of_sequence(case, name, row) for name in ("k", "v"))
        out[row, :count] = dense_oracle(case.q[row, :count], keys, values, seen, scale=case.scale, **options)
    return out


def _of_sequence(case: Case, name: str, row: int) -> np.ndarray:
    """Keys or values of a sequence `[S, K, H]`, dequantized."""
    pool, scale = getattr(case, f"{name}_pages"), case.options.get(f"{name}_scale")
    pages = case.page_table[row, : -(-case.seq_lens[row] // pool.shape[2])]
    held = pool[pages].astype(np.float64)
    if scale is not None:
        held *= scale[pages][..., None] if scale.ndim == 3 else scale.reshape(len(scale), 1, -1)
    return np.swapaxes(held, 1, 2).reshape(-1, *held.shape[1::2])[: case.seq_lens[row]]


def assert_as_good_as(out: Any, reference: Any, true: np.ndarray, *, ulps: int = 2) -> None:
    """At most twice the error of the same dtype's jnp reference, which must be small, and so many units in the last place of the
    largest number."""
    errors = [np.abs(np.asarray(found, np.float64) - true).max() for found in (out, reference)]
    ulp = float(jnp.finfo(out.dtype).eps) * np.abs(true).max()
    assert errors[1] <= 4 * ulp, f"the reference is wrong by {errors[1] / ulp:.2f} ulp"
    assert errors[0] <= 2 * errors[1] + ulps * ulp, (
        f"wrong by {errors[0] / ulp:.2f} ulp, the reference {errors[1] / ulp:.2f}"
    )
