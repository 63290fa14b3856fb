"""One CTA of the chain: how it multiplies what is brought."""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.fused.layer.mosaic_gpu_narrow_share import NarrowShare
from dflash_kernels.fused.layer.plan import COPIES, ROWS, Product
from dflash_kernels.mosaic_gpu.pipeline import div, rem


class Share(NarrowShare):
    """What one CTA does of the stages it is given, as its warpgroups."""

    def run(self):
        works = [self._multiply, self._bring_weights, self._bring_activations]
        for thread, work in enumerate(works):
            takes_turns = self.syncs and work in (self._multiply, self._bring_activations)
            task = functools.partial(self._turn, thread, work) if takes_turns else work
            pl.when(lax.axis_index("wg") == thread)(task)

    def _multiply(self):
        taken = {place: counts for place, _, *counts in self._products()}
        self._empty_next()
        for place, stage in enumerate(self.stages):
            if isinstance(stage, Product):
                self._product(stage, *taken[place])
            else:
                self._add_up(next(product for product in self.plan.products if product.name == stage), None)

    def _product(self, product: Product, taken, x_taken):
        (self._narrow_product if self.plan.narrow else self._wide_product)(product, taken, x_taken)

    def _wide_product(self, product: Product, taken, x_taken):
        pieces = product.pieces
        shape, units, steps = (ROWS, self.plan.tokens), self._units(product), self._steps(product)

        def multiply(*accs):
            def step(unit, _):
                x_slot = rem(x_taken + unit, self.plan.x_slots)
                plgpu.barrier_wait(self.buffers["x_in"].at[x_slot])
                for turn in range(product.parts):
                    index = taken + unit * product.parts + turn
                    slot = rem(index, self.plan.slots)
                    plgpu.barrier_wait(self.buffers["w_in"].at[slot])
                    for block in range(COPIES):
                        x = self.buffers["x_sm"].at[x_slot, block].transpose((1, 0))
                        for acc, (part, offset) in zip(accs, pieces, strict=True):
                            if part == turn:
                                rows = pl.ds(block * product.rows + offset, ROWS)
                                plgpu.wgmma(acc, self.buffers["w_sm"].at[slot, rows], x)
                    # All but this slot's instructions are done: the slot before can be filled again.
                    plgpu.wgmma_wait(COPIES * len(product.offsets))
                    pl.when(index > taken)(lambda index=index: self._release(index - 1))
                pl.when(unit > 0)(lambda: self._release_x(x_taken + unit - 1))

            # The norm's factors are known a little later than the first activations, and the product's first half needs none.
            half = div(units, 2) if product.name in ("gate_up", "next") else units
            lax.fori_loop(0, half, step, None)
            factors = self._factors(product) if product.name in ("gate_up", "next") else None
            if factors is not None:
                lax.fori_loop(half, units, step, None)
            results = tuple(acc[...] for acc in accs)

            @pl.when(units > 0)
            def _():
                self._release(taken + steps - 1)
                self._release_x(x_taken + units - 1)

            return results if factors is None else (*results, factors)

        tiles = pl.run_scoped(multiply, *[plgpu.ACC(shape, jnp.float32) for _ in pieces])
        self._finish(product, tiles)

    def _release(self, index):
        plgpu.barrier_arrive(self.buffers["w_out"].at[rem(index, self.plan.slots)])

    def _release_x(self, index):
        plgpu.barrier_arrive(self.buffers["x_out"].at[rem(index, self.plan.x_slots)])
