"""Self-attention over pages: write the new tokens' keys and values, then let the queries see the whole sequence."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from dflash_kernels import (
    PagedSchedule,
    attention_chain,
    kv_write,
    latent_encode,
    latent_write,
    mla_write,
    paged_schedule,
    qkv_attention,
    qkv_attention_refusal,
    qkv_write,
    schedule_helps,
)
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.attention.mla import ABSORBED, LatentForm, LatentLayer, absorbed_attention
from dflash_jax.attention.mla_prefill import chunked_prefill
from dflash_jax.attention.prefill import attend_to_pages
from dflash_jax.cache.pages import Pages, slots_of
from dflash_jax.models.deepseek import MLAttention
from dflash_jax.models.dflash import DFlash
from dflash_jax.models.layers import Attention, Rotary

# Norm, rotation, write and attention of few tokens as one launch, where there is one; False for comparisons.
FUSED_QKV = True


class PagedAttend:
    """An `attend` over a page pool for T new tokens of each sequence.

    The pools change while a model is traced: read `pages` after the model's call.

    Args:
      pages: the model's pools.
      page_table: `[B, W]` int32, one row for each sequence.
      positions: `[B, T]` int32 of the new tokens, consecutive in each row.
      q_lens: `[B]` int32, new tokens of each sequence that are real; the rest write nothing and give 0.
      form: when layers with latent attention expand their rows.
      related: rows may be pieces of one sequence. Then nothing attends before all rows are written.
    """

    def __init__(
        self,
        pages: Pages,
        page_table: Int[Array, "B W"],
        positions: Int[Array, "B T"],
        q_lens: Int[Array, "B"],
        form: LatentForm = ABSORBED,
        *,
        related: bool = False,
    ):
        self.form, self._pages, self.related = form, pages, related
        self._k, self._v, self._k_scale = list(pages.k), list(pages.v), list(pages.k_scale)
        self.page_table, self.q_lens = page_table, q_lens
        self.seq_lens = jnp.where(q_lens > 0, positions[:, 0] + q_lens, 0)
        live = jnp.arange(positions.shape[1]) < q_lens[:, None]
        self.slots = slots_of(page_table, positions, live, pages.page_size).reshape(-1)
        self._schedule: PagedSchedule | None = None

    def __call__(self, layer: Attention, qkv: Array, rotary: Rotary) -> Array:
        i = layer.index
        k_scale = self._k_scale[i] if self._k_scale else None
        v_scale = self._pages.v_scale[i] if self._pages.v_scale else None
        rows, cos, sin = (x.reshape(self.slots.shape[0], x.shape[-1]) for x in (qkv, *rotary))
        norms: Any = {**dict(zip(("q_norm", "k_norm"), layer.norms, strict=True)), "eps": layer.config.norm_eps}
        # Parts dealt out by lengths are worth more than a launch where lengths may differ much.
        schedule = self._shared(layer)
        if schedule is None and self._at_once(layer, qkv, rotary):
            out, self._k[i], self._v[i] = qkv_attention(
                self._k[i], self._v[i], rows, self.page_table, self.seq_lens, self.q_lens, cos, sin, causal=layer.causal,
                scale=layer.scale, **norms,
            )  # fmt: skip
            return out
        q, self._k[i], self._v[i], written = qkv_write(
            self._k[i], self._v[i], rows, self.slots, cos, sin, k_scale=k_scale, v_scale=v_scale, **norms
        )  # fmt: skip
        if written is not None and self._k[i].dtype == jnp.int8:
            k_scale = self._k_scale[i] = written  # of the new keys, too
        return attend_to_pages(
            q.reshape(*qkv.shape[:2], *q.shape[1:]), self._k[i], self._v[i], self.page_table, self.seq_lens,
            q_lens=self.q_lens, causal=layer.causal, window=layer.window,
            sinks=None if layer.sinks is None else layer.sinks[...], scale=layer.scale,
            k_scale=k_scale, v_scale=v_scale, schedule=schedule,
        )  # fmt: skip

    def _at_once(self, layer: Attention, qkv: Array, rotary: Rotary) -> bool:
        """Whether norm, rotation, write and attention are one operation."""
        pool, config = self._k[layer.index], layer.config
        if self.related or layer.window is not None or layer.sinks is not None or layer.q_norm is None:
            return False
        if not FUSED_QKV or pool.dtype != qkv.dtype:
            return False
        _, kv_heads, page_size, head_dim = pool.shape
        reason = qkv_attention_refusal(
            qkv.shape[0], qkv.shape[1], qkv.dtype, group=config.num_heads // kv_heads, kv_heads=kv_heads, head_dim=head_dim,
            turned=2 * rotary.cos.shape[-1], page_size=page_size, table_width=self.page_table.shape[1], causal=layer.causal,
        )  # fmt: skip
        return reason is None

    def chain(
        self,
        layer: Attention,
        qkv: Array,
        rotary: Rotary,
        stream: Array,
        weights: tuple[Any, ...],
        scales: Any,
        exchange: Any,
    ) -> tuple[Array, Array | None]:
        """A whole layer: `attention_chain` with its weights from `o` on, to the stream and the next projection."""
        i = layer.index
        rows, cos, sin = (x.reshape(self.slots.shape[0], x.shape[-1]) for x in (qkv, *rotary))
        k_scale = self._pages.k_scale[i] if self._pages.k_scale else None
        v_scale = self._pages.v_scale[i] if self._pages.v_scale else None
        q_norm, k_norm = (cast(Array, one) for one in layer.norms)  # plans take no layer without them
        out = attention_chain(
            self._k[i], self._v[i], rows, self.page_table, self.seq_lens, self.q_lens, cos, sin, stream, *weights,
            scales=scales, k_scale=k_scale, v_scale=v_scale, q_norm=q_norm, k_norm=k_norm,
            exchange=exchange, causal=layer.causal, scale=layer.scale, eps=layer.config.norm_eps,
        )  # fmt: skip
        self._k[i], self._v[i] = out.k_pages, out.v_pages
        return out.stream, out.projected

    def _shared(self, layer: Attention) -> PagedSchedule | None:
        """The schedule of all layers, made for the first."""
        config, tokens = layer.config, self.slots.shape[0] // self.q_lens.shape[0]
        heads = {"heads": config.num_heads, "kv_heads": config.num_kv_heads}
        longest = self.page_table.shape[1] * self._pages.page_size
        sequences = self.seq_lens.shape[0]
        if self._schedule is None and schedule_helps(sequences, tokens=tokens, longest=longest, **heads):
            self._schedule = paged_schedule(self.seq_lens, tokens=tokens, **heads)
        return self._schedule

    def latent(self, layer: LatentLayer, q_nope: Array, q_pe: Array, kv_c: Array, k_pe: Array) -> Array:
        """Latent attention: `q_nope [B,T,N,P]`, `q_pe [B,T,N,r]`, `kv_c [B,T,R]` and `k_pe [B,T,r]` to `[B,T,N,V_h]`."""
        i, rank = layer.index, kv_c.shape[-1]
        latents, pool = jnp.concatenate([kv_c, k_pe], axis=-1), self._k[i]
        scale = self._pages.k_scale[i] if self._pages.k_scale else None
        stored = latent_encode(latents, pool.dtype, kv_lora_rank=rank, scale=scale)
        self._k[i] = latent_write(pool, stored.reshape(-1, stored.shape[-1]), self.slots)
        return self._over_latents(layer, q_nope, q_pe)

    def latent_rows(self, layer: MLAttention, q: Array, row: Array, rotary: Rotary) -> Array:
        """Latent attention of what the layer projects, `q [B,T,N,P+r]` and `row [B,T,R+r]`, to `[B,T,N,V_h]`."""
        i, config = layer.index, layer.config
        rows, queries, cos, sin = (x.reshape(-1, *x.shape[2:]) for x in (row, q, *rotary))
        queries, self._k[i] = mla_write(
            self._k[i], rows, queries, self.slots, cos, sin, norm=layer.kv_a_norm.weight[...], eps=layer.kv_a_norm.eps,
            interleaved=config.rope_interleaved, latent_scale=self._pages.k_scale[i] if self._pages.k_scale else None,
        )  # fmt: skip
        return self._over_latents(layer, *jnp.split(queries.reshape(q.shape), [config.qk_nope_head_dim], axis=-1))

    def _over_latents(self, layer: LatentLayer, q_nope: Array, q_pe: Array) -> Array:
        """The queries over their sequences' pages, which hold the queries' own rows already."""
        pool, rank = self._k[layer.index], layer.w_uv.shape[-1]
        scale = self._pages.k_scale[layer.index] if self._pages.k_scale else None
        tokens, heads, nope = q_nope.shape[1:]
        if not self.form.expands(tokens, heads=heads, rank=rank, nope=nope, value=layer.w_uv.shape[1]):
            return absorbed_attention(
                layer, q_nope, q_pe, pool, self.page_table, self.seq_lens, self.q_lens, latent_scale=scale
            )
        row = heads * (nope + q_pe.shape[-1] + layer.w_uv.shape[1]) * q_nope.dtype.itemsize
        return chunked_prefill(
            layer, q_nope, q_pe, pool, self.page_table, self.seq_lens, self.q_lens,
            context_chunk=self.form.chunk(row), latent_scale=scale,
        )  # fmt: skip

    @property
    def pages(self) -> Pages:
        return dataclasses.replace(self._pages, k=tuple(self._k), v=tuple(self._v), k_scale=tuple(self._k_scale))


def write_context(
    drafter: DFlash,
    pages: Pages,
    page_table: Int[Array, "B W"],
    products: Float[Array, "B C F"],
    positions: Int[Array, "B C"],
    live: Bool[Array, "B C"],
) -> Pages:
    """The drafter's pools with the keys and values of all its layers, from `drafter.context_products`.

    Tokens that are not live write nothing.
    """
    slots = slots_of(page_table, positions, live, pages.page_size).reshape(-1)
    with jax.named_scope("draft_context"):
        projected = (products, *drafter.rotary(positions))
        kv, cos, sin = (x.reshape(slots.shape[0], x.shape[-1]) for x in projected)
        k, v, _ = kv_write(
            pages.k, pages.v, kv, slots, cos, sin, k_norm=drafter.context_norms, eps=drafter.config.norm_eps
        )
    return dataclasses.replace(pages, k=k, v=v)
