"""A model whose layers' matrices lie in blocks of columns: which ones, where, and that nothing else changes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import ColumnBlocks, in_column_blocks

import dflash_jax as dj
from dflash_jax.attention.dense import dense_attend
from dflash_jax.checkpoints import weights
from dflash_jax.checkpoints.weights import (
    reading_bytes,
    reading_jobs,
    round_weights,
    stored_shapes,
    weight_bytes,
    weight_shapes,
)
from dflash_jax.cli.info import collect
from dflash_jax.engine.cycle_costs import bare_cost
from dflash_jax.execution import switches
from dflash_jax.execution.plan import CallShape, choose, weight_format
from dflash_jax.execution.runner import Planned
from dflash_jax.execution.weight_layout import block_columns, blocks_pay, cycle_rows
from dflash_jax.models import bind, family_named, fuse_context_projection, init_params, layer_traits
from dflash_jax.models.dflash import HEAD_INDEX
from dflash_jax.models.layers import ONE_BY_ONE, linear
from dflash_jax.models.presets import DRAFTERS, MOE_TARGETS, TARGETS

from ..devices import on
from ..models.golden_files import cases, golden
from ..small_pair import small_pair

PAIR = [(TARGETS["Qwen3-4B"], family_named("qwen3")), (DRAFTERS["Qwen3-4B-DFlash-b16"], family_named("dflash"))]
BFLOAT16 = jnp.dtype(jnp.bfloat16)


def test_where_it_pays() -> None:
    target, draft = (config for config, _ in PAIR)
    moe = next(iter(MOE_TARGETS.values()))
    small = dj.load().target
    few, many = cycle_rows(16, draft), cycle_rows(32, draft)
    assert (cycle_rows(32, None), few, many) == (32, 256, 512)
    assert not blocks_pay(target, BFLOAT16, few)  # on a CPU
    with on("NVIDIA H200"):
        assert blocks_pay(target, BFLOAT16, few)
        assert blocks_pay(draft, BFLOAT16, few)
        assert not blocks_pay(target, BFLOAT16, many)
        assert not blocks_pay(target, jnp.dtype(jnp.float32), few)
        assert not blocks_pay(moe, BFLOAT16, few)
        assert not blocks_pay(small, BFLOAT16, few)
    with on("NVIDIA A100-SXM4-80GB"):
        assert not blocks_pay(target, BFLOAT16, few)


def test_largest_cycle_decides() -> None:
    """What is planned: blocks, or rows where the largest cycle has many tokens; without a drafter it has one of each sequence."""
    draft = PAIR[1][0]
    blocked = lambda table: any(isinstance(one, ColumnBlocks) for one in table["target"].values())  # noqa: E731
    with on("NVIDIA H200"):
        for batch, alone, expected in ((16, False, True), (32, False, False), (32, True, True), (512, True, False)):
            rows = cycle_rows(batch, None if alone else draft)
            assert blocked(weight_shapes(PAIR[:1] if alone else PAIR, BFLOAT16, rows=rows)) is expected


def test_which_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the layers but the first one's projection; as many bytes as before, in models that are not in eight bits."""
    stored = stored_shapes(PAIR, BFLOAT16)
    with on("NVIDIA H200"):
        kept, in_bytes = weight_shapes(PAIR, BFLOAT16), weight_shapes(PAIR, BFLOAT16, draft_weight_dtype="fp8")
        monkeypatch.setattr(switches, "COLUMN_BLOCKS", False)
        assert not any(isinstance(one, ColumnBlocks) for one in weight_shapes(PAIR, BFLOAT16)["target"].values())
    for role, layers in (("target", 36), ("draft", 5)):
        blocked = {name for name, one in kept[role].items() if isinstance(one, ColumnBlocks)}
        assert len(blocked) == 4 * layers - 1
        assert {name for name, one in stored[role].items() if len(one.shape) == 2} - blocked == {
            "layers.0.attn.qkv_proj.weight", *({"embed.weight"} if role == "target" else {"fc.weight", "context_kv_proj.weight"})
        }  # fmt: skip
        assert all(
            (kept[role][name].shape, kept[role][name].dtype) == (one.shape, one.dtype)
            for name, one in stored[role].items()
        )
    assert weight_bytes({"": kept["target"]}) == weight_bytes({"": stored["target"]})
    assert reading_bytes(stored, kept) > weight_bytes(stored)
    assert not any(isinstance(one, ColumnBlocks) for one in in_bytes["draft"].values())
    target, draft = (config for config, _ in PAIR)
    of_rows = {
        **stored,
        "draft": stored["draft"] | {k: v for k, v in kept["draft"].items() if k not in stored["draft"]},
    }
    assert bare_cost(target, draft, kept) == bare_cost(target, draft, of_rows)


def test_parameters_are_taken_one_by_one() -> None:
    config, params, *_ = golden(cases("qwen3")[0])
    few = {name: jnp.tile(one, (1, 64)) if one.ndim == 2 else one for name, one in params.items()}
    blocked = block_columns(dict(given := few))
    for name, one in blocked.items():
        array = one.matrix() if isinstance(one, ColumnBlocks) else one
        np.testing.assert_array_equal(np.asarray(array), np.asarray(given[name]))
    assert sum(isinstance(one, ColumnBlocks) for one in blocked.values()) == 4 * config.num_layers - 1
    left = dict(few)
    block_columns(left)
    assert left.keys() == {name for name, one in blocked.items() if not isinstance(one, ColumnBlocks)}


def test_programs_are_there_before_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each shape of blocks and one for the head's index: reading, which calls them, compiles none of them."""
    monkeypatch.setattr(weights, "blocks_pay", lambda config, dtype, rows: True)
    monkeypatch.setattr(weights, "index_pays", lambda head: True)
    target, draft = small_pair(hidden=128, inner=192, vocab=1016)  # sizes that no other test has
    pair = [(target, family_named("qwen3")), (draft, family_named("dflash"))]
    drawn = {family.role: init_params(family.parameters(one), jax.random.key(1), "float32") for one, family in pair}
    drawn["draft"] = fuse_context_projection(draft, drawn["draft"])
    jobs = reading_jobs(weight_shapes(pair, jnp.dtype("float32")))
    assert len(jobs) == 4 + 1
    for job in jobs:
        job()
    compiled: list[str] = []

    def listen(event: str, seconds: float, **_: Any) -> None:
        compiled.extend([event] if "compile" in event else [])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        kept = round_weights(drawn, target, draft, jnp.dtype("float32"))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []
    assert isinstance(kept["draft"]["layers.0.mlp.down_proj.weight"], ColumnBlocks)
    assert HEAD_INDEX in kept["draft"]


def test_a_product() -> None:
    keys = jax.random.split(jax.random.key(0), 2)
    x, weight = jax.random.normal(keys[0], (2, 3, 128)), jax.random.normal(keys[1], (24, 128))
    np.testing.assert_array_equal(np.asarray(linear(x, in_column_blocks(weight))), np.asarray(linear(x, weight)))


@pytest.mark.few("True")
@pytest.mark.parametrize("fused", [False, True])
def test_the_shipped_target(fused: bool) -> None:
    """Layers one by one and, in a cycle, products with what follows them: blocks have no other kernels."""
    model: Any = dj.load(dtype="float32")
    params = dict(model.engine.weights["target"])
    ids = jnp.asarray([[5, 9, 300, 7, 11, 20]])
    positions = jnp.arange(6)[None]
    blocked = block_columns(dict(params))
    chosen = choose(layer_traits(model.target), CallShape(*ids.shape, jnp.dtype(jnp.float32)), weight_format(blocked))
    assert (chosen.runner, chosen.weight_layout) == ("fused_dense", "column_blocks")
    theirs = bind(model.target, params)(ids, positions, dense_attend(), (0,))
    ours = bind(model.target, blocked)(ids, positions, dense_attend(), (0,), Planned(chosen) if fused else ONE_BY_ONE)
    for found, expected in zip(ours[:2], theirs[:2], strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected), atol=1e-5 * float(jnp.abs(expected).max()))


@pytest.mark.few  # of the target alone it is shown above, bit for bit of each product in tests/kernels
def test_texts_are_the_same(monkeypatch: pytest.MonkeyPatch, all_cases: bool) -> None:
    """The shipped pair in float32, greedy and sampled, with and without drafting; `info` and the plan count as many bytes."""
    prompts = ["def test_", "class Matrix:", "The quick brown fox jumps over the lazy dog, and then"]
    greedy = dj.SamplingParams(max_tokens=40, ignore_eos=True)
    laws = greedy, dj.SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.0, seed=3)
    plain = dj.load(max_batch=1, max_model_len=128)
    monkeypatch.setattr(weights, "blocks_pay", lambda config, dtype, rows: rows == 16)
    blocked, facts = dj.load(max_batch=1, max_model_len=128), collect(max_model_len=128)
    assert isinstance(blocked.engine.weights["target"]["layers.0.mlp.down_proj.weight"], ColumnBlocks)
    assert isinstance(blocked.engine.weights["draft"]["layers.0.mlp.down_proj.weight"], ColumnBlocks)
    assert blocked.memory.weights == plain.memory.weights == facts["memory"]["weight_bytes"]
    ways = [(law, draft) for law in laws for draft in (True, False)]
    for law, draft in ways if all_cases else (ways[0], ways[3]):
        before, ours = (dj.generate(one, prompts, law, draft=draft) for one in (plain, blocked))
        assert [one.token_ids for one in ours] == [one.token_ids for one in before]
        assert [one.acceptance_lengths for one in ours] == [one.acceptance_lengths for one in before]
