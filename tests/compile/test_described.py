"""Descriptions: what differs has different ones, and what programs return comes back from them."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import DeltaState

from dflash_jax.attention.mla import ABSORBED
from dflash_jax.cache import Pages
from dflash_jax.compile.executable_cache import NotDescribable, describe, rebuild
from dflash_jax.decoding.prefill import Caches
from dflash_jax.decoding.state import Setup
from dflash_jax.models.presets import (
    DEEPSEEK_TARGETS,
    DRAFTERS,
    HYBRID_TARGETS,
    LLAMA_TARGETS,
    MISTRAL_TARGETS,
    MOE_TARGETS,
    QWEN2_TARGETS,
    TARGETS,
)
from dflash_jax.quantization.weights import Quantized

PRESETS = {
    **TARGETS,
    **DRAFTERS,
    **MOE_TARGETS,
    **DEEPSEEK_TARGETS,
    **LLAMA_TARGETS,
    **QWEN2_TARGETS,
    **MISTRAL_TARGETS,
    **HYBRID_TARGETS,
}


def through_json(value):
    return json.loads(json.dumps(describe(value)))


@pytest.mark.parametrize("name", PRESETS)
def test_every_configuration_comes_back_equal(name):
    config = PRESETS[name]
    assert rebuild(through_json(config)) == config


def test_setups_that_differ_in_any_field_are_described_differently():
    first = Setup(TARGETS["Qwen3-4B"])
    others = {
        "target": TARGETS["Qwen3-8B"], "draft": DRAFTERS["Qwen3-4B-DFlash-b16"], "mode": "full", "logprobs": True,
        "proposals": "argmax", "draft_temperature": 0.75, "draft_window": 64, "form": ABSORBED, "imposed_acceptance": 6.0,
        "verified": 4, "per_request": True, "ranks": 2, "dealt": 2, "interleave": 16,
        "sampling": False, "exact": True, "pictures": True,
    }  # fmt: skip
    assert others.keys() == {field.name for field in dataclasses.fields(Setup)}
    texts = {json.dumps(describe(dataclasses.replace(first, **{name: value}))) for name, value in others.items()}
    assert len(texts | {json.dumps(describe(first))}) == len(others) + 1
    assert rebuild(through_json(dataclasses.replace(first, form=ABSORBED))).form.expand_above == math.inf


def test_trees_of_arrays_come_back_as_their_shapes():
    values = Quantized(jnp.zeros((2, 3), jnp.int8), jnp.ones(2), jnp.dtype("bfloat16"))
    pages = Pages((jnp.zeros((1, 2)),), ())
    caches = Caches(pages, pages, (DeltaState(jnp.zeros((1, 2, 3, 4)), jnp.zeros((1, 3, 5))),))
    tree = (pages, caches, {"b": [np.int32(3), None], "a": values})
    found = rebuild(through_json(tree))
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(found)] == [
        (leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)
    ]


def test_shape_dtype_and_weakness_tell_arrays_apart():
    leaves = [
        jnp.zeros(2), jnp.zeros(3), jnp.zeros(2, jnp.bfloat16), jnp.zeros((2, 1)),
        jax.ShapeDtypeStruct((2,), jnp.float32, weak_type=True),
    ]  # fmt: skip
    assert len({json.dumps(describe(leaf)) for leaf in leaves}) == len(leaves)
    assert describe(jnp.zeros(2)) == describe(np.zeros(2, np.float32))


@pytest.mark.parametrize("value", [print, object(), {1: 2}, {"x": {3}}, jnp.float32])
def test_what_has_no_description_is_refused(value):
    with pytest.raises(NotDescribable):
        describe(value)


@pytest.mark.parametrize(
    "described",
    [
        {"dataclass": "os:stat_result", "fields": {}},
        {"dataclass": "dflash_jax.compile.programs:Programs.call", "fields": {}},
        {"dataclass": "dflash_jax.cache.pages:make_pages", "fields": {}},
        {"dataclass": "dflash_jax.cache.pages:Pages", "fields": {"wrong": 1}},
        {"named": "os:stat_result", "parts": []},
        {"named": "dflash_jax.cache.pages:Pages", "parts": []},
        {"array": [[2], "no such dtype", False]},
        {"pickle": "gASVAAAAAAAAAAAu"},
    ],
)
def test_descriptions_that_nobody_made_are_refused(described):
    with pytest.raises(NotDescribable):
        rebuild(described)
