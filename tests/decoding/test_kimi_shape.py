"""A target with latent attention under a drafter with grouped queries in the shape of Kimi-K2.5 and Kimi-K2.5-DFlash, but narrow
and of 13 layers rather than 61: six of them are tapped, six drafter layers, blocks of eight, YaRN on both sides.
"""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import dflash_jax as dj
from dflash_jax.models import family_of, to_huggingface

VOCAB, LAYERS, TAPS = 67, 13, [1, 3, 5, 7, 10, 11]
YARN = {
    "rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
SHARED = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 262_144, "rope_theta": 50_000.0,
    "rope_scaling": YARN,
}  # fmt: skip
TARGET = SHARED | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "num_hidden_layers": LAYERS, "num_attention_heads": 2,
    "num_key_value_heads": 2, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 8, "n_group": 1,
    "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.827,
    # One layer of experts rather than all but one: they are compiled one by one.
    "first_k_dense_replace": LAYERS - 1, "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-5,
}  # fmt: skip
DRAFT = SHARED | {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 1, "head_dim": 4, "block_size": 8, "num_target_layers": LAYERS,
    "dflash_config": {"mask_token_id": VOCAB - 2, "target_layer_ids": TAPS},
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> dj.Model:
    root = tmp_path_factory.mktemp("kimi")
    for seed, (name, config) in enumerate((("target", TARGET), ("draft", DRAFT))):
        family = family_of(config)
        table = family.parameters(family.config(config))
        rng, folder = np.random.default_rng(seed), root / name
        folder.mkdir()
        params = {row.name: (rng.normal(size=row.shape) * 0.3).astype(np.float32) for row in table}
        save_file(
            {key: np.ascontiguousarray(array) for key, array in to_huggingface(table, params).items()},
            folder / "model.safetensors",
        )
        (folder / "config.json").write_text(json.dumps(config))
    return dj.load(root / "target", draft=root / "draft", max_batch=2, page_size=16, max_model_len=64)


@pytest.mark.few  # of smaller latent pairs they run in test_mla_lossless
def test_no_text_changes(model: dj.Model) -> None:
    assert model.engine.draft is not None
    assert (model.engine.draft.block_size, model.engine.draft.num_layers) == (8, 6)
    assert list(model.engine.draft.target_layer_ids) == TAPS
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCAB - 2, length).tolist() for length in (30, 3)]
    # The drafter knows the noise of a sampled text, so some of its proposals stand.
    params = [dj.SamplingParams(max_tokens=16, temperature=t, seed=2, ignore_eos=True) for t in (0.0, 3.0)]
    drafted, plain = (dj.generate(model, prompts, params, draft=use) for use in (True, False))
    assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]
    assert [len(out.token_ids) for out in drafted] == [16, 16]
    assert max(drafted[1].acceptance_lengths) > 1
