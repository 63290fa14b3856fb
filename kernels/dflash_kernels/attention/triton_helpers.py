"""Device functions shared by the Triton attention kernels."""

# Triton is an extra.
# pyright: reportMissingImports=false

from typing import no_type_check

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
@no_type_check  # keeps the tests' shape checker from wrapping a function that Triton has to read
def widen(values, dtype: tl.constexpr, FLOAT8_BITS: tl.constexpr):
    """Page entries as the dtype that multiplies; `FLOAT8_BITS` says of which float8 they are the bytes: "e4m3", "e5m2", or None.

    Sign, exponent and mantissa of e4m3 fit into float16 as they are; the exponents' biases differ by 8. e5m2 is a float16 without
    its lower byte.
    """
    if FLOAT8_BITS == "e5m2":
        values = (values.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    if FLOAT8_BITS == "e4m3":
        bits = values.to(tl.uint16)
        number = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256
        values = tl.where((bits & 0x7F) == 0x7F, float("nan"), number)
    return values.to(dtype)
