"""Which pages running requests have: they grow, are taken away, are forgotten, and all come back."""

import copy

import jax
import pytest

from dflash_jax.cache import PageAllocator
from dflash_jax.cache.groups import GroupPool, PageGroup
from dflash_jax.engine.requests import Request
from dflash_jax.engine.slots import Job, Slots
from dflash_jax.sampling_params import SamplingParams


@pytest.mark.few
def test_more_prompts_than_slots_and_pages(make_pair, make_prompts):
    """Requests wait for slots and pages, are served in order, and give the same text as alone."""
    pair = make_pair(max_batch=2, num_pages=9)
    prompts = make_prompts((30, 5, 60, 1, 44, 12, 80))
    mixed = [SamplingParams(max_tokens=n) for n in (10, 33, 7, 25, 1, 40, 12)]
    together = pair.run(prompts, mixed)[0]
    assert [len(tokens) for tokens in together] == [10, 33, 7, 25, 1, 40, 12]
    assert together == [pair.run([prompt], one)[0][0] for prompt, one in zip(prompts, mixed, strict=True)]


def test_a_prompt_may_take_the_last_page():
    """But none that others need for their next cycles."""
    pool = GroupPool(PageGroup(None, (0, 1), (0,), 4), PageAllocator(4))
    slots = Slots(1, 4, [pool], 16, None)
    job = Job(Request(0, (1,) * 57, SamplingParams(max_tokens=1)), ticket=0)
    assert not slots.enter(job, 4, spare=1)
    assert slots.free == 4
    assert slots.enter(job, 4, spare=0)
    assert slots.free == 0


def test_prompts_that_enter_together_leave_each_other_room(make_pair, make_prompts):
    """For their next cycles: of four that would fit by their prompts alone one waits, and none loses its pages later."""
    pair = make_pair(num_pages=9)
    assert (pair.engine.pages_for(25), pair.engine.pages_for(25 + 12)) == (2, 3)
    requests = [Request(i, tuple(p), SamplingParams(max_tokens=12)) for i, p in enumerate(make_prompts((25,) * 4))]
    most = max(len(pair.engine.scheduler.batch.slots.taken) for _ in pair.engine.run(requests, cycles=4))
    assert (most, pair.engine.scheduler.stats.preemptions) == (3, 0)
    pair.assert_free()


@pytest.mark.few
def test_pages_grow_with_the_text(make_pair, make_prompts):
    """Long answers are begun side by side in a pool that could not hold two of them whole."""
    pair = make_pair(max_batch=4, num_pages=11)
    params = SamplingParams(max_tokens=140)
    assert 2 * pair.engine.pages_for(20 + 140) > 11
    prompts = make_prompts((20, 17, 12, 9))
    run = pair.engine.run([Request(i, tuple(p), params) for i, p in enumerate(prompts)], cycles=2)
    tokens, most = {i: [] for i in range(4)}, 0
    for update in run:
        tokens[update.index] += update.tokens
        most = max(most, len(pair.engine.scheduler.batch.slots.decoding))
    pair.assert_free()
    assert most >= 3
    assert pair.engine.scheduler.stats.preemptions >= 2
    assert list(tokens.values()) == [pair.run([prompt], params)[0][0] for prompt in prompts]


def test_contents_of_lost_pages_and_other_weights_are_forgotten(make_pair, make_prompts):
    pair = make_pair()
    prompt = make_prompts((70,))[0]
    expected = pair.run([prompt])[0]
    assert pair.engine.allocator.num_published >= 70 // 16
    for leaf in jax.tree.leaves(pair.engine.take_pools()):
        leaf.delete()
    assert pair.run([prompt])[0] == expected
    weights = pair.engine.weights
    pair.engine.weights = jax.tree.map(lambda leaf: leaf * 1.5, weights)
    other = pair.run([prompt])[0]
    assert other != expected
    pair.engine.weights = weights
    assert pair.run([prompt])[0] == expected


def test_a_copy_has_pages_of_its_own(pair, make_prompts):
    """A shared account had named pages to the one that only the other had written."""
    other = copy.copy(pair)
    other.engine = copy.copy(pair.engine)
    stem = make_prompts((40,))[0]
    prompts = [[*stem, 5, 6], make_prompts((70,), seed=2)[0], [*stem, 7]]
    expected = [pair.run([prompt])[0] for prompt in prompts]
    for one in (other, pair, other, other, pair):
        assert [one.run([prompt])[0] for prompt in prompts] == expected
        prompts, expected = [*prompts[1:], prompts[0]], [*expected[1:], expected[0]]
    assert other.engine.programs is pair.engine.programs


def test_closing_early_gives_every_page_back(pair, make_prompts):
    prompts = make_prompts((12, 30, 50, 7, 9))
    for stop_after in range(1, 9):
        run = pair.engine.run(
            [Request(i, tuple(p), SamplingParams(max_tokens=40)) for i, p in enumerate(prompts)], cycles=2
        )
        for seen, _ in enumerate(run, 1):
            if seen == stop_after:
                break
        run.close()
        pair.assert_free()


def test_interrupt_at_every_program_call(pair, make_prompts, monkeypatch):
    """Ctrl-C inside any device call, also one that has consumed the pools, leaves the next call right."""
    prompts = make_prompts((12, 30, 50))
    expected = pair.run(prompts)[0]
    call = pair.engine.programs.call
    for deadly in range(12):
        calls = iter(range(10**6))

        def interrupted(*args, deadly=deadly, calls=calls):
            result = call(*args)
            if next(calls) == deadly:
                raise KeyboardInterrupt
            return result

        monkeypatch.setattr(pair.engine.programs, "call", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pair.run(prompts, cycles=2)
        monkeypatch.undo()
        pair.assert_free()
        assert pair.run(prompts)[0] == expected


def test_cancelled_requests_leave_at_once(pair, make_prompts):
    prompts = make_prompts((12, 30, 50, 9, 9, 9))
    run = pair.engine.run(
        [Request(i, tuple(p), SamplingParams(max_tokens=40)) for i, p in enumerate(prompts)], cycles=1
    )
    seen = dict.fromkeys(range(6), 0)
    for update in run:
        seen[update.index] += len(update.tokens)
        if update.index == 1 and seen[1] > 4:
            run.cancel(1)
            run.cancel(5)
    assert seen[1] < 12
    assert seen[5] == 0
    assert all(seen[i] == 40 for i in (0, 2, 3, 4))
    pair.assert_free()
