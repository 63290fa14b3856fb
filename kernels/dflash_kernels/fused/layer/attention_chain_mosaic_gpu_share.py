"""One CTA of a chain that begins with attention: what it does before the first product.

A CTA attends with the queries of one KV head to one part of a sequence's keys. It norms and turns these queries itself, and so does
whoever has the places of the new keys in its part: nobody waits for another launch or CTA before the parts are put together. The
warpgroup of the weights fills the ring meanwhile, but for its end, which queries, keys and values have until then.
"""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import functools

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.fused.layer.mosaic_gpu_item_narrow import NarrowItem
from dflash_kernels.fused.layer.mosaic_gpu_plan import Attention
from dflash_kernels.fused.layer.mosaic_gpu_share import Share
from dflash_kernels.fused.layer.mosaic_gpu_sm90_attention import Item
from dflash_kernels.fused.layer.plan import Plan, Product

ATTEND, MERGE = "attend", "merge"


class AttendingShare(Share):
    """What one CTA does of the stages it is given, attention among them."""

    def __init__(self, attention: Attention, plan: Plan, stages, refs, buffers, interpret):
        self.attention, self.first_stages = attention, [stage for stage in stages if stage in (ATTEND, MERGE)]
        super().__init__(plan, [stage for stage in stages if stage not in (ATTEND, MERGE)], refs, buffers, interpret)

    def run(self):
        thread = lax.axis_index("wg")
        pl.when(thread == 0)(self._attend)
        pl.when(thread == 2)(self._bring_keys)
        super().run()

    def _attend(self):
        if ATTEND in self.first_stages:
            self._for_item(lambda item: item.attend())
        if self.syncs:
            plgpu.barrier_arrive(self.buffers["attended"])
        if MERGE in self.first_stages:
            self._for_item(lambda item: item.merge())

    def _bring_keys(self):
        if ATTEND not in self.first_stages:
            return
        self._for_item(lambda item: item.bring(self._ask))
        if self.syncs:
            pl.when(self.cta >= self.attention.items)(self._ask)

    def _ask(self):
        """Lets the warpgroup of the weights begin."""
        if self.syncs:
            plgpu.barrier_arrive(self.buffers["asked"])

    def _for_item(self, work):
        kind = NarrowItem if self.attention.narrow_stages else Item
        pl.when(self.cta < self.attention.items)(lambda: work(kind(self)))

    def _clear(self, index):
        """Before slots are filled for the first time: any of them, so that keys do not wait behind weights, and the last ones."""
        for first, barrier in ((0, "asked"), (self.attention.kept(self.plan), "attended")):
            pl.when(index == first)(functools.partial(plgpu.barrier_wait, self.buffers[barrier]))

    def _copy_activations(self, product: Product, taken, held):
        if self.syncs:
            self._take(product, taken, held, 0, product.depth)
        else:
            super()._copy_activations(product, taken, held)

    def _product(self, product: Product, taken, x_taken):
        super()._product(product, taken, x_taken)
        self._after(product)

    def _after(self, product: Product):
        if self.syncs and product.name == "gate_up":
            # The norm of its input is of sums that all CTAs' products with the heads went into.
            self._for_item(lambda item: item.empty())
