"""A token's result has the same bits in any company, operation by operation: in Pallas's interpreter, and what a GPU runs (one
command: `pytest -m gpu tests/invariance`)."""

import pytest

from .people import SHAPES, differing
from .rowwise import ROWWISE

OPERATIONS = ROWWISE


@pytest.mark.parametrize("name", OPERATIONS)
def test_small(name: str) -> None:
    operation = OPERATIONS[name]
    assert not differing(operation.make(False), operation.small, free=operation.free, moves=operation.moves)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATIONS)
def test_on_a_gpu(name: str) -> None:
    operation = OPERATIONS[name]
    assert not differing(operation.make(True), operation.shapes, free=operation.free, moves=operation.moves)
