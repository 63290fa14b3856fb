"""Words in global memory as one thread sees them: where they are, how they are written, and how it waits for them."""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, scf, vector
from jax.experimental.mosaic import gpu as mgpu

from dflash_kernels.fused.layer.plan import EMPTY
from dflash_kernels.mosaic_gpu.layouts import then

WARP, WARPGROUP = 32, 128
VECTOR = 4  # words that one thread moves at once


def await_first(base, count, pitch: int) -> None:
    """Waits for `count` words (int32), each `pitch` bytes after the one before, with as many threads.

    All threads of all CTAs, reading again and again, would be in the way of what they wait for.
    """
    with when(arith.cmpi(arith.CmpIPredicate.ult, thread(), count)):
        mgpu.utils.inline_ptx(
            "{ .reg .pred p; .reg .b32 w; .reg .b64 a; mov.b64 a, $0; again: ld.relaxed.gpu.global.b32 w, [a]; "
            "setp.eq.u32 p, w, 0xffffffff; @p bra again; }",
            offset(base, times(thread(), pitch)), has_side_effects=True,
        )  # fmt: skip
    mgpu.utils.warpgroup_barrier()


def await_all(addresses, kind: str, width: int = VECTOR):
    """The words at all addresses, `width` each, read until no u32, or no half of a u16x2, is EMPTY."""
    count, i32 = len(addresses), ir.IntegerType.get_signless(32)

    def load(index: int) -> str:
        words = ", ".join(f"${index * width + word}" for word in range(width))
        return f"ld.relaxed.gpu.global.v{width}.b32 {{{words}}}, [a{index}];"

    def check(indices) -> str:
        words = [f"${index * width + word}" for index in indices for word in range(width)]
        lines = [f"mov.b32 m, {words[0]};", *(f"max.{kind} m, m, {word};" for word in words[1:])]
        if kind == "u32":
            return " ".join(lines) + " setp.eq.u32 p, m, 0xffffffff;"
        return " ".join(lines) + " and.b32 t, m, 0xffff; setp.eq.u32 p, t, 0xffff; setp.ge.or.u32 p, m, 0xffff0000, p;"

    lines = ["{", ".reg .pred p; .reg .b32 m, t;", f".reg .b64 a<{count}>;"]
    lines += [f"mov.b64 a{index}, ${count * width + index};" for index in range(count)]
    every = range(count)
    lines += ["again:", *(load(index) for index in every), check(every), "@p bra again;"]
    lines += ["}"]
    return mgpu.utils.inline_ptx(
        "\n".join(lines), *addresses, result_types=[i32] * (count * width), has_side_effects=True
    )


def load_all(addresses):
    """The words at all addresses, VECTOR each."""
    i32, load = ir.IntegerType.get_signless(32), "ld.relaxed.gpu.global.v4.b32 {$0, $1, $2, $3}, [$4];"
    found = [
        mgpu.utils.inline_ptx(load, address, result_types=[i32] * VECTOR, has_side_effects=True)
        for address in addresses
    ]
    return [word for words in found for word in words]


def words_of(registers):
    """All elements of float32 registers of two, as int32."""
    i32 = ir.IntegerType.get_signless(32)
    return [
        arith.bitcast(i32, vector.extract(register, dynamic_position=[], static_position=[i]))
        for register in registers.flat
        for i in range(2)
    ]


def filled(bits):
    """Bits of a float32 that are not EMPTY: another NaN stands for that one."""
    none = arith.cmpi(arith.CmpIPredicate.eq, bits, number(EMPTY))
    return arith.select(none, number(0x7FFFFFFF), bits)


def store(address, words) -> None:
    names = ", ".join(f"${i + 1}" for i in range(len(words)))
    mgpu.utils.inline_ptx(
        f"st.relaxed.gpu.global.v{len(words)}.b32 [$0], {{{names}}};", address, *words, has_side_effects=True
    )


def own(area, word, first: int):
    """Address of this thread's vector number `first / 4` of a tile in the order of threads."""
    place = arith.addi(number(first * WARPGROUP), times(thread(), VECTOR))
    return address(area, arith.addi(word.registers.item(), place))


def address(area, word):
    i64 = ir.IntegerType.get_signless(64)
    return offset(llvm.ptrtoint(i64, mgpu.utils.memref_ptr(area)), times(word, 4))


def offset(address, size):
    return arith.addi(address, arith.extui(ir.IntegerType.get_signless(64), size))


def thread():
    return arith.remui(mgpu.utils.thread_idx(), number(WARPGROUP))


def paired(column):
    """Where a column lies in rows of interleaved columns (`core.layouts`)."""
    block, other = arith.andi(column, number(-16)), arith.andi(arith.shrui(column, number(3)), number(1))
    return arith.addi(block, arith.addi(times(arith.andi(column, number(7)), 2), other))


def times(value, factor: int):
    return arith.muli(value, number(factor))


def number(value: int):
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def when(condition):
    return then(scf.IfOp(condition))
