"""Latent attention: absorbed, expanded and chunked give one result, whatever the chunk, the order or the garbage around."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.attention.dense import dense_attend
from dflash_jax.attention.mla import LatentForm, break_even_queries
from dflash_jax.attention.mla_prefill import chunked_prefill
from dflash_jax.attention.paged import PagedAttend
from dflash_jax.cache import Pages

from .latent_layer import Batch, make_batch

EXPANDED = LatentForm(expand_above=0, context_chunk=1 << 20)
CONTEXT, QUERIES = [0, 8, 17, 30, 0, 5], [5, 6, 1, 3, 6, 0]  # chunks of 8: none, C, 2 C + 1, more, none, idle


@functools.partial(jax.jit, static_argnames="form")
def attend_latent(layer, q_nope, q_pe, latents, pages, table, context_lens, q_lens, *, form):
    # As decoding does: an idle row keeps its positions, only q_lens says that it is idle.
    positions = context_lens[:, None] + jnp.arange(q_nope.shape[1])
    options = {} if form is None else {"form": form}
    attend = PagedAttend(table, positions, q_lens, pages.shape[2], **options)
    kv_c, k_pe = jnp.split(latents, [layer.w_uk.shape[-1]], axis=-1)
    return attend.latent_parts(layer, q_nope, q_pe, kv_c, k_pe, Pages((pages,), ()))


def run(batch: Batch, t: int, form: LatentForm | None = None, padding: float = np.nan) -> tuple[np.ndarray, np.ndarray]:
    """Output `[B, t, N, V]` and the pages afterwards; every row past `q_lens` comes in as `padding`."""
    new = (batch.new(array, t, padding) for array in (batch.q_nope, batch.q_pe, batch.latents))
    tables = batch.page_table, batch.context_lens, batch.q_lens
    out, pages = attend_latent(batch.layer, *new, batch.pages, *tables, form=form)
    assert pages.v == ()
    return np.asarray(out), np.asarray(pages.k[0])


@pytest.mark.parametrize("form", [None, EXPANDED, LatentForm(0, 24)], ids=["absorbed", "expanded", "chunked"])
@pytest.mark.parametrize("causal", [True, False])
def test_agrees_with_float64(form: LatentForm | None, causal: bool) -> None:
    batch = make_batch(CONTEXT, QUERIES, causal=causal)
    out, _ = run(batch, 6, form)
    np.testing.assert_allclose(out, batch.oracle(6), rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", [None, EXPANDED], ids=["absorbed", "expanded"])
def test_new_rows_are_in_the_pages_and_nothing_else_changed(form: LatentForm | None) -> None:
    batch = make_batch(CONTEXT, QUERIES)
    _, pages = run(batch, 6, form)
    expected = batch.pages.copy()
    for row, (start, count) in enumerate(zip(CONTEXT, QUERIES, strict=True)):
        for s in range(start, start + count):
            expected[batch.page_table[row, s // 4], 0, s % 4] = batch.latents[row, s]
    np.testing.assert_array_equal(pages, expected)


@pytest.mark.few("0-float64", "1-float32")
@pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("seed", range(2))
def test_absorbed_equals_expanded(seed: int, dtype: type) -> None:
    rng = np.random.default_rng(seed)
    heads, nope, rotated, value, rank = rng.integers(1, 9, 5) * (1, 2, 2, 3, 4)
    context, queries = rng.integers(0, 40, 3), rng.integers(1, 17, 3)
    with jax.enable_x64(dtype == np.float64):
        batch = make_batch(
            context, queries, heads=heads, nope=nope, rotated=rotated, value=value, rank=rank, dtype=dtype, seed=seed,
            page_size=int(rng.integers(1, 17)),
        )  # fmt: skip
        absorbed, expanded, chunked = (run(batch, 16, form)[0] for form in (None, EXPANDED, LatentForm(0, 48)))
    allowed = 1e-10 if dtype == np.float64 else 1e-5
    np.testing.assert_allclose(absorbed, expanded, rtol=0, atol=allowed)
    np.testing.assert_allclose(chunked, expanded, rtol=0, atol=allowed)
    np.testing.assert_allclose(expanded, batch.oracle(16), rtol=0, atol=allowed)


@pytest.mark.parametrize("chunk_pages", [1, 3, 5])
def test_the_chunk_does_not_matter(chunk_pages: int) -> None:
    batch = make_batch([0, 16, 33, 61, 3], [7, 7, 2, 7, 1], seed=2)
    whole, _ = run(batch, 7, EXPANDED)
    out, _ = run(batch, 7, LatentForm(0, 5 * 4 * chunk_pages + 3))
    np.testing.assert_allclose(out, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("page_size", [1, 5, 61, 64])
def test_the_page_size_does_not_matter(page_size: int) -> None:
    batch = make_batch(CONTEXT, QUERIES, page_size=page_size)
    out, _ = run(batch, 6, LatentForm(0, 6 * page_size))
    np.testing.assert_allclose(out, batch.oracle(6), rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", [None, EXPANDED, LatentForm(0, 24)], ids=["absorbed", "expanded", "chunked"])
def test_order_of_requests_does_not_matter(form: LatentForm | None) -> None:
    batch, order = make_batch(CONTEXT, QUERIES, seed=4), [4, 1, 5, 3, 0, 2]
    np.testing.assert_array_equal(run(batch.rows(order), 6, form)[0], run(batch, 6, form)[0][order])


@pytest.mark.parametrize("form", [None, EXPANDED, LatentForm(0, 24)], ids=["absorbed", "expanded", "chunked"])
def test_nothing_unused_is_read(form: LatentForm | None) -> None:
    """Padding rows, slots past each sequence, other pages and table entries: NaN, infinite or plausible, no bit changes."""
    clean = make_batch(CONTEXT, QUERIES, garbage=0.0, seed=5)
    expected, _ = run(clean, 6, form)
    assert np.isfinite(expected).all()
    for row, count in enumerate(QUERIES):
        assert (expected[row, count:] == 0).all()
    for garbage in (np.nan, np.inf, -np.inf, 1.0):
        out, _ = run(make_batch(CONTEXT, QUERIES, garbage=garbage, seed=5), 6, form, garbage)
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("form", [None, LatentForm(0, 8)], ids=["absorbed", "chunked"])
def test_very_negative_logits(form: LatentForm | None) -> None:
    """A constant of -1e5 on every logit cancels: no finite number stands for "masked". Exact in float32 by construction."""
    batch = make_batch([13, 0], [3, 3], rotated=6, seed=6)
    batch.layer = dataclasses.replace(batch.layer, scale=0.125, w_uk=jnp.round(batch.layer.w_uk * 4))
    for name in ("q_nope", "q_pe", "latents", "pages"):
        setattr(batch, name, np.round(getattr(batch, name)))
    batch.q_pe[..., -1], batch.latents[..., -1] = 8, -(2.0**17)
    batch.pages[..., -1] = np.where(np.isnan(batch.pages[..., -1]), np.nan, -(2.0**17))
    out, _ = run(batch, 3, form)
    np.testing.assert_allclose(out, batch.oracle(3), rtol=0, atol=2e-2 if form else 1e-5)


def test_many_chunks_keep_their_accuracy() -> None:
    batch = make_batch([600], [4], width=200, seed=7)
    out, _ = run(batch, 4, LatentForm(0, 4))  # 150 merges
    np.testing.assert_allclose(out, batch.oracle(4), rtol=0, atol=1e-5)


def test_half_precision_chunks_agree_with_one_pass() -> None:
    """Partial results are kept in float32: chunking must not cost bfloat16 more than its own rounding."""
    exact = make_batch([120], [6], seed=8, heads=4)
    true = exact.oracle(6)
    half = make_batch([120], [6], seed=8, heads=4, dtype=jnp.bfloat16)
    errors = [np.abs(run(half, 6, LatentForm(0, chunk))[0].astype(np.float64) - true).max() for chunk in (4, 1 << 20)]
    assert errors[0] <= 1.5 * errors[1] + 2**-8


def test_an_all_zero_token() -> None:
    batch = make_batch([9, 4], [3, 2], seed=9)
    batch.latents[0, 3] = batch.latents[1, 4] = 0
    batch.pages[batch.page_table[0, 0], 0, 3] = 0
    for form in (None, LatentForm(0, 8)):
        np.testing.assert_allclose(run(batch, 3, form)[0], batch.oracle(3), rtol=0, atol=1e-5)


def test_dense_attention_agrees_with_float64() -> None:
    batch = make_batch([0, 0], [11, 11])
    rank = batch.latents.shape[-1] - batch.rotated
    arrays = batch.q_nope, batch.q_pe, batch.latents[..., :rank], batch.latents[..., rank:]
    out = dense_attend().latent_parts(batch.layer, *map(jnp.asarray, arrays))
    np.testing.assert_allclose(out, batch.oracle(11), rtol=0, atol=1e-5)
    mask = jnp.tril(jnp.ones((2, 11, 11), bool))
    np.testing.assert_array_equal(out, dense_attend(mask).latent_parts(batch.layer, *map(jnp.asarray, arrays)))


def test_the_form_follows_the_number_of_queries() -> None:
    sizes = {"heads": 64, "rank": 512, "nope": 128, "value": 128}
    assert math.ceil(break_even_queries(512, 128, 128)) == 171
    assert break_even_queries(8, 8, 8) == math.inf
    assert not LatentForm().expands(238, **sizes)
    assert LatentForm().expands(239, **sizes)
    assert not LatentForm().expands(384, **(sizes | {"heads": 16}))
    assert LatentForm().expands(385, **(sizes | {"heads": 16}))
    assert LatentForm(expand_above=16).expands(17, **sizes)
    assert not LatentForm(expand_above=16).expands(16, **sizes)


def test_the_context_is_expanded_in_bounded_pieces() -> None:
    """No array of the program holds a head's keys for more than the chunk's tokens."""
    batch = make_batch([200], [4], seed=1)
    shapes = batch.new(batch.q_nope, 4), batch.new(batch.q_pe, 4), batch.written()

    def sizes(chunk: int) -> int:
        def call(*arrays):
            return chunked_prefill(batch.layer, *arrays, context_chunk=chunk)

        jaxpr = jax.make_jaxpr(call)(*shapes, batch.page_table, batch.seq_lens, batch.q_lens)
        loop = next(eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "while")
        body = loop.params["body_jaxpr"].jaxpr
        return max(math.prod(out.aval.shape) for eqn in body.eqns for out in eqn.outvars)

    assert sizes(16) == 16 * max(18, 3 * 16)
    assert sizes(64) == 4 * sizes(16)


def test_a_chunk_holds_the_new_tokens_at_least() -> None:
    batch = make_batch([20, 3], [4, 4])
    np.testing.assert_array_equal(run(batch, 4, LatentForm(0, 7))[0], run(batch, 4, LatentForm(0, 8))[0])
