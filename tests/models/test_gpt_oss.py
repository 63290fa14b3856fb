"""gpt-oss: what `config.json` means, transformers' logits, MXFP4 bit for bit, conversion both ways, and DFlash over it without a
changed token."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import AddNorm, Mxfp4Tiles, token_attention_exchange
from flax import nnx
from safetensors.numpy import load_file

from dflash_jax.attention import paged
from dflash_jax.attention.dense import dense_attend
from dflash_jax.attention.paged import PagedAttend
from dflash_jax.cache.pages import make_pages
from dflash_jax.checkpoints.converted import open_converted
from dflash_jax.checkpoints.huggingface import open_checkpoint
from dflash_jax.checkpoints.weights import read_weights, reading_bytes, stored_shapes, weight_bytes, weight_shapes
from dflash_jax.cli.info import collect, lines
from dflash_jax.engine import planning
from dflash_jax.engine.planning import plan_engine
from dflash_jax.errors import CapacityError, CheckpointError, ConfigError, ParameterError
from dflash_jax.execution import plan, switches
from dflash_jax.execution.plan import PLAIN, CallShape, ExecutionPlan, WeightFormat, choose, weight_format
from dflash_jax.execution.runner import Planned
from dflash_jax.execution.weight_layout import check_scales, tile_experts
from dflash_jax.models import DFlashConfig, GptOssConfig, bind, count, family_for, family_of, init_params, layer_traits
from dflash_jax.models.gpt_oss import BiasedMoE, gpt_oss_derived, gpt_oss_parameters
from dflash_jax.models.presets import GPT_OSS_TARGETS
from dflash_jax.options import LoadOptions
from dflash_jax.quantization.mxfp4 import Mxfp4, dequantize
from dflash_jax.sampling_params import SamplingParams

from ..convert.conftest import Folders
from ..devices import custom_calls, h200
from ..random_pair import Pair, random_prompts
from .golden_files import GOLDEN, TOLERANCE, difference
from .gpt_oss_reference import forward, mxfp4, packed, random_file, random_tensors, unpacked
from .test_parity_llama import logits_and_taps, opened

FOLDER = GOLDEN / "gpt_oss_folder"
PUBLISHED: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200_002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131_072, "model_type": "gpt_oss",
    "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
    "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199_999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150_000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 201_088,
}  # fmt: skip


def read(file: dict[str, Any] = PUBLISHED, /, **changes: Any) -> GptOssConfig:
    file = {key: value for key, value in (file | changes).items() if value is not ...}
    config = family_of(file).config(file)
    assert isinstance(config, GptOssConfig)
    return config


def test_the_published_file_reads_as_its_preset() -> None:
    preset = GPT_OSS_TARGETS["gpt-oss-20b"]
    assert read() == preset
    assert type(preset).from_dict(preset.to_dict()) == preset
    assert family_of({"model_type": "gpt_oss"}) is family_for(preset)
    larger = {
        "num_hidden_layers": 36,
        "num_local_experts": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    }
    assert read(**larger) == GPT_OSS_TARGETS["gpt-oss-120b"]


def test_absent_keys_are_those_of_the_larger_one() -> None:
    kept = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "model_type",
    )
    file = {key: PUBLISHED[key] for key in kept} | {
        "num_hidden_layers": 36,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
    }
    assert (
        family_of(file).config(file | {"quantization_config": {"quant_method": "mxfp4"}})
        == GPT_OSS_TARGETS["gpt-oss-120b"]
    )
    assert read(rope_theta=...).rope.theta == 150_000
    rope = {"rope_type": "default", "rope_theta": 1e4}
    assert read(rope_theta=..., rope_scaling=..., rope_parameters=rope, initial_context_length=...).rope.theta == 1e4


@pytest.mark.parametrize("name", GPT_OSS_TARGETS)
def test_presets_have_their_published_size(name: str) -> None:
    """Counted as weights in both releases; bytes are 4.25 bits a weight of an expert."""
    config = GPT_OSS_TARGETS[name]
    family, half = family_for(config), replace(config, mxfp4=False)
    sizes = {"gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672}
    assert [count(family.parameters(one)) for one in (config, half)] == [sizes[name]] * 2
    experts = 3 * config.num_layers * config.num_experts * 2880 * 2880
    stored = stored_shapes([(config, family)], jnp.dtype("bfloat16"))
    assert weight_bytes(stored) == 2 * (sizes[name] - experts) + experts * 17 // 32
    kept = weight_shapes([(config, family)], jnp.dtype("bfloat16"))
    assert weight_bytes(kept) == 2 * sizes[name]
    assert reading_bytes(stored, kept) > weight_bytes(kept)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 16}, "num_local_experts=32 and num_experts=16"), ({"experts_per_token": 2}, "experts_per_token=2"),
        ({"experts_per_token": 64, "num_experts_per_tok": 64}, "more than num_local_experts=32"),
        ({"initial_context_length": 8192}, "initial_context_length=8192"), ({"swiglu_limit": 0}, "swiglu_limit must be positive"),
        ({"layer_types": ["full_attention"]}, "layer_types must list"), ({"hidden_act": "gelu"}, "hidden_act must be silu"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized .'awq'."), ({"use_sliding_window": True}, "use_sliding"),
        ({"quantization_config": {"quant_method": "mxfp4", "group": 16}}, "not known of MXFP4: group"),
        ({"moe_intermediate_size": 64}, "moe_intermediate_size=64"), ({"hidden_size": 2896}, "blocks of 32"),
        ({"use_qk_norm": True}, "use_qk_norm"), ({"sliding_window": 0}, "sliding_window must be"),
    ],
)  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(**changes)


def test_a_folder_that_transformers_wrote_gives_its_logits_and_taps() -> None:
    checkpoint = open_checkpoint(FOLDER)
    with np.load(FOLDER / "expected.npz") as file:
        ids, theirs, taps = file["ids"], file["logits"], file["taps"]
    logits, ours = logits_and_taps(checkpoint.config, checkpoint.load("float32"), ids.tolist())
    assert difference(logits, theirs) <= TOLERANCE
    assert difference(ours[:-1], taps) <= TOLERANCE


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_four_bits_are_read_as_transformers_reads_them(dtype: str) -> None:
    """Every byte and every scale, numbers that are too large or below the normal ones included."""
    with np.load(FOLDER / "mxfp4.npz") as file:
        blocks, scales, bits = file["blocks"][0], file["scales"][0], file["bits"][0].T
    ours = np.asarray(dequantize(jnp.asarray(blocks), jnp.asarray(scales), dtype))
    if dtype == "bfloat16":
        assert np.array_equal(ours.view(np.uint16), bits)
    else:
        assert ours.tobytes() == mxfp4(blocks, scales).tobytes()


def test_experts_in_four_bits_are_loaded_as_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release in MXFP4 and the same in floating point are one model, and one set of weights."""
    file = random_file(0) | {"quantization_config": {"quant_method": "mxfp4"}}
    tensors = packed(random_tensors(file))
    (tmp_path / "four").mkdir()
    (tmp_path / "many").mkdir()
    four, many = opened(tmp_path / "four", file, tensors), opened(tmp_path / "many", file, unpacked(tensors))
    assert (four.config.mxfp4, many.config.mxfp4) == (True, False)
    assert not four.notices
    assert "tells of MXFP4, the experts' tensors are in floating point" in many.notices[0]
    ours, theirs = (read_weights(one, None, jnp.dtype("float32"))["target"] for one in (four, many))
    assert ours.keys() == theirs.keys()
    assert all(np.asarray(ours[name]).tobytes() == np.asarray(theirs[name]).tobytes() for name in theirs)
    kept = read_weights(four, None, jnp.dtype("float32"), "mxfp4")["target"]
    assert sum(isinstance(one, Mxfp4) for one in kept.values()) == 2 * four.config.num_layers
    shapes = weight_shapes([(four.config, four.family)], jnp.dtype("float32"), "mxfp4")
    assert weight_bytes({"target": kept}) == weight_bytes(shapes) == reading_bytes(shapes, shapes)
    plan = choose(layer_traits(four.config), CallShape(1, 8, jnp.dtype("bfloat16")), weight_format(kept))
    assert "stored in MXFP4" in (plan.refused("fused_moe") or "")
    with pytest.raises(ParameterError, match="none of this checkpoint is in MXFP4"):
        plan_engine(many, None, LoadOptions(weight_dtype="mxfp4"))
    assert plan_engine(four, None, LoadOptions(weight_dtype="mxfp4"))[1].weights == weight_bytes(shapes)
    monkeypatch.setattr(planning, "free_memory", lambda: 1000)
    with pytest.raises(CapacityError, match='With weight_dtype="mxfp4" experts stay in the four bits'):
        plan_engine(four, None, LoadOptions())
    monkeypatch.undo()
    text = "\n".join(lines(collect(tmp_path / "four", draft=False, weight_dtype="mxfp4")))
    assert "experts in mxfp4, as they were released" in text
    assert weight_bytes({"target": ours}) == weight_bytes(
        weight_shapes([(four.config, four.family)], jnp.dtype("float32"))
    )


@pytest.mark.few("mxfp4")
@pytest.mark.parametrize("release", ["floating point", "mxfp4"])
def test_round_trip_keeps_every_bit(release: str, tmp_path: Path) -> None:
    hf, file = (
        Folders(tmp_path),
        random_file(1, num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"]),
    )
    tensors = random_tensors(file)
    if release == "mxfp4":
        tensors, file = packed(tensors), file | {"quantization_config": {"quant_method": "mxfp4"}}
    folder = hf.write("target", file, tensors, shards=2)
    assert hf.convert(folder, "--output", tmp_path / "out", "--verify", "logits") == 0
    assert open_converted(tmp_path / "out").config == open_checkpoint(folder).config
    assert hf.convert(tmp_path / "out", "--reverse", "--output", tmp_path / "back") == 0
    back = {
        name: value for path in (tmp_path / "back").glob("*.safetensors") for name, value in load_file(path).items()
    }
    assert back.keys() == tensors.keys()
    assert all(back[name].tobytes() == tensors[name].tobytes() for name in tensors)
    text = "\n".join(lines(collect(folder, draft=None)))
    assert "gpt_oss from" in text
    assert f"{file['num_experts_per_tok']} of {file['num_local_experts']} experts a token" in text


@pytest.mark.parametrize("name", GPT_OSS_TARGETS)
def test_four_bits_stay_where_a_kernel_reads_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper in bfloat16, without an option: as many bytes as were released, of which the 120b's fit one GPU of 80 GB."""
    config = GPT_OSS_TARGETS[name]
    family, half = family_for(config), jnp.dtype("bfloat16")
    with h200():
        for asked in (None, "mxfp4"):
            kept = weight_shapes([(config, family)], half, asked)
            stored = stored_shapes([(config, family)], half)
            assert weight_bytes(kept) == weight_bytes(stored) < 66e9
            assert reading_bytes(stored, kept) < weight_bytes(kept) + 2e9
            tiles = [one for one in kept["target"].values() if isinstance(one, Mxfp4Tiles)]
            assert len(tiles) == 2 * config.num_layers
        held = weight_format(kept["target"])
        runners = {
            rows: choose(layer_traits(config), CallShape(1, rows, half), held).runner for rows in (1, 8, 1024, 2048)
        }
        assert runners == {1: "fused_moe", 8: "fused_moe", 1024: "fused_moe", 2048: "plain"}
        monkeypatch.setattr(switches, "FUSED_MXFP4", False)
        off = choose(layer_traits(config), CallShape(1, 8, half), held)
        assert off.runner == "plain"
        assert "switched off" in (off.refused("fused_moe") or "")
        others = [
            weight_shapes([(config, family)], jnp.dtype("float32")),
            weight_shapes([(config, family)], half, "int8"),
        ]
        monkeypatch.setattr(switches, "FOUR_BITS", False)
        others.append(weight_shapes([(config, family)], half))
        assert not any(isinstance(one, Mxfp4Tiles) for shapes in others for one in shapes["target"].values())


def make_experts(tokens: int, dtype: str) -> tuple[BiasedMoE, BiasedMoE, Any]:
    """A layer's feed-forward with its experts as they were released, the same with them in tiles, and rows."""
    config = replace(
        GPT_OSS_TARGETS["gpt-oss-20b"], vocab_size=64, hidden_size=64, intermediate_size=128, num_layers=1, windows=(None,),
        num_experts=4, experts_per_token=2,
    )  # fmt: skip
    key = jax.random.key(0)
    params = gpt_oss_derived(config, init_params(gpt_oss_parameters(config), key, dtype))
    table = {name: one for name, one in params.items() if name.startswith("layers.0.mlp.")}
    biases = [name for name in table if name.endswith("bias")]
    table |= {name: jax.random.normal(key, table[name].shape, dtype) for name in biases}
    made = []
    for one in (table, tile_experts(config, {**table})):
        layer = BiasedMoE(config)
        layer.router.weight, layer.router.bias = (
            nnx.Param(one[f"layers.0.mlp.router.{x}"]) for x in ("weight", "bias")
        )
        for name in ("gate_up_proj", "down_proj"):
            matrix = getattr(layer.experts, name)
            matrix.weight, matrix.bias = (
                nnx.Param(one[f"layers.0.mlp.experts.{name}.{x}"]) for x in ("weight", "bias")
            )
        made.append(layer)
    return made[0], made[1], jax.random.normal(key, (1, tokens, 64), dtype)


SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
    "num_layers": 3, "windows": (3, None, 3), "num_experts": 4, "experts_per_token": 2,
}  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 9])
def test_the_fused_runner_agrees_with_layers_called_one_by_one(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases of attention's output and of the router, sinks, and norms that are rounded last."""
    config = replace(GPT_OSS_TARGETS["gpt-oss-20b"], **SMALL)
    params = gpt_oss_derived(config, init_params(gpt_oss_parameters(config), jax.random.key(0)))
    drawn = [name for name in params if name.endswith((".bias", "norm.weight", ".sinks"))]
    params |= {name: 1 + jax.random.normal(jax.random.key(len(name)), params[name].shape) for name in drawn}
    tiled = tile_experts(config, params)
    monkeypatch.setattr(plan, "mxfp4_mixture_refusal", lambda *_, **__: None)
    chosen = choose(
        layer_traits(config), CallShape(1, tokens, jnp.dtype("float32")), WeightFormat("float32", experts="mxfp4_tiles")
    )
    assert chosen.runner == "fused_moe"

    def run(one: ExecutionPlan) -> list[jax.Array]:
        def outputs(params: Any, ids: jax.Array) -> list[jax.Array]:
            model: Any = bind(config, params)
            rotary = model.rotary(jnp.arange(tokens)[None])
            streams, last, _ = Planned(one)(model.layers, model.norm, model.embed(ids), rotary, dense_attend(), None)
            return [*streams, last]

        return jax.jit(outputs)(tiled, jnp.arange(tokens)[None])

    for expected, found in zip(run(PLAIN), run(chosen), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * float(jnp.abs(expected).max()))


def test_a_projection_that_writes_is_the_projection_and_the_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls, the second behind the first, over a window and over all; one token of the second sequence writes nothing."""
    config = replace(GPT_OSS_TARGETS["gpt-oss-20b"], **SMALL)
    params = init_params(gpt_oss_parameters(config), jax.random.key(0))
    model: Any = bind(config, gpt_oss_derived(config, params))
    monkeypatch.setattr(paged, "few_qkv_write_refusal", lambda *_, **__: None)
    table = jnp.asarray([[2, 0, 5], [1, 4, 3]])
    kept = {name: make_pages(config, 6, 4, jnp.dtype("float32")) for name in ("apart", "whole")}
    for first, lens in ((0, [4, 3]), (4, [4, 4])):
        positions = jnp.asarray([[0], [-1 if first else 0]]) + first + jnp.arange(4)
        attend = PagedAttend(table, positions, jnp.asarray(lens), 4)
        x, rotary = jax.random.normal(jax.random.key(first), (2, 4, config.hidden_size)), model.rotary(positions)
        for layer in model.layers:
            projected = layer.attn.qkv_proj(x)
            expected, kept["apart"] = attend(layer.attn, projected, rotary, kept["apart"])
            same, found, kept["whole"] = layer.attn.mix_rows(x, rotary, attend, kept["whole"])
            assert np.array_equal(same, x)
            for one, true in zip(
                jax.tree.leaves((found, kept["whole"])), jax.tree.leaves((expected, kept["apart"])), strict=True
            ):
                np.testing.assert_allclose(one, true, rtol=0, atol=1e-5)


def test_a_projection_that_norms_is_the_norm_and_the_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token at a time, over pages: all layers' streams."""
    config = replace(GPT_OSS_TARGETS["gpt-oss-20b"], **SMALL)
    params = gpt_oss_derived(config, init_params(gpt_oss_parameters(config), jax.random.key(0)))
    model: Any = bind(config, tile_experts(config, params))
    monkeypatch.setattr(paged, "few_qkv_write_refusal", lambda *_, **__: None)
    monkeypatch.setattr(plan, "mxfp4_mixture_refusal", lambda *_, **__: None)
    written = [0]
    real = paged.few_qkv_write

    def counted(*args: Any, **options: Any) -> Any:
        written[0] += options.get("added") is not None
        return real(*args, **options)

    monkeypatch.setattr(paged, "few_qkv_write", counted)
    shape, weights = CallShape(1, 1, jnp.dtype("float32")), WeightFormat("float32", experts="mxfp4_tiles")
    found = {}
    for together in (False, True):
        monkeypatch.setattr(switches, "NORM_HEADS", together)
        chosen, kept = choose(layer_traits(config), shape, weights), make_pages(config, 6, 4, jnp.dtype("float32"))
        found[together] = []
        assert chosen.runner == "fused_moe"
        for token in range(5):
            positions = jnp.asarray([[token]])
            attend = PagedAttend(jnp.asarray([[2, 0, 5]]), positions, jnp.asarray([1]), 4)
            x = jax.random.normal(jax.random.key(token), (1, 1, config.hidden_size))
            streams, last, kept = Planned(chosen)(model.layers, model.norm, x, model.rotary(positions), attend, kept)
            found[together].append([*streams, last, *kept.k, *kept.v])
        assert written[0] == 5 * (len(model.layers) - 1) * together
    for true, one in zip(jax.tree.leaves(found[False]), jax.tree.leaves(found[True]), strict=True):
        np.testing.assert_allclose(one, true, rtol=0, atol=1e-5)


def test_a_tokens_attention_is_that_of_separate_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token at a time, over pages, behind a window too, and one that is not real: all layers' streams."""
    config = replace(GPT_OSS_TARGETS["gpt-oss-20b"], **SMALL)
    params = gpt_oss_derived(config, init_params(gpt_oss_parameters(config), jax.random.key(0)))
    model: Any = bind(config, tile_experts(config, params))
    monkeypatch.setattr(paged, "token_attention_refusal", lambda *_, **__: None)
    monkeypatch.setattr(plan, "mxfp4_mixture_refusal", lambda *_, **__: None)
    calls, real = [0], paged.token_attention

    def counted(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        return real(*args, **options)

    monkeypatch.setattr(paged, "token_attention", counted)
    shape, weights = CallShape(1, 1, jnp.dtype("float32")), WeightFormat("float32", experts="mxfp4_tiles")
    chosen, found = choose(layer_traits(config), shape, weights), {}
    for together in (False, True):
        monkeypatch.setattr(switches, "TOKEN_ATTENTION", together)
        kept, found[together] = make_pages(config, 6, 4, jnp.dtype("float32")), []
        for token in range(7):
            positions, live = jnp.asarray([[token]]), token < 6
            attend = PagedAttend(jnp.asarray([[2, 0, 5]]), positions, jnp.asarray([int(live)]), 4)
            x = jax.random.normal(jax.random.key(token), (1, 1, config.hidden_size))
            streams, last, kept = Planned(chosen)(model.layers, model.norm, x, model.rotary(positions), attend, kept)
            found[together].append([*streams, last, *kept.k, *kept.v])
        assert calls[0] == 7 * len(model.layers) * together
    for true, one in zip(jax.tree.leaves(found[False]), jax.tree.leaves(found[True]), strict=True):
        np.testing.assert_allclose(one, true, rtol=0, atol=1e-5)


def test_what_keeps_separate_launches_at_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(GPT_OSS_TARGETS["gpt-oss-20b"], **SMALL)
    params = init_params(gpt_oss_parameters(config), jax.random.key(0))
    model: Any = bind(config, gpt_oss_derived(config, params))
    monkeypatch.setattr(paged, "token_attention_refusal", lambda *_, **__: None)
    pages, layer = make_pages(config, 6, 4, jnp.dtype("float32")), model.layers[0]

    def attended(tokens: int = 1, dtype: Any = jnp.float32, **how: Any) -> bool:
        positions, shape = jnp.arange(tokens)[None], (tokens, config.hidden_size)
        attend = PagedAttend(jnp.asarray([[2, 0, 5]]), positions, jnp.asarray([tokens]), 4, **how)
        added = AddNorm(jnp.zeros((1, *shape)), layer.input_norm.weight[...].astype(dtype), 1e-5)
        found = layer.attn.mix_token(
            jnp.ones((1, *shape)), model.rotary(positions), attend, pages, added, token_attention_exchange
        )
        return found is not None

    assert attended()
    assert not attended(tokens=2)
    assert not attended(exact=True)
    assert not attended(shared=jnp.asarray([0]))  # a cascade's
    assert not attended(dealt=2)
    assert not attended(dtype=jnp.bfloat16)
    monkeypatch.setattr(paged, "ranks_here", lambda: 2)
    assert not attended()


@pytest.mark.parametrize(("rows", "launches"), [(8, 5), (64, 4)])
def test_a_layer_is_a_few_launches(rows: int, launches: int) -> None:
    """Beside attention: products with their biases, norms, the router and the experts; of many rows XLA multiplies."""
    config = replace(
        GPT_OSS_TARGETS["gpt-oss-20b"], **SMALL | {"hidden_size": 512, "num_layers": 1, "windows": (None,)}
    )
    with h200():
        shapes = weight_shapes([(config, family_for(config))], jnp.dtype("bfloat16"))["target"]

    def run(params: Any, x: jax.Array) -> Any:
        model: Any = bind(config, params)
        chosen = choose(layer_traits(config), CallShape(1, rows, x.dtype), weight_format(params))
        assert chosen.runner == "fused_moe"
        rotary = model.rotary(jnp.arange(rows)[None])
        return Planned(chosen)(model.layers, model.norm, x, rotary, dense_attend(), None)[1]

    with h200():
        x = jax.ShapeDtypeStruct((1, rows, config.hidden_size), jnp.bfloat16)
        text = jax.jit(run).trace(shapes, x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == launches


@pytest.mark.few("9")
@pytest.mark.parametrize("tokens", [1, 9])
def test_experts_in_tiles_are_those_that_were_released(tokens: int) -> None:
    """Without the kernel, whose interpreted form `test_mxfp4_mixture` has: bit for bit where experts run in turn."""
    as_released, tiled, x = make_experts(tokens, "float32")
    given, found = as_released(x), tiled(x)
    np.testing.assert_allclose(found, given, rtol=0, atol=1e-6 * float(jnp.abs(given).max()))


@pytest.mark.few("9-1")
@pytest.mark.parametrize(("tokens", "launches"), [(1, 1), (9, 1), (1500, 4)])
def test_experts_in_tiles_run_in_their_kernel(tokens: int, launches: int) -> None:
    """Long prompts in pieces, of which each chooses its experts in a launch before."""
    _, tiled, x = make_experts(tokens, "bfloat16")
    assert custom_calls(tiled, jax.ShapeDtypeStruct(x.shape, x.dtype)) == ["mosaic_gpu_v2"] * launches


def test_scales_that_no_tile_has_room_for_are_refused() -> None:
    blocks = jnp.zeros((64, 2, 16), jnp.uint8)
    params = {"fine": Mxfp4(blocks, jnp.full((64, 2), 160, jnp.uint8), jnp.dtype("bfloat16"))}
    check_scales(params)
    params["layers.0.x"] = Mxfp4(blocks, jnp.full((64, 2), 161, jnp.uint8), jnp.dtype("bfloat16"))
    with pytest.raises(CheckpointError, match=r"layers.0.x:\n  - scales up to 2\^34 were found, .* 2\^33 at most"):
        check_scales(params)


def test_random_weights_in_four_bits_are_as_large_as_others() -> None:
    sizes: Any = {"hidden_size": 512, "intermediate_size": 1024, "num_experts": 1, "experts_per_token": 1}
    config = replace(GPT_OSS_TARGETS["gpt-oss-20b"], num_layers=1, windows=(None,), **sizes)
    table = {one.name: one for one in gpt_oss_parameters(config) if "experts.down_proj" in one.name}
    params = init_params(list(table.values()), jax.random.key(0), "bfloat16")
    numbers = dequantize(*(params[f"layers.0.mlp.experts.down_proj.{x}"] for x in ("blocks", "scales")), jnp.float32)
    assert 0.7 < float(jnp.std(numbers)) * 1024**0.5 < 1.5


def test_no_fused_runner_takes_its_layers() -> None:
    plan = choose(layer_traits(GPT_OSS_TARGETS["gpt-oss-20b"]), CallShape(1, 8, jnp.dtype("bfloat16")))
    assert plan.runner == "plain"
    assert "clamped_swiglu" in (plan.refused("fused_moe") or "")


@functools.cache
def make_pair() -> tuple[Pair, dict[str, Any], dict[str, np.ndarray]]:
    """A random target with windows of 9 and experts kept in four bits, whose head knows two tokens, so that a random drafter of
    blocks of 8 is often right."""
    file = random_file(2, sliding_window=9, quantization_config={"quant_method": "mxfp4"})
    config: Any = read(file)
    tensors = packed(random_tensors(file, 2, scale=2.0))
    head = np.zeros_like(tensors["lm_head.weight"])
    head[[3, 40]] = tensors["lm_head.weight"][[3, 40]]
    tensors["lm_head.weight"] = head
    draft = DFlashConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
        windows=(None,) * 2, causal=(False,) * 2, block_size=8, mask_token_id=96, target_layer_ids=(0, 2), target_hidden_size=32,
    )  # fmt: skip
    family = family_for(config)
    stored = {
        parameter.name: jnp.asarray(
            np.concatenate([tensors[source.name].reshape(source.taken) for source in parameter.sources])
        )
        for parameter in family.parameters(config)
    }
    pair = Pair(config, draft, edit=lambda weights: weights.update(target=family.derived(config, stored)))
    return pair, file, tensors


def test_greedy_text_with_a_drafter_is_that_without(all_cases: bool) -> None:
    """Prompts of several lengths in pages, across windows and with sinks: every token is the float64 model's choice."""
    pair, file, tensors = make_pair()
    prompts, params = random_prompts([1, 5, 33, 70]), SamplingParams(max_tokens=40)
    drafted, counts, _ = pair.run(prompts, params)
    if all_cases:
        assert drafted == pair.run(prompts, params, draft=False)[0]
    assert {count for each in counts for count in each} >= {1, 2, 3}
    for prompt, tokens in zip(prompts, drafted, strict=True):
        logits = forward(file, tensors, [*prompt, *tokens])[0][len(prompt) - 1 : -1]
        assert tokens == np.argmax(logits, axis=-1).tolist()
