"""What is believed of a `config.json`: keys that publishers write load, everything else is done or refused by name, sizes end."""

import dataclasses
import math
from typing import Any

import pytest

from dflash_jax.config import (
    HEAD_NORMS,
    MAX_BLOCK,
    MAX_LAYERS,
    MAX_POSITION,
    NEUTRAL_KEYS,
    NEUTRAL_VALUES,
    NO_EXPERTS,
    DecoderConfig,
    Qwen3Config,
)
from dflash_jax.errors import ConfigError, UnsupportedModelError
from dflash_jax.models import DeepseekConfig, DFlashConfig, family_of
from dflash_jax.models.layers import rope_frequencies

DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "head_dim": 8, "hidden_act": "silu", "hidden_size": 16, "initializer_range": 0.02,
    "intermediate_size": 32, "max_position_embeddings": 4096, "max_window_layers": 4, "model_type": "qwen3",
    "num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_scaling": None,
    "rope_theta": 1_000_000, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 64,
}  # fmt: skip
MOE: dict[str, Any] = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "mlp_only_layers": [], "model_type": "qwen3_moe",
    "moe_intermediate_size": 8, "norm_topk_prob": True, "num_experts": 4, "num_experts_per_tok": 2,
    "output_router_logits": False, "router_aux_loss_coef": 0.001,
}  # fmt: skip
MLA: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "aux_loss_alpha": 0.001, "ep_size": 1,
    "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 48, "kv_lora_rank": 16,
    "max_position_embeddings": 4096, "model_type": "deepseek_v3", "moe_intermediate_size": 8, "moe_layer_freq": 1, "n_group": 2,
    "n_routed_experts": 8, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 4, "num_experts_per_tok": 2,
    "num_hidden_layers": 2, "num_key_value_heads": 4, "num_nextn_predict_layers": 0, "pretraining_tp": 1, "q_lora_rank": 24,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 50_000.0, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc",
    "use_cache": True, "v_head_dim": 8, "vocab_size": 64,
}  # fmt: skip
KIMI: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"], "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
    "bos_token_id": 1, "dtype": "bfloat16", "eos_token_id": 2, "ignore_index": -100, "media_placeholder_token_id": 60,
    "model_type": "kimi_k25", "pad_token_id": 3, "text_config": MLA, "tie_word_embeddings": False,
    "use_unified_vision_chunk": True, "video_placeholder": "<|video|>", "vision_config": {"vt_hidden_size": 1152},
}  # fmt: skip
DRAFT: dict[str, Any] = DENSE | {
    "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": 16,
    "dflash_config": {"mask_token_id": 60, "target_layer_ids": [1, 17, 33]}, "layer_types": ["full_attention"] * 4,
    "num_target_layers": 36,
}  # fmt: skip
SPECULATORS: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "aux_hidden_state_layer_ids": [2, 18, 34], "block_size": 8, "draft_vocab_size": 64,
    "mask_token_id": 60, "sample_from_anchor": False, "speculators_config": {"algorithm": "dflash"},
    "speculators_model_type": "dflash", "speculators_version": "0.9.0", "tie_word_embeddings": False,
    "transformer_layer_config": {key: value for key, value in DENSE.items() if key not in ("architectures", "torch_dtype")},
}  # fmt: skip
FILES = {"dense": DENSE, "moe": MOE, "mla": MLA, "kimi": KIMI, "draft": DRAFT, "speculators": SPECULATORS}
# What PretrainedConfig wrote into every file up to transformers 4, with the values that it wrote.
EVERY_FILE: dict[str, Any] = {
    "_name_or_path": "", "add_cross_attention": False, "bad_words_ids": None, "begin_suppress_tokens": None,
    "chunk_size_feed_forward": 0, "cross_attention_hidden_size": None, "decoder_start_token_id": None, "diversity_penalty": 0.0,
    "do_sample": False, "early_stopping": False, "encoder_no_repeat_ngram_size": 0, "exponential_decay_length_penalty": None,
    "finetuning_task": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "is_decoder": False, "is_encoder_decoder": False,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "length_penalty": 1.0, "max_length": 20, "min_length": 0,
    "no_repeat_ngram_size": 0, "num_beam_groups": 1, "num_beams": 1, "num_return_sequences": 1, "output_attentions": False,
    "output_hidden_states": False, "output_scores": False, "pad_token_id": None, "prefix": None, "problem_type": None,
    "pruned_heads": {}, "remove_invalid_values": False, "repetition_penalty": 1.0, "return_dict": True,
    "return_dict_in_generate": False, "sep_token_id": None, "suppress_tokens": None, "task_specific_params": None,
    "temperature": 1.0, "tf_legacy_loss": False, "tie_encoder_decoder": False, "tokenizer_class": None, "top_k": 50,
    "top_p": 1.0, "torchscript": False, "typical_p": 1.0, "use_bfloat16": False,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


def read(file: dict[str, Any], notices: list[str] | None = None, **changes: Any) -> Any:
    values = file | changes
    return family_of(values).config(values, notices=notices)


def nested(file: dict[str, Any], place: str, **changes: Any) -> dict[str, Any]:
    return file | {place: file[place] | changes}


@pytest.mark.parametrize("file", FILES.values(), ids=FILES)
def test_what_transformers_writes_into_every_file_changes_nothing(file: dict[str, Any]) -> None:
    notices: list[str] = []
    assert read(file | EVERY_FILE, notices) == read(file)
    assert notices == []
    inner = {"kimi": "text_config", "speculators": "transformer_layer_config"}
    for name, place in inner.items():
        if FILES[name] is file:
            assert read(nested(file, place, **EVERY_FILE)) == read(file)


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        # Qwen3-Coder-30B-A3B-Instruct has these three.
        (MOE, {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}),
        (DENSE, {"use_mrope": False, "mlp_bias": False, "num_experts": 0, "quantization_config": None, "is_causal": True}),
        (DENSE, {"final_logit_softcapping": None, "attn_logit_softcapping": 0.0, "model_max_length": 32768}),
        (DENSE, {"rope_scaling": {"type": "default", "factor": 1.0, "finetuned": True}}),
        (MLA, {"use_qk_norm": False, "qk_head_dim": 16, "head_dim": 8, "output_router_logits": False}),
        (KIMI, {"text_config": MLA | {"num_experts": None}, "torch_dtype": "bfloat16", "vision_end_token_id": 7}),
        (DRAFT, {"markov_rank": 0, "markov_head_type": None, "enable_confidence_head": False}),
        (DRAFT, {"num_anchors": 512, "loss_decay_gamma": 7.0, "attention_mode": "gqa", "is_neox_style": True}),
        (DRAFT, {"dflash_config": DRAFT["dflash_config"] | {"projector_type": "dflash", "shift_label": False}}),
    ],
)  # fmt: skip
def test_keys_of_published_files_that_say_what_is_done_anyway(file: dict[str, Any], changes: dict[str, Any]) -> None:
    expected, config = read(file).to_dict(), read(file, **changes).to_dict()
    assert config == expected


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        (DENSE, "use_qk_norm", False), (MOE, "use_qk_norm", False), (DRAFT, "use_qk_norm", False), (MLA, "use_qk_norm", True),
        (DENSE, "use_qk_norm", 1), (DENSE, "mlp_bias", True), (DENSE, "mlp_bias", 0), (DENSE, "qkv_bias", True),
        (DENSE, "is_encoder_decoder", True), (DENSE, "add_cross_attention", True), (DENSE, "pruned_heads", {"0": [1]}),
        (DENSE, "num_experts", 4), (DENSE, "is_causal", False), (KIMI, "rope_is_neox_style", False),
        (MLA, "is_neox_style", False), (MOE, "shared_expert_intermediate_size", 8), (MOE, "attn_output_gate", True),
        (MLA, "sliding_window", 128), (MLA, "index_topk", 2048), (MLA, "index_topk", None), (DRAFT, "hc_mult", 4),
        (DRAFT, "gating", True), (DRAFT, "conv_heads", 2), (DRAFT, "enable_confidence_head", True),
        (DRAFT, "attention_mode", "mla"), (KIMI, "rope_scaling", YARN), (KIMI, "num_hidden_layers", 3),
        (KIMI, "tie_word_embeddings", True), (KIMI, "audio_tower", None), (SPECULATORS, "num_jacobi_passes", 0),
    ],
)  # fmt: skip
def test_keys_that_would_not_be_done_are_refused_by_name(file: dict[str, Any], key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{key}=|{key} .*must be"):
        read(file, **{key: value})


@pytest.mark.parametrize("place", ["top", "inside"])
@pytest.mark.parametrize(
    ("key", "value"), [("is_neox_style", False), ("rope_is_neox_style", False), ("rope_interleave", True)]
)
def test_rotary_pairs_next_to_each_other_in_every_spelling(key: str, value: bool, place: str) -> None:
    file = DRAFT | {key: value} if place == "top" else nested(DRAFT, "dflash_config", **{key: value})
    assert read(file).rope == dataclasses.replace(read(DRAFT).rope, paired=True)
    assert read(DENSE, **{key: value}).rope.paired
    assert read(DENSE, rope_scaling=YARN | {key: value}).rope.paired
    assert not read(DENSE, **{key: not value}).rope.paired
    config = read(DENSE, **{key: value})
    assert type(config).from_dict(config.to_dict()) == config


def test_two_words_of_rotary_pairs() -> None:
    with pytest.raises(
        ConfigError, match=r"is_neox_style of .* and rope_interleave of .* say two things of rotary pairs"
    ):
        read(DENSE, is_neox_style=True, rope_interleave=True)
    with pytest.raises(ConfigError, match="say two things of rotary pairs"):
        read(nested(DRAFT, "dflash_config", is_neox_style=False), is_neox_style=True)


def test_no_key_is_neutral_in_two_ways() -> None:
    assert not NEUTRAL_KEYS & (NEUTRAL_VALUES.keys() | NO_EXPERTS.keys() | HEAD_NORMS.keys())


# Rotation -------------------------------------------------------------------------------------------------------------------------

WITHOUT = {key: value for key, value in DENSE.items() if key not in ("rope_theta", "rope_scaling")}
NEWER = WITHOUT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000}}


@pytest.mark.parametrize(
    "file", [NEWER, DRAFT | {"rope_parameters": {"rope_type": "default"}}, MLA | {"rope_parameters": {}}]
)
def test_scaling_added_to_a_newer_file_counts(file: dict[str, Any]) -> None:
    """Model cards say to add `rope_scaling`, also where transformers 5 has written `rope_parameters` without scaling."""
    notices: list[str] = []
    config = read(file, notices, rope_scaling=YARN)
    assert (config.rope.kind, config.rope.factor, config.rope.original_max_position) == ("yarn", 4.0, 2048)
    assert config.rope.theta == read(file).rope.theta
    assert config.max_position == 8192
    beside = file["rope_parameters"].get("rope_type") == "default"
    assert [notice[:49] for notice in notices] == ["config.json has rope_scaling beside rope_paramete"] * beside


def test_both_places_may_agree() -> None:
    assert (
        read(WITHOUT, rope_parameters=YARN | {"rope_theta": 5.0}, rope_scaling=YARN, rope_theta=5.0).rope.factor == 4.0
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": YARN, "rope_scaling": YARN | {"factor": 2.0}}, r"one factor=4\.0 and factor of rope_scaling=2\.0"),
        ({"rope_parameters": YARN, "rope_scaling": {"type": "linear", "factor": 4.0}}, "one rope_type='yarn' and rope_type of"),
        ({"rope_parameters": YARN, "rope_scaling": {"type": "default"}}, "one rope_type='yarn' and rope_type of"),
        ({"rope_theta": 10_000.0, "rope_parameters": {"rope_theta": 5e5}}, r"one rope_theta=10000\.0 and rope_theta of rope_param"),
        ({"partial_rotary_factor": 1.0, "rope_scaling": {"partial_rotary_factor": 0.5}}, "one partial_rotary_factor"),
        ({"rope_scaling": YARN | {"type": "linear"}}, "rope_scaling's rope_type='yarn' and rope_scaling's type='linear'"),
        ({"rope_scaling": {"rope_type": "default", "factor": 4.0}}, r"factor=4\.0"),
        ({"rope_scaling": {"factor": 4.0}}, r"factor=4\.0"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0, "attention_factor": 0.5}}, r"attention_factor=0\.5"),
        ({"rope_scaling": YARN | {"low_freq_factor": 1.0}}, r"low_freq_factor=1\.0"),
        ({"rope_scaling": YARN | {"long_factor": [1.0]}}, r"long_factor=\[1\.0\]"),
        ({"rope_scaling": YARN | {"is_neox_style": 0}}, "is_neox_style(=0| must be true or false)"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {}}}, "full_attention="),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, r"rope_type must be .*got \['yarn'\]"),
        ({"rope_scaling": YARN | {"attention_factor": -1.0}}, "attention_factor must be positive"),
        ({"rope_scaling": YARN | {"beta_slow": 0.0}}, "betas and frequency factors must be positive"),
        ({"rope_scaling": YARN | {"factor": 10**400}}, "factor must be a finite number"),
        ({"rope_scaling": YARN | {"factor": 1e300}}, "stretches 2,048 positions beyond"),
        ({"rope_theta": 1.0, "rope_scaling": YARN}, "rope_theta above 1 with yarn"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
         "high_freq_factor must be above low_freq_factor"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("file", ["dense", "draft", "mla"])
def test_what_a_rotation_cannot_be(file: str, changes: dict[str, Any], message: str) -> None:
    values = {key: value for key, value in FILES[file].items() if key not in ("rope_theta", "rope_scaling")}
    with pytest.raises(ConfigError, match=message):
        read(values, **changes)


def test_attn_factor_is_left_out_as_transformers_leaves_it_out() -> None:
    """rope_scaling of DeepSeek-R1-0528-Qwen3-8B: its attn_factor is the inverse of transformers' magnitude."""
    notices: list[str] = []
    scaling = YARN | {"original_max_position_embeddings": 32768, "attn_factor": 0.8782488562869419}
    rope = read(DENSE, notices, rope_scaling=scaling, max_position_embeddings=131_072).rope
    assert rope == read(DENSE, rope_scaling=YARN | {"original_max_position_embeddings": 32768}).rope
    assert rope_frequencies(rope, 8)[1] == pytest.approx(0.1 * math.log(4) + 1)
    assert rope_frequencies(rope, 8)[1] * 0.8782488562869419 == pytest.approx(1)
    [notice] = notices
    assert notice.startswith("attn_factor=0.8782488562869419 of rope_scaling is left out, as transformers")
    assert read(DENSE, notices, rope_scaling=YARN | {"attn_factor": 1}).rope.factor == 4.0
    assert len(notices) == 1
    with pytest.raises(ConfigError, match=r"attn_factor=0\.5"):  # no other kind is known to have it
        read(DENSE, rope_scaling={"type": "linear", "factor": 2.0, "attn_factor": 0.5})


# Drafters -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["DFlashDraftModel", "DFlashForCausalLM", "DFlashSpeculator", "Qwen3DFlashDraftModel", "DSparkSpeculator"]
)
def test_every_name_of_the_layout_is_read(name: str) -> None:
    assert read(DRAFT, architectures=[name]) == read(DRAFT)
    assert family_of({"architectures": [name]}).role == "draft"


def test_names_of_other_layouts_are_not() -> None:
    with pytest.raises(UnsupportedModelError, match=r"K3DSparkModel.*known architectures: .*Qwen3DFlashDraftModel"):
        read(DRAFT, architectures=["K3DSparkModel"])


SLIDING = ["sliding_attention"] * 3 + ["full_attention"]


@pytest.mark.parametrize(
    ("changes", "inner", "windows", "causal"),
    [
        # No layer slides: `use_swa` makes all of them slide, and none causal.
        ({}, {"use_swa": True, "swa_window_size": 5}, (5,) * 4, False),
        ({"sliding_window": 9}, {"use_swa": True}, (9,) * 4, False),
        ({"sliding_window": 9}, {"use_swa": True, "swa_window_size": 5}, (5,) * 4, False),
        ({"layer_types": None, "sliding_window": 9}, {"use_swa": True}, (9,) * 4, False),
        ({"layer_types": None, "use_swa": True, "swa_window_size": 5}, {}, (5,) * 4, False),
        ({}, {"use_swa": True, "swa_window_size": 5, "causal": True}, (5,) * 4, True),
        ({"layer_types": None}, {"use_swa": False, "swa_window_size": 5}, (None,) * 4, False),
        # Some slide: their types say which, and the size of dflash_config counts.
        ({"layer_types": SLIDING, "sliding_window": 9}, {"use_swa": True}, (9, 9, 9, None), None),
        ({"layer_types": SLIDING, "sliding_window": 9}, {"swa_window_size": 5}, (5, 5, 5, None), None),
    ],
)  # fmt: skip
def test_windows_and_causality_of_a_drafter(
    changes: dict[str, Any], inner: dict[str, Any], windows: tuple[int | None, ...], causal: bool | None
) -> None:
    notices: list[str] = []
    config = read(nested(DRAFT, "dflash_config", **inner), notices, **changes)
    assert config.windows == windows
    assert config.causal == ((True, True, True, False) if causal is None else (causal,) * 4)
    said = "use_swa" in inner and inner["use_swa"] and "layer_types" not in changes
    assert [notice[:33] for notice in notices] == ["use_swa counts before layer_types"] * said


def test_sinks_have_two_names() -> None:
    assert read(DRAFT, add_swa_attention_sink_bias=True).sinks
    assert not read(nested(DRAFT, "dflash_config", attention_sink_bias=False), add_swa_attention_sink_bias=True).sinks


@pytest.mark.parametrize(
    ("types", "flag", "causal", "notice"),
    [
        (SLIDING, None, (True, True, True, False), "sliding_window_non_causal is absent"),
        (SLIDING, False, (True, True, True, False), "sliding_window_non_causal is false"),
        (SLIDING, True, (False,) * 4, None),
        (SLIDING[:1] * 4, None, (True,) * 4, "sliding_window_non_causal is absent"),
        (SLIDING[:1] * 4, False, (True,) * 4, None),
        (SLIDING[:1] * 4, True, (False,) * 4, None),
        (SLIDING[3:] * 4, None, (False,) * 4, None),
        (SLIDING[3:] * 4, False, (False,) * 4, None),
    ],
)
def test_causality_of_speculators_files_is_the_trainers(
    types: list[str], flag: bool | None, causal: tuple[bool, ...], notice: str | None
) -> None:
    notices: list[str] = []
    file = nested(SPECULATORS, "transformer_layer_config", layer_types=types, sliding_window=9)
    config = read(file, notices, **({} if flag is None else {"sliding_window_non_causal": flag}))
    assert config.causal == causal
    assert config.windows == tuple(9 if kind == "sliding_attention" else None for kind in types)
    assert [one[: len(notice or "")] for one in notices] == ([] if notice is None else [notice])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash_config": {"causal": True}}, "dflash_config beside transformer_layer_config"),
        ({"eagle_config": {"layer_ids": [1]}}, "eagle_config beside transformer_layer_config"),
        ({"hidden_size": 32}, "says hidden_size in two ways"),
        ({"rope_scaling": YARN}, "says rope_scaling in two ways"),
    ],
)
def test_a_speculators_file_says_a_thing_once(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(SPECULATORS, **changes)


# Bounds ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [10**12, 2**31, 2**63, 10**400], ids=["10**12", "2**31", "2**63", "10**400"])
@pytest.mark.parametrize("name", FILES)
def test_no_integer_of_a_file_is_believed_without_a_bound(name: str, value: int) -> None:
    """Every integer that is read is either refused or, where nothing is built from it, changes nothing."""
    file = FILES[name]
    for place in (None, "dflash_config", "text_config", "transformer_layer_config"):
        values = file if place is None else file.get(place, {})
        for key in [key for key, each in values.items() if type(each) is int]:
            changed = file | {key: value} if place is None else nested(file, place, **{key: value})
            if key == "rope_theta" or (key.endswith("token_id") and key != "mask_token_id"):
                continue
            try:
                config = read(changed)
            except ConfigError as error:
                assert len(str(error)) < 800  # noqa: PT017, what is read must be what it was
            else:
                assert config == read(file), key


@pytest.mark.parametrize(
    ("file", "key", "largest"),
    [
        (DENSE, "num_hidden_layers", MAX_LAYERS), (DRAFT, "block_size", MAX_BLOCK), (DENSE, "vocab_size", 1 << 24),
        (DENSE, "max_position_embeddings", MAX_POSITION), (DENSE, "head_dim", 1 << 14), (DENSE, "hidden_size", 1 << 20),
        (MOE, "num_experts", 1 << 14), (MLA, "n_routed_experts", 1 << 14), (MLA, "kv_lora_rank", 1 << 20),
        (MLA, "num_nextn_predict_layers", MAX_LAYERS), (DRAFT, "num_target_layers", MAX_LAYERS),
        (DRAFT, "draft_vocab_size", 1 << 24),
    ],
)  # fmt: skip
def test_sizes_end(file: dict[str, Any], key: str, largest: int) -> None:
    with pytest.raises(ConfigError, match=f"{key} must be an integer of at most {largest:,}, got {largest + 1}"):
        read(file, **{key: largest + 1})


def test_layers_and_experts_together_end() -> None:
    with pytest.raises(ConfigError, match="1000 layers of 16384 experts are more than 131,072 experts in all"):
        read(MOE, num_hidden_layers=1000, num_experts=16_384)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (DENSE, {"num_layers": 10**12}, "num_layers must be int of at most 1,024, got 1000000000000"),
        (DENSE, {"num_layers": "3"}, "num_layers must be int"),
        (DENSE, {"hidden_size": 0}, "hidden_size must be int"),
        (DENSE, {"attention_bias": 1}, "attention_bias must be bool"),
        (DENSE, {"norm_eps": 10**400}, "norm_eps must be float"),
        (DENSE, {"windows": [None]}, "1 windows for 4 layers"),
        (DENSE, {"windows": [[1]] * 4}, "windows must be"),
        (DENSE, {"rope": {"kind": "default"}}, "RopeConfig: expected the fields"),
        (DENSE, {"rope": None}, "RopeConfig: expected the fields"),
        (DRAFT, {"block_size": 2**31}, "block_size must be int of at most 1,024"),
        (DRAFT, {"mask_token_id": -1}, "mask_token_id=-1"),
        (DRAFT, {"causal": [True]}, "1 flags of causality for 4 layers"),
        (MLA, {"num_experts": 10**9}, "num_experts must be int"),
    ],
)
def test_our_own_form_is_bounded_too(config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    """Markers of converted folders are files as well."""
    ours: DecoderConfig = read(config)
    values = ours.to_dict()
    with pytest.raises(ConfigError, match=message):
        type(ours).from_dict(values | changes)
    with pytest.raises(ConfigError, match="RopeConfig: theta cannot be"):
        type(ours).from_dict(values | {"rope": values["rope"] | {"theta": "x"}})


@pytest.mark.parametrize("value", [5, True, "Qwen3ForCausalLM", [["Qwen3ForCausalLM"]], [{"a": 1}], {"a": 1}, [None]])
@pytest.mark.parametrize("file", [DENSE, DRAFT, MLA])
def test_architectures_are_a_list_of_names(file: dict[str, Any], value: Any) -> None:
    with pytest.raises(ConfigError, match="architectures must be a list of names, got"):
        read(file, architectures=value)
    for config in (Qwen3Config, DFlashConfig, DeepseekConfig):
        assert issubclass(config, DecoderConfig)
    with pytest.raises(ConfigError, match="architectures must be a list of names"):
        read(KIMI, text_config=MLA | {"architectures": value})


def test_messages_are_cut() -> None:
    with pytest.raises(ConfigError) as caught:
        read(DENSE, layer_types=["full_attention"] * 100_000)
    assert len(str(caught.value)) < 400
