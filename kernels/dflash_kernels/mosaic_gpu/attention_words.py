"""Words of two numbers in 16 bits, in one thread's registers, and the numbers they hold."""

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from dflash_kernels.mosaic_gpu import ptx as th


def numbers(words):
    """float32 numbers of words of two bfloat16."""
    values = []
    for word in words:
        values.append(utils.bitcast(th.shift_left(word, 16), ir.F32Type.get()))
        values.append(utils.bitcast(arith.andi(word, utils.c(-65536, th.i32())), ir.F32Type.get()))
    return values


def packed(values):
    """Words of two bfloat16 each, rounded to the nearest."""
    words = []
    for low, high in zip(values[::2], values[1::2], strict=True):
        words.append(utils.inline_ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", high, low, result_types=th.i32()))
    return words


def as_float16(words):
    """Words of two bfloat16 as words of two float16."""
    values = numbers(words)
    return [
        utils.inline_ptx("cvt.rn.f16x2.f32 $0, $1, $2;", high, low, result_types=th.i32())
        for low, high in zip(values[::2], values[1::2], strict=True)
    ]
