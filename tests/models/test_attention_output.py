"""What latent attention gives, quantized and multiplied: against float64 with the rounding applied, and through `load`."""

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import dflash_jax as dj
from dflash_jax.attention.dense import dense_attend
from dflash_jax.bench.workload import random_pair
from dflash_jax.errors import ParameterError
from dflash_jax.models import DeepseekConfig, bind, family_named, init_params, to_huggingface
from dflash_jax.models.layers import Rotary
from dflash_jax.options import ATTENTION_OUTPUTS
from dflash_jax.quantization.attention_output import check_attention_output, layer_scale, with_outputs
from dflash_jax.quantization.weights import Quantized, quantize_weights

from ..kernels.test_quantize import E2M1, E4M3, nearest
from .test_quantized import dequantized

CONFIG = DeepseekConfig(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=24,
    windows=(None,) * 2, q_lora_rank=24, kv_lora_rank=64, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=32,
    num_experts=4, experts_per_token=2, num_shared_experts=1, routing="noaux_tc", num_groups=1, groups_per_token=1,
    norm_routing_weights=True, routing_scale=1.0, num_dense_layers=1, moe_intermediate_size=32,
)  # fmt: skip
# How far a number is from what is kept of it, of the largest of those that share its scale. One scale of the layer lies above all.
CLOSE = {"fp8": 2.0**-4, "fp8_groups": 2.0**-4, "nvfp4": 1 / 6 + 0.08}


@functools.cache
def plain_weights() -> dict[str, Any]:
    params = init_params(family_named("deepseek").parameters(CONFIG), jax.random.key(0))
    return quantize_weights(params, "fp8_dynamic")


def weights(kind: Any) -> dict[str, Any]:
    return with_outputs(CONFIG, plain_weights(), kind)


def e4m3(x: np.ndarray) -> np.ndarray:
    return np.sign(x) * E4M3[nearest(x, E4M3)]


def rounded(rows: np.ndarray, kind: str, scale: float) -> np.ndarray:
    """In float64: what a format keeps of rows; `scale` of the layer, where there is one."""
    if kind == "fp8":
        return e4m3(rows / scale) * scale
    group = 128 if kind == "fp8_groups" else 16
    parts = rows.reshape(len(rows), -1, group)
    top = np.abs(parts).max(-1, keepdims=True)
    if kind == "fp8_groups":
        scales = np.exp2(np.ceil(np.log2(np.maximum(top, 1e-10) / 448)))
        return (e4m3(parts / scales) * scales).reshape(rows.shape)
    whole = 6 / scale
    scales = e4m3(whole * top / 6)
    factors = np.where(scales > 0, whole / np.where(scales > 0, scales, 1), 0)
    codes = parts * factors
    return (np.sign(codes) * E2M1[nearest(codes, E2M1)] * scales / whole).reshape(rows.shape)


class Given:
    """Attention that gives what it is told."""

    def __init__(self, out: Any):
        self.out = out

    def latent(self, layer: Any, q: Any, row: Any, rotary: Any, cache: Any) -> tuple[Any, Any]:
        return self.out, cache


@jax.jit
def attended(params: Any, out: Any) -> Any:
    """A layer's attention around `out [1, T, N, V]`."""
    x = jnp.ones((1, out.shape[1], 64), out.dtype)
    layer = bind(CONFIG, params).layers[1].attn
    rotary = Rotary(*jnp.zeros((2, 1, out.shape[1], 4)))
    return layer(x, rotary, Given(out))[0][0]


@pytest.mark.few("bfloat16-3-nvfp4", "float32-80-fp8_groups", "float32-80-nvfp4")
@pytest.mark.parametrize("kind", ATTENTION_OUTPUTS)
@pytest.mark.parametrize("tokens", [3, 80])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_the_layer_multiplies_what_the_format_keeps(kind: str, tokens: int, dtype: Any) -> None:
    def in_dtype(one: Any) -> Any:
        return dataclasses.replace(one, dtype=dtype) if isinstance(one, Quantized) else one.astype(dtype)

    params = {name: in_dtype(one) for name, one in weights(kind).items()}
    matrix: Any = params["layers.1.attn.o_proj.weight"]
    rng = np.random.default_rng(tokens)
    out = rng.standard_normal((1, tokens, 4, 32)) * np.logspace(-3, 0.3, tokens)[:, None, None]
    out[:, 1] = 0
    out = jnp.asarray(out, dtype)
    found = attended(params, out)
    assert found.dtype == dtype
    exact = np.asarray(out, np.float64).reshape(tokens, -1)
    kept = rounded(exact, kind, 1.0 if matrix.output_scale is None else float(matrix.output_scale))
    true = kept @ dequantized(matrix).T
    off, eps = np.abs(np.asarray(found, np.float64) - true), 2 * float(jnp.finfo(dtype).eps)
    noise = np.abs(kept) @ np.abs(dequantized(matrix)).T * 2.0**-12
    assert (off <= eps * np.abs(true) + noise).mean() > 0.95  # a number between two codes may go to either
    reach = np.abs(exact).max(-1, keepdims=True) * np.abs(dequantized(matrix)).sum(-1)
    assert (off <= CLOSE[kind] * reach + eps * np.abs(true)).all()
    assert not np.asarray(found, np.float32)[1].any()


@pytest.mark.parametrize("seed", range(3))
def test_no_output_passes_its_layers_scale_and_one_reaches_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    up, norm = rng.standard_normal((4 * 48, 64)), rng.uniform(0.2, 3, 64)
    scale = float(layer_scale(jnp.asarray(up, jnp.float32), jnp.asarray(norm, jnp.float32), nope=16, value=32))
    values = up.reshape(4, 48, 64)[:, 16:].reshape(-1, 64) * norm
    worst = values[np.argmax(np.linalg.norm(values, axis=1))]
    latents = np.concatenate([rng.standard_normal((500, 64)), rng.standard_cauchy((500, 64)), worst[None]])
    latents /= np.sqrt(np.mean(latents**2, axis=1, keepdims=True))
    top = np.abs(latents @ values.T).max(axis=1)
    assert top.max() <= 448 * scale
    assert top[-1] > 448 * scale / 1.08
    assert float(layer_scale(jnp.zeros((192, 64)), jnp.ones(64), nope=16, value=32)) == 1.0


@pytest.mark.few
def test_logits_move_by_as_much_as_the_format_says() -> None:
    """Of the spread of logits: what docs/limits.md quotes."""
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 96, (2, 24)))
    positions = jnp.broadcast_to(jnp.arange(24), ids.shape)

    @jax.jit
    def logits(params: Any) -> jax.Array:
        model = bind(CONFIG, params)
        return model.logits(model(ids, positions, dense_attend())[0])

    plain = np.asarray(logits(weights(None)), np.float64)
    moved = {
        kind: np.sqrt(np.mean((np.asarray(logits(weights(kind)), np.float64) - plain) ** 2)) / plain.std()
        for kind in ATTENTION_OUTPUTS
    }
    # The model's own rounding of weights moves them by 0.12.
    assert 0.01 < moved["fp8_groups"] < 0.08
    assert 0.01 < moved["fp8"] < 0.08
    assert 0.08 < moved["nvfp4"] < 0.3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A Hugging Face folder of such a target."""
    path = tmp_path_factory.mktemp("target")
    config = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 96, "hidden_size": 64,
        "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1,
        "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
        "routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "max_position_embeddings": 128, "eos_token_id": 3,
        "num_nextn_predict_layers": 0, "rope_theta": 10000.0,
    }  # fmt: skip
    table = family_named("deepseek").parameters(CONFIG)
    rng = np.random.default_rng(0)
    params = {row.name: (rng.normal(size=row.shape) * 0.3).astype(np.float32) for row in table}
    save_file(
        {name: np.ascontiguousarray(one) for name, one in to_huggingface(table, params).items()},
        path / "model.safetensors",
    )
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.few("nvfp4-2")
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", ATTENTION_OUTPUTS)
def test_a_model_that_is_loaded_so(folder: Any, kind: Any, tp: int) -> None:
    """Its text is that of its own layers without pages, also where devices each have a part of what is rounded."""
    options: Any = {"max_model_len": 64, "page_size": 16, "max_batch": 1, "weight_dtype": "fp8_dynamic"}
    model = dj.load(folder, draft=False, attention_output=kind, tp=tp, **options)
    given = [5, 9, 11, 2, 40]
    out = dj.generate(model, given, dj.SamplingParams(max_tokens=6, ignore_eos=True))
    whole = model if tp == 1 else dj.load(folder, draft=False, attention_output=kind, **options)
    params: Any = whole.engine.weights["target"]
    found: Any = params["layers.0.attn.o_proj.weight"]
    assert (found.outputs, found.output_scale is None) == (kind, kind == "fp8_groups")
    ids = jnp.asarray([given + out.token_ids])
    target = jax.jit(
        lambda params: (model := bind(CONFIG, params)).logits(
            model(ids, jnp.arange(ids.shape[1])[None], dense_attend())[0]
        )
    )
    chosen = jnp.argmax(target(params)[0, len(given) - 1 : -1], axis=-1).tolist()
    # A number on the border between two codes may go to either, and so may a near tie of tokens.
    assert sum(one == other for one, other in zip(chosen, out.token_ids, strict=True)) >= 4


def test_what_is_refused() -> None:
    with pytest.raises(
        ParameterError, match="attention_output='nvfp4' is for latent attention, and this target's has keys"
    ):
        dj.load(attention_output="nvfp4", weight_dtype="fp8_dynamic")
    with pytest.raises(ParameterError, match="attention_output='fp8' is for latent attention"):
        random_pair("qwen3-4b", attention_output="fp8", weight_dtype="fp8_dynamic")
    with pytest.raises(
        ParameterError, match="a multiple of 64 columns, this target's attention gives 32 on each GPU: take 'fp8'"
    ):
        check_attention_output(CONFIG, "fp8_groups", 4)
    narrow = dataclasses.replace(CONFIG, v_head_dim=10)
    with pytest.raises(ParameterError, match="a multiple of 16 columns, this target's attention gives 40: take"):
        check_attention_output(narrow, "nvfp4", 1)
    check_attention_output(narrow, "fp8", 1)
    check_attention_output(narrow, None, 1)
