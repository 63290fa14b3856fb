"""Qwen3 targets with experts: what `config.json` means, conversion both ways, and DFlash over one without a changed token."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dflash_jax.checkpoints.converted import open_converted
from dflash_jax.checkpoints.huggingface import open_checkpoint
from dflash_jax.cli.info import collect, lines
from dflash_jax.engine import Engine
from dflash_jax.engine.requests import Request
from dflash_jax.errors import ConfigError
from dflash_jax.models import (
    DFlashConfig,
    Qwen3MoeConfig,
    family_named,
    family_of,
    fuse_context_projection,
    init_params,
)
from dflash_jax.models.presets import MOE_TARGETS
from dflash_jax.sampling_params import SamplingParams

from ..convert.conftest import Folders

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 97, "hidden_size": 32,
    "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [1], "max_position_embeddings": 512, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "eos_token_id": 1, "torch_dtype": "bfloat16",
    "router_aux_loss_coef": 0.001, "output_router_logits": False, "max_window_layers": 3, "sliding_window": None,
    "use_sliding_window": False,
}  # fmt: skip
DRAFT = DFlashConfig(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    windows=(None,) * 2, causal=(False,) * 2, block_size=5, mask_token_id=96, target_layer_ids=(0, 2),
    target_hidden_size=32,
)  # fmt: skip


def read(**changes: Any) -> Qwen3MoeConfig:
    config = family_of(CONFIG | changes).config(CONFIG | changes)
    assert isinstance(config, Qwen3MoeConfig)
    return config


def test_the_published_file_reads_as_its_preset() -> None:
    preset = MOE_TARGETS["Qwen3-30B-A3B"]
    published = CONFIG | {
        "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "mlp_only_layers": [], "max_position_embeddings": 40_960, "rope_theta": 1e6,
        "max_window_layers": 48,
    }  # fmt: skip
    assert family_of(published).config(published) == preset
    assert Qwen3MoeConfig.from_dict(preset.to_dict()) == preset


def test_the_file_that_transformers_5_writes_reads_as_the_one_before() -> None:
    count = CONFIG["num_experts"]
    written = {
        "num_local_experts": count,
        "num_experts": None,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
    }
    assert read(**written) == read()
    assert read(num_experts=None).num_experts == 128


def test_heads_without_a_size_share_the_hidden_size() -> None:
    assert read(head_dim=None, hidden_size=48, num_attention_heads=4).head_dim == 12


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({}, (1,)),
        ({"mlp_only_layers": []}, ()),
        ({"mlp_only_layers": None, "decoder_sparse_step": 2}, (0, 2)),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 3}, (0, 1)),
    ],
)
def test_which_layers_have_experts(changes: dict[str, Any], dense: tuple[int, ...]) -> None:
    config = read(**changes)
    assert config.dense_layers == dense
    names = {parameter.name for parameter in family_named("qwen3_moe").parameters(config)}
    assert {i for i in range(3) if f"layers.{i}.mlp.router.weight" not in names} == set(dense)
    assert not any("shared" in name for name in names)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({}, None),
        ({"sliding_window": 7}, None),
        ({"sliding_window": 7, "use_sliding_window": True}, 7),
        ({"use_sliding_window": True}, None),
    ],
)
def test_all_layers_slide_or_none(changes: dict[str, Any], window: int | None) -> None:
    assert read(**changes).windows == (window,) * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 is more than num_experts=6"),
        ({"mlp_only_layers": "1"}, "mlp_only_layers must be a list"),
        ({"n_group": 2}, "n_group=2"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(**changes)


def test_round_trip_keeps_every_bit(tmp_path) -> None:
    hf = Folders(tmp_path)
    folder = hf.write("target", CONFIG, hf.tensors(CONFIG), shards=2)
    assert hf.convert(folder, "--output", tmp_path / "out", "--verify", "logits") == 0
    assert open_converted(tmp_path / "out").config == open_checkpoint(folder).config == read()
    assert hf.convert(tmp_path / "out", "--reverse", "--output", tmp_path / "back") == 0
    before, after = (
        {name: value for path in sorted(where.glob("*.safetensors")) for name, value in load_file(path).items()}
        for where in (folder, tmp_path / "back")
    )
    assert before.keys() == after.keys()
    assert "model.layers.0.mlp.experts.5.down_proj.weight" in before
    assert "model.layers.1.mlp.down_proj.weight" in before
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)


def test_info_names_the_experts(tmp_path) -> None:
    hf = Folders(tmp_path)
    folder = hf.write("target", CONFIG, hf.tensors(CONFIG))
    assert any("2 of 6 experts a token" in line for line in lines(collect(folder, draft=None)))


@pytest.mark.few
def test_same_tokens_with_and_without_drafting() -> None:
    config = read()
    target = init_params(family_named("qwen3_moe").parameters(config), jax.random.key(0))
    draft = init_params(family_named("dflash").parameters(DRAFT), jax.random.key(1))
    weights = {
        # Logits spread out enough for argmax to be stable.
        "target": {name: array * 4.0 if array.ndim > 1 else array for name, array in target.items()},
        "draft": fuse_context_projection(DRAFT, draft),
    }
    engine = Engine(
        target=config, draft=DRAFT, weights=weights, dtype=jnp.dtype(jnp.float32), max_model_len=96, page_size=16, max_batch=3,
        max_chunk=32,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, 96, length).tolist()) for length in (3, 40, 17, 1)]

    def run(*, draft: bool, texts: list[tuple[int, ...]]) -> list[list[int]]:
        tokens: list[list[int]] = [[] for _ in texts]
        requests = [Request(i, text, SamplingParams(max_tokens=24), ()) for i, text in enumerate(texts)]
        for update in engine.run(requests, draft=draft, cycles=8):
            tokens[update.index] += update.tokens
        return tokens

    drafted = run(draft=True, texts=prompts)
    assert drafted == run(draft=False, texts=prompts)
    assert drafted == [run(draft=True, texts=[text])[0] for text in prompts]
    assert all(len(tokens) == 24 or tokens[-1] == 1 for tokens in drafted)
