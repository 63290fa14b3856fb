"""NVFP4, MX formats, GPTQ in few bits and bitsandbytes: whole folders as they are published, and what is wrong with one."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dflash_jax.checkpoints import huggingface
from dflash_jax.checkpoints.huggingface import open_checkpoint
from dflash_jax.checkpoints.quantized import dequantized
from dflash_jax.checkpoints.quantized.bitsandbytes import Blocks, Nested
from dflash_jax.checkpoints.quantized.input_first import InputFirst
from dflash_jax.checkpoints.quantized.packed import E2M1, table_of
from dflash_jax.checkpoints.quantized.releases import take_release
from dflash_jax.checkpoints.quantized.scaled import Scaled
from dflash_jax.checkpoints.safetensors import Tensor
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.models.parameters import to_huggingface

from ..quantized_folders import (
    RELEASES,
    auto_round_config,
    compressed,
    drawn_float8,
    e2m1,
    gptq,
    gptq_config,
    is_projection,
    load,
    modelopt,
    nvfp4_of_modelopt,
    put,
    released,
)
from .test_deepseek import BIASES
from .test_deepseek import CONFIG as DEEPSEEK
from .test_float8_releases import MIXTURE, NEXT, STACKED

# Sizes that words of three bits fill.
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 2}
Q = "model.layers.1.self_attn.q_proj"
RELEASED = Path(__file__).parent / "golden" / "released"
type Tensors = dict[str, np.ndarray]


def release(
    hf: Any, kind: str, shards: int = 1, config: dict[str, Any] | None = None, **said: Any
) -> tuple[Path, Tensors]:
    """A folder with projections quantized, and what its tensors stand for."""
    make, about, _ = RELEASES[kind]
    whole = hf.qwen3_config | SIZES if config is None else config
    extra: dict[str, Any] = BIASES if whole["model_type"] == "deepseek_v3" else {}
    if whole["model_type"] == STACKED["model_type"]:
        shapes = {"gate_up_proj": (4, 48, 32), "down_proj": (4, 32, 24)}
        extra = {f"model.layers.{i}.mlp.experts.{name}": np.zeros(one) for i in (0, 1) for name, one in shapes.items()}
    stored, exact = released(hf.tensors(whole, extra=extra), make)
    folder = hf.write(f"target-{len(list(hf.root.iterdir()))}", whole | {"quantization_config": about | said}, {})
    return put(folder, stored, shards), exact


def check_every_number(folder: Path, exact: Tensors, *dtypes: str) -> None:
    checkpoint = open_checkpoint(folder)
    assert checkpoint.dtype == "bfloat16"
    for dtype in dtypes or ("bfloat16", "float32"):
        found = to_huggingface(checkpoint.family.parameters(checkpoint.config), checkpoint.load(dtype))
        assert found.keys() == exact.keys()
        for name, value in found.items():
            np.testing.assert_array_equal(value, exact[name].astype(np.float32).astype(value.dtype), err_msg=name)
            assert value.ndim == 1 or value.dtype == jnp.dtype(dtype)


@pytest.mark.parametrize("name", [path.name for path in sorted(RELEASED.iterdir())])
def test_models_that_other_tools_wrote(name: str) -> None:
    """make_quantized_models.py: folders of transformers, compressed-tensors and ModelOpt, and their numbers."""
    checkpoint = open_checkpoint(RELEASED / name)
    with np.load(RELEASED / name / "dequantized.npz") as file:
        theirs = dict(file)
    assert f": {len(theirs)} tensors are dequantized" in checkpoint.notices[0]
    ours = to_huggingface(checkpoint.family.parameters(checkpoint.config), checkpoint.load("bfloat16"))
    for key, bits in theirs.items():
        wanted = bits.view(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(ours[key], np.float32), wanted, err_msg=key)


@pytest.mark.parametrize("kind", RELEASES)
def test_every_number_of_a_folder(hf: Any, kind: str) -> None:
    """In shards that part a matrix's tensors; a slab of codes is far smaller than a matrix, and no part ends where a row does."""
    folder, exact = release(hf, kind, shards=3)
    notices = open_checkpoint(folder).notices
    assert f"weights were released in {RELEASES[kind][2]}" in notices[0]
    assert ": 14 tensors are dequantized while they are loaded" in notices[0]
    assert not any("left out" in one for one in notices)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dequantized, "SLAB", 200)
        patch.setattr(huggingface, "PART_BYTES", 4 * 333)
        patch.setattr(huggingface, "CONVERTED_BYTES", 4 * 50)
        check_every_number(folder, exact, "float32")


@pytest.mark.parametrize("kind", ["nvfp4", "modelopt nvfp4", "mxfp4", "nf4", "fp4", "bitsandbytes int8"])
def test_sizes_that_fill_nothing(hf: Any, kind: str) -> None:
    """Rows of 40, 44 and 56 numbers, of which blocks of 64 take no notice."""
    sizes = {"hidden_size": 44, "intermediate_size": 40, "head_dim": 14, "num_hidden_layers": 2}
    check_every_number(*release(hf, kind, config=hf.qwen3_config | sizes))


@pytest.mark.parametrize("kind", ["modelopt nvfp4", "nvfp4", "mxfp4", "nf4", "bitsandbytes int8"])
@pytest.mark.parametrize("config", [MIXTURE, NEXT, DEEPSEEK], ids=["experts", "grouped rows", "latent"])
def test_an_experts_own_tensors(hf: Any, config: dict[str, Any], kind: str) -> None:
    check_every_number(*release(hf, kind, config=hf.qwen3_config | config), "bfloat16")


def test_experts_in_three_bits(hf: Any) -> None:
    config = hf.qwen3_config | MIXTURE | SIZES | {"moe_intermediate_size": 32}
    check_every_number(*release(hf, "gptq int3", config=config), "bfloat16")


def test_experts_in_one_tensor(hf: Any) -> None:
    """ModelOpt's names for them: `gate_up_proj_weight_scale`, with a second scale for each expert."""
    folder, exact = release(hf, "modelopt nvfp4", config=STACKED)
    stored = load(folder / "model.safetensors")
    assert stored["model.layers.0.mlp.experts.gate_up_proj_weight_scale_2"].shape == (4,)
    check_every_number(folder, exact)
    # One scale for all experts, and as many as there are with ones around them.
    for shape in ((4, 1, 1), (1,)):
        name = "model.layers.0.mlp.experts.down_proj"
        stored[f"{name}_weight_scale_2"] = np.full(shape, 1e-4, np.float32)
        codes, scales = stored[name], stored[f"{name}_weight_scale"]
        numbers = e2m1(np.stack([codes & 15, codes >> 4], -1).reshape(4, 32, 24))
        products = scales.astype(np.float32) * np.float32(1e-4)
        exact[name] = numbers * np.repeat(products, 16, -1)[..., :24]
        check_every_number(put(folder, stored), exact)


OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 3,
    "num_experts_per_tok": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "sliding_window": 16,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("each", [True, False], ids=["each", "all"])
def test_experts_with_input_channels_first(hf: Any, each: bool) -> None:
    """gpt-oss's, whose bytes and scales go down a column, with a second scale for each expert or for all."""

    def make(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        if len(shape) == 2:
            return nvfp4_of_modelopt(shape, rng)
        experts, inner, outer = shape
        parts, exact = nvfp4_of_modelopt((experts, outer, inner), rng)
        if not each:
            whole, grid = parts[".weight_scale_2"][:1], parts[".weight_scale"].astype(np.float32)
            numbers = e2m1(np.stack([parts[".weight"] & 15, parts[".weight"] >> 4], -1).reshape(exact.shape))
            parts[".weight_scale_2"], exact = whole.reshape(()), numbers * np.repeat(grid * whole, 16, -1)
        turned = {end: parts[end].swapaxes(1, 2) for end in (".weight", ".weight_scale")}
        return parts | turned, exact.swapaxes(1, 2)

    def chosen(name: str, tensor: np.ndarray) -> bool:
        return is_projection(name, tensor) and not name.endswith(("_bias", "router.weight"))

    stored, exact = released(hf.tensors(OSS), make, chosen)
    assert stored["model.layers.0.mlp.experts.gate_up_proj"].shape == (3, 32, 64)
    folder = put(hf.write("oss", OSS | {"quantization_config": modelopt("NVFP4")}, {}), stored, shards=2)
    assert "weights were released in NVFP4: 12 tensors" in open_checkpoint(folder).notices[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dequantized, "SLAB", 200)
        patch.setattr(huggingface, "PART_BYTES", 4 * 333)
        check_every_number(folder, exact, "float32")
    name = "model.layers.1.mlp.experts.down_proj"
    broken = stored | {f"{name}_weight_scale_2": np.ones(2, np.float32)}
    with pytest.raises(
        CheckpointError, match=r"_weight_scale_2 is float32 .2., expected one scale, or one for each of 3 exp"
    ):
        open_checkpoint(put(folder, broken))


def test_layers_in_several_formats_of_modelopt(hf: Any) -> None:
    """Attention in float8 and feed-forwards in NVFP4, a feed-forward left out: each tensor's dtype tells."""
    layers = {
        f"model.layers.{i}.{part}": {"quant_algo": algorithm} | ({"group_size": 16} if algorithm == "NVFP4" else {})
        for i in range(3)
        for part, algorithm in (("self_attn.q_proj", "FP8"), ("mlp.up_proj", "NVFP4"))
    }
    config = hf.qwen3_config | {"quantization_config": modelopt("MIXED_PRECISION", quantized_layers=layers)}
    stored, exact = released(
        hf.tensors(hf.qwen3_config), nvfp4_of_modelopt, lambda name, _: ".mlp." in name and ".0." not in name
    )
    for name, tensor in hf.tensors(hf.qwen3_config).items():
        if "self_attn" in name and tensor.ndim > 1:
            stored[name], stored[f"{name}_scale"], exact[name] = drawn_float8(
                tensor.shape, None, np.random.default_rng(1)
            )
    folder = put(hf.write("mixed", config, {}), stored)
    notices = open_checkpoint(folder).notices
    assert "weights were released in float8 with a scale for each tensor and NVFP4: 18 tensors" in notices[0]
    assert "rounds activations as well (float8, static and NVFP4, static)" in notices[1]
    check_every_number(folder, exact)


@pytest.mark.parametrize("nested", [False, True], ids=["in a file of its own", "as it is there, in config.json"])
def test_where_modelopt_says_it(hf: Any, nested: bool) -> None:
    folder, exact = release(hf, "modelopt nvfp4")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    own = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head", "*.0.*"],
    }
    said = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": own}
    if nested:
        config["quantization_config"] = said | {"quant_method": "modelopt_fp4"}
    else:
        (folder / "hf_quant_config.json").write_text(json.dumps(said))
    (folder / "config.json").write_text(json.dumps(config))
    scales = {
        f"model.layers.{i}.self_attn.{side}_proj.{side}_scale": np.full((), 0.25 + i, np.float32)
        for i in range(2)
        for side in "kv"
    }
    put(folder, load(folder / "model.safetensors") | scales)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.cache_dtype == "fp8"
    assert checkpoint.cache_scales is not None
    assert [float(scale.max()) for scale in checkpoint.cache_scales.k] == [0.25, 1.25]
    check_every_number(folder, exact)


WIDTHS: dict[str, dict[str, Any]] = {
    "auto-round": auto_round_config(
        4,
        extra_config={
            "lm_head": {"bits": 16},
            "a": {"bits": 8, "group_size": 16},
            "b": {"bits": 2},
            "c": {"group_size": -1},
        },
    ),
    "GPTQ": gptq_config(
        4,
        dynamic={
            "-:.*lm_head.*": {},
            "+:a": {"bits": 8, "group_size": 16},
            "b": {"bits": 2},
            "+:c": {"group_size": -1},
        },
    ),
}


@pytest.mark.parametrize("kind", WIDTHS)
def test_modules_with_other_bits_and_groups(hf: Any, kind: str) -> None:
    """Shapes tell which they have, whatever patterns name them."""
    folder, exact = release(hf, "auto-round")
    config, stored = json.loads((folder / "config.json").read_text()), load(folder / "model.safetensors")
    own = {"q_proj": gptq(8, size=16), "down_proj": gptq(2), "up_proj": gptq(4, size=64)}
    for name, tensor in hf.tensors(hf.qwen3_config | SIZES).items():
        if make := own.get(name.split(".")[-2]):
            parts, exact[name] = make(tensor.shape, np.random.default_rng(3))
            stored |= {name.removesuffix(".weight") + end: part for end, part in parts.items()}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": WIDTHS[kind]}))
    check_every_number(put(folder, stored), exact)
    stored[f"{Q}.qzeros"] = stored[f"{Q}.qzeros"][:, :-1]
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(put(folder, stored))
    assert len(caught.value.problems) == 1
    assert f"tensor {Q}.qzeros is int32 [4, 15], expected int32 [4, 16]" in caught.value.problems[0]


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_what_autoround_says_beside_other_formats(method: str) -> None:
    """Its own settings, and of AWQ that symmetric numbers have no zeros, which are stored all the same."""
    said = {key: value for key, value in auto_round_config(4).items() if key not in ("packing_format", "extra_config")}
    more = (
        {"zero_point": False, "version": "gemm"} if method == "awq" else {"desc_act": False, "true_sequential": False}
    )
    said |= {"quant_method": method, "provider": "auto-round", **more}
    assert take_release({"quantization_config": said})[1] is not None


def test_tables_of_another_shape(hf: Any) -> None:
    folder, exact = release(hf, "nf4")
    stored = load(folder / "model.safetensors")
    for name in [name for name in stored if name.endswith(("quant_map", "absmax"))]:
        stored[name] = stored[name][None]
    check_every_number(put(folder, stored), exact, "float32")


def test_older_files_of_bitsandbytes_name_no_method(hf: Any) -> None:
    folder, exact = release(hf, "nf4")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (folder / "config.json").write_text(json.dumps(config))
    check_every_number(folder, exact)


@pytest.mark.parametrize("kind", ["modelopt nvfp4", "nvfp4", "nf4"])
def test_a_head_that_is_the_embedding(hf: Any, kind: str) -> None:
    """Without one of its own, with a plain copy, and with one that was quantized, which is another one."""
    config = hf.qwen3_config | SIZES | {"tie_word_embeddings": True}
    folder, exact = release(hf, kind, config=config)
    assert "lm_head.weight" not in exact
    check_every_number(folder, exact)
    stored = load(folder / "model.safetensors")
    embedding = stored["model.embed_tokens.weight"]
    check_every_number(put(folder, stored | {"lm_head.weight": embedding}), exact)
    head, _ = released({"lm_head.weight": embedding}, RELEASES[kind][0], lambda *_: True)
    put(folder, stored | head)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight, though"):
        open_checkpoint(folder)


@pytest.mark.parametrize("kind", ["modelopt nvfp4", "nvfp4", "nf4", "gptq int3"])
def test_conversion_and_the_way_back(hf: Any, kind: str) -> None:
    """What comes back has matrices under their own names, and says nothing of the format."""
    folder, exact = release(hf, kind)
    assert hf.convert(folder, "--output", hf.root / "out") == 0
    assert hf.convert(hf.root / "out", "--reverse", "--output", hf.root / "back") == 0
    assert "quantization_config" not in json.loads((hf.root / "back" / "config.json").read_text())
    back = load(hf.root / "back" / "model.safetensors")
    assert back.keys() == exact.keys()
    for name, value in back.items():
        np.testing.assert_array_equal(value, exact[name].astype(np.float32).astype(ml_dtypes.bfloat16), err_msg=name)


def _sparse(path: Path, *tensors: tuple[str, tuple[int, ...]]) -> list[Tensor]:
    """Tensors in a file that takes no room on disk."""
    found, position = list[Tensor](), 0
    for dtype, shape in tensors:
        found.append(Tensor(dtype, dtype, shape, path, position))
        position += found[-1].nbytes
    with path.open("wb") as file:
        file.truncate(position)
    return found


def _large_nvfp4(path: Path) -> Scaled:
    codes, scales, whole = _sparse(path, ("U8", (4096, 4096)), ("F8_E4M3", (4096, 512)), ("F32", (1,)))
    with path.open("r+b") as file:
        file.seek(whole.offset)
        file.write(np.ones(1, np.float32).tobytes())
    return Scaled(codes, scales, table_of(E2M1), (4096, 8192), 4096, (1, 16), whole=whole)


def _large_nf4(path: Path) -> Blocks:
    blocks = 4096 * 8192 // 64
    codes, table, places, inner, wholes = _sparse(
        path, ("U8", (4096 * 4096,)), ("F32", (16,)), ("U8", (blocks,)), ("F32", (256,)), ("F32", (blocks // 256,))
    )
    return Blocks(codes, table, Nested(places, inner, wholes, 256, 0.5), (4096, 8192), 64)


def _large_input_first(path: Path) -> InputFirst:
    codes, scales, whole = _sparse(path, ("U8", (4, 512, 8192)), ("F8_E4M3", (4, 64, 8192)), ("F32", (4,)))
    with path.open("r+b") as file:
        file.seek(whole.offset)
        file.write(np.ones(4, np.float32).tobytes())
    return InputFirst(codes, scales, whole, (4, 1024, 8192), 16)


@pytest.mark.parametrize("make", [_large_nvfp4, _large_nf4, _large_input_first], ids=["nvfp4", "nf4", "input first"])
def test_memory_stays_far_below_a_matrix(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    """128 MB of numbers, 16 MB of codes: no more than a slab of codes and a few pieces are held at a time."""
    weight = dequantized.Dequantized.of("weight", make(tmp_path / "large"), "bfloat16")
    tracemalloc.start()
    try:
        total = sum(piece.size for piece in weight.pieces(2 << 20))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert total == 4096 * 8192
    assert peak < 24 << 20


def _state(**changes: Any) -> np.ndarray:
    said = {
        "quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [64, 64], "nested_blocksize": 256,
        "nested_dtype": "float32", "nested_offset": 0.5,
    }  # fmt: skip
    return np.frombuffer(json.dumps(said | changes).encode(), np.uint8)


NF4 = ".weight.quant_state.bitsandbytes__nf4"
BROKEN: dict[str, tuple[str, dict[str, np.ndarray | None], str]] = {
    "no scale": (
        "modelopt nvfp4",
        {".weight_scale": None},
        f"{Q}.weight is in NVFP4 and has no scale {Q}.weight_scale; fetch",
    ),
    "no second scale": (
        "modelopt nvfp4",
        {".weight_scale_2": None},
        f"{Q}.weight is in NVFP4 and has no scale {Q}.weight_scale_2",
    ),
    "neither": (
        "modelopt nvfp4",
        {".weight_scale": None, ".weight_scale_2": None},
        f"no scale {Q}.weight_scale and no {Q}.weight_scale_2",
    ),
    "scale's dtype": (
        "modelopt nvfp4",
        {".weight_scale": np.ones((64, 4), np.float32)},
        f"{Q}.weight_scale has dtype float32, expected scales in float8_e4m3fn",
    ),
    "scale's shape": (
        "modelopt nvfp4",
        {".weight_scale": np.ones((64, 5), ml_dtypes.float8_e4m3fn)},
        f"{Q}.weight_scale has shape [64, 5], expected [64, 4] for {Q}.weight of shape [64, 64]",
    ),
    "second scale's shape": (
        "modelopt nvfp4",
        {".weight_scale_2": np.ones(64, np.float32)},
        f"{Q}.weight_scale_2 is float32 [64], expected one scale in",
    ),
    "second scale's sign": (
        "modelopt nvfp4",
        {".weight_scale_2": -np.ones((), np.float32)},
        f"{Q}.weight_scale_2 holds a scale that is not positive",
    ),
    "scale's number": (
        "nvfp4",
        {".weight_scale": np.full((64, 4), np.nan, ml_dtypes.float8_e4m3fn)},
        f"{Q}.weight_scale holds scales that are not",
    ),
    "no global scale": (
        "nvfp4",
        {".weight_global_scale": None},
        f"{Q}.weight_packed has no scale {Q}.weight_global_scale; fetch the tensors again",
    ),
    "scales that overflow": (
        "modelopt nvfp4",
        {".weight_scale_2": np.full((), 3e38, np.float32)},
        f"tensor {Q}.weight holds values that are not finite",
    ),
    "scales of scales that overflow": (
        "nf4",
        {
            ".weight.nested_absmax": np.full(1, 3e38, np.float32),
            ".weight.nested_quant_map": np.full(256, 3e38, np.float32),
        },
        f"tensor {Q}.weight holds values that are not finite",
    ),
    "global scale of zero": (
        "nvfp4",
        {".weight_global_scale": np.zeros(1, np.float32)},
        f"{Q}.weight_global_scale holds a scale that",
    ),
    "codes' shape": (
        "nvfp4",
        {".weight_packed": np.zeros((64, 31), np.uint8)},
        f"tensor {Q}.weight has shape [64, 62], expected [64,",
    ),
    "exponent of no number": (
        "mxfp4",
        {".weight_scale": np.full((64, 2), 255, np.uint8)},
        f"{Q}.weight_scale holds scales that are",
    ),
    "rows": (
        "modelopt rows",
        {".weight_scale": np.ones(63, np.float32)},
        f"{Q}.weight_scale has shape [63], expected [64, 1] for {Q}.weight",
    ),
    "words of three bits": (
        "gptq int3",
        {".qweight": np.zeros((7, 64), np.int32)},
        f"{Q}.qweight has shape [7, 64], expected 32 numbers of 3 bits in each 3",
    ),
    "zeros of three bits": (
        "gptq int3",
        {".qzeros": np.zeros((8, 7), np.int32)},
        f"{Q}.qzeros is int32 [8, 7], expected int32 [8, 6] beside {Q}.qweight",
    ),
    "no state": ("nf4", {NF4: None}, f"tensor {Q}.weight has no state {Q}.weight.quant_state.bitsandbytes__nf4 or fp4"),
    "no scales": (
        "nf4",
        {".weight.absmax": None},
        f"tensor {Q}.weight has no {Q}.weight.absmax; fetch the tensors again",
    ),
    "no scales of scales": (
        "nf4",
        {".weight.nested_absmax": None, ".weight.nested_quant_map": None},
        f"tensor {Q}.weight has no {Q}.weight.nested_absmax and no {Q}.weight.nested_quant_map",
    ),
    "scales' size": (
        "nf4",
        {".weight.absmax": np.zeros(63, np.uint8)},
        f"{Q}.weight.absmax is uint8 [63], expected 64 numbers in uint8",
    ),
    "scales' dtype": (
        "nf4",
        {".weight.absmax": np.ones(64, np.float32)},
        f"{Q}.weight.absmax is float32 [64], expected 64 numbers in uint8",
    ),
    "table": (
        "nf4",
        {".weight.quant_map": np.ones(15, np.float32)},
        f"{Q}.weight.quant_map is float32 [15], expected 16 numbers in",
    ),
    "infinite table": (
        "nf4",
        {".weight.quant_map": np.full(16, np.inf, np.float32)},
        f"{Q}.weight.quant_map holds scales that are not",
    ),
    "no JSON": ("nf4", {NF4: np.zeros(9, np.uint8)}, f"tensor {Q}{NF4} says None, expected bitsandbytes' JSON"),
    "state's dtype": ("nf4", {NF4: np.zeros(9, np.float32)}, f"tensor {Q}{NF4} says None, expected bitsandbytes' JSON"),
    "state's size": (
        "nf4",
        {NF4: np.full(1 << 17, 32, np.uint8)},
        f"tensor {Q}{NF4} says None, expected bitsandbytes' JSON",
    ),
    "shape": (
        "nf4",
        {NF4: _state(shape=[64, 66])},
        f"{Q}.weight is uint8 [2048, 1], expected 2112 bytes for [64, 66]; fetch it again",
    ),
    "another shape": (
        "nf4",
        {NF4: _state(shape=[32, 128])},
        f"tensor {Q}.weight has shape [32, 128], expected [64, 64]",
    ),
    "odd columns": (
        "nf4",
        {NF4: _state(shape=[4096, 1])},
        "expected bitsandbytes' JSON: a shape with an even number of columns",
    ),
    "flat": ("nf4", {NF4: _state(shape=[4096])}, "expected bitsandbytes' JSON"),
    "negative": ("nf4", {NF4: _state(shape=[-64, -64])}, "expected bitsandbytes' JSON"),
    "no blocks": ("nf4", {NF4: _state(blocksize=0)}, "expected bitsandbytes' JSON"),
    "offset": ("nf4", {NF4: _state(nested_offset="much")}, "expected bitsandbytes' JSON"),
    "dtype of scales": ("nf4", {NF4: _state(nested_dtype="float16")}, "expected bitsandbytes' JSON"),
    "no scale of rows": (
        "bitsandbytes int8",
        {".SCB": None},
        f"tensor {Q}.weight is in int8 and has no scale {Q}.SCB; fetch the",
    ),
    "order": (
        "bitsandbytes int8",
        {".weight_format": np.ones((), np.uint8)},
        f"{Q}.weight_format says that {Q}.weight is not stored",
    ),
    "scale of rows": (
        "bitsandbytes int8",
        {".SCB": np.ones(63, np.float32)},
        f"{Q}.SCB has shape [63], expected [64, 1] for",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_wrong_with_a_tensor_is_named(hf: Any, case: str) -> None:
    kind, changes, message = BROKEN[case]
    folder, _ = release(hf, kind)
    stored: dict[str, Any] = load(folder / "model.safetensors") | {Q + end: part for end, part in changes.items()}
    put(folder, {name: one for name, one in stored.items() if one is not None})
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder).load()
    assert len(caught.value.problems) == 1
    assert message in caught.value.problems[0]


def test_a_missing_shard_hides_no_other_problem(hf: Any) -> None:
    for kind in ("modelopt nvfp4", "nvfp4", "nf4", "bitsandbytes int8"):
        folder, _ = release(hf, kind, shards=3)
        (folder / "model-00002-of-00003.safetensors").unlink()
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(folder)
        assert len(caught.value.problems) == 1
        assert "model-00002-of-00003.safetensors is missing" in caught.value.problems[0]


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "modelopt nvfp4",
            {"quant_algo": "NVFP4_AWQ", "pre_quant_scale": True},
            "quant_algo='NVFP4_AWQ' in quantization_config, expec",
        ),
        ("modelopt nvfp4", {"quant_algo": "W4A16_AWQ"}, "quant_algo='W4A16_AWQ'"),
        ("modelopt nvfp4", {"quant_algo": "NVFP4_SVD"}, "quant_algo='NVFP4_SVD'"),
        ("modelopt nvfp4", {"group_size": 32}, "group_size=32 in quantization_config, expected one of None, 0, 16"),
        ("modelopt nvfp4", {"pre_quant_scale": True}, "pre_quant_scale=True"),
        ("modelopt nvfp4", {"lora_rank": 32}, "not known of modelopt: lora_rank"),
        ("modelopt nvfp4", {"ignore": "lm_head"}, "ignore in quantization_config must be a list of names"),
        (
            "modelopt nvfp4",
            {"quant_algo": "MIXED_PRECISION"},
            "quantized_layers in quantization_config must be an object of layers",
        ),
        (
            "modelopt nvfp4",
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.b": {"quant_algo": "W8A16"}}},
            r"quant_algo='W8A16' in quantization_config\.quantized_layers\.a\.b",
        ),
        ("modelopt nvfp4", {"kv_cache_quant_algo": "NVFP4"}, "keeps keys and values in 'NVFP4', expected float8"),
        ("nvfp4", {"format": "marlin-24", "config_groups": {"group_0": {"weights": {}}}}, "format='marlin-24'"),
        (
            "nvfp4",
            compressed("mxfp6-pack-quantized", {"num_bits": 6, "type": "float"}),
            "format='mxfp6-pack-quantized'",
        ),
        (
            "nvfp4",
            compressed(
                "nvfp4-pack-quantized", {"num_bits": 4, "type": "int", "strategy": "tensor_group", "group_size": 16}
            ),
            "int weights of 4 bits in format nvfp4-pack-quantized",
        ),
        (
            "nvfp4",
            compressed("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 16}),
            "strategy='group' in",
        ),
        (
            "nvfp4",
            compressed("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 16}),
            "group_size=16 in",
        ),
        (
            "mxfp8",
            compressed("mxfp8-quantized", {"num_bits": 8, "type": "int"}),
            "int weights of 8 bits in format mxfp8-quantized",
        ),
        ("gptq int3", {"bits": 5}, "bits=5 in quantization_config, expected one of 2, 3, 4, 8"),
        ("gptq int3", {"checkpoint_format": "gptq_p"}, "checkpoint_format='gptq_p'"),
        ("auto-round", {"packing_format": "auto_round:llm_compressor"}, "packing_format='auto_round:llm_compressor'"),
        (
            "auto-round",
            {"packing_format": "auto_round:auto_awq", "bits": 8},
            "bits=8 in quantization_config, expected one of 4",
        ),
        ("auto-round", {"data_type": "mx_fp"}, "data_type='mx_fp'"),
        ("auto-round", {"act_bits": 8}, "act_bits=8"),
        ("auto-round", {"rotation_config": {}}, "not known of AutoRound: rotation_config"),
        ("auto-round", {"extra_config": {"a": {"bits": 5}}}, r"bits=5 in quantization_config\.extra_config\.a"),
        (
            "auto-round",
            {"extra_config": {"a": {"group_size": 0}}},
            r"group_size in quantization_config\.extra_config\.a must be",
        ),
        (
            "auto-round",
            {"extra_config": {"a": {"data_type": "nv_fp"}}},
            r"data_type='nv_fp' in quantization_config\.extra_config\.a",
        ),
        ("nf4", {"bnb_4bit_quant_type": "nf3"}, "bnb_4bit_quant_type='nf3'"),
        ("nf4", {"bnb_8bit": True}, "not known of bitsandbytes: bnb_8bit"),
        ("bitsandbytes int8", {"llm_int8_has_fp16_weight": True}, "llm_int8_has_fp16_weight=True"),
    ],
)
def test_what_is_not_read_is_refused_by_name(hf: Any, kind: str, changes: dict[str, Any], message: str) -> None:
    folder, _ = release(hf, kind, **changes)
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(folder)
