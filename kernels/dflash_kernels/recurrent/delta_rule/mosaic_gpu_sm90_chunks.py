"""The state-independent part of a chunk of 64 prompt tokens, on Hopper: one CTA of one warpgroup for a chunk of a value head.

With `cum` the summed logs of decays since the chunk's beginning, `T` the inverse of `I + A` and `A` the strictly lower part of
`beta_i exp(cum_i - cum_j) K K^T` (https://arxiv.org/abs/2412.06464):

    w = T (beta exp(cum) K),  new = T (beta V),  seen = lower part of exp(cum_i - cum_j) Q K^T

so that what tokens write is `new - w S`, and what queries find is `exp(cum) Q S + seen (new - w S)`, for any state S before them.

`T` grows by blocks: with X the inverse of the blocks of s rows on the diagonal, those of 2 s rows are `X - X A X`, of which only
what lies between two blocks of s is kept. Every number in between is one of a result or of A, so nothing cancels; the product
`(I - A)(I + A^2) ...` would. Both factors are sums of two bfloat16 numbers, which leaves out 2^-16 of a product.
"""

# Pallas declares ACC less public than it documents it.
# pyright: reportPrivateImportUsage=false

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.mosaic_gpu.layouts import TILED, rows_of
from dflash_kernels.mosaic_gpu.thread_op import COLUMN, MATRIX, ROW, kernel
from dflash_kernels.mosaic_gpu.wgmma import add_values, scores_of, zeros

WIDTH, CHUNK = 128, 64  # of heads; tokens


def chunks(
    q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, cum: jax.Array, interpret: Any = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The three matrices of every chunk and value head, bfloat16.

    Args:
      q, k: `[chunks, 64, Hk * 128]` bfloat16, keys of length 1, queries scaled.
      v: `[chunks, 64, Hv * 128]` bfloat16.
      beta, cum: `[chunks, Hv, 64]` float32.

    Returns:
      `w` and `new`, `[chunks, Hv, 64, 128]`, and `seen`, `[chunks, Hv, 64, 64]`.
    """
    count, value_heads, _ = beta.shape
    per_key = value_heads * WIDTH // k.shape[2]

    def body(*refs: Any, **buffers: Any) -> None:
        _Chunk(per_key, refs, buffers).run()

    body.__name__ = "delta_chunks"  # what profilers show
    wide = jax.ShapeDtypeStruct((count, value_heads, CHUNK, WIDTH), jnp.bfloat16)
    square = plgpu.SMEM((CHUNK, CHUNK), jnp.bfloat16, transforms=TILED)
    rows = plgpu.SMEM((CHUNK, WIDTH), jnp.bfloat16, transforms=TILED)
    scratch = {"q": rows, "k": rows, "v": rows, "arrived": plgpu.Barrier(num_barriers=3)}
    scratch["gates"] = plgpu.Barrier(num_arrivals=4)
    scratch |= {name: plgpu.SMEM((2, CHUNK), jnp.float32) for name in ("beta", "cum")}
    scratch |= dict.fromkeys(("seen", "a_high", "a_low", "x_high", "x_low"), square)
    return kernel(
        body, out_type=(wide, wide, jax.ShapeDtypeStruct((count, value_heads, CHUNK, CHUNK), jnp.bfloat16)),
        grid=(count, value_heads), grid_names=("chunk", "head"), scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True), interpret=interpret,
    )(q, k, v, beta, cum)  # fmt: skip


class _Chunk:
    """The program of one CTA."""

    def __init__(self, per_key: int, refs: tuple[Any, ...], buffers: dict[str, Any]):
        self.q, self.k, self.v, self.beta, self.cum, self.w, self.new, self.seen = refs
        self.buffers = buffers
        self.chunk, self.head = lax.axis_index("chunk"), lax.axis_index("head")
        self.key = lax.div(self.head, jnp.int32(per_key))

    def run(self) -> None:
        b = self.buffers
        for name, ref in (("beta", self.beta), ("cum", self.cum)):
            for axis in range(2):  # one load of the same place could not have both layouts
                plgpu.copy_gmem_to_smem(ref.at[self.chunk, self.head], b[name].at[axis], b["gates"])
        for place, (name, ref, head) in enumerate(
            (("k", self.k, self.key), ("q", self.q, self.key), ("v", self.v, self.head))
        ):
            source = ref.at[self.chunk, :, pl.ds(head * WIDTH, WIDTH)]
            plgpu.copy_gmem_to_smem(source, b[name], b["arrived"].at[place])
        plgpu.barrier_wait(b["gates"])
        of_rows, of_columns = rows_of(b["cum"].at[0], ROW), rows_of(b["cum"].at[1], COLUMN)
        row, column = (
            plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis), MATRIX) for axis in (0, 1)
        )
        # Above the diagonal the exponential would overflow.
        decay = jnp.exp(jnp.minimum(_along(of_rows, 0) - _along(of_columns, 1), 0.0))
        plgpu.barrier_wait(b["arrived"].at[0])
        gram = scores_of(b["k"], b["k"], CHUNK)
        a = jnp.where(column < row, _along(rows_of(b["beta"].at[0], ROW), 0) * gram * decay, 0.0)
        plgpu.barrier_wait(b["arrived"].at[1])
        seen = jnp.where(column <= row, scores_of(b["q"], b["k"], CHUNK) * decay, 0.0)
        self._give(seen, b["seen"], self.seen)
        inverse = self._inverse(a, row, column)
        strength = rows_of(b["beta"].at[1], COLUMN)
        plgpu.barrier_wait(b["arrived"].at[2])
        # Queries are no longer needed when keys are multiplied, nor keys when values are.
        for factor, right, free, target in (
            (strength * jnp.exp(of_columns), "k", "q", self.w), (strength, "v", "k", self.new),
        ):  # fmt: skip
            out = zeros((CHUNK, WIDTH))
            for part in _split(inverse * _along(factor, 1)):
                out = add_values(out, part, b[right])
            self._give(out, b[free], target)
        plgpu.wait_smem_to_gmem(0)

    def _give(self, matrix: jax.Array, through: Any, target: Any) -> None:
        through[...] = matrix.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(through, target.at[self.chunk, self.head])

    def _inverse(self, a: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
        b = self.buffers
        _put(_split(a), b["a_high"], b["a_low"])
        inverse = plgpu.layout_cast(jnp.where(row == column, 1.0, 0.0), MATRIX) - jnp.where(
            _between(row, column, 1), a, 0.0
        )
        size = 2
        while size < CHUNK:
            parts = _split(inverse)
            _put(parts, b["x_high"], b["x_low"])
            left = self._product(parts, "a")
            inverse = inverse - jnp.where(_between(row, column, size), self._product(_split(left), "x"), 0.0)
            size *= 2
        return inverse

    def _product(self, left: tuple[jax.Array, jax.Array], right: str) -> jax.Array:
        """Of two sums of two numbers; the product of both lower ones is left out."""
        high, low = (self.buffers[f"{right}_{part}"] for part in ("high", "low"))
        out = zeros((CHUNK, CHUNK))
        for part, other in ((left[1], high), (left[0], low), (left[0], high)):
            out = add_values(out, part, other)
        return out


def _split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As the sum of two bfloat16 numbers."""
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def _put(parts: tuple[jax.Array, jax.Array], high: Any, low: Any) -> None:
    high[...], low[...] = parts
    plgpu.commit_smem()


def _between(row: jax.Array, column: jax.Array, size: int) -> jax.Array:
    """Of two neighbouring blocks of `size` rows: rows of the second, columns of the first."""
    return ((row & -size) == (column & -size) + size) & ((row & size) == size)


def _along(vector: jax.Array, axis: int) -> jax.Array:
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, (CHUNK, CHUNK), [axis]), MATRIX)
