"""Grouped-query attention with the context's pages spread over emulated ranks: each attends to its own for all heads, the
results are joined, and the new tokens, which every rank holds, come on top. Sinks belong to one part of all.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import merge_states, paged_attention, ragged_attention

from dflash_jax.attention.context_parallel import combine_ranks, local_lens

from ..kernels.attention_oracle import make_case, oracle
from .token_places import local_slot

PAGE, T = 4, 3
LENGTHS = np.arange(41)
SINKS = np.linspace(-1, 2, 4, dtype=np.float32)


@pytest.mark.few("sinks-4-3")
@pytest.mark.parametrize(("ranks", "interleave"), [(2, 1), (4, 1), (8, 1), (2, 16), (4, 3)])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
def test_ranks_together_equal_the_undivided(ranks: int, interleave: int, sinks: np.ndarray | None) -> None:
    """Contexts of every length from 0 to 40, so that some ranks hold nothing; one to three new tokens each."""
    q_lens = 1 + LENGTHS % T
    case = make_case(
        LENGTHS + q_lens, q_lens, t=T, head_dim=16, page_size=PAGE, width=12, **({} if sinks is None else {"sinks": sinks})
    )  # fmt: skip
    true_out, true_lse = oracle(case)
    q, counts = jnp.asarray(case.q), jnp.asarray(q_lens, jnp.int32)

    def token(pool: np.ndarray, row: int, s: int) -> np.ndarray:
        return pool[case.page_table[row, s // PAGE], :, s % PAGE]

    parts = []
    for rank in range(ranks):
        # As many pages for each sequence as the longest needs, NaN where a rank holds nothing.
        pools = np.full((2, 41 * 11, 2, PAGE, 16), np.nan, np.float32)
        for row, length in enumerate(LENGTHS):
            ranks_of, places = local_slot(np.arange(length), ranks=ranks, interleave=interleave)
            for s in np.flatnonzero(ranks_of == rank):
                for pool, whole in zip(pools, (case.k_pages, case.v_pages), strict=True):
                    pool[row * 11 + places[s] // PAGE, :, places[s] % PAGE] = token(whole, row, s)
        table = jnp.asarray(np.arange(41 * 11, dtype=np.int32).reshape(41, 11))
        held = local_lens(LENGTHS, rank, ranks=ranks, interleave=interleave).astype(jnp.int32)
        parts.append(
            paged_attention(q, *map(jnp.asarray, pools), table, held, q_lens=counts, causal=False, return_lse=True)
        )
    context = combine_ranks(jnp.stack([out for out, _ in parts]), jnp.stack([lse for _, lse in parts]))

    rows = [(row, length + i) for row, length in enumerate(LENGTHS) for i in range(q_lens[row])]
    k, v = (np.stack([token(pool, *place) for place in rows]) for pool in (case.k_pages, case.v_pages))
    packed = np.concatenate([case.q[row, :count] for row, count in enumerate(q_lens)])
    bounds = jnp.asarray(np.cumsum([0, *q_lens]), jnp.int32)
    given = None if sinks is None else jnp.asarray(sinks)
    new = ragged_attention(*map(jnp.asarray, (packed, k, v)), bounds, sinks=given, return_lse=True)
    live = np.arange(T) < q_lens[:, None]
    out, lse = merge_states(*(part[live] for part in context), *new)
    np.testing.assert_allclose(out, true_out[live], rtol=0, atol=4e-6)
    np.testing.assert_allclose(lse, true_lse[live], rtol=4e-6, atol=4e-6)


def test_a_sink_on_every_rank_would_be_noticed() -> None:
    """Two ranks, one key each with a score of 0, and a sink of 0: its weight is a third of all, not half."""
    q, table, lens = jnp.zeros((1, 1, 1, 16)), jnp.zeros((1, 1), jnp.int32), jnp.ones((1,), jnp.int32)
    ones, zero = jnp.ones((1, 1, PAGE, 16)), jnp.zeros((1,))
    with_sink = paged_attention(q, ones, ones, table, lens, causal=False, sinks=zero, return_lse=True)
    without = paged_attention(q, ones, ones, table, lens, causal=False, return_lse=True)

    def joined(*parts):
        return float(combine_ranks(*(jnp.stack(part) for part in zip(*parts, strict=True)))[0][0, 0, 0, 0])

    assert joined(with_sink, without) == pytest.approx(2 / 3)
    assert joined(with_sink, with_sink) == pytest.approx(1 / 2)
