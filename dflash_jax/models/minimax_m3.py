"""MiniMax-M3 targets: configuration, the Flax modules, parameters and Hugging Face names.

Heads of most layers attend to blocks of keys that an indexer beside them chooses. Norms are zero-centered, half of a head rotates,
and feed-forwards are gpt-oss' clamped SwiGLU. Experts are chosen by sigmoids with a correction, beside one that every token takes.
Texts alone are read: the vision tower and layers that predict further tokens are left out. Source: transformers' MiniMaxM3VL
classes; the keys of the published files are those of MiniMax's own configuration.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from dflash_jax.config import HEAD_NORMS, NEUTRAL_KEYS, NEUTRAL_VALUES, DecoderConfig, KeyReader, decoder_fields, shown
from dflash_jax.errors import ConfigError
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.gemma import text_keys
from dflash_jax.models.layers import (
    MLP,
    SWIGLU_ALPHA,
    Attention,
    BlockRows,
    Cache,
    Linear,
    Mixer,
    PreNormLayer,
    Rotary,
    ZeroCenteredNorm,
    mlp_parameters,
    rotate,
)
from dflash_jax.models.minimax_m2 import expert_parameters
from dflash_jax.models.moe import MoE, expert_traits
from dflash_jax.models.parameters import Parameter, Source, single
from dflash_jax.models.traits import LayerTraits, decoder_traits
from dflash_jax.parallel.cut import by_columns, by_rows

COMPOSITE = "MiniMaxM3SparseForConditionalGeneration"
ARCHITECTURES = (COMPOSITE, "MiniMaxM3SparseForCausalLM")
MODEL_TYPES = ("minimax_m3_vl", "minimax_m3_text")
SPARSE, FULL = "minimax_m3_sparse", "full_attention"
# Layers that predict further tokens are left out.
_NEUTRAL = NEUTRAL_KEYS | {
    "max_model_len", "mtp_transformer_layers", "num_mtp_modules", "router_jitter_noise", "sparse_disable_index_value", "use_mtp",
}  # fmt: skip
_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    **NEUTRAL_VALUES, **HEAD_NORMS, "attention_output_gate": (None, False), "n_shared_experts": (None, 1),
    "norm_topk_prob": (None, True), "qk_norm_type": (None, "per_head"), "scoring_func": (None, "sigmoid"),
    "swiglu_alpha": (None, SWIGLU_ALPHA), "swiglu_beta": (None, 1, 1.0), "use_gemma_norm": (None, True),
    "use_routing_bias": (None, True),
}  # fmt: skip
_BESIDE_TEXT = NEUTRAL_KEYS | {
    "image_seq_length", "image_token_id", "image_token_index", "img_token_compression_config", "multimodal_projector_bias",
    "projector_hidden_act", "projector_hidden_size", "text_config", "video_token_id", "video_token_index", "vision_config",
    "vision_feature_layer", "vision_feature_select_strategy",
}  # fmt: skip
# Of `sparse_attention_config`, and what transformers calls the same.
_SPARSE_KEYS = {
    "sparse_index_dim": "index_head_dim", "sparse_num_index_heads": "index_n_heads", "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks", "sparse_local_block": "index_local_blocks",
}  # fmt: skip
_SPARSE_VALUES: Mapping[str, tuple[Any, ...]] = {
    "sparse_init_block": (None, 0), "sparse_score_type": (None, "max"), "use_sparse_attention": (None, True),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MiniMaxM3Config(DecoderConfig):
    """A MiniMax-M3 target; `intermediate_size` is that of layers without experts.

    Attributes:
      num_experts, experts_per_token: experts of a layer, and how many a token takes.
      moe_intermediate_size, shared_intermediate_size: inner width of one of these, and of the one that all tokens take.
      routing_scale: factor on what the former give.
      swiglu_limit: see `layers.gated`.
      dense_layers: layers without experts.
      indexers: of each layer, whether an indexer chooses blocks for its heads.
      index_head_dim: entries of an indexer's queries and keys (E).
      index_block, index_blocks, index_local: keys of a block, blocks that a query sees at most, and those that it always sees.
    """

    num_experts: int
    experts_per_token: int
    moe_intermediate_size: int
    shared_intermediate_size: int
    routing_scale: float = 2.0
    swiglu_limit: float = 7.0
    dense_layers: tuple[int, ...] = ()
    indexers: tuple[bool, ...]
    index_head_dim: int
    index_block: int
    index_blocks: int
    index_local: int
    tie_embeddings: bool = False

    # What `models.moe` asks of every configuration, and this family has in one form only.
    routing = "noaux_tc"
    routing_eps = 0.0
    num_groups = groups_per_token = 1
    num_shared_experts = 0
    norm_routing_weights = True

    def __post_init__(self) -> None:
        """Raises ConfigError as `DecoderConfig` does, and where indexers cannot be so."""
        super().__post_init__()
        turned = int(self.head_dim * self.rope.partial)
        if len(self.indexers) != self.num_layers or not turned <= self.index_head_dim or self.index_head_dim % 2:
            raise ConfigError(
                f"{type(self).__name__}: each of {self.num_layers} layers must say whether it has an indexer, and these have an "
                f"even size of at least the {turned} entries that rotate, got {shown(self.indexers)} and {self.index_head_dim}"
            )
        if self.index_local > self.index_blocks:
            raise ConfigError(
                f"{type(self).__name__}: a query cannot always see its last {self.index_local} blocks, it sees "
                f"{self.index_blocks} at most"
            )

    @property
    def index_topk(self) -> int:
        """Tokens that a query sees at most, where an indexer chooses."""
        return self.index_block * self.index_blocks if any(self.indexers) else self.max_position

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], notices: list[str] | None = None) -> "MiniMaxM3Config":
        """Reads a `config.json` of one of `ARCHITECTURES`.

        Args:
          notices: takes what was decided where the file leaves a choice, one sentence each.

        Raises:
          ConfigError: a needed key is missing or malformed, two keys contradict each other, the weights are quantized, or a key is
            present that this package does not implement.
        """
        keys, whole = text_keys(values, (COMPOSITE,), notices)
        fields: dict[str, Any] = decoder_fields(
            keys, windows=lambda _, layers: (None,) * layers, activations=("silu", "swigluoai")
        )
        layers, rope, experts = fields["num_layers"], fields["rope"], keys.integer("num_local_experts", 128)
        if (turned := keys.get("rotary_dim")) is not None:
            partial = keys.integer("rotary_dim") / fields["head_dim"]
            if rope.partial not in (1.0, partial) or not 0 < partial <= 1 or turned % 2:
                raise ConfigError(
                    f"{keys.subject}: rotary_dim={turned} must be even, at most head_dim={fields['head_dim']}, and what "
                    f"partial_rotary_factor says, here {rope.partial}"
                )
            fields["rope"] = replace(rope, partial=partial)
        if fields["attention_bias"]:
            raise ConfigError(f"{keys.subject}: attention_bias must be false, as the releases have it")
        taken, tied = keys.integer("num_experts_per_tok", 4), keys.flag("tie_word_embeddings")
        if taken > experts:
            raise ConfigError(f"{keys.subject}: num_experts_per_tok={taken} is more than num_local_experts={experts}")
        mixture = _kinds(keys, layers, "moe_layer_freq", "mlp_layer_types", ("dense", "sparse"), default=True)
        config = cls(
            **fields | {"intermediate_size": keys.integer("dense_intermediate_size", 12_288)},
            num_experts=experts,
            experts_per_token=taken,
            moe_intermediate_size=fields["intermediate_size"],
            shared_intermediate_size=keys.integer("shared_intermediate_size", 3072),
            routing_scale=keys.number("routed_scaling_factor", 2.0),
            swiglu_limit=keys.number("swiglu_limit", 7.0, positive=True),
            dense_layers=tuple(i for i, own in enumerate(mixture) if not own),
            tie_embeddings=tied,
            **_indexers(keys, layers, fields["num_kv_heads"]),
        )
        keys.refuse_rest(_NEUTRAL, _NEUTRAL_VALUES)
        if whole is not None:
            twice = {key: (keys.values.get(key),) for key in keys.read} | {"tie_word_embeddings": (None, tied)}
            whole.refuse_rest(_BESIDE_TEXT, {**NEUTRAL_VALUES, **twice})
        return config


def _kinds(
    keys: KeyReader, layers: int, numbers: str, names: str, kinds: tuple[str, str], *, default: bool
) -> tuple[bool, ...]:
    """Of each layer, whether it is of the second kind: a list of 0 and 1, or of names."""
    found = None
    for key, known in ((numbers, (0, 1)), (names, kinds)):
        if keys.get(key) is None:
            continue
        listed = tuple(one == known[1] for one in keys.kinds(key, layers, known))
        if found not in (None, listed):
            raise ConfigError(f"{keys.subject}: {numbers} and {names} say different things of a layer: keep one")
        found = listed
    return (default,) * layers if found is None else found


def _indexers(keys: KeyReader, layers: int, kv_heads: int) -> dict[str, Any]:
    """The fields of indexers: in MiniMax's files within `sparse_attention_config`, in transformers' at the top."""
    inside = KeyReader(f"{keys.subject}, sparse_attention_config", keys.get("sparse_attention_config", {}))
    sizes: dict[str, int] = {}
    defaults = {
        "index_head_dim": 128,
        "index_n_heads": 4,
        "index_block_size": 128,
        "index_topk_blocks": 16,
        "index_local_blocks": 1,
    }
    for theirs, own in _SPARSE_KEYS.items():
        least = 0 if own == "index_local_blocks" else 1
        outside = keys.integer(own, defaults[own], minimum=least)
        sizes[own] = inside.integer(theirs, outside, minimum=least)
        if keys.get(own) not in (None, sizes[own]):
            raise ConfigError(
                f"{keys.subject}: {own}={outside} and sparse_attention_config's {theirs}={sizes[own]}: keep one"
            )
    both = KeyReader(
        keys.subject,
        {"layer_types": keys.get("layer_types"), "sparse_attention_freq": inside.get("sparse_attention_freq")},
    )
    indexers = _kinds(both, layers, "sparse_attention_freq", "layer_types", (FULL, SPARSE), default=False)
    inside.refuse_rest({"sparse_disable_index_value"}, _SPARSE_VALUES)
    values = inside.values.get("sparse_disable_index_value")
    if values is not None and values != [int(one) for one in indexers]:
        raise ConfigError(
            f"{inside.subject}: sparse_disable_index_value must be 1 where there is an indexer, as in the releases, whose values "
            f"are no weights of theirs, got {shown(values)}"
        )
    if any(indexers) and sizes["index_n_heads"] != kv_heads:
        raise ConfigError(
            f"{keys.subject}: indexers must have a head for each of num_key_value_heads={kv_heads}, as the releases have it, got "
            f"{sizes['index_n_heads']}"
        )
    return {
        "indexers": indexers, "index_head_dim": sizes["index_head_dim"], "index_block": sizes["index_block_size"],
        "index_blocks": sizes["index_topk_blocks"], "index_local": sizes["index_local_blocks"],
    }  # fmt: skip


class BlockAttention(Attention):
    """Attention with zero-centered norms of heads and, where the configuration says so, an indexer beside it, whose queries and key
    are rows of the projection after the values'."""

    zero_centered = True

    def __init__(self, config: MiniMaxM3Config, index: int, traits: LayerTraits):
        super().__init__(config, index, traits, norm=ZeroCenteredNorm)
        n, k, h, e = config.num_heads, config.num_kv_heads, config.head_dim, config.index_head_dim
        self.chooses, self.index_place = config.indexers[index], sum(config.indexers[:index])
        if self.chooses:
            self.qkv_proj = Linear((n + 2 * k) * h + (k + 1) * e, config.hidden_size)
            self.index_q_norm, self.index_k_norm = (ZeroCenteredNorm(e, config.norm_eps) for _ in "qk")

    def mix(self, projected: Array, rotary: Rotary, attend: Any, cache: Cache) -> tuple[Array, Cache]:
        """See `Mixer`."""
        if not self.chooses:
            return super().mix(projected, rotary, attend, cache)
        heads, e = self.config.num_kv_heads, self.index_q_norm.offset[...].shape[0]
        qkv, q, k = jnp.split(projected, [projected.shape[-1] - (heads + 1) * e, projected.shape[-1] - e], axis=-1)
        q = rotate(self.index_q_norm(q.reshape(*q.shape[:-1], heads, e)), rotary)
        k = rotate(self.index_k_norm(k)[..., None, :], rotary)[..., 0, :]
        return attend.blocks(self, qkv, BlockRows(q, k), rotary, cache)


class MiniMaxM3Layer(PreNormLayer):
    """Pre-norm attention and experts, or one feed-forward, each added to the residual stream."""

    def __init__(self, config: MiniMaxM3Config, index: int, traits: LayerTraits):
        d, how = config.hidden_size, {"activation": traits.activation, "limit": config.swiglu_limit}
        self.input_norm, self.post_norm = (ZeroCenteredNorm(d, config.norm_eps) for _ in range(2))
        self.attn = BlockAttention(config, index, traits)
        dense = index in config.dense_layers
        self.mlp: Any = (
            MLP(d, config.intermediate_size, **how)
            if dense
            else MoE(config, shared=config.shared_intermediate_size, **how)
        )

    @property
    def mixer(self) -> Mixer:
        return self.attn


class MiniMaxM3(Decoder):
    """A MiniMax-M3 decoder; see `Decoder` for how it is called."""

    def __init__(self, config: MiniMaxM3Config):
        traits = minimax_m3_traits(config)
        super().__init__(
            config, [MiniMaxM3Layer(config, i, traits) for i in range(config.num_layers)], tied=config.tie_embeddings,
            norm=ZeroCenteredNorm(config.hidden_size, config.norm_eps),
        )  # fmt: skip


def minimax_m3_traits(config: MiniMaxM3Config) -> LayerTraits:
    """Layers whose heads attend to chosen blocks, with experts in all of them or in some."""
    own: dict[str, Any] = {
        "zero_centered": True, "activation": "clamped_swiglu", "block_sparse": any(config.indexers),
    }  # fmt: skip
    if len(config.dense_layers) == config.num_layers:
        return decoder_traits(config, **own)
    kind: Any = "mixed" if config.dense_layers else "moe"
    return decoder_traits(config, feed_forward=kind, experts=expert_traits(config), **own)


def minimax_m3_parameters(config: MiniMaxM3Config) -> tuple[Parameter, ...]:
    """Parameters of a MiniMax-M3 checkpoint."""
    v, d = config.vocab_size, config.hidden_size
    table = [single("embed.weight", "model.embed_tokens.weight", (v, d))]
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        table += [
            single(f"{ours}input_norm.offset", f"{theirs}input_layernorm.weight", (d,)),
            *_attention_parameters(config, i, f"{ours}attn.", f"{theirs}self_attn."),
            single(f"{ours}post_norm.offset", f"{theirs}post_attention_layernorm.weight", (d,)),
        ]
        if i in config.dense_layers:
            table += mlp_parameters(config, f"{ours}mlp.", f"{theirs}mlp.")
            continue
        theirs = f"{theirs}block_sparse_moe."
        shared = replace(config, intermediate_size=config.shared_intermediate_size)
        table += expert_parameters(config, f"{ours}mlp.", theirs)
        table += mlp_parameters(shared, f"{ours}mlp.shared.", f"{theirs}shared_experts.")
    table.append(single("norm.offset", "model.norm.weight", (d,)))
    if not config.tie_embeddings:
        table.append(single("lm_head.weight", "lm_head.weight", (v, d), cut=by_rows((v, v), optional=True)))
    return tuple(table)


def _attention_parameters(config: MiniMaxM3Config, index: int, ours: str, theirs: str) -> list[Parameter]:
    d, n, k, h = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    e, chooses = config.index_head_dim, config.indexers[index]
    rows = [("q_proj", n * h), ("k_proj", k * h), ("v_proj", k * h)]
    rows += [("index_q_proj", k * e), ("index_k_proj", e)] if chooses else []
    norms = [("q_norm", h), ("k_norm", h)] + ([("index_q_norm", e), ("index_k_norm", e)] if chooses else [])
    sources = tuple(Source(f"{theirs}{name}.weight", (count, d)) for name, count in rows)
    # Devices share layers without an indexer alone.
    cut = None if chooses else by_rows((n * h, n), (k * h, k), (k * h, k))
    return [
        Parameter(f"{ours}qkv_proj.weight", sources, cut=cut),
        single(f"{ours}o_proj.weight", f"{theirs}o_proj.weight", (d, n * h), cut=by_columns((n * h, n))),
        *(single(f"{ours}{name}.offset", f"{theirs}{name}.weight", (size,)) for name, size in norms),
    ]


_LEFT_OUT = re.compile(r"(model\.)?(mtp\.|vision_tower\.|vision_model\.|multi_modal_projector\.|patch_merge_mlp\.)")


def minimax_m3_canonical(name: str) -> str | None:
    """Checkpoint name as declared, as of a text model by itself; None for the tower, layers of further tokens and buffers computed
    here."""
    for prefix in ("model.language_model.", "language_model.model.", "language_model."):
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            name = name if name.startswith("lm_head.") else f"model.{name}"
            break
    return None if _LEFT_OUT.match(name) or "rotary_emb." in name else name
