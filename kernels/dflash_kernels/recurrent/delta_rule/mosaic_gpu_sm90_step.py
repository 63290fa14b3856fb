"""A plain step of the gated delta rule on Hopper, states in place: a CTA for a value head of a slot.

The head's matrix is read once and stays in registers, a column in each thread: what key and query find in it are sums over rows,
which no thread needs another one for, and so is what is written. All that the step reads is asked for before anything is computed,
for that would wait.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.core.layouts import aliased_ref, freeze_aliased
from dflash_kernels.mosaic_gpu.columns import VECTOR, convolved, held_columns, summed_columns, write_columns
from dflash_kernels.mosaic_gpu.layouts import rows_of
from dflash_kernels.mosaic_gpu.softmax import sigmoid, softplus
from dflash_kernels.mosaic_gpu.thread_op import kernel
from dflash_kernels.recurrent.delta_rule.inputs import KEPT, TAPS, DeltaShape, DeltaState, DeltaWeights

WIDTH = 128  # of heads


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
        scratch_types={name: plgpu.SMEM((WIDTH,), jnp.float32) for name in ("q", "k")},
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
        self.live = live[self.slot]

    def run(self) -> None:
        b, own = self.buffers, pl.ds(self.head * WIDTH, WIDTH)
        given = self._rows()
        z = _load(self.projected.at[self.slot, 0, pl.ds(self.shape.channels + self.head * WIDTH, WIDTH)])
        weight, asked = _load(self.norm), self._asked()
        held = held_columns(self.s, self.slot, self.head)
        q, k, v = (
            convolved(*([one.astype(jnp.float32) for one in part] for part in (rows, taps)))[0] for rows, taps in given
        )
        beta, decay = _gates(*(number.astype(jnp.float32) for number in asked))
        b["q"][...], b["k"][...] = q, k
        plgpu.commit_smem()
        of_k = lax.rsqrt((k * k).sum() + 1e-6)
        of_q = lax.rsqrt((q * q).sum() + 1e-6) * WIDTH**-0.5
        alike = (q * k).sum() * of_q * of_k
        by_key, by_query = summed_columns(held, [b["k"], b["q"]])
        u = (v - by_key * (of_k * decay)) * beta
        write_columns(self.s, self.slot, self.head, held, b["k"], decay, u * of_k, self.live)
        self._keep([rows for rows, _ in given])
        self.out.at[self.slot, 0, own][...] = self._gated(by_query * (of_q * decay) + u * alike, z, weight)

    def _places(self) -> list[Any]:
        """Channels of the head's queries, keys and values."""
        of_key, of_value = self.key * WIDTH, self.head * WIDTH
        first_k, first_v = self.shape.key_heads * WIDTH, 2 * self.shape.key_heads * WIDTH
        return [pl.ds(start, WIDTH) for start in (of_key, first_k + of_key, first_v + of_value)]

    def _rows(self) -> list[tuple[list[jax.Array], list[jax.Array]]]:
        """A channel of q, k and v in every thread: earlier tokens, this one, and what the convolution multiplies them with."""
        found = []
        for place in self._places():
            rows = [_load(self.earlier.at[self.slot, row, place]) for row in range(KEPT)]
            rows.append(_load(self.projected.at[self.slot, 0, place]))
            found.append((rows, [_load(self.conv.at[place, tap]) for tap in range(TAPS)]))
        return found

    def _keep(self, given: list[list[jax.Array]]) -> None:
        """The rows that the next token needs go to their place; one of the heads of a key takes the key's."""
        leads = self.key * self.shape.heads_per_key == self.head
        live = jnp.full((WIDTH,), self.live, jnp.int32) > 0
        for rows, place, writes in zip(given, self._places(), (leads, leads, None), strict=True):

            def keep(rows: list[jax.Array] = rows, place: Any = place) -> None:
                for row in range(KEPT):
                    self.new.at[self.slot, row, place][...] = jnp.where(live, rows[row + 1], rows[row])

            keep() if writes is None else pl.when(writes)(keep)

    def _asked(self) -> tuple[Any, ...]:
        """Arguments of `_gates`."""
        column = self.shape.channels + self.shape.value_heads * WIDTH + self.head
        b, a = (self.projected[self.slot, 0, place] for place in (column, column + self.shape.value_heads))
        return b, a, self.a_log[self.head], self.dt_bias[self.head]

    def _gated(self, out: jax.Array, z: jax.Array, weight: jax.Array) -> jax.Array:
        """The output, rounded, normed and times SiLU of z."""
        dtype, rounded = self.projected.dtype, jnp.promote_types(self.norm.dtype, self.projected.dtype)
        wide, z = out.astype(dtype).astype(jnp.float32), z.astype(jnp.float32)
        normed = (wide * lax.rsqrt((wide * wide).sum() * (1 / WIDTH) + self.eps)).astype(dtype).astype(jnp.float32)
        weighted = (weight.astype(jnp.float32) * normed).astype(rounded)
        return (weighted.astype(jnp.float32) * (z * sigmoid(z))).astype(dtype)


def _gates(b: Any, a: Any, a_log: Any, dt_bias: Any) -> tuple[Any, Any]:
    """`beta` and the token's decay."""
    return sigmoid(b), jnp.exp(-jnp.exp(a_log) * softplus(a + dt_bias))


def _load(ref: Any) -> jax.Array:
    return rows_of(ref, VECTOR)
