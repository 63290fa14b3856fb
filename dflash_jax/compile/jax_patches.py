"""All that this package does with JAX's internals: executables as bytes, and two patches of how Mosaic GPU kernels are lowered.

* **Executables as bytes**, and back: what JAX's own serialization does, without its pickle. XLA's bytes hold the machine code and
  which arguments are donated. What JAX keeps beside them follows from the arguments' shapes, from the results' shapes, and from
  which arguments the code reads.
* **Kernels side by side** (`kernels_side_by_side`): XLA compiles the kernels of a program one after the other, after most of what
  else it does. JAX keeps every kernel that was compiled for the rest of the process, under its hash, so a program finds what a
  smaller one has brought there: one that consists of the kernel alone.
* **Names of values** (`name_values_once`): JAX 0.11 sorts what it infers layouts for by name. It takes each name from a print of
  the operation, and every print numbers the whole kernel again; here all come from one numbering of a kernel.

None of it is done with versions of JAX that it was not written for: programs are then kept by JAX's own cache alone, and the first
ones come later.
"""

# pyright: reportPrivateImportUsage=false

import functools
import math
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
from jax import monitoring
from jax._src import config, core

# Minor versions whose internals are what this file takes them for.
KNOWN_VERSIONS = ((0, 11), (0, 12))
# Of them: whose layout inference sorts by name. Later ones keep no such order.
SORTING_VERSIONS = ((0, 11),)


def known() -> bool:
    """Whether this JAX is one that the file was written for."""
    return jax.__version_info__[:2] in KNOWN_VERSIONS


def sorts_by_name() -> bool:
    """Whether this JAX is one that `name_values_once` was written for."""
    return jax.__version_info__[:2] in SORTING_VERSIONS


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
      NotSerialisable: this JAX is not a known one, an argument lies elsewhere or over several devices, or a default device was set.
    """
    if not known():
        raise NotSerialisable(f"JAX {jax.__version__} keeps its executables in its own way")
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


# `jax.experimental.serialize_executable` restores the same program as fast, but its bytes are a pickle, which runs what it names
# before anything of it can be checked, and entries of ours hold none. The refusals below read the same internals and would stay,
# and so would the description of the results, which it does not keep.
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
    from jax._src.interpreters.pxla import UnloadedMeshExecutable
    from jax._src.stages import ArgInfo
    from jaxlib.xla_client import DeviceList

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


_POOL = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="kernel")


@contextmanager
def kernels_side_by_side() -> Iterator[None]:
    """Kernels that are lowered inside are compiled by other threads from its end on. Nobody waits for them or hears of their
    errors: the program that they are of will meet the same.

    Not from the moment that each is lowered: first cycles of a 4B model on an H200 came after 21.8 s so, twice, and after 20.4 and
    20.7 s in other runs with all kernels at the end.
    """
    mosaic: Any = sys.modules.get("jax.experimental.mosaic.gpu.core") if known() else None
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


_INSTALLING, _NUMBERED = threading.Lock(), threading.local()


def name_values_once() -> None:
    """From now on, names in kernels come from one numbering. Does nothing where JAX's part for them is not imported (yet)."""
    inference: Any = sys.modules.get("jax.experimental.mosaic.gpu.layout_inference")
    if inference is None or not (known() and sorts_by_name()):
        return
    with _INSTALLING:
        if hasattr(inference.infer_layout, "__wrapped__"):
            return
        inference.infer_layout = _numbered(inference.infer_layout)
        inference.ValueSite.__str__ = _named(inference.ValueSite.__str__)


def _numbered(infer_layout: Any) -> Any:
    from jax._src.lib.mlir import ir

    @functools.wraps(infer_layout)
    def infer(module: Any, **options: Any) -> None:
        # Inference adds attributes only: no value comes or goes while this numbering is in use.
        _NUMBERED.state = ir.AsmState(module.operation)
        try:
            infer_layout(module, **options)
        finally:
            _NUMBERED.state = None

    return infer


def _named(printed: Any) -> Any:
    @functools.wraps(printed)
    def name(site: Any) -> str:
        state, operation = getattr(_NUMBERED, "state", None), site.operation.operation
        if state is None:
            return printed(site)
        told = [*operation.results][:1] or [*operation.operands]  # values that no other operation of this name has
        values = " ".join(value.get_name(state) for value in told)
        return f"{values} {operation.name}:{'ora'[site.type]}-{site.index}"

    return name
