"""Persistent chain of matrix products on Hopper: one CTA on every multiprocessor takes a share of each product in turn.

Weights are the left operand of the matrix instruction, tokens the right one, so that few tokens waste nothing. The CTA program has
three warpgroups. The weights' producer does nothing but start TMA copies into a ring: it depends on no result, runs ahead of
everybody across the products, and keeps memory busy while the grid waits. The activations' producer fills a second ring, past the
queue of the weights' copies. The consumer multiplies and has the epilogues. What one product leaves for the next goes through a
cross-CTA mailbox and is read word by word as it is written.

The output and down projections are split-K, or they would not fill the machine. The CTA of the first split waits for the others'
partial sums, in float32, and adds all in a fixed order to 64 features of the residual stream; where several GPUs share the layer,
their sums too, in order of GPUs. It publishes the stream times the
norm's weight; the factor that the norm still lacks, one for each token, is known only when all CTAs have published theirs, and
multiplies the next product instead of its input.

With weights of one byte (W8A8 by hi/lo decomposition, `mosaic_gpu.hi_lo`) activations are brought as two numbers of one byte each.

Every product is a stage, between which CTAs wait for one another (`mosaic_gpu.stages`).
"""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.core.rank_exchange import RankExchange
from dflash_kernels.fused.plan import BLOCK, COPIES, IN_FLIGHT, LINE, ROWS, Plan, Product
from dflash_kernels.mosaic_gpu import hi_lo, mailbox, rank_mailbox
from dflash_kernels.mosaic_gpu.layouts import rows_of, store_transposed, tiled
from dflash_kernels.mosaic_gpu.pipeline import Ring, div, rem
from dflash_kernels.mosaic_gpu.softmax import sigmoid
from dflash_kernels.mosaic_gpu.stages import launch as launch_stages
from dflash_kernels.mosaic_gpu.thread_op import MATRIX, ROW
from dflash_kernels.mosaic_gpu.tma import address_of, copied, copy_once, copy_rows, prefetch

# The array, or the area of the mailbox, that each product's activations come from.
SOURCES = {"o": "x", "gate_up": "scaled", "down": "gated", "next": "scaled"}


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Hooks of a stage in front of the first product in the CTA program; by default they do nothing.

    Attributes:
      acquire: called by the weights' producer with a step before it fills that step's stage.
      first_in_mailbox: whether the first product's activations come through a mailbox, `x`.
      after: called by the consumer after each product's epilogue.
    """

    acquire: Callable[[Any], None] = lambda step: None
    first_in_mailbox: bool = False
    after: Callable[[Product], None] = lambda product: None


@dataclasses.dataclass(frozen=True)
class Cta:
    """State of a CTA's program, which its functions share.

    Attributes:
      products: what this launch runs of the plan's, in order.
      refs: arrays in global memory; buffers: shared memory and barriers, as `scratch` declares them.
      index: of this CTA in the grid.
      launches: how many launches have used the mailbox before, and area: the word where this launch's area begins.
    """

    plan: Plan
    products: Sequence[Product]
    refs: Mapping[str, Any]
    buffers: Mapping[str, Any]
    index: Any
    overlap: Overlap = Overlap()
    launches: Any = 0
    area: Any = 0

    @property
    def weights(self) -> Ring:
        return Ring(self.plan.stages, *self.buffers["w_ring"])

    @property
    def activations(self) -> Ring:
        return Ring(self.plan.x_stages, *self.buffers["x_ring"])

    # The share of a product that is this CTA's.

    def split(self, product: Product) -> Any:
        """Index of the split of the depth."""
        return rem(self.index, product.splits)

    def tile(self, product: Product) -> Any:
        """Index of the tile of weight rows."""
        return div(self.index, product.splits)

    def first_row(self, product: Product) -> Any:
        return jnp.minimum(self.tile(product) * product.rows, product.features - product.rows)

    def k_tiles(self, product: Product) -> Any:
        """Stages of weights: none where there are more CTAs than tiles."""
        split = self.split(product)
        steps = _first_k_tile(product, split + 1) - _first_k_tile(product, split)
        return jnp.where(self.index < product.ctas, steps, 0).astype(jnp.int32)

    def x_tiles(self, product: Product) -> Any:
        """Stages of activations."""
        return div(self.k_tiles(product), product.matrices)

    def first_column(self, product: Product) -> Any:
        return div(_first_k_tile(product, self.split(product)), product.matrices) * (COPIES * product.columns)

    def column(self, product: Product, x_tile: Any) -> Any:
        """First column of a stage of activations."""
        # CTAs that read the same activations begin with different columns, or they would wait for the same lines of the L2.
        if self.plan.is_8bit:
            count = jnp.maximum(self.x_tiles(product), 1)
            x_tile = lax.rem(x_tile + self.tile(product), count)
        return self.first_column(product) + x_tile * (COPIES * product.columns)

    def in_turn(self) -> Iterator[tuple[Product, Any, Any]]:
        """Each product and the steps of either ring before it: of weights, of activations."""
        step, x_step = jnp.int32(0), jnp.int32(0)
        for product in self.products:
            yield product, step, x_step
            step, x_step = step + self.k_tiles(product), x_step + self.x_tiles(product)

    def word(self, name: str, product: Product) -> Any:
        """The mailbox's word where `name` begins; `product` is one that publishes or takes it."""
        layout = self.plan.mailbox
        if name == "gated":
            return self.area + layout.gated
        projection = layout.projection * (product.name in ("down", "next"))
        return self.area + projection + {"partial": 0, "squares": layout.squares, "scaled": layout.scaled}[name]

    def pitch(self, name: str) -> int:
        """Columns of a matrix in the mailbox."""
        return self.plan.products[1].features if name == "gated" else self.plan.hidden


def _first_k_tile(product: Product, split: Any) -> Any:
    return div(split * product.k_tiles, product.splits)


# Launch


def scratch(plan: Plan, dtype: Any, weights: Any) -> dict[str, Any]:
    """Shared memory and barriers of one CTA for activations and weights of these dtypes."""
    buffers: dict[str, Any] = {
        "w_sm": ring_memory(plan, weights),
        "x_sm": plgpu.SMEM((plan.x_stages, plan.x_blocks, plan.tokens, BLOCK), dtype, transforms=tiled(dtype)),
        "w_ring": ring_barriers(plan.stages, COPIES), "x_ring": ring_barriers(plan.x_stages),
    }  # fmt: skip
    if plan.is_8bit:
        # Rows of the hi numbers, then rows of the lo ones.
        shape = plan.x_stages, COPIES, 2 * plan.tokens, 2 * BLOCK
        buffers["x_sm"] = plgpu.SMEM(shape, weights, transforms=tiled(weights))
        buffers["scale_sm"] = plgpu.SMEM((plan.x_stages, plan.tokens), jnp.float32)
    return buffers


def ring_memory(plan: Plan, dtype: Any) -> Any:
    """Stages of weights, or of what else has the same bytes in a row."""
    columns = BLOCK * 2 // jnp.dtype(dtype).itemsize
    return plgpu.SMEM((plan.stages, plan.stage_rows, columns), dtype, transforms=tiled(dtype))


def ring_barriers(stages: int, arrivals: int = 1) -> tuple[Any, Any]:
    """Full and empty barriers of a `Ring` whose stages are filled by so many copies."""
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages), plgpu.Barrier(num_barriers=stages)


def outputs(plan: Plan, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Outputs of the launch, without those that go through the mailbox.

    A chain without an output projection has no residual stream, and only its end is `projected`.
    """
    widths = {product.name: product.features for product in plan.products}
    projected = (plan.live, widths["next"]) if "next" in widths else (1, ROWS)
    stream = {"stream": jax.ShapeDtypeStruct((plan.hidden, plan.tokens), jnp.float32)} if "o" in widths else {}
    return stream | {"projected": jax.ShapeDtypeStruct(projected, dtype)}


# By which the launch's memory for exchanges with other GPUs is known.
RANK_REFS, RANK_INPUTS = ("rank_counts", "rank_area"), ("peers",)


def with_ranks(
    inputs: Mapping[str, Any], mailboxes: Mapping[str, Any], ranks: RankExchange | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments with which a launch reduces over GPUs as well."""
    if ranks is None:
        return dict(inputs), dict(mailboxes)
    held = dict(zip(RANK_REFS, (ranks.counts, ranks.area), strict=True))
    return {**inputs, RANK_INPUTS[0]: ranks.peers}, {**mailboxes, **held}


def rank_exchange_of(refs: Mapping[str, Any]) -> RankExchange | None:
    """Arguments that `with_ranks` has added."""
    return RankExchange(*(refs[name] for name in (*RANK_REFS, *RANK_INPUTS))) if RANK_REFS[0] in refs else None


def rank_place(plan: Plan, product: Product, tile: Any) -> Any:
    """Place of the exchange for 64 features of the output projection, or of the down projection behind all of those."""
    return tile + (plan.reducers if product.name == "down" else 0)


def launch(
    body: Callable[..., None], name: str, plan: Plan, stages: Sequence[Any], inputs: Mapping[str, Any],
    mailboxes: Mapping[str, Any], dtype: Any, buffers: dict[str, Any], interpret: Any,
) -> dict[str, Any]:  # fmt: skip
    """Runs `body(stages, refs, buffers)` on every CTA and returns results by name.

    Args:
      name: what profilers show.
      stages: the products, and what comes before them.
      inputs: arrays and Refs, by the names that `refs` has them under; mailboxes: Refs, likewise.
      dtype: of activations.
      buffers: types of shared memory and barriers.
    """
    return launch_stages(
        body, name, stages, {**inputs, **mailboxes}, outputs(plan, dtype), interpret=interpret, grid=(plan.ctas,),
        grid_names=("cta",), num_threads=3, thread_name="wg", scratch_types=buffers,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )  # fmt: skip


# CTA program


def program(plan: Plan) -> Callable[..., None]:
    """`body` of `launch` for products alone."""
    return lambda products, refs, buffers: run(Cta(plan, products, refs, buffers, lax.axis_index("cta")))


def run(cta: Cta) -> None:
    """Dispatches the warpgroups: consumer, producer of weights, producer of activations."""
    for warpgroup, work in enumerate((consume, produce_weights, produce_activations)):
        task = functools.partial(work, cta)
        if work is not produce_weights:
            task = functools.partial(_in_turn, cta, warpgroup, work)
        pl.when(lax.axis_index("wg") == warpgroup)(task)


def _in_turn(cta: Cta, warpgroup: int, work: Callable[[Cta], None]) -> None:
    """Runs `work` with the area of the mailbox that is this launch's; each warpgroup counts launches for itself."""
    own, words = cta.index * LINE + warpgroup, cta.refs["mailbox"]
    launches = mailbox.launches(words, own)
    work(dataclasses.replace(cta, launches=launches, area=cta.plan.mailbox.area(rem(launches, 2))))
    mailbox.launched(words, own, launches + 1)


# Producer of weights


def produce_weights(cta: Cta) -> None:
    """Starts the copies of all products' weights, each as soon as its stage is empty; then prefetches what the next launch reads
    first."""
    ring = cta.weights
    arrivals = address_of(ring.full)
    for product, before, _ in cta.in_turn():

        def fill(k_tile: Any, _: None, product: Product = product, before: Any = before) -> None:
            step = before + k_tile
            stage = ring.stage(step)
            cta.overlap.acquire(step)
            ring.producer_acquire(step, stage)
            ring.limit_in_flight(step, IN_FLIGHT)
            weights = cta.refs[product.name]
            for copy, (rows, columns) in enumerate(_weight_tiles(cta, product, k_tile, weights)):
                target = cta.buffers["w_sm"].at[stage, pl.ds(copy * product.rows, product.rows)]
                copy_once(weights, rows, columns, target, arrivals, stage)

        lax.fori_loop(0, cta.k_tiles(product), fill, None)
    if "ahead" in cta.refs:
        _prefetch(cta, cta.plan.products[0], cta.refs["ahead"])


def _weight_tiles(cta: Cta, product: Product, k_tile: Any, weights: Any) -> Iterator[tuple[Any, Any]]:
    """Rows and columns of each copy of a stage; gate and up rows take turns."""
    column, whole = cta.column(product, div(k_tile, product.matrices)), product.matrices * product.features
    row = cta.first_row(product) + rem(k_tile, product.matrices) * product.features
    for block in range(COPIES):
        first = column + block * product.columns
        if weights.shape == (whole, product.depth):
            yield pl.ds(row, product.rows), pl.ds(first, product.columns)
        else:  # column blocks, one below the other
            yield pl.ds(row + div(first, BLOCK) * whole, product.rows), pl.ds(0, BLOCK)


def _prefetch(cta: Cta, product: Product, weights: Any) -> None:
    """Brings to the L2 what the next launch reads first: memory is idle while other kernels run in between."""

    def fetch(k_tile: Any, _: None) -> None:
        for rows, columns in _weight_tiles(cta, product, k_tile, weights):
            prefetch(weights.at[rows, columns])

    lax.fori_loop(0, cta.k_tiles(product), fetch, None)


# Producer of activations


def produce_activations(cta: Cta) -> None:
    """Brings every product's activations: the first one's from memory, the others' as other CTAs publish them."""
    for product, _, before in cta.in_turn():
        name = SOURCES[product.name]
        if product != cta.plan.products[0]:
            _take(cta, product, before, cta.refs["mailbox"], cta.word(name, product), cta.pitch(name))
        elif cta.overlap.first_in_mailbox or cta.plan.is_8bit:
            checks = cta.overlap.first_in_mailbox
            _take(cta, product, before, cta.refs[name], 0, product.depth, checks=checks)
        else:
            _copy(cta, product, before, cta.refs[name])


def _copy(cta: Cta, product: Product, before: Any, source: Any) -> None:
    """Copies what was in memory before the launch, half a ring at a time."""
    ring, lag, column = cta.activations, cta.plan.x_stages // 2, cta.first_column(product)

    def fill(x_tile: Any, _: None) -> None:
        stage = _acquire(ring, before + x_tile)
        first = column + x_tile * (cta.plan.x_blocks * BLOCK)
        copy_rows(source, first, cta.buffers["x_sm"].at[stage], rows=cta.plan.live)

        @pl.when(x_tile >= lag)
        def _():
            copied(lag)
            _fill_done(ring, before + x_tile - lag)

    count = cta.x_tiles(product)
    lax.fori_loop(0, count, fill, None)
    copied(0)
    lax.fori_loop(jnp.maximum(count - lag, 0), count, lambda x_tile, _: _fill_done(ring, before + x_tile), None)


def _take(cta: Cta, product: Product, before: Any, area: Any, word: Any, pitch: int, checks: bool = True) -> None:
    """Takes a matrix of `pitch` columns that CTAs publish at a word of `area`, several stages at a time.

    Without `checks`, as hi and lo numbers alone, what is there already.
    """
    ring, group, count = cta.activations, cta.plan.x_group, cta.x_tiles(product)

    def fill(index: Any, _: None) -> None:
        first = index * group
        filled = jnp.minimum(count - first, group)
        stages = []
        for place in range(group):
            step = before + first + place
            pl.when(place < filled)(functools.partial(_await_empty, ring, step))
            stages.append(ring.stage(step))
        columns = [cta.column(product, first + place) for place in range(group)]
        target, sizes = cta.buffers["x_sm"], {"rows": cta.plan.live, "pitch": pitch}
        if cta.plan.is_8bit:
            waits, scales = (index == 0) & checks, cta.buffers["scale_sm"]
            hi_lo.take_rows(area, word, columns, target, scales, stages, filled, waits, **sizes, checks=checks)
        else:
            mailbox.take_rows(area, word, columns[0], target, stages, filled, index == 0, **sizes)
        for place in range(group):
            pl.when(place < filled)(functools.partial(_fill_done, ring, before + first + place))

    lax.fori_loop(0, div(count + (group - 1), group), fill, None)


def _acquire(ring: Ring, step: Any) -> Any:
    """The stage of a step, once it is empty."""
    _await_empty(ring, step)
    return ring.stage(step)


def _await_empty(ring: Ring, step: Any) -> None:
    ring.producer_acquire(step, ring.stage(step))


def _fill_done(ring: Ring, step: Any) -> None:
    plgpu.barrier_arrive(ring.full.at[ring.stage(step)])


# Consumer


def consume(cta: Cta) -> None:
    """Multiplies and has the epilogues, product by product."""
    in_turn = list(cta.in_turn())
    _empty_next(cta)
    for product, *before in in_turn:
        (_mainloop_8bit if cta.plan.is_8bit else _mainloop_16bit)(cta, product, *before)
        cta.overlap.after(product)


def _empty_next(cta: Cta) -> None:
    """Empties this CTA's share of the area that the next launch uses."""
    layout = cta.plan.mailbox
    other = layout.area(1 - rem(cta.launches, 2)) + cta.index * layout.share
    mailbox.empty(cta.refs["mailbox"], other, words=layout.share)


def _mainloop_16bit(cta: Cta, product: Product, before: Any, x_before: Any) -> None:
    w_ring, x_ring, w_sm, x_sm = cta.weights, cta.activations, cta.buffers["w_sm"], cta.buffers["x_sm"]
    x_tiles, k_tiles = cta.x_tiles(product), cta.k_tiles(product)

    def multiply(*accs: Any) -> tuple[Any, ...]:
        def one(x_tile: Any, _: None) -> None:
            x_stage = x_ring.stage(x_before + x_tile)
            x_ring.consumer_wait(x_stage)
            for matrix in range(product.matrices):
                step = before + x_tile * product.matrices + matrix
                stage = w_ring.stage(step)
                w_ring.consumer_wait(stage)
                for block in range(COPIES):
                    x = x_sm.at[x_stage, block].transpose((1, 0))
                    for acc, (own, offset) in zip(accs, product.accumulators, strict=True):
                        if own == matrix:
                            rows = pl.ds(block * product.rows + offset, ROWS)
                            plgpu.wgmma(acc, w_sm.at[stage, rows], x)
                # All but this stage's instructions are done: the stage before can be filled again.
                plgpu.wgmma_wait(COPIES * len(product.offsets))
                pl.when(step > before)(lambda step=step: w_ring.consumer_release(w_ring.stage(step - 1)))
            pl.when(x_tile > 0)(lambda: x_ring.consumer_release(x_ring.stage(x_before + x_tile - 1)))

        # The norm's factors are known a little later than the first activations, and the product's first half needs none.
        normed = product.name in ("gate_up", "next")
        half = div(x_tiles, 2) if normed else x_tiles
        lax.fori_loop(0, half, one, None)
        factors = (_norm_factors(cta, product),) if normed else ()
        if normed:
            lax.fori_loop(half, x_tiles, one, None)
        results = tuple(acc[...] for acc in accs)

        @pl.when(x_tiles > 0)
        def _():
            w_ring.consumer_release(w_ring.stage(before + k_tiles - 1))
            x_ring.consumer_release(x_ring.stage(x_before + x_tiles - 1))

        return (*results, *factors)

    accumulators = [plgpu.ACC((ROWS, cta.plan.tokens), jnp.float32) for _ in product.accumulators]
    _epilogue(cta, product, pl.run_scoped(multiply, *accumulators))


def _mainloop_8bit(cta: Cta, product: Product, before: Any, x_before: Any) -> None:
    """Products of hi and of lo numbers side by side, each stage's added to float32 sums.

    Tensor cores keep sums of float8 products in about fourteen bits, so those of a stage, 256 columns, go to float32 before the
    next one's.
    """
    w_ring, x_ring, w_sm, x_sm = cta.weights, cta.activations, cta.buffers["w_sm"], cta.buffers["x_sm"]
    x_tiles, tokens = cta.x_tiles(product), cta.plan.tokens
    sums = jnp.int32 if cta.refs[product.name].dtype == jnp.int8 else jnp.float32
    scales, last = cta.refs[f"{product.name}_scales"], product.matrices * product.features - 1
    scales = [
        hi_lo.row_scales(scales, cta.first_row(product) + (matrix * product.features + offset), last=last)
        for matrix, offset in product.accumulators
    ]

    def one(x_tile: Any, totals: tuple[Any, ...]) -> tuple[Any, ...]:
        x_stage, step = x_ring.stage(x_before + x_tile), before + x_tile * product.matrices
        stages = [w_ring.stage(step + matrix) for matrix in range(product.matrices)]
        x_ring.consumer_wait(x_stage)

        def multiply(*accs: Any) -> tuple[Any, ...]:
            for matrix, stage in enumerate(stages):
                w_ring.consumer_wait(stage)
                for block in range(COPIES):
                    x = x_sm.at[x_stage, block].transpose((1, 0))
                    for acc, (own, offset) in zip(accs, product.accumulators, strict=True):
                        if own == matrix:
                            rows = pl.ds(block * product.rows + offset, ROWS)
                            plgpu.wgmma(acc, w_sm.at[stage, rows], x)
            return tuple(acc[...] for acc in accs)

        found = pl.run_scoped(multiply, *[plgpu.ACC((ROWS, 2 * tokens), sums) for _ in product.accumulators])
        for stage in stages:
            w_ring.consumer_release(stage)
        totals = tuple(
            hi_lo.add(total, both, cta.buffers["scale_sm"], x_stage) for total, both in zip(totals, found, strict=True)
        )
        x_ring.consumer_release(x_stage)
        return totals

    zero = jnp.zeros((ROWS, tokens), jnp.float32)
    totals = tuple(plgpu.layout_cast(zero, MATRIX) for _ in product.accumulators)
    # The norm's factors are known a little later than the first activations, and the product's first half needs none.
    normed = product.name in ("gate_up", "next")
    half = div(x_tiles, 2) if normed else x_tiles
    totals, factors = lax.fori_loop(0, half, one, totals), ()
    if normed:
        factors = (_norm_factors(cta, product),)
        totals = lax.fori_loop(half, x_tiles, one, totals)
    results = [
        total * lax.broadcast_in_dim(scale, total.shape, [0]) for total, scale in zip(totals, scales, strict=True)
    ]
    _epilogue(cta, product, (*results, *factors))


def _norm_factors(cta: Cta, product: Product) -> Any:
    """Norm factor of each token: over all features, from the sums of squares of 64 each."""
    word, count = cta.word("squares", product), cta.plan.reducers
    squares = mailbox.take_columns(cta.refs["mailbox"], word, rows=count, tokens=cta.plan.tokens)
    factors = lax.rsqrt(squares.sum(axis=0) * (1 / cta.plan.hidden) + cta.plan.eps)
    return lax.broadcast_in_dim(factors, (ROWS, cta.plan.tokens), [1])


# Epilogues


def _epilogue(cta: Cta, product: Product, results: Sequence[Any]) -> None:
    """Epilogue of a product: its accumulators and, after a norm, its factors."""
    epilogues = {"o": _split_k, "down": _split_k, "gate_up": _swiglu, "next": _project}
    pl.when(cta.index < product.ctas)(lambda: epilogues[product.name](cta, product, results))


def _split_k(cta: Cta, product: Product, results: Sequence[Any]) -> None:
    """Publishes a partial sum of 64 features; the CTA of the first split reduces them in place of that."""
    (tile,), split = results, cta.split(product)
    mailbox.sum_splits(
        cta.refs["mailbox"], split, product.splits, tile, lambda split: _partial_word(cta, product, cta.tile(product), split),
        lambda total: _reduce(cta, product, cta.tile(product), total),
    )  # fmt: skip


def _partial_word(cta: Cta, product: Product, tile_index: Any, split: Any) -> Any:
    return cta.word("partial", product) + (tile_index * product.splits + split) * cta.plan.mailbox.tile


def _reduce(cta: Cta, product: Product, tile_index: Any, total: Callable[[list[Any]], Any]) -> None:
    """Adds the partial sums of 64 features to the residual stream, in order, and publishes what the next product's norm needs.

    `total`: the first split's with those at some words of the mailbox.
    """
    refs, norm, last = cta.refs, "post" if product.name == "o" else "next", product == cta.plan.products[-1]
    first = tile_index * ROWS
    rows = pl.ds(first, ROWS)
    if "stream" in refs:
        stream = rows_of(refs["before" if norm == "post" else "stream"].at[rows], MATRIX)
    else:
        stream = plgpu.layout_cast(jnp.zeros((ROWS, cta.plan.tokens), jnp.float32), MATRIX)
    weight = jnp.zeros((ROWS,)) if last else rows_of(refs[f"{norm}_norm"].at[rows], ROW)
    tile = total([_partial_word(cta, product, tile_index, split) for split in range(1, product.splits)])
    if (ranks := rank_exchange_of(refs)) is not None:
        tile = rank_mailbox.summed_tile(tile, *ranks, rank_place(cta.plan, product, tile_index))
    stream = stream + tile
    if not last:
        weight = weight.astype(jnp.float32)
        weight = 1.0 + weight if cta.plan.zero_centered else weight
        scaled = stream * lax.broadcast_in_dim(weight, stream.shape, [0])
        _publish(cta, "scaled", product, first, scaled, ROWS)
        squares = (stream * stream).sum(axis=0)
        word = cta.word("squares", product) + tile_index * cta.plan.tokens
        mailbox.put_columns(refs["mailbox"], word, squares)
    if "stream" in refs:
        refs["stream"].at[rows][...] = stream


def _swiglu(cta: Cta, product: Product, results: Sequence[Any]) -> None:
    """Publishes `silu(gate) * up`."""
    *tiles, factors = results
    count, covered = len(product.offsets), 0
    for offset, gate, up in zip(product.offsets, tiles[:count], tiles[count:], strict=True):
        gate = gate * factors
        gated, first = gate * sigmoid(gate) * (up * factors), cta.first_row(product) + offset
        rows, skipped = min(product.rows - offset, ROWS), max(covered - offset, 0)
        _publish(cta, "gated", product, first, gated, rows, skipped)
        covered = offset + ROWS


def _project(cta: Cta, product: Product, results: Sequence[Any]) -> None:
    """Writes the last product."""
    *tiles, factors = results
    for offset, tile in zip(product.offsets, tiles, strict=True):
        first, rows = cta.first_row(product) + offset, min(product.rows - offset, ROWS)
        store_transposed(cta.refs["projected"], first, tile * factors, rows=rows, tokens=cta.plan.live)


def _publish(
    cta: Cta, name: str, product: Product, first_feature: Any, tile: Any, rows: int, first_row: int = 0
) -> None:
    """Hands over the first rows of a tile as features of the live tokens; another tile has those before `first_row`."""
    mailbox.put_transposed(
        cta.refs["mailbox"], cta.word(name, product), first_feature, tile, first_row=first_row, rows=rows,
        tokens=cta.plan.live, pitch=cta.pitch(name), paired=cta.plan.is_8bit,
    )  # fmt: skip
