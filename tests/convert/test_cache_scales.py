"""Scales of keys and values in checkpoints: every name, what configurations say of them, both directions of a conversion, texts."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import dflash_jax as dj
from dflash_jax.checkpoints.cache_scales import CONVERTED_SCALES, save_scales
from dflash_jax.checkpoints.converted import open_converted
from dflash_jax.checkpoints.huggingface import inspect, open_checkpoint
from dflash_jax.errors import CheckpointError, ConfigError, ParameterError
from dflash_jax.models import family_of
from dflash_jax.quantization.kv_formats import CacheScales

from .test_deepseek import CONFIG as DEEPSEEK

LAYERS, HEADS = 3, 2
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
COMPRESSED = {
    "config_groups": {}, "format": "dense", "global_compression_ratio": None, "ignore": [], "kv_cache_scheme": SCHEME,
    "quant_method": "compressed-tensors", "quantization_status": "compressed", "sparsity_config": {}, "transform_config": {},
    "version": "0.12.2",
}  # fmt: skip
PROJECTIONS = {
    "group_0": {
        "input_activations": None, "output_activations": SCHEME, "targets": ["re:.*k_proj", "re:.*v_proj"], "weights": None,
    }
}  # fmt: skip
MODELOPT = {
    "quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8", "producer": {"name": "modelopt"},
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}, "config_groups": {}, "ignore": [],
}  # fmt: skip
NESTED = {
    "quant_method": "modelopt", "producer": {"name": "modelopt"},
    "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
}  # fmt: skip
NAMES = {
    "compressed": ("self_attn.k_scale", "self_attn.v_scale"),
    "modules": ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    "modelopt": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "together": ("self_attn.qkv_proj.k_scale", "self_attn.qkv_proj.v_scale"),
    "outputs": ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
}


def scale_tensors(names: tuple[str, ...], shape: tuple[int, ...] = (), dtype=np.float32) -> dict[str, np.ndarray]:
    """A scale that no other layer and side has, in numbers that are no powers of two."""
    draw = np.random.default_rng(5).uniform(0.003, 0.05, (LAYERS, len(names), *shape)).astype(dtype)
    return {
        f"model.layers.{i}.{name}": np.array(draw[i, side]) for i in range(LAYERS) for side, name in enumerate(names)
    }


def write(hf, name, tensors, *, scheme=COMPRESSED, dtype="bfloat16"):
    config = hf.qwen3_config | ({} if scheme is None else {"quantization_config": scheme})
    return hf.write(name, config, hf.tensors(hf.qwen3_config, dtype) | tensors)


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("shape", [(), (1,), (HEADS,), (HEADS, 1, 1)], ids=str)
def test_every_name(hf, names, shape) -> None:
    tensors = scale_tensors(names, shape, np.float32 if shape else ml_dtypes.bfloat16)
    found = open_checkpoint(write(hf, "source", tensors))
    assert found.cache_dtype == "fp8"
    assert not found.notices
    for i in range(LAYERS):
        for side, name in zip((found.cache_scales.k, found.cache_scales.v), names, strict=True):
            expected = tensors[f"model.layers.{i}.{name}"].astype(np.float32).reshape(-1)
            np.testing.assert_array_equal(side[i], np.broadcast_to(expected, (HEADS,)))


def test_one_scale_for_both_sides(hf) -> None:
    tensors = scale_tensors(("self_attn.kv_scale",))
    scales = open_checkpoint(write(hf, "source", tensors, scheme=None)).cache_scales
    for i, (k, v) in enumerate(zip(scales.k, scales.v, strict=True)):
        assert (k == v).all()
        assert (k == tensors[f"model.layers.{i}.self_attn.kv_scale"]).all()


SCHEMES = {
    "compressed": COMPRESSED, "of heads": COMPRESSED | {"kv_cache_scheme": SCHEME | {"strategy": "attn_head"}},
    "older": COMPRESSED | {"config_groups": PROJECTIONS}, "modelopt": MODELOPT, "nested": NESTED,
}  # fmt: skip


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_what_quantizes_nothing_but_the_cache_is_opened(hf, scheme) -> None:
    """The model is that of the file without it."""
    found = open_checkpoint(write(hf, "without", {}, scheme=scheme))
    assert (found.cache_dtype, found.cache_scales) == ("fp8", None)
    plain = family_of(hf.qwen3_config).config(hf.qwen3_config)
    assert found.config == plain


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (COMPRESSED | {"kv_cache_scheme": None}, "weights are quantized .'compressed-tensors'"),
        (MODELOPT | {"quant_algo": "FP8"}, "weights are quantized .'modelopt'"),
        (COMPRESSED | {"weight_block_size": [128, 128]}, "weights are quantized"),
        (COMPRESSED | {"config_groups": {"g": {"targets": ["Linear"], "weights": SCHEME}}}, "weights are quantized"),
        (COMPRESSED | {"config_groups": {"g": {"targets": ["Linear"], "output_activations": SCHEME}}}, "weights are"),
        (COMPRESSED | {"config_groups": [1]}, "weights are quantized"),
        (COMPRESSED | {"kv_cache_scheme": SCHEME | {"type": "int"}}, "keeps keys and values in .*'int'.*not dynamic"),
        (COMPRESSED | {"kv_cache_scheme": SCHEME | {"dynamic": True}}, "not dynamic.*remove quantization_config"),
        (COMPRESSED | {"kv_cache_scheme": SCHEME | {"strategy": "channel"}}, "keeps keys and values in"),
        (COMPRESSED | {"kv_cache_scheme": 8}, "keeps keys and values in 8"),
        (MODELOPT | {"kv_cache_quant_algo": "NVFP4"}, "keeps keys and values in"),
    ],
    ids=str,
)  # fmt: skip
def test_what_says_anything_else_is_refused(hf, scheme, message) -> None:
    with pytest.raises(ConfigError, match=message):
        family_of(hf.qwen3_config).config(hf.qwen3_config | {"quantization_config": scheme})


def changed(change):
    tensors = scale_tensors(NAMES["compressed"])
    change(tensors)
    return tensors


FIRST = "model.layers.0.self_attn.k_scale"
MISTAKES = {
    "nan": (lambda t: t.update({FIRST: np.full(1, np.nan, np.float32)}), "k_scale has a scale that is not a positive number"),
    "zero": (lambda t: t.update({FIRST: np.zeros((), np.float32)}), "not a positive number"),
    "shape": (lambda t: t.update({FIRST: np.ones(3, np.float32)}), r"is float32 \[3\], expected one scale .*, or one for"),
    "square": (lambda t: t.update({FIRST: np.ones((1, 1, 2, 2), np.float32)}), r"\[1, 1, 2, 2\], expected"),
    "integer": (lambda t: t.update({FIRST: np.ones((), np.int32)}), "is int32"),
    "twice": (lambda t: t.update({"model.layers.0.self_attn.attn.k_scale": t[FIRST]}), "second scale of the same layer"),
    "layer": (lambda t: [t.pop(f"model.layers.1.self_attn.{s}_scale") for s in "kv"], "layer 1 has no scales"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_told_with_all_others(hf, change, message) -> None:
    source = write(hf, "source", changed(change) | {"stray": np.ones(1, np.float32)})
    with pytest.raises(CheckpointError, match=message) as told:
        open_checkpoint(source)
    assert "stray" in str(told.value)


def test_scales_that_nothing_reads_are_left_out_by_name(hf) -> None:
    other = {f"model.layers.0.self_attn.{name}": np.ones((), np.float32) for name in ("prob_output_scale", "q_scale")}
    checkpoint, problems = inspect(write(hf, "source", scale_tensors(NAMES["compressed"]) | other))
    assert not problems
    assert checkpoint.notices == [f"{name} is not needed and left out" for name in other]


def test_a_latent_row_has_one_scale(hf) -> None:
    """DeepSeek's: the scale of keys, whatever is said of values; per-head scales are none."""
    config = DEEPSEEK
    tensors = hf.tensors(config)
    scales = {
        f"model.layers.{i}.self_attn.{s}_scale": np.full((), 0.01 * (i + 1), np.float32) for i in range(3) for s in "kv"
    }
    found = open_checkpoint(hf.write("latent", config | {"quantization_config": COMPRESSED}, tensors | scales))
    assert [float(scale) for scale in found.cache_scales.k] == [np.float32(0.01 * i) for i in (1, 2, 3)]
    assert found.cache_scales.v == ()
    assert all(scale.shape == () for scale in found.cache_scales.k)


@pytest.mark.parametrize("shape", [(), (HEADS, 1, 1)], ids=["layer", "heads"])
def test_conversion_keeps_them_in_both_directions(hf, bits, shape) -> None:
    tensors = scale_tensors(NAMES["modelopt"], shape, ml_dtypes.bfloat16)
    source = write(hf, "source", tensors, scheme=MODELOPT)
    assert hf.convert(source, "--output", hf.root / "out") == 0
    first, again = open_checkpoint(source), open_converted(hf.root / "out", hashes=True)
    assert again.cache_dtype == "fp8"
    for ours, theirs in zip(
        (*again.cache_scales.k, *again.cache_scales.v), (*first.cache_scales.k, *first.cache_scales.v), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    assert hf.convert(hf.root / "out", "--reverse", "--output", hf.root / "back") == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (source, hf.root / "back"))
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert (value.dtype, value.shape, bits(value)) == (after[name].dtype, after[name].shape, bits(after[name])), (
            name
        )
    assert (hf.root / "back" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    path = hf.root / "out" / CONVERTED_SCALES
    path.write_text(path.read_text().replace('"k": [[0', '"k": [[x'))
    with pytest.raises(CheckpointError, match=r"cache_scales\.json holds no scales .*convert again"):
        open_converted(hf.root / "out")


@pytest.mark.few
def test_pages_are_kept_on_them(hf, tmp_path) -> None:
    """`auto` keeps pages in float8 on the checkpoint's scales: texts are those of the same model with a file of these scales."""
    tensors = scale_tensors(NAMES["compressed"], (HEADS,))
    source, options = (
        write(hf, "source", tensors, dtype="float32"),
        {"dtype": "float32", "max_batch": 1, "page_size": 16},
    )
    plain = write(hf, "plain", {}, scheme=None, dtype="float32")
    model = dj.load(source, cache_dtype="auto", **options)
    target, _ = model.engine.take_pools()
    for i in range(LAYERS):
        np.testing.assert_array_equal(target.k_scale[i], tensors[f"model.layers.{i}.self_attn.k_scale"])
        np.testing.assert_array_equal(target.v_scale[i], tensors[f"model.layers.{i}.self_attn.v_scale"])
    sides = [[tensors[f"model.layers.{i}.self_attn.{s}_scale"] for i in range(LAYERS)] for s in "kv"]
    save_scales(tmp_path / "scales.json", CacheScales(*map(tuple, sides)), "fp8")
    other = dj.load(plain, cache_dtype="fp8", cache_scales=tmp_path / "scales.json", **options)
    prompt, params = [[5, 9, 2, 44, 17, 3]], dj.SamplingParams(max_tokens=24, ignore_eos=True)
    assert dj.generate(model, prompt, params)[0].token_ids == dj.generate(other, prompt, params)[0].token_ids
    unquantized = dj.load(source, **options)
    assert unquantized.engine.cache_dtype is None
    assert any('cache_dtype="auto"' in notice for notice in unquantized.notices)
    assert dj.load(plain, cache_dtype="auto", **options).engine.cache_dtype is None
    with pytest.raises(ParameterError, match="cache_scales is for cache_dtype"):
        dj.load(plain, cache_dtype="auto", cache_scales="traffic", **options)
    empty = dj.load(write(hf, "unscaled", {}, dtype="float32"), cache_dtype="auto", **options)
    assert empty.engine.cache_dtype == "fp8"
    assert any("no scales of them" in notice for notice in empty.notices)
