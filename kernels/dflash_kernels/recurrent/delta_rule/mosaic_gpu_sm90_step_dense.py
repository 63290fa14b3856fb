"""A plain step of the gated delta rule and the product after it on Hopper, of one slot, in one launch.

All that a CTA multiplies fits its shared memory and is on its way from the start. Meanwhile the first CTAs of each part of the
matrix have a head each: they announce what it gives before they write its state. The others wait for those heads alone that they
multiply. With one row a matrix instruction would be nearly all zeros, so both warpgroups multiply in registers, in float32.

Pallas' interpreter cannot make CTAs wait for each other: there heads and product are a launch each.
"""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.core.device import WARPGROUP
from dflash_kernels.core.layouts import aliased_ref, freeze_aliased
from dflash_kernels.mosaic_gpu.counters import announce, await_announced
from dflash_kernels.mosaic_gpu.layouts import TILED, rows_of, store
from dflash_kernels.mosaic_gpu.pipeline import div, rem
from dflash_kernels.mosaic_gpu.thread_op import COLUMN, MATRIX, ROW, kernel
from dflash_kernels.mosaic_gpu.tma import address_of, copy_once
from dflash_kernels.recurrent.delta_rule.inputs import DeltaShape, DeltaState, DeltaWeights
from dflash_kernels.recurrent.delta_rule.mosaic_gpu_sm90_step import WIDTH, Head
from dflash_kernels.recurrent.delta_rule.step_plan import BLOCK, CONSUMERS, TILE, StepPlan

HEADS, PRODUCT = "heads", "product"
VECTOR = 4  # neighbouring numbers of one thread


def step_dense(
    plan: StepPlan, projected: jax.Array, weights: DeltaWeights, state: DeltaState, live: jax.Array, matrix: jax.Array,
    ready: Any, shape: DeltaShape, eps: float, interpret: Any = None,
) -> tuple[jax.Array, DeltaState]:  # fmt: skip
    """`[parts, 1, D]` float32; `projected [1, 1, W]`, `live [1]` int32, `matrix [D, Hv * 128]`.

    `ready` is a Ref of `plan.parts` zeros or more that no other launch uses at the same time, and holds zeros afterwards.
    """
    s = aliased_ref(state.s)
    out = jax.ShapeDtypeStruct((1, 1, shape.value_heads * WIDTH), projected.dtype)
    conv = jax.ShapeDtypeStruct(state.conv.shape, state.conv.dtype)
    parts = jax.ShapeDtypeStruct((plan.parts, 1, plan.features), jnp.float32)
    given = (projected, *weights, state.conv, live, s)

    def launch(stages: tuple[str, ...], results: tuple[Any, ...]) -> Any:
        def body(*refs: Any, **buffers: Any) -> None:
            _Cta(plan, shape, eps, stages, refs, buffers).run()

        body.__name__ = "delta_step_dense"  # what profilers show
        return kernel(
            body, out_type=results, scratch_types=_scratch(plan, matrix.dtype), grid=(plan.ctas,), grid_names=("cta",),
            num_threads=CONSUMERS, thread_name="wg", compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=interpret,
        )  # fmt: skip

    if interpret is None:
        _, after, found = launch((HEADS, PRODUCT), (out, conv, parts))(*given, matrix, ready)
    else:
        mixed, after = launch((HEADS,), (out, conv))(*given)
        (found,) = launch((PRODUCT,), (parts,))(matrix, mixed)
    return found, DeltaState(freeze_aliased(s), after)


def _scratch(plan: StepPlan, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of one CTA."""
    blocks = plan.columns // BLOCK
    return {
        "w_sm": plgpu.SMEM((blocks, TILE, BLOCK), dtype, transforms=TILED), "full": plgpu.Barrier(num_barriers=blocks),
        "x_sm": plgpu.SMEM((CONSUMERS, plan.own), jnp.float32), "sums": plgpu.SMEM((TILE,), jnp.float32), "added": plgpu.Barrier(),
        **{name: plgpu.SMEM((WIDTH,), jnp.float32) for name in ("q", "k")},
    }  # fmt: skip


class _Cta:
    """The program of one CTA: one warpgroup starts the copies, the other may have a head; then both multiply."""

    def __init__(
        self, plan: StepPlan, shape: DeltaShape, eps: float, stages: tuple[str, ...], refs: tuple[Any, ...],
        buffers: dict[str, Any],
    ):  # fmt: skip
        self.plan, self.shape, self.eps, self.stages, self.buffers = plan, shape, eps, stages, buffers
        if stages == (HEADS,):
            self.given, self.kept = refs[:8], refs[8:]
        elif stages == (PRODUCT,):
            self.matrix, self.mixed, self.parts = refs
        else:
            self.given, self.matrix, self.ready, self.kept, self.parts = (
                refs[:8],
                refs[8],
                refs[9],
                refs[10:12],
                refs[12],
            )
            self.mixed = refs[10]
        index = lax.axis_index("cta")
        self.part, self.tile = div(index, plan.tiles), rem(index, plan.tiles)

    def run(self) -> None:
        for warpgroup, first in enumerate((self._head, self._fill)):

            @pl.when(lax.axis_index("wg") == warpgroup)
            def _(warpgroup: int = warpgroup, first: Any = first) -> None:
                first()
                if PRODUCT in self.stages:
                    self._multiply(warpgroup)

    def _head(self) -> None:
        if HEADS not in self.stages:
            return
        shared = {name: self.buffers[name] for name in ("q", "k")}
        index = self.part * self.plan.heads + self.tile
        head = Head(self.shape, self.eps, (*self.given, *self.kept), shared, jnp.int32(0), index)

        @pl.when(self.tile < self.plan.heads)
        def _() -> None:
            head.run((lambda: announce(self.ready, self.part)) if PRODUCT in self.stages else None)

    def _fill(self) -> None:
        """Starts the copies of all that the CTA multiplies."""
        if PRODUCT not in self.stages:
            return
        full, blocks = address_of(self.buffers["full"]), self.plan.columns // BLOCK

        def fill(block: Any, _: None) -> None:
            rows = pl.ds(self.tile * TILE, TILE)
            columns = pl.ds(self.part * self.plan.columns + block * BLOCK, BLOCK)
            copy_once(self.matrix, rows, columns, self.buffers["w_sm"].at[block], full, block)

        lax.fori_loop(0, blocks, fill, None)

    def _multiply(self, warpgroup: int) -> None:
        plan, x_sm = self.plan, self.buffers["x_sm"].at[warpgroup]
        blocks = plan.own // BLOCK
        first = warpgroup * blocks
        if HEADS in self.stages:
            await_announced(self.ready, self.part, given=plan.heads, taken=CONSUMERS * plan.tiles)
        own = self.mixed.at[0, 0, pl.ds(self.part * plan.columns + warpgroup * plan.own, plan.own)]
        vector = math.gcd(plan.own // WARPGROUP, VECTOR)
        x_sm[...] = rows_of(own, plgpu.Layout.WG_STRIDED((plan.own,), vec_size=vector)).astype(jnp.float32)
        plgpu.commit_smem()
        sums = plgpu.layout_cast(jnp.zeros((TILE, BLOCK), jnp.float32), MATRIX)
        for block in range(blocks):
            x = rows_of(x_sm.at[pl.ds(block * BLOCK, BLOCK)], COLUMN)
            plgpu.barrier_wait(self.buffers["full"].at[first + block])
            w = plgpu.load(self.buffers["w_sm"].at[first + block], layout=MATRIX)
            sums = sums + w.astype(jnp.float32) * lax.broadcast_in_dim(x, w.shape, [1])
        self._give(warpgroup, sums.sum(axis=1))

    def _give(self, warpgroup: int, sums: jax.Array) -> None:
        """Both consumers' sums: one leaves its own in shared memory, the other adds and stores them."""
        shared, added = self.buffers["sums"], self.buffers["added"]
        if warpgroup > 0:
            shared[...] = sums
            plgpu.barrier_arrive(added)
        else:
            plgpu.barrier_wait(added)
            total = sums + rows_of(shared, ROW)
            store(self.parts.at[self.part, 0, pl.ds(self.tile * TILE, TILE)], total)
