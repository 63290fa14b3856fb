"""The law of what is emitted where a draft head proposes: its own samples judged by the law that it gives back.

Target and method are those of `test_sampling_law`. Every proposal of a block depends on the one before it, and the laws are over
some tokens alone, or over a vocabulary of the drafter's own. Where eight requests share rows, a head says itself how much of each
block is verified. That the tests can fail is shown with laws, and with numbers of a head, that are wrong on purpose.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.cache import Pages
from dflash_jax.decoding.accept import accept_rejection
from dflash_jax.decoding.head_proposals import picker
from dflash_jax.decoding.sampling import filtered_logits
from dflash_jax.decoding.state import DecodeState, Setup
from dflash_jax.decoding.verify_budget import budget, log_odds, survivals
from dflash_jax.models.heads import (
    Block,
    DominoConfig,
    HeadConfig,
    Law,
    LiLiCorrConfig,
    MarkovConfig,
    SelectorConfig,
    Sizes,
    XPressConfig,
    head_module,
    head_parameters,
)

from ..random_pair import draft_config, target_config
from .chi_square import count, p_value
from .test_sampling_law import (
    BAD,
    DRAFT,
    FULL,
    GOOD,
    PLACES,
    PLAIN,
    PROPOSALS,
    SAMPLES,
    START,
    TARGET,
    VOCAB,
    joint_law,
    requests,
)

HIDDEN, OWN = 4, np.array([0, 2, 3, 5])  # tokens of a vocabulary of the drafter's own
HEADS = {
    "selector": (SelectorConfig(rank=3, top_k=3), None),
    "vanilla": (MarkovConfig(rank=3), None),
    "gated, its own tokens": (MarkovConfig(rank=3, form="gated"), OWN),
    "rnn, best few": (MarkovConfig(rank=3, form="rnn", top_k=4), None),
    "xpress": (XPressConfig(rank=3, top_k=4, inner=4, passes=2), None),
    "lilicorr": (LiLiCorrConfig(rank=3, top_k=4, hidden=4, layers=1, heads=2, inner=6), None),
    "domino": (DominoConfig(rank=3, state=4, kept=1), None),
    "confident": (MarkovConfig(rank=3, confidence="hidden_and_token", confidence_bias=True), None),
}
SHARING, SHARED_ROWS = 8, 12  # requests, and what is verified of them together
type Wrong = Callable[[Law, Block], Law]
# Tokens to verify of each row, by a head, its block, the law and the proposals.
type Cut = Callable[[Any, Block, Law, jax.Array], jax.Array]


def emitted(
    name: str, parameters: dict[str, Any], wrong: Wrong = lambda law, block: law, cut: Cut | None = None
) -> tuple[np.ndarray, float]:
    """The first tokens after START of SAMPLES rows, by cycles of a head's proposals, and the mean number accepted at once."""
    config, own = HEADS[name]
    mode = "sampled" if set(parameters) == {"temperature"} else "full"
    setup = Setup(target=target_config(vocab_size=VOCAB), mode=mode, proposals="rejection")
    text, accepted = _run(setup, config, own is not None, wrong, cut, requests(SAMPLES, **parameters))
    return np.asarray(text), float(accepted)


def _run(
    setup: Setup, config: HeadConfig, own: bool, wrong: Wrong, cut: Cut | None, request: Any
) -> tuple[jax.Array, jax.Array]:
    sizes = Sizes(hidden=HIDDEN, vocab=VOCAB, rows=len(OWN) if own else VOCAB, slots=PROPOSALS + 1)
    rng = np.random.default_rng(1)
    tables = {
        one.name.removeprefix("head."): rng.normal(size=one.shape) * 0.8 for one in head_parameters(config, sizes)
    }
    states = jnp.asarray(rng.normal(size=(VOCAB, PROPOSALS, HIDDEN)), jnp.float32)
    embeddings = jnp.asarray(rng.normal(size=(VOCAB, HIDDEN)), jnp.float32)
    base_of = jnp.asarray(DRAFT[..., OWN] if own else DRAFT)

    @jax.jit
    def cycle(carry):
        pending, length, text = carry
        none, zeros = Pages((), ()), jnp.zeros_like(pending)
        state = DecodeState(
            pending, zeros, jnp.zeros((SAMPLES, 1, 0)), zeros, zeros, zeros, zeros > 0, request, none, none
        )
        places = jnp.arange(PROPOSALS + 1)
        positions = length[:, None] + places
        head = head_module(config, sizes)
        for name, value in tables.items():
            part = head
            for step in name.split("."):
                part = getattr(part, step)
            part[...] = jnp.asarray(value, jnp.float32)
        hidden, own_ids = states[pending], jnp.asarray(OWN) if own else None
        slots = jnp.concatenate([hidden[:, :1], hidden], axis=1)
        block = Block(
            pending, hidden, base_of[pending], own_ids, slots, lambda ids: embeddings[ids], lambda: hidden[:, 0]
        )
        pick = picker(setup, positions[:, :-1], state, None)
        proposals, law = head.propose(block, pick)
        ids = jnp.concatenate([pending[:, None], proposals], axis=1)
        logits = filtered_logits(jnp.asarray(TARGET)[ids], request, setup.mode)
        lengths = None if cut is None else cut(head, block, law, proposals)
        accepted, tokens = accept_rejection(proposals, wrong(law, block), logits, positions, request, lengths)
        at = jnp.where(places <= accepted[:, None], jnp.minimum(positions, text.shape[1]), text.shape[1])
        text = text.at[jnp.arange(SAMPLES)[:, None], at].set(tokens, mode="drop")
        last = jnp.take_along_axis(tokens, accepted[:, None], axis=1)[:, 0]
        return (last, length + accepted + 1, text), accepted

    carry = jnp.full(SAMPLES, START, jnp.int32), jnp.zeros(SAMPLES, jnp.int32), jnp.zeros((SAMPLES, 6), jnp.int32)
    carry, first = cycle(carry)
    for _ in range(PLACES - 1):
        carry, _ = cycle(carry)
    return carry[2][:, :PLACES], first.mean()


@pytest.mark.few("selector-*top_k*", "domino-*")
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("selector", PLAIN), ("selector", FULL), ("vanilla", PLAIN), ("gated, its own tokens", PLAIN), ("rnn, best few", FULL),
        ("xpress", PLAIN), ("lilicorr", FULL), ("domino", PLAIN),
    ],
    ids=str,
)  # fmt: skip
def test_a_block_has_the_targets_law(name: str, parameters: dict[str, Any]) -> None:
    """All three tokens at once, and so each pair of places as well."""
    text, accepted = emitted(name, parameters)
    assert p_value(count(text, VOCAB), joint_law(parameters)) > GOOD
    assert 0.1 < accepted < PROPOSALS


def of_the_base(law: Law, block: Block) -> Law:
    """As if the head had no say."""
    assert law.tokens is not None
    return Law(jnp.take_along_axis(block.logits, law.tokens, axis=-1), law.tokens)


def of_the_place_before(law: Law, block: Block) -> Law:
    return Law(jnp.roll(law.logits, 1, axis=1), law.tokens)


@pytest.mark.few("base")
@pytest.mark.parametrize(
    ("name", "wrong"), [("selector", of_the_base), ("vanilla", of_the_place_before)], ids=["base", "place"]
)
def test_wrong_laws_are_noticed(name: str, wrong: Wrong) -> None:
    text, _ = emitted(name, PLAIN, wrong)
    assert p_value(count(text, VOCAB), joint_law(PLAIN)) < BAD


def shared_rows(law: Law, told: jax.Array) -> jax.Array:
    """Tokens to verify of each row where SHARING rows share SHARED_ROWS, mostly by what a head says."""
    survival = survivals(log_odds(law.logits), jnp.array([0.2, 1.0, 0.1, -0.3]), told)
    groups = survival.reshape(-1, SHARING, PROPOSALS)
    return jax.vmap(lambda rows: budget(rows, jnp.full(SHARING, True), SHARED_ROWS))(groups).reshape(-1)


def by_the_head(head: Any, block: Block, law: Law, proposals: jax.Array) -> jax.Array:
    before = jnp.concatenate([block.anchor[:, None], proposals[:, :-1]], axis=1)
    return shared_rows(law, head.log_odds(block, before))


def by_the_drawn_token(head: Any, block: Block, law: Law, proposals: jax.Array) -> jax.Array:
    return shared_rows(law, head.log_odds(block, proposals))


def by_the_token_behind(head: Any, block: Block, law: Law, proposals: jax.Array) -> jax.Array:
    """The last place's number, which knows the first one's token, in both places."""
    before = jnp.concatenate([block.anchor[:, None], proposals[:, :-1]], axis=1)
    told = head.log_odds(block, before)
    return shared_rows(law, jnp.broadcast_to(told[:, -1:], told.shape))


@pytest.mark.few("plain")
@pytest.mark.parametrize("parameters", [PLAIN, FULL], ids=["plain", "full"])
def test_blocks_have_the_targets_law_where_the_head_says_how_much_is_verified(parameters: dict[str, Any]) -> None:
    """All three tokens of a request, and the first two of each of two that share rows: neither's text tells of the other's."""
    text, accepted = emitted("confident", parameters, cut=by_the_head)
    law = joint_law(parameters)
    assert p_value(count(text, VOCAB), law) > GOOD
    pairs = law.sum(axis=2)
    both = np.concatenate([text[::2, :2], text[1::2, :2]], axis=1)
    assert p_value(count(both, VOCAB), np.multiply.outer(pairs, pairs)) > GOOD
    assert 0.1 < accepted < (SHARED_ROWS - SHARING) / SHARING


@pytest.mark.few("drawn")
@pytest.mark.parametrize("cut", [by_the_drawn_token, by_the_token_behind], ids=["drawn", "behind"])
def test_a_head_that_looks_at_what_was_drawn_is_noticed(cut: Cut) -> None:
    """What is verified depends on a place's own token, or a place's number on what is drawn there."""
    text, _ = emitted("confident", PLAIN, cut=cut)
    assert p_value(count(text, VOCAB), joint_law(PLAIN)) < BAD


def test_a_head_that_is_judged_by_its_law_draws_from_all_tokens() -> None:
    few, selector = MarkovConfig(rank=3, top_k=4, form="gated"), SelectorConfig(rank=3, top_k=3)
    setup = Setup(target_config(), draft_config(head=few), mode="sampled", proposals="rejection")
    assert setup.drafting.head == MarkovConfig(rank=3, form="gated")
    for other in (
        {"mode": "greedy"},
        {"proposals": "shared_noise"},
        {"draft": draft_config(head=selector)},
        {"draft": None},
    ):
        same = replace(setup, **other)
        assert same.drafting == same.draft
