"""Refusals that several kernels share."""

from dflash_kernels.target import HOPPER, target


def refuse_other_than_hopper(*, causal: bool = False) -> None:
    """Raises NotImplementedError where the device that is traced for is no Hopper GPU, or cannot be trusted with a causal mask."""
    device = target()
    if device.platform != "gpu" or device.capability != HOPPER:
        raise NotImplementedError(f"needs a Hopper GPU (compute capability 9.0); {device.words}")
    if causal and 12080 <= device.cuda < 12091:
        raise NotImplementedError(f"CUDA {device.cuda} miscompiles causal masks of such kernels; use 12.9.1 or later")
