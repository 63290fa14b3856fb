"""Pallas's GPU kernels of a program, compiled side by side while XLA is still at work on everything else.

XLA compiles the kernels of a program one after the other, after most of what else it does: 8 of 12 s for the decode loop of a 4B
model. JAX keeps every kernel that was compiled for the rest of the process, under its hash, so a program finds what a smaller one
has brought there: one that consists of the kernel alone.
"""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import jax

from dflash_jax.compile.serialization import compile_here

_POOL = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="kernel")


@contextmanager
def kernels_side_by_side() -> Iterator[None]:
    """Kernels that are lowered inside are compiled by other threads from its end on. Nobody waits for them or hears of their
    errors: the program that they are of will meet the same.

    Not from the moment that each is lowered: first cycles of a 4B model on an H200 came after 21.8 s so, twice, and after 20.4 and
    20.7 s in other runs with all kernels at the end.
    """
    mosaic: Any = sys.modules.get("jax.experimental.mosaic.gpu.core")
    if mosaic is None:  # nothing was traced that has such kernels
        yield
        return
    before = set(mosaic.KNOWN_KERNELS)
    yield
    for digest, code in tuple(mosaic.KNOWN_KERNELS.items()):
        if digest not in before:
            with suppress(RuntimeError):  # Python ends; nobody waits for the kernel here
                _POOL.submit(compile_kernel, digest, code)


def compile_kernel(digest: bytes, code: bytes) -> None:
    """Compiles a kernel for all programs of this process."""
    # It is compiled when its call is instantiated, which takes none of its arrays.
    call: Any = jax.ffi.ffi_call("mosaic_gpu_v2", jax.ShapeDtypeStruct((), "float32"))
    flags = dict.fromkeys(("use_custom_barrier", "skip_device_barrier", "uses_xla_collective_metadata"), False)
    compile_here(jax.jit(lambda: call(kernel_hash=digest, module=code, **flags)).lower())
