"""Self-attention over pages: write the new tokens' keys and values, then let the queries see the whole sequence."""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from dflash_kernels import (
    AddNorm,
    PagedSchedule,
    attention_chain,
    few_qkv_write,
    few_qkv_write_refusal,
    kv_write,
    latent_encode,
    latent_write,
    mla_write,
    paged_schedule,
    qkv_attention,
    qkv_attention_refusal,
    qkv_write,
    schedule_helps,
    token_attention,
    token_attention_refusal,
)
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.attention.blocks import block_attention
from dflash_jax.attention.cascade import SharedPages, cascade_attention, split_tables
from dflash_jax.attention.compressed import compressed_attention
from dflash_jax.attention.context_parallel import absorbed_over_ranks, most_queries, slots_on_rank
from dflash_jax.attention.context_parallel_heads import heads_over_ranks
from dflash_jax.attention.mla import ABSORBED, LatentForm, LatentLayer, absorbed_attention
from dflash_jax.attention.mla_prefill import chunked_prefill
from dflash_jax.attention.prefill import attend_to_pages
from dflash_jax.cache.groups import LayerTables, of_layer, table_width
from dflash_jax.cache.pages import Pages, slots_of
from dflash_jax.execution import switches
from dflash_jax.models.deepseek import MLAttention
from dflash_jax.models.dflash import DFlash
from dflash_jax.models.layers import Attention, BlockRows, ChoiceRows, Linear, Rotary
from dflash_jax.parallel.collectives import ranks_here


class PagedAttend:
    """An `Attend`, `LatentAttend`, `BlockAttend` and `CompressedAttend` over page pools for T new tokens of each sequence; its
    cache is `Pages`.

    Args:
      page_table: `[B, W]` int32, one row for each sequence, or `cache.groups.LayerTables` of such.
      positions: `[B, T]` int32 of the new tokens, consecutive in each row.
      q_lens: `[B]` int32, new tokens of each sequence that are real; the rest write nothing and give 0.
      page_size: tokens of a page; of a rank's part of it where those are dealt out.
      form: when layers with latent attention expand their rows.
      related: rows may be pieces of one sequence. Then nothing attends before all rows are written.
      heads: query and key heads of layers that attend by calls of their own: where lengths may differ much, one schedule is made
        for all of them.
      narrow: whether all of their pages are of eight bits.
      exact: whether a row's bits are to depend on no other row.
      shared: pages that a sequence begins with and shares with others, see `attention.cascade.split_tables`. Layers of heads
        without a window read these once for all; None where no program is made for it.
      dealt: ranks that have a part each of every page; see `attention.context_parallel`.
      interleave: tokens on one of these before the next one's begin; None for a rank's part of a page.
    """

    def __init__(
        self,
        page_table: Any,
        positions: Int[Array, "B T"],
        q_lens: Int[Array, "B"],
        page_size: int,
        form: LatentForm = ABSORBED,
        *,
        related: bool = False,
        heads: tuple[int, int] | None = None,
        narrow: bool = False,
        exact: bool = False,
        shared: Int[Array, "*groups B"] | None = None,
        dealt: int = 1,
        interleave: int | None = None,
    ):
        self.form, self.related, self.exact = form, related, exact
        self.dealt, self.interleave = dealt, page_size if interleave is None else interleave
        self.page_table, self.q_lens = page_table, q_lens
        self.seq_lens = jnp.where(q_lens > 0, positions[:, 0] + q_lens, 0)
        live = jnp.arange(positions.shape[1]) < q_lens[:, None]
        where = positions, live, page_size
        if dealt == 1:
            self.slots = _flat_slots(page_table, *where)
        else:
            self.slots = slots_on_rank(page_table, *where, dealt, self.interleave).reshape(-1)
        self.rows = positions.size
        # Of each group of layers; what no layer asks for is never computed.
        self.parts = (
            None if shared is None else jax.tree.map(lambda table: split_tables(table, shared, page_size), page_table)
        )
        own = self.seq_lens
        if shared is not None:
            own = jnp.maximum(own - (shared if shared.ndim == 1 else jnp.sum(shared, axis=0)) * page_size, 0)
        self.schedule = None if heads is None or dealt > 1 else self._make_schedule(own, *heads, page_size, narrow)

    def _make_schedule(
        self, lens: Int[Array, "B"], heads: int, kv_heads: int, page_size: int, narrow: bool
    ) -> PagedSchedule | None:
        sequences = lens.shape[0]
        options = {"heads": heads, "kv_heads": kv_heads, "tokens": self.rows // sequences}
        if not schedule_helps(sequences, longest=table_width(self.page_table) * page_size, **options):
            return None
        return paged_schedule(lens, narrow=narrow and switches.NARROW_ITEMS, **options)

    def __call__(self, layer: Attention, qkv: Array, rotary: Rotary, cache: Pages) -> tuple[Array, Pages]:
        i = layer.index
        k, v, table = cache.k[i], cache.v[i], of_layer(self.page_table, i)
        k_scale = cache.k_scale[i] if cache.k_scale else None
        v_scale = cache.v_scale[i] if cache.v_scale else None
        rows, cos, sin = (x.reshape(self.rows, x.shape[-1]) for x in (qkv, *rotary))
        norms: Any = {**dict(zip(("q_norm", "k_norm"), layer.norms, strict=True)), "eps": layer.config.norm_eps}
        if self.dealt > 1:
            return self._over_ranks(layer, qkv, rotary, cache)
        parts = self._parts(layer)
        # Parts dealt out by lengths are worth more than a launch where lengths may differ much.
        alike = k.shape == v.shape  # values may be smaller than keys
        if alike and self.schedule is None and parts is None and self._at_once(layer, qkv, rotary, k):
            out, k, v = qkv_attention(
                k, v, rows, table, self.seq_lens, self.q_lens, cos, sin, causal=layer.causal,
                scale=layer.scale, **norms,
            )  # fmt: skip
            return out, cache.with_layer(i, k=k, v=v)
        if layer.keeps:
            norms |= {"zero_centered": layer.zero_centered, "beside": layer.beside}
            q, k, v, written = qkv_write(
                k, v, rows, of_layer(self.slots, i), cos, sin, k_scale=k_scale, v_scale=v_scale, **norms
            )
            q, cache = q.reshape(*qkv.shape[:2], *q.shape[1:]), cache.with_layer(i, k=k, v=v)
            if written is not None and k.dtype == jnp.int8:
                cache = cache.with_layer(i, k_scale=written)  # of the new keys, too
        else:
            q = layer.queries(qkv, rotary)
        return self._over(layer, q, cache), cache

    def blocks(self, layer: Any, qkv: Array, index: BlockRows, rotary: Rotary, cache: Pages) -> tuple[Array, Pages]:
        """See `BlockAttend`."""
        return block_attention(self, layer, qkv, index, rotary, cache)

    def compressed(
        self, layer: Any, q: Array, row: Array, choice: ChoiceRows | None, cache: Pages
    ) -> tuple[Array, Pages]:
        """See `CompressedAttend`."""
        return compressed_attention(self, layer, q, row, choice, cache)

    def of_rows(
        self, layer: Attention, x: Array, rotary: Rotary, cache: Pages, added: AddNorm | None = None
    ) -> tuple[Array, Array, Pages] | None:
        """x, and the layer's projection of `x [B,T,D]` as well, where that, the rotation and the write are one launch; else None.

        With `added` what it adds and norms, too; then x comes with that.
        """
        i, (weight, bias) = layer.index, _matrix(layer.qkv_proj)
        pool = cache.k[i]
        if bias is None or not self._writes_rows(layer, cache):
            return None
        sizes = {"head_dim": pool.shape[3], "turned": 2 * rotary.cos.shape[-1], "page_dtype": pool.dtype}
        if few_qkv_write_refusal(self.rows, x.dtype, x.shape[-1], **sizes, norms=added is not None) is not None:
            return None
        rows, cos, sin = (one.reshape(self.rows, one.shape[-1]) for one in (x, *rotary))
        given = pool, cache.v[i], rows, weight, bias, of_layer(self.slots, i), cos, sin
        if added is None:
            q, k, v = few_qkv_write(*given)
        else:
            rows, (q, k, v) = few_qkv_write(*given, added=added)
        cache = cache.with_layer(i, k=k, v=v)
        return rows.reshape(x.shape), self._over(layer, q.reshape(*x.shape[:2], *q.shape[1:]), cache), cache

    def of_token(
        self, layer: Attention, x: Array, rotary: Rotary, cache: Pages, added: AddNorm, exchange: Callable[[int], Any]
    ) -> tuple[Array, Array, Pages] | None:
        """See `Attention.mix_token`: of one token, where nothing but speed tells that from separate launches."""
        i, qkv, output = layer.index, *map(_matrix, layer.projections)
        k, v, table = cache.k[i], cache.v[i], of_layer(self.page_table, i)
        if not (switches.TOKEN_ATTENTION and self.rows == 1 and self._writes_rows(layer, cache)):
            return None
        if self.exact or self.parts is not None or not layer.causal or layer.soft_cap is not None:
            return None
        if not isinstance(output[0], jax.Array) or k.shape != v.shape:
            return None
        # Of other dtypes the call would be its definition, which attends by XLA.
        if any(one is not None and one.dtype != x.dtype for one in (*qkv, *output, added.weight)):
            return None
        sizes: Any = {
            "heads": layer.config.num_heads, "kv_heads": k.shape[1], "head_dim": k.shape[3], "turned": 2 * rotary.cos.shape[-1],
            "page_size": k.shape[2], "table_width": table.shape[1], "page_dtype": k.dtype, "hidden": x.shape[-1],
        }  # fmt: skip
        if token_attention_refusal(x.dtype, **sizes, window=layer.window) is not None:
            return None
        rows, cos, sin = (one.reshape(1, one.shape[-1]) for one in (x, *rotary))
        sinks = None if layer.sinks is None else layer.sinks[...]
        parts, rows, k, v = token_attention(
            k, v, rows, qkv, output, table, self.seq_lens, self.q_lens, of_layer(self.slots, i), cos, sin, added=added, sinks=sinks,
            window=layer.window, scale=layer.scale, exchange=exchange(k.shape[1]),
        )  # fmt: skip
        return rows.reshape(x.shape), parts, cache.with_layer(i, k=k, v=v)

    def _writes_rows(self, layer: Attention, cache: Pages) -> bool:
        """Whether the launch of a layer's projection of few rows may write to the pages: heads are rotated and nothing else."""
        i, (weight, bias) = layer.index, _matrix(layer.qkv_proj)
        if not (switches.FEW and isinstance(weight, jax.Array) and bias is not None and layer.keeps):
            return False
        if self.dealt > 1 or ranks_here() > 1 or cache.k[i].dtype != cache.v[i].dtype:
            return False
        return not layer.pairs and not layer.beside and layer.norms[0] is None

    def _over(self, layer: Attention, q: Array, cache: Pages) -> Array:
        """Queries over the pages, which have their own rows already."""
        i = layer.index
        k, v, table, parts = cache.k[i], cache.v[i], of_layer(self.page_table, i), self._parts(layer)
        k_scale = cache.k_scale[i] if cache.k_scale else None
        v_scale = cache.v_scale[i] if cache.v_scale else None
        options: Any = {
            "q_lens": self.q_lens, "causal": layer.causal, "sinks": None if layer.sinks is None else layer.sinks[...],
            "scale": layer.scale, "soft_cap": layer.soft_cap, "k_scale": k_scale, "v_scale": v_scale,
        }  # fmt: skip
        schedule = self.schedule if k.dtype.itemsize > 1 or switches.NARROW_ITEMS else None
        if parts is not None:
            return cast(Array, cascade_attention(q, k, v, parts, self.seq_lens, schedule=schedule, **options))
        # The schedule of a call that shares pages is for what is left of the sequences.
        schedule = schedule if self.parts is None else None
        options |= {"window": layer.window, "schedule": schedule, "batch_invariant": self.exact}
        return attend_to_pages(q, k, v, table, self.seq_lens, **options)

    def _over_ranks(self, layer: Attention, qkv: Array, rotary: Rotary, cache: Pages) -> tuple[Array, Pages]:
        """The same where ranks that have the same key head keep a part each of every page: what lies before the new tokens is
        attended to where it is, and these by whoever has their queries."""
        i, norms = layer.index, dict(zip(("q_norm", "k_norm"), layer.norms, strict=True))
        rows, cos, sin = (x.reshape(self.rows, x.shape[-1]) for x in (qkv, *rotary))
        q, k_pages, v_pages, _ = qkv_write(
            cache.k[i], cache.v[i], rows, of_layer(self.slots, i), cos, sin, eps=layer.config.norm_eps,
            zero_centered=layer.zero_centered, beside=layer.beside, **norms,
        )  # fmt: skip
        q, (_, k, v) = q.reshape(*qkv.shape[:2], *q.shape[1:]), layer.heads(qkv, rotary)
        table, spread = of_layer(self.page_table, i), {"interleave": self.interleave, "scale": layer.scale}
        out = heads_over_ranks(q, k, v, k_pages, v_pages, table, self.seq_lens, self.q_lens, self.dealt, **spread)
        return out, cache.with_layer(i, k=k_pages, v=v_pages)

    def _parts(self, layer: Attention) -> SharedPages | None:
        """Shared prefixes of the layer's sequences, if it reads them once."""
        if self.parts is None or layer.window is not None:
            return None
        return of_layer(self.parts, layer.index)

    def _at_once(self, layer: Attention, qkv: Array, rotary: Rotary, pool: Array) -> bool:
        """Whether norm, rotation, write and attention are one operation."""
        config = layer.config
        if self.related or layer.window is not None or layer.sinks is not None or layer.beside or layer.zero_centered:
            return False
        if layer.soft_cap is not None or not layer.keeps:
            return False
        if not switches.FUSED_QKV or pool.dtype != qkv.dtype:
            return False
        _, kv_heads, page_size, head_dim = pool.shape
        reason = qkv_attention_refusal(
            qkv.shape[0], qkv.shape[1], qkv.dtype, group=config.num_heads // kv_heads, kv_heads=kv_heads, head_dim=head_dim,
            turned=2 * rotary.cos.shape[-1], page_size=page_size, table_width=table_width(self.page_table), causal=layer.causal,
        )  # fmt: skip
        return reason is None

    def in_layer(
        self,
        layer: Attention,
        qkv: Array,
        rotary: Rotary,
        stream: Array,
        weights: tuple[Any, ...],
        scales: Any,
        workspace: Any,
        cache: Pages,
    ) -> tuple[Array, Array | None, Pages]:
        """A whole layer: `attention_chain` with its weights from the output projection on; see `execution.persistent`."""
        i = layer.index
        rows, cos, sin = (x.reshape(self.rows, x.shape[-1]) for x in (qkv, *rotary))
        q_norm, k_norm = layer.norms
        out = attention_chain(
            cache.k[i], cache.v[i], rows, of_layer(self.page_table, i), self.seq_lens, self.q_lens, cos, sin, stream, *weights,
            scales=scales, k_scale=cache.k_scale[i] if cache.k_scale else None,
            v_scale=cache.v_scale[i] if cache.v_scale else None, q_norm=q_norm, k_norm=k_norm,
            exchange=workspace.mailboxes, causal=layer.causal, scale=layer.scale, eps=layer.config.norm_eps,
            **workspace.options,
        )  # fmt: skip
        return out.stream, out.projected, cache.with_layer(i, k=out.k_pages, v=out.v_pages)

    def latent(self, layer: MLAttention, q: Array, row: Array, rotary: Rotary, cache: Pages) -> tuple[Array, Pages]:
        """Latent attention of what the layer projects: rows are normed and rotated on their way into the pages."""
        q_nope, q_pe, cache = self.write_latents(layer, q, row, rotary, cache)
        return self.over_latents(layer, q_nope, q_pe, cache), cache

    def write_latents(
        self, layer: MLAttention, q: Array, row: Array, rotary: Rotary, cache: Pages
    ) -> tuple[Array, Array, Pages]:
        """Both parts of the queries, rotated, and the pages with the new rows."""
        i, config = layer.index, layer.config
        rows, queries, cos, sin = (x.reshape(-1, *x.shape[2:]) for x in (row, q, *rotary))
        queries, pool = mla_write(
            cache.k[i], rows, queries, of_layer(self.slots, i), cos, sin, norm=layer.kv_a_norm.weight[...], eps=layer.kv_a_norm.eps,
            interleaved=config.rope_interleaved, latent_scale=cache.k_scale[i] if cache.k_scale else None,
        )  # fmt: skip
        q_nope, q_pe = jnp.split(queries.reshape(q.shape), [config.qk_nope_head_dim], axis=-1)
        return q_nope, q_pe, cache.with_layer(i, k=pool)

    def latent_parts(
        self, layer: LatentLayer, q_nope: Array, q_pe: Array, kv_c: Array, k_pe: Array, cache: Pages
    ) -> tuple[Array, Pages]:
        """The same of rows that are normed and rotated: `q_nope [B,T,N,P]`, `q_pe [B,T,N,r]`, `kv_c [B,T,R]`, `k_pe [B,T,r]`."""
        cache = self.write_parts(layer, kv_c, k_pe, cache)
        return self.over_latents(layer, q_nope, q_pe, cache), cache

    def write_parts(self, layer: LatentLayer, kv_c: Array, k_pe: Array, cache: Pages) -> Pages:
        """The pages with the new rows, of which these are both parts, normed and rotated."""
        i, rank = layer.index, kv_c.shape[-1]
        latents, pool = jnp.concatenate([kv_c, k_pe], axis=-1), cache.k[i]
        scale = cache.k_scale[i] if cache.k_scale else None
        stored = latent_encode(latents, pool.dtype, kv_lora_rank=rank, scale=scale)
        return cache.with_layer(i, k=latent_write(pool, stored.reshape(-1, stored.shape[-1]), of_layer(self.slots, i)))

    def over_latents(self, layer: LatentLayer, q_nope: Array, q_pe: Array, cache: Pages) -> Array:
        """The queries over their sequences' pages, which hold the queries' own rows already."""
        pool, rank = cache.k[layer.index], layer.w_uv.shape[-1]
        scale = cache.k_scale[layer.index] if cache.k_scale else None
        q_scale = cache.q_scale[layer.index] if cache.q_scale else None
        tokens, heads, nope = q_nope.shape[1:]
        expands = self.form.expands(tokens, heads=heads, rank=rank, nope=nope, value=layer.w_uv.shape[1])
        if self.dealt > 1 and not expands and tokens <= most_queries(self.dealt, self.interleave):
            return absorbed_over_ranks(
                layer, q_nope, q_pe, pool, self.page_table, self.seq_lens, self.q_lens, self.dealt, self.interleave,
                latent_scale=scale,
            )  # fmt: skip
        if self.dealt == 1 and not expands:
            return absorbed_attention(
                layer,
                q_nope,
                q_pe,
                pool,
                self.page_table,
                self.seq_lens,
                self.q_lens,
                latent_scale=scale,
                q_scale=q_scale,
            )
        row = heads * (nope + q_pe.shape[-1] + layer.w_uv.shape[1]) * q_nope.dtype.itemsize
        return chunked_prefill(
            layer, q_nope, q_pe, pool, self.page_table, self.seq_lens, self.q_lens,
            context_chunk=self.form.chunk(row), latent_scale=scale, dealt=self.dealt, interleave=self.interleave,
            float8=q_scale is not None,
        )  # fmt: skip


def _matrix(layer: Linear) -> tuple[Any, Array | None]:
    """A matrix as it is stored, and its bias where it has one."""
    return layer.weight[...], None if layer.bias is None else layer.bias[...]


def write_context(
    drafter: DFlash,
    pages: Pages,
    page_table: Any,
    products: Float[Array, "B C F"],
    positions: Int[Array, "B C"],
    live: Bool[Array, "B C"],
) -> Pages:
    """The drafter's pools with the keys and values of all its layers, from `drafter.context_products`.

    Tokens that are not live write nothing. `page_table` may be `cache.groups.LayerTables`.
    """
    slots = _flat_slots(page_table, positions, live, pages.page_size)
    with jax.named_scope("draft_context"):
        projected = (drafter.context_rows(products), *drafter.rotary(positions))
        kv, cos, sin = (x.reshape(positions.size, x.shape[-1]) for x in projected)
        sides: Any = {"k_norm": drafter.context_norms}
        if pages.k_scale:
            sides |= {"k_scale": pages.k_scale, "v_scale": pages.v_scale}
        if not isinstance(slots, LayerTables):
            k, v, _ = kv_write(pages.k, pages.v, kv, slots, cos, sin, eps=drafter.config.norm_eps, **sides)
            return dataclasses.replace(pages, k=k, v=v)
        of_layers = kv.reshape(kv.shape[0], len(pages.k), -1)
        for group, own in enumerate(slots.tables):
            layers = [i for i, other in enumerate(slots.groups) if other == group]
            if not layers:
                continue
            theirs = {name: each and tuple(each[i] for i in layers) for name, each in sides.items()}
            k, v, _ = kv_write(
                tuple(pages.k[i] for i in layers), tuple(pages.v[i] for i in layers),
                jnp.concatenate([of_layers[:, i] for i in layers], axis=1), own, cos, sin,
                eps=drafter.config.norm_eps, **theirs,
            )  # fmt: skip
            for place, i in enumerate(layers):
                pages = pages.with_layer(i, k=k[place], v=v[place])
    return pages


def _flat_slots(tables: Any, positions: Int[Array, "B T"], live: Bool[Array, "B T"], page_size: int) -> Any:
    """`slots_of` in one row, for every table of `LayerTables`."""
    return jax.tree.map(lambda table: slots_of(table, positions, live, page_size).reshape(-1), tables)
