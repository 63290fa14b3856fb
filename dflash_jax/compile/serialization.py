"""Compiled programs as bytes, and back: what JAX's own serialisation does, without its pickle.

XLA's bytes hold the machine code and which arguments are donated. What JAX keeps beside them follows from the arguments' shapes,
from the results' shapes, and from which arguments the code reads.
"""

import math
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax import monitoring
from jax._src import config, core
from jax._src.interpreters.pxla import UnloadedMeshExecutable
from jax._src.stages import ArgInfo
from jaxlib.xla_client import DeviceList


class NotSerialisable(ValueError):
    """A program that is more than its code: it calls back to Python, holds constants, or runs on several devices."""


def find_kernel_runtime() -> None:
    """Lets restored code find the library through which Pallas kernels on GPUs are launched: JAX names it when it traces one."""
    extension: Any
    try:
        from jax._src.lib import mosaic_gpu as extension
    except ImportError:
        return  # no GPU's plugin is installed
    library = Path(extension._mosaic_gpu_ext.__file__).parent / "libmosaic_gpu_runtime.so"
    if library.exists():
        os.environ.setdefault("MOSAIC_GPU_RUNTIME_LIB_PATH", str(library))


def device_of(args: tuple) -> Any:
    """The one device that programs of these arguments run on.

    Raises:
      NotSerialisable: an argument lies elsewhere, is laid out over several devices, or a default device was set.
    """
    device = jax.local_devices()[0]
    if jax.config.jax_default_device is not None or jax.device_count() != jax.local_device_count():
        raise NotSerialisable("programs of the first device only")
    for leaf in jax.tree.leaves(args):
        sharding = getattr(leaf, "sharding", None)
        if sharding is not None and sharding.device_set != {device}:
            raise NotSerialisable(f"an argument lies on {sharding}")
    return device


def compile_here(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, bool]:
    """The compiled program, and whether `serialise` may be asked for it: what comes from JAX's own cache would lack its code.

    What is compiled here does not go into JAX's cache: it is to be kept elsewhere, and takes megabytes.
    """
    before = getattr(_FOUND, "count", 0)
    with config.persistent_cache_min_compile_time_secs(math.inf):
        program = lowered.compile()
    return program, getattr(_FOUND, "count", 0) == before


def _heard(event: str, **_: Any) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _FOUND.count = getattr(_FOUND, "count", 0) + 1


# Programs that this thread got from JAX's cache.
_FOUND = threading.local()
monitoring.register_event_listener(_heard)


def serialise(program: jax.stages.Compiled) -> tuple[bytes, list[int]]:
    """XLA's bytes, and the numbers of the flat arguments that the code reads.

    Raises:
      NotSerialisable: see there.
    """
    executable: Any = program._executable
    mesh = executable._unloaded_executable
    besides = {
        "callbacks": mesh.host_callbacks, "effects": [*mesh.ordered_effects, *mesh.unordered_effects], "refs": mesh.mut,
        "constants": program._params.const_args, "devices": list(mesh.device_list)[1:], "a place": mesh.committed,
        "layouts": [layout for layout in mesh.dispatch_in_layouts if layout is not None],
    }  # fmt: skip
    if found := [name for name, value in besides.items() if value]:
        raise NotSerialisable(f"a program with {', '.join(found)} of its own")
    return executable.xla_executable.serialize(), sorted(mesh.kept_var_idx)


def restore(
    payload: bytes, read: Sequence[int], results: Any, name: str, donate: tuple[int, ...], args: tuple
) -> jax.stages.Compiled:
    """The program that `serialise` gave `payload` and `read` for.

    Args:
      results: a pytree of shapes.
      name: of the function, for profiles.
      donate, args: as it was compiled for; arguments may be shapes.
    """
    device = device_of(args)
    place = jax.sharding.SingleDeviceSharding(device)
    infos = tuple(
        jax.tree.map(lambda leaf, given=number in donate: ArgInfo(_aval(leaf), given), arg)
        for number, arg in enumerate(args)
    )
    flat = [info._aval for info in jax.tree.leaves(infos)]
    taken, given = [flat[index] for index in read], [_aval(leaf) for leaf in jax.tree.leaves(results)]
    devices = DeviceList((device,))
    mesh = UnloadedMeshExecutable(
        xla_executable=device.client.deserialize_executable(payload, executable_devices=devices),
        device_list=devices, backend=device.client, input_avals=taken, input_shardings=[place] * len(taken),
        output_avals=given, output_shardings=[place] * len(given), committed=False, name=name, unordered_effects=[],
        ordered_effects=[], keepalive=[], host_callbacks=[], kept_var_idx=set(read), mut=None,
        xla_in_layouts=[None] * len(taken), dispatch_in_layouts=[None] * len(taken), xla_out_layouts=[None] * len(given),
        all_args_info=None, pgle_profiler=None,
    )  # fmt: skip
    return jax.stages.Compiled(mesh.load(), [], (infos, {}), jax.tree.structure(results))


def _aval(leaf: Any) -> core.ShapedArray:
    return core.ShapedArray(leaf.shape, leaf.dtype, weak_type=bool(getattr(leaf, "weak_type", False)))
