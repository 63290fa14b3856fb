"""A target with latent attention and mixture-of-experts layers under a drafter with grouped-query attention: no text changes."""

import dataclasses
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import dflash_jax as dj
from dflash_jax.attention.dense import dense_attend
from dflash_jax.attention.mla import ABSORBED, LatentForm
from dflash_jax.cache import LayerSpec, Pages, layer_specs, make_pages, page_bytes
from dflash_jax.checkpoints.calibration import calibrate
from dflash_jax.engine import Engine
from dflash_jax.engine.requests import Request
from dflash_jax.errors import ParameterError
from dflash_jax.models import (
    DeepseekConfig,
    DFlashConfig,
    bind,
    family_named,
    family_of,
    fuse_context_projection,
    init_params,
    to_huggingface,
)
from dflash_jax.sampling_params import SamplingParams

VOCAB = 97
TARGET = DeepseekConfig(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=3, num_kv_heads=3, head_dim=14,
    windows=(None,) * 2, q_lora_rank=20, kv_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=6, v_head_dim=10,
    num_experts=4, experts_per_token=2, num_shared_experts=1, routing="noaux_tc", num_groups=1, groups_per_token=1,
    norm_routing_weights=True, routing_scale=1.5, num_dense_layers=1, moe_intermediate_size=16,
)  # fmt: skip
DRAFT = DFlashConfig(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8,
    windows=(None,), causal=(False,), block_size=5, mask_token_id=VOCAB - 1, target_layer_ids=(-1, 0, 1),
    target_hidden_size=32,
)  # fmt: skip
CHUNKED = LatentForm(expand_above=16, context_chunk=32)  # chunks of two pages
LENGTHS = (3, 40, 17, 90, 1, 64)
GREEDY = SamplingParams(max_tokens=24)
SAMPLED = SamplingParams(max_tokens=24, temperature=2.5, seed=5)


def weights(config: DeepseekConfig = TARGET) -> dict[str, dict[str, jax.Array]]:
    """Logits spread out enough for argmax to be stable; the drafter shares the embedding and says little of its own."""
    target = init_params(family_named("deepseek").parameters(config), jax.random.key(0))
    draft = init_params(family_named("dflash").parameters(DRAFT), jax.random.key(1))
    for name in draft:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            draft[name] = draft[name] * 0.0
    return {
        "target": {name: array * 4.0 if array.ndim > 1 else array for name, array in target.items()},
        "draft": fuse_context_projection(DRAFT, draft),
    }


def make_engine(**options) -> Engine:
    options = {"max_model_len": 128, "page_size": 16, "max_batch": 4, "max_chunk": 64, "latent_form": CHUNKED} | options
    options = {"target": TARGET, "draft": DRAFT, "dtype": jnp.dtype(jnp.float32)} | options
    return Engine(weights=weights(options["target"]), **options)


def prompts(lengths=LENGTHS) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB - 1, length).tolist() for length in lengths]


def run(engine: Engine, texts, params: SamplingParams = GREEDY, *, draft: bool = True) -> tuple[list, list]:
    """Token ids and acceptance lengths of each prompt."""
    tokens, counts = ([[] for _ in texts] for _ in range(2))
    for update in engine.run([Request(i, tuple(p), params, ()) for i, p in enumerate(texts)], draft=draft, cycles=8):
        tokens[update.index] += update.tokens
        counts[update.index] += update.counts
    engine.allocator.check_integrity()
    assert engine.allocator.num_free == engine.num_pages
    return tokens, counts


def poison(pages: Pages) -> Pages:
    return jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), pages)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """One engine for all tests, its pages full of NaN before the first request."""
    engine = make_engine()
    engine.keep_pools(*map(poison, engine.take_pools()))
    return engine


@pytest.fixture(scope="module")
def plain(engine) -> list[list[int]]:
    return run(engine, prompts(), draft=False)[0]


def test_what_the_pages_keep(engine) -> None:
    target, draft = engine.take_pools()
    assert layer_specs(TARGET) == (LayerSpec(1, 30, None),) * 2
    assert [pool.shape for pool in target.k] == [(engine.num_pages, 1, 16, 30)] * 2
    assert target.v == ()
    assert target.page_size == 16
    assert len(draft.v) == 1
    assert page_bytes(TARGET, 16, jnp.dtype(jnp.float32)) == 2 * 16 * 30 * 4
    pages = make_pages(TARGET, 5, 8, jnp.dtype(jnp.bfloat16))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(pages)) == 5 * page_bytes(TARGET, 8, jnp.dtype(jnp.bfloat16))


def test_greedy_text_is_the_dense_models_argmax(plain) -> None:
    params, ids = weights()["target"], np.zeros((len(plain), 128), np.int32)
    for row, prompt, tokens in zip(ids, prompts(), plain, strict=True):
        row[: len(prompt) + 24] = prompt + tokens

    @jax.jit
    def chosen(params, ids):
        target = bind(TARGET, params)
        hidden, _, _ = target(ids, jnp.broadcast_to(jnp.arange(128), ids.shape), dense_attend())
        return jnp.argmax(target.logits(hidden), axis=-1)

    for row, prompt, tokens in zip(np.asarray(chosen(params, ids)), prompts(), plain, strict=True):
        assert row[len(prompt) - 1 :][:24].tolist() == tokens


@pytest.mark.few("sampled")
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_same_tokens_with_and_without_drafting(engine, params) -> None:
    drafted, counts = run(engine, prompts(), params)
    assert drafted == run(engine, prompts(), params, draft=False)[0]
    assert all(len(tokens) == 24 == 1 + sum(row) for tokens, row in zip(drafted, counts, strict=True))
    if params is SAMPLED:  # the drafter knows the noise, so some of its proposals stand
        assert {1, 2, 3} <= set(np.concatenate(counts).tolist())


def test_greedy_proposals_that_stand(engine, monkeypatch) -> None:
    """Two tokens are ever chosen, or the first id where both are unlikely, so that even this drafter is often right."""
    few = jax.tree.map(jnp.asarray, engine.weights)
    rows = jnp.isin(jnp.arange(VOCAB), jnp.array([5, 17]))
    few["target"]["lm_head.weight"] = jnp.where(rows[:, None], few["target"]["lm_head.weight"], 0.0)
    monkeypatch.setattr(engine, "weights", few)
    drafted, counts = run(engine, prompts())
    assert drafted == run(engine, prompts(), draft=False)[0]
    assert {1, 2, 3} <= set(np.concatenate(counts).tolist())


@pytest.mark.few
def test_alone_equals_in_a_batch(engine) -> None:
    texts = prompts()
    together, _ = run(engine, texts)
    assert [together[i] for i in (1, 3)] == [run(engine, [texts[i]])[0][0] for i in (1, 3)]
    assert run(engine, texts[::-1])[0] == together[::-1]


@pytest.mark.few("absorbed")
@pytest.mark.parametrize(
    "changes",
    [{"latent_form": ABSORBED}, {"max_chunk": 16, "page_size": 64, "latent_form": LatentForm(expand_above=0)}],
    ids=["absorbed", "small-chunks"],
)
def test_how_a_prompt_attends_does_not_matter(plain, changes) -> None:
    assert run(make_engine(**changes), prompts()[:4], draft=False)[0] == plain[:4]


PACKABLE = dataclasses.replace(TARGET, kv_lora_rank=128)


@pytest.mark.few("config1-fp8_packed")
@pytest.mark.parametrize(("config", "cache_dtype"), [(TARGET, "fp8"), (PACKABLE, "fp8_packed")])
def test_pages_in_eight_bits(config, cache_dtype, plain) -> None:
    """Drafting and company change no token. Texts are compared that no border between two roundings divides: float32 differs in its
    last digit between shapes, and a number on such a border then reads back as another one.
    """
    texts = prompts()[:4]
    first = make_engine(target=config, cache_dtype=cache_dtype)
    drafted, counts = run(first, texts)
    assert all(len(row) > 0 for row in counts)
    assert drafted[1:2] == run(first, texts[1:2], draft=False)[0]
    pool = first.take_pools()[0].k[0]
    assert pool.dtype == (jnp.float8_e4m3fn if cache_dtype == "fp8" else jnp.uint8)
    assert first.pool_bytes < make_engine(target=config).pool_bytes
    if config is TARGET:
        assert drafted != plain[:4]
        options = {"max_chunk": 32, "latent_form": LatentForm(8, 16), "draft": None, "cache_dtype": cache_dtype}
        assert drafted == run(make_engine(**options), texts, draft=False)[0]


@pytest.mark.few  # tests/attention has their numbers
def test_queries_in_float8() -> None:
    """Blocks and prompts alike; drafting changes no token, and that they are rounded changes some."""
    texts = prompts()[:2]
    first = make_engine(cache_dtype="fp8", query_dtype="fp8")
    drafted, counts = run(first, texts)
    assert all(len(row) > 0 for row in counts)
    assert drafted[1:] == run(first, texts[1:], draft=False)[0]
    assert np.asarray(first.take_pools()[0].q_scale).tolist() == [1.0, 1.0]
    assert drafted != run(make_engine(cache_dtype="fp8", draft=None), texts, draft=False)[0]


def test_pools_are_never_copied(engine, plain) -> None:
    """Programs hold no copy of a whole pool: neither the loop over cycles nor the one over a prompt's context chunks."""
    shapes = "|".join(",".join(map(str, pool.shape)) for pages in engine.take_pools() for pool in pages.k[:1])
    copy = re.compile(rf"= \w+\[(?:{shapes})\]\S* (?:copy|copy-start|convert|transpose)\(")
    texts = {key[0].__name__: program.as_text() for key, program in engine.programs._compiled.items()}
    assert {"prefill_chunk", "loop"} <= set(texts)
    for name, text in texts.items():
        assert not copy.findall(text), name


@pytest.mark.few
def test_a_pair_of_checkpoints_through_load_and_generate(tmp_path) -> None:
    """Two Hugging Face folders, a sampled and a greedy prompt longer than a chunk and one of a single token."""
    target = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": VOCAB, "hidden_size": 32,
        "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 3,
        "num_key_value_heads": 3, "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2,
        "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "max_position_embeddings": 128, "eos_token_id": 3,
        "num_nextn_predict_layers": 0, "rope_theta": 10000.0,
    }  # fmt: skip
    draft = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "vocab_size": VOCAB, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 128, "block_size": 4, "num_target_layers": 2,
        "dflash_config": {"mask_token_id": 96, "target_layer_ids": [0, 1]},
    }  # fmt: skip
    for seed, (name, config) in enumerate((("target", target), ("draft", draft))):
        family = family_of(config)
        table = family.parameters(family.config(config))
        rng, folder = np.random.default_rng(seed), tmp_path / name
        folder.mkdir()
        params = {row.name: (rng.normal(size=row.shape) * 0.3).astype(np.float32) for row in table}
        tensors = {key: np.ascontiguousarray(array) for key, array in to_huggingface(table, params).items()}
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
    model = dj.load(tmp_path / "target", draft=tmp_path / "draft", max_batch=2, page_size=16, max_model_len=96)
    params = [dj.SamplingParams(max_tokens=12, temperature=t, seed=2, ignore_eos=True) for t in (0.0, 1.5)]
    drafted, plain = (dj.generate(model, prompts((70, 1)), params, draft=use) for use in (True, False))
    assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]
    assert [len(out.token_ids) for out in drafted] == [12, 12]

    texts = [[5, 9, 11, 2], [7, 7, 30]]
    model = dj.load(
        tmp_path / "target", draft=False, page_size=16, max_model_len=96, cache_dtype="fp8", calibration=texts
    )
    scales = np.asarray(model.engine.take_pools()[0].k_scale).tolist()
    stored: Any = model.engine.weights["target"]
    params = family_of(target).config(target), stored
    assert scales == [float(scale) for scale in calibrate(*params, texts).k]
    assert max(scales) < 1  # of rows whose largest number lies far below 200
    assert model.engine.take_pools()[0].q_scale == ()
    model = dj.load(
        tmp_path / "target", draft=False, page_size=16, max_model_len=96, cache_dtype="fp8", calibration=texts,
        query_dtype="fp8", scale_range=(50, 400, 400),
    )  # fmt: skip
    found = calibrate(*params, texts, reach=(50.0, 400.0, 400.0))
    pools = model.engine.take_pools()[0]
    of_pools = np.asarray((*pools.k_scale, *pools.q_scale)).tolist()
    assert of_pools == [float(scale) for scale in (*found.k, *found.q)]
    assert [float(scale) for scale in found.k] == [scale / 2 for scale in scales]
    out = dj.generate(model, prompts((20,)), dj.SamplingParams(max_tokens=5, ignore_eos=True))
    assert len(out[0].token_ids) == 5
    with pytest.raises(ParameterError, match="leave it out"):
        dj.load(tmp_path / "target", draft=False, calibration=texts)
    with pytest.raises(ParameterError, match=r"no tokenizer\.json: give calibration as token ids"):
        dj.load(tmp_path / "target", draft=False, cache_dtype="fp8", calibration=["text"])
    vocabulary, longest = params[0].vocab_size, params[0].max_position
    wrong = {
        "at least one text with a token": [[], []],
        f"text 1 has token id {vocabulary}, the target's go from 0 to {vocabulary - 1}": [[0, 1], [2, vocabulary]],
        f"text 0 has {longest + 1} tokens, the target takes {longest}": [[1] * (longest + 1)],
    }
    for said, texts in wrong.items():
        with pytest.raises(ParameterError, match=said):
            dj.load(tmp_path / "target", draft=False, cache_dtype="fp8", calibration=texts)
    with pytest.raises(ParameterError, match="kv_lora_rank 16"):
        dj.load(tmp_path / "target", draft=False, cache_dtype="fp8_packed")
