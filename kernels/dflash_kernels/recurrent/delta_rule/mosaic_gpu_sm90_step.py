"""A plain step of the gated delta rule on Hopper, states in place: a CTA, or a cluster of four, for a value head of a slot.

The head's matrix is read once and stays in registers, a column in each thread: what key and query find in it are sums over rows,
which no thread needs another one for, and so is what is written. All that the step reads is asked for before anything is computed,
for that would wait.

Few slots leave most multiprocessors without a head. Then four CTAs have 32 of its rows each, give one another their sums over
distributed shared memory, and do the rest all alike, as that costs no time; the first of them writes the output.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.core.device import MULTIPROCESSORS
from dflash_kernels.core.layouts import aliased_ref, freeze_aliased
from dflash_kernels.mosaic_gpu.columns import (
    VECTOR,
    convolved,
    give_sums,
    held_columns,
    summed_columns,
    taken_sums,
    write_columns,
)
from dflash_kernels.mosaic_gpu.layouts import rows_of
from dflash_kernels.mosaic_gpu.rows import row_sums, sums_of_warps
from dflash_kernels.mosaic_gpu.softmax import sigmoid, softplus
from dflash_kernels.mosaic_gpu.thread_op import kernel
from dflash_kernels.mosaic_gpu.tma import address_of
from dflash_kernels.recurrent.delta_rule.inputs import KEPT, TAPS, DeltaShape, DeltaState, DeltaWeights

WIDTH = 128  # of heads
PARTS = 4  # CTAs of a cluster that share a head


def step(
    projected: jax.Array, weights: DeltaWeights, state: DeltaState, live: jax.Array, shape: DeltaShape, eps: float,
    interpret: Any = None, parts: int | None = None,
) -> tuple[jax.Array, DeltaState]:  # fmt: skip
    """`projected [B, 1, W]`, `live [B]` int32; heads of 128.

    `parts`: CTAs that share a head, 1, 2 or 4; None: as many as `parts_of` says.
    """
    slots = projected.shape[0]
    parts = parts_of(slots * shape.value_heads) if parts is None else parts

    def body(*refs: Any, **buffers: Any) -> None:
        _Head(shape, eps, parts, refs, buffers).run()

    body.__name__ = "delta_step"  # what profilers show
    s = aliased_ref(state.s)
    scratch: dict[str, Any] = {name: plgpu.SMEM((WIDTH,), jnp.float32) for name in ("q", "k")}
    scratch |= {"lengths": sums_of_warps(3), "squares": sums_of_warps(1)}
    cluster: dict[str, Any] = {}
    if parts > 1:
        cluster = {"cluster": (parts,), "cluster_names": ("part",)}
        scratch |= {
            "sums": plgpu.SMEM((parts, WIDTH, 2), jnp.float32), "arrived": plgpu.Barrier(),
            "met": plgpu.ClusterBarrier(collective_axes=("part",)),
        }  # fmt: skip
    out, conv = kernel(
        body, grid=(slots, shape.value_heads), grid_names=("slot", "head"), **cluster,
        # Heads that share a key read its rows of the convolution, whenever they come: new ones go elsewhere.
        out_type=(
            jax.ShapeDtypeStruct((slots, 1, shape.value_heads * WIDTH), projected.dtype),
            jax.ShapeDtypeStruct(state.conv.shape, state.conv.dtype),
        ),
        scratch_types=scratch, interpret=interpret,
        # Pallas puts two barriers around every store. Nothing in shared memory is written twice: that of `row_sums` is enough.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(projected, *weights, state.conv, live, s)  # fmt: skip
    return out, DeltaState(freeze_aliased(s), conv)


def parts_of(heads: int) -> int:
    """CTAs that share a head where so many heads, of all slots, are there."""
    return PARTS if heads <= MULTIPROCESSORS else 1


class _Head:
    """The program of one CTA."""

    def __init__(self, shape: DeltaShape, eps: float, parts: int, refs: tuple[Any, ...], buffers: dict[str, Any]):
        self.shape, self.eps, self.parts, self.buffers = shape, eps, parts, buffers
        self.projected, self.conv, self.a_log, self.dt_bias, self.norm, self.earlier, live, self.s = refs[:8]
        self.out, self.new = refs[8:]
        self.slot, self.head = lax.axis_index("slot"), lax.axis_index("head")
        self.part = lax.axis_index("part") if parts > 1 else jnp.int32(0)
        self.key = lax.div(self.head, jnp.int32(shape.heads_per_key))
        self.live = live[self.slot]

    def run(self) -> None:
        b = self.buffers
        given = self._rows()
        z = _load(self.projected.at[self.slot, 0, pl.ds(self.shape.channels + self.head * WIDTH, WIDTH)])
        weight, asked = _load(self.norm), self._asked()
        held = held_columns(self.s, self.slot, self.head, self.part, parts=self.parts)
        q, k, v = (
            convolved(*([one.astype(jnp.float32) for one in part] for part in (rows, taps)))[0] for rows, taps in given
        )
        beta, decay = _gates(*(number.astype(jnp.float32) for number in asked))
        self._keep([rows for rows, _ in given])
        b["q"][...], b["k"][...] = q, k
        # Its barrier is also the one that keys and queries need.
        of_k, of_q, alike = row_sums([k * k, q * q, q * k], b["lengths"], vector=1)
        by_key, by_query = self._found(held)
        of_k, of_q = lax.rsqrt(of_k + 1e-6), lax.rsqrt(of_q + 1e-6) * WIDTH**-0.5
        u = (v - by_key * (of_k * decay)) * beta
        write_columns(
            self.s, self.slot, self.head, self.part, held, self._of_part(b["k"]), decay, u * of_k, self.live, parts=self.parts
        )  # fmt: skip
        out = by_query * (of_q * decay) + u * (alike * of_q * of_k)

        def write() -> None:
            self.out.at[self.slot, 0, pl.ds(self.head * WIDTH, WIDTH)][...] = self._gated(out, z, weight)

        _where(self._has(0), write)

    def _found(self, held: list[jax.Array]) -> list[jax.Array]:
        """What key and query find in all rows of the matrix."""
        b, vectors = self.buffers, [self.buffers["k"], self.buffers["q"]]
        found = summed_columns(held, [self._of_part(vector) for vector in vectors])
        if self.parts == 1:
            return found
        memory, arrived, matrix = b["sums"], address_of(b["arrived"]), self.s.at[self.slot, self.head]
        give_sums(found, memory, arrived, parts=self.parts)
        return taken_sums(memory, arrived, matrix, vectors, b["met"], parts=self.parts)

    def _of_part(self, vector: Any) -> Any:
        """The numbers of the CTA's rows, of those of all rows."""
        rows = WIDTH // self.parts
        return vector.at[pl.ds(self.part * rows, rows)] if self.parts > 1 else vector

    def _has(self, index: int) -> Any:
        """Whether this CTA has share number `index` of what its cluster does once; None: it has all of that."""
        return self.part == index % self.parts if self.parts > 1 else None

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
        for index, (rows, place) in enumerate(zip(given, self._places(), strict=True)):

            def keep(rows: list[jax.Array] = rows, place: Any = place) -> None:
                for row in range(KEPT):
                    self.new.at[self.slot, row, place][...] = jnp.where(live, rows[row + 1], rows[row])

            # The cluster's first CTA writes the output.
            mine, of_key = self._has(index + 1), index < 2
            writes = leads if mine is None else mine & leads
            _where(writes if of_key else mine, keep)

    def _asked(self) -> tuple[Any, ...]:
        """Arguments of `_gates`."""
        column = self.shape.channels + self.shape.value_heads * WIDTH + self.head
        b, a = (self.projected[self.slot, 0, place] for place in (column, column + self.shape.value_heads))
        return b, a, self.a_log[self.head], self.dt_bias[self.head]

    def _gated(self, out: jax.Array, z: jax.Array, weight: jax.Array) -> jax.Array:
        """The output, rounded, normed and times SiLU of z."""
        dtype, rounded = self.projected.dtype, jnp.promote_types(self.norm.dtype, self.projected.dtype)
        wide, z = out.astype(dtype).astype(jnp.float32), z.astype(jnp.float32)
        (squares,) = row_sums([wide * wide], self.buffers["squares"], vector=1)
        normed = (wide * lax.rsqrt(squares * (1 / WIDTH) + self.eps)).astype(dtype).astype(jnp.float32)
        weighted = (weight.astype(jnp.float32) * normed).astype(rounded)
        return (weighted.astype(jnp.float32) * (z * sigmoid(z))).astype(dtype)


def _gates(b: Any, a: Any, a_log: Any, dt_bias: Any) -> tuple[Any, Any]:
    """`beta` and the token's decay."""
    return sigmoid(b), jnp.exp(-jnp.exp(a_log) * softplus(a + dt_bias))


def _where(condition: Any, does: Callable[[], None]) -> None:
    """Does it where the condition holds; always without one."""
    does() if condition is None else pl.when(condition)(does)


def _load(ref: Any) -> jax.Array:
    return rows_of(ref, VECTOR)
