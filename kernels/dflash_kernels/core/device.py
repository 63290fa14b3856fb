"""The device that a program is traced for, and the requirements of it that several kernels share."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp

HOPPER = 90  # compute capability

# Of a Hopper GPU.
WARP, WARPGROUP = 32, 128  # threads
MATRIX_ROWS = 64  # the M of a warpgroup's matrix instruction
MULTIPROCESSORS = 132
SHARED_MEMORY = 227 * 1024  # bytes that a CTA can have
HALF_SHARED_MEMORY = (
    113 * 1024
)  # of a CTA that shares its multiprocessor: half of 228 KiB, less the KiB that the system keeps

# Compute capability and multiprocessors by a word of the device's name: for programs that are lowered for a GPU which this machine
# does not have. Devices that are there say so themselves.
_KNOWN = {
    "A100": (80, 108), "A30": (80, 56), "A10": (86, 72), "A10G": (86, 80), "L4": (89, 58), "L40": (89, 142), "L40S": (89, 142),
    "H100": (90, 132), "H200": (90, 132), "GH200": (90, 132), "B200": (100, 148), "GB200": (100, 148),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Target:
    """A device kind.

    Attributes:
      kind: the device's name.
      platform: "gpu", "cpu" and so on.
      capability: CUDA compute capability times ten, 0 where it is none or unknown.
      multiprocessors: of a GPU; 0 elsewhere.
      cuda: version of the CUDA runtime, 13000 for 13.0; 0 where it is not known.
    """

    kind: str
    platform: str
    capability: int
    multiprocessors: int
    cuda: int = 0

    @property
    def words(self) -> str:
        known = f"has {self.capability // 10}.{self.capability % 10}" if self.capability else "has none that is known"
        return f"the device, {self.kind}, {known}"


def default_device() -> Any:
    """Device that programs are compiled for unless their arrays name another."""
    chosen = jax.config.jax_default_device
    return jax.devices(chosen)[0] if chosen is None or isinstance(chosen, str) else chosen


def target() -> Target:
    """The abstract device of the mesh in use where it names another kind than the default device, else the default device."""
    device = default_device()
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None and abstract.device_kind != device.device_kind:
        known = next((_KNOWN[word] for word in re.findall(r"\w+", abstract.device_kind) if word in _KNOWN), (0, 0))
        return Target(abstract.device_kind, abstract.platform, known[0], abstract.num_cores or known[1])
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    capability = int(major) * 10 + int(minor) if major.isdigit() and minor.isdigit() else 0
    cuda = re.search(r"cuda (\d+)", str(getattr(device.client, "platform_version", "")))
    cores = getattr(device, "core_count", 0) or 0
    return Target(device.device_kind, device.platform, capability, cores, int(cuda[1]) if cuda else 0)


def require_hopper(*, causal: bool = False) -> None:
    """Raises NotImplementedError where the device that is traced for is no Hopper GPU, or cannot be trusted with a causal mask."""
    device = target()
    if device.platform != "gpu" or device.capability != HOPPER:
        raise NotImplementedError(f"needs a Hopper GPU (compute capability 9.0); {device.words}")
    if causal and 12080 <= device.cuda < 12091:
        raise NotImplementedError(f"CUDA {device.cuda} miscompiles causal masks of such kernels; use 12.9.1 or later")


def require_page_size(page_size: int) -> None:
    """Raises NotImplementedError for pages that do not make up tiles of 64 tokens in copies of whole groups of eight rows."""
    if page_size % 64 and (64 % page_size or page_size < 8):
        raise NotImplementedError(f"takes page sizes 8, 16, 32 and multiples of 64, not {page_size}")


def require_half_precision(*dtypes: Any) -> None:
    """Raises NotImplementedError unless all dtypes are bfloat16, or all float16."""
    if len({jnp.dtype(dtype) for dtype in dtypes}) > 1 or dtypes[0] not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"takes bfloat16 or float16 throughout, not {', '.join(map(str, dtypes))}")
