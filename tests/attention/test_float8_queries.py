"""Queries of latent attention in float8, over float8 rows: float64 with the rounding applied, in both forms, and through `load`."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.attention.mla import LatentForm
from dflash_jax.attention.paged import PagedAttend
from dflash_jax.cache import Pages, make_pages
from dflash_jax.checkpoints.cache_scales import read_scales, save_scales
from dflash_jax.cli.info import plan
from dflash_jax.errors import ParameterError
from dflash_jax.models.presets import DEEPSEEK_TARGETS, SPARSE_TARGETS
from dflash_jax.quantization.kv_formats import CacheScales, check_query_dtype, default_scales

from ..kernels.test_quantize import E4M3, nearest
from .latent_layer import Batch
from .test_cache_formats import RANK, SCALE, batch_in

Q_SCALE = 2.0**-6


@functools.partial(jax.jit, static_argnames="form")
def attend(layer, q_nope, q_pe, latents, pages, table, context_lens, q_lens, *, form, q_scale):
    positions = context_lens[:, None] + jnp.arange(q_nope.shape[1])
    over = PagedAttend(table, positions, q_lens, pages.shape[2], **({} if form is None else {"form": form}))
    kv_c, k_pe = jnp.split(latents, [RANK], axis=-1)
    held = Pages((pages,), (), (jnp.float32(SCALE),), q_scale=() if q_scale is None else (jnp.float32(q_scale),))
    return over.latent_parts(layer, q_nope, q_pe, kv_c, k_pe, held)[0]


def run(batch: Batch, form: LatentForm | None, q_scale: float | None = Q_SCALE, padding: float = np.nan) -> np.ndarray:
    new = (batch.new(array, 6, padding) for array in (batch.q_nope, batch.q_pe, batch.latents))
    tables = batch.page_table, batch.context_lens, batch.q_lens
    return np.asarray(attend(batch.layer, *new, batch.pages, *tables, form=form, q_scale=q_scale))


def e4m3(x: np.ndarray, scale: float = 1.0) -> np.ndarray:
    return np.sign(x) * E4M3[nearest(x / scale, E4M3)] * scale


def expected(batch: Batch, *, absorbed: bool) -> np.ndarray:
    """`[B, 6, N, V]` in float64: joined queries on their scale, or queries, keys and values of heads as they are."""
    w_uk, w_uv = (np.asarray(w, np.float64) for w in (batch.layer.w_uk, batch.layer.w_uv))
    out = np.zeros((len(batch.q_lens), 6, *w_uv.shape[:2]))
    for row, (start, count) in enumerate(zip(batch.context_lens, batch.q_lens, strict=True)):
        rows = batch.latents[row, : start + count].astype(np.float64)
        for i in range(count):
            q_nope, q_pe = (part[row, start + i].astype(np.float64) for part in (batch.q_nope, batch.q_pe))
            seen = rows[: start + i + 1]
            if absorbed:
                q = e4m3(np.concatenate([np.einsum("np,npr->nr", q_nope, w_uk), q_pe], axis=-1), Q_SCALE)
                scores, values = q @ seen.T, np.einsum("sr,nvr->nsv", seen[:, :RANK], w_uv)
            else:
                k_nope = e4m3(np.einsum("sr,npr->nsp", seen[:, :RANK], w_uk))
                scores = np.einsum("np,nsp->ns", e4m3(q_nope), k_nope) + e4m3(q_pe) @ e4m3(seen[:, RANK:]).T
                values = e4m3(np.einsum("sr,nvr->nsv", seen[:, :RANK], w_uv))
            weights = np.exp((scores - scores.max(1, keepdims=True)) * batch.layer.scale)
            out[row, i] = np.einsum("ns,nsv->nv", weights / weights.sum(1, keepdims=True), values)
    return out


FORMS = pytest.mark.parametrize("form", [None, LatentForm(0, 24)], ids=["absorbed", "chunked"])


@pytest.mark.few("absorbed")
@FORMS
def test_attention_is_that_of_the_rounded_numbers(form: LatentForm | None) -> None:
    """Of float32 queries one in some thousands lies so near a border that it may go to either side."""
    batch = batch_in(jnp.float8_e4m3fn)
    found, true = run(batch, form), expected(batch, absorbed=form is None)
    off = np.abs(found - true)
    assert (off <= 2e-5).mean() > 0.9
    assert off.max() < 0.02
    unrounded = batch.oracle(6)
    # A step of float8 is up to a sixteenth of a number; scores are sums of many such.
    assert 0.002 < np.abs(true - unrounded).max() < 0.3
    assert np.abs(run(batch, form, None) - unrounded).max() < 2e-5


@FORMS
def test_padding_reaches_nothing(form: LatentForm | None) -> None:
    clean = run(batch_in(jnp.float8_e4m3fn, 0), form, padding=0.0)
    for garbage, padding in itertools.product((0xFF, 0x80), (np.nan, np.inf)):
        assert run(batch_in(jnp.float8_e4m3fn, garbage), form, padding=padding).tobytes() == clean.tobytes()


CONFIG = dataclasses.replace(DEEPSEEK_TARGETS["DeepSeek-V3"], num_layers=2, windows=(None,) * 2)


def test_pages_hold_their_scales_and_files_too(tmp_path: Any) -> None:
    make = functools.partial(make_pages, CONFIG, 2, 8, jnp.dtype(jnp.bfloat16))
    found = CacheScales(default_scales(CONFIG).k, (), (np.array(0.5, np.float32), np.array(0.25, np.float32)))
    assert make(cache_dtype="fp8", scales=found).q_scale == ()
    assert [float(one) for one in make(cache_dtype="fp8", float8_queries=True).q_scale if one is not None] == [1, 1]
    pages = make(cache_dtype="fp8", scales=found, float8_queries=True)
    assert [float(one) for one in pages.q_scale if one is not None] == [0.5, 0.25]
    left_out = make(cache_dtype=(None, "fp8"), scales=found, float8_queries=True)
    assert [None if one is None else float(one) for one in left_out.q_scale] == [None, 0.25]
    save_scales(tmp_path / "scales.json", found, "fp8")
    assert read_scales(tmp_path / "scales.json", CONFIG, "fp8") == found
    save_scales(tmp_path / "one.json", dataclasses.replace(found, q=found.q[:1]), "fp8")
    with pytest.raises(ParameterError, match="scales of queries that are not one for each layer"):
        read_scales(tmp_path / "one.json", CONFIG, "fp8")


def test_what_is_refused() -> None:
    check_query_dtype(CONFIG, "fp8")
    with pytest.raises(ParameterError, match="query_dtype='fp8' is for latent attention, this target keeps keys"):
        plan(query_dtype="fp8", cache_dtype="fp8")
    with pytest.raises(ParameterError, match="is for attention to all rows, here an indexer chooses some"):
        check_query_dtype(SPARSE_TARGETS["DeepSeek-V3.2"], "fp8")
