"""Model configurations: frozen dataclasses read from a Hugging Face `config.json`.

`from_hf` reads every key that changes what a model computes and refuses the ones it does not know, so that a checkpoint never
runs as something it is not. `to_dict` and `from_dict` are this package's own JSON form, kept in converted folders.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, ClassVar, get_args, get_origin

from dflash_jax.errors import ConfigError

# Keys that describe training, generation's defaults, bookkeeping or other software. Whatever they say, no forward pass reads them.
NEUTRAL_KEYS = frozenset(
    """_attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash
    _experts_implementation_internal _flash_attn_2_enabled _name_or_path architectures assistant_confidence_threshold
    assistant_lookbehind attention_dropout attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id
    cache_implementation chunk_size_feed_forward classifier_dropout decoder_start_token_id diversity_penalty do_sample dtype
    early_stopping embd_pdrop encoder_no_repeat_ngram_size encoder_repetition_penalty eos_token_id epsilon_cutoff eta_cutoff
    experts_implementation exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    gradient_checkpointing hidden_dropout id2label initializer_range is_decoder label2id language length_penalty max_length
    min_length model_max_length model_type name_or_path no_repeat_ngram_size num_assistant_tokens
    num_assistant_tokens_schedule num_beam_groups num_beams num_labels num_return_sequences output_attentions
    output_hidden_states output_router_logits output_scores pad_token_id prefix pretraining_tp problem_type
    remove_invalid_values repetition_penalty resid_pdrop return_dict return_dict_in_generate router_aux_loss_coef
    sep_token_id suppress_tokens target_lookbehind task_specific_params temperature tf_legacy_loss tokenizer_class top_k
    top_p torch_dtype torchscript transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache
    use_return_dict xla_device""".split()
)
_ABSENT = (None, False, 0)
# Keys of features that no family here has, with what says that a model has none either. Any other value is refused by name.
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    # of transformers' PretrainedConfig
    "add_cross_attention": (None, False), "cross_attention_hidden_size": (None,), "is_encoder_decoder": (None, False),
    "per_layer_config": (None, {}), "pruned_heads": (None, {}), "tie_encoder_decoder": (None, False),
    # weights: the quantised ones have an error of their own
    "compression_config": (None,), "quantization": (None, {}), "quantization_config": (None, {}),
    # rotary embedding
    "is_neox_style": (None, True), "mrope_interleaved": (None, False), "mrope_section": (None,), "no_rope_layers": (None, []),
    "rope_is_neox_style": (None, True), "rope_local_base_freq": (None,), "use_mrope": (None, False),
    # attention
    "add_full_attention_sink_bias": (None, False), "add_swa_attention_sink_bias": (None, False),
    "attention_sink_bias": (None, False), "attn_logit_softcapping": _ABSENT, "attn_output_gate": (None, False),
    "clip_qkv": (None,), "gating": (None, False), "is_causal": (None, True), "qkv_bias": (None, False),
    "query_pre_attn_scalar": (None,), "use_bidirectional_attention": (None, False),
    # the rest of a layer, embedding and head
    "attention_multiplier": (None,), "embedding_multiplier": (None, 1), "final_logit_softcapping": _ABSENT,
    "hc_mult": (None,), "lm_head_bias": (None, False), "logits_scaling": (None, 1), "mlp_bias": (None, False),
    "residual_multiplier": (None, 1), "swiglu_limit": (None,), "use_bias": (None, False),
    # other inputs, and layers that predict further tokens
    "audio_config": (None,), "mtp_num_hidden_layers": _ABSENT, "num_mtp_modules": _ABSENT, "vision_config": (None,),
}  # fmt: skip
# What a dense model says of experts and of a latent that it does not have.
NO_EXPERTS: Mapping[str, tuple[Any, ...]] = dict.fromkeys(
    """kv_lora_rank moe_intermediate_size n_routed_experts n_shared_experts num_experts num_experts_per_tok num_local_experts
    num_nextn_predict_layers num_shared_experts q_lora_rank shared_expert_intermediate_size""".split(),
    _ABSENT,
)
# A norm on every head's queries and keys: the Qwen3 families and their drafters have it, whatever a file calls it.
HEAD_NORMS: Mapping[str, tuple[Any, ...]] = {"qk_layernorm": (None, True), "use_qk_norm": (None, True)}
# Families without it.
NO_HEAD_NORMS: Mapping[str, tuple[Any, ...]] = {"qk_layernorm": (None, False), "use_qk_norm": (None, False)}

# The largest sizes that are believed of a file, far above any model's: whatever is built from one is bounded before it is built.
MAX_LAYERS, MAX_BLOCK, MAX_POSITION = 1024, 1024, 1 << 28
MAX_EXPERTS_OF_ALL_LAYERS = 1 << 17
MAX_INTEGER = 2**31 - 1
_LARGEST = {
    "vocab_size": 1 << 24, "draft_vocab_size": 1 << 24, "hidden_size": 1 << 20, "target_hidden_size": 1 << 20,
    "intermediate_size": 1 << 24, "moe_intermediate_size": 1 << 24, "num_attention_heads": 1 << 14, "num_heads": 1 << 14,
    "num_key_value_heads": 1 << 14, "num_kv_heads": 1 << 14, "head_dim": 1 << 14, "num_hidden_layers": MAX_LAYERS,
    "num_layers": MAX_LAYERS, "num_target_layers": MAX_LAYERS, "num_nextn_predict_layers": MAX_LAYERS,
    "num_mtp_layers": MAX_LAYERS, "max_position_embeddings": MAX_POSITION, "original_max_position_embeddings": MAX_POSITION,
    "max_position": MAX_POSITION, "num_experts": 1 << 14, "num_local_experts": 1 << 14, "n_routed_experts": 1 << 14,
    "n_shared_experts": 1 << 14, "num_shared_experts": 1 << 14, "num_experts_per_tok": 1 << 14, "experts_per_token": 1 << 14,
    "q_lora_rank": 1 << 20, "kv_lora_rank": 1 << 20, "qk_nope_head_dim": 1 << 14, "qk_rope_head_dim": 1 << 14,
    "v_head_dim": 1 << 14, "block_size": MAX_BLOCK, "index_topk": MAX_POSITION, "index_n_heads": 1 << 14, "index_heads": 1 << 14,
    "index_head_dim": 1 << 14, "index_topk_freq": MAX_LAYERS, "index_skip_topk_offset": MAX_LAYERS,
}  # fmt: skip
_MOST_SHOWN = 200


def shown(value: Any) -> str:
    """A value of a file as a message shows it: on one line, and cut where it is long."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} ..."


def given(value: Any) -> str:
    """A value that is needed as a message shows it; None stands for a key that is absent or null."""
    return "nothing: the key is missing" if value is None else shown(value)


def architectures_of(values: Mapping[str, Any]) -> tuple[str, ...]:
    """The names in `architectures`; none where the key is absent or null.

    Raises:
      ConfigError: it is no list of names.
    """
    names = values.get("architectures")
    names = [] if names is None else names
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"config.json: architectures must be a list of names, got {shown(names)}")
    return tuple(names)


class KeyReader:
    """Reads a JSON object key by key, remembers which were read, and refuses the rest.

    Attributes:
      notices: what the reader of a file decided where the file leaves a choice, one sentence each.
    """

    def __init__(self, subject: str, values: Any, notices: list[str] | None = None):
        if not isinstance(values, Mapping):
            raise ConfigError(f"{subject} must be a JSON object, got {type(values).__name__}")
        self.subject, self.values, self.read = subject, values, set[str]()
        self.notices: list[str] = [] if notices is None else notices

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        value = self.values.get(key, default)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """An integer from `minimum` to the largest that is believed of this key."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ConfigError(f"{self.subject}: {key} must be an integer of at least {minimum}, got {given(value)}")
        if value > (largest := _LARGEST.get(key, MAX_INTEGER)):
            raise ConfigError(f"{self.subject}: {key} must be an integer of at most {largest:,}, got {shown(value)}")
        return value

    def number(self, key: str, default: float | None = None, *, positive: bool = False) -> float:
        value = self.get(key, default)
        if not _is_number(value):
            raise ConfigError(f"{self.subject}: {key} must be a finite number, got {given(value)}")
        if positive and value <= 0:
            raise ConfigError(f"{self.subject}: {key} must be positive, got {shown(value)}")
        return float(value)

    def flag(self, key: str, *, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.subject}: {key} must be true or false, got {shown(value)}")
        return value

    def refuse_rest(
        self, neutral: Collection[str] = NEUTRAL_KEYS, values: Mapping[str, tuple[Any, ...]] | None = None
    ) -> None:
        """Refuses every key that was not read, is not neutral whatever it says, and is not neutral with this value.

        False and null are values like others: where a key is not known, nobody can tell what its absence means.

        Args:
          values: by key, what is neutral there; None takes `NEUTRAL_VALUES`.

        Raises:
          ConfigError: names every key that is left, with its value.
        """
        values = NEUTRAL_VALUES if values is None else values
        left = {
            key: value
            for key, value in self.values.items()
            if key not in self.read
            and key not in neutral
            and not any(_same(value, each) for each in values.get(key, ()))
        }
        if left:
            listed = ", ".join(f"{key}={shown(value)}" for key, value in sorted(left.items()))
            raise ConfigError(
                f"{self.subject} sets keys this package does not implement: {listed}. They may change what the model computes, so "
                "it is not loaded. If a key is only bookkeeping, remove it from the file."
            )


def _is_number(value: Any) -> bool:
    """Whether a value is a number that a double holds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _same(value: Any, other: Any) -> bool:
    """Equality in which true is not 1 and false is not 0."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


# The one tap of a drafter that reads the target's hidden states after the final norm, rather than streams between layers.
FINAL_HIDDEN = -2


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. Kinds: default, linear, dynamic, llama3, yarn, longrope, proportional.

    Attributes:
      paired: whether entries 2i and 2i + 1 of a head turn together (not neox), otherwise i and i + half of those that turn. Of
        latent attention its own configuration says so.
      reach: positions that an engine serves, which decide the frequencies of `dynamic` and `longrope`: see `reaching`.
      long_factor, short_factor: of longrope, a divisor of each frequency beyond the original length and within it.
    """

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
    long_factor: tuple[float, ...] = ()
    short_factor: tuple[float, ...] = ()
    reach: int = 0
    paired: bool = False

    @classmethod
    def from_keys(
        cls,
        keys: KeyReader,
        max_position: int,
        *,
        partial: float = 1.0,
        neutral: Collection[str] = (),
        pairs: bool = False,
    ) -> "RopeConfig":
        """Reads `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before).

        A file may have both: model cards say to add `rope_scaling` with YaRN, also to a file whose `rope_parameters` say `default`.
        The kind is then the one that scales, and what stands in both, or inside and outside, must agree.

        Args:
          partial: what an absent `partial_rotary_factor` means.
          neutral: keys that say nothing of text alone.
          pairs: whether the family's heads may turn neighbours together, as `turns_pairs` reads it.

        Raises:
          ConfigError: a kind that is not implemented, a value that cannot be, two values for one thing, or a key that this kind
            does not read.
        """
        merged = _rope_values(keys)
        scaling = KeyReader(f"{keys.subject}, rope_parameters", merged, keys.notices)
        kind = scaling.get("rope_type", "default")
        if not isinstance(kind, str) or kind not in _ROPE_KEYS:
            raise ConfigError(f"{scaling.subject}: rope_type must be {_ROPE_KINDS}, got {shown(kind)}")
        theta, partial = scaling.number("rope_theta", 10_000.0), scaling.number("partial_rotary_factor", partial)
        if not 0 < partial <= 1:
            raise ConfigError(f"{scaling.subject}: partial_rotary_factor must be in (0, 1], got {partial}")
        if missing := [key for key in _ROPE_NEEDS.get(kind, ()) if merged.get(key) is None]:
            raise ConfigError(f"{scaling.subject}: rope_type {kind} needs {', '.join(missing)}")
        original = scaling.integer("original_max_position_embeddings", max_position)
        if (
            kind == "dynamic"
        ):  # transformers stretches what lies beyond max_position_embeddings, whatever else the file says
            original = max_position
        reads = _ROPE_KEYS[kind]

        def number(key: str, default: float) -> float:
            return scaling.number(key, default) if key in reads else default

        factor = number("factor", max_position / original if kind in ("yarn", "longrope") else 1.0)
        if factor <= 0 or theta <= 0 or (kind == "yarn" and theta <= 1):
            raise ConfigError(
                f"{scaling.subject}: factor and rope_theta must be positive, and rope_theta above 1 with yarn, got {factor} and "
                f"{theta}"
            )
        given = "attention_factor" in reads and scaling.get("attention_factor") is not None
        rope = cls(
            kind=kind,
            theta=theta,
            partial=partial,
            factor=factor,
            original_max_position=original,
            low_freq_factor=number("low_freq_factor", 1.0),
            high_freq_factor=number("high_freq_factor", 4.0),
            beta_fast=number("beta_fast", 32.0),
            beta_slow=number("beta_slow", 1.0),
            attention_factor=scaling.number("attention_factor", positive=True) if given else None,
            mscale=number("mscale", 0.0),
            mscale_all_dim=number("mscale_all_dim", 0.0),
            truncate=scaling.flag("truncate", default=True) if "truncate" in reads else True,
            long_factor=_divisors(scaling, "long_factor") if kind == "longrope" else (),
            short_factor=_divisors(scaling, "short_factor") if kind == "longrope" else (),
            paired=pairs and turns_pairs(keys, scaling),
        )
        if min(rope.low_freq_factor, rope.beta_fast, rope.beta_slow) <= 0 or min(rope.mscale, rope.mscale_all_dim) < 0:
            raise ConfigError(f"{scaling.subject}: betas and frequency factors must be positive, mscale not negative")
        if kind == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
            raise ConfigError(
                f"{scaling.subject}: high_freq_factor must be above low_freq_factor, got {rope.high_freq_factor} and "
                f"{rope.low_freq_factor}"
            )
        if kind == "yarn" and "attn_factor" in merged and (ignored := scaling.number("attn_factor", 1.0)) != 1:
            scaling.notices.append(
                f"attn_factor={ignored} of rope_scaling is left out, as transformers leaves it out; vLLM multiplies rotated "
                "queries and keys by it. For that, set attention_factor to the product in config.json"
            )
        scaling.refuse_rest({"finetuned", *neutral}, _ROPE_NEUTRAL)
        return rope

    @classmethod
    def from_dict(cls, values: Any) -> "RopeConfig":
        """From its fields by name. Raises ConfigError where they are others, or of another type."""
        fields = {field.name: field.type for field in dataclasses.fields(cls)}
        if isinstance(values, Mapping):  # folders that were converted before there were these are of other kinds
            values = {"long_factor": (), "short_factor": (), "reach": 0, "paired": False, **values}
            values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        if not isinstance(values, Mapping) or set(values) != set(fields):
            raise ConfigError(f"{cls.__name__}: expected the fields {sorted(fields)}, got {shown(values)}")
        for name, kind in fields.items():
            if not _fits(kind, values[name], MAX_POSITION):
                raise ConfigError(f"{cls.__name__}: {name} cannot be {shown(values[name])}")
        return cls(**values)

    def reaching(self, positions: int) -> "RopeConfig":
        """The same for an engine that serves so many positions.

        transformers chooses the frequencies of `dynamic` and `longrope` in each call by the longest sequence in it, so that keys
        that were cached before keep other ones. Here they are those of the longest sequence that an engine takes, for all tokens:
        vLLM does likewise, and a text is transformers' for one call of that length.
        """
        return dataclasses.replace(self, reach=positions) if self.follows_length else self

    @property
    def follows_length(self) -> bool:
        """Whether frequencies depend on how many positions an engine serves."""
        return self.kind in ("dynamic", "longrope")

    def check(self, head_dim: int) -> None:
        """Raises ConfigError where heads of so many entries cannot turn so."""
        pairs = int(head_dim * self.partial) // 2
        if self.kind == "dynamic" and pairs < 2:
            raise ConfigError(f"rope_type dynamic needs 2 pairs of entries that turn, heads of {head_dim} have {pairs}")
        if self.kind == "longrope":
            for name in ("long_factor", "short_factor"):
                if (given := len(getattr(self, name))) != pairs:
                    raise ConfigError(
                        f"rope_type longrope: {name} must have {pairs} numbers, one for each pair, got {given}"
                    )
            if self.original_max_position < 2:
                raise ConfigError(
                    f"rope_type longrope: original_max_position_embeddings must be at least 2, got {self.original_max_position}"
                )

    def longest(self, max_position: int) -> int:
        """Positions a model takes: YaRN and dynamic scaling stretch the original ones by their factor.

        Model cards say to add `rope_scaling` to config.json, where `max_position_embeddings` then stays what it was without.

        Raises:
          ConfigError: more than `MAX_POSITION`.
        """
        if self.kind not in ("yarn", "dynamic"):
            return max_position
        stretched = self.factor * self.original_max_position
        if stretched > MAX_POSITION:
            raise ConfigError(
                f"config.json: factor={self.factor} stretches {self.original_max_position:,} positions beyond {MAX_POSITION:,}"
            )
        return max(max_position, int(stretched))


def _divisors(keys: KeyReader, name: str) -> tuple[float, ...]:
    """A list of positive numbers. Raises ConfigError where it is anything else."""
    values = keys.get(name)
    if not isinstance(values, list) or not values or not all(_is_number(value) and value > 0 for value in values):
        raise ConfigError(f"{keys.subject}: {name} must be a list of positive numbers, got {shown(values)}")
    return tuple(float(value) for value in values)


# What each kind reads beside `rope_theta`, `partial_rotary_factor` and the original length, which others merely note.
_ROPE_KEYS: Mapping[str, Collection[str]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("factor", "attention_factor", "long_factor", "short_factor"),
    "proportional": ("factor",),
}
_ROPE_NEEDS: Mapping[str, Collection[str]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("long_factor", "short_factor"),
}
_ROPE_KINDS = f"{', '.join(list(_ROPE_KEYS)[:-1])} or {list(_ROPE_KEYS)[-1]}"
# Said of a rotation by a file whose kind does not read it, and the same as nothing.
_ROPE_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "factor": (None, 1), "attention_factor": (None, 1), "attn_factor": (None, 1), "mrope_interleaved": (None, False),
    "mrope_section": (None,), "is_neox_style": (None, True), "low_freq_factor": (None,), "high_freq_factor": (None,),
    "beta_fast": (None,), "beta_slow": (None,), "mscale": (None,), "mscale_all_dim": (None,), "truncate": (None,),
    "long_factor": (None,), "short_factor": (None,),
}  # fmt: skip


def turns_pairs(*places: KeyReader) -> bool:
    """Whether entries of a head that lie next to each other turn together, by the keys of vLLM, SGLang and transformers.

    Raises:
      ConfigError: two of them disagree.
    """
    said: list[tuple[str, bool]] = []
    for keys in places:
        for key, neox in (("is_neox_style", True), ("rope_is_neox_style", True), ("rope_interleave", False)):
            if keys.get(key) is not None:
                said.append((f"{key} of {keys.subject}", keys.flag(key) != neox))
    if len({paired for _, paired in said}) > 1:
        listed = " and ".join(name for name, _ in said)
        raise ConfigError(f"{listed} say two things of rotary pairs: keep the one that the model was trained with")
    return any(paired for _, paired in said)


def _rope_values(keys: KeyReader) -> dict[str, Any]:
    """All that a file says of its rotation as one object, with the kind under `rope_type`.

    Raises:
      ConfigError: it says two different things.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    for place in ("rope_parameters", "rope_scaling"):
        values = dict(KeyReader(f"{keys.subject}, {place}", keys.get(place, {})).values)
        kinds = [values.pop(key) for key in ("rope_type", "type") if values.get(key) is not None]
        values.pop("type", None)
        _agree(keys, [(f"{place}'s rope_type", kinds[0]), (f"{place}'s type", kinds[-1])] if kinds else [])
        found.append((place, values | ({"rope_type": kinds[0]} if kinds else {})))
    (newer, parameters), (older, scaling) = found
    if scaling.get("rope_type") not in (None, "default") and parameters.get("rope_type") == "default":
        del parameters["rope_type"]
        keys.notices.append(
            f"config.json has {older} beside {newer}: the {shown(scaling['rope_type'])} of {older} counts, with what {newer} "
            "says of rope_theta"
        )
    outside = {
        key: keys.get(key) for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    }
    merged: dict[str, Any] = {}
    for place, values in (("the file itself", outside), *found):
        for key, value in values.items():
            if value is not None and merged.get(key) is not None:
                _agree(keys, [(f"one {key}", merged[key]), (f"{key} of {place}", value)])
            merged[key] = merged.get(key) if value is None else value
    return {key: value for key, value in merged.items() if value is not None or key not in outside}


def _agree(keys: KeyReader, said: list[tuple[str, Any]]) -> None:
    """Raises ConfigError where a file gives two values to one thing."""
    if said and not all(_same(value, said[0][1]) for _, value in said):
        listed = " and ".join(f"{name}={shown(value)}" for name, value in said)
        raise ConfigError(f"{keys.subject} says {listed}: keep the one that the model was trained with")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Configuration of a Qwen3-shaped decoder stack, shared by the dense target and the DFlash drafter.

    Attributes:
      windows: per layer, the number of keys a query sees counting itself, or None for all.
      cut_sizes, key_head_counts: names of sizes, or of layers' sizes, that devices which share a model divide among them, and of
        numbers of key heads, of which several may hold the same.
    """

    cut_sizes: ClassVar[tuple[str, ...]] = ("num_heads", "intermediate_size")
    key_head_counts: ClassVar[tuple[str, ...]] = ("num_kv_heads",)

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

    def __post_init__(self) -> None:
        """Raises ConfigError for a value beyond its bound, or of another type, wherever it comes from."""
        _check_fields(type(self), {field.name: getattr(self, field.name) for field in dataclasses.fields(self)})
        experts = getattr(self, "num_experts", 0)
        if experts * self.num_layers > MAX_EXPERTS_OF_ALL_LAYERS:
            raise ConfigError(
                f"{type(self).__name__}: {self.num_layers} layers of {experts} experts are more than "
                f"{MAX_EXPERTS_OF_ALL_LAYERS:,} experts in all"
            )
        if self.windows and len(self.windows) != self.num_layers:
            raise ConfigError(f"{type(self).__name__}: {len(self.windows)} windows for {self.num_layers} layers")
        if any(
            getattr(self, field.name).follows_length for field in dataclasses.fields(self) if field.type is RopeConfig
        ):
            for rope, dim in self.rotations:
                rope.check(dim)

    @property
    def rotations(self) -> tuple[tuple[RopeConfig, int], ...]:
        """Every rotation, and the entries of a head that it is for."""
        return ((self.rope, self.head_dim),)

    @property
    def cached_layers(self) -> int:
        """Layers that keep keys and values in pages."""
        return self.num_layers

    @property
    def key_shapes(self) -> tuple[tuple[int, int], ...]:
        """Key heads, and the size of one, of each layer that keeps keys and values in pages."""
        return ((self.num_kv_heads, self.head_dim),) * self.cached_layers

    @property
    def value_dims(self) -> tuple[int, ...]:
        """The size of a value of each of these heads, in each of these layers."""
        return tuple(dim for _, dim in self.key_shapes)

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
        rotations = [field.name for field in dataclasses.fields(cls) if field.type is RopeConfig]
        given |= {name: RopeConfig.from_dict(values[name]) for name in rotations}
        _check_fields(cls, given)
        return cls(**given)


def reaching[C: DecoderConfig](config: C, positions: int) -> C:
    """The same for an engine that serves so many positions: see `RopeConfig.reaching`."""
    rotations = {
        field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.type is RopeConfig
    }
    changed = {name: rope.reaching(positions) for name, rope in rotations.items()}
    return config if changed == rotations else dataclasses.replace(config, **changed)


def _check_fields(config_class: type[DecoderConfig], values: Mapping[str, Any]) -> None:
    """Raises ConfigError unless every field has a value of its type, within its bound."""
    for field in dataclasses.fields(config_class):
        value, largest = values[field.name], _LARGEST.get(field.name, MAX_INTEGER)
        if not _fits(field.type, value, largest) or (field.name in _AT_LEAST_ONE and value < 1):
            kind = getattr(field.type, "__name__", str(field.type))
            raise ConfigError(
                f"{config_class.__name__}: {field.name} must be {kind} of at most {largest:,}, got {shown(value)}"
            )


_AT_LEAST_ONE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
)


def _fits(kind: Any, value: Any, largest: int) -> bool:
    """Whether a value is of a field's type: a plain one, a union, or a tuple of any length; integers up to `largest`."""
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_fits(get_args(kind)[0], each, largest) for each in value)
    if isinstance(kind, UnionType):
        return any(_fits(each, value, largest) for each in get_args(kind))
    if kind is float:
        return _is_number(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and FINAL_HIDDEN <= value <= largest
    return isinstance(value, kind)


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(DecoderConfig):
    """A dense Qwen3 target."""

    tie_embeddings: bool = False

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], notices: list[str] | None = None) -> "Qwen3Config":
        """Reads a Qwen3 `config.json`.

        Args:
          notices: takes what was decided where the file leaves a choice, one sentence each.

        Raises:
          ConfigError: a needed key is missing or malformed, or a key is present that this package does not implement.
        """
        keys = KeyReader("config.json (Qwen3)", values, notices)
        config = cls(**decoder_fields(keys), tie_embeddings=keys.flag("tie_word_embeddings"))
        keys.refuse_rest(NEUTRAL_KEYS, {**NEUTRAL_VALUES, **NO_EXPERTS, **HEAD_NORMS})
        return config


def refuse_quantised(values: Mapping[str, Any]) -> None:
    """Raises ConfigError where a file says, in transformers' way or in MLX's, that its weights are quantised."""
    for key in ("quantization_config", "quantization"):
        if found := values.get(key):
            method = shown(found.get("quant_method", found) if isinstance(found, Mapping) else found)
            if isinstance(found, Mapping) and "quant_method" not in found and {"bits", "group_size"} <= found.keys():
                method = f"MLX's format, {method}"
            raise ConfigError(
                f"config.json says in {key} that the weights are quantised ({method}), expected bfloat16, float16 or float32, or a "
                "format that is dequantized here: float8 (quant_method fp8 or fbgemm_fp8), modelopt, compressed-tensors, GPTQ, "
                "AWQ, AutoRound, bitsandbytes, and MXFP4 of gpt-oss. Take another release, or write the checkpoint in bfloat16 "
                "with its publisher's tool and remove the key"
            )


def decoder_fields(
    keys: KeyReader,
    *,
    head_dim: int | None = 128,
    windows: Callable[[KeyReader, int], tuple[int | None, ...]] | None = None,
    activations: Collection[str] = ("silu",),
    rope_neutral: Collection[str] = (),
) -> dict[str, Any]:
    """The fields of `DecoderConfig` from a Qwen3-style `config.json`.

    Args:
      head_dim: what an absent `head_dim` means; None: the hidden size over the heads.
      windows: reads each of so many layers' window; None: `layer_windows`.
      activations: names of the feed-forward's that the family has.
      rope_neutral: keys of the rotation that change nothing of the family.
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
    if (activation := keys.get("hidden_act", "silu")) not in activations:
        raise ConfigError(f"{keys.subject}: hidden_act must be {' or '.join(activations)}, got {shown(activation)}")
    max_position = keys.integer("max_position_embeddings", 32_768)
    rope = RopeConfig.from_keys(keys, max_position, pairs=True, neutral=rope_neutral)
    return {
        "vocab_size": keys.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": keys.integer("intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "norm_eps": keys.number("rms_norm_eps", 1e-6, positive=True),
        "rope": rope,
        "max_position": rope.longest(max_position),
        "attention_bias": keys.flag("attention_bias"),
        "windows": (layer_windows if windows is None else windows)(keys, layers),
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
            f"{keys.subject}: layer_types must list full_attention or sliding_attention for each of {layers} layers, got "
            f"{shown(types)}"
        )
    if "sliding_attention" in types:
        window = keys.integer("sliding_window", assumed)
    return tuple(window if kind == "sliding_attention" else None for kind in types)
