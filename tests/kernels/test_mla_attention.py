"""Absorbed latent attention against loops in float64, and what its callers rely on beyond closeness."""

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import NoImplementationError, latent_write, mla_attention
from dflash_kernels.attention.mla.api import IMPLEMENTATIONS

from .attention_oracle import Case, make_case, oracle

RANK, ROTATED = 24, 8
WIDTH = RANK + ROTATED


@pytest.fixture(params=["xla", pytest.param("xla", id="xla-on-gpu", marks=pytest.mark.gpu)])
def implementation(request: pytest.FixtureRequest) -> str:
    assert request.param in IMPLEMENTATIONS
    return request.param


def latent_case(seq_lens, q_lens=None, *, heads: int = 3, causal: bool = True, **options: Any) -> Case:
    """A case of grouped-query attention with one key head of the latent row's width."""
    return make_case(seq_lens, q_lens, kv_heads=1, group=heads, head_dim=WIDTH, causal=causal, scale=0.2, **options)


@functools.partial(jax.jit, static_argnames=("kv_lora_rank", "scale", "causal", "implementation"))
def call(q, pages, table, seq_lens, q_lens, **options):
    return mla_attention(q, pages, table, seq_lens, q_lens=q_lens, return_lse=True, **options)


def run(case: Case, implementation: str) -> tuple[np.ndarray, np.ndarray]:
    q, pages, _, *rest = case.arrays()
    out, lse = call(q, pages, *rest, kv_lora_rank=RANK, **case.options, implementation=implementation)
    assert out.dtype == case.q.dtype
    assert lse.dtype == jnp.float32
    return np.asarray(out), np.asarray(lse)


def true_values(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """float64: the latent row is the key, its first R entries the value."""
    out, lse = oracle(dataclasses.replace(case, v_pages=case.k_pages))
    return out[..., :RANK], lse


def check(case: Case, implementation: str) -> tuple[np.ndarray, np.ndarray]:
    (out, lse), (true_out, true_lse) = run(case, implementation), true_values(case)
    eps = 2e-6 if case.q.dtype == np.float32 else float(jnp.finfo(case.q.dtype).eps)
    error = eps * max(float(np.abs(true_out).max()), 1.0)
    np.testing.assert_allclose(out.astype(np.float64), true_out, rtol=0, atol=error)
    np.testing.assert_allclose(lse, true_lse, rtol=1e-5, atol=1e-5)
    return out, lse


def same_bits(ours: tuple[np.ndarray, ...], theirs: tuple[np.ndarray, ...]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.few("xla-1", "xla-4", "xla-7", "xla-10", "xla-13", "xla-16")
@pytest.mark.parametrize("t", range(1, 17))
def test_agrees_with_float64(t: int, implementation: str) -> None:
    heads, page_size = (1, 3, 5, 16, 7)[t % 5], (16, 64, 5, 1, 61)[t % 5]
    case = latent_case(
        [t + 21, 67, 5, 0, 16, max(t // 2, 1)], [t, max(t - 3, 1), 0, t, min(2, t), t], t=t, heads=heads,
        page_size=page_size, causal=t % 3 > 0, seed=t,
    )  # fmt: skip
    check(case, implementation)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_half_precision(dtype: Any, page_size: int, implementation: str) -> None:
    check(latent_case([130, 9], t=4, dtype=dtype, page_size=page_size), implementation)


@pytest.mark.parametrize("scale", [None, 0.25])
def test_float8_rows_stand_for_their_number_times_the_scale(scale: float | None, implementation: str) -> None:
    case = latent_case([70, 5], [3, 2], t=3)
    stored = jnp.asarray(case.k_pages).astype(jnp.float8_e4m3fn)
    exact = dataclasses.replace(case, k_pages=np.asarray(stored, np.float32) * (scale or 1))
    true_out, true_lse = true_values(exact)
    q, _, _, table, lens, q_lens = case.arrays()
    options = {"kv_lora_rank": RANK, "latent_scale": scale, "return_lse": True, "implementation": implementation}
    out, lse = mla_attention(q, stored, table, lens, q_lens=q_lens, **options, scale=0.2)
    np.testing.assert_allclose(out, true_out, rtol=0, atol=5e-6)
    np.testing.assert_allclose(lse, true_lse, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="latent_scale is one number for float8_e4m3fn pages"):
        mla_attention(q, jnp.zeros_like(stored, q.dtype), table, lens, kv_lora_rank=RANK, scale=1.0, latent_scale=0.5)


@pytest.mark.parametrize("causal", [True, False])
def test_rows_without_a_visible_key(causal: bool, implementation: str) -> None:
    # Row 0: five queries, two keys. Row 1: no keys, five queries. Row 2: keys, no queries.
    out, lse = check(latent_case([2, 0, 8], [5, 5, 0], t=5, causal=causal), implementation)
    blind = np.zeros((3, 5), bool)
    blind[0, :3] = causal
    blind[1:] = True
    assert (out[blind] == 0).all()
    assert (lse[blind] == -np.inf).all()
    assert np.isfinite(lse[~blind]).all()


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_nothing_unused_is_read(dtype: Any, implementation: str) -> None:
    build = functools.partial(latent_case, [33, 0, 7, 64], [6, 6, 2, 0], t=6, dtype=dtype, causal=False, seed=3)
    clean = build(garbage=0.0)
    clean.page_table = np.where(clean.page_table % len(clean.k_pages) == clean.page_table, clean.page_table, 0)
    expected = run(clean, implementation)
    assert np.isfinite(expected[0].astype(np.float32)).all()
    for garbage in (np.nan, np.inf, -np.inf):
        assert same_bits(run(build(garbage=garbage), implementation), expected)


def limited() -> tuple[jax.Array, tuple[jax.Array, jax.Array], list[np.ndarray]]:
    """Where queries stand that see rows of a part of a sequence, the fewest and the most of them, and how many each one sees: a
    part before all queries, behind all, one that ends among them, one that begins there, and one that lies among them."""
    stand, fewest, most = np.array([30, 2, 22, 14, 3]), np.array([9, 0, 19, 10, 1]), np.array([9, 0, 21, 40, 4])
    seen = [
        np.clip(place - 4 + np.arange(4) + 1, low, high) for place, low, high in zip(stand, fewest, most, strict=True)
    ]
    assert [[*each] for each in seen] == [[9] * 4, [0] * 4, [19, 20, 21, 21], [11, 12, 13, 14], [1, 1, 2, 3]]
    return jnp.asarray(stand), (jnp.asarray(fewest), jnp.asarray(most)), seen


def limited_case(**options: Any) -> Case:
    return latent_case([9, 0, 21, 40, 4], [4] * 5, t=4, **options)


def test_limits(implementation: str) -> None:
    """Each query is one of a sequence of its own that has so many rows."""
    case = limited_case(page_size=16)
    stand, limits, seen = limited()
    q, pages, _, table, _, q_lens = case.arrays()
    out, lse = call(
        q,
        pages,
        table,
        stand,
        q_lens,
        limits=limits,
        kv_lora_rank=RANK,
        scale=0.2,
        implementation=implementation,
    )
    for row in range(4):
        lens = np.array([each[row] for each in seen], np.int32)
        alone = dataclasses.replace(case, q=case.q[:, row : row + 1], seq_lens=lens, q_lens=np.minimum(lens, 1))
        true_out, true_lse = true_values(alone)
        np.testing.assert_allclose(out[:, row], true_out[:, 0], rtol=0, atol=5e-6)
        np.testing.assert_allclose(lse[:, row], true_lse[:, 0], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="limits bound what causal queries see"):
        mla_attention(q, pages, table, stand, limits=limits, kv_lora_rank=RANK, scale=0.2, causal=False)


def test_order_of_pages_and_requests_does_not_matter(implementation: str) -> None:
    build = functools.partial(latent_case, [70, 45, 0, 16, 3], [7, 5, 7, 0, 3], t=7, width=6, seed=5)
    out, lse = run(build(), implementation)
    assert same_bits(run(build(shuffled=False), implementation), (out, lse))
    order = [3, 0, 4, 2, 1]
    assert same_bits(run(build().rows(order), implementation), (out[order], lse[order]))


def test_logits_shifted_by_a_large_constant(implementation: str) -> None:
    # Small integers and powers of two: every product and partial sum is exact, so the shift must cancel.
    case = latent_case([50, 19, 4], [5, 2, 4], t=5)
    case.options["scale"] = 0.125
    case.k_pages, case.q = (np.clip(np.round(array * 2), -3, 3) for array in (case.k_pages, case.q))
    # In the rotated part, which is no value: a value of this size would hide every error.
    case.q[..., -1], case.k_pages[..., -1] = 8, -(2.0**17)
    (out, lse), (near_out, near_lse) = run(case, implementation), true_values(case)
    assert near_lse[0, 0].max() < -120_000
    np.testing.assert_allclose(out, near_out, rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse, near_lse, rtol=1e-6)


def test_defaults_are_causal_and_without_lse(implementation: str) -> None:
    case = latent_case([20, 9], t=4)
    q, pages, _, table, lens, _ = case.arrays()
    out = mla_attention(q, pages, table, lens, kv_lora_rank=RANK, scale=0.2, implementation=implementation)
    np.testing.assert_allclose(out, true_values(case)[0], rtol=0, atol=5e-6)


def test_an_unknown_implementation_is_named() -> None:
    q, pages, _, table, lens, _ = latent_case([4], t=1).arrays()
    with pytest.raises(NoImplementationError, match=r"mla_attention: no implementation named \['cuda'\]"):
        mla_attention(q, pages, table, lens, kv_lora_rank=RANK, scale=1.0, implementation="cuda")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latent_pages": (6, 2, 16, WIDTH)}, r"\[P, 1, p, 32\]"),
        ({"latent_pages": (6, 1, 16, 30)}, r"\(6, 1, 16, 30\) are not \[P, 1, p, 32\]"),
        ({"kv_lora_rank": 0}, "kv_lora_rank 0"),
        ({"kv_lora_rank": WIDTH + 1}, "kv_lora_rank 33"),
        ({"page_table": (1, 2)}, "start with 2 sequences"),
        ({"seq_lens": (3,)}, "start with 2 sequences"),
        ({"q_lens": (1,)}, "start with 2 sequences"),
    ],
)
def test_arguments_that_do_not_agree(changes: dict[str, Any], message: str) -> None:
    shapes = {"q": (2, 1, 3, WIDTH), "latent_pages": (6, 1, 16, WIDTH), "page_table": (2, 2), "seq_lens": (2,)}
    options = {"kv_lora_rank": RANK} | {name: value for name, value in changes.items() if isinstance(value, int)}
    shapes |= {name: value for name, value in changes.items() if isinstance(value, tuple)}
    kinds = {"q": jnp.float32, "latent_pages": jnp.float32}
    arrays = {name: jnp.zeros(shape, kinds.get(name, jnp.int32)) for name, shape in shapes.items()}
    # The function itself: in test runs a shape checker around it would speak first.
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(mla_attention)(**arrays, **options, scale=1.0)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("q_scale", [None, 0.0625])
def test_float8_queries_stand_for_their_number_times_the_scale(
    dtype: Any, q_scale: float | None, implementation: str
) -> None:
    case = latent_case([70, 5], [3, 2], t=3)
    q, rows = (jnp.asarray(one).astype(jnp.float8_e4m3fn) for one in (case.q, case.k_pages))
    wide = {"q": np.asarray(q, np.float32) * (q_scale or 1), "k_pages": np.asarray(rows, np.float32) * 0.25}
    true_out, true_lse = true_values(dataclasses.replace(case, **wide))
    _, _, _, table, lens, q_lens = case.arrays()
    out, lse = mla_attention(
        q, rows, table, lens, q_lens=q_lens, kv_lora_rank=RANK, scale=0.2, latent_scale=0.25, q_scale=q_scale, dtype=dtype,
        return_lse=True, implementation=implementation,
    )  # fmt: skip
    assert out.dtype == dtype
    eps = 5e-6 if dtype == np.float32 else 2 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(out, np.float64), true_out, rtol=0, atol=eps)
    np.testing.assert_allclose(lse, true_lse, rtol=1e-5, atol=1e-5)


def test_other_queries_in_eight_bits_are_refused() -> None:
    q, pages, _, table, lens, _ = latent_case([70, 5], t=1).arrays()
    eight = q.astype(jnp.float8_e4m3fn)
    rows = pages.astype(jnp.float8_e4m3fn)
    options: Any = {"kv_lora_rank": RANK, "scale": 1.0}
    for wrong, over in ((eight, pages), (q.astype(jnp.float8_e5m2), rows)):
        with pytest.raises(ValueError, match=r"q must be .* only pages, and queries beside float8_e4m3fn ones, may"):
            mla_attention(wrong, over, table, lens, **options)
    left_over: list[dict[str, Any]] = [{"q_scale": 1.0}, {"dtype": jnp.bfloat16}]
    for given in left_over:
        with pytest.raises(
            ValueError, match="q_scale and dtype are for queries and pages in float8_e4m3fn, these are float32"
        ):
            mla_attention(q, rows, table, lens, **options, **given)


def test_latents_are_written_to_their_slots_alone(implementation: str) -> None:
    """Slots may be fewer than rows; negative ones write nothing; an all-zero row is written as zeros."""
    rng = np.random.default_rng(0)
    pool, rows = np.full((5, 1, 4, WIDTH), np.nan, np.float32), rng.standard_normal((6, WIDTH)).astype(np.float32)
    rows[1] = 0
    written = np.asarray(
        latent_write(
            jnp.array(pool), jnp.array(rows), jnp.array([7, 18, -1, -(2**31), 0]), implementation=implementation
        )
    )
    pool[1, 0, 3], pool[4, 0, 2], pool[0, 0, 0] = rows[0], rows[1], rows[4]
    np.testing.assert_array_equal(written, pool)
    for shape, slots in (((6, WIDTH), 7), ((6, WIDTH - 1), 6)):
        with pytest.raises(ValueError, match=r"latent pages|slots"):
            inspect.unwrap(latent_write)(jnp.array(pool), jnp.zeros(shape), jnp.zeros(slots, jnp.int32))


@pytest.mark.large
def test_a_pool_of_more_than_two_to_the_31_entries(implementation: str) -> None:
    """Offsets into the pool do not fit 32 bits. The zeros of the pool are never touched, so they take no memory."""
    rng, pages = np.random.default_rng(0), 2**31 // (16 * WIDTH) + 2000
    flat = np.zeros(pages * 16 * WIDTH + 64, np.float16)
    # At a multiple of 64 bytes JAX reads the array in place.
    pool = flat[-flat.ctypes.data % 64 // 2 :][: pages * 16 * WIDTH].reshape(pages, 1, 16, WIDTH)
    pool[pages - 7] = rng.standard_normal((1, 16, WIDTH))
    table, lens = np.array([[pages - 7]], np.int32), np.array([13], np.int32)
    q = rng.standard_normal((1, 2, 3, WIDTH)).astype(np.float16)
    small = Case(
        q, pool[pages - 7 :], pool[:1], table * 0, lens, np.array([2], np.int32), {"scale": 0.2, "causal": True}
    )
    big = jax.device_put(pool, may_alias=True)
    options = small.options | {"kv_lora_rank": RANK, "implementation": implementation}
    out, _ = call(q, big, table, lens, small.q_lens, **options)
    np.testing.assert_array_equal(out, run(small, implementation)[0])
