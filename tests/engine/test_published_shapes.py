"""Programs of every published shape, cut to a layer of each kind, trace for an H100 that is not here.

Families run other code there than on a CPU, so that what a layer lacks would be found by users first.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dflash_jax.bench import workload
from dflash_jax.checkpoints.weights import weight_shapes
from dflash_jax.engine import STOP_WIDTH, Engine
from dflash_jax.engine.warmup import Jobs
from dflash_jax.execution.weight_layout import cycle_rows
from dflash_jax.models import family_named
from dflash_jax.models.presets import DEEPSEEK_TARGETS, GEMMA3_TARGETS, MISTRAL_TARGETS, QWEN2_TARGETS, SPARSE_TARGETS

from ..devices import on

LAYERS, BFLOAT16 = 4, jnp.dtype(jnp.bfloat16)
# Families and targets for which no drafter is published.
ALONE: Mapping[str, tuple[str, Any]] = {
    "deepseek": ("deepseek", next(iter(DEEPSEEK_TARGETS.values()))),
    "sparse": ("deepseek_sparse", next(iter(SPARSE_TARGETS.values()))),
    "gemma-3": ("gemma3", next(iter(GEMMA3_TARGETS.values()))),
    "mistral": ("mistral", next(iter(MISTRAL_TARGETS.values()))),
    "qwen-2": ("qwen2", next(iter(QWEN2_TARGETS.values()))),
}


def cut(name: str) -> tuple[str, Any, Any]:
    """A family, a target of few layers, and its drafter of two if it has one."""
    family, target, draft = (*ALONE[name], None) if name in ALONE else workload.published_shape(name)
    kept = {"num_layers": LAYERS, "windows": target.windows[-LAYERS:]}
    if getattr(target, "full_layers", ()):
        kept["full_layers"] = (LAYERS - 1,)
    if getattr(target, "indexers", ()):
        kept["indexers"] = target.indexers[:LAYERS]
    if draft is None:
        return family, replace(target, **kept), None
    taps = {"target_layer_ids": tuple(range(len(draft.target_layer_ids)))[:LAYERS], "num_target_layers": LAYERS}
    few = {"num_layers": 2, "windows": draft.windows[:2], "causal": draft.causal[:2]}
    return family, replace(target, **kept), replace(draft, **taps, **few)


@pytest.mark.few("gemma-3-1", "deepseek-1", "qwen3.5-4b-8")
@pytest.mark.parametrize("slots", [1, 8])
@pytest.mark.parametrize("name", [*workload.SHAPES, *ALONE])
def test_programs_trace(name: str, slots: int) -> None:
    family, target, draft = cut(name)
    models = [(target, family_named(family))] + ([] if draft is None else [(draft, family_named("dflash"))])

    def traced(function: Any, static: tuple, donate: tuple[int, ...], *args: Any) -> None:
        jax.jit(function, static_argnums=tuple(range(len(static)))).trace(*static, *args)

    with on("NVIDIA H100"):
        weights = weight_shapes(models, BFLOAT16, rows=cycle_rows(slots, draft))
        engine = Engine(target, draft, weights, BFLOAT16, max_model_len=1024, max_batch=slots)
        for drafting in (False,) if draft is None else (True, False):
            jobs = Jobs(engine, engine.setup(mode="greedy", draft=drafting), STOP_WIDTH)
            jobs.prepare = traced
            jobs.loop(slots, 8)()
        for rows in sorted({jobs.core.buckets.pieces[0], jobs.core.buckets.pieces[-1]}):
            jobs.prefill(8, rows, jobs.core.buckets.piece, slots)()
