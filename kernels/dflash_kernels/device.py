"""Refusals that several kernels share."""

from dflash_kernels.target import HOPPER, target


def refuse_other_than_hopper() -> None:
    """Raises NotImplementedError where the device that is traced for is no Hopper GPU."""
    device = target()
    if device.platform != "gpu" or device.capability != HOPPER:
        raise NotImplementedError(f"needs a Hopper GPU (compute capability 9.0); {device.words}")
