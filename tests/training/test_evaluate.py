"""Offline acceptance: replayed cycles, loops, and noise that both models share."""

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.models import bind
from dflash_jax.training.attention import causal_attend
from dflash_jax.training.drafter import initial_drafter
from dflash_jax.training.evaluate import Acceptance, cycles_of, loops, measure, replay
from dflash_jax.training.optimizer import half
from dflash_jax.training.rollouts import continue_prompts, position_noise
from dflash_jax.training.settings import TINY
from dflash_jax.training.target import initial_target, positions_like


def test_replay_counts_accepted_drafts_and_the_bonus():
    ids = np.array([[9, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]])
    proposals = np.zeros((1, 6, 3), int)
    proposals[0, 0] = [2, 3, 0]  # pending 1: two right, so three tokens; next pending is 4
    proposals[0, 3] = [0, 6, 7]  # pending 4: the first is wrong, so one token
    proposals[0, 4] = [6, 7, 8]  # pending 5: all right, four tokens, past the end
    assert replay(ids, proposals, prompt=2, new=6).cycles == [[3, 1, 4]]


def test_replay_stops_at_the_end_of_text():
    ids = np.array([[9, 9, 1, 0, 3, 4, 5, 6]])
    proposals = np.zeros((1, 4, 2), int)
    assert replay(ids, proposals, prompt=2, new=4).cycles == [[2]]


def test_cycles_in_law_by_hand():
    # The first pending token: none stands or both do; from then on one of two stands for sure.
    stands = np.array([[[0.5, 0.5], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]])
    # Starts: 0, then 1 or 3; from 1 on 3, and from 3 past the end: 1 + 0.5 + 1 cycles of 2, 2 and 2 tokens on average.
    assert cycles_of(stands) == (2.5, 5.0)


def test_cycles_of_drafters_that_know_nothing_and_all():
    one = np.zeros((2, 8, 3))
    assert cycles_of(one) == (16.0, 16.0)
    assert cycles_of(one + 1) == (4.0, 16.0)


def test_summary_of_nothing_and_of_something():
    assert Acceptance([]).summary(4) == {"prompts": 0, "cycles": 0}
    summary = Acceptance([[1, 3], [2]]).summary(4)
    assert (summary["cycle_mean"], summary["prompt_mean"], summary["histogram"]) == (2.0, 2.0, [1, 1, 1, 0])


def test_loops_are_found_by_period():
    rng = np.random.default_rng(0)
    free = rng.integers(0, 1000, 128)
    short, long = free.copy(), free.copy()
    short[-48:] = np.tile(rng.integers(0, 1000, 16), 3)
    long[-48:] = np.resize(rng.integers(0, 1000, 17), 48)
    assert loops(np.stack([free, short, long])).tolist() == [False, True, False]


def test_continuations_are_the_argmax_of_logits_and_noise():
    target = initial_target(TINY)
    prompts, key = jax.random.randint(jax.random.key(1), (3, 8), 1, 300), jax.random.key(7)

    @jax.jit
    def logits_of(target, ids):
        model = bind(TINY.target_config, target)
        return model.logits(model(ids, positions_like(ids), causal_attend())[0])

    for sampled in (False, True):
        ids = continue_prompts(TINY.target_config, target, prompts, key, new=6, sampled=sampled)
        logits = logits_of(target, ids)
        for position in range(8, 14):
            noise = position_noise(key, position, 3, TINY.vocab_size) if sampled else 0.0
            assert jnp.array_equal(jnp.argmax(logits[:, position - 1] + noise, -1), ids[:, position])


def test_shared_noise_agrees_where_both_are_nearly_uniform():
    # Untrained models at temperature 1: independent samples would agree once in 320, shared noise nearly always.
    target, draft = half(initial_target(TINY)), half(initial_drafter(TINY))
    prompts = np.asarray(jax.random.randint(jax.random.key(1), (4, 8), 1, 300))
    kinds, new = measure(TINY, target, draft, prompts, temperature=1.0)
    assert new.shape == (4, TINY.evaluation_new)
    assert kinds["shared x1"].summary(TINY.block_size)["cycle_mean"] > 3
    assert kinds["argmax"].summary(TINY.block_size)["cycle_mean"] < 1.5
