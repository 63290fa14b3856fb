"""Attention over pools kept in eight bits: it sees exactly what the pool stands for, in both forms and with any chunks.

The oracle attends in float64 to the rows as they read back, so nothing here is about how good eight bits are. Known failures: NaN
codes and NaN scales in unused rows, padding with garbage, an all-zero token, scales from zeros, padding or infinite numbers, chunk
invariance, order of requests.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from dflash_kernels import latent_decode, latent_encode

from dflash_jax.attention.dense import dense_attend, masked_attention
from dflash_jax.attention.mla import LatentForm
from dflash_jax.attention.paged import PagedAttend
from dflash_jax.cache import CacheScales, Pages, check_cache_dtype, layer_specs, make_pages, page_bytes
from dflash_jax.checkpoints.calibration import Observer, calibrate
from dflash_jax.config import Qwen3Config
from dflash_jax.errors import ParameterError
from dflash_jax.models import bind, family_named, init_params
from dflash_jax.models.presets import DEEPSEEK_TARGETS, TARGETS
from dflash_jax.quantization.kv_formats import scale_for

from .latent_layer import Batch, make_batch

RANK, SCALE = 128, 0.125
CONTEXT, QUERIES = [0, 8, 17, 30, 0, 5], [5, 6, 1, 3, 6, 0]
KINDS = pytest.mark.parametrize("kind", [jnp.float8_e4m3fn, jnp.uint8], ids=["fp8", "packed"])
FORMS = pytest.mark.parametrize("form", [None, LatentForm(0, 24)], ids=["absorbed", "chunked"])


def encode(latents: np.ndarray, kind) -> np.ndarray:
    return np.asarray(latent_encode(jnp.asarray(latents), kind, kv_lora_rank=RANK, scale=jnp.float32(SCALE)))


def batch_in(kind, garbage: int = 0xFF, context=CONTEXT, queries=QUERIES, **options) -> Batch:
    """A batch whose pool holds encoded rows, every byte of the unused ones `garbage`, and whose latents are what those read as."""
    batch = make_batch(context, queries, rank=RANK, garbage=0.0, **options)
    stored = encode(batch.latents, kind)
    width = stored.shape[-1]
    pages = np.full((*batch.pages.shape[:3], width * stored.itemsize), garbage, np.uint8).view(stored.dtype)
    page_size = pages.shape[2]
    for row, length in enumerate(batch.context_lens):
        for s in range(length):
            pages[batch.page_table[row, s // page_size], 0, s % page_size] = stored[row, s]
    read = latent_decode(jnp.asarray(stored), jnp.float32, kv_lora_rank=RANK, scale=jnp.float32(SCALE))
    return dataclasses.replace(batch, pages=pages, latents=np.array(read))


@functools.partial(jax.jit, static_argnames="form")
def attend_latent(layer, q_nope, q_pe, latents, pages, table, context_lens, q_lens, *, form):
    positions = context_lens[:, None] + jnp.arange(q_nope.shape[1])
    attend = PagedAttend(table, positions, q_lens, pages.page_size, **({} if form is None else {"form": form}))
    kv_c, k_pe = jnp.split(latents, [RANK], axis=-1)
    return attend.latent_parts(layer, q_nope, q_pe, kv_c, k_pe, pages)


def run(batch: Batch, t: int, form: LatentForm | None, dtype=np.float32) -> tuple[np.ndarray, Pages]:
    new = (batch.new(array, t).astype(dtype) for array in (batch.q_nope, batch.q_pe, batch.latents))
    scales = () if batch.pages.dtype == np.uint8 else (jnp.float32(SCALE),)
    pages = Pages((jnp.asarray(batch.pages),), (), scales)
    layer = jax.tree.map(lambda w: w.astype(dtype), batch.layer)
    out, pages = attend_latent(layer, *new, pages, batch.page_table, batch.context_lens, batch.q_lens, form=form)
    return np.asarray(out), pages


@pytest.mark.few("absorbed-packed", "chunked-fp8")
@KINDS
@FORMS
def test_every_form_sees_what_the_pool_stands_for(kind, form) -> None:
    """Packed rows are exact again under their own scale only where the largest number lies at 448, so new rows may round anew."""
    batch = batch_in(kind)
    out, pages = run(batch, 6, form)
    rounded = np.asarray(
        latent_decode(
            jnp.asarray(encode(batch.latents, kind)), jnp.float32, kv_lora_rank=RANK, scale=jnp.float32(SCALE)
        )
    )
    fresh = np.arange(batch.latents.shape[1]) >= batch.context_lens[:, None]
    batch.latents = np.where(fresh[..., None], rounded, batch.latents)
    np.testing.assert_allclose(out, batch.oracle(6), rtol=0, atol=2e-5)
    assert [scale.shape for scale in pages.k_scale] == ([()] if kind == jnp.float8_e4m3fn else [])


@KINDS
def test_rows_are_written_encoded_and_nothing_else_changed(kind) -> None:
    batch = batch_in(kind)
    expected, stored = batch.pages.copy(), encode(batch.latents, kind)
    for row, (start, count) in enumerate(zip(CONTEXT, QUERIES, strict=True)):
        for s in range(start, start + count):
            expected[batch.page_table[row, s // 4], 0, s % 4] = stored[row, s]
    for form in (None, LatentForm(0, 24)):
        _, pages = run(batch, 6, form)
        assert np.asarray(pages.k[0]).tobytes() == expected.tobytes()


@KINDS
@FORMS
def test_nothing_unused_is_read(kind, form) -> None:
    """0xff is NaN as a code, as a scale and as a rotated number; 0x7f NaN as a code."""
    expected, _ = run(batch_in(kind, garbage=0), 6, form)
    assert np.isfinite(expected).all()
    for garbage in (0xFF, 0x7F):
        np.testing.assert_array_equal(run(batch_in(kind, garbage=garbage), 6, form)[0], expected)


@KINDS
def test_order_of_requests_does_not_matter(kind) -> None:
    batch, order = batch_in(kind), [3, 0, 5, 2, 4, 1]
    for form in (None, LatentForm(0, 24)):
        moved, there = run(batch.rows(order), 6, form)[0], run(batch, 6, form)[0][order]
        # Not the same bits on every processor: where a row lies decides which instructions multiply it.
        np.testing.assert_allclose(moved, there, rtol=0, atol=2e-6)


@pytest.mark.few("fp8")
@KINDS
def test_an_all_zero_token(kind) -> None:
    batch = batch_in(kind, context=[9, 4], queries=[3, 2])
    batch.latents[0, 3] = batch.latents[0, 10] = batch.latents[1, 4] = 0
    batch.pages[batch.page_table[0, 0], 0, 3] = encode(batch.latents[0, 3], kind)
    for form in (None, LatentForm(0, 8)):
        out, pages = run(batch, 3, form)
        read = latent_decode(pages.k[0], jnp.float32, kv_lora_rank=RANK, scale=jnp.float32(SCALE))
        assert not np.asarray(read)[batch.page_table[0, 0], 0, 3].any()
        assert not np.asarray(read)[batch.page_table[0, 10 // 4], 0, 10 % 4].any()
        assert np.isfinite(out).all()


@KINDS
def test_half_precision(kind) -> None:
    batch = batch_in(kind)
    true = batch.oracle(6)
    out = run(batch, 6, LatentForm(0, 24), ml_dtypes.bfloat16)[0].astype(np.float64)
    assert np.abs(out - true).max() < 0.05 * np.abs(true).max()


# Pools of whole models, and the scales they are kept on.

GQA = Qwen3Config(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    windows=(None,) * 2,
)
MLA = dataclasses.replace(
    DEEPSEEK_TARGETS["DeepSeek-V3"], vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, num_kv_heads=2,
    q_lora_rank=None, kv_lora_rank=128, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, head_dim=12, windows=(None,) * 2,
    num_dense_layers=2,
)  # fmt: skip


def params_of(config):
    family = "qwen3" if config is GQA else "deepseek"
    return init_params(family_named(family).parameters(config), jax.random.key(0))


def test_bytes_of_a_page() -> None:
    """DeepSeek-V3: 576 numbers a token and layer, in 1152, 576 or 656 bytes."""
    config, kind = DEEPSEEK_TARGETS["DeepSeek-V3"], jnp.dtype(jnp.bfloat16)
    sizes = [page_bytes(config, 64, kind, cache_dtype=cache_dtype) for cache_dtype in (None, "fp8", "fp8_packed")]
    assert sizes == [61 * 64 * width for width in (1152, 576, 656)]
    assert page_bytes(TARGETS["Qwen3-4B"], 64, kind, cache_dtype="fp8") * 2 == page_bytes(TARGETS["Qwen3-4B"], 64, kind)
    assert layer_specs(config, "fp8_packed")[0].shape(5, 64) == (5, 1, 64, 656)
    for cache_dtype in ("fp8", "fp8_packed"):
        pages = make_pages(MLA, 3, 16, kind, cache_dtype=cache_dtype)
        assert sum(pool.nbytes for pool in pages.k) == 3 * page_bytes(MLA, 16, kind, cache_dtype=cache_dtype)
        assert len(pages.k_scale) == (2 if cache_dtype == "fp8" else 0)


def test_what_cannot_be_kept_so() -> None:
    check_cache_dtype(GQA, "fp8")
    check_cache_dtype(MLA, "fp8_packed")
    with pytest.raises(ParameterError, match="this target has keys and values of heads"):
        check_cache_dtype(GQA, "fp8_packed")
    with pytest.raises(ParameterError, match="this target has kv_lora_rank 100"):
        check_cache_dtype(dataclasses.replace(MLA, kv_lora_rank=100), "fp8_packed")
    with pytest.raises(ParameterError, match="got 'int4'"):
        check_cache_dtype(GQA, "int4")
    with pytest.raises(ParameterError, match='"int8" is for keys and values of heads'):
        check_cache_dtype(MLA, "int8")
    with pytest.raises(ParameterError, match='"fp8_e5m2" is for keys and values of heads'):
        check_cache_dtype(MLA, "fp8_e5m2")


@pytest.mark.parametrize(
    ("name", "kept"), [("fp8", ml_dtypes.float8_e4m3fn), ("fp8_e5m2", ml_dtypes.float8_e5m2)], ids=["fp8", "e5m2"]
)
def test_heads_are_read_as_they_are_kept(name, kept) -> None:
    """Grouped-query attention over float8 pools, a scale for each head, against float32 attention to what the pools stand for."""
    qkv = jnp.asarray(np.random.default_rng(0).standard_normal((1, 20, 64)), jnp.float32)
    scales = [np.array(scale, np.float32) for scale in ([0.5, 0.03125], [0.25, 0.0625])]
    chosen = CacheScales((scales[0],) * 2, (scales[1],) * 2)
    pages = make_pages(GQA, 4, 8, jnp.dtype(jnp.float32), cache_dtype=name, scales=chosen)

    @jax.jit
    def both(params, pages):
        model, positions = bind(GQA, params), jnp.arange(20, dtype=jnp.int32)[None]
        layer, rotary = model.layers[1].attn, model.rotary(positions)
        attend = PagedAttend(jnp.array([[2, 0, 3]], jnp.int32), positions, jnp.array([20], jnp.int32), 8)
        return *attend(layer, qkv, rotary, pages), layer.heads(qkv, rotary)

    out, pages, (q, k, v) = both(params_of(GQA), pages)
    read = [
        jnp.asarray((np.asarray(x) / s[:, None]).astype(kept).astype(np.float32) * s[:, None])
        for x, s in zip((k, v), scales, strict=True)
    ]
    true = masked_attention(q, *read, jnp.tril(jnp.ones((1, 20, 20), bool)), 8**-0.5)
    np.testing.assert_allclose(out, true, rtol=0, atol=1e-5)
    assert pages.k[1].dtype == kept
    np.testing.assert_array_equal(pages.k_scale[1], scales[0])


def largest_seen(config, texts) -> list[np.ndarray]:
    """Largest key of each layer and head over the texts one by one, without padding."""

    @jax.jit
    def observe(params, ids):
        observer = Observer(jnp.ones(ids.shape, bool))
        seen = bind(config, params)(ids, jnp.arange(ids.shape[1])[None], observer)[2]
        return [seen[i]["keys"] for i in range(config.num_layers)]

    found = [observe(params_of(config), jnp.array([text])) for text in texts]
    return [np.max([np.asarray(row[i]) for row in found], axis=0) for i in range(config.num_layers)]


@pytest.mark.few("heads")
@pytest.mark.parametrize("config", [GQA, MLA], ids=["heads", "latent"])
def test_scales_are_the_smallest_powers_of_two_that_leave_room(config) -> None:
    texts = [[3, 9, 1, 14, 50], [8, 8]]
    scales = calibrate(config, params_of(config), texts)
    assert len(scales.k) == 2
    assert len(scales.v) == (2 if config is GQA else 0)
    for scale, largest in zip(scales.k, largest_seen(config, texts), strict=True):
        assert scale.dtype == np.float32
        assert scale.shape == ((2,) if config is GQA else ())
        assert (np.log2(scale) % 1 == 0).all()
        assert (largest <= 200 * scale * (1 + 1e-5)).all()
        assert (largest >= 100 * scale * (1 - 1e-5)).all()


def test_padding_is_looked_past() -> None:
    """A short text gets the same scales beside a long one of zeros' tokens whose row ends first: what pads it is never counted."""
    live = jnp.array([[True, True, False], [True, False, False]])
    observer = Observer(live)
    rows = jnp.where(live[..., None, None], 1.5, jnp.array(jnp.nan)) * jnp.ones((2, 3, 2, 4))
    assert observer._largest(rows).tolist() == [1.5, 1.5]
    assert observer._largest(jnp.where(live[..., None, None], rows, 1e30)).tolist() == [1.5, 1.5]
    rows = rows.at[0, 1, 1, 2].set(jnp.nan)
    assert np.isnan(observer._largest(rows)).tolist() == [False, True]


def test_zeros_have_a_scale_and_infinities_have_none() -> None:
    found = scale_for(np.array([0.0, 200.0, 200.1, 1e-30, 3e38]), "x")
    assert found.tolist() == [1.0, 1.0, 2.0, 2.0**-107, 2.0**120]
    for wrong in (np.nan, np.inf):
        with pytest.raises(ValueError, match="keys of layer 3: calibration met a number that is not finite"):
            scale_for(np.array([1.0, wrong]), "keys of layer 3")
    with pytest.raises(ValueError, match="at least one text"):
        calibrate(GQA, params_of(GQA), [[], []])


def test_a_model_of_zeros_gets_scales_of_one() -> None:
    """A dummy forward pass over zeros must not leave a scale of 0 behind, which every later number would be divided by."""
    zeros = jax.tree.map(jnp.zeros_like, params_of(MLA))
    assert [float(scale) for scale in calibrate(MLA, zeros, [[1, 2, 3]]).k] == [1.0, 1.0]


@pytest.mark.few("config1-fp8_packed")
@pytest.mark.parametrize(("config", "cache_dtype"), [(GQA, "fp8"), (MLA, "fp8_packed")])
def test_logits_stay_close_to_the_unquantized_models(config, cache_dtype) -> None:
    """A whole model, prompt in two parts and one token after it: near the dense model, and the same however the prompt is cut."""
    params, ids = params_of(config), np.random.default_rng(1).integers(0, 61, (1, 24)).astype(np.int32)
    scales = calibrate(config, params, ids.tolist()) if cache_dtype == "fp8" else None

    @jax.jit
    def dense(params):
        model = bind(config, params)
        return model.logits(model(jnp.asarray(ids), jnp.arange(24)[None], dense_attend())[0])

    @jax.jit
    def part(params, pages, ids, start):
        model, positions = bind(config, params), start + jnp.arange(ids.shape[1])[None]
        table = jnp.array([[3, 1, 2]], jnp.int32)
        attend = PagedAttend(table, positions, jnp.array([ids.shape[1]]), pages.page_size, form=LatentForm(8, 16))
        hidden, _, pages = model(ids, positions, attend, cache=pages)
        return pages, model.logits(hidden)[0, -1]

    found, true = [], dense(params)
    for cuts in ((0, 16, 24), (0, 8, 24)):  # long parts are expanded, short ones absorbed
        pages = make_pages(config, 4, 8, jnp.dtype(jnp.float32), cache_dtype=cache_dtype, scales=scales)
        for start, stop in itertools.pairwise(cuts):
            pages, logits = part(params, pages, jnp.asarray(ids[:, start:stop]), jnp.int32(start))
        found.append(np.asarray(logits))
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-4)
    assert np.abs(found[0] - true[0, -1]).max() < 0.1 * np.abs(true).max()
