"""How a CTA brings activations as digits, what it makes of products with them, and the scales of weights of one byte."""

# Pallas declares what it inlines with the context that it passes itself.
# pyright: reportAbstractUsage=false, reportCallIssue=false, reportPrivateImportUsage=false

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, math, vector
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.core.layouts import interleave_columns
from dflash_kernels.fused.layer.plan import ROWS
from dflash_kernels.mosaic_gpu import mailbox
from dflash_kernels.mosaic_gpu import ptx as memory
from dflash_kernels.mosaic_gpu.convert import BYTE, SECOND, digits_of, float8_words, int8_words
from dflash_kernels.mosaic_gpu.layouts import tiled

_SCALAR = plgpu.Layout.WG_SPLAT
_WGMMA = plgpu.Layout.WGMMA
_NUMBERS = 8  # of a thread's vector


def copy_digits(source, column, target, units, *, rows: int) -> None:
    """One slot of digits, in the interpreter, from columns in their own order."""
    blocks, tokens, width = target.shape
    held = source[pl.ds(0, rows), pl.ds(column, blocks * width)].astype(jnp.float32)
    digits, unit = digits_of(jnp.pad(interleave_columns(held), ((0, tokens // 2 - rows), (0, 0))), target.dtype)
    for block in range(blocks):
        target.at[block][...] = digits[:, block * width : (block + 1) * width]
    units[...] = unit


def take_digits(
    area, word, columns, target, units, slots, count, waits, *, rows: int, pitch: int, checks: bool
) -> None:
    """Brings columns of a matrix in bfloat16 to shared memory as digits; columns are in pairs, as those of weights are.

    Args:
      columns: where each 256 of them begin, int32 scalars.
      target: `[slots, 2, 2 * tokens, 128]` in shared memory, in swizzled tiles of 8 rows.
      units: `[slots, tokens]` float32 in shared memory, what digits are times.
      slots: where they go, int32 scalars; count: how many of them are filled, the first ones.
      waits: whether a few threads ask first, where others may not have written yet.
      rows: how many tokens count; the others become zeros.
      checks: whether to read what is EMPTY again until it is not.
    """
    _, blocks, lines, width = target.shape
    tokens, size, warps = lines // 2, blocks * lines * width, memory.WARPGROUP // memory.WARP
    make_words = int8_words if target.dtype == jnp.int8 else float8_words
    kinds = [_SCALAR, plgpu.RefType(tiled(target.dtype)), plgpu.RefType(), *[_SCALAR] * (2 + 2 * len(slots))]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *kinds))
    def take(_, area, word, target, units, count, waits, *places):
        count, waits, places = count.registers.item(), waits.registers.item(), [p.registers.item() for p in places]
        base, i32 = memory.word_address(area, word.registers.item()), ir.IntegerType.get_signless(32)
        shared, of_units = (llvm.ptrtoint(i32, mgpu.utils.memref_ptr(ref)) for ref in (target, units))
        # A warp has a token's 256 columns, a thread eight of them: half of a chunk of first digits, and of one of second digits.
        warp, lane = (op(memory.thread(), memory.number(memory.WARP)) for op in (arith.divui, arith.remui))
        block, among = (op(lane, memory.number(memory.WARP // blocks)) for op in (arith.divui, arith.remui))
        chunk, half = (op(among, memory.number(2)) for op in (arith.divui, arith.remui))
        zero, sources, wanted = memory.number(0), [], []
        for unit, (slot, column) in enumerate(zip(places[: len(slots)], places[len(slots) :], strict=True)):
            filled = arith.cmpi(arith.CmpIPredicate.ult, memory.number(unit), count)
            # What is not wanted is read where the first one is, which costs nothing.
            column = arith.addi(arith.select(filled, column, places[len(slots)]), memory.mul(lane, _NUMBERS))
            for start in range(0, tokens, warps):
                token = arith.addi(warp, memory.number(start))
                there = arith.cmpi(arith.CmpIPredicate.ult, token, memory.number(rows))
                if start < rows:
                    element = arith.addi(memory.mul(arith.select(there, token, zero), pitch), column)
                    sources.append(memory.offset(base, memory.mul(element, 2)))
                line = arith.addi(memory.mul(block, lines), token)
                to = memory.mul(arith.xori(chunk, arith.remui(token, memory.number(8))), 2 * _NUMBERS)
                to = arith.addi(arith.addi(to, memory.mul(line, width)), memory.mul(half, _NUMBERS))
                to = arith.addi(arith.addi(shared, memory.mul(slot, size)), to)
                unit_at = arith.addi(memory.mul(slot, tokens), token)
                unit_at = arith.addi(of_units, memory.mul(unit_at, 4))
                wanted.append((filled, there if start < rows else None, to, unit_at))
        if checks:
            asked = arith.select(waits, memory.number(blocks * width // ROWS), zero)
            mailbox.await_first(memory.offset(base, memory.mul(places[len(slots)], 2)), asked, ROWS * 2)
            found = iter(mailbox.await_all(sources, "u16x2"))
        else:
            found = iter(mailbox.load_all(sources))
        first_lane = arith.cmpi(arith.CmpIPredicate.eq, lane, zero)
        for filled, there, to, unit_at in wanted:
            digits, unit = [zero] * 4, zero
            if there is not None:
                *digits, unit = make_words([arith.select(there, next(found), zero) for _ in range(mailbox.VECTOR)])
            with mgpu.utils.when(filled):
                for digit in range(2):
                    mgpu.utils.inline_ptx(
                        "st.shared.v2.b32 [$0], {$1, $2};", arith.addi(to, memory.number(digit * tokens * width)),
                        *digits[2 * digit : 2 * digit + 2], has_side_effects=True,
                    )  # fmt: skip
            with mgpu.utils.when(arith.andi(filled, first_lane)):
                mgpu.utils.inline_ptx("st.shared.b32 [$0], $1;", unit_at, unit, has_side_effects=True)
        mgpu.utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)

    scalars = [jnp.asarray(value, jnp.int32) for value in (word, count, *slots, *columns)]
    take(area, scalars[0], target, units, scalars[1], jnp.asarray(waits), *scalars[2:])


def added(total, product, units, slot, interpret: Any):
    """`total [64, tokens]` and a product with digits `[64, 2 * tokens]`, times what the digits of a slot are times."""
    tokens, whole = total.shape[1], product.dtype == jnp.int32
    if interpret is not None:
        first, second = product[:, :tokens], product[:, tokens:]
        value = (first * BYTE + second).astype(jnp.float32) if whole else first + second / SECOND
        return total + value * units.at[slot][...]

    result = plgpu.ShapeDtypeStruct(total.shape, total.dtype, layout=_WGMMA)

    @plgpu.inline_mgpu(arg_types=(_WGMMA, _WGMMA, plgpu.RefType(), _SCALAR), return_type=result)
    def add(_, total, product, units, slot):
        f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        base = llvm.ptrtoint(i32, mgpu.utils.memref_ptr(units))
        base = arith.addi(base, memory.mul(slot.registers.item(), tokens * 4))
        pair, scales = ir.VectorType.get((2,), f32), {}
        halves = product[:, :tokens].registers, product[:, tokens:].registers
        registers = np.empty_like(total.registers)
        places = zip(np.ndindex(registers.shape), total.layout.thread_idxs(total.shape), strict=True)
        for place, (_, column) in places:
            group = place[1]
            if group not in scales:
                address = arith.addi(base, memory.mul(arith.index_cast(i32, column), 4))
                found = mgpu.utils.inline_ptx(
                    "ld.shared.v2.f32 {$0, $1}, [$2];", address, result_types=[f32, f32], has_side_effects=True
                )
                scales[group] = vector.from_elements(pair, found)
            first, second = (half[place] for half in halves)
            if whole:
                byte = vector.broadcast(first.type, memory.number(BYTE))
                # 256 columns of such digits stay below 2^31.
                value = arith.sitofp(pair, arith.addi(arith.muli(first, byte), second))
            else:
                value = math.fma(second, vector.broadcast(pair, mgpu.c(1 / SECOND, f32)), first)
            registers[place] = math.fma(value, scales[group], total.registers[place])
        return mgpu.FragmentedArray(_registers=registers, _layout=total.layout, _is_signed=None)

    return add(total, product, units, jnp.asarray(slot, jnp.int32))


def row_scales(scales, first, last: int, interpret: Any):
    """`scales[first + row]` of 64 rows, float32; those past `last` are the one there."""
    if interpret is not None:
        return scales[...][jnp.minimum(first + lax.iota(jnp.int32, ROWS), last)]

    result = plgpu.ShapeDtypeStruct((ROWS,), jnp.dtype(jnp.float32), layout=_WGMMA.reduce(1))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR), return_type=result)
    def load(_, scales, first):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        zero = mgpu.FragmentedArray.splat(mgpu.c(0.0, f32), (ROWS,), layout=mgpu.WGMMA_ROW_LAYOUT)
        registers = np.empty_like(zero.registers)
        places = zip(np.ndindex(registers.shape), zero.layout.thread_idxs((ROWS,)), strict=True)
        for place, (row,) in places:
            row = arith.addi(first.registers.item(), arith.index_cast(i32, row))
            address = memory.word_address(scales, arith.minsi(row, memory.number(last)))
            # Asked for here, long before it is needed.
            found = mgpu.utils.inline_ptx(
                "ld.volatile.global.f32 $0, [$1];", address, result_types=f32, has_side_effects=True
            )
            old: Any = zero.registers[place]
            registers[place] = vector.from_elements(old.type, [found])
        return mgpu.FragmentedArray(_registers=registers, _layout=zero.layout, _is_signed=None)

    return load(scales, jnp.asarray(first, jnp.int32))
