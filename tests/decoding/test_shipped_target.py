"""The target that ships under drafters that know nothing: up to 14 held-out prompts x 64 tokens, and not a token changes."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.models import family_named, fuse_context_projection, init_params

PROMPTS = Path(__file__).parent.parent / "data" / "heldout_prompts.json"
PARAMS = dj.SamplingParams(max_tokens=64, ignore_eos=True)
SIZES, FEW = {"random": (1, 8, 5), "always wrong": (8, 6)}, (4, 3)
pytestmark = pytest.mark.usefixtures("optimised")


@pytest.fixture(scope="module")
def model(all_cases: bool) -> dj.Model:
    """As `test_shipped_pair` loads it, whose programs of the target alone are these."""
    return dj.load(dtype="float32", max_batch=8 if all_cases else 4, max_model_len=256)


@pytest.fixture(scope="module")
def prompts(all_cases: bool) -> list[str]:
    return [row["text"] for row in json.loads(PROMPTS.read_text())][: sum(SIZES["random"] if all_cases else FEW)]


@pytest.fixture(scope="module")
def plain(model, prompts) -> list[tuple[int, ...]]:
    return [row.token_ids for row in dj.generate(model, prompts, PARAMS, draft=False)]


@pytest.mark.few
@pytest.mark.parametrize("kind", ["random", "always wrong"])
def test_greedy_text_does_not_depend_on_the_drafter(model, prompts, plain, kind, all_cases):
    """In ragged batches. The wrong drafter proposes only the mask id, which the target never emits."""
    changes = {"num_layers": 1, "windows": (None,), "causal": (False,), "block_size": 4}
    if kind == "always wrong":
        changes |= {"own_head": True, "draft_vocab_size": model.draft.head.top_k}
    config = replace(model.draft, **changes)
    params = init_params(family_named("dflash").parameters(config), jax.random.key(3))
    if kind == "always wrong":
        params["d2t"] = jnp.full(config.draft_vocab_size, config.mask_token_id, jnp.int32)
    weights = {"target": model.engine.weights["target"], "draft": fuse_context_projection(config, params)}
    said: list[str] = []
    other = replace(model, engine=replace(model.engine, draft=config, weights=weights, num_pages=0), tell=said.append)

    rest, sizes = iter(prompts), SIZES[kind] if all_cases else FEW
    drafted = [row for size in sizes for row in dj.generate(other, list(itertools.islice(rest, size)), PARAMS)]
    assert [row.token_ids for row in drafted] == plain
    lengths = np.concatenate([row.acceptance_lengths for row in drafted])
    assert config.mask_token_id not in np.concatenate(plain)
    if kind == "always wrong":
        assert other.acceptance_by_position == (0.0,) * 3
        causes = ("enable_thinking", "another one than", "another target", "quantized", "draft_window")
        assert [all(cause in text for cause in causes) for text in said] == [True]
    assert lengths.max() == 1 if kind == "always wrong" else lengths.mean() < 1.5
    assert other.engine.allocator.num_free == other.engine.num_pages
