"""Rows that requests share: what is learnt of a drafter's confidence, how many rows are chosen, and that no text changes."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.checkpoints.weights import weight_shapes
from dflash_jax.compile.programs import Status
from dflash_jax.decoding import cycle
from dflash_jax.decoding.accept import imposed_chance
from dflash_jax.decoding.state import Emitted
from dflash_jax.decoding.verify_budget import survivals
from dflash_jax.engine.acceptance_estimate import RIDGE, SHRINKAGE, AcceptanceEstimate
from dflash_jax.engine.cycle_costs import CycleCost, cycle_cost
from dflash_jax.engine.verify_auto import AutoPolicy, Choice, best_gains, judged
from dflash_jax.engine.verify_policy import Kind, Length, Served
from dflash_jax.models import family_named
from dflash_jax.models.dflash import DFlash
from dflash_jax.models.heads import Block, Law, MarkovConfig, Pick
from dflash_jax.models.heads.markov import Markov
from dflash_jax.models.presets import DRAFTERS, TARGETS
from dflash_jax.sampling_params import SamplingParams

from ..decoding.test_verify_budget import lengths_of
from ..devices import on
from ..random_pair import VOCAB, draft_config

PLACES = 3


# Of a law alone, and with those that a head gives itself.
SLOPES = [(0.9,), (0.6, 0.4)]


def blocks(slopes: Sequence[float], intercepts: np.ndarray, count: int, rng: np.random.Generator):
    """Log-odds, and how many proposals stand, in a world where a logistic law holds. Second signs are like the first ones."""
    odds = rng.normal(1.0, 2.0, (len(slopes), count, len(intercepts)))
    odds[1:] += 0.8 * odds[0]
    stands = rng.random(odds[0].shape) < 1 / (1 + np.exp(-(np.tensordot(slopes, odds, axes=1) + intercepts)))
    return np.concatenate(odds, axis=1), np.cumprod(stands, axis=1).sum(axis=1)


@pytest.mark.parametrize("slopes", SLOPES, ids=["law", "law and head"])
def test_a_step_is_newtons_with_shrinkage(slopes: tuple[float, ...]) -> None:
    """Against the whole matrix, solved at once; what was not judged has no part in it."""
    signs = len(slopes)
    rng, estimate, size = np.random.default_rng(0), AcceptanceEstimate(PLACES, signs), signs + PLACES
    odds, accepted = blocks(slopes, np.array([0.3, -0.5, 0.0]), 60, rng)
    verified = rng.integers(1, PLACES + 2, 60)
    accepted = np.minimum(accepted, verified - 1)
    before = np.concatenate([estimate.slopes, estimate.intercepts])
    gradient, matrix, counts = np.zeros(size), np.eye(size) * RIDGE, np.zeros(PLACES)
    for row, stood, length in zip(odds.reshape(-1, signs, PLACES), accepted, verified, strict=True):
        for place in range(min(stood + 1, length - 1)):
            x = np.array([*row[:, place], *np.eye(PLACES)[place]])
            chance = 1 / (1 + np.exp(-x @ before))
            gradient += (float(place < stood) - chance) * x
            matrix += chance * (1 - chance) * np.outer(x, x)
            counts[place] += 1
    step = np.linalg.solve(matrix, gradient)[:signs] * counts.sum() / (counts.sum() + SHRINKAGE)
    rest = (gradient[signs:] - matrix[signs:, :signs] @ step) / np.diag(matrix)[signs:] * counts / (counts + SHRINKAGE)
    estimate.observe(odds, accepted, verified, cycles=7)
    assert estimate.parameters.tolist() == before.astype(np.float32).tolist()
    estimate.observe(odds[:0], accepted[:0], verified[:0], cycles=1)
    np.testing.assert_allclose(estimate.parameters, before + np.array([*step, *rest]), rtol=1e-6)


@pytest.mark.parametrize("slopes", SLOPES, ids=["law", "law and head"])
def test_the_law_is_learnt_whatever_is_cut(slopes: tuple[float, ...]) -> None:
    truth = np.array([0.8, -0.4, 0.1])
    rng, estimate = np.random.default_rng(1), AcceptanceEstimate(PLACES, len(slopes))
    for _ in range(6):
        odds, accepted = blocks(slopes, truth, 12_000, rng)
        verified = 1 + np.sum(np.cumprod(odds[:, :PLACES] > 0, axis=1), axis=1)  # by a law alone, as a budget is
        estimate.observe(odds, np.minimum(accepted, verified - 1), verified, cycles=100)
    np.testing.assert_allclose(estimate.parameters, [*slopes, *truth], atol=0.1)
    odds, _ = blocks(slopes, truth, 5, rng)
    chances = np.cumprod(estimate.chances(odds), axis=1)
    signs = jnp.split(jnp.float32(odds), len(slopes), axis=1)
    of_programs = survivals(signs[0], jnp.asarray(estimate.parameters), *signs[1:])
    np.testing.assert_allclose(of_programs, chances, rtol=1e-5)


def test_confidence_is_no_bad_sign_and_parted_data_break_nothing() -> None:
    estimate, ones = AcceptanceEstimate(1), np.ones(400, int)
    odds = np.where(np.arange(400) % 2, 5.0, -5.0)[:, None]
    for _ in range(30):
        estimate.observe(odds, (odds[:, 0] < 0).astype(int), 2 * ones, cycles=100)
    assert estimate.slopes.tolist() == [0.0]
    for _ in range(30):
        estimate.observe(odds, ones, 2 * ones, cycles=100)
    assert np.isfinite(estimate.parameters).all()
    assert estimate.chances(odds).min() > 0.99


def compiled(_: Length) -> Status:
    return "compiled"


def test_worked_example_of_gains() -> None:
    """Tokens a millisecond of 0, 1, ... proposals of two requests under a staircase, 2.5 ms up to three and 3.1 above: three are
    best."""
    gains = best_gains(np.cumprod([[0.9, 0.8, 0.5], [0.6, 0.5, 0.2]], axis=1))
    costs = np.where(np.arange(7) <= 3, 2.5, 3.1)
    np.testing.assert_allclose((2 + gains) / costs, [0.8, 1.16, 1.448, 1.688, 1.477, 1.574, 1.594], atol=5e-4)


class Rows(CycleCost):
    """So much a cycle, so much a row, and something for sharing."""

    def __init__(self):
        """Of no pair."""

    def ms(self, slots: int, verified: int, context: float, *, proposed: int | None = None) -> float:
        return (3.0 if verified > 1 else 2.5) + 0.02 * slots * verified + (0.0 if proposed is None else 0.2)


class World:
    """Requests in slots of their own whose proposals stand with one chance each, and a drafter that knows it.

    Args:
      knows: False for a drafter that is as sure of all of them.
    """

    def __init__(self, policy: AutoPolicy, chances: np.ndarray, *, slots: int | None = None, knows: bool = True):
        self.policy, self.chances, self.rng = policy, chances, np.random.default_rng(2)
        self.slots, self.first = slots or len(chances), 0
        self.odds = (np.log(chances / (1 - chances)) if knows else np.full(len(chances), 1.0))[:, None] * np.ones(15)
        self.chosen: list[Length] = []

    def run(self, calls: int, *, cycles: int = 8) -> float:
        """Tokens a millisecond over so many calls."""
        tokens = spent = 0.0
        for _ in range(calls):
            count = len(self.chances)
            tickets: dict[int, Kind] = dict.fromkeys(range(self.first, self.first + count), "greedy")
            length = self.policy.next(tickets, self.slots, 100.0, cycles, compiled).length
            self.chosen.append(length)
            lengths = np.full(count, length.tokens)
            told: dict[str, Any] = {}
            if length.shared:
                survival = self.policy.learnt.chances(self.odds).cumprod(axis=1)
                lengths = np.array(lengths_of(survival, np.full(count, True), self.slots * length.tokens))
                told = {"lengths": np.tile(lengths, (cycles, 1)), "odds": np.tile(self.odds, (cycles, 1, 1))}
            stands = self.rng.random((cycles, count, 15)) < self.chances[:, None]
            stood: Any = np.minimum(np.cumprod(stands, axis=2).sum(axis=2), lengths - 1)
            nothing: Any = np.zeros((cycles, count, 0))
            served = [Served(ticket, slot, "greedy") for slot, ticket in enumerate(tickets)]
            emitted = Emitted(nothing, 1 + stood, stood, nothing, nothing, nothing, **told)
            self.policy.look(length, served, emitted)
            tokens += np.sum(1 + stood)
            spent += cycles * self.policy.cycle_ms(self.slots, length, 100.0)
        return tokens / spent

    def best_common(self) -> float:
        """Tokens a millisecond of the best length that all have in common, by who knows the chances."""
        gains = 1 + np.cumsum(
            np.concatenate([[0], np.cumprod(self.chances[:, None] * np.ones(15), axis=1).mean(axis=0)])
        )
        lengths = [Length(n) for n in (1, 4, 8, 16)]
        return max(
            len(self.chances) * (gains[n.tokens - 1]) / self.policy.cycle_ms(self.slots, n, 100.0) for n in lengths
        )


MIXED = np.where(np.arange(32) % 2, 0.97, 0.05)


@pytest.mark.parametrize("mean", [2.0, 6.0, 10.0])
@pytest.mark.parametrize("count", [1, 32])
def test_equal_requests_and_one_alone_never_share(mean, count) -> None:
    """Of all that run are the same length is verified; what that is, and how soon it is found, is as it was before requests were
    told apart."""
    world = World(AutoPolicy(16, Rows()), np.full(count, imposed_chance(mean, 15)))
    world.run(10)
    assert world.run(60) > 0.96 * world.best_common()
    assert not any(length.shared for length in world.chosen)


def test_good_requests_pay_for_rows_that_bad_ones_do_not_get() -> None:
    """Half of 32 requests have proposals that stand, half have none: some rows for each slot on average beat the whole block and
    any length for all. Others who come after them and are all alike share nothing."""
    world = World(AutoPolicy(16, Rows()), MIXED)
    world.run(10)
    assert world.run(40) > 1.1 * world.best_common()
    assert all(length.shared for length in world.chosen[5:])
    after = World(world.policy, np.full(32, 0.8))
    after.first = 100
    after.run(20)
    assert after.run(20) > 0.96 * after.best_common()
    assert not any(length.shared for length in after.chosen[10:])


def test_slots_that_stand_empty_leave_their_rows() -> None:
    """Few requests of equal ones, in many slots, share what all slots have."""
    world = World(AutoPolicy(16, Rows()), np.full(4, 0.9), slots=32)
    world.run(10)
    assert world.run(20) > 1.1 * world.best_common()
    assert world.chosen[-1] == Length(4, shared=True)


def test_a_drafter_that_cannot_tell_is_not_trusted() -> None:
    """Its rows go to whom they do not help. It is tried for a while, and lengths are common ones again."""
    world = World(AutoPolicy(16, Rows()), MIXED, knows=False)
    world.run(40)
    assert any(length.shared for length in world.chosen)
    assert not any(length.shared for length in world.chosen[-10:])
    assert world.run(40) > 0.96 * world.best_common()


def test_rows_are_not_shared_where_that_was_not_measured() -> None:
    """Beside a request that samples, and where the engine says so."""
    world = World(AutoPolicy(16, Rows()), MIXED)
    world.run(20)
    assert world.chosen[-1].shared
    beside: dict[int, Kind] = {**dict.fromkeys(range(31), "greedy"), 99: "sampled"}
    assert not world.policy.next(beside, 32, 100.0, 32, compiled).length.shared
    assert not any(length.shared for length in world.policy.candidates(32, 100.0, "sampled"))
    never = World(AutoPolicy(16, Rows(), sharing=False), MIXED)
    assert never.run(20) > 0.9 * never.best_common()
    assert not any(length.shared for length in (*never.chosen, *never.policy.candidates(32, 100.0)))
    assert AutoPolicy(16, Rows(), "per_request", sharing=False).shares(32)


def test_fewer_slots_verify_what_may_be_chosen_there() -> None:
    """Otherwise a batch that empties would move to programs that its next choice is not among."""

    class Few(Rows):
        def ms(self, slots: int, verified: int, context: float, *, proposed: int | None = None) -> float:
            return super().ms(slots, verified, context, proposed=proposed) + (9.0 if proposed and slots < 16 else 0.0)

    policy = AutoPolicy(16, Few())
    policy.current = Length(6, shared=True)
    assert policy.with_slots(32, 100.0) == Length(6, shared=True)
    assert policy.with_slots(8, 100.0) == Length(8)
    policy.current = Length(4)
    assert policy.with_slots(1, 100.0) in policy.candidates(1, 100.0)


def test_whoever_insists_has_rows_shared() -> None:
    """Lengths between the pending token and the whole block are means; equal requests have no others."""
    policy = AutoPolicy(16, Rows(), "per_request")
    assert [length.tokens for length in policy.candidates(32, 100.0)] == [1, 2, 3, 4, 6, 8, 12, 16]
    assert [length for length in policy.candidates(32, 100.0) if not length.shared] == [Length(1), Length(16)]
    world = World(policy, np.full(32, 0.8))
    world.run(20)
    assert all(length.shared for length in world.chosen)


def test_drafting_is_given_up_and_tried_again() -> None:
    world = World(AutoPolicy(16, Rows()), np.full(32, 0.02))
    world.run(200)
    rested = world.policy.cycles[Length(1)]
    assert rested > 0.8 * sum(world.policy.cycles.values())
    world.chances = np.full(32, 0.9)
    world.run(100)
    assert world.run(20) > 0.93 * world.best_common()


def test_requests_that_stay_long_are_not_the_typical_ones() -> None:
    """Those whose proposals fall run alone in the end. Who comes next is reckoned to be like all that came, and drafts at once."""
    policy = AutoPolicy(16, Rows())
    World(policy, MIXED).run(3)
    tail = World(policy, MIXED[::2])
    tail.first = 200
    for _ in range(20):
        tail.run(1)
    assert policy.current == Length(1)
    fresh: dict[int, Kind] = dict.fromkeys(range(300, 332), "greedy")
    assert policy.next(fresh, 32, 100.0, 32, compiled).length.tokens > 1


def test_what_was_not_verified_of_shared_rows_counts_by_the_law() -> None:
    """Rows are cut where the law is low. Left out these cycles would make a request look better than it is."""
    rng, cycles, chance = np.random.default_rng(5), 20_000, np.array([[0.9, 0.5], [0.3, 0.2]])
    law = chance[rng.integers(0, 2, cycles)][:, None]
    stands = np.cumprod(rng.random(law.shape) < law, axis=2).sum(axis=2)
    lengths = np.where(law[:, :, 0] > 0.5, 3, 1)
    live = np.full(lengths.shape, True)
    tried, stood = judged(2, live, np.minimum(stands, lengths - 1), lengths, law)
    np.testing.assert_allclose((stood / tried)[0], [0.6, (0.45 + 0.06) / 1.2], rtol=0.03)
    tried, stood = judged(2, live, np.minimum(stands, lengths - 1), lengths)
    np.testing.assert_allclose((stood / tried)[0], [0.9, 0.5], rtol=0.03)
    assert not np.any(judged(2, ~live, stands, lengths, law))


CONFIDENT = MarkovConfig(rank=6, confidence="hidden_and_token", confidence_bias=True)


def by_turns(*lengths: Length):
    """One of these in each call, whatever they cost."""
    each = itertools.cycle(lengths)

    def choose(policy: AutoPolicy, *_) -> Choice:
        policy.current = next(each)
        return Choice(policy.current, policy.current)

    return choose


@pytest.mark.few("confident-greedy")
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize("head", [None, CONFIDENT], ids=["v1", "confident"])
def test_texts_stay_the_same_where_rows_are_shared_now_and_then(
    make_pair, make_prompts, monkeypatch, head, temperature
):
    """Common lengths and shared rows by turns, in the middle of texts, while requests come and go."""
    pair = make_pair(draft=draft_config(block_size=8, head=head), max_batch=4)
    prompts = make_prompts((5, 21, 9, 13, 7, 30))
    each = [SamplingParams(max_tokens=30 + 5 * i, seed=i, temperature=temperature) for i in range(6)]
    plain = pair.run(prompts, each, draft=False)[0]
    lengths = Length(8), Length(3, shared=True), Length(4), Length(1), Length(2, shared=True)
    monkeypatch.setattr(AutoPolicy, "choose", by_turns(*lengths))
    monkeypatch.setattr(AutoPolicy, "shares", lambda policy, slots: True)
    pair.engine.verify_length = "auto"
    assert pair.run(prompts, each)[0] == plain
    assert pair.engine.verify_policy.cycles.keys() == set(lengths)


def test_a_head_is_asked_with_the_token_before_each_place(make_pair, make_prompts, monkeypatch):
    """What it says stands behind what the law says, and may know the anchor and the proposals before a place, no other."""
    pair, drafts = make_pair(draft=draft_config(block_size=4, head=CONFIDENT)), 3
    seen, observe = [], AcceptanceEstimate.observe

    def counting(head: Markov, block: Block, pick: Pick):
        return (block.anchor[:, None] + 1 + jnp.arange(drafts)) % VOCAB, Law(block.logits)

    def remember(estimate: AcceptanceEstimate, odds: np.ndarray, *rest, cycles: int):
        seen.append(odds)
        observe(estimate, odds, *rest, cycles=cycles)

    monkeypatch.setattr(Markov, "propose", counting)
    monkeypatch.setattr(Markov, "log_odds", lambda head, block, before: before / 4.0)
    monkeypatch.setattr(AcceptanceEstimate, "observe", remember)
    monkeypatch.setattr(AutoPolicy, "choose", by_turns(Length(2, shared=True)))
    monkeypatch.setattr(AutoPolicy, "shares", lambda policy, slots: True)
    pair.engine.verify_length = "per_request"
    texts, counts, _ = pair.run(make_prompts((9,)), SamplingParams(max_tokens=12))
    odds = np.concatenate(seen)
    assert odds.shape == (len(counts[0]), 2 * drafts)
    pending = np.array(texts[0])[np.cumsum([0, *counts[0]])[:-1]]
    np.testing.assert_array_equal(4 * odds[:, drafts:], (pending[:, None] + np.arange(drafts)) % VOCAB)
    assert len(pair.engine.estimate) == 2 + drafts


def test_texts_are_the_targets_own_and_rows_go_where_they_are_worth_it(make_pair, make_prompts, monkeypatch):
    """Of two requests the drafter knows the texts, of two it is unsure and wrong; one of each is greedy. Twelve rows for four
    slots: who is known gets five."""
    pair, tokens, block = make_pair(draft=draft_config(block_size=8)), 60, 8
    prompts = make_prompts((5, 21, 9, 13))
    each = [SamplingParams(max_tokens=tokens, seed=i, temperature=float(i // 2)) for i in range(4)]
    plain = pair.run(prompts, each, draft=False)[0]
    texts = np.zeros((4, 32 + tokens + block), np.int32)
    for row, prompt, text in zip(texts, prompts, plain, strict=True):
        row[: len(prompt) + tokens] = prompt + text
    seen, draft_block = [], cycle.draft_block

    def remember(drafter, target, pages, table, state, *rest):
        seen[:] = [state]
        return draft_block(drafter, target, pages, table, state, *rest)

    def known(drafter, hidden, head):
        (state,) = seen
        who = state.request.seed[:, -1].astype(jnp.int32)
        right = jnp.asarray(texts)[who[:, None], state.seq_lens[:, None] + jnp.arange(1, block)]
        sure = (who % 2 == 0)[:, None, None]
        return jnp.where(sure, 100.0 * jax.nn.one_hot(right, VOCAB), 2.0 * jax.nn.one_hot((right + 1) % VOCAB, VOCAB))

    monkeypatch.setattr(cycle, "draft_block", remember)
    monkeypatch.setattr(DFlash, "logits", known)
    monkeypatch.setattr(AutoPolicy, "choose", by_turns(Length(3, shared=True)))
    monkeypatch.setattr(AutoPolicy, "shares", lambda policy, slots: True)
    pair.engine.verify_length = "per_request"
    drafted, counts, _ = pair.run(prompts, each)
    assert drafted == plain
    assert counts[0][:11] == counts[2][:11] == [5] * 11
    assert np.mean(counts[1][:11] + counts[3][:11]) < 1.5
    estimate = pair.engine.verify_policy.estimate
    assert estimate is not None
    assert pair.engine.verify_policy.cycles.keys() == {Length(3, shared=True)}


def test_few_slots_do_not_share() -> None:
    """Qwen3-4B on an H100: of eight slots sharing saves less than it takes, of 64 much more. A length is then every slot's."""
    pair = [(TARGETS["Qwen3-4B"], family_named("qwen3")), (DRAFTERS["Qwen3-4B-DFlash-b16"], family_named("dflash"))]
    with on("NVIDIA H100 80GB HBM3"):
        weights = weight_shapes(pair, jnp.dtype(jnp.bfloat16))
    policy = AutoPolicy(16, cycle_cost(pair[0][0], pair[1][0], weights))
    assert [policy.shares(slots) for slots in (1, 8, 16, 64)] == [False, False, True, True]
    assert not any(length.shared for length in policy.candidates(8, 100.0))
    assert [length.tokens for length in policy.candidates(64, 100.0) if length.shared] == [4, 6, 8]
    assert policy.cycle_ms(64, Length(8, shared=True), 100.0) > policy.cycle_ms(64, Length(8), 100.0) + 0.3
