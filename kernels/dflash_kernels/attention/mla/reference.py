"""The definition in jnp: gather the pages, mask, softmax in float32. Every other implementation is judged against it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def mla_attention_reference(
    q: Float[Array, "B T N C"],
    latent_pages: Float[Array, "P 1 p C"],
    page_table: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    q_lens: Int[Array, "B"],
    *,
    kv_lora_rank: int,
    scale: float | Float[Array, ""],
    causal: bool,
    limits: tuple[Int[Array, "B"], Int[Array, "B"]] | None = None,
    latent_scale: Float[Array, ""] | None = None,
) -> tuple[Float[Array, "B T N R"], Float[Array, "B T N"]]:
    """See `mla_attention`."""
    b, t, _, width = q.shape
    pages, _, p, _ = latent_pages.shape
    wide = jnp.promote_types(q.dtype, jnp.float32)
    precision = jax.lax.Precision.HIGHEST if q.dtype == wide else None

    keys, rows = jnp.arange(page_table.shape[1] * p), jnp.arange(t)
    fewest, most = (None, seq_lens) if limits is None else limits
    held = keys < most[:, None]  # [B, S]
    visible = held[:, None] & (rows < q_lens[:, None])[:, :, None]
    if causal:
        seen = (seq_lens - q_lens)[:, None] + rows + 1
        seen = seen if fewest is None else jnp.maximum(seen, fewest[:, None])
        visible &= keys < seen[:, :, None]

    # Rows no query may see can hold NaN, and 0 * NaN is NaN: they are replaced, not weighted.
    latents = latent_pages[jnp.clip(page_table, 0, pages - 1)].reshape(b, -1, width)
    if latent_scale is not None:
        latents = latents.astype(wide) * latent_scale.astype(wide)
    latents = latents.astype(q.dtype)
    latents = jnp.where(held[:, :, None], latents, jnp.zeros((), latents.dtype))
    scores = jnp.einsum("btnc,bsc->bnts", q, latents, precision=precision, preferred_element_type=wide) * scale
    scores = jnp.where(visible[:, None], scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    share = (weights / jnp.where(total > 0, total, 1.0)).astype(latents.dtype)
    values = latents[:, :, :kv_lora_rank]
    out = jnp.einsum("bnts,bsr->bntr", share, values, precision=precision, preferred_element_type=wide)
    lse = (top + jnp.log(total))[..., 0]
    return jnp.moveaxis(out, 1, 2).astype(q.dtype), jnp.moveaxis(lse, 1, 2)
