"""One CTA of the chain: what it makes of its products' results, and hands over."""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.fused.layer.mosaic_gpu_bring import Bring
from dflash_kernels.fused.layer.plan import LINE, ROWS, Product
from dflash_kernels.mosaic_gpu import mailbox as exchange
from dflash_kernels.mosaic_gpu.layouts import rows_of, store_transposed
from dflash_kernels.mosaic_gpu.pipeline import div, rem
from dflash_kernels.mosaic_gpu.softmax import sigmoid

_WGMMA = plgpu.Layout.WGMMA


class Hand(Bring):
    """What a CTA does with tiles of results."""

    def _turn(self, thread: int, work):
        """Runs `work` with the part of the exchange that is this launch's; each warpgroup counts launches for itself."""
        own = self.cta * LINE + thread
        self.launches = exchange.launches(self.refs["exchange"], own)
        self.area = self.plan.exchange.area(rem(self.launches, 2))
        work()
        exchange.launched(self.refs["exchange"], own, self.launches + 1)

    def _empty_next(self):
        """Empties this CTA's share of the area that the next launch uses."""
        if self.syncs:
            share = self.plan.exchange.share
            other = self.plan.exchange.area(1 - rem(self.launches, 2)) + self.cta * share
            exchange.empty(self.refs["exchange"], other, words=share)

    def _finish(self, product: Product, results):
        """Hands over results of a product, or writes them."""
        finish = {"o": self._split, "down": self._split, "gate_up": self._gate, "next": self._write_next}
        pl.when(self.cta < product.ctas)(lambda: finish[product.name](product, results))

    def _split(self, product: Product, tiles):
        """Leaves a part of the sum of 64 features, or adds to it what others have left: the CTA of the depth's first part does."""
        (tile,), part = tiles, self._part(product)

        @pl.when((part > 0) | (not self.syncs))
        def _():
            if self.syncs:
                exchange.put_tile(
                    self.refs["exchange"], self._part_word(product, div(self.cta, product.splits), part), tile
                )
            else:
                self.refs["parts"].at[part, pl.ds(self._first_row(product), ROWS)][...] = tile

        if self.syncs:
            pl.when(part == 0)(lambda: self._add_up(product, tile))

    def _part_word(self, product: Product, tile_index, part):
        return self._handed("parts", product) + (tile_index * product.splits + part) * self.plan.exchange.tile

    def _add_up(self, product: Product, tile):
        """Adds the parts of 64 features to the residual stream, in order, and leaves what the next product's norm needs."""
        norm = "post" if product.name == "o" else "next"
        # Under the interpreter all parts are in memory, and CTAs without features are here too.
        tile_index = self.cta if tile is None else div(self.cta, product.splits)
        add = functools.partial(self._add, product, norm, tile_index, tile)
        pl.when(tile_index < self.plan.owners)(add) if tile is None else add()

    def _add(self, product: Product, norm: str, tile_index, tile):
        first, last = tile_index * ROWS, norm == "next" and len(self.plan.products) == 3
        rows = pl.ds(first, ROWS)
        stream = self._stream(norm, rows)
        weight = jnp.zeros((ROWS,)) if last else rows_of(self.refs[f"{norm}_norm"].at[rows], _WGMMA.reduce(1))
        if tile is None:
            tile = rows_of(self.refs["parts"].at[0, rows], _WGMMA)
            for part in range(1, product.splits):
                tile = tile + rows_of(self.refs["parts"].at[part, rows], _WGMMA)
        else:
            places = [self._part_word(product, tile_index, part) for part in range(1, product.splits)]
            tile = exchange.add_tiles(self.refs["exchange"], places, tile)
        stream = stream + tile
        if not last:
            scaled = stream * lax.broadcast_in_dim(weight.astype(jnp.float32), stream.shape, [0])
            self._hand("scaled", product, first, scaled, ROWS)
            squares = (stream * stream).sum(axis=0)
            if self.syncs:
                word = self._handed("squares", product) + tile_index * self.plan.tokens
                exchange.put_columns(self.refs["exchange"], word, squares)
            else:
                self.refs["squares"].at[tile_index][...] = squares
        self._keep(rows, stream)

    def _stream(self, norm: str, rows):
        """The residual stream so far."""
        return rows_of(self.refs["before" if norm == "post" else "stream"].at[rows], _WGMMA)

    def _keep(self, rows, stream):
        self.refs["stream"].at[rows][...] = stream

    def _factors(self, product: Product):
        """What the norm multiplies each token with: over all features, from the sums of squares of 64 each."""
        squares = self._squares(product)
        factors = lax.rsqrt(squares.sum(axis=0) * (1 / self.plan.hidden) + self.plan.eps)
        return lax.broadcast_in_dim(factors, (ROWS, self.plan.tokens), [1])

    def _squares(self, product: Product):
        owners = self.plan.owners
        if self.syncs:
            word = self._handed("squares", product)
            return exchange.take_columns(self.refs["exchange"], word, rows=owners, tokens=self.plan.tokens)
        squares = rows_of(self.refs["squares"], _WGMMA)
        index = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, squares.shape, 0), _WGMMA)
        return jnp.where(index < owners, squares, 0.0)

    def _hand(self, name: str, product: Product, first_feature, tile, rows: int, first_row: int = 0):
        """Writes the first rows of a tile as features of the live tokens; those before `first_row` are written by another tile."""
        if not self.syncs:
            store_transposed(
                self.refs[name], first_feature, tile, rows=rows, tokens=self.plan.live, interpret=self.interpret
            )
            return
        pitch = self.plan.products[1].features if name == "gated" else self.plan.hidden
        exchange.put_transposed(
            self.refs["exchange"], self._handed(name, product), first_feature, tile,
            first_row=first_row, rows=rows, tokens=self.plan.live, pitch=pitch, paired=self.plan.narrow,
        )  # fmt: skip

    def _gate(self, product: Product, results):
        *tiles, factors = results
        count, covered = len(product.offsets), 0
        for offset, gate, up in zip(product.offsets, tiles[:count], tiles[count:], strict=True):
            gate = gate * factors
            gated, first = gate * sigmoid(gate) * (up * factors), self._first_row(product) + offset
            self._hand("gated", product, first, gated, min(product.rows - offset, ROWS), max(covered - offset, 0))
            covered = offset + ROWS

    def _write_next(self, product: Product, results):
        *tiles, factors = results
        for offset, tile in zip(product.offsets, tiles, strict=True):
            first, rows = self._first_row(product) + offset, min(product.rows - offset, ROWS)
            store_transposed(
                self.refs["projected"],
                first,
                tile * factors,
                rows=rows,
                tokens=self.plan.live,
                interpret=self.interpret,
            )
