"""gpt-oss, Gemma 3 and Gemma 4 shared by devices: transformers' logits, and the texts and acceptance of one device."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_convert.cli import main
from dflash_kernels import Mxfp4Tiles

import dflash_jax as dj
from dflash_jax.attention.dense import dense_attend
from dflash_jax.checkpoints import weights as reading
from dflash_jax.checkpoints.converted import open_converted
from dflash_jax.checkpoints.huggingface import open_checkpoint
from dflash_jax.checkpoints.weights import (
    read_weights,
    reading_bytes,
    spread,
    stored_shapes,
    weight_bytes,
    weight_shapes,
)
from dflash_jax.cli.info import plan
from dflash_jax.engine.sharing import sharing_refusals
from dflash_jax.errors import CheckpointError
from dflash_jax.execution import plan as plans
from dflash_jax.execution.plan import ExecutionPlan
from dflash_jax.execution.runner import Planned
from dflash_jax.execution.weight_layout import check_scales
from dflash_jax.models import bind
from dflash_jax.models import gpt_oss as modules
from dflash_jax.models.presets import GEMMA4_TARGETS, GPT_OSS_TARGETS
from dflash_jax.models.registry import family_for, layer_traits
from dflash_jax.parallel.ranks import AXIS, Ranks, local_ranks, share_config
from dflash_jax.quantization.mxfp4 import Mxfp4

from ..convert.conftest import DFLASH, Folders
from ..models import gemma_reference, gpt_oss_reference
from ..models.golden_files import GOLDEN, difference
from .test_texts import GREEDY, PROMPTS, SAMPLED, check_ranks_agree, served
from .test_texts import OPTIONS as SEVERAL

FLOAT32 = jnp.dtype("float32")
OPTIONS: Any = SEVERAL | {"max_batch": 1}
# Gemma 4's scores have no scale, so float32 is further from float64 than elsewhere.
TOLERANCES = {"gpt_oss": 1e-5, "gemma3": 1e-5, "gemma4": 3e-5}


@pytest.mark.few("gpt_oss-2", "gemma4-4")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", TOLERANCES)
def test_transformers_logits_and_taps(name, ranks):
    """Four devices have two key heads, and one in Gemma 4's layers without a window: some hold the same."""
    checkpoint, shared = open_checkpoint(GOLDEN / f"{name}_folder"), local_ranks(ranks)
    assert shared is not None
    config: Any = checkpoint.config
    with np.load(checkpoint.folder / "expected.npz") as file:
        ids, theirs, taps = file["ids"], file["logits"], file["taps"]

    def run(own: Any) -> tuple[jax.Array, jax.Array]:
        model, tokens = bind(share_config(config, ranks), own), jnp.array([ids.tolist()])
        positions = jnp.arange(tokens.shape[1])[None]
        hidden, streams, _ = model(tokens, positions, dense_attend(), tuple(range(config.num_layers)))
        return model.logits(hidden)[0], jnp.stack(jnp.split(streams[0], config.num_layers, axis=-1))

    weights = read_weights(checkpoint, None, FLOAT32, ranks=shared)["target"]
    logits, ours = shared.each(run, weights, axis=None)
    assert difference(logits, theirs) <= TOLERANCES[name]
    assert difference(ours[: len(taps)], taps) <= TOLERANCES[name]


HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
WINDOWED = [gemma_reference.SLIDING, gemma_reference.FULL]


def gpt_oss(**changes: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    file = gpt_oss_reference.random_file(
        2, **HEADS, sliding_window=9, num_local_experts=4, num_experts_per_tok=2, num_hidden_layers=2, vocab_size=96,
        layer_types=["sliding_attention", "full_attention"], **changes,
    )  # fmt: skip
    return file, gpt_oss_reference.random_tensors(file, 2, scale=2.0)


def gemma(kind: str, seed: int = 3, **changes: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    sizes: Any = HEADS | {"num_hidden_layers": 2, "layer_types": WINDOWED, "intermediate_size": 48, "vocab_size": 96}
    sizes |= {"final_logit_softcapping": 5.0, "sliding_window": 9, "tie_word_embeddings": False}
    file = gemma_reference.random_file(kind, seed, **sizes | changes)
    return file, gemma_reference.random_tensors(file, seed)


def sharing() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The last layer attends to the keys of the one before; layers have embeddings of their own."""
    types = [*WINDOWED, gemma_reference.FULL]
    file = {"num_hidden_layers": 3, "layer_types": types, "num_kv_shared_layers": 1, "attention_k_eq_v": True}
    return gemma("gemma4_small", **file, vocab_size_per_layer_input=96)


def packed(**sizes: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    file, tensors = gpt_oss(quantization_config={"quant_method": "mxfp4"}, **sizes)
    return file, gpt_oss_reference.packed(tensors)


MODELS = {
    "gpt_oss": gpt_oss,
    "mxfp4": packed,
    "tiles": partial(packed, hidden_size=64, intermediate_size=128),
    "gemma3": partial(gemma, "gemma3", 7),  # of which a random drafter is right now and then
    "gemma4_moe": partial(gemma, "gemma4_moe", num_experts=4, top_k_experts=2),
    "gemma4_small": sharing,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Any:
    """Folders by name, each with a drafter in it."""
    made, found = Folders(tmp_path_factory.mktemp("families")), dict[str, Path]()

    def folder(name: str) -> Path:
        if name not in found:
            file, tensors = MODELS[name]()
            head = "lm_head.weight" if "lm_head.weight" in tensors else "model.embed_tokens.weight"
            tensors[head][[5, 60, 90]] *= 6  # so a random drafter is right now and then
            found[name] = made.write(name, file, tensors)
            drafter = DFLASH | HEADS | {"num_hidden_layers": 1, "num_target_layers": file["num_hidden_layers"]}
            drafter |= {"hidden_size": file.get("hidden_size", drafter["hidden_size"])}
            drafter["dflash_config"] = {"mask_token_id": 95, "target_layer_ids": [0, 1]}
            made.write(f"{name}/draft", drafter, made.tensors(drafter, "float32"))
        return found[name]

    return folder


@pytest.mark.few
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("mxfp4", "tiles")])
def test_texts(folders, name, ranks):
    single, model = (dj.load(folders(name), tp=count, **OPTIONS) for count in (1, ranks))
    texts = served(model, GREEDY)
    assert texts == served(single, GREEDY)
    assert {length for _, lengths in texts for length in lengths} >= {1, 2}
    if name == "gpt_oss":
        assert served(model, SAMPLED) == served(single, SAMPLED)
    if ranks == 2:
        assert [tokens for tokens, _ in served(model, GREEDY, draft=False)] == [tokens for tokens, _ in texts]
    check_ranks_agree(model, ranks)
    pools = model.engine.take_pools()[0]
    assert {shard.data.shape[1] for pool in pools.k for shard in pool.addressable_shards} == {max(1, 2 // ranks)}
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(model.engine.take_pools()))
    assert model.engine.pool_bytes == held


@pytest.mark.parametrize("kept", [None, "mxfp4", "int8"])
def test_experts_in_four_bits(folders, kept):
    """Numbers, or the four bits that were released: of each device its experts', as planned before they are read."""
    checkpoint, ranks = open_checkpoint(folders("mxfp4")), local_ranks(2)
    assert ranks is not None
    models = [(checkpoint.config, checkpoint.family)]
    cut = read_weights(checkpoint, None, FLOAT32, kept, ranks=ranks)["target"]
    planned = spread(models, weight_shapes(models, FLOAT32, kept, ranks=ranks), ranks)["target"]
    assert planned.keys() == cut.keys()
    for name, shape in planned.items():
        leaves = zip(jax.tree.leaves(shape), jax.tree.leaves(cut[name]), strict=True)
        for wanted, made in leaves:
            assert (wanted.shape, wanted.dtype) == (made.shape, made.dtype), name
            assert wanted.sharding.is_equivalent_to(made.sharding, made.ndim), name
    experts = cut["layers.0.mlp.experts.gate_up_proj.weight"]
    assert isinstance(experts, Mxfp4) == (kept == "mxfp4")
    whole = read_weights(checkpoint, None, FLOAT32, kept)["target"]["layers.0.mlp.experts.gate_up_proj.weight"]
    for ours, theirs in zip(jax.tree.leaves(experts), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert {shard.data.shape[0] for shard in ours.addressable_shards} == {len(theirs) // 2}


@pytest.mark.few  # their logits are compared above
def test_texts_of_experts_in_four_bits(folders):
    single, model = (dj.load(folders("mxfp4"), tp=tp, weight_dtype="mxfp4", **OPTIONS) for tp in (1, 2))
    assert served(model, GREEDY) == served(single, GREEDY)


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts in MXFP4 are kept in tiles and run as where a kernel reads them, by its definition."""
    monkeypatch.setattr(reading, "tiles_pay", lambda *_: True)
    for module in (plans, modules):
        monkeypatch.setattr(module, "mxfp4_mixture_refusal", lambda *_, **__: None)


@pytest.mark.few("2")
@pytest.mark.parametrize("ranks", [2, 4])
def test_tiles_of_experts_in_four_bits(folders, tmp_path, tiled, ranks):
    """Of a release and of what it was converted to: each device has tiles of its experts, bit for bit, as planned before."""
    shared, converted = local_ranks(ranks), tmp_path / "converted"
    assert main([str(folders("tiles")), "--output", str(converted)]) == 0
    whole = read_weights(open_checkpoint(folders("tiles")), None, FLOAT32)["target"]
    assert shared is not None
    for checkpoint in (open_checkpoint(folders("tiles")), open_converted(converted)):
        models = [(checkpoint.config, checkpoint.family)]
        cut = read_weights(checkpoint, None, FLOAT32, ranks=shared)["target"]
        planned = spread(models, weight_shapes(models, FLOAT32, ranks=shared), shared)["target"]
        assert weight_bytes({"": planned}) == weight_bytes(stored_shapes(models, FLOAT32, ranks=shared))
        assert jax.tree.structure(cut) == jax.tree.structure(planned) == jax.tree.structure(whole)
        assert sum(isinstance(one, Mxfp4Tiles) for one in cut.values()) == 2 * checkpoint.config.num_layers
        for name, tiles in whole.items():
            for true, made, shape in zip(*map(jax.tree.leaves, (tiles, cut[name], planned[name])), strict=True):
                assert made.sharding.is_equivalent_to(shape.sharding, made.ndim), name
                if isinstance(tiles, Mxfp4Tiles):
                    np.testing.assert_array_equal(made, true)
                    assert {shard.data.shape[0] for shard in made.addressable_shards} == {4 // ranks}


@pytest.mark.few("2")
@pytest.mark.parametrize("ranks", [2, 4])
def test_layers_with_tiles_are_those_of_one_device(folders, tiled, ranks):
    """By the fused runner and one operation after the other."""
    checkpoint, shared = open_checkpoint(folders("tiles")), local_ranks(ranks)
    assert shared is not None
    config: Any = checkpoint.config
    positions = jnp.arange(9)[None]

    def run(own: Any, chosen: ExecutionPlan, count: int) -> jax.Array:
        model: Any = bind(share_config(config, count), own)
        x, rotary = model.embed(positions * 7 + 3), model.rotary(positions)
        return model.logits(Planned(chosen)(model.layers, model.norm, x, rotary, dense_attend(), None)[1])

    whole, weights = (read_weights(checkpoint, None, FLOAT32, ranks=each)["target"] for each in (None, shared))
    expected = jax.jit(lambda own: run(own, plans.PLAIN, 1))(whole)
    traits = layer_traits(share_config(config, ranks))
    fused = plans.choose(traits, plans.CallShape(1, 9, FLOAT32), plans.weight_format(weights), ranks=ranks)
    assert (fused.runner, fused.exchange) == ("fused_moe", False)
    for chosen in (fused, plans.PLAIN):
        found = shared.each(partial(run, chosen=chosen, count=ranks), weights, axis=None)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * float(jnp.abs(expected).max()))


@pytest.mark.few  # their layers' logits are compared above
@pytest.mark.parametrize("ranks", [2, 4])
def test_texts_of_experts_in_tiles(folders, tiled, ranks):
    single, model = (dj.load(folders("tiles"), tp=tp, **OPTIONS) for tp in (1, ranks))
    assert isinstance(model.engine.weights["target"]["layers.0.mlp.experts.down_proj.weight"], Mxfp4Tiles)
    texts = served(model, GREEDY)
    assert texts == served(single, GREEDY)
    assert {length for _, lengths in texts for length in lengths} >= {1, 2}
    assert served(model, SAMPLED) == served(single, SAMPLED)
    assert [tokens for tokens, _ in served(model, GREEDY, draft=False)] == [tokens for tokens, _ in texts]
    check_ranks_agree(model, ranks)


def test_scales_that_no_tile_has_room_for_are_refused_of_any_device():
    shared = local_ranks(2)
    assert shared is not None
    scales = jax.device_put(np.array([[160], [161]], np.uint8), shared.along(0))
    params = {"fine": Mxfp4(jnp.zeros((2, 1, 16), jnp.uint8), scales[::-1] - 1, jnp.dtype("bfloat16"))}
    check_scales(params, shared)
    with pytest.raises(CheckpointError, match=r"layers.0.x:\n  - scales up to 2\^34 were found"):
        check_scales(params | {"layers.0.x": replace(params["fine"], scales=scales)}, shared)


@pytest.mark.parametrize(("name", "ranks", "most"), [("gpt-oss-20b", 2, 7.5e9), ("gpt-oss-120b", 8, 9.2e9)])
def test_each_hopper_gpu_keeps_its_experts_in_four_bits(name, ranks, most):
    """In bfloat16, without an option and in as many bytes as were released; its kernel takes cycles and prompts."""
    config, half = GPT_OSS_TARGETS[name], jnp.dtype("bfloat16")
    models = [(config, family_for(config))]
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((ranks,), (AXIS,), (jax.sharding.AxisType.Auto,), abstract_device=device)
    shared = Ranks(mesh)
    with jax.sharding.use_abstract_mesh(mesh):
        stored = stored_shapes(models, half, ranks=shared)
        for asked in (None, "mxfp4"):
            kept = weight_shapes(models, half, asked, ranks=shared)
            assert weight_bytes(kept) == weight_bytes(stored) < most
            assert reading_bytes(stored, kept) < weight_bytes(kept) + 1.5e9
        tiles = kept["target"]["layers.0.mlp.experts.gate_up_proj.weight"]
        assert isinstance(tiles, Mxfp4Tiles)
        assert tiles.shape == (config.num_experts // ranks, 2 * 2880, 2880)
        traits, form = layer_traits(share_config(config, ranks)), plans.weight_format(kept["target"])
        for rows in (1, 8, 64, 1024):
            assert plans.choose(traits, plans.CallShape(1, rows, half), form, ranks=ranks).runner == "fused_moe"
        eight = weight_shapes(models, half, "int8", ranks=shared)["target"]
        assert not any(isinstance(one, Mxfp4 | Mxfp4Tiles) for one in eight.values())


@pytest.mark.few  # test_eight_bit_pages has those of one shape
def test_pages_of_two_shapes_in_eight_bits(folders):
    """Scales of both shapes' heads, one of which two devices hold."""
    eight: Any = {"cache_dtype": "int8", "calibration": PROMPTS}
    models: Any = [dj.load(folders("gemma4_small"), tp=tp, **eight, **OPTIONS) for tp in (1, 2)]
    single, model = models
    ours, theirs = (np.concatenate([*map(np.ravel, made.engine.cache_scales.v)]) for made in (model, single))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert served(model, GREEDY) == served(single, GREEDY)


def test_what_can_be_shared():
    larger, experts = GEMMA4_TARGETS["gemma-4-31B"], GEMMA4_TARGETS["gemma-4-26B-A4B"]
    for target, most in ((GPT_OSS_TARGETS["gpt-oss-20b"], 32), (larger, 32), (experts, 16)):
        assert not sharing_refusals(target, None, most)
    assert sharing_refusals(larger, None, 3) == [
        "the target: 32 query heads are no multiple of 3",
        "the target: 16 key heads neither divide 3 nor are a multiple of it",
        "the target: 4 key heads neither divide 3 nor are a multiple of it",
    ]
    odd = replace(experts, num_experts=127, full_kv_heads=1)
    assert sharing_refusals(odd, None, 2) == ["the target: 127 experts are no multiple of 2"]


def test_info_counts_what_each_device_holds(folders):
    alone, shared = (plan(folders("gemma3"), tp=tp, **OPTIONS) for tp in (1, 2))
    assert 2 * shared["pages"]["pool_bytes"] == alone["pages"]["pool_bytes"]
    assert shared["memory"]["weight_bytes"] < alone["memory"]["weight_bytes"]
