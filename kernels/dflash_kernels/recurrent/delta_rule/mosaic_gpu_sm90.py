"""Verification by the gated delta rule on Hopper: one CTA of one warpgroup for a value head of a slot.

The head's state, 64 KiB, is on its way to shared memory while each thread convolves a channel of its own for all tokens. What keys
and queries find in the state, and in each other, are products on tensor cores at full precision; lengths of keys and queries,
`beta` and decays are factors of their rows and columns afterwards. Then a thread has a column of the values: the triangular system,
sixteen unknowns, is solved in its registers, where the outputs come from as well.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.mosaic_gpu.columns import VECTOR, convolved, solve, store_columns
from dflash_kernels.mosaic_gpu.layouts import rows_of, tiled
from dflash_kernels.mosaic_gpu.precise import LEFT_PITCH, products
from dflash_kernels.mosaic_gpu.softmax import sigmoid, softplus
from dflash_kernels.mosaic_gpu.thread_op import COLUMN, MATRIX, ROW, kernel
from dflash_kernels.recurrent.delta_rule.inputs import KEPT, TAPS, DeltaFactors, DeltaShape, DeltaState, DeltaWeights

WIDTH, MOST = 128, 16  # of heads; tokens
MATRIX_ROWS = 64
# Sixteen rows in registers, each within one warp.
_ROWS = plgpu.Layout.TILED(
    plgpu.Tiling(((MOST, 32), (4, 32), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)


def verify(
    projected: jax.Array, weights: DeltaWeights, state: DeltaState, shape: DeltaShape, eps: float, interpret: Any = None
) -> tuple[jax.Array, DeltaFactors]:
    """`projected [B, T, W]` of up to 16 tokens; heads of 128."""
    slots, tokens, _ = projected.shape

    def body(*refs: Any, **buffers: Any) -> None:
        _Head(shape, eps, refs, buffers).run()

    body.__name__ = "delta_verify"  # what profilers show
    of_values, of_keys = (slots, tokens, shape.value_heads), (slots, tokens, shape.key_heads)
    results = (
        jax.ShapeDtypeStruct((slots, tokens, shape.value_heads * WIDTH), projected.dtype),
        jax.ShapeDtypeStruct((*of_keys, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((*of_values, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct(of_values, jnp.float32),
        jax.ShapeDtypeStruct((slots, tokens, shape.channels), projected.dtype),
    )
    out, *factors = kernel(
        body, out_type=results, grid=(slots, shape.value_heads), grid_names=("slot", "head"),
        scratch_types={
            "state": plgpu.SMEM((WIDTH, WIDTH), jnp.float32, transforms=tiled(jnp.float32)),
            "columns": plgpu.SMEM((WIDTH, LEFT_PITCH), jnp.float32),
            "found": plgpu.SMEM((2 * MOST, WIDTH), jnp.float32),
            "gram": plgpu.SMEM((MATRIX_ROWS, MOST), jnp.float32),
            "squares": plgpu.SMEM((WIDTH,), jnp.float32),
            # Of keys, then of queries, a number each.
            "gates": plgpu.SMEM((WIDTH,), jnp.float32),
            "decays": plgpu.SMEM((WIDTH,), jnp.float32),
            "lengths": plgpu.SMEM((WIDTH,), jnp.float32),
            "factors": plgpu.SMEM((WIDTH,), jnp.float32),
            "entries": plgpu.SMEM((WIDTH,), jnp.float32),
            "arrived": plgpu.Barrier(),
        },
        # Pallas puts two barriers around every store, a hundred of them. Between threads there are those that stand in the program.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True), interpret=interpret,
    )(projected, *weights, *state)  # fmt: skip
    return out, DeltaFactors(*factors)


class _Head:
    """The program of one CTA."""

    def __init__(self, shape: DeltaShape, eps: float, refs: tuple[Any, ...], buffers: dict[str, Any]):
        self.shape, self.eps, self.buffers = shape, eps, buffers
        self.projected, self.conv, self.a_log, self.dt_bias, self.norm, self.s, self.earlier = refs[:7]
        self.out, self.k, self.u, self.cum, self.rows = refs[7:]
        self.dtype, self.tokens = self.projected.dtype, self.projected.shape[1]
        self.slot, self.head = lax.axis_index("slot"), lax.axis_index("head")
        self.key = lax.div(self.head, jnp.int32(shape.heads_per_key))
        self.leads = self.key * shape.heads_per_key == self.head  # of the heads of a key, the one that writes it

    def run(self) -> None:
        b = self.buffers
        plgpu.copy_gmem_to_smem(self.s.at[self.slot, self.head], b["state"], b["arrived"])
        k, v = self._convolve()
        of_z = self.shape.channels + self.head * WIDTH
        z = [_load(self.projected.at[self.slot, token, pl.ds(of_z, WIDTH)]) for token in range(self.tokens)]
        cum = self._gates()
        plgpu.barrier_wait(b["arrived"])
        plgpu.commit_smem()
        products(b["columns"], b["state"], b["found"], b["gram"], b["squares"])
        plgpu.commit_smem()
        self._factors()
        plgpu.commit_smem()
        self._weigh()
        plgpu.commit_smem()
        solve(b["found"], b["gram"], b["entries"], b["gates"], v)
        self._finish(z)
        for token in range(self.tokens):
            self.cum[self.slot, token, self.head] = cum[token]

        @pl.when(self.leads)
        def _():
            for token in range(self.tokens):
                self.k.at[self.slot, token, self.key][...] = k[token] * b["lengths"][token]

    def _convolve(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """Keys, not of length 1 yet, and values: a channel of each in every thread. Keys and queries go to shared memory."""
        shape = self.shape
        first_k, first_v = shape.key_heads * WIDTH, 2 * shape.key_heads * WIDTH
        of_key = self.key * WIDTH
        places = [pl.ds(start, WIDTH) for start in (of_key, first_k + of_key, first_v + self.head * WIDTH)]
        held = [
            (
                [_load(self.earlier.at[self.slot, row, place]) for row in range(KEPT)],
                [_load(self.projected.at[self.slot, token, place]) for token in range(self.tokens)],
                [_load(self.conv.at[place, tap]).astype(jnp.float32) for tap in range(TAPS)],
            )
            for place in places
        ]
        q, k, v = (
            convolved([row.astype(jnp.float32) for row in (*earlier, *rows)], taps) for earlier, rows, taps in held
        )
        nothing = plgpu.layout_cast(jnp.zeros((WIDTH,), jnp.float32), VECTOR)
        for part, first in ((k, 0), (q, MOST)):
            store_columns(self.buffers["columns"], [*part, *[nothing] * (MOST - self.tokens)], first=first)

        def keep(part: int) -> None:
            for token, row in enumerate(held[part][1]):
                self.rows.at[self.slot, token, places[part]][...] = row

        keep(2)

        @pl.when(self.leads)
        def _():
            keep(0)
            keep(1)

        return k, v

    def _gates(self) -> list[Any]:
        """Summed logs of decays, one for each token; `gates` then holds `beta`, `decays` these sums, twice."""
        gates, decays = self.buffers["gates"], self.buffers["decays"]
        gates[...] = jnp.zeros((WIDTH,), jnp.float32)
        decays[...] = jnp.zeros((WIDTH,), jnp.float32)
        plgpu.commit_smem()
        first = self.shape.channels + self.shape.value_heads * WIDTH + self.head
        for token in range(self.tokens):
            for place, column in ((token, first), (MOST + token, first + self.shape.value_heads)):
                gates[place] = self.projected[self.slot, token, column].astype(jnp.float32)
        plgpu.commit_smem()
        given = _load(gates)
        decay = -jnp.exp(self.a_log[self.head].astype(jnp.float32)) * softplus(
            given + self.dt_bias[self.head].astype(jnp.float32)
        )
        plgpu.commit_smem()
        gates[...] = jnp.where(_lane() < MOST, sigmoid(given), decay)
        plgpu.commit_smem()
        cum, total = [], jnp.float32(0)
        for token in range(self.tokens):
            total = total + gates[MOST + token]
            cum.append(total)
            decays[token] = total
            decays[MOST + token] = total
        return cum

    def _factors(self) -> None:
        """Factors of rows of keys and queries: `lengths` makes them 1 long, `factors` has `beta` or the scale in it,
        `entries` the decay since the state as well.
        """
        b = self.buffers
        length = lax.rsqrt(_load(b["squares"]) + 1e-6)
        factor = length * jnp.where(_lane() < MOST, _load(b["gates"]), jnp.float32(WIDTH**-0.5))
        b["lengths"][...] = length
        b["factors"][...] = factor
        b["entries"][...] = factor * jnp.exp(_load(b["decays"]))

    def _weigh(self) -> None:
        """Weights of a token for those before it, in `gram`: rows of keys, then of queries."""
        b, shape = self.buffers, (MATRIX_ROWS, MOST)
        of_rows = [rows_of(b[name].at[pl.ds(0, MATRIX_ROWS)], ROW) for name in ("factors", "decays")]
        of_columns = [rows_of(b[name].at[pl.ds(0, MOST)], COLUMN) for name in ("lengths", "decays")]
        (factor, end), (length, start) = (
            [_along(vector, shape, axis) for vector in vectors] for vectors, axis in ((of_rows, 0), (of_columns, 1))
        )
        row, column = (plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, axis), MATRIX) for axis in (0, 1))
        # A key's row takes what is before its token, a query's that one as well.
        seen = jnp.where(row < MOST, column < row, column <= row - MOST)
        weight = rows_of(b["gram"], MATRIX) * factor * length * jnp.exp(jnp.minimum(end - start, 0.0))
        b["gram"][...] = jnp.where(seen, weight, 0.0)

    def _finish(self, z: list[jax.Array]) -> None:
        """Writes and outputs out of shared memory: the former as they are, the latter rounded, normed and times SiLU of z."""
        found, rounded = self.buffers["found"], jnp.promote_types(self.norm.dtype, self.dtype)
        for token, gate in enumerate(z):
            self.u.at[self.slot, token, self.head][...] = _load(found.at[token])
            found.at[token][...] = gate.astype(jnp.float32)
        plgpu.commit_smem()
        gate, place = rows_of(found.at[pl.ds(0, MOST)], _ROWS), found.at[pl.ds(MOST, MOST)]
        tile = rows_of(place, _ROWS).astype(self.dtype).astype(jnp.float32)
        factor = lax.rsqrt((tile * tile).sum(axis=1) * (1 / WIDTH) + self.eps)
        normed = (tile * _in_rows(factor, tile.shape, 0)).astype(self.dtype).astype(jnp.float32)
        weight = _in_rows(rows_of(self.norm, _ROWS.reduce(0)).astype(jnp.float32), tile.shape, 1)
        place[...] = (weight * normed).astype(rounded).astype(jnp.float32) * (gate * sigmoid(gate))
        plgpu.commit_smem()
        for token in range(self.tokens):
            out = self.out.at[self.slot, token, pl.ds(self.head * WIDTH, WIDTH)]
            out[...] = _load(found.at[MOST + token]).astype(self.dtype)


def _load(ref: Any) -> jax.Array:
    return rows_of(ref, VECTOR)


def _lane() -> jax.Array:
    return plgpu.layout_cast(lax.iota(jnp.int32, WIDTH), VECTOR)


def _along(vector: jax.Array, shape: tuple[int, int], axis: int) -> jax.Array:
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, shape, [axis]), MATRIX)


def _in_rows(vector: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, shape, [axis]), _ROWS)
