"""Batches that mix decoding and prefilling requests, through a whole small model: every token's logits are those of its own request
alone in one dense pass, whatever the order, the line between the kinds, the workspace and the garbage around.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.attention.dense import dense_attend
from dflash_jax.attention.standalone.packed import PackedAttend
from dflash_jax.cache import Pages, make_pages
from dflash_jax.errors import CapacityError
from dflash_jax.models import bind, family_named, init_params
from dflash_jax.models.presets import DEEPSEEK_TARGETS

CONFIG = dataclasses.replace(
    DEEPSEEK_TARGETS["DeepSeek-V3"], vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=3, num_kv_heads=3,
    q_lora_rank=20, kv_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=6, v_head_dim=10, head_dim=14, windows=(None,) * 2,
    num_experts=4, experts_per_token=2, num_groups=1, groups_per_token=1, num_dense_layers=1, moe_intermediate_size=16,
)  # fmt: skip
PAGE, WIDTH, LONGEST = 4, 8, 26
# Decoding, a prompt with context, nothing, a verified block, a whole prompt, a prompt whose context ends in the first chunk.
CONTEXT, QUERIES = np.array([17, 13, 5, 9, 0, 3]), np.array([1, 7, 0, 4, 9, 6])


@functools.cache
def params():
    return init_params(family_named("deepseek").parameters(CONFIG), jax.random.key(0))


@functools.cache
def ids() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 61, (6, LONGEST)).astype(np.int32)


@functools.cache
def alone() -> np.ndarray:
    """Logits `[6, S, V]` of every request in one pass without a cache."""

    @jax.jit
    def dense(params, ids):
        model = bind(CONFIG, params)
        return model.logits(model(ids, jnp.broadcast_to(jnp.arange(LONGEST), ids.shape), dense_attend())[0])

    return np.asarray(dense(params(), ids()))


def call(pages: Pages, table: np.ndarray, order, context, queries, padding: int = 0, **options):
    """Pages afterwards and logits `[T, V]` of the new tokens of the requests in `order`."""
    rows = [ids()[r, c : c + q] for r, c, q in zip(order, context, queries, strict=True)]
    tokens = np.concatenate([*rows, np.full(padding, 60, np.int32)])

    @jax.jit
    def run(params, pages, tokens, table):
        model = bind(CONFIG, params)
        attend = PackedAttend(table, queries, context + queries, page_size=PAGE, tokens=len(tokens), **options)
        hidden, _, pages = model(tokens[None], attend.positions, attend, cache=pages)
        return pages, model.logits(hidden)[0]

    return run(params(), pages, jnp.asarray(tokens), jnp.asarray(table))


@functools.cache
def prepared() -> tuple[Pages, np.ndarray]:
    """Pools full of NaN but for the contexts, which went in as one batch of prompts; tables with garbage past each request."""
    pages = make_pages(CONFIG, 60, PAGE, jnp.dtype(jnp.float32))
    pages = jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), pages)
    table = np.random.default_rng(1).permutation(60)[: 6 * WIDTH].reshape(6, WIDTH).astype(np.int32)
    for row, length in enumerate(CONTEXT + QUERIES):
        table[row, -(-int(length) // PAGE) :] = 2_147_480_000
    pages, logits = call(pages, table, range(6), np.zeros(6, int), CONTEXT, workspace=256)
    true = np.concatenate([alone()[row, :count] for row, count in enumerate(CONTEXT)])
    np.testing.assert_allclose(logits, true, rtol=0, atol=2e-4)
    return pages, table


@pytest.mark.few("mixed")
@pytest.mark.parametrize(
    ("order", "options"),
    [
        ((0, 1, 2, 3, 4, 5), {"workspace": 16, "absorb_up_to": 4, "padding": 3}),
        ((4, 5, 1, 3, 0, 2), {"workspace": 24, "absorb_up_to": 4}),
        ((5, 3, 4, 0, 2, 1), {"workspace": 64, "absorb_up_to": 0}),
        ((2, 4, 1, 0, 3, 5), {"workspace": 4, "absorb_up_to": 9}),
    ],
    ids=["decodes-first", "mixed", "all-expanded", "all-absorbed"],
)
def test_every_request_is_as_alone(order, options) -> None:
    pages, table = prepared()
    order = list(order)
    after, logits = call(pages, table[order], order, CONTEXT[order], QUERIES[order], **options)
    true = np.concatenate([alone()[r, CONTEXT[r] : CONTEXT[r] + QUERIES[r]] for r in order])
    np.testing.assert_allclose(np.asarray(logits)[: len(true)], true, rtol=0, atol=2e-4)
    assert np.isfinite(logits).all()
    held = sum(int(length) for length in CONTEXT + QUERIES)
    for pool in after.k:
        assert np.isfinite(np.asarray(pool)).all(-1).sum() == held


def test_lengths_and_workspaces_that_do_not_fit() -> None:
    table = jnp.zeros((2, 3), jnp.int32)
    with pytest.raises(ValueError, match="7 new tokens do not fit a batch of 6"):
        PackedAttend(table, np.array([3, 4]), np.array([3, 4]), page_size=PAGE, workspace=64, tokens=6)
    with pytest.raises(CapacityError, match="at least 8 tokens"):
        PackedAttend(table, np.array([3, 4]), np.array([9, 9]), page_size=PAGE, workspace=6, absorb_up_to=1)
