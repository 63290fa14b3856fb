"""The fold of verified tokens into the state on Hopper, in place: a CTA for 64 rows of a head's matrix, read and written once.

The rows are in registers while the tokens' outer products are added, one token after the other; its keys and writes wait in shared
memory. The CTAs of a slot move its convolution's rows on as well, 128 channels each.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.core.layouts import aliased_ref, freeze_aliased
from dflash_kernels.mosaic_gpu.columns import VECTOR
from dflash_kernels.mosaic_gpu.layouts import rows_of
from dflash_kernels.mosaic_gpu.thread_op import COLUMN, MATRIX, ROW, kernel
from dflash_kernels.recurrent.delta_rule.inputs import KEPT, DeltaFactors, DeltaState

WIDTH, ROWS = 128, 64  # of heads; of a matrix instruction's operand in registers


def fold(state: DeltaState, factors: DeltaFactors, counts: jax.Array, interpret: Any = None) -> DeltaState:
    """`counts [B]` int32; heads of 128."""
    slots, tokens, value_heads = factors.cum.shape

    def body(*refs: Any, **buffers: Any) -> None:
        _Rows(refs, buffers).run()

    body.__name__ = "delta_fold"  # what profilers show
    s, conv = aliased_ref(state.s), aliased_ref(state.conv)
    kernel(
        body, out_type=(), grid=(slots, value_heads, 2), grid_names=("slot", "head", "half"),
        scratch_types={"k": plgpu.SMEM((tokens, WIDTH), jnp.float32), "u": plgpu.SMEM((tokens, WIDTH), jnp.float32)},
        # Pallas puts two barriers around every store. One between writing keys and writes and reading them is enough.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True), interpret=interpret,
    )(counts, *factors, s, conv)  # fmt: skip
    return DeltaState(freeze_aliased(s), freeze_aliased(conv))


class _Rows:
    """The program of one CTA."""

    def __init__(self, refs: tuple[Any, ...], buffers: dict[str, Any]):
        self.counts, self.k, self.u, self.cum, self.rows, self.s, self.conv = refs
        self.buffers, self.tokens = buffers, self.cum.shape[1]
        self.slot, self.head, self.half = (lax.axis_index(name) for name in ("slot", "head", "half"))
        self.count = jnp.minimum(self.counts[self.slot], self.tokens)

    def run(self) -> None:
        # Slots of which no token stands stay as they are.
        pl.when(self.count > 0)(self._fold)

    def _fold(self) -> None:
        value_heads = self.u.shape[2]
        key = lax.div(self.head, jnp.int32(value_heads // self.k.shape[2]))
        place = self.s.at[self.slot, self.head, pl.ds(self.half * ROWS, ROWS)]
        held = rows_of(place, MATRIX)
        end = self.cum[self.slot, self.count - 1, self.head]
        for token in range(self.tokens):
            # Past the count anything may stand.
            stands = _everywhere(token) < self.count
            decay = jnp.exp(jnp.minimum(end - self.cum[self.slot, token, self.head], 0.0))
            for name, ref, head, factor in (("k", self.k, key, decay), ("u", self.u, self.head, jnp.float32(1))):
                row = rows_of(ref.at[self.slot, token, head], VECTOR) * factor
                self.buffers[name].at[token][...] = jnp.where(stands, row, 0.0)
        plgpu.commit_smem()
        block = self.half * value_heads + self.head  # of channels
        pl.when(block < self.conv.shape[2] // WIDTH)(lambda: self._move_on(pl.ds(block * WIDTH, WIDTH)))

        def add(token: Any, held: jax.Array) -> jax.Array:
            k = rows_of(self.buffers["k"].at[token, pl.ds(self.half * ROWS, ROWS)], ROW)
            u = rows_of(self.buffers["u"].at[token], COLUMN)
            return held + _along(k, held.shape, 0) * _along(u, held.shape, 1)

        place[...] = lax.fori_loop(0, self.count, add, held * jnp.exp(end))

    def _move_on(self, channels: Any) -> None:
        """The convolution's rows of some channels."""
        found = []
        for row in range(KEPT):
            place = self.count + row  # among what stood before and the tokens
            old = rows_of(self.conv.at[self.slot, jnp.minimum(place, KEPT - 1), channels], VECTOR)
            new = rows_of(self.rows.at[self.slot, jnp.maximum(place - KEPT, 0), channels], VECTOR)
            found.append(jnp.where(_everywhere(place) < KEPT, old, new.astype(old.dtype)))
        for row, moved in enumerate(found):
            self.conv.at[self.slot, row, channels][...] = moved


def _everywhere(number: Any) -> jax.Array:
    return jnp.full((WIDTH,), number, jnp.int32)


def _along(vector: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, shape, [axis]), MATRIX)
