"""Programs, slots and the state between cycles: what is read, what is written, and what is refused."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.attention.dense import dense_attend
from dflash_jax.engine.requests import Request
from dflash_jax.errors import CapacityError, DFlashError, ParameterError, PromptError
from dflash_jax.models import bind
from dflash_jax.sampling_params import SamplingParams


def poison(engine):
    """NaN in every slot of every page, with nothing in them to be found again."""
    engine.allocator.forget()
    engine.keep_pools(*jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), engine.take_pools()))


@pytest.mark.parametrize("draft", [True, False])
def test_nan_in_unused_slots_changes_nothing(pair, make_prompts, draft):
    prompts = make_prompts((3, 40, 17, 90, 1))
    clean = pair.run(prompts, draft=draft)
    poison(pair.engine)
    assert pair.run(prompts, draft=draft)[:2] == clean[:2]


@pytest.mark.few("False-2")
@pytest.mark.parametrize(("ahead", "calls"), [(False, 1), (True, 1), (False, 2)])
def test_drafter_context_is_that_of_the_committed_tokens_only(make_pair, make_prompts, ahead, calls):
    """After cycles that rejected proposals, the drafter's pages equal those computed from the committed text alone.

    The pages may be those that the next cycles are on their way to; rows of what was committed before stay as they are. A second
    call for cycles verifies fewer tokens than the first: it has no room for all that this one committed last.
    """
    pair = make_pair(goes_ahead=ahead)
    engine = pair.engine
    prompt = make_prompts((21,))[0]
    run = engine.run([Request(0, tuple(prompt), SamplingParams(max_tokens=60))], cycles=7)
    tokens = list(prompt)
    for update in run:
        tokens += update.tokens
        calls -= not update.first
        if not calls:
            break
        if not update.first:
            engine.verify_length = 2
    assert bool(engine.scheduler.inflight.calls) == ahead
    batch = engine.scheduler.batch
    pages, table, (job,) = batch.state.draft_pages, batch.slots.tables[0][0], batch.slots.taken
    length = job.filled - job.fresh
    assert length > len(prompt)
    assert sum(update.counts) < len(update.counts) * pair.draft.block_size, (
        "nothing was rejected: the test shows nothing"
    )
    target, drafter = bind(pair.target, engine.weights["target"]), bind(pair.draft, engine.weights["draft"])
    ids, positions = jnp.array([tokens[:length]]), jnp.arange(length)[None]
    _, features, _ = target(ids, positions, dense_attend(), pair.draft.target_layer_ids)
    keys, values = drafter.context_kv(drafter.context(features), positions)
    for layer in range(pair.draft.num_layers):
        for pool, expected in ((pages.k, keys), (pages.v, values)):
            rows = jnp.moveaxis(pool[layer][table[: -(-length // engine.page_size)]], 2, 1)
            found = rows.reshape(-1, *rows.shape[2:])[:length]
            np.testing.assert_allclose(found, expected[layer, 0], rtol=1e-4, atol=1e-5)
    run.close()
    pair.assert_free()


def test_a_fork_is_told_so(pair, monkeypatch):
    """A call of the device would wait there for threads that are its parent's."""
    here = os.getpid()
    monkeypatch.setattr("os.getpid", lambda: here + 1)
    for ask in (lambda one: pair.engine.run([one]), lambda one: pair.engine.submit(one, print)):
        with pytest.raises(DFlashError, match=r"is a fork, without its threads and devices: load it here"):
            ask(Request(0, (1, 2), SamplingParams(max_tokens=1)))


@pytest.mark.parametrize("slots", [1, 4])
def test_programs_get_arrays_that_nobody_changes(pair, make_prompts, monkeypatch, slots):
    """Programs may read host memory after the call has returned, so what the account writes to later is never handed over."""
    engine, call, seen = pair.engine, pair.engine.programs.call, []
    prompts = make_prompts((40, 130, 5, 17, 90))
    run = engine.run([Request(i, tuple(p), SamplingParams(max_tokens=20)) for i, p in enumerate(prompts)], slots=slots)

    def inspected(function, static, donate, *args):
        given = [leaf for leaf in jax.tree.leaves(args[1:]) if isinstance(leaf, np.ndarray)]
        kept = (*engine.scheduler.batch.slots.tables, engine.scheduler.batch.retired)
        assert not any(np.shares_memory(leaf, array) for leaf in given for array in kept), function.__name__
        seen.append((function.__name__, len(given)))
        return call(function, static, donate, *args)

    monkeypatch.setattr(engine.programs, "call", inspected)
    assert {update.index for update in run} == set(range(5))
    assert {name for name, count in seen if count} >= {"prefill_chunk", "admit_program", "loop"}
    pair.assert_free()


def test_no_sequence_waits_longer_than_one_chunk(make_pair, make_prompts, monkeypatch):
    """A long prompt arrives while others decode: each of its chunks is followed by cycles of theirs."""
    pair = make_pair(max_chunk=16)
    engine, calls, tokens = pair.engine, [], {0: [], 1: [], 2: []}
    long, *short = make_prompts((110, 8, 5))
    call = engine.programs.call
    monkeypatch.setattr(engine.programs, "call", lambda *args: calls.append(args[0].__name__) or call(*args))
    requests = [Request(i, tuple(p), SamplingParams(max_tokens=40)) for i, p in enumerate((*short, long))]
    run, coming = engine.run(requests[:2], cycles=32, slots=4), requests[2:]
    for update in run:
        tokens[update.index] += update.tokens
        if coming and len(calls) > 3:
            run.add(coming.pop())
            calls.clear()
    assert calls[:15] == ["loop", "prefill_chunk"] * 7 + ["admit_program"]
    pair.assert_free()
    monkeypatch.undo()
    assert list(tokens.values()) == pair.run([*short, long])[0]


def test_added_requests_bring_what_they_need(pair, make_prompts):
    """Greedy requests are joined by sampled ones, by log-probabilities and by more stop ids than slots had room for; what can
    never run is refused."""
    prompts = make_prompts((12, 30, 50))
    each = [
        SamplingParams(max_tokens=20),
        SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, seed=4, logprobs=1),
    ]
    whole = pair.run(prompts[2:], each[0])[0][0]
    stops = tuple({token for token in range(40) if token not in whole} | {whole[9]})
    each.append(SamplingParams(max_tokens=20, stop_token_ids=stops))
    assert len(stops) > 16
    run = pair.engine.run([Request(0, tuple(prompts[0]), each[0])], cycles=2, slots=3)
    tokens, logprobs, widths, coming = {0: [], 1: [], 2: []}, [], set(), True
    for update in run:
        if coming:
            with pytest.raises(PromptError):
                run.add(Request(3, (), each[0]))
            for index in (1, 2):
                run.add(Request(index, tuple(prompts[index]), each[index]))
            coming = False
        tokens[update.index] += update.tokens
        logprobs += update.logprobs
        batch = pair.engine.scheduler.batch
        widths.add((batch.needs.stop_width, batch.state.request.stop_ids.shape[1]))
    pair.assert_free()
    assert widths == {(8, 8), (64, 64)}
    assert tokens[2] == whole[: whole.index(whole[9]) + 1]
    assert list(tokens.values()) == pair.run(prompts, each)[0]
    assert len(logprobs) == 20


@pytest.mark.few
def test_programs_serve_what_runs(make_pair, make_prompts):
    """A request that asks for more leaves: where the simple program is compiled it is taken again, else the other one goes on."""
    prompts = make_prompts((12, 30))
    each = [
        SamplingParams(max_tokens=40),
        SamplingParams(max_tokens=6, temperature=0.8, top_p=0.9, seed=4, logprobs=1),
    ]
    for warm in (False, True):
        pair = make_pair()
        expected = pair.run(prompts, each[0])[0][:1] if warm else []
        run, kinds = pair.engine.run([Request(i, tuple(p), each[i]) for i, p in enumerate(prompts)], cycles=2), []
        tokens = {0: [], 1: []}
        for update in run:
            tokens[update.index] += update.tokens
            kinds.append((pair.engine.scheduler.batch.needs.mode, pair.engine.scheduler.batch.needs.logprobs))
        assert kinds[0] == ("full", True)
        assert kinds[-1] == (("greedy", False) if warm else ("full", True))
        assert tokens[0] == (expected or pair.run(prompts[:1], each[0])[0])[0]


def test_nothing_is_added_where_it_would_not_be_served(pair, make_prompts):
    """To a run that has ended or was closed. The index of one that was cancelled may come again."""
    requests = [
        Request(i, tuple(prompt), SamplingParams(max_tokens=20)) for i, prompt in enumerate(make_prompts((9, 12)))
    ]
    over, closed, run = (pair.engine.run(requests[:1], cycles=1) for _ in range(3))
    assert list(over)
    closed.close()
    for ended in (over, closed):
        with pytest.raises(DFlashError, match="has ended"):
            ended.add(requests[1])
    tokens = {0: [], 1: []}
    for seen, update in enumerate(run):
        tokens[update.index] += update.tokens
        if seen == 0:
            run.add(requests[1])
            run.cancel(1)
            run.add(requests[1])
    pair.assert_free()
    assert list(tokens.values()) == pair.run([list(request.prompt) for request in requests], requests[0].params)[0]


def test_stop_ids_end_inside_a_block(pair, make_prompts):
    prompt = make_prompts((25,))[0]
    whole = pair.run([prompt])[0][0]
    for place in (0, 1, 7, 20):
        stop = whole[place]
        first = whole.index(stop)
        params = SamplingParams(max_tokens=40, stop_token_ids=[stop])
        tokens, _, last = pair.run([prompt], params)
        assert tokens[0] == whole[: first + 1]
        assert (last[0].finish_reason, last[0].stop_reason) == ("stop", stop)
        tokens, _, last = pair.run([prompt], eos=(stop,))
        assert tokens[0] == whole[: first + 1]
        assert last[0].finish_reason == "eos"
        assert pair.run([prompt], SamplingParams(max_tokens=40, ignore_eos=True), eos=(stop,))[0][0] == whole


def test_min_tokens_holds_stops_back(pair, make_prompts):
    prompt = make_prompts((25,))[0]
    stop = pair.run([prompt])[0][0][3]
    params = SamplingParams(max_tokens=40, min_tokens=12, stop_token_ids=[stop])
    drafted, _, last = pair.run([prompt], params)
    assert stop not in drafted[0][:12]
    assert drafted[0] == pair.run([prompt], params, draft=False)[0][0]
    assert last[0].finish_reason == ("stop" if stop in drafted[0] else "length")


@pytest.mark.parametrize("draft", [True, False])
def test_logprobs_are_the_targets(pair, make_prompts, draft):
    prompt = make_prompts((25,))[0]
    params = SamplingParams(max_tokens=20, temperature=0.9, seed=2, logprobs=4)
    rows, tokens = [], []
    for update in pair.engine.run([Request(0, tuple(prompt), params)], draft=draft):
        rows += update.logprobs
        tokens += update.tokens
    assert len(rows) == len(tokens) == 20
    target = bind(pair.target, pair.engine.weights["target"])
    ids = jnp.array([prompt + tokens])
    hidden, _, _ = target(ids, jnp.arange(ids.shape[1])[None], dense_attend())
    table = np.asarray(jax.nn.log_softmax(target.logits(hidden))[0, len(prompt) - 1 : -1])
    for place, (chosen, top) in enumerate(rows):
        assert chosen == pytest.approx(table[place, tokens[place]], abs=1e-3)
        assert [token for token, _ in top] == np.argsort(-table[place], kind="stable")[:4].tolist()
        assert [value for _, value in top] == pytest.approx(np.sort(table[place])[::-1][:4].tolist(), abs=1e-3)


def test_seed_repeats_and_none_does_not(pair, make_prompts):
    prompts = make_prompts((12,))
    seeded = SamplingParams(max_tokens=30, temperature=1.0, seed=7)
    assert pair.run(prompts, seeded)[0] == pair.run(prompts, seeded)[0]
    free = SamplingParams(max_tokens=30, temperature=1.0)
    assert pair.run(prompts, free)[0] != pair.run(prompts, free)[0]


@pytest.mark.few
def test_no_compilation_after_warmup(make_pair, make_prompts):
    """Some 50 random prompt lengths, in batches, greedy with drafting and sampled without: nothing is compiled."""
    pair = make_pair(max_batch=2, max_model_len=160, max_chunk=64)
    engine = pair.engine
    for job in engine.warmup_jobs([engine.setup(mode=m, draft=d) for m, d in (("greedy", True), ("sampled", False))]):
        job()
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    jax.jit(lambda x: x + 41)(1.0)
    assert compiled, "the listener hears nothing: the test shows nothing"
    compiled.clear()
    rng = np.random.default_rng(0)
    for trial in range(26):
        prompts = make_prompts(rng.integers(1, 140, 1 + trial % 3), seed=trial)
        params = SamplingParams(max_tokens=int(rng.integers(1, 20)), temperature=float(trial % 2), seed=trial)
        pair.run(prompts, params, draft=trial % 2 == 0, cycles=4)
    assert compiled == []


def test_requests_that_can_never_run_are_refused_first(make_pair, make_prompts):
    pair = make_pair(num_pages=4)
    good = make_prompts((5,))[0]
    cases = [
        ([], SamplingParams(max_tokens=5), PromptError, r"prompts\[1\]: the prompt is empty"),
        ([5, 97], SamplingParams(max_tokens=5), PromptError, "97"),
        ([5, -1], SamplingParams(max_tokens=5), PromptError, "-1"),
        ([5], SamplingParams(max_tokens=5, stop_token_ids=[97]), ParameterError, "97"),
        (make_prompts((155,))[0], SamplingParams(max_tokens=6), CapacityError, "161"),
        (make_prompts((100,))[0], SamplingParams(max_tokens=6), CapacityError, "pages"),
    ]
    for prompt, params, error, said in cases:
        with pytest.raises(error, match=said):
            pair.run([good, prompt], [SamplingParams(max_tokens=5), params])
    pair.assert_free()
    assert len(pair.run([good], SamplingParams(max_tokens=5))[0][0]) == 5


def test_a_run_beside_a_paused_one(pair, make_prompts):
    """Both are served; what the paused one gains waits for it."""
    prompts, params = make_prompts((5, 9)), SamplingParams(max_tokens=20)
    expected = pair.run(prompts, params)[0]
    requests = [Request(i, tuple(prompt), params) for i, prompt in enumerate(prompts)]
    paused = pair.engine.run(requests[:1], cycles=1)
    tokens = list(next(iter(paused)).tokens)
    assert [token for update in pair.engine.run(requests[1:]) for token in update.tokens] == expected[1]
    assert pair.engine.scheduler.stats.running <= 1
    assert pair.engine.allocator.num_free <= pair.engine.num_pages
    for update in paused:
        tokens += update.tokens
    assert tokens == expected[0]
    pair.assert_free()


def test_no_requests(pair):
    assert list(pair.engine.run([])) == []
