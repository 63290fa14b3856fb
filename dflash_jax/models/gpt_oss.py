"""gpt-oss (20b, 120b): targets with attention sinks, sliding windows in every other layer, and experts with biases.

A head's sink is one more logit of its softmax, whose weight is dropped. Heads are not normed; all projections, the router and the
experts have biases. A token's weights are a softmax over the logits of the experts it takes alone. An expert's feed-forward is a
SwiGLU whose gate and up are clamped, the gate scaled inside its sigmoid and the up shifted by 1; both come in turns, row by row.
Source: "gpt-oss-120b & gpt-oss-20b Model Card", arXiv 2508.10925, section 2, and transformers' GptOss classes; absent keys mean
what their configuration takes for them.

Experts are released in MXFP4 (`quantization.mxfp4`), as rows, or in sixteen bits with input channels first. Both become the rows
`[E*2F, D]` and `[E*D, F]` that modules have, by `gpt_oss_derived`. Where a kernel reads four bits, rows in MXFP4 become its tiles
(`execution.weight_layout`).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from dflash_kernels import Mxfp4Tiles, dense_scores, mxfp4_mixture, mxfp4_mixture_refusal
from flax import nnx
from jaxtyping import Array, Float, Int

from dflash_jax.config import (
    NEUTRAL_KEYS,
    NEUTRAL_VALUES,
    NO_HEAD_NORMS,
    DecoderConfig,
    KeyReader,
    decoder_fields,
)
from dflash_jax.errors import ConfigError
from dflash_jax.models.decoder import Decoder, target_parameters
from dflash_jax.models.layers import DecoderLayer, Linear, WideNorm, decoder_parameters
from dflash_jax.models.moe import own_choices, rows_times
from dflash_jax.models.parameters import Parameter, Source, single
from dflash_jax.models.qwen3 import qwen3_canonical
from dflash_jax.models.traits import ExpertTraits, LayerTraits, decoder_traits
from dflash_jax.parallel.collectives import own_rank, ranks_here, reduced
from dflash_jax.parallel.cut import by_rows
from dflash_jax.quantization.mxfp4 import BLOCK, Mxfp4, dequantize

_THETA = 150_000.0
# What transformers' configuration takes for a rotation that a file does not name.
_ROPE = {
    "rope_type": "yarn", "rope_theta": _THETA, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_MOST_ROWS = 1024  # that the kernel for experts in four bits is given at once: 4,096 choices of four experts
_KINDS = ("sliding_attention", "full_attention")
# Of transformers' quantization configuration: what it would do with the weights, and which modules it would leave alone.
_QUANTIZED_NEUTRAL = frozenset(("dequantize", "modules_to_not_convert", "quant_method"))

gpt_oss_canonical = qwen3_canonical


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(DecoderConfig):
    """A gpt-oss target; `intermediate_size` is the inner width of one expert, `attention_bias` is of all four projections.

    Attributes:
      num_experts, experts_per_token: experts of a layer, and how many a token takes.
      swiglu_alpha: factor on the gate inside its sigmoid.
      swiglu_limit: largest gate, and largest absolute up.
      mxfp4: whether a checkpoint has its experts in MXFP4.
    """

    num_experts: int
    experts_per_token: int
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    mxfp4: bool = False
    tie_embeddings: bool = False
    cut_sizes: ClassVar[tuple[str, ...]] = ("num_heads",)  # of experts each device has whole ones

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.experts_per_token > self.num_experts:
            raise ConfigError(
                f"{type(self).__name__}: num_experts_per_tok={self.experts_per_token} is more than "
                f"num_local_experts={self.num_experts}"
            )
        if self.mxfp4 and (self.hidden_size % BLOCK or self.intermediate_size % BLOCK):
            raise ConfigError(
                f"{type(self).__name__}: experts in MXFP4 have columns in blocks of {BLOCK}, got hidden_size={self.hidden_size} "
                f"and intermediate_size={self.intermediate_size}"
            )

    @classmethod
    def from_hf(
        cls, values: Mapping[str, Any], tensor_names: Collection[str] = (), notices: list[str] | None = None
    ) -> "GptOssConfig":
        """Reads a `config.json` of GptOssForCausalLM.

        Args:
          tensor_names: canonical ones of the checkpoint, which tell how experts are stored; without any the file does.
          notices: takes what was decided where the file leaves a choice, one sentence each.

        Raises:
          ConfigError: a needed key is missing or malformed, two keys contradict each other, the weights are quantized in another
            way than MXFP4, or a key is present that this package does not implement.
        """
        values = dict(values)
        says_mxfp4 = _take_mxfp4(values)
        _complete_rotation(values)
        keys = KeyReader("config.json (gpt-oss)", values, notices)
        fields = decoder_fields(keys, head_dim=64, windows=_windows)
        fields["attention_bias"] = keys.flag("attention_bias", default=True)
        context = keys.integer("initial_context_length", fields["rope"].original_max_position)
        if context != fields["rope"].original_max_position:
            raise ConfigError(
                f"{keys.subject} says initial_context_length={context} and original_max_position_embeddings="
                f"{fields['rope'].original_max_position}: keep the one that the model was trained with"
            )
        packed = any(name.endswith("experts.gate_up_proj_blocks") for name in tensor_names)
        if tensor_names and says_mxfp4 != packed:
            told, found = ("MXFP4", "floating point") if says_mxfp4 else ("no quantization", "MXFP4")
            keys.notices.append(f"config.json tells of {told}, the experts' tensors are in {found}: the tensors count")
        config = cls(
            **fields,
            num_experts=_alias(keys, "num_local_experts", "num_experts", 128),
            experts_per_token=_alias(keys, "num_experts_per_tok", "experts_per_token", 4),
            swiglu_alpha=keys.number("swiglu_alpha", 1.702, positive=True),
            swiglu_limit=keys.number("swiglu_limit", 7.0, positive=True),
            mxfp4=packed if tensor_names else says_mxfp4,
            tie_embeddings=keys.flag("tie_word_embeddings"),
        )
        keys.refuse_rest(NEUTRAL_KEYS, {**NEUTRAL_VALUES, **NO_HEAD_NORMS})
        return config


def _take_mxfp4(values: dict[str, Any]) -> bool:
    """Whether a file says that its experts are in MXFP4, which is taken out of `values`; other formats stay in."""
    found = values.get("quantization_config")
    if not isinstance(found, Mapping) or found.get("quant_method") != "mxfp4":
        return False
    if unknown := sorted(set(found) - _QUANTIZED_NEUTRAL):
        raise ConfigError(
            f"config.json sets keys of quantization_config that are not known of MXFP4: {', '.join(unknown)}. Take the published "
            "release, or remove them if they are only bookkeeping"
        )
    del values["quantization_config"]
    return True


def _complete_rotation(values: dict[str, Any]) -> None:
    """Puts into a file what it leaves out of its rotation."""
    places = [values[key] for key in ("rope_parameters", "rope_scaling") if values.get(key) is not None]
    if not places:
        theta = values.pop("rope_theta", None)
        values["rope_parameters"] = _ROPE | ({} if theta is None else {"rope_theta": theta})
    elif all(isinstance(one, Mapping) and one.get("rope_theta") is None for one in [values, *places]):
        values["rope_theta"] = _THETA


def _windows(keys: KeyReader, layers: int) -> tuple[int | None, ...]:
    """Each layer's window: as `layer_types` lists them, otherwise every other layer slides, the first one too."""
    types = keys.kinds("layer_types", layers, _KINDS, [_KINDS[i % 2] for i in range(layers)])
    window = keys.integer("sliding_window", 128)
    return tuple(window if kind == _KINDS[0] else None for kind in types)


def _alias(keys: KeyReader, name: str, other: str, default: int) -> int:
    """A number that has two names; a file that gives both must give the same."""
    number = keys.integer(name, keys.integer(other, default))
    if (found := keys.integer(other, number)) != number:
        raise ConfigError(
            f"{keys.subject} says {name}={number} and {other}={found}: keep the one that the model was trained with"
        )
    return number


def gpt_oss_traits(config: GptOssConfig) -> LayerTraits:
    """Heads that are not normed and have sinks; experts in all layers."""
    experts = ExpertTraits(config.num_experts, config.experts_per_token, config.intermediate_size)
    return decoder_traits(
        config, qk_norm=False, sinks=True, feed_forward="moe", activation="clamped_swiglu", experts=experts
    )  # fmt: skip


def clamped_swiglu(both: Float[Array, "... F2"], alpha: float, limit: float) -> Float[Array, "... F"]:
    """`(u + 1) * g * sigmoid(alpha * g)` in float32 of gates g up to `limit` and ups u from minus to plus `limit`.

    Gates are the even columns of `both`, ups the odd ones.
    """
    wide = both.astype(jnp.float32)
    gate, up = jnp.minimum(wide[..., 0::2], limit), jnp.clip(wide[..., 1::2], -limit, limit)
    return ((up + 1) * gate * jax.nn.sigmoid(alpha * gate)).astype(both.dtype)


class BiasedRouter(nnx.Module):
    """Scores of the experts, in float32 whatever the model's dtype; the largest are taken, weighted by their softmax."""

    def __init__(self, config: GptOssConfig):
        self.taken = config.experts_per_token
        self.weight = nnx.Param(jnp.zeros((config.num_experts, config.hidden_size)))
        self.bias = nnx.Param(jnp.zeros((config.num_experts,)))

    def __call__(self, x: Float[Array, "T D"]) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
        best, experts = jax.lax.top_k(self.logits(x), self.taken)
        return experts, jax.nn.softmax(best, axis=-1)

    @property
    def score_bias(self) -> Float[Array, "E"]:
        """Bias of the router's scores."""
        return self.bias[...]

    def logits(self, x: Float[Array, "T D"]) -> Float[Array, "T E"]:
        return dense_scores(x, self.weight[...]) + self.bias[...].astype(jnp.float32)


class BiasedExperts(nnx.Module):
    """All experts: rows of expert after expert in one matrix `[E*2F, D]`, gate and up in turns, and in another `[E*D, F]`.

    Matrices in MXFP4 are dequantized where they are multiplied: by the kernel that reads tiles of them, an expert's at a time, or
    what tokens have gathered.
    """

    def __init__(self, config: GptOssConfig):
        e, d, f = config.num_experts, config.hidden_size, config.intermediate_size
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit
        self.hidden, self.inner = d, f
        self.gate_up_proj, self.down_proj = Linear(e * 2 * f, d, bias=True), Linear(e * d, f, bias=True)

    @property
    def count(self) -> int:
        """Experts whose matrices are here: of several devices, each has a share of them."""
        return cast(nnx.Param, self.down_proj.bias)[...].shape[0] // self.hidden

    def __call__(
        self, x: Float[Array, "T D"], experts: Int[Array, "T k"], weights: Float[Array, "T k"]
    ) -> Float[Array, "T D"]:
        """Sum over each token's experts, weighted and added in float32; where ranks share them, over those of this one."""
        if ranks_here() > 1:
            experts, weights = own_choices(experts, weights, self.count)
        if experts.size <= self.count and not self.tiled:
            return self.chosen(x, experts, weights)
        if self.tiled or isinstance(self.gate_up_proj.weight[...], Mxfp4):
            return self.in_turn(x, experts, weights)
        return self.every(x, experts, weights)

    @property
    def tiled(self) -> bool:
        """Whether matrices are in tiles of MXFP4."""
        return isinstance(self.gate_up_proj.weight[...], Mxfp4Tiles)

    def streams(self, tokens: int, taken: int, dtype: Any) -> bool:
        """Whether `parts` takes so many tokens."""
        sizes = {"experts": self.count, "hidden": self.hidden, "inner": self.inner}
        return self.tiled and mxfp4_mixture_refusal(tokens, taken, dtype, **sizes) is None

    def parts(
        self, x: Float[Array, "T D"], router: BiasedRouter, logits: Float[Array, "T E"], exchange: Any = None
    ) -> Float[Array, "n T D"]:
        """Weighted outputs of a token's experts, float32, still to be added, by the kernel that reads tiles. If ranks share
        experts, those of this one. Nothing differentiates this."""
        (gate_up, first), (down, last) = (self._by_expert(one) for one in (self.gate_up_proj, self.down_proj))
        how = {"taken": router.taken, "alpha": self.alpha, "limit": self.limit, "exchange": exchange}
        how["first"] = own_rank() * self.count if ranks_here() > 1 else None
        return mxfp4_mixture(logits, x, gate_up, first, down, last, **how)

    def chosen(
        self, x: Float[Array, "T D"], experts: Int[Array, "T k"], weights: Float[Array, "T k"]
    ) -> Float[Array, "T D"]:
        """Each token times the gathered weights of its experts."""
        (gate_up, first), (down, last) = (
            jax.tree.map(lambda one: one[experts], self._by_expert(one)) for one in (self.gate_up_proj, self.down_proj)
        )
        both = (rows_times(_numbers(gate_up), x[:, None]) + first.astype(jnp.float32)).astype(x.dtype)
        inner = clamped_swiglu(both, self.alpha, self.limit)
        out = (rows_times(_numbers(down), inner) + last.astype(jnp.float32)).astype(x.dtype)
        return (out.astype(jnp.float32) * weights[..., None]).sum(axis=-2).astype(x.dtype)

    def every(
        self, x: Float[Array, "T D"], experts: Int[Array, "T k"], weights: Float[Array, "T k"]
    ) -> Float[Array, "T D"]:
        """All experts on all tokens at once; the weights are read in place."""
        (gate_up, first), (down, last) = (self._by_expert(one) for one in (self.gate_up_proj, self.down_proj))
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        both = jnp.einsum("td,efd->etf", x, _numbers(gate_up), precision=precision) + first[:, None]
        inner = clamped_swiglu(both, self.alpha, self.limit)
        out = jnp.einsum("etf,edf->etd", inner, _numbers(down), precision=precision) + last[:, None]
        each = jax.vmap(_share, in_axes=(0, None, None, 0))(jnp.arange(self.count), experts, weights, out)
        return each.sum(axis=0).astype(x.dtype)

    def in_turn(
        self, x: Float[Array, "T D"], experts: Int[Array, "T k"], weights: Float[Array, "T k"]
    ) -> Float[Array, "T D"]:
        """All experts on all tokens, one after the other: one expert's matrices at a time are dequantized."""
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

        def add(total: Array, one: tuple[Any, ...]) -> tuple[Array, None]:
            index, (gate_up, first), (down, last) = one
            both = jnp.einsum("td,fd->tf", x, _numbers(gate_up), precision=precision) + first
            inner = clamped_swiglu(both, self.alpha, self.limit)
            out = jnp.einsum("tf,df->td", inner, _numbers(down), precision=precision) + last
            return total + _share(index, experts, weights, out), None

        parts = (self._by_expert(one) for one in (self.gate_up_proj, self.down_proj))
        total, _ = jax.lax.scan(add, jnp.zeros(x.shape, jnp.float32), (jnp.arange(self.count), *parts))
        return total.astype(x.dtype)

    def _by_expert(self, matrix: Linear) -> tuple[Any, Array]:
        """A matrix and its bias with a first axis of experts."""
        weight, bias = matrix.weight[...], cast(nnx.Param, matrix.bias)
        tiled = isinstance(weight, Mxfp4Tiles)
        parts = weight if tiled else jax.tree.map(lambda one: one.reshape(self.count, -1, *one.shape[1:]), weight)
        return parts, bias[...].reshape(self.count, -1)


def _numbers(weight: Array | Mxfp4 | Mxfp4Tiles) -> Array:
    """A matrix, dequantized where it is in four bits."""
    if isinstance(weight, Mxfp4Tiles):
        return dequantize(*weight.blocks_and_scales(), weight.dtype)
    return dequantize(weight.blocks, weight.scales, weight.dtype) if isinstance(weight, Mxfp4) else weight


def _share(
    index: Int[Array, ""], experts: Int[Array, "T k"], weights: Float[Array, "T k"], out: Float[Array, "T D"]
) -> Float[Array, "T D"]:
    """One expert's weighted output for each token, float32.

    Where a token did not take the expert, the output is left out and not weighted with 0: it may overflow there.
    """
    taken = experts == index
    share = jnp.where(taken, weights, 0.0).sum(axis=1)
    return jnp.where(taken.any(axis=1)[:, None], out.astype(jnp.float32) * share[:, None], 0.0)


class BiasedMoE(nnx.Module):
    """A router and the experts it chooses."""

    routed = True

    def __init__(self, config: GptOssConfig):
        self.router, self.experts = BiasedRouter(config), BiasedExperts(config)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        rows = x.reshape(-1, x.shape[-1])
        if self.experts.streams(min(rows.shape[0], _MOST_ROWS), self.router.taken, x.dtype):
            some = [rows[first : first + _MOST_ROWS] for first in range(0, rows.shape[0], _MOST_ROWS)]
            parts = (self.experts.parts(one, self.router, self.router.logits(one)) for one in some)
            return reduced(jnp.concatenate([one.sum(axis=0).astype(x.dtype) for one in parts])).reshape(x.shape)
        return reduced(self.experts(rows, *self.router(rows))).reshape(x.shape)

    def beside(self, x: Float[Array, "... D"]) -> None:
        """There are no shared experts."""


class GptOss(Decoder):
    """A gpt-oss decoder; see `Decoder` for how it is called."""

    def __init__(self, config: GptOssConfig):
        traits = gpt_oss_traits(config)
        layers = [
            DecoderLayer(config, i, traits, feed_forward=BiasedMoE(config), norm=WideNorm)
            for i in range(config.num_layers)
        ]
        norm = WideNorm(config.hidden_size, config.norm_eps)
        super().__init__(config, layers, tied=config.tie_embeddings, norm=norm)


def gpt_oss_parameters(config: GptOssConfig) -> tuple[Parameter, ...]:
    """Parameters of a gpt-oss checkpoint, experts as it has them."""

    def feed_forward(index: int, ours: str, theirs: str) -> list[Parameter]:
        e, d, f = config.num_experts, config.hidden_size, config.intermediate_size
        table = [
            single(f"{ours}router.weight", f"{theirs}router.weight", (e, d)),
            single(f"{ours}router.bias", f"{theirs}router.bias", (e,)),
        ]
        for name, rows, columns in (("gate_up_proj", 2 * f, d), ("down_proj", d, f)):
            own, source, cut = f"{ours}experts.{name}", f"{theirs}experts.{name}", by_rows((e, e))
            if config.mxfp4:
                blocks, scales = (e, rows, columns // BLOCK, BLOCK // 2), (e, rows, columns // BLOCK)
                table += [
                    single(f"{own}.blocks", f"{source}_blocks", blocks, "uint8", weights=2, cut=cut),
                    single(f"{own}.scales", f"{source}_scales", scales, "uint8", weights=0, cut=cut),
                ]
            else:
                table.append(single(f"{own}.columns", source, (e, columns, rows), cut=cut))
            bias = Source(f"{source}_bias", (e, rows), kept=(e * rows,))
            table.append(Parameter(f"{own}.bias", (bias,), cut=by_rows((e * rows, e))))
        return table

    layers = decoder_parameters(config, "model.", gpt_oss_traits(config), feed_forward=feed_forward, sinks="sinks")
    return target_parameters(config, layers, tied=config.tie_embeddings)


@jax.jit
def _as_rows(columns: Float[Array, "E D F"]) -> Float[Array, "F2 D"]:
    return columns.swapaxes(1, 2).reshape(-1, columns.shape[1])


def gpt_oss_derived(config: GptOssConfig, params: dict[str, Any]) -> dict[str, Any]:
    """`params` with the experts' matrices as modules have them, each in place of what it is made of, which is taken out."""
    for i in range(config.num_layers):
        for name in ("gate_up_proj", "down_proj"):
            own = f"layers.{i}.mlp.experts.{name}"
            if config.mxfp4:
                scales = params.pop(f"{own}.scales")
                scales = scales.reshape(-1, scales.shape[-1])
                blocks = params.pop(f"{own}.blocks").reshape(*scales.shape, BLOCK // 2)
                params[f"{own}.weight"] = Mxfp4(blocks, scales, params[f"{own}.bias"].dtype)
            else:
                params[f"{own}.weight"] = _as_rows(params.pop(f"{own}.columns"))
    return params
