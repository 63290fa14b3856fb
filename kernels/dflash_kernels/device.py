"""What the default device can run, for kernels that need a kind of it."""

import jax


def refuse_other_than_hopper() -> None:
    """Raises NotImplementedError where the default device is no Hopper GPU."""
    chosen = jax.config.jax_default_device
    device = jax.devices(chosen)[0] if chosen is None or isinstance(chosen, str) else chosen
    capability = getattr(device, "compute_capability", "none")
    if device.platform != "gpu" or capability != "9.0":
        had = f"the default device, {device.device_kind}, has {capability}"
        raise NotImplementedError(f"needs a Hopper GPU (compute capability 9.0); {had}")
