"""Which length is verified: what the choice gains in a world of known chances, and that it can be relied on."""

import itertools
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.checkpoints.weights import weight_shapes
from dflash_jax.compile.programs import Status
from dflash_jax.decoding.state import Emitted
from dflash_jax.engine import cycle_costs as costs
from dflash_jax.engine.cycle_costs import BANDWIDTH, CycleCost, Stack, cycle_cost
from dflash_jax.engine.planning import choose_verify_length
from dflash_jax.engine.verify_auto import FIRST_CYCLES, AutoPolicy
from dflash_jax.engine.verify_policy import Kind, Length, Served, VerifyPolicy
from dflash_jax.errors import ParameterError
from dflash_jax.models import family_named
from dflash_jax.models.presets import DRAFTERS, TARGETS
from dflash_jax.options import WeightDtype

OFFERED = 16
WHOLE = Length(OFFERED)


def greedy(count: int) -> dict[int, Kind]:
    """So many running requests, by their tickets."""
    return dict.fromkeys(range(count), "greedy")


def cost_of(name: str, draft_weight_dtype: WeightDtype | None = None) -> CycleCost:
    target, draft = TARGETS[f"Qwen3-{name}"], DRAFTERS[f"Qwen3-{name}-DFlash-b16"]
    pair = [(target, family_named("qwen3")), (draft, family_named("dflash"))]
    return cycle_cost(target, draft, weight_shapes(pair, jnp.dtype("bfloat16"), None, draft_weight_dtype))


@pytest.fixture(scope="module")
def cost() -> CycleCost:
    return cost_of("4B")


def accepted(chances: np.ndarray, verified: int, cycles: int, rng: np.random.Generator) -> np.ndarray:
    stands = rng.random((cycles, verified - 1)) < chances[: verified - 1]
    return np.cumprod(stands, axis=1).sum(axis=1)


def saw(lengths: AutoPolicy, length: Length, found: dict[Kind, np.ndarray], cycles: int) -> None:
    """Tells of cycles in which so many proposals stood, in turn of each request of a kind."""
    stood: Any = np.concatenate([each.reshape(cycles, -1) for each in found.values()], axis=1)
    kinds: list[Kind] = [kind for kind, each in found.items() for _ in range(len(each) // cycles)]
    served = [Served(i, i, kind) for i, kind in enumerate(kinds)]
    nothing: Any = np.zeros((*stood.shape, 0))
    lengths.look(length, served, Emitted(nothing, 1 + stood, stood, nothing, nothing, nothing))


def all_compiled(length: Length) -> Status:
    return "compiled"


def play(lengths: AutoPolicy, chances: np.ndarray, slots: int, calls: int, rng: np.random.Generator) -> float:
    """Tokens a millisecond over so many calls of 32 cycles, every program being there."""
    tokens = spent = 0.0
    for _ in range(calls):
        length, cycles, _ = lengths.next(greedy(slots), slots, 1024.0, 32, all_compiled)
        drafts = length.tokens > 1
        stood = accepted(chances, length.tokens, cycles * slots, rng) if drafts else np.zeros(cycles * slots, int)
        saw(lengths, length, {"greedy": stood}, cycles)
        tokens += stood.sum() + cycles * slots
        spent += cycles * lengths.cycle_ms(slots, length, 1024.0)
    return tokens / spent


def best_rate(cost: CycleCost, chances: np.ndarray, slots: int) -> float:
    gains = 1 + np.concatenate([[0], np.cumsum(np.cumprod(chances))])
    return max(gains[n - 1] / cost.ms(slots, n, 1024.0) for n in (1, 4, 8, 16))


@pytest.mark.parametrize("name", ["4B", "8B"])
def test_a_drafter_in_float8_costs_less(name):
    """The bytes and products of drafts halve, with the head's for proposals; plain decoding costs what it did."""
    exact, narrow = cost_of(name), cost_of(name, "fp8_dynamic")
    assert narrow.ms(32, 1, 1024.0) == exact.ms(32, 1, 1024.0)
    for slots in (1, 8, 32):
        assert 0.8 < narrow.ms(slots, 16, 1024.0) / exact.ms(slots, 16, 1024.0) < 0.95
    assert narrow.draft.products == pytest.approx(exact.draft.products / 2, rel=1e-3)
    assert narrow.proposing.dense < 0.51 * exact.proposing.dense == 0.51 * narrow.head.dense


@pytest.mark.few("0.02-1", "0.3-64", "0.6-8", "0.8-1", "0.95-64")
@pytest.mark.parametrize("slots", [1, 8, 64])
@pytest.mark.parametrize("chance", [0.02, 0.3, 0.6, 0.8, 0.95])
def test_chooses_nearly_as_well_as_who_knows_the_chances(cost, slots, chance):
    chances, lengths = np.full(OFFERED - 1, chance), AutoPolicy(OFFERED, cost)
    rng = np.random.default_rng(0)
    play(lengths, chances, slots, 20, rng)
    assert play(lengths, chances, slots, 200, rng) > 0.93 * best_rate(cost, chances, slots)


def test_gives_up_drafting_and_finds_out_when_it_pays_again(cost):
    lengths, rng = AutoPolicy(OFFERED, cost), np.random.default_rng(1)
    never, often = np.full(OFFERED - 1, 0.01), np.full(OFFERED - 1, 0.9)
    play(lengths, never, 8, 40, rng)
    rested = lengths.cycles[Length(1)]
    assert rested > 0.8 * sum(lengths.cycles.values())
    assert sum(lengths.cycles.values()) - rested > 8  # drafting was tried again in between
    play(lengths, often, 8, 40, rng)
    assert play(lengths, often, 8, 40, rng) > 0.95 * best_rate(cost, often, 8)


def test_kinds_of_requests_are_told_apart(cost):
    lengths, rng = AutoPolicy(OFFERED, cost), np.random.default_rng(3)
    often, never = (accepted(np.full(OFFERED - 1, p), OFFERED, 4000, rng) for p in (0.95, 0.02))
    saw(lengths, WHOLE, {"greedy": often, "sampled": never}, 32)
    assert lengths.choose({"greedy": 8}, 8, 1024.0, all_compiled).length.tokens > 8
    assert lengths.choose({"sampled": 8}, 8, 1024.0, all_compiled).length == Length(1)
    assert lengths.choose({"greedy": 8}, 8, 1024.0, all_compiled).length.tokens > 8


def test_the_same_history_gives_the_same_choice(cost):
    def but_eight(length: Length) -> Status:
        return "pending" if length.tokens == 8 else "compiled"

    def history() -> list[Length]:
        rng, lengths, made = np.random.default_rng(4), AutoPolicy(OFFERED, cost), []
        for chance in np.repeat([0.9, 0.05, 0.6, 0.95], 20):
            made.append(lengths.next(greedy(14) | {14: "sampled"}, 15, 512.0, 7, but_eight).length)
            stood = accepted(np.full(OFFERED - 1, chance), made[-1].tokens, 98, rng)
            saw(lengths, made[-1], {"greedy": stood}, 7)
        return made

    made = history()
    assert made == history()
    assert len(set(made)) > 1
    assert Length(8) not in made


def test_a_length_that_is_hardly_better_does_not_take_over(cost, monkeypatch):
    """Otherwise noise in what stood would have it change with every look."""
    lengths = AutoPolicy(OFFERED, cost)
    for eight, sixteen, chosen in ((1.02, 1.0, 16), (1.04, 1.0, 8), (1.0, 1.02, 8), (1.0, 1.04, 16)):
        rates = {Length(8): eight, WHOLE: sixteen}
        monkeypatch.setattr(lengths, "rates", lambda *_, rates=rates: rates)
        assert lengths.choose({"greedy": 8}, 8, 1024.0, all_compiled).length.tokens == chosen


def test_programs_of_other_lengths_are_asked_for_only_where_the_best_one_is_missing(cost):
    asked: list[Length] = []

    def status(length: Length) -> Status:
        asked.append(length)
        return "missing" if length.tokens == missing else "compiled"

    lengths = AutoPolicy(OFFERED, cost)
    for missing, others in ((0, ()), (1, lengths.candidates(8, 1024.0))):
        saw(lengths, WHOLE, {"greedy": np.zeros(640, int)}, 32)
        asked.clear()
        choice = lengths.choose({"greedy": 8}, 8, 1024.0, status)
        assert choice.wanted == Length(1) == asked[0]
        assert sorted({choice.wanted, *others}) == sorted(asked)
        assert (choice.length.tokens != 1, choice.loss_s > 0) == (missing == 1, missing == 1)


def test_a_cost_asked_for_again_is_the_same(cost):
    fresh = replace(cost)
    for slots, verified, context in itertools.product((1, 3, 8, 200), (1, 4, 16), (10.0, 5000.0)):
        once = fresh.ms(slots, verified, context)
        assert once == fresh.ms(slots, verified, context) == replace(cost).ms(slots, verified, context)
        assert once == cost.modelled(slots, verified, context) * cost._ratio(slots, verified)
    assert fresh == cost


def test_a_program_is_compiled_when_its_lack_has_cost_enough(cost):
    lengths = AutoPolicy(OFFERED, cost)
    saw(lengths, WHOLE, {"greedy": np.zeros(4000, int)}, 4)
    choice = lengths.choose({"greedy": 64}, 64, 1024.0, lambda n: "compiled" if n == WHOLE else "missing")
    assert (choice.length, choice.wanted) == (WHOLE, Length(1))
    lost = cost.ms(64, OFFERED, 1024.0) - cost.ms(64, 1, 1024.0)
    assert choice.loss_s == pytest.approx(lost / 1e3, rel=0.03)
    asked = [lengths.worth_compiling("program", 1.0) for _ in range(12)]
    assert asked == [i == 4 for i in range(12)]


def test_next_is_all_that_the_scheduler_asks(cost):
    """The length, how many cycles of it, and once what is worth compiling; nothing is asked where nothing is chosen."""

    def first_is_missing(length: Length) -> Status:
        return "compiled" if length == WHOLE else "missing"

    def refused(length: Length) -> Status:
        raise AssertionError("nobody chooses")

    for option, length in ((None, OFFERED), (4, 4), (99, OFFERED)):
        fixed = VerifyPolicy(OFFERED, option)
        assert fixed.next(greedy(3), 4, 1024.0, 32, refused) == (Length(length), 32, None)
        assert not fixed.fewer_slots_pay(64, 1, 1024.0, 10**9)
    policy = AutoPolicy(OFFERED, cost)
    assert policy.next(greedy(64), 64, 1024.0, 32, all_compiled).cycles == FIRST_CYCLES
    saw(policy, WHOLE, {"greedy": np.zeros(4000, int)}, 4)
    choice = policy.choose({"greedy": 64}, 64, 1024.0, first_is_missing)
    calls = int(5.0 / (choice.loss_s * 32)) + 1
    found = [policy.next(greedy(64), 64, 1024.0, 32, first_is_missing) for _ in range(calls + 5)]
    assert {(one.length, one.cycles) for one in found} == {(WHOLE, 32)}
    assert [one.compile for one in found] == [Length(1) if i == calls - 1 else None for i in range(calls + 5)]
    saved = (cost.ms(64, OFFERED, 1024.0) - cost.ms(8, OFFERED, 1024.0)) / 1e3
    told = [policy.fewer_slots_pay(64, 8, 1024.0, round(2.0 / saved)) for _ in range(6)]
    assert told == [i == 2 for i in range(6)]


def test_looks_soon_while_little_is_known(cost):
    """Each kind of running requests by itself; where nothing is drafted there is nothing to find out."""
    lengths = AutoPolicy(OFFERED, cost)
    assert [lengths.patience({"greedy": 1}, cycles) for cycles in (3, 32)] == [3, FIRST_CYCLES]
    saw(lengths, WHOLE, {"greedy": np.zeros(FIRST_CYCLES, int)}, FIRST_CYCLES)
    assert lengths.patience({"greedy": 1}, 32) == 32
    assert lengths.patience({"greedy": 1, "sampled": 1}, 32) == FIRST_CYCLES
    lengths.current = Length(1)
    assert lengths.patience({"sampled": 1}, 32) == 32


def test_experts_are_read_once_however_many_rows_take_them():
    """Rows choose by chance: of experts of which each takes a quarter, two read 7 of 16, three 37 of 64."""
    experts = Stack(layers=0, dense=0.0, experts=64.0, share=0.25, products=0.0, kept=0.0)
    read = [experts.seconds(rows, 0.0) * BANDWIDTH for rows in (1, 2, 3)]
    np.testing.assert_allclose(read, [16, 28, 37], rtol=1e-12)


@pytest.mark.parametrize("name", ["4B", "8B"])
def test_costs_grow_with_rows_and_only_lengths_that_save_time_have_programs(name):
    cost = cost_of(name)
    for slots in (1, 2, 8, 24, 32, 64, 128):
        spent = [cost.ms(slots, n, 1024.0) for n in range(1, OFFERED + 1)]
        assert all(b > 0.97 * a for a, b in itertools.pairwise(spent))
        assert cost.ms(slots, OFFERED, 8192.0) > spent[-1]
        found = AutoPolicy(OFFERED, cost).candidates(slots, 1024.0)
        assert found[0] == Length(1)
        assert found[-1] == WHOLE
    assert len(AutoPolicy(OFFERED, cost).candidates(2, 1024.0)) <= 3
    assert len(AutoPolicy(OFFERED, cost).candidates(64, 1024.0)) >= 4


def test_measured_points_are_given_back():
    """In the shapes that were measured, a cycle costs what it cost."""
    pairs = {row["pair"]: row for row in costs.measured()}
    assert "qwen3-4b" in pairs
    for name, row in pairs.items():
        cost = cost_of(name.removeprefix("qwen3-").upper())
        for slots, verified, ms, _ in row["cycles"]:
            assert cost.ms(slots, verified, float(row["context"])) == pytest.approx(ms, rel=1e-3)


@pytest.mark.parametrize("length", [0, -1, 17, True, "most"])
def test_lengths_that_load_refuses(length):
    with pytest.raises(ParameterError, match="verify_length must be"):
        dj.load(verify_length=length)
    with pytest.raises(ParameterError, match="\"auto\" or left out without a drafter; got 'per_request'"):
        choose_verify_length(None, "per_request")


@pytest.mark.few
def test_a_fixed_length_is_kept_and_texts_are_the_same():
    model = dj.load(dtype="float32", max_batch=1, max_model_len=128, verify_length=4)
    params = [
        dj.SamplingParams(max_tokens=40, ignore_eos=True),
        dj.SamplingParams(max_tokens=40, temperature=1.0, seed=5),
    ]
    prompts = ["def main(", "class Stack:\n"]
    cut = dj.generate(model, prompts, params)
    assert max(n for row in cut for n in row.acceptance_lengths) == 4
    assert set(model.engine.verify_policy.cycles) == {Length(4)}
    model.engine.verify_length = None
    assert [row.token_ids for row in dj.generate(model, prompts, params)] == [row.token_ids for row in cut]
