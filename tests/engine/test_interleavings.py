"""The hardest moments for somebody to leave: with a call behind, inside a prompt, from another thread, twice in a row.

After each, every page is back, and what may be found in pages is what ought to be there: the next request, which begins like those
before, has the text that it has alone.
"""

import threading
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from dflash_jax.cache import PageAllocator
from dflash_jax.engine.requests import Request
from dflash_jax.errors import CapacityError
from dflash_jax.sampling_params import SamplingParams

from .schedules import Interrupter

GREEDY = SamplingParams(max_tokens=40)


def requests(prompts: list, params: SamplingParams = GREEDY) -> list[Request]:
    return [Request(i, tuple(prompt), params) for i, prompt in enumerate(prompts)]


@pytest.fixture
def eager(make_pair) -> Iterator:
    """Small pages and chunks, so that beginnings are shared and prompts take several turns; cycles start ahead."""
    pair = make_pair(page_size=8, max_chunk=16, num_pages=60)
    pair.engine.goes_ahead = True
    return pair


def continued(pair, prompts: list) -> list[list[int]]:
    """Texts that find what the ones before have left in the pages."""
    return pair.run([*prompts, prompts[0][:20] + prompts[1]])[0]


@pytest.mark.few
def test_interrupts_around_calls_ahead(eager, make_prompts, all_cases):
    prompts = make_prompts((12, 30, 50))
    expected = continued(eager, prompts)
    behind = 0
    for at in range(20, 420, 8 if all_cases else 20):
        run = eager.engine.run(requests(prompts), cycles=2)
        with pytest.MonkeyPatch.context() as patch:
            interrupter = Interrupter(patch, eager.engine, at)
            try:
                for _ in run:
                    pass
            except KeyboardInterrupt:
                behind += interrupter.behind
        eager.assert_free()
        assert continued(eager, prompts) == expected, f"wrong after an interrupt at step {at}"
    assert behind > (10 if all_cases else 4)


def test_an_interrupt_while_pages_are_given_back(eager, make_prompts, monkeypatch):
    """Twice Ctrl-C: inside of a step, and in what puts right what the first has left."""
    prompts = make_prompts((12, 30, 50))
    expected = continued(eager, prompts)
    reclaim, run = eager.engine.allocator.reclaim, eager.engine.run(requests(prompts), cycles=2)

    def interrupted(*_):
        raise KeyboardInterrupt

    next(iter(run))
    monkeypatch.setattr(eager.engine.allocator, "reclaim", interrupted)
    monkeypatch.setattr(eager.engine.scheduler, "_look", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(iter(run))
    assert eager.engine.allocator.num_free < eager.engine.num_pages
    monkeypatch.undo()
    eager.engine.goes_ahead = True
    assert eager.engine.allocator.reclaim == reclaim
    assert continued(eager, prompts) == expected


def test_an_interrupt_while_lost_pools_are_made_again(eager, make_prompts, monkeypatch):
    """In pools of zeros, nothing of the old ones may be found, wherever the interrupt came."""
    prompts = make_prompts((12, 30, 50))
    expected = continued(eager, prompts)
    for owner, name in ((eager.engine.allocator, "forget"), (eager.engine, "_make_pools")):
        for late in (False, True):
            step = getattr(owner, name)

            def interrupted(late=late, step=step):
                result = step() if late else None
                raise KeyboardInterrupt(result)

            for leaf in (leaf for pages in eager.engine.take_pools() for leaf in (*pages.k, *pages.v)):
                leaf.delete()
            monkeypatch.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                eager.run(prompts)
            monkeypatch.undo()
            eager.engine.goes_ahead = True
            assert continued(eager, prompts) == expected


def test_a_device_that_failed_leaves_nothing_behind(eager, make_prompts, monkeypatch):
    """Results of a program that failed while the host went on are its error, in every later call that reads them."""
    prompts = make_prompts((12, 30, 50))
    expected, call, calls = continued(eager, prompts), eager.engine.programs.call, iter(range(99))

    def failing(function, *args):
        if next(calls) == 9:
            pools = eager.engine.take_pools()
            eager.engine.keep_pools(*jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), pools))
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return call(function, *args)

    monkeypatch.setattr(eager.engine.programs, "call", failing)
    with pytest.raises(CapacityError, match="ran out while requests were served"):
        eager.run(prompts, cycles=2)
    monkeypatch.undo()
    assert continued(eager, prompts) == expected


@pytest.mark.few
def test_left_inside_a_prompt(eager, make_prompts):
    """Closed between two chunks of one request's prompt while another decodes, and again one chunk later."""
    long = make_prompts((100, 100), seed=4)
    prompts = [*make_prompts((12,)), long[0], long[0][:50] + long[1][:40]]
    expected, inside = continued(eager, prompts), set()
    eager.engine.allocator.forget()
    for stop_after in range(2, 12):
        run = eager.engine.run(requests(prompts), cycles=1)
        for seen, _ in enumerate(run, 1):
            if seen == stop_after:
                break
        inside |= {job.filled for job in eager.engine.scheduler.batch.slots.filling}
        run.close()
        eager.assert_free()
        assert continued(eager, prompts) == expected
        eager.engine.allocator.forget()
    assert len(inside) > 3, f"closed inside a prompt only at {inside}"


@pytest.mark.few
def test_a_full_pool_behind_a_call(eager, make_prompts):
    """Calls ahead get no page that somebody needs: where there are too few, results are looked at first, and one request waits."""
    prompts, params = make_prompts((20, 17, 12, 9)), SamplingParams(max_tokens=100)
    expected, all_pages = [eager.run([prompt], params)[0][0] for prompt in prompts], eager.engine.allocator
    behind = 0
    for pages in (17, 19, 22, 30, 45):
        # The pools stay as they are, so that nothing is compiled again; the account knows fewer pages.
        eager.engine.allocator = PageAllocator(pages)
        run, tokens = eager.engine.run(requests(prompts, params), cycles=3), {i: [] for i in range(4)}
        for update in run:
            tokens[update.index] += update.tokens
            behind += bool(eager.engine.scheduler.inflight.calls)
        eager.engine.allocator.check_integrity()
        assert eager.engine.allocator.num_free == pages
        assert list(tokens.values()) == expected
    eager.engine.allocator = all_pages
    assert eager.engine.scheduler.stats.preemptions > 3
    assert behind > 10


def test_pages_that_others_still_read(eager, make_prompts):
    """Who wrote a shared beginning leaves, by itself or cancelled, with a call behind or not; new requests take every free page."""
    stem = make_prompts((40,))[0]
    prompts = [stem + tail for tail in make_prompts((3, 5, 9), seed=2)]
    others = make_prompts((60, 60, 50), seed=9)
    expected = [eager.run([prompt])[0][0] for prompt in (*prompts, *others)]
    eager.engine.allocator.forget()

    def found():
        return eager.engine.scheduler.stats.cached_tokens

    for victim, after in ((0, 2), (0, 5), (1, 6)):
        run, tokens, before = (
            eager.engine.run(requests([*prompts, *others]), slots=3),
            {i: [] for i in range(6)},
            found(),
        )
        for seen, update in enumerate(run):
            tokens[update.index] += update.tokens
            if seen == after:
                run.cancel(victim)
        assert found() - before >= 2 * 40
        eager.assert_free()
        left = tokens.pop(victim)
        assert left == expected[victim][: len(left)]
        assert len(left) < len(expected[victim])
        assert tokens == {i: text for i, text in enumerate(expected) if i != victim}
        eager.engine.allocator.forget()


@pytest.mark.few("8")
@pytest.mark.parametrize("count", [2, 8])
def test_threads_join_one_batch(eager, make_prompts, count):
    """All are served at once, with the texts that they have alone."""
    prompts = make_prompts((12, 30, 50))
    expected, start = eager.run(prompts)[0], threading.Barrier(count)
    served, most = [], [0]

    def serve():
        start.wait()
        for _ in range(12 // count):
            tokens = {i: [] for i in range(3)}
            for update in eager.engine.run(requests(prompts), cycles=2):
                tokens[update.index] += update.tokens
                most[0] = max(most[0], eager.engine.scheduler.stats.running)
            served.append(list(tokens.values()))
            eager.engine.ready_pools()  # as warming up does

    threads = [threading.Thread(target=serve) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    eager.assert_free()
    assert served == [expected] * (12 // count * count)
    assert most[0] > 3  # of more than one thread
    assert eager.run(prompts)[0] == expected


def test_warming_up_leaves_the_pools_to_who_runs(eager, make_prompts, monkeypatch):
    """In the middle of a call nobody but its run has the pools: the ones before are used up, and new ones would hold nothing."""
    prompts = make_prompts((12, 30, 50))
    expected = continued(eager, prompts)
    call, published = eager.engine.programs.call, eager.engine.allocator.num_published
    assert published

    def beside(*args):
        result = call(*args)
        thread = threading.Thread(target=next(eager.engine.warmup_jobs([])))
        thread.start()
        thread.join()
        return result

    def made():
        pytest.fail("pools were made beside those of a run")

    monkeypatch.setattr(eager.engine.programs, "call", beside)
    monkeypatch.setattr(eager.engine, "_make_pools", made)
    assert continued(eager, prompts) == expected
    assert eager.engine.allocator.num_published >= published
