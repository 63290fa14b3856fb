"""The expanded form of latent attention for the new tokens of prompts: themselves at once, their context in chunks of bounded size.

Parts are joined through their lse, in float32. Each part is one attention of keys (P + r wide) and values (V_h wide) that are
written out for it and forgotten after it: through the ragged kernel where it takes the call, as plain jnp elsewhere.
"""

import functools

import jax
import jax.numpy as jnp
from dflash_kernels import NoImplementationError, latent_decode, merge_states, ragged_attention
from jaxtyping import Array, Float, Int, Shaped

from dflash_jax.attention.mla import LatentLayer, masked_attention_and_lse


def chunked_prefill(
    layer: LatentLayer,
    q_nope: Float[Array, "B T N P"],
    q_pe: Float[Array, "B T N r"],
    latents: Float[Array, "B T C"],
    latent_pages: Shaped[Array, "pages 1 p stored"],
    page_table: Int[Array, "B W"],
    context_lens: Int[Array, "B"],
    q_lens: Int[Array, "B"],
    *,
    context_chunk: int,
    latent_scale: Float[Array, ""] | None = None,
) -> Float[Array, "B T N V"]:
    """New tokens over themselves and over the context in their sequences' pages, expanded.

    The context is taken `context_chunk` tokens at a time, shared evenly by the sequences and rounded down to whole pages, but
    at least one page each. Shapes are static; chunks past the longest context are not computed.

    Args:
      latents: rows of the new tokens, `[kv_c | k_pe]`; those past `q_lens` may hold anything.
      context_lens: tokens of each sequence before the new ones; nothing past them is read from the pages.
      q_lens: new tokens that are real; rows past them give 0.
      latent_scale: of float8 pages; see `dflash_kernels.latent_cache` for the formats.
    """
    b, t = q_nope.shape[:2]
    pages, _, p, stored = latent_pages.shape
    columns = min(max(1, context_chunk // b // p), page_table.shape[1])
    chunk, rank = columns * p, layer.w_uv.shape[-1]
    live = jnp.arange(t) < q_lens[:, None]
    latents = jnp.where(live[:, :, None], latents, jnp.zeros((), latents.dtype))
    attend = functools.partial(
        expanded_part,
        jnp.concatenate([q_nope, q_pe], axis=-1),
        q_lens,
        key_weights(layer, latents),
        layer.w_uv,
        layer.scale,
    )
    new = attend(latents, q_lens, causal=layer.causal)

    # Whole chunks, or the last slice would be shifted back over rows that were seen already.
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % columns)))

    def add(index: Array, seen: tuple[Array, Array]) -> tuple[Array, Array]:
        own = jax.lax.dynamic_slice_in_dim(table, index * columns, columns, axis=1)
        held = jnp.clip(context_lens - index * chunk, 0, chunk)
        rows = latent_pages[jnp.clip(own, 0, pages - 1)].reshape(b, chunk, stored)
        gathered = latent_decode(rows, latents.dtype, kv_lora_rank=rank, scale=latent_scale)
        gathered = jnp.where((jnp.arange(chunk) < held[:, None])[:, :, None], gathered, jnp.zeros((), gathered.dtype))
        return merge_states(*seen, *attend(gathered, held, causal=False))

    wide = jnp.promote_types(q_nope.dtype, jnp.float32)
    chunks = (jnp.max(context_lens, initial=0) + chunk - 1) // chunk
    with jax.named_scope("latent_context"):
        out, _ = jax.lax.fori_loop(0, chunks, add, (new[0].astype(wide), new[1].astype(wide)))
    return jnp.where(live[:, :, None, None], out, 0).astype(q_nope.dtype)


def key_weights(layer: LatentLayer, latents: Float[Array, "B T C"]) -> Float[Array, "N h C"]:
    """From a whole latent row to a head's whole key: `w_uk`, and ones that carry the rotated part over.

    A product with these writes keys as attention reads them; up-projecting first would write them twice.
    """
    n, _, rank = layer.w_uk.shape
    rotated = latents.shape[-1] - rank
    carried = jnp.eye(rotated, rank + rotated, k=rank, dtype=latents.dtype)
    up = jnp.pad(layer.w_uk.astype(latents.dtype), ((0, 0), (0, 0), (0, rotated)))
    return jnp.concatenate([up, jnp.broadcast_to(carried, (n, *carried.shape))], axis=1)


def expanded_part(
    q: Float[Array, "B T N h"],
    q_lens: Int[Array, "B"],
    w_k: Float[Array, "N h C"],
    w_uv: Float[Array, "N V R"],
    scale: float,
    latents: Float[Array, "B S C"],
    kv_lens: Int[Array, "B"],
    *,
    causal: bool,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Output and lse of the first `q_lens` queries over the first `kv_lens` rows. Other rows must be finite; other queries give
    anything, lse included, but a query that sees no row gives lse -inf.
    """
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.promote_types(q.dtype, jnp.float32) else None
    k = jnp.einsum("bsc,nhc->bsnh", latents, w_k, precision=precision)
    v = jnp.einsum("bsr,nvr->bsnv", latents[..., : w_uv.shape[-1]], w_uv.astype(latents.dtype), precision=precision)
    try:
        packed = (_pack(rows, lens) for rows, lens in ((q, q_lens), (k, kv_lens), (v, kv_lens)))
        starts = (jnp.pad(jnp.cumsum(lens), (1, 0)).astype(jnp.int32) for lens in (q_lens, kv_lens))
        out, lse = ragged_attention(
            *packed, *starts, causal=causal, scale=scale, return_lse=True, implementation="mosaic_gpu"
        )
        return _unpack(out, q_lens, q.shape[1]), _unpack(lse, q_lens, q.shape[1])
    except NoImplementationError:
        rows, keys = jnp.arange(q.shape[1]), jnp.arange(k.shape[1])
        visible = (rows < q_lens[:, None])[:, :, None] & (keys < kv_lens[:, None])[:, None]
        if causal:
            visible &= keys <= rows[:, None] + (kv_lens - q_lens)[:, None, None]
        return masked_attention_and_lse(q, k, v, visible, scale)


def _pack(rows: Float[Array, "B S *x"], lens: Int[Array, "B"]) -> Float[Array, "rows *x"]:
    """The first `lens` rows of each sequence after those of the one before; the rest is padding."""
    b, s = rows.shape[:2]
    flat = rows.reshape(b * s, *rows.shape[2:])
    if b == 1:
        return flat
    ends = jnp.cumsum(lens)
    place = jnp.arange(b * s)
    owner = jnp.minimum(jnp.searchsorted(ends, place, side="right"), b - 1)
    return flat[jnp.clip(owner * s + place - (ends - lens)[owner], 0, b * s - 1)]


def _unpack(packed: Float[Array, "rows *x"], lens: Int[Array, "B"], s: int) -> Float[Array, "B S *x"]:
    """Packed rows back in place; the rows past `lens` hold anything."""
    if lens.shape == (1,):
        return packed[None]
    rows = (jnp.cumsum(lens) - lens)[:, None] + jnp.arange(s)
    return packed[jnp.clip(rows, 0, packed.shape[0] - 1)]
