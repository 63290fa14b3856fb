"""jax-triton, an extra of this package: imported only where a kernel wants it, and called."""

import importlib
import os
from typing import Any

from dflash_kernels.core.device import Target, target

OLDEST = 80  # compute capability: Triton's pipelines start with Ampere's asynchronous copies
MULTIPROCESSORS = 108  # of an A100, where the device does not say
# Bytes of shared memory that a program may have on every GPU since Ampere (GeForce cards have least).
SHARED_MEMORY = 99 * 1024
FIRST_WITH_FLOAT8 = 89  # compute capability
VERSION = "0.3."  # later ones call kernels in another way


def usable_target() -> Target:
    """The device in use. Raises NotImplementedError where it cannot run Triton kernels or jax-triton is not installed."""
    device = target()
    if device.capability < OLDEST:
        raise NotImplementedError(f"needs an NVIDIA GPU of compute capability 8.0 or newer; {device.words}")
    jax_triton()
    return device


def jax_triton() -> Any:
    """The module. Raises NotImplementedError with the reason where it cannot be imported."""
    cache = os.environ.get("TRITON_CACHE_DIR")
    install = "pip install 'dflash-jax[triton]'"
    try:
        # triton first: without it jax-triton imports and fails at its first call.
        importlib.import_module("triton")
        module = importlib.import_module("jax_triton")
    except ImportError as error:
        raise NotImplementedError(f"needs jax-triton and a CUDA build of JAX ({install}): {error}") from error
    finally:
        # Importing it turns the cache off for every other user of Triton in this process.
        if cache is None:
            os.environ.pop("TRITON_CACHE_DIR", None)
        else:
            os.environ["TRITON_CACHE_DIR"] = cache
    if not module.__version__.startswith(VERSION):
        raise NotImplementedError(f"needs jax-triton {VERSION}*, not {module.__version__} ({install})")
    return module


def power_of_two(number: int) -> int:
    """The smallest one that is not below the number: Triton's arrays have no other sizes."""
    return 1 << (number - 1).bit_length()
