"""DeepSeek-V2, DeepSeek-V3 and Kimi-K2 targets: latent attention (arXiv 2405.04434, section 2.1), their parameters and names.

One row `[kv_c | k_pe]` stands for the keys and values of all heads of a token. A caller's `attend.latent` may expand it to full
keys and values (`MLAttention.expand`), or move the up-projections to the query and the output and attend to the rows themselves
(`absorb`, `up`); both give the same numbers.
"""

import re

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dflash_jax.models.decoder import Decoder
from dflash_jax.models.deepseek_config import DeepseekConfig
from dflash_jax.models.layers import (
    MLP,
    LatentAttend,
    Linear,
    RMSNorm,
    Rotary,
    WritesLatentRows,
    mlp_parameters,
    rotary_tables,
    rotate,
)
from dflash_jax.models.moe import MoE, expert_traits, moe_parameters
from dflash_jax.models.parameters import Parameter, Source, single
from dflash_jax.models.traits import LayerTraits, decoder_traits

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
        self.o_proj = Linear(d, n * config.v_head_dim, bias=bias)

    def project(self, x: Array) -> tuple[Array, Array]:
        """Queries `[B,T,N,P+r]` and latent rows `[B,T,R+r]` of `x [B,T,D]`, neither normed nor rotated."""
        config = self.config
        if self.direct:
            q, row = self.q_proj(x), self.kv_a_proj(x)
        else:
            q_a, row = jnp.split(self.qkv_a_proj(x), [config.q_lora_rank or 0], axis=-1)
            q = self.q_b_proj(self.q_a_norm(q_a))
        return q.reshape(*x.shape[:-1], config.num_heads, config.head_dim), row

    def parts(self, q: Array, row: Array, rotary: Rotary) -> tuple[Array, Array, Array, Array]:
        """`q_nope`, `q_pe` (rotated), `kv_c` (normed) and `k_pe` (rotated) of what `project` gives."""
        config = self.config
        turn = rotate_interleaved if config.rope_interleaved else rotate
        q_nope, q_pe = jnp.split(q, [config.qk_nope_head_dim], axis=-1)
        kv_c, k_pe = jnp.split(row, [config.kv_lora_rank], axis=-1)
        # The rotary key is one for all heads.
        k_pe = turn(k_pe[..., None, :], rotary)[..., 0, :]
        return q_nope, turn(q_pe, rotary), self.kv_a_norm(kv_c), k_pe

    def __call__(self, x: Array, rotary: Rotary, attend: LatentAttend) -> Array:
        q, row = self.project(x)
        if isinstance(attend, WritesLatentRows):
            out = attend.latent_rows(self, q, row, rotary)
        else:
            out = attend.latent(self, *self.parts(q, row, rotary))
        return self.o_proj(out.reshape(*out.shape[:-2], -1))

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
    def __init__(self, config: DeepseekConfig, index: int):
        self.input_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attn = MLAttention(config, index)
        self.post_norm = RMSNorm(config.hidden_size, config.norm_eps)
        dense = index < config.num_dense_layers
        self.mlp = MLP(config.hidden_size, config.intermediate_size) if dense else MoE(config)

    def __call__(self, x: Array, rotary: Rotary, attend: LatentAttend) -> Array:
        x = x + self.attn(self.input_norm(x), rotary, attend)
        return x + self.mlp(self.post_norm(x))


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

    def __init__(self, config: DeepseekConfig):
        layers = [DeepseekLayer(config, i) for i in range(config.num_layers)]
        self.rotary_dim = config.qk_rope_head_dim
        super().__init__(config, layers, tied=config.tie_embeddings)

    def rotary(self, positions: Int[Array, "B T"]) -> Rotary:
        return rotary_tables(positions, self.config.rope, self.rotary_dim)


def deepseek_parameters(config: DeepseekConfig) -> tuple[Parameter, ...]:
    """Parameters of a checkpoint with latent attention."""
    v, d = config.vocab_size, config.hidden_size
    table = [single("embed.weight", "model.embed_tokens.weight", (v, d))]
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        table.append(single(f"{ours}input_norm.weight", f"{theirs}input_layernorm.weight", (d,)))
        table += _attention_parameters(config, f"{ours}attn.", f"{theirs}self_attn.")
        table.append(single(f"{ours}post_norm.weight", f"{theirs}post_attention_layernorm.weight", (d,)))
        if i < config.num_dense_layers:
            table += mlp_parameters(config, f"{ours}mlp.", f"{theirs}mlp.")
        else:
            table += moe_parameters(config, f"{ours}mlp.", f"{theirs}mlp.")
    table.append(single("norm.weight", "model.norm.weight", (d,)))
    if not config.tie_embeddings:
        table.append(single("lm_head.weight", "lm_head.weight", (v, d)))
    return tuple(table)


def _attention_parameters(config: DeepseekConfig, ours: str, theirs: str) -> list[Parameter]:
    d, n, latent, rank = config.hidden_size, config.num_heads, config.kv_lora_rank, config.q_lora_rank
    values = n * config.v_head_dim
    down = [("kv_a_proj_with_mqa", config.latent_width)]
    if rank is None:
        table = [single(f"{ours}q_proj.weight", f"{theirs}q_proj.weight", (n * config.head_dim, d))]
        fused = "kv_a_proj"
    else:
        table = [
            single(f"{ours}q_a_norm.weight", f"{theirs}q_a_layernorm.weight", (rank,)),
            single(f"{ours}q_b_proj.weight", f"{theirs}q_b_proj.weight", (n * config.head_dim, rank)),
        ]
        fused, down = "qkv_a_proj", [("q_a_proj", rank), *down]
    table += [
        Parameter(f"{ours}{fused}.weight", tuple(Source(f"{theirs}{name}.weight", (rows, d)) for name, rows in down)),
        single(f"{ours}kv_a_norm.weight", f"{theirs}kv_a_layernorm.weight", (latent,)),
        single(f"{ours}kv_b_proj.weight", f"{theirs}kv_b_proj.weight", (n * config.qk_nope_head_dim + values, latent)),
        single(f"{ours}o_proj.weight", f"{theirs}o_proj.weight", (d, values)),
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
