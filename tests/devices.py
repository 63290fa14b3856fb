"""GPUs that need not be here: inside one of these contexts, programs are traced and lowered for it."""

import contextlib
import importlib
import re
from collections.abc import Callable
from typing import Any

import jax

from dflash_jax.compile.jax_patches import name_values_once


def on(kind: str, *, names: bool = True) -> contextlib.AbstractContextManager[Any]:
    """A GPU by the name that its driver gives it. With `names`, values of kernels are named once, as in the decode loop's programs:
    otherwise names are half of the time that lowering a kernel takes."""
    if names:
        importlib.import_module("jax.experimental.pallas.mosaic_gpu")  # names are patched where they have been imported
        name_values_once()
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device))


def h200() -> contextlib.AbstractContextManager[Any]:
    return on("NVIDIA H200")


def custom_calls(function: Callable[..., Any], *arrays: Any, kind: str = "NVIDIA H200") -> list[str]:
    """Names of the custom calls, in order, of a function lowered for a GPU."""
    with on(kind):
        text = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r"custom_call @(\w+)", text)
