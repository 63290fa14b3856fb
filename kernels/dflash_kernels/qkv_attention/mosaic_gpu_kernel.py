"""The Hopper kernel: one CTA or two for each sequence's KV head, as in `paged_attention`, make queries and new keys themselves.

Keys that are in the pages already are on their way meanwhile. The new ones go to the pages before the copies of the tiles that hold
them begin; nobody else reads or writes them.
"""

# Pallas declares what it inlines with the context that it passes itself.
# pyright: reportAbstractUsage=false, reportCallIssue=false, reportPrivateImportUsage=false

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.attention_chain import mosaic_gpu_ops as ops
from dflash_kernels.attention_chain.mosaic_gpu_plan import HEAD_DIM, KEYS, Attention
from dflash_kernels.layer_chain.mosaic_gpu_ops import TILED
from dflash_kernels.paged_attention.mosaic_gpu_kernel import Block, grid
from dflash_kernels.paged_attention.mosaic_gpu_merge import merge_xla
from dflash_kernels.paged_attention.mosaic_gpu_ops import ring, scores_of_blocks, scratch
from dflash_kernels.paged_attention.mosaic_gpu_pair import Pair
from dflash_kernels.paged_attention.mosaic_gpu_schedule import ROWS, Launch

_HALF = HEAD_DIM // 2


def attention(
    launch: Launch,
    shapes: Attention,
    eps: float,
    inputs: dict[str, jax.Array],
    pools: dict[str, jax.Array],
    interpret: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the kernel: the output `[B, T, N, H]` and the pools.

    Args:
      inputs: `qkv [M, N + 2 K, H]`, `cos` and `sin` float32 `[M, H / 2]`, `q_norm` and `k_norm [H]`, `table`, `seq_lens`, `q_lens`.
      pools: `k` and `v`, written in place.
    """
    if interpret is not None:
        # The interpreter has no shared memory of other CTAs.
        launch = dataclasses.replace(launch, together=False)
    b, rows, whole = shapes.sequences, -(-shapes.rows // 8) * 8, launch.direct or launch.together
    shape = (b, launch.tokens, launch.kv_heads, launch.group) if whole else (b, launch.kv_heads, launch.splits, rows)
    made = {"o": jax.ShapeDtypeStruct((*shape, HEAD_DIM), jnp.bfloat16 if whole else jnp.float32)}
    if not whole:
        made["lse"] = jax.ShapeDtypeStruct((b, launch.kv_heads, launch.splits, ROWS), jnp.float32)
    names, kind = [*inputs, *pools, *made], _Pair if launch.pair else _Written
    queries = plgpu.SMEM((1, 2 * ROWS, _HALF), jnp.bfloat16, transforms=TILED)

    def body(*refs, **buffers):
        kind(launch, shapes, eps, dict(zip(names, refs, strict=True)), buffers, interpret).run()

    body.__name__ = "qkv_attention"  # what profilers show
    held = {name: jax.new_ref(pool) for name, pool in pools.items()}
    out, *lse = plgpu.kernel(
        body,
        out_type=tuple(made.values()),
        scratch_types=kind.scratch(launch, jnp.bfloat16, interpret) | {"q_sm": queries},
        **grid(launch, b), num_threads=1, thread_name="wg",
        # Row reductions of a matrix tile stay within a warp: no scratch, which two CTAs on a multiprocessor have no room for.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(*inputs.values(), *held.values())  # fmt: skip
    if not whole:
        out = merge_xla(out, lse[0], None, launch.tokens, launch.group, jnp.bfloat16)
    return out.reshape(b, launch.tokens, -1, HEAD_DIM), jax.freeze(held["k"]), jax.freeze(held["v"])


class _Written(Block):
    """One CTA's work. Two that share a head's keys take turns with the tiles, and both make its queries."""

    ahead = True

    def __init__(self, launch, shapes, eps, refs, buffers, interpret):
        super().__init__(launch, refs, buffers, interpret)
        self.shapes, self.eps = shapes, eps
        self.first = self.seq_len - self.q_len  # position of the first new token

    @staticmethod
    def scratch(launch: Launch, dtype: Any, interpret: Any) -> dict[str, Any]:
        """The output leaves from registers, but not in the interpreter."""
        return (ring if interpret is None else scratch)(launch, dtype, interpret)

    @property
    def stride(self) -> int:
        return self.launch.splits

    def _ask_for_queries(self):
        of_head = (self.shapes, self.refs, self.b, self.head, self.interpret)
        self.new = ops.ask_for_new(*of_head)
        return ops.ask_for_queries(*of_head)

    def _start(self, pages):
        # Tiles from this one on have new keys, or are past the end.
        new = lax.div(self.first, jnp.int32(KEYS))
        self.fill_ring(("k", "v"), pages, below=new)
        call = (self.shapes, self.eps, self.refs)
        ops.put_queries(*call, self.queries, self.buffers["q_sm"], 0, self.b, self.head, self.interpret)
        low, high, tiles = self.first, jnp.minimum(self.seq_len, self.kv_len), (new, new + 1)
        if self.stride > 1:
            # New tokens lie in two tiles at most.
            own = new + lax.rem(new + self.split, jnp.int32(2))
            low, high, tiles = jnp.maximum(low, own * KEYS), jnp.minimum(high, (own + 1) * KEYS), (own, own)

        @pl.when(low < high)
        def _():
            places = [page for tile in tiles for page in self.pages(tile)]
            limits = (self.first, low, high)
            ops.put_new(*call, self.new, places, self.b, self.head, limits, self.interpret)
            ops.order_copies(self.interpret)

        self.fill_ring(("k", "v"), pages, least=new)

    def _write(self, out, lse):
        if self.interpret is None and self.launch.direct:
            self.store(jnp.int32(0), out)
        else:
            super()._write(out, lse)

    def _scores(self, keys):
        queries = [self.buffers["q_sm"].at[0, pl.ds(block * ROWS, ROWS)] for block in range(2)]
        return scores_of_blocks(queries, keys, self.launch.keys)


class _Pair(_Written, Pair):
    """A CTA that has half of a head's keys."""

    scratch = Pair.scratch
