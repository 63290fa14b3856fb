"""Rows that requests share: what is learnt of a drafter's confidence, how many rows are chosen, and that no text changes."""

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.checkpoints.weights import weight_shapes
from dflash_jax.compile.programs import Status
from dflash_jax.decoding import cycle
from dflash_jax.decoding.state import Emitted
from dflash_jax.engine.acceptance_estimate import RIDGE, SHRINKAGE, AcceptanceEstimate
from dflash_jax.engine.cycle_costs import CycleCost, cycle_cost
from dflash_jax.engine.verify_per_request import LOOK_AGAIN, PerRequestPolicy, best_gains
from dflash_jax.engine.verify_policy import FIRST_CYCLES, Choice
from dflash_jax.models import family_named
from dflash_jax.models.dflash import DFlash
from dflash_jax.models.presets import DRAFTERS, TARGETS
from dflash_jax.sampling_params import SamplingParams

from ..decoding.test_verify_budget import lengths_of
from ..devices import on
from ..random_pair import VOCAB, draft_config

PLACES = 3


def blocks(slope: float, intercepts: np.ndarray, count: int, rng: np.random.Generator):
    """Log-odds, and how many proposals stand, in a world where a logistic law holds."""
    odds = rng.normal(1.0, 2.0, (count, len(intercepts)))
    stands = rng.random(odds.shape) < 1 / (1 + np.exp(-(slope * odds + intercepts)))
    return odds, np.cumprod(stands, axis=1).sum(axis=1)


def test_a_step_is_newtons_with_shrinkage() -> None:
    """Against the whole matrix, solved at once; what was not judged has no part in it."""
    rng, estimate = np.random.default_rng(0), AcceptanceEstimate(PLACES)
    odds, accepted = blocks(1.0, np.array([0.3, -0.5, 0.0]), 60, rng)
    verified = rng.integers(1, PLACES + 2, 60)
    accepted = np.minimum(accepted, verified - 1)
    before = np.concatenate([[estimate.slope], estimate.intercepts])
    gradient, matrix, counts = np.zeros(4), np.eye(4) * RIDGE, np.zeros(PLACES)
    for row, stood, length in zip(odds, accepted, verified, strict=True):
        for place in range(min(stood + 1, length - 1)):
            x = np.array([row[place], *np.eye(PLACES)[place]])
            chance = 1 / (1 + np.exp(-x @ before))
            gradient += (float(place < stood) - chance) * x
            matrix += chance * (1 - chance) * np.outer(x, x)
            counts[place] += 1
    slope = np.linalg.solve(matrix, gradient)[0] * counts.sum() / (counts.sum() + SHRINKAGE)
    rest = (gradient[1:] - matrix[1:, 0] * slope) / np.diag(matrix)[1:] * counts / (counts + SHRINKAGE)
    estimate.observe(odds, accepted, verified, cycles=7)
    assert estimate.parameters.tolist() == before.astype(np.float32).tolist()
    estimate.observe(odds[:0], accepted[:0], verified[:0], cycles=1)
    np.testing.assert_allclose(estimate.parameters, before + np.array([slope, *rest]), rtol=1e-6)


def test_the_law_is_learnt_whatever_is_cut() -> None:
    rng, estimate, truth = np.random.default_rng(1), AcceptanceEstimate(PLACES), np.array([0.8, -0.4, 0.1])
    for _ in range(6):
        odds, accepted = blocks(0.9, truth, 12_000, rng)
        verified = 1 + np.sum(np.cumprod(odds > 0, axis=1), axis=1)  # by the law alone, as a budget is
        estimate.observe(odds, np.minimum(accepted, verified - 1), verified, cycles=100)
    np.testing.assert_allclose(estimate.parameters, [0.9, *truth], atol=0.1)


def test_confidence_is_no_bad_sign_and_parted_data_break_nothing() -> None:
    estimate, ones = AcceptanceEstimate(1), np.ones(400, int)
    odds = np.where(np.arange(400) % 2, 5.0, -5.0)[:, None]
    for _ in range(30):
        estimate.observe(odds, (odds[:, 0] < 0).astype(int), 2 * ones, cycles=100)
    assert estimate.slope == 0.0
    for _ in range(30):
        estimate.observe(odds, ones, 2 * ones, cycles=100)
    assert np.isfinite(estimate.parameters).all()
    assert estimate.chances(odds).min() > 0.99


class Stairs(CycleCost):
    """A cycle costs 2.5 ms up to three proposals of two requests, 3.1 ms above."""

    def __init__(self):
        """Of no pair."""

    def ms(self, slots: int, verified: int, context: float, *, proposed: int | None = None) -> float:
        return 2.5 if slots * verified <= 5 else 3.1


def compiled(_: int) -> Status:
    return "compiled"


def test_worked_example_of_gains() -> None:
    """Tokens a millisecond of 0, 1, ... proposals of two requests under a staircase: three are best."""
    gains = best_gains(np.cumprod([[[0.9, 0.8, 0.5], [0.6, 0.5, 0.2]]], axis=2))
    costs = np.array([Stairs().ms(1, 2 + more, 0.0) for more in range(7)])
    np.testing.assert_allclose(((2 + gains) / costs), [0.8, 1.16, 1.448, 1.688, 1.477, 1.574, 1.594], atol=5e-4)


class Rows(CycleCost):
    """So much a cycle, so much a row."""

    def __init__(self):
        """Of no pair."""

    def ms(self, slots: int, verified: int, context: float, *, proposed: int | None = None) -> float:
        return 3.0 + 0.02 * slots * verified if verified > 1 else 2.5 + 0.02 * slots


def told(policy: PerRequestPolicy, odds: np.ndarray, length: int, rng: np.random.Generator) -> int:
    """One call of 8 cycles in which the device verifies `length` a slot; returns the tokens gained."""
    cycles, slots, places = 8, *odds.shape
    chances = 1 / (1 + np.exp(-(0.9 * odds - 0.2)))
    survival = policy.learnt.chances(odds).cumprod(axis=1)
    lengths = np.array(lengths_of(survival, np.full(slots, True), slots * length))
    stood = np.cumprod(rng.random((cycles, slots, places)) < chances, axis=2).sum(axis=2)
    stood = np.minimum(stood, lengths - 1)
    told = {"lengths": np.tile(lengths, (cycles, 1)), "odds": np.tile(odds, (cycles, 1, 1))}
    nothing = np.zeros((cycles, slots, 0))
    emitted = Emitted(nothing, 1 + stood, stood, nothing, nothing, nothing, **told)
    policy.observe_drafts(dict(enumerate(range(slots))), emitted)
    policy.observe(length, {}, cycles)
    return int(np.sum(1 + stood))


def test_good_requests_pay_for_rows_that_bad_ones_do_not_get() -> None:
    """Half of 32 requests have proposals that stand, half have none: some rows for each slot on average beat the whole block and
    any length for all; where all are bad nothing is drafted, until it is tried again."""
    policy, rng = PerRequestPolicy(16, Rows()), np.random.default_rng(2)
    mixed = np.where(np.arange(32)[:, None] % 2, 4.0, -5.0) * np.ones(15)
    tickets = list(range(32))
    assert policy.next({"greedy": 32}, 32, 100.0, 32, compiled, tickets)[:2] == (12, FIRST_CYCLES)
    for _ in range(60):
        length = policy.next({"greedy": 32}, 32, 100.0, 32, compiled, tickets).length
        gained = told(policy, mixed, length, rng)
    assert 4 <= length <= 9
    rate = gained / 8 / policy.cost.ms(32, length, 100.0)
    assert rate > 1.1 * max((32 + 16 * min(n - 1, 11)) / Rows().ms(32, n, 100.0) for n in range(1, 17))
    for _ in range(40):
        length = policy.next({"greedy": 32}, 32, 100.0, 32, compiled, tickets).length
        if length == 1:
            break
        told(policy, np.full((32, 15), -6.0), length, rng)
    assert length == 1
    policy.observe(1, {}, 100)
    assert policy.next({"greedy": 32}, 32, 100.0, 32, compiled, tickets)[:2] == (1, 32)
    policy.observe(1, {}, 4000)
    again = policy.next({"greedy": 32}, 32, 100.0, 32, compiled, tickets)
    assert again.length > 1
    assert again.cycles == FIRST_CYCLES
    # A request that nobody has seen is reckoned to be a good one.
    policy.observe(1, {}, -4000)
    assert policy.next({"greedy": 32}, 32, 100.0, 32, compiled, tickets).length == 1
    assert policy.next({"greedy": 32}, 32, 100.0, 32, compiled, [*tickets[:-16], *range(100, 116)]).length > 1


def test_a_new_request_among_many_changes_little() -> None:
    """Where rows are shared anyway nobody has to be looked at apart: one unknown request of 32 leaves the length as it was."""
    policy, rng = PerRequestPolicy(16, Rows()), np.random.default_rng(4)
    mixed = np.where(np.arange(32)[:, None] % 2, 4.0, -5.0) * np.ones(15)
    for _ in range(20):
        length = policy.next({"greedy": 32}, 32, 100.0, 32, compiled, range(32)).length
        told(policy, mixed, length, rng)
    later = policy.next({"greedy": 32}, 32, 100.0, 32, compiled, [*range(31), 99])
    assert 4 <= length <= later.length <= 9
    assert later.cycles == FIRST_CYCLES


def always(length: int):
    """A choice of so many tokens for each slot on average, whatever they cost."""
    return lambda policy, *_: Choice(length, length)


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
    monkeypatch.setattr(PerRequestPolicy, "choose", always(3))
    monkeypatch.setattr(PerRequestPolicy, "shares", lambda policy, slots: True)
    pair.engine.verify_length = "per_request"
    drafted, counts, _ = pair.run(prompts, each)
    assert drafted == plain
    assert counts[0][:11] == counts[2][:11] == [5] * 11
    assert np.mean(counts[1][:11] + counts[3][:11]) < 1.5
    estimate = pair.engine.verify_policy.estimate
    assert estimate is not None
    assert pair.engine.verify_policy.cycles.keys() == {3}


def test_whole_blocks_are_plain_ones_and_requests_are_looked_at_before() -> None:
    """Requests whose proposals all stand get whole blocks, which say nothing of single proposals, after a look and until the next;
    where no length between pays, lengths are those of acceptance alone."""
    policy, rng, tickets = PerRequestPolicy(16, Rows()), np.random.default_rng(3), [0, 1, 2, 3]
    sure, stood = np.full((4, 15), 9.0), {"greedy": np.full(32, 15)}

    def following(status=compiled):
        return policy.next({"greedy": 4}, 4, 100.0, 32, status, tickets)

    for _ in range(3):
        assert following().length == (16 if policy.recent else 12)
        told(policy, sure, 12, rng)
    assert following()[:2] == (16, 32)
    for _ in range(LOOK_AGAIN // 32):
        policy.observe(16, stood, 32)
    assert following()[:2] == (12, FIRST_CYCLES)
    assert following(lambda length: "compiled" if length == 16 else "missing").length == 16

    class Flat(Rows):
        def ms(self, slots: int, verified: int, context: float, *, proposed: int | None = None) -> float:
            return 3.0 if verified > 1 else 2.5

    flat = PerRequestPolicy(16, Flat())
    assert flat.next({"greedy": 1}, 1, 100.0, 32, compiled, [7]).length == 16
    flat.observe(16, {"greedy": np.zeros(64, int)}, 64)
    assert flat.next({"greedy": 1}, 1, 100.0, 32, compiled, [7]).length == 1


def test_few_slots_do_not_share() -> None:
    """Qwen3-4B on an H100: of eight slots sharing saves less than it takes, of 64 much more. A length is then every slot's."""
    pair = [(TARGETS["Qwen3-4B"], family_named("qwen3")), (DRAFTERS["Qwen3-4B-DFlash-b16"], family_named("dflash"))]
    with on("NVIDIA H100 80GB HBM3"):
        weights = weight_shapes(pair, jnp.dtype(jnp.bfloat16))
    policy = PerRequestPolicy(16, cycle_cost(pair[0][0], pair[1][0], weights))
    assert [policy.shares(slots) for slots in (1, 8, 16, 64)] == [False, False, True, True]
    assert policy.shorter(8) == [8, 4, 1]
    assert policy.shorter(64) == [12, 8, 6, 4, 3, 2, 1]
    assert policy.cycle_ms(8, 8, 100.0) == policy.cost.ms(8, 8, 100.0)
    assert policy.cycle_ms(64, 8, 100.0) > policy.cost.ms(64, 8, 100.0) + 0.3
