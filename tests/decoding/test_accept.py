"""How many proposals stand and what follows them: counts and edge cases; the law itself is in test_sampling_law.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decoding import accept
from dflash_jax.decoding.accept import accept_matching, accept_rejection
from dflash_jax.decoding.sampling import RequestArrays, noise_at
from dflash_jax.models.heads import Law

B, G, VOCAB = 256, 4, 7


def requests() -> RequestArrays:
    seed = jnp.stack([jnp.zeros(B, jnp.uint32), jnp.arange(B, dtype=jnp.uint32)], axis=1)
    ones, zeros = jnp.ones(B), jnp.zeros(B, jnp.int32)
    stops = jnp.full((B, 1), -1, jnp.int32)
    return RequestArrays(
        seed=seed, temperature=ones, top_p=ones, top_k=zeros, min_p=0 * ones, min_tokens=zeros, stop_ids=stops
    )


def rejection(proposals, draft_logits, target_logits):
    positions = jnp.broadcast_to(jnp.arange(target_logits.shape[1]), target_logits.shape[:2])
    return accept_rejection(proposals, Law(draft_logits), target_logits, positions, requests())


def test_matching_counts_the_common_beginning() -> None:
    rng = np.random.default_rng(0)
    proposals, chosen = rng.integers(0, 2, (B, G)).astype(np.int32), rng.integers(0, 2, (B, G + 1)).astype(np.int32)
    accepted, tokens = accept_matching(jnp.asarray(proposals), jnp.asarray(chosen))
    expected = [next((j for j in range(G) if proposals[row, j] != chosen[row, j]), G) for row in range(B)]
    assert accepted.tolist() == expected
    assert set(expected) == set(range(G + 1))
    np.testing.assert_array_equal(tokens, chosen)
    assert accepted.dtype == tokens.dtype == jnp.int32


def test_matching_without_proposals_emits_the_targets_choice() -> None:
    accepted, tokens = accept_matching(jnp.zeros((3, 0), jnp.int32), jnp.array([[4], [5], [6]], jnp.int32))
    assert accepted.tolist() == [0, 0, 0]
    assert tokens.tolist() == [[4], [5], [6]]


def random_rows(seed: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    draft, target = rng.normal(size=(B, G, VOCAB)), rng.normal(size=(B, G + 1, VOCAB))
    proposals = (draft + rng.gumbel(size=draft.shape)).argmax(axis=-1)
    return jnp.asarray(proposals, jnp.int32), jnp.asarray(draft, jnp.float32), jnp.asarray(target, jnp.float32)


def test_rejection_keeps_proposals_before_the_first_refusal() -> None:
    proposals, draft, target = random_rows(1)
    accepted, tokens = (np.asarray(part) for part in rejection(proposals, draft, target))
    assert set(accepted) == set(range(G + 1))
    for row in range(B):
        np.testing.assert_array_equal(tokens[row, : accepted[row]], proposals[row, : accepted[row]])


def test_rejection_accepts_all_where_drafter_and_target_agree() -> None:
    proposals, draft, target = random_rows(2)
    target = target.at[:, :G].set(draft)
    accepted, tokens = rejection(proposals, draft, target)
    assert (np.asarray(accepted) == G).all()
    np.testing.assert_array_equal(tokens[:, :G], proposals)


def test_rejection_never_emits_what_the_target_refuses() -> None:
    proposals, draft, target = random_rows(3)
    refused = np.random.default_rng(4).random(target.shape) < 0.5
    refused[..., 0] = False
    accepted, tokens = rejection(proposals, draft, jnp.where(refused, -jnp.inf, target))
    emitted = np.arange(G + 1) <= np.asarray(accepted)[:, None]
    hit = np.take_along_axis(refused, np.asarray(tokens)[..., None], axis=-1)[..., 0]
    assert not (hit & emitted).any()


def test_rejection_of_laws_without_a_common_token() -> None:
    rows = B
    draft = jnp.full((rows, G, VOCAB), -jnp.inf).at[:, :, :3].set(0.0)
    target = jnp.full((rows, G + 1, VOCAB), -jnp.inf).at[:, :, 3:].set(0.0)
    proposals = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32)[:, None] % 3, (rows, G))
    accepted, tokens = rejection(proposals, draft, target)
    assert (np.asarray(accepted) == 0).all()
    assert set(np.asarray(tokens)[:, 0]) == {3, 4, 5, 6}


def test_a_refusal_by_rounding_alone_emits_what_the_target_allows(monkeypatch) -> None:
    """A uniform number that rounds to 1 refuses a proposal that p and q find equally likely: nothing is left of p - q then."""

    def noise(*args, stream, since):
        return noise_at(*args, stream, since) + 100 * (stream == 2)

    monkeypatch.setattr(accept, "noise_at", noise)
    law = jnp.full((B, G + 1, VOCAB), 0.0).at[:, :, :2].set(-jnp.inf)
    accepted, tokens = rejection(jnp.full((B, G), 2, jnp.int32), law[:, :G], law)
    assert (np.asarray(accepted) == 0).all()
    assert set(np.asarray(tokens)[:, 0]) == set(range(2, VOCAB))


@pytest.mark.parametrize("shift", [-300.0, 300.0])
def test_rejection_does_not_depend_on_a_constant_in_the_logits(shift: float) -> None:
    proposals, draft, target = random_rows(5)
    base, moved = rejection(proposals, draft, target), rejection(proposals, draft + shift, target - shift)
    agree = np.asarray(base[0]) == np.asarray(moved[0])
    assert agree.mean() > 0.98  # rounding may turn a draw that was almost even
