"""What every test shares: the platform, exact float32, shape checks, and a compilation cache for this run alone.

Environment variables rather than `jax.config`, so that processes started by a test inherit them.
"""

import importlib.util
import os
import shutil
import tempfile

import pytest

CHECKED = ("dflash_jax", "dflash_kernels")


def pytest_configure(config: pytest.Config) -> None:
    """Runs before any test module, and so before JAX, is imported."""
    wants_gpu = "gpu" in config.option.markexpr.replace("not gpu", "")
    if not wants_gpu:
        os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = tempfile.mkdtemp(prefix="dflash-jax-tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        config.add_cleanup(lambda: os.environ.pop("JAX_COMPILATION_CACHE_DIR", None))
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    if importlib.util.find_spec("beartype") is not None:
        from jaxtyping import install_import_hook

        config.add_cleanup(install_import_hook(CHECKED, "beartype.beartype").uninstall)
