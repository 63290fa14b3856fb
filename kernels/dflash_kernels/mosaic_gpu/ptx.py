"""Thread-level arithmetic and PTX: integers, places in swizzled tiles, addresses, loads and predicated instructions.

A fragment of the matrix layout gives the thread of warp w, row r of 8 and column pair c of 4 the elements at rows `16 w + r` and
`+ 8`, columns `2 c` and `2 c + 1`.
"""

import functools
import math
from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxlib.mlir.dialects import math as mlir_math

from dflash_kernels.core.device import WARP, WARPGROUP

CHUNK = 16  # bytes: what an 8 by 8 matrix of 16-bit elements spans of a row, and what swizzling moves


def when(predicate, ptx: str, *operands) -> None:
    utils.inline_ptx(ptx, *operands, predicate=predicate, has_side_effects=True)


def load(
    address,
    count: int = 1,
    *,
    op: str = "ld.global",
    kind: str = "b32",
    there=None,
    otherwise: str = "0",
    ordered: bool = True,
) -> list:
    """Vector load of `count` words; of `otherwise` without the predicate `there`, where one is given.

    Args:
      op: the instruction up to its vector size. "ld.volatile.global" stays where it stands in the code; "ld.global.nc" may move to
        where its words are needed, if it is not `ordered`.
      kind: "b32" for integers, "f32".
    """
    names, vectors = ", ".join(f"${i}" for i in range(count)), "" if count == 1 else f".v{count}"
    names = names if count == 1 else f"{{{names}}}"
    types = [ir.F32Type.get() if kind == "f32" else i32()] * count
    text = f"{op}{vectors}.{kind} {names}, [${count}];"
    if there is None:
        return list(utils.inline_ptx(text, address, result_types=types, has_side_effects=ordered))
    words = " ".join(f"mov.b32 ${i}, {otherwise};" for i in range(count))
    text = f"{{ .reg .pred there; setp.ne.b32 there, ${count + 1}, 0; {words} @there {text} }}"
    return list(
        utils.inline_ptx(text, address, arith.extui(i32(), there), result_types=types, has_side_effects=ordered)
    )


def load_if(predicate, address, how: str = "ld.global.nc") -> list:
    """Sixteen bytes of global memory as four words, zeros without the predicate.

    `how` "ld.volatile.global": asked for where it stands in the code; other loads move to where they are needed.
    """
    return load(address, 4, op=how, there=predicate, ordered="volatile" in how)


def ex2(value):
    """2 to the power of a float32, as the hardware approximates it."""
    return utils.inline_ptx("ex2.approx.ftz.f32 $0, $1;", value, result_types=ir.F32Type.get())


def exp(value):
    """e to the power of a float32."""
    return ex2(arith.mulf(value, utils.c(math.log2(math.e), ir.F32Type.get())))


def log2(value):
    """The binary logarithm of a float32, as the hardware approximates it."""
    return utils.inline_ptx("lg2.approx.ftz.f32 $0, $1;", value, result_types=ir.F32Type.get())


def within(row, column, columns: int, width: int):
    """Byte offset in a tile of two-byte elements, swizzled over `width` bytes; `column` in bytes."""
    of_8, in_8 = mul(div(row, 8), 16 * columns), mul(rem(row, 8), width)
    across = mul(div(column, width), 8 * width)
    return add(add(add(of_8, in_8), across), xor(rem(column, width), swizzle_of(rem(row, 8), width)))


def swizzle_of(row, width: int):
    """Operand of the exclusive or with the byte offset within a row of `width` bytes, the swizzle's size."""
    return mul(rem(div(row, 128 // width), width // CHUNK), CHUNK)


def shape_and_strides(ref) -> tuple[list[int], list[int]]:
    ty = ir.MemRefType(ref.type)
    return ty.shape, ty.get_strides_and_offset()[0]


def rows_and_columns(tile) -> tuple[int, int]:
    down, across, rows, columns = ir.MemRefType(tile.type).shape
    return down * rows, across * columns


def swizzle(tile) -> int:
    ty = ir.MemRefType(tile.type)
    return ty.shape[-1] * utils.bytewidth(ty.element_type)


def address(ref, space: int = 0):
    """Address of a memory's first element: 32 bits in shared memory, 64 in global memory."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(32 if space == 3 else 64), utils.memref_ptr(ref))


def lane_and_warp():
    within_warpgroup = thread()
    return rem(within_warpgroup, WARP), div(within_warpgroup, WARP)


def opaque_lane_and_warp() -> list:
    """As no compiler knows them: addresses are computed where they are needed, not before the loop, for want of registers."""
    return [
        utils.inline_ptx("mov.b32 $0, $1;", value, result_types=i32(), has_side_effects=True)
        for value in lane_and_warp()
    ]


def thread():
    """Index of this thread in its warpgroup."""
    return rem(utils.thread_idx(), WARPGROUP)


def thread_of_cta():
    return utils.thread_idx()


def cta_of_cluster():
    return utils.inline_ptx("mov.u32 $0, %cluster_ctarank;", result_types=i32())


def number(value: int):
    return utils.c(value, i32())


def offset(address, size):
    """`size` bytes, 32 bits, further in global memory."""
    return add(address, widen_index(size))


def word_address(area, word):
    """Address of word number `word` of an area of global memory."""
    return offset(address(area), mul(word, 4))


def shared_word(base, word):
    """Word number `word` from an address in shared memory on."""
    return load(add(base, mul(word, 4)), op="ld.shared")[0]


def shared_quad(base, word) -> list:
    """Four words from number `word` on, a multiple of four."""
    return load(add(base, mul(word, 4)), 4, op="ld.shared")


def store_shared_quad(base, word, values) -> None:
    """Writes four words from number `word` on, a multiple of four."""
    inline("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", add(base, mul(word, 4)), *values)


def store_shared(base, word, value) -> None:
    """Writes word number `word` from an address in shared memory on."""
    inline("st.shared.b32 [$0], $1;", add(base, mul(word, 4)), value)


def global_word(area, word):
    """Word number `word` of an area of global memory."""
    return load(word_address(area, word), op="ld.global")[0]


def constant(value, like):
    return utils.c(value, like.type) if isinstance(value, int) else value


def below(a, bound: int):
    return arith.cmpi(arith.CmpIPredicate.slt, a, utils.c(bound, i32()))


def compare(a, relation: str, b):
    """Comparison of integers; `relation` "eq", "slt", "sge" and so on, "ult" and "uge" without sign."""
    return arith.cmpi(getattr(arith.CmpIPredicate, relation), a, constant(b, a))


def every(*conditions):
    return functools.reduce(arith.andi, conditions)


def either(a, b):
    return arith.ori(a, b)


def select(condition, a, b):
    return arith.select(condition, a, b)


def least(a, b):
    """The smaller one of two integers with sign."""
    return arith.minsi(a, constant(b, a))


def unsigned_min(a, b):
    return arith.minui(a, b)


def bit_and(a, b):
    return arith.andi(a, constant(b, a))


def bits_set(word):
    """How many bits of a word are 1."""
    return utils.inline_ptx("popc.b32 $0, $1;", word, result_types=i32())


def first_bit(word):
    """The lowest bit that is 1 of a word that has one."""
    ptx = "{ .reg .b32 turned; brev.b32 turned, $1; clz.b32 $0, turned; }"
    return utils.inline_ptx(ptx, word, result_types=i32())


def under(a, bound: int):
    """`below` of numbers without a sign."""
    return arith.cmpi(arith.CmpIPredicate.ult, a, utils.c(bound, i32()))


def add(a, b):
    return arith.addi(a, constant(b, a))


def sub(a, b):
    return arith.subi(a, constant(b, a))


def mul(a, b):
    return arith.muli(a, constant(b, a))


def xor(a, b):
    return arith.xori(a, constant(b, a))


def div(a, b: int):
    return arith.divui(a, constant(b, a))


def rem(a, b: int):
    return arith.remui(a, constant(b, a))


def fadd(a, b):
    return arith.addf(a, b)


def fsub(a, b):
    return arith.subf(a, b)


def fmul(a, b):
    return arith.mulf(a, b)


def fdiv(a, b):
    return arith.divf(a, b)


def rsqrt(value):
    return mlir_math.rsqrt(value)


def real(value: float):
    """A float32."""
    return utils.c(value, ir.F32Type.get())


def as_real(word):
    """The float32 whose bits a word is."""
    return utils.bitcast(word, ir.F32Type.get())


def bits(value):
    """The integer of a number's bits."""
    return arith.bitcast(ir.IntegerType.get_signless(utils.bitwidth(value.type)), value)


def as_word(condition):
    """1 where a condition holds, else 0."""
    return arith.extui(i32(), condition)


def index_word(index):
    """A place in a fragment, as `foreach` gives it, in 32 bits."""
    return arith.index_cast(i32(), index)


def from_lane_before(value, distance: int):
    """`value` of the lane so many before this one, 0 where there is none (`shfl.up`)."""
    ptx = f"{{ .reg .pred there; shfl.sync.up.b32 $0|there, $1, {distance}, 0, 0xffffffff; @!there mov.b32 $0, 0; }}"
    return inline(ptx, value, returns=i32(), convergent=True)


def from_lane(value, lane):
    """`value` of a lane of the warp (`shfl.idx`)."""
    ptx = "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;"
    return inline(ptx, value, constant(lane, value), returns=i32(), convergent=True)


def shuffle_xor(value, distance: int):
    """The value of the thread whose lane differs from the own one by `distance`, exclusively ored."""
    return utils.shfl_bfly(value, distance)


def inline(ptx: str, *operands, returns=None, **options) -> Any:
    """PTX with side effects; `returns`: type of a result, or of each of several."""
    return utils.inline_ptx(ptx, *operands, result_types=returns, has_side_effects=True, **options)


def bfloat16_at(address):
    """A number of bfloat16 in global memory, as float32."""
    wide = "{ .reg .b16 number, zero; ld.global.b16 number, [$1]; mov.b16 zero, 0; mov.b32 $0, {zero, number}; }"
    return as_real(inline(wide, address, returns=i32()))


def commit_shared() -> None:
    """Matrix instructions and TMA that begin afterwards find what the warpgroup's threads have stored in shared memory before."""
    mgpu.commit_shared()


def cta_barrier() -> None:
    """All threads of the CTA wait for each other."""
    inline("barrier.sync 0;", convergent=True)


def cluster_barrier() -> None:
    """All threads of the cluster wait for each other, and see what the others have stored."""
    for ptx in ("barrier.cluster.arrive.release.aligned;", "barrier.cluster.wait.acquire.aligned;"):
        inline(ptx, convergent=True)


def push(base, word, cta, values, barrier) -> None:
    """Sends two or four words to another CTA's shared memory, where they lie as from number `word` of the own `base` on, a multiple
    of as many. The barrier there that lies where the own `barrier` does counts their bytes as they arrive."""
    names = ", ".join(f"${3 + i}" for i in range(len(values)))
    ptx = (
        "{ .reg .b32 there, counts; mapa.shared::cluster.u32 there, $0, $1; mapa.shared::cluster.u32 counts, $2, $1;"
        f" st.async.shared::cluster.mbarrier::complete_tx::bytes.v{len(values)}.b32 [there], {{{names}}}, [counts]; }}"
    )
    inline(ptx, add(base, mul(word, 4)), cta, barrier, *values)


def expect_bytes(barrier, count: int, *, others: int = 0) -> None:
    """Arrives at a barrier, for so many others as well, that completes when all have arrived and the bytes that each expects."""
    if others:
        inline(f"mbarrier.arrive.shared::cta.b64 _, [$0], {others};", barrier)
    inline(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {count};", barrier)


def await_phase(barrier, phase) -> None:
    """Waits until a barrier has completed for the time number `phase`, of which only the last bit counts."""
    ptx = "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1; @!done bra again; }"
    inline(ptx, barrier, phase)


def over_lanes(value, kind: str):
    """The sum ("add"), the largest ("max") or the smallest ("min") of a warp's values, integers without sign."""
    return inline(f"redux.sync.{kind}.u32 $0, $1, 0xffffffff;", value, returns=i32(), convergent=True)


def ballot(condition):
    """A bit for each lane of the warp whose condition holds."""
    ptx = "{ .reg .pred holds; setp.ne.b32 holds, $1, 0; vote.sync.ballot.b32 $0, holds, 0xffffffff; }"
    return inline(ptx, as_word(condition), returns=i32(), convergent=True)


def lower_lanes(mask, lane):
    """The bits of a mask of lanes that belong to lanes below `lane`, which is less than 32."""
    ptx = "{ .reg .b32 mask; shl.b32 mask, 1, $2; sub.u32 mask, mask, 1; and.b32 $0, $1, mask; }"
    return inline(ptx, mask, lane, returns=i32())


def warp_barrier() -> None:
    """All lanes of the warp wait for each other, and see what the others have stored."""
    inline("bar.warp.sync 0xffffffff;", convergent=True)


def warpgroup_barrier() -> None:
    utils.warpgroup_barrier()


def branch(condition):
    """Context: the code inside runs where the condition holds."""
    return utils.when(condition)


def one_thread():
    """Context: the code inside runs in one thread of the warpgroup."""
    return utils.single_thread(scope=utils.ThreadSubset.WARPGROUP)


def fori(count, carry: list):
    """Decorator: runs `body(index, carry)` `count` times; the loop's last carry is the name's attribute `results`."""
    return utils.fori(count, carry)


def shift_left(a, bits: int):
    return arith.shli(a, utils.c(bits, a.type))


def shift_right(a, bits):
    """Without a sign, by fewer than 32 bits."""
    return arith.shrui(a, bits)


def widen_index(a):
    return arith.extui(i64(), a)


def as_array(words):
    """Four words of a thread as Pallas knows them."""
    quad = vector.from_elements(ir.VectorType.get((4,), i32()), words)
    layout = mgpu.WGStridedFragLayout((512,), 4)
    return mgpu.FragmentedArray(_registers=np.array([quad], dtype=object), _layout=layout, _is_signed=True)


def as_words(array):
    """The words that `as_array` was made of."""
    return [vector.extract(array.registers.item(), [], [i]) for i in range(4)]


def i32():
    return ir.IntegerType.get_signless(32)


def i64():
    return ir.IntegerType.get_signless(64)


def f32():
    return ir.F32Type.get()
