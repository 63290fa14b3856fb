"""Drafting changes the speed of a text, never the text."""

import numpy as np
import pytest

from dflash_jax.config import FINAL_HIDDEN
from dflash_jax.sampling_params import SamplingParams

LENGTHS = (3, 40, 17, 90, 1, 64, 16, 15)


def spread_embedding(weights):
    """A drafter that is right now and then: it shares the target's embedding, and its own layers say little."""
    for name in weights["draft"]:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights["draft"][name] = weights["draft"][name] * 0.0


@pytest.mark.few("filtered")
@pytest.mark.parametrize(
    ("batch", "params"),
    [
        (1, SamplingParams(max_tokens=40)),
        (8, SamplingParams(max_tokens=40)),
        (3, SamplingParams(max_tokens=40, temperature=1.0, seed=5)),
        (8, SamplingParams(max_tokens=40, temperature=0.7, top_p=0.8, top_k=20, min_p=0.01, seed=9)),
    ],
    ids=["alone", "greedy", "sampled", "filtered"],
)
def test_same_tokens_with_and_without_drafting(pair, make_prompts, params, batch):
    prompts = make_prompts(LENGTHS[:batch])
    drafted, counts, _ = pair.run(prompts, params)
    plain, ones, _ = pair.run(prompts, params, draft=False)
    assert drafted == plain
    assert all(set(row) == {1} for row in ones)
    for tokens, row in zip(drafted, counts, strict=True):
        assert len(tokens) == 40 == 1 + sum(row)
        assert min(row) >= 1, "a cycle without progress"


def test_alone_equals_in_a_batch(pair, make_prompts):
    prompts = make_prompts(LENGTHS)
    together, _, _ = pair.run(prompts)
    assert together == [pair.run([prompt])[0][0] for prompt in prompts]


@pytest.mark.few
def test_each_request_of_a_batch_has_its_own_parameters(pair, make_prompts):
    """Whatever the others ask for, each has the text that it has alone."""
    prompts = make_prompts((25,)) * 8
    plain = pair.run(prompts[:1])[0][0]
    sampled = {"max_tokens": 30, "temperature": 1.3}
    each = [
        SamplingParams(max_tokens=30), SamplingParams(max_tokens=30, stop_token_ids=[plain[9]]),
        SamplingParams(max_tokens=30, stop_token_ids=[plain[0]], min_tokens=12), SamplingParams(**sampled, seed=3),
        SamplingParams(**sampled, seed=3, top_k=2), SamplingParams(**sampled, seed=3, top_p=0.3),
        SamplingParams(**sampled, seed=3, min_p=0.4), SamplingParams(max_tokens=7, temperature=0.2, seed=8, logprobs=2),
    ]  # fmt: skip
    together = pair.run(prompts, each)[0]
    assert together == [pair.run(prompts[:1], [one])[0][0] for one in each]
    assert len({tuple(tokens) for tokens in together}) == 8, "parameters that change nothing show nothing"


def test_accepting_drafter_speeds_up_and_stays_lossless(make_pair, make_prompts):
    """With proposals that often stand, cycles end at every place of the block."""
    pair = make_pair(edit=spread_embedding)
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=3)
    prompts = make_prompts(LENGTHS)
    drafted, counts, _ = pair.run(prompts, params)
    assert drafted == pair.run(prompts, params, draft=False)[0]
    lengths = np.concatenate(counts)
    assert lengths.mean() > 1.5
    assert {1, 2, 3, 5} <= set(lengths.tolist())


def test_always_wrong_drafter(make_pair, make_prompts, make_config):
    """The drafter proposes only id 0; the target's row for id 0 is zero, so its argmax, which is positive, is never id 0."""

    def edit(weights):
        weights["target"]["lm_head.weight"] = weights["target"]["lm_head.weight"].at[0].set(0)
        weights["draft"]["lm_head.weight"] = weights["draft"]["lm_head.weight"] * 0

    target, draft = make_config
    pair = make_pair(target(tie_embeddings=False), draft(own_head=True), edit=edit)
    prompts = make_prompts(LENGTHS)
    drafted, counts, _ = pair.run(prompts)
    assert drafted == pair.run(prompts, draft=False)[0]
    assert set(np.concatenate(counts).tolist()) == {1}


@pytest.mark.few("argmax")
@pytest.mark.parametrize("proposals", ["argmax", "rejection"])
def test_other_proposals(make_pair, make_prompts, proposals):
    """Argmax proposals keep a seed's text; rejection keeps greedy texts (its sampled law is tested with the acceptors)."""
    pair = make_pair(proposals=proposals)
    prompts = make_prompts(LENGTHS[:4])
    mixed = [SamplingParams(max_tokens=30, temperature=t, seed=1) for t in (0.0, 1.0, 0.0, 0.8)]
    drafted, plain = (pair.run(prompts, mixed, draft=draft)[0] for draft in (True, False))
    kept = range(4) if proposals == "argmax" else (0, 2)
    assert all(drafted[i] == plain[i] for i in kept)


def test_rejection_of_a_seed_is_the_same_alone_and_in_a_batch(make_pair, make_prompts):
    """What stands depends on a request's own noise, cycle by cycle."""
    pair = make_pair(edit=spread_embedding, proposals="rejection")
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3)
    prompts = make_prompts(LENGTHS[:4])
    together, counts, _ = pair.run(prompts, params)
    assert together == [pair.run([prompt], params)[0][0] for prompt in prompts]
    lengths = np.concatenate(counts)
    assert lengths.mean() > 1.5
    assert {1, 2, 3} <= set(lengths.tolist())


@pytest.mark.few
@pytest.mark.parametrize(
    "changes",
    [
        {"target_layer_ids": (FINAL_HIDDEN,)},
        {
            "windows": (4, 7), "num_layers": 2, "causal": (True, False), "sinks": True, "value_scale": 0.6,
            "logit_softcap": 5.0,
        },
        {"sample_from_anchor": True, "own_head": True, "draft_vocab_size": 31},
        {"block_size": 16},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_drafter_variants(pair, make_pair, make_prompts, make_config, changes):
    prompts = make_prompts((9, 33))
    assert make_pair(draft=make_config[1](**changes)).run(prompts)[0] == pair.run(prompts, draft=False)[0]


@pytest.mark.few
def test_sliding_target(make_pair, make_prompts, make_config):
    pair = make_pair(make_config[0](num_layers=3, windows=(None, 6, 20)))
    prompts = make_prompts((9, 33))
    assert pair.run(prompts)[0] == pair.run(prompts, draft=False)[0]


@pytest.mark.few
@pytest.mark.parametrize("page_size", [4, 64])
def test_page_size_does_not_matter(pair, make_pair, make_prompts, page_size):
    prompts = make_prompts((9, 33, 70))
    assert make_pair(page_size=page_size).run(prompts)[0] == pair.run(prompts)[0]


def test_cycles_per_call_do_not_matter(pair, make_prompts):
    prompts = make_prompts((9, 33, 70))
    assert pair.run(prompts, cycles=1)[0] == pair.run(prompts, cycles=32)[0]


def test_chunked_prefill_equals_whole(pair, make_pair, make_prompts):
    prompts = make_prompts((100, 33, 64))
    assert make_pair(max_chunk=16).run(prompts)[0] == pair.run(prompts)[0]
