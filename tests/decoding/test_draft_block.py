"""A cycle's draft is the drafter's own: what its block computes over pages equals one dense pass over the committed text.

Nothing else would notice: with a block at the wrong positions, or with a context that is not all there, texts stay the target's own
and only fewer proposals stand.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.attention.dense import dense_attend
from dflash_jax.decoding.cycle import commit_context, draft_block
from dflash_jax.engine.requests import Request
from dflash_jax.execution.plan import ContextPlan
from dflash_jax.models import bind
from dflash_jax.models.dflash import SHARED_HEAD
from dflash_jax.sampling_params import SamplingParams

WINDOWS = {"num_layers": 2, "windows": (4, 30), "causal": (True, False)}


@pytest.mark.few("sinks")
@pytest.mark.parametrize(
    ("changes", "packed", "window"),
    [
        ({}, False, None), (WINDOWS, True, None),
        ({"sinks": True, "value_scale": 0.6, "sample_from_anchor": True}, False, None), ({}, False, 9),
        (WINDOWS, True, 20), (WINDOWS | {"layer_kind": "laguna", "gating": "per-head"}, False, None),
    ],
    ids=["plain", "windows", "sinks", "the last tokens", "the last tokens, windows", "layers of Laguna"],
)  # fmt: skip
def test_blocks_equal_a_dense_pass(make_pair, make_prompts, make_config, changes, packed, window, monkeypatch) -> None:
    """Three sequences that stand at different places, after cycles that rejected proposals; a fourth slot is idle.

    With `window`, of the context that is left of it; what is not may hold NaN.
    """
    if packed:
        monkeypatch.setattr("dflash_jax.execution.plan._packed_refusal", lambda *_: None)
    pair = make_pair(draft=make_config[1](**changes), goes_ahead=False, draft_window=window)
    engine, prompts = pair.engine, make_prompts((21, 3, 50))
    tokens = [list(prompt) for prompt in prompts]
    run = engine.run(
        [Request(i, tuple(p), SamplingParams(max_tokens=60)) for i, p in enumerate(prompts)], cycles=2, slots=4
    )
    slots: dict[int, int] = {}
    for update in run:
        tokens[update.index] += update.tokens
        slots = {job.request.index: job.slot for job in engine.scheduler.batch.slots.decoding}
        lens = np.asarray(engine.scheduler.batch.state.seq_lens)
        # All updates of the call have come, and at least three cycles are behind everybody.
        if len(slots) == 3 and all(
            len(tokens[i]) == lens[slot] + 1 >= len(prompts[i]) + 4 for i, slot in slots.items()
        ):
            break
    assert len(slots) == 3, "no sequence may have ended: the test shows nothing"
    batch = engine.scheduler.batch
    assert (np.asarray(batch.state.fresh)[list(slots.values())] < pair.draft.block_size).any(), "nothing was rejected"

    @jax.jit
    def over_pages(weights, state, table):
        target, drafter = bind(pair.target, weights["target"]), bind(pair.draft, weights["draft"])
        pages = commit_context(drafter, state, table, ContextPlan("packed" if packed else "apart"))
        pages_before = (
            0 * state.seq_lens if window is None else jnp.maximum(state.seq_lens - window, 0) // engine.page_size
        )
        unseen = jnp.arange(table.shape[1]) < pages_before[:, None]
        unseen = jnp.where(unseen & ~state.done[:, None], table, engine.num_pages)
        k, v = ([pool.at[unseen].set(jnp.nan, mode="drop") for pool in pools] for pools in (pages.k, pages.v))
        pages = dataclasses.replace(pages, k=tuple(k), v=tuple(v))
        return draft_block(drafter, target, pages, table, state, window=window)[0]

    @jax.jit
    def dense(weights, ids, pending):
        target, drafter = bind(pair.target, weights["target"]), bind(pair.draft, weights["draft"])
        positions, length = jnp.arange(ids.shape[1])[None], ids.shape[1]
        _, features, _ = target(ids, positions, dense_attend(), pair.draft.target_layer_ids)
        first = 0 if window is None else max(length - window, 0) // engine.page_size * engine.page_size
        keys, values = (x[:, :, first:] for x in drafter.context_kv(drafter.context(features), positions))
        block = drafter.block_embeddings(pending, target.embed.weight[...])
        return drafter(block, length + jnp.arange(pair.draft.block_size)[None], dense_attend(context=(keys, values)))[0]

    hidden = np.asarray(over_pages(engine.weights, batch.state, jnp.asarray(batch.slots.tables[0])))
    for index, slot in slots.items():
        ids, pending = jnp.array([tokens[index][:-1]]), jnp.array(tokens[index][-1:])
        true = dense(engine.weights, ids, pending)[0]
        np.testing.assert_allclose(hidden[slot], true, rtol=0, atol=2e-4 * float(jnp.abs(true).max()))
    run.close()
    pair.assert_free()


@pytest.mark.few("0.8-None")
@pytest.mark.parametrize(("temperature", "length"), [(0.0, None), (0.0, 3), (0.8, None)])
def test_proposals_are_those_of_the_drafters_copy_of_the_head(make_pair, temperature, length):
    """One that knows two tokens alone: whatever stands was among them."""

    def edit(weights):
        weights["draft"][SHARED_HEAD] = jnp.zeros_like(weights["target"]["embed.weight"]).at[7].set(1.0)

    pair = make_pair(edit=edit, imposed_acceptance=4.5, proposals="argmax", verify_length=length)
    params, drafted = SamplingParams(max_tokens=40, ignore_eos=True, temperature=temperature, seed=1), []
    for update in pair.engine.run([Request(0, (1, 2, 3), params)]):
        drafted += [token for token, ours in zip(update.tokens, update.from_draft, strict=True) if ours]
    assert len(drafted) > 20
    assert set(drafted) <= {0, 7}
