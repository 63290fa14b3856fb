"""Activations as two numbers of one byte each, which matrix instructions multiply with weights of one byte as they lie.

A number of eight significant bits is the sum of two of float8_e4m3fn, which have four: its own rounding, and a sixteenth of what
that leaves times 16. Before that, a power of two brings the largest of a token's 256 numbers in a slot between 128 and 256. Numbers
down to 2^-13 of the largest one are then exact, and of smaller ones at most 2^-21 of it is lost. For weights in int8 it brings the
largest one between 2^14 and 2^15, and the bytes are those of the nearest whole number: about 2^-15 of the largest one is lost at
most, where rounding that one to bfloat16 has lost up to 2^-9.
"""

# pyright: reportPrivateImportUsage=false

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir
from jax.experimental.mosaic import gpu as mgpu

SECOND = 16  # what a second digit in float8 is divided by
BYTE = 256  # what a first digit in int8 is times
MOST = 127 * BYTE + 127  # of two digits in int8
_WHOLE = 1.5 * 2**23  # what float32 rounds to whole numbers beside
# m: the exponent, as it is stored, of the largest of four words in each thread of a warp.
_LARGEST = (
    "and.b32 m, $5, 0x7fff7fff;",
    *(f"and.b32 t, ${word}, 0x7fff7fff; max.u16x2 m, m, t;" for word in (6, 7, 8)),
    "shr.u32 t, m, 16; and.b32 m, m, 0xffff; max.u32 m, m, t; redux.sync.max.u32 m, m, 0xffffffff; shr.u32 m, m, 7;",
)


def digits_of(x, kind: Any):
    """`x [tokens, columns]` float32 as digits `[2 * tokens, columns]` of `kind`, and what they are times, `[tokens]` float32."""
    _, exponent = jnp.frexp(jnp.abs(x).max(axis=1))
    unit = jnp.where(x.any(axis=1), jnp.ldexp(jnp.float32(1), exponent - (15 if kind == jnp.int8 else 8)), 1.0)
    x = x / unit[:, None]
    if kind == jnp.int8:
        x = jnp.minimum(jnp.round(x), MOST)
        first = jnp.floor((x + BYTE // 2) / BYTE)
        second = x - first * BYTE
    else:
        first = x.astype(kind)
        second = (x - first.astype(jnp.float32)) * SECOND
    return jnp.concatenate([first.astype(kind), second.astype(kind)]), unit


def float8_words(words):
    """First digits and second ones, two words each, of four words of bfloat16, and bits of what they are times.

    All of a warp have the same largest number.
    """
    lines = [
        "{ .reg .b32 m, t, x, f0, f1, g, d, k; .reg .b16 a0, a1, b0, b1; mov.b32 k, 0x4C004C00;",  # k: 16 in float16, twice
        *_LARGEST,
        # Times 2^(134 - m).
        "max.u32 m, m, 8; sub.u32 t, 261, m; shl.b32 t, t, 7; prmt.b32 t, t, t, 0x1010;",
        "sub.u32 m, m, 7; shl.b32 $4, m, 23;",
    ]
    for word in range(4):
        digit = word % 2
        lines += [
            f"mul.rn.bf16x2 x, ${5 + word}, t; shl.b32 f0, x, 16; and.b32 f1, x, 0xffff0000;",
            f"cvt.rn.satfinite.e4m3x2.f32 a{digit}, f1, f0; cvt.rn.f16x2.e4m3x2 g, a{digit}; cvt.rn.f16x2.f32 d, f1, f0;",
            f"sub.rn.f16x2 d, d, g; mul.rn.f16x2 d, d, k; cvt.rn.satfinite.e4m3x2.f16x2 b{digit}, d;",
        ]
        if digit:
            lines.append(f"mov.b32 ${word // 2}, {{a0, a1}}; mov.b32 ${2 + word // 2}, {{b0, b1}};")
    return _of_words(lines, words)


def int8_words(words):
    """`float8_words` for weights in int8."""
    lines = [
        "{ .reg .b32 m, t, x, v, g, f0, f1, v0, v1, g0, g1; .reg .pred p;",
        *_LARGEST,
        # Digits of what is not a number are numbers.
        "setp.eq.u32 p, m, 255; max.u32 m, m, 15; sub.u32 t, 268, m; shl.b32 t, t, 7; prmt.b32 t, t, t, 0x1010;",
        "sub.u32 m, m, 14; shl.b32 m, m, 23; selp.b32 $4, 0x7fffffff, m, p;",
    ]
    for word in range(4):
        digit = word % 2
        lines.append(f"mul.rn.bf16x2 x, ${5 + word}, t; shl.b32 f0, x, 16; and.b32 f1, x, 0xffff0000;")
        for half in ("f0", "f1"):
            lines.append(f"min.f32 {half}, {half}, {_bits(float(MOST))};")
        # The last bits of a sum of this size are those of the nearest whole number; of half a low byte more, the high byte counts.
        for name, first in (("v", _WHOLE), ("g", _WHOLE + BYTE // 2)):
            lines += [f"add.rn.f32 v, f0, {_bits(first)}; add.rn.f32 g, f1, {_bits(first)};"]
            lines += [f"prmt.b32 {name}{digit}, v, g, 0x5410;"]
        if digit:
            lines.append(f"prmt.b32 ${word // 2}, g0, g1, 0x7531; prmt.b32 ${2 + word // 2}, v0, v1, 0x6420;")
    return _of_words(lines, words)


def _of_words(lines, words):
    i32 = ir.IntegerType.get_signless(32)
    return mgpu.utils.inline_ptx("\n".join([*lines, "}"]), *words, result_types=[i32] * 5, has_side_effects=True)


def _bits(value: float) -> str:
    return "0f" + np.float32(value).tobytes()[::-1].hex()
