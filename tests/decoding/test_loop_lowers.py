"""The decode loop lowers for GPUs that are not here, with the attention kernel of each, and where 64 bits are enabled."""

import re
from dataclasses import replace
from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.attention.paged import PagedAttend
from dflash_jax.checkpoints.weights import weight_shapes
from dflash_jax.decoding import prefill
from dflash_jax.decoding.loop import loop, loop_options
from dflash_jax.decoding.prefill import Caches, admit, prefill_chunk
from dflash_jax.decoding.sampling import Mode, noise_at
from dflash_jax.decoding.state import Proposals
from dflash_jax.engine import MAX_CYCLES, STOP_WIDTH, Engine
from dflash_jax.engine.requests import Request, empty_state, request_rows
from dflash_jax.engine.warmup import Jobs
from dflash_jax.execution import switches
from dflash_jax.models import family_for, family_named
from dflash_jax.models.presets import SPARSE_TARGETS
from dflash_jax.sampling_params import SamplingParams

from ..devices import on
from ..hybrid_pair import chosen_config, kimi_config, pooled_config, relative_config
from ..kernels.test_cross_lowering import CALLS, HAS_JAX_TRITON
from ..random_pair import draft_config, target_config


@pytest.mark.few("NVIDIA A100*True-None", "NVIDIA H200-True-9")
@pytest.mark.parametrize(("draft", "window"), [(True, None), (True, 9), (False, None)])
@pytest.mark.parametrize("kind", CALLS)
def test_loop_lowers(make_pair, kind, draft, window):
    heads = {"num_heads": 4, "head_dim": 64}
    kept = {"dtype": jnp.dtype(jnp.bfloat16), "draft_window": window}
    pair = make_pair(target_config(**heads), draft_config(**heads), **kept)
    engine = pair.engine
    engine.weights = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), engine.weights)
    setup = engine.setup(mode="greedy", draft=draft)
    state = empty_state(setup, 2, STOP_WIDTH, engine.dtype, engine.take_pools())
    call = (engine.weights, jnp.zeros((2, 4), jnp.int32), state, jnp.int32(4), jnp.bool_(False), jnp.zeros(2, bool))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), call)
    with on(kind):
        # A program is made ready before its arrays are there: what XLA is told follows from shapes alone.
        assert loop_options(setup, MAX_CYCLES, *shapes) == loop_options(setup, MAX_CYCLES, *call)
        traced = jax.jit(loop, static_argnums=(0, 1)).trace(setup, MAX_CYCLES, *shapes)
        calls = re.findall(r"custom_call @(\w+)", traced.lower(lowering_platforms=("cuda",)).as_text())
    assert set(calls) == ({CALLS[kind]} if HAS_JAX_TRITON or kind == "NVIDIA H200" else set())


@pytest.mark.few("groups")
@pytest.mark.parametrize("form", ["group", "groups"])
def test_a_loop_that_reads_shared_pages_once_stays_one_graph(form):
    """No branch and no sort, which a CUDA graph lacks, though who shares what is found out in the program."""
    target = target_config(num_layers=1, windows=(None,), num_heads=4, head_dim=64)
    weights = weight_shapes([(target, family_named("qwen3"))], jnp.dtype(jnp.bfloat16))
    engine = Engine(target, None, weights, jnp.dtype(jnp.bfloat16), max_model_len=512)
    job = Jobs(engine, engine.setup(mode="greedy", draft=False), STOP_WIDTH).loop(4, 8, shared=form)
    function, static, _, *call = job.args
    with on("NVIDIA H200"):
        text = jax.jit(partial(function, *static)).trace(*call).lower(lowering_platforms=("cuda",)).as_text()
    assert not re.search(r"(stablehlo|chlo|mhlo)\.(case|if|sort)", text)
    assert text.count("custom_call @mosaic_gpu_v2") >= 2


@pytest.mark.few("True")
@pytest.mark.parametrize("sampling", [False, True])
def test_a_loop_with_grammars_as_tables_stays_one_graph(sampling):
    """No branch and no sort, which a CUDA graph lacks, and nobody asks the host."""
    target = target_config(num_layers=1, windows=(None,), num_heads=4, head_dim=64)
    weights = weight_shapes([(target, family_named("qwen3"))], jnp.dtype(jnp.bfloat16))
    engine = Engine(target, None, weights, jnp.dtype(jnp.bfloat16), max_model_len=512)
    setup = engine.setup(mode="regular", draft=False, sampling=sampling)
    jobs = Jobs(engine, setup, STOP_WIDTH)
    for job in (jobs.loop(4, 8), jobs.admit(4, 2)):
        function, static, _, *call = job.args
        with on("NVIDIA H200"):
            text = jax.jit(partial(function, *static)).trace(*call).lower(lowering_platforms=("cuda",)).as_text()
        assert not re.search(r"(stablehlo|chlo|mhlo)\.(case|if|sort)", text)
        assert "callback" not in text


@pytest.mark.few
@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("config", [pooled_config, kimi_config, chosen_config, relative_config])
def test_a_loop_over_states_of_any_kind_has_no_branch(config, kind):
    """Kimi delta attention, several streams, hashed n-grams, pools and blocks beyond what is chosen, a bias by distance: no branch
    and no sort, which a CUDA graph lacks."""
    target, draft, dtype = config(), draft_config(num_heads=4, head_dim=64), jnp.dtype(jnp.bfloat16)
    weights = weight_shapes([(target, family_for(target)), (draft, family_named("dflash"))], dtype)
    engine = Engine(target, draft, weights, dtype, max_model_len=512)
    function, static, _, *call = Jobs(engine, engine.setup(mode="greedy", draft=True), STOP_WIDTH).loop(4, 8).args
    with on(kind):
        text = jax.jit(partial(function, *static)).trace(*call).lower(lowering_platforms=("cuda",)).as_text()
    assert not re.search(r"(stablehlo|chlo|mhlo)\.(case|if|sort)", text)
    assert "callback" not in text


@pytest.mark.parametrize("kernels", [False, True])
def test_a_sparse_targets_loop_has_no_branch_and_unpacks_no_pages(kernels, monkeypatch):
    """DeepSeek-V3.2's widths, packed pages: no branch and no sort, which a CUDA graph lacks, and only chosen rows are unpacked."""
    monkeypatch.setattr(switches, "SPARSE", kernels)
    whole = SPARSE_TARGETS["DeepSeek-V3.2"]
    target = replace(
        whole, num_layers=2, windows=(None,) * 2, indexers=(True, False), num_dense_layers=2, vocab_size=512
    )
    weights = weight_shapes([(target, family_named("deepseek_sparse"))], jnp.dtype(jnp.bfloat16))
    sizes = {"max_model_len": 8192, "cache_dtype": "fp8_packed", "num_pages": 256}
    engine = Engine(target, None, weights, jnp.dtype(jnp.bfloat16), **sizes)
    setup, pools = engine.setup(mode="greedy", draft=False), engine.pool_shapes()
    state = jax.eval_shape(lambda: empty_state(setup, 2, STOP_WIDTH, engine.dtype, jax.tree.map(jnp.zeros_like, pools)))
    rest = jax.eval_shape(lambda: (jnp.zeros((2, 64), jnp.int32), jnp.int32(4), jnp.bool_(False), jnp.zeros(2, bool)))
    with on("NVIDIA H200"):
        # A function of its own: of one that was traced before, what switches say would not be looked at.
        traced = jax.jit(partial(loop, setup, MAX_CYCLES)).trace(weights, rest[0], state, *rest[1:])
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert not re.search(r"(stablehlo|chlo|mhlo)\.(case|if|sort|top_?k)", text)
    assert "tensor<2x1x2048x576xbf16>" in text
    # The write of index keys; scores, the choice, and for both layers one function of attention: splits, and what combines them.
    assert text.count("custom_call @mosaic_gpu_v2") == (5 if kernels else 1)
    assert not re.search(r"tensor<(256|128|2x64)x(1x)?64x576x", text)


@pytest.mark.few
def test_pieces_of_one_prompt_attend_after_all_are_written(monkeypatch):
    """Where one operation would write and attend for rows as many and as short, as it does for sequences that are not related."""
    target = target_config(hidden_size=2560, intermediate_size=9728, num_heads=32, num_kv_heads=8, head_dim=128)
    weights = weight_shapes([(target, family_named("qwen3"))], jnp.dtype(jnp.bfloat16))
    engine = Engine(target, None, weights, jnp.dtype(jnp.bfloat16), max_model_len=512)
    table, ids, numbers = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((16, 8), (16, 8), (16,)))
    setup = engine.setup(mode="greedy", draft=False).for_prefill()

    def lowered():
        with on("NVIDIA H200"):
            call = jax.jit(partial(prefill_chunk, setup))
            traced = call.trace(engine.weights, table, Caches(*engine.pool_shapes()), ids, numbers, numbers, numbers)
            return traced.lower(lowering_platforms=("cuda",)).as_text(debug_info=True)

    assert "qkv_attention" not in lowered()
    monkeypatch.setattr(prefill, "PagedAttend", lambda *args, **_: PagedAttend(*args))
    assert "qkv_attention" in lowered()


@pytest.mark.few("full-rejection")
@pytest.mark.parametrize("proposals", get_args(Proposals))
@pytest.mark.parametrize("mode", get_args(Mode))
def test_64_bits_change_nothing(pair, mode, proposals):
    """Whoever enables them for work of his own gets the same programs: log-probabilities had ended in a TypeError."""
    engine = pair.engine
    setup = replace(engine.setup(mode=mode, draft=True, logprobs=mode != "sampled"), proposals=proposals, verified=3)
    state = jax.eval_shape(partial(empty_state, setup, 2, STOP_WIDTH, engine.dtype), engine.pool_shapes())
    rows = request_rows(setup, [(Request(0, (1,), SamplingParams()), ()), None], STOP_WIDTH, engine.dtype)
    table, logits = np.zeros((2, 4), np.int32), np.zeros((2, 1, engine.target.vocab_size), np.float32)
    programs = (
        (partial(loop, setup, 4), engine.weights, table, state, np.int32(4), np.bool_(False), np.zeros(2, bool)),
        (partial(admit, setup), state, np.zeros(2, np.int32), rows, logits),
    )
    for program, *args in programs:
        expected = jax.eval_shape(program, *args)
        with jax.enable_x64(True):
            assert jax.eval_shape(program, *args) == expected


def test_64_bits_draw_the_same_noise():
    seed, positions = jnp.array([[1, 2]], jnp.uint32), jnp.array([[7, 8]], jnp.int32)
    expected = np.asarray(noise_at(seed, positions, 9))
    with jax.enable_x64(True):
        np.testing.assert_array_equal(noise_at(seed, positions, 9), expected)
