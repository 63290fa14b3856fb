"""The Hopper kernel dealt out by a `PagedSchedule`: a CTA for each part, and no second launch that puts parts together."""

# Pallas declares what it inlines with the context that it passes itself.
# pyright: reportCallIssue=false, reportPrivateImportUsage=false

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.attention.paged.launch import ROWS, Launch
from dflash_kernels.attention.paged.mosaic_gpu_ops import scratch
from dflash_kernels.attention.paged.mosaic_gpu_sm90 import Block
from dflash_kernels.attention.paged.schedule import PagedSchedule

_SCALAR = plgpu.Layout.WG_SPLAT(())


def attention_by_items(
    launch: Launch, schedule: PagedSchedule, q: jax.Array, k_pages: jax.Array, v_pages: jax.Array,
    slopes: jax.Array | None, table: jax.Array, seq_lens: jax.Array, q_lens: jax.Array, interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Runs the kernel; arguments as for `mosaic_gpu_kernel.attention`.

    Returns:
      Output `[B, T, K, G, H]` and natural lse `[B, K, 1, 64]` float32 of all parts together.
    """
    b, rows = q.shape[0], launch.tokens * launch.group
    arrays = {"q": q, "k": k_pages, "v": v_pages, "slopes": slopes, "items": schedule.items}
    arrays |= {"table": table, "seq_lens": seq_lens, "q_lens": q_lens}
    given = {name: array for name, array in arrays.items() if array is not None}
    held = (schedule.arrived,) if interpret is None else ()
    names = [*given, *(["arrived"] if held else []), "o", "lse", "parts"]

    def body(*refs, **buffers):
        _Item(launch, dict(zip(names, refs, strict=True)), buffers, interpret).run()

    out, lse, parts = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((b, launch.tokens, launch.kv_heads, launch.group, launch.head_dim), q.dtype),
            jax.ShapeDtypeStruct((launch.items, launch.kv_heads, ROWS), jnp.float32),
            jax.ShapeDtypeStruct((launch.items, launch.kv_heads, rows, launch.head_dim), jnp.float32),
        ),
        scratch_types=scratch(launch, q.dtype, interpret),
        grid=(launch.items, launch.kv_heads), grid_names=("item", "heads"),
        num_threads=1, thread_name="wg",
        # Row reductions of a matrix tile stay within a warp: no scratch, which two CTAs on a multiprocessor have no room for.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(*given.values(), *held)  # fmt: skip
    whole = _whole_lse(schedule.items, lse, b)
    return out if interpret is None else _put_together(schedule.items, parts, lse, whole, q), whole[:, :, None]


class _Item(Block):
    """One CTA's work."""

    def _place(self):
        self.item, items = lax.axis_index("item"), self.refs["items"]
        self.count = items[self.item, 2]
        return items[self.item, 0], items[self.item, 1], jnp.maximum(self.count, 1)

    def run(self):
        pl.when(self.count > 0)(super().run)

    def _nothing(self):
        lse = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
        shape = (ROWS, self.launch.head_dim)
        self._write(plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA), lse)

    def _lse_row(self):
        return self.refs["lse"].at[self.item, self.head]

    def _settle(self):
        buffers, rows = self.buffers, self.launch.tokens * self.launch.group
        if self.interpret is not None:
            # The interpreter has no counters that CTAs share.
            self.refs["parts"].at[self.item, self.head][...] = buffers["o_sm"].at[0][pl.ds(0, rows)]
            return

        from dflash_kernels.mosaic_gpu import combine as settling

        @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * 5, *[_SCALAR] * 3))
        def settle(_ctx, *operands):
            settling.combine_last(*operands, rows)

        refs = self.refs
        settle(
            buffers["o_sm"].at[0], refs["o"].at[self.b].at[:, self.head], refs["parts"].at[:, self.head],
            refs["lse"].at[:, self.head], refs["arrived"].at[self.b * self.launch.kv_heads + self.head], self.item, self.split,
            self.count,
        )  # fmt: skip


def _own(items: jax.Array, b: int) -> jax.Array:
    """`[B, I, 1, 1]`, whether a part is a sequence's."""
    return ((items[:, 0] == jnp.arange(b)[:, None]) & (items[:, 2] > 0))[..., None, None]


def _whole_lse(items: jax.Array, lse: jax.Array, b: int) -> jax.Array:
    """`[B, K, 64]` of parts' `[I, K, 64]`."""
    return jax.nn.logsumexp(jnp.where(_own(items, b), lse, -jnp.inf), axis=1)


def _put_together(items: jax.Array, parts: jax.Array, lse: jax.Array, whole: jax.Array, q: jax.Array) -> jax.Array:
    base = jnp.where(whole == -jnp.inf, 0.0, whole)[:, None]
    weights = jnp.where(_own(items, q.shape[0]), jnp.exp(lse - base), 0.0)[..., : parts.shape[2], None]
    out = jnp.where(weights > 0, weights * parts, 0.0).sum(axis=1)
    b, tokens, kv_heads, group, head_dim = q.shape
    return jnp.moveaxis(out.reshape(b, kv_heads, tokens, group, head_dim), 1, 2).astype(q.dtype)
