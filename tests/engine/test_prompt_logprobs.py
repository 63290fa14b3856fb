"""Scores of prompts: those of a pass without pages, whatever pages hold, however a prompt is cut, beside requests without."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.attention.dense import dense_attend
from dflash_jax.decoding import prefill
from dflash_jax.engine.requests import Request
from dflash_jax.models.registry import bind
from dflash_jax.sampling_params import SamplingParams

SCORED = SamplingParams(max_tokens=3, prompt_logprobs=4)


def test_prompts_are_scored_as_by_a_pass_over_them(
    make_pair: Any, make_prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two calls for the longer one, of logits in three parts each; its pages are there when it comes again."""
    monkeypatch.setattr(prefill, "SCORED_AT_ONCE", 7)
    pair = make_pair(max_batch=2, max_model_len=64, max_chunk=20)
    (long, short), none = make_prompts((37, 5)), SamplingParams(max_tokens=3, prompt_logprobs=0)
    alone, _, _ = pair.run([long, short], SamplingParams(max_tokens=3))
    updates = [first_updates(pair, prompts, SCORED) for prompts in ([long, short], [long, short])]
    ids = np.zeros((2, 64), np.int32)
    for row, prompt in enumerate((long, short)):
        ids[row, : len(prompt)] = prompt

    @jax.jit
    def laws(weights: Any, ids: jax.Array) -> jax.Array:
        target = bind(pair.target, weights["target"])
        hidden, _, _ = target(ids, jnp.broadcast_to(jnp.arange(64), ids.shape), dense_attend(), ())
        return jax.nn.log_softmax(target.logits(hidden), axis=-1)

    law = np.asarray(laws(pair.engine.weights, ids))
    for found in updates:
        for row, prompt in enumerate((long, short)):
            update = found[row]
            assert (len(update.prompt_logprobs), update.tokens[0], update.cached) == (len(prompt) - 1, alone[row][0], 0)
            for place, (logprob, top) in enumerate(update.prompt_logprobs):
                expected = law[row, place]
                assert logprob == pytest.approx(expected[prompt[place + 1]], abs=1e-4)
                np.testing.assert_allclose([one for _, one in top], np.sort(expected)[::-1][:4], atol=1e-4)
                assert (max(one for _, one in top) == logprob) == (top[0][0] == prompt[place + 1])
    # Beside one that finds pages, and with no token at all.
    params = [SamplingParams(max_tokens=3), SamplingParams(max_tokens=0, prompt_logprobs=0)]
    tokens, _, last = pair.run([long, short], params)
    assert tokens == [alone[0], []]
    assert last[1].finish_reason == "length"
    assert [top for _, top in last[1].prompt_logprobs] == [[]] * 4
    assert pair.run([[7]], none)[2][0].prompt_logprobs == []


def first_updates(pair: Any, prompts: list[list[int]], params: SamplingParams) -> dict[int, Any]:
    asks = [Request(i, tuple(prompt), params) for i, prompt in enumerate(prompts)]
    return {update.index: update for update in pair.engine.run(asks) if update.first}
