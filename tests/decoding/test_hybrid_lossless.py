"""A target with recurrent states under a drafter: no text changes, whatever number of proposals stands.

States are where quality is lost without an error: every way to reach one is held against plain steps and the dense model.
"""

import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.attention.dense import dense_attend
from dflash_jax.attention.paged import PagedAttend
from dflash_jax.attention.recurrent import committed, verifying
from dflash_jax.cache import PageAllocator, make_pages
from dflash_jax.cache.recurrent import make_states
from dflash_jax.decoding import cycle
from dflash_jax.decoding.prefill import Caches, prefill_chunk
from dflash_jax.decoding.state import Setup
from dflash_jax.engine.requests import Request
from dflash_jax.models import bind
from dflash_jax.sampling_params import SamplingParams

from ..hybrid_pair import (
    chosen_config,
    conv_config,
    hybrid_config,
    hybrid_moe_config,
    hybrid_pair,
    kimi_config,
    mamba2_config,
    nothing,
    pooled_config,
    relative_config,
)
from ..random_pair import VOCAB, Pair, random_params, random_prompts

# Around the convolution's 3 rows, chunks of 64 tokens and pieces of prompts; several calls for the longest.
LENGTHS = (1, 2, 3, 63, 64, 65, 100, 40)
# Fewer layers than in `hybrid_config`, as every one is compiled in every program.
SMALL = {"num_layers": 2, "windows": (None,) * 2, "full_layers": (1,)}
GREEDY, SAMPLED = SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=1.0, seed=3)


TARGETS = {
    "dense": partial(hybrid_config, **SMALL), "moe": partial(hybrid_moe_config, **SMALL, dense_layers=()),
    "conv": partial(conv_config, **SMALL, num_dense_layers=1),
    "pooled": partial(pooled_config, **SMALL, num_dense_layers=1), "kimi": partial(kimi_config, **SMALL, num_dense_layers=1),
    "chosen": partial(chosen_config, **SMALL), "relative": relative_config,
    "mamba2": partial(
        mamba2_config, num_layers=3, windows=(None,) * 3, mamba_layers=(0,), full_layers=(1,), expert_layers=(2,)
    ),
}  # fmt: skip
LONG = [pytest.param(name, marks=pytest.mark.few) for name in ("pooled", "kimi", "chosen", "relative", "mamba2")]


@pytest.fixture(scope="module", params=["dense", "moe", "conv", *LONG])
def hybrid(request) -> Pair:
    target = TARGETS[request.param]()
    return hybrid_pair(target, max_chunk=64, draft={"target_layer_ids": (-1, 0, 1)})


def counts_of(rows: list[list[int]]) -> set[int]:
    return set(np.concatenate(rows).tolist())


@pytest.mark.few("moe-sampled")
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_same_tokens_with_and_without_drafting(hybrid: Pair, params: SamplingParams) -> None:
    prompts = random_prompts(LENGTHS)
    drafted, counts, _ = hybrid.run(prompts, params)
    plain, ones, _ = hybrid.run(prompts, params, draft=False)
    assert drafted == plain
    assert counts_of(ones) == {1}
    if params is SAMPLED:
        assert counts_of(counts) >= {1, 2, 3, 4}


@pytest.mark.few("moe", "conv")
def test_alone_as_in_a_batch_and_as_the_dense_model_says(hybrid: Pair) -> None:
    prompts = random_prompts(LENGTHS[2:5])
    together = hybrid.run(prompts, GREEDY)[0]
    assert together == [hybrid.run([prompt], GREEDY)[0][0] for prompt in prompts]
    ids, config = np.zeros((len(prompts), 100), np.int32), hybrid.target
    for row, prompt, tokens in zip(ids, prompts, together, strict=True):
        row[: len(prompt) + 24] = prompt + tokens

    @jax.jit
    def chosen(params, ids):
        model = bind(config, params)
        hidden, *_ = model(ids, jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape), dense_attend())
        return jnp.argmax(model.logits(hidden), axis=-1)

    for row, prompt, tokens in zip(chosen(hybrid.engine.weights["target"], ids), prompts, together, strict=True):
        assert np.asarray(row)[len(prompt) - 1 :][:24].tolist() == tokens


@pytest.mark.few
@pytest.mark.parametrize("kind", ["dense", "conv", "pooled", "kimi", "chosen", "relative", "mamba2"])
def test_greedy_texts_whatever_number_of_proposals_stands(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    draft = {"target_layer_ids": (-1, 0, 1), "block_size": 16}
    hold_any_number(monkeypatch, hybrid_pair(TARGETS[kind](), max_chunk=64, draft=draft))


def hold_any_number(monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
    """1 to all tokens of a block stand. `HYBRID_TEXTS` prompts of 64 tokens each, some alone and all in ragged batches."""
    many, tokens, block = int(os.environ.get("HYBRID_TEXTS", "6")), 64, pair.draft.block_size
    prompts = random_prompts([1 + 37 * i % 90 for i in range(many)], seed=21)
    each = [SamplingParams(max_tokens=tokens, seed=i) for i in range(many)]
    plain, ones, _ = pair.run(prompts, each, draft=False)
    propose_in_part(monkeypatch, [prompt + text for prompt, text in zip(prompts, plain, strict=True)], block)
    drafted, counts, _ = pair.run(prompts, each)
    assert drafted == plain
    assert counts_of(ones) == {1}
    assert len(counts_of(counts)) >= min(block, 2 * many)
    for i in range(0, many, 2):
        assert pair.run(prompts[i : i + 1], each[i])[:2] == (plain[i : i + 1], counts[i : i + 1])


def propose_in_part(monkeypatch: pytest.MonkeyPatch, known: list[list[int]], block: int) -> None:
    """Each cycle's proposals are the text that comes, wrong from a place on that changes from cycle to cycle.

    `known` are prompts with their texts, by the requests' seeds, which count from 0.
    """
    texts = np.zeros((len(known), max(map(len, known)) + 2 * block), np.int32)
    for row, text in zip(texts, known, strict=True):
        row[: len(text)] = text
    stands = np.random.default_rng(4).integers(0, block, texts.shape)
    seen, draft_block = [], cycle.draft_block

    def remember(drafter, target, pages, table, state, *rest):
        seen[:] = [state]
        return draft_block(drafter, target, pages, table, state, *rest)

    def proposals(drafter, block_states, head, index):
        (state,), places = seen, jnp.arange(1, block)
        who = state.request.seed[:, -1].astype(jnp.int32)
        right = jnp.asarray(texts)[who[:, None], state.seq_lens[:, None] + places]
        stand = jnp.asarray(stands)[who, state.seq_lens]
        found = jnp.where(places <= stand[:, None], right, (right + 1) % VOCAB)
        rest = block_states.shape[1] - found.shape[1]  # where the anchor's row is left in, nobody reads it
        return jnp.pad(found, ((0, 0), (rest, 0)))

    monkeypatch.setattr(cycle, "draft_block", remember)
    monkeypatch.setattr(cycle, "best_proposals", proposals)


@pytest.mark.few
def test_other_numbers_of_cycles_lengths_and_slots(hybrid: Pair) -> None:
    """Widths change between cycles, one token alone among them; batches shrink, and slots go to requests that wait."""
    prompts = random_prompts((9, 33, 5, 70, 1, 20, 12), seed=2)
    each = [SamplingParams(max_tokens=n, temperature=1.0, seed=n) for n in (40, 3, 25, 8, 30, 1, 17)]
    expected = hybrid.run(prompts, each, draft=False)[0]
    engine = hybrid.engine
    for length in (None, 1, 3):
        engine.verify_length = length
        assert hybrid.run(prompts, each, cycles=2)[0] == expected
    engine.verify_length = None


@pytest.mark.few
def test_a_request_that_loses_its_pages_is_prefilled_again(hybrid: Pair) -> None:
    """States are not kept for it: they are made again from its tokens."""
    prompts = random_prompts((40, 30, 35), seed=4)
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=1)
    expected, engine = hybrid.run(prompts, params)[0], hybrid.engine
    whole, engine.allocator, before = engine.allocator, PageAllocator(12), engine.scheduler.stats.preemptions
    updates = list(engine.run([Request(i, tuple(prompt), params, ()) for i, prompt in enumerate(prompts)]))
    engine.allocator = whole
    assert engine.scheduler.stats.preemptions > before
    assert [[t for update in updates if update.index == i for t in update.tokens] for i in range(3)] == expected


@pytest.mark.few("moe")
def test_no_page_is_shared(hybrid: Pair) -> None:
    """A page without the state at its end is no beginning of another prompt."""
    prompt = random_prompts((80,))[0]
    first = hybrid.run([prompt], GREEDY)
    again = hybrid.run([prompt], GREEDY)
    assert first[0] == again[0]
    assert again[2][0].cached == 0


@pytest.mark.few("delta", "chosen")
@pytest.mark.parametrize(
    "config",
    [
        hybrid_config(),
        conv_config(),
        TARGETS["pooled"](),
        TARGETS["kimi"](),
        TARGETS["chosen"](),
        relative_config(),
        mamba2_config(),
    ],
    ids=["delta", "conv", "pooled", "kimi", "chosen", "relative", "mamba2"],
)
def test_states_after_every_number_of_accepted_tokens(config) -> None:
    """A block of 16 verified in 18 slots, of which 1 to 16 tokens stand, none, or nothing at all: states, logits of the tokens that
    stand, and those of the next token are those of single steps."""
    dtype = jnp.dtype("float32")
    params, tokens, slots = random_params(config, 0), 16, 18
    counts = np.array([*range(1, tokens + 1), 0, 0])
    live = jnp.asarray(np.arange(slots) != slots - 1)
    block = np.random.default_rng(0).integers(0, VOCAB, (slots, tokens + 1))
    prompt = np.broadcast_to(np.arange(7, dtype=np.int32), (slots, 7))
    table = jnp.arange(slots * 2).reshape(slots, 2)
    caches = Caches(
        make_pages(config, slots * 2, 16, dtype), make_pages(config, 1, 16, dtype), make_states(config, slots, dtype)
    )
    zeros = np.zeros(slots, np.int32)
    caches, _ = jax.jit(partial(prefill_chunk, Setup(config)))(
        {"target": params}, table, caches, prompt, zeros, zeros + 7, np.arange(slots)
    )

    @jax.jit
    def verify(params, pages, states, ids, first, counts):
        model, lens = bind(config, params), jnp.where(live, ids.shape[1], 0)
        positions = first[:, None] + jnp.arange(ids.shape[1])
        attend, cache = verifying(PagedAttend(table, positions, lens, 16), pages, states, live)
        hidden, _, cache = model(ids, positions, attend, cache=cache)
        return model.logits(hidden), *committed(cache, counts)

    logits, pages, wide = verify(params, caches.target, caches.recurrent, block[:, :tokens], zeros + 7, counts)
    following, _, _ = verify(
        params, pages, wide, block[np.arange(slots), counts][:, None], zeros + 7 + counts, (counts > 0) * 1
    )
    pages, states, chosen = caches.target, caches.recurrent, []
    at = {0: states}
    for place in range(tokens + 1):
        single, pages, states = verify(params, pages, states, block[:, place : place + 1], zeros + 7 + place, zeros + 1)
        chosen.append(np.asarray(single)[:, 0])
        at[place + 1] = states
    for slot, count in enumerate(counts[:-1]):
        np.testing.assert_allclose(
            np.asarray(logits)[slot, :count], np.array(chosen)[:count, slot], atol=2e-5, rtol=2e-5
        )
        np.testing.assert_allclose(np.asarray(following)[slot, 0], chosen[count][slot], atol=2e-5, rtol=2e-5)
        for ours, theirs in zip(jax.tree.leaves(wide), jax.tree.leaves(at[count]), strict=True):
            largest = np.abs(theirs[slot]).max()
            np.testing.assert_allclose(ours[slot], theirs[slot], atol=1e-5 * max(largest, 1e-3))
    for left, before in zip(
        jax.tree.leaves((wide, states)), jax.tree.leaves((caches.recurrent, caches.recurrent)), strict=True
    ):
        np.testing.assert_array_equal(left[-1], before[-1])
    for kept, before in zip(jax.tree.leaves(wide), jax.tree.leaves(caches.recurrent), strict=True):
        np.testing.assert_array_equal(kept[-2], before[-2])


@pytest.mark.few("moe", "conv")
def test_a_slot_that_is_given_to_another_request_starts_from_zero(hybrid: Pair) -> None:
    """States of slots that a prompt is about to begin in are overwritten with NaN."""
    prompts = random_prompts(LENGTHS)
    expected = hybrid.run(prompts, GREEDY)[0]
    call, poisoned = hybrid.engine.programs.call, []

    def with_poison(function, static, donate, *args):
        if function.__name__ == "prefill_chunk":
            caches, starts, slots = args[2], args[4], args[6]
            fresh = [slot for slot, start in zip(slots, starts, strict=True) if start == 0 and slot < 4]
            states = jax.tree.map(lambda leaf: leaf.at[np.array(fresh, int)].set(nothing(leaf)), caches.recurrent)
            args = (*args[:2], caches._replace(recurrent=states), *args[3:])
            poisoned.extend(fresh)
        return call(function, static, donate, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hybrid.engine.programs, "call", with_poison)
        assert hybrid.run(prompts, GREEDY)[0] == expected
    assert len(poisoned) >= len(prompts)
