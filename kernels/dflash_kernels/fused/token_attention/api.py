"""Attention of one token, from the norm before it to its output projection. Checks shapes, then dispatches."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_kernels.core.dispatch import first_fitting
from dflash_kernels.core.validation import check_axes, check_floats, check_integers, check_of_heads, check_sequences
from dflash_kernels.fused.few_qkv.api import AddNorm
from dflash_kernels.fused.token_attention.mosaic_gpu import refuse, token_attention_mosaic_gpu
from dflash_kernels.fused.token_attention.plan import counters
from dflash_kernels.fused.token_attention.reference import token_attention_reference

IMPLEMENTATIONS = {"mosaic_gpu": token_attention_mosaic_gpu, "xla": token_attention_reference}


class TokenAttended(NamedTuple):
    """Result of `token_attention`: parts of the output projection `[S, 1, D]` float32, the stream `[1, D]`, and the pools."""

    parts: Array
    stream: Array
    k_pages: Array
    v_pages: Array


def token_attention_refusal(
    dtype: Any, *, heads: int, kv_heads: int, head_dim: int, turned: int, page_size: int, table_width: int, page_dtype: Any,
    hidden: int, window: tuple[int | None, int | None] | None = None,
) -> str | None:  # fmt: skip
    """Why `token_attention` has nothing faster than separate operations for calls of these sizes; None where it has.

    Args:
      turned: columns of a head that turn with the position.
      table_width: pages that the page table has room for.
      hidden: D.
    """
    try:
        refuse(
            dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim, turned=turned, page_size=page_size,
            table_width=table_width, page_dtype=page_dtype, hidden=hidden, window=window or (None, None),
        )  # fmt: skip
    except NotImplementedError as reason:
        return str(reason)
    return None


def token_attention_exchange(kv_heads: int) -> Any:
    """A Ref that calls of `token_attention` with so many key heads may share which never run at the same time: each leaves it as it
    was."""
    return jax.new_ref(jnp.zeros((counters(kv_heads),), jnp.int32))


def token_attention(
    k_pages: Float[Array, "P K p H"],
    v_pages: Float[Array, "P K p H"],
    x: Float[Array, "1 D"],
    qkv: tuple[Float[Array, "F D"], Float[Array, "F"] | None],
    output: tuple[Float[Array, "D A"], Float[Array, "D"] | None],
    page_table: Int[Array, "1 W"],
    seq_lens: Int[Array, "1"],
    q_lens: Int[Array, "1"],
    slots: Int[Array, "1"],
    cos: Float[Array, "1 half"],
    sin: Float[Array, "1 half"],
    *,
    added: AddNorm,
    sinks: Float[Array, "N"] | None = None,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    exchange: Any = None,
    implementation: str | Sequence[str] | None = None,
) -> TokenAttended:
    """Attention of one token of one sequence in a layer: `few_qkv_write` with `added`, `paged_attention` and `few_linear` in parts.

    Args:
      k_pages, v_pages: page pools; donate them to the surrounding jit and the write happens in place.
      x: the residual stream, to which `added.parts` are added and whose norm is projected.
      qkv, output: weights `[(N + 2 K) H, D]` and `[D, N H]`, each with its bias or None.
      page_table, seq_lens, q_lens: as of `paged_attention`; `seq_lens` counts the token, `q_lens` is 0 where it is not real.
      slots: where the token's key belongs, as of `qkv_write`: that of position `seq_lens - 1`; negative where it is not real.
      cos, sin: float32, of the token's angles and times any factor.
      sinks: logit per head that counts in the softmax as one more key without a value.
      window: keys seen to the left of the token and right of it, None on a side for all.
      scale: softmax scale, `H ** -0.5` where None.
      exchange: what `token_attention_exchange` gave, made once for calls that follow one another; without it each makes its own.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Raises:
      ValueError: shapes do not agree.
      NoImplementationError: nothing named takes these arguments.
    """
    check_axes(k_pages=(k_pages, "P K p H"), v_pages=(v_pages, "P K p H"), x=(x, "1 D"), slots=(slots, "1"))
    check_axes(qkv=(qkv[0], "F D"), output=(output[0], "D A"), cos=(cos, "1 half"), sin=(sin, "1 half"))
    check_floats(k_pages=k_pages, v_pages=v_pages, x=x, qkv=qkv[0], output=output[0], cos=cos, sin=sin)
    check_integers(slots=slots)
    check_sequences(1, page_table=page_table, seq_lens=seq_lens, q_lens=q_lens)
    (_, kv_heads, _, head_dim), (features, hidden), (rows, width) = k_pages.shape, qkv[0].shape, output[0].shape
    if v_pages.shape != k_pages.shape or x.shape != (1, hidden) or rows != hidden:
        raise ValueError(
            f"pools {k_pages.shape} and {v_pages.shape}, x {x.shape} and weights {qkv[0].shape} and {output[0].shape} do not "
            "belong together"
        )
    if features != width + 2 * kv_heads * head_dim or width % (kv_heads * head_dim) or not width:
        raise ValueError(
            f"weights {qkv[0].shape} and {output[0].shape} must be [(N + 2 * {kv_heads}) * {head_dim}, D] and [D, N * {head_dim}]"
        )
    if slots.shape != (1,) or {cos.shape, sin.shape} != {(1, head_dim // 2)}:
        raise ValueError(
            f"slots {slots.shape}, cos {cos.shape} and sin {sin.shape} must be of one row and half of {head_dim} dims"
        )
    for name, bias, count in (("qkv", qkv[1], features), ("output", output[1], hidden)):
        if bias is not None:
            check_axes(**{f"bias of {name}": (bias, "F")})
            check_floats(**{f"bias of {name}": bias})
            if bias.shape != (count,):
                raise ValueError(f"the bias {bias.shape} of {name} does not fit {count} rows")
    if added.parts.shape[1:] != x.shape or added.weight.shape != x.shape[1:]:
        raise ValueError(
            f"parts {added.parts.shape} and a norm's weight {added.weight.shape} do not fit a stream {x.shape}"
        )
    if exchange is not None and exchange.shape != (counters(kv_heads),):
        raise ValueError(f"an exchange {exchange.shape} is not one for {kv_heads} key heads")
    check_of_heads(width // head_dim, sinks=sinks)
    with jax.named_scope("token_attention"):
        out = first_fitting(
            "token_attention", IMPLEMENTATIONS, implementation, k_pages, v_pages, x, qkv, output, page_table, seq_lens, q_lens,
            slots, cos, sin, added, sinks, exchange, window=tuple(window or (None, None)),
            scale=head_dim**-0.5 if scale is None else scale,
        )  # fmt: skip
    return TokenAttended(*out)
