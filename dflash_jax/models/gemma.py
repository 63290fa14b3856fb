"""Common parts of Gemma 3 and Gemma 4 targets: readers of their files, two rotations, and sublayers with norms at both ends.

Five of six layers see a window of keys and rotate heads one way, the sixth sees all of them and rotates another way. Embeddings are
multiplied by the square root of their width, feed-forwards gated by GELU, head and embedding shared. Text models are read by
themselves and out of vision-language checkpoints, whose towers are left out. Absent keys mean what transformers' configurations
take for them.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from dflash_jax.config import (
    NEUTRAL_KEYS,
    NEUTRAL_VALUES,
    NO_EXPERTS,
    DecoderConfig,
    KeyReader,
    RopeConfig,
    architectures_of,
    refuse_quantized,
    shown,
)
from dflash_jax.errors import ConfigError
from dflash_jax.models.layers import (
    Attend,
    Attention,
    Cache,
    Norm,
    RMSNorm,
    Rotary,
)
from dflash_jax.models.parameters import Parameter, Source, single
from dflash_jax.models.traits import LayerTraits, decoder_traits
from dflash_jax.models.two_rotations import TwoRotationsDecoder, own_columns, own_rotation
from dflash_jax.parallel.cut import by_columns, by_rows

SLIDING, FULL = "sliding_attention", "full_attention"
_PATTERN = 6  # layers from one with full attention to the next
_LOCAL_THETA, _GLOBAL_THETA = 1e4, 1e6

_NEUTRAL = NEUTRAL_KEYS | {"_sliding_window_pattern", "sliding_window_pattern"}
# Attention that sees ahead is of pictures, or of models that embed texts.
NEUTRAL_OF_TEXT: Mapping[str, tuple[Any, ...]] = {
    **NEUTRAL_VALUES, **NO_EXPERTS, "attention_bias": (None, False), "attn_logit_softcapping": (None, 0),
    "use_bidirectional_attention": (None, False, "vision"),
}  # fmt: skip
# Of pictures and sounds, and of the tokens that stand for them.
_BESIDE_TEXT = NEUTRAL_KEYS | {
    "audio_config", "audio_token_id", "audio_token_index", "boa_token_id", "boa_token_index", "boi_token_id", "boi_token_index",
    "eoa_token_id", "eoa_token_index", "eoi_token_id", "eoi_token_index", "image_token_id", "image_token_index",
    "mm_tokens_per_image", "text_config", "video_token_id", "vision_config", "vision_soft_tokens_per_image",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(DecoderConfig):
    """A Gemma target; `rope` is the rotation of layers without a window.

    Attributes:
      local_rope: the rotation of layers with one.
      logit_softcap: c of `c * tanh(logit / c)`; 0 for no cap.
    """

    local_rope: RopeConfig
    logit_softcap: float = 0.0
    tie_embeddings: bool = True

    @property
    def embedding_scale(self) -> float:
        """Factor on embeddings."""
        return math.sqrt(self.hidden_size)

    def head_shape(self, index: int) -> tuple[int, int]:
        """Key heads of layer `index` and the size of all its heads."""
        del index
        return self.num_kv_heads, self.head_dim

    def of_layer(self, index: int) -> "GemmaConfig":
        """The same model with the heads of layer `index` in all layers."""
        kv_heads, head_dim = self.head_shape(index)
        return replace(self, num_kv_heads=kv_heads, head_dim=head_dim)

    @property
    def rotations(self) -> tuple[tuple[RopeConfig, int], ...]:
        """The rotation of layers with a window and that of layers without, and the size of the heads that turn by it."""
        last = next((i for i, window in enumerate(self.windows) if window is None), 0)
        return (self.local_rope, self.head_dim), (self.rope, self.head_shape(last)[1])


def text_keys(
    values: Mapping[str, Any], composites: Iterable[str], notices: list[str] | None
) -> tuple[KeyReader, KeyReader | None]:
    """Keys of a file's text model, and the keys beside them in the file of a vision-language model."""
    refuse_quantized(values)
    named = architectures_of(values)
    name = f"config.json ({named[0] if named else values.get('model_type', 'Gemma')})"
    if "text_config" not in values and not set(named) & set(composites):
        return KeyReader(name, values, notices), None
    whole = KeyReader(f"{name}, beside text_config", values)
    keys = KeyReader(f"{name}, text_config", whole.get("text_config", {}), notices)
    refuse_quantized(keys.values)
    return keys, whole


def refuse_rest(keys: KeyReader, whole: KeyReader | None, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises ConfigError for keys that were not read; what the text model reads may be said twice, but not in two ways."""
    keys.refuse_rest(_NEUTRAL, neutral)
    if whole is not None:
        whole.refuse_rest(_BESIDE_TEXT, {**NEUTRAL_VALUES, **{key: (keys.values.get(key),) for key in keys.read}})


def soft_cap(keys: KeyReader, name: str) -> float:
    """The cap of some scores; 0, as for null, where they have none."""
    if (cap := keys.number(name, 0.0)) < 0:
        raise ConfigError(f"{keys.subject}: {name} must be positive, or null for no cap, got {cap}")
    return cap


def tied(keys: KeyReader, whole: KeyReader | None) -> bool:
    """Whether embedding and head are one, which they are where neither place says."""
    if whole is None or "tie_word_embeddings" in keys.values:
        return keys.flag("tie_word_embeddings", default=True)
    return whole.flag("tie_word_embeddings", default=True)


def gemma_fields(
    keys: KeyReader, *, layers: int, vocab: int, window: int, max_position: int, full_rope: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields of `GemmaConfig`.

    Args:
      layers, vocab, window, max_position: what absent keys mean.
      full_rope: an absent rotation of layers without a window.
    """
    count, heads = keys.integer("num_hidden_layers", layers), keys.integer("num_attention_heads", 8)
    kv_heads = keys.integer("num_key_value_heads", 4)
    if heads % kv_heads:
        raise ConfigError(
            f"{keys.subject}: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"
        )
    head_dim = keys.integer("head_dim", 256)
    if head_dim % 2:
        raise ConfigError(f"{keys.subject}: head_dim must be even for rotary embeddings, got {head_dim}")
    for name in ("hidden_activation", "hidden_act"):
        if (found := keys.get(name, "gelu_pytorch_tanh")) != "gelu_pytorch_tanh":
            raise ConfigError(f"{keys.subject}: {name} must be gelu_pytorch_tanh, got {shown(found)}")
    max_position = keys.integer("max_position_embeddings", max_position)
    local, full = _rotations(keys, max_position, full_rope)
    return {
        "vocab_size": keys.integer("vocab_size", vocab),
        "hidden_size": keys.integer("hidden_size", 2304),
        "intermediate_size": keys.integer("intermediate_size", 9216),
        "num_layers": count,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "norm_eps": keys.number("rms_norm_eps", 1e-6, positive=True),
        "rope": full,
        "local_rope": local,
        "max_position": full.longest(max_position),
        "windows": _windows(keys, count, window),
        "logit_softcap": soft_cap(keys, "final_logit_softcapping"),
    }


def _windows(keys: KeyReader, layers: int, default: int) -> tuple[int | None, ...]:
    """Each layer's window: as `layer_types` lists them, otherwise every sixth layer sees everything."""
    every = keys.integer("sliding_window_pattern", keys.integer("_sliding_window_pattern", _PATTERN))
    absent = [FULL if (i + 1) % every == 0 else SLIDING for i in range(layers)]
    types = keys.kinds("layer_types", layers, (SLIDING, FULL), absent)
    window = keys.integer("sliding_window", default)
    return tuple(window if kind == SLIDING else None for kind in types)


def _rotations(keys: KeyReader, max_position: int, absent: Mapping[str, Any]) -> tuple[RopeConfig, RopeConfig]:
    """The rotation of layers with a window and that of layers without: both in `rope_parameters`, by kind of layer (transformers
    5), or the latter in `rope_theta` and `rope_scaling` and the base of the former in `rope_local_base_freq` (before)."""
    given = KeyReader(f"{keys.subject}, rope_parameters", keys.get("rope_parameters", {}), keys.notices)
    found = []
    for kind, base, theta in ((SLIDING, "rope_local_base_freq", _LOCAL_THETA), (FULL, "rope_theta", _GLOBAL_THETA)):
        named = KeyReader(f"{given.subject}, {kind}", given.get(kind, absent if kind == FULL else {})).values
        outside = keys.get(base, theta)  # read in any case: a file may say it twice
        own = {"rope_parameters": named} | ({} if named.get("rope_theta") is not None else {"rope_theta": outside})
        if kind == FULL:
            own["rope_scaling"] = keys.get("rope_scaling")
        found.append(RopeConfig.from_keys(KeyReader(f"{keys.subject}, {kind}", own, keys.notices), max_position))
    # transformers 5.10 writes the two it gives other families beside the kinds of layers, without a meaning of their own.
    beside = {"rope_theta": (None,), "rope_type": (None, "default")} if FULL in given.values else {}
    given.refuse_rest((), beside)
    return found[0], found[1]


def gemma_traits(config: DecoderConfig, **changes: Any) -> LayerTraits:
    """Layers that norm what comes out of their sublayers, with feed-forwards gated by GELU."""
    return decoder_traits(config, normed_out=True, activation="gelu_tanh", **changes)


class GemmaAttention(Attention):
    """Attention that turns heads by one of two rotations; see `models.two_rotations`."""

    def __init__(self, config: GemmaConfig, index: int, traits: LayerTraits, norm: type[Norm] = RMSNorm):
        super().__init__(config.of_layer(index), index, traits, norm=norm)
        self.turned = own_columns(config.rotations, config.windows[index])

    def mix(self, projected: Array, rotary: Rotary, attend: Attend, cache: Cache) -> tuple[Array, Cache]:
        """See `Mixer`."""
        return attend(self, projected, own_rotation(rotary, self.turned), cache)


class GemmaLayer(nnx.Module):
    """Attention and feed-forward, normed before and after, each added to the residual stream.

    Args:
      norm: of the stream, and of what a sublayer gives.
    """

    def __init__(self, config: GemmaConfig, attn: GemmaAttention, mlp: nnx.Module, norm: type[Norm]):
        d, eps = config.hidden_size, config.norm_eps
        self.input_norm, self.attn, self.attn_out_norm = norm(d, eps), attn, norm(d, eps)
        self.post_norm, self.mlp_out_norm = norm(d, eps), norm(d, eps)
        self.mlp: Any = mlp

    @property
    def mixer(self) -> GemmaAttention:
        return self.attn

    def __call__(self, x: Array, rotary: Rotary, attend: Attend, cache: Cache = None) -> tuple[Array, Cache]:
        attended, cache = self.attn(self.input_norm(x), rotary, attend, cache)
        x = x + self.attn_out_norm(attended)
        return x + self.mlp_out_norm(self.fed(x)), cache

    def fed(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Feed-forward of the stream x."""
        return self.mlp(self.post_norm(x))


class GemmaDecoder(TwoRotationsDecoder):
    """A Gemma decoder; see `Decoder` for how it is called."""

    def __init__(self, config: GemmaConfig, layer: Callable[[int], nnx.Module], norm: type[Norm]):
        super().__init__(
            config, [layer(i) for i in range(config.num_layers)], tied=config.tie_embeddings,
            norm=norm(config.hidden_size, config.norm_eps), embedding_scale=config.embedding_scale,
            logit_softcap=config.logit_softcap,
        )  # fmt: skip


def norm_parameters(config: DecoderConfig, ours: str, theirs: str, leaf: str) -> list[Parameter]:
    """The four norms of a layer; `leaf` is what a norm calls its weight."""
    names = {
        "input_norm": "input_layernorm", "attn_out_norm": "post_attention_layernorm", "post_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    }  # fmt: skip
    return [
        single(f"{ours}{own}.{leaf}", f"{theirs}{name}.weight", (config.hidden_size,)) for own, name in names.items()
    ]


def attention_parameters(
    config: GemmaConfig, index: int, ours: str, theirs: str, leaf: str, *, values: bool = True
) -> list[Parameter]:
    """Parameters of one layer's attention; `values` says whether these have a projection of their own."""
    d, n, (k, h) = config.hidden_size, config.num_heads, config.head_shape(index)
    rows = {"q_proj": n, "k_proj": k} | ({"v_proj": k} if values else {})
    heads = tuple(Source(f"{theirs}{name}.weight", (count * h, d)) for name, count in rows.items())
    return [
        Parameter(f"{ours}qkv_proj.weight", heads, cut=by_rows(*((count * h, count) for count in rows.values()))),
        single(f"{ours}o_proj.weight", f"{theirs}o_proj.weight", (d, n * h), cut=by_columns((n * h, n))),
        *(single(f"{ours}{one}.{leaf}", f"{theirs}{one}.weight", (h,)) for one in ("q_norm", "k_norm")),
    ]


_LEFT_OUT = re.compile(
    r"(model\.)?(vision_tower|vision_model|embed_vision|multi_modal_projector|audio_tower|embed_audio)\.|.*rotary_emb\."
)
# Where a vision-language checkpoint has its text model: transformers 5, and before.
_INSIDE = (("model.language_model.", "model."), ("language_model.model.", "model."), ("language_model.", ""))


def gemma_canonical(name: str) -> str | None:
    """Checkpoint name as declared, as of a text model by itself; None for towers of other inputs and buffers computed here."""
    if _LEFT_OUT.match(name):
        return None
    for prefix, ours in _INSIDE:
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name
