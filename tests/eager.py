"""Operations that only move numbers, called outside of any program: NumPy's, as nothing has to be compiled for them.

JAX compiles each of them for each shape, among them `jnp.asarray` of an array of NumPy, in five to ten milliseconds: a third of all
that tests compile. Numbers and types are the same ones, which `tests/compile/test_eager.py` holds them to.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax._src.core import stage_p
from jax.extend.core import primitives as known

# Of which NumPy holds one in each element, as a device does.
TYPES = frozenset(
    np.dtype(name)
    for name in (bool, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.float16, jnp.bfloat16, np.float32)
)  # fmt: skip

ALIGNED = 64  # bytes, of an array that a device reads without a copy
MOST = 2**30  # bytes of a result: whether memory holds more is for JAX to say


def on_host(
    function: Callable[..., np.ndarray | None], compiled: Callable[..., Any], *arrays: Any, **named: Any
) -> Any:
    """`function` of the arrays on the host where they lie on one device, that of whatever names none; else what JAX does."""
    held = [_held(array) for array in arrays]
    if named.get("sharding") is not None or any(array is None for array in held):
        return compiled(*arrays, **named)
    result = function(*held, **named)
    if result is None or result.nbytes > MOST:
        return compiled(*arrays, **named)
    return jax.device_put(_astray(result))


def _astray(array: np.ndarray) -> np.ndarray:
    """A copy that lies where no device can read it as it lies, so that it has one of its own: what was given may be changed, and
    what NumPy holds cannot be given away to a program."""
    room = np.empty(array.nbytes + 2 * ALIGNED, np.uint8)
    begin = -room.ctypes.data % ALIGNED + array.itemsize
    copy = room[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _held(array: Any) -> np.ndarray | None:
    """What an operand holds; None where that, or where it lies, is for JAX to say."""
    if isinstance(array, np.ndarray | np.generic):
        return np.asarray(array) if array.dtype in TYPES else None
    if not isinstance(array, jax.Array) or array.dtype not in TYPES or array.weak_type or array.committed:
        return None
    return np.asarray(array)


def _converted(array: np.ndarray, *, new_dtype: Any, weak_type: bool, **_: Any) -> np.ndarray | None:
    """The same type alone: what rounds is JAX's."""
    return array if array.dtype == new_dtype and not weak_type else None


def _spread(array: np.ndarray, *, shape: Any, broadcast_dimensions: Any, **_: Any) -> np.ndarray:
    sizes = [1] * len(shape)
    for axis, size in zip(broadcast_dimensions, array.shape, strict=True):
        sizes[axis] = size
    return np.broadcast_to(array.reshape(sizes), shape)


def _reshaped(array: np.ndarray, *, new_sizes: Any, dimensions: Any, **_: Any) -> np.ndarray | None:
    return array.reshape(new_sizes) if dimensions is None else None


def _squeezed(array: np.ndarray, *, dimensions: Any) -> np.ndarray:
    return np.squeeze(array, dimensions)


def _cut(array: np.ndarray, *starts: np.ndarray, slice_sizes: Any) -> np.ndarray:
    places = (
        slice(begin := min(max(int(start), 0), size - taken), begin + taken)
        for start, size, taken in zip(starts, array.shape, slice_sizes, strict=True)
    )
    return array[tuple(places)]


def _joined(*arrays: np.ndarray, dimension: int) -> np.ndarray:
    return np.concatenate(arrays, dimension)


def _turned(array: np.ndarray, *, permutation: Any) -> np.ndarray:
    return np.transpose(array, permutation)


def _counted(*, dtype: Any, shape: Any, dimension: int, **_: Any) -> np.ndarray | None:
    if dtype not in TYPES:
        return None
    return np.broadcast_to(
        np.arange(shape[dimension])
        .astype(dtype)
        .reshape([-1 if axis == dimension else 1 for axis in range(len(shape))]),
        shape,
    )


MOVES = {
    stage_p: lambda array: array,
    known.convert_element_type_p: _converted, known.broadcast_in_dim_p: _spread, known.reshape_p: _reshaped,
    known.squeeze_p: _squeezed, known.dynamic_slice_p: _cut, known.concatenate_p: _joined, known.transpose_p: _turned,
    known.iota_p: _counted,
}  # fmt: skip


def move_on_host() -> None:
    """From now on, in this process."""
    for primitive, function in MOVES.items():
        primitive.def_impl(partial(on_host, function, primitive.impl))
