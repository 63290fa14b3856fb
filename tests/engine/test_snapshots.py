"""Prompts that begin like others go on from pages and a snapshot of states: what they give is what they give without.

Alone and prefilled whole is what everything here is held against; states that nobody restored are NaN.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.cache import PageAllocator
from dflash_jax.cache.snapshots import SnapshotAccount, snapshot_places
from dflash_jax.engine import Engine
from dflash_jax.engine.memory import plan_memory
from dflash_jax.engine.requests import Request
from dflash_jax.engine.warmup import prompt_calls
from dflash_jax.errors import CapacityError
from dflash_jax.sampling_params import SamplingParams

from ..hybrid_pair import (
    chosen_config,
    conv_config,
    hybrid_config,
    hybrid_pair,
    kimi_config,
    mamba2_config,
    nothing,
    pooled_config,
    relative_config,
)
from ..random_pair import Pair, random_prompts

SMALL = {"num_layers": 2, "windows": (None,) * 2, "full_layers": (1,)}
PAGE = 16
PLAIN = SamplingParams(max_tokens=8)
PARAMS = SamplingParams(max_tokens=24, temperature=1.0, seed=3, logprobs=2)


TARGETS = {
    "delta": hybrid_config(**SMALL), "conv": conv_config(**SMALL, num_dense_layers=1),
    "pooled": pooled_config(**SMALL, num_dense_layers=1), "kimi": kimi_config(**SMALL, num_dense_layers=1),
    "chosen": chosen_config(**SMALL), "relative": relative_config(),
    "mamba2": mamba2_config(**SMALL, mamba_layers=(0,), expert_layers=()),
}  # fmt: skip
LONG = [pytest.param(name, marks=pytest.mark.few) for name in ("pooled", "kimi", "chosen", "relative", "mamba2")]


@pytest.fixture(scope="module", params=["delta", "conv", *LONG])
def shared(request) -> Pair:
    return hybrid_pair(
        TARGETS[request.param], max_chunk=64, draft={"target_layer_ids": (-1, 0, 1)}, page_size=PAGE, state_snapshots=4,
        snapshot_tokens=PAGE,
    )  # fmt: skip


@pytest.fixture
def pair(shared: Pair) -> Pair:
    """With nothing to be found, and with NaN in every slot and snapshot that nobody has written to."""
    engine = shared.engine
    engine.allocator.forget()
    engine.snapshots.forget()
    engine.take_pools()
    engine.keep_states(jax.tree.map(lambda leaf: jnp.full_like(leaf, nothing(leaf)), engine.kept_states))
    return shared


@pytest.fixture(autouse=True)
def nan_in_new_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of every new batch, and of every slot that is about to be given its first piece or a snapshot."""
    from dflash_jax.engine import batch

    make, enter = batch.empty_state, batch.Batch.begin

    def poisoned(*args):
        state = make(*args)
        return replace(state, recurrent=jax.tree.map(lambda leaf: jnp.full_like(leaf, nothing(leaf)), state.recurrent))

    def begin(batch, job):
        states = jax.tree.map(lambda leaf: leaf.at[job.slot].set(nothing(leaf)), batch.state.recurrent)
        batch.keep(replace(batch.state, recurrent=states))
        enter(batch, job)

    monkeypatch.setattr(batch, "empty_state", poisoned)
    monkeypatch.setattr(batch.Batch, "begin", begin)


def served(pair: Pair, prompts, params=PARAMS):
    """Tokens, acceptance lengths, log-probabilities and tokens found of every prompt, all of them served together."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    engine = pair.engine
    requests = [Request(i, tuple(prompt), one) for i, (prompt, one) in enumerate(zip(prompts, each, strict=True))]
    tokens, counts, chances, cached = ([[] for _ in prompts] for _ in range(4))
    for update in engine.run(requests, slots=4):  # one number of slots, one set of programs
        tokens[update.index] += update.tokens
        counts[update.index] += update.counts
        chances[update.index] += [one for one, _ in update.logprobs]
        cached[update.index].append(update.cached)
    pair.assert_free()
    return tokens, counts, chances, [max(one) for one in cached]


def alone(pair: Pair, prompts, params=PARAMS):
    """Each without whatever others left."""
    found = [[], [], []]
    for prompt in prompts:
        pair.engine.share_prefixes = False
        for kept, one in zip(found, served(pair, [prompt], params), strict=False):
            kept += one
        pair.engine.share_prefixes = True
    return found


def assert_alike(found, expected) -> None:
    assert found[0] == expected[0]
    assert found[1] == expected[1]
    for ours, theirs in zip(found[2], expected[2], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def families(stem: int, ends: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    """Prompts that have their first `stem` tokens in common."""
    beginning = random_prompts((stem,), seed)[0]
    return [beginning + end for end in random_prompts(ends, seed + 1)]


def test_the_same_prompt_again(pair: Pair) -> None:
    """One that ends with a page keeps a token to be prefilled: its logits are wanted."""
    prompts = random_prompts((85, 96, 17, 16))
    expected = alone(pair, prompts)
    for i, prompt in enumerate(prompts):
        first, again = served(pair, [prompt]), served(pair, [prompt])
        assert (first[3], again[3]) == ([0], [(len(prompt) - 1) // PAGE * PAGE])
        for found in (first, again):
            assert_alike(found, [kept[i : i + 1] for kept in expected])


@pytest.mark.few("delta")
def test_a_conversation_goes_on_and_a_third_prompt_finds_what_two_had_in_common(pair: Pair) -> None:
    prompts = families(70, (40, 30, 21, 25))
    longer = prompts[0] + alone(pair, prompts[:1])[0][0][:20] + [5, 6, 7]
    prompts.insert(1, longer)
    expected = alone(pair, prompts)
    found = [served(pair, [prompt]) for prompt in prompts]
    # The third has four pages in common with the first, and a state after three of them only; it leaves one after the fourth.
    assert [one[3] for one in found] == [[0], [96], [48], [64], [64]]
    assert_alike([[one[0] for one in part] for part in zip(*found, strict=True)][:3], expected)


@pytest.mark.few("delta")
def test_several_at_once_with_a_common_beginning(pair: Pair) -> None:
    """The first two are prefilled side by side; those behind wait for the state that the second one leaves."""
    prompts = families(40, (20, 11, 12, 13, 14))
    expected = alone(pair, prompts)
    found = served(pair, prompts)
    assert_alike(found, expected)
    assert found[3] == [0, 0, 32, 32, 32]
    # Two equal ones: the second waits and finds all that it may.
    found = served(pair, [prompts[0][::-1]] * 2)
    assert found[3] == [0, 48]
    assert found[0][0] == found[0][1]


@pytest.mark.few("delta")
def test_who_comes_behind_a_prompt_that_is_scored_waits_for_its_state(pair: Pair) -> None:
    """It asked for keys that nobody had made, and ended with an error of Python's."""
    prompts = random_prompts((30,)) * 2
    expected = alone(pair, prompts, PLAIN)
    found = served(pair, prompts, [replace(PLAIN, prompt_logprobs=0), PLAIN])
    assert (found[0], found[3]) == (expected[0], [0, 16])


def test_pages_without_a_snapshot_and_snapshots_without_pages_are_no_hit(pair: Pair) -> None:
    engine, prompt = pair.engine, random_prompts((90,), 5)[0]
    expected = alone(pair, [prompt])
    served(pair, [prompt])
    engine.snapshots.forget()
    assert served(pair, [prompt])[3] == [0]
    engine.allocator.forget()
    assert len(engine.snapshots) > 0
    found = served(pair, [prompt])
    assert found[3] == [0]
    assert_alike(found, expected)
    assert served(pair, [prompt])[3] == [80]


@pytest.mark.few
def test_more_prompts_than_snapshots(pair: Pair) -> None:
    """The pool holds four: the one used longest ago is given up, and a shorter hit is a hit."""
    engine = pair.engine
    prompts = random_prompts((40,) * 6, 7)
    expected = alone(pair, prompts)
    found = [served(pair, [prompt]) for prompt in (*prompts[:4], prompts[0], *prompts[4:])]
    assert len(engine.snapshots) == 4
    assert [one[3][0] for one in found] == [0, 0, 0, 0, 32, 0, 0]
    again = [served(pair, [prompt]) for prompt in (prompts[0], prompts[3], prompts[1])]
    assert [one[3][0] for one in again] == [32, 32, 0]
    for i, one in zip((0, 1, 2, 3, 0, 4, 5, 0, 3, 1), [*found, *again], strict=True):
        assert_alike(one, [kept[i : i + 1] for kept in expected])
    # One that has left a snapshot on its way is found by its shorter part.
    long = random_prompts((100,), 8)[0]
    served(pair, [long])
    key = next(reversed(engine.snapshots._rows))
    row = engine.snapshots._rows.pop(key)
    found = served(pair, [long])
    assert 0 < found[3][0] < 96
    assert_alike(found, alone(pair, [long]))
    assert row < 4


@pytest.mark.few("delta")
def test_requests_that_lose_their_pages_come_back_to_a_snapshot(pair: Pair) -> None:
    engine, prompts = pair.engine, families(34, (16, 6, 11), seed=4)
    params = replace(PARAMS, max_tokens=40)
    expected, before = alone(pair, prompts, params), engine.scheduler.stats
    whole, engine.allocator = engine.allocator, PageAllocator(10)
    found = served_with(engine, prompts, params)
    engine.allocator.check_integrity()
    engine.allocator = whole
    after = engine.scheduler.stats
    assert after.preemptions > before.preemptions
    assert after.cached_tokens > before.cached_tokens
    assert found == expected[0]


def served_with(engine: Engine, prompts, params) -> list[list[int]]:
    tokens = [[] for _ in prompts]
    for update in engine.run([Request(i, tuple(prompt), params) for i, prompt in enumerate(prompts)]):
        tokens[update.index] += update.tokens
    return tokens


def test_a_prompt_that_is_cancelled_on_its_way_leaves_what_it_has_come_to(pair: Pair) -> None:
    """Of 130 tokens 128 in four calls: after the second one it is cancelled, and one that begins alike goes on from there."""
    engine, prompt = pair.engine, random_prompts((130,), 9)[0]
    engine.goes_ahead = False
    expected = alone(pair, [prompt])
    scheduler = engine.scheduler
    ticket = engine.submit(Request(0, tuple(prompt), PARAMS), lambda ticket, what: None)
    while len(engine.snapshots) < 1:
        engine.step()
    engine.scheduler.abort(ticket)
    while engine.step():
        pass
    assert scheduler.stats.running == 0
    found = served(pair, [prompt])
    engine.goes_ahead = None
    assert found[3][0] > 0
    assert_alike(found, expected)


@pytest.mark.few
def test_more_slots_while_prompts_go_on_from_snapshots(pair: Pair) -> None:
    """Slots are added and taken while one is at its prompt: states move with their sequences."""
    engine, prompts = pair.engine, families(50, (10, 11, 12), seed=11)
    expected = alone(pair, prompts)
    served(pair, prompts[:2])
    tokens = {i: [] for i in range(3)}
    run, coming = engine.run([Request(0, tuple(prompts[0]), PARAMS)], cycles=1), [1, 2]
    for update in run:
        tokens[update.index] += update.tokens
        if len(tokens[0]) > 4 and coming:
            run.add(Request(coming[0], tuple(prompts[coming.pop(0)]), PARAMS))
    assert list(tokens.values()) == expected[0]


def test_new_weights_find_nothing(pair: Pair) -> None:
    engine, prompt = pair.engine, random_prompts((50,), 13)[0]
    first = served(pair, [prompt])
    engine.weights = dict(engine.weights)
    again = served(pair, [prompt])
    assert again[3] == [0]
    assert_alike(again, first)


def test_memory_for_snapshots() -> None:
    """Pages come first where nobody has asked for a number."""
    usual = {
        "weights": 100,
        "reading": 100,
        "workspace": 100,
        "page": 10,
        "longest_pages": 4,
        "max_batch": 2,
        "state": 50,
    }
    plans = [
        plan_memory(**usual, num_pages=None, free=free, snapshots=count)
        for free, count in ((1000, None), (530, None), (470, None), (1000, 3), (1000, 0), (540, 2))
    ]
    assert [one.state_snapshots for one in plans] == [4, 1, 0, 3, 0, 2]
    assert [one.num_pages for one in plans] == [8, 8, 7, 8, 8, 4]
    assert [one.snapshots for one in plans] == [50 * one.state_snapshots for one in plans]
    with pytest.raises(CapacityError, match="snapshots of states"):
        plan_memory(**usual, num_pages=8, free=600, snapshots=3)
    assert plan_memory(**usual | {"state": 0}, num_pages=None, free=1000, snapshots=None).state_snapshots == 0


def test_calls_that_are_known_before(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pieces end at places of snapshots too, what is compiled while weights are read is what is called."""
    engine, call, called = pair.engine, pair.engine.programs.call, []

    def watched(function, static, donate, *args):
        if function.__name__ == "prefill_chunk":
            called.append((args[1].shape[1], *args[3].shape))
        return call(function, static, donate, *args)

    monkeypatch.setattr(engine.programs, "call", watched)
    prompts = random_prompts((9, 40, 100), seed=17)
    served(pair, prompts, replace(PARAMS, max_tokens=2))
    requests = [Request(i, tuple(prompt), PARAMS) for i, prompt in enumerate(prompts)]
    assert list(prompt_calls(engine, requests, 4)) == called
    assert len(called) > 2


def test_where_snapshots_are_taken() -> None:
    places = [
        snapshot_places(*numbers, 16, apart=32, every=64)
        for numbers in ((0, 0, 20), (0, 0, 33), (0, 48, 90), (48, 48, 90), (0, 0, 200), (0, 16, 200), (64, 96, 97))
    ]
    assert places == [[], [32], [48, 80], [80], [64, 128, 192], [64, 128, 192], [96]]


def test_the_account_of_snapshots() -> None:
    account = SnapshotAccount(2)
    a, b, c = b"a", b"b", b"c"
    for key in (a, b):
        account.publish(account.free_row(lambda key: True), key)
    assert account.find([a, c]) == (1, 0)
    assert account.free_row(lambda key: True) == 1  # b was used longest ago
    account.publish(1, c)
    assert account.free_row(lambda key: key != c) == 1
    assert account.find([c]) == (0, -1)
