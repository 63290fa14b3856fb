"""Whatever happens around a request, its text is the one it has alone."""

import itertools
import json
import os
import random
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.engine import STOP_WIDTH, Engine
from dflash_jax.engine.verify_auto import AutoPolicy, Choice
from dflash_jax.engine.verify_policy import Length
from dflash_jax.engine.warmup import Jobs

from ..hybrid_pair import hybrid_config, hybrid_pair
from .schedules import Text, make_texts, play

PROMPTS = 12


@pytest.fixture(scope="module")
def engine(make_pair) -> Engine:
    """With what moves sequences into other numbers of slots, which is never waited for, at hand, and prompts in small pieces."""
    engine = make_pair(page_size=4, max_model_len=72, max_chunk=24, num_pages=64).engine
    engine.buckets = replace(engine.buckets, pieces=(2, 12), piece=2)
    jobs = Jobs(engine, engine.setup(mode="sampled", draft=True), STOP_WIDTH)
    for old, new in itertools.permutations(engine.buckets.batch, 2):
        jobs.resize(old, new)()
    return engine


@pytest.fixture(scope="module")
def texts(engine, make_prompts) -> list[Text]:
    """Prompts of 1 to 40 tokens; most begin like another one, for any number of tokens."""
    rng, stems = random.Random(3), make_prompts((40, 40))
    prompts = []
    for i in range(PROMPTS):
        stem = stems[i % 2][: rng.randint(0, 36)]
        prompts.append(stem + make_prompts((rng.randint(1, 40 - len(stem)),), seed=i)[0])
    return make_texts(engine, prompts, tokens=32)


def test_random_schedules(engine, texts, all_cases):
    """`SCHEDULES` of them. In every other one, another number of tokens is verified whenever somebody looks. Batches that empty
    move."""
    # One token alone is verified in a hybrid pair's schedules too.
    lengths = ((None,), (None, 1, 3) if all_cases else (None, 3))
    count = int(os.environ.get("SCHEDULES", 80 if all_cases else 8))
    outcomes = [play(engine, texts, seed, interrupt=seed % 4 == 3, lengths=lengths[seed % 2]) for seed in range(count)]
    happened = np.sum([astuple(outcome) for outcome in outcomes], axis=0)
    least = np.array((50, 500, 50, 25, 50, 0, 25, 0)) * count // 200
    assert all(happened >= least), f"too little happened to show anything: {happened}"


def test_random_schedules_with_calls_ahead(engine, texts, all_cases):
    """Where the next cycles run already while somebody cancels, ends or interrupts, and while the pool is full. Of every two, one
    reads pages once that requests share."""
    count = 80 if all_cases else 16
    outcomes = [
        play(engine, texts, seed, interrupt=seed % 4 == 3, ahead=True, cascade=True if seed % 4 > 1 else None)
        for seed in range(count)
    ]
    happened = np.sum([astuple(outcome) for outcome in outcomes], axis=0)
    assert all(happened >= np.array((8, 200, 30, 10, 8, 150, 10, 30)) * count // 80), (
        f"too little happened to show anything: {happened}"
    )


@pytest.mark.few
def test_random_schedules_where_requests_share_rows(engine, texts, monkeypatch):
    """Two tokens of each slot are verified on average: whoever ends or is cancelled leaves its rows to the others."""
    monkeypatch.setattr(AutoPolicy, "choose", lambda *_: Choice(*2 * [Length(2, shared=True)]))
    monkeypatch.setattr(AutoPolicy, "shares", lambda policy, slots: True)
    outcomes = [
        play(
            engine,
            texts,
            seed,
            interrupt=seed % 8 == 7,
            lengths=("per_request", None),
            ahead=seed % 2 == 1,
            cascade=True if seed > 9 else None,
        )
        for seed in range(12)
    ]
    happened = np.sum([astuple(outcome) for outcome in outcomes], axis=0)
    assert all(happened >= (1, 20, 3, 1, 2, 10, 1, 2)), f"too little happened to show anything: {happened}"


@pytest.fixture(scope="module")
def hybrid(make_prompts) -> tuple[Engine, list[Text]]:
    """A target with recurrent states and fewer snapshots of them than prompts, and texts that begin alike."""
    target = hybrid_config(num_layers=2, windows=(None,) * 2, full_layers=(1,))
    engine = hybrid_pair(
        target, page_size=4, max_model_len=72, max_chunk=24, num_pages=64, draft={"target_layer_ids": (-1, 0, 1)},
        state_snapshots=5, snapshot_tokens=4,
    ).engine  # fmt: skip
    engine.buckets = replace(engine.buckets, pieces=(2, 12), piece=2)
    stem = make_prompts((36,))[0]
    ends = make_prompts((3, 9, 1, 14, 5, 20), seed=1)
    prompts = [stem[:length] + end for length, end in zip((30, 17, 36, 24, 8, 0), ends, strict=True)]
    return engine, make_texts(engine, prompts, tokens=32)


@pytest.mark.few("in_turn")
@pytest.mark.parametrize("ahead", [False, True], ids=["in_turn", "ahead"])
def test_random_schedules_of_a_hybrid_pair(hybrid, ahead, all_cases):
    """States are restored, kept, moved and given up while others cancel and interrupt. `HYBRID_SCHEDULES` of them."""
    engine, texts = hybrid
    count = int(os.environ.get("HYBRID_SCHEDULES", 6 if all_cases else 2))
    outcomes = [
        play(engine, texts, seed, interrupt=seed % 4 == 3, lengths=(None, 1) if seed % 2 else (None,), ahead=ahead)
        for seed in range(count)
    ]
    happened = np.sum([astuple(outcome) for outcome in outcomes], axis=0)
    assert happened[1] >= 2 * count, f"too few pages were found: {happened}"
    assert happened[0] >= count // 10, f"nobody lost pages: {happened}"
    engine.snapshots.check_integrity()


@pytest.mark.few  # of random pairs they run
def test_random_schedules_of_the_shipped_pair():
    model = dj.load(dtype="float32", max_batch=4, max_model_len=128, page_size=8)
    engine = replace(model.engine, max_chunk=32)
    rows = json.loads((Path(__file__).parent.parent / "data" / "heldout_prompts.json").read_text())
    prompts = [model.tokenizer.encode(row["text"])[:length] for row, length in zip(rows, (64, 9, 40, 31), strict=False)]
    texts = make_texts(engine, [*prompts, prompts[0][:50], prompts[0][:33] + prompts[1]], tokens=48)
    outcomes = [play(engine, texts, seed, interrupt=seed % 8 == 7) for seed in range(2, 8)]
    happened = np.sum([astuple(outcome) for outcome in outcomes], axis=0)
    assert all(happened >= (1, 10, 1, 1, 0, 0, 0, 0)), f"too little happened to show anything: {happened}"


@pytest.mark.few
def test_shared_pages_leave_acceptance_as_it_is(monkeypatch):
    """A drafter sees the same context whether a prompt's beginning was prefilled or found, and whoever had left it there."""
    model = dj.load(dtype="float32", max_batch=4, max_model_len=256, page_size=8, num_pages=400)
    rows = json.loads((Path(__file__).parent.parent / "data" / "heldout_prompts.json").read_text())[:8]
    params = dj.SamplingParams(max_tokens=64, ignore_eos=True)
    lengths = [replace(params, max_tokens=40 + i) for i in range(len(rows))]  # last pages filled up to every row
    first = dj.generate(model, [row["text"] for row in rows], lengths)
    longer = [out.prompt_token_ids + out.token_ids for out in first]
    taken, find = [], model.engine.allocator.find

    def counted(keys):
        pages = find(keys)
        taken.append(len(pages))
        return pages

    monkeypatch.setattr(model.engine.allocator, "find", counted)
    found = dj.generate(model, longer, params)
    # The pending token and those of the last cycle, at most 16, are not in both models' pages yet.
    assert all(8 * (pages + 1) + 17 > len(tokens) for pages, tokens in zip(taken, longer, strict=True))
    alone = replace(model, engine=replace(model.engine, share_prefixes=False))
    again = dj.generate(alone, longer, params)
    assert alone.engine.allocator.num_published == 0
    assert [out.token_ids for out in found] == [out.token_ids for out in again]
    assert [out.acceptance_lengths for out in found] == [out.acceptance_lengths for out in again]
    assert np.concatenate([out.acceptance_lengths for out in found]).mean() > 4
