"""GLM-5.3-Flash targets: Kimi delta attention beside latent attention to chosen pools of tokens, over several residual streams.

Most layers keep a state (`models.kimi_delta`). The others have latent attention that nothing rotates, to the pools that an indexer
chooses (`attention.pooled`). Every sublayer reads and mixes several residual streams (`models.hyper_connections`); the final norm
is of their mean, and so are the features that drafters read of a layer. Source: transformers' Glm5Next classes, 5.17, whose
defaults absent keys mean; drafters' features as in SGLang (pull request 36708) and vLLM (55682): of the streams after a layer.

Of a checkpoint with pictures only the text model is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from dflash_kernels.recurrent.kda import KdaShape
from flax import nnx
from jaxtyping import Array, Float, Int

from dflash_jax.config import (
    NEUTRAL_KEYS,
    KeyReader,
    RopeConfig,
    architectures_of,
    refuse_quantized,
    shown,
)
from dflash_jax.errors import ConfigError
from dflash_jax.models.decoder import Decoder, target_parameters
from dflash_jax.models.deepseek import (
    LATENT_VALUES,
    NEUTRAL,
    V3,
    DeepseekConfig,
    MLAttention,
    deepseek_traits,
    expert_keys,
    latent_parameters,
)
from dflash_jax.models.deepseek_sparse import Indexer, dense_layers, indexer_parameters
from dflash_jax.models.hyper_connections import HyperConnection, MeanNorm
from dflash_jax.models.kimi_delta import KimiDelta, delta_keys, kda_parameters, kda_traits
from dflash_jax.models.layers import (
    MLP,
    Cache,
    Linear,
    PooledRows,
    RMSNorm,
    Rotary,
    mlp_parameters,
)
from dflash_jax.models.moe import MoE, moe_parameters
from dflash_jax.models.parameters import Parameter, single
from dflash_jax.models.traits import LayerTraits

TEXT, COMPOSITE = "Glm5NextForCausalLM", "Glm5NextForConditionalGeneration"
ARCHITECTURES, MODEL_TYPES = (TEXT, COMPOSITE), ("glm5_next", "glm5_next_text")
# Nothing rotates. What iterations of a head for further tokens (MTP) share is left out with that.
_NEUTRAL = NEUTRAL | {
    "index_share_for_mtp_iteration", "index_skip_topk_offset", "index_topk_freq", "indexer_rope_interleave", "rope_interleave",
    "rope_parameters", "rope_scaling", "rope_theta",
}  # fmt: skip
_VALUES: dict[str, tuple[Any, ...]] = {
    **{key: said for key, said in LATENT_VALUES.items() if key not in ("hc_mult", "layer_types", "swiglu_limit")},
    "index_kpool_compress": (None, True), "index_kpool_always_select_tail": (None, True), "mhc": (None, True),
    "mla_use_nope": (None, True), "moe_router_dtype": (None, "float32"), "num_local_experts": (None,),
}  # fmt: skip
_BESIDE_TEXT = NEUTRAL_KEYS | {
    "image_end_token_id", "image_start_token_id", "image_token_id", "text_config", "video_end_token_id", "video_start_token_id",
    "video_token_id", "vision_config",
}  # fmt: skip
_LINEAR, _LATENT = "linear_attention", "deepseek_sparse_attention"


@dataclass(frozen=True, kw_only=True)
class Glm5NextConfig(DeepseekConfig):
    """A GLM-5.3-Flash target. Sizes of heads and latents are those of layers with latent attention.

    Attributes:
      full_layers: layers with latent attention; all others keep a state.
      linear_heads, linear_head_dim, linear_lower_bound: of these, see `KdaShape`.
      index_topk, index_pool: tokens that a query sees in chosen pools at most, and those of one pool.
      index_heads, index_head_dim: of the indexers (I and E).
      streams, stream_rounds, stream_eps: see `HyperConnection`.
      swiglu_limit: see `layers.gated`.
    """

    full_layers: tuple[int, ...]
    linear_heads: int
    linear_head_dim: int
    linear_lower_bound: float | None
    index_topk: int
    index_pool: int
    index_heads: int
    index_head_dim: int
    streams: int
    stream_rounds: int
    stream_eps: float
    swiglu_limit: float

    def __post_init__(self) -> None:
        """Raises ConfigError as `DecoderConfig` does, and where pools cannot be so."""
        super().__post_init__()
        if self.index_topk % self.index_pool:
            raise ConfigError(
                f"Glm5NextConfig: index_topk={self.index_topk} is not a multiple of the {self.index_pool} tokens of a pool"
            )

    @property
    def rotations(self) -> tuple[tuple[RopeConfig, int], ...]:
        return ()

    @property
    def kda(self) -> KdaShape:
        """The shape of every layer that keeps a state."""
        return KdaShape(self.linear_heads, self.linear_head_dim, self.linear_lower_bound)

    @property
    def cached_layers(self) -> int:
        return len(self.full_layers)

    @property
    def indexers(self) -> tuple[bool, ...]:
        """Of each layer with pages, whether it has an indexer."""
        return (True,) * self.cached_layers

    @property
    def index_row_width(self) -> int:
        """Numbers that pages keep of a token for an indexer: its key, and the logits of its weights in a pool."""
        return 2 * self.index_head_dim

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], notices: list[str] | None = None) -> "Glm5NextConfig":
        """Reads a `config.json` of one of `ARCHITECTURES`.

        Args:
          notices: takes what was decided where the file leaves a choice, one sentence each.

        Raises:
          ConfigError: a needed key is missing or malformed, the weights are quantized, or a key is present that this package does
            not implement.
        """
        refuse_quantized(values)
        whole = None
        if COMPOSITE in architectures_of(values) or isinstance(values.get("text_config"), Mapping):
            whole = KeyReader("config.json (beside text_config)", values)
            values = KeyReader("config.json, text_config", whole.get("text_config")).values
            refuse_quantized(values)
        keys = KeyReader(f"config.json ({TEXT})", values, notices)
        decoder, experts = _decoder(keys), expert_keys(keys, V3)
        layers = decoder["num_layers"]
        experts["num_dense_layers"] = dense_layers(keys, layers, experts["num_dense_layers"])
        tied = keys.flag("tie_word_embeddings")
        if whole is not None and "tie_word_embeddings" not in values:
            tied = whole.flag("tie_word_embeddings")
        full = _full_layers(keys, layers)
        _check_indexers(keys, full, layers)
        config = cls(
            **decoder, **experts, **delta_keys(keys, full, layers, heads=64, bound=-5.0),
            latent_norm_eps=decoder["norm_eps"],
            full_layers=full,
            index_topk=keys.integer("index_topk", 2048),
            index_pool=keys.integer("index_kpool", 16),
            index_heads=keys.integer("index_n_heads", 32),
            index_head_dim=keys.integer("index_head_dim", 128),
            streams=keys.integer("hc_mult", 4),
            stream_rounds=keys.integer("hc_sinkhorn_iters", 20),
            stream_eps=keys.number("hc_eps", 1e-6, positive=True),
            swiglu_limit=keys.number("swiglu_limit", 10.0, positive=True),
            tie_embeddings=tied,
        )  # fmt: skip
        keys.refuse_rest(_NEUTRAL, _VALUES)
        if whole is not None:
            twice = {key: (values.get(key),) for key in keys.read} | {"tie_word_embeddings": (tied,)}
            whole.refuse_rest(_BESIDE_TEXT, {**LATENT_VALUES, **twice})
        return config


def _decoder(keys: KeyReader) -> dict[str, Any]:
    """The fields of `DecoderConfig`, and those of latent attention."""
    layers, heads = keys.integer("num_hidden_layers"), keys.integer("num_attention_heads")
    if (kv_heads := keys.integer("num_key_value_heads", heads)) != heads:
        raise ConfigError(f"{keys.subject}: num_key_value_heads must be num_attention_heads={heads}, got {kv_heads}")
    if (activation := keys.get("hidden_act", "silu")) != "silu":
        raise ConfigError(f"{keys.subject}: hidden_act must be silu, got {shown(activation)}")
    if (rotary := keys.integer("qk_rope_head_dim", 0, minimum=0)) != 0:
        raise ConfigError(f"{keys.subject}: qk_rope_head_dim must be 0, as nothing rotates, got {rotary}")
    plain = keys.integer("qk_nope_head_dim")
    if (head_dim := keys.integer("qk_head_dim", plain)) != plain:
        raise ConfigError(f"{keys.subject}: qk_head_dim must be qk_nope_head_dim={plain}, got {head_dim}")
    return {
        "vocab_size": keys.integer("vocab_size"),
        "hidden_size": keys.integer("hidden_size"),
        "intermediate_size": keys.integer("intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": plain,
        "norm_eps": keys.number("rms_norm_eps", 1e-5, positive=True),
        "rope": RopeConfig(),
        "max_position": keys.integer("max_position_embeddings", 1 << 20),
        "attention_bias": keys.flag("attention_bias"),
        "windows": (None,) * layers,
        "q_lora_rank": keys.integer("q_lora_rank"),
        "kv_lora_rank": keys.integer("kv_lora_rank"),
        "qk_nope_head_dim": plain,
        "qk_rope_head_dim": 0,
        "v_head_dim": keys.integer("v_head_dim"),
    }


def _full_layers(keys: KeyReader, layers: int) -> tuple[int, ...]:
    """Layers with latent attention: as `layer_types` lists them, otherwise every fourth one."""
    named = (_LINEAR, _LATENT, "full_attention")
    kinds = keys.get("layer_types", [named[i % 4 == 3] for i in range(layers)])
    if not isinstance(kinds, list | tuple) or len(kinds) != layers or not all(kind in named for kind in kinds):
        raise ConfigError(
            f"{keys.subject}: layer_types must list {', '.join(named[:2])} or {named[2]} for each of {layers} layers, "
            f"got {shown(kinds)}"
        )
    full = tuple(i for i, kind in enumerate(kinds) if kind != _LINEAR)
    if not 0 < len(full) < layers:
        raise ConfigError(
            f"{keys.subject}: layer_types must have layers of both kinds, as every release has, got {shown(kinds)}"
        )
    return full


def _check_indexers(keys: KeyReader, full: tuple[int, ...], layers: int) -> None:
    """Raises ConfigError where a layer with latent attention has no indexer: no layer before it hands its choice on."""
    for key in ("indexer_types", "index_topk_pattern"):
        kinds = keys.get(key)
        if kinds is not None and (
            not isinstance(kinds, list | tuple | str)
            or len(kinds) != layers
            or any(kinds[i] not in ("full", "F") for i in full)
        ):
            raise ConfigError(
                f"{keys.subject}: {key} must say full of each of the layers {list(full)}, which have latent attention, got "
                f"{shown(kinds)}"
            )
    every = keys.integer("index_topk_freq", 1)
    if every != 1 and keys.values.get("indexer_types") is None:
        raise ConfigError(
            f"{keys.subject}: index_topk_freq must be 1, or indexer_types list what each layer has, got {every}"
        )


class PoolIndexer(Indexer):
    """An indexer of pools, whose queries and keys nothing rotates."""

    def __init__(self, config: Glm5NextConfig):
        super().__init__(config)
        self.gate = Linear(config.index_head_dim, config.hidden_size)
        self.places = nnx.Param(jnp.zeros((config.index_pool, config.index_head_dim)))

    def turned(self, x: Array, rotary: Any) -> Array:
        del rotary
        return x

    def pooled(self, x: Float[Array, "B T D"], q_latent: Float[Array, "B T Rq"]) -> PooledRows:
        """Outputs for the layer's normed input and the queries' normed latent."""
        q, k, weights = self(x, q_latent, None)
        return PooledRows(q, k, self.gate(x), weights, self.places[...])


class PooledAttention(MLAttention):
    """Latent projections and an indexer around the caller's `attend.pooled`; `index` is the place among layers with pages."""

    config: Glm5NextConfig

    def __init__(self, config: Glm5NextConfig, index: int):
        super().__init__(config, index)
        self.indexer = PoolIndexer(config)

    def parts(self, q: Array, row: Array, rotary: Any) -> tuple[Array, Array, Array, Array]:
        """Queries, an empty part of them that would rotate, normed latents, and likewise an empty part of keys."""
        del rotary
        return q, q[..., :0], self.kv_a_norm(row), row[..., :0]

    def __call__(self, x: Array, rotary: Rotary, attend: Any, cache: Cache = None) -> tuple[Array, Cache]:
        """Raises NotImplementedError where `attend` is no `PooledAttend`."""
        del rotary
        if not hasattr(attend, "pooled"):
            raise NotImplementedError(
                f"{type(attend).__name__} has no attention to pools that an indexer chooses: take DenseAttend, or a HybridAttend"
            )
        q_latent, row = self.project_latents(x)
        index = self.indexer.pooled(x, q_latent)
        out, cache = attend.pooled(self, self.queries(q_latent), row, index, cache)
        return self.o_proj(out.reshape(*out.shape[:-2], -1)), cache


class StreamLayer(nnx.Module):
    """A mixer and a feed-forward, each behind a norm, which read several residual streams `[B,T,S,D]` and write to them."""

    attention_conv: Any = None
    mlp_conv: Any = None

    def __init__(self, config: Glm5NextConfig, index: int):
        d, eps, limit = config.hidden_size, config.norm_eps, config.swiglu_limit
        self.attn_streams, self.mlp_streams = (
            HyperConnection(config.streams, d, rounds=config.stream_rounds, eps=config.stream_eps, norm_eps=eps)
            for _ in range(2)
        )
        self.input_norm, self.post_norm = RMSNorm(d, eps), RMSNorm(d, eps)
        before, attends = sum(full < index for full in config.full_layers), index in config.full_layers
        self.attn: Any = PooledAttention(config, before) if attends else None
        self.kda: Any = None if attends else KimiDelta(d, config.kda, index - before, eps)
        dense = index < config.num_dense_layers
        self.mlp: Any = MLP(d, config.intermediate_size, limit=limit) if dense else MoE(config, limit=limit)

    @property
    def mixer(self) -> Any:
        """Of this layer: attention, or Kimi delta attention."""
        return self.kda if self.attn is None else self.attn

    def __call__(self, x: Array, rotary: Rotary, attend: Any, cache: Cache = None) -> tuple[Array, Cache]:
        read, mixing = self.attn_streams.read(x)
        out, cache = self.mixer(self.input_norm(read), rotary, attend, cache)
        x = self.attn_streams.write(x, out, mixing)
        read, mixing = self.mlp_streams.read(x)
        return self.mlp_streams.write(x, self.mlp(self.post_norm(read)), mixing), cache


class Glm5Next(Decoder):
    """A GLM-5.3-Flash decoder; see `Decoder` for how it is called, with a `PooledAttend` that is also a `DeltaAttend`."""

    def __init__(self, config: Glm5NextConfig):
        layers = [StreamLayer(config, i) for i in range(config.num_layers)]
        norm = MeanNorm(config.hidden_size, config.norm_eps)
        super().__init__(config, layers, tied=config.tie_embeddings, norm=norm)
        self.streams = config.streams

    def spread(self, x: Float[Array, "B T D"]) -> Float[Array, "B T S D"]:
        """All streams begin with the embedding."""
        return jnp.repeat(x[:, :, None], self.streams, axis=2)

    def tapped(self, stream: Float[Array, "B T S D"], index: int) -> Float[Array, "B T D"]:
        """Drafters read the mean of the streams after a layer, whichever it is."""
        del index
        return jnp.mean(stream, axis=2)

    def rotary(self, positions: Int[Array, "B T"]) -> Rotary:
        """None: no entry of a head rotates."""
        nothing = jnp.zeros((*positions.shape, 0), jnp.float32)
        return Rotary(nothing, nothing)


def glm5_next_traits(config: Glm5NextConfig) -> LayerTraits:
    """Layers of two kinds, over several streams."""
    return replace(deepseek_traits(config), delta=kda_traits(config.kda), streams=config.streams)


def glm5_next_parameters(config: Glm5NextConfig) -> tuple[Parameter, ...]:
    """Parameters of a GLM-5.3-Flash checkpoint, by the released names."""
    d, table = config.hidden_size, list[Parameter]()
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        for our, their in (("attn_streams", "attn"), ("mlp_streams", "ffn")):
            table += _stream_parameters(config, f"{ours}{our}.", f"{theirs}hc_{their}_")
        table.append(single(f"{ours}input_norm.weight", f"{theirs}input_layernorm.weight", (d,)))
        if i in config.full_layers:
            table += latent_parameters(config, f"{ours}attn.", f"{theirs}self_attn.")
            table += _indexer_parameters(config, f"{ours}attn.indexer.", f"{theirs}self_attn.indexer.")
        else:
            table += kda_parameters(d, config.kda, f"{ours}kda.", f"{theirs}self_attn.")
        table.append(single(f"{ours}post_norm.weight", f"{theirs}post_attention_layernorm.weight", (d,)))
        feed_forward = mlp_parameters if i < config.num_dense_layers else moe_parameters
        table += feed_forward(config, f"{ours}mlp.", f"{theirs}mlp.")
    return target_parameters(config, table, tied=config.tie_embeddings)


def _stream_parameters(config: Glm5NextConfig, ours: str, theirs: str) -> list[Parameter]:
    """Parameters of one `HyperConnection`, float32 in the released files."""
    streams = config.streams
    rows = (2 + streams) * streams
    shapes = {"rows": ("fn", (rows, streams * config.hidden_size)), "base": ("base", (rows,)), "scale": ("scale", (3,))}
    return [single(f"{ours}{our}", f"{theirs}{their}", shape, "float32") for our, (their, shape) in shapes.items()]


def _indexer_parameters(config: Glm5NextConfig, ours: str, theirs: str) -> list[Parameter]:
    width = config.index_head_dim
    return [
        *indexer_parameters(config, ours, theirs),
        single(f"{ours}gate.weight", f"{theirs}index_kpool_compress_gate", (width, config.hidden_size)),
        single(f"{ours}places", f"{theirs}index_kpool_compress_ape", (config.index_pool, width), "float32"),
    ]


def glm5_next_canonical(name: str) -> str | None:
    """Checkpoint name as declared above: without `language_model.`; None for the vision tower."""
    if name.startswith(("model.visual.", "visual.")):
        return None
    return name.replace("model.language_model.", "model.", 1)
