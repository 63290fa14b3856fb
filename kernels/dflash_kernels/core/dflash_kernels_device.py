"""Refusals that several kernels share."""

from typing import Any

import jax.numpy as jnp

from dflash_kernels.core.device import HOPPER, target


def refuse_other_than_hopper(*, causal: bool = False) -> None:
    """Raises NotImplementedError where the device that is traced for is no Hopper GPU, or cannot be trusted with a causal mask."""
    device = target()
    if device.platform != "gpu" or device.capability != HOPPER:
        raise NotImplementedError(f"needs a Hopper GPU (compute capability 9.0); {device.words}")
    if causal and 12080 <= device.cuda < 12091:
        raise NotImplementedError(f"CUDA {device.cuda} miscompiles causal masks of such kernels; use 12.9.1 or later")


def refuse_page_size(page_size: int) -> None:
    """Raises NotImplementedError for pages that do not make up tiles of 64 tokens in copies of whole groups of eight rows."""
    if page_size % 64 and (64 % page_size or page_size < 8):
        raise NotImplementedError(f"takes page sizes 8, 16, 32 and multiples of 64, not {page_size}")


def refuse_other_than_half(*dtypes: Any) -> None:
    """Raises NotImplementedError unless all of them are bfloat16, or all float16."""
    if len({jnp.dtype(dtype) for dtype in dtypes}) > 1 or dtypes[0] not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"takes bfloat16 or float16 throughout, not {', '.join(map(str, dtypes))}")
