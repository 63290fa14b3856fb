"""Sequences spread over 2, 4 and 8 emulated ranks against the same sequences on one."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.attention.context_parallel import (
    combine_ranks,
    limits_on_rank,
    local_lens,
    most_queries,
    visible_on_rank,
)
from dflash_jax.attention.mla import expanded_attention
from dflash_jax.attention.standalone.context_parallel import padded_local_lens, reorder_gathered
from dflash_jax.attention.standalone.mla_metadata import ContextChunks, plan_context
from dflash_jax.attention.standalone.mla_packed import packed_prefill

from .latent_layer import make_batch
from .token_places import local_slot

LENGTHS = np.arange(41)
SPREADS = pytest.mark.parametrize(("ranks", "interleave"), [(2, 1), (4, 1), (8, 1), (2, 16), (4, 3), (8, 16)])


@SPREADS
def test_every_token_has_one_place(ranks: int, interleave: int) -> None:
    for length in LENGTHS:
        rank, place = local_slot(np.arange(length), ranks=ranks, interleave=interleave)
        for r in range(ranks):
            mine = place[rank == r]
            assert mine.tolist() == list(range(len(mine))), "a rank's tokens are dense and in order"
            assert int(local_lens(np.array(length), r, ranks=ranks, interleave=interleave)) == len(mine)


@SPREADS
def test_causal_bounds_of_several_queries(ranks: int, interleave: int) -> None:
    seq_lens, q_lens = np.repeat(LENGTHS, 3), np.tile([1, 3, 8], 41)
    keep = seq_lens >= q_lens
    seq_lens, q_lens = seq_lens[keep], q_lens[keep]
    for rank in range(ranks):
        seen = np.asarray(
            visible_on_rank(jnp.asarray(seq_lens), jnp.asarray(q_lens), 8, rank, ranks=ranks, interleave=interleave)
        )
        for row, (length, count) in enumerate(zip(seq_lens, q_lens, strict=True)):
            for i in range(8):
                position = length - count + i
                held = local_slot(np.arange(position + 1), ranks=ranks, interleave=interleave)[0] == rank
                assert seen[row, i] == (held.sum() if i < count else 0)
        stand, (fewest, most) = limits_on_rank(
            jnp.asarray(seq_lens), jnp.asarray(q_lens), rank, ranks=ranks, interleave=interleave
        )
        bounded = np.clip((stand - q_lens)[:, None] + np.arange(8) + 1, fewest[:, None], most[:, None])
        held = (np.arange(8) < q_lens[:, None]) & (q_lens <= most_queries(ranks, interleave))[:, None]
        np.testing.assert_array_equal(bounded[held], seen[held])
    if interleave == 1:  # the closed form
        rank, length, count = ranks - 1, 37, 5
        bounds = visible_on_rank(jnp.array([length]), jnp.array([count]), count, rank, ranks=ranks, interleave=1)[0]
        assert bounds.tolist() == [-(-(length - rank - (count - 1) + j) // ranks) for j in range(count)]


@SPREADS
def test_ranks_together_equal_the_undivided(ranks: int, interleave: int) -> None:
    """Every length from 0 to 40 in one batch, with up to four queries: ranks without a key or without a visible one, and rows
    that see nothing."""
    t, q_lens = 4, np.minimum(LENGTHS, 1 + LENGTHS % 4)
    batch = make_batch(LENGTHS - q_lens, q_lens, seed=ranks)
    queries = jnp.asarray(batch.new(batch.q_nope, t, 0.0)), jnp.asarray(batch.new(batch.q_pe, t, 0.0))
    rank_of, place = local_slot(np.arange(40), ranks=ranks, interleave=interleave)
    parts = []
    for rank in range(ranks):
        held = np.zeros((41, 40, batch.latents.shape[-1]), np.float32)
        held[:, place[rank_of == rank]] = batch.latents[:, rank_of == rank]
        seen = visible_on_rank(jnp.asarray(LENGTHS), jnp.asarray(q_lens), t, rank, ranks=ranks, interleave=interleave)
        visible = jnp.arange(40) < seen[:, :, None]
        out, lse = expanded_attention(batch.layer, *queries, jnp.asarray(held), visible)
        # What a kernel may leave where a rank sees no key.
        empty = np.asarray(seen == 0)[:, :, None]
        parts.append((jnp.where(empty[..., None], jnp.nan, out), jnp.where(empty, (jnp.inf, jnp.nan)[rank % 2], lse)))
    out, lse = combine_ranks(jnp.stack([part[0] for part in parts]), jnp.stack([part[1] for part in parts]))
    np.testing.assert_allclose(out, batch.oracle(t), rtol=0, atol=1e-5)
    blind = np.arange(t) >= q_lens[:, None]
    assert (np.asarray(lse)[blind] == -np.inf).all()
    assert np.isfinite(np.asarray(lse)[~blind]).all()


def gather_from_ranks(
    latents: np.ndarray, chunks: ContextChunks, index: int, ranks: int, interleave: int
) -> np.ndarray:
    """What the ranks' own gathers of chunk `index` hold, NaN in the padding."""
    widths = padded_local_lens(chunks, index, ranks=ranks, interleave=interleave)
    gathered = np.full((ranks, widths.sum(), latents.shape[-1]), np.nan, np.float32)
    for request, length in enumerate(chunks.lens[index]):
        start = chunks.starts[index, request]
        rank, place = local_slot(start + np.arange(length), ranks=ranks, interleave=interleave)
        first = start // ranks  # chunks begin at whole turns
        gathered[rank, widths[:request].sum() + place - first] = latents[request, start : start + length]
    return gathered


@pytest.mark.few("2-3")
@pytest.mark.parametrize(("ranks", "interleave"), [(2, 1), (4, 1), (8, 1), (2, 3)])
def test_gathered_context_equals_the_undivided(ranks: int, interleave: int) -> None:
    context = LENGTHS
    queries = np.resize([1, 3, 2], len(context))
    batch = make_batch(context, queries, seed=3)
    chunks = plan_context(
        queries, context + queries, workspace=24 * len(context), page_size=4, align=ranks * interleave
    )
    assert chunks is not None
    assert len(chunks.totals) > 1

    def pieces():
        for i in range(len(chunks.totals)):
            gathered = gather_from_ranks(batch.latents, chunks, i, ranks, interleave)
            rows, owners = reorder_gathered(jnp.asarray(gathered), chunks, i, interleave=interleave)
            assert len(rows) == chunks.totals[i]
            yield rows, owners

    def pack(array: np.ndarray) -> jnp.ndarray:
        return jnp.asarray(
            np.concatenate([array[r, s : s + c] for r, (s, c) in enumerate(zip(context, queries, strict=True))])
        )

    arrays = map(pack, (batch.q_nope, batch.q_pe, batch.latents))
    out = packed_prefill(batch.layer, *arrays, queries, pieces(), chunks.tokens_with_context)
    true = np.concatenate([row[:count] for row, count in zip(batch.oracle(3), queries, strict=True)])
    np.testing.assert_allclose(out, true, rtol=0, atol=1e-5)


def test_chunks_that_begin_inside_a_turn_are_refused() -> None:
    plan = functools.partial(plan_context, np.array([1]), np.array([30]), workspace=12, page_size=4)
    with pytest.raises(ValueError, match="plan with align=8"):
        reorder_gathered(jnp.zeros((8, 9, 3)), plan(), 0, interleave=1)
    with pytest.raises(ValueError, match="1 rows of each rank were gathered, the plan has 6"):
        reorder_gathered(jnp.zeros((2, 1, 3)), plan(align=2), 0, interleave=1)


def test_an_lse_in_base_two_would_be_noticed() -> None:
    """Two ranks with 3 and 5 equal keys: natural logarithms give their sum."""
    ones = jnp.ones((1, 2))
    out, lse = combine_ranks(jnp.stack([ones * 3, ones * 5]), jnp.log(jnp.array([[3.0], [5.0]])))
    np.testing.assert_allclose(out, ones * 34 / 8, rtol=1e-6)
    np.testing.assert_allclose(lse, np.log([8.0]), rtol=1e-6)
