"""A token's result has the same bits in any company, operation by operation: in Pallas's interpreter, and what a GPU runs (one
command: `pytest -m gpu tests/invariance`)."""

import pytest

from .over_pages import OVER_PAGES
from .people import differing
from .rowwise import ROWWISE
from .whole_layers import WHOLE_LAYERS

OPERATIONS = ROWWISE | OVER_PAGES | WHOLE_LAYERS


# The others differ from one of these in size, dtype or epilogue. Kernels of attention take longest.
FEW = (
    "residual and norm, zero-centered", "product, int8", "head, best alone", "experts",
    "choice, filtered", "attention, four splits",
    "norm, rotation and write to int8 pages", "attention from the projection", "gated delta net, one token",
)  # fmt: skip


@pytest.mark.few(*FEW)
@pytest.mark.parametrize("name", [name for name, operation in OPERATIONS.items() if operation.small])
def test_small(name: str) -> None:
    operation = OPERATIONS[name]
    found = differing(operation.make(False), operation.small, free=operation.free, moves=operation.moves)
    assert bool(found) != operation.holds, found


# That bits differed here is not promised of what the mode refuses.
@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, operation in OPERATIONS.items() if operation.holds and operation.real])
def test_on_a_gpu(name: str) -> None:
    operation = OPERATIONS[name]
    found = differing(operation.make(True), operation.shapes, free=operation.free, moves=operation.moves, turns=3)
    assert not found
