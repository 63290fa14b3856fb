"""Rows out of pages against a loop over positions."""

import inspect
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import NoImplementationError, latent_gather
from dflash_kernels.kv_cache.latent.gather import IMPLEMENTATIONS

from .attention_oracle import make_case

WIDTH = 32


@pytest.fixture(params=["xla", pytest.param("xla", id="xla-on-gpu", marks=pytest.mark.gpu)])
def implementation(request: pytest.FixtureRequest) -> str:
    assert request.param in IMPLEMENTATIONS
    return request.param


@pytest.mark.few("xla-16-130*", "xla-1-200-f8")
@pytest.mark.parametrize(
    "dtype", [np.float32, jnp.bfloat16, jnp.float8_e4m3fn, np.uint8], ids=["f32", "bf16", "f8", "bytes"]
)
@pytest.mark.parametrize(("page_size", "rows"), [(16, 130), (64, 97), (5, 64), (1, 200)])
def test_rows_come_in_order(page_size: int, rows: int, dtype: Any, implementation: str) -> None:
    garbage = 255 if dtype == np.uint8 else np.nan
    case = make_case(
        [70, 0, 33, 100], t=1, kv_heads=1, head_dim=WIDTH, page_size=page_size, dtype=dtype, garbage=garbage
    )
    starts, lens = np.array([7, 0, 32, 16], np.int32), np.array([40, 0, 1, 56], np.int32)
    pages, table = jnp.asarray(case.k_pages), jnp.asarray(case.page_table)
    found = latent_gather(
        pages, table, jnp.asarray(starts), jnp.asarray(lens), rows=rows, implementation=implementation
    )
    expected = np.zeros((rows, WIDTH), case.k_pages.dtype)
    places = [(b, s) for b, start in enumerate(starts) for s in range(start, start + lens[b])]
    for row, (b, s) in enumerate(places[:rows]):
        expected[row] = case.k_pages[case.page_table[b, s // page_size], 0, s % page_size]
    assert np.asarray(found).tobytes() == expected.tobytes()


def test_arguments_that_do_not_agree() -> None:
    pages, table, ints = jnp.zeros((3, 1, 4, 8)), jnp.zeros((2, 2), jnp.int32), jnp.zeros((2,), jnp.int32)
    check = inspect.unwrap(latent_gather)
    with pytest.raises(ValueError, match=r"latent_pages must be an array \[P, 1, p, \w+\], not \("):
        check(pages[:, 0], table, ints, ints, rows=3)
    for starts, lens in ((ints[:1], ints), (ints, ints[:1])):
        with pytest.raises(ValueError, match="must start with 2 sequences"):
            check(pages, table, starts, lens, rows=3)
    with pytest.raises(NoImplementationError, match=r"latent_gather: no implementation named \['cuda'\]"):
        latent_gather(pages, table, ints, ints, rows=3, implementation="cuda")
