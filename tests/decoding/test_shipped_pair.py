"""The pair that ships, on prompts from files it was never trained on, through the functions a user calls."""

import inspect
import itertools
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from jaxtyping import TypeCheckError

import dflash_jax as dj
from dflash_jax.generation import params_of_prompts

PROMPTS = Path(__file__).parent.parent / "data" / "heldout_prompts.json"
TOKENS = 64


@pytest.fixture(scope="module")
def model(all_cases: bool) -> dj.Model:
    return dj.load(dtype="float32", max_batch=8 if all_cases else 4, max_model_len=256)


@pytest.fixture(scope="module")
def prompts(all_cases: bool) -> list[str]:
    texts = [row["text"] for row in json.loads(PROMPTS.read_text())]
    assert len(texts) == 100
    return texts[: int(os.environ.get("SHIPPED_TEXTS", 24 if all_cases else 8))]


def ragged(prompts: list[str], most: int):
    """The prompts in batches of 1, 3, 8, 6, 1, 3, ..., or 1, 3, 4, 2: an engine has programs for 1, 4 and 8."""
    rest = iter(prompts)
    for size in itertools.cycle((1, 3, 8, 6) if most == 8 else (1, 3, 4, 2)):
        batch = list(itertools.islice(rest, size))
        if not batch:
            return
        yield batch


def test_greedy_text_is_the_targets_own(model, prompts):
    """`SHIPPED_TEXTS` prompts x 64 tokens, float32: ragged batches with drafting = without, and every fourth alone."""
    params = dj.SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    plain = [row.token_ids for row in dj.generate(model, prompts, params, draft=False)]
    alone = [dj.generate(model, prompt, params) for prompt in prompts[::4]]
    batched = [
        row.token_ids for batch in ragged(prompts, model.engine.max_batch) for row in dj.generate(model, batch, params)
    ]
    assert [row.token_ids for row in alone] == plain[::4]
    assert batched == plain
    assert all(len(tokens) == TOKENS for tokens in plain)
    lengths = np.concatenate([row.acceptance_lengths for row in alone])
    assert lengths.mean() > 4, "the drafter no longer follows its target"
    shares = model.acceptance_by_position
    assert len(shares) == model.draft.num_drafts
    assert 0.6 < shares[0] < 1
    assert shares[0] > shares[3] > shares[-1]
    assert model.engine.allocator.num_free == model.engine.num_pages


@pytest.mark.parametrize(
    ("params", "came"), [({"max_tokens": 4}, "dict"), (["greedy"], "1, among them str"), (5, "int"), ([], "0")]
)
def test_bad_params_are_named_errors(params, came):
    checked = inspect.unwrap(params_of_prompts)  # the test run checks annotations first
    with pytest.raises(dj.ParameterError, match=f"one for each of 1 prompts, got {came}$"):
        checked(params, 1)


@pytest.mark.few
def test_sampled_text_is_the_seeds_own(model, prompts):
    params = [dj.SamplingParams(max_tokens=64, temperature=1.0, top_p=0.95, seed=i, ignore_eos=True) for i in range(8)]
    drafted, plain = (dj.generate(model, prompts[:8], params, draft=draft) for draft in (True, False))
    assert [row.text for row in drafted] == [row.text for row in plain]
    assert np.concatenate([row.acceptance_lengths for row in drafted]).mean() > 1.3


@pytest.mark.few
def test_more_of_the_drafters_own_samples_stand_than_of_shared_noise(model, prompts):
    params = [dj.SamplingParams(max_tokens=64, temperature=1.0, seed=i, ignore_eos=True) for i in range(len(prompts))]
    drawing = dj.load(dtype="float32", max_batch=model.engine.max_batch, max_model_len=256, proposals="rejection")
    gained = [
        np.concatenate([row.acceptance_lengths for row in dj.generate(one, prompts, params)]).mean()
        for one in (drawing, model)
    ]
    assert gained[0] > gained[1] + 0.3


def test_stream_is_generate_in_pieces(model, prompts):
    params = dj.SamplingParams(max_tokens=80, stop=("\n\n\n", "return None"))
    whole = dj.generate(model, prompts[:5], params)
    pieces = {i: [] for i in range(5)}
    for piece in dj.stream(model, prompts[:5], params, cycles=1):
        pieces[piece.index].append(piece)
    for expected, got in zip(whole, pieces.values(), strict=True):
        assert "".join(piece.text for piece in got) == expected.text
        assert [token for piece in got for token in piece.token_ids] == expected.token_ids
        assert [piece.finish_reason for piece in got[:-1]] == [None] * (len(got) - 1)
        assert got[-1].finish_reason == expected.finish_reason
        assert got[-1].completion.text == expected.text
        # Also where a stop string ends the text in the first of many cycles that the device ran at once.
        counts = got[-1].completion.acceptance_lengths
        assert [n for piece in got for n in piece.accepted] == counts == expected.acceptance_lengths
        assert all(stop not in expected.text for stop in params.stop)


def test_completion_tells_what_happened(model, prompts):
    params = dj.SamplingParams(max_tokens=50, logprobs=2, ignore_eos=True)
    started = time.perf_counter()
    out = dj.generate(model, prompts[0], params)
    spent = time.perf_counter() - started
    assert len(out.token_ids) == 50 == 1 + sum(out.acceptance_lengths) == len(out.from_draft) == len(out.logprobs)
    assert out.finish_reason == "length"
    assert out.text == model.tokenizer.decode(out.token_ids)
    # Each cycle ends with a token of the target's own, but the last one where max_tokens cut it among its proposals.
    assert sum(out.from_draft) == 50 - 1 - len(out.acceptance_lengths) + out.from_draft[-1]
    assert all(row.logprob == pytest.approx(row.top[0][1]) for row in out.logprobs), "greedy takes the most probable"
    stats = out.stats
    assert stats.target_steps == len(out.acceptance_lengths)
    assert stats.tokens_per_cycle == pytest.approx(np.mean(out.acceptance_lengths))
    assert 0 < stats.prefill_s <= stats.time_to_first_token_s < spent
    assert stats.tokens_per_s == pytest.approx(49 / stats.decode_s)


@pytest.mark.few
def test_one_in_one_out_list_in_list_out(model, prompts):
    params = dj.SamplingParams(max_tokens=4)
    one = dj.generate(model, prompts[0], params)
    assert isinstance(one, dj.Completion)
    listed = dj.generate(model, [prompts[0]], params)
    assert [row.token_ids for row in listed] == [one.token_ids]
    ids = one.prompt_token_ids
    assert dj.generate(model, ids, params).token_ids == one.token_ids
    assert dj.generate(model, np.array(ids).tolist(), params).token_ids == one.token_ids
    mixed = dj.generate(model, [prompts[1], ids], [params, dj.SamplingParams(max_tokens=2)])
    assert [len(row.token_ids) for row in mixed] == [4, 2]
    assert dj.generate(model, [], params) == []


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ("", None, dj.PromptError),
        ([[]], None, dj.PromptError),
        (7, None, dj.PromptError),
        ({"role": "user"}, None, dj.PromptError),
        ([{"role": "user", "content": "hi"}], None, dj.PromptError),
        ("x" * 4000, None, dj.CapacityError),
        ("x", dj.SamplingParams(max_tokens=10_000), dj.CapacityError),
        (["x", "y"], [dj.SamplingParams()], dj.ParameterError),
        (b"x", None, dj.PromptError),
        ([b"x", "y"], None, dj.PromptError),
    ],
)
def test_bad_prompts_are_named_errors(model, prompt, params, error):
    with pytest.raises((error, TypeCheckError)):  # the test run checks annotations first
        dj.generate(model, prompt, params)
    with pytest.raises(error):
        inspect.unwrap(dj.generate)(model, prompt, params)
    with pytest.raises((error, TypeCheckError)):
        dj.stream(model, prompt, params)
    assert model.engine.allocator.num_free == model.engine.num_pages
