"""Prompts that are prefilled in one call: pieces of several, each in rows of its own, and what each gets is what it gets alone."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.attention.dense import dense_attend
from dflash_jax.decoding.prefill import Caches, admit, prefill_chunk
from dflash_jax.engine.buckets import Buckets
from dflash_jax.engine.requests import Request, empty_state, request_rows
from dflash_jax.engine.warmup import prompt_calls
from dflash_jax.models import bind
from dflash_jax.sampling_params import SamplingParams


@pytest.fixture
def calls(pair, monkeypatch):
    """Programs that `pair` calls, each with what it was given; no page is known from before."""
    pair.engine.allocator.forget()
    return watched(pair, monkeypatch)


def watched(pair, monkeypatch):
    seen, call = [], pair.engine.programs.call
    monkeypatch.setattr(
        pair.engine.programs, "call", lambda *args: seen.append((args[0].__name__, args[3:])) or call(*args)
    )
    return seen


def shapes(calls):
    """Of the ids of every call that prefills."""
    return [args[3].shape for name, args in calls if name == "prefill_chunk"]


def requests(prompts, params=None, **options):
    options = {"max_tokens": 24, "ignore_eos": True} | options
    each = params or [SamplingParams(**options)] * len(prompts)
    return [Request(i, tuple(prompt), one) for i, (prompt, one) in enumerate(zip(prompts, each, strict=True))]


def texts(updates):
    tokens = {}
    for update in updates:
        tokens.setdefault(update.index, []).extend(update.tokens)
    return [tokens[i] for i in sorted(tokens)]


def one_by_one(pair, prompts, params):
    found = []
    for prompt, one in zip(prompts, params, strict=True):
        (text,), _, _ = pair.run([prompt], one)
        pair.engine.allocator.forget()
        found.append(text)
    return found


def test_prompts_that_fit_are_one_call(pair, make_prompts, calls):
    """And one more that puts all of them into their slots; first tokens come in order of arrival."""
    prompts = make_prompts((9, 33, 1, 32))
    updates = list(pair.engine.run(requests(prompts), slots=4))
    assert [name for name, _ in calls[:3]] == ["prefill_chunk", "admit_program", "loop"]
    assert shapes(calls) == [(8, 32)]
    assert [update.index for update in updates if update.first] == [0, 1, 2, 3]
    assert [update.first for update in updates[:5]] == [True] * 4 + [False]
    pair.assert_free()


def test_each_as_it_asks_for(pair, make_prompts, calls):
    """Sampling parameters, log-probabilities and lengths belong to their rows."""
    prompts = make_prompts((9, 40, 5, 17))
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True),
        SamplingParams(max_tokens=1, temperature=0.9, seed=3, logprobs=2),
        SamplingParams(max_tokens=15, temperature=0.7, top_k=5, seed=8, min_tokens=4, logprobs=1),
        SamplingParams(max_tokens=20, logprobs=0),
    ]
    updates = list(pair.engine.run(requests(prompts, params), slots=4))
    assert shapes(calls)[0] == (8, 32)
    tokens = [[token for update in updates if update.index == i for token in update.tokens] for i in range(4)]
    values = [[row for update in updates if update.index == i for row in update.logprobs] for i in range(4)]
    assert tokens == one_by_one(pair, prompts, params)
    for i, wanted in ((1, 2), (2, 1), (3, 0)):
        (alone,) = (
            [[row for update in pair.engine.run(requests([prompts[i]], [params[i]])) for row in update.logprobs]],
        )
        np.testing.assert_allclose([row[0] for row in values[i]], [row[0] for row in alone[0]], atol=1e-5)
        assert all(len(row[1]) == wanted for row in values[i])
    assert values[0] == []
    pair.assert_free()


@pytest.mark.few("int8 pages-False")
@pytest.mark.parametrize("draft", [True, False])
@pytest.mark.parametrize("options", [{}, {"cache_dtype": "int8"}], ids=["pages", "int8 pages"])
def test_the_same_text_and_acceptance_as_alone(make_pair, make_prompts, monkeypatch, draft, options):
    """Also with pages that keep a scale for each token, and for the drafter's context."""
    pair = make_pair(page_size=8, **options)
    prompts, params = make_prompts((9, 40, 5, 33)), SamplingParams(max_tokens=40, ignore_eos=True)
    alone = [pair.run([prompt], params, draft=draft)[:2] for prompt in prompts]
    pair.engine.allocator.forget()
    calls = watched(pair, monkeypatch)
    tokens, counts, _ = pair.run(prompts, params, draft=draft)
    assert shapes(calls)[0] == (8, 32)
    assert [([text], [count]) for text, count in zip(tokens, counts, strict=True)] == alone


def test_the_end_of_a_long_prompt_takes_others_along(make_pair, make_prompts, monkeypatch):
    """Nobody joins its first chunks, and one that does not fit whole waits for the next call."""
    pair = make_pair(max_chunk=128)
    prompts = make_prompts((140, 40, 60, 9))
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = one_by_one(pair, prompts, [params] * 4)
    calls = watched(pair, monkeypatch)
    assert pair.run(prompts, params)[0] == expected
    assert shapes(calls) == [(4, 32)] * 3
    _, *later = [args for name, args in calls if name == "prefill_chunk"]
    assert [(args[4].tolist(), args[5].tolist()) for args in later] == [
        ([128, 0, 32, 0], [12, 32, 8, 0]),
        ([0, 32, 0, 0], [32, 28, 9, 0]),
    ]


def test_what_just_fits_is_taken_along(make_pair, make_prompts, monkeypatch):
    """By what its pages lack: of a prompt whose beginning is found, only the rest."""
    pair = make_pair(max_chunk=128)
    long, short, *two = make_prompts((140, 9, 64, 64))
    calls = watched(pair, monkeypatch)
    for prompts in ([long], [short, long], two):
        pair.run(prompts, SamplingParams(max_tokens=3, ignore_eos=True))
    rows = [
        list(zip(args[4].tolist(), args[5].tolist(), strict=True)) for name, args in calls if name == "prefill_chunk"
    ]
    assert rows[2:] == [[(0, 9), (128, 12), (0, 0), (0, 0)], [(0, 32), (32, 32), (0, 32), (32, 32)]]


def test_what_begins_alike_is_prefilled_once(make_pair, make_prompts, monkeypatch):
    """It waits for the call that fills the pages it will share; others that wait behind it keep their turn."""
    pair = make_pair(page_size=8)
    stem, *ends, other = make_prompts((20, 5, 7, 9))
    prompts, params = [stem + ends[0], stem + ends[1], other], SamplingParams(max_tokens=20, ignore_eos=True)
    expected = one_by_one(pair, prompts, [params] * 3)
    calls = watched(pair, monkeypatch)
    run = pair.engine.run(requests(prompts, [params] * 3), slots=4)
    assert texts(run) == expected
    assert pair.engine.scheduler.stats.cached_tokens == 2 * 8
    assert [args[5].tolist() for name, args in calls if name == "prefill_chunk"] == [[25, 0, 0, 0], [11, 9, 0, 0]]
    pair.assert_free()


@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("when", [0, 1, 5])
def test_cancelled_among_others(pair, make_prompts, victim, when):
    """Before its first token is seen, or later: nobody else notices."""
    prompts, params = make_prompts((9, 33, 1, 32)), SamplingParams(max_tokens=24, ignore_eos=True)
    expected = pair.run(prompts, params)[0]
    run, tokens = pair.engine.run(requests(prompts, [params] * 4), slots=4), {i: [] for i in range(4)}
    kept = -1
    for seen, update in enumerate(run):
        tokens[update.index] += update.tokens
        if seen == when:
            run.cancel(victim)
            kept = len(tokens[victim])
    assert len(tokens[victim]) == kept
    assert tokens[victim] == expected[victim][:kept]
    assert all(tokens[i] == expected[i] for i in range(4) if i != victim)
    pair.assert_free()


@pytest.mark.few
def test_what_lost_its_slot_is_prefilled_with_others(make_pair, make_prompts, monkeypatch):
    """It emits nothing a second time and goes on where it was, beside one whose first token comes."""
    pair = make_pair(page_size=4, num_pages=40, max_batch=4)
    pair.engine.share_prefixes = False
    prompts, params = make_prompts((9, 8, 7, 6)), SamplingParams(max_tokens=60, ignore_eos=True)
    expected = one_by_one(pair, prompts, [params] * 4)
    calls = watched(pair, monkeypatch)
    run = pair.engine.run(requests(prompts, [params] * 4), slots=4, cycles=2)
    updates = list(run)
    assert texts(updates) == expected
    assert sorted(update.index for update in updates if update.first) == [0, 1, 2, 3]
    assert pair.engine.scheduler.stats.preemptions
    resumed = [args[3].pending for name, args in calls if name == "admit_program"]
    assert any((pending >= 0).any() for pending in resumed)
    pair.assert_free()


@pytest.mark.few
def test_pieces_are_what_a_chunk_is(pair, make_prompts):
    """Logits and pages of a prompt in rows among those of another one: as in one row. Rows without tokens change nothing."""
    engine = pair.engine
    setup = engine.setup(mode="greedy", draft=True).for_prefill()
    (prompt, other), size = make_prompts((43, 12)), 16
    tables = np.array([[0, 1, 2, 3], [7, 6, 5, 4]], np.int32)

    def prefilled(*given):
        table, *rest = (jnp.asarray(x, jnp.int32) for x in given)
        rest.append(jnp.arange(len(rest[0])))
        return prefill_chunk(setup, engine.weights, table, Caches(*engine._make_pools()), *rest)

    ids = np.zeros((1, 48), np.int32)
    ids[0, :43] = prompt
    whole, expected = prefilled(tables[:1], ids, [0], [43])
    rows, starts, lengths = np.full((6, size), 5, np.int32), [0, 0, 16, 32, 9, 0], [12, 16, 16, 11, 0, 0]
    rows[0, :12], rows[1], rows[2], rows[3, :11] = other, prompt[:16], prompt[16:32], prompt[32:]
    table = tables[[1, 0, 0, 0, 0, 1]]
    pieces, logits = prefilled(table, rows, starts, lengths)
    np.testing.assert_allclose(logits[3], expected[0], atol=2e-5)
    for got, wanted in zip(pieces[:2], whole[:2], strict=True):
        for a, b in zip((*got.k, *got.v), (*wanted.k, *wanted.v), strict=True):
            np.testing.assert_allclose(a[:4], b[:4], atol=2e-5)
            assert not np.asarray(a[4:7]).any()
            assert np.asarray(a[7]).any()


@pytest.mark.few
def test_long_prompts(make_pair, make_prompts, monkeypatch):
    """In pieces or in one row, up to the last token of a page table and past it: programs that warming up names, and logits of the
    target without pages."""
    pair = make_pair(max_model_len=400, max_batch=2)
    engine, programs = pair.engine, pair.engine.programs
    setup = engine.setup(mode="greedy", draft=False, logprobs=True)
    named = set()
    monkeypatch.setattr(programs, "prepare", lambda *args: named.add(programs.key(*args)))
    for job in engine.warmup_jobs([setup]):
        job()
    monkeypatch.undo()
    target, calls, call = bind(pair.target, engine.weights["target"]), [], programs.call
    monkeypatch.setattr(programs, "call", lambda *args: calls.append((programs.key(*args), args)) or call(*args))
    params = SamplingParams(max_tokens=3, logprobs=0, ignore_eos=True)
    for prompt in make_prompts((256, 257)):
        first, *_ = engine.run([Request(0, tuple(prompt), params)], draft=False)
        hidden, _, _ = target(jnp.array([prompt]), jnp.arange(len(prompt))[None], dense_attend())
        table = jax.nn.log_softmax(target.logits(hidden[:, -1:]))[0, 0]
        assert first.tokens == [int(jnp.argmax(table))]
        assert first.logprobs[0][0] == pytest.approx(float(table.max()), abs=1e-4)
    assert all(key in named for key, _ in calls)
    tables = [args[4].shape for _, args in calls if args[0] is prefill_chunk]
    assert tables == [(8, 16), (1, 26)]


@pytest.mark.parametrize("mode", ["greedy", "full"])
def test_admit_leaves_other_slots_alone(pair, mode):
    engine = pair.engine
    setup = engine.setup(mode=mode, draft=True)
    params = SamplingParams(max_tokens=9, temperature=0.8 if mode == "full" else 0.0, seed=2, stop_token_ids=[7])
    last = Request(2, (1,), replace(params, max_tokens=1, stop_token_ids=()))
    named = [(last, ()), (Request(0, (1, 2, 3), params), ()), (Request(1, (4, 5), params), (6, 8)), None]
    rows = request_rows(setup, named, 8, engine.dtype)
    state = empty_state(setup, 4, 8, engine.dtype, engine._make_pools())
    logits = jnp.zeros((4, 1, engine.target.vocab_size)).at[:, 0, 7].set(50.0)
    state, emitted = admit(setup, state, jnp.array([3, 2, 0, 4]), jax.tree.map(jnp.asarray, rows), logits)
    assert state.done.tolist() == [False, True, True, True]  # resumed, empty, ended by its stop id, by its length
    assert state.seq_lens.tolist() == [3, 0, 3, 1]
    assert state.pending.tolist() == [8, 0, 7, 7]
    assert state.produced.tolist() == [2, 0, 1, 1]
    assert state.remaining.tolist() == [7, 0, 8, 0]
    assert emitted.counts[:3].tolist() == [1, 1, 0]
    assert emitted.tokens[1].tolist() == [7]


@pytest.mark.parametrize(
    ("most", "longest", "batch", "pieces", "whole"),
    [
        (512, 4096, 8, (4, 8, 16), 512), (512, 4096, 1, (4, 8), 512), (512, 160, 8, (4, 8, 16), 0), (512, 300, 8, (4, 8, 16), 300),
        (256, 4096, 8, (4, 8), 0), (512, 70, 1, (3,), 0), (512, 70, 2, (4, 6), 0), (100, 4096, 8, (3,), 0), (20, 4096, 8, (1,), 0),
    ],
)  # fmt: skip
def test_shapes_of_calls(most, longest, batch, pieces, whole):
    buckets = Buckets.build(max_batch=batch, max_tokens=longest, page_size=64, longest=longest, max_chunk=most)
    assert (buckets.pieces, buckets.piece) == (pieces, min(32, most))
    assert buckets.whole == ((1, whole) if whole else None)
    for left in range(1, longest):
        rows, size = buckets.prompts([left])
        assert rows * size >= min(left, whole or pieces[-1] * buckets.piece)
        assert rows * size <= buckets.chunk <= most


@pytest.mark.parametrize(
    ("dense", "width"), [(0, (4, 16, 64)), (2048, (4, 16, 32, 64)), (200, (4, 16, 64)), (8192, (4, 16, 64))]
)
def test_a_table_ends_where_programs_part(dense, width):
    sizes = {"max_batch": 8, "max_tokens": 4096, "page_size": 64, "longest": 4096, "max_chunk": 512}
    assert Buckets.build(**sizes, dense=dense).width == width


def test_several_prompts_take_as_few_rows_as_hold_them():
    buckets = Buckets.build(max_batch=8, max_tokens=4096, page_size=64, longest=4096, max_chunk=512)
    assert buckets.prompts([33, 64]) == (4, 32)
    assert buckets.prompts([33, 65]) == (8, 32)
    assert buckets.prompts([300, 40]) == (16, 32)
    assert buckets.room([33, 65]) == 11 * 32
    assert buckets.room([600]) < 0
    assert [buckets.room([33], most) for most in (512, 511, 300, 127, 1)] == [14 * 32, 6 * 32, 6 * 32, 2 * 32, 2 * 32]


def test_calls_that_are_known_before(pair, make_prompts, calls):
    """What is compiled while weights are read is what is called."""
    prompts = make_prompts((9, 40, 5, 100, 17, 33))
    coming = requests(prompts, max_tokens=8)
    expected, width = list(prompt_calls(pair.engine, coming[:4], 4)), pair.engine.buckets.width[-1]
    assert expected == [(width, 8, 32)]
    pair.run(prompts[:4], SamplingParams(max_tokens=8, ignore_eos=True))
    assert [(args[1].shape[1], *args[3].shape) for name, args in calls if name == "prefill_chunk"] == expected
    assert [rows for _, rows, _ in prompt_calls(pair.engine, coming, 2)] == [4] * 5
    assert list(prompt_calls(pair.engine, requests(make_prompts((128,))), 1)) == [(width, 4, 32)]
