"""Runs calls of Triton implementations in Triton's interpreter: `python interpret_triton.py calls.pkl results.pkl`.

A process of its own, because Triton decides on import whether its kernels are interpreted. The functions that call jax-triton run
as they are; only jax-triton itself is replaced.
"""

import importlib
import os
import pickle
import sys
import types
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import triton.language as tl
from dflash_kernels.core.device import Target
from triton.runtime import interpreter

OPS = {name: importlib.import_module(f"dflash_kernels.{name}.triton") for name in ("attention.paged", "attention.mla")}
DEVICE = Target("interpreter", "gpu", 80, 2)
TYPES = {
    np.dtype(np.float32): tl.float32, np.dtype(np.float16): tl.float16, np.dtype(ml_dtypes.bfloat16): tl.bfloat16,
    np.dtype(np.int32): tl.int32, np.dtype(np.int8): tl.int8, np.dtype(np.uint8): tl.uint8,
    np.dtype(ml_dtypes.float8_e4m3fn): tl.float8e4nv,
}  # fmt: skip


class Tensor:
    """As much of a torch tensor as the interpreter touches."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.dtype = array, TYPES[array.dtype]

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "Tensor":
        return self

    def cpu(self) -> "Tensor":
        return self

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def new_empty(self, *_: Any, **__: Any) -> "Tensor":
        return self

    def set_(self, *_: Any) -> "Tensor":
        return self

    def copy_(self, _: Any) -> None:
        pass


def triton_call(
    *arrays: jax.Array, kernel: Any, out_shape: Any, grid: tuple[int, ...], input_output_aliases: dict[int, int] | None = None,
    num_warps: int, num_stages: int, compute_capability: int, **constants: Any,
) -> Any:  # fmt: skip
    """What jax-triton does, here and now; outputs start as garbage unless they are aliased."""
    inputs = [np.array(array) for array in arrays]
    outputs = [np.full(shape.shape, 0x7F, np.uint8).repeat(np.dtype(shape.dtype).itemsize, -1) for shape in out_shape]
    outputs = [output.view(shape.dtype) for output, shape in zip(outputs, out_shape, strict=True)]
    for given, made in (input_output_aliases or {}).items():
        outputs[made] = inputs[given]
    kernel[grid](*map(Tensor, inputs), *map(Tensor, outputs), **constants)
    return tuple(jnp.asarray(output) for output in outputs)


def main(calls: Path, results: Path) -> None:
    # numpy no longer makes an index of an array with one element, which is what the interpreter keeps a scalar in.
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
    made = {}
    for name, (op, function, arrays, options) in pickle.loads(calls.read_bytes()).items():
        OPS[op].jax_triton = lambda: types.SimpleNamespace(triton_call=triton_call)
        OPS[op].usable_target = lambda: DEVICE
        options = {
            key: jnp.asarray(value) if isinstance(value, np.ndarray) else value for key, value in options.items()
        }
        with jax.disable_jit():
            out = getattr(OPS[op], function)(*map(jnp.asarray, arrays), **options)
        made[name] = tuple(np.asarray(part) for part in out)
    results.write_bytes(pickle.dumps(made))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
