"""The drafter configurations: each config.json as published files spell it, next to what it must come to mean."""

from dataclasses import dataclass, field

FULL, SLIDING = "full_attention", "sliding_attention"

BASE = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "bos_token_id": 1,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_target_layers": 6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 97,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One golden file.

    Attributes:
      config: what differs from BASE in config.json; None removes a key.
      meaning: fields of the reference's `Spec` that the config must come to, `causal` and `window` among them.
      rope: the rotary settings in transformers' newer spelling.
      extra: tensors beside those every drafter has, by name without the prefix, with their shapes.
      prefix: what every tensor name in the file starts with.
    """

    config: dict[str, object]
    meaning: dict[str, object]
    rope: dict[str, object] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    taps: tuple[int, ...] = (0, 2, 3)
    block: int = 8
    mask_token_id: int = 95
    extra: dict[str, tuple[int, ...]] = field(default_factory=dict)
    prefix: str = ""


def _inner(**changes: object) -> dict[str, object]:
    return {"mask_token_id": 95, "target_layer_ids": [0, 2, 3]} | changes


CASES = {
    # the first published form: block_size at the top, whole attention, old rope keys
    "dflash_full": Case(
        config={
            "block_size": 8,
            "dflash_config": _inner(),
            "layer_types": [FULL, FULL],
            "rope_theta": 1000000,
            "rope_scaling": None,
        },
        meaning={"causal": (False, False), "window": (None, None)},
        rope={"rope_type": "default", "rope_theta": 1000000.0},
    ),
    # is_causal false: sliding layers look both ways; a window smaller than the block; scaled embeddings and logits
    "dflash_window_both_ways": Case(
        config={
            "dflash_config": _inner(block_size=8),
            "final_logit_softcapping": 2.0,
            "input_embedding_scale": 1.7,
            "is_causal": False,
            "layer_types": [SLIDING, SLIDING, FULL],
            "num_hidden_layers": 3,
            "output_multiplier": 0.19611613513818404,
            "rope_theta": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            "sliding_window": 5,
            "use_sliding_window": True,
        },
        meaning={
            "causal": (False, False, False),
            "window": (5, 5, None),
            "embed_scale": 1.7,
            "logit_scale": 0.19611613513818404,
            "softcap": 2.0,
        },
        rope={"rope_type": "default", "rope_theta": 500000.0},
    ),
    # nothing said: sliding layers are causal in the block, full layers are not
    "dflash_window_causal": Case(
        config={
            "dflash_config": _inner(block_size=8),
            "layer_types": [SLIDING, FULL],
            "sliding_window": 6,
            "use_sliding_window": True,
        },
        meaning={"causal": (True, False), "window": (6, None)},
    ),
    # dflash_config.causal overrules the layer type
    "dflash_causal_inner": Case(
        config={
            "dflash_config": _inner(block_size=8, causal=False),
            "layer_types": [SLIDING, FULL],
            "sliding_window": 6,
            "use_sliding_window": True,
        },
        meaning={"causal": (False, False), "window": (6, None)},
    ),
    # is_causal at the top overrules dflash_config.causal
    "dflash_causal_top": Case(
        config={"dflash_config": _inner(block_size=8, causal=False), "is_causal": True, "layer_types": [FULL, FULL]},
        meaning={"causal": (True, True), "window": (None, None)},
    ),
    # sinks, scaled values, half-rotated heads, a mask embedding of its own, the last of six target layers tapped
    "dflash_sinks": Case(
        config={
            "block_size": 8,
            "dflash_config": _inner(target_layer_ids=[0, 3, 5], attention_sink_bias=True, attention_value_scale=0.612),
            "is_causal": False,
            "layer_types": [SLIDING, SLIDING],
            "num_key_value_heads": 1,
            "partial_rotary_factor": 0.5,
            "sliding_window": 7,
            "use_sliding_window": True,
        },
        meaning={"causal": (False, False), "window": (7, 7), "value_scale": 0.612},
        rope={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        taps=(0, 3, 5),
        extra={
            "layers.0.self_attn.attention_sink_bias": (4,),
            "layers.1.self_attn.attention_sink_bias": (4,),
            "mask_embedding": (32,),
        },
    ),
    # odd sizes, five heads to one, YaRN stretched 64 times
    "dflash_yarn": Case(
        config={
            "block_size": 6,
            "dflash_config": _inner(mask_token_id=100),
            "hidden_size": 40,
            "intermediate_size": 56,
            "layer_types": [FULL, FULL],
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-4,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 64.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
            },
            "rope_theta": 50000.0,
            "vocab_size": 101,
        },
        meaning={"causal": (False, False), "window": (None, None)},
        rope={
            "rope_type": "yarn",
            "rope_theta": 50000.0,
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
        },
        block=6,
        mask_token_id=100,
    ),
    # its own tables, 61 of the target's 97 tokens, a narrower target, biases, "model." in front of every name
    "dflash_draft_vocabulary": Case(
        config={
            "attention_bias": True,
            "block_size": 8,
            "dflash_config": _inner(),
            "draft_vocab_size": 61,
            "layer_types": [FULL, FULL],
            "target_hidden_size": 24,
        },
        meaning={"causal": (False, False), "window": (None, None)},
        extra={"embed_tokens.weight": (97, 32), "lm_head.weight": (61, 32), "d2t": (61,)},
        prefix="model.",
    ),
    # every slot predicts the token after its own; the embedding output is tapped
    "dflash_anchor": Case(
        config={
            "block_size": 7,
            "dflash_config": _inner(target_layer_ids=[-1, 1, 3], sample_from_anchor=True),
            "layer_types": [FULL, FULL],
        },
        meaning={"causal": (False, False), "window": (None, None)},
        taps=(-1, 1, 3),
        block=7,
        extra={"embed_tokens.weight": (97, 32), "lm_head.weight": (97, 32)},
    ),
}
