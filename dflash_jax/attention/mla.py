"""Multi-head latent attention over pages, in the two forms that compute the same.

Absorbed: the queries are turned into latent space, and every head attends to the cached rows as they are. Reads least, so it suits
a few queries over a long context: decoding and verification.

Expanded: keys and values of every head are written out from the latent rows. Does less arithmetic per query and key, at the price
of an up-projection per key, so it suits the many queries of a prompt. The context before them is expanded in chunks of bounded
size, one after the other, and joined through the parts' lse: memory does not grow with the context.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
from dflash_kernels import latent_decode, mla_attention, quantize_tensor
from jaxtyping import Array, Bool, Float, Int, Shaped


@runtime_checkable
class LatentLayer(Protocol):
    """Interface of a layer with latent attention; `scale` includes the rotary embedding's factor."""

    index: int
    causal: bool
    scale: float

    @property
    def w_uk(self) -> Array:
        """`[N, P, R]`, from the latent to the keys without their rotated part."""
        ...

    @property
    def w_uv(self) -> Array:
        """`[N, V_h, R]`, from the latent to the values."""
        ...

    def absorb(self, q_nope: Array, q_pe: Array) -> Array:
        """`[B,T,N,P]` and `[B,T,N,r]` to queries of latent rows `[B,T,N,R+r]`."""
        ...

    def up(self, o_latent: Array) -> Array:
        """`[B,T,N,R]` to `[B,T,N,V_h]`."""
        ...

    def expand(self, kv_c: Array) -> tuple[Array, Array]:
        """`[...,R]` to keys without their rotated part `[...,N,P]` and values `[...,N,V_h]`."""
        ...


# Measured on an H200 in bfloat16 (`benchmarks/mla_prefill.py --parts crossover`). With 16 heads expanding takes nearly as long for
# 128 new tokens as for 512, 0.2 ms after 8k of context and 0.75 ms after 32k; absorbed takes that long for some 420 tokens, after
# 2k of context for 256. With 128 heads both take as long for some 250 after 8k of context, 220 after 2k and 280 after 32k (measured
# for 64, 128, 192 and 256).
_BREAK_EVEN_COSTS = 1.4  # times the query tokens at which multiplications are equal
_FIXED_COST_ROWS = 6144
_WORKSPACE = 320 * 2**20  # bytes


@dataclass(frozen=True)
class LatentForm:
    """When latent attention is expanded, and in what pieces.

    Attributes:
      expand_above: calls of more query tokens than this are expanded, others absorbed. None: 1.4 times `break_even_queries` of the
        layer, but no fewer than 6144 query rows (tokens times heads), which the launches and merges of the expanded form cost on
        an H200.
      context_chunk: rows expanded at a time, for all sequences of a call together; the new tokens' at least. None: as many as a
        workspace of 320 MiB holds, 32768 for 16 heads of 192 and 128 in bfloat16.
    """

    expand_above: int | float | None = None
    context_chunk: int | None = None

    def expands(self, queries: int, *, heads: int, rank: int, nope: int, value: int) -> bool:
        if self.expand_above is not None:
            return queries > self.expand_above
        return queries > max(_BREAK_EVEN_COSTS * break_even_queries(rank, nope, value), _FIXED_COST_ROWS / heads)

    def chunk(self, row: int) -> int:
        """Rows to expand at a time; a row's keys and values of all heads take `row` bytes."""
        return _WORKSPACE // row if self.context_chunk is None else self.context_chunk


ABSORBED = LatentForm(expand_above=math.inf)
BY_ARITHMETIC = LatentForm()


def break_even_queries(rank: int, nope: int, value: int) -> float:
    """Query tokens per call at which both forms take equally many multiplications for a key of the context.

    Per head and key, absorbed takes (R + r) + R for each query; expanded takes (P + r) + V_h for each query and R (P + V_h) once.
    171 queries for R 512, P 128, V_h 128.
    """
    saved = 2 * rank - nope - value
    return math.inf if saved <= 0 else rank * (nope + value) / saved


def absorbed_attention(
    layer: LatentLayer,
    q_nope: Float[Array, "B T N P"],
    q_pe: Float[Array, "B T N r"],
    latent_pages: Shaped[Array, "pages 1 p stored"],
    page_table: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    q_lens: Int[Array, "B"],
    *,
    latent_scale: Float[Array, ""] | None = None,
    q_scale: Float[Array, ""] | None = None,
) -> Float[Array, "B T N V"]:
    """The queries over their sequences' pages, which hold the queries' own rows already.

    Args:
      latent_pages: in any format of `dflash_kernels.kv_cache.latent`. Packed rows are unpacked into pages of their own first,
        all that the table names: they save memory between calls, not traffic within one.
      latent_scale: of float8 pages.
      q_scale: queries, with both their parts joined, are rounded to float8 on it; None leaves them.
    """
    q, rank = layer.absorb(q_nope, q_pe), layer.w_uv.shape[-1]
    if latent_pages.dtype == jnp.uint8:
        named = latent_pages[jnp.clip(page_table, 0, latent_pages.shape[0] - 1)].reshape(-1, *latent_pages.shape[1:])
        latent_pages = latent_decode(named, q.dtype, kv_lora_rank=rank)
        page_table = jnp.arange(page_table.size, dtype=jnp.int32).reshape(page_table.shape)
    float8: Any = {}
    if q_scale is not None:
        q, float8 = quantize_tensor(q, q_scale), {"q_scale": q_scale, "dtype": q.dtype}
    o_latent = mla_attention(
        q, latent_pages, page_table, seq_lens, q_lens=q_lens, kv_lora_rank=rank, scale=layer.scale, causal=layer.causal,
        latent_scale=latent_scale, **float8,
    )  # fmt: skip
    return layer.up(cast(Array, o_latent))


def expanded_attention(
    layer: LatentLayer,
    q_nope: Float[Array, "B T N P"],
    q_pe: Float[Array, "B T N r"],
    latents: Float[Array, "B S C"],
    visible: Bool[Array, "B T S"],
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Output and lse, both at least float32, of queries over expanded latent rows.

    Rows that no query may see must be finite; queries that see no row give 0 and -inf whatever they hold.
    """
    kv_c, k_pe = latents[..., : -q_pe.shape[-1]], latents[..., None, -q_pe.shape[-1] :]
    k_nope, v = layer.expand(kv_c)
    k = jnp.concatenate([k_nope, jnp.broadcast_to(k_pe, (*k_nope.shape[:-1], k_pe.shape[-1]))], axis=-1)
    q = jnp.concatenate([q_nope, q_pe], axis=-1)
    return masked_attention_and_lse(q, k, v, visible, layer.scale)


def masked_attention_and_lse(
    q: Float[Array, "B T N h"],
    k: Float[Array, "B S N h"],
    v: Float[Array, "B S N V"],
    visible: Bool[Array, "B T S"],
    scale: float,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """`expanded_attention` of keys and values written out already."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    precision = jax.lax.Precision.HIGHEST if q.dtype == wide else None
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, precision=precision, preferred_element_type=wide) * scale
    scores = jnp.where(visible[:, None], scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    share = (weights / jnp.where(total > 0, total, 1.0)).astype(v.dtype)
    out = jnp.einsum("bnts,bsnv->bntv", share, v, precision=precision, preferred_element_type=wide)
    return jnp.moveaxis(out, 1, 2), jnp.moveaxis((top + jnp.log(total))[..., 0], 1, 2)
