"""Words of four float8 numbers, columns in pairs, of a row that a warpgroup holds. Pallas itself has no moves between threads.

A thread holds four neighbouring columns. Of a block of sixteen a word takes two columns from the lower eight and the two that lie
eight further on: halves of words of two threads.
"""

from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from dflash_kernels.mosaic_gpu import ptx as th

_COLUMNS = 4  # of a thread


def in_pairs(row: mgpu.FragmentedArray, layout: Any) -> mgpu.FragmentedArray:
    """int32 words of `row [D]` float32, four columns a thread, in `layout`, one word a thread. NaN stays, others saturate."""
    i32, lane = th.i32(), th.lane_and_warp()[0]
    place = th.rem(lane, _COLUMNS)
    lower = th.add(th.sub(lane, place), th.div(place, 2))
    # Bytes 0 and 1 of both words or 2 and 3, one after the other.
    order = th.add(th.mul(th.rem(place, 2), 0x2222), 0x5140)
    words = []
    for register in row.registers.flat:
        numbers = [vector.extract(register, [], [i]) for i in range(_COLUMNS)]
        word = utils.inline_ptx(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;"
            " cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            *numbers, result_types=i32,
        )  # fmt: skip
        word = utils.inline_ptx(
            "{ .reg .b32 one, other; shfl.sync.idx.b32 one, $1, $2, 31, -1;"
            " shfl.sync.idx.b32 other, $1, $3, 31, -1; prmt.b32 $0, one, other, $4; }",
            word, lower, th.add(lower, 2), order, result_types=i32, has_side_effects=True,
        )  # fmt: skip
        words.append(vector.from_elements(ir.VectorType.get((1,), i32), [word]))
    registers = np.empty(len(words), dtype=object)
    registers[:] = words
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)
