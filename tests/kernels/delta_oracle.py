"""The gated delta rule of one prompt in float64 NumPy, token after token, and random calls of it."""

from typing import NamedTuple

import numpy as np
from dflash_kernels import DeltaShape, DeltaState, DeltaWeights
from jax import numpy as jnp

EPS = 1e-6


class Truth(NamedTuple):
    out: np.ndarray  # [T, Hv * dv]
    s: np.ndarray  # [T + 1, Hv, dk, dv]: before the first token and after each
    conv: np.ndarray  # [T + 1, 3, C]


def truth(
    projected: np.ndarray,
    weights: DeltaWeights,
    shape: DeltaShape,
    s: np.ndarray | None = None,
    conv: np.ndarray | None = None,
) -> Truth:
    """One prompt `[T, W]` from a state, or from nothing. Nothing is rounded on the way."""
    hk, hv, dk, dv, c = shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim, shape.channels
    taps, a_log, dt_bias, norm = (np.asarray(weight, np.float64) for weight in weights)
    x = np.asarray(projected, np.float64)
    s = np.zeros((hv, dk, dv)) if s is None else np.asarray(s, np.float64)
    rows = np.concatenate([np.zeros((3, c)) if conv is None else np.asarray(conv, np.float64), x[:, :c]])
    mixed = _silu(sum(rows[tap : tap + len(x)] * taps[:, tap] for tap in range(4)))
    q, k, v = np.split(mixed, [hk * dk, 2 * hk * dk], axis=1)
    q, k = (part.reshape(-1, hk, dk) for part in (q, k))
    q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
    q, k = (np.repeat(part, hv // hk, axis=1) for part in (q * dk**-0.5, k))
    v, (z, b, a) = v.reshape(-1, hv, dv), np.split(x[:, c:], [hv * dv, hv * dv + hv], axis=1)
    beta, decay = 1 / (1 + np.exp(-b)), np.exp(-np.exp(a_log) * np.logaddexp(0, a + dt_bias))
    out, states = np.zeros_like(v), [s]
    for t in range(len(x)):
        s = s * decay[t][:, None, None]
        u = (v[t] - np.einsum("hkv,hk->hv", s, k[t])) * beta[t][:, None]
        s = s + k[t][:, :, None] * u[:, None, :]
        out[t] = np.einsum("hkv,hk->hv", s, q[t])
        states.append(s)
    normed = norm * out / np.sqrt((out**2).mean(-1, keepdims=True) + EPS) * _silu(z.reshape(out.shape))
    return Truth(normed.reshape(len(x), -1), np.stack(states), np.stack([rows[t : t + 3] for t in range(len(x) + 1)]))


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def random_weights(seed: int, shape: DeltaShape, dtype: object = jnp.float32) -> DeltaWeights:
    """Decays between hardly any and nearly everything in a token, as in trained models."""
    rng = np.random.default_rng(seed)
    conv, dt_bias, norm = (
        rng.normal(size=(shape.channels, 4)) / 2,
        rng.normal(size=shape.value_heads),
        rng.normal(size=shape.value_dim),
    )
    a_log = np.log(rng.uniform(0.01, 16, shape.value_heads))
    return DeltaWeights(
        jnp.asarray(conv, dtype),
        jnp.asarray(a_log, jnp.float32),
        jnp.asarray(dt_bias, jnp.float32),
        jnp.asarray(1 + norm / 4, dtype),
    )


def random_rows(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def random_state(seed: int, slots: int, shape: DeltaShape) -> DeltaState:
    s = random_rows(seed, slots, shape.value_heads, shape.key_dim, shape.value_dim)
    return DeltaState(jnp.asarray(s), jnp.asarray(random_rows(seed + 1, slots, 3, shape.channels)))


def close(found: object, expected: np.ndarray, within: float) -> None:
    """Relative to the largest number."""
    found = np.asarray(found, np.float64)
    assert found.shape == expected.shape
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error <= within, error
