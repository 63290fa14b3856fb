"""Chunks to numbers where several warpgroups do so at a time: Pallas's own reductions share one place in memory."""

# Pallas declares what it inlines with the context that it passes itself.
# pyright: reportAbstractUsage=false, reportCallIssue=false, reportPrivateImportUsage=false

from typing import Any, Literal

import jax.numpy as jnp
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, memref, vector
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

type Kind = Literal["add", "max", "min"]
WARPS = 4  # of a warpgroup
_SCALAR = plgpu.Layout.WG_SPLAT


def reduce_into(kind: Kind, chunk: Any, target: Any, row: Any, place: Any, scratch: Any, layout: Any) -> None:
    """Writes the sum or the like of a chunk of float32 to `target[row, place]`.

    Args:
      chunk: in `layout`, of one warpgroup.
      target: `[rows, places]` float32 in shared memory.
      row, place: int32 scalars.
      scratch: `[rows, WARPS]` float32 in shared memory, a row for each warpgroup; None under Pallas's interpreter.
    """
    if scratch is None:
        target[row, place] = {"add": chunk.sum, "max": chunk.max, "min": chunk.min}[kind]()
        return

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType(), plgpu.RefType(), _SCALAR, _SCALAR))
    def inlined(_, chunk, target, scratch, row, place):
        row, place = (arith.index_cast(ir.IndexType.get(), value.registers.item()) for value in (row, place))
        memref.store(_scalar(chunk.reduce(kind, 0, mgpu.utils.memref_slice(scratch, row))), target, [row, place])

    inlined(chunk, target, scratch, row, jnp.asarray(place, jnp.int32))


def _scalar(found: Any) -> Any:
    value = found.registers.item()
    if not isinstance(value.type, ir.VectorType):
        return value
    return vector.extract(value, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0]))
