"""The Hopper kernel: a CTA for each sequence's KV head, as in `paged_attention`, that makes its queries and new keys itself.

Keys that are in the pages already are on their way meanwhile. The new ones go to the pages before the copies of the tiles that hold
them begin; nobody else reads or writes them.
"""

# Pallas declares what it inlines with the context that it passes itself.
# pyright: reportAbstractUsage=false, reportCallIssue=false, reportPrivateImportUsage=false

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.attention_chain import mosaic_gpu_ops as ops
from dflash_kernels.attention_chain.mosaic_gpu_plan import HEAD_DIM, KEYS, Attention
from dflash_kernels.layer_chain.mosaic_gpu_ops import TILED
from dflash_kernels.paged_attention.mosaic_gpu_kernel import Block
from dflash_kernels.paged_attention.mosaic_gpu_ops import scores_of_blocks, scratch
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
    b, names = shapes.sequences, [*inputs, *pools, "o", "lse"]
    queries = plgpu.SMEM((1, 2 * ROWS, _HALF), jnp.bfloat16, transforms=TILED)

    def body(*refs, **buffers):
        _Written(launch, shapes, eps, dict(zip(names, refs, strict=True)), buffers, interpret).run()

    body.__name__ = "qkv_attention"  # what profilers show
    held = {name: jax.new_ref(pool) for name, pool in pools.items()}
    out, _ = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((b, launch.tokens, launch.kv_heads, launch.group, HEAD_DIM), jnp.bfloat16),
            jax.ShapeDtypeStruct((b, launch.kv_heads, 1, ROWS), jnp.float32),
        ),
        scratch_types=scratch(launch, jnp.bfloat16, interpret, queries),
        grid=(b, 1, launch.kv_heads), grid_names=("b", "split", "heads"), num_threads=1, thread_name="wg",
        # Row reductions of a matrix tile stay within a warp: no scratch, which two CTAs on a multiprocessor have no room for.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(*inputs.values(), *held.values())  # fmt: skip
    return out.reshape(b, launch.tokens, -1, HEAD_DIM), jax.freeze(held["k"]), jax.freeze(held["v"])


class _Written(Block):
    """One CTA's work."""

    def __init__(self, launch, shapes, eps, refs, buffers, interpret):
        super().__init__(launch, refs, buffers, interpret)
        self.shapes, self.eps = shapes, eps
        self.first = self.seq_len - self.q_len  # position of the first new token

    def _start(self):
        # Tiles from this one on have new keys, or are past the end.
        new = lax.div(self.first, jnp.int32(KEYS))
        self.fill_ring(("k", "v"), below=new)
        ops.load_queries(
            self.shapes, self.eps, self.refs, self.buffers["q_sm"], 0, self.b, self.head, self.interpret
        )  # fmt: skip
        ops.stage_new(
            self.shapes, self.eps, self.refs, None, self.b, self.head, self.first, self.first,
            jnp.minimum(self.seq_len, self.kv_len), self.interpret,
        )  # fmt: skip
        ops.order_copies(self.interpret)
        self.fill_ring(("k", "v"), least=new)

    def _scores(self, keys):
        queries = [self.buffers["q_sm"].at[0, pl.ds(block * ROWS, ROWS)] for block in range(2)]
        return scores_of_blocks(queries, keys, self.launch.keys)
