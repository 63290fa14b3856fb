"""Model configurations: frozen dataclasses read from a Hugging Face `config.json`.

`from_hf` reads every key that changes what a model computes and refuses the ones it does not know, so that a checkpoint never
runs as something it is not. `to_dict` and `from_dict` are this package's own JSON form, kept in converted folders.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from dflash_jax.errors import ConfigError

# Keys that describe training, bookkeeping or defaults of other software. They do not change a forward pass.
NEUTRAL_KEYS = frozenset(
    """_attn_implementation _attn_implementation_autoset _name_or_path add_cross_attention architectures attention_dropout
    auto_map bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward diversity_penalty do_sample dtype
    early_stopping eos_token_id experts_implementation finetuning_task forced_bos_token_id forced_eos_token_id id2label
    initializer_range is_decoder is_encoder_decoder label2id language length_penalty max_length min_length model_type
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states
    output_scores pad_token_id prefix problem_type remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss
    tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p unsloth_fixed
    unsloth_version use_bfloat16 use_cache""".split()
)


class KeyReader:
    """Reads a JSON object key by key, remembers which were read, and refuses the rest.

    Raises:
      ConfigError: from `refuse_rest` when an unread key holds something other than None, False or an empty value.
    """

    def __init__(self, subject: str, values: Any):
        if not isinstance(values, Mapping):
            raise ConfigError(f"{subject} must be a JSON object, got {type(values).__name__}")
        self.subject, self.values, self.read = subject, values, set[str]()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        value = self.values.get(key, default)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ConfigError(f"{self.subject}: {key} must be an integer of at least {minimum}, got {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"{self.subject}: {key} must be a finite number, got {value!r}")
        return float(value)

    def flag(self, key: str, *, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.subject}: {key} must be true or false, got {value!r}")
        return value

    def refuse_rest(self, neutral: Collection[str] = ()) -> None:
        unknown = {
            key: value
            for key, value in self.values.items()
            if key not in self.read and key not in neutral and value not in (None, False, "", [], {})
        }
        if unknown:
            shown = ", ".join(f"{key}={value!r}" for key, value in sorted(unknown.items()))
            raise ConfigError(
                f"{self.subject} sets keys this package does not implement: {shown}. They may change what the model computes, so "
                "it is not loaded. If a key is only bookkeeping, remove it from the file."
            )


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding, half-split form. Kinds: default, linear, llama3, yarn."""

    kind: str = "default"
    theta: float = 10_000.0
    partial: float = 1.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    @classmethod
    def from_keys(cls, keys: KeyReader, max_position: int) -> "RopeConfig":
        """Reads `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before).

        Raises:
          ConfigError: a kind that is not implemented, or a value that cannot be.
        """
        merged: dict[str, Any] = {}
        for key in ("rope_scaling", "rope_parameters"):
            merged |= KeyReader(f"{keys.subject}, {key}", keys.get(key, {})).values
        scaling = KeyReader(f"{keys.subject}, rope_parameters", merged)
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        scaling.get("type")
        if kind not in ("default", "linear", "llama3", "yarn"):
            raise ConfigError(f"{scaling.subject}: rope_type must be default, linear, llama3 or yarn, got {kind!r}")
        theta = scaling.number("rope_theta", keys.number("rope_theta", 10_000.0))
        partial = scaling.number("partial_rotary_factor", keys.number("partial_rotary_factor", 1.0))
        if not 0 < partial <= 1:
            raise ConfigError(f"{scaling.subject}: partial_rotary_factor must be in (0, 1], got {partial}")
        needed = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}.get(kind, ())
        if missing := [key for key in needed if merged.get(key) is None]:
            raise ConfigError(f"{scaling.subject}: rope_type {kind} needs {', '.join(missing)}")
        original = scaling.integer("original_max_position_embeddings", max_position)
        factor = scaling.number("factor", max_position / original if kind == "yarn" else 1.0)
        if factor <= 0 or theta <= 0:
            raise ConfigError(f"{scaling.subject}: factor and rope_theta must be positive, got {factor} and {theta}")
        given = scaling.get("attention_factor") is not None
        rope = cls(
            kind=kind,
            theta=theta,
            partial=partial,
            factor=factor,
            original_max_position=original,
            low_freq_factor=scaling.number("low_freq_factor", 1.0),
            high_freq_factor=scaling.number("high_freq_factor", 4.0),
            beta_fast=scaling.number("beta_fast", 32.0),
            beta_slow=scaling.number("beta_slow", 1.0),
            attention_factor=scaling.number("attention_factor") if given else None,
            mscale=scaling.number("mscale", 0.0),
            mscale_all_dim=scaling.number("mscale_all_dim", 0.0),
            truncate=scaling.flag("truncate", default=True),
        )
        scaling.refuse_rest()
        return rope

    def longest(self, max_position: int) -> int:
        """Positions a model takes: YaRN stretches the original ones by its factor.

        Model cards say to add `rope_scaling` to config.json, where `max_position_embeddings` then stays what it was without.
        """
        return max(max_position, int(self.factor * self.original_max_position)) if self.kind == "yarn" else max_position


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """What a Qwen3-shaped decoder stack needs: shared by the dense target and the DFlash drafter.

    Attributes:
      windows: per layer, the number of keys a query sees counting itself, or None for all.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    max_position: int = 32_768
    attention_bias: bool = False
    windows: tuple[int | None, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "DecoderConfig":
        """Inverse of `to_dict`, also after a trip through JSON.

        Raises:
          ConfigError: fields are missing or unknown: another version wrote them.
        """
        fields = {field.name for field in dataclasses.fields(cls)}
        if set(values) != fields:
            missing, extra = sorted(fields - set(values)), sorted(set(values) - fields)
            raise ConfigError(
                f"{cls.__name__}: missing fields {missing}, unknown fields {extra}. Convert the checkpoint again."
            )
        given: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
        }
        given["rope"] = RopeConfig(**values["rope"])
        return cls(**given)


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(DecoderConfig):
    """A dense Qwen3 target."""

    tie_embeddings: bool = False

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "Qwen3Config":
        """Reads a Qwen3 `config.json`.

        Raises:
          ConfigError: a needed key is missing or malformed, or a key is present that this package does not implement.
        """
        keys = KeyReader("config.json (Qwen3)", values)
        config = cls(**decoder_fields(keys), tie_embeddings=keys.flag("tie_word_embeddings"))
        keys.refuse_rest(NEUTRAL_KEYS)
        return config


def refuse_quantised(values: Mapping[str, Any]) -> None:
    """Raises ConfigError where a file says, in transformers' way or in MLX's, that its weights are quantised."""
    for key in ("quantization_config", "quantization"):
        if found := values.get(key):
            method = found.get("quant_method", found) if isinstance(found, Mapping) else found
            raise ConfigError(
                f"config.json says in {key} that the weights are quantised ({method!r}), expected bfloat16, float16 or float32. "
                "Take its bfloat16 release, or write the checkpoint in bfloat16 (DeepSeek-V3's repository has a script that "
                "multiplies its 8-bit blocks by their scales; int4 experts need their publisher's tool) and remove the key"
            )


def decoder_fields(keys: KeyReader, *, head_dim: int | None = 128) -> dict[str, Any]:
    """The fields of `DecoderConfig` from a Qwen3-style `config.json`.

    Args:
      head_dim: what an absent `head_dim` means; None: the hidden size over the heads.
    """
    refuse_quantised(keys.values)
    hidden = keys.integer("hidden_size")
    layers, heads = keys.integer("num_hidden_layers"), keys.integer("num_attention_heads")
    kv_heads = keys.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{keys.subject}: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"
        )
    head_dim = keys.integer("head_dim", hidden // heads if head_dim is None else head_dim)
    if head_dim % 2:
        raise ConfigError(f"{keys.subject}: head_dim must be even for rotary embeddings, got {head_dim}")
    if (activation := keys.get("hidden_act", "silu")) != "silu":
        raise ConfigError(f"{keys.subject}: hidden_act must be silu, got {activation!r}")
    max_position = keys.integer("max_position_embeddings", 32_768)
    rope = RopeConfig.from_keys(keys, max_position)
    return {
        "vocab_size": keys.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": keys.integer("intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "norm_eps": keys.number("rms_norm_eps", 1e-6),
        "rope": rope,
        "max_position": rope.longest(max_position),
        "attention_bias": keys.flag("attention_bias"),
        "windows": layer_windows(keys, layers),
    }


def layer_windows(keys: KeyReader, layers: int) -> tuple[int | None, ...]:
    """Per layer window from `layer_types`, or from `use_sliding_window` and `max_window_layers` where that list is absent."""
    types = keys.get("layer_types")
    use = keys.flag("use_sliding_window", default=types is not None)
    # Absent keys mean what transformers' Qwen3Config takes for them; an explicit null window means none.
    assumed = 4096 if use and types is None and "sliding_window" not in keys.values else None
    window = keys.get("sliding_window", assumed)
    first = keys.integer("max_window_layers", 28, minimum=0)
    if types is None:
        sliding = use and window is not None
        types = ["sliding_attention" if sliding and i >= first else "full_attention" for i in range(layers)]
    known = isinstance(types, list | tuple) and all(kind in ("full_attention", "sliding_attention") for kind in types)
    if not known or len(types) != layers:
        raise ConfigError(
            f"{keys.subject}: layer_types must list full_attention or sliding_attention for each of {layers} layers, got {types!r}"
        )
    if "sliding_attention" in types:
        window = keys.integer("sliding_window", assumed)
    return tuple(window if kind == "sliding_attention" else None for kind in types)
