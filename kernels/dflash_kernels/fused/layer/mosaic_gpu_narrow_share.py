"""How one CTA of the chain multiplies weights of one byte with digits of activations."""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.fused.layer.mosaic_gpu_hand import Hand
from dflash_kernels.fused.layer.mosaic_gpu_narrow import added, row_scales
from dflash_kernels.fused.layer.plan import COPIES, ROWS, Product
from dflash_kernels.mosaic_gpu.pipeline import div, rem

_WGMMA = plgpu.Layout.WGMMA


class NarrowShare(Hand):
    """One warpgroup multiplies, as for weights of two bytes.

    Sums of float8 products are kept in about fourteen bits, so those of a slot, 256 columns, go to float32 before the next one's.
    """

    def _narrow_product(self, product: Product, taken, x_taken):
        units, tokens, pieces = self._units(product), self.plan.tokens, product.pieces
        sums = jnp.int32 if self.refs[product.name].dtype == jnp.int8 else jnp.float32
        scales, last = self.refs[f"{product.name}_scales"], product.parts * product.features - 1
        scales = [
            row_scales(scales, self._first_row(product) + (part * product.features + offset), last, self.interpret)
            for part, offset in pieces
        ]

        def step(unit, totals):
            x_slot, index = rem(x_taken + unit, self.plan.x_slots), taken + unit * product.parts
            slots = [rem(index + part, self.plan.slots) for part in range(product.parts)]
            plgpu.barrier_wait(self.buffers["x_in"].at[x_slot])

            def multiply(*accs):
                for part, slot in enumerate(slots):
                    plgpu.barrier_wait(self.buffers["w_in"].at[slot])
                    for block in range(COPIES):
                        x = self.buffers["x_sm"].at[x_slot, block].transpose((1, 0))
                        for acc, (own, offset) in zip(accs, pieces, strict=True):
                            if own == part:
                                rows = pl.ds(block * product.rows + offset, ROWS)
                                plgpu.wgmma(acc, self.buffers["w_sm"].at[slot, rows], x)
                return tuple(acc[...] for acc in accs)

            found = pl.run_scoped(multiply, *[plgpu.ACC((ROWS, 2 * tokens), sums) for _ in pieces])
            for slot in slots:
                plgpu.barrier_arrive(self.buffers["w_out"].at[slot])
            totals = tuple(
                added(total, one, self.buffers["unit_sm"], x_slot, self.interpret)
                for total, one in zip(totals, found, strict=True)
            )
            plgpu.barrier_arrive(self.buffers["x_out"].at[x_slot])
            return totals

        zero = jnp.zeros((ROWS, tokens), jnp.float32)
        totals = tuple(plgpu.layout_cast(zero, _WGMMA) for _ in pieces)
        # The norm's factors are known a little later than the first activations, and the product's first half needs none.
        half = div(units, 2) if product.name in ("gate_up", "next") else units
        totals, factors = lax.fori_loop(0, half, step, totals), ()
        if product.name in ("gate_up", "next"):
            factors = (self._factors(product),)
            totals = lax.fori_loop(half, units, step, totals)
        results = [
            total * lax.broadcast_in_dim(scale, total.shape, [0]) for total, scale in zip(totals, scales, strict=True)
        ]
        self._finish(product, (*results, *factors))
