"""A plain step of the gated delta rule on Hopper, states in place: a CTA for a value head of a slot.

The head's matrix is read once and stays in registers: what key and query find in it comes from there, and so does what is written.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.core.layouts import aliased_ref, freeze_aliased
from dflash_kernels.mosaic_gpu.columns import VECTOR, convolved
from dflash_kernels.mosaic_gpu.layouts import rows_of
from dflash_kernels.mosaic_gpu.softmax import sigmoid, softplus
from dflash_kernels.mosaic_gpu.thread_op import COLUMN, MATRIX, ROW, kernel
from dflash_kernels.recurrent.delta_rule.inputs import KEPT, TAPS, DeltaShape, DeltaState, DeltaWeights

WIDTH, ROWS = 128, 64  # of heads; of a matrix instruction's operand in registers


def step(
    projected: jax.Array, weights: DeltaWeights, state: DeltaState, live: jax.Array, shape: DeltaShape, eps: float,
    interpret: Any = None,
) -> tuple[jax.Array, DeltaState]:  # fmt: skip
    """`projected [B, 1, W]`, `live [B]` int32; heads of 128."""
    slots = projected.shape[0]

    def body(*refs: Any, **buffers: Any) -> None:
        _Head(shape, eps, refs, buffers).run()

    body.__name__ = "delta_step"  # what profilers show
    s = aliased_ref(state.s)
    out, conv = kernel(
        body, grid=(slots, shape.value_heads), grid_names=("slot", "head"),
        # Heads that share a key read its rows of the convolution, whenever they come: new ones go elsewhere.
        out_type=(
            jax.ShapeDtypeStruct((slots, 1, shape.value_heads * WIDTH), projected.dtype),
            jax.ShapeDtypeStruct(state.conv.shape, state.conv.dtype),
        ),
        scratch_types={name: plgpu.SMEM((WIDTH,), jnp.float32) for name in ("q", "k", "v", "found")},
        compiler_params=plgpu.CompilerParams(approx_math=True), interpret=interpret,
    )(projected, *weights, state.conv, live, s)  # fmt: skip
    return out, DeltaState(freeze_aliased(s), conv)


class _Head:
    """The program of one CTA."""

    def __init__(self, shape: DeltaShape, eps: float, refs: tuple[Any, ...], buffers: dict[str, Any]):
        self.shape, self.eps, self.buffers = shape, eps, buffers
        self.projected, self.conv, self.a_log, self.dt_bias, self.norm, self.earlier, live, self.s = refs[:8]
        self.out, self.new = refs[8:]
        self.slot, self.head = lax.axis_index("slot"), lax.axis_index("head")
        self.key = lax.div(self.head, jnp.int32(shape.heads_per_key))
        self.live = live[self.slot] > 0

    def run(self) -> None:
        b = self.buffers
        halves = [self.s.at[self.slot, self.head, pl.ds(start, ROWS)] for start in (0, ROWS)]
        held = [rows_of(half, MATRIX) for half in halves]
        q, k, v = self._convolve()
        k = k * lax.rsqrt((k * k).sum() + 1e-6)
        q = q * (lax.rsqrt((q * q).sum() + 1e-6) * WIDTH**-0.5)
        alike = (q * k).sum()
        for name, vector in (("q", q), ("k", k), ("v", v)):
            b[name][...] = vector
        plgpu.commit_smem()
        beta, decay = self._gates()
        keys, queries = ([rows_of(b[name].at[pl.ds(start, ROWS)], ROW) for start in (0, ROWS)] for name in ("k", "q"))
        by_key, by_query = (
            sum((tile * _along(part, tile.shape, 0)).sum(axis=0) for tile, part in zip(held, parts, strict=True))
            for parts in (keys, queries)
        )
        u = (rows_of(b["v"], COLUMN) - by_key * decay) * beta
        b["found"][...] = by_query * decay + u * alike
        plgpu.commit_smem()

        @pl.when(self.live)
        def _():
            for half, tile, part in zip(halves, held, keys, strict=True):
                half[...] = tile * decay + _along(part, tile.shape, 0) * _along(u, tile.shape, 1)

        self._gate(_load(b["found"]))

    def _convolve(self) -> list[jax.Array]:
        """A channel of q, k and v in every thread; the rows that the next token needs go to their place."""
        of_key, found = self.key * WIDTH, []
        first_k, first_v = self.shape.key_heads * WIDTH, 2 * self.shape.key_heads * WIDTH
        leads = self.key * self.shape.heads_per_key == self.head
        for start, writes in ((of_key, leads), (first_k + of_key, leads), (first_v + self.head * WIDTH, None)):
            place = pl.ds(start, WIDTH)
            rows = [_load(self.earlier.at[self.slot, row, place]) for row in range(KEPT)]
            rows.append(_load(self.projected.at[self.slot, 0, place]))
            taps = [_load(self.conv.at[place, tap]).astype(jnp.float32) for tap in range(TAPS)]
            found += convolved([row.astype(jnp.float32) for row in rows], taps)

            def keep(rows: list[jax.Array] = rows, place: Any = place) -> None:
                live = jnp.full((WIDTH,), jnp.where(self.live, 1, 0), jnp.int32) > 0
                for row in range(KEPT):
                    self.new.at[self.slot, row, place][...] = jnp.where(live, rows[row + 1], rows[row])

            keep() if writes is None else pl.when(writes)(keep)
        return found

    def _gates(self) -> tuple[Any, Any]:
        """`beta` and the token's decay."""
        column = self.shape.channels + self.shape.value_heads * WIDTH + self.head
        b, a = (
            self.projected[self.slot, 0, place].astype(jnp.float32)
            for place in (column, column + self.shape.value_heads)
        )
        rate = jnp.exp(self.a_log[self.head].astype(jnp.float32))
        return sigmoid(b), jnp.exp(-rate * softplus(a + self.dt_bias[self.head].astype(jnp.float32)))

    def _gate(self, out: jax.Array) -> None:
        """The output, rounded, normed and times SiLU of z."""
        dtype, own = self.projected.dtype, pl.ds(self.head * WIDTH, WIDTH)
        wide = out.astype(dtype).astype(jnp.float32)
        normed = (wide * lax.rsqrt((wide * wide).sum() * (1 / WIDTH) + self.eps)).astype(dtype).astype(jnp.float32)
        weighted = (_load(self.norm).astype(jnp.float32) * normed).astype(jnp.promote_types(self.norm.dtype, dtype))
        z = _load(self.projected.at[self.slot, 0, pl.ds(self.shape.channels + self.head * WIDTH, WIDTH)])
        z = z.astype(jnp.float32)
        self.out.at[self.slot, 0, own][...] = (weighted.astype(jnp.float32) * (z * sigmoid(z))).astype(dtype)


def _load(ref: Any) -> jax.Array:
    return rows_of(ref, VECTOR)


def _along(vector: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, shape, [axis]), MATRIX)
