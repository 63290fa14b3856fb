"""Attention of a decoder's tokens to an encoder's, whose keys and values are written to pages once.

    k_pages, v_pages = write_encoded(k_pages, v_pages, k, v, page_table, encoder_lens, fresh)      # when a request comes
    out = cross_attention(q, k_pages, v_pages, page_table, encoder_lens, q_lens=q_lens)            # in every step

The encoder's pages have a table of their own. Its lengths stay whole in every step; only what is written depends on whose tokens
are new.
"""

from typing import Any, cast

import jax.numpy as jnp
from dflash_kernels import cache_write, paged_attention
from jaxtyping import Array, Bool, Float, Int, Shaped

from dflash_jax.cache.pages import slots_of


def write_encoded(
    k_pages: Shaped[Array, "P K p H"],
    v_pages: Shaped[Array, "P K p H"],
    k: Shaped[Array, "S K H"],
    v: Shaped[Array, "S K H"],
    page_table: Int[Array, "B W"],
    encoder_lens: Int[Array, "B"],
    fresh: Bool[Array, "B"],
) -> tuple[Shaped[Array, "P K p H"], Shaped[Array, "P K p H"]]:
    """The pools with the keys and values of the requests that are `fresh`; those of others stay as they are.

    Args:
      k, v: of the fresh requests' encoder tokens, one request after the other, of the pools' dtype or both in 16 or 32 bits
        (`quantize_tensor` makes float8 ones). Rows past the last one are padding.
      encoder_lens: int32 encoder tokens of every request.

    Raises:
      ValueError: shapes do not agree, or numbers in 16 or 32 bits are to be stored in eight.
      NoImplementationError: no implementation takes these arguments.
    """
    counts = jnp.where(fresh, encoder_lens, 0)
    ends, row = jnp.cumsum(counts), jnp.arange(k.shape[0])
    owner = jnp.minimum(jnp.searchsorted(ends, row, side="right"), counts.shape[0] - 1)
    place = row - (ends - counts)[owner]
    slots = slots_of(page_table[owner], place[:, None], (row < ends[-1])[:, None], k_pages.shape[2])[:, 0]
    return cache_write(k_pages, v_pages, k, v, slots.astype(jnp.int32))


def cross_attention(
    q: Float[Array, "B T N H"],
    k_pages: Float[Array, "P K p H"],
    v_pages: Float[Array, "P K p H"],
    page_table: Int[Array, "B W"],
    encoder_lens: Int[Array, "B"],
    *,
    q_lens: Int[Array, "B"] | None = None,
    **options: Any,
) -> Float[Array, "B T N H"]:
    """Every query over all of its request's encoder tokens, whatever its own position.

    Args:
      encoder_lens: 0 where a request has no encoder tokens: its rows are 0.
      q_lens: decoder tokens that are real, T where None; rows past them are 0.
      options: of `paged_attention`, but for `causal`, `window` and ALiBi, which belong to positions of one sequence.

    Raises:
      ValueError: an option that counts positions, or shapes do not agree.
      NoImplementationError: no implementation takes these arguments.
    """
    if wrong := sorted({"causal", "window", "alibi_slopes", "alibi_sqrt", "return_lse"} & set(options)):
        raise ValueError(f"cross attention has no {', '.join(wrong)}: its queries and keys are of two sequences")
    out = paged_attention(q, k_pages, v_pages, page_table, encoder_lens, q_lens=q_lens, causal=False, **options)
    return cast(Array, out)
