"""Latent pages dealt out to the ranks that share a target: each has a part of every page, and texts are those of one device."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.attention.mla import LatentForm
from dflash_jax.cli.info import plan
from dflash_jax.compile.programs import Programs
from dflash_jax.engine import Engine
from dflash_jax.engine.sharing import check_sharing
from dflash_jax.errors import ParameterError
from dflash_jax.models import family_for
from dflash_jax.models.presets import DEEPSEEK_TARGETS, DRAFTERS, TARGETS
from dflash_jax.options import LoadOptions
from dflash_jax.parallel.ranks import local_ranks
from dflash_jax.sampling_params import SamplingParams

from ..convert.conftest import Folders
from ..convert.test_deepseek import BIASES, CONFIG
from ..random_pair import Pair, random_params
from ..shared_weights import shared_weights
from .test_families import DRAFT as SOME_DRAFT
from .test_families import OPTIONS
from .test_families import TARGETS as SMALL

TARGET = replace(SMALL["latents"], num_layers=1, num_dense_layers=1, windows=(None,))
DRAFT = replace(SOME_DRAFT, target_layer_ids=(-1, 0))
# Prompts in pieces of 32 tokens, expanded with a context that takes more than one gather; the rests of them are absorbed.
SHAPE = OPTIONS | {"max_model_len": 128, "max_batch": 2, "max_chunk": 32}
SHAPE["latent_form"] = LatentForm(expand_above=16, context_chunk=32)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(4)
    long = rng.integers(0, 90, 100).tolist()
    # Lengths that end in every part of a page; the last one begins as the first, which by then is in pages.
    return [long, long[:3], long[50:73], [*long[:70], 1, 2, 3]]


def some_are_likely(weights: dict[str, dict]) -> None:
    """Tokens whose logits are far greater than the others': so a drafter is right now and then."""
    head = weights["target"]["lm_head.weight"]
    weights["target"]["lm_head.weight"] = head.at[jnp.array([5, 60, 90])].multiply(6)


@pytest.fixture(scope="module")
def single() -> Pair:
    return Pair(TARGET, DRAFT, edit=some_are_likely, **SHAPE)


@pytest.mark.few("4-4")
@pytest.mark.parametrize(("ranks", "interleave"), [(2, None), (4, None), (4, 4)])
def test_texts(single, ranks, interleave):
    shared = local_ranks(ranks, dealt=ranks)
    assert shared is not None
    weights = {"target": random_params(TARGET, 0), "draft": random_params(DRAFT, 1, 1.0)}
    some_are_likely(weights)
    weights = shared_weights([(TARGET, family_for(TARGET)), (DRAFT, family_for(DRAFT))], weights, shared)
    pair = Pair(TARGET, DRAFT, **SHAPE)
    pair.engine = Engine(
        TARGET,
        DRAFT,
        weights,
        programs=Programs(ranks=shared),
        interleave=interleave,
        **SHAPE | {"page_size": 16 * ranks},
    )
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    tokens, counts, _ = pair.run(prompts(), params)
    expected, accepted, _ = single.run(prompts(), params)
    assert (tokens, counts) == (expected, accepted)
    assert {length for lengths in counts for length in lengths} >= {1, 2}
    # Of the last one, whole pages: 64 tokens of 70.
    assert pair.engine.scheduler.stats.cached_tokens == 64
    latents, heads = (pages.k[0] for pages in pair.engine.take_pools())
    assert {shard.data.shape[1:3] for shard in latents.addressable_shards} == {(1, 16)}
    assert latents.shape[2] == 16 * ranks
    assert {shard.data.shape[:3] for shard in heads.addressable_shards} == {
        (ranks * len(latents), max(1, 2 // ranks), 16)
    }
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(pair.engine.take_pools())) // ranks
    assert pair.engine.pool_bytes == held


def test_refusals():
    target, draft = DEEPSEEK_TARGETS["DeepSeek-V2-Lite"], None
    check_sharing(target, draft, LoadOptions(tp=4, decode_context_parallel_size=4))
    for options, reason in (
        (
            LoadOptions(tp=4, decode_context_parallel_size=2),
            "must be 1 or 4, the devices of tp=4 that keep the same keys",
        ),
        (LoadOptions(decode_context_parallel_size=2), "each of tp=1 has some of deepseek's"),
    ):
        with pytest.raises(ParameterError, match=reason):
            check_sharing(target, draft, options)
    dealt = LoadOptions(tp=2, decode_context_parallel_size=2, page_size=8)
    with pytest.raises(ParameterError, match="each of tp=2 has some of qwen3's 8 key heads for itself: leave it out"):
        check_sharing(TARGETS["Qwen3-8B"], draft, dealt)
    with pytest.raises(
        ParameterError,
        match="runs of 8 tokens on a device verifies up to 9 tokens of a sequence, the drafter's blocks have 16",
    ):
        check_sharing(target, DRAFTERS["Qwen3-8B-DFlash-b16"], dealt)


def test_plan(tmp_path):
    """What each device holds of as many tokens is half, and the plan says why."""
    made = Folders(tmp_path)
    folder = made.write("target", CONFIG, made.tensors(CONFIG, extra=BIASES))
    options: Any = {"max_batch": 2, "max_model_len": 64, "page_size": 16}
    alone, dealt = plan(folder, **options), plan(folder, **options, tp=2, decode_context_parallel_size=2)
    kept = [found["pages"]["num_pages"] * found["pages"]["page_size"] for found in (alone, dealt)]
    assert kept[1] >= kept[0]
    per_token = [found["pages"]["pool_bytes"] / tokens for found, tokens in zip((alone, dealt), kept, strict=True)]
    assert per_token[0] == 2 * per_token[1]
    assert "pages of 32 tokens, each dealt out to 2 devices" in str(dealt)
