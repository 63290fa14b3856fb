"""Attention of one token with the projections around it on Hopper, by one persistent kernel.

A KV head has a row of CTAs, which wait for one another twice and for no others: for its heads, as some of them project one each,
and for its splits (split-KV), as each attends to a tile of keys in turn. Then each combines the splits and multiplies some rows of
the output projection, of the columns that the KV head's queries meet; products of KV heads are left to be added. While CTAs wait,
the ring fills with weights of that projection, most of which fit it, so memory is seldom idle.

Copies of keys begin before the token's own key is written. So that is in no tile, and counts where splits are combined.

One warpgroup norms, multiplies and attends, the other one is the producer of weights.
"""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.core.device import MATRIX_ROWS as TILE
from dflash_kernels.core.layouts import aliased_ref, freeze_aliased
from dflash_kernels.fused.token_attention.plan import APART, COLUMNS, HEAD_DIM, IN_FLIGHT, IN_FLIGHT_BESIDE, Plan
from dflash_kernels.matmul.few_tiling import BLOCK
from dflash_kernels.matmul.row_norm_sm90 import add_norm_row
from dflash_kernels.mosaic_gpu import paged_kv, softmax, stages
from dflash_kernels.mosaic_gpu.counters import announce, await_announced
from dflash_kernels.mosaic_gpu.epilogue import store_split
from dflash_kernels.mosaic_gpu.layouts import TILED, row_of, store_transposed
from dflash_kernels.mosaic_gpu.own_key import combine_with_own
from dflash_kernels.mosaic_gpu.paged_kv import PagedKV, Place, Work, clear_rows
from dflash_kernels.mosaic_gpu.pipeline import Ring, div
from dflash_kernels.mosaic_gpu.queries import ask_for_rows, put_rows
from dflash_kernels.mosaic_gpu.rows import keep_first_row, store_padded
from dflash_kernels.mosaic_gpu.thread_op import MATRIX, ROW
from dflash_kernels.mosaic_gpu.tma import address_of, copy_once
from dflash_kernels.mosaic_gpu.turned_head import store_head
from dflash_kernels.mosaic_gpu.wgmma import Accumulator, add_products, add_values, scores_of, zeros

PROJECT, ATTEND, OUTPUT = "project", "attend", "output"
CHAIN = (5, 4, 3, 2, 1)  # products in flight of the first projection, whose blocks come one by one


# Launch


def token_attention(
    plan: Plan, given: dict[str, jax.Array], k_pages: jax.Array, v_pages: jax.Array, ready: Any, interpret: Any = None
) -> tuple[jax.Array, ...]:
    """Parts of the output projection `[K, 1, D]` float32, the stream, and the pools.

    Args:
      given: `x [1, D]`, `added [S, 1, D]`, `norm [D]`, the weights `qkv` and `o` and the biases that there are, `sinks [N]` or
        none, `cos`, `sin`, `table [1, W]`, `seq_lens [1]` without the token, `q_lens [1]` and `slots [1]`.
      ready: a Ref of `counters(K)` zeros that no other launch uses at the same time, and holds zeros afterwards.
    """
    pools = {"k": aliased_ref(k_pages), "v": aliased_ref(v_pages)}
    dtype, splits = given["x"].dtype, (plan.kv_heads, plan.splits)
    results = {
        "out": jax.ShapeDtypeStruct((plan.kv_heads, 1, plan.hidden), jnp.float32),
        "stream": jax.ShapeDtypeStruct((1, plan.hidden), dtype),
        "q": jax.ShapeDtypeStruct((1, plan.heads, HEAD_DIM), dtype),
        "parts": jax.ShapeDtypeStruct((*splits, plan.group, HEAD_DIM), jnp.float32),
        "lses": jax.ShapeDtypeStruct((*splits, TILE), jnp.float32),
    }
    found = stages.launch(
        program(plan), "token_attention", (PROJECT, ATTEND, OUTPUT), given | pools | {"ready": ready}, results,
        interpret=interpret, scratch_types=scratch(plan, dtype), grid=splits, grid_names=("heads", "split"), num_threads=2,
        thread_name="wg", compiler_params=plgpu.CompilerParams(approx_math=True),
    )  # fmt: skip
    return found["out"], found["stream"], freeze_aliased(pools["k"]), freeze_aliased(pools["v"])


def program(plan: Plan) -> Callable[..., None]:
    """The CTA program, as `stages.launch` takes it."""

    def body(stages: Sequence[str], refs: Mapping[str, Any], buffers: Mapping[str, Any]) -> None:
        place = Place(jnp.int32(0), lax.axis_index("split"), jnp.int32(plan.splits))
        kv = paged_kv.paged_kv(plan.keys, dict(refs), dict(buffers), place=place, stride=plan.splits)
        run(Cta(plan, stages, refs, buffers, kv))

    return body


def scratch(plan: Plan, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of one CTA."""
    return paged_kv.ring(plan.keys, dtype) | {
        "w_sm": plgpu.SMEM((plan.stages, TILE, BLOCK), dtype, transforms=TILED),
        "x_sm": plgpu.SMEM((plan.resident_blocks, COLUMNS, BLOCK), dtype, transforms=TILED),
        "q_sm": plgpu.SMEM((TILE, HEAD_DIM), dtype, transforms=TILED),
        "head_sm": plgpu.SMEM((TILE, COLUMNS), jnp.float32),
        "full": plgpu.Barrier(num_barriers=plan.stages), "empty": plgpu.Barrier(num_barriers=plan.stages),
    }  # fmt: skip


# CTA program


@dataclasses.dataclass(frozen=True)
class Cta:
    """State of a CTA's program, which its functions share.

    Attributes:
      stages: what this launch runs, in order.
      refs, buffers: arrays in global memory, and shared memory and barriers, by name.
      kv: producer of keys and values.
    """

    plan: Plan
    stages: Sequence[str]
    refs: Mapping[str, Any]
    buffers: Mapping[str, Any]
    kv: PagedKV

    @property
    def work(self) -> Work:
        return self.kv.work

    @property
    def head(self) -> Any:
        """KV head."""
        return self.work.head

    @property
    def index(self) -> Any:
        """Of this CTA among those of its KV head."""
        return self.work.place.split

    @property
    def ring(self) -> Ring:
        """Ring of the weights."""
        return Ring(self.plan.stages, self.buffers["full"], self.buffers["empty"])

    @property
    def projects(self) -> Any:
        """Whether the CTA has a tile of the first projection."""
        return self.index < self.plan.makers

    @property
    def projected_head(self) -> Any:
        """Which head that is: of all queries', then of the keys', then of the values'."""
        plan, beside = self.plan, self.index - self.plan.group
        return jnp.where(
            beside < 0, self.head * plan.group + self.index, plan.heads + self.head + beside * plan.kv_heads
        )

    @property
    def projected_steps(self) -> Any:
        """Steps of the ring before those of the output projection."""
        return jnp.where(self.projects, self.plan.projected_blocks, 0) if PROJECT in self.stages else jnp.int32(0)

    @property
    def tiles(self) -> Any:
        """Tiles of the output projection that this CTA has."""
        if OUTPUT not in self.stages:
            return jnp.int32(0)
        return div(self.plan.output_tiles - self.tile(0) + (self.plan.splits - 1), self.plan.splits)

    def tile(self, turn: Any) -> Any:
        """Number of one of them; the last CTAs, which project nothing, have the first ones."""
        return self.plan.splits - 1 - self.index + turn * self.plan.splits

    @property
    def queries(self) -> Any:
        """`[1, G, H]` of the KV head."""
        return self.refs["q"].at[:, pl.ds(self.head * self.plan.group, self.plan.group)]


def run(cta: Cta) -> None:
    """Dispatches the warpgroups: the one that computes, and the producer of weights."""
    warpgroup = lax.axis_index("wg")
    pl.when(warpgroup == 0)(lambda: consume(cta))
    pl.when(warpgroup == 1)(lambda: produce(cta))


def produce(cta: Cta) -> None:
    """Starts the copies of both projections' weights, each as soon as its stage is empty."""
    ring, refs, before = cta.ring, cta.refs, cta.projected_steps
    arrivals, few = address_of(ring.full), jnp.where(cta.projects, IN_FLIGHT, IN_FLIGHT_BESIDE)

    def fill(step: Any, in_flight: Any, weights: Any, row: Any, column: Any) -> None:
        stage = ring.stage(step)
        ring.producer_acquire(step, stage)
        if in_flight is not None:
            ring.limit_in_flight(step, in_flight)
        rows, columns = pl.ds(row, TILE), pl.ds(column, BLOCK)
        copy_once(weights, rows, columns, cta.buffers["w_sm"].at[stage], arrivals, stage)

    def projected(step: Any, _: None) -> None:
        fill(step, ring.stages, refs["qkv"], cta.projected_head * HEAD_DIM, step * BLOCK)

    def output(in_flight: Any, step: Any, _: None) -> None:
        turn, blocks = div(step, cta.plan.output_blocks), cta.plan.output_blocks
        block = cta.head * blocks + step - turn * blocks
        fill(before + step, in_flight, refs["o"], cta.tile(turn) * TILE, block * BLOCK)

    count = cta.tiles * cta.plan.output_blocks
    early = jnp.minimum(count, ring.stages)
    lax.fori_loop(0, before, projected, None)
    ring.await_landed(jnp.maximum(before - ring.stages, 0), jnp.maximum(before - few, 0))
    lax.fori_loop(0, early, functools.partial(output, few), None)
    # Nobody waits any more when the ring has room for the rest.
    lax.fori_loop(early, count, functools.partial(output, None), None)
    ring.drain(before + count)


def consume(cta: Cta) -> None:
    """The stages of a CTA, in order. Keys and values are on their way while heads are projected."""
    if PROJECT in cta.stages:
        pl.when(cta.projects)(lambda: norm(cta))
    if ATTEND in cta.stages:
        cta.kv.fill_ring(("k", "v"), cta.kv.ring_pages())
    if PROJECT in cta.stages:
        pl.when(cta.projects)(lambda: project(cta))
    if ATTEND in cta.stages:
        attend(cta)
    if OUTPUT in cta.stages:
        multiply_output(cta)


# First projection


def norm(cta: Cta) -> None:
    """The row that is projected to shared memory, by every CTA for itself, and the stream, by one."""
    refs, how = cta.refs, cta.plan.norm
    added, scaled = add_norm_row(refs["added"], refs["x"], refs["norm"], 0, how.eps, how.zero_centered, how.rounds_last)
    pl.when((cta.head == 0) & (cta.index == 0))(lambda: store_padded(refs["stream"].at[0], added))
    keep_first_row(cta.buffers["x_sm"].at[pl.ds(0, cta.plan.projected_blocks)], scaled)
    plgpu.commit_smem()


def project(cta: Cta) -> None:
    """A head of the token, rotated, to the queries or to the pages."""
    plan, refs, index = cta.plan, cta.refs, cta.index
    chain = next(count for count in CHAIN if plan.projected_blocks % count == 0)

    def some(turn: Any, product: Any) -> Any:
        return multiply(cta, product, turn * chain, turn * chain, chain)

    product = lax.fori_loop(0, plan.projected_blocks // chain, some, zeros((TILE, COLUMNS)))
    if "qkv_bias" in refs:
        product = product + _bias(refs["qkv_bias"], cta.projected_head, product.shape)
    tables = [refs[name] for name in ("cos", "sin", "slots")]

    def put(name: str, head: Any, **how: Any) -> None:
        store_head(refs[name], product, cta.buffers["head_sm"], *tables, head, tokens=1, **how)

    pl.when(index < plan.group)(lambda: put("q", cta.projected_head, turns=True, paged=False))
    pl.when(index == plan.group)(lambda: put("k", cta.head, turns=True, paged=True))
    pl.when(index == plan.group + 1)(lambda: put("v", cta.head, turns=False, paged=True))
    announce(refs["ready"], cta.head * APART)


def multiply(cta: Cta, product: Any, step: Any, block: Any, count: int) -> Any:
    """`product` and `count` blocks of weights from a step of the ring on, times blocks of x: all in flight at once."""
    ring, held = cta.ring, cta.buffers
    places = [ring.stage(step + index) for index in range(count)]

    def begin(total: Accumulator) -> None:
        for index, place in enumerate(places):
            ring.consumer_wait(place)
            total.begin(held["w_sm"].at[place], held["x_sm"].at[block + index].transpose((1, 0)))

    product = add_products(product, begin)
    for place in places:
        ring.consumer_release(place)
    return product


def _bias(bias: Any, tile: Any, shape: tuple[int, ...]) -> Any:
    """Bias of a tile's rows."""
    return lax.broadcast_in_dim(row_of(bias.at[pl.ds(tile * TILE, TILE)]).astype(jnp.float32), shape, [0])


# Attention


def attend(cta: Cta) -> None:
    """One split of the keys before the token, normalized, and its lse."""
    plan, refs, work = cta.plan, cta.refs, cta.work
    await_announced(refs["ready"], cta.head * APART, given=plan.makers, taken=plan.splits)
    lse_row = refs["lses"].at[cta.head, cta.index]

    @pl.when(work.begin < work.end)
    def _() -> None:
        asked = ask_for_rows(cta.queries, jnp.int32(0), rows=plan.group, columns=HEAD_DIM)
        put_rows(cta.queries, cta.buffers["q_sm"], jnp.int32(0), asked)
        row_max = plgpu.layout_cast(jnp.full((TILE,), -jnp.inf, jnp.float32), ROW)
        row_sum = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), ROW)
        acc = plgpu.layout_cast(jnp.zeros((TILE, HEAD_DIM), jnp.float32), MATRIX)
        acc, row_max, row_sum = work.walk(functools.partial(_step, cta), (acc, row_max, row_sum))
        out, lse = softmax.finalize(acc, row_max, row_sum, work.live(row_sum, ROW))
        store_split(refs["parts"].at[cta.head, cta.index], out, jnp.int32(0))
        lse_row[...] = lse

    @pl.when(work.begin >= work.end)
    def _() -> None:
        lse_row[...] = plgpu.layout_cast(jnp.full((TILE,), -jnp.inf, jnp.float32), ROW)

    announce(refs["ready"], (plan.kv_heads + cta.head) * APART)


def _step(cta: Cta, tile: Any, carry: Any, *, masked: bool) -> tuple[Any, Any, Any]:
    """One tile of keys: scores, online softmax, values."""
    kv, (acc, row_max, row_sum) = cta.kv, carry
    coming = kv.pages(kv.next_in_stage(tile))
    scores = scores_of(cta.buffers["q_sm"], kv.wait("k", tile), TILE)
    kv.release("k", tile, coming)
    if masked:
        scores = jnp.where(cta.work.mask(tile, ROW), scores, -jnp.inf)
    weights, alpha, row_max, row_sum = softmax.online_step(scores, row_max, row_sum, cta.plan.scale * softmax.LOG2E)
    acc = softmax.rescaled(acc, alpha)
    weights, values = weights.astype(cta.buffers["v_sm"].dtype), kv.wait("v", tile)
    if masked:
        # The weight of a row past the sequence is 0, and 0 * NaN is NaN.
        clear_rows(values, cta.work.kv_len - tile * TILE)
    acc = add_values(acc, weights, values)
    kv.release("v", tile, coming)
    return acc, row_max, row_sum


# Output projection


def multiply_output(cta: Cta) -> None:
    """Combines the splits and the token's own key, and multiplies this CTA's tiles of weights by what that gives."""
    plan, refs, head = cta.plan, cta.refs, cta.head
    await_announced(refs["ready"], (plan.kv_heads + head) * APART, given=plan.splits, taken=plan.splits)
    place, sinks = [refs["slots"][0], refs["q_lens"][0], head], refs.get("sinks")
    queries = refs["q"].at[0, pl.ds(head * plan.group, plan.group)]
    given = [refs["parts"].at[head], refs["lses"].at[head], queries, refs["k"], refs["v"]]
    blocks = cta.buffers["x_sm"].at[pl.ds(0, plan.output_blocks)]
    combine_with_own(*given, place, sinks, blocks, scale=plan.scale)

    def of_tile(turn: Any, _: None) -> None:
        tile, step = cta.tile(turn), cta.projected_steps + turn * plan.output_blocks
        product = multiply(cta, zeros((TILE, COLUMNS)), step, 0, plan.output_blocks)
        if "o_bias" in refs:
            # One of those whose products are added has the bias.
            product = product + _bias(refs["o_bias"], tile, product.shape) * jnp.where(head == 0, 1.0, 0.0)
        store_transposed(refs["out"].at[head], tile * TILE, product, rows=TILE, tokens=1)

    lax.fori_loop(0, cta.tiles, of_tile, None)
