"""One cycle by itself: who gains, and who is left alone."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import PagedSchedule

from dflash_jax.attention import paged
from dflash_jax.decoding.cycle import cycle
from dflash_jax.decoding.loop import loop
from dflash_jax.engine import STOP_WIDTH
from dflash_jax.engine.requests import empty_state


@pytest.mark.few("True-greedy", "False-sampled")
@pytest.mark.parametrize("mode", ["greedy", "sampled"])
@pytest.mark.parametrize("draft", [True, False])
def test_done_slots_change_nothing_and_live_ones_gain(pair, mode, draft) -> None:
    """Whatever numbers they were left with, tokens they might still emit among them; no page of theirs is written."""
    engine, live = pair.engine, 1
    setup = engine.setup(mode=mode, draft=draft)
    pools = jax.tree.map(lambda pool: jnp.full_like(pool, 0.5), engine.take_pools())
    state = empty_state(setup, 3, STOP_WIDTH, engine.dtype, pools)
    state = replace(
        state, pending=jnp.array([7, 8, 9], jnp.int32), seq_lens=jnp.array([5, 6, 20], jnp.int32),
        fresh=jnp.array([2, 0, 3], jnp.int32), features=jnp.ones_like(state.features), done=jnp.array([True, False, True]),
        produced=jnp.array([4, 1, 8], jnp.int32), remaining=jnp.array([9, 9, 0], jnp.int32),
    )  # fmt: skip
    table = jnp.array([[0, 1, 2], [3, 4, 5], [6, 7, 8]], jnp.int32)
    after, emitted = jax.jit(cycle, static_argnums=0)(setup, engine.weights, table, state)
    for name in ("pending", "seq_lens", "produced", "remaining", "done"):
        before, now = (np.asarray(getattr(one, name)) for one in (state, after))
        np.testing.assert_array_equal(np.delete(now, live), np.delete(before, live), err_msg=name)
    counts = np.asarray(emitted.counts)
    assert np.delete(counts, live).tolist() == np.delete(np.asarray(emitted.accepted), live).tolist() == [0, 0]
    assert 1 <= counts[live] == np.asarray(emitted.accepted)[live] + 1 <= setup.width
    assert int(after.seq_lens[live]) == 6 + counts[live]
    assert int(after.remaining[live]) == 9 - counts[live]
    written = [pool for pages in (after.target_pages, after.draft_pages) for pool in (*pages.k, *pages.v)]
    for pool in written:
        changed = np.flatnonzero((np.asarray(pool) != 0.5).any(axis=(1, 2, 3)))
        assert set(changed.tolist()) <= {3, 4, 5}
    assert (np.asarray(after.target_pages.k[0])[3] != 0.5).any()


@pytest.mark.parametrize(("draft", "schedules"), [(True, 2), (False, 1)])
def test_one_schedule_for_all_layers_of_a_model(pair, monkeypatch, draft, schedules) -> None:
    """Who attends to which part is worked out once a step, whatever the number of layers."""
    made, given = [], []
    attend = paged.attend_to_pages
    monkeypatch.setattr(paged, "schedule_helps", lambda *_, **__: True)

    def schedule(seq_lens, **_):
        made.append(PagedSchedule(jnp.tile(seq_lens[:, None], (1, 3)), None))
        return made[-1]

    def attended(*args, schedule, **options):
        given.append(schedule)
        return attend(*args, schedule=None, **options)

    monkeypatch.setattr(paged, "paged_schedule", schedule)
    monkeypatch.setattr(paged, "attend_to_pages", attended)
    engine, setup = pair.engine, pair.engine.setup(mode="greedy", draft=draft)
    state = empty_state(setup, 3, STOP_WIDTH, engine.dtype, engine.take_pools())
    table = jax.ShapeDtypeStruct((3, 4), jnp.int32)
    jax.eval_shape(lambda table: cycle(setup, engine.weights, table, state)[1], table)
    assert len(made) == schedules
    assert len(given) == pair.target.num_layers + draft * pair.draft.num_layers
    assert {id(one) for one in given} == {id(one) for one in made}


def test_a_loop_ends_when_a_slot_is_free_and_somebody_waits(pair) -> None:
    """Otherwise it goes on for those that are not done; what is retired gains nothing."""
    engine, setup = pair.engine, pair.engine.setup(mode="greedy", draft=False)
    table, call = jnp.array([[0, 1], [2, 3], [4, 5]], jnp.int32), jax.jit(loop, static_argnums=(0, 1))
    for waits, gained in ((True, [2, 2, 0]), (False, [2, 6, 0])):
        state = empty_state(setup, 3, STOP_WIDTH, engine.dtype, engine.take_pools())
        state = replace(state, done=jnp.zeros(3, bool), remaining=jnp.array([2, 9, 9], jnp.int32))
        retired = jnp.array([False, False, True])
        after, rows = call(setup, 8, engine.weights, table, state, jnp.int32(6), jnp.bool_(waits), retired)
        assert np.asarray(rows.counts).sum(axis=0).tolist() == after.produced.tolist() == gained
