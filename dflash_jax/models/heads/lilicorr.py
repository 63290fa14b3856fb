"""LiLiCorr's head: candidates of all places attend to one another, and what comes out scores neighbors (arXiv 2608.20530).

Every candidate is a node, made of its token's embedding, its place's hidden state, and what its place's base logits say of it. A
few layers of attention over all nodes of a block know of each pair only how far their places are apart. Then a node has a vector
for who comes after it and one for who comes before, and the score of a pair is their product: base logits are features alone.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dflash_jax.config import shown
from dflash_jax.errors import ConfigError
from dflash_jax.models.heads.base import LARGEST_RANK, Block, HeadConfig, Law, Pick, Sizes
from dflash_jax.models.heads.pairs import walk
from dflash_jax.models.heads.reading import Source, missing
from dflash_jax.models.largest import largest
from dflash_jax.models.layers import Linear, RMSNorm
from dflash_jax.models.parameters import Parameter, single

PREFIX = "lilicorr."
FEATURES = 5
FEATURE_EPS = 1e-5
MOST_LAYERS = 64


@dataclass(frozen=True, kw_only=True)
class LiLiCorrConfig(HeadConfig):
    """LiLiCorr's head; `rank` is `lilicorr_factor_dim` of a drafter's file.

    Attributes:
      hidden: width of nodes.
      layers, heads, inner: of attention over nodes, and the width of its feed-forward.
      vector_eps: least length of a vector that is divided by its own.
      score_scale: factor on scores of pairs.
    """

    kind: Literal["lilicorr"] = "lilicorr"
    hidden: int = 0
    layers: int = 0
    heads: int = 0
    inner: int = 0
    vector_eps: float = 1e-6
    score_scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        bounds = {
            "hidden": LARGEST_RANK,
            "layers": MOST_LAYERS,
            "heads": LARGEST_RANK,
            "inner": LARGEST_RANK,
            "top_k": 16,
        }
        for name, most in bounds.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ConfigError(f"{type(self).__name__}: {name} must be 1 to {most:,}, got {shown(value)}")
        for name in ("vector_eps", "score_scale"):
            if not isinstance(value := getattr(self, name), int | float) or not value > 0:
                raise ConfigError(f"{type(self).__name__}: {name} must be a positive number, got {shown(value)}")
        if self.hidden % self.heads:
            raise ConfigError(f"{type(self).__name__}: hidden={self.hidden} must be a multiple of heads={self.heads}")


_NEEDED = (
    "lilicorr_candidate_topk", "lilicorr_num_layers", "lilicorr_num_heads", "lilicorr_mlp_ratio", "lilicorr_factor_dim",
    "lilicorr_vector_eps", "lilicorr_logit_scale",
)  # fmt: skip


def read_lilicorr(source: Source, names: Collection[str], sizes: Sizes) -> LiLiCorrConfig | None:
    """The configuration that a file's keys, found by `source`, and its tensors' names say; None where neither speaks of LiLiCorr.

    Raises:
      ConfigError: a key is missing, or cannot be.
    """
    switch = source("lilicorr_enabled")
    keys = {key: source(key) for key in _NEEDED}
    said = {key: reader.get(key) is not None for key, reader in keys.items()}
    if not any(name.startswith(PREFIX) for name in names) and not (
        any(said.values()) or switch.flag("lilicorr_enabled")
    ):
        return None
    missing(keys, said, "LiLiCorr's head")
    width, width_key = source("lilicorr_hidden_size"), "lilicorr_hidden_size"
    hidden = width.integer(width_key, 0, minimum=0) or sizes.hidden
    top_k, layers, heads, rank = (
        keys[f"lilicorr_{key}"].integer(f"lilicorr_{key}")
        for key in ("candidate_topk", "num_layers", "num_heads", "factor_dim")
    )
    ratio, eps, scale = (
        keys[f"lilicorr_{key}"].number(f"lilicorr_{key}") for key in ("mlp_ratio", "vector_eps", "logit_scale")
    )
    if sizes.rows != sizes.vocab or not switch.flag("lilicorr_enabled", default=True):
        raise ConfigError(
            f"{switch.subject}: LiLiCorr's head proposes from the target's whole vocabulary and is not switched off, got "
            f"draft_vocab_size={sizes.rows} of {sizes.vocab} and lilicorr_enabled={switch.get('lilicorr_enabled', True)}"
        )
    return LiLiCorrConfig(
        rank=rank, top_k=top_k, hidden=hidden, layers=layers, heads=heads, inner=int(hidden * ratio), vector_eps=eps,
        score_scale=scale,
    )  # fmt: skip


class FeatureNorm(nnx.Module):
    """Layer norm of a candidate's features, in float32."""

    def __init__(self):
        self.weight, self.bias = nnx.Param(jnp.ones((FEATURES,))), nnx.Param(jnp.zeros((FEATURES,)))

    def __call__(self, x: Float[Array, "... 5"]) -> Float[Array, "... 5"]:
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + FEATURE_EPS)
        return x * self.weight[...].astype(x.dtype) + self.bias[...].astype(x.dtype)


class FeedForward(nnx.Module):
    """silu between two projections with biases."""

    def __init__(self, given: int, inner: int, out: int):
        self.up_proj, self.down_proj = Linear(inner, given, bias=True), Linear(out, inner, bias=True)

    def __call__(self, x: Array) -> Array:
        return self.down_proj(jax.nn.silu(self.up_proj(x)))


class Layer(nnx.Module):
    """Attention of every node to all, with a bias for each two, then a feed-forward, each added to what it was given."""

    def __init__(self, config: LiLiCorrConfig, eps: float):
        h = config.hidden
        self.heads = config.heads
        self.attn_norm, self.mlp_norm = RMSNorm(h, eps), RMSNorm(h, eps)
        self.in_proj, self.out_proj = Linear(3 * h, h, bias=True), Linear(h, h, bias=True)
        self.mlp = FeedForward(h, config.inner, h)

    def __call__(self, x: Float[Array, "B M h"], bias: Float[Array, "N M M"]) -> Float[Array, "B M h"]:
        split = self.in_proj(self.attn_norm(x)).reshape(*x.shape[:-1], 3, self.heads, -1)
        q, k, v = (split[:, :, i].astype(jnp.float32) for i in range(3))
        exact = jax.lax.Precision.HIGHEST
        scores = jnp.einsum("bqnd,bknd->bnqk", q, k, precision=exact) / q.shape[-1] ** 0.5 + bias.astype(jnp.float32)
        mixed = jnp.einsum("bnqk,bknd->bqnd", jax.nn.softmax(scores, axis=-1), v, precision=exact)
        x = x + self.out_proj(mixed.reshape(x.shape).astype(x.dtype))
        return x + self.mlp(self.mlp_norm(x))


class LiLiCorr(nnx.Module):
    """See the module."""

    def __init__(self, config: LiLiCorrConfig, sizes: Sizes):
        d, h, eps = sizes.hidden, config.hidden, sizes.norm_eps
        self.config, self.slots = config, sizes.slots
        self.token_proj = Linear(h, d, bias=True) if h != d else None
        self.pass_hidden_proj, self.context_proj = Linear(h, d, bias=True), Linear(h, d, bias=True)
        self.feature_norm = FeatureNorm()
        self.feature_mlp = FeedForward(FEATURES, h, h)
        self.slot_embedding = nnx.Param(jnp.zeros((1, 1, sizes.slots - 1, 1, h)))
        self.rank_embedding = nnx.Param(jnp.zeros((1, 1, 1, config.top_k, h)))
        self.relative_slot_bias = nnx.Param(jnp.zeros((config.heads, 2 * sizes.slots - 1)))
        self.same_slot_bias = nnx.Param(jnp.zeros((config.heads,)))
        self.layers = nnx.List([Layer(config, eps) for _ in range(config.layers)])
        self.output_norm, self.anchor_norm = RMSNorm(h, eps), RMSNorm(h, eps)
        self.factor_input_proj = Linear(h, 3 * h, bias=True)
        self.out_head, self.in_head, self.anchor_out_head = (Linear(config.rank, h, bias=True) for _ in range(3))

    def propose(self, block: Block, pick: Pick) -> tuple[Int[Array, "B g"], Law]:
        """See `DraftHead`."""
        c = self.config
        logs = jax.nn.log_softmax(block.logits, axis=-1)
        unary, tokens = largest(logs, c.top_k)
        nodes = self.nodes(block.embed(tokens), block.hidden, unary)
        context = block.context()
        anchor = self.context_proj(context)
        anchor = self.anchor_norm(jnp.where(jnp.any(context != 0, axis=-1, keepdims=True), anchor, 0))
        both = jnp.broadcast_to(anchor[:, None, None], nodes.shape)
        factors = jax.nn.silu(self.factor_input_proj(jnp.concatenate([nodes, both, nodes * both], axis=-1)))
        after, before, first = (
            self.direction(head(x))
            for head, x in ((self.out_head, factors), (self.in_head, factors), (self.anchor_out_head, anchor))
        )
        exact = jax.lax.Precision.HIGHEST
        start = jnp.einsum("bf,bcf->bc", first, before[:, 0], precision=exact)[:, None, None]
        start = jnp.broadcast_to(start, (*start.shape[:2], c.top_k, c.top_k))
        pairs = jnp.einsum("bgpf,bgcf->bgpc", after[:, :-1], before[:, 1:], precision=exact)
        return walk(c.score_scale * jnp.concatenate([start, pairs], axis=1), tokens, pick)

    def nodes(
        self, embedded: Float[Array, "B g C D"], hidden: Float[Array, "B g D"], logs: Float[Array, "B g C"]
    ) -> Float[Array, "B g C h"]:
        """Candidates after the layers and the last norm, from their tokens' embeddings, best first, and log-probabilities."""
        places, top_k = logs.shape[1:]
        ranks = jnp.arange(top_k, dtype=jnp.float32)
        said = (logs, jnp.exp(logs), logs - logs[..., :1], ranks / max(top_k - 1, 1), (ranks == 0).astype(jnp.float32))
        features = self.feature_norm(jnp.stack([jnp.broadcast_to(one, logs.shape) for one in said], axis=-1))
        x = embedded.astype(hidden.dtype)
        x = (x if self.token_proj is None else self.token_proj(x)) + self.pass_hidden_proj(hidden)[:, :, None]
        x = x + self.feature_mlp(features.astype(hidden.dtype))
        x = x + self.slot_embedding[0, :, :places].astype(x.dtype) + self.rank_embedding[0].astype(x.dtype)
        slot = jnp.repeat(jnp.arange(places), top_k)
        apart = slot[:, None] - slot
        bias = self.relative_slot_bias[...][:, apart + self.slots - 1]
        bias = bias + (apart == 0) * self.same_slot_bias[...][:, None, None]
        rows = x.reshape(x.shape[0], places * top_k, -1)
        for layer in self.layers:
            rows = layer(rows, bias)
        return self.output_norm(rows).reshape(x.shape)

    def direction(self, x: Float[Array, "*B f"]) -> Float[Array, "*B f"]:
        """Vectors of length 1, in float32."""
        wide = x.astype(jnp.float32)
        return wide / jnp.maximum(jnp.linalg.norm(wide, axis=-1, keepdims=True), self.config.vector_eps)


def lilicorr_parameters(config: LiLiCorrConfig, sizes: Sizes) -> list[Parameter]:
    """Tensors of the head, whose names are those of the checkpoint, but for attention's first projection."""
    d, h, r, f, slots = sizes.hidden, config.hidden, config.rank, config.inner, sizes.slots
    table = [
        single("slot_embedding", f"{PREFIX}slot_embedding", (1, 1, slots - 1, 1, h)),
        single("rank_embedding", f"{PREFIX}rank_embedding", (1, 1, 1, config.top_k, h)),
        single("relative_slot_bias", f"{PREFIX}relative_slot_bias", (config.heads, 2 * slots - 1)),
        single("same_slot_bias", f"{PREFIX}same_slot_bias", (config.heads,)),
    ]

    def dense(name: str, rows: int, columns: int) -> None:
        table.append(single(f"{name}.weight", f"{PREFIX}{name}.weight", (rows, columns)))
        table.append(single(f"{name}.bias", f"{PREFIX}{name}.bias", (rows,)))

    if h != d:
        dense("token_proj", h, d)
    dense("pass_hidden_proj", h, d)
    dense("context_proj", h, d)
    table += [
        single(f"feature_norm.{kind}", f"{PREFIX}feature_norm.{kind}", (FEATURES,)) for kind in ("weight", "bias")
    ]
    dense("feature_mlp.up_proj", h, FEATURES)
    dense("feature_mlp.down_proj", h, h)
    for i in range(config.layers):
        layer = f"layers.{i}"
        table += [
            single(f"{layer}.{one}.weight", f"{PREFIX}{layer}.{one}.weight", (h,)) for one in ("attn_norm", "mlp_norm")
        ]
        table.append(single(f"{layer}.in_proj.weight", f"{PREFIX}{layer}.attn.in_proj_weight", (3 * h, h)))
        table.append(single(f"{layer}.in_proj.bias", f"{PREFIX}{layer}.attn.in_proj_bias", (3 * h,)))
        table.append(single(f"{layer}.out_proj.weight", f"{PREFIX}{layer}.attn.out_proj.weight", (h, h)))
        table.append(single(f"{layer}.out_proj.bias", f"{PREFIX}{layer}.attn.out_proj.bias", (h,)))
        dense(f"{layer}.mlp.up_proj", f, h)
        dense(f"{layer}.mlp.down_proj", h, f)
    table += [single(f"{one}.weight", f"{PREFIX}{one}.weight", (h,)) for one in ("output_norm", "anchor_norm")]
    dense("factor_input_proj", h, 3 * h)
    for name in ("out_head", "in_head", "anchor_out_head"):
        dense(name, r, h)
    return table


def lilicorr_tables(config: LiLiCorrConfig) -> tuple[str, ...]:
    """Parameters of which a cycle reads a few rows alone: none."""
    del config
    return ()
