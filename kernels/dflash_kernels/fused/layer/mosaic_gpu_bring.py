"""What one CTA of the chain takes of each product, and how two of its warpgroups bring it to shared memory."""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.fused.layer.mosaic_gpu_narrow import copy_digits, take_digits
from dflash_kernels.fused.layer.plan import BLOCK, COPIES, FLIGHT, Plan, Product
from dflash_kernels.mosaic_gpu import mailbox as exchange
from dflash_kernels.mosaic_gpu.pipeline import div, rem
from dflash_kernels.mosaic_gpu.tma import address_of, copied, copy_once, copy_rows


class Bring:
    """A CTA's tiles and parts of the depth, its rings of weights and activations, and where results are handed over.

    `area`, the word of the exchange where this launch's begins, is for whoever derives from this to set.
    """

    area = 0

    def __init__(self, plan: Plan, stages, refs, buffers, interpret):
        self.plan, self.stages, self.refs, self.buffers, self.interpret = plan, stages, refs, buffers, interpret
        self.cta = lax.axis_index("cta")
        self.syncs = interpret is None

    def _part(self, product: Product):
        """Which part of the depth is this CTA's."""
        return rem(self.cta, product.splits)

    def _first_step(self, product: Product, part):
        return div(part * product.steps, product.splits)

    def _steps(self, product: Product):
        """Slots that this CTA takes: none where there are more CTAs than tiles."""
        part = self._part(product)
        steps = self._first_step(product, part + 1) - self._first_step(product, part)
        return jnp.where(self.cta < product.ctas, steps, 0).astype(jnp.int32)

    def _units(self, product: Product):
        """Slots of activations that this CTA takes."""
        return div(self._steps(product), product.parts)

    def _first_row(self, product: Product):
        return jnp.minimum(div(self.cta, product.splits) * product.rows, product.features - product.rows)

    def _first_column(self, product: Product):
        return div(self._first_step(product, self._part(product)), product.parts) * (COPIES * product.columns)

    def _column(self, product: Product, unit):
        """Where a slot of activations begins."""
        # CTAs that read the same ones begin with different ones. Of a layer of Qwen3-4B for 16 tokens that takes 6 us of 68 where
        # copies of three slots are on their way at once (`cp.async`), and nothing where two slots are read, which takes 53.
        if self.plan.narrow:
            units = jnp.maximum(self._units(product), 1)
            unit = lax.rem(unit + div(self.cta, product.splits), units)
        return self._first_column(product) + unit * (COPIES * product.columns)

    def _products(self):
        """Products with their place among the stages and what this CTA has taken before each: slots of weights, of activations."""
        taken, x_taken = jnp.int32(0), jnp.int32(0)
        for place, stage in enumerate(self.stages):
            if isinstance(stage, Product):
                yield place, stage, taken, x_taken
                taken, x_taken = taken + self._steps(stage), x_taken + self._units(stage)

    def _tiles(self, product: Product, step, weights):
        """Where the copies of one step come from: rows and columns of the weights, block by block; gate and up take turns."""
        column, whole = self._column(product, div(step, product.parts)), product.parts * product.features
        row = self._first_row(product) + rem(step, product.parts) * product.features
        for block in range(COPIES):
            first = column + block * product.columns
            if weights.shape == (whole, product.depth):
                yield pl.ds(row, product.rows), pl.ds(first, product.columns)
            else:  # blocks of columns, one below the other
                yield pl.ds(row + div(first, BLOCK) * whole, product.rows), pl.ds(0, BLOCK)

    def _bring_weights(self):
        arrived, left = self.buffers["w_in"], self.buffers["w_out"]
        arrivals = address_of(arrived) if self.syncs else None
        for _, product, taken, _ in self._products():

            def bring(step, _, product=product, taken=taken):
                index = taken + step
                slot = rem(index, self.plan.slots)
                if self.syncs:
                    self._clear(index)
                pl.when(index >= self.plan.slots)(lambda: plgpu.barrier_wait(left.at[slot]))
                if self.syncs:
                    # With more requests at once, everybody else's would wait longer for memory.
                    landed = index - FLIGHT
                    pl.when(landed >= 0)(lambda: plgpu.barrier_wait(arrived.at[rem(landed, self.plan.slots)]))
                weights = self.refs[product.name]
                for copy, (rows, columns) in enumerate(self._tiles(product, step, weights)):
                    target = self.buffers["w_sm"].at[slot, pl.ds(copy * product.rows, product.rows)]
                    if arrivals is None:
                        plgpu.copy_gmem_to_smem(weights.at[rows, columns], target, arrived.at[slot])
                    else:
                        copy_once(weights, rows, columns, target, arrivals, slot)

            lax.fori_loop(0, self._steps(product), bring, None)
        if self.syncs and "ahead" in self.refs:
            self._prefetch(self.plan.products[0], self.refs["ahead"])

    def _prefetch(self, product: Product, source):
        """Brings to the cache what the next launch reads first: memory is idle while other kernels run in between."""

        def bring(step, _):
            for rows, columns in self._tiles(product, step, source):
                plgpu.async_prefetch(source.at[rows, columns])

        lax.fori_loop(0, self._steps(product), bring, None)

    def _clear(self, index):
        """Waits until a slot may be filled for the first time."""

    def _bring_activations(self):
        source = {"o": "x", "gate_up": "scaled", "down": "gated", "next": "scaled"}
        for place, product, _, taken in self._products():
            if self.syncs and place > 0:
                self._take_activations(product, taken, source[product.name])
            else:
                self._copy_activations(product, taken, self.refs[source[product.name]])

    def _copy_activations(self, product: Product, taken, held):
        """Brings what was in memory before the launch."""
        if self.plan.narrow:
            self._copy_digits(product, taken, held)
            return
        lag, buffers, column = self.plan.x_slots // 2, self.buffers, self._first_column(product)

        def bring(unit, _):
            slot = self._free_x(taken + unit)
            first = column + unit * (self.plan.x_blocks * BLOCK)
            copy_rows(held, first, buffers["x_sm"].at[slot], rows=self.plan.live, interpret=self.interpret)

            @pl.when(unit >= lag)
            def _():
                copied(lag, self.interpret)
                self._ready_x(taken + unit - lag)

        units = self._units(product)
        lax.fori_loop(0, units, bring, None)
        copied(0, self.interpret)
        lax.fori_loop(jnp.maximum(units - lag, 0), units, lambda unit, _: self._ready_x(taken + unit), None)

    def _copy_digits(self, product: Product, taken, held):
        if self.syncs:
            self._take(product, taken, held, 0, product.depth, checks=False)
            return
        buffers = self.buffers

        def bring(unit, _):
            slot, first = self._free_x(taken + unit), self._column(product, unit)
            copy_digits(held, first, buffers["x_sm"].at[slot], buffers["unit_sm"].at[slot], rows=self.plan.live)
            plgpu.commit_smem()
            self._ready_x(taken + unit)

        lax.fori_loop(0, self._units(product), bring, None)

    def _take_activations(self, product: Product, taken, name: str):
        """Brings what other CTAs hand over."""
        pitch = self.plan.products[1].features if name == "gated" else self.plan.hidden
        self._take(product, taken, self.refs["exchange"], self._handed(name, product), pitch)

    def _take(self, product: Product, taken, area, word, pitch: int, checks: bool = True):
        """Brings a matrix of `pitch` columns that other CTAs hand over at a word of `area`, several slots at a time.

        Without `checks`, only as digits, what is there already.
        """
        group, units = self.plan.x_group, self._units(product)

        def bring(index, _):
            first = index * group
            count = jnp.minimum(units - first, group)
            slots = []
            for unit in range(group):
                place = taken + first + unit
                pl.when(unit < count)(functools.partial(self._await_free_x, place))
                slots.append(rem(place, self.plan.x_slots))
            columns = [self._column(product, first + unit) for unit in range(group)]
            target, sizes = self.buffers["x_sm"], {"rows": self.plan.live, "pitch": pitch}
            if self.plan.narrow:
                waits, of_units = (index == 0) & checks, self.buffers["unit_sm"]
                take_digits(area, word, columns, target, of_units, slots, count, waits, **sizes, checks=checks)
            else:
                exchange.take_rows(area, word, columns[0], target, slots, count, index == 0, **sizes)
            for unit in range(group):
                pl.when(unit < count)(functools.partial(self._ready_x, taken + first + unit))

        lax.fori_loop(0, div(units + (group - 1), group), bring, None)

    def _free_x(self, index):
        """The slot of activations number `index`, once it is free."""
        self._await_free_x(index)
        return rem(index, self.plan.x_slots)

    def _await_free_x(self, index):
        slot = rem(index, self.plan.x_slots)
        pl.when(index >= self.plan.x_slots)(lambda: plgpu.barrier_wait(self.buffers["x_out"].at[slot]))

    def _ready_x(self, index):
        plgpu.barrier_arrive(self.buffers["x_in"].at[rem(index, self.plan.x_slots)])

    def _handed(self, name: str, product: Product):
        """The word of this launch's exchange where `name` begins; `product` is one that gives or takes it."""
        area = self.plan.exchange
        if name == "gated":
            return self.area + area.gated
        stage = area.stage * (product.name in ("down", "next"))
        return self.area + stage + {"parts": 0, "squares": area.squares, "scaled": area.scaled}[name]
