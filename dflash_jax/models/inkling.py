"""Inkling targets: configuration, the Flax modules, parameters and names in Hugging Face's and in the released files.

No head rotates. Attention has a bias by the distance to the key, which follows from the query's hidden state
(`attention.relative`); five of six layers have a window and head counts of their own. Keys and values are convolved along the
tokens, and so is what attention and feed-forwards give (`models.residual_conv`). Experts are chosen by sigmoids with a correction,
and shared experts take part in the sum that weights are divided by. Texts alone are read: the audio and the vision tower and layers
that predict further tokens are left out.

Source: transformers' Inkling classes, 5.17, and its mapping of the released names.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from dflash_kernels import dense_scores
from dflash_kernels.recurrent.residual_conv import ResidualConvShape
from flax import nnx
from jaxtyping import Array, Float, Int

from dflash_jax.config import NEUTRAL_KEYS, NEUTRAL_VALUES, DecoderConfig, KeyReader, shown
from dflash_jax.errors import ConfigError
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.gemma import text_keys
from dflash_jax.models.layers import MLP, Cache, Linear, RMSNorm, Rotary, gated
from dflash_jax.models.moe import Experts, expert_traits
from dflash_jax.models.parameters import Parameter, Source, single
from dflash_jax.models.residual_conv import ResidualConv
from dflash_jax.models.traits import LayerTraits, decoder_traits

COMPOSITE, TEXT = "InklingForConditionalGeneration", "InklingForCausalLM"
ARCHITECTURES, MODEL_TYPES = (COMPOSITE, TEXT), ("inkling_mm_model", "inkling_text")
LOCAL, FULL = "hybrid_sliding", "hybrid"
CONVS = 3  # of a layer: of keys and values, of what attention gives, of what its feed-forward gives
# No class reads the epsilon of the router; how many states a layer has follows from the rest; further tokens are not predicted.
_NEUTRAL = NEUTRAL_KEYS | {
    "chain_hidden_post_norm", "mtp_hidden_states_first", "mtp_local_layer_ids", "num_mtp_layers", "number_of_conv_states",
    "rms_norm_eps_moe_gate",
}  # fmt: skip
_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    **NEUTRAL_VALUES,
    **dict.fromkeys(
        ("norm_after_topk", "shared_expert_sink", "use_embed_norm", "use_gate_bias", "use_global_scale", "use_sconv"), (None, True)
    ),
    "gate_activation": (None, "sigmoid"), "o_bias": (None, False), "q_bias": (None, False),
    "tie_word_embeddings": (None, False),
}  # fmt: skip
_BESIDE_TEXT = NEUTRAL_KEYS | {
    "audio_bos_token_id", "audio_config", "audio_token_id", "image_bos_token_id", "image_token_id", "mtp_config", "text_config",
    "vision_config",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class InklingConfig(DecoderConfig):
    """An Inkling target; `num_heads`, `num_kv_heads` and `head_dim` are those of layers without a window, `intermediate_size` that
    of layers without experts. `vocab_size` are rows of the embedding and of the head.

    Attributes:
      local_heads, local_kv_heads, local_head_dim: the same of layers with a window.
      bias_width, bias_extent: profiles that a head's bias is mixed of, and distances that they cover in layers without a window;
        with one it is the window.
      growth_floor, growth_alpha: scores of layers without a window are times `1 + alpha * log((position + 1) / floor)` beyond that
        position; 0 for no such factor.
      conv_taps: tokens that a convolution reaches over, the newest included.
      dense_layers: layers without experts.
      num_experts, experts_per_token, moe_intermediate_size, num_shared_experts: routed experts of a layer, how many a token takes,
        inner width of one, and those that every token takes.
      routing_scale: factor on a token's weights.
      logit_divisor: of logits.
      true_vocab: tokens that there are; rows behind them fill up.
      in_turns: whether a checkpoint has rows of gates and of what they multiply in turns, as the released files do.
    """

    local_heads: int
    local_kv_heads: int
    local_head_dim: int
    bias_width: int
    bias_extent: int
    growth_floor: int = 0
    growth_alpha: float = 0.1
    conv_taps: int = 4
    dense_layers: tuple[int, ...] = ()
    num_experts: int
    experts_per_token: int
    moe_intermediate_size: int
    num_shared_experts: int
    routing_scale: float = 8.0
    logit_divisor: float = 24.0
    true_vocab: int
    in_turns: bool = False
    key_head_counts: ClassVar[tuple[str, ...]] = ("num_kv_heads", "local_kv_heads")

    # What `models.moe` asks of every configuration, and this family has in one form only.
    routing = "noaux_tc"
    num_groups = groups_per_token = 1
    norm_routing_weights = True

    def __post_init__(self) -> None:
        """Raises ConfigError as `DecoderConfig` does, and where heads, experts or tokens cannot be so."""
        super().__post_init__()
        subject = type(self).__name__
        sizes = (self.num_heads, self.num_kv_heads), (self.local_heads, self.local_kv_heads)
        if any(kv_heads < 1 or heads < 1 or heads % kv_heads for heads, kv_heads in sizes) or self.local_head_dim < 1:
            raise ConfigError(
                f"{subject}: heads must be a multiple of key heads, got {sizes[0]} without a window and {sizes[1]} with one"
            )
        if self.experts_per_token > self.num_experts or self.num_shared_experts < 1:
            raise ConfigError(
                f"{subject}: num_experts_per_tok={self.experts_per_token} must be at most n_routed_experts={self.num_experts}, and "
                f"n_shared_experts at least 1, got {self.num_shared_experts}"
            )
        if not 1 <= self.true_vocab <= self.vocab_size:
            raise ConfigError(
                f"{subject}: unpadded_vocab_size={self.true_vocab} must be at most vocab_size={self.vocab_size}"
            )
        if not 2 <= self.conv_taps <= 64 or self.logit_divisor <= 0:
            raise ConfigError(
                f"{subject}: conv_kernel_size must be from 2 to 64 and logits_mup_width_multiplier positive, got {self.conv_taps} "
                f"and {self.logit_divisor}"
            )

    def heads(self, index: int) -> tuple[int, int, int]:
        """Heads of layer `index`, its key heads, and the size of one."""
        if self.windows[index] is None:
            return self.num_heads, self.num_kv_heads, self.head_dim
        return self.local_heads, self.local_kv_heads, self.local_head_dim

    def extent(self, index: int) -> int:
        """Distances that the bias of layer `index` covers."""
        return self.windows[index] or self.bias_extent

    @property
    def key_shapes(self) -> tuple[tuple[int, int], ...]:
        return tuple(self.heads(i)[1:] for i in range(self.num_layers))

    @property
    def conv_shapes(self) -> tuple[ResidualConvShape, ...]:
        """Of what slots keep: of each layer keys beside values, what attention gives, and what its feed-forward gives."""
        widths = ((2 * kv_heads * dim, self.hidden_size, self.hidden_size) for kv_heads, dim in self.key_shapes)
        return tuple(ResidualConvShape(width, self.conv_taps) for layer in widths for width in layer)

    @property
    def head_scale(self) -> float:
        """Factor on products with the head, which drafters that borrow it apply as well."""
        return 1 / self.logit_divisor

    @classmethod
    def from_hf(
        cls, values: Mapping[str, Any], tensor_names: Collection[str] = (), notices: list[str] | None = None
    ) -> "InklingConfig":
        """Reads a `config.json` of one of `ARCHITECTURES`.

        Args:
          tensor_names: canonical ones of the checkpoint, which tell how rows of gates are stored.
          notices: takes what was decided where the file leaves a choice, one sentence each.

        Raises:
          ConfigError: a needed key is missing or malformed, two keys contradict each other, the weights are quantized, or a key is
            present that this package does not implement.
        """
        keys, whole = text_keys(values, (COMPOSITE,), notices)
        if (activation := keys.get("hidden_act", "silu")) != "silu":
            raise ConfigError(f"{keys.subject}: hidden_act must be silu, got {shown(activation)}")
        vocab = keys.integer("vocab_size", 201_024)
        config = cls(
            **_decoder(keys),
            **_widths(keys),
            vocab_size=vocab,
            true_vocab=min(keys.integer("unpadded_vocab_size", vocab), vocab),
            bias_width=keys.integer("d_rel", 16),
            bias_extent=keys.integer("rel_extent", 1024),
            growth_floor=keys.integer(
                "log_scaling_n_floor", 0, minimum=0 if keys.get("log_scaling_n_floor") is None else 1
            ),
            growth_alpha=keys.number("log_scaling_alpha", 0.1),
            conv_taps=_alias(keys, "conv_kernel_size", "sconv_kernel_size", 4),
            num_experts=_alias(keys, "n_routed_experts", "num_local_experts", 256),
            experts_per_token=keys.integer("num_experts_per_tok", 6),
            num_shared_experts=keys.integer("n_shared_experts", 2),
            routing_scale=keys.number("route_scale", 8.0),
            logit_divisor=_divisor(keys),
            in_turns=any("w13_" in name for name in tensor_names),
        )
        keys.refuse_rest(_NEUTRAL, _NEUTRAL_VALUES)
        if whole is not None:
            # What the text model reads may be said twice, but not in two ways.
            twice = {key: (keys.values.get(key),) for key in keys.read} | {"tie_word_embeddings": (None, False)}
            whole.refuse_rest(_BESIDE_TEXT, {**NEUTRAL_VALUES, **twice})
        return config


def _alias(keys: KeyReader, name: str, other: str, default: int) -> int:
    """A number that has two names; a file that gives both must give the same."""
    number = keys.integer(name, keys.integer(other, default))
    if (found := keys.integer(other, number)) != number:
        raise ConfigError(
            f"{keys.subject} says {name}={number} and {other}={found}: keep the one that the model was trained with"
        )
    return number


def _divisor(keys: KeyReader) -> float:
    name, other = "logits_mup_width_multiplier", "embedding_multiplier"
    number = keys.number(name, keys.number(other, 24.0, positive=True), positive=True)
    if (found := keys.number(other, number)) != number:
        raise ConfigError(
            f"{keys.subject} says {name}={number} and {other}={found}: keep the one that the model was trained with"
        )
    return number


def _decoder(keys: KeyReader) -> dict[str, Any]:
    """The fields of `DecoderConfig` but for widths of feed-forwards and the vocabulary, and heads of layers with a window."""
    layers = keys.integer("num_hidden_layers", 66)
    window = _alias(keys, "sliding_window_size", "sliding_window", 512)
    local = _listed(
        keys, layers, "local_layer_ids", "layer_types", (FULL, LOCAL), [i for i in range(layers) if (i + 1) % 6]
    )
    return {
        "hidden_size": keys.integer("hidden_size", 6144),
        "num_layers": layers,
        "num_heads": keys.integer("num_attention_heads", 64),
        "num_kv_heads": keys.integer("num_key_value_heads", 8),
        "head_dim": keys.integer("head_dim", 128),
        "local_heads": keys.integer("swa_num_attention_heads", 64),
        "local_kv_heads": keys.integer("swa_num_key_value_heads", 16),
        "local_head_dim": keys.integer("swa_head_dim", 128),
        "norm_eps": keys.number("rms_norm_eps", 1e-6, positive=True),
        "max_position": _alias(keys, "max_position_embeddings", "model_max_length", 131_072),
        "windows": tuple(window if i in local else None for i in range(layers)),
    }


def _widths(keys: KeyReader) -> dict[str, Any]:
    """Which layers have no experts, and widths of feed-forwards. Released files call that of dense ones `dense_intermediate_size`,
    and that of experts `intermediate_size`."""
    layers = keys.integer("num_hidden_layers", 66)
    before = keys.integer("dense_mlp_idx", 0, minimum=0)
    dense = _listed(keys, layers, None, "mlp_layer_types", ("sparse", "dense"), list(range(min(before, layers))))
    if "dense_mlp_idx" in keys.values and dense != tuple(range(min(before, layers))):
        raise ConfigError(
            f"{keys.subject}: dense_mlp_idx={before} and mlp_layer_types say different things of a layer: keep one"
        )
    inner = keys.integer("intermediate_size", 24_576)
    if keys.get("dense_intermediate_size") is None:
        return {
            "dense_layers": dense,
            "intermediate_size": inner,
            "moe_intermediate_size": keys.integer("moe_intermediate_size", 3072),
        }
    experts = inner if keys.get("intermediate_size") is not None else 3072
    return {
        "dense_layers": dense,
        "intermediate_size": keys.integer("dense_intermediate_size"),
        "moe_intermediate_size": keys.integer("moe_intermediate_size", experts),
    }


def _listed(
    keys: KeyReader, layers: int, numbers: str | None, names: str, kinds: tuple[str, str], default: list[int]
) -> tuple[int, ...]:
    """Layers of the second kind: `numbers` lists them, or `names` each layer's kind."""
    said = None if numbers is None else keys.get(numbers)
    if said is not None and not (
        isinstance(said, list | tuple) and all(type(one) is int and 0 <= one < layers for one in said)
    ):
        raise ConfigError(f"{keys.subject}: {numbers} must list layers from 0 to {layers - 1}, got {shown(said)}")
    listed = tuple(sorted(set(default if said is None else said)))
    if keys.get(names) is None:
        return listed
    found = tuple(i for i, kind in enumerate(keys.kinds(names, layers, kinds)) if kind == kinds[1])
    if said is not None and found != listed:
        raise ConfigError(f"{keys.subject}: {numbers} and {names} say different things of a layer: keep one")
    return found


class RelativeAttention(nnx.Module):
    """Attention with normed heads and a bias by distance, which rows of the projection after the values' mix.

    Attributes the caller reads: `index`, `causal`, `window` (left, right; None = unbounded), `scale`, `profiles` and `growth`.
    """

    def __init__(self, config: InklingConfig, index: int):
        n, k, h = config.heads(index)
        self.config, self.index, self.causal, self.sizes = config, index, True, (n, k, h)
        self.scale = 1 / h  # heads are normed
        reach, d = config.windows[index], config.hidden_size
        self.window = None if reach is None else (reach - 1, 0)
        self.qkv_proj = Linear((n + 2 * k) * h + n * config.bias_width, d)
        self.o_proj = Linear(d, n * h)
        self.q_norm, self.k_norm = (RMSNorm(h, config.norm_eps) for _ in "qk")
        self.profiles = nnx.Param(jnp.zeros((config.bias_width, config.extent(index))))
        self.kv_conv = ResidualConv(config.conv_shapes[CONVS * index], CONVS * index)

    def growth(self, positions: Int[Array, "B T"]) -> Float[Array, "B T"] | None:
        """Factor on scores by the query's position; None in layers without."""
        config = self.config
        if self.window is not None or not config.growth_floor:
            return None
        beyond = jnp.maximum((positions + 1).astype(jnp.float32) / config.growth_floor, 1.0)
        return 1.0 + config.growth_alpha * jnp.log(beyond)

    def __call__(self, x: Array, rotary: Rotary, attend: Any, cache: Cache = None) -> tuple[Array, Cache]:
        """Raises NotImplementedError where `attend` is no `RelativeAttend`."""
        del rotary  # the bias tells how far keys are
        if not hasattr(attend, "relative"):
            raise NotImplementedError(
                f"{type(attend).__name__} has no attention with a bias by distance: take DenseAttend, or a HybridAttend"
            )
        n, k, h = self.sizes
        q, kv, mixes = jnp.split(self.qkv_proj(x), [n * h, (n + 2 * k) * h], axis=-1)
        kv, cache = self.kv_conv(kv, attend, cache)
        q, mixes = (one.reshape(*one.shape[:-1], n, -1) for one in (q, mixes))
        keys, values = jnp.split(kv.reshape(*kv.shape[:-1], 2 * k, h), 2, axis=-2)
        out, cache = attend.relative(self, self.q_norm(q), self.k_norm(keys), values, mixes, cache)
        return self.o_proj(out.reshape(*out.shape[:-2], -1)), cache


class ScaledMLP(MLP):
    """Gated feed-forward with one learned factor on what it gives."""

    def __init__(self, hidden: int, inner: int):
        super().__init__(hidden, inner)
        self.scale = nnx.Param(jnp.ones((1,)))

    def __call__(self, x: Array) -> Array:
        return (super().__call__(x).astype(jnp.float32) * self.scale[...]).astype(x.dtype)


class SinkRouter(nnx.Module):
    """Scores of routed and of shared experts, in float32. Experts are chosen by the sigmoid of their score with a correction;
    sigmoids of those chosen and of all shared ones are divided by their sum."""

    def __init__(self, config: InklingConfig):
        self.count, self.taken, self.factor = config.num_experts, config.experts_per_token, config.routing_scale
        self.weight = nnx.Param(jnp.zeros((config.num_experts + config.num_shared_experts, config.hidden_size)))
        self.bias = nnx.Param(jnp.zeros((config.num_experts,)))
        self.scale = nnx.Param(jnp.ones((1,)))

    def __call__(self, x: Float[Array, "T D"]) -> tuple[Int[Array, "T k"], Float[Array, "T k"], Float[Array, "T S"]]:
        """Routed experts of every token, their weights, and those of the shared ones."""
        count, taken = self.count, self.taken
        log_scores = jax.nn.log_sigmoid(dense_scores(x, self.weight[...]).astype(jnp.float32))
        routed, shared = log_scores[..., :count], log_scores[..., count:]
        experts = jax.lax.top_k(jnp.exp(routed) + self.bias[...].astype(jnp.float32), taken)[1]
        both = jnp.concatenate([jnp.take_along_axis(routed, experts, axis=-1), shared], axis=-1)
        weights = jax.nn.softmax(both, axis=-1) * (self.factor * self.scale[...])
        return experts, weights[:, :taken], weights[:, taken:]


class SharedExperts(nnx.Module):
    """Experts that every token takes, each with a weight of the token's: gates of all and what they multiply in one matrix, down
    rows in another `[S*D, F]`."""

    def __init__(self, config: InklingConfig):
        self.count, d, f = config.num_shared_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj, self.down_proj = Linear(2 * self.count * f, d), Linear(self.count * d, f)

    def __call__(self, x: Float[Array, "T D"], weights: Float[Array, "T S"]) -> Float[Array, "T D"]:
        inner = gated(self.gate_up_proj(x), "silu", None).reshape(x.shape[0], self.count, -1)
        down: Any = self.down_proj.weight[...]
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        out = jnp.einsum("tsf,sdf->std", inner, down.reshape(self.count, -1, down.shape[-1]), precision=precision)
        return (out.astype(jnp.float32) * weights.T[..., None]).sum(axis=0).astype(x.dtype)


class SinkMoE(nnx.Module):
    """Routed experts, and shared ones that tokens weight beside them."""

    def __init__(self, config: InklingConfig):
        self.router, self.experts, self.shared = SinkRouter(config), Experts(config), SharedExperts(config)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        rows = x.reshape(-1, x.shape[-1])
        experts, weights, shared = self.router(rows)
        return (self.experts(rows, experts, weights) + self.shared(rows, shared)).reshape(x.shape)


class InklingLayer(nnx.Module):
    """Pre-norm attention and feed-forward, each convolved along the tokens before it is added to the residual stream."""

    def __init__(self, config: InklingConfig, index: int):
        d, eps, states = config.hidden_size, config.norm_eps, range(CONVS * index, CONVS * (index + 1))
        self.input_norm, self.post_norm = RMSNorm(d, eps), RMSNorm(d, eps)
        self.attn = RelativeAttention(config, index)
        self.attn_conv, self.mlp_conv = (ResidualConv(config.conv_shapes[i], i) for i in states[1:])
        dense = index in config.dense_layers
        self.mlp: Any = ScaledMLP(d, config.intermediate_size) if dense else SinkMoE(config)

    def __call__(self, x: Array, rotary: Rotary, attend: Any, cache: Cache = None) -> tuple[Array, Cache]:
        out, cache = self.attn(self.input_norm(x), rotary, attend, cache)
        out, cache = self.attn_conv(out, attend, cache)
        x = x + out
        out, cache = self.mlp_conv(self.mlp(self.post_norm(x)), attend, cache)
        return x + out, cache


class Inkling(Decoder):
    """An Inkling decoder; see `Decoder` for how it is called, with a `RelativeAttend` that is also a `DeltaAttend`.

    Embeddings are normed; drafters that borrow the table take its rows as they are. Logits of rows that fill up are -inf.
    """

    config: InklingConfig

    def __init__(self, config: InklingConfig):
        layers = [InklingLayer(config, i) for i in range(config.num_layers)]
        super().__init__(config, layers, tied=False, logit_scale=config.head_scale)
        self.embed_norm = RMSNorm(config.hidden_size, config.norm_eps)

    def spread(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The normed embeddings."""
        return self.embed_norm(x)

    def tapped_embedding(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The same."""
        return self.embed_norm(x)

    def rotary(self, positions: Int[Array, "B T *axes"]) -> Rotary:
        """By no angle: heads do not turn."""
        shape = (*positions.shape[:2], 0)
        return Rotary(jnp.ones(shape, jnp.float32), jnp.zeros(shape, jnp.float32))

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """See `Decoder`."""
        out, count = super().logits(hidden), self.config.true_vocab
        return out if count == out.shape[-1] else jnp.where(jnp.arange(out.shape[-1]) < count, out, -jnp.inf)

    def best(self, hidden: Float[Array, "... D"]) -> Int[Array, "..."]:
        """See `Decoder`."""
        if self.config.true_vocab == self.config.vocab_size:
            return super().best(hidden)
        return jnp.argmax(self.logits(hidden), axis=-1).astype(jnp.int32)


def inkling_traits(config: InklingConfig) -> LayerTraits:
    """Layers with two counts of heads and a bias by distance, with experts in most."""
    own: dict[str, Any] = {"rotary_dim": 0, "uneven_heads": True, "relative": True}
    if len(config.dense_layers) == config.num_layers:
        return decoder_traits(config, **own)
    kind: Any = "mixed" if config.dense_layers else "moe"
    return decoder_traits(config, feed_forward=kind, experts=expert_traits(config), **own)


def inkling_parameters(config: InklingConfig) -> tuple[Parameter, ...]:
    """Parameters of an Inkling checkpoint."""
    v, d = config.vocab_size, config.hidden_size
    table = [
        single("embed.weight", "model.embed_tokens.weight", (v, d)),
        single("embed_norm.weight", "model.embed_norm.weight", (d,)),
    ]
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        table += [
            single(f"{ours}input_norm.weight", f"{theirs}input_layernorm.weight", (d,)),
            *_attention_parameters(config, i, f"{ours}attn.", f"{theirs}self_attn."),
            _taps(config, f"{ours}attn_conv.", d, f"{theirs}attn_sconv."),
            single(f"{ours}post_norm.weight", f"{theirs}post_attention_layernorm.weight", (d,)),
        ]
        feed_forward = _dense_parameters if i in config.dense_layers else _expert_parameters
        table += [
            *feed_forward(config, f"{ours}mlp.", f"{theirs}mlp."),
            _taps(config, f"{ours}mlp_conv.", d, f"{theirs}mlp_sconv."),
        ]
    table += [single("norm.weight", "model.norm.weight", (d,)), single("lm_head.weight", "lm_head.weight", (v, d))]
    return tuple(table)


def _taps(config: InklingConfig, ours: str, channels: int, *theirs: str) -> Parameter:
    """Taps of a convolution of so many channels from each of some in the checkpoint, which are in float32 in all dtypes."""
    taps = config.conv_taps
    sources = tuple(Source(f"{one}conv1d.weight", (channels, 1, taps), kept=(channels, taps)) for one in theirs)
    return Parameter(f"{ours}taps", sources, "float32")


def _attention_parameters(config: InklingConfig, index: int, ours: str, theirs: str) -> list[Parameter]:
    d, r, (n, k, h) = config.hidden_size, config.bias_width, config.heads(index)
    rows = {"q_proj": n * h, "k_proj": k * h, "v_proj": k * h, "r_proj": n * r}
    return [
        Parameter(f"{ours}qkv_proj.weight", tuple(Source(f"{theirs}{one}.weight", (c, d)) for one, c in rows.items())),
        single(f"{ours}o_proj.weight", f"{theirs}o_proj.weight", (d, n * h)),
        *(single(f"{ours}{one}.weight", f"{theirs}{one}.weight", (h,)) for one in ("q_norm", "k_norm")),
        single(f"{ours}profiles", f"{theirs}rel_logits_proj.proj", (r, config.extent(index))),
        _taps(config, f"{ours}kv_conv.", k * h, f"{theirs}k_sconv.", f"{theirs}v_sconv."),
    ]


def _dense_parameters(config: InklingConfig, ours: str, theirs: str) -> list[Parameter]:
    d, f = config.hidden_size, config.intermediate_size
    gates = tuple(Source(f"{theirs}{one}.weight", (f, d)) for one in ("gate_proj", "up_proj"))
    return [
        single(f"{ours}gate_up_proj.in_turns", f"{theirs}w13_dn.weight", (2 * f, d))
        if config.in_turns
        else Parameter(f"{ours}gate_up_proj.weight", gates),
        single(f"{ours}down_proj.weight", f"{theirs}down_proj.weight", (d, f)),
        single(f"{ours}scale", f"{theirs}global_scale", (1,), "float32"),
    ]


def _expert_parameters(config: InklingConfig, ours: str, theirs: str) -> list[Parameter]:
    e, s, d, f = config.num_experts, config.num_shared_experts, config.hidden_size, config.moe_intermediate_size
    names = ("w13_weight", "shared_w13_weight") if config.in_turns else ("gate_up_proj", "")
    leaf = "in_turns" if config.in_turns else "weight"
    shared = tuple(
        Source(f"{theirs}shared_experts.{one}", (s, f, d), kept=(s * f, d)) for one in ("gate_proj", "up_proj")
    )
    if config.in_turns:
        shared = (Source(f"{theirs}shared_experts.{names[1]}", (s, 2 * f, d), kept=(2 * s * f, d)),)
    routed = Source(f"{theirs}experts.{names[0]}", (e, 2 * f, d), kept=(2 * e * f, d))
    down = Source(f"{theirs}experts.down_proj", (e, d, f), kept=(e * d, f))
    shared_down = Source(f"{theirs}shared_experts.down_proj", (s, d, f), kept=(s * d, f))
    return [
        single(f"{ours}router.weight", f"{theirs}gate.weight", (e + s, d)),
        single(f"{ours}router.bias", f"{theirs}gate.e_score_correction_bias", (e,), "float32"),
        single(f"{ours}router.scale", f"{theirs}gate.global_scale", (1,), "float32"),
        Parameter(f"{ours}experts.gate_up_proj.{leaf}", (routed,)),
        Parameter(f"{ours}experts.down_proj.weight", (down,)),
        Parameter(f"{ours}shared.gate_up_proj.{leaf}", shared),
        Parameter(f"{ours}shared.down_proj.weight", (shared_down,)),
    ]


def inkling_derived(config: InklingConfig, params: dict[str, Any]) -> dict[str, Any]:
    """`params` with all gates of a matrix, or of an expert, before what they multiply, in place of rows in turns."""
    for name in [name for name in params if name.endswith(".in_turns")]:
        rows = params.pop(name)
        groups = config.num_experts if ".experts." in name else 1
        apart = rows.reshape(groups, -1, 2, rows.shape[-1]).swapaxes(1, 2)
        params[f"{name.removesuffix('in_turns')}weight"] = apart.reshape(rows.shape)
    return params


_LEFT_OUT = re.compile(r"model\.(audio|audio_tower|visual|vision_tower|mtp)\.")
# Names of the released files, in the order in which they are replaced.
_RELEASED = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^model\.llm\.unembed\.", "lm_head."), (r"^model\.llm\.embed\.", "model.embed_tokens."),
        (r"^model\.(llm|language_model)\.", "model."), (r"\.attn\.wq_du\.", ".self_attn.q_proj."),
        (r"\.attn\.wk_dv\.", ".self_attn.k_proj."), (r"\.attn\.wv_dv\.", ".self_attn.v_proj."),
        (r"\.attn\.wr_du\.", ".self_attn.r_proj."), (r"\.attn\.wo_ud\.", ".self_attn.o_proj."), (r"\.attn\.", ".self_attn."),
        (r"sconv\.weight$", "sconv.conv1d.weight"), (r"\.attn_norm\.", ".input_layernorm."),
        (r"\.mlp_norm\.", ".post_attention_layernorm."), (r"\.mlp\.gate\.bias$", ".mlp.gate.e_score_correction_bias"),
        (r"\.mlp\.w2_md\.", ".mlp.down_proj."), (r"\.(shared_)?w2_weight$", ".down_proj"),
    )
)  # fmt: skip


def inkling_canonical(name: str) -> str | None:
    """Checkpoint name as declared, as of a text model by itself; None for towers and layers that predict further tokens."""
    if _LEFT_OUT.match(name):
        return None
    for pattern, ours in _RELEASED:
        name = pattern.sub(ours, name)
    return name
