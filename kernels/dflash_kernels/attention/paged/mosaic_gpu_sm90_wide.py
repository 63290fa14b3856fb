"""The Hopper kernel for heads of 512: one CTA attends with 64 query rows of a KV head to one split of one sequence's pages.

The output of 64 rows, 64 x 512 in float32, fills half of a multiprocessor's registers. So two warpgroups share the rows, and each
has half of the columns, of queries, keys and values alike: it copies them itself, multiplies its queries with its keys and its
weights with its values. Only the scores are sums over both halves: of each tile each warpgroup hands its products to the other
through shared memory, in float32. Both then know the same scores and do the same softmax, and no other word passes between them.

For more than 64 query rows the two can be those of two CTAs, a cluster (`paired`): each has two warpgroups, so 128 rows, and reads
half of the columns for all of them, and products go to the other CTA's shared memory. While they are on their way, and while a tile
has its softmax, the tile before is multiplied with its values and the tile after with the queries.

Splits are the output itself where there is one, and are left for a launch of its own otherwise (`combine`).
"""

# Pallas declares ACC and its transforms less public than it documents them.
# pyright: reportPrivateImportUsage=false

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.attention.paged.launch import ROWS, Launch
from dflash_kernels.attention.paged.mosaic_gpu_sm90 import Cta, given_arrays, weigh
from dflash_kernels.mosaic_gpu import combine, epilogue, paged_kv, softmax, tma
from dflash_kernels.mosaic_gpu.layouts import swizzled
from dflash_kernels.mosaic_gpu.queries import ask_for_rows, put_rows
from dflash_kernels.mosaic_gpu.thread_op import MATRIX, ROW, kernel
from dflash_kernels.mosaic_gpu.wgmma import add_values, scores_of, side_by_side

# A barrier at every access of shared memory, as is put in by default, is more than the hand-over of products needs: what copies and
# matrix instructions touch has barriers of its own here.
_PARAMS = plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True)


def attention(
    launch: Launch, q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, slopes: jax.Array | None, table: jax.Array,
    seq_lens: jax.Array, q_lens: jax.Array, interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Runs the kernel. Arguments and results are those of `mosaic_gpu_sm90.attention`."""
    b, rows = q.shape[0], launch.row_blocks * launch.block_rows
    written = rows if launch.row_blocks > 1 else -(-launch.tokens * launch.group // 8) * 8
    if launch.direct:
        out = jax.ShapeDtypeStruct((b, launch.tokens, launch.kv_heads, launch.group, launch.head_dim), q.dtype)
    else:
        out = jax.ShapeDtypeStruct((b, launch.kv_heads, launch.splits, written, launch.head_dim), jnp.float32)
    given = given_arrays(q=q, k=k_pages, v=v_pages, slopes=slopes, table=table, seq_lens=seq_lens, q_lens=q_lens)

    def body(*refs, **buffers):
        named = dict(zip([*given, "o", "lse"], refs, strict=True))
        kv = paged_kv.paged_kv(launch, named, buffers, stride=launch.splits)
        half, width = lax.axis_index("half" if launch.paired else "wg"), launch.head_dim // 2
        kv = dataclasses.replace(kv, first_column=half * width)
        if not launch.paired:
            # Both warpgroups have all of the CTA's rows.
            work = dataclasses.replace(kv.work, first_row=kv.work.row_block * ROWS)
            kv = dataclasses.replace(kv, work=work, own=half)
        place = kv.work.place
        _attend(Cta(launch, named, buffers, kv, named["lse"].at[place.sequence, kv.work.head, place.split]), half)

    cluster = {"cluster": (2,), "cluster_names": ("half",)} if launch.paired else {}
    return kernel(
        body,
        out_type=(out, jax.ShapeDtypeStruct((b, launch.kv_heads, launch.splits, rows), jnp.float32)),
        scratch_types=scratch(launch, q.dtype),
        **paged_kv.grid(launch, b), **cluster,
        num_threads=2, thread_name="wg", compiler_params=_PARAMS, interpret=interpret,
    )(*given.values())  # fmt: skip


def scratch(launch: Launch, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of one CTA. The first index is a warpgroup's, but for tiles that both read."""
    half, keys, stages = launch.head_dim // 2, launch.keys, launch.stages
    own = () if launch.paired else (2,)
    buffers: dict[str, Any] = {"q_sm": plgpu.SMEM((2, ROWS, half), dtype, transforms=swizzled(dtype, half))}
    for stream in ("k", "v"):
        tiles = swizzled(dtype, half, paged_kv.most_swizzled(stream, keys))
        buffers[f"{stream}_sm"] = plgpu.SMEM((*own, stages, keys, half), dtype, transforms=tiles)
        barriers = stages if launch.paired else 2 * stages
        buffers[f"{stream}_in"] = plgpu.Barrier(num_arrivals=launch.copies, num_barriers=barriers)
        if launch.paired:
            buffers[f"{stream}_out"] = plgpu.Barrier(num_arrivals=2, num_barriers=stages)
    buffers |= {"given_in": plgpu.Barrier(num_barriers=2), "taken_in": plgpu.Barrier(num_barriers=2)}
    if launch.paired:
        return buffers | {"products": plgpu.SMEM((2, ROWS * keys), jnp.float32)}
    buffers["products"] = plgpu.SMEM((2, ROWS, keys), jnp.float32, transforms=swizzled(jnp.float32, keys))
    return buffers


def _attend(cta: Cta, half: Any) -> None:
    """The program of a warpgroup."""
    work, kv, launch = cta.work, cta.kv, cta.launch
    width, q_sm = launch.head_dim // 2, cta.buffers["q_sm"].at[cta.work.warpgroup]
    queries = cta.queries.at[:, :, pl.ds(kv.first_column, width)]
    rows = ask_for_rows(queries, work.first_row, rows=launch.tokens * launch.group, columns=width)
    pages = kv.ring_pages()

    @pl.when(work.begin < work.end)
    def _():
        fill = functools.partial(kv.fill_ring, ("k", "v"), pages)
        pl.when(work.warpgroup == 0)(fill) if launch.paired else fill()
        # A row's garbage never leaves that row.
        put_rows(queries, q_sm, work.first_row, rows)
        row_max = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), ROW)
        row_sum = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ROW)
        acc = plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), MATRIX)
        acc, row_max, row_sum = (_flow if launch.flows else _go)(cta, (acc, row_max, row_sum))
        _write(cta, half, *softmax.finalize(acc, row_max, row_sum, work.live(row_sum, ROW)))

    @pl.when(work.begin >= work.end)
    def _():
        lse = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), ROW)
        zeros = plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), MATRIX)
        _write(cta, half, zeros if launch.direct else None, lse)

    if launch.paired:
        # No CTA leaves while the other one still gives to it, or tells that it has taken.
        combine.await_cluster()


# Mainloop, one product at a time


def _go(cta: Cta, carry: Any) -> Any:
    """All tiles of keys, where waiting for memory is what takes time."""
    return cta.work.walk(functools.partial(_step, cta), carry)


def _step(cta: Cta, tile: Any, carry: Any, *, masked: bool) -> tuple[Any, Any, Any]:
    """One tile of keys: this half's products, the scores, online softmax, this half's values."""
    kv, (acc, row_max, row_sum) = cta.kv, carry
    coming = kv.pages(kv.next_in_stage(tile))
    products = scores_of(_queries(cta), kv.wait("k", tile), cta.launch.keys)
    _release(cta, "k", tile, coming)
    _give(cta, products)
    weights, alpha, row_max, row_sum = weigh(cta, tile, _take(cta, products), row_max, row_sum, masked=masked)
    values = kv.wait("v", tile)
    acc = softmax.rescaled(acc, alpha)
    if masked:
        _clear_unused(cta, values, tile)
    acc = add_values(acc, weights.astype(values.dtype), values)
    _release(cta, "v", tile, coming)
    # Of this tile the other one has long had the products; the next one's may take their place.
    plgpu.barrier_wait(cta.buffers["taken_in"].at[cta.work.warpgroup])
    return acc, row_max, row_sum


# Mainloop, products of two tiles under the softmax of the one between them


def _flow(cta: Cta, carry: Any) -> Any:
    """All tiles of keys, where products are what takes time.

    While a tile has its softmax, the tile before is multiplied with its values and the tile after with the queries, and what the
    other half has of its scores was on its way since the softmax before.
    """
    kv, work, (acc, *statistics) = cta.kv, cta.work, carry
    pages = kv.pages(kv.next_in_stage(work.begin))
    products = scores_of(_queries(cta), kv.wait("k", work.begin), cta.launch.keys)
    _release(cta, "k", work.begin, pages)
    _give(cta, products)
    carry = _overlapped(cta, work.begin, (acc, None, *statistics, products, pages, pages), masked=True)
    acc, weights, *statistics = work.walk(functools.partial(_overlapped, cta), carry, skip=1)
    values = kv.wait("v", work.last)
    _clear_unused(cta, values, work.last)
    acc = add_values(acc, weights, values)
    plgpu.barrier_wait(cta.buffers["taken_in"].at[work.warpgroup])
    return acc, *statistics[:2]


def _overlapped(cta: Cta, tile: Any, carry: Any, *, masked: bool) -> tuple[Any, ...]:
    """The softmax of a tile, under products of its neighbors.

    The carry: sums; weights of the tile before, None where there is none; maximum and sum of each row; this half's products of the
    tile, which the other one has been given; pages of the tiles that come in the place of the one before, and in its own.
    """
    launch, kv, (acc, before, row_max, row_sum, products, earlier, pages) = cta.launch, cta.kv, carry
    preceding, following = tile - cta.work.stride, tile + cta.work.stride
    coming, there = kv.pages(kv.next_in_stage(following)), following < cta.work.end

    @pl.when(there)
    def _():
        kv.wait("k", following)

    values = None if before is None else kv.wait("v", preceding)

    def multiply(total, sums):
        # Past the last tile they are of whatever lies there, and nobody uses them.
        total.begin(_queries(cta), kv.held("k", following).transpose((1, 0)))
        if before is not None:
            sums.begin(before, values)
        found = weigh(cta, tile, _take(cta, products), row_max, row_sum, masked=masked)
        return sums.read(), total.read(), *found

    found = side_by_side(multiply, ((ROWS, launch.keys), acc))
    # Registers that a product reads must not be written while one is on its way: the assembler would then let none be.
    acc, products, weights, alpha, row_max, row_sum = lax.optimization_barrier(found)
    _release(cta, "k", following, coming)
    if before is not None:
        _release(cta, "v", preceding, earlier)

    @pl.when(there)
    def _():
        plgpu.barrier_wait(cta.buffers["taken_in"].at[cta.work.warpgroup])
        _give(cta, products)

    weights = weights.astype(cta.buffers["v_sm"].dtype)
    return softmax.rescaled(acc, alpha), weights, row_max, row_sum, products, pages, coming


# Parts of both


def _queries(cta: Cta) -> Any:
    return cta.buffers["q_sm"].at[cta.work.warpgroup]


def _give(cta: Cta, products: Any) -> None:
    """Gives the other half products over this one's columns."""
    mine, given, memory = cta.work.warpgroup, cta.buffers["given_in"], cta.buffers["products"]
    if cta.launch.paired:
        combine.give_peer(products, memory.at[mine], tma.arrival(tma.address_of(given), mine))
    else:
        memory.at[mine][...] = products
        plgpu.barrier_arrive(given.at[mine])


def _take(cta: Cta, products: Any) -> Any:
    """Products over all columns, from those over this half's and what the other one has given: the same bits in both."""
    memory, given, taken = (cta.buffers[name] for name in ("products", "given_in", "taken_in"))
    mine, other = cta.work.warpgroup, 1 - cta.work.warpgroup
    if cta.launch.paired:
        plgpu.barrier_wait(given.at[mine])
        return combine.add_given(products, memory.at[mine], tma.arrival(tma.address_of(taken), mine))
    plgpu.barrier_wait(given.at[other])
    scores = products + plgpu.load(memory.at[other], layout=MATRIX)
    plgpu.barrier_arrive(taken.at[other])
    return scores


def _clear_unused(cta: Cta, values: Any, tile: Any) -> None:
    """Zeroes the value rows past the sequence: their weight is 0, and 0 * NaN is NaN. Two that share a tile write the same bits."""
    live, swizzle = cta.work.kv_len - tile * cta.launch.keys, paged_kv.most_swizzled("v", cta.launch.keys)
    pl.when(live < cta.launch.keys)(lambda: paged_kv.clear_rows(values, live, swizzle=swizzle))


def _release(cta: Cta, stream: str, tile: Any, pages: list[Any]) -> None:
    """Gives a used tile's memory to the tile that comes next in it."""
    if cta.launch.paired:
        cta.kv.release(stream, tile, pages)
        return
    coming = cta.kv.next_in_stage(tile)

    @pl.when(coming < cta.work.end)
    def _():
        plgpu.commit_smem()
        cta.kv.fill(stream, coming, pages)


# Epilogue


def _write(cta: Cta, half: Any, out: Any, lse: Any) -> None:
    """This half of the columns; the lse is the first half's to write."""
    launch, work, refs = cta.launch, cta.work, cta.refs

    @pl.when(half == 0)
    def _():
        cta.lse_row.at[pl.ds(work.first_row, ROWS)][...] = lse

    if out is None:
        return
    column, width, rows = cta.kv.first_column, launch.head_dim // 2, launch.tokens * launch.group
    if launch.direct:
        epilogue.store_columns(cta.out, out.astype(refs["o"].dtype), column, work.first_row, rows=rows)
    else:
        split = refs["o"].at[work.place.sequence, work.head, work.place.split]
        epilogue.store_split(split.at[:, pl.ds(column, width)], out, work.first_row)
