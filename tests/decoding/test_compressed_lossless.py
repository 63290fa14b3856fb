"""A target that attends to compressed keys under a drafter: no text changes, whatever number of proposals stands.

Compressed rows are made of what pages hold, so every way to get pages is held against plain steps and the dense model: prompts in
pieces, blocks that stand in part, pages that another request has left, pages that are found, and such as were given back.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.attention.dense import dense_attend
from dflash_jax.attention.ragged import RaggedAttend
from dflash_jax.cache import PageAllocator
from dflash_jax.cache.groups import PageTables
from dflash_jax.decoding.prefill import Caches
from dflash_jax.engine.requests import Request
from dflash_jax.engine.verify_auto import AutoPolicy
from dflash_jax.engine.verify_policy import Length
from dflash_jax.models import bind
from dflash_jax.models.deepseek_v4 import SPARSE
from dflash_jax.sampling_params import SamplingParams

from ..compressed_pair import compressed_config, compressed_pair
from ..engine.test_verify_auto import by_turns
from ..random_pair import Pair, of_one_shape, random_prompts
from .test_hybrid_lossless import counts_of, hold_any_number, propose_in_part

GREEDY, SAMPLED = SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=1.0, seed=3)
ONE = {"num_layers": 1, "windows": (7,), "kinds": (SPARSE,), "hashed": (True,)}


def with_nan(made: Pair) -> Pair:
    """Every slot of every page is NaN, and nothing in them is found."""
    engine = made.engine
    for pool in engine.groups:
        pool.allocator.forget()
    engine.keep_pools(*jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), engine.take_pools()))
    return made


def dense_texts(pair: Pair, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Greedy ones of the model without pages."""
    ids = np.zeros((len(prompts), max(map(len, prompts)) + tokens), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt

    @jax.jit
    def chosen(params, ids):
        model = bind(pair.target, params)
        hidden, *_ = model(ids, jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape), dense_attend())
        return jnp.argmax(model.logits(hidden), axis=-1)

    ends = np.array([len(prompt) for prompt in prompts])
    for place in range(tokens):
        best = np.asarray(chosen(pair.engine.weights["target"], ids))
        ids[np.arange(len(ids)), ends + place] = best[np.arange(len(ids)), ends + place - 1]
    return [row[end : end + tokens].tolist() for row, end in zip(ids, ends, strict=True)]


def test_texts_are_those_of_the_dense_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts in several pieces, a short one, and one that begins with another's pages, whatever number of proposals stands."""
    draft = {"target_layer_ids": (-1, 0), "block_size": 6}
    pair = with_nan(compressed_pair(compressed_config(**ONE), max_chunk=64, max_batch=2, draft=draft))
    of_one_shape(pair.engine)
    long, short, other = random_prompts((90, 4, 30))
    prompts = [long, short, [*long[:45], *other]]
    texts = dense_texts(pair, prompts, 40)
    propose_in_part(monkeypatch, [prompt + text for prompt, text in zip(prompts, texts, strict=True)], 6)
    drafted, counts, _ = pair.run(prompts, [SamplingParams(max_tokens=40, seed=i) for i in range(3)])
    assert drafted == texts
    assert counts_of(counts) == {1, 2, 3, 4, 5, 6}
    assert pair.engine.scheduler.stats.cached_tokens == 32


@pytest.mark.few
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_same_tokens_with_and_without_drafting(params: SamplingParams) -> None:
    pair = with_nan(compressed_pair(max_chunk=64))
    prompts = random_prompts((1, 2, 9, 10, 11, 63, 64, 100))
    drafted, counts, _ = pair.run(prompts, params)
    plain, ones, _ = pair.run(prompts, params, draft=False)
    assert drafted == plain
    assert counts_of(ones) == {1}
    if params is SAMPLED:
        assert len(counts_of(counts)) > 1
        return
    assert drafted == dense_texts(pair, prompts, 24)
    assert drafted[5:] == [pair.run([prompt], params)[0][0] for prompt in prompts[5:]]


@pytest.mark.few
@pytest.mark.parametrize("page", [4, 16, 32])
def test_greedy_texts_whatever_number_of_proposals_stands(monkeypatch: pytest.MonkeyPatch, page: int) -> None:
    hold_any_number(monkeypatch, compressed_pair(max_chunk=64, page_size=page, draft={"block_size": 16}))


@pytest.mark.few
def test_requests_that_share_rows_of_a_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another number of verified tokens for each of them, side by side."""
    pair, packs, packed = compressed_pair(max_chunk=64), [], RaggedAttend.compressed
    monkeypatch.setattr(AutoPolicy, "choose", by_turns(Length(3, shared=True)))
    monkeypatch.setattr(AutoPolicy, "shares", lambda policy, slots: True)
    monkeypatch.setattr(RaggedAttend, "compressed", lambda *given: (packs.append(1), packed(*given))[1])
    pair.engine.verify_length = "per_request"
    prompts = random_prompts((40, 9, 70))
    drafted, counts, _ = pair.run(prompts, SAMPLED)
    assert drafted == pair.run(prompts, SAMPLED, draft=False)[0]
    assert packs
    assert len(counts_of(counts)) > 1


@pytest.mark.few
def test_a_request_that_loses_its_pages_is_prefilled_again() -> None:
    pair = compressed_pair(max_chunk=64)
    prompts, params = random_prompts((40, 30, 35), seed=4), SamplingParams(max_tokens=40, temperature=1.0, seed=1)
    expected, engine = pair.run(prompts, params)[0], pair.engine
    assert len(engine.groups) == 1  # nothing falls out of windows in texts that are so short
    whole, engine.allocator, before = engine.allocator, PageAllocator(12), engine.scheduler.stats.preemptions
    updates = list(engine.run([Request(i, tuple(prompt), params, ()) for i, prompt in enumerate(prompts)]))
    engine.allocator = whole
    assert engine.scheduler.stats.preemptions > before
    assert [[t for update in updates if update.index == i for t in update.tokens] for i in range(3)] == expected


@pytest.mark.few
def test_rows_of_tokens_fall_out_of_windows_and_compressed_rows_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is given back holds NaN; pages that end with a window are found again, with the compressed rows before them."""
    options: dict[str, Any] = {"max_model_len": 640, "page_size": 32, "max_chunk": 128, "max_batch": 2}
    pair = compressed_pair(**options)
    of_one_shape(pair.engine)
    full, *narrow = pair.engine.groups
    assert (full.group.reach, full.group.target) == (None, (3, 4))
    assert [(pool.group.reach, pool.group.target) for pool in narrow] == [(10, (2,)), (7, (0, 1))]
    prompts = random_prompts((520, 60, 330))
    whole = object.__new__(Pair)
    whole.engine = replace(pair.engine, slides=False, share_prefixes=False, num_pages=0)
    of_one_shape(whole.engine)
    texts = whole.run(prompts, GREEDY, draft=False)[0]
    call, engine = pair.engine.programs.call, pair.engine

    def called(function, static, donate, weights, table, pools, *rest):
        if not isinstance(table, PageTables):
            return call(function, static, donate, weights, table, pools, *rest)
        sizes = (engine.num_pages, *engine.window_pages)
        accounts = [pool.allocator for pool in engine.groups]
        unused = {
            id(account): ~np.isin(np.arange(count), np.array([*np.flatnonzero(account._owners), *account._keys], int))
            for count, account in zip(sizes, accounts, strict=True)
        }
        names = ("target", "draft") if isinstance(pools, Caches) else ("target_pages", "draft_pages")
        changed = {}
        for role, name in zip(("target", "draft"), names, strict=True):
            pages = getattr(pools, name)
            for pool in engine.groups:
                bad = unused[id(pool.allocator)][:, None, None, None]
                for layer in getattr(pool.group, role):
                    sides = {side: getattr(pages, side)[layer] for side in ("k", "v") if getattr(pages, side)}
                    pages = pages.with_layer(
                        layer, **{side: jnp.where(bad, jnp.nan, one) for side, one in sides.items()}
                    )
            changed[name] = pages
        pools = pools._replace(**changed) if isinstance(pools, Caches) else replace(pools, **changed)
        return call(function, static, donate, weights, table, pools, *rest)

    monkeypatch.setattr(engine.programs, "call", called)
    assert pair.run(prompts, GREEDY)[0] == texts
    before = engine.scheduler.stats.cached_tokens
    assert pair.run(prompts, GREEDY)[0] == texts
    assert engine.scheduler.stats.cached_tokens - before == 512 + 32 + 320
    branch = [*prompts[0][:300], *prompts[1]]
    assert pair.run([branch], GREEDY)[0] == dense_texts(pair, [branch], 24)
