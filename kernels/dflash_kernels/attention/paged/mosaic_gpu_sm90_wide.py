"""The Hopper kernel for heads of 512: one CTA attends with 64 query rows of a KV head to one split of one sequence's pages.

The output of 64 rows, 64 x 512 in float32, fills half of a multiprocessor's registers. So two warpgroups share the rows, and each has
half of the columns, of queries, keys and values alike: it copies them itself, multiplies its queries with its keys and its weights
with its values. Only the scores are sums over both halves: of each tile each warpgroup hands its products to the other through shared
memory, in float32. Both then know the same scores and do the same softmax, and no other word passes between them.

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
from dflash_kernels.attention.paged.mosaic_gpu_sm90 import Cta, weigh
from dflash_kernels.mosaic_gpu import epilogue, paged_kv, softmax
from dflash_kernels.mosaic_gpu.layouts import swizzled
from dflash_kernels.mosaic_gpu.queries import ask_for_rows, put_rows
from dflash_kernels.mosaic_gpu.thread_op import MATRIX, ROW, interpreting, kernel
from dflash_kernels.mosaic_gpu.wgmma import add_values, scores_of

# A barrier at every access of shared memory, as is put in by default, is more than the hand-over of products needs: what copies and
# matrix instructions touch has barriers of its own here.
_PARAMS = plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True)


def attention(
    launch: Launch, q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, slopes: jax.Array | None, table: jax.Array,
    seq_lens: jax.Array, q_lens: jax.Array, interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Runs the kernel. Arguments and results are those of `mosaic_gpu_sm90.attention`."""
    b, rows = q.shape[0], launch.row_blocks * ROWS
    written = rows if launch.row_blocks > 1 else -(-launch.tokens * launch.group // 8) * 8
    if launch.direct:
        out = jax.ShapeDtypeStruct((b, launch.tokens, launch.kv_heads, launch.group, launch.head_dim), q.dtype)
    else:
        out = jax.ShapeDtypeStruct((b, launch.kv_heads, launch.splits, written, launch.head_dim), jnp.float32)
    given = {"q": q, "k": k_pages, "v": v_pages, "slopes": slopes, "table": table, "seq_lens": seq_lens, "q_lens": q_lens}
    given = {name: array for name, array in given.items() if array is not None}

    def body(*refs, **buffers):
        named = dict(zip([*given, "o", "lse"], refs, strict=True))
        kv = paged_kv.paged_kv(launch, named, buffers, stride=launch.splits)
        # Both warpgroups have all of the CTA's rows.
        work = dataclasses.replace(kv.work, first_row=kv.work.row_block * ROWS)
        kv = dataclasses.replace(kv, work=work, half=work.warpgroup)
        _attend(Cta(launch, named, buffers, kv, named["lse"].at[work.place.sequence, work.head, work.place.split]))

    return kernel(
        body,
        out_type=(out, jax.ShapeDtypeStruct((b, launch.kv_heads, launch.splits, rows), jnp.float32)),
        scratch_types=scratch(launch, q.dtype, interpret),
        **paged_kv.grid(launch, b),
        num_threads=2, thread_name="wg", compiler_params=_PARAMS, interpret=interpret,
    )(*given.values())  # fmt: skip


def scratch(launch: Launch, dtype: Any, interpret: Any) -> dict[str, Any]:
    """Shared memory and barriers of one CTA; the first index of each is a warpgroup's."""
    half, keys = launch.head_dim // 2, launch.keys
    tiles = {
        f"{stream}_sm": plgpu.SMEM(
            (2, launch.stages, keys, half), dtype, transforms=swizzled(dtype, half, paged_kv.most_swizzled(stream, keys))
        )
        for stream in ("k", "v")
    }
    filled = plgpu.Barrier(num_arrivals=launch.copies, num_barriers=2 * launch.stages)
    buffers: dict[str, Any] = tiles | {
        "q_sm": plgpu.SMEM((2, ROWS, half), dtype, transforms=swizzled(dtype, half)),
        "k_in": filled, "v_in": filled,
        "products": plgpu.SMEM((2, ROWS, keys), jnp.float32, transforms=swizzled(jnp.float32, keys)),
        "given": plgpu.Barrier(num_barriers=2), "taken": plgpu.Barrier(num_barriers=2),
    }  # fmt: skip
    if interpret is not None:
        # The interpreter knows neither weights nor results from registers.
        buffers["p_sm"] = plgpu.SMEM((2, ROWS, keys), dtype)
        buffers["o_sm"] = plgpu.SMEM((2, ROWS, half), dtype if launch.direct else jnp.float32)
    return buffers


def _attend(cta: Cta) -> None:
    """The program of a warpgroup."""
    work, kv = cta.work, cta.kv
    half = cta.launch.head_dim // 2
    queries = cta.queries.at[:, :, pl.ds(work.warpgroup * half, half)]
    rows = ask_for_rows(queries, work.first_row, rows=cta.launch.tokens * cta.launch.group, columns=half)
    pages = kv.ring_pages()

    @pl.when(work.begin < work.end)
    def _():
        kv.fill_ring(("k", "v"), pages)
        # A row's garbage never leaves that row.
        put_rows(queries, cta.buffers["q_sm"].at[work.warpgroup], work.first_row, rows)
        row_max = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), ROW)
        row_sum = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ROW)
        acc = plgpu.layout_cast(jnp.zeros((ROWS, half), jnp.float32), MATRIX)
        if cta.launch.ahead:
            products = scores_of(cta.buffers["q_sm"].at[work.warpgroup], kv.wait("k", work.begin), cta.launch.keys)
            coming = kv.pages(kv.next_in_stage(work.begin))
            _refill(cta, "k", work.begin, coming)
            carry = acc, row_max, row_sum, products, *coming
            acc, row_max, row_sum = work.walk(functools.partial(_step_ahead, cta), carry)[:3]
        else:
            acc, row_max, row_sum = work.walk(functools.partial(_step, cta), (acc, row_max, row_sum))
        _write(cta, *softmax.finalize(acc, row_max, row_sum, work.live(row_sum, ROW)))

    @pl.when(work.begin >= work.end)
    def _():
        lse = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), ROW)
        zeros = plgpu.layout_cast(jnp.zeros((ROWS, half), jnp.float32), MATRIX)
        _write(cta, zeros if cta.launch.direct else None, lse)


# Mainloop


def _step(cta: Cta, tile: Any, carry: Any, *, masked: bool) -> tuple[Any, Any, Any]:
    """One tile of keys: this half's products, the scores, online softmax, this half's values."""
    launch, kv, buffers, (acc, row_max, row_sum) = cta.launch, cta.kv, cta.buffers, carry
    mine, coming = cta.work.warpgroup, kv.pages(kv.next_in_stage(tile))
    products = scores_of(buffers["q_sm"].at[mine], kv.wait("k", tile), launch.keys)
    _refill(cta, "k", tile, coming)
    weights, alpha, row_max, row_sum = weigh(cta, tile, _scores(cta, products), row_max, row_sum, masked=masked)
    acc = softmax.rescaled(acc, alpha)
    values = kv.wait("v", tile)
    if masked:
        # Rows past the sequence: their weight is 0, and 0 * NaN is NaN.
        live = cta.work.kv_len - tile * launch.keys
        swizzle = paged_kv.most_swizzled("v", launch.keys)
        pl.when(live < launch.keys)(lambda: paged_kv.clear_rows(values, live, swizzle=swizzle))
    staged = buffers["p_sm"].at[mine] if "p_sm" in buffers else None
    acc = add_values(acc, weights.astype(buffers["v_sm"].dtype), values, staged)
    _refill(cta, "v", tile, coming)
    # Of this tile the other warpgroup has long had the products; the next one's may take their place.
    plgpu.barrier_wait(buffers["taken"].at[mine])
    return acc, row_max, row_sum


def _step_ahead(cta: Cta, tile: Any, carry: Any, *, masked: bool) -> tuple[Any, ...]:
    """One tile of keys, whose products are there: the scores and the softmax under the next tile's products, then the values."""
    launch, kv, buffers, (acc, row_max, row_sum, products, *pages) = cta.launch, cta.kv, cta.buffers, carry
    mine, following = cta.work.warpgroup, tile + cta.work.stride
    coming = kv.pages(kv.next_in_stage(following))

    @pl.when(following < cta.work.end)
    def _():
        kv.wait("k", following)

    def under_products(total):
        # Past the last tile they are of whatever lies there, and nobody uses them.
        keys = buffers["k_sm"].at[mine, kv.stage(following)]
        plgpu.wgmma(total, buffers["q_sm"].at[mine], keys.transpose((1, 0)))
        found = weigh(cta, tile, _scores(cta, products), row_max, row_sum, masked=masked)
        return total[...], *found

    products, weights, alpha, row_max, row_sum = pl.run_scoped(
        under_products, plgpu.ACC((ROWS, launch.keys), jnp.float32)
    )
    _refill(cta, "k", following, coming)
    acc = softmax.rescaled(acc, alpha)
    values = kv.wait("v", tile)
    if masked:
        # Rows past the sequence: their weight is 0, and 0 * NaN is NaN.
        live = cta.work.kv_len - tile * launch.keys
        swizzle = paged_kv.most_swizzled("v", launch.keys)
        pl.when(live < launch.keys)(lambda: paged_kv.clear_rows(values, live, swizzle=swizzle))
    staged = buffers["p_sm"].at[mine] if "p_sm" in buffers else None
    acc = add_values(acc, weights.astype(buffers["v_sm"].dtype), values, staged)
    _refill(cta, "v", tile, pages)
    plgpu.barrier_wait(buffers["taken"].at[mine])
    return acc, row_max, row_sum, products, *coming


def _scores(cta: Cta, products: Any) -> Any:
    """Products over all columns, from those over each half: the same bits in both warpgroups."""
    memory, given, taken = (cta.buffers[name] for name in ("products", "given", "taken"))
    mine, other = cta.work.warpgroup, 1 - cta.work.warpgroup
    memory.at[mine][...] = products
    plgpu.barrier_arrive(given.at[mine])
    plgpu.barrier_wait(given.at[other])
    scores = products + plgpu.load(memory.at[other], layout=MATRIX)
    plgpu.barrier_arrive(taken.at[other])
    return scores


def _refill(cta: Cta, stream: str, tile: Any, pages: list[Any]) -> None:
    """Starts this half of the tile that takes a used one's place."""
    coming = cta.kv.next_in_stage(tile)

    @pl.when(coming < cta.work.end)
    def _():
        plgpu.commit_smem()
        cta.kv.fill(stream, coming, pages)


# Epilogue


def _write(cta: Cta, out: Any, lse: Any) -> None:
    """This half of the columns; the lse is the first warpgroup's to write."""
    launch, work, refs = cta.launch, cta.work, cta.refs

    @pl.when(work.warpgroup == 0)
    def _():
        cta.lse_row.at[pl.ds(work.first_row, ROWS)][...] = lse

    if out is None:
        return
    half = launch.head_dim // 2
    column, rows = work.warpgroup * half, launch.tokens * launch.group
    if interpreting():
        _write_interpreted(cta, out, pl.ds(column, half))
    elif launch.direct:
        epilogue.store_columns(cta.out, out.astype(refs["o"].dtype), column, work.first_row, rows=rows)
    else:
        split = refs["o"].at[work.place.sequence, work.head, work.place.split]
        epilogue.store_split(split.at[:, pl.ds(column, half)], out, work.first_row)


def _write_interpreted(cta: Cta, out: Any, columns: Any) -> None:
    launch, work, o = cta.launch, cta.work, cta.refs["o"]
    held = cta.buffers["o_sm"].at[work.warpgroup]
    held[...] = out.astype(held.dtype)
    plgpu.commit_smem()
    if launch.direct:
        group = launch.group
        first = lax.div(work.first_row, jnp.int32(group))

        @pl.loop(0, jnp.minimum(launch.tokens - first, max(ROWS // group, 1)))
        def _(token):
            target = o.at[work.place.sequence, first + token, work.head, :, columns]
            plgpu.copy_smem_to_gmem(held.at[pl.ds(token * group, group)], target)
    else:
        rows = min(o.shape[3], ROWS)
        target = o.at[work.place.sequence, work.head, work.place.split, pl.ds(work.first_row, rows), columns]
        plgpu.copy_smem_to_gmem(held.at[pl.ds(0, rows)], target)
    plgpu.wait_smem_to_gmem(0)
