"""The definition of paged attention in float32 gives a request the same bits alone and in a batch, compiled as for users."""

from typing import Any

import numpy as np
import pytest

from .attention_candidates import XLA, run, same_bits
from .attention_oracle import make_case

pytestmark = pytest.mark.usefixtures("optimised")


@pytest.mark.few("3")
@pytest.mark.parametrize("index", range(9))
def test_same_bits_alone_and_in_a_batch(index: int) -> None:
    """Products of other sizes may add up in another order, so none may depend on who else is in the batch."""
    mask: dict[str, Any] = {"causal": index % 2 == 0, "window": (30, 4), "soft_cap": 2.0} if index > 5 else {}
    lens, t = [70, 45, 16, 33, 128][: 2 + index % 4], (1, 7, 16)[index % 3]
    shape = {"group": 1 + index % 4, "head_dim": (64, 72, 128)[index // 3]}
    case = make_case(lens, t=t, dtype=np.float32, seed=index, **shape, **mask)
    out, lse = run(case, XLA)
    for row in range(len(lens)):
        assert same_bits(run(case.rows([row]), XLA), (out[[row]], lse[[row]]))
