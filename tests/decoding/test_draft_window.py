"""A drafter that sees the end of a context: which pages those are, and that no text depends on it."""

import inspect
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.decoding.draft_window import columns, last_pages
from dflash_jax.sampling_params import SamplingParams

from ..engine.test_verify_length import cost_of


@pytest.mark.parametrize(("window", "block", "page_size"), [(1, 5, 4), (7, 16, 4), (16, 5, 16), (30, 1, 8)])
def test_pages_hold_the_window_and_the_block(window: int, block: int, page_size: int) -> None:
    lens = np.arange(140 - block)
    table = np.arange(-(-140 // page_size))[None] + 100 * lens[:, None]  # whose page it is, and which
    found, before = (
        np.asarray(x)
        for x in last_pages(jnp.asarray(table), jnp.asarray(lens), window=window, block=block, page_size=page_size)
    )
    assert found.shape[1] == columns(window, block, page_size) < table.shape[1]
    kept = lens - before
    assert ((kept == lens) | (kept >= window)).all()
    assert (kept < window + page_size).all()
    for row, (length, first) in enumerate(zip(lens, before, strict=True)):
        for position in range(first, length + block):
            assert found[row, (position - first) // page_size] == table[row, position // page_size]


def test_a_table_that_is_no_wider_stays() -> None:
    table, lens = jnp.arange(12).reshape(2, 6), jnp.array([90, 3])
    for window in (None, 80):
        found, before = last_pages(table, lens, window=window, block=5, page_size=16)
        assert found is table
        assert before.tolist() == [0, 0]


@pytest.mark.few("params1")
@pytest.mark.parametrize(
    "params", [SamplingParams(max_tokens=60), SamplingParams(max_tokens=60, temperature=1.0, seed=3)]
)
def test_texts_stay_the_targets(make_pair, make_prompts, params: SamplingParams) -> None:
    """Of sequences shorter and longer than the window, whose pages are shared, too."""
    pair = make_pair(draft_window=9)
    prompts = make_prompts((3, 90, 40, 17))
    prompts.append(prompts[1][:70])
    drafted, _, _ = pair.run(prompts, params)
    assert drafted == pair.run(prompts, params, draft=False)[0]


@pytest.mark.few  # random drafters with windows keep the texts
def test_shipped_pair_drafts_with_little_of_a_context() -> None:
    """What lies further back helps it to guess, and less than what is near: a few tokens alone cost it proposals."""
    prompts = [
        "import os\nimport sys\n\n\ndef main(argv):\n    for name in argv:\n        print(name)\n\n\nclass Names:\n"
    ]
    params, gained, texts = dj.SamplingParams(max_tokens=100, ignore_eos=True), {}, []
    model = dj.load(dtype="float32", max_batch=1, max_model_len=256, page_size=8, draft_window=64)
    for window in (None, 64, 1):
        model.engine.draft_window = window
        out = dj.generate(model, prompts, params)[0]
        gained[window] = out.stats.tokens_per_cycle
        texts.append(out.token_ids)
    assert texts[0] == texts[1] == texts[2]
    assert gained[1] < 0.9 * gained[None]
    assert gained[64] > 0.8 * gained[None]


@pytest.mark.parametrize("window", [0, -1, True, "all", 2.5, 2**31])
def test_windows_that_load_refuses(window) -> None:
    with pytest.raises(
        dj.ParameterError, match="draft_window must be an integer from 1 to 2147483647, or None for all, got"
    ):
        inspect.unwrap(dj.load)(draft_window=window)


def test_a_window_needs_a_drafter() -> None:
    with pytest.raises(dj.ParameterError, match="draft_window must be left out without a drafter, got 64"):
        dj.load(draft=False, draft_window=64)


def test_costs_know_the_window() -> None:
    whole = cost_of("4B")
    seen = replace(whole, window=2048)
    assert seen.ms(1, 16, 2048.0) == whole.ms(1, 16, 2048.0)
    assert seen.ms(1, 16, 32768.0) < whole.ms(1, 16, 32768.0)
    assert seen.ms(1, 1, 32768.0) == whole.ms(1, 1, 32768.0)
