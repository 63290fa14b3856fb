"""Requests that begin with the same pages: who they are, what reading those once saves, and texts that stay as they are."""

import itertools
import random
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.cache.specs import LayerSpec
from dflash_jax.compile import programs
from dflash_jax.decoding.loop import loop
from dflash_jax.decoding.masked_cycle import verify_block
from dflash_jax.engine import STOP_WIDTH
from dflash_jax.engine.cascade import (
    GROUPS,
    CascadePolicy,
    LayerCost,
    Sharers,
    Sharing,
    common_pages,
    layer_costs,
    shared_argument,
)
from dflash_jax.engine.resources import Resources
from dflash_jax.engine.warmup import Jobs
from dflash_jax.sampling_params import SamplingParams

from ..random_pair import Pair, random_prompts

# Qwen3-8B's on an H200: 36 layers of 32 query heads over 8 of 128, in bfloat16; its drafter has five.
LAYER = LayerCost(4096.0, 32, 8, 128)
POLICY = CascadePolicy((LAYER,) * 36, (LAYER,) * 5, 16)

STEM, *ENDS = random_prompts((33, 1, 9, 4, 20), seed=5)
# The third one begins otherwise; the last one shares less.
PROMPTS = [STEM + ENDS[0], STEM + ENDS[1], ENDS[3], STEM[:19] + ENDS[2]]
PARAMS = SamplingParams(max_tokens=24)
# Two beginnings, which others have in part, and one of nobody else; more requests than slots.
SECOND = random_prompts((22,), seed=6)[0]
GROUPED = [
    STEM + ENDS[0],
    SECOND + ENDS[1],
    STEM + ENDS[1],
    SECOND + ENDS[2],
    ENDS[3],
    STEM + ENDS[2],
    SECOND + ENDS[3],
]
LENGTHS = [SamplingParams(max_tokens=count) for count in (24, 20, 9, 24, 15, 24, 18)]


def brute_force(table: np.ndarray, whole: np.ndarray, most: int) -> int:
    """Readings of pages that the best groups save, over all ways to make up to so many."""
    saved = {}
    for count in range(2, len(table) + 1):
        for rows in itertools.combinations(range(len(table)), count):
            pages = next(
                (page for page in range(min(whole[list(rows)])) if len({*table[list(rows), page]}) > 1),
                min(whole[list(rows)]),
            )
            saved[rows] = (count - 1) * int(pages)
    ways = (
        chosen for groups in range(1, most + 1) for chosen in itertools.combinations(saved, groups)
        if len({row for rows in chosen for row in rows}) == sum(map(len, chosen))
    )  # fmt: skip
    return max((sum(saved[rows] for rows in chosen) for chosen in ways), default=0)


def test_the_beginnings_that_save_most() -> None:
    """Of one group, of two and of three, which no sequence is in twice."""
    rng, groups_of = random.Random(2), set()
    for _ in range(60):
        rows, width = rng.randint(0, 6), rng.randint(1, 7)
        table = [[rng.randint(0, 2), *(rng.randint(0, 1) for _ in range(width - 1))] for _ in range(rows)]
        table = np.array(table, np.int32)
        table = table.reshape(rows, width)
        whole = np.array([rng.randint(0, width) for _ in range(rows)], np.int64)
        choices = common_pages(table, whole, most=3)
        for most in (1, 2, 3):
            groups = choices[min(most, len(choices)) - 1] if choices else []
            assert len(groups) <= most
            assert sum((len(found) - 1) * pages for found, pages in groups) == brute_force(table, whole, most)
            everybody = [int(row) for found, _ in groups for row in found]
            assert len(everybody) == len({*everybody})
            for found, pages in groups:
                assert pages
                assert (table[found, :pages] == table[found[0], :pages]).all()
                assert whole[found].min() >= pages
        groups_of.add(len(choices))
    assert groups_of == {0, 1, 2, 3}
    later = np.array([[1, 2], [3, 2]], np.int32)
    assert common_pages(later, np.array([2, 2])) == []  # a later page in common is none


def test_what_a_program_is_told() -> None:
    """One row of pages for one group, `GROUPS` of them for more."""
    slots, groups = np.array([4, 0, 2, 5]), [(np.array([0, 3]), 7), (np.array([2, 1]), 2)]
    assert shared_argument(groups[:1], slots, 6).tolist() == [0, 0, 0, 0, 7, 7]
    told = shared_argument(groups, slots, 6)
    assert told.shape == (GROUPS, 6)
    assert told[:2].tolist() == [[0, 0, 0, 0, 7, 7], [2, 0, 2, 0, 0, 0]]
    assert not told[2:].any()


@pytest.mark.parametrize(
    ("sharers", "slots", "verified", "tokens", "pays"),
    [
        (32, 32, 1, 8192, True), (32, 32, 16, 8192, True), (8, 8, 1, 8192, True), (2, 8, 1, 32768, True),
        (8, 8, 1, 64, False), (2, 2, 1, 512, False),  # launches cost more
        (2, 32, 16, 2048, False),  # everybody's queries are multiplied with what two share
    ],
)  # fmt: skip
def test_when_it_pays(sharers: int, slots: int, verified: int, tokens: int, pays: bool) -> None:
    assert (POLICY.saved_s([Sharers(sharers, tokens)], slots, verified) > 0) == pays


@pytest.mark.parametrize(
    ("groups", "slots", "verified", "pays"),
    [
        ([(16, 8192), (16, 8192)], 32, 1, True), ([(8, 32768)] * 4, 32, 1, True), ([(30, 8192), (2, 64)], 32, 1, False),
        ([(4, 2048), (4, 2048)], 8, 1, False), ([(16, 8192), (16, 8192)], 32, 16, False),  # all queries are multiplied twice
    ],
)  # fmt: skip
def test_when_more_groups_pay(groups: list[tuple[int, int]], slots: int, verified: int, pays: bool) -> None:
    """More than the best of them alone."""
    sharers = [Sharers(*one) for one in groups]
    alone = max(POLICY.saved_s([one], slots, verified) for one in sharers)
    assert (POLICY.saved_s(sharers, slots, verified) > max(alone, 0.0)) == pays


def test_layers_that_can() -> None:
    full, window, latent = LayerSpec(8, 128, 128), LayerSpec(8, 128, 128, window=512), LayerSpec(1, 576, None)
    assert layer_costs([full, window, latent], [262144, 262144, 73728], 32, 64) == (LAYER,)


@pytest.fixture(scope="module")
def pair() -> Pair:
    made = Pair(page_size=4, max_model_len=80, max_chunk=24, num_pages=200)
    made.engine.buckets = replace(made.engine.buckets, batch=(4,), width=made.engine.buckets.width[-1:])
    return made


def texts_alone(pair: Pair, prompts: list[list[int]], params: object) -> list[list[int]]:
    """Nothing shared, nothing drafted."""
    whole = replace(pair.engine, share_prefixes=False)
    whole.buckets = pair.engine.buckets
    other = object.__new__(Pair)
    other.engine = whole
    return other.run(prompts, params, draft=False)[0]


@pytest.fixture(scope="module")
def texts(pair) -> list[list[int]]:
    return texts_alone(pair, PROMPTS, PARAMS)


@pytest.fixture(scope="module")
def grouped(pair) -> list[list[int]]:
    return texts_alone(pair, GROUPED, LENGTHS)


@pytest.fixture
def shared(pair, monkeypatch) -> list[list[int] | None]:
    """What each call for cycles is told of shared pages. Before it, pages that are nobody's are filled with NaN."""
    engine, call, seen = pair.engine, pair.engine.programs.call, []

    def called(function, static, donate, weights, table, state, *rest):
        if function is loop:
            seen.append(None if rest[-1] is None else rest[-1].tolist())
            account = engine.allocator
            unused = (np.array(account._owners) == 0) & ~np.isin(np.arange(account.num_pages), [*account._keys])
            assert unused.any()
            state = replace(
                state,
                target_pages=_with_nan(state.target_pages, unused),
                draft_pages=_with_nan(state.draft_pages, unused),
            )
        return call(function, static, donate, weights, table, state, *rest)

    monkeypatch.setattr(engine.programs, "call", called)
    monkeypatch.setattr(engine, "cascade", True)
    return seen


@jax.jit
def _with_nan(pages, unused):
    return jax.tree.map(lambda pool: jnp.where(unused[:, None, None, None], jnp.nan, pool), pages)


@pytest.mark.few("False")
@pytest.mark.parametrize("draft", [True, False])
def test_texts_of_several_groups_are_those_of_requests_alone(pair, grouped, shared, draft: bool) -> None:
    """Groups that come and go, with members that end: one program for all, which tells them apart by what it is given."""
    # What a first run left in pages the second finds, so that all of it shares from the start.
    assert [pair.run(GROUPED, LENGTHS, draft=draft)[0] for _ in range(2)] == [grouped, grouped]
    several = [told for told in shared if told is not None and np.ndim(told) == 2]
    assert several
    counts = {tuple(sorted(sum(map(bool, row)) for row in told if any(row))) for told in several}
    assert (2, 2) in counts
    assert {len(told) for told in several} == {GROUPS}


@pytest.mark.parametrize("draft", [True, False])
def test_texts_are_those_of_requests_alone(pair, texts, shared, draft: bool) -> None:
    assert pair.run(PROMPTS, PARAMS, draft=draft)[0] == texts
    assert [8, 8, 0, 0] in shared


def test_nothing_is_told_where_nothing_is_shared(pair, shared) -> None:
    """Then the program that knows nothing of sharing runs."""
    pair.run([ENDS[3], ENDS[1]], PARAMS)
    assert shared
    assert not any(shared)


def test_a_program_is_compiled_once_its_lack_has_cost_enough(pair, texts, shared, monkeypatch) -> None:
    """Nobody waits for it: until then pages are read as ever."""
    engine, started = pair.engine, []
    dear = CascadePolicy((replace(LAYER, token=1e12),), (), 0)
    monkeypatch.setattr(Resources, "cascade_policy", dear)
    monkeypatch.setattr(engine, "programs", programs.Programs())
    call = engine.programs.call

    def called(function, *rest):
        if function is loop:
            shared.append(None if rest[-1] is None else rest[-1].tolist())
        return call(function, *rest)

    monkeypatch.setattr(engine.programs, "call", called)

    def start(jobs):
        started.extend(jobs)
        return [job() for job in jobs]

    monkeypatch.setattr("dflash_jax.engine.batch.start_compiling", start)
    assert pair.run(PROMPTS, PARAMS, draft=False, cycles=2)[0] == texts
    assert len(started) == 1
    assert shared[0] is None
    assert [8, 8, 0, 0] in shared


def test_the_program_for_several_groups_is_compiled_like_that_for_one(pair, grouped, shared, monkeypatch) -> None:
    """Until its lack has cost enough, one group is read once where that program is there."""
    engine, started = pair.engine, []
    monkeypatch.setattr(Resources, "cascade_policy", CascadePolicy((replace(LAYER, token=1e12),), (), 0))
    monkeypatch.setattr("dflash_jax.engine.batch.start_compiling", lambda jobs: started.extend(jobs))
    known = {"group"}
    monkeypatch.setattr(
        engine, "program_status", lambda name, args: "compiled" if name[-1] in known else None, raising=False
    )
    assert pair.run(GROUPED, LENGTHS, draft=False, cycles=2)[0] == grouped
    assert {np.ndim(told) for told in shared if told is not None} == {1}
    assert [np.shape(job.args[-1]) for job in started] == [(GROUPS, 4)]
    known.add("groups")
    assert pair.run(GROUPED, LENGTHS, draft=False, cycles=2)[0] == grouped
    assert 2 in {np.ndim(told) for told in shared if told is not None}


def test_cycles_whose_masks_the_host_makes(pair) -> None:
    """Both programs that attend are told."""
    engine = pair.engine
    setup, size = engine.setup(mode="structured", draft=True), (4, engine.buckets.width[-1])

    def products(shared: Sharing | None) -> list[int]:
        function, static, _, *call = Jobs(engine, setup, STOP_WIDTH).loop(*size, shared=shared).args
        weights, table, _, _, _, pages = call
        state, _, block = jax.eval_shape(partial(function, *static), *call)
        drafted = jax.make_jaxpr(partial(function, *static))(*call)
        verified = jax.make_jaxpr(partial(verify_block, *static))(weights, table, state, block, pages)
        return [str(one).count("dot_general") for one in (drafted, verified)]

    alone, layers = products(None), (pair.draft.num_layers, pair.target.num_layers)
    # Scores and values of the shared pages beside those of the rest.
    for form in ("group", "groups"):
        assert [more - less for more, less in zip(products(form), alone, strict=True)] == [
            2 * count for count in layers
        ]
