"""Interpreted kernels in less time; see `tests/kernels/conftest.py`."""

from ..kernels.conftest import callbacks_take_numpy, compiled_once

__all__ = ["callbacks_take_numpy", "compiled_once"]
