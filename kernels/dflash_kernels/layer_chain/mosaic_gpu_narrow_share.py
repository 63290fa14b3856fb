"""How one CTA of the chain multiplies weights of one byte."""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.layer_chain import mosaic_gpu_exchange as exchange
from dflash_kernels.layer_chain.mosaic_gpu_hand import Hand
from dflash_kernels.layer_chain.mosaic_gpu_narrow import deal_registers, times_rows, widened
from dflash_kernels.layer_chain.mosaic_gpu_ops import div, rem, rows_of
from dflash_kernels.layer_chain.mosaic_gpu_plan import HALF, LINE, ROWS, Product

_WGMMA = plgpu.Layout.WGMMA
FIRST, SECOND = 0, 3  # warpgroups that multiply


class NarrowShare(Hand):
    """Two warpgroups multiply, a block of each slot each, and run the same code: what else they would do takes instructions from
    memory. The first one adds the results of both and hands them over.
    """

    def _run_narrow(self):
        wg = lax.axis_index("wg")
        pl.when((wg == FIRST) | (wg == SECOND))(self._multiply_narrow)
        works = {1: self._bring_weights, 2: self._bring_activations}
        for thread, work in works.items():
            takes_turns = self.syncs and work == self._bring_activations
            task = functools.partial(self._turn, thread, work) if takes_turns else work
            pl.when(wg == thread)(functools.partial(self._begin, thread, task))

    def _begin(self, thread: int, task):
        """All that a warpgroup does, in one branch: it has registers of its own."""
        if self.syncs:
            deal_registers(thread)
        self._prepare(thread)
        task()

    def _prepare(self, thread: int):
        """What comes before the first product."""

    def _multiply_narrow(self):
        wg = lax.axis_index("wg")
        self.adds, self.block = wg == FIRST, div(wg, SECOND)
        if self.syncs:
            deal_registers(FIRST)
        pl.when(self.adds)(lambda: self._prepare(FIRST))
        own = self.cta * LINE + FIRST
        if self.syncs:
            # The second one has no use for what it reads, and the first one counts this launch when all is done.
            self.launches = exchange.launches(self.refs["exchange"], own)
            self.area = self.plan.exchange.area(rem(self.launches, 2))
        pl.when(self.adds)(self._empty_next)
        taken, count = {place: counts for place, _, *counts in self._products()}, 0
        for place, stage in enumerate(self.stages):
            if isinstance(stage, Product):
                self._narrow_product(stage, count, *taken[place])
                count += 1
            else:
                product = next(product for product in self.plan.products if product.name == stage)
                pl.when(self.adds)(functools.partial(self._add_up, product, None))
        if self.syncs:
            pl.when(self.adds)(lambda: exchange.launched(self.refs["exchange"], own, self.launches + 1))

    def _narrow_product(self, product: Product, count: int, taken, x_taken):
        units, factored = self._units(product), product.name in ("gate_up", "next")
        halves = 2 if len(product.pieces) == 1 else 1  # of a block that one turn of the loop takes

        def multiply(*accs):
            def step(turn, _):
                unit, half = (turn, 0) if halves == 2 else (div(turn, 2), rem(turn, 2))
                x_slot, index = rem(x_taken + unit, self.plan.x_slots), taken + unit * product.parts

                def arrive():
                    plgpu.barrier_wait(self.buffers["x_in"].at[x_slot])
                    for part in range(product.parts):
                        plgpu.barrier_wait(self.buffers["w_in"].at[rem(index + part, self.plan.slots)])

                def leave():
                    for part in range(product.parts):
                        plgpu.barrier_arrive(self.buffers["w_out"].at[rem(index + part, self.plan.slots)])
                    plgpu.barrier_arrive(self.buffers["x_out"].at[x_slot])

                arrive() if halves == 2 else pl.when(half == 0)(arrive)
                for own in range(halves):
                    own = own if halves == 2 else half
                    x = self.buffers["x_sm"].at[x_slot, 2 * self.block + own].transpose((1, 0))
                    for acc, piece in zip(accs, product.pieces, strict=True):
                        plgpu.wgmma(acc, self._piece(product, index, own, *piece), x)
                        # Registers of the one before are free again.
                        plgpu.wgmma_wait(1)
                plgpu.wgmma_wait(0)
                leave() if halves == 2 else pl.when(half == 1)(leave)
                if factored:
                    # Known a little later than the first activations.
                    pl.when(self.adds & (turn == div(units * (2 // halves), 2)))(keep_factors)

            def keep_factors():
                self.buffers["factor_sm"][...] = self._factors(product)

            lax.fori_loop(0, units * (2 // halves), step, None)
            if factored:
                # Every CTA waits for them: it empties afterwards what all have read before.
                pl.when(self.adds & (units == 0))(keep_factors)
            return tuple(acc[...] for acc in accs)

        tiles = pl.run_scoped(multiply, *[plgpu.ACC((ROWS, self.plan.tokens), jnp.float32) for _ in product.pieces])

        @pl.when(self.block == 1)
        def _():
            if count:
                plgpu.barrier_wait(self.buffers["added"])
            for place, tile in enumerate(tiles):
                self._sums(place)[...] = tile
            plgpu.barrier_arrive(self.buffers["summed"])

        @pl.when(self.adds)
        def _():
            results = self._with_others(product, tiles)
            if factored:
                results = (*results, rows_of(self.buffers["factor_sm"], _WGMMA))
            self._finish(product, results)
            self._after(product)

    def _piece(self, product: Product, index, half, part: int, offset: int):
        """Half of this warpgroup's block of one piece of a unit whose first slot is number `index`, in registers."""
        both = part == product.parts
        slots = [rem(index + of, self.plan.slots) for of in (range(product.parts) if both else (part,))]
        rows = pl.ds(self.block * product.rows + offset, product.rows - ROWS if both else ROWS)
        spare = self.buffers["wide_sm"].at[self.block] if "wide_sm" in self.buffers else None
        return widened([self.buffers["w_sm"].at[slot, rows] for slot in slots], half, spare, self.interpret)

    def _after(self, product: Product):
        """What comes after a product."""

    def _with_others(self, product: Product, tiles):
        """Tiles with those of the other warpgroup, times the scales of their rows of weights."""
        plgpu.barrier_wait(self.buffers["summed"])
        sums = [tile + rows_of(self._sums(place), _WGMMA) for place, tile in enumerate(tiles)]
        if product.halved:
            *sums, both = sums
            place = len(sums)
            self._sums(place)[...] = both
            # What is left of gate and of up, as first rows of a tile each.
            halves = [both, rows_of(self._sums(place, HALF), _WGMMA)]
            sums = [tile for pair in zip(sums, halves, strict=True) for tile in pair]
        plgpu.barrier_arrive(self.buffers["added"])
        scales, last = self.refs[f"{product.name}_scales"], product.parts * product.features - 1
        places = [(part, offset) for part in range(product.parts) for offset in product.offsets]
        found = []
        for (part, offset), tile in zip(places, sums, strict=True):
            first = self._first_row(product) + (part * product.features + offset)
            found.append(times_rows(tile, scales, first, last, self.interpret))
        return tuple(found)

    def _sums(self, place: int, first: int = 0):
        """Where a tile of results lies that one warpgroup leaves for another, or what begins with its row `first`."""
        return self.buffers["sum_sm"].at[pl.ds(place * ROWS + first, ROWS)]
