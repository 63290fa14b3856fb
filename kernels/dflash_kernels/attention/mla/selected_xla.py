"""Many query tokens in XLA's operations, some at a time: each gathers rows of its own, 2 MB of them for DeepSeek's 2,048."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from dflash_kernels.attention.mla.selected_reference import WORKSPACE, mla_selected_reference


def mla_selected_xla(
    q: Float[Array, "B T N C"],
    latent_pages: Shaped[Array, "P 1 p stored"],
    slots: Int[Array, "B T K"],
    *,
    kv_lora_rank: int,
    scale: float | Float[Array, ""],
    latent_scale: Float[Array, ""],
    workspace: int = WORKSPACE,
) -> tuple[Float[Array, "B T N R"], Float[Array, "B T N"]]:
    """See `mla_selected_attention`."""
    (b, t, heads, width), count = q.shape, slots.shape[2]
    stored = latent_pages.shape[3] * latent_pages.dtype.itemsize
    token = count * (stored + width * q.dtype.itemsize + heads * (8 + q.dtype.itemsize))
    some, options = (
        max(workspace // token, 1),
        {"kv_lora_rank": kv_lora_rank, "scale": scale, "latent_scale": latent_scale},
    )
    if b * t <= some:
        return mla_selected_reference(q, latent_pages, slots, **options)
    parts = -(-b * t // some)
    flat_q, flat_slots = q.reshape(b * t, heads, width), slots.reshape(b * t, count)
    missing = parts * some - b * t
    flat_q = jnp.pad(flat_q, ((0, missing), (0, 0), (0, 0)))
    flat_slots = jnp.pad(flat_slots, ((0, missing), (0, 0)), constant_values=-1)

    def attend(part: tuple[Array, Array]) -> tuple[Array, Array]:
        return mla_selected_reference(part[0][None], latent_pages, part[1][None], **options)

    parted = flat_q.reshape(parts, some, heads, width), flat_slots.reshape(parts, some, count)
    out, lse = jax.lax.map(attend, parted)
    out, lse = (x.reshape(parts * some, heads, -1)[: b * t].reshape(b, t, heads, -1) for x in (out, lse))
    return out, lse[..., 0]
