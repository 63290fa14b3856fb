"""One CTA of a chain that begins with attention: what it does before the first product.

A CTA attends with the queries of one KV head to one part of a sequence's keys. It norms and turns these queries itself, and so does
whoever has the places of the new keys in its part: nobody waits for another launch or CTA before the parts are put together. The
warpgroup of the weights fills the ring meanwhile, but for its last slots, which queries, keys and values have until then.
"""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.attention_chain import mosaic_gpu_ops as ops
from dflash_kernels.attention_chain.mosaic_gpu_plan import KEYS, Attention
from dflash_kernels.layer_chain.mosaic_gpu_ops import div, rem
from dflash_kernels.layer_chain.mosaic_gpu_plan import Plan, Product
from dflash_kernels.layer_chain.mosaic_gpu_share import Share
from dflash_kernels.paged_attention.mosaic_gpu_ops import LOG2E, add_values, spread

ATTEND, MERGE = "attend", "merge"
_WGMMA, _ROW = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)


class AttendingShare(Share):
    """What one CTA does of the stages it is given, attention among them."""

    def __init__(self, attention: Attention, plan: Plan, stages, refs, buffers, interpret):
        self.attention, self.first_stages = attention, [stage for stage in stages if stage in (ATTEND, MERGE)]
        super().__init__(plan, [stage for stage in stages if stage not in (ATTEND, MERGE)], refs, buffers, interpret)

    def run(self):
        if not self.plan.narrow:
            thread = lax.axis_index("wg")
            pl.when(thread == 0)(self._attend)
            pl.when(thread == 2)(self._bring_keys)
        super().run()

    def _prepare(self, thread: int):
        if thread in (0, 2):
            (self._attend if thread == 0 else self._bring_keys)()

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
        pl.when(self.cta < self.attention.items)(lambda: work(_Item(self)))

    def _clear(self, index):
        """Before slots are filled for the first time: any of them, so that keys do not wait behind weights, and the last ones."""
        for first, barrier in ((0, "asked"), (self.plan.slots - self.attention.borrowed, "attended")):
            pl.when(index == first)(functools.partial(plgpu.barrier_wait, self.buffers[barrier]))

    def _copy_activations(self, product: Product, taken, held):
        if self.syncs:
            self._take(product, taken, held, 0, product.depth)
        else:
            super()._copy_activations(product, taken, held)

    def _product(self, product: Product, taken, x_taken):
        super()._product(product, taken, x_taken)
        if self.syncs and product.name == "gate_up":
            # The norm of its input is of sums that all CTAs' products with the heads went into.
            self._for_item(lambda item: item.empty())


class _Item:
    """A part of a sequence's keys under the queries of one KV head. Scalars are read once, at construction."""

    def __init__(self, share: AttendingShare):
        self.share, self.attention, self.refs, self.buffers = share, share.attention, share.refs, share.buffers
        attention, self.interpret = self.attention, share.interpret
        self.item = share.cta
        self.sequence_head, self.split = div(self.item, attention.splits), rem(self.item, attention.splits)
        self.sequence = div(self.sequence_head, attention.kv_heads)
        self.head = rem(self.sequence_head, attention.kv_heads)
        seq_len, self.q_len = self.refs["seq_lens"][self.sequence], self.refs["q_lens"][self.sequence]
        # A sequence longer than its table is cut to it; positions still count from the true length.
        self.first = seq_len - self.q_len
        held = jnp.minimum(seq_len, attention.table_width * attention.page_size)
        self.kv_len = jnp.where(self.q_len > 0, held, 0)
        tiles = div(self.kv_len + (KEYS - 1), KEYS)
        share_of = div(tiles + (attention.splits - 1), attention.splits)
        # Parts that have keys, the first ones.
        self.busy = lax.div(tiles + share_of - 1, jnp.maximum(share_of, 1))
        self.begin = self.split * share_of
        self.end = jnp.maximum(jnp.minimum(self.begin + share_of, tiles), self.begin)
        # Tiles from here on hold new keys, or end within the sequence.
        self.plain_end = jnp.clip(div(jnp.maximum(self.first, 0), KEYS), self.begin, self.end)

    def bring(self, asked):
        """Starts the copies of keys and values, each as soon as its stage is free; calls `asked` when no more stage is free."""
        last, full = div(self.kv_len - 1, self.attention.page_size), self.begin + self.attention.stages

        def bring(tile, _):
            self._fill(tile, self._stage(tile), self._pages(tile, last))

        lax.fori_loop(self.begin, jnp.minimum(full, self.end), bring, None)
        asked()
        lax.fori_loop(full, self.end, bring, None)

    def _pages(self, tile, last):
        attention = self.attention
        if attention.page_size >= KEYS:
            entries = [div(tile, attention.page_size // KEYS)]
        else:
            count = KEYS // attention.page_size
            entries = [tile * count + copy for copy in range(count)]
        return [self.refs["table"][self.sequence, jnp.minimum(entry, last)] for entry in entries]

    def _fill(self, tile, stage, pages):
        attention = self.attention
        for which, name in enumerate(("k", "v")):
            arrived, left = self.buffers[f"{name}_in"].at[stage], self.buffers[f"{name}_out"].at[stage]
            pl.when(tile - self.begin >= attention.stages)(functools.partial(plgpu.barrier_wait, left))
            rows = min(attention.page_size, KEYS)
            first = rem(tile, max(attention.page_size // KEYS, 1)) * KEYS
            for copy, page in enumerate(pages):
                for block in range(2):
                    source = self.refs[name].at[page, self.head, pl.ds(first, rows), pl.ds(block * KEYS, KEYS)]
                    place = pl.ds(block * KEYS + copy * rows, rows)
                    target = self.buffers["kv_sm"].at[self._slot(which, stage), place]
                    plgpu.copy_gmem_to_smem(source, target, arrived)

    def _stage(self, tile):
        return rem(tile - self.begin, self.attention.stages)

    def _queries(self) -> int:
        """Slot of the ring that the queries have."""
        return self.share.plan.slots - 1

    def _slot(self, which: int, stage):
        """Slot of the ring that keys (0) or values (1) of a stage have; the last one is the queries'."""
        return self._queries() - 1 - 2 * stage - which

    def attend(self):
        """Leaves this part, where it has keys."""
        ring = self.buffers["kv_sm"]
        # Before the first branch on a length, so that they are on their way together.
        ops.load_queries(
            self.attention,
            self.share.plan.eps,
            self.refs,
            ring,
            self._queries(),
            self.sequence,
            self.head,
            self.interpret,
        )

        @pl.when(self.begin < self.end)
        def _():
            self._start()
            rows = plgpu.layout_cast(jnp.full((KEYS,), -jnp.inf, jnp.float32), _ROW)
            total = plgpu.layout_cast(jnp.zeros((KEYS,), jnp.float32), _ROW)
            accs = [plgpu.layout_cast(jnp.zeros((KEYS, KEYS), jnp.float32), _WGMMA) for _ in range(2)]
            carry = lax.fori_loop(
                self.begin, self.plain_end, functools.partial(self._step, plain=True), (*accs, rows, total)
            )
            carry = lax.fori_loop(self.plain_end, self.end, functools.partial(self._step, plain=False), carry)
            self._finish(*carry)

    def _start(self):
        """New keys and values, where this part has their places."""
        low, high = self.begin * KEYS, jnp.minimum(self.end * KEYS, self.kv_len)

        @pl.when(self.plain_end < self.end)
        def _():
            ops.stage_new(
                self.attention, self.share.plan.eps, self.refs, self.buffers["new_sm"], self.sequence, self.head, self.first,
                low, high, self.interpret,
            )  # fmt: skip

    def _step(self, tile, carry, *, plain: bool):
        """One tile of keys: scores, online softmax in base 2, values."""
        attention, (*accs, top, total), stage = self.attention, carry, self._stage(tile)
        scores = self._scores(self._there("k", tile, stage, plain))
        self._release("k", tile, stage)
        unit = attention.scale * LOG2E
        if not plain:
            scores = jnp.where(self._mask(tile), scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(axis=1) * unit)
        # A row that has seen nothing yet keeps -inf as its maximum; 0 in its place makes every weight 0 instead of NaN.
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        kept = jnp.exp2(top - base)
        weights = jnp.exp2(scores * unit - lax.broadcast_in_dim(base, scores.shape, [0]))
        total = total * kept + weights.sum(axis=1)
        weights = weights.astype(self.buffers["kv_sm"].dtype)
        staged = self.buffers.get("p_sm")
        values = self._there("v", tile, stage, plain)
        accs = [acc * lax.broadcast_in_dim(kept, acc.shape, [0]) for acc in accs]
        accs = [add_values(acc, weights, block, staged) for acc, block in zip(accs, values, strict=True)]
        self._release("v", tile, stage)
        return (*accs, new_top, total)

    def _release(self, name: str, tile, stage):
        """Gives a stage back where another tile comes in it."""
        arrive = functools.partial(plgpu.barrier_arrive, self.buffers[f"{name}_out"].at[stage])
        pl.when(tile + self.attention.stages < self.end)(arrive)

    def _there(self, name: str, tile, stage, plain: bool):
        """Blocks of a tile of keys or values, once it is there and holds the new tokens."""
        which, ring = int(name == "v"), self.buffers["kv_sm"]
        plgpu.barrier_wait(self.buffers[f"{name}_in"].at[stage])
        slot = self._slot(which, stage)
        if not plain:
            first, live = self.first - tile * KEYS, self.kv_len - tile * KEYS
            ops.overlay(self.attention, self.buffers["new_sm"], which, ring, slot, first, live, self.interpret)
        return ops.blocks(ring, slot)

    def _scores(self, keys):
        queries = ops.blocks(self.buffers["kv_sm"], self._queries())

        def multiply(scores):
            for query, key in zip(queries, keys, strict=True):
                plgpu.wgmma(scores, query, key.transpose((1, 0)))
            return scores[...]

        return pl.run_scoped(multiply, plgpu.ACC((KEYS, KEYS), jnp.float32))

    def _tokens(self):
        """Query token of each row."""
        return div(plgpu.layout_cast(lax.iota(jnp.int32, KEYS), _ROW), self.attention.group)

    def _mask(self, tile):
        shape, high = (KEYS, KEYS), self.kv_len
        if self.attention.causal:
            high = jnp.minimum(high, self._tokens() + (self.first + 1))
        keys = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 1), _WGMMA)
        return keys < spread(high - tile * KEYS, shape)

    def _finish(self, *carry):
        """Normalises and leaves this part."""
        *accs, top, total = carry
        live = (self._tokens() < self.q_len) & (total != 0)
        inverse = jnp.where(live, 1.0 / jnp.where(live, total, 1.0), 0.0)
        lse = jnp.where(live, (top + jnp.log2(jnp.where(live, total, 1.0))) * (1 / LOG2E), -jnp.inf)
        factor = lax.broadcast_in_dim(inverse, accs[0].shape, [0])
        # Not a product alone: rows past the live ones may hold NaN.
        parts = [jnp.where(factor != 0, acc * factor, 0.0) for acc in accs]
        ops.leave_part(self.attention, self.refs, self.item, parts, lse, self.interpret)

    def merge(self):
        """Puts the parts of some rows together."""
        pl.when(self.split < self.attention.mergers)(self._merge)

    def _merge(self):
        place = (self.item - self.split, self.sequence, self.head, self.split, self.busy)
        ops.put_together(self.attention, self.refs, *place, self.interpret)

    def empty(self):
        """Makes the words EMPTY again that `merge` has written."""
        place = (self.sequence, self.head, self.split)
        clear = functools.partial(ops.empty_heads, self.attention, self.refs["x"], *place)
        pl.when(self.split < self.attention.mergers)(clear)
