"""The plan of a packed prefill: worked examples field by field, laws over random batches, and the prefill that follows it."""

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.attention.standalone.mla_metadata import plan_context, workspace_tokens
from dflash_jax.attention.standalone.mla_packed import packed_prefill, paged_chunks
from dflash_jax.errors import CapacityError

from .latent_layer import Batch, make_batch


def plan(query_lens, context, **options):
    query_lens, context = np.array(query_lens, int), np.array(context, int)
    return plan_context(query_lens, query_lens + context, **({"workspace": 64, "page_size": 4} | options))


def test_a_worked_example() -> None:
    """Contexts none, C, 2 C + 1 and less than C, with C = 8 from 26 rows for 3 requests."""
    chunks = plan([3, 2, 1, 4], [0, 8, 17, 5], workspace=26)
    assert chunks.chunk_size == 8
    expected = {
        "starts": [[0] * 4, [8] * 4, [16] * 4],
        "lens": [[0, 8, 8, 5], [0, 0, 8, 0], [0, 0, 1, 0]],
        "cu_seq_lens": [[0, 0, 8, 16, 21], [0, 0, 0, 8, 8], [0, 0, 0, 1, 1]],
        "totals": [21, 8, 1],
        "max_seq_lens": [8, 8, 1],
        "token_to_seq": [
            [1] * 8 + [2] * 8 + [3] * 5,
            [2] * 8 + [0] * 13,
            [2] + [0] * 20,
        ],
    }
    for name, value in expected.items():
        array = getattr(chunks, name)
        assert array.dtype == np.int32
        assert array.tolist() == value, name
    assert chunks.tokens_with_context == 10


def test_starts_are_the_same_for_every_request() -> None:
    chunks = plan([1] * 4, [600, 513, 700, 768], workspace=1027, page_size=16)
    assert chunks.starts.tolist() == [[0] * 4, [256] * 4, [512] * 4]


def test_tokens_with_context() -> None:
    assert plan([3, 2, 1, 4], [9, 1, 0, 0]).tokens_with_context == 5  # context first: exactly the tokens that have some
    assert plan([3, 2, 1, 4], [0, 0, 0, 7]).tokens_with_context == 10


def test_no_context_needs_no_plan() -> None:
    assert plan([3, 2], [0, 0]) is None
    assert plan([], []) is None


@pytest.mark.parametrize("seed", range(20))
def test_every_context_token_is_planned_once_and_in_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, page_size, align = rng.integers(1, 9), int(rng.integers(1, 20)), int(rng.integers(1, 5))
    context = rng.integers(0, 90, n) * rng.integers(0, 2, n)
    workspace = int(n * np.lcm(page_size, align) + rng.integers(0, 200))
    chunks = plan(rng.integers(1, 5, n), context, workspace=workspace, page_size=page_size, align=align)
    if chunks is None:
        assert (context == 0).all()
        return
    assert chunks.chunk_size % page_size == chunks.chunk_size % align == 0
    assert chunks.totals.max() <= workspace
    assert (chunks.totals == chunks.lens.sum(1)).all()
    assert (chunks.max_seq_lens == chunks.lens.max(1)).all()
    seen = [[] for _ in range(n)]
    for i, total in enumerate(chunks.totals):
        for row in range(total):
            seq = chunks.token_to_seq[i, row]
            seen[seq].append(chunks.starts[i, seq] + row - chunks.cu_seq_lens[i, seq])
    assert seen == [list(range(length)) for length in context]


def test_refusals() -> None:
    with pytest.raises(CapacityError, match=r"7 tokens holds no 4 for each of 2 requests .* at least 8 tokens"):
        plan([1, 1], [5, 5], workspace=7)
    with pytest.raises(ValueError, match="do not fit seq_lens"):
        plan_context(np.array([4]), np.array([3]), workspace=64, page_size=4)
    with pytest.raises(ValueError, match="do not fit seq_lens"):
        plan_context(np.array([-1]), np.array([3]), workspace=64, page_size=4)


def test_the_workspace() -> None:
    assert workspace_tokens(max_model_len=4096, max_batch=8, page_size=64) == 32768
    assert workspace_tokens(max_model_len=131072, max_batch=8, page_size=64) == 65536
    assert workspace_tokens(max_model_len=128, max_batch=256, page_size=64) == 65536
    assert workspace_tokens(max_model_len=128, max_batch=4096, page_size=64) == 262144
    assert workspace_tokens(max_model_len=16, max_batch=4, page_size=64) == 1024


def packed(batch: Batch, workspace: int, padding: int = 3) -> np.ndarray:
    """`packed_prefill` of a batch, as `[T, N, V]`; NaN in the padding after the last token."""

    def pack(array: np.ndarray) -> jnp.ndarray:
        rows = [array[r, s : s + c] for r, (s, c) in enumerate(zip(batch.context_lens, batch.q_lens, strict=True))]
        return jnp.asarray(np.concatenate([*rows, np.full((padding, *array.shape[2:]), np.nan, array.dtype)]))

    chunks = plan(batch.q_lens, batch.context_lens, workspace=workspace, page_size=batch.pages.shape[2])
    arrays = pack(batch.q_nope), pack(batch.q_pe), pack(batch.latents)
    if chunks is None:
        out = packed_prefill(batch.layer, *arrays, batch.q_lens)
    else:
        context = paged_chunks(chunks, jnp.asarray(batch.pages), jnp.asarray(batch.page_table))
        out = packed_prefill(batch.layer, *arrays, batch.q_lens, context, chunks.tokens_with_context)
    assert (np.asarray(out)[len(out) - padding :] == 0).all()
    return np.asarray(out)[: len(out) - padding]


def flat(batch: Batch, padded: np.ndarray) -> np.ndarray:
    return np.concatenate([row[:count] for row, count in zip(padded, batch.q_lens, strict=True)])


@pytest.mark.few("order1-20")
@pytest.mark.parametrize("workspace", [20, 1000])
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 2, 0, 3, 1)])
def test_the_packed_prefill(workspace: int, order: tuple[int, ...]) -> None:
    """Contexts of 0, C, 2 C + 1 and others, in orders where requests without context come first, last and between."""
    batch = make_batch([9, 4, 13, 0, 0], [2, 3, 1, 4, 2], seed=11).rows(order)
    np.testing.assert_allclose(packed(batch, workspace), flat(batch, batch.oracle(4)), rtol=0, atol=1e-5)


def test_no_context_at_all() -> None:
    batch = make_batch([0, 0], [3, 4], seed=13)
    np.testing.assert_allclose(packed(batch, 64), flat(batch, batch.oracle(4)), rtol=0, atol=1e-5)
