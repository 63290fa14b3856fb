"""compressed-tensors, GPTQ and AWQ: numbers that other tools packed and unpacked again (make_quantized_golden.py), whole folders,
and what is wrong with one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dflash_jax.checkpoints.huggingface import open_checkpoint
from dflash_jax.checkpoints.quantized import dequantized as reading
from dflash_jax.checkpoints.quantized.releases import FORMATS, dequantized, take_release
from dflash_jax.checkpoints.safetensors import read_header
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.models.parameters import to_huggingface

from ..quantized_folders import drawn_float8, e4m3, is_projection, load, put, spread
from .test_deepseek import BIASES
from .test_deepseek import CONFIG as DEEPSEEK

GOLDEN = Path(__file__).parent / "golden"
CASES: dict[str, Any] = json.loads((GOLDEN / "quantized.json").read_text())
Q = "model.layers.1.self_attn.q_proj"
type Tensors = dict[str, np.ndarray]


@pytest.mark.parametrize("case", CASES)
def test_numbers_of_other_tools(case: str) -> None:
    """Whole, and in slabs and pieces that end anywhere."""
    path, said = GOLDEN / "quantized.safetensors", CASES[case]
    tensors = {name: one for name, one in read_header(path).items() if name.startswith(f"{case}.")}
    theirs, problems = load(path)[f"{case}.dequantized"], list[str]()
    del tensors[f"{case}.dequantized"]
    found, lost = dequantized(FORMATS[said["quant_method"]](said), tensors, (), problems)
    assert not problems
    assert not lost
    assert list(found) == [f"{case}.weight"]
    ours = reading.read(found[f"{case}.weight"])
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours.astype(theirs.dtype), theirs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "SLAB", 500)
        for begin, size in ((0, 1), (95, 98), (333, 1111), (ours.size - 7, 7)):
            pieces = [piece.copy() for piece in found[f"{case}.weight"].part(begin, (size,)).pieces(4 * 250)]
            np.testing.assert_array_equal(np.concatenate(pieces), ours.reshape(-1)[begin : begin + size])


def packed(numbers: np.ndarray, bits: int = 4) -> np.ndarray:
    """Whole numbers in words along the last axis, the first in the lowest bits; a word that is not full has zeros."""
    per_word = 32 // bits
    full = np.zeros((*numbers.shape[:-1], -(-numbers.shape[-1] // per_word) * per_word), np.uint64)
    full[..., : numbers.shape[-1]] = numbers
    words = full.reshape(*numbers.shape[:-1], -1, per_word) << (bits * np.arange(per_word, dtype=np.uint64))
    return words.sum(-1).astype(np.uint32).view(np.int32)


def group(**weights: Any) -> dict[str, Any]:
    """A `quantization_config` of compressed-tensors with one group."""
    form = weights.pop("format", "pack-quantized")
    activations = weights.pop("activations", None)
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "ignore": ["lm_head", r"re:.*mlp\.gate$"], "kv_cache_scheme": None, "global_compression_ratio": 1.5,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"], "weights": {"observer": "minmax", "dynamic": False, **weights},
                "input_activations": activations, "output_activations": None,
            },
        },
    }  # fmt: skip


def int4_groups(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    numbers, scales = (
        rng.integers(-8, 8, shape),
        rng.uniform(0.01, 0.02, (shape[0], shape[1] // 8)).astype(ml_dtypes.bfloat16),
    )
    exact = numbers * spread(scales, shape, (1, 8))
    return {".weight_packed": packed(numbers + 8), ".weight_scale": scales, ".weight_shape": np.array(shape)}, exact


def float8_rows(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    codes, scales, exact = drawn_float8(shape, (1, shape[1]), rng)
    return {".weight": codes, ".weight_scale": scales}, exact


def int8_rows(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    numbers, scales = rng.integers(-128, 128, shape).astype(np.int8), rng.uniform(0.001, 0.002, (shape[0], 1))
    scales = scales.astype(ml_dtypes.bfloat16)
    return {".weight": numbers, ".weight_scale": scales}, numbers * scales.astype(np.float64)


def gptq(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    height, width = shape
    numbers, zeros = rng.integers(0, 16, (width, height)), rng.integers(1, 17, (width // 8, height))
    scales = rng.uniform(0.01, 0.02, zeros.shape).astype(np.float16)
    index = rng.permutation(np.arange(width, dtype=np.int32) // 8)
    stored = {
        ".qweight": packed(numbers.T).T, ".qzeros": packed(zeros - 1), ".scales": scales, ".g_idx": index,
        ".bias": np.zeros(height, np.float16),
    }  # fmt: skip
    return stored, ((numbers - zeros[index] % 16) * scales.astype(np.float64)[index]).T


def awq(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    height, width = shape
    numbers, zeros = rng.integers(0, 16, (width, height)), rng.integers(0, 16, (width // 8, height))
    scales, order = rng.uniform(0.01, 0.02, zeros.shape).astype(np.float16), [0, 2, 4, 6, 1, 3, 5, 7]
    words = [packed(one.reshape(len(one), -1, 8)[..., order].reshape(one.shape)) for one in (numbers, zeros)]
    spread_zeros, spread_scales = (np.repeat(one.astype(np.float64), 8, axis=0) for one in (zeros, scales))
    return {".qweight": words[0], ".qzeros": words[1], ".scales": scales}, ((numbers - spread_zeros) * spread_scales).T


DYNAMIC = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
type Maker = Callable[[tuple[int, ...], np.random.Generator], tuple[Tensors, np.ndarray]]
FOLDERS: dict[str, tuple[Maker, dict[str, Any], str]] = {
    "int4": (int4_groups, group(num_bits=4, type="int", strategy="group", group_size=8), "int4 in groups of 8"),
    "float8": (
        float8_rows,
        group(num_bits=8, type="float", strategy="channel", format="float-quantized", activations=DYNAMIC),
        "float8 with a scale for each row",
    ),
    "int8": (
        int8_rows,
        group(num_bits=8, type="int", strategy="channel", format="int-quantized"),
        "int8 with a scale for each row",
    ),
    "gptq": (
        gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": True, "sym": False, "dynamic": {"-:.*lm_head.*": {}}},
        "GPTQ, int4 in groups of 8",
    ),
    "awq": (
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm", "zero_point": True},
        "AWQ, int4 in groups of 8",
    ),
}  # fmt: skip


def release(hf: Any, kind: str, shards: int = 1, **said: Any) -> tuple[Path, Tensors]:
    """A folder with projections quantized, and what its tensors stand for; sizes are those that fill words."""
    config: dict[str, Any] = hf.qwen3_config
    make, about, _ = FOLDERS[kind]
    stored, exact, rng = dict[str, np.ndarray](), dict[str, np.ndarray](), np.random.default_rng(0)
    for name, tensor in hf.tensors(config).items():
        stored[name] = exact[name] = tensor
        if is_projection(name, tensor):
            del stored[name]
            parts, exact[name] = make(tensor.shape, rng)
            stored |= {name.removesuffix(".weight") + end: part for end, part in parts.items()}
    folder = hf.write(f"target-{len(list(hf.root.iterdir()))}", config | {"quantization_config": about | said}, {})
    return put(folder, stored, shards), exact


@pytest.mark.parametrize("kind", FOLDERS)
def test_every_number_of_a_folder(hf, kind):
    folder, exact = release(hf, kind, shards=3)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.dtype == "bfloat16"
    assert f"weights were released in {FOLDERS[kind][2]}: 21 tensors" in checkpoint.notices[0]
    assert any("rounds activations as well (float8, dynamic)" in one for one in checkpoint.notices) == (
        kind == "float8"
    )
    assert not any("left out" in one for one in checkpoint.notices)
    for dtype in (ml_dtypes.bfloat16, np.float32):
        params = checkpoint.load(np.dtype(dtype).name)
        found = to_huggingface(checkpoint.family.parameters(checkpoint.config), params)
        assert found.keys() == exact.keys()
        for name, value in found.items():
            np.testing.assert_array_equal(value, exact[name].astype(np.float32).astype(dtype), err_msg=name)


def test_int4_experts_of_a_vision_model(hf):
    """Kimi K2.5's shape: the text model's configuration tells of them, and attention is not quantized."""
    config = DEEPSEEK | {"kv_lora_rank": 16, "q_lora_rank": 24}
    stored, exact, rng = dict[str, np.ndarray](), dict[str, np.ndarray](), np.random.default_rng(0)
    for name, tensor in hf.tensors(config, extra=BIASES).items():
        stored[name] = exact[name] = tensor
        if ".experts." in name:
            del stored[name]
            parts, exact[name] = int4_groups(tensor.shape, rng)
            stored |= {name.removesuffix(".weight") + end: part for end, part in parts.items()}
    outer = {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
        "text_config": config | {"quantization_config": FOLDERS["int4"][1]},
    }  # fmt: skip
    folder = put(hf.write("k25", outer, {}), {f"language_model.{name}": value for name, value in stored.items()})
    checkpoint = open_checkpoint(folder)
    found = to_huggingface(checkpoint.family.parameters(checkpoint.config), checkpoint.load("float32"))
    for name, value in found.items():
        np.testing.assert_array_equal(value, exact[name].astype(np.float32), err_msg=name)


def test_keys_and_values_in_float8_beside_weights(hf):
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    folder, _ = release(hf, "int8", kv_cache_scheme=scheme)
    scales = {
        f"model.layers.{i}.self_attn.{side}_scale": np.full(1, 0.25 + i, np.float32) for i in range(3) for side in "kv"
    }
    put(folder, load(folder / "model.safetensors") | scales)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.cache_dtype == "fp8"
    assert checkpoint.cache_scales is not None
    assert [float(scale.max()) for scale in checkpoint.cache_scales.k] == [0.25, 1.25, 2.25]


def test_older_files_of_compressed_tensors(hf):
    """Scales of pages stand beside the projections that write them, and blocks are a text."""
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    blocks: dict[str, Any] = {"num_bits": 8, "type": "int", "strategy": "block", "block_structure": "8x16"}
    said: dict[str, Any] = group(format="int-quantized", **blocks) | {"kv_cache_scheme": scheme}
    folder, _ = release(hf, "int8", 1, **said)
    stored = load(folder / "model.safetensors")
    for name in [name for name in stored if name.endswith("weight_scale")]:
        height, width = stored[name.removesuffix("_scale")].shape
        stored[name] = np.ones((-(-height // 8), -(-width // 16)), np.float32)
    scales = {
        f"model.layers.{i}.self_attn.{side}_proj.output_scale": np.full(1, 0.25 + i, np.float32)
        for i in range(3)
        for side in "kv"
    }
    put(folder, stored | scales)
    checkpoint = open_checkpoint(folder)
    assert "int8 in blocks of 8 x 16: 21 tensors" in checkpoint.notices[0]
    assert checkpoint.cache_scales is not None
    assert [float(scale.max()) for scale in checkpoint.cache_scales.k] == [0.25, 1.25, 2.25]


def test_a_release_that_says_it_twice():
    """In itself and in its text model's part."""
    said = {"quantization_config": FOLDERS["int4"][1]}
    values, found = take_release({"a": 1, **said, "text_config": {"b": 2, **said}})
    assert values == {"a": 1, "text_config": {"b": 2}}
    assert found is not None


def test_a_release_that_says_it_in_a_file_of_its_own(hf):
    """ModelOpt's older ones."""
    folder, exact = release(hf, "float8")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    own = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": own}))
    stored = load(folder / "model.safetensors")
    for name in [name for name in stored if name.endswith("weight_scale")]:
        codes, stored[name] = name.removesuffix("_scale"), stored[name][0].reshape(())
        exact[codes] = e4m3(stored[codes].view(np.uint8)) * float(stored[name])
    put(folder, stored)
    checkpoint = open_checkpoint(folder)
    found = to_huggingface(checkpoint.family.parameters(checkpoint.config), checkpoint.load("float32"))
    for name, value in found.items():
        np.testing.assert_array_equal(value, exact[name].astype(np.float32), err_msg=name)


def test_what_modelopts_own_file_may_say_beside_float8(hf: Any) -> None:
    folder = hf.qwen3()
    for said in ({}, {"quant_algo": None, "kv_cache_quant_algo": None}):
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
        assert open_checkpoint(folder).cache_dtype is None
    said = {"quant_algo": "NVFP4_AWQ", "group_size": 16, "kv_cache_quant_algo": "FP8"}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    with pytest.raises(ConfigError, match="quant_algo='NVFP4_AWQ' in quantization_config, expected one of 'FP8'"):
        open_checkpoint(folder)


def test_autoround_in_the_order_of_awq(hf):
    folder, exact = release(hf, "awq")
    config = json.loads((folder / "config.json").read_text())
    said = {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 8,
        "sym": False,
        "packing_format": "auto_round:auto_awq",
    }
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    checkpoint = open_checkpoint(folder)
    assert "weights were released in AutoRound, int4 in groups of 8: 21 tensors" in checkpoint.notices[0]
    found = to_huggingface(checkpoint.family.parameters(checkpoint.config), checkpoint.load("float32"))
    for name, value in found.items():
        np.testing.assert_array_equal(value, exact[name].astype(np.float32), err_msg=name)


def test_groups_of_modules_in_different_formats(hf):
    """Feed-forwards in int4 and the rest in int8: each tensor's dtype tells which it is."""
    four, eight = (FOLDERS[kind][1]["config_groups"]["group_0"] for kind in ("int4", "int8"))
    groups = {"group_0": {**four, "format": "pack-quantized"}, "group_1": {**eight, "format": "int-quantized"}}
    folder, exact = release(hf, "int4", format="mixed-precision", config_groups=groups)
    stored = {name: one for name, one in load(folder / "model.safetensors").items() if not name.startswith(Q)}
    parts, exact[f"{Q}.weight"] = int8_rows((32, 32), np.random.default_rng(1))
    put(folder, stored | {Q + end: part for end, part in parts.items()})
    checkpoint = open_checkpoint(folder)
    assert "int4 in groups of 8 and int8 with a scale for each row: 21 tensors" in checkpoint.notices[0]
    found = to_huggingface(checkpoint.family.parameters(checkpoint.config), checkpoint.load("float32"))
    for name, value in found.items():
        np.testing.assert_array_equal(value, exact[name].astype(np.float32), err_msg=name)


@pytest.mark.parametrize("kind", ["int4", "gptq", "awq"])
def test_conversion_and_the_way_back(hf, kind):
    """What comes back has matrices under their own names."""
    folder, exact = release(hf, kind)
    assert hf.convert(folder, "--output", hf.root / "out") == 0
    assert hf.convert(hf.root / "out", "--reverse", "--output", hf.root / "back") == 0
    back = load(hf.root / "back" / "model.safetensors")
    assert back.keys() == exact.keys()
    for name, value in back.items():
        np.testing.assert_array_equal(value, exact[name].astype(np.float32).astype(ml_dtypes.bfloat16), err_msg=name)


BROKEN: dict[str, tuple[str, Tensors, str]] = {
    "no scale": ("int4", {".weight_scale": np.zeros(0)}, f"tensor {Q}.weight_packed has no scale {Q}.weight_scale"),
    "scale's shape": (
        "int4", {".weight_scale": np.ones((32, 5), np.float32)}, f"tensor {Q}.weight_scale has shape [32, 5], expected [32, 4]",
    ),
    "scale's number": (
        "int8", {".weight_scale": np.full((32, 1), np.nan, np.float32)}, f"tensor {Q}.weight_scale holds scales that are not fin",
    ),
    "order": ("int4", {".weight_g_idx": np.full(32, 4, np.int32)}, f"tensor {Q}.weight_g_idx names groups 4 .. 4, expected 0 .. 3"),
    "order's shape": ("int4", {".weight_g_idx": np.zeros(31, np.int32)}, f"tensor {Q}.weight_g_idx is int32 [31], expected 32"),
    "zero's shape": (
        "int4", {".weight_zero_point": np.zeros((3, 4), np.int32)},
        f"tensor {Q}.weight_zero_point is int32 [3, 4], expected int32 [4, 4]",
    ),
    "no matrix": ("int8", {".weight": np.zeros((), np.int8)}, f"tensor {Q}.weight has shape [], expected a matrix"),
    "no zeros": ("gptq", {".qzeros": np.zeros(0)}, f"tensor {Q}.qweight has no {Q}.qzeros"),
    "zeros' shape": ("awq", {".qzeros": np.zeros((4, 5), np.int32)}, f"tensor {Q}.qzeros is int32 [4, 5], expected int32 [4, 4]"),
    "scales' dtype": ("gptq", {".scales": np.ones((4, 32), np.int32)}, f"tensor {Q}.scales is int32 [4, 32], expected bfloat16 or"),
    "infinite scales": (
        "awq", {".scales": np.full((4, 32), np.inf, np.float16)}, f"tensor {Q}.scales holds scales that are not finite",
    ),
    "groups": ("gptq", {".g_idx": np.full(32, 4, np.int32)}, f"tensor {Q}.g_idx names groups 4 .. 4, expected 0 .. 3"),
    "codes' dtype": ("gptq", {".qweight": np.zeros((4, 32), np.float32)}, f"tensor {Q}.qweight is float32 [4, 32], expected a"),
    "codes' shape": ("awq", {".qweight": np.zeros(128, np.int32)}, f"tensor {Q}.qweight is int32 [128], expected a matrix of"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_wrong_with_a_tensor_is_named(hf, case):
    kind, changes, message = BROKEN[case]
    folder, _ = release(hf, kind)
    stored = load(folder / "model.safetensors") | {Q + end: part for end, part in changes.items()}
    put(folder, {name: one for name, one in stored.items() if one.dtype != np.float64})
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder).load()
    assert len(caught.value.problems) == 1
    assert message in caught.value.problems[0]


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "int4",
            {"format": "marlin-24"},
            "format='marlin-24' in quantization_config, read are float-",
        ),
        ("int4", {"config_groups": {}}, "'compressed-tensors'"),
        ("int4", {"config_groups": {"group_0": 4}}, "config_groups.group_0 must be an object"),
        ("int4", {"quantization_status": "frozen"}, "quantization_status='frozen'"),
        ("int4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "only dense weights are read"),
        ("int4", {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config="),
        ("gptq", {"bits": 5}, "bits=5 in quantization_config, expected one of 2, 3, 4, 8"),
        ("gptq", {"group_size": 0}, "group_size in quantization_config must be a positive integer"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ("gptq", {"rotation": "hadamard"}, "not known of GPTQ: rotation"),
        ("awq", {"bits": 8}, "bits=8"),
        ("awq", {"version": "gemv"}, "version='gemv' in quantization_config, expected one of None, 'gemm'"),
        ("awq", {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ("awq", {"zero_point": False}, "zero_point=False"),
    ],
)
def test_what_is_not_read_is_refused_by_name(hf, kind, changes, message):
    folder, _ = release(hf, kind, **changes)
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": "tensor_group"}, "strategy='tensor_group', group_size=8"),
        ({"group_size": None}, "strategy='group', group_size=None"),
        ({"strategy": "block", "block_structure": [8]}, "block_structure=.8. in quantization_config.config_groups.group_0.weights"),
        ({"num_bits": 3}, "num_bits=3"),
        ({"type": "float"}, "float weights of 4 bits in format pack-quantized"),
        ({"dynamic": True}, "dynamic=True"),
        ({"rounding": "up"}, "not known of compressed-tensors: rounding"),
    ],
)  # fmt: skip
def test_weights_that_are_not_read_are_refused_by_name(hf, changes, message):
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8} | changes
    folder, _ = release(hf, "int4", **group(**weights))
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(folder)


def test_asymmetric_weights_need_their_zeros(hf):
    said = {"num_bits": 8, "strategy": "channel", "symmetric": False}
    folder, _ = release(hf, "int8", **group(type="int", format="int-quantized", **said))
    with pytest.raises(CheckpointError, match=rf"tensor {Q}\.weight has no zeros {Q}\.weight_zero_point"):
        open_checkpoint(folder)
    folder, _ = release(hf, "float8", **group(type="float", format="float-quantized", **said))
    with pytest.raises(ConfigError, match="symmetric=False of float weights"):
        open_checkpoint(folder)
