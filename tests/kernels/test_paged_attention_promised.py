"""Every head dim with every dtype of queries and pages, and every page size with each of them, in every implementation."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import NoImplementationError

from .attention_candidates import CANDIDATES, HOPPER, XLA, Candidate, check, run
from .attention_oracle import make_case

HEAD_DIMS, PAGE_SIZES = (64, 72, 80, 96, 128, 192, 256), (16, 32, 64, 128)
KINDS = [(dtype, stored) for stored in (None, jnp.float8_e4m3fn, np.int8) for dtype in (jnp.bfloat16, jnp.float16)]
SINKS, SLOPES = np.linspace(-1.5, 2.5, 32, dtype=np.float32), (2.0 ** -np.linspace(0.5, 8, 32)).astype(np.float32)
MASKS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": False, "soft_cap": 1.5},
    {"window": (20, 0), "sinks": SINKS},
    {"alibi_slopes": SLOPES},
    {"causal": False, "window": (30, 3), "alibi_slopes": SLOPES, "alibi_sqrt": True, "sinks": SINKS},
)
SHAPES = ((1, 16), (16, 4), (5, 1), (2, 7))  # T and the heads of a group


@pytest.mark.few("xla-0-*", "xla-1-1", "xla-2-2", "xla-3-3", "xla-4-4", "xla-5-5", "xla-6-0")
@pytest.mark.parametrize("kind", range(len(KINDS)))
@pytest.mark.parametrize("head", range(len(HEAD_DIMS)))
@pytest.mark.parametrize("candidate", CANDIDATES)
def test_what_is_promised(candidate: Candidate, head: int, kind: int) -> None:
    """On Hopper, what the kernel does not take of pages in eight bits is refused where it is named, and served where it is not."""
    (dtype, stored), head_dim, page_size = KINDS[kind], HEAD_DIMS[head], PAGE_SIZES[(head + kind) % 4]
    (t, group), mask = SHAPES[(head + 2 * kind) % 4], MASKS[(2 * head + kind) % 5]
    of_heads = {name: mask[name][: 2 * group] for name in ("sinks", "alibi_slopes") if name in mask}
    shape = {"t": t, "group": group, "head_dim": head_dim, "page_size": page_size}
    case = make_case([150, 33, 0, t], [t, 1, t, t], dtype=dtype, stored=stored, **shape, **mask | of_heads)
    if (
        candidate is HOPPER
        and stored is not None
        and (head_dim in (72, 80, 96) or (stored == np.int8 and page_size < 32))
    ):
        with pytest.raises(NoImplementationError, match=r"mosaic_gpu: takes (head dims|int8 pages of 32)"):
            run(case, candidate)
        candidate = dataclasses.replace(XLA, name=None)
    check(case, candidate)


def test_pairs_are_all_there() -> None:
    pages = {(kind, PAGE_SIZES[(head + kind) % 4]) for head in range(len(HEAD_DIMS)) for kind in range(len(KINDS))}
    assert len(pages) == len(KINDS) * len(PAGE_SIZES)
