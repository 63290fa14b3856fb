"""Pages of key heads of which there are fewer than devices: those that have the same one keep a part each of every page."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.cli.info import plan
from dflash_jax.engine.sharing import check_sharing
from dflash_jax.errors import ParameterError
from dflash_jax.models.presets import GPT_OSS_TARGETS, MOE_TARGETS, TARGETS
from dflash_jax.options import LoadOptions

from .test_texts import GREEDY

OPTIONS: Any = {"dtype": "float32", "max_batch": 2, "max_model_len": 96, "page_size": 8}
DEALT: Any = OPTIONS | {"tp": 8, "decode_context_parallel_size": 2}


def served(model: Any, params: Any, *, draft: bool = True) -> list[tuple]:
    done = dj.generate(model, prompts(), params, draft=draft)
    return [(one.token_ids, one.acceptance_lengths) for one in done]


def prompts() -> list[list[int]]:
    """Lengths that end in either part of a page."""
    rng = np.random.default_rng(4)
    return [rng.integers(5, 90, length).tolist() for length in (70, 21)]


@pytest.fixture(scope="module")
def models(folder) -> tuple[Any, Any]:
    """Four key heads on one device, and on eight."""
    return dj.load(folder, **OPTIONS), dj.load(folder, **DEALT)


@pytest.mark.few
@pytest.mark.parametrize("run", [1, 2])
def test_shorter_runs_of_tokens(models, folder, run):
    """Of three tokens each of both devices that keep the same key head has some."""
    model = dj.load(folder, cp_kv_cache_interleave_size=run, **DEALT)
    params = dj.SamplingParams(max_tokens=4, ignore_eos=True)
    assert served(model, params) == served(models[0], params)
    dj.generate(model, [[60, 5, 7]], dj.SamplingParams(max_tokens=1), draft=False)
    parts = [np.asarray(shard.data) for shard in model.engine.take_pools()[0].k[0].addressable_shards]
    assert all(part.any() for part in parts)


def test_texts(models):
    single, model = models
    found = [served(one, GREEDY) for one in (single, model)]
    assert found[0] == found[1]
    assert {length for _, lengths in found[1] for length in lengths} >= {1, 2}
    assert [tokens for tokens, _ in served(model, GREEDY, draft=False)] == [tokens for tokens, _ in found[0]]
    pages, draft = model.engine.take_pools()
    assert {shard.data.shape[1:3] for pool in (*pages.k, *draft.v) for shard in pool.addressable_shards} == {(1, 8)}
    assert 2 * len(pages.k[0]) == len(draft.k[0])
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves((pages, draft)))
    assert model.engine.pool_bytes == held


def test_every_key_is_on_one_device(models):
    """Devices that have the same key head keep other tokens' keys each."""
    _, model = models
    dj.generate(model, prompts(), GREEDY, draft=False)
    parts = [np.asarray(shard.data) for shard in model.engine.take_pools()[0].k[0].addressable_shards]
    rows = [{row.tobytes() for row in part.reshape(-1, 8) if row.any()} for part in parts]
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        assert min(len(first), len(second)) > 40
        assert not first & second


def test_pools_stay_and_beginnings_are_found_again(models):
    _, model = models

    def places() -> list[int]:
        pools = jax.tree.leaves(model.engine.take_pools())
        return [shard.data.unsafe_buffer_pointer() for pool in pools for shard in pool.addressable_shards]

    before = places()
    long = prompts()[0]
    first, again = (dj.generate(model, [[*long, 7]], GREEDY)[0] for _ in range(2))
    assert (first.token_ids, again.stats.cached_tokens) == (again.token_ids, 64)
    assert places() == before


def test_twice_the_tokens_in_the_same_bytes(folder):
    alone, dealt = (plan(folder, **options) for options in (OPTIONS | {"tp": 8}, DEALT))
    assert dealt["pages"]["page_size"] == 16
    ours, theirs = (
        {"pages": found["pages"]["num_pages"], "bytes": found["pages"]["pool_bytes"]} for found in (alone, dealt)
    )
    # The drafter's pages, of one layer beside the target's two, are not dealt out.
    assert theirs["bytes"] / (theirs["pages"] * 16) == pytest.approx(ours["bytes"] / (ours["pages"] * 8) * (1 + 1) / 3)
    assert "each dealt out to 2 devices" in str(dealt)


def test_refusals():
    experts = MOE_TARGETS["Qwen3-30B-A3B"]
    check_sharing(experts, None, LoadOptions(tp=8, decode_context_parallel_size=2))
    check_sharing(replace(TARGETS["Qwen3-8B"], num_kv_heads=1), None, LoadOptions(tp=4, decode_context_parallel_size=4))
    uneven, alone = (
        LoadOptions(page_size=64, cp_kv_cache_interleave_size=48),
        LoadOptions(cp_kv_cache_interleave_size=16),
    )
    for options, reason in (
        (uneven, "cp_kv_cache_interleave_size=48 must divide page_size=64"),
        (alone, "is for pages that are spread: give decode_context_parallel_size"),
    ):
        with pytest.raises(ParameterError, match=reason):
            check_sharing(experts, None, options)
    with pytest.raises(ParameterError, match="cp_kv_cache_interleave_size must be an integer from 1 to 64, got 65"):
        LoadOptions(cp_kv_cache_interleave_size=65)
    for target, tp, reason in (
        (experts, 16, "must be 1 or 4, the devices of tp=16 that keep the same keys of qwen3_moe, got 2"),
        (experts, 4, "each of tp=4 has some of qwen3_moe's 4 key heads for itself"),
        (
            GPT_OSS_TARGETS["gpt-oss-20b"],
            16,
            "whose layers have windows, attention sinks, soft caps or heads of several kinds",
        ),
    ):
        with pytest.raises(ParameterError, match=reason):
            check_sharing(target, None, LoadOptions(tp=tp, decode_context_parallel_size=2))
