"""Attention of the training passes. Each has a plain counterpart in `dflash_jax.attention.dense` that tests hold it to."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.attention.dense import masked_attention
from dflash_jax.models.layers import Attend, Attention, Cache, Rotary


def causal_attend() -> Attend:
    """Full causal attention through cuDNN on a GPU, through XLA elsewhere."""
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"

    def attend(layer: Attention, qkv: Array, rotary: Rotary, cache: Cache = None) -> tuple[Array, Cache]:
        q, k, v = layer.heads(qkv, rotary)
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=layer.scale, implementation=implementation)
        return out, cache

    return attend


def block_attend(
    anchors: Int[Array, "B A"], context: tuple[Float[Array, "L B C K H"], Float[Array, "L B C K H"]], block: int
) -> Attend:
    """Attention of draft blocks in training: a slot sees the context strictly before its block's anchor, and its own block in both
    directions.

    Scores between different blocks are not computed. The layer's rows are whole sequences of blocks, or blocks: `[B, A*G, D]` or
    `[B*A, G, D]`.
    """

    def attend(layer: Attention, qkv: Array, rotary: Rotary, cache: Cache = None) -> tuple[Array, Cache]:
        q, k, v = layer.heads(qkv, rotary)
        keys, values = context[0][layer.index], context[1][layer.index]
        (b, a), (n, h), heads = anchors.shape, q.shape[2:], k.shape[2]
        grouped = q.reshape(b, a, block, heads, n // heads, h)
        own_k, own_v = (x.reshape(b, a, block, heads, h) for x in (k, v))
        to_context = jnp.einsum("bagkrh,bskh->bkrags", grouped, keys).astype(jnp.float32)
        to_block = jnp.einsum("bagkrh,bajkh->bkragj", grouped, own_k).astype(jnp.float32)
        before = jnp.arange(keys.shape[1]) < anchors[:, :, None]
        to_context = jnp.where(before[:, None, None, :, None, :], to_context, -jnp.inf)
        weights = jax.nn.softmax(jnp.concatenate([to_context, to_block], axis=-1) * layer.scale, axis=-1).astype(
            q.dtype
        )
        on_context, on_block = jnp.split(weights, [keys.shape[1]], axis=-1)
        out = jnp.einsum("bkrags,bskh->bagkrh", on_context, values) + jnp.einsum(
            "bkragj,bajkh->bagkrh", on_block, own_v
        )
        return out.reshape(q.shape), cache

    return attend


type KeysValues = tuple[tuple[Array, ...], tuple[Array, ...]]


def growing_attend(at: Int[Array, ""] | int) -> Attend:
    """Attention of tokens from position `at` on; its cache is the keys and the values of all layers in arrays of a fixed length."""

    def attend(layer: Attention, qkv: Array, rotary: Rotary, cache: KeysValues) -> tuple[Array, KeysValues]:
        q, k, v = layer.heads(qkv, rotary)
        i, start = layer.index, (0, at, 0, 0)
        keys, values = (
            (*kept[:i], jax.lax.dynamic_update_slice(kept[i], new, start), *kept[i + 1 :])
            for kept, new in zip(cache, (k, v), strict=True)
        )
        ends = at + jnp.arange(q.shape[1])
        visible = jnp.arange(keys[i].shape[1])[None, :] <= ends[:, None]
        return masked_attention(q, keys[i], values[i], visible[None], layer.scale), (keys, values)

    return attend
