"""Mixture of experts in MXFP4 for few rows on Hopper: persistent CTAs stream the four-bit weights of the experts that are taken.

As in `fused.experts`, weights are the left operand of the matrix instruction and an expert's rows of x the right one; sorting,
gathering and the hand-over between the two products are that kernel's. What differs: a work item is 64 rows of weights, whose tiles
the consumers share, since widening four bits keeps several warpgroups busy. Each widens its tiles from shared memory to registers,
exactly, and multiplies; the first one adds up what they have and runs the epilogue. Where tokens are so few that the second product
has too few items for the GPU, its columns are cut into parts, whose results are added by whoever wants them.

Pallas' interpreter cannot make CTAs wait for each other: there each product is a launch of its own.
"""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from dflash_kernels.core.device import WARPGROUP
from dflash_kernels.core.mxfp4 import PIECE, PIECES, SHIFT, TILE, tile_numbers
from dflash_kernels.fused.experts.mosaic_gpu_sm90 import (
    announce_tile,
    await_tiles,
    gather_rows,
    sort_entries,
    store_out,
)
from dflash_kernels.fused.mxfp4_experts.plan import Gate, Mxfp4Plan
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.layouts import TILED, rows_of
from dflash_kernels.mosaic_gpu.pipeline import Ring, div, rem
from dflash_kernels.mosaic_gpu.thread_op import GLOBAL, MATRIX, ROW, SCALAR, interpreting, kernel, matrix, thread_op
from dflash_kernels.mosaic_gpu.tma import copied
from dflash_kernels.mosaic_gpu.wgmma import zeros

GATED, DOWN = "gated", "down"


# Launch


def experts(
    plan: Mxfp4Plan,
    x: jax.Array,
    entries: jax.Array,
    weights: jax.Array | None,
    matrices: Sequence[jax.Array],
    ready: Any,
    interpret: Any = None,
) -> jax.Array:
    """`[parts, k, T, D]` float32.

    Args:
      entries, weights: `[T * k]`; where the plan chooses, the logits `[T * E]` and None.
      matrices: pieces of the gated matrices' tiles `[pieces, 136]`, their biases `[E * 2F]`, and both of the second ones.
      ready: a Ref of `plan.groups` zeros or more that no other launch uses at the same time, and holds zeros afterwards.
    """
    inner = jax.ShapeDtypeStruct((plan.entries, plan.inner), x.dtype)
    out = jax.ShapeDtypeStruct((plan.parts, plan.top_k, plan.tokens, plan.hidden), jnp.float32)
    given, names = ((entries,), ("entries",)) if weights is None else ((entries, weights), ("entries", "weights"))
    gate_up, gate_up_bias, down, down_bias = matrices
    first, last = ("gate_up", "gate_up_bias"), ("down", "down_bias")
    if interpret is None:
        both = _launch(plan, x.dtype, (GATED, DOWN), ("x", *names, *first, *last, "ready"), (inner, out))
        return both(x, *given, *matrices, ready)[1]
    between = _launch(plan, x.dtype, (GATED,), ("x", *names, *first), (inner,), interpret)
    (between,) = between(x, *given, gate_up, gate_up_bias)
    return _launch(plan, x.dtype, (DOWN,), ("inner", *names, *last), (out,), interpret)(
        between, *given, down, down_bias
    )[0]


def _launch(
    plan: Mxfp4Plan,
    dtype: Any,
    stages: tuple[str, ...],
    names: tuple[str, ...],
    outs: tuple[Any, ...],
    interpret: Any = None,
) -> Callable[..., Any]:
    results = [{GATED: "inner", DOWN: "out"}[stage] for stage in stages]

    def body(*refs: Any, **buffers: Any) -> None:
        run(Cta(plan, stages, dict(zip((*names, *results), refs, strict=True)), buffers, lax.axis_index("cta")))

    body.__name__ = "_".join(("mxfp4_experts", *stages))  # what profilers show
    return kernel(
        body, out_type=outs, scratch_types=_scratch(plan, dtype), grid=(plan.ctas,), grid_names=("cta",),
        num_threads=plan.consumers + 2, thread_name="wg", compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )  # fmt: skip


def _scratch(plan: Mxfp4Plan, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of one CTA."""

    def ring(stages: int) -> tuple[Any, Any]:
        return (
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=plan.consumers, num_barriers=stages),
        )

    buffers = {
        "w_sm": plgpu.SMEM((plan.stages, plan.consumers * PIECES, PIECE), jnp.int32), "w_ring": ring(plan.stages),
        "x_sm": plgpu.SMEM((plan.x_stages, plan.consumers, plan.columns, TILE), dtype, transforms=TILED),
        "x_ring": ring(plan.x_stages),
        "sorted": plgpu.SMEM((plan.padded,), jnp.int32), "shares": plgpu.SMEM((plan.padded,), jnp.float32),
        "spare": plgpu.SMEM((2 * plan.padded + plan.threads,), jnp.int32), "groups": plgpu.SMEM((3 * plan.groups + 1,), jnp.int32),
        "is_sorted": plgpu.Barrier(),
    }  # fmt: skip
    if plan.consumers > 1:
        buffers["kept"] = plgpu.SMEM((plan.consumers - 1, TILE, plan.columns), jnp.float32)
        buffers["given"], buffers["taken"] = plgpu.Barrier(num_arrivals=plan.consumers - 1), plgpu.Barrier()
    return buffers


# CTA program


@dataclasses.dataclass(frozen=True)
class Cta:
    """What the functions of the CTA program share.

    Attributes:
      stages: products that this launch runs, in order.
      refs: arrays in global memory; buffers: shared memory and barriers, by name.
      index: of this CTA in the grid.
    """

    plan: Mxfp4Plan
    stages: Sequence[str]
    refs: Mapping[str, Any]
    buffers: Mapping[str, Any]
    index: Any

    @property
    def weights(self) -> Ring:
        return Ring(self.plan.stages, *self.buffers["w_ring"])

    @property
    def activations(self) -> Ring:
        return Ring(self.plan.x_stages, *self.buffers["x_ring"])

    def steps(self, stage: str) -> int:
        """Stages of one work item: of its columns, so many tiles as there are consumers."""
        if stage == GATED:
            return self.plan.hidden // TILE // self.plan.consumers
        return self.plan.inner // TILE // self.plan.consumers // self.plan.parts

    def group(self, group: Any) -> list[Any]:
        """Expert, first place among the sorted entries, and how many there are."""
        return [self.buffers["groups"][row * self.plan.groups + group] for row in range(3)]

    def work_items(self, work: Callable[..., None]) -> tuple[Any, Any]:
        """`work(stage, items before, steps before, group, tile, part)` for all work items in turn, once entries are sorted.

        Returns how many items and steps there were.
        """
        items, steps, used = jnp.int32(0), jnp.int32(0), self.buffers["groups"][3 * self.plan.groups]
        for stage in self.stages:
            parts = 1 if stage == GATED else self.plan.parts
            tiles = self.plan.gated_tiles if stage == GATED else self.plan.down_tiles
            of_item = self.steps(stage)
            turns = div(used * (tiles * parts) - self.index + self.plan.ctas - 1, self.plan.ctas)

            def one(
                turn: Any, _: None, stage=stage, tiles=tiles, parts=parts, of_item=of_item, items=items, steps=steps
            ) -> None:
                item = self.index + turn * self.plan.ctas
                place = rem(item, tiles * parts)
                work(
                    stage, items + turn, steps + turn * of_item, div(item, tiles * parts), div(place, parts), rem(place, parts)
                )  # fmt: skip

            lax.fori_loop(0, turns, one, None)
            items, steps = items + turns, steps + turns * of_item
        return items, steps


def run(cta: Cta) -> None:
    """Dispatches the warpgroups: consumers, producer of weights, producer of activations."""
    warpgroup, consumers = lax.axis_index("wg"), cta.plan.consumers
    pl.when(warpgroup < consumers)(lambda: consume(cta, warpgroup))
    pl.when(warpgroup == consumers)(lambda: produce_weights(cta))
    pl.when(warpgroup == consumers + 1)(lambda: produce_activations(cta))


# Producers


def produce_weights(cta: Cta) -> None:
    """Starts the copies of all work items' weights, each as soon as its stage is empty."""
    plan, ring = cta.plan, cta.weights
    plgpu.barrier_wait(cta.buffers["is_sorted"])

    def produce(stage: str, _items: Any, before: Any, group: Any, tile: Any, part: Any) -> None:
        expert, _, _ = cta.group(group)
        name, tiles, units = (
            ("gate_up", plan.gated_tiles, plan.hidden) if stage == GATED else ("down", plan.down_tiles, plan.inner)
        )
        pieces, count = plan.consumers * PIECES, cta.steps(stage)
        first = (expert * tiles + tile) * (units // TILE * PIECES) + part * (count * pieces)

        def fill(step: Any, _: None) -> None:
            place = ring.stage(before + step)
            ring.producer_acquire(before + step, place)
            source = cta.refs[name].at[pl.ds(first + step * pieces, pieces)]
            plgpu.copy_gmem_to_smem(source, cta.buffers["w_sm"].at[place], ring.full.at[place])

        lax.fori_loop(0, count, fill, None)

    ring.drain(cta.work_items(produce)[1])


def produce_activations(cta: Cta) -> None:
    """Gathers the rows of each work item's group, half a ring at a time."""
    plan, ring = cta.plan, cta.activations
    plgpu.barrier_wait(cta.buffers["is_sorted"])
    lag = plan.x_stages // 2

    def produce(stage: str, _items: Any, before: Any, group: Any, _tile: Any, part: Any) -> None:
        _, first, live = cta.group(group)
        source, count, width = cta.refs["x" if stage == GATED else "inner"], cta.steps(stage), plan.consumers * TILE
        if stage == DOWN and "ready" in cta.refs:
            await_tiles(cta.refs["ready"], group, given=plan.gated_tiles, taken=plan.down_tiles * plan.parts)

        def fill(step: Any, _: None) -> None:
            place = ring.stage(before + step)
            ring.producer_acquire(before + step, place)
            gather_rows(
                source, (part * count + step) * width, cta.buffers["x_sm"].at[place], cta.buffers["sorted"], first, live,
                top_k=plan.top_k if stage == GATED else 0,
            )  # fmt: skip

            @pl.when(step >= lag)
            def _():
                copied(lag)
                plgpu.barrier_arrive(ring.full.at[ring.stage(before + step - lag)])

        lax.fori_loop(0, count, fill, None)
        copied(0)
        begun = jnp.int32(max(count - lag, 0))
        lax.fori_loop(begun, count, lambda step, _: plgpu.barrier_arrive(ring.full.at[ring.stage(before + step)]), None)

    ring.drain(cta.work_items(produce)[1])


# Consumers


def consume(cta: Cta, warpgroup: Any) -> None:
    """The first one sorts; all multiply, work item by work item, and the first one has the epilogues."""

    @pl.when(warpgroup == 0)
    def _():
        given = [cta.refs[name] for name in ("entries", "weights") if name in cta.refs]
        tables = [cta.buffers[name] for name in ("sorted", "shares", "spare", "groups")]
        sort_entries(given, tables, plan=cta.plan)
        plgpu.barrier_arrive(cta.buffers["is_sorted"])

    plgpu.barrier_wait(cta.buffers["is_sorted"])
    items, _ = cta.work_items(lambda *item: _work_item(cta, warpgroup, *item))
    if cta.plan.consumers > 1:
        # Every completion of a barrier is waited for.
        pl.when((warpgroup > 0) & (items > 0))(lambda: plgpu.barrier_wait(cta.buffers["taken"]))


def _work_item(cta: Cta, warpgroup: Any, stage: str, items: Any, before: Any, group: Any, tile: Any, part: Any) -> None:
    own = _mainloop(cta, warpgroup, cta.steps(stage), before)
    if cta.plan.consumers == 1:
        _epilogue(cta, own, stage, group, tile, part)
        return

    @pl.when(warpgroup > 0)
    def _():
        pl.when(items > 0)(lambda: plgpu.barrier_wait(cta.buffers["taken"]))
        keep(cta.buffers["kept"].at[warpgroup - 1], own)
        plgpu.barrier_arrive(cta.buffers["given"])

    @pl.when(warpgroup == 0)
    def _():
        plgpu.barrier_wait(cta.buffers["given"])
        product = own
        for other in range(cta.plan.consumers - 1):
            product = add_kept(product, cta.buffers["kept"].at[other])
        plgpu.barrier_arrive(cta.buffers["taken"])
        _epilogue(cta, product, stage, group, tile, part)


def _epilogue(cta: Cta, product: Any, stage: str, group: Any, tile: Any, part: Any) -> None:
    expert, first, live = cta.group(group)
    if stage == GATED:
        where = (expert * cta.plan.gated_tiles + tile, tile * (TILE // 2), first, live)
        store_gated(cta.refs["inner"], product, cta.refs["gate_up_bias"], *where, gate=cta.plan.gate)
        if "ready" in cta.refs:
            announce_tile(cta.refs["ready"], group)
        return
    feature, out = tile * TILE, cta.refs["out"].at[part]
    bias = cta.refs["down_bias"].at[pl.ds(expert * cta.plan.hidden + feature, TILE)]
    bias = (bias[...] if interpreting() else rows_of(bias, ROW)).astype(jnp.float32)
    bias = bias * jnp.where(part == 0, 1.0, 0.0)
    product = product * 2.0**SHIFT + lax.broadcast_in_dim(bias, product.shape, [0])
    tables = cta.buffers["sorted"], cta.buffers["shares"]
    store_out(out, product, *tables, first, live, feature, shape=cta.refs["out"].shape[1:])


def _mainloop(cta: Cta, warpgroup: Any, steps: int, before: Any) -> Any:
    """One consumer's tiles of a work item times a group's columns, `[64, columns]` float32."""
    w_ring, x_ring, w_sm, x_sm = cta.weights, cta.activations, cta.buffers["w_sm"], cta.buffers["x_sm"]

    def one(step: Any, total: Any) -> Any:
        stage, x_stage = w_ring.stage(before + step), x_ring.stage(before + step)
        w_ring.consumer_wait(stage)
        wide = widened(w_sm.at[stage, pl.ds(warpgroup * PIECES, PIECES)])
        w_ring.consumer_release(stage)
        x_ring.consumer_wait(x_stage)
        total = _add_product(total, wide, x_sm.at[x_stage, warpgroup])
        x_ring.consumer_release(x_stage)
        return total

    return lax.fori_loop(0, steps, one, zeros((TILE, cta.plan.columns)))


def _add_product(total: Any, wide: Any, x: Any) -> Any:
    if interpreting():
        return total + jnp.dot(wide.astype(jnp.float32), x[...].astype(jnp.float32).T, precision="highest")
    transposed = x.transpose((1, 0))
    return pl.run_state(lambda acc: plgpu.wgmma(acc, wide, transposed))(plgpu.ACC.init(total))


# Widening and epilogues, in terms of single threads


def _widened_interpreted(tile: Any) -> Any:
    return tile_numbers(tile[...]).astype(jnp.bfloat16)


@thread_op(args=(GLOBAL,), returns=lambda tile: matrix((TILE, TILE), jnp.bfloat16), interpret=_widened_interpreted)
def widened(tile: Any) -> Any:
    """A tile of MXFP4 `[4, 136]` in shared memory as bfloat16, times 2 to the minus `SHIFT`, exactly."""
    i32, pair = th.i32(), ir.VectorType.get((2,), ir.BF16Type.get())
    lane, warp = th.lane_and_warp()
    base = th.address(tile, space=3)
    words = th.load(th.add(base, th.mul(th.thread(), 16)), 4, op="ld.shared")
    of_rows = th.add(th.mul(warp, 32), th.mul(th.div(lane, 4), 4))
    scales = th.load(th.add(base, th.add(of_rows, 4 * 512)), op="ld.shared")[0]
    # A factor is a bfloat16 without sign and fraction, twice: its exponent is a byte of the scales' word.
    factors = [
        mgpu.utils.inline_ptx(
            f"{{ .reg .b32 both; prmt.b32 both, $1, 0, 0x4{place}4{place}; shl.b32 $0, both, 7; }}", scales, result_types=i32
        )
        for place in range(4)
    ]  # fmt: skip
    registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((TILE, TILE)), dtype=object)
    for step, word in enumerate(words):
        upper, lower = factors[step // 2], factors[2 + step // 2]
        # A number's bits at a bfloat16's places are the number times 2^-126, the subnormal one included.
        slots = mgpu.utils.inline_ptx(
            "{ .reg .b32 a, b, c; and.b32 a, $4, 0x81C081C0; mul.rn.bf16x2 $0, a, $5;"
            " shl.b32 a, $4, 3; and.b32 a, a, 0x81C081C0; mul.rn.bf16x2 $1, a, $6;"
            " shl.b32 a, $4, 6; and.b32 a, a, 0x81C081C0; mul.rn.bf16x2 $2, a, $5;"
            " shl.b32 a, $4, 1; and.b32 a, a, 0x80008000; shr.u32 b, $4, 5; and.b32 b, b, 0x01000100; or.b32 a, a, b;"
            " shr.u32 c, $4, 4; and.b32 c, c, 0x00C000C0; or.b32 a, a, c; mul.rn.bf16x2 $3, a, $6; }",
            word, upper, lower, result_types=[i32] * 4,
        )  # fmt: skip
        for slot, value in enumerate(slots):
            registers[0, 2 * step + slot // 2, 0, 0, slot % 2, 0, 0, 0, 0] = mgpu.utils.bitcast(value, pair)
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def _kept_interpreted(memory: Any, product: Any) -> None:
    memory[...] = product


@thread_op(args=(GLOBAL, MATRIX), interpret=_kept_interpreted)
def keep(memory: Any, product: Any) -> None:
    """Stores a matrix `[64, N]` float32 to as much shared memory, for the same threads of another warpgroup."""
    base = th.add(th.address(memory, space=3), th.mul(th.thread(), 8))
    for index, place in enumerate(np.ndindex(product.registers.shape)):
        both = [vector.extract(product.registers[place], [], [i]) for i in range(2)]
        th.inline("st.shared.v2.f32 [$0], {$1, $2};", th.add(base, index * 8 * WARPGROUP), *both)


@thread_op(
    args=(MATRIX, GLOBAL), returns=lambda product, _: matrix(product.shape), interpret=lambda product, kept: product + kept[...]
)  # fmt: skip
def add_kept(product: Any, memory: Any) -> Any:
    """`product` plus the matrix that another warpgroup kept."""
    base = th.add(th.address(memory, space=3), th.mul(th.thread(), 8))
    registers, pair = np.empty_like(product.registers), ir.VectorType.get((2,), th.f32())
    for index, place in enumerate(np.ndindex(registers.shape)):
        other = th.load(th.add(base, index * 8 * WARPGROUP), 2, op="ld.shared", kind="f32")
        registers[place] = th.fadd(product.registers[place], vector.from_elements(pair, other))
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def _store_gated_interpreted(
    target: Any, product: Any, bias: Any, tile: Any, feature: Any, first: Any, live: Any, *, gate: Gate
) -> None:
    halves = (product * 2.0**SHIFT).reshape(4, 2, 8, -1)
    biases = bias[pl.ds(tile * TILE, TILE)].astype(jnp.float32).reshape(4, 8, 2, 1)
    gates, ups = (halves[:, half] + biases[:, :, half] for half in range(2))
    gates, ups = jnp.minimum(gates, gate.limit), jnp.clip(ups, -gate.limit, gate.limit)
    found = ((ups + 1) * gates * jax.nn.sigmoid(gate.alpha * gates)).reshape(TILE // 2, -1).astype(target.dtype)
    for column in range(found.shape[1]):

        @pl.when(column < live)
        def _(column=column):
            target.at[first + column, pl.ds(feature, TILE // 2)][...] = found[:, column]


@thread_op(args=(GLOBAL, MATRIX, GLOBAL, SCALAR, SCALAR, SCALAR, SCALAR), interpret=_store_gated_interpreted)
def store_gated(
    target: Any, product: Any, bias: Any, tile: Any, feature: Any, first: Any, live: Any, *, gate: Gate
) -> None:
    """SwiGLU of a tile's gates and ups to the `live` rows of `target` from `first` on, 32 features from `feature` on.

    Args:
      target: `[entries, F]` bfloat16 in global memory.
      product: `[64, N]`, times 2 to the minus `SHIFT`: of each sixteen rows eight gates, then their ups.
      bias: `[E * 2F]` bfloat16 in global memory, gates and ups in turns.
      tile: whose rows these are, counted over all experts.
    """
    lane, warp = th.lane_and_warp()
    row, column = th.add(th.mul(warp, 8), th.div(lane, 4)), th.mul(th.rem(lane, 4), 2)
    both = th.load(th.word_address(bias, th.add(th.mul(tile, TILE // 2), row)), op="ld.global.nc")[0]
    biases = [th.as_real(th.shift_left(both, 16)), th.as_real(th.bit_and(both, -(1 << 16)))]
    scale, one = th.real(2.0**SHIFT), th.real(1.0)
    limit, alpha = gate.limit, th.real(-gate.alpha)
    pitch, base = th.shape_and_strides(target)[1][0], th.word_address(target, th.number(0))
    for columns in range(product.shape[1] // 8):
        pairs = [product.registers[0, columns, 0, 0, half, 0, 0, 0, 0] for half in range(2)]
        for which in range(2):
            gates, ups = (
                th.fadd(th.fmul(vector.extract(pair, [], [which]), scale), own)
                for pair, own in zip(pairs, biases, strict=True)
            )
            gates, ups = _at_most(gates, limit), _at_least(_at_most(ups, limit), -limit)
            grown = th.fadd(one, th.exp(th.fmul(alpha, gates)))
            value = th.fdiv(th.fmul(th.fadd(ups, one), gates), grown)
            place = th.add(column, 8 * columns + which)
            element = th.add(th.mul(th.add(first, place), pitch), th.add(feature, row))
            text = "{ .reg .b16 h; cvt.rn.bf16.f32 h, $2; @$0 st.global.b16 [$1], h; }"
            _if_there(th.compare(place, "ult", live), text, th.offset(base, th.mul(element, 2)), value)


def _if_there(there: Any, text: str, address: Any, value: Any) -> None:
    mgpu.utils.llvm.inline_asm(
        ir.Type.parse("!llvm.void"), [there, address, value], text, "b,l,f", has_side_effects=True
    )  # fmt: skip


def _at_most(value: Any, bound: float) -> Any:
    # A NaN stays one.
    return mgpu.utils.inline_ptx("min.NaN.f32 $0, $1, $2;", value, th.real(bound), result_types=th.f32())


def _at_least(value: Any, bound: float) -> Any:
    return mgpu.utils.inline_ptx("max.NaN.f32 $0, $1, $2;", value, th.real(bound), result_types=th.f32())
