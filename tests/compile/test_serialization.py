"""Programs as bytes: what restoring them needs beside them."""

import os

import pytest

from dflash_jax.compile.serialization import find_kernel_runtime


@pytest.mark.gpu
def test_kernels_find_their_runtime_as_jax_would_tell_them(monkeypatch):
    """Their code is restored without any import of what would name it. JAX has what tells it with a GPU's libraries only."""
    monkeypatch.delenv("MOSAIC_GPU_RUNTIME_LIB_PATH", raising=False)
    find_kernel_runtime()
    ours = os.environ["MOSAIC_GPU_RUNTIME_LIB_PATH"]
    from jax.experimental.mosaic.gpu import core

    assert str(core.RUNTIME_PATH) == ours
