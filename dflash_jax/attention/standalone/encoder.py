"""Attention without a cache in which every token sees both ways: encoders of text, and of images and sound.

In 16 bits or float32: with no pages there is no scale for eight bits, and what comes so is refused.
"""

from typing import Any, cast

import jax.numpy as jnp
from dflash_kernels import ragged_attention
from jaxtyping import Array, Float, Int


def encoder_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K V"],
    cu_lens: Int[Array, "C"],
    *,
    window: int | None = None,
    **options: Any,
) -> Float[Array, "T N V"]:
    """Tokens of packed texts over the tokens of the same text.

    Args:
      cu_lens: `[B + 1]` int32, where each text begins, and the end of the last; rows past it are padding, may hold anything and
        give 0.
      window: a token sees those fewer than so many places away, to both sides; None for all.
      options: of `ragged_attention`: soft_cap, sinks, alibi_slopes, alibi_sqrt, scale, implementation.

    Raises:
      ValueError: `window` is not positive, shapes do not agree, or something is in eight bits.
      NoImplementationError: nothing named takes these arguments.
    """
    if window is not None and window < 1:
        raise ValueError(f"a window of {window} holds not even the token itself: give at least 1, or None for all")
    reach = None if window is None else (window - 1, window - 1)
    return cast(Array, ragged_attention(q, k, v, cu_lens, causal=False, window=reach, **options))


def batch_encoder_attention(
    q: Float[Array, "B S *heads"],
    k: Float[Array, "B S *kv_heads"],
    v: Float[Array, "B S *kv_heads"],
    *,
    head_dim: int,
    cu_lens: Int[Array, "C"] | None = None,
    **options: Any,
) -> Float[Array, "B S *heads"]:
    """The same for batches `[B, S, N, H]`, or `[B, S, N * H]` as a projection leaves them, as vision encoders have them.

    Args:
      head_dim: H, of queries, keys and values.
      cu_lens: where each picture begins in the `B * S` rows, as in `encoder_attention`; None: every row of the batch is one.
      options: as in `encoder_attention`.

    Returns:
      The queries' shape.

    Raises:
      ValueError: as `encoder_attention`, q, k and v are of different tokens, or `head_dim` does not divide what was given.
    """
    if not q.shape[:2] == k.shape[:2] == v.shape[:2]:
        raise ValueError(
            f"q {q.shape}, k {k.shape} and v {v.shape} must begin with the same batch and tokens [B, S]: tokens of an encoder "
            "attend to one another (for keys of another sequence: cross_attention)"
        )
    (b, s), last = q.shape[:2], {q.shape[-1], k.shape[-1], v.shape[-1]}
    if any(width % head_dim if q.ndim == 3 else width != head_dim for width in last):
        raise ValueError(f"q {q.shape}, k {k.shape} and v {v.shape} are no heads of {head_dim}")
    starts = jnp.arange(b + 1, dtype=jnp.int32) * s if cu_lens is None else cu_lens
    packed_q, packed_k, packed_v = (x.reshape(b * s, -1, head_dim) for x in (q, k, v))
    return encoder_attention(packed_q, packed_k, packed_v, starts, **options).reshape(q.shape)
