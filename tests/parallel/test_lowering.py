"""Programs of several GPUs lower for GPUs that are not here, with the kernels of one."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu
import jax.numpy as jnp
import pytest

from dflash_jax.checkpoints.weights import spread, weight_shapes
from dflash_jax.compile.jax_patches import name_values_once
from dflash_jax.compile.over_ranks import over_ranks
from dflash_jax.compile.programs import Programs
from dflash_jax.decoding.cycle import in_one_graph
from dflash_jax.engine import STOP_WIDTH, Engine
from dflash_jax.engine.warmup import Jobs
from dflash_jax.execution import switches
from dflash_jax.models import family_named
from dflash_jax.models.deepseek_v4 import HEAVY, SPARSE
from dflash_jax.models.presets import (
    DEEPSEEK_TARGETS,
    DEEPSEEK_V4_TARGETS,
    DRAFTERS,
    GEMMA3_TARGETS,
    GEMMA4_TARGETS,
    GPT_OSS_TARGETS,
    HYBRID_TARGETS,
    MOE_TARGETS,
    TARGETS,
)
from dflash_jax.parallel.ranks import AXIS, Ranks, held

KIND, BFLOAT16 = "NVIDIA H100", jnp.dtype(jnp.bfloat16)
# What waits for other GPUs: sums of products, and gathered choices.
MEETINGS = ("all_reduce", "all_gather", "all_to_all")


def cut_short(target: Any, draft: Any, windows: tuple[int | None, ...] = (None,) * 2) -> tuple[Any, Any]:
    """A published target and its drafter with two layers and one."""
    target = replace(target, num_layers=2, windows=windows)
    taps: dict[str, Any] = {"target_layer_ids": (0, 1), "num_target_layers": 2}
    return target, replace(draft, num_layers=1, windows=(None,), causal=(False,), **taps)


LATENT_DRAFT = replace(DRAFTERS["Qwen3-8B-DFlash-b16"], hidden_size=2048, target_hidden_size=2048, vocab_size=102400)


def drafter_for(target: Any) -> Any:
    """A published drafter in another target's sizes."""
    sizes = {
        "hidden_size": target.hidden_size,
        "target_hidden_size": target.feature_width,
        "vocab_size": target.vocab_size,
    }
    return replace(DRAFTERS["Qwen3-8B-DFlash-b16"], **sizes)


GEMMA3, GEMMA4 = GEMMA3_TARGETS["gemma-3-27b"], GEMMA4_TARGETS["gemma-4-26B-A4B"]
COMPRESSED = replace(
    DEEPSEEK_V4_TARGETS["DeepSeek-V4-Flash"],
    num_layers=2,
    windows=(128, 128),
    kinds=(SPARSE, HEAVY),
    hashed=(True, False),
)
# Family, target and drafter.
MODELS: dict[str, tuple[str, Any, Any]] = {
    "dense": ("qwen3", *cut_short(TARGETS["Qwen3-8B"], DRAFTERS["Qwen3-8B-DFlash-b16"])),
    "experts": ("qwen3_moe", *cut_short(MOE_TARGETS["Qwen3-30B-A3B"], DRAFTERS["Qwen3-Coder-30B-A3B-DFlash"])),
    "dealt": ("qwen3_moe", *cut_short(MOE_TARGETS["Qwen3-30B-A3B"], DRAFTERS["Qwen3-Coder-30B-A3B-DFlash"])),
    "latents": ("deepseek", *cut_short(DEEPSEEK_TARGETS["DeepSeek-V2-Lite"], LATENT_DRAFT)),
    "shared": (
        "qwen3_5",
        *cut_short(replace(HYBRID_TARGETS["Qwen3.5-35B-A3B"], full_layers=(1,)), DRAFTERS["Qwen3.5-35B-A3B-DFlash"]),
    ),
    "gpt_oss": ("gpt_oss", *cut_short(GPT_OSS_TARGETS["gpt-oss-20b"], DRAFTERS["gpt-oss-20b-DFlash"], (128, None))),
    "gemma3": ("gemma3", *cut_short(GEMMA3, drafter_for(GEMMA3), (1024, None))),
    "gemma4": ("gemma4", *cut_short(GEMMA4, drafter_for(GEMMA4), (1024, None))),
    "compressed": ("deepseek_v4", *cut_short(COMPRESSED, drafter_for(COMPRESSED), (128, 128))),
}  # fmt: skip


def engine_of(name: str, ranks: Ranks, slots: int, **more: Any) -> Engine:
    family, target, draft = MODELS[name]
    models = [(target, family_named(family)), (draft, family_named("dflash"))]
    weights = spread(models, weight_shapes(models, BFLOAT16, rows=16 * slots, ranks=ranks), ranks)
    options: dict[str, Any] = {"max_model_len": 512, "max_batch": slots, "page_size": 64 * ranks.dealt, **more}
    return Engine(target, draft, weights, BFLOAT16, programs=Programs(ranks=ranks), **options)


def lowered(ranks: Ranks, function: Callable, static: tuple, donate: tuple[int, ...], *args: Any) -> str:
    return (
        over_ranks(ranks, function, static, donate, args, None)
        .trace(*args)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )


@pytest.mark.few
@pytest.mark.parametrize(
    ("name", "slots", "count", "kept"),
    [
        ("dealt", 8, 8, None),
        ("shared", 1, 2, None),
        ("shared", 8, 8, None),
        ("dense", 1, 2, None), ("dense", 8, 8, None), ("experts", 1, 2, None), ("experts", 8, 4, None), ("latents", 1, 2, None),
        ("latents", 8, 8, None), ("dense", 1, 2, "fp8"), ("dense", 8, 8, "int8"), ("gpt_oss", 1, 2, None),
        ("gpt_oss", 8, 8, None), ("gemma3", 1, 2, None), ("gemma3", 8, 8, None), ("gemma4", 1, 2, None), ("gemma4", 8, 8, None),
        ("compressed", 1, 2, None), ("compressed", 8, 8, None),
    ],
)  # fmt: skip
def test_programs_lower(name, slots, count, kept, monkeypatch):
    monkeypatch.setattr(switches, "RANK_EXCHANGE", False)
    device = jax.sharding.AbstractDevice(device_kind=KIND, num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((count,), (AXIS,), (jax.sharding.AxisType.Auto,), abstract_device=device)
    dealt = count if name == "latents" else 2 if name == "dealt" else 1
    ranks = Ranks(mesh, dealt)
    name_values_once()
    with jax.sharding.use_abstract_mesh(mesh):
        engine = engine_of(name, ranks, slots, cache_dtype=kept)
        jobs: Any = Jobs(engine, engine.setup(mode="greedy", draft=True), STOP_WIDTH)
        jobs.prepare = partial(lowered, ranks)
        cycles, prompts = jobs.loop(slots, 8)(), jobs.prefill(8, 2, 32, slots)()
        texts = [jobs.admit(slots, 1)(), jobs.resize(slots, 2 * slots)()]
    assert [name for text in texts for name in MEETINGS if name in text] == []
    for text in (cycles, prompts):
        assert "mosaic_gpu" in "".join(re.findall(r"custom_call @(\w+)", text))
    meetings = sum(len(re.findall(rf"stablehlo.{name}\W", cycles)) for name in MEETINGS)
    # Two for each of three layers; two choices among ranks, where a head is cut; two more in each of the target's layers where
    # pages are dealt out.
    choices = 0 if getattr(engine.target, "tie_embeddings", False) else 2
    assert meetings == 2 * 3 + choices + (2 * 2 if dealt > 1 else 0)


@pytest.mark.few("dense-1-2-None")
@pytest.mark.parametrize(
    ("name", "slots", "count", "kept"),
    [("dense", 1, 2, None), ("dense", 8, 4, None), ("experts", 8, 4, None), ("dense", 1, 2, "fp8")],
)
def test_greedy_loops_exchange_in_kernels(name, slots, count, kept):
    """Where memory lies is gathered before the loop, for layers and for choices; in it nobody waits for a collective."""
    device = jax.sharding.AbstractDevice(device_kind=KIND, num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((count,), (AXIS,), (jax.sharding.AxisType.Auto,), abstract_device=device)
    ranks = Ranks(mesh)
    with jax.sharding.use_abstract_mesh(mesh):
        engine = engine_of(name, ranks, slots, cache_dtype=kept)
        jobs: Any = Jobs(engine, engine.setup(mode="greedy", draft=True), STOP_WIDTH)
        jobs.prepare = partial(lowered, ranks)
        cycles = jobs.loop(slots, 8)()
    found = {meeting: len(re.findall(rf"stablehlo.{meeting}\W", cycles)) for meeting in MEETINGS}
    assert found == {"all_reduce": 0, "all_gather": 2, "all_to_all": 0}


@pytest.mark.few("greedy-gpt_oss-1-2")
@pytest.mark.parametrize(("slots", "count"), [(1, 2), (8, 8)], ids=["1-2", "8-8"])
@pytest.mark.parametrize("name", ["latents", "gpt_oss", "gemma3", "gemma4", "compressed"])
@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_layers_one_by_one_add_up_in_kernels(mode, name, slots, count):
    """Nobody waits for a collective in a greedy loop; where tokens are drawn, logits alone are gathered."""
    device = jax.sharding.AbstractDevice(device_kind=KIND, num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((count,), (AXIS,), (jax.sharding.AxisType.Auto,), abstract_device=device)
    ranks = Ranks(mesh)
    with jax.sharding.use_abstract_mesh(mesh):
        engine = engine_of(name, ranks, slots)
        jobs: Any = Jobs(engine, engine.setup(mode=mode, draft=True), STOP_WIDTH)
        jobs.prepare = partial(lowered, ranks)
        before, loop = jobs.loop(slots, 8)().split("stablehlo.while", 1)
        weights = {role: held(table) for role, table in engine.weights.items()}
        setup = jobs.setup.of_rank()
        plans = setup.plans(weights, slots, engine.buckets.width[-1], engine.pool_shapes())
    gathers = 0 if mode == "greedy" or getattr(engine.target, "tie_embeddings", False) else 2
    assert "stablehlo.all_gather" in before
    assert sum(len(re.findall(rf"stablehlo.{meeting}\W", loop)) for meeting in MEETINGS) == gathers
    assert plans.target.exchange
    assert in_one_graph(setup, plans) == (mode == "greedy")
