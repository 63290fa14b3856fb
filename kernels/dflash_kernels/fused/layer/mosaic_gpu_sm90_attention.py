"""A layer in one launch on Hopper: attention over pages in front of the products of `gemm_chain`, by one persistent kernel.

Attention is split-KV: a CTA attends with the queries of one KV head to one split of a sequence's keys. It norms and rotates these
queries itself, and so does whoever has the places of the new keys in its split: nobody waits for another launch or CTA before the
splits are combined through the mailbox. The consumer warpgroup attends, the producer of activations brings keys and values to a
ring of tiles. Queries and that ring have the end of the weights' ring until attention is done; the producer of weights fills the
rest meanwhile.

Tiles of float8 pages come to a ring of their own, where the producer of keys widens them to float16. Pages are not scaled: their
scales go to the scores and to the sums.
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

from dflash_kernels.core.layouts import aliased_ref, freeze_aliased
from dflash_kernels.core.rank_exchange import RankExchange
from dflash_kernels.fused import gemm_chain, heads
from dflash_kernels.fused.plan import BLOCK, HEAD_DIM, KEYS, REACH, TILE_ROWS, Attention, Plan, Product
from dflash_kernels.mosaic_gpu import combine, softmax
from dflash_kernels.mosaic_gpu.convert import widen_tile
from dflash_kernels.mosaic_gpu.layouts import tiled
from dflash_kernels.mosaic_gpu.mailbox import given_or_own
from dflash_kernels.mosaic_gpu.mask import spread
from dflash_kernels.mosaic_gpu.pipeline import div, rem
from dflash_kernels.mosaic_gpu.softmax import LOG2E
from dflash_kernels.mosaic_gpu.thread_op import MATRIX, ROW
from dflash_kernels.mosaic_gpu.tma import touch_row
from dflash_kernels.mosaic_gpu.wgmma import add_values

ATTEND, COMBINE = "attend", "combine"
K, V = range(2)


# Launch


def scratch(attention: Attention, plan: Plan, dtype: Any, weights: Any) -> dict[str, Any]:
    """Shared memory and barriers of one CTA. Tiles of keys and values lie in the memory of the weights' ring, `rings`."""
    kind = jnp.float16 if attention.stages_8bit else dtype
    # Whoever widens tiles fills a stage by itself, when the copies of a tile as it comes have completed another barrier.
    full, empty = gemm_chain.ring_barriers(attention.stages, 1 if attention.stages_8bit else attention.copies)
    ring = (full, empty)
    if attention.stages_8bit:
        ring = (full, plgpu.Barrier(num_arrivals=attention.copies, num_barriers=attention.stages_8bit), empty)
    buffers = gemm_chain.scratch(plan, dtype, weights)
    buffers |= {
        "new_sm": plgpu.SMEM((2, attention.staged, HEAD_DIM), kind), "asked": plgpu.Barrier(), "attended": plgpu.Barrier(),
        "k_ring": ring, "v_ring": ring,
    }  # fmt: skip
    rings = {"kv_sm": plgpu.SMEM((attention.tiles(plan), TILE_ROWS, BLOCK), kind, transforms=tiled(kind))}
    if attention.stages_8bit:
        shape = (2 * attention.tiles(plan), KEYS, HEAD_DIM)
        rings["kv_8bit_sm"] = plgpu.SMEM(shape, jnp.float8_e4m3fn, transforms=tiled(jnp.float8_e4m3fn))
    return buffers | {"rings": plgpu.RefUnion(buffers.pop("w_sm"), *rings.values())}


def mailboxes_of(attention: Attention, plan: Plan, given: Any) -> dict[str, Any]:
    """The given mailboxes by name, or where there are none some that are used once."""
    shapes = {
        "mailbox": (plan.mailbox.words,), "attended": (attention.work_items, attention.rows, HEAD_DIM),
        "lses": (attention.work_items, KEYS), "x": (plan.live, attention.kv_heads * attention.group * HEAD_DIM // 2),
    }  # fmt: skip
    given = given or (None,) * len(shapes)
    return {name: given_or_own(one, *shapes[name]) for name, one in zip(shapes, given, strict=True)}


def attention_chain(
    attention: Attention, plan: Plan, inputs: dict[str, jax.Array], pools: dict[str, jax.Array], mailboxes: Any,
    ranks: RankExchange | None = None, interpret: Any = None,
) -> tuple[jax.Array, jax.Array | None, dict[str, jax.Array]]:  # fmt: skip
    """Runs the kernel.

    Args:
      attention, plan: shapes and tiling.
      inputs: `qkv [B * T, N + 2 K, H]`, `cos` and `sin [B * T, H / 2]` float32, `q_norm` and `k_norm` or neither, `table [B, W]`,
        `seq_lens` and `q_lens [B]` int32 (with REACH times how many tokens after its own a token sees), for float8 pools
        `k_scale` and `v_scale [K]` float32, and what the products take but for `x`.
      pools: `k` and `v`, `[P, K, p, H]`, written in place.
      mailboxes: Refs of the products' mailbox, of attention's splits `[ctas, rows, H]` and their lse `[ctas, 64]`, and of the heads
        `[live, N * H / 2]`, int32, EMPTY at first. No other launch uses them at the same time.
      ranks: as for `layer_chain`.

    Returns:
      The residual stream `[hidden, tokens]` float32, the next projection `[live, features]` or None, and the pools.
    """
    dtype = inputs["qkv"].dtype
    aliased = {name: aliased_ref(pool) for name, pool in pools.items()}

    def body(stages: Sequence[Any], refs: dict[str, Any], buffers: dict[str, Any]) -> None:
        buffers |= dict(zip(("w_sm", "kv_sm", "kv_8bit_sm"), buffers.pop("rings"), strict=False))
        run(attention, plan, stages, refs, buffers)

    inputs, given = gemm_chain.with_ranks(inputs | aliased, mailboxes_of(attention, plan, mailboxes), ranks)
    found = gemm_chain.launch(
        body, "attention_chain", plan, (ATTEND, COMBINE, *plan.products), inputs, given, dtype,
        scratch(attention, plan, dtype, inputs["o"].dtype), interpret,
    )  # fmt: skip
    written = {name: freeze_aliased(ref) for name, ref in aliased.items()}
    return found["stream"], found["projected"] if "next" in inputs else None, written


# CTA program


def run(attention: Attention, plan: Plan, stages: Sequence[Any], refs: dict[str, Any], buffers: dict[str, Any]) -> None:
    """Attention's share of two warpgroups, then the products; see `gemm_chain.run`."""
    index = lax.axis_index("cta")
    products = [stage for stage in stages if stage not in (ATTEND, COMBINE)]
    of_split = functools.partial(_of_split, attention, refs, buffers, index)
    overlap = gemm_chain.Overlap(
        acquire=functools.partial(_acquire_weights, attention.kept(plan), buffers), first_in_mailbox=True,
        after=lambda product: _empty_heads(product, of_split),
    )  # fmt: skip
    warpgroup = lax.axis_index("wg")
    pl.when(warpgroup == 0)(lambda: _consume(stages, buffers, of_split, plan.eps))
    pl.when(warpgroup == 2)(lambda: _produce(attention, stages, buffers, of_split, index))
    gemm_chain.run(gemm_chain.Cta(plan, products, refs, buffers, index, overlap))


def _consume(stages: Sequence[Any], buffers: Mapping[str, Any], of_split: Callable[..., None], eps: float) -> None:
    if ATTEND in stages:
        of_split(functools.partial(attend, eps=eps))
    plgpu.barrier_arrive(buffers["attended"])
    if COMBINE in stages:
        of_split(_combine)


def _produce(
    attention: Attention, stages: Sequence[Any], buffers: Mapping[str, Any], of_split: Callable[..., None], index: Any
) -> None:
    started = functools.partial(_weights_may_start, buffers)
    if ATTEND not in stages:
        started()
        return
    produce = produce_8bit if attention.stages_8bit else produce_16bit
    of_split(lambda split: produce(split, started))
    pl.when(index >= attention.work_items)(started)


def _weights_may_start(buffers: Mapping[str, Any]) -> None:
    """Lets the producer of weights begin."""
    plgpu.barrier_arrive(buffers["asked"])


def _acquire_weights(kept: int, buffers: Mapping[str, Any], step: Any) -> None:
    """Before weights fill stages for the first time: any, so that keys do not wait behind weights, and the borrowed ones."""
    for first, barrier in ((0, "asked"), (kept, "attended")):
        pl.when(step == first)(functools.partial(plgpu.barrier_wait, buffers[barrier]))


def _empty_heads(product: Product, of_split: Callable[..., None]) -> None:
    """Makes the words EMPTY again that `combine` has written, of heads that all CTAs have read.

    They have after gate and up: the norm of that product's input is of sums that all CTAs' products with the heads went into.
    """
    if product.name == "gate_up":
        of_split(lambda split: pl.when(split.index < split.shapes.combiners)(lambda: combine.empty_heads(
            split.refs["x"], split.sequence, split.head, split.index, shapes=split.shapes
        )))  # fmt: skip


def _of_split(
    attention: Attention,
    refs: Mapping[str, Any],
    buffers: Mapping[str, Any],
    index: Any,
    work: Callable[["Split"], None],
) -> None:
    """`work` of the CTA's split, where it has one."""
    pl.when(index < attention.work_items)(lambda: work(split_of(attention, refs, buffers, index)))


# Prologue


@dataclasses.dataclass(frozen=True)
class Tile:
    """A tile of the ring `[tiles, 2 * 64, 64]`: 64 rows as two blocks of 64 columns, one below the other."""

    ring: Any
    place: Any

    @property
    def whole(self) -> Any:
        return self.rows(0, 0, TILE_ROWS)

    @property
    def blocks(self) -> list[Any]:
        return [self.rows(block, 0, KEYS) for block in range(2)]

    def rows(self, block: int, first: int, count: int) -> Any:
        return self.ring.at[self.place, pl.ds(block * KEYS + first, count)]


@dataclasses.dataclass(frozen=True)
class Split:
    """A CTA's split of a sequence's keys under the queries of one KV head. Scalars are read once.

    Attributes:
      work_item: which of all CTAs' splits; index: which of the head's.
      sequence, head: whose.
      q_len: new tokens; reach: how many tokens after its own each of them sees; first: position of the first one.
      kv_len: keys of the sequence; busy: splits that have keys, the first ones.
      count: tiles of this split, which take turns with the others': its tile i is the sequence's `index + i * splits`, so that a
        key's split depends on its position alone; from `plain_count` on they hold new keys, or end within the sequence.
    """

    attention: Attention
    refs: Mapping[str, Any]
    buffers: Mapping[str, Any]
    work_item: Any
    index: Any
    sequence: Any
    head: Any
    q_len: Any
    reach: Any
    first: Any
    kv_len: Any
    busy: Any
    count: Any
    plain_count: Any

    @property
    def shapes(self) -> combine.SplitHeads:
        of = self.attention
        return combine.SplitHeads(of.tokens, of.group, of.splits, HEAD_DIM, of.interleaved)

    # The ring of tiles, counted from the end of the weights' memory: queries, then keys and values of each stage.

    @property
    def queries(self) -> "Tile":
        return Tile(self.buffers["kv_sm"], self.buffers["kv_sm"].shape[0] - 1)

    def of_sequence(self, tile: Any) -> Any:
        """The sequence's number of a tile of this split."""
        return self.index + tile * self.attention.splits

    def stage(self, tile: Any) -> Any:
        return rem(tile, self.attention.stages)

    def tile(self, which: int, stage: Any) -> "Tile":
        """Memory of a stage's keys or values."""
        return Tile(self.buffers["kv_sm"], self.buffers["kv_sm"].shape[0] - 2 - 2 * stage - which)

    def full(self, which: int, stage: Any) -> Any:
        return self.buffers["kv"[which] + "_ring"][0].at[stage]

    def await_empty(self, which: int, tile: Any) -> None:
        """Waits until the stage of a tile is empty."""
        empty = self.buffers["kv"[which] + "_ring"][-1].at[self.stage(tile)]
        pl.when(tile >= self.attention.stages)(functools.partial(plgpu.barrier_wait, empty))

    def release(self, which: int, tile: Any) -> None:
        """Gives a stage back where another tile comes in it."""
        empty = self.buffers["kv"[which] + "_ring"][-1].at[self.stage(tile)]
        pl.when(tile + self.attention.stages < self.count)(functools.partial(plgpu.barrier_arrive, empty))


def split_of(attention: Attention, refs: Mapping[str, Any], buffers: Mapping[str, Any], work_item: Any) -> Split:
    """Split-KV work item of a CTA: its sequence, its head, and the tiles of keys that it attends to."""
    sequence_head, index = div(work_item, attention.splits), rem(work_item, attention.splits)
    sequence, head = div(sequence_head, attention.kv_heads), rem(sequence_head, attention.kv_heads)
    # Before it is known which pages are needed.
    touch_row(refs["table"].at[sequence])
    seq_len, asked = refs["seq_lens"][sequence], refs["q_lens"][sequence]
    q_len, reach = rem(asked, REACH), div(asked, REACH)
    # A sequence longer than its table is cut to it; positions still count from the true length.
    first = seq_len - q_len
    held = jnp.minimum(seq_len, attention.table_width * attention.page_size)
    kv_len = jnp.where(q_len > 0, held, 0)
    tiles = div(kv_len + (KEYS - 1), KEYS)
    busy = jnp.minimum(tiles, attention.splits)

    def own(end: Any) -> Any:
        return div(jnp.maximum(end - index, 0) + (attention.splits - 1), attention.splits)

    count = own(tiles)
    plain_count = jnp.minimum(own(div(jnp.maximum(first, 0), KEYS)), count)
    return Split(
        attention, refs, buffers, work_item, index, sequence, head, q_len, reach, first, kv_len, busy, count, plain_count
    )  # fmt: skip


# Producer


def produce_16bit(split: Split, started: Callable[[], None]) -> None:
    """Brings keys and values, each tile as soon as its stage is empty; calls `started` when no more stage is empty."""
    full = jnp.int32(split.attention.stages)

    def fill(tile: Any, pages: list[Any]) -> list[Any]:
        # The next tile's pages are looked up while this one's stage is not empty yet.
        coming = _pages(split, tile + 1)
        stage = split.stage(tile)
        for which in (K, V):
            split.await_empty(which, tile)
            target = split.tile(which, stage)
            for rows, source in _page_rows(split, which, tile, pages):
                for block in range(2):
                    of_block = target.rows(block, rows.start, rows.size)
                    columns = source.at[:, pl.ds(block * KEYS, KEYS)]
                    plgpu.copy_gmem_to_smem(columns, of_block, split.full(which, stage))
        return coming

    @pl.when(split.count > 0)
    def _():
        pages = lax.fori_loop(0, jnp.minimum(full, split.count), fill, _pages(split, jnp.int32(0)))
        started()
        lax.fori_loop(full, split.count, fill, pages)

    pl.when(split.count == 0)(started)


def produce_8bit(split: Split, started: Callable[[], None]) -> None:
    """`produce_16bit` of float8 pages: copies go to a ring of their own, and each tile is widened to its stage."""
    ahead = split.attention.stages_8bit

    def start(tile: Any, _: None) -> None:
        pages = _pages(split, tile)
        for which in (K, V):
            _fill_8bit(split, which, tile, pages)

    lax.fori_loop(0, jnp.minimum(ahead, split.count), start, None)
    started()

    def widen(tile: Any, _: None) -> None:
        coming, stage = _pages(split, tile + ahead), split.stage(tile)
        for which in (K, V):
            plgpu.barrier_wait(_full_8bit(split, which, tile))
            split.await_empty(which, tile)
            widen_tile(split.buffers["kv_8bit_sm"].at[_place_8bit(split, which, tile)], split.tile(which, stage).whole)
            plgpu.barrier_arrive(split.full(which, stage))
            pl.when(tile + ahead < split.count)(functools.partial(_fill_8bit, split, which, tile + ahead, coming))

    lax.fori_loop(0, split.count, widen, None)


def _fill_8bit(split: Split, which: int, tile: Any, pages: list[Any]) -> None:
    for rows, source in _page_rows(split, which, tile, pages):
        target = split.buffers["kv_8bit_sm"].at[_place_8bit(split, which, tile), rows]
        plgpu.copy_gmem_to_smem(source, target, _full_8bit(split, which, tile))


def _full_8bit(split: Split, which: int, tile: Any) -> Any:
    return split.buffers["kv"[which] + "_ring"][1].at[rem(tile, split.attention.stages_8bit)]


def _place_8bit(split: Split, which: int, tile: Any) -> Any:
    """Place of an eight-bit tile as it arrives: two lie in the memory of one that is widened, before all of those."""
    ahead = split.attention.stages_8bit
    first = 2 * (split.buffers["kv_sm"].shape[0] - 1 - 2 * split.attention.stages - ahead)
    return first + 2 * rem(tile, ahead) + which


def _pages(split: Split, tile: Any) -> list[Any]:
    """Ids of the pages that hold a tile. Entries past the sequence's last page are replaced by it, not read."""
    page_size, last = split.attention.page_size, div(split.kv_len - 1, split.attention.page_size)
    tile = split.of_sequence(tile)
    if page_size >= KEYS:
        entries = [div(tile, page_size // KEYS)]
    else:
        count = KEYS // page_size
        entries = [tile * count + copy for copy in range(count)]
    return [split.refs["table"][split.sequence, jnp.minimum(entry, last)] for entry in entries]


def _page_rows(split: Split, which: int, tile: Any, pages: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Location of a tile in memory: its rows, and the part of a pool they come from."""
    rows = min(split.attention.page_size, KEYS)
    first = rem(split.of_sequence(tile), max(split.attention.page_size // KEYS, 1)) * KEYS
    for copy, page in enumerate(pages):
        yield pl.ds(copy * rows, rows), split.refs["kv"[which]].at[page, split.head, pl.ds(first, rows)]


# Mainloop


def attend(split: Split, *, eps: float) -> None:
    """Online softmax over the split's tiles; leaves the split in the mailbox, where it has keys."""
    refs, shapes = split.refs, split.attention
    # Before the first branch on a length, so that loads are on their way together.
    given = [refs.get(name) for name in ("qkv", "cos", "sin", "q_norm")]
    heads.load_queries(*given, split.sequence, split.head, split.queries.whole, shapes=shapes, eps=eps)

    @pl.when(split.count > 0)
    def _():
        # New keys lie in two tiles at most, which are two splits' where there are two.
        low, end = (split.of_sequence(tile) * KEYS for tile in (split.plain_count, split.count - 1))
        high = jnp.minimum(end + KEYS, split.kv_len)

        @pl.when(split.plain_count < split.count)
        def _():
            pools, scales = (
                [refs[name] for name in "kv"],
                [refs[f"{name}_scale"] for name in "kv" if shapes.stages_8bit],
            )
            heads.write_new(
                *[refs.get(name) for name in ("qkv", "cos", "sin", "k_norm", "table")], pools, scales or None,
                split.buffers["new_sm"], split.sequence, split.head, [split.first, low, high], shapes=shapes, eps=eps,
            )  # fmt: skip

        row_max = plgpu.layout_cast(jnp.full((KEYS,), -jnp.inf, jnp.float32), ROW)
        row_sum = plgpu.layout_cast(jnp.zeros((KEYS,), jnp.float32), ROW)
        accs = [plgpu.layout_cast(jnp.zeros((KEYS, KEYS), jnp.float32), MATRIX) for _ in range(2)]
        carry = (*accs, row_max, row_sum)
        for first, end, plain in ((0, split.plain_count, True), (split.plain_count, split.count, False)):
            carry = lax.fori_loop(first, end, functools.partial(_step, split, plain=plain), carry)
        _finish(split, *carry)


def _step(split: Split, tile: Any, carry: tuple[Any, ...], *, plain: bool) -> tuple[Any, ...]:
    """One tile of keys: scores, online softmax in base 2, values."""
    (*accs, row_max, row_sum), scale_log2 = carry, _scale_log2(split)
    scores = _scores(split, _blocks_of(split, K, tile, plain))
    split.release(K, tile)
    if not plain:
        scores = jnp.where(_mask(split, tile), scores, -jnp.inf)
    weights, alpha, row_max, row_sum = softmax.online_step(scores, row_max, row_sum, scale_log2)
    weights = weights.astype(split.buffers["kv_sm"].dtype)
    values = _blocks_of(split, V, tile, plain)
    accs = [softmax.rescaled(acc, alpha) for acc in accs]
    accs = [add_values(acc, weights, block) for acc, block in zip(accs, values, strict=True)]
    split.release(V, tile)
    return (*accs, row_max, row_sum)


def _blocks_of(split: Split, which: int, tile: Any, plain: bool) -> list[Any]:
    """Blocks of a tile of keys or values, once it is there and holds the new tokens."""
    stage = split.stage(tile)
    plgpu.barrier_wait(split.full(which, stage))
    held = split.tile(which, stage)
    if not plain:
        first, live = (end - split.of_sequence(tile) * KEYS for end in (split.first, split.kv_len))
        heads.overlay(split.buffers["new_sm"], held.whole, first, live, shapes=split.attention, which=which)
    return held.blocks


def _scores(split: Split, keys: list[Any]) -> Any:
    queries = split.queries.blocks

    def multiply(scores: Any) -> Any:
        for query, key in zip(queries, keys, strict=True):
            plgpu.wgmma(scores, query, key.transpose((1, 0)))
        return scores[...]

    return pl.run_scoped(multiply, plgpu.ACC((KEYS, KEYS), jnp.float32))


def _scale_log2(split: Split) -> Any:
    """Factor that makes scores exponents of two."""
    scale = split.attention.scale * LOG2E
    return scale * split.refs["k_scale"][split.head] if split.attention.stages_8bit else scale


def _row_tokens(split: Split) -> Any:
    """Query token of each row."""
    return div(plgpu.layout_cast(lax.iota(jnp.int32, KEYS), ROW), split.attention.group)


def _mask(split: Split, tile: Any) -> Any:
    shape = KEYS, KEYS
    high = jnp.minimum(split.kv_len, _row_tokens(split) + (split.first + 1 + split.reach))
    keys = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 1), MATRIX)
    return keys < spread(high - split.of_sequence(tile) * KEYS, shape)


# Epilogue


def _finish(split: Split, *carry: Any) -> None:
    """Normalizes the split and leaves it in the mailbox."""
    *accs, row_max, row_sum = carry
    live = (_row_tokens(split) < split.q_len) & (row_sum != 0)
    inverse = jnp.where(live, 1.0 / softmax.counted(row_sum, live), 0.0)
    lse = softmax.natural_lse(row_max, softmax.counted(row_sum, live), live)
    if split.attention.stages_8bit:
        inverse = inverse * split.refs["v_scale"][split.head]
    out = [softmax.scaled(acc, inverse) for acc in accs]
    combine.store_split(split.refs["attended"].at[split.work_item], split.refs["lses"].at[split.work_item], out, lse)


def _combine(split: Split) -> None:
    """Combines all splits of some rows."""

    @pl.when(split.index < split.shapes.combiners)
    def _():
        combine.combine_mailbox(
            split.refs["attended"], split.refs["lses"], split.refs["x"], split.work_item - split.index, split.sequence, split.head,
            split.index, split.busy, shapes=split.shapes,
        )  # fmt: skip
