"""Keys and values out of latent rows in pages, against float64."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import NoImplementationError, latent_expand
from dflash_kernels.kv_cache.latent_expand.launch import Tuning
from dflash_kernels.kv_cache.latent_expand.mosaic_gpu import launch
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..devices import h200

GARBAGE_ENTRY = 2_147_480_000


def make_case(
    starts: list[int], lens: list[int], *, heads=2, nope=128, value=128, rotated=64, rank=128, page_size=64,
    dtype: Any = jnp.bfloat16,
) -> tuple[np.ndarray, ...]:  # fmt: skip
    """Pages, table, starts, lens and weights; NaN in rows and large numbers in entries that nobody may look at."""
    rng = np.random.default_rng(0)
    ends = np.add(starts, lens)
    width = -(-max(ends) // page_size) + 1
    order = rng.permutation(len(lens) * width + 1)
    pages = np.full((len(order), 1, page_size, rank + rotated), np.nan, dtype)
    table = np.full((len(lens), width), GARBAGE_ENTRY, np.int32)
    for b, end in enumerate(ends):
        used = -(-end // page_size)
        table[b, :used] = order[b * width : b * width + used]
        for s in range(starts[b], end):
            pages[table[b, s // page_size], 0, s % page_size] = rng.standard_normal(rank + rotated).astype(dtype)
    weights = ((rng.standard_normal((heads, d, rank)) * rank**-0.5).astype(dtype) for d in (nope, value))
    return pages, table, np.array(starts, np.int32), np.array(lens, np.int32), *weights


def check(case: tuple[np.ndarray, ...], k: Any, v: Any) -> None:
    pages, table, starts, lens, w_uk, w_uv = case
    page_size, rank = pages.shape[2], w_uk.shape[2]
    uk, uv = (np.asarray(w, np.float64) for w in (w_uk, w_uv))
    eps = float(jnp.finfo(pages.dtype).eps)
    for b, (start, count) in enumerate(zip(starts, lens, strict=True)):
        places = np.arange(start, start + count)
        rows = pages[table[b, places // page_size], 0, places % page_size].astype(np.float64)
        k_pe = np.broadcast_to(rows[:, None, rank:], (count, uk.shape[0], rows.shape[1] - rank))
        expected = np.concatenate([np.einsum("sr,npr->snp", rows[:, :rank], uk, optimize=True), k_pe], axis=-1)
        for found, true in ((k, expected), (v, np.einsum("sr,nvr->snv", rows[:, :rank], uv, optimize=True))):
            own = np.asarray(found[b, :count], np.float64)
            np.testing.assert_allclose(own, true, rtol=eps, atol=max(eps, 1e-6))


@pytest.mark.few("1-bf16", "5-f32")
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("page_size", [1, 5, 64])
def test_definition(page_size: int, dtype: Any) -> None:
    starts = [page_size, 0, 0, 3 * page_size]
    case = make_case(
        starts, [7, 0, 40, 33], heads=3, nope=10, value=7, rotated=6, rank=12, page_size=page_size, dtype=dtype
    )
    k, v = latent_expand(*(jnp.asarray(x) for x in case), rows=40)
    assert (k.shape, v.shape) == ((4, 40, 3, 16), (4, 40, 3, 7))
    assert np.isfinite(np.asarray(k, np.float32)).all()
    check(case, k, v)


KERNEL = [
    ([0], [1], 64, 128, 128, 2),
    ([64, 0, 128, 0], [300, 0, 130, 128], 64, 300, 192, 4),
    ([16, 160], [257, 90], 16, 260, 256, 3),
    ([384], [200], 192, 256, 128, 4),
    ([256, 0], [300, 64], 256, 320, 512, 2),
]


@pytest.mark.few("starts3-lens3-192-256-128-4")
@pytest.mark.parametrize(("starts", "lens", "page_size", "rows", "rank", "stages"), KERNEL)
def test_kernel_interpreted(starts, lens, page_size: int, rows: int, rank: int, stages: int) -> None:
    case = make_case(starts, lens, heads=1, rank=rank, page_size=page_size)
    arrays = (jnp.asarray(x) for x in case)
    k, v = launch(*arrays, rows=rows, tuning=Tuning(stages=stages, cluster=1), interpret=plgpu.InterpretGPUParams())
    assert (k.shape, v.shape) == ((len(lens), rows, 1, 192), (len(lens), rows, 1, 128))
    check(case, k, v)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("heads", [1, 16])
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("page_size", [16, 64, 256])
def test_kernel_on_a_gpu(page_size: int, cluster: int, heads: int, dtype: Any) -> None:
    case = make_case([256, 0, 768], [700, 0, 1030], heads=heads, rank=512, page_size=page_size, dtype=dtype)
    call = jax.jit(functools.partial(launch, rows=1100, tuning=Tuning(cluster=cluster)))
    check(case, *call(*(jnp.asarray(x) for x in case)))


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", [1, 2])
def test_as_many_heads_as_deepseek_v3_on_a_gpu(cluster: int) -> None:
    case = make_case([192, 0, 64], [500, 0, 130], heads=128, rank=512)
    call = jax.jit(functools.partial(launch, rows=512, tuning=Tuning(cluster=cluster)))
    check(case, *call(*(jnp.asarray(x) for x in case)))


@pytest.mark.few
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("page_size", [16, 64])
def test_lowers_for_hopper(page_size: int, cluster: int) -> None:
    case = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in make_case([0], [9], heads=4, rank=512, page_size=page_size)]
    with h200():
        call = jax.jit(functools.partial(launch, rows=256, tuning=Tuning(cluster=cluster)))
        assert "mosaic_gpu_v2" in call.trace(*case).lower(lowering_platforms=("cuda",)).as_text()


def test_what_the_kernel_refuses() -> None:
    arrays = [jnp.asarray(x) for x in make_case([0], [9])]
    with pytest.raises(NoImplementationError, match="needs a Hopper GPU"):
        latent_expand(*arrays, rows=64, implementation="mosaic_gpu")
    refused = [
        ({"dtype": np.float32}, "bfloat16 or float16 throughout"),
        ({"nope": 64}, "heads of 64 and 64"),
        ({"rank": 96}, "latents of 96"),
        ({"page_size": 12}, "multiple of 8, not 12"),
    ]
    for options, reason in refused:
        arrays = [jnp.asarray(x) for x in make_case([0], [9], **options)]
        with h200(), pytest.raises(NoImplementationError, match=reason):
            latent_expand(*arrays, rows=64, implementation="mosaic_gpu")


def test_arguments_that_do_not_agree() -> None:
    pages, table, starts, lens, w_uk, w_uv = (jnp.asarray(x) for x in make_case([0, 0], [9, 3]))
    call = functools.partial(inspect.unwrap(latent_expand), rows=9)
    with pytest.raises(ValueError, match=r"latent_pages must be an array \[P, 1, p, \w+\], not \("):
        call(pages[:, 0], table, starts, lens, w_uk, w_uv)
    with pytest.raises(ValueError, match="must start with 2 sequences"):
        call(pages, table, starts[:1], lens, w_uk, w_uv)
    with pytest.raises(ValueError, match=r"must be \[N, nope, R\] and \[N, V, R\]"):
        call(pages, table, starts, lens, w_uk, w_uv[:1])
    with pytest.raises(ValueError, match="hold no latent of 128"):
        call(pages[..., :100], table, starts, lens, w_uk, w_uv)
