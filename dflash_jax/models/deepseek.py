"""DeepSeek-V2, DeepSeek-V3 and Kimi-K2 targets: configuration, latent attention (MLA), parameters and Hugging Face names.

Sources: DeepSeek-V2, arXiv 2405.04434 (latent attention, section 2.1; device-limited routing), DeepSeek-V3, arXiv 2412.19437
(routing without an auxiliary loss). Absent keys mean what transformers' DeepseekV2Config and DeepseekV3Config take for them.

One row `[kv_c | k_pe]` stands for the keys and values of all heads of a token. A caller's `attend.latent` may expand it to full
keys and values (`MLAttention.expand`), or move the up-projections to the query and the output and attend to the rows themselves
(`absorb`, `up`); both give the same numbers.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dflash_jax.config import (
    NEUTRAL_KEYS,
    NEUTRAL_VALUES,
    DecoderConfig,
    KeyReader,
    RopeConfig,
    architectures_of,
    refuse_quantised,
    shown,
)
from dflash_jax.errors import ConfigError
from dflash_jax.models.decoder import Decoder, target_parameters
from dflash_jax.models.layers import (
    MLP,
    Cache,
    IndexedAttend,
    LatentAttend,
    Linear,
    RMSNorm,
    Rotary,
    SummedLinear,
    mlp_parameters,
    rotary_tables,
    rotate,
)
from dflash_jax.models.moe import MoE, expert_traits, moe_parameters
from dflash_jax.models.parameters import Parameter, Source, single
from dflash_jax.models.traits import LayerTraits, decoder_traits
from dflash_jax.parallel.cut import by_columns, by_rows

V2, V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
# Text models inside a vision-language checkpoint: everything about text is in `text_config`.
COMPOSITES = ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration")
ARCHITECTURES = (V2, V3, "KimiK2ForCausalLM", *COMPOSITES)
MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25")

# Training, bookkeeping, and a size that follows from others (transformers overwrites it).
NEUTRAL = NEUTRAL_KEYS | {"aux_loss_alpha", "ep_size", "head_dim", "seq_aux"}
# Latent attention has norms on its latents, not on heads, and no windows.
LATENT_VALUES = {
    **NEUTRAL_VALUES,
    "layer_types": (None,), "num_experts": (None,), "num_local_experts": (None,), "qk_layernorm": (None, False),
    "sliding_window": (None,), "use_qk_norm": (None, False), "use_sliding_window": (None, False),
}  # fmt: skip
# What stands beside `text_config`: the vision tower, which is not loaded, and ids that stand for its inputs.
_BESIDE_TEXT = NEUTRAL_KEYS | {
    "ignore_index", "image_token_id", "image_token_index", "media_placeholder_token_id", "text_config",
    "use_unified_vision_chunk", "video_placeholder", "video_token_id", "vision_config", "vision_end_token_id",
    "vision_start_token_id",
}  # fmt: skip
_ROUTING = {V2: ("greedy", "group_limited_greedy"), V3: ("noaux_tc",)}
_SCORING = {"greedy": "softmax", "group_limited_greedy": "softmax", "noaux_tc": "sigmoid"}
_ABSENT: dict[str, dict[str, Any]] = {
    V2: {"n_shared_experts": 2, "first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "mtp": 0},
    V3: {"n_shared_experts": 1, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "mtp": 1},
}


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(DecoderConfig):
    """A target with latent attention. `head_dim` is what queries and keys have: position-free and rotary dimensions together.

    Attributes:
      q_lora_rank: width of the queries' latent, or None where queries are projected directly.
      kv_lora_rank: width R of the latent that keys and values share.
      qk_nope_head_dim, qk_rope_head_dim, v_head_dim: P, r and V_h of one head.
      rope_interleaved: whether dimensions 2i and 2i+1 turn together (otherwise i and i + r/2).
      latent_norm_eps: epsilon of the norms of both latents. transformers takes 1e-6 here whatever `rms_norm_eps` says, others
        take `rms_norm_eps`; the two differ for Kimi-K2.5 only (1e-5). We follow transformers.
      num_experts, experts_per_token, num_shared_experts: routed experts, how many a token takes, and those every token takes.
      routing: greedy, group_limited_greedy or noaux_tc; see `models.moe.route`.
      num_groups, groups_per_token: the experts' groups, and how many of them a token may choose from.
      norm_routing_weights, routing_scale: whether a token's weights are made to sum to 1, and the factor on them after that.
      num_dense_layers: leading layers with a plain feed-forward of `intermediate_size`.
      moe_intermediate_size: inner width of one expert.
      num_mtp_layers: layers a checkpoint may hold past the last one, which predict further tokens and are left out here.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    num_experts: int
    experts_per_token: int
    num_shared_experts: int
    routing: str
    num_groups: int
    groups_per_token: int
    norm_routing_weights: bool
    routing_scale: float
    num_dense_layers: int
    moe_intermediate_size: int
    rope_interleaved: bool = True
    latent_norm_eps: float = 1e-6
    num_mtp_layers: int = 0
    tie_embeddings: bool = False

    @property
    def rotations(self) -> tuple[tuple[RopeConfig, int], ...]:
        return ((self.rope, self.qk_rope_head_dim),)

    @property
    def latent_width(self) -> int:
        """Numbers cached for one token and layer: the latent and the rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def attention_scale(self) -> float:
        """Factor on the scores: head_dim**-0.5, times the square of YaRN's magnitude for all dimensions where that is set.

        YaRN's factor on cos and sin (`models.layers.rope_frequencies`) is the ratio of both magnitudes and reaches only the
        rotary dimensions; this one reaches all.
        """
        rope, scale = self.rope, self.head_dim**-0.5
        if rope.kind == "default" or not rope.mscale_all_dim or rope.factor <= 1:
            return scale
        return scale * (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], notices: list[str] | None = None) -> "DeepseekConfig":
        """Reads a `config.json` of one of `ARCHITECTURES`.

        Args:
          notices: takes what was decided where the file leaves a choice, one sentence each.

        Raises:
          ConfigError: a needed key is missing or malformed, the weights are quantised, or a key is present that this package does
            not implement.
        """
        names, whole = set(architectures_of(values)), None
        if names & set(COMPOSITES) or values.get("model_type") == "kimi_k25":
            refuse_quantised(values)
            whole = KeyReader("config.json (beside text_config)", values)
            values = KeyReader("config.json, text_config", whole.get("text_config")).values
            names = set(architectures_of(values))
        refuse_quantised(values)
        kind = V2 if V2 in names or (not names and values.get("model_type") == "deepseek_v2") else V3
        keys = KeyReader(f"config.json ({kind})", values, notices)
        config = cls(**decoder_keys(keys), **attention_keys(keys), **expert_keys(keys, kind))
        keys.refuse_rest(NEUTRAL, LATENT_VALUES)
        if whole is not None:
            # What the text model reads may be said twice, but not in two ways.
            twice = {key: (values.get(key),) for key in keys.read} | {"tie_word_embeddings": (config.tie_embeddings,)}
            whole.refuse_rest(_BESIDE_TEXT, LATENT_VALUES | twice)
        return config


def decoder_keys(keys: KeyReader) -> dict[str, Any]:
    """The fields of `DecoderConfig`, and whether the head is the embedding."""
    layers, heads = keys.integer("num_hidden_layers"), keys.integer("num_attention_heads")
    if (kv_heads := keys.integer("num_key_value_heads", heads)) != heads:
        raise ConfigError(f"{keys.subject}: num_key_value_heads must be num_attention_heads={heads}, got {kv_heads}")
    if (activation := keys.get("hidden_act", "silu")) != "silu":
        raise ConfigError(f"{keys.subject}: hidden_act must be silu, got {shown(activation)}")
    max_position = keys.integer("max_position_embeddings")
    rope = RopeConfig.from_keys(keys, max_position)
    if rope.partial != 1:
        raise ConfigError(f"{keys.subject}: partial_rotary_factor must be 1 with latent attention, got {rope.partial}")
    return {
        "vocab_size": keys.integer("vocab_size"),
        "hidden_size": keys.integer("hidden_size"),
        "intermediate_size": keys.integer("intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": keys.integer("qk_nope_head_dim") + keys.integer("qk_rope_head_dim"),
        "norm_eps": keys.number("rms_norm_eps", 1e-6, positive=True),
        "rope": rope,
        "max_position": rope.longest(max_position),
        "attention_bias": keys.flag("attention_bias"),
        "windows": (None,) * layers,
        "tie_embeddings": keys.flag("tie_word_embeddings"),
    }


def attention_keys(keys: KeyReader) -> dict[str, Any]:
    """The fields of latent attention."""
    rotary, plain = keys.integer("qk_rope_head_dim"), keys.integer("qk_nope_head_dim")
    if (whole := keys.integer("qk_head_dim", plain + rotary)) != plain + rotary:
        raise ConfigError(
            f"{keys.subject}: qk_head_dim={whole} is not qk_nope_head_dim={plain} and qk_rope_head_dim={rotary} together"
        )
    if rotary % 2:
        raise ConfigError(f"{keys.subject}: qk_rope_head_dim must be even, got {rotary}")
    if "q_lora_rank" not in keys.values:
        raise ConfigError(f"{keys.subject}: q_lora_rank is missing; null says that queries are projected directly")
    return {
        "q_lora_rank": None if keys.get("q_lora_rank") is None else keys.integer("q_lora_rank"),
        "kv_lora_rank": keys.integer("kv_lora_rank"),
        "qk_nope_head_dim": keys.integer("qk_nope_head_dim"),
        "qk_rope_head_dim": rotary,
        "v_head_dim": keys.integer("v_head_dim"),
        "rope_interleaved": keys.flag("rope_interleave", default=True),
    }


def expert_keys(keys: KeyReader, kind: str) -> dict[str, Any]:
    """The fields of the mixture of experts; routing must be one that both the file and transformers' class for it mean."""
    absent = _ABSENT[kind]
    routing = keys.get("topk_method", _ROUTING[kind][0])
    if not isinstance(routing, str) or routing not in _ROUTING[kind]:
        raise ConfigError(f"{keys.subject}: topk_method must be {' or '.join(_ROUTING[kind])}, got {shown(routing)}")
    if (scoring := keys.get("scoring_func", _SCORING[routing])) != _SCORING[routing]:
        raise ConfigError(
            f"{keys.subject}: scoring_func must be {_SCORING[routing]} with {routing}, got {shown(scoring)}"
        )
    if (every := keys.integer("moe_layer_freq", 1)) != 1:
        raise ConfigError(f"{keys.subject}: moe_layer_freq must be 1, got {every}")
    normed = keys.flag("norm_topk_prob", default=kind == V3)
    if normed and kind == V2:
        raise ConfigError(
            f"{keys.subject}: norm_topk_prob must be false: what true means differs between programs, and no released model sets it"
        )
    experts, taken = keys.integer("n_routed_experts"), keys.integer("num_experts_per_tok")
    grouped = {"greedy": 1}.get(routing)
    groups, chosen = keys.integer("n_group", grouped), keys.integer("topk_group", grouped)
    if routing == "greedy":
        groups = chosen = 1
    size = experts // groups
    if experts % groups or chosen > groups or taken > chosen * size or (routing == "noaux_tc" and size < 2):
        raise ConfigError(
            f"{keys.subject}: n_routed_experts={experts}, n_group={groups}, topk_group={chosen} and num_experts_per_tok={taken} do "
            "not fit: groups must be of equal size, and those taken must hold the experts taken"
        )
    mtp = keys.integer("num_mtp_layers", absent["mtp"], minimum=0)
    return {
        "num_experts": experts,
        "experts_per_token": taken,
        "num_shared_experts": keys.integer("n_shared_experts", absent["n_shared_experts"]),
        "routing": routing,
        "num_groups": groups,
        "groups_per_token": chosen,
        "norm_routing_weights": normed,
        "routing_scale": keys.number("routed_scaling_factor", absent["routed_scaling_factor"]),
        "num_dense_layers": keys.integer("first_k_dense_replace", absent["first_k_dense_replace"], minimum=0),
        "moe_intermediate_size": keys.integer("moe_intermediate_size"),
        "num_mtp_layers": keys.integer("num_nextn_predict_layers", mtp, minimum=0),
    }


_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_VISION = ("vision_tower.", "mm_projector.", "model.vision_tower.", "model.mm_projector.")


def rotate_interleaved(x: Float[Array, "... heads r"], rotary: Rotary) -> Float[Array, "... heads r"]:
    """Turns dimensions 2i and 2i+1 together, and leaves them where they are."""
    halves = x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x.shape)
    turned = rotate(halves, rotary)
    return turned.reshape(*x.shape[:-1], 2, -1).swapaxes(-1, -2).reshape(x.shape)


class MLAttention(nnx.Module):
    """Latent projections around the caller's `attend.latent`.

    Attributes the caller reads: `index`, `causal`, `window`, `sinks` (None for all published models), `scale`, `config`.
    """

    def __init__(self, config: DeepseekConfig, index: int):
        self.config, self.index, self.causal = config, index, True
        self.window, self.sinks = None, None
        self.scale = config.attention_scale
        n, d, bias = config.num_heads, config.hidden_size, config.attention_bias
        self.direct = config.q_lora_rank is None
        if config.q_lora_rank is None:
            self.q_proj = Linear(n * config.head_dim, d)
            self.kv_a_proj = Linear(config.latent_width, d, bias=bias)
        else:
            # Both latents come from one product over x: the queries' rows first.
            self.qkv_a_proj = Linear(config.q_lora_rank + config.latent_width, d, bias=bias)
            self.q_a_norm = RMSNorm(config.q_lora_rank, config.latent_norm_eps)
            self.q_b_proj = Linear(n * config.head_dim, config.q_lora_rank)
        self.kv_a_norm = RMSNorm(config.kv_lora_rank, config.latent_norm_eps)
        self.kv_b_proj = Linear(n * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank)
        self.o_proj = SummedLinear(d, n * config.v_head_dim, bias=bias)

    def project(self, x: Array) -> tuple[Array, Array]:
        """Queries `[B,T,N,P+r]` and latent rows `[B,T,R+r]` of `x [B,T,D]`, neither normed nor rotated."""
        if self.direct:
            return self._by_heads(self.q_proj(x)), self.kv_a_proj(x)
        q_latent, row = self.project_latents(x)
        return self.queries(q_latent), row

    def project_latents(self, x: Array) -> tuple[Array, Array]:
        """The queries' normed latent, where queries have one, and latent rows as of `project`."""
        q_a, row = jnp.split(self.qkv_a_proj(x), [self.config.q_lora_rank or 0], axis=-1)
        return self.q_a_norm(q_a), row

    def queries(self, q_latent: Array) -> Array:
        """Queries `[B,T,N,P+r]` of their normed latent."""
        return self._by_heads(self.q_b_proj(q_latent))

    def _by_heads(self, q: Array) -> Array:
        return q.reshape(*q.shape[:-1], self.config.num_heads, self.config.head_dim)

    def parts(self, q: Array, row: Array, rotary: Rotary) -> tuple[Array, Array, Array, Array]:
        """`q_nope`, `q_pe` (rotated), `kv_c` (normed) and `k_pe` (rotated) of what `project` gives."""
        config = self.config
        turn = rotate_interleaved if config.rope_interleaved else rotate
        q_nope, q_pe = jnp.split(q, [config.qk_nope_head_dim], axis=-1)
        kv_c, k_pe = jnp.split(row, [config.kv_lora_rank], axis=-1)
        # The rotary key is one for all heads.
        k_pe = turn(k_pe[..., None, :], rotary)[..., 0, :]
        return q_nope, turn(q_pe, rotary), self.kv_a_norm(kv_c), k_pe

    def __call__(self, x: Array, rotary: Rotary, attend: LatentAttend, cache: Cache = None) -> tuple[Array, Cache]:
        out, cache = attend.latent(self, *self.project(x), rotary, cache)
        return self.o_proj(out.reshape(*out.shape[:-2], -1)), cache

    @property
    def w_uk(self) -> Float[Array, "N P R"]:
        """From the latent to every head's position-free keys."""
        return self._up_projection()[:, : self.config.qk_nope_head_dim]

    @property
    def w_uv(self) -> Float[Array, "N Vh R"]:
        """From the latent to every head's values."""
        return self._up_projection()[:, self.config.qk_nope_head_dim :]

    def _up_projection(self) -> Array:
        return self.kv_b_proj.weight[...].reshape(self.config.num_heads, -1, self.config.kv_lora_rank)

    def absorb(self, q_nope: Float[Array, "... N P"], q_pe: Float[Array, "... N r"]) -> Float[Array, "... N W"]:
        """Queries for latent rows: their dot product with a row is that of the expanded query and key."""
        latent = jnp.einsum("...np,npr->...nr", q_nope, self.w_uk, precision=_precision(q_nope))
        return jnp.concatenate([latent, q_pe], axis=-1)

    def up(self, o_latent: Float[Array, "... N R"]) -> Float[Array, "... N Vh"]:
        """Values from an average over latents."""
        return jnp.einsum("...nr,nvr->...nv", o_latent, self.w_uv, precision=_precision(o_latent))

    def expand(self, kv_c: Float[Array, "... R"]) -> tuple[Float[Array, "... N P"], Float[Array, "... N Vh"]]:
        """Every head's position-free keys, and its values."""
        both = self.kv_b_proj(kv_c).reshape(*kv_c.shape[:-1], self.config.num_heads, -1)
        k_nope, v = jnp.split(both, [self.config.qk_nope_head_dim], axis=-1)
        return k_nope, v


def _precision(x: Array) -> jax.lax.Precision | None:
    """float32 stays float32 on GPUs, as in `models.layers.linear`."""
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


class DeepseekLayer(nnx.Module):
    """Latent attention and feed-forward, each added to the residual stream; `attention` makes a layer's from its index."""

    def __init__(self, config: DeepseekConfig, index: int, attention: type[MLAttention] = MLAttention):
        self.input_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attn: Any = attention(config, index)
        self.post_norm = RMSNorm(config.hidden_size, config.norm_eps)
        dense = index < config.num_dense_layers
        self.mlp = MLP(config.hidden_size, config.intermediate_size) if dense else MoE(config)

    def __call__(
        self, x: Array, rotary: Rotary, attend: LatentAttend | IndexedAttend, cache: Cache = None
    ) -> tuple[Array, Cache]:
        attended, cache = self.attn(self.input_norm(x), rotary, attend, cache)
        x = x + attended
        return x + self.mlp(self.post_norm(x)), cache


def deepseek_traits(config: DeepseekConfig) -> LayerTraits:
    """Latent attention; experts in all layers but the first ones."""
    dense = min(config.num_dense_layers, config.num_layers)
    kind = "dense" if dense == config.num_layers else "mixed" if dense else "moe"
    experts = None if kind == "dense" else expert_traits(config)
    return decoder_traits(
        config,
        attention="latent",
        qk_norm=False,
        rotary_dim=config.qk_rope_head_dim,
        feed_forward=kind,
        experts=experts,
    )


class Deepseek(Decoder):
    """A decoder with latent attention; see `Decoder` for how it is called, with a `LatentAttend`."""

    def __init__(self, config: DeepseekConfig, attention: type[MLAttention] = MLAttention):
        layers = [DeepseekLayer(config, i, attention) for i in range(config.num_layers)]
        self.rotary_dim = config.qk_rope_head_dim
        super().__init__(config, layers, tied=config.tie_embeddings)

    def rotary(self, positions: Int[Array, "B T"]) -> Rotary:
        return rotary_tables(positions, self.config.rope, self.rotary_dim)


def deepseek_parameters(
    config: DeepseekConfig, beside: Callable[[int, str, str], list[Parameter]] | None = None
) -> tuple[Parameter, ...]:
    """Parameters of a checkpoint with latent attention.

    `beside` declares what layer i's attention has beside that, given i, our prefix and the checkpoint's.
    """
    d, table = config.hidden_size, list[Parameter]()
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        table.append(single(f"{ours}input_norm.weight", f"{theirs}input_layernorm.weight", (d,)))
        table += latent_parameters(config, f"{ours}attn.", f"{theirs}self_attn.")
        table += [] if beside is None else beside(i, f"{ours}attn.", f"{theirs}self_attn.")
        table.append(single(f"{ours}post_norm.weight", f"{theirs}post_attention_layernorm.weight", (d,)))
        if i < config.num_dense_layers:
            table += mlp_parameters(config, f"{ours}mlp.", f"{theirs}mlp.")
        else:
            table += moe_parameters(config, f"{ours}mlp.", f"{theirs}mlp.")
    return target_parameters(config, table, tied=config.tie_embeddings)


def latent_parameters(config: DeepseekConfig, ours: str, theirs: str) -> list[Parameter]:
    """Parameters of one layer's latent attention."""
    d, n, latent, rank = config.hidden_size, config.num_heads, config.kv_lora_rank, config.q_lora_rank
    values = n * config.v_head_dim
    queries, expanded = by_rows((n * config.head_dim, n)), n * config.qk_nope_head_dim + values
    down = [("kv_a_proj_with_mqa", config.latent_width)]
    if rank is None:
        table = [single(f"{ours}q_proj.weight", f"{theirs}q_proj.weight", (n * config.head_dim, d), cut=queries)]
        fused = "kv_a_proj"
    else:
        table = [
            single(f"{ours}q_a_norm.weight", f"{theirs}q_a_layernorm.weight", (rank,)),
            single(f"{ours}q_b_proj.weight", f"{theirs}q_b_proj.weight", (n * config.head_dim, rank), cut=queries),
        ]
        fused, down = "qkv_a_proj", [("q_a_proj", rank), *down]
    table += [
        Parameter(f"{ours}{fused}.weight", tuple(Source(f"{theirs}{name}.weight", (rows, d)) for name, rows in down)),
        single(f"{ours}kv_a_norm.weight", f"{theirs}kv_a_layernorm.weight", (latent,)),
        single(f"{ours}kv_b_proj.weight", f"{theirs}kv_b_proj.weight", (expanded, latent), cut=by_rows((expanded, n))),
        single(f"{ours}o_proj.weight", f"{theirs}o_proj.weight", (d, values), cut=by_columns((values, n))),
    ]
    if config.attention_bias:
        biases = tuple(Source(f"{theirs}{name}.bias", (rows,)) for name, rows in down)
        table += [Parameter(f"{ours}{fused}.bias", biases), single(f"{ours}o_proj.bias", f"{theirs}o_proj.bias", (d,))]
    return table


def deepseek_canonical(name: str) -> str | None:
    """Checkpoint name as declared above: without `language_model.`; None for vision towers and buffers computed here."""
    if name.startswith(_VISION) or name.endswith("rotary_emb.inv_freq"):
        return None
    return name.removeprefix("language_model.")


def is_mtp_tensor(config: DeepseekConfig, name: str) -> bool:
    """Whether a canonical name belongs to a layer past the last one, which predicts further tokens (MTP)."""
    found = _LAYER.match(name)
    return found is not None and 0 <= int(found[1]) - config.num_layers < config.num_mtp_layers
