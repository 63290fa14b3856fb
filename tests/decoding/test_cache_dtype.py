"""The shipped pair with its target's pages in eight bits, on scales found on Python text."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.attention.dense import masked_attention
from dflash_jax.attention.paged import PagedAttend
from dflash_jax.cache import CacheScales, check_cache_dtype, layer_specs, make_pages, page_bytes
from dflash_jax.checkpoints.cache_scales import read_scales
from dflash_jax.checkpoints.calibration import calibrate
from dflash_jax.config import Qwen3Config
from dflash_jax.errors import ParameterError
from dflash_jax.models import bind, family_named, init_params
from dflash_jax.models.presets import DEEPSEEK_TARGETS
from dflash_jax.options import LoadOptions
from dflash_jax.quantization.kv_formats import without_layers

from ..random_pair import target_config

TEXTS = [
    "import numpy as np\n\n\ndef normalise(x):\n    return x / x.sum()\n",
    "class Stack:\n    def __init__(self):\n",
]
OPTIONS = {"dtype": "float32", "max_batch": 1, "max_model_len": 128, "page_size": 16}


@pytest.mark.few
def test_the_shipped_pair_with_pages_in_float8() -> None:
    """Drafting changes no token; the target's pages take a quarter of float32's, the drafter's stay."""
    model = dj.load(cache_dtype="fp8", calibration=TEXTS, **OPTIONS)
    target, draft = model.engine.take_pools()
    assert {pool.dtype for pool in (*target.k, *target.v)} == {jnp.dtype(jnp.float8_e4m3fn)}
    assert {pool.dtype for pool in (*draft.k, *draft.v)} == {jnp.dtype(jnp.float32)}
    for scale in (*target.k_scale, *target.v_scale):
        assert scale.shape == (model.target.num_kv_heads,)
        assert (np.log2(scale) % 1 == 0).all()
        assert (np.asarray(scale) < 1).all()  # nothing in this model's cache comes near 200
    prompts, params = ["def test_", "class Stack("], dj.SamplingParams(max_tokens=32)
    drafted, plain = (dj.generate(model, prompts, params, draft=draft) for draft in (True, False))
    assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]
    assert max(length for out in drafted for length in out.acceptance_lengths) > 3


@pytest.mark.few  # of a random pair, beside a layer in float32, they run
def test_the_shipped_pair_with_pages_in_int8(tmp_path) -> None:
    """A scale of every key beside the pages, one of every channel for values; pages found again bring their keys' scales along."""
    model = dj.load(cache_dtype="int8", calibration=TEXTS, **OPTIONS)
    model.save_cache_scales(tmp_path / "scales.json")
    again = read_scales(tmp_path / "scales.json", model.target, "int8")
    assert all((ours == theirs).all() for ours, theirs in zip(again.v, model.engine.cache_scales.v, strict=True))
    for edit, message in (
        (("int8", "fp8"), "has scales for cache_dtype='fp8', asked for is 'int8'"),
        (('"v": [[[', '"v": [[[0.0, '), "no scales|shapes"),
        (('{"', "{"), "holds no scales as save_cache_scales writes them"),
    ):
        (tmp_path / "wrong.json").write_text((tmp_path / "scales.json").read_text().replace(*edit))
        with pytest.raises(ParameterError, match=message):
            read_scales(tmp_path / "wrong.json", model.target, "int8")
    target, draft = model.engine.take_pools()
    heads, dim = model.target.num_kv_heads, model.target.head_dim
    assert {pool.dtype for pool in (*target.k, *target.v)} == {jnp.dtype(jnp.int8)}
    assert {pool.dtype for pool in (*draft.k, *draft.v)} == {jnp.dtype(jnp.float32)}
    assert {scale.shape for scale in target.k_scale} == {(model.engine.num_pages, heads, 16)}
    assert {scale.shape for scale in target.v_scale} == {(heads, dim)}
    kept = sum(leaf.nbytes for leaf in (*target.k, *target.v, *target.k_scale))
    assert kept == model.engine.num_pages * page_bytes(model.target, 16, model.engine.dtype, cache_dtype="int8")
    prompts, params = ["def test_", *TEXTS], dj.SamplingParams(max_tokens=32)
    drafted, plain = (dj.generate(model, prompts, params, draft=draft) for draft in (True, False))
    assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]
    assert len(plain[1].prompt_token_ids) > 16  # a page at least is found when it comes again
    assert [dj.generate(model, prompt, params).token_ids for prompt in prompts] == [out.token_ids for out in plain]
    assert max(length for out in drafted for length in out.acceptance_lengths) > 3
    whole = dj.generate(dj.load(**OPTIONS), prompts, params)
    same = [a == b for x, y in zip(plain, whole, strict=True) for a, b in zip(x.token_ids, y.token_ids, strict=False)]
    assert np.mean(same) > 0.5  # quantized text may differ, but it is no noise


def test_int8_pages_are_read_as_they_are_kept() -> None:
    """Against float32 attention to what int8 stands for, tokens coming in two parts: the first ones' scales are still there."""
    heads, cut, total = (2, 8), 13, 20
    config = Qwen3Config(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
        windows=(None,) * 2,
    )  # fmt: skip
    params = init_params(family_named("qwen3").parameters(config), jax.random.key(0))
    qkv = jnp.asarray(np.random.default_rng(0).standard_normal((1, total, 64)), jnp.float32)
    v_scale = (
        np.random.default_rng(1).uniform(0.01, 0.05, heads).astype(np.float32)
    )  # so small that some values are cut
    pages = make_pages(config, 4, 8, jnp.dtype(jnp.float32), cache_dtype="int8", scales=CacheScales((), (v_scale,) * 2))

    @functools.partial(jax.jit, static_argnames=("start", "stop"))
    def part(params, pages, start, stop):
        model, positions = bind(config, params), jnp.arange(start, stop, dtype=jnp.int32)[None]
        attend = PagedAttend(jnp.array([[2, 0, 3]], jnp.int32), positions, jnp.array([stop - start], jnp.int32), 8)
        out, pages = attend(model.layers[1].attn, qkv[:, start:stop], model.rotary(positions), pages)
        return out, pages, model.layers[1].attn.heads(qkv[:, start:stop], model.rotary(positions))

    outs, made = [], []
    for start, stop in ((0, cut), (cut, total)):
        out, pages, own = part(params, pages, start, stop)
        outs, made = [*outs, out], [*made, own]
    q, k, v = (np.concatenate(parts, axis=1) for parts in zip(*made, strict=True))
    k_scale = np.abs(k).max(axis=-1, keepdims=True) / 127
    read = np.round(k / k_scale) * k_scale, np.clip(np.round(v / v_scale), -127, 127) * v_scale
    true = masked_attention(*map(jnp.asarray, (q, *read)), jnp.tril(jnp.ones((1, total, total), bool)), 8**-0.5)
    np.testing.assert_allclose(np.concatenate(outs, axis=1), true, rtol=0, atol=2e-5)
    assert (np.abs(v / v_scale) > 127).any()
    kept = np.asarray(pages.k_scale[1])[[2, 0, 3]].transpose(0, 2, 1).reshape(-1, 2)
    np.testing.assert_allclose(kept[:total], k_scale[0, :, :, 0], rtol=1e-6)
    assert not np.asarray(pages.k_scale[0]).any()


def test_what_the_shipped_pair_cannot_have() -> None:
    with pytest.raises(ParameterError, match="needs latent rows"):
        dj.load(cache_dtype="fp8_packed", **OPTIONS)
    with pytest.raises(ParameterError, match='"int8" needs calibration: texts like those to be served'):
        dj.load(cache_dtype="int8", **OPTIONS)
    with pytest.raises(ParameterError, match='calibration finds scales for cache_dtype "fp8" and "int8", not for None'):
        dj.load(calibration=TEXTS, **OPTIONS)


@pytest.mark.parametrize("wanted", ["int4", ["fp8", None, "fp8"], {"k": "int8"}], ids=str)
def test_no_layer_and_no_side_is_left_out(wanted) -> None:
    # The function itself: in test runs a shape checker around it would speak first.
    with pytest.raises(
        ParameterError,
        match='must be None, "auto", "fp8", "fp8_e5m2", "int8", "int8_keys" or "fp8_packed", one for keys and values of all layers',
    ):
        inspect.unwrap(check_cache_dtype)(target_config(), wanted)


@pytest.mark.few
def test_pages_in_float8_e5m2(make_pair, make_prompts) -> None:
    """Under vLLM's name, on scales of 1, for target and drafter: text is that of plain decoding."""
    assert LoadOptions(cache_dtype="fp8_e5m2", draft_cache_dtype="fp8_e5m2").cache_dtype == "fp8_e5m2"
    pair = make_pair(cache_dtype="fp8_e5m2", draft_cache_dtype="fp8_e5m2")
    for pages in pair.engine.take_pools():
        assert {str(pool.dtype) for pool in (*pages.k, *pages.v)} == {"float8_e5m2"}
        assert all((scale == 1).all() for scale in (*pages.k_scale, *pages.v_scale))
    assert page_bytes(pair.target, 16, jnp.dtype(jnp.float32), cache_dtype="fp8_e5m2") * 4 == page_bytes(
        pair.target, 16, jnp.dtype(jnp.float32)
    )
    prompts, params = make_prompts((30, 7)), dj.SamplingParams(max_tokens=12)
    assert pair.run(prompts, params)[0] == pair.run(prompts, params, draft=False)[0]
    with pytest.raises(ParameterError, match="calibration finds scales for"):
        LoadOptions(cache_dtype="fp8_e5m2", calibration=TEXTS)


@pytest.mark.few
def test_layers_left_out_and_a_drafter_in_float8(make_pair, make_prompts) -> None:
    """Every second layer in int8 beside one in float32, the drafter's in float8: text is that of plain decoding."""
    target = target_config(windows=(64, None))
    kept = without_layers(target, "int8", ["sliding_window"])
    assert kept == (None, "int8")
    v_scale = (np.full((1, 16), 0.05, np.float32),) * 2
    engine = {"cache_dtype": kept, "cache_scales": CacheScales((), v_scale), "draft_cache_dtype": "fp8"}
    pair = make_pair(target=target, **engine)
    ours, theirs = pair.engine.take_pools()
    assert [str(pool.dtype) for pool in (*ours.k, *ours.v, *theirs.k)] == ["float32", "int8"] * 2 + ["float8_e4m3fn"]
    assert ours.k_scale[0] is None
    assert (
        sum(leaf.nbytes for leaf in jax.tree.leaves((ours.k, ours.v, ours.k_scale, theirs.k, theirs.v)))
        == pair.engine.pool_bytes
    )
    prompts, params = make_prompts((30, 7)), dj.SamplingParams(max_tokens=12)
    assert pair.run(prompts, params)[0] == pair.run(prompts, params, draft=False)[0]


@pytest.mark.few("int8")
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_scales_from_the_first_traffic(make_pair, make_prompts, kind) -> None:
    """They are what calibration finds on the first prompts, and texts those of an engine that had them from the beginning."""
    pair, prompts, params = (
        make_pair(cache_dtype=kind, scales_from_traffic=True),
        make_prompts((30, 7)),
        dj.SamplingParams(max_tokens=12),
    )
    pair.engine.take_pools()  # warming up makes pools before anybody comes
    found = pair.run(prompts, params)[0]
    scales = pair.engine.cache_scales
    expected = calibrate(pair.target, pair.engine.weights["target"], prompts, cache_dtype=kind)
    assert all(map(np.array_equal, (*scales.k, *scales.v), (*expected.k, *expected.v)))
    assert not all((scale == 1).all() for scale in (*scales.k, *scales.v))
    pair.run(make_prompts((50,), seed=4), params)  # what comes later changes nothing
    assert pair.engine.cache_scales is scales
    assert make_pair(cache_dtype=kind, cache_scales=expected).run(prompts, params)[0] == found


def test_layers_are_named_as_in_vllm() -> None:
    target = target_config(windows=(64, None))
    assert without_layers(target, "fp8", ()) == "fp8"
    assert without_layers(target, "fp8", [1]) == without_layers(target, "fp8", ["full_attention"]) == ("fp8", None)
    assert LoadOptions(cache_dtype="fp8_e4m3", cache_dtype_skip_layers=["0"]).cache_dtype == "fp8"
    assert LoadOptions(draft_cache_dtype="auto").draft_cache_dtype is None
    with pytest.raises(ParameterError, match="names 7, which no layer with pages is: these are 0 to 1 of 2"):
        without_layers(target, "fp8", [7])
    with pytest.raises(ParameterError, match="leaves no layer of 2"):
        without_layers(target, "fp8", [0, "1"])
    for wrong in (
        {"cache_dtype_skip_layers": [0]},
        {"cache_dtype": "fp8", "cache_dtype_skip_layers": "0"},
        {"draft_cache_dtype": "int8"},
    ):
        with pytest.raises(ParameterError, match=r"cache_dtype"):
            LoadOptions(**wrong)


def test_keys_in_int8_beside_values_as_they_are(make_pair, make_prompts) -> None:
    """No calibration: each key brings its scale. Text is that of plain decoding, pages found again bring their scales along."""
    kind = jnp.dtype(jnp.float32)
    pair = make_pair(cache_dtype="int8_keys")
    pages, _ = pair.engine.take_pools()
    assert [str(pool.dtype) for pool in (*pages.k, *pages.v)] == ["int8"] * 2 + ["float32"] * 2
    assert pages.v_scale == ()
    kept = sum(leaf.nbytes for leaf in (*pages.k, *pages.v, *pages.k_scale))
    assert kept == pair.engine.num_pages * page_bytes(pair.target, 16, kind, cache_dtype="int8_keys")
    prompts, params = make_prompts((40, 7)), dj.SamplingParams(max_tokens=12)
    plain = pair.run(prompts, params, draft=False)[0]
    assert pair.run(prompts, params)[0] == plain
    assert [pair.run([prompt], params)[0][0] for prompt in prompts] == plain
    with pytest.raises(ParameterError, match='"int8_keys" is for keys and values of heads'):
        check_cache_dtype(DEEPSEEK_TARGETS["DeepSeek-V2-Lite"], "int8_keys")
    assert LoadOptions(cache_dtype="int8_keys").cache_dtype == "int8_keys"


class OtherValues(Qwen3Config):
    """Keys of 16 entries, values of 24."""

    @property
    def value_dims(self) -> tuple[int, ...]:
        return (24,) * self.cached_layers


@pytest.mark.parametrize(("kept", "entry"), [(None, (4, 4)), ("fp8", (1, 1)), ("int8", (1, 1)), ("int8_keys", (1, 4))])
def test_pools_of_values_of_another_head_dim(kept, entry) -> None:
    """Their shapes, scales and bytes."""
    base, kind = target_config(), jnp.dtype(jnp.float32)
    config = OtherValues(**{field.name: getattr(base, field.name) for field in dataclasses.fields(base)})
    pages = make_pages(config, 3, 8, kind, cache_dtype=kept)
    assert {pool.shape for pool in pages.k} == {(3, 1, 8, 16)}
    assert {pool.shape for pool in pages.v} == {(3, 1, 8, 24)}
    if kept == "int8":
        assert {scale.shape for scale in pages.v_scale} == {(1, 24)}
    scales = 4 if kept in ("int8", "int8_keys") else 0
    of_token = 2 * (16 * entry[0] + 24 * entry[1] + scales)
    assert page_bytes(config, 8, kind, cache_dtype=kept) == 8 * of_token
    assert sum(spec.entries for spec in layer_specs(config, kept)) == 2 * 40
