"""The expanded form of latent attention for the new tokens of prompts, their context in chunks of bounded size.

Each chunk's keys (P + r wide) and values (V_h wide) are written out from its latent rows and forgotten after one attention over
them: through kernels where there are any that take the call, as plain jnp elsewhere. The last chunk of a sequence holds its new
tokens and as much of the context before them as fits; a context that fits whole needs no other. Parts are joined through their lse,
in float32.
"""

import functools

import jax
import jax.numpy as jnp
from dflash_kernels import (
    NoImplementationError,
    dequantize_tensor,
    latent_decode,
    latent_expand,
    merge_states,
    quantize_tensor,
    ragged_attention,
)
from jaxtyping import Array, Float, Int, Shaped

from dflash_jax.attention.context_parallel import gathered_pages
from dflash_jax.attention.mla import LatentLayer, masked_attention_and_lse

_TILE = 128  # rows


def chunked_prefill(
    layer: LatentLayer,
    q_nope: Float[Array, "B T N P"],
    q_pe: Float[Array, "B T N r"],
    latent_pages: Shaped[Array, "pages 1 p stored"],
    page_table: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    q_lens: Int[Array, "B"],
    *,
    context_chunk: int,
    latent_scale: Float[Array, ""] | None = None,
    dealt: int = 1,
    interleave: int | None = None,
    float8: bool = False,
) -> Float[Array, "B T N V"]:
    """New tokens over their sequences' pages, which hold the new tokens' own rows already, expanded.

    Rows are taken `context_chunk` at a time, shared evenly by the sequences and rounded down to whole pages, but at least as many
    pages as the new tokens can lie in. Shapes are static; chunks that no sequence has are not computed.

    Args:
      seq_lens: rows of each sequence, the new ones included; nothing past them is read from the pages.
      q_lens: new tokens that are real; rows past them may hold anything and give 0.
      latent_scale: of float8 pages; see `dflash_kernels.kv_cache.latent` for the formats.
      dealt: ranks that have a part each of every page. A chunk's rows are gathered from all.
      interleave: tokens on one of these before the next one's begin; None for a rank's part of a page.
      float8: queries, keys and values are rounded to float8 on a scale of 1 before they attend.
    """
    b, t = q_nope.shape[:2]
    p, width = dealt * latent_pages.shape[2], page_table.shape[1]
    spread = dealt, latent_pages.shape[2] if interleave is None else interleave
    columns = min(max(context_chunk // b // p, -(-t // p) + 1), width)
    chunk = columns * p
    # The last chunk of a sequence, as full as whole pages allow.
    last = jnp.maximum(-(-seq_lens // p) - columns, 0) * p
    rows = functools.partial(
        expanded_rows, layer, latent_pages, page_table, latent_scale, q_nope.dtype, columns, spread, float8
    )
    q = jnp.concatenate([q_nope, q_pe], axis=-1)
    attend = functools.partial(attention_and_lse, in_float8(q) if float8 else q, q_lens, layer.scale)
    out, lse = attend(*rows(last, seq_lens - last), seq_lens - last, causal=layer.causal)
    if columns < width:
        wide = jnp.promote_types(q_nope.dtype, jnp.float32)

        def add(index: Array, seen: tuple[Array, Array]) -> tuple[Array, Array]:
            starts = jnp.full_like(last, index * chunk)
            held = jnp.clip(last - starts, 0, chunk)
            return merge_states(*seen, *attend(*rows(starts, held), held, causal=False))

        with jax.named_scope("latent_context"):
            chunks = (jnp.max(last, initial=0) + chunk - 1) // chunk
            out, _ = jax.lax.fori_loop(0, chunks, add, (out.astype(wide), lse.astype(wide)))
    new = jnp.arange(t) < q_lens[:, None]
    return jnp.where(new[..., None, None], out, 0).astype(q_nope.dtype)


def in_float8(x: Float[Array, "*rows H"]) -> Float[Array, "*rows H"]:
    """The nearest float8 (e4m3) number in x's dtype, which what multiplies it takes; past 448 it is that."""
    return dequantize_tensor(quantize_tensor(x, 1.0), dtype=x.dtype)


def expanded_rows(
    layer: LatentLayer,
    latent_pages: Shaped[Array, "pages 1 p stored"],
    page_table: Int[Array, "B W"],
    latent_scale: Float[Array, ""] | None,
    dtype: jnp.dtype,
    columns: int,
    spread: tuple[int, int],
    float8: bool,
    starts: Int[Array, "B"],
    lens: Int[Array, "B"],
) -> tuple[Float[Array, "B S N H"], Float[Array, "B S N V"]]:
    """Keys and values of the first `lens` rows from `starts` on; the others may hold anything. `spread`: ranks that have a part of
    every page, and tokens on one before the next one's begin."""
    dealt, interleave = spread
    p, rank = dealt * latent_pages.shape[2], layer.w_uv.shape[-1]
    if latent_pages.dtype != dtype or dealt > 1:
        # Rows in eight bits are laid out as the kernels read them, and those of other ranks have to come here; pages of their own,
        # one sequence after the other.
        entry = jnp.minimum(starts[:, None] // p + jnp.arange(columns), page_table.shape[1] - 1)
        named = jnp.clip(jnp.take_along_axis(page_table, entry, axis=1), 0, latent_pages.shape[0] - 1).reshape(-1)
        latent_pages = latent_pages[named] if dealt == 1 else gathered_pages(latent_pages, named, dealt, interleave)
        if latent_pages.dtype != dtype:
            latent_pages = latent_decode(latent_pages, dtype, kv_lora_rank=rank, scale=latent_scale)
        page_table = jnp.arange(latent_pages.shape[0], dtype=jnp.int32).reshape(entry.shape[0], -1)
        starts = jnp.zeros_like(starts)
    weights = (weight.astype(dtype) for weight in (layer.w_uk, layer.w_uv))
    # Whole tiles of the kernel, or it would have to cut its result; small chunks stay small.
    rows = columns * p if columns * p < _TILE else -(-columns * p // _TILE) * _TILE
    k, v = latent_expand(latent_pages, page_table, starts, lens, *weights, rows=rows)
    return (in_float8(k), in_float8(v)) if float8 else (k, v)


def attention_and_lse(
    q: Float[Array, "B T N H"],
    q_lens: Int[Array, "B"],
    scale: float,
    k: Float[Array, "B S N H"],
    v: Float[Array, "B S N V"],
    kv_lens: Int[Array, "B"],
    *,
    causal: bool,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Output and lse of the first `q_lens` queries over the first `kv_lens` rows, the last query at the last row.

    Other rows may hold anything. Other queries, and those that see no row, give 0 and lse -inf.
    """
    (b, t), s = q.shape[:2], k.shape[1]
    try:
        cu_q_lens, cu_kv_lens = packed_lens(q_lens, t, kv_lens, s)
        packed_q, packed_k, packed_v = (rows.reshape(-1, *rows.shape[2:]) for rows in (q, k, v))
        out, lse = ragged_attention(
            packed_q, packed_k, packed_v, cu_q_lens, cu_kv_lens, causal=causal, scale=scale, return_lse=True,
            implementation="mosaic_gpu",
        )  # fmt: skip
        return out.reshape(b, t, *out.shape[1:]), lse.reshape(b, t, -1)
    except NoImplementationError:
        rows, keys = jnp.arange(t), jnp.arange(s)
        held = keys < kv_lens[:, None]
        visible = (rows < q_lens[:, None])[:, :, None] & held[:, None]
        if causal:
            visible &= keys <= rows[:, None] + (kv_lens - q_lens)[:, None, None]
        k, v = (jnp.where(held[:, :, None, None], x, jnp.zeros((), x.dtype)) for x in (k, v))
        return masked_attention_and_lse(q, k, v, visible, scale)


def packed_lens(q_lens: Int[Array, "B"], t: int, kv_lens: Int[Array, "B"], s: int) -> tuple[Array, Array]:
    """Starts of packed sequences that stand `t` queries and `s` keys apart: `cu_q_lens` and `cu_kv_lens`.

    Between any two lie queries without keys and keys without queries: a sequence each, which costs nothing.
    """
    b = q_lens.shape[0]
    q_starts, kv_starts = (jnp.arange(b, dtype=jnp.int32) * apart for apart in (t, s))
    q_bounds = jnp.stack([q_starts, q_starts + q_lens, q_starts + t], axis=1)
    kv_bounds = jnp.stack([kv_starts, kv_starts + kv_lens, kv_starts + kv_lens], axis=1)
    # What comes after the last sequence is padding already.
    return q_bounds.reshape(-1)[:-1].astype(jnp.int32), kv_bounds.reshape(-1)[:-1].astype(jnp.int32)
