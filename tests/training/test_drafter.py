"""The drafter's training pass against its definition and against the modules that draft."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Bool, Int

from dflash_jax.attention.dense import dense_attend
from dflash_jax.decoding.accept import _weights
from dflash_jax.models import bind
from dflash_jax.training.drafter import block_hidden, gather_slots, initial_drafter, target_pass
from dflash_jax.training.losses import block_stands, cycle_weights, decay_weights, dpace_weights, hard_terms, soft_terms
from dflash_jax.training.settings import TINY
from dflash_jax.training.target import initial_target, positions_like

blocks = jax.jit(block_hidden, static_argnums=0)

ANCHORS = jnp.array([[8, 11, 16], [9, 13, 14]])


@pytest.fixture(scope="module")
def pair():
    """float32 weights and one batch: target, drafter, ids, features."""
    target, draft = initial_target(TINY), initial_drafter(TINY)
    ids = jax.random.randint(jax.random.key(3), (2, 24), 1, TINY.vocab_size - 1)
    _, features = jax.jit(target_pass, static_argnums=0)(TINY, target, ids)
    return target, draft, ids, features


def block_mask(anchors: Int[Array, "B A"], context: int, block: int) -> Bool[Array, "B T S"]:
    """Which key each slot of each block sees, as `block_attend` has it: T = A * block slots; S = context keys, then the slots."""
    owner = jnp.repeat(jnp.arange(anchors.shape[1]), block)
    before = jnp.arange(context)[None, None, :] < jnp.repeat(anchors, block, axis=1)[:, :, None]
    same = jnp.broadcast_to(owner[:, None] == owner[None, :], (*before.shape[:2], owner.shape[0]))
    return jnp.concatenate([before, same], axis=-1)


def test_block_mask_by_brute_force():
    context, block = 24, TINY.block_size
    mask = np.asarray(block_mask(ANCHORS, context, block))
    for row, anchors in enumerate(np.asarray(ANCHORS)):
        for query in range(len(anchors) * block):
            for key in range(context + len(anchors) * block):
                before_anchor = key < anchors[query // block]
                same_block = (key - context) // block == query // block
                assert mask[row, query, key] == (before_anchor if key < context else same_block)


def test_one_pass_equals_dense_attention_under_the_mask(pair):
    target, draft, ids, features = pair
    config = TINY.draft_config
    hidden = blocks(config, draft, target["embed.weight"], ids, features, ANCHORS)

    @jax.jit
    def dense(draft, ids, features):
        module = bind(config, draft)
        context = module.context_kv(module.context(features), positions_like(ids))
        pending = jnp.take_along_axis(ids, ANCHORS, axis=1).reshape(-1)
        x = module.block_embeddings(pending, target["embed.weight"]).reshape(2, 3 * config.block_size, -1)
        positions = (ANCHORS[:, :, None] + jnp.arange(config.block_size)).reshape(2, -1)
        return module(x, positions, dense_attend(block_mask(ANCHORS, ids.shape[1], config.block_size), context))[0]

    expected = dense(draft, ids, features)
    np.testing.assert_allclose(hidden.reshape(expected.shape), expected, atol=2e-5)


@pytest.mark.parametrize("anchor", [8, 14, 16])
def test_one_block_equals_drafting_with_the_context_before_it(pair, anchor):
    target, draft, ids, features = pair
    config = TINY.draft_config
    trained = blocks(config, draft, target["embed.weight"], ids, features, jnp.array([[11, anchor], [anchor, 9]]))

    @jax.jit
    def draft_once(draft, seen, pending):
        module = bind(config, draft)
        context = module.context_kv(module.context(seen), jnp.broadcast_to(jnp.arange(anchor), (2, anchor)))
        x = module.block_embeddings(pending, target["embed.weight"])
        positions = jnp.broadcast_to(anchor + jnp.arange(config.block_size), (2, config.block_size))
        return module(x, positions, dense_attend(context=context))[0]

    drafted = draft_once(draft, features[:, :anchor], ids[:, anchor])
    np.testing.assert_allclose(trained[0, 1], drafted[0], atol=2e-5)
    np.testing.assert_allclose(trained[1, 0], drafted[1], atol=2e-5)


def test_target_pass_equals_the_dense_module(pair):
    target, _, ids, features = pair
    final, _ = jax.jit(target_pass, static_argnums=0)(TINY, target, ids)

    @jax.jit
    def dense(target, ids):
        return bind(TINY.target_config, target)(ids, positions_like(ids), dense_attend(), TINY.taps)[:2]

    hidden, expected = dense(target, ids)
    np.testing.assert_allclose(features, expected, atol=2e-5)
    np.testing.assert_allclose(final, hidden, atol=2e-5)


def test_slots_are_gathered_at_their_own_positions():
    values = jnp.arange(2 * 24).reshape(2, 24)
    slots = gather_slots(values, ANCHORS, 4, 1)
    assert slots.shape == (6, 4)
    assert slots[2].tolist() == [17, 18, 19, 20]
    assert slots[3].tolist() == [24 + 10, 24 + 11, 24 + 12, 24 + 13]


def test_dpace_weights_by_hand():
    # lifted chances 0.9 and 0.75: through slot 1 0.9, through slot 2 0.675
    np.testing.assert_allclose(dpace_weights(jnp.array([[0.8, 0.5]])), [[1.575, 0.675]], rtol=1e-6)


def test_block_stands_is_the_weight_of_block_verification():
    """Over all texts of three places of three tokens: the mean over texts from p is that of `accept_rejection`'s k_i over q's."""
    rng, (slots, vocab) = np.random.default_rng(0), (3, 3)
    # A law of each place after each text before it, so that ratios depend on more than the place.
    laws = {name: {} for name in "pq"}
    texts = np.array(list(itertools.product(range(vocab), repeat=slots)))
    for law in laws.values():
        for text in texts:
            for place in range(slots):
                law.setdefault(tuple(text[:place]), rng.dirichlet(np.ones(vocab)))
    p, q = (np.array([[law[tuple(text[:i])] for i in range(slots)] for text in texts]) for law in laws.values())
    at = (np.arange(len(texts))[:, None], np.arange(slots), texts)
    weights = np.asarray(_weights(jnp.asarray(p[at]), jnp.asarray(q[at])))[:, 1:]
    expected = (np.prod(q[at], axis=1)[:, None] * weights).sum(0)
    stands = np.asarray(block_stands(jnp.log(p), jnp.log(q), jnp.asarray(texts)))
    np.testing.assert_allclose((np.prod(p[at], axis=1)[:, None] * stands).sum(0), expected, rtol=1e-5)


def test_cycle_weights_by_hand():
    weights = np.asarray(cycle_weights(jnp.array([[2.0, 4.0, 6.0], [1.0, 1.0, 1.0]]), reach=1))
    often = np.array([[1 / 3, 1 / 4, 1 / 5], [1, 1, 1]])
    np.testing.assert_allclose(weights, often / often.mean(), rtol=1e-6)


def test_decay_weights_start_at_one_and_fall_by_e_in_seven_slots():
    weights = decay_weights(15)
    assert float(weights[0]) == 1.0
    np.testing.assert_allclose(weights[7], np.exp(-1), rtol=1e-6)


def test_soft_terms_are_the_expectation_of_hard_terms():
    logits, target = jax.random.normal(jax.random.key(0), (2, 1, 3, 5))
    soft, shared = soft_terms(logits, target)
    p = jax.nn.softmax(target)
    expected = sum(p[..., token] * hard_terms(logits, jnp.full((1, 3), token))[0] for token in range(5))
    np.testing.assert_allclose(soft, expected, rtol=1e-5)
    np.testing.assert_allclose(shared, 1 - 0.5 * jnp.abs(p - jax.nn.softmax(logits)).sum(-1), rtol=1e-5)
