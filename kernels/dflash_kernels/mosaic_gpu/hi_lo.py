"""Hi/lo decomposition: bfloat16 activations as two 8-bit numbers each, for products with 8-bit weights on tensor cores.

Columns are interleaved, as those of the weights are. A matrix of activations has the rows of all hi numbers before those of all lo
ones, so that one product gives both sums, side by side; a scale for each token and stage multiplies them (`convert.digits_of`).
"""

# pyright: reportAbstractUsage=false, reportCallIssue=false, reportPrivateImportUsage=false

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, math, vector

from dflash_kernels.core.device import MATRIX_ROWS as ROWS
from dflash_kernels.core.device import WARP, WARPGROUP
from dflash_kernels.mosaic_gpu import mailbox
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.convert import BYTE, SECOND, digits_of, float8_words, int8_words
from dflash_kernels.mosaic_gpu.layouts import tiled
from dflash_kernels.mosaic_gpu.thread_op import GLOBAL, MATRIX, SCALAR, interpreting, matrix, row, thread_op

_NUMBERS = 8  # of a thread's vector


def _rows_taken(held: Any, columns: Any, target: Any, scales: Any, stages: Any, count: Any) -> None:
    """`take_rows` in the interpreter, of a matrix `held [rows, columns]`."""
    _, blocks, lines, width = target.shape
    for index, (stage, column) in enumerate(zip(stages, columns, strict=True)):

        @pl.when(index < count)
        def _(stage: Any = stage, column: Any = column) -> None:
            taken = lax.dynamic_slice_in_dim(held, column, blocks * width, axis=1).astype(jnp.float32)
            both, scale = digits_of(jnp.pad(taken, ((0, lines // 2 - held.shape[0]), (0, 0))), target.dtype)
            for block in range(blocks):
                target.at[stage, block][...] = both[:, block * width : (block + 1) * width]
            scales.at[stage][...] = scale

    plgpu.commit_smem()


def take_rows(
    area: Any, word: Any, columns: Any, target: Any, scales: Any, stages: Any, count: Any, waits: Any, *, rows: int,
    pitch: int, checks: bool,
) -> None:  # fmt: skip
    """Brings columns of a bfloat16 matrix that CTAs publish to shared memory, as hi and lo numbers.

    Args:
      area: global memory; word: where in it the matrix of `pitch` columns begins.
      columns: where each 256 of them begin, int32 scalars; stages: where they go; count: how many are filled, the first ones.
      target: `[stages, 2, 2 * tokens, 128]` in shared memory, in swizzled tiles of 8 rows.
      scales: `[stages, tokens]` float32 in shared memory.
      waits: whether a few threads ask first, where others may not have written yet.
      rows: how many tokens count; the others become zeros.
      checks: whether to read what is EMPTY again until it is not.
    """
    if interpreting():
        _rows_taken(mailbox.held_matrix(area, word, rows, pitch), columns, target, scales, stages, count)
        return
    _, blocks, lines, width = target.shape
    tokens, size, warps = lines // 2, blocks * lines * width, WARPGROUP // WARP
    decomposed = int8_words if target.dtype == jnp.int8 else float8_words
    kinds = [SCALAR, plgpu.RefType(tiled(target.dtype)), GLOBAL, *[SCALAR] * (2 + 2 * len(stages))]

    @plgpu.inline_mgpu(arg_types=(GLOBAL, *kinds))
    def take(_, area, word, target, scales, count, waits, *places):
        count, waits, places = count.registers.item(), waits.registers.item(), [p.registers.item() for p in places]
        base = th.word_address(area, word.registers.item())
        shared, of_scales = (th.address(ref, space=3) for ref in (target, scales))
        # A warp has a token's 256 columns, a thread eight of them: half of a chunk of hi numbers, and of one of lo numbers.
        warp, lane = th.div(th.thread(), WARP), th.rem(th.thread(), WARP)
        block, among = th.div(lane, WARP // blocks), th.rem(lane, WARP // blocks)
        chunk, half = th.div(among, 2), th.rem(among, 2)
        zero, sources, wanted = th.number(0), [], []
        for index, (stage, column) in enumerate(zip(places[: len(stages)], places[len(stages) :], strict=True)):
            filled = arith.cmpi(arith.CmpIPredicate.ult, th.number(index), count)
            # What is not wanted is read where the first one is, which costs nothing.
            column = arith.addi(arith.select(filled, column, places[len(stages)]), th.mul(lane, _NUMBERS))
            for start in range(0, tokens, warps):
                token = arith.addi(warp, th.number(start))
                there = arith.cmpi(arith.CmpIPredicate.ult, token, th.number(rows))
                if start < rows:
                    element = arith.addi(th.mul(arith.select(there, token, zero), pitch), column)
                    sources.append(th.offset(base, th.mul(element, 2)))
                line = arith.addi(th.mul(block, lines), token)
                to = th.mul(arith.xori(chunk, arith.remui(token, th.number(8))), 2 * _NUMBERS)
                to = arith.addi(arith.addi(to, th.mul(line, width)), th.mul(half, _NUMBERS))
                to = arith.addi(arith.addi(shared, th.mul(stage, size)), to)
                scale_at = arith.addi(th.mul(stage, tokens), token)
                scale_at = arith.addi(of_scales, th.mul(scale_at, 4))
                wanted.append((filled, there if start < rows else None, to, scale_at))
        if checks:
            asked = arith.select(waits, th.number(blocks * width // ROWS), zero)
            mailbox.await_first(th.offset(base, th.mul(places[len(stages)], 2)), asked, ROWS * 2)
            found = iter(mailbox.await_all(sources, "u16x2"))
        else:
            found = iter(mailbox.load_all(sources))
        first_lane = arith.cmpi(arith.CmpIPredicate.eq, lane, zero)
        for filled, there, to, scale_at in wanted:
            both, scale = [zero] * 4, zero
            if there is not None:
                *both, scale = decomposed([arith.select(there, next(found), zero) for _ in range(mailbox.VECTOR)])
            with utils.when(filled):
                for low in range(2):
                    utils.inline_ptx(
                        "st.shared.v2.b32 [$0], {$1, $2};", arith.addi(to, th.number(low * tokens * width)),
                        *both[2 * low : 2 * low + 2], has_side_effects=True,
                    )  # fmt: skip
            with utils.when(arith.andi(filled, first_lane)):
                utils.inline_ptx("st.shared.b32 [$0], $1;", scale_at, scale, has_side_effects=True)
        utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)

    scalars = [jnp.asarray(value, jnp.int32) for value in (word, count, *stages, *columns)]
    take(area, scalars[0], target, scales, scalars[1], jnp.asarray(waits), *scalars[2:])


def _add_interpreted(total: Any, both: Any, scales: Any, stage: Any) -> Any:
    tokens, whole = total.shape[1], both.dtype == jnp.int32
    high, low = both[:, :tokens], both[:, tokens:]
    value = (high * BYTE + low).astype(jnp.float32) if whole else high + low / SECOND
    return total + value * scales.at[stage][...]


@thread_op(
    args=(MATRIX, MATRIX, GLOBAL, SCALAR), returns=lambda total, *_: matrix(total.shape), interpret=_add_interpreted
)
def add(total: Any, both: Any, scales: Any, stage: Any) -> Any:
    """`total [64, tokens]` and the sums of a stage's hi and lo numbers, `[64, 2 * tokens]`, times their scales.

    Args:
      scales: `[stages, tokens]` float32 in shared memory; stage: int32 scalar.
    """
    tokens, whole = total.shape[1], isinstance(both.mlir_dtype, ir.IntegerType)
    i32, f32 = th.i32(), ir.F32Type.get()
    base = arith.addi(th.address(scales, space=3), th.mul(stage, tokens * 4))
    pair, found = ir.VectorType.get((2,), f32), {}
    halves = both[:, :tokens].registers, both[:, tokens:].registers
    registers = np.empty_like(total.registers)
    places = zip(np.ndindex(registers.shape), total.layout.thread_idxs(total.shape), strict=True)
    for place, (_, column) in places:
        group = place[1]
        if group not in found:
            address = arith.addi(base, th.mul(arith.index_cast(i32, column), 4))
            found[group] = vector.from_elements(pair, th.load(address, 2, op="ld.shared", kind="f32"))
        high, low = (half[place] for half in halves)
        if whole:
            byte = vector.broadcast(high.type, th.number(BYTE))
            # 256 columns of such numbers stay below 2^31.
            value = arith.sitofp(pair, arith.addi(arith.muli(high, byte), low))
        else:
            value = math.fma(low, vector.broadcast(pair, utils.c(1 / SECOND, f32)), high)
        registers[place] = math.fma(value, found[group], total.registers[place])
    return mgpu.FragmentedArray(_registers=registers, _layout=total.layout, _is_signed=None)


def _row_scales_interpreted(scales: Any, first: Any, *, last: int) -> Any:
    return scales[...][jnp.minimum(first + lax.iota(jnp.int32, ROWS), last)]


@thread_op(args=(GLOBAL, SCALAR), returns=row(ROWS), interpret=_row_scales_interpreted)
def row_scales(scales: Any, first: Any, *, last: int) -> Any:
    """`scales[first + row]` of 64 rows, float32; those past `last` are the one there. Loads are issued where this stands."""
    zero = mgpu.FragmentedArray.splat(utils.c(0.0, ir.F32Type.get()), (ROWS,), layout=mgpu.WGMMA_ROW_LAYOUT)
    registers = np.empty_like(zero.registers)
    places = zip(np.ndindex(registers.shape), zero.layout.thread_idxs((ROWS,)), strict=True)
    for place, (own,) in places:
        at = arith.addi(first, arith.index_cast(th.i32(), own))
        address = th.word_address(scales, arith.minsi(at, th.number(last)))
        old: Any = zero.registers[place]
        registers[place] = vector.from_elements(old.type, th.load(address, op="ld.volatile.global", kind="f32"))
    return mgpu.FragmentedArray(_registers=registers, _layout=zero.layout, _is_signed=None)
