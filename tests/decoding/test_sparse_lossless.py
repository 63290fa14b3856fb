"""A target whose indexer chooses what a token sees, under a drafter with grouped queries, from two Hugging Face folders.

It chooses 20 tokens, so that prompts go on past them in the middle of pages; the last layer takes over what the one before chose.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import dflash_jax as dj
from dflash_jax.attention.dense import dense_attend
from dflash_jax.attention.ragged import RaggedAttend, packing
from dflash_jax.cache import LayerSpec, layer_specs, make_pages, page_bytes
from dflash_jax.checkpoints.calibration import calibrate
from dflash_jax.models import bind, family_of, to_huggingface
from dflash_jax.models.layers import IndexRows

VOCAB, LONGEST = 67, 96
SHARED = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 512}
TARGET = SHARED | {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 8, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5, "mlp_layer_types": ["dense", "dense"],
    "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "index_topk": 20, "index_n_heads": 6, "index_head_dim": 8, "indexer_types": ["full", "shared"], "eos_token_id": 1,
}  # fmt: skip
DRAFT = SHARED | {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "block_size": 4, "num_target_layers": 2,
    "dflash_config": {"mask_token_id": VOCAB - 1, "target_layer_ids": [0, 1]},
}  # fmt: skip
CONFIG = family_of(TARGET).config(TARGET)


def written(folder: Path, file: dict, seed: int) -> Path:
    table = family_of(file).parameters(family_of(file).config(file))
    rng = np.random.default_rng(seed)
    params = {row.name: (rng.normal(size=row.shape) * 0.4).astype(np.float32) for row in table}
    folder.mkdir()
    tensors = {key: np.ascontiguousarray(array) for key, array in to_huggingface(table, params).items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(file))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dj.Model:
    """Its pages are full of NaN before the first request."""
    root = tmp_path_factory.mktemp("sparse")
    target, draft = (
        written(root / name, file, seed) for seed, (name, file) in enumerate((("target", TARGET), ("draft", DRAFT)))
    )
    model = dj.load(target, draft=draft, max_batch=2, page_size=16, max_model_len=LONGEST)
    pools = jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), model.engine.take_pools())
    model.engine.keep_pools(*pools)
    return model


def choices(model: dj.Model, texts: list[list[int]]) -> np.ndarray:
    """After every token of some texts the one that the model without pages chooses."""
    ids = np.zeros((len(texts), LONGEST), np.int32)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = text

    @jax.jit
    def chosen(params, ids):
        target = bind(CONFIG, params)
        hidden, _, _ = target(ids, jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape), dense_attend())
        return jnp.argmax(target.logits(hidden), axis=-1)

    return np.asarray(chosen(model.engine.weights["target"], ids))


def test_no_text_changes(model: dj.Model) -> None:
    """A prompt of several pieces, one that becomes longer than what is chosen while it is decoded, one that finds pages of the
    first, and a sampled one: all that a drafter proposes or others do beside changes no token, and it is the dense model's."""
    rng = np.random.default_rng(3)
    long, short = (rng.integers(2, VOCAB - 1, length).tolist() for length in (60, 5))
    prompts = [long, short, long[:40] + short, long[:30]]
    params = [dj.SamplingParams(max_tokens=24, temperature=t, seed=2, ignore_eos=True) for t in (0.0, 0.0, 0.0, 3.0)]
    drafted = dj.generate(model, prompts, params)
    (plain,) = dj.generate(model, prompts[3:], params[3:], draft=False)
    assert plain.token_ids == drafted[3].token_ids
    # The drafter knows the noise of a sampled text, so some of its proposals stand.
    assert max(drafted[3].acceptance_lengths) > 1
    assert model.engine.allocator.num_published > 0
    texts = [prompt + list(out.token_ids) for prompt, out in zip(prompts[:3], drafted, strict=False)]
    for prompt, text, row in zip(prompts, texts, choices(model, texts), strict=False):
        assert row[len(prompt) - 1 : len(text) - 1].tolist() == text[len(prompt) :]


@pytest.mark.gpu
def test_no_text_changes_on_a_gpu(model: dj.Model) -> None:
    test_no_text_changes(model)


def test_rows_side_by_side_attend_as_those_of_slots() -> None:
    """Two slots with three tokens and one, side by side: what an attention for slots is told and gives is unpacked and packed."""

    class Inner:
        def indexed(self, layer, q, row, index, rotary, cache):
            found.append((q, row, index, rotary))
            return q + row, cache

    pack, found = packing(jnp.array([3, 1]), 5, 4), []
    rows = jnp.arange(5.0)[None, :, None]
    for index in (IndexRows(rows + 10, rows + 20, rows + 30), None):
        out, cache = RaggedAttend(Inner(), pack).indexed(None, rows, rows + 1, index, (rows + 2,), "cache")
        assert cache == "cache"
        assert out[0, :4, 0].tolist() == [1, 3, 5, 7]
        for leaf, first in zip(jax.tree.leaves(found[-1]), (0, 1, 10, 20, 30, 2) if index else (0, 1, 2), strict=True):
            np.testing.assert_array_equal(leaf[..., 0] - first, [[0, 1, 2, 2], [3, 3, 3, 3]])


def test_scales_of_latent_rows_are_found(model: dj.Model) -> None:
    scales = calibrate(CONFIG, model.engine.weights["target"], [list(range(2, 50)), [5]]).k
    assert [scale.shape for scale in scales] == [(), ()]
    assert max(scales) < 1  # of rows whose largest number lies far below 200


def test_what_the_pages_keep(model: dj.Model) -> None:
    target, _ = model.engine.take_pools()
    assert layer_specs(CONFIG) == (LayerSpec(1, 20, None, index=8), LayerSpec(1, 20, None))
    assert [pool.shape for pool in target.index] == [(model.engine.num_pages, 1, 16, 8)]
    assert (target.index[0].dtype, target.index_scale) == (jnp.float32, ())
    # Two latent rows of 20 numbers, and an index key of 8 in float32 or, with its scale, in float8.
    sizes = [(None, jnp.float32, 2 * 80 + 32), (None, jnp.bfloat16, 2 * 40 + 12), ("fp8", jnp.float32, 2 * 20 + 12)]
    for cache_dtype, dtype, token in sizes:
        options = {"cache_dtype": cache_dtype}
        assert page_bytes(CONFIG, 16, jnp.dtype(dtype), **options) == 16 * token
        pages = make_pages(CONFIG, 5, 16, jnp.dtype(dtype), **options)
        pools = (*pages.k, *pages.index, *pages.index_scale)
        assert sum(pool.nbytes for pool in pools) == 5 * 16 * token
