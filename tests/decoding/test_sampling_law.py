"""The law of what is emitted, over whole blocks: drafting must not change it, whatever is proposed.

The target is a Markov chain written down as a table, so the exact law of the first tokens is a product of its rows, and every
later row of a verified block depends on the proposals before it. Each emitted triple comes from as many cycles as it takes. That
the tests can fail is shown with acceptors that are wrong on purpose.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.cache import Pages
from dflash_jax.config import Qwen3Config
from dflash_jax.decoding import accept, cycle
from dflash_jax.decoding.accept import accept_matching, accept_rejection
from dflash_jax.decoding.cycle import propose
from dflash_jax.decoding.sampling import RequestArrays, choose, filtered_logits, noise_at
from dflash_jax.decoding.state import DecodeState, Setup
from dflash_jax.decoding.verify_budget import budget, log_odds, survivals
from dflash_jax.models.heads import Law

from .chi_square import count, p_value

VOCAB, PROPOSALS, PLACES, SAMPLES, START = 6, 2, 3, 24_000, 4
GOOD, BAD = 1e-3, 1e-6

_rng = np.random.default_rng(0)
TARGET = (_rng.normal(size=VOCAB) * 1.6 + _rng.normal(size=(VOCAB, VOCAB)) * 0.9).astype(np.float32)
# Slot j of the drafter knows the pending token alone: what follows it after j + 1 steps, blurred.
_law = np.exp(TARGET) / np.exp(TARGET).sum(axis=1, keepdims=True)
_ahead = np.stack([np.linalg.matrix_power(_law, j + 1) for j in range(PROPOSALS)], axis=1)
DRAFT = (np.log(_ahead) + _rng.normal(size=_ahead.shape) * 0.4).astype(np.float32)

PLAIN = {"temperature": 1.0}
FULL = {"temperature": 0.8, "top_k": 4, "top_p": 0.9, "min_p": 0.05}


def law_of(
    logits: np.ndarray, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Probabilities of one row in float64, by the definitions of the parameters."""
    law = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    law[law < min_p * law.max()] = 0
    if top_k:
        law[law < np.sort(law)[-top_k]] = 0
    law /= law.sum()
    ordered = np.sort(law)[::-1]
    law[law < ordered[np.searchsorted(np.cumsum(ordered), min(top_p, 1 - 1e-9))]] = 0
    return law / law.sum()


def requests(rows: int, first_seed: int = 0, **parameters: Any) -> RequestArrays:
    defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "min_tokens": 0}
    kinds = {"top_k": jnp.int32, "min_tokens": jnp.int32}
    arrays = {
        name: jnp.full(rows, parameters.get(name, default), kinds.get(name, jnp.float32))
        for name, default in defaults.items()
    }
    seed = jnp.stack([jnp.full(rows, 9), first_seed + jnp.arange(rows)], axis=1).astype(jnp.uint32)
    return RequestArrays(seed=seed, stop_ids=jnp.full((rows, 1), -1, jnp.int32), **arrays)


def test_the_test_itself() -> None:
    for statistic, cells in ((3.841, 2), (18.307, 11), (124.342, 101)):
        law = np.full(cells, 1 / cells)
        counts = np.full(cells, 1e6)
        counts[:2] += np.array([1, -1]) * np.sqrt(statistic / 2 * 1e6)
        assert abs(p_value(counts, law) - 0.05) < 1e-3
    assert p_value(np.array([10, 10, 1]), np.array([0.5, 0.5, 0.0])) == 0.0


# One emitted token, no drafting.

SINGLE = {
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 2.5},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "min_p": {"temperature": 1.0, "min_p": 0.25},
    "all": {"temperature": 1.4, "top_k": 7, "top_p": 0.85, "min_p": 0.05},
}


@pytest.mark.parametrize("mode", ["sampled", "full"])
@pytest.mark.parametrize("name", SINGLE)
def test_one_token(name: str, mode: Any) -> None:
    parameters = SINGLE[name]
    if mode == "sampled":
        parameters = {"temperature": parameters["temperature"]}
    logits = np.random.default_rng(3).normal(size=10).astype(np.float32) * 0.8
    tokens = one_token(jnp.asarray(logits), requests(SAMPLES, 10**6, **parameters), mode)
    counts = np.bincount(np.asarray(tokens), minlength=10)
    assert p_value(counts, law_of(logits, **parameters)) > GOOD
    other = law_of(logits, **parameters | {"temperature": parameters["temperature"] * 1.15})
    assert p_value(counts, other) < BAD


@functools.partial(jax.jit, static_argnums=2)
def one_token(logits: jax.Array, request: RequestArrays, mode: Any) -> jax.Array:
    rows = jnp.broadcast_to(logits, (request.seed.shape[0], 1, logits.shape[0]))
    positions = jnp.full(rows.shape[:2], 7)
    return choose(filtered_logits(rows, request, mode), positions, request, mode)[:, 0]


# Blocks.

Acceptor = Callable[..., tuple[jax.Array, jax.Array]]


def matching(proposals, chosen, drafted, logits, positions, request):
    return accept_matching(proposals, chosen)


def rejection(proposals, chosen, drafted, logits, positions, request):
    return accept_rejection(proposals, Law(drafted), logits, positions, request)


def shared_lengths(drafted: jax.Array) -> jax.Array:
    """Tokens verified of each row where eight share twelve, by the laws of proposals."""
    shared = survivals(log_odds(drafted), jnp.array([0.7, 0.1, -0.3])).reshape(-1, 8, PROPOSALS)
    return jax.vmap(lambda rows: budget(rows, jnp.full(8, True), 12))(shared).reshape(-1)


def cut_matching(proposals, chosen, drafted, logits, positions, request):
    return accept_matching(proposals, chosen, shared_lengths(drafted))


def cut_rejection(proposals, chosen, drafted, logits, positions, request):
    return accept_rejection(proposals, Law(drafted), logits, positions, request, shared_lengths(drafted))


def emit(setup: Setup, acceptor: Acceptor, request: RequestArrays) -> jax.Array:
    """The first tokens of every row after START, by cycles of drafting and verifying."""
    rows, mode = request.seed.shape[0], setup.mode
    pending, length = jnp.full(rows, START, jnp.int32), jnp.zeros(rows, jnp.int32)
    text = jnp.zeros((rows, PLACES + PROPOSALS + 1), jnp.int32)
    zeros = jnp.zeros(rows, jnp.int32)
    none = Pages((), ())
    state = DecodeState(zeros, zeros, jnp.zeros((rows, 1, 0)), zeros, zeros, zeros, zeros > 0, request, none, none)
    places = jnp.arange(PROPOSALS + 1)

    def cycle(carry):
        pending, length, text = carry
        positions = length[:, None] + places
        draft_logits = jnp.asarray(DRAFT)[pending]
        proposals = propose(setup, draft_logits, positions[:, :-1], state)
        ids = jnp.concatenate([pending[:, None], proposals], axis=1)
        logits = filtered_logits(jnp.asarray(TARGET)[ids], request, mode)
        chosen = choose(logits, positions, request, mode)
        drafted = filtered_logits(draft_logits, request, mode)
        accepted, tokens = acceptor(proposals, chosen, drafted, logits, positions, request)
        at = jnp.where(places <= accepted[:, None], jnp.minimum(positions, text.shape[1]), text.shape[1])
        text = text.at[jnp.arange(rows)[:, None], at].set(tokens, mode="drop")
        last = jnp.take_along_axis(tokens, accepted[:, None], axis=1)[:, 0]
        return (last, length + accepted + 1, text), accepted

    carry, first = cycle((pending, length, text))
    for _ in range(PLACES - 1):
        carry, _ = cycle(carry)
    return carry[2][:, :PLACES], first


def joint_law(parameters: dict[str, Any]) -> np.ndarray:
    rows = np.stack([law_of(row, **parameters) for row in TARGET])
    return rows[START][:, None, None] * rows[:, :, None] * rows[None]


def drafted_text(acceptor: Acceptor, proposals: str, parameters: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """`emit` for SAMPLES seeds, in the simplest mode that serves these parameters."""
    mode = "sampled" if set(parameters) == {"temperature"} else "full"
    target = Qwen3Config(
        vocab_size=VOCAB, hidden_size=2, intermediate_size=2, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2
    )
    return emit(Setup(target=target, mode=mode, proposals=proposals), acceptor, requests(SAMPLES, **parameters))


def judge(acceptor: Acceptor, proposals: str, parameters: dict[str, Any]) -> tuple[float, float]:
    """The p-value of the emitted triples under the exact law, and the mean number of proposals accepted at once."""
    text, accepted = drafted_text(acceptor, proposals, parameters)
    return p_value(count(text, VOCAB), joint_law(parameters)), float(accepted.mean())


@pytest.mark.few("rejection-filters", "shared_noise-temperature", "independent-matching-temperature")
@pytest.mark.parametrize("parameters", [PLAIN, FULL], ids=["temperature", "filters"])
@pytest.mark.parametrize(
    ("proposals", "acceptor"),
    [("shared_noise", matching), ("argmax", matching), ("rejection", rejection), ("rejection", matching)],
    ids=["shared_noise", "argmax", "rejection", "independent-matching"],
)
def test_a_block_has_the_targets_law(proposals: str, acceptor: Acceptor, parameters: dict[str, Any]) -> None:
    p, accepted = judge(acceptor, proposals, parameters)
    assert p > GOOD
    assert 0.2 < accepted < PROPOSALS


def test_a_block_of_which_part_is_verified_has_the_targets_law() -> None:
    p, accepted = judge(cut_rejection, "rejection", PLAIN)
    assert p > GOOD
    assert 0.1 < accepted < 0.5  # of eight rows four proposals are verified


@pytest.mark.few
def test_shared_noise_and_rejection_accept_more_than_guessing() -> None:
    kinds = {"shared_noise": matching, "rejection": rejection}
    guessing = judge(matching, "rejection", PLAIN)[1]
    assert all(judge(acceptor, kind, PLAIN)[1] > guessing + 0.1 for kind, acceptor in kinds.items())


@pytest.mark.few
def test_a_seeds_text_does_not_depend_on_the_proposals() -> None:
    texts = [drafted_text(matching, kind, PLAIN)[0] for kind in ("shared_noise", "argmax", "rejection")]
    np.testing.assert_array_equal(texts[0], texts[1])
    np.testing.assert_array_equal(texts[0], texts[2])
    cut, accepted = drafted_text(cut_matching, "shared_noise", PLAIN)
    np.testing.assert_array_equal(texts[0], cut)
    assert 0.1 < accepted.mean() < 0.5


# Wrong on purpose.


def within_top_two(proposals, chosen, drafted, logits, positions, request):
    second = jnp.sort(logits[:, :-1], axis=-1)[..., -2]
    agree = jnp.take_along_axis(logits[:, :-1], proposals[..., None], axis=-1)[..., 0] >= second
    accepted = jnp.sum(jnp.cumprod(agree, axis=1), axis=1, dtype=jnp.int32)
    padded = jnp.concatenate([proposals, chosen[:, -1:]], axis=1)
    return accepted, jnp.where(jnp.arange(PROPOSALS + 1) < accepted[:, None], padded, chosen)


def refused_proposal_emitted(proposals, chosen, drafted, logits, positions, request):
    accepted, tokens = rejection(proposals, chosen, drafted, logits, positions, request)
    padded = jnp.concatenate([proposals, tokens[:, -1:]], axis=1)
    return accepted, jnp.where(jnp.arange(PROPOSALS + 1) == accepted[:, None], padded, tokens)


def residual_forgotten(proposals, chosen, drafted, logits, positions, request):
    accepted, tokens = rejection(proposals, chosen, drafted, logits, positions, request)
    return accepted, jnp.where(jnp.arange(PROPOSALS + 1) == accepted[:, None], chosen, tokens)


def row_one_late(proposals, chosen, drafted, logits, positions, request):
    return matching(
        proposals, jnp.concatenate([chosen[:, 1:], chosen[:, :1]], axis=1), drafted, logits, positions, request
    )


def one_noise_for_all_places(proposals, chosen, drafted, logits, positions, request):
    noise = noise_at(request.seed, jnp.zeros_like(positions), VOCAB)
    return accept_matching(proposals, jnp.argmax(logits + noise, axis=-1).astype(jnp.int32))


def residual_at_the_cut(proposals, chosen, drafted, logits, positions, request):
    accepted, tokens = cut_rejection(proposals, chosen, drafted, logits, positions, request)
    p, q = jax.nn.softmax(logits), jnp.pad(jax.nn.softmax(drafted), ((0, 0), (0, 1), (0, 0)))
    noise = noise_at(request.seed, positions, VOCAB, stream=3)
    refused = jnp.argmax(jnp.log(jnp.maximum(p - q, 0.0)) + noise, axis=-1).astype(jnp.int32)
    refused = jnp.where(jnp.arange(PROPOSALS + 1) == PROPOSALS, tokens, refused)
    return accepted, jnp.where(jnp.arange(PROPOSALS + 1) == accepted[:, None], refused, tokens)


def cut_by_the_drawn_token(proposals, chosen, drafted, logits, positions, request):
    drawn = jnp.take_along_axis(jax.nn.softmax(drafted), proposals[..., None], axis=-1)[..., 0]
    lengths = 1 + jnp.sum(jnp.cumprod(drawn > 0.3, axis=1), axis=1)
    return accept_rejection(proposals, Law(drafted), logits, positions, request, lengths)


@pytest.mark.few("no_residual", "argmax_by_ratio", "row_late", "top_two")
@pytest.mark.parametrize(
    ("proposals", "acceptor"),
    [
        ("argmax", within_top_two),
        ("rejection", refused_proposal_emitted),
        ("rejection", residual_forgotten),
        ("argmax", rejection),  # p/q rejection of what was not drawn from q
        ("argmax", row_one_late),
        ("shared_noise", one_noise_for_all_places),
        ("rejection", residual_at_the_cut),
        ("rejection", cut_by_the_drawn_token),
    ],
    ids=[
        "top_two",
        "refused_emitted",
        "no_residual",
        "argmax_by_ratio",
        "row_late",
        "one_noise",
        "cut_is_no_refusal",
        "cut_by_draw",
    ],
)
def test_wrong_acceptors_are_noticed(proposals: str, acceptor: Acceptor) -> None:
    assert judge(acceptor, proposals, PLAIN)[0] < BAD


def test_noise_that_another_cycle_had_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands depends on the noise of places behind it, so the next cycle finds a part of it used up."""
    for module in (accept, cycle):
        monkeypatch.setattr(module, "noise_at", lambda *args, stream=0, since=None: noise_at(*args, stream))
    assert judge(rejection, "rejection", PLAIN)[0] < BAD
