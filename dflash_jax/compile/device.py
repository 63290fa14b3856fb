"""The device that everything runs on."""

import os
from typing import Any

import jax

from dflash_jax.errors import DeviceError


def local_device() -> Any:
    """The first `jax.Device` of this process. The first call starts JAX's backend.

    Raises:
      DeviceError: JAX starts none, with its own reason and what it was told.
    """
    try:
        return jax.local_devices()[0]
    except (RuntimeError, AssertionError) as error:  # the latter where a CUDA device is asked for and there is none
        told = {
            name: os.environ[name]
            for name in sorted(os.environ)
            if name.startswith(("JAX_PLATFORM", "XLA_PYTHON_", "CUDA_VIS"))
        }
        settings = ", ".join(f"{name}={value}" for name, value in told.items()) or "nothing that names a device"
        reason = " ".join(str(error).split()) or "no such device was found"
        raise DeviceError(
            f"JAX starts no device: {reason}. The environment says {settings}. See that nvidia-smi lists a GPU and this "
            "package has its extra cuda13, or set JAX_PLATFORMS=cpu to run on the CPU"
        ) from error
