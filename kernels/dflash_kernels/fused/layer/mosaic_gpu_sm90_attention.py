"""One part of a sequence's keys under the queries of one KV head: how a CTA of a chain attends to it."""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.fused import mosaic_gpu_ops as ops
from dflash_kernels.fused.layer.mosaic_gpu_plan import KEYS, REACH
from dflash_kernels.mosaic_gpu.mask import spread
from dflash_kernels.mosaic_gpu.pipeline import div, rem
from dflash_kernels.mosaic_gpu.softmax import LOG2E
from dflash_kernels.mosaic_gpu.tma import touch_row
from dflash_kernels.mosaic_gpu.wgmma import add_values

_WGMMA, _ROW = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)


class Item:
    """A CTA's part. Scalars are read once, at construction.

    One warpgroup attends, another one has keys and values brought to a ring of tiles, as long as the part may be.
    """

    def __init__(self, share):
        self.share, self.attention, self.refs, self.buffers = share, share.attention, share.refs, share.buffers
        attention, self.interpret = self.attention, share.interpret
        self.item = share.cta
        self.sequence_head, self.split = div(self.item, attention.splits), rem(self.item, attention.splits)
        self.sequence = div(self.sequence_head, attention.kv_heads)
        self.head = rem(self.sequence_head, attention.kv_heads)
        if share.syncs:
            # Before it is known which pages are needed.
            touch_row(self.refs["table"].at[self.sequence])
        seq_len, asked = self.refs["seq_lens"][self.sequence], self.refs["q_lens"][self.sequence]
        self.q_len, self.reach = rem(asked, REACH), div(asked, REACH)
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
        """Has keys and values brought, each tile as soon as its stage is free; calls `asked` when no more stage is free."""
        full = self.begin + self.attention.stages

        def bring(tile, pages):
            # The next tile's pages are looked up while this one's stage is not free yet.
            coming = self._pages(tile + 1)
            self._fill(tile, pages)
            return coming

        @pl.when(self.begin < self.end)
        def _():
            pages = lax.fori_loop(self.begin, jnp.minimum(full, self.end), bring, self._pages(self.begin))
            asked()
            lax.fori_loop(full, self.end, bring, pages)

        pl.when(self.begin >= self.end)(asked)

    def _pages(self, tile):
        """Ids of the pages that hold a tile. Entries past the sequence's last page are replaced by it, not read."""
        attention, last = self.attention, div(self.kv_len - 1, self.attention.page_size)
        if attention.page_size >= KEYS:
            entries = [div(tile, attention.page_size // KEYS)]
        else:
            count = KEYS // attention.page_size
            entries = [tile * count + copy for copy in range(count)]
        return [self.refs["table"][self.sequence, jnp.minimum(entry, last)] for entry in entries]

    def _fill(self, tile, pages):
        stage = self._stage(tile)
        for which, name in enumerate(("k", "v")):
            self._await_stage(name, tile)
            ring, slot = self.buffers["kv_sm"], self._slot(which, stage)
            for rows, source in self._sources(name, tile, pages):
                for block in range(2):
                    target = ring.at[slot, pl.ds(block * KEYS + rows.start, rows.size)]
                    columns = source.at[:, pl.ds(block * KEYS, KEYS)]
                    plgpu.copy_gmem_to_smem(columns, target, self.buffers[f"{name}_in"].at[stage])

    def _sources(self, name: str, tile, pages):
        """Where a tile lies in memory: its rows, and the part of a pool they come from."""
        rows = min(self.attention.page_size, KEYS)
        first = rem(tile, max(self.attention.page_size // KEYS, 1)) * KEYS
        for copy, page in enumerate(pages):
            yield pl.ds(copy * rows, rows), self.refs[name].at[page, self.head, pl.ds(first, rows)]

    def _await_stage(self, name: str, tile):
        """Waits until the stage of a tile is free."""
        left = self.buffers[f"{name}_out"].at[self._stage(tile)]
        pl.when(tile - self.begin >= self.attention.stages)(functools.partial(plgpu.barrier_wait, left))

    def _stage(self, tile):
        return rem(tile - self.begin, self.attention.stages)

    def _queries(self) -> int:
        """Slot of the ring that the queries have, the last one."""
        return self.buffers["kv_sm"].shape[0] - 1

    def _slot(self, which: int, stage):
        """Slot of the ring that keys (0) or values (1) of a stage have."""
        return self._queries() - 1 - 2 * stage - which

    def attend(self):
        """Leaves this part, where it has keys."""
        # Before the first branch on a length, so that they are on their way together.
        ops.load_queries(
            self.attention, self.share.plan.eps, self.refs, self.buffers["kv_sm"], self._queries(), self.sequence, self.head,
            self.interpret,
        )  # fmt: skip

        @pl.when(self.begin < self.end)
        def _():
            self._start()
            rows = plgpu.layout_cast(jnp.full((KEYS,), -jnp.inf, jnp.float32), _ROW)
            total = plgpu.layout_cast(jnp.zeros((KEYS,), jnp.float32), _ROW)
            accs = [plgpu.layout_cast(jnp.zeros((KEYS, KEYS), jnp.float32), _WGMMA) for _ in range(2)]
            carry = (*accs, rows, total)
            for first, end, plain in ((self.begin, self.plain_end, True), (self.plain_end, self.end, False)):
                carry = lax.fori_loop(first, end, functools.partial(self._step, plain=plain), carry)
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
        (*accs, top, total), unit = carry, self._unit()
        scores = self._scores(self._there(0, tile, plain))
        self._release("k", tile)
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
        values = self._there(1, tile, plain)
        accs = [acc * lax.broadcast_in_dim(kept, acc.shape, [0]) for acc in accs]
        accs = [add_values(acc, weights, block, staged) for acc, block in zip(accs, values, strict=True)]
        self._release("v", tile)
        return (*accs, new_top, total)

    def _there(self, which: int, tile, plain: bool):
        """Blocks of a tile of keys (0) or values (1), once it is there and holds the new tokens."""
        ring, stage = self.buffers["kv_sm"], self._stage(tile)
        plgpu.barrier_wait(self.buffers[f"{'kv'[which]}_in"].at[stage])
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

    def _release(self, name: str, tile):
        """Gives a stage back where another tile comes in it."""
        arrive = functools.partial(plgpu.barrier_arrive, self.buffers[f"{name}_out"].at[self._stage(tile)])
        pl.when(tile + self.attention.stages < self.end)(arrive)

    def _unit(self):
        """What makes scores exponents of two."""
        return self.attention.scale * LOG2E

    def _tokens(self):
        """Query token of each row."""
        return div(plgpu.layout_cast(lax.iota(jnp.int32, KEYS), _ROW), self.attention.group)

    def _mask(self, tile):
        shape = KEYS, KEYS
        high = jnp.minimum(self.kv_len, self._tokens() + (self.first + 1 + self.reach))
        keys = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 1), _WGMMA)
        return keys < spread(high - tile * KEYS, shape)

    def _finish(self, *carry):
        """Normalises and leaves this part."""
        *accs, top, total = carry
        live = (self._tokens() < self.q_len) & (total != 0)
        inverse = jnp.where(live, 1.0 / jnp.where(live, total, 1.0), 0.0)
        lse = jnp.where(live, (top + jnp.log2(jnp.where(live, total, 1.0))) * (1 / LOG2E), -jnp.inf)
        factor = lax.broadcast_in_dim(self._of_values(inverse), accs[0].shape, [0])
        # Not a product alone: rows past the live ones may hold NaN.
        parts = [jnp.where(factor != 0, acc * factor, 0.0) for acc in accs]
        ops.leave_part(self.attention, self.refs, self.item, parts, lse, self.interpret)

    def _of_values(self, inverse):
        """What sums of weighted values are multiplied with."""
        return inverse

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
