"""Releases in float8: every number against float64, for each way that scales are kept in, and what is wrong with a folder."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dflash_jax.checkpoints import huggingface
from dflash_jax.checkpoints.converted import open_converted
from dflash_jax.checkpoints.huggingface import open_checkpoint
from dflash_jax.checkpoints.quantized import dequantized
from dflash_jax.checkpoints.quantized.scaled import Scaled
from dflash_jax.checkpoints.safetensors import Tensor
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.models.parameters import to_huggingface
from dflash_jax.parallel.ranks import local_ranks

from ..quantized_folders import BLOCKS, drawn_float8, is_projection, load, put, quantized
from .test_deepseek import BIASES
from .test_deepseek import CONFIG as DEEPSEEK

# Sizes that no block of these divides.
BLOCK = (20, 12)
CONFIG = BLOCKS | {
    "weight_block_size": list(BLOCK), "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.up_proj"],
    "weight_per_tensor": False, "act_per_tensor": False,  # as the releases of Qwen3.5 say
}  # fmt: skip
Q = "model.layers.1.self_attn.q_proj"
MIXTURE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
HYBRID: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"],
    "rms_norm_eps": 1e-6, "max_position_embeddings": 128, "tie_word_embeddings": False, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
NEXT = HYBRID | {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
STACKED = HYBRID | {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}


def chosen(name: str, tensor: np.ndarray) -> bool:
    return is_projection(name, tensor) and "layers.0.mlp.up_proj" not in name


def release(
    hf, config: dict[str, Any], said: dict[str, Any] = CONFIG, block: tuple[int, int] | None = BLOCK, shards: int = 2
) -> tuple[Path, dict[str, np.ndarray]]:
    """A folder of the family with projections in float8, and what its tensors stand for."""
    extra = BIASES if config["model_type"] == "deepseek_v3" else {}
    if config["model_type"] == STACKED["model_type"]:
        shapes = {"gate_up_proj": (4, 48, 32), "down_proj": (4, 32, 24)}
        extra = {
            f"model.layers.{i}.mlp.experts.{name}": np.zeros(shape) for i in (0, 1) for name, shape in shapes.items()
        }
    stored, exact = quantized(hf.tensors(config, extra=extra), chosen, block)
    assert sum(value.dtype == ml_dtypes.float8_e4m3fn for value in stored.values()) > 5
    folder = hf.write(f"target-{len(list(hf.root.iterdir()))}", config | {"quantization_config": said}, {})
    return put(folder, stored, shards), exact


def tensors_of(checkpoint: Any, params: dict[str, Any]) -> dict[str, np.ndarray]:
    return to_huggingface(checkpoint.family.parameters(checkpoint.config), params)


def rounded(exact: np.ndarray, dtype: Any) -> np.ndarray:
    """A product in float32, which rounds it once, and in `dtype`, which does again."""
    return exact.astype(np.float32).astype(dtype)


def check_every_number(folder: Path, exact: dict[str, np.ndarray], dtype: str) -> None:
    checkpoint = open_checkpoint(folder)
    assert checkpoint.dtype == "bfloat16"
    found = tensors_of(checkpoint, checkpoint.load(dtype))
    for name, value in found.items():
        wanted = rounded(exact[name], value.dtype)
        assert value.ndim == 1 or value.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(value, wanted, err_msg=name)
    assert found.keys() == exact.keys()


@pytest.mark.few("*-float32")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "config", [{}, MIXTURE, NEXT, STACKED, DEEPSEEK], ids=["dense", "experts", "grouped rows", "stacked", "latent"]
)
def test_every_number_of_blocks(hf, config, dtype):
    """A slab of codes is far smaller than a matrix here, and no part of a parameter ends where a row does."""
    folder, exact = release(hf, hf.qwen3_config | config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dequantized, "SLAB", 96)
        patch.setattr(huggingface, "PART_BYTES", 4 * 333)
        patch.setattr(huggingface, "CONVERTED_BYTES", 4 * 50)
        check_every_number(folder, exact, dtype)


def test_blocks_of_128_over_edges(hf):
    config = hf.qwen3_config | {"hidden_size": 200, "intermediate_size": 300, "num_hidden_layers": 1}
    folder, exact = release(hf, config, BLOCKS, (128, 128))
    check_every_number(folder, exact, "bfloat16")


@pytest.mark.parametrize("suffix", ["scale", "scale_inv"])
@pytest.mark.parametrize("scheme", ["static", "dynamic"])
def test_one_scale_for_each_tensor(hf, scheme, suffix):
    said = {
        "quant_method": "fp8",
        "activation_scheme": scheme,
        "ignored_layers": ["lm_head"],
        "weight_block_size": None,
    }
    folder, exact = release(hf, hf.qwen3_config, said, None)
    read = {name: value for path in folder.glob("*.safetensors") for name, value in load(path).items()}
    stored = {name.replace("_scale_inv", f"_{suffix}"): value for name, value in read.items()}
    scales = [name for name in stored if name.endswith(f"_{suffix}")]
    if scheme == "static":
        stored |= {name.replace(f"weight_{suffix}", "input_scale"): np.ones((), np.float32) for name in scales}
    put(folder, stored)
    check_every_number(folder, exact, "bfloat16")
    notices = " ".join(open_checkpoint(folder).notices)
    assert "float8 with a scale for each tensor" in notices
    assert f"rounds activations as well (float8, {scheme}); that is not done here" in notices
    assert "left out" not in notices


@pytest.mark.parametrize(
    ("said", "block", "rounds"),
    [
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}, (1, 512), "dynamic"),
        (
            {
                "quant_method": "modelopt", "quant_algo": "FP8", "producer": {"name": "modelopt"}, "ignore": ["lm_head"],
                "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
            },
            None, "static",
        ),
    ],
    ids=["rows", "tensors"],
)  # fmt: skip
def test_what_other_tools_call_scales(hf, said, block, rounds):
    folder, exact = release(hf, hf.qwen3_config, said, block, shards=1)
    beside = "input_scale_ub" if block else "input_scale"
    stored = {name.replace("_scale_inv", "_scale"): one for name, one in load(folder / "model.safetensors").items()}
    of_activations = [name.replace("weight_scale", beside) for name in stored if name.endswith("weight_scale")]
    put(folder, stored | dict.fromkeys(of_activations, np.ones((), np.float32)))
    check_every_number(folder, exact, "bfloat16")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.cache_dtype == ("fp8" if "kv_cache_scheme" in said else None)
    assert f"(float8, {rounds})" in checkpoint.notices[1]


@pytest.mark.parametrize("kind", ["float32", "float8_e8m0fnu", "uint8"])
def test_scales_that_are_powers_of_two(hf, kind):
    """Down to the smallest exponents, whose products are denormal in float32."""
    folder, exact = release(hf, hf.qwen3_config, CONFIG | {"scale_fmt": "ue8m0"}, shards=1)
    stored, rng = load(folder / "model.safetensors"), np.random.default_rng(3)
    codes, scales, products = drawn_float8((32, 32), BLOCK, rng, powers=True)
    scales, products = scales.copy(), products.copy()
    products[:20, :12] *= 2.0**-120 / scales[0, 0]
    scales[0, 0] = 2.0**-120
    exponents = (np.log2(scales) + 127).astype(np.uint8)
    narrow = {"float32": scales, "uint8": exponents, "float8_e8m0fnu": exponents.view(ml_dtypes.float8_e8m0fnu)}[kind]
    put(folder, stored | {f"{Q}.weight": codes, f"{Q}.weight_scale_inv": narrow})
    check_every_number(folder, exact | {f"{Q}.weight": products}, "float32")


@pytest.mark.parametrize("config", [{}, MIXTURE, DEEPSEEK], ids=["dense", "experts", "latent"])
def test_shares_of_two_gpus(hf, config, bits):
    """As the shares of a folder that holds these numbers in bfloat16, a few columns and rows at a time."""
    folder, exact = release(hf, hf.qwen3_config | config)
    narrow = {
        name: value if name in BIASES else rounded(exact[name], ml_dtypes.bfloat16) for name, value in exact.items()
    }
    plain = put(hf.write("plain", hf.qwen3_config | config, {}), narrow)
    ranks = local_ranks(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface, "PART_BYTES", 4 * 333)
        ours, theirs = (open_checkpoint(one).load(ranks=ranks) for one in (folder, plain))
    assert ours.keys() == theirs.keys()
    assert all(bits(ours[name]) == bits(array) for name, array in theirs.items())


def test_memory_stays_far_below_a_matrix(hf):
    """128 MB of numbers, 32 MB of codes: no more than a slab of codes and a few pieces are held at a time."""
    weight = dequantized.Dequantized.of("weight", _large(hf.root / "large"), "bfloat16")
    tracemalloc.start()
    try:
        total = sum(piece.size for piece in weight.pieces(2 << 20))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert total == 4096 * 8192
    assert peak < 24 << 20


def _large(path: Path) -> Scaled:
    """A matrix of zeros in a file that takes no room on disk."""
    with path.open("wb") as file:
        file.truncate(4096 * 8192 + 32 * 64 * 4)
    codes, scales = Tensor("w", "F8_E4M3", (4096, 8192), path, 0), Tensor("s", "F32", (32, 64), path, 4096 * 8192)
    return Scaled(codes, scales, dequantized.float8, (4096, 8192), 4096, (128, 128))


def test_a_release_is_told_of(hf):
    folder, _ = release(hf, hf.qwen3_config)
    first, second, *_ = open_checkpoint(folder).notices
    assert first.startswith(
        "weights were released in float8 in blocks of 20 x 12: 20 tensors are dequantized while they are loaded"
    )
    assert "in bfloat16 (released: " in first
    assert second == "the release rounds activations as well (float8, dynamic); that is not done here"


def test_a_configuration_alone_changes_nothing(hf, bits):
    """Somebody dequantized the tensors and left the key."""
    folder = hf.qwen3()
    config = json.loads((folder / "config.json").read_text())
    before = open_checkpoint(folder).load()
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": BLOCKS}))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.notices == [
        "config.json tells of float8 in blocks of 128 x 128, and no tensor is in it: the tensors count"
    ]
    assert all(bits(before[name]) == bits(array) for name, array in checkpoint.load().items())


def test_a_drafter_in_float8(hf):
    folder, exact = release(hf, hf.dflash_config)
    assert open_checkpoint(folder).family.role == "draft"
    check_every_number(folder, exact, "bfloat16")


def test_conversion_and_the_way_back(hf):
    """The converted folder holds bfloat16, and what comes back says nothing of float8."""
    folder, exact = release(hf, hf.qwen3_config)
    assert hf.convert(folder, "--output", hf.root / "out", "--verify", "logits") == 0
    converted = open_converted(hf.root / "out")
    assert converted.dtype == "bfloat16"
    again = tensors_of(converted, converted.load())
    for name, value in again.items():
        np.testing.assert_array_equal(value, rounded(exact[name], ml_dtypes.bfloat16), err_msg=name)
    assert hf.convert(hf.root / "out", "--reverse", "--output", hf.root / "back") == 0
    config = json.loads((hf.root / "back" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["torch_dtype"] == "bfloat16"
    back = load(hf.root / "back" / "model.safetensors")
    assert back.keys() == exact.keys()
    for name, value in back.items():
        np.testing.assert_array_equal(value, again[name], err_msg=name)


def test_a_plan_names_what_it_does(hf, capsys):
    folder, _ = release(hf, hf.qwen3_config)
    rows = {row["source"]: row for row in open_checkpoint(folder).plan.rows()}
    assert (rows[f"{Q}.weight"]["stored"], rows[f"{Q}.weight"]["to"]) == ("float8_e4m3fn", "bfloat16")
    assert rows[f"{Q}.weight"]["op"] == "dequantize+stack"
    assert not any("scale" in name for name in rows)


def broken(folder: Path, **changes: np.ndarray | None) -> str:
    """The problems of a folder with a projection's tensors changed, or None for taken away."""
    changed = {f"{Q}.{part}": value for part, value in changes.items()}
    stored = load(folder / "model.safetensors") | changed
    put(folder, {name: value for name, value in stored.items() if value is not None})
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder).load()
    return "\n".join(caught.value.problems)


def test_scales_that_are_wrong_are_named(hf):
    def fresh() -> Path:
        return release(hf, hf.qwen3_config, shards=1)[0]

    scale = f"tensor {Q}.weight_scale_inv"
    assert broken(fresh(), weight_scale_inv=None) == (
        f"tensor {Q}.weight is in float8 and has no scale {Q}.weight_scale_inv; fetch the tensors again"
    )
    for shape in ((3, 2), (2, 2, 3), (), (1, 1), (6,)):
        found = broken(fresh(), weight_scale_inv=np.ones(shape, np.float32))
        assert found == (
            f"{scale} has shape {list(shape)}, expected [2, 3] for {Q}.weight of shape [32, 32]; fetch it again"
        )
    assert f"{scale} has dtype int32, expected scales in float32" in broken(
        fresh(), weight_scale_inv=np.ones((2, 3), np.int32)
    )
    for value in (np.nan, np.inf):
        found = broken(fresh(), weight_scale_inv=np.full((2, 3), value, np.float32))
        assert f"{scale} holds scales that are not finite" in found
    exponents = np.full((2, 3), 255, np.uint8).view(ml_dtypes.float8_e8m0fnu)
    assert f"{scale} holds scales that are not finite" in broken(fresh(), weight_scale_inv=exponents)
    nans = np.full((32, 32), 127, np.uint8).view(ml_dtypes.float8_e4m3fn)
    assert f"tensor {Q}.weight holds values that are not finite" in broken(fresh(), weight=nans)
    assert "has shape [1024], expected a matrix" in broken(fresh(), weight=np.zeros(1024, ml_dtypes.float8_e4m3fn))
    wrong = broken(
        fresh(), weight=np.zeros((32, 24), ml_dtypes.float8_e4m3fn), weight_scale_inv=np.ones((2, 2), np.float32)
    )
    assert f"tensor {Q}.weight has shape [32, 24], expected [32, 32]" in wrong
    assert "dtype float8_e5m2" in broken(fresh(), weight=np.zeros((32, 32), ml_dtypes.float8_e5m2))


def test_a_missing_shard_hides_no_other_problem(hf):
    folder, _ = release(hf, hf.qwen3_config, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert len(caught.value.problems) == 1
    assert "model-00002-of-00003.safetensors is missing" in caught.value.problems[0]


def test_other_formats_of_modelopt_are_refused(hf):
    folder, _ = release(hf, hf.qwen3_config, {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, None)
    with pytest.raises(ConfigError, match="quant_algo='W4A8_AWQ' in quantization_config, expected one of 'FP8'"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_block_size": [128]}, "weight_block_size in quantization_config must be two positive integers"),
        ({"weight_block_size": [128, 0]}, "weight_block_size"),
        ({"weight_block_size": [True, 128]}, "weight_block_size"),
        ({"weight_per_tensor": True}, "weight_per_tensor=True in quantization_config, expected one of None, False"),
        ({"fmt": "e5m2"}, "fmt='e5m2' in quantization_config, expected one of None, 'e4m3'"),
        ({"scale_fmt": "e2m1"}, "scale_fmt='e2m1'"),
        ({"activation_scheme": "block"}, "activation_scheme='block'"),
        (
            {"modules_to_not_convert": "lm_head"},
            "modules_to_not_convert in quantization_config must be a list of names",
        ),
        ({"expert_dtype": "fp4"}, "not known of fp8: expert_dtype"),
    ],
)
def test_what_is_not_read_is_refused_by_name(hf, changes, message):
    folder, _ = release(hf, hf.qwen3_config, CONFIG | changes)
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        open_checkpoint(folder)
