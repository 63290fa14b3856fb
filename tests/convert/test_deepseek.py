"""Conversion of targets with latent attention and experts, both ways."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_jax.attention.dense import dense_attend
from dflash_jax.checkpoints.converted import open_converted
from dflash_jax.checkpoints.huggingface import open_checkpoint
from dflash_jax.cli.info import collect, lines
from dflash_jax.errors import CheckpointError
from dflash_jax.models import bind

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 96, "hidden_size": 32,
    "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
    "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "max_position_embeddings": 128, "num_nextn_predict_layers": 1, "rope_theta": 10000.0,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "eos_token_id": 1, "torch_dtype": "bfloat16",
    "rope_scaling": {
        "type": "yarn", "factor": 4, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 32,
        "beta_fast": 32, "beta_slow": 1,
    },
}  # fmt: skip
BIASES = {
    f"model.layers.{i}.mlp.gate.e_score_correction_bias": np.linspace(-0.3, 0.3, 8, dtype=np.float32) for i in (1, 2)
}


def tensors_of(folder) -> dict[str, np.ndarray]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def source(hf, *, shards: int = 2, extra: dict[str, np.ndarray] | None = None, **changes: Any):
    """A folder with float32 correction biases among bfloat16 weights, as published."""
    config = CONFIG | changes
    return hf.write("target", config, hf.tensors(config, extra=BIASES) | (extra or {}), shards=shards)


def mtp_layer() -> dict[str, np.ndarray]:
    """Tensors past the last layer, with an expert's and with some that only such a layer has."""
    names = ("eh_proj", "enorm", "hnorm", "embed_tokens", "shared_head.head", "shared_head.norm", "mlp.gate")
    names += tuple(f"mlp.experts.{index}.up_proj" for index in range(8))
    return {f"model.layers.3.{name}.weight": np.ones((2, 2), ml_dtypes.bfloat16) for name in names}


def logits(checkpoint) -> jax.Array:
    config, params = checkpoint.config, checkpoint.load("float32")
    ids = jax.random.randint(jax.random.key(0), (2, 9), 0, config.vocab_size)
    positions = jnp.broadcast_to(jnp.arange(9), ids.shape)

    @jax.jit
    def run(params):
        model = bind(config, params)
        return model.logits(model(ids, positions, dense_attend())[0])

    return run(params)


def test_converted_and_original_give_the_same_logits(hf, bits):
    folder = source(hf)
    assert hf.convert(folder, "--output", hf.root / "out", "--verify", "logits") == 0
    plain, converted = open_checkpoint(folder), open_converted(hf.root / "out")
    assert plain.config == converted.config
    assert bits(logits(plain)) == bits(logits(converted))
    stored = converted.marker["parameters"]
    assert stored["layers.1.mlp.router.bias"] == {"shape": [8], "dtype": "float32"}
    assert stored["layers.1.mlp.experts.gate_up_proj.weight"] == {"shape": [8 * 2 * 16, 32], "dtype": "bfloat16"}
    assert stored["layers.2.mlp.experts.down_proj.weight"] == {"shape": [8 * 32, 16], "dtype": "bfloat16"}


def test_experts_lie_one_after_the_other_with_gate_before_up(hf):
    folder = source(hf)
    tensors, params = tensors_of(folder), open_checkpoint(folder).load("float32")
    rows = params["layers.2.mlp.experts.gate_up_proj.weight"].reshape(8, 2, 16, 32)
    downs = params["layers.2.mlp.experts.down_proj.weight"].reshape(8, 32, 16)
    for index in range(8):
        for place, name in enumerate(("gate_proj", "up_proj")):
            theirs = tensors[f"model.layers.2.mlp.experts.{index}.{name}.weight"].astype(np.float32)
            np.testing.assert_array_equal(rows[index, place], theirs)
        down = tensors[f"model.layers.2.mlp.experts.{index}.down_proj.weight"].astype(np.float32)
        np.testing.assert_array_equal(downs[index], down)


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None, "attention_bias": True, "tie_word_embeddings": True}])
def test_round_trip_keeps_every_bit(hf, bits, changes):
    folder = source(hf, **changes)
    assert hf.convert(folder, "--output", hf.root / "out") == 0
    assert hf.convert(hf.root / "out", "--reverse", "--output", hf.root / "back") == 0
    before, after = tensors_of(folder), tensors_of(hf.root / "back")
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert (value.dtype, value.shape, bits(value)) == (after[name].dtype, after[name].shape, bits(after[name])), (
            name
        )
    assert (hf.root / "back" / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_correction_biases_stay_float32_in_a_narrowed_model(hf):
    assert hf.convert(source(hf), "--output", hf.root / "out", "--dtype", "float16") == 0
    params = open_converted(hf.root / "out").load("bfloat16")
    np.testing.assert_array_equal(
        params["layers.1.mlp.router.bias"], BIASES["model.layers.1.mlp.gate.e_score_correction_bias"]
    )
    kinds = {str(value.dtype) for name, value in params.items() if not name.endswith("router.bias")}
    assert kinds == {"bfloat16"}


def test_mtp_layers_are_skipped_with_one_notice(hf):
    extra = mtp_layer()
    folder = source(hf, extra=extra)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.notices == [f"model.layers.3.*: {len(extra)} tensors are not needed and left out"]
    assert hf.convert(folder, "--output", hf.root / "out") == 0
    assert set(open_converted(hf.root / "out").marker["left_out"]) == set(extra)
    assert hf.convert(hf.root / "out", "--reverse", "--output", hf.root / "back") == 0
    assert tensors_of(hf.root / "back").keys() == tensors_of(folder).keys() - extra.keys()


def test_layers_that_no_one_announced_are_not_skipped(hf):
    folder = source(hf, extra=mtp_layer(), num_nextn_predict_layers=0)
    with pytest.raises(
        CheckpointError, match=r"model\.layers\.3\.eh_proj\.weight is not one that this configuration has"
    ):
        open_checkpoint(folder)


def test_float8_that_no_file_tells_of_is_refused(hf):
    name = "model.layers.0.mlp.down_proj.weight"
    scaled = {name: np.ones((32, 48), ml_dtypes.float8_e4m3fn), f"{name}_scale_inv": np.ones((1, 1), np.float32)}
    with pytest.raises(CheckpointError, match="has dtype float8_e4m3fn, expected bfloat16, float16, float32") as caught:
        open_checkpoint(hf.write("unsaid", CONFIG, hf.tensors(CONFIG, extra=BIASES) | scaled))
    assert f"tensor {name}_scale_inv is not one that this configuration has" in str(caught.value)


def test_the_text_model_of_a_vision_model(hf, bits):
    tensors = {f"language_model.{name}": value for name, value in hf.tensors(CONFIG, extra=BIASES).items()}
    tower = {f"vision_tower.encoder.blocks.{i}.weight": np.ones((2, 2), np.float32) for i in range(9)}
    outer = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": CONFIG}
    folder = hf.write("k25", outer | {"vision_config": {"patch_size": 14}}, tensors | tower)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.notices == ["vision_tower.*: 9 tensors are not needed and left out"]
    assert bits(logits(checkpoint)) == bits(logits(open_checkpoint(source(hf))))
    assert hf.convert(folder, "--output", hf.root / "out") == 0
    assert hf.convert(hf.root / "out", "--reverse", "--output", hf.root / "back") == 0
    assert tensors_of(hf.root / "back").keys() == tensors.keys()


def test_info_tells_of_latent_rows(hf):
    facts = collect(source(hf), draft=False)
    assert "3 layers of 32 x 48, 2 heads and one latent row of 24, vocabulary 96" in "\n".join(lines(facts))
    assert (facts["models"][0]["latent_width"], facts["models"][0]["experts"]) == (24, 8)
    pages = facts["pages"]
    size = pages["num_pages"] * pages["page_size"] * 3 * 24 * jnp.dtype(pages["dtype"]).itemsize
    assert pages["pool_bytes"] == size


def test_a_missing_expert_is_named(hf):
    folder = source(hf, shards=1)
    tensors = tensors_of(folder)
    del tensors["model.layers.2.mlp.experts.5.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.mlp\.experts\.5\.up_proj\.weight is missing"):
        open_checkpoint(folder)


def test_indexers_go_both_ways(hf, bits):
    """Norms of their keys stay float32 among bfloat16 weights, and a layer without an indexer has no tensors of one."""
    changes = {
        "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_topk": 4, "index_n_heads": 4,
        "index_head_dim": 16, "indexer_types": ["full", "shared", "full"],
    }  # fmt: skip
    part = "model.layers.{}.self_attn.indexer.k_norm.{}"
    norms = {
        part.format(i, name): np.linspace(-1, 2, 16, dtype=np.float32) for i in (0, 2) for name in ("weight", "bias")
    }
    config = CONFIG | changes
    folder = hf.write("target", config, hf.tensors(config, extra=BIASES | norms), shards=2)
    assert hf.convert(folder, "--output", hf.root / "out") == 0
    converted = open_converted(hf.root / "out")
    assert converted.config == open_checkpoint(folder).config
    stored = converted.marker["parameters"]
    assert {name: row["dtype"] for name, row in stored.items() if ".0.attn.indexer" in name} == {
        "layers.0.attn.indexer.q_proj.weight": "bfloat16", "layers.0.attn.indexer.k_proj.weight": "bfloat16",
        "layers.0.attn.indexer.weights_proj.weight": "bfloat16", "layers.0.attn.indexer.k_norm.weight": "float32",
        "layers.0.attn.indexer.k_norm.bias": "float32",
    }  # fmt: skip
    assert not [name for name in stored if ".1.attn.indexer" in name]
    assert hf.convert(hf.root / "out", "--reverse", "--output", hf.root / "back") == 0
    before, after = tensors_of(folder), tensors_of(hf.root / "back")
    assert {name: bits(value) for name, value in before.items()} == {name: bits(value) for name, value in after.items()}
    facts = collect(folder, draft=False)
    text = "\n".join(lines(facts))
    assert "2 heads and one latent row of 24 and, in 2, an index key of 16, vocabulary 96" in text
    assert "a token attends to the 4 that an indexer scores best" in text
    pages = facts["pages"]
    wide = jnp.dtype(pages["dtype"])
    index = 16 * wide.itemsize if wide == jnp.float32 else 20
    assert pages["pool_bytes"] == pages["num_pages"] * pages["page_size"] * (3 * 24 * wide.itemsize + 2 * index)
