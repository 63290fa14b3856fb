"""DeepSeek V4: transformers' logits and taps, what its files say and what is refused, its drafter's file, and the way to our own
format and back."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import dflash_jax as dj
from dflash_jax.attention.dense import dense_attend
from dflash_jax.cache import LayerSpec, check_cache_dtype, layer_specs, make_pages, page_bytes
from dflash_jax.checkpoints.huggingface import open_checkpoint
from dflash_jax.checkpoints.pair import check_pair
from dflash_jax.checkpoints.weights import read_weights
from dflash_jax.engine.planning import plan_engine
from dflash_jax.engine.sharing import sharing_refusals
from dflash_jax.errors import ConfigError, PairError, ParameterError
from dflash_jax.execution.plan import CallShape, choose, exact_refusals
from dflash_jax.models import DFlashConfig, bind, count, family_for, family_of, layer_traits
from dflash_jax.models.deepseek_v4 import HEAVY, SLIDING, SPARSE, CompressedAttention, DeepseekV4Config
from dflash_jax.models.layers import Rotary
from dflash_jax.models.presets import DEEPSEEK_V4_TARGETS
from dflash_jax.options import LoadOptions
from dflash_jax.parallel.ranks import local_ranks, share_config

from ..published_layouts import LAYOUTS, TARGETS
from ..quantized_folders import Parts, drawn_float8, mxfp4, released, save
from .golden_files import GOLDEN, TOLERANCE, difference
from .golden_models import check_conversion, check_logits_and_taps, check_texts

FOLDER = GOLDEN / "deepseek_v4_folder"
FILE = TARGETS["DeepSeek V4"]
DRAFTER = LAYOUTS["speculators, of DeepSeek V4"]
YARN = FILE["rope_scaling"]
GREEDY = dj.SamplingParams(max_tokens=16, ignore_eos=True)


def read(notices: list[str] | None = None, /, **changes: Any) -> DeepseekV4Config:
    file = {key: value for key, value in (FILE | changes).items() if value is not ...}
    config = family_of(file).config(file, notices=notices)
    assert isinstance(config, DeepseekV4Config)
    return config


def test_transformers_logits_and_taps() -> None:
    """Of 40 tokens, beyond all windows and stretches, of which an indexer chooses four of ten."""
    check_logits_and_taps(FOLDER, TOLERANCE)


@pytest.mark.few
def test_devices_that_share_it() -> None:
    """Two of them, with half of the heads, of their groups and of the experts each: logits, taps and texts."""
    checkpoint, shared = open_checkpoint(FOLDER), local_ranks(2)
    assert shared is not None
    config: Any = checkpoint.config
    with np.load(FOLDER / "expected.npz") as file:
        ids, logits, taps = file["ids"].tolist(), file["logits"], file["taps"]

    def run(own: Any) -> tuple[jax.Array, jax.Array]:
        model, tokens = bind(share_config(config, 2), own), jnp.array([ids])
        places, every = jnp.arange(len(ids))[None], tuple(range(config.num_layers))
        hidden, streams, _ = model(tokens, places, dense_attend(), every)
        return model.logits(hidden)[0], jnp.stack(jnp.split(streams[0], config.num_layers, axis=-1))

    weights = read_weights(checkpoint, None, jnp.dtype("float32"), ranks=shared)["target"]
    ours = shared.each(run, weights, axis=None)
    assert difference(ours[0], logits) <= TOLERANCE
    assert difference(ours[1], taps) <= TOLERANCE
    small: Any = {"draft": False, "max_batch": 2, "max_model_len": 128}
    said = [dj.generate(dj.load(FOLDER, tp=tp, **small), [ids, [5, 6]], GREEDY) for tp in (1, 2)]
    assert [text.token_ids for text in said[0]] == [text.token_ids for text in said[1]]


@pytest.mark.few
def test_texts_in_pages_and_with_a_drafter_are_the_dense_models() -> None:
    check_texts(FOLDER, (-1, 1, 3))


@pytest.mark.few
def test_it_is_converted_there_and_back(tmp_path: Path) -> None:
    check_conversion(FOLDER, tmp_path)


def released_names() -> dict[str, np.ndarray]:
    """transformers writes some of its own."""
    return {
        name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_").replace(
            "attn.norm.", "attn.kv_norm."
        ): tensor
        for name, tensor in load_file(FOLDER / "model.safetensors").items()
    }  # fmt: skip


def test_names_of_the_release(tmp_path: Path) -> None:
    """Drafters inside of a checkpoint are left out."""
    tensors = released_names()
    assert "layers.0.attn.kv_norm.weight" in tensors
    save_file(tensors | {"mtp.0.attn.wkv.weight": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((FOLDER / "config.json").read_text())
    ours, theirs = (open_checkpoint(folder).load("float32") for folder in (tmp_path, FOLDER))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_the_release_in_eight_and_four_bits(tmp_path: Path) -> None:
    """Projections in float8 with exponents of blocks, experts of four bits in int8 with those of 32 columns, both as `X.scale`."""

    def of_eight(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Parts, np.ndarray]:
        codes, scales, exact = drawn_float8(shape, (8, 8), rng, powers=True)
        return {".weight": codes, ".scale": (np.log2(scales) + 127).astype(np.uint8)}, exact

    def of_four(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Parts, np.ndarray]:
        parts, exact = mxfp4(shape, rng)
        return {".weight": parts[".weight_packed"].view(np.int8), ".scale": parts[".weight_scale"]}, exact

    def projection(name: str, _: np.ndarray) -> bool:
        return ".compressor.w" not in name and any(
            part in name for part in (".wq_", ".wkv.", ".wo_", "shared_experts.")
        )

    tensors = {name: one.astype(np.float32) if one.dtype != np.int64 else one for name, one in released_names().items()}
    stored, exact = released(tensors, of_eight, projection)
    stored, whole = released(stored, of_four, lambda name, _: ".ffn.experts." in name)
    exact = {name: whole[name] if ".ffn.experts." in name else one for name, one in exact.items()}
    save(tmp_path / "model.safetensors", stored)
    file = json.loads((FOLDER / "config.json").read_text())
    said = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [8, 8],
    }
    (tmp_path / "config.json").write_text(json.dumps(file | {"quantization_config": said, "expert_dtype": "fp4"}))
    checkpoint = open_checkpoint(tmp_path)
    params, config = checkpoint.load("float32"), checkpoint.config
    for parameter in family_for(config).parameters(config):
        whole = np.concatenate([exact[source.name].reshape(source.taken) for source in parameter.sources])
        np.testing.assert_array_equal(np.asarray(params[parameter.name]), whole.astype(params[parameter.name].dtype))


def test_what_a_file_says() -> None:
    """In the words of the release, and in transformers'."""
    config = read()
    assert config.kinds == (SLIDING, SPARSE, HEAVY, SPARSE)
    assert (config.sparse_rate, config.heavy_rate, config.hashed) == (4, 128, (True, False, False, False))
    assert (config.rope.theta, config.rope.kind, config.rotary_dim) == (1e4, "default", 8)
    rope = config.compress_rope
    assert (rope.theta, rope.kind, rope.factor, rope.attention_factor) == (1.6e5, "yarn", 16.0, 1.0)
    theirs = {
        "compress_ratios": ..., "layer_types": [SLIDING, SPARSE, HEAVY, SPARSE], "compress_rates": {SPARSE: 4, HEAVY: 128},
        "num_hash_layers": ..., "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"], "qk_rope_head_dim": ...,
        "partial_rotary_factor": 0.5, "rope_scaling": ..., "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.5},
            "compress": {
                **{key: value for key, value in YARN.items() if key != "type"}, "rope_type": "yarn", "rope_theta": 160000,
                "attention_factor": 1.0, "partial_rotary_factor": 0.5,
            },
        },
    }  # fmt: skip
    assert read(**theirs) == config
    assert read(compress_rate_csa=4, compress_rate_hca=128, n_shared_experts=..., topk_method=...) == config
    assert read(compress_rate_csa=8).sparse_rate == 8
    assert read(compress_ratios=...).kinds == (HEAVY, HEAVY, HEAVY, SPARSE)
    assert read(num_hash_layers=...).hashed == (True, True, True, False)
    assert read(rope_scaling=...).compress_rope.kind == "default"
    assert type(config).from_dict(config.to_dict()) == config


def test_what_absent_keys_mean() -> None:
    """What transformers takes, sizes of the Flash."""
    config = DeepseekV4Config.from_hf({"architectures": ["DeepseekV4ForCausalLM"]})
    assert (config.num_layers, config.hidden_size, config.num_experts, config.rotary_dim) == (43, 4096, 256, 64)
    assert config.kinds == (HEAVY, HEAVY) + (HEAVY, SPARSE) * 20 + (HEAVY,)
    assert config.max_position == 1 << 20


def test_published_sizes() -> None:
    """Of the Flash: as many weights as transformers' class has, what its file says, and bytes of its pages in sixteen bits."""
    config = DEEPSEEK_V4_TARGETS["DeepSeek-V4-Flash"]
    assert count(family_for(config).parameters(config)) == 284_332_240_471
    rope = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65_536, "beta_fast": 32, "beta_slow": 1}
    ratios = [0, 0, *[4, 128] * 20, 4, 0]
    file = {"architectures": ["DeepseekV4ForCausalLM"], "compress_ratios": ratios, "rope_scaling": rope}
    assert DeepseekV4Config.from_hf(file) == config
    specs, kind = layer_specs(config), jnp.dtype("bfloat16")
    tokens = sum(spec.token_bytes(kind) for spec in specs if spec.window is not None)
    rows = sum(spec.rows(64) * spec.token_bytes(kind) for spec in specs if spec.window is None)
    assert {spec.window for spec in specs} == {128, None}
    assert (tokens, rows // 64) == (192_512, 7040)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"compress_ratios": [0, 4, 8, 4]}, "must list 0, 4 or 128"), ({"compress_ratios": [0, 4]}, "for each of 4 layers"),
        ({"layer_types": [SPARSE] * 4}, "say different things"), ({"layer_types": ["full_attention"] * 4}, "must list sliding"),
        ({"compress_rates": {SPARSE: 4}}, HEAVY), ({"compress_rates": {SPARSE: 4, HEAVY: 8, "other": 2}}, "other"),
        ({"compress_rates": {SPARSE: 4, HEAVY: 8}, "compress_rate_hca": 9}, "keep one"),
        ({"mlp_layer_types": ["moe"] * 4}, "say different things"), ({"mlp_layer_types": ["dense"] * 4}, "must list hash_moe"),
        ({"scoring_func": "tanh"}, "scoring_func must be"), ({"topk_method": "greedy"}, "topk_method"),
        ({"n_shared_experts": 2}, "n_shared_experts"), ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"num_experts_per_tok": 5}, "cannot take 5"), ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"hidden_act": "gelu"}, "hidden_act"), ({"attention_bias": True}, "attention_bias"), ({"swiglu_limit": 0}, "positive"),
        ({"qk_rope_head_dim": 7}, "must be even"), ({"qk_rope_head_dim": 10}, "no more than"), ({"o_groups": 3}, "o_groups"),
        ({"partial_rotary_factor": 0.25}, "keep one"), ({"rope_parameters": {"main": {}}, "rope_scaling": None}, "both of main"),
        ({"rope_parameters": {"main": {}, "compress": {}, "factor": 2.0}, "rope_scaling": None}, "beside main and compress"),
        ({"rope_parameters": YARN | {"factor": 2}}, "keep one"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type must be default"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"), ({"layer_scale": 1.0}, "layer_scale"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"), ({"dspark_block_size": 6}, "dspark_block_size"),
    ],
)  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(**changes)


def test_what_its_layers_do_not_go_with() -> None:
    config = read()
    plan = choose(layer_traits(config), CallShape(1, 8, jnp.dtype("bfloat16")))
    assert plan.runner == "plain"
    assert sharing_refusals(config, None, 2) == []
    assert any("2 groups of heads" in reason for reason in sharing_refusals(config, None, 4))
    with pytest.raises(ParameterError, match="keeps compressed keys"):
        plan_engine(open_checkpoint(FOLDER), None, LoadOptions(tp=2, decode_context_parallel_size=2))
    assert any("compressed keys" in reason for reason in exact_refusals(layer_traits(config), 5))
    with pytest.raises(ParameterError, match="compressed keys"):
        check_cache_dtype(config, "fp8")
    with pytest.raises(ParameterError, match="compressed keys"):
        plan_engine(open_checkpoint(FOLDER), None, LoadOptions(weight_dtype="int8"))
    layer = CompressedAttention(config, 0)
    with pytest.raises(NotImplementedError, match="no attention to compressed keys"):
        layer(jnp.zeros((1, 2, 32)), Rotary(*(jnp.zeros((1, 2, 8)),) * 2), object())


def test_what_the_pages_keep() -> None:
    """Keys and what compressed rows are made of, as far back as a query or a row to come needs them; one compressed row for each
    stretch that ends in a page."""
    config = read()
    sparse, heavy = LayerSpec(1, 16 + 4 * 24, None, window=9), LayerSpec(1, 48, None, window=128)
    rows = LayerSpec(1, 24, None, stride=4), LayerSpec(1, 16, None, stride=128), LayerSpec(1, 24, None, stride=4)
    assert layer_specs(config) == (LayerSpec(1, 16, None, window=9), sparse, heavy, sparse, *rows)
    pages = make_pages(config, 3, 16, jnp.dtype("float32"))
    assert [pool.shape[2:] for pool in pages.k[4:]] == [(4, 24), (1, 16), (4, 24)]
    assert sum(pool.nbytes for pool in pages.k) == 3 * page_bytes(config, 16, jnp.dtype("float32"))
    assert pages.page_size == 16


def test_what_its_drafter_says() -> None:
    """Features of all four streams; the width of one may be named, or that of all."""
    target, names = read(), ("lm_head.weight", "d2t")
    config = family_of(DRAFTER).config(DRAFTER, names)
    assert isinstance(config, DFlashConfig)
    assert (config.target_hidden_size, config.target_layer_ids) == (4 * 32, (0, 1, 3))
    for width in (32, 128):
        assert family_of(DRAFTER).config(DRAFTER | {"target_hidden_size": width}, names) == config
    check_pair(target, config)
    plain = family_of(DRAFTER).config(LAYOUTS["speculators, reduced vocabulary"], names)
    with pytest.raises(PairError, match="width 32, the target's are 128"):
        check_pair(target, plain)
    assert family_of(DRAFTER).canonical("hc_head_fn") is None
