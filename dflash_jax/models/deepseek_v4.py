"""DeepSeek V4 targets: attention to a window and to compressed keys, over several residual streams, with experts in every layer.

All heads of a layer share one key, which is the value, too; heads turn by their last entries, and what attention gives is turned
back by the query's place. Some layers see a window alone. The others also see compressed rows: of long stretches all (heavily
compressed attention, HCA), or of short ones that overlap those that an indexer chooses (compressed sparse attention, CSA); see
`attention.compressed`. Experts of the first layers are listed for each token of the vocabulary.

Source: transformers' DeepseekV4 classes, 5.17, whose defaults absent keys mean; drafters' features as in the speculators library
(pull request 524) and vLLM: the streams after a layer, one behind the other. Drafters inside of a checkpoint (`mtp.*`) are left
out.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from dflash_kernels import dense_scores
from flax import nnx
from jaxtyping import Array, Float, Int

from dflash_jax.config import (
    NEUTRAL_KEYS,
    NEUTRAL_VALUES,
    DecoderConfig,
    KeyReader,
    RopeConfig,
    given,
    refuse_quantized,
    shown,
)
from dflash_jax.errors import ConfigError
from dflash_jax.models.deepseek import rotate_interleaved
from dflash_jax.models.hyper_connections import HyperConnection, SumNorm
from dflash_jax.models.layers import Cache, ChoiceRows, Linear, RMSNorm, Rotary, SummedLinear, rotary_tables, unit_norm
from dflash_jax.models.moe import SCORES, MoE, expert_traits, expert_weights
from dflash_jax.models.parameters import Parameter, Source, single
from dflash_jax.models.traits import LayerTraits, decoder_traits
from dflash_jax.models.two_rotations import TwoRotationsDecoder, own_columns, own_rotation
from dflash_jax.parallel.collectives import reduced
from dflash_jax.parallel.cut import Cut, by_columns, by_rows

ARCHITECTURES, MODEL_TYPES = ("DeepseekV4ForCausalLM",), ("deepseek_v4",)
SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_RATES = {SPARSE: 4, HEAVY: 128}
_BY_RATIO = {0: SLIDING, 4: SPARSE, 128: HEAVY}
_HASHED, _LEARNED = "hash_moe", "moe"
# How a release keeps experts, which its tensors say; layers that are left out; and training.
_NEUTRAL = NEUTRAL_KEYS | {"expert_dtype", "num_nextn_predict_layers", "router_jitter_noise"}
_VALUES: Mapping[str, tuple[Any, ...]] = {
    **{key: said for key, said in NEUTRAL_VALUES.items() if key not in ("hc_mult", "swiglu_limit")},
    "attention_bias": (None, False), "hidden_act": (None, "silu"), "n_group": (None, 1), "n_shared_experts": (None, 1),
    "norm_topk_prob": (None, True), "num_key_value_heads": (None, 1), "topk_group": (None, 1), "topk_method": (None, "noaux_tc"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DeepseekV4Config(DecoderConfig):
    """A DeepSeek V4 target. `rope` is that of layers with a window alone; `intermediate_size` is an expert's.

    Attributes:
      kinds: of each layer, `SLIDING`, `SPARSE` or `HEAVY`.
      sparse_rate, heavy_rate: tokens of a stretch in layers of these kinds.
      compress_rope: of all other layers.
      rotary_dim: entries of a head that turn, the last ones.
      q_lora_rank: width of the queries' latent.
      out_groups, out_rank: groups of heads that are projected by themselves first, and the width of what each gives.
      index_topk: compressed rows that a query sees at most where an indexer chooses.
      index_heads, index_head_dim: of indexers (I and E).
      streams, stream_rounds, stream_eps: see `HyperConnection`.
      num_experts, experts_per_token, moe_intermediate_size: experts of a layer, how many a token takes, and one's inner width; one
        more is every token's.
      scoring: what makes scores of a router's products, see `models.moe.SCORES`.
      routing_scale: factor on the weights of those that a token takes, which sum to 1 before.
      hashed: of each layer, whether its experts are listed for each token.
      swiglu_limit: see `layers.gated`.
    """

    kinds: tuple[str, ...]
    sparse_rate: int
    heavy_rate: int
    compress_rope: RopeConfig
    rotary_dim: int
    q_lora_rank: int
    out_groups: int
    out_rank: int
    index_topk: int
    index_heads: int
    index_head_dim: int
    streams: int
    stream_rounds: int
    stream_eps: float
    num_experts: int
    experts_per_token: int
    moe_intermediate_size: int
    scoring: str
    routing_scale: float
    hashed: tuple[bool, ...]
    swiglu_limit: float
    tie_embeddings: bool = False

    cut_sizes = ("num_heads", "out_groups")

    # What `models.moe` asks of every configuration, and this family has in one form only.
    routing = "noaux_tc"
    num_groups = groups_per_token = num_shared_experts = 1
    norm_routing_weights = True

    def __post_init__(self) -> None:
        """Raises ConfigError as `DecoderConfig` does, and where layers cannot be so."""
        super().__post_init__()
        subject, sizes = type(self).__name__, (self.head_dim, self.index_head_dim)
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= min(sizes):
            raise ConfigError(
                f"{subject}: entries of a head that turn must be even, and no more than heads of {sizes[0]} and indexers' of "
                f"{sizes[1]} have, got {self.rotary_dim}"
            )
        if not len(self.kinds) == len(self.hashed) == len(self.windows) == self.num_layers:
            raise ConfigError(
                f"{subject}: kinds, hashed and windows must be of each of {self.num_layers} layers, got {len(self.kinds)}, "
                f"{len(self.hashed)} and {len(self.windows)}"
            )
        if self.num_heads * self.head_dim % self.out_groups:
            raise ConfigError(
                f"{subject}: {self.num_heads} heads of {self.head_dim} are not cut into {self.out_groups} groups (o_groups)"
            )
        least = (
            "sparse_rate",
            "heavy_rate",
            "index_topk",
            "index_heads",
            "streams",
            "stream_rounds",
            "experts_per_token",
        )
        if low := [name for name in least if getattr(self, name) < 1]:
            raise ConfigError(f"{subject}: {low[0]} must be at least 1, got {getattr(self, low[0])}")
        if not self.experts_per_token <= self.num_experts:
            raise ConfigError(
                f"{subject}: a token cannot take {self.experts_per_token} experts of {self.num_experts} (num_experts_per_tok)"
            )

    @property
    def rotations(self) -> tuple[tuple[RopeConfig, int], ...]:
        return (self.rope, self.rotary_dim), (self.compress_rope, self.rotary_dim)

    @property
    def feature_width(self) -> int:
        """All streams are read."""
        return self.streams * self.hidden_size

    def rate(self, layer: int) -> int:
        """Tokens of a stretch; 0 where a layer sees a window alone."""
        return {SPARSE: self.sparse_rate, HEAVY: self.heavy_rate}.get(self.kinds[layer], 0)

    @property
    def compressed_layers(self) -> tuple[int, ...]:
        """Layers that see compressed rows."""
        return tuple(i for i, kind in enumerate(self.kinds) if kind != SLIDING)

    @property
    def kept_rows(self) -> tuple[tuple[int, int | None, int], ...]:
        """Pools of rows: width, tokens that a query or a row to come reads back to (None for all), and tokens of one row.

        First of each layer's tokens: the key, and what compressed rows are made of, values and logits of weights. Then the
        compressed rows of the layers that have such, beside them the indexer's.
        """
        h, e, tokens, entries = self.head_dim, self.index_head_dim, list[Any](), list[Any]()
        for layer, kind in enumerate(self.kinds):
            rate, window = self.rate(layer), self.windows[layer] or 0
            if kind == SPARSE:  # made of two stretches, by two parts of what a token gives
                tokens.append((h + 4 * (h + e), max(window, 2 * rate), 1))
                entries.append((h + e, None, rate))
            elif kind == HEAVY:
                tokens.append((3 * h, max(window, rate), 1))
                entries.append((h, None, rate))
            else:
                tokens.append((h, window, 1))
        return (*tokens, *entries)

    @property
    def cached_layers(self) -> int:
        return len(self.kept_rows)

    @property
    def state_layers(self) -> int:
        return 0

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], notices: list[str] | None = None) -> "DeepseekV4Config":
        """Reads a `config.json` of one of `ARCHITECTURES`.

        Args:
          notices: takes what was decided where the file leaves a choice, one sentence each.

        Raises:
          ConfigError: a needed key is malformed, the weights are quantized, two keys contradict each other, or a key is present
            that this package does not implement.
        """
        refuse_quantized(values)
        keys = KeyReader(f"config.json ({ARCHITECTURES[0]})", values, notices)
        layers, head_dim = keys.integer("num_hidden_layers", 43), keys.integer("head_dim", 512)
        inner, experts = keys.integer("moe_intermediate_size", 2048), keys.integer("n_routed_experts", 256)
        rates, turned = _rates(keys), _turned(keys, head_dim)
        max_position = keys.integer("max_position_embeddings", 1 << 20)
        rope, compress_rope = _rotations(keys, max_position, turned, head_dim)
        config = cls(
            vocab_size=keys.integer("vocab_size", 129_280),
            hidden_size=keys.integer("hidden_size", 4096),
            intermediate_size=inner,
            num_layers=layers,
            num_heads=keys.integer("num_attention_heads", 64),
            num_kv_heads=1,
            head_dim=head_dim,
            norm_eps=keys.number("rms_norm_eps", 1e-6, positive=True),
            rope=rope,
            max_position=max_position,
            windows=(keys.integer("sliding_window", 128),) * layers,
            kinds=_kinds(keys, layers),
            sparse_rate=rates[SPARSE],
            heavy_rate=rates[HEAVY],
            compress_rope=compress_rope,
            rotary_dim=turned,
            q_lora_rank=keys.integer("q_lora_rank", 1024),
            out_groups=keys.integer("o_groups", 8),
            out_rank=keys.integer("o_lora_rank", 1024),
            index_topk=keys.integer("index_topk", 512),
            index_heads=keys.integer("index_n_heads", 64),
            index_head_dim=keys.integer("index_head_dim", 128),
            streams=keys.integer("hc_mult", 4),
            stream_rounds=keys.integer("hc_sinkhorn_iters", 20),
            stream_eps=keys.number("hc_eps", 1e-6, positive=True),
            num_experts=experts,
            experts_per_token=keys.integer("num_experts_per_tok", 6),
            moe_intermediate_size=inner,
            scoring=_scoring(keys),
            routing_scale=keys.number("routed_scaling_factor", 1.5),
            hashed=_hashed(keys, layers),
            swiglu_limit=keys.number("swiglu_limit", 10.0, positive=True),
            tie_embeddings=keys.flag("tie_word_embeddings"),
        )
        others = {"intermediate_size": (None, inner), "num_local_experts": (None, experts)}
        keys.refuse_rest(_NEUTRAL, {**_VALUES, **others})
        return config


def _scoring(keys: KeyReader) -> str:
    scoring = keys.get("scoring_func", "sqrtsoftplus")
    if not isinstance(scoring, str) or scoring not in SCORES:
        raise ConfigError(f"{keys.subject}: scoring_func must be {', '.join(SCORES)}, got {shown(scoring)}")
    return scoring


def _rates(keys: KeyReader) -> dict[str, int]:
    """Tokens of a stretch, by kind of layer: `compress_rates`, or the older keys, which count."""
    found = keys.get("compress_rates", _RATES)
    inner = KeyReader(f"{keys.subject}, compress_rates", found)
    rates = {kind: inner.integer(kind) for kind in _RATES}
    inner.refuse_rest((), {})
    for kind, key in ((SPARSE, "compress_rate_csa"), (HEAVY, "compress_rate_hca")):
        if keys.get(key) is not None:
            if "compress_rates" in keys.values and keys.integer(key) != rates[kind]:
                raise ConfigError(
                    f"{keys.subject} says {key}={keys.integer(key)} and {kind}={rates[kind]} in compress_rates: keep one"
                )
            rates[kind] = keys.integer(key)
    return rates


def _listed(keys: KeyReader, key: str, listed: Any, layers: int, known: Sequence[str]) -> tuple[str, ...]:
    """What a list says of each layer; what it says of layers behind the last one is left out, as transformers leaves it out."""
    kinds = tuple(listed)[:layers] if isinstance(listed, list | tuple) else ()
    if len(kinds) != layers or not all(isinstance(kind, str) and kind in known for kind in kinds):
        raise ConfigError(
            f"{keys.subject}: {key} must list {', '.join(known[:-1])} or {known[-1]} for each of {layers} layers, got "
            f"{shown(listed)}"
        )
    return kinds


def _kinds(keys: KeyReader, layers: int) -> tuple[str, ...]:
    """Kinds of layers: `layer_types`, the release's `compress_ratios`, or two heavy ones and then both kinds by turns."""
    ways: dict[str, tuple[str, ...]] = {}
    if (types := keys.get("layer_types")) is not None:
        ways["layer_types"] = _listed(keys, "layer_types", types, layers, (SLIDING, SPARSE, HEAVY))
    if (ratios := keys.get("compress_ratios")) is not None:
        if not isinstance(ratios, list | tuple) or not all(type(r) is int and r in _BY_RATIO for r in ratios):
            raise ConfigError(
                f"{keys.subject}: compress_ratios must list 0, 4 or 128 of each layer, got {shown(ratios)}"
            )
        named = [_BY_RATIO[ratio] for ratio in ratios]
        ways["compress_ratios"] = _listed(keys, "compress_ratios", named, layers, (SLIDING, SPARSE, HEAVY))
    if len(set(ways.values())) > 1:
        raise ConfigError(f"{keys.subject}: {' and '.join(ways)} say different things of the kinds of layers: keep one")
    turns = tuple(HEAVY if i < 2 or i % 2 == 0 else SPARSE for i in range(layers))
    return next(iter(ways.values()), turns)


def _hashed(keys: KeyReader, layers: int) -> tuple[bool, ...]:
    """Of each layer, whether its experts are listed for each token: `mlp_layer_types`, or the first `num_hash_layers`."""
    said, first = keys.get("mlp_layer_types"), keys.integer("num_hash_layers", 3, minimum=0)
    counted = tuple(i < first for i in range(layers))
    if said is None:
        return counted
    found = tuple(one == _HASHED for one in _listed(keys, "mlp_layer_types", said, layers, (_HASHED, _LEARNED)))
    if keys.values.get("num_hash_layers") is not None and found != counted:
        raise ConfigError(
            f"{keys.subject}: num_hash_layers={first} and mlp_layer_types say different things: keep one, got {shown(said)}"
        )
    return found


def _turned(keys: KeyReader, head_dim: int) -> int:
    """Entries of a head that turn: `qk_rope_head_dim`, or `partial_rotary_factor` of a head, an eighth where both are absent."""
    ways: dict[str, int] = {}
    if keys.get("qk_rope_head_dim") is not None:
        ways["qk_rope_head_dim"] = keys.integer("qk_rope_head_dim")
    if keys.get("partial_rotary_factor") is not None:
        ways["partial_rotary_factor"] = int(head_dim * keys.number("partial_rotary_factor", positive=True))
    if len(set(ways.values())) > 1:
        raise ConfigError(
            f"{keys.subject}: qk_rope_head_dim={ways['qk_rope_head_dim']} is not what partial_rotary_factor makes of "
            f"head_dim={head_dim}, {ways['partial_rotary_factor']}: keep one"
        )
    return next(iter(ways.values()), head_dim // 8)


def _rotations(keys: KeyReader, max_position: int, turned: int, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """Rotations of layers with a window alone, and of all others.

    A file has both as `main` and `compress`, or one, which scales the latter; then bases are `rope_theta` and
    `compress_rope_theta`, and a factor on YaRN's rotation that is absent is 1.

    Raises:
      ConfigError: they cannot be, or are of another part of a head than `turned` entries.
    """
    found = keys.get("rope_parameters", keys.get("rope_scaling", {}))
    scaling = KeyReader(f"{keys.subject}, rope_parameters", found).values
    for key in ("rope_parameters", "rope_scaling"):
        if keys.get(key) not in (None, found):
            raise ConfigError(f"{keys.subject} says rope_parameters and rope_scaling, which differ: keep one")
    bases = {"main": keys.number("rope_theta", 1e4), "compress": keys.number("compress_rope_theta", 1.6e5)}
    both = {name: scaling.get(name) for name in bases}
    if all(isinstance(one, Mapping) for one in both.values()):
        if rest := {key: value for key, value in scaling.items() if key not in both and value is not None}:
            raise ConfigError(
                f"{keys.subject}: rope_parameters has {shown(rest)} beside main and compress: leave it out"
            )
    else:
        if any(one is not None for one in both.values()):
            raise ConfigError(f"{keys.subject}: rope_parameters must have both of main and compress, or neither")
        shared = {key: value for key, value in scaling.items() if key not in ("rope_theta", "partial_rotary_factor")}
        shared["rope_type"] = shared.get("rope_type") or shared.pop("type", None) or "default"
        if shared["rope_type"] == "yarn" and shared.get("attention_factor") is None:
            shared["attention_factor"] = 1.0
        shared.pop("type", None)
        both = {"main": {"rope_type": "default"}, "compress": shared}
    read: list[RopeConfig] = []
    for name, own in both.items():
        inner = {"rope_theta": bases[name], **own}  # pyright: ignore[reportGeneralTypeIssues]
        subject = KeyReader(f"{keys.subject}, {name}", {"rope_parameters": inner}, keys.notices)
        rope = RopeConfig.from_keys(subject, max_position, partial=turned / head_dim)
        if rope.follows_length or rope.kind == "proportional":
            raise ConfigError(
                f"{subject.subject}: rope_type must be default, linear, llama3 or yarn, got {given(rope.kind)}"
            )
        if abs(rope.partial * head_dim - turned) >= 1:
            raise ConfigError(
                f"{subject.subject}: partial_rotary_factor={rope.partial} of head_dim={head_dim} is not the {turned} entries that "
                "turn"
            )
        read.append(replace(rope, partial=1.0))
    return read[0], read[1]


def turned_last(x: Float[Array, "... heads H"], rotary: Rotary) -> Float[Array, "... heads H"]:
    """Heads whose last entries turn, those that lie next to each other together."""
    rest, last = jnp.split(x, [x.shape[-1] - 2 * rotary.cos.shape[-1]], axis=-1)
    return jnp.concatenate([rest, rotate_interleaved(last, rotary)], axis=-1)


class Compressor(nnx.Module):
    """Makes one row of a stretch of tokens: the mean of what they give, each number weighted by a softmax over them, normed and
    turned by the place of the first.

    Args:
      width: of a row.
      rate: tokens of a stretch.
      overlaps: a row is of the stretch before it as well, of which it takes the first half of what tokens give, and of its own
        the second.
      rope, turned: the rotation, and entries of a row that turn.
    """

    def __init__(self, width: int, rate: int, *, overlaps: bool, eps: float, rope: RopeConfig, turned: int):
        self.width, self.overlaps, self.rope, self.turned = width, overlaps, rope, turned
        self.norm = RMSNorm(width, eps)
        self.places = nnx.Param(jnp.zeros((rate, (1 + overlaps) * width), jnp.float32))

    def __call__(
        self, before: Float[Array, "B C r F"], own: Float[Array, "B C r F"], starts: Int[Array, "B C"]
    ) -> Float[Array, "B C W"]:
        """Rows of stretches that begin at `starts`, from what their tokens give and those of the stretches before: values, then
        logits of weights."""
        values, logits = self._parts(own)
        if self.overlaps:
            earlier, their = self._parts(before)
            none = (starts == 0)[..., None, None]  # before the text's beginning
            earlier, their = jnp.where(none, 0, earlier), jnp.where(none, -jnp.inf, their)
            values = jnp.concatenate([earlier[..., : self.width], values[..., self.width :]], axis=-2)
            logits = jnp.concatenate([their[..., : self.width], logits[..., self.width :]], axis=-2)
        summed = jnp.sum(jax.nn.softmax(logits, axis=-2) * values.astype(jnp.float32), axis=-2)
        rows = self.norm(summed.astype(own.dtype))[..., None, :]
        return turned_last(rows, rotary_tables(starts, self.rope, self.turned))[..., 0, :]

    def _parts(self, given: Float[Array, "B C r F"]) -> tuple[Array, Array]:
        values, logits = jnp.split(given, 2, axis=-1)
        return values, logits.astype(jnp.float32) + self.places[...]


class CompressedAttention(nnx.Module):
    """Projections around the caller's `attend.compressed`.

    Attributes the caller reads: `index` and `place`, of its pools of tokens' and of compressed rows; `rate`, `window`, `sinks`,
    `scale`, `config`, and `entries`.
    """

    def __init__(self, config: DeepseekV4Config, index: int):
        self.config, self.index, self.rate = config, index, config.rate(index)
        self.place = config.num_layers + sum(layer < index for layer in config.compressed_layers)
        self.window, self.scale = config.windows[index] or 0, config.head_dim**-0.5
        self.columns = own_columns(config.rotations, None if self.rate else self.window)
        n, h, d, eps = config.num_heads, config.head_dim, config.hidden_size, config.norm_eps
        self.sparse = config.kinds[index] == SPARSE
        # One product over x: the queries' latent, the key, and what compressed rows are made of.
        self.in_proj = Linear(config.q_lora_rank + config.kept_rows[index][0], d)
        self.q_norm, self.kv_norm = RMSNorm(config.q_lora_rank, eps), RMSNorm(h, eps)
        self.q_proj = Linear(n * h, config.q_lora_rank)
        self.group_proj = Linear(config.out_groups * config.out_rank, n * h // config.out_groups)
        self.o_proj = SummedLinear(d, config.out_groups * config.out_rank)
        self.sinks = nnx.Param(jnp.zeros((n,), jnp.float32))
        how: dict[str, Any] = {"eps": eps, "rope": config.compress_rope, "turned": config.rotary_dim}
        self.compressor = Compressor(h, self.rate, overlaps=self.sparse, **how) if self.rate else None
        e, heads = config.index_head_dim, config.index_heads
        self.index_compressor = Compressor(e, self.rate, overlaps=True, **how) if self.sparse else None
        self.index_q_proj = Linear(heads * e, config.q_lora_rank) if self.sparse else None
        self.index_weights_proj = Linear(heads, d) if self.sparse else None

    def entries(
        self, before: Float[Array, "B C r F"], own: Float[Array, "B C r F"], starts: Int[Array, "B C"]
    ) -> Float[Array, "B C W"]:
        """See `CompressedAttend`: rows of stretches that begin at `starts`, and behind each the indexer's."""
        assert self.compressor is not None, "layers without stretches have none"
        if self.index_compressor is None:
            return self.compressor(before, own, starts)
        cut = 4 * self.config.head_dim
        rows = self.compressor(before[..., :cut], own[..., :cut], starts)
        return jnp.concatenate([rows, self.index_compressor(before[..., cut:], own[..., cut:], starts)], axis=-1)

    def choice(self, x: Float[Array, "B T D"], q_latent: Float[Array, "B T Rq"], rotary: Rotary) -> ChoiceRows | None:
        """The indexer's outputs for the layer's normed input and the queries' normed latent."""
        if self.index_q_proj is None or self.index_weights_proj is None:
            return None
        heads, width = self.config.index_heads, self.config.index_head_dim
        q = self.index_q_proj(q_latent).reshape(*x.shape[:-1], heads, width)
        # In float32 as far as to the scores: they choose, and are rounded nowhere else.
        wide, weight = jnp.promote_types(x.dtype, jnp.float32), self.index_weights_proj.weight[...]
        weights = jnp.einsum("btd,id->bti", x, weight, precision=jax.lax.Precision.HIGHEST, preferred_element_type=wide)
        return ChoiceRows(turned_last(q, rotary), weights * (heads * width) ** -0.5)

    def __call__(self, x: Array, rotary: Rotary, attend: Any, cache: Cache = None) -> tuple[Array, Cache]:
        """Raises NotImplementedError where `attend` is no `CompressedAttend`."""
        if not hasattr(attend, "compressed"):
            raise NotImplementedError(
                f"{type(attend).__name__} has no attention to compressed keys: take DenseAttend or PagedAttend"
            )
        config, rotary = self.config, own_rotation(rotary, self.columns)
        q_latent, kv, rest = jnp.split(
            self.in_proj(x), [config.q_lora_rank, config.q_lora_rank + config.head_dim], axis=-1
        )
        q_latent = self.q_norm(q_latent)
        q = self.q_proj(q_latent).reshape(*x.shape[:-1], config.num_heads, config.head_dim)
        q = turned_last(unit_norm(q, config.norm_eps), rotary)
        kv = turned_last(self.kv_norm(kv)[..., None, :], rotary)[..., 0, :]
        row = jnp.concatenate([kv, rest], axis=-1)
        out, cache = attend.compressed(self, q, row, self.choice(x, q_latent, rotary), cache)
        # Keys are values, so what was turned by a key's place is turned back by the query's.
        out = turned_last(out, Rotary(rotary.cos, -rotary.sin))
        return self.o_proj(self._by_groups(out.reshape(*x.shape[:-1], config.out_groups, -1))), cache

    def _by_groups(self, out: Float[Array, "B T g F"]) -> Float[Array, "B T gR"]:
        """What each group of heads gives, projected by itself."""
        weight = self.group_proj.weight[...].reshape(self.config.out_groups, self.config.out_rank, -1)
        precision = jax.lax.Precision.HIGHEST if out.dtype == jnp.float32 else None
        return jnp.einsum("btgf,grf->btgr", out, weight, precision=precision).reshape(*out.shape[:2], -1)


class HashRouter(nnx.Module):
    """Experts of a token by a table for the vocabulary, weighted by their scores."""

    def __init__(self, config: DeepseekV4Config):
        self.config = config
        self.weight = nnx.Param(jnp.zeros((config.num_experts, config.hidden_size)))
        self.table = nnx.Param(jnp.zeros((config.vocab_size, config.experts_per_token), jnp.int32))

    def __call__(self, x: Float[Array, "T D"], ids: Int[Array, "T"]) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
        scores = SCORES[self.config.scoring](dense_scores(x, self.weight[...]).astype(jnp.float32))
        experts = self.table[...][ids]
        return experts, expert_weights(self.config, scores, experts)


class HashMoE(MoE):
    """Experts that are listed for each token of the vocabulary, and the one that every token takes."""

    def __init__(self, config: DeepseekV4Config, *, limit: float):
        super().__init__(config, limit=limit)
        self.router: Any = HashRouter(config)

    def of_tokens(self, x: Float[Array, "B T D"], ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """What they give for tokens with these ids."""
        rows, shared = x.reshape(-1, x.shape[-1]), self.beside(x)
        assert shared is not None, "one is every token's"
        return reduced(self.experts(rows, *self.router(rows, ids.reshape(-1))).reshape(x.shape) + shared)


class DeepseekV4Layer(nnx.Module):
    """Attention and experts, each behind a norm, which read several residual streams `[B,T,S,D]` and write to them."""

    attention_conv: Any = None
    mlp_conv: Any = None

    def __init__(self, config: DeepseekV4Config, index: int):
        d, eps = config.hidden_size, config.norm_eps
        self.attn_streams, self.mlp_streams = (
            HyperConnection(config.streams, d, rounds=config.stream_rounds, eps=config.stream_eps, norm_eps=eps)
            for _ in range(2)
        )
        self.input_norm, self.post_norm = RMSNorm(d, eps), RMSNorm(d, eps)
        self.attn = CompressedAttention(config, index)
        self.mlp: Any = (HashMoE if config.hashed[index] else MoE)(config, limit=config.swiglu_limit)

    def __call__(
        self,
        x: Array,
        rotary: Rotary,
        attend: Any,
        cache: Cache = None,
        *,
        ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Array, Cache]:
        """`ids` are the tokens', where their experts are listed."""
        read, mixing = self.attn_streams.read(x)
        out, cache = self.attn(self.input_norm(read), rotary, attend, cache)
        x = self.attn_streams.write(x, out, mixing)
        read, mixing = self.mlp_streams.read(x)
        read = self.post_norm(read)
        out = self.mlp(read) if ids is None else self.mlp.of_tokens(read, ids)
        return self.mlp_streams.write(x, out, mixing), cache


class DeepseekV4(TwoRotationsDecoder):
    """A DeepSeek V4 decoder; see `Decoder` for how it is called, with a `CompressedAttend`."""

    def __init__(self, config: DeepseekV4Config):
        layers = [DeepseekV4Layer(config, i) for i in range(config.num_layers)]
        norm = SumNorm(config.streams, config.hidden_size, eps=config.stream_eps, norm_eps=config.norm_eps)
        super().__init__(config, layers, tied=config.tie_embeddings, norm=norm)
        self.streams, self.hashed = config.streams, config.hashed

    def layers_for(self, ids: Int[Array, "B T"], x: Float[Array, "B T D"]) -> Sequence[Any]:
        """See `Decoder`: layers whose experts are listed for tokens, with these."""
        del x
        return [
            functools.partial(layer, ids=ids) if hashed else layer
            for layer, hashed in zip(self.layers, self.hashed, strict=True)
        ]

    def spread(self, x: Float[Array, "B T D"]) -> Float[Array, "B T S D"]:
        """All streams begin with the embedding."""
        return jnp.repeat(x[:, :, None], self.streams, axis=2)

    def tapped(self, stream: Float[Array, "B T S D"], index: int) -> Float[Array, "B T SD"]:
        """Drafters read all streams after a layer."""
        del index  # of every layer alike
        return stream.reshape(*stream.shape[:2], -1)

    def tapped_embedding(self, x: Float[Array, "B T D"]) -> Float[Array, "B T SD"]:
        return self.tapped(self.spread(x), -1)


def deepseek_v4_traits(config: DeepseekV4Config) -> LayerTraits:
    """Layers with one shared key and compressed ones, over several streams."""
    return decoder_traits(
        config, attention="latent", compressed=True, qk_norm=False, rotary_dim=config.rotary_dim, sinks=True, feed_forward="moe",
        experts=expert_traits(config), streams=config.streams,
    )  # fmt: skip


def deepseek_v4_parameters(config: DeepseekV4Config) -> tuple[Parameter, ...]:
    """Parameters of a DeepSeek V4 checkpoint, by the released names."""
    v, d, streams = config.vocab_size, config.hidden_size, config.streams
    table = [single("embed.weight", "embed.weight", (v, d))]
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.", f"layers.{i}."
        for our, their in (("attn_streams", "attn"), ("mlp_streams", "ffn")):
            rows = (2 + streams) * streams
            table += _stream_parameters(config, f"{ours}{our}.", f"{theirs}hc_{their}_", rows, 3)
        table.append(single(f"{ours}input_norm.weight", f"{theirs}attn_norm.weight", (d,)))
        table += _attention_parameters(config, i, f"{ours}attn.", f"{theirs}attn.")
        table.append(single(f"{ours}post_norm.weight", f"{theirs}ffn_norm.weight", (d,)))
        table += _expert_parameters(config, f"{ours}mlp.", f"{theirs}ffn.", hashed=config.hashed[i])
    table.append(single("norm.weight", "norm.weight", (d,)))
    table += _stream_parameters(config, "norm.", "hc_head_", streams, 1)
    return (
        *table,
        *(
            ()
            if config.tie_embeddings
            else (single("lm_head.weight", "head.weight", (v, d), cut=by_rows((v, v), optional=True)),)
        ),
    )


def _stream_parameters(config: DeepseekV4Config, ours: str, theirs: str, rows: int, scales: int) -> list[Parameter]:
    """Parameters of factors of streams, float32 in the released files."""
    shapes = {
        "rows": ("fn", (rows, config.streams * config.hidden_size)),
        "base": ("base", (rows,)),
        "scale": ("scale", (scales,)),
    }
    return [single(f"{ours}{our}", f"{theirs}{their}", shape, "float32") for our, (their, shape) in shapes.items()]


def _attention_parameters(config: DeepseekV4Config, layer: int, ours: str, theirs: str) -> list[Parameter]:
    d, n, h, rank, kind = config.hidden_size, config.num_heads, config.head_dim, config.q_lora_rank, config.kinds[layer]
    rate, groups = config.rate(layer), config.out_groups
    compressors = {"": ("compressor", (1 + (kind == SPARSE)) * h)} if rate else {}
    if kind == SPARSE:
        compressors["index_"] = ("indexer.compressor", 2 * config.index_head_dim)
    first = [("wq_a", rank), ("wkv", h)]
    table: list[Parameter] = []
    for our, (their, width) in compressors.items():
        first += [(f"{their}.wkv", width), (f"{their}.wgate", width)]
        normed = width // (1 + (kind == SPARSE))
        table += [
            single(f"{ours}{our}compressor.places", f"{theirs}{their}.ape", (rate, width), "float32"),
            single(f"{ours}{our}compressor.norm.weight", f"{theirs}{their}.norm.weight", (normed,)),
        ]
    shapes = {
        "q_norm": ("q_norm", (rank,)), "kv_norm": ("kv_norm", (h,)), "q_proj": ("wq_b", (n * h, rank)),
        "group_proj": ("wo_a", (groups * config.out_rank, n * h // groups)), "o_proj": ("wo_b", (d, groups * config.out_rank)),
    }  # fmt: skip
    cuts: dict[str, Cut] = {
        "q_proj": by_rows((n * h, n)),
        "group_proj": by_rows((groups * config.out_rank, groups)),
        "o_proj": by_columns((groups * config.out_rank, groups)),
    }
    if kind == SPARSE:  # whole on every device, as the choice is one for all heads
        heads = config.index_heads
        shapes["index_q_proj"] = ("indexer.wq_b", (heads * config.index_head_dim, rank))
        shapes["index_weights_proj"] = ("indexer.weights_proj", (heads, d))
    return [
        Parameter(f"{ours}in_proj.weight", tuple(Source(f"{theirs}{name}.weight", (rows, d)) for name, rows in first)),
        *(
            single(f"{ours}{our}.weight", f"{theirs}{their}.weight", shape, cut=cuts.get(our))
            for our, (their, shape) in shapes.items()
        ),
        single(f"{ours}sinks", f"{theirs}attn_sink", (n,), "float32", cut=by_rows((n, n))),
        *table,
    ]


def _expert_parameters(config: DeepseekV4Config, ours: str, theirs: str, *, hashed: bool) -> list[Parameter]:
    e, d, f = config.num_experts, config.hidden_size, config.moe_intermediate_size
    experts, shared = [f"{theirs}experts.{i}." for i in range(e)], f"{theirs}shared_experts."
    taken = config.vocab_size, config.experts_per_token

    def gates(*prefixes: str) -> tuple[Source, ...]:
        return tuple(Source(f"{prefix}{name}.weight", (f, d)) for prefix in prefixes for name in ("w1", "w3"))

    return [
        single(f"{ours}router.weight", f"{theirs}gate.weight", (e, d)),
        single(f"{ours}router.table", f"{theirs}gate.tid2eid", taken, "int32", weights=0)
        if hashed
        else single(f"{ours}router.bias", f"{theirs}gate.bias", (e,), "float32"),
        Parameter(f"{ours}experts.gate_up_proj.weight", gates(*experts), cut=by_rows((2 * e * f, e))),
        Parameter(
            f"{ours}experts.down_proj.weight",
            tuple(Source(f"{expert}w2.weight", (d, f)) for expert in experts),
            cut=by_rows((e * d, e)),
        ),
        Parameter(f"{ours}shared.gate_up_proj.weight", gates(shared), cut=by_rows((f, f), (f, f))),
        single(f"{ours}shared.down_proj.weight", f"{shared}w2.weight", (d, f), cut=by_columns((f, f))),
    ]


_RENAMED = (
    (re.compile(r"^model\."), ""), (re.compile(r"^embed_tokens\."), "embed."), (re.compile(r"^lm_head\."), "head."),
    (re.compile(r"^hc_head\.hc_"), "hc_head_"), (re.compile(r"^(layers\.\d+\.attn)\.norm\."), r"\1.kv_norm."),
)  # fmt: skip


def deepseek_v4_canonical(name: str) -> str | None:
    """Checkpoint name as declared above, also of what transformers writes; None for drafters inside of a checkpoint."""
    for pattern, ours in _RENAMED:
        name = pattern.sub(ours, name)
    return None if name.startswith("mtp.") else name
