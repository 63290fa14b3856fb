"""Names of values in Pallas's GPU kernels while they are lowered: all from one numbering of a kernel.

JAX 0.11 sorts what it infers layouts for by name. It takes each name from a print of the operation, and every print numbers the
whole kernel again: 3.8 of the 9 s that the kernels of a 4B model's decode loop took to lower.
"""

# pyright: reportPrivateImportUsage=false

import functools
import sys
import threading
from typing import Any

_INSTALLING, _NUMBERED = threading.Lock(), threading.local()


def name_values_once() -> None:
    """From now on, names in kernels come from one numbering. Does nothing where JAX's part for them is not imported (yet)."""
    inference: Any = sys.modules.get("jax.experimental.mosaic.gpu.layout_inference")
    if inference is None:
        return
    with _INSTALLING:
        if hasattr(inference.infer_layout, "__wrapped__"):
            return
        inference.infer_layout = _numbered(inference.infer_layout)
        inference.ValueSite.__str__ = _named(inference.ValueSite.__str__)


def _numbered(infer_layout: Any) -> Any:
    from jax._src.lib.mlir import ir

    @functools.wraps(infer_layout)
    def infer(module: Any, **options: Any) -> None:
        # Inference adds attributes only: no value comes or goes while this numbering is in use.
        _NUMBERED.state = ir.AsmState(module.operation)
        try:
            infer_layout(module, **options)
        finally:
            _NUMBERED.state = None

    return infer


def _named(printed: Any) -> Any:
    @functools.wraps(printed)
    def name(site: Any) -> str:
        state, operation = getattr(_NUMBERED, "state", None), site.operation.operation
        if state is None:
            return printed(site)
        told = [*operation.results][:1] or [*operation.operands]  # values that no other operation of this name has
        values = " ".join(value.get_name(state) for value in told)
        return f"{values} {operation.name}:{'ora'[site.type]}-{site.index}"

    return name
