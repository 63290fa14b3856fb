"""What compiled programs depend on besides their own arguments: this package's sources, its neighbours' versions, the device,
JAX's settings. All of it as JSON."""

import functools
import hashlib
import os
import platform
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

# The packages whose Python becomes programs; their own dependencies do not.
SOURCES = ("dflash_jax", "dflash_kernels")
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "numpy", "jax-triton", "triton")
VARIABLES = ("XLA_", "TF_", "MOSAIC_", "PALLAS_", "TRITON_", "NVIDIA_TF32", "CUBLAS", "CUDNN", "LIBTPU_INIT_ARGS")
# Of them: memory, messages, and places that JAX sets itself when it first traces a kernel.
NEUTRAL_VARIABLES = (
    "XLA_PYTHON_CLIENT_", "TF_CPP_", "TRITON_CACHE_DIR", "MOSAIC_GPU_CUDA_ROOT", "MOSAIC_GPU_RUNTIME_LIB_PATH",
    "MOSAIC_GPU_NVSHMEM_",
)  # fmt: skip
# Of JAX's settings: where things are kept and what is told about them.
NEUTRAL_SETTINGS = ("cache", "log", "traceback", "dump")


def settings() -> dict[str, str]:
    """JAX's settings as they are for this thread, and the switches of this package that change what is traced."""
    from dflash_jax.execution import plan

    found = {
        name: str(getattr(jax.config, name, None))
        for name in sorted(jax.config.values)
        if not any(part in name for part in NEUTRAL_SETTINGS)
    }
    switches = (plan.PERSISTENT, plan.PERSISTENT_ATTENTION, plan.FUSED_DENSE)
    return found | {"switches": ",".join(map(str, switches))}


@functools.cache
def environment(device: Any) -> dict[str, Any]:
    """What stays for a process: sources, versions, variables, and the machine with its driver."""
    return {
        "sources": sources(), "versions": {name: _version(name) for name in PACKAGES}, "device": _device(device),
        "variables": {
            name: value for name, value in sorted(os.environ.items())
            if name.startswith(VARIABLES) and not name.startswith(NEUTRAL_VARIABLES)
        },
    }  # fmt: skip


@functools.cache
def sources() -> str:
    """One hash of all Python and JSON files of the packages that trace programs. A model's weights are none of them."""
    digest = hashlib.sha256()
    for package in SOURCES:
        root = Path(str(resources.files(package)))
        files = [path for path in root.rglob("*") if path.suffix in (".py", ".json")]
        for path in sorted(path for path in files if "pair" not in path.relative_to(root).parts):
            content = path.read_bytes()
            digest.update(f"{package}/{path.relative_to(root).as_posix()}:{len(content)}:".encode() + content)
    return digest.hexdigest()


def _device(device: Any) -> dict[str, str]:
    names = ("platform", "device_kind", "compute_capability", "core_count")
    found = {name: str(getattr(device, name, "")) for name in names}
    found["runtime"] = device.client.platform_version
    # The code of a CPU's programs uses whatever its machine has; that of a GPU's calls the driver.
    found["machine"] = f"{platform.machine()} {_lines('/proc/cpuinfo', ('model name', 'flags', 'Features'))}"
    if device.platform == "gpu":
        found["machine"] = f"{platform.machine()} {_lines('/proc/driver/nvidia/version', ('NVRM',))}"
    return found


def _lines(path: str, names: tuple[str, ...]) -> str:
    """The first line that begins with each of `names`; nothing where there is no such file."""
    try:
        lines = Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(next((line for line in lines if line.startswith(name)), "") for name in names)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
