"""The definition of ragged attention against float64, for packed keys and for pages."""

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import NoImplementationError, ragged_attention, ragged_paged_attention

from .ragged_oracle import Case, in_eight_bits, make_case, oracle

SINKS = np.linspace(-1.5, 2.5, 16, dtype=np.float32)
SLOPES = np.linspace(0.02, 0.5, 16, dtype=np.float32)
FORMS = ("dense", "paged")


def run(case: Case, form: str, implementation: str = "xla", **changes: Any) -> tuple[np.ndarray, np.ndarray]:
    function = ragged_attention if form == "dense" else ragged_paged_attention
    options: dict[str, Any] = case.options | changes
    options |= {name: jnp.asarray(value) for name, value in options.items() if isinstance(value, np.ndarray)}
    call = jax.jit(lambda *arrays: function(*arrays, return_lse=True, implementation=implementation, **options))
    out, lse = call(*getattr(case, form)())
    assert out.dtype == case.q.dtype
    assert lse.dtype == jnp.float32
    return np.asarray(out), np.asarray(lse)


CASES: dict[str, tuple[list[int], list[int] | None, dict[str, Any]]] = {
    "prompts": ([7, 1, 12], None, {}),
    "encoder": ([9, 4, 1], None, {"causal": False, "group": 1}),
    "chunk": ([5, 3, 1], [17, 3, 8], {"value_dim": 32}),
    "cross": ([5, 3], [2, 11], {"causal": False, "group": 4}),
    "more-queries": ([6, 3], [4, 1], {}),
    "empty": ([0, 5, 0, 3, 0], [4, 5, 0, 0, 0], {}),
    "window": ([9, 5], [14, 5], {"window": (3, 0)}),
    "window-both": ([9, 5], [14, 5], {"causal": False, "window": (3, 2), "page_size": 5}),
    "cap-sinks": ([6, 2, 2], [9, 2, 0], {"soft_cap": 1.5, "sinks": SINKS[:4]}),
    "alibi": ([6, 2], [9, 2], {"alibi_slopes": SLOPES[:4], "scale": 0.3}),
    "alibi-sqrt": ([6, 2], [9, 2], {"causal": False, "alibi_slopes": SLOPES[:4], "alibi_sqrt": True}),
    "many-heads": ([4, 2], None, {"kv_heads": 1, "group": 16, "sinks": SINKS, "head_dim": 8}),
}


@pytest.mark.few("window-paged", "cap-sinks-dense", "many-heads-paged", "encoder-*", "empty-*")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CASES)
def test_reference_agrees_with_float64(name: str, form: str) -> None:
    q_lens, kv_lens, changes = CASES[name]
    case = make_case(q_lens, kv_lens, **{"head_dim": 16, "page_size": 4} | changes)
    (out, lse), (true_out, true_lse) = run(case, form), oracle(case)
    np.testing.assert_allclose(out, true_out, rtol=0, atol=2e-6)
    np.testing.assert_allclose(lse, true_lse, rtol=1e-6, atol=2e-6)
    assert (out[~np.isfinite(true_lse)] == 0).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision(dtype: Any, form: str) -> None:
    case = make_case([9, 4], [20, 4], head_dim=16, dtype=dtype)
    (out, lse), (true_out, true_lse) = run(case, form), oracle(case)
    np.testing.assert_allclose(out.astype(np.float64), true_out, rtol=0, atol=2 * float(jnp.finfo(dtype).eps))
    np.testing.assert_allclose(lse, true_lse, rtol=1e-4, atol=1e-3)


@pytest.mark.few("empty-int8", "chunk-fp8")
@pytest.mark.parametrize("stored", [jnp.float8_e4m3fn, jnp.float8_e5m2, np.int8], ids=["fp8", "e5m2", "int8"])
@pytest.mark.parametrize("name", ["chunk", "empty", "cap-sinks", "alibi-sqrt"])
def test_pages_in_eight_bits(name: str, stored: Any) -> None:
    q_lens, kv_lens, changes = CASES[name]
    case = in_eight_bits(make_case(q_lens, kv_lens, **{"head_dim": 16, "page_size": 4} | changes), stored)
    (out, lse), (true_out, true_lse) = run(case, "paged"), oracle(case)
    np.testing.assert_allclose(out, true_out, rtol=0, atol=4e-6)
    np.testing.assert_allclose(lse, true_lse, rtol=2e-6, atol=2e-6)


def test_one_scale_for_all_heads_and_none() -> None:
    case = in_eight_bits(make_case([5, 3], [9, 3], head_dim=16), jnp.float8_e4m3fn)
    call = functools.partial(ragged_paged_attention, *case.paged())
    np.testing.assert_array_equal(
        call(k_scale=0.5, v_scale=2.0), call(k_scale=jnp.full(2, 0.5), v_scale=jnp.full(2, 2.0))
    )
    np.testing.assert_array_equal(call(), call(k_scale=1.0, v_scale=1.0))


def test_scales_that_do_not_fit_are_named() -> None:
    plain = make_case([5, 2], head_dim=16)
    call = inspect.unwrap(ragged_paged_attention)  # in test runs a shape checker around it would speak first
    with pytest.raises(ValueError, match="k_scale is for float8 and int8 pages; these are float32"):
        call(*plain.paged(), k_scale=1.0)
    with pytest.raises(ValueError, match=r"int8 pages need v_scale of \(2, 16\), not \(2,\)"):
        call(*in_eight_bits(plain, np.int8).paged(), k_scale=jnp.ones((4, 2, 16)), v_scale=jnp.ones(2))


@pytest.mark.parametrize("stored", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_eight_bits_without_pages_are_refused(stored: Any) -> None:
    """Softmax weights would be rounded to as few bits as the values that they multiply."""
    arrays = dict(zip(("q", "k", "v", "cu_q_lens", "cu_kv_lens"), make_case([5, 2], head_dim=16).dense(), strict=True))
    for name in ("q", "k", "v"):
        with pytest.raises(
            ValueError, match=f"{name} must be bfloat16, float16 or float32, not float8.*multiply it with its scale"
        ):
            ragged_attention(**arrays | {name: arrays[name].astype(stored)})
    pages = make_case([5, 2], head_dim=16).paged()
    with pytest.raises(ValueError, match=r"q must be .* only pages may have eight bits"):
        ragged_paged_attention(pages[0].astype(stored), *pages[1:])


def test_keys_default_to_the_queries() -> None:
    case = make_case([5, 2], padding=(3, 3), head_dim=16)
    given = ragged_attention(*case.dense()[:4], implementation="xla")
    np.testing.assert_array_equal(np.asarray(given), run(case, "dense")[0])


def test_a_sequence_does_not_notice_its_neighbours() -> None:
    """A prompt gives in a batch what it gives alone, to rounding."""
    case = make_case([7, 4, 6], [9, 4, 11], head_dim=16, padding=(0, 0))
    rows, keys = slice(7, 11), slice(9, 13)
    lens = np.array([0, 4], np.int32)
    alone = dataclasses.replace(case, q=case.q[rows], k=case.k[keys], v=case.v[keys], cu_q_lens=lens, cu_kv_lens=lens)
    for whole, one in zip(run(case, "dense"), run(alone, "dense"), strict=True):
        np.testing.assert_allclose(whole[rows], one, rtol=0, atol=1e-6)


def test_traced_lengths_compile_once() -> None:
    function = jax.jit(lambda *arrays: ragged_attention(*arrays, implementation="xla"))
    for lens in ([7, 5], [1, 11], [12, 0]):
        case = make_case(lens, head_dim=16, garbage=0.0)
        np.testing.assert_allclose(function(*case.dense()), oracle(case)[0], rtol=0, atol=2e-6)
    assert function._cache_size() == 1


def test_shapes_that_disagree_are_named() -> None:
    case = make_case([5, 2], head_dim=16)
    q, k, v, cu_q, cu_kv = case.dense()
    pages = case.paged()
    with pytest.raises(ValueError, match="12 keys for 10 queries"):
        ragged_attention(q, k, v, cu_q)
    with pytest.raises(ValueError, match="do not fit keys of 2 heads x 16"):
        ragged_attention(q[:, :3], k, v, cu_q, cu_kv)
    with pytest.raises(ValueError, match="B at least 1"):
        ragged_attention(q, k, v, cu_q[:1], cu_kv[:1])
    with pytest.raises(ValueError, match="must start with 2 sequences"):
        ragged_paged_attention(*pages[:4], pages[4][:1], pages[5][:1])
    with pytest.raises(NoImplementationError, match="no implementation named"):
        ragged_attention(q, k, v, cu_q, cu_kv, implementation="cuda")
