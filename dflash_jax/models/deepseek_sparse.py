"""DeepSeek-V3.2 and GLM-5 targets: latent attention over the rows that an indexer chooses for each token (DSA).

Source: DeepSeek-V3.2-Exp's report (2025), section 2.1; layouts of rotation as in transformers' DeepseekV32 and GlmMoeDsa, 5.24.

A layer is DeepSeek-V3's. Beside it an indexer scores every token before a query, and the query attends to the `index_topk` best of
them alone, the same for all heads: of equal scores the earlier token. Up to that many tokens it is DeepSeek-V3, number for number.
GLM-5.2 has indexers in some layers, the others take over what the nearest one before them chose.

A norm of the latents has epsilon 1e-6 whatever `rms_norm_eps` says, as in transformers (see `DeepseekConfig.latent_norm_eps`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from dflash_jax.config import KeyReader, architectures_of, refuse_quantised, shown
from dflash_jax.errors import ConfigError
from dflash_jax.models.deepseek import (
    LATENT_VALUES,
    NEUTRAL,
    V3,
    Deepseek,
    DeepseekConfig,
    MLAttention,
    attention_keys,
    decoder_keys,
    deepseek_parameters,
    expert_keys,
    rotate_interleaved,
)
from dflash_jax.models.layers import Cache, IndexRows, LayerNorm, Linear, Rotary, rotate
from dflash_jax.models.parameters import Parameter, single

V32, GLM = "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"
SPARSE_ARCHITECTURES, SPARSE_TYPES = (V32, GLM), ("deepseek_v32", "glm_moe_dsa")
INDEX_NORM_EPS = 1e-6
# How sets pass between iterations of a head for further tokens (MTP), which is left out.
_NEUTRAL = NEUTRAL | {"index_share_for_mtp_iteration"}
_KINDS = {"full": True, "F": True, "shared": False, "S": False}


@dataclass(frozen=True, kw_only=True)
class SparseDeepseekConfig(DeepseekConfig):
    """A target with latent attention and indexers; `q_lora_rank` is never None.

    Attributes:
      index_topk: tokens a query attends to at most.
      index_heads, index_head_dim: of the indexers (I and E); the first `qk_rope_head_dim` dimensions of a head rotate.
      index_interleaved: whether dimensions 2i and 2i+1 of these turn together (GLM), otherwise i and i + r/2 (DeepSeek).
      indexers: of each layer, whether it has an indexer of its own.
    """

    index_topk: int
    index_heads: int
    index_head_dim: int
    index_interleaved: bool
    indexers: tuple[bool, ...]

    def __post_init__(self) -> None:
        """Raises ConfigError as `DecoderConfig` does, and where indexers cannot be so."""
        super().__post_init__()
        for name in ("index_topk", "index_heads", "index_head_dim", "q_lora_rank"):
            if (getattr(self, name) or 0) < 1:
                raise ConfigError(f"SparseDeepseekConfig: {name} must be at least 1, got {getattr(self, name)}")
        width = self.index_head_dim
        if width & (width - 1) or width < self.qk_rope_head_dim:
            raise ConfigError(
                f"SparseDeepseekConfig: index_head_dim must be a power of two, which its keys' float8 form needs, and hold "
                f"{self.qk_rope_head_dim} rotary dimensions, got {width}"
            )
        if len(self.indexers) != self.num_layers or not self.indexers[0]:
            raise ConfigError(
                f"SparseDeepseekConfig: indexers must say of each of {self.num_layers} layers whether it has one, the first with "
                f"one, got {shown(self.indexers)}"
            )

    def index_place(self, layer: int) -> int:
        """Index among the layers with an indexer of this one, or of the one whose choice it reuses, counted from 0."""
        return sum(self.indexers[: layer + 1]) - 1

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], notices: list[str] | None = None) -> "SparseDeepseekConfig":
        """Reads a `config.json` of one of `SPARSE_ARCHITECTURES`.

        Args:
          notices: takes what was decided where the file leaves a choice, one sentence each.

        Raises:
          ConfigError: a needed key is missing or malformed, the weights are quantised, or a key is present that this package does
            not implement.
        """
        refuse_quantised(values)
        names = architectures_of(values)
        glm = GLM in names or (not names and values.get("model_type") == "glm_moe_dsa")
        keys = KeyReader(f"config.json ({GLM if glm else V32})", values, notices)
        decoder, experts = decoder_keys(keys), expert_keys(keys, V3)
        layers = decoder["num_layers"]
        experts["num_dense_layers"] = dense_layers(keys, layers, experts["num_dense_layers"])
        _check_kinds(keys, layers)
        keys.integer("q_lora_rank")
        config = cls(
            **decoder, **attention_keys(keys), **experts,
            index_topk=keys.integer("index_topk", 2048),
            index_heads=keys.integer("index_n_heads", 32 if glm else 64),
            index_head_dim=keys.integer("index_head_dim", 128),
            # Not the main attention's: DeepSeek's indexers turn halves, whatever that says.
            index_interleaved=keys.flag("indexer_rope_interleave", default=glm),
            indexers=_indexers(keys, layers),
        )  # fmt: skip
        keys.refuse_rest(_NEUTRAL, {key: said for key, said in LATENT_VALUES.items() if key != "layer_types"})
        return config


def _check_kinds(keys: KeyReader, layers: int) -> None:
    """Raises ConfigError where a file says that some layer's attention is of another kind."""
    kinds = keys.get("layer_types", ["indexed_attention"] * layers)
    known = isinstance(kinds, list | tuple) and set(kinds) <= {"indexed_attention", "deepseek_sparse_attention"}
    if not known or len(kinds) != layers:
        raise ConfigError(
            f"{keys.subject}: layer_types must be indexed_attention for each of {layers} layers, got {shown(kinds)}"
        )


def dense_layers(keys: KeyReader, layers: int, counted: int) -> int:
    """Leading layers without experts: as `mlp_layer_types` lists them, otherwise `counted`.

    Raises:
      ConfigError: dense layers are not the leading ones, or both keys say different things.
    """
    kinds = keys.get("mlp_layer_types")
    if kinds is None:
        return counted
    dense = len(kinds) - kinds.count("sparse") if isinstance(kinds, list | tuple) else -1
    if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise ConfigError(
            f"{keys.subject}: mlp_layer_types must be dense for some leading layers and sparse for the rest of {layers}, got "
            f"{shown(kinds)}"
        )
    if keys.values.get("first_k_dense_replace") not in (None, dense):
        raise ConfigError(
            f"{keys.subject} says first_k_dense_replace={counted}, and {dense} dense layers in mlp_layer_types: keep the one that "
            "the model was trained with"
        )
    return dense


def _indexers(keys: KeyReader, layers: int) -> tuple[bool, ...]:
    """Indices of the layers with an indexer: as `indexer_types` lists them, `index_topk_pattern`, or every `index_topk_freq`-th.

    Raises:
      ConfigError: a list has other names or another length, or the ways to say it differ.
    """
    every, first = keys.integer("index_topk_freq", 1), keys.integer("index_skip_topk_offset", 2, minimum=0)
    counted = tuple(max(i - first + 1, 0) % every == 0 for i in range(layers))
    ways: dict[str, tuple[bool, ...]] = {}
    for key in ("indexer_types", "index_topk_pattern"):
        if (kinds := keys.get(key)) is not None:
            listed: Sequence[Any] = kinds if isinstance(kinds, list | tuple | str) else ()
            if len(listed) != layers or not all(isinstance(kind, str) and kind in _KINDS for kind in listed):
                raise ConfigError(
                    f"{keys.subject}: {key} must say full or shared of each of {layers} layers, got {shown(kinds)}"
                )
            ways[key] = tuple(_KINDS[kind] for kind in listed)
    if keys.values.get("index_topk_freq") is not None and "index_topk_pattern" not in ways:
        ways["index_topk_freq"] = counted
    found = next(iter(ways.values()), counted)
    if any(way != found for way in ways.values()):
        raise ConfigError(
            f"{keys.subject}: {' and '.join(ways)} say different things of which layers have an indexer: keep the one that the "
            "model was trained with"
        )
    if not found[0]:
        raise ConfigError(f"{keys.subject}: the first layer must have an indexer, got {shown(found)}")
    return found


class Indexer(nnx.Module):
    """Queries, keys and weights by which a layer chooses the tokens that its queries see."""

    def __init__(self, config: Any):
        self.config = config
        heads, width = config.index_heads, config.index_head_dim
        self.q_proj = Linear(heads * width, config.q_lora_rank or 0)
        self.k_proj = Linear(width, config.hidden_size)
        self.k_norm = LayerNorm(width, INDEX_NORM_EPS)
        self.weights_proj = Linear(heads, config.hidden_size)

    def __call__(self, x: Array, q_latent: Array, rotary: Any) -> IndexRows:
        """Index queries, keys and weights of the layer's normed input `x [B,T,D]` and the queries' normed latent `[B,T,Rq]`."""
        config = self.config
        q = self.q_proj(q_latent).reshape(*x.shape[:-1], config.index_heads, config.index_head_dim)
        k = self.k_norm(self.k_proj(x))[..., None, :]
        # In float32 as far as to the scores: they choose, and are rounded nowhere else.
        wide, weight = jnp.promote_types(x.dtype, jnp.float32), self.weights_proj.weight[...]
        weights = jnp.einsum("btd,id->bti", x, weight, precision=jax.lax.Precision.HIGHEST, preferred_element_type=wide)
        factor = (config.index_heads * config.index_head_dim) ** -0.5
        return IndexRows(self.turned(q, rotary), self.turned(k, rotary)[..., 0, :], weights * factor)

    def turned(self, x: Array, rotary: Any) -> Array:
        """Heads with their first dimensions rotated."""
        if not self.config.index_interleaved:
            return rotate(x, rotary)
        first, rest = jnp.split(x, [self.config.qk_rope_head_dim], axis=-1)
        return jnp.concatenate([rotate_interleaved(first, rotary), rest], axis=-1)


class SparseAttention(MLAttention):
    """Latent projections and an indexer around the caller's `attend.indexed`; `indexer` None where another layer's counts."""

    config: SparseDeepseekConfig

    def __init__(self, config: SparseDeepseekConfig, index: int):
        super().__init__(config, index)
        self.indexer = Indexer(config) if config.indexers[index] else None

    def __call__(self, x: Array, rotary: Rotary, attend: Any, cache: Cache = None) -> tuple[Array, Cache]:
        """Raises NotImplementedError where `attend` is no `IndexedAttend`: nothing else asks the indexer."""
        if not hasattr(attend, "indexed"):
            raise NotImplementedError(
                f"{type(attend).__name__} has no attention to what an indexer chooses: take DenseAttend, or a PagedAttend within "
                "IndexedPages"
            )
        q_latent, row = self.project_latents(x)
        index = None if self.indexer is None else self.indexer(x, q_latent, rotary)
        out, cache = attend.indexed(self, self.queries(q_latent), row, index, rotary, cache)
        return self.o_proj(out.reshape(*out.shape[:-2], -1)), cache


class SparseDeepseek(Deepseek):
    """A decoder with latent attention over chosen rows; see `Decoder` for how it is called, with an `IndexedAttend`."""

    def __init__(self, config: SparseDeepseekConfig):
        super().__init__(config, SparseAttention)


def sparse_parameters(config: SparseDeepseekConfig) -> tuple[Parameter, ...]:
    """Parameters of a checkpoint with latent attention and indexers; layers without one have no tensors of it."""

    def indexer(layer: int, ours: str, theirs: str) -> list[Parameter]:
        return indexer_parameters(config, f"{ours}indexer.", f"{theirs}indexer.") if config.indexers[layer] else []

    return deepseek_parameters(config, indexer)


def indexer_parameters(config: Any, ours: str, theirs: str) -> list[Parameter]:
    """Parameters of one `Indexer`."""
    heads, width = config.index_heads, config.index_head_dim
    shapes = {
        ("q_proj", "wq_b"): (heads * width, config.q_lora_rank or 0), ("k_proj", "wk"): (width, config.hidden_size),
        ("weights_proj", "weights_proj"): (heads, config.hidden_size),
    }  # fmt: skip
    return [
        *(single(f"{ours}{our}.weight", f"{theirs}{their}.weight", shape) for (our, their), shape in shapes.items()),
        # float32 in the released files, among bfloat16 weights.
        *(single(f"{ours}k_norm.{part}", f"{theirs}k_norm.{part}", (width,), "float32") for part in ("weight", "bias")),
    ]
