"""Interpreted kernels in less time (see `tests/kernels/conftest.py`), with matrix instructions that add as a GPU's do: the sum of
an element has one order, wherever it stands in a tile. A CPU's libraries add the rows at a tile's edge in another one."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ..kernels.conftest import callbacks_take_numpy, compiled_once

__all__ = ["callbacks_take_numpy", "compiled_once", "one_order"]


@pytest.fixture(autouse=True)
def one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul, dot = np.matmul, jnp.dot

    def rounded_once(a: Any, b: Any, dtype: Any = None, **options: Any) -> Any:
        if dtype != np.float32:
            return matmul(a, b, dtype=dtype, **options)
        return matmul(a.astype(np.float64), b.astype(np.float64)).astype(dtype)

    def term_after_term(a: Any, b: Any, **options: Any) -> Any:
        if a.ndim != 2 or b.ndim != 2 or a.dtype != jnp.float32:
            return dot(a, b, **options)
        return (a[:, :, None] * b[None]).sum(axis=1)

    monkeypatch.setattr(np, "matmul", rounded_once)
    monkeypatch.setattr(jnp, "dot", term_after_term)
