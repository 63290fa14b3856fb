"""Every implementation of paged attention against loops in float64, and what callers rely on beyond closeness."""

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import NoImplementationError, paged_attention
from dflash_kernels.attention.paged.api import IMPLEMENTATIONS

from .attention_candidates import CANDIDATES, Candidate, check, rounding, run, same_bits
from .attention_oracle import Case, make_case, oracle

SINKS = np.linspace(-1.5, 2.5, 64, dtype=np.float32)
MASKS: tuple[dict[str, Any], ...] = (
    {"causal": True},
    {"causal": False},
    {"causal": True, "window": (9, 0)},
    {"causal": False, "window": (6, 3), "sinks": SINKS},
    {"causal": False, "window": (None, 2), "soft_cap": 1.5},
    {"causal": True, "window": (0, None), "sinks": SINKS},
    {"causal": True, "soft_cap": 0.7, "sinks": SINKS, "scale": 0.25},
)


@pytest.fixture(params=CANDIDATES)
def candidate(request: pytest.FixtureRequest) -> Candidate:
    assert request.param.name in IMPLEMENTATIONS
    return request.param


@pytest.mark.few("xla-0", "xla-3", "xla-6", "xla-8", "xla-11", "xla-14")
@pytest.mark.parametrize("index", range(17))
def test_agrees_with_float64(index: int, candidate: Candidate) -> None:
    """T is index + 1; group sizes from 1 to 16, head dims, page sizes and masks all come up."""
    t, group, kv_heads = index + 1, index * 5 % 16 + 1, 1 + index % 3
    mask = MASKS[index % len(MASKS)]
    if "sinks" in mask:
        mask = mask | {"sinks": SINKS[: kv_heads * group]}
    q_lens = [t, max(t - 3, 1), 0, t, min(2, t), t]
    seq_lens = [t + 21, 47, 5, 0, 16, max(t // 2, 1)]
    head_dim, page_size = (sizes[index % len(sizes)] for sizes in (candidate.head_dims, candidate.page_sizes))
    shape = {"t": t, "kv_heads": kv_heads, "group": group, "head_dim": head_dim, "page_size": page_size}
    check(make_case(seq_lens, q_lens, dtype=candidate.dtype, seed=index, **shape, **mask), candidate)


@pytest.mark.parametrize(("t", "group"), [(33, 2), (64, 1), (64, 5)])
def test_many_queries(t: int, group: int, candidate: Candidate) -> None:
    """More rows than a matrix instruction takes at once, whole tokens of them and not."""
    shape = {"kv_heads": 1, "group": group, "page_size": 32}
    check(make_case([t + 40, t, 9], [t, t - 5, 9], t=t, dtype=candidate.dtype, **shape), candidate)


def test_one_query_is_the_same_in_a_longer_block(candidate: Candidate) -> None:
    """A sequence with one new token sees the same keys, causal or not, whatever room the block around it has."""
    case = make_case([70, 33], t=1, group=4, dtype=candidate.dtype, seed=4)
    block = dataclasses.replace(
        case, q=np.concatenate([case.q, np.full_like(case.q, np.nan)], axis=1).repeat(4, axis=1)
    )
    block.q[:, 0] = case.q[:, 0]
    for causal in (True, False):
        case.options["causal"] = block.options["causal"] = causal
        (alone, alone_lse), (out, lse) = run(case, candidate), run(block, candidate)
        difference = out[:, :1].astype(np.float64) - alone.astype(np.float64)
        assert np.abs(difference).max() <= rounding(candidate.dtype, alone)
        np.testing.assert_allclose(lse[:, :1], alone_lse, rtol=2e-6, atol=2e-6)
        assert not out[:, 1:].any()
        assert (lse[:, 1:] == -np.inf).all()


@pytest.mark.parametrize("mask", MASKS, ids="-".join)
def test_every_mask(mask: dict[str, Any], candidate: Candidate) -> None:
    mask = mask | ({"sinks": SINKS[:8]} if "sinks" in mask else {})
    check(make_case([40, 130, 3, 17], [8, 8, 3, 4], t=8, group=4, dtype=candidate.dtype, **mask), candidate)


def test_defaults_are_causal_scaled_and_without_lse(candidate: Candidate) -> None:
    case = make_case([20, 9], t=4, dtype=candidate.dtype)
    q, k, v, table, lens, _ = case.arrays()
    out = np.asarray(paged_attention(q, k, v, table, lens, implementation=candidate.name))
    true = oracle(case)[0]
    np.testing.assert_allclose(out.astype(np.float64), true, rtol=0, atol=rounding(candidate.dtype, true))


@pytest.mark.parametrize("sinks", [None, SINKS[:4]], ids=["plain", "sinks"])
@pytest.mark.parametrize("causal", [True, False])
def test_rows_without_a_visible_key(causal: bool, sinks: np.ndarray | None, candidate: Candidate) -> None:
    # Row 0: five queries, two keys, so the first three stand before the sequence. Row 1: no keys. Row 2: no queries.
    mask = {"causal": causal, "window": (2, 0), "sinks": sinks}
    out, lse = check(make_case([2, 0, 8], [5, 5, 0], t=5, dtype=candidate.dtype, **mask), candidate)
    blind = np.zeros((3, 5), bool)
    blind[0, :3] = blind[1] = True
    assert (out[blind] == 0).all()
    assert (out[2] == 0).all()
    np.testing.assert_allclose(
        lse[blind], np.broadcast_to(-np.inf if sinks is None else sinks, lse[blind].shape), rtol=2e-7
    )
    assert (lse[2] == -np.inf).all()


@pytest.mark.parametrize("half", [False, True], ids=["own", "bfloat16"])
def test_nothing_unused_is_read(half: bool, candidate: Candidate) -> None:
    dtype = jnp.bfloat16 if half else candidate.dtype
    build = functools.partial(make_case, [33, 0, 7, 64], [6, 6, 2, 0], t=6, dtype=dtype, causal=False, seed=3)
    clean = build(garbage=0.0)
    clean.page_table = np.where(clean.page_table % len(clean.k_pages) == clean.page_table, clean.page_table, 0)
    expected = run(clean, candidate)
    assert np.isfinite(expected[0].astype(np.float32)).all()
    for garbage in (np.nan, np.inf, -np.inf):
        assert same_bits(run(build(garbage=garbage), candidate), expected)


def test_page_order_does_not_matter(candidate: Candidate) -> None:
    build = functools.partial(make_case, [70, 45, 16], t=3, width=6, dtype=candidate.dtype, seed=5)
    assert same_bits(run(build(), candidate), run(build(shuffled=False), candidate))


def test_other_requests_leave_no_trace(candidate: Candidate) -> None:
    head_dim = candidate.head_dims[1]
    case = make_case(
        [70, 45, 0, 16, 3], [7, 5, 7, 0, 3], t=7, group=3, head_dim=head_dim, dtype=candidate.dtype, seed=6
    )
    out, lse = run(case, candidate)
    order = [3, 0, 4, 2, 1]
    assert same_bits(run(case.rows(order), candidate), (out[order], lse[order]))
    for row in range(5):
        alone = dataclasses.replace(case, seq_lens=case.seq_lens * (np.arange(5) == row))
        assert same_bits([part[row] for part in run(alone, candidate)], (out[row], lse[row]))


def test_a_request_alone_equals_itself_in_a_batch(candidate: Candidate) -> None:
    # Up to rounding: kernels cut long sequences into parts by the room a batch leaves. For the definition see
    # `test_paged_attention_alone.py`.
    head_dim = candidate.head_dims[1]
    case = make_case([70, 45, 16], [7, 5, 7], t=7, group=3, head_dim=head_dim, dtype=candidate.dtype, seed=6)
    out, lse = run(case, candidate)
    for row in range(3):
        alone = run(case.rows([row]), candidate)
        difference = alone[0].astype(np.float64) - out[[row]].astype(np.float64)
        assert np.abs(difference).max() <= rounding(candidate.dtype, out)
        np.testing.assert_allclose(alone[1], lse[[row]], rtol=2e-6, atol=2e-6)


def test_twice_the_same(candidate: Candidate) -> None:
    case = make_case([200, 31], t=16, group=8, head_dim=128, dtype=jnp.bfloat16)
    assert same_bits(run(case, candidate), run(case, candidate))


@pytest.mark.parametrize("soft_cap", [None, 4e5])
def test_logits_shifted_by_a_large_constant(soft_cap: float | None, candidate: Candidate) -> None:
    # Small integers, powers of two and a scale of 1/8: every product and partial sum is exact, so the shift must cancel.
    case = make_case([50, 19, 4], [5, 2, 4], t=5, head_dim=64, scale=0.125, soft_cap=soft_cap, dtype=candidate.dtype)
    case.k_pages, case.q = (
        np.clip(np.round(array.astype(np.float32) * 2), -3, 3).astype(candidate.dtype)
        for array in (case.k_pages, case.q)
    )
    case.q[..., 0], case.k_pages[..., 0] = 8, -(2.0**17)
    (out, lse), (near_out, near_lse) = run(case, candidate), oracle(case)
    assert near_lse[0, 0].max() < -120_000
    error = rounding(candidate.dtype, near_out) if soft_cap is None else 0.1
    np.testing.assert_allclose(out.astype(np.float64), near_out, rtol=0, atol=error)
    np.testing.assert_allclose(lse, near_lse, rtol=1e-6)


def naive(case: Case) -> np.ndarray:
    """Textbook attention on gathered keys in the inputs' dtype, softmax in float32."""
    rows = []
    for row, length in enumerate(case.seq_lens):
        places = np.arange(length)
        pages, at = case.page_table[row, places // case.k_pages.shape[2]], places % case.k_pages.shape[2]
        groups = case.q.shape[2] // case.k_pages.shape[1]
        k, v = (jnp.repeat(jnp.asarray(pool[pages, :, at]), groups, axis=1) for pool in (case.k_pages, case.v_pages))
        scores = jnp.einsum("tnh,snh->nts", jnp.asarray(case.q[row]), k).astype(jnp.float32) * case.scale
        behind = jnp.arange(case.q.shape[1])[:, None] + length - case.q.shape[1] - places
        weights = jax.nn.softmax(jnp.where(behind >= 0, scores, -jnp.inf), axis=-1)
        rows.append(jnp.einsum("nts,snh->tnh", weights.astype(v.dtype), v))
    return np.asarray(jnp.stack(rows)).astype(np.float64)


@pytest.mark.few("xla-bfloat16-16", "xla-float16-1")
@pytest.mark.parametrize("t", [1, 16])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_half_precision_is_as_good_as_the_textbook(dtype: Any, t: int, candidate: Candidate) -> None:
    case = make_case([200], t=t, kv_heads=1, group=3, head_dim=128, page_size=32, dtype=dtype, seed=9)
    true, lse = oracle(case)
    out, our_lse = run(case, candidate)
    ulp = float(jnp.finfo(dtype).eps) * 2.0 ** np.floor(np.log2(np.abs(true).max()))
    allowed = 2 * np.abs(naive(case) - true).max() + 2 * ulp
    assert np.abs(out.astype(np.float64) - true).max() <= allowed
    np.testing.assert_allclose(our_lse, lse, rtol=1e-5, atol=1e-5)


def test_an_unknown_implementation_is_named() -> None:
    case = make_case([4], t=1)
    with pytest.raises(
        NoImplementationError, match=r"paged_attention: no implementation named \['cuda'\]; there are .*xla"
    ):
        paged_attention(*case.arrays()[:5], implementation="cuda")


def test_names_are_tried_in_order_and_every_refusal_is_told() -> None:
    case = make_case([20, 4], t=2, head_dim=20)
    with pytest.raises(NoImplementationError) as caught:
        paged_attention(*case.arrays()[:5], implementation=("mosaic_gpu", "triton"))
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines] == ["paged_attention", "mosaic_gpu", "triton"]
    assert "takes queries in bfloat16 or float16, not float32" in lines[2]
    asked, left_open = (
        paged_attention(*case.arrays()[:5], implementation=names) for names in (("triton", "xla"), None)
    )
    np.testing.assert_array_equal(np.asarray(asked), np.asarray(left_open))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": (2, 1, 3, 64)}, r"q heads 3 x 64 do not fit"),
        ({"q": (2, 1, 4, 32)}, r"q heads 4 x 32 do not fit"),
        ({"v_pages": (6, 2, 8, 64)}, r"\(6, 2, 8, 64\)"),
        ({"page_table": (1, 2)}, r"must start with 2 sequences"),
        ({"seq_lens": (3,)}, r"must start with 2 sequences"),
        ({"q_lens": (1,)}, r"q_lens \(1,\) must start with 2 sequences"),
        ({"sinks": (2,)}, r"sinks \(2,\) must be \(4,\), one for each query head"),
    ],
)
def test_shapes_that_do_not_agree(changes: dict[str, tuple[int, ...]], message: str) -> None:
    shapes = {
        "q": (2, 1, 4, 64),
        "k_pages": (6, 2, 16, 64),
        "v_pages": (6, 2, 16, 64),
        "page_table": (2, 2),
        "seq_lens": (2,),
    }
    floats = ("q", "k_pages", "v_pages", "sinks")
    arrays = {
        name: jnp.zeros(shape, jnp.float32 if name in floats else jnp.int32)
        for name, shape in (shapes | changes).items()
    }
    # The function itself: in test runs a shape checker around it would speak first.
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(paged_attention)(**arrays)
