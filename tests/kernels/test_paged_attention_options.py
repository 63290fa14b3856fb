"""ALiBi and quantized pages in every implementation of paged attention, against loops in float64."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import NoImplementationError, paged_attention

from ..devices import custom_calls
from .attention_candidates import CANDIDATES, Candidate, check, run, same_bits
from .attention_oracle import make_case, with_wide_values

SLOPES = (2.0 ** -np.linspace(0.5, 8, 12)).astype(np.float32)
STORED = (jnp.float8_e4m3fn, jnp.float8_e5m2, np.int8)
IN_HALF_PRECISION = [
    pytest.param(row.values[0], dtype, id=f"{row.id}-{dtype.__name__}", marks=row.marks)
    for row in CANDIDATES
    for dtype in (jnp.bfloat16, jnp.float16)
]


def takes(candidate: Candidate, stored: Any) -> bool:
    """Whether an implementation has pages of this dtype; the one for Hopper GPUs says why it has not."""
    if candidate.name != "mosaic_gpu" or stored != jnp.float8_e5m2:
        return True
    with pytest.raises(NoImplementationError, match="mosaic_gpu: takes float8_e4m3fn alone of the float8 formats"):
        run(make_case([9], t=1, dtype=candidate.dtype, stored=stored), candidate)
    return False


@pytest.fixture(params=CANDIDATES)
def candidate(request: pytest.FixtureRequest) -> Candidate:
    return request.param


@pytest.mark.few("*-window-cap-linear", "*-full-sqrt")
@pytest.mark.parametrize("sqrt", [False, True], ids=["linear", "sqrt"])
@pytest.mark.parametrize(
    "mask",
    [{}, {"causal": False}, {"window": (9, 0), "soft_cap": 1.5}, {"causal": False, "window": (None, 3)}],
    ids=["causal", "full", "window-cap", "right"],
)
def test_alibi(mask: dict[str, Any], sqrt: bool, candidate: Candidate) -> None:
    """Idle rows, dead queries, and queries before their sequence, whose keys all lie ahead."""
    mask = mask | {"alibi_slopes": SLOPES, "alibi_sqrt": sqrt}
    check(make_case([70, 130, 3, 0], [8, 3, 5, 8], t=8, group=6, dtype=candidate.dtype, **mask), candidate)


@pytest.mark.few("*-3-*")
@pytest.mark.parametrize("stored", STORED, ids=["fp8", "e5m2", "int8"])
@pytest.mark.parametrize("index", range(4))
def test_quantized_pages(index: int, stored: Any, candidate: Candidate) -> None:
    if not takes(candidate, stored):
        return
    t, kv_heads, group = ((1, 2, 4), (4, 1, 3), (16, 2, 5), (7, 3, 1))[index]
    head_dim, page_size = candidate.narrow_head_dims[index], (32, 64, 32, 128)[index]
    sinks = np.linspace(-1, 2, kv_heads * group, dtype=np.float32)
    mask = ({}, {"causal": False, "sinks": sinks}, {"window": (20, 0)}, {"soft_cap": 1.5})[index]
    if index == 3:
        mask |= {"alibi_slopes": SLOPES[:3], "alibi_sqrt": True}
    shape = {"t": t, "kv_heads": kv_heads, "group": group, "head_dim": head_dim, "page_size": page_size}
    case = make_case([150, 64, 0, t], [t, max(t - 3, 1), t, t], dtype=candidate.dtype, stored=stored, **shape, **mask)
    check(case, candidate)


@pytest.mark.parametrize("stored", STORED, ids=["fp8", "e5m2", "int8"])
def test_nothing_unused_is_read_of_quantized_pages(stored: Any, candidate: Candidate) -> None:
    """float8 pages hold NaN in unused rows, int8 pages have NaN scales there."""
    if not takes(candidate, stored):
        return
    build = functools.partial(
        make_case, [33, 0, 7, 64], [6, 6, 2, 0], t=6, page_size=32, dtype=candidate.dtype, stored=stored, causal=False
    )
    expected = run(build(garbage=0.0), candidate)
    assert np.isfinite(expected[0].astype(np.float32)).all()
    for garbage in (np.nan, -np.inf):
        assert same_bits(run(build(garbage=garbage), candidate), expected)


@pytest.mark.few("xla-bfloat16-fp8", "xla-float16-int8")
@pytest.mark.parametrize("stored", STORED, ids=["fp8", "e5m2", "int8"])
@pytest.mark.parametrize(("candidate", "dtype"), IN_HALF_PRECISION)
def test_quantized_pages_under_half_precision(stored: Any, dtype: Any, candidate: Candidate) -> None:
    if takes(candidate, stored):
        check(make_case([200, 90], t=16, group=4, head_dim=128, page_size=64, dtype=dtype, stored=stored), candidate)


@pytest.mark.parametrize("mask", [{}, {"causal": False, "window": (9, 3)}], ids=["causal", "window"])
def test_int8_keys_beside_wide_values(mask: dict[str, Any], candidate: Candidate) -> None:
    """Where they are unused, both hold NaN, keys in their scales. The kernel for Hopper GPUs says that it takes both alike."""
    case = with_wide_values(
        make_case([40, 17, 0], t=3, group=3, page_size=32, stored=np.int8, dtype=candidate.dtype, **mask)
    )
    if candidate.name != "mosaic_gpu":
        check(case, candidate)
    q, *arrays = case.arrays()[:5]
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q.astype(jnp.bfloat16), *arrays, case.options["k_scale"])
    ]
    named = functools.partial(paged_attention, implementation="mosaic_gpu")
    with pytest.raises(NoImplementationError, match="mosaic_gpu: takes pages of one byte, both alike"):
        custom_calls(lambda *arrays: named(*arrays[:5], k_scale=arrays[5]), *shapes)


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "stored", "mask"),
    [
        (64, 32, None, {"window": (20, 0), "soft_cap": 1.5}),
        (40, 72, None, {"causal": False, "sinks": np.linspace(-1, 2, 6, dtype=np.float32)}),
        (64, 128, jnp.float8_e4m3fn, {}),
        (128, 96, np.int8, {"alibi_slopes": SLOPES[:6]}),
    ],
    ids=["narrower", "wider", "fp8", "int8"],
)
def test_values_of_another_head_dim(
    head_dim: int, value_dim: int, stored: Any, mask: dict[str, Any], candidate: Candidate
) -> None:
    build = functools.partial(
        make_case, [70, 130, 3, 0], [8, 3, 3, 8], t=8, group=3, head_dim=head_dim, value_dim=value_dim, page_size=32,
        dtype=candidate.dtype, stored=stored, **mask,
    )  # fmt: skip
    if candidate.name == "mosaic_gpu":
        with pytest.raises(NoImplementationError, match=r"mosaic_gpu: takes (values of the keys' head dim|head dims)"):
            run(build(), candidate)
        return
    out, lse = check(build(), candidate)
    assert out.shape == (4, 8, 6, value_dim)
    assert same_bits(run(build(garbage=-np.inf), candidate), (out, lse))


def test_queries_in_eight_bits_are_refused() -> None:
    q, *arrays = make_case([40, 17], t=3).arrays()[:5]
    with pytest.raises(
        ValueError, match=r"q must be bfloat16, float16 or float32, not float8.* only pages may have eight bits"
    ):
        paged_attention(q.astype(jnp.float8_e4m3fn), *arrays)


def test_scale_of_all_heads_or_none(candidate: Candidate) -> None:
    case = make_case([40, 17], t=3, dtype=candidate.dtype, stored=jnp.float8_e4m3fn)
    arrays, stated = case.arrays()[:5], functools.partial(paged_attention, implementation=candidate.name)
    for scale, of_each in ((0.5, jnp.full((2,), 0.5)), (None, jnp.ones((2,)))):
        ours, theirs = (stated(*arrays, k_scale=given, v_scale=given, scale=0.01) for given in (scale, of_each))
        assert same_bits((np.asarray(ours),), (np.asarray(theirs),))


@pytest.mark.parametrize(
    ("stored", "options", "message"),
    [
        (jnp.bfloat16, {"k_scale": 2.0}, "k_scale is for float8 and int8 pages; these are bfloat16"),
        (jnp.bfloat16, {"alibi_slopes": (2,)}, r"alibi_slopes \(2,\) must be \(4,\)"),
        (jnp.float8_e4m3fn, {"v_scale": (2, 64)}, r"a scalar v_scale or one of \(2,\), not \(2, 64\)"),
        (jnp.int8, {}, r"int8 pages need k_scale of \(6, 2, 16\), not None"),
        (jnp.int8, {"k_scale": (6, 2, 16), "v_scale": (2,)}, r"int8 pages need v_scale of \(2, 64\), not \(2,\)"),
    ],
)
def test_options_that_do_not_fit(stored: Any, options: dict[str, Any], message: str) -> None:
    given = {name: value if isinstance(value, float) else jnp.ones(value) for name, value in options.items()}
    pages, lens = jnp.zeros((6, 2, 16, 64), stored), jnp.zeros((2,), jnp.int32)
    with pytest.raises(ValueError, match=message):
        # The function itself: in test runs a shape checker around it would speak first.
        inspect.unwrap(paged_attention)(
            jnp.zeros((2, 1, 4, 64), jnp.bfloat16), pages, pages, jnp.zeros((2, 2), jnp.int32), lens, **given
        )
