"""Pieces of prompts beside a cycle in one program: what each kind of rows becomes is what programs of their own make of it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decoding.loop import loop
from dflash_jax.decoding.prefill import Caches, prefill_chunk
from dflash_jax.engine.cycle_costs import Stack
from dflash_jax.engine.mixing import MixingPolicy, mixing_refusal
from dflash_jax.engine.resources import Resources
from dflash_jax.models.heads import SelectorConfig
from dflash_jax.models.presets import SPARSE_TARGETS, TARGETS
from dflash_jax.models.qwen3_moe import Qwen3MoeConfig
from dflash_jax.sampling_params import SamplingParams

from ..decoding import test_mla_lossless
from ..hybrid_pair import hybrid_config
from ..random_pair import VOCAB, Pair, draft_config, random_prompts, target_config

SIZES: Any = {"vocab_size": VOCAB, "hidden_size": 40, "intermediate_size": 64, "num_layers": 2, "windows": (None,) * 2}
EXPERTS: Any = {"num_experts": 4, "experts_per_token": 2, "moe_intermediate_size": 16, "norm_routing_weights": True}
OPTIONS: Any = {"page_size": 4, "max_model_len": 120, "max_chunk": 24, "num_pages": 200}
PROMPTS = random_prompts((33, 1, 9, 40, 20, 17, 30), seed=5)
LENGTHS = (24, 20, 9, 24, 15, 24, 18)


def latents() -> Pair:
    pair = object.__new__(Pair)
    pair.target, pair.draft = test_mla_lossless.TARGET, test_mla_lossless.DRAFT
    pair.engine = test_mla_lossless.make_engine(**OPTIONS)
    return pair


PAIRS: dict[str, Callable[[], Pair]] = {
    "heads": lambda: Pair(**OPTIONS),
    "windows": lambda: Pair(target_config(windows=(20, None)), **OPTIONS),
    "experts": lambda: Pair(Qwen3MoeConfig(**SIZES, **EXPERTS, num_heads=4, num_kv_heads=2, head_dim=16), **OPTIONS),
    "latents": latents,
    "DFlash 2": lambda: Pair(
        None, draft_config(head=SelectorConfig(rank=6, top_k=5), conv_taps=2, conv_group=8), **OPTIONS
    ),
}


def make(kind: str) -> Pair:
    """A pair whose pieces ride wherever they can, few of them at a time."""
    pair = PAIRS[kind]()
    pair.engine.buckets = replace(pair.engine.buckets, pieces=(2, 4, 12), piece=2)
    return pair


def texts(pair: Pair, params: list[SamplingParams], **options: Any) -> list[list[int]]:
    for pool in pair.engine.groups:
        pool.allocator.forget()
    return pair.run(PROMPTS, params, **options)[0]


def poison(engine: Resources) -> None:
    """No number in any page: whoever reads what nobody wrote gives none."""
    engine.take_pools()
    engine.keep_pools(*(jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), each) for each in engine.take_pools()))


@pytest.mark.parametrize(
    ("kind", "law"),
    [(kind, {}) for kind in PAIRS] + [("heads", {"temperature": 0.9, "top_p": 0.9}), ("latents", {"logit_bias": {3: 4.0}})],
)  # fmt: skip
@pytest.mark.few("windows-law1", "latents-law6")
def test_texts(kind: str, law: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With drafting and without, of verified blocks of every length, with calls ahead and without."""
    pair, called = make(kind), []
    engine = pair.engine
    params = [SamplingParams(max_tokens=count, seed=3, **law) for count in LENGTHS]
    alone, drafted = texts(pair, params, draft=False), texts(pair, params)
    assert drafted == alone
    call = engine.programs.call
    monkeypatch.setattr(engine.programs, "call", lambda *args: called.append(args[0].__name__) or call(*args))
    engine.mixed = True
    for length, ahead, draft in ((None, False, True), (3, True, True), (1, False, True), (None, True, False)):
        engine.verify_length, engine.goes_ahead = length, ahead
        poison(engine)
        called.clear()
        assert texts(pair, params, draft=draft) == alone
        assert called.count("mixed_cycle") > 5


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.few("heads", "latents")
def test_one_program_does_what_two_do(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, states, first logits, and both models' pages of every call."""
    pair, seen = make(kind), []
    engine, call = pair.engine, pair.engine.programs.call

    def compared(function: Any, static: Any, donate: Any, *args: Any) -> Any:
        if function.__name__ != "mixed_cycle" or len(seen) > 6:
            return call(function, static, donate, *args)
        weights, table, state, retired, pieces, ids, starts, lengths = jax.tree.map(jnp.copy, args)
        setup, slots = static[0], jnp.full((len(ids),), len(retired), jnp.int32)
        alone = loop(setup, 1, weights, table, state, jnp.int32(1), jnp.bool_(False), retired)
        cycled, emitted = jax.tree.map(np.asarray, alone)
        caches = Caches(*(jax.tree.map(jnp.asarray, each) for each in (cycled.target_pages, cycled.draft_pages)))
        caches, logits = prefill_chunk(setup.for_prefill(), weights, pieces, caches, ids, starts, lengths, slots)
        expected = replace(cycled, target_pages=caches.target, draft_pages=caches.draft), emitted, logits
        found = call(function, static, donate, *args)
        for ours, theirs in zip(*(jax.tree.leaves(each) for each in (found, expected)), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-4)
        seen.append(np.count_nonzero(lengths))
        return found

    monkeypatch.setattr(engine.programs, "call", compared)
    engine.mixed = True
    texts(pair, [SamplingParams(max_tokens=count) for count in LENGTHS])
    assert len(seen) > 5
    assert min(seen) > 0


def test_when_it_pays() -> None:
    """Of Qwen3-4B: cycles of few rows wait for weights, those of many do not."""
    stack = Stack(36, 7.3e9, 0.0, 0.0, 7.3e9, 0.0)
    policy = MixingPolicy(stack)
    assert policy.saved_s(128, 256) > 0.0003
    assert policy.saved_s(8, 256) > policy.saved_s(128, 256)
    assert policy.saved_s(1024, 256) == policy.saved_s(512, 256) == 0.0


def test_who_never_mixes() -> None:
    can = TARGETS["Qwen3-4B"]
    assert mixing_refusal(can, exact=False, ranks=1) is None
    assert "no other row" in str(mixing_refusal(can, exact=True, ranks=1))
    assert "devices" in str(mixing_refusal(can, exact=False, ranks=2))
    assert "outside of attention" in str(mixing_refusal(hybrid_config(), exact=False, ranks=1))
    assert "indexer" in str(mixing_refusal(next(iter(SPARSE_TARGETS.values())), exact=False, ranks=1))


def test_only_where_it_is_asked_for_or_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU nothing rides; on a GPU programs are made when their lack has cost enough."""
    pair = make("heads")
    engine, made = pair.engine, []
    assert engine.mixing is None
    engine.mixed = True
    assert engine.mixing is not None
    engine.mixed = None
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    policy = engine.mixing
    monkeypatch.undo()
    assert policy is not None
    monkeypatch.setattr(Resources, "mixing", policy)
    monkeypatch.setattr(MixingPolicy, "saved_s", lambda *_: 1.0)
    monkeypatch.setattr("dflash_jax.engine.scheduler.start_compiling", lambda jobs: made.extend(jobs))
    params = [SamplingParams(max_tokens=count) for count in LENGTHS]
    expected = texts(pair, params)
    assert made
    assert all(job.args[0].__name__ == "mixed_cycle" for job in made)
    for job in made:
        job()
    called, call = [], engine.programs.call
    monkeypatch.setattr(engine.programs, "call", lambda *args: called.append(args[0].__name__) or call(*args))
    assert texts(pair, params) == expected
    assert "mixed_cycle" in called
