"""The DFlash drafter: a small decoder that fills a whole block of masked slots in one forward pass.

Later members of the family are the same with other layers (`draft_conv`) or with a head that makes the proposals (`heads`).

Source: "DFlash: Block Diffusion for Flash Speculative Decoding", arXiv 2602.06036. Features tapped from the target enter only as
extra keys and values; every slot's hidden state predicts the token at that slot's own position.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Shaped

from dflash_jax.models.decoder import Embedding
from dflash_jax.models.dflash_config import DFlashConfig
from dflash_jax.models.draft_conv import ConvolvedLayer, conv_parameters
from dflash_jax.models.draft_gemma import gemma4_draft_layers, gemma4_draft_parameters
from dflash_jax.models.draft_laguna import (
    FeatureNorms,
    laguna_draft_layers,
    laguna_draft_parameters,
    laguna_draft_traits,
)
from dflash_jax.models.gemma import gemma_traits
from dflash_jax.models.heads import Block, head_module, head_parameters
from dflash_jax.models.layers import (
    ONE_BY_ONE,
    Attend,
    Cache,
    DecoderLayer,
    Linear,
    RMSNorm,
    Rotary,
    Runner,
    WideNorm,
    best_of_head,
    decoder_parameters,
    halved,
    linear,
    rms_norm,
    rotary_tables,
    rotate,
    unit_norm,
)
from dflash_jax.models.parameters import Parameter, single
from dflash_jax.models.traits import LayerTraits, decoder_traits
from dflash_jax.parallel.collectives import gathered
from dflash_jax.parallel.cut import by_rows
from dflash_jax.quantization.weights import Quantized

# Among a drafter's weights: its own copy of the target's head in eight bits, which stands for the head; and one that only says
# among which rows of the head the best is (`execution.draft_head`).
SHARED_HEAD, HEAD_INDEX = "shared.lm_head.weight", "index.lm_head.weight"


def dflash_traits(config: DFlashConfig) -> LayerTraits:
    """Layers of the dense Qwen3 kind, with sinks and a factor on values where a checkpoint says so, Gemma 4's or Laguna's."""
    if config.gemma4:
        return gemma_traits(config, normed_values=True)
    if config.laguna:
        return laguna_draft_traits(config)
    return decoder_traits(
        config, sinks=config.sinks, value_scale=config.value_scale, convolved=config.conv_taps > 0, activation=config.activation
    )  # fmt: skip


class DFlash(nnx.Module):
    """A drafter; embeddings and head are the target's unless the checkpoint brings its own."""

    def __init__(self, config: DFlashConfig):
        d = config.hidden_size
        self.config = config
        self.fc = Linear(d, len(config.target_layer_ids) * config.target_hidden_size) if config.projects else None
        taps, width = len(config.target_layer_ids), config.target_hidden_size
        self.feature_norms = FeatureNorms(taps, width, config.norm_eps) if config.laguna else None
        norm = WideNorm if config.gemma4 else RMSNorm
        self.hidden_norm = norm(d, config.norm_eps)
        self.layers = nnx.List(_layers(config))
        self.norm = norm(d, config.norm_eps)
        rows = config.num_layers * (1 if config.keys_as_values else 2) * config.num_kv_heads * config.head_dim
        self.context_kv_proj = Linear(rows, d, bias=config.attention_bias)
        self.embed = Embedding(config.vocab_size, d) if config.own_embedding else None
        self.lm_head = Linear(config.draft_vocab_size or config.vocab_size, d) if config.own_head else None
        self.mask_embedding = nnx.Param(jnp.zeros((d,))) if config.mask_embedding else None
        self.d2t = nnx.Param(jnp.zeros((config.draft_vocab_size,), jnp.int32)) if config.draft_vocab_size else None
        self.head = None if config.head is None else head_module(config.head, config.head_sizes)

    def context(self, features: Float[Array, "... nD"]) -> Float[Array, "... D"]:
        """Tapped features, concatenated in list order, to the context states that all layers share (project, then norm)."""
        features = self.normed(features)
        return self.of_projected(features if self.fc is None else self.fc(features))

    def normed(self, features: Float[Array, "... nD"]) -> Float[Array, "... nD"]:
        """Features as they are projected: each normed by itself in drafters that do so."""
        return features if self.feature_norms is None else self.feature_norms(features)

    def of_projected(self, products: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Context states of the projection's result. Where every layer norms them again, its weights are `context_kv_proj`'s."""
        states = self.hidden_norm(products)
        return unit_norm(states, self.config.norm_eps) if self.config.laguna else states

    def context_kv(
        self, context: Float[Array, "B C D"], positions: Int[Array, "B C"]
    ) -> tuple[Float[Array, "L B C K H"], Float[Array, "L B C K H"]]:
        """Keys (normed, rotated) and values of all layers for context states, through one projection."""
        c = self.config
        both = self.context_rows(self.context_kv_proj(context))
        both = both.reshape(*context.shape[:-1], c.num_layers, 2, c.num_kv_heads, c.head_dim)
        keys, values = jnp.moveaxis(both, (-4, -3), (1, 0))
        if self.context_norms is not None:
            norms = jnp.stack(self.context_norms)
            keys = rms_norm(keys, jnp.ones((c.head_dim,), both.dtype), c.norm_eps) * norms[:, None, None, None, :]
        return rotate(keys, self.rotary(positions)), values

    @property
    def context_norms(self) -> tuple[Float[Array, "H"], ...] | None:
        """Weights of every layer's key norm; None where `context_rows` norms."""
        return None if self.config.gemma4 else tuple(cast(Array, layer.attn.norms[1]) for layer in self.layers)

    def context_rows(self, products: Float[Array, "... F"]) -> Float[Array, "... F2"]:
        """Result of `context_kv_proj`, with keys and values of each layer in turn: of layers that norm values both are normed."""
        c = self.config
        if not c.gemma4:
            return products
        parts = products.reshape(*products.shape[:-1], c.num_layers, -1, c.num_kv_heads, c.head_dim)
        keys = [layer.attn.k_norm(parts[..., i, 0, :, :]) for i, layer in enumerate(self.layers)]
        both = jnp.stack([jnp.stack(keys, axis=-3), unit_norm(parts[..., -1, :, :], c.norm_eps)], axis=-3)
        return both.reshape(*products.shape[:-1], -1)

    def rotary(self, positions: Int[Array, "B T"]) -> Rotary:
        """The rotation at `positions` that all layers share."""
        return rotary_tables(positions, self.config.rope, self.config.head_dim)

    def block_embeddings(
        self, pending: Int[Array, "B"], embed_weight: Float[Array, "V Dt"] | Quantized
    ) -> Float[Array, "B G D"]:
        """Embeddings of `[pending, MASK, ..., MASK]`. `embed_weight` is the target's table; ignored with a table of its own."""
        c = self.config
        table = embed_weight if self.embed is None else self.embed.weight[...]
        mask = table[c.mask_token_id] if self.mask_embedding is None else self.mask_embedding[...].astype(table.dtype)
        masks = jnp.broadcast_to(mask, (pending.shape[0], c.block_size - 1, mask.shape[-1]))
        x = jnp.concatenate([table[pending][:, None], masks], axis=1)
        return x if c.input_scale == 1.0 else x * jnp.asarray(c.input_scale, x.dtype)

    def __call__(
        self,
        x: Float[Array, "B G D"],
        positions: Int[Array, "B G"],
        attend: Attend,
        run: Runner = ONE_BY_ONE,
        cache: Cache = None,
    ) -> tuple[Float[Array, "B G D"], Cache]:
        """Hidden states of the block's slots after the final norm, and the cache. `attend` adds the context's keys."""
        return self._run(x, None, positions, attend, run, cache)

    def block(
        self,
        pending: Int[Array, "B"],
        embed_weight: Float[Array, "V Dt"] | Quantized,
        positions: Int[Array, "B G"],
        attend: Attend,
        run: Runner = ONE_BY_ONE,
        cache: Cache = None,
    ) -> tuple[Float[Array, "B G D"], Cache]:
        """The same for `block_embeddings` of these arguments."""
        c, table = self.config, embed_weight if self.embed is None else self.embed.weight[...]
        if self.mask_embedding is not None or c.input_scale != 1.0:
            return self(self.block_embeddings(pending, embed_weight), positions, attend, run, cache)
        ids = jnp.where(jnp.arange(c.block_size) == 0, pending[:, None], c.mask_token_id)
        return self._run(*run.embed(self.layers, table, ids), positions, attend, run, cache)

    def _run(
        self, x: Array, normed: Array | None, positions: Array, attend: Attend, run: Runner, cache: Cache
    ) -> tuple[Array, Cache]:
        rotary, scaled = self.rotary(positions), self._scaled(attend)
        _, hidden, cache = run(self.layers, self.norm, x, rotary, scaled, cache, normed=normed)
        return hidden, cache

    def _scaled(self, attend: Attend) -> Attend:
        scale = self.config.value_scale
        if scale == 1.0:
            return attend

        def scaled(layer, qkv, rotary, cache):
            out, cache = attend(layer, qkv, rotary, cache)
            return out * jnp.asarray(scale, out.dtype), cache

        return scaled

    def logits(
        self, hidden: Float[Array, "... D"], head_weight: Float[Array, "F Dt"] | Quantized
    ) -> Float[Array, "... V"]:
        """float32 logits over the target's vocabulary; ids outside a reduced draft vocabulary are -inf."""
        out, targets = self._rows(hidden, head_weight)
        if targets is None:
            return out
        return jnp.full((*out.shape[:-1], self.config.vocab_size), -jnp.inf).at[..., targets].set(out)

    def judged(
        self,
        slots: Float[Array, "B G D"],
        places: int,
        anchor: Int[Array, "B"],
        head_weight: Float[Array, "F Dt"] | Quantized,
        embed_weight: Float[Array, "V Dt"] | Quantized,
        features: Float[Array, "B nD"],
        listed: tuple[Float[Array, "B g S"], Int[Array, "B g S"]] | None = None,
    ) -> Block:
        """Inputs of the draft head for the first `places` of a block.

        Args:
          slots: hidden states of the whole block.
          head_weight, embed_weight: the target's.
          features: tapped, of the last committed token; zeros where they are not at hand.
          listed: products with some rows of the target's head, and the rows, where the head regards the best few alone.
        """
        hidden = self.proposing(slots)[:, :places]
        table = embed_weight if self.embed is None else self.embed.weight[...]
        scale = self.config.input_scale

        def embed(ids: Array) -> Array:
            return table[ids] if scale == 1.0 else table[ids] * jnp.asarray(scale, table.dtype)

        def context() -> Array:
            found = jnp.any(features != 0, axis=-1, keepdims=True)
            return jnp.where(found, self.context(features), jnp.zeros((), features.dtype))

        if listed is not None:
            products, rows = listed
            return Block(anchor, hidden, self._scaled_logits(products), None, slots, embed, context, rows)
        return Block(anchor, hidden, *self._rows(hidden, head_weight), slots, embed, context)

    def _rows(self, hidden: Array, head_weight: Array | Quantized) -> tuple[Array, Array | None]:
        """float32 logits over the LM head's rows, and the rows' tokens where it has a vocabulary of its own."""
        c = self.config
        head = head_weight if self.lm_head is None else self.lm_head.weight[...]
        out = self._scaled_logits(gathered(linear(hidden, head), self.head_rows).astype(jnp.float32))
        return out, None if self.d2t is None else jnp.arange(c.draft_vocab_size, dtype=jnp.int32) + self.d2t[...]

    def _scaled_logits(self, products: Array) -> Array:
        c = self.config
        out = products * (c.head_scale * c.logit_scale)
        return jnp.tanh(out / c.logit_softcap) * c.logit_softcap if c.logit_softcap else out

    def best(self, hidden: Float[Array, "... D"], head_weight: Float[Array, "F Dt"] | Quantized) -> Int[Array, "..."]:
        """The tokens of the greatest `logits`, the first of equal ones. Neither a scale nor a soft cap changes which they are."""
        rows = best_of_head(hidden, head_weight if self.lm_head is None else self.lm_head.weight[...], self.head_rows)
        return rows if self.d2t is None else rows + self.d2t[...][rows]

    @property
    def head_rows(self) -> int:
        """Rows of the head that proposes, the target's or the drafter's own."""
        c = self.config
        return c.vocab_size if self.lm_head is None else c.draft_vocab_size or c.vocab_size

    def proposing(self, slots: Shaped[Array, "B G ..."]) -> Shaped[Array, "B g ..."]:
        """The slots that predict a drafted token: all but the anchor, or all with `sample_from_anchor`."""
        return slots if self.config.sample_from_anchor else slots[:, 1:]


def _layers(config: DFlashConfig) -> list[Any]:
    if config.gemma4:
        return [*gemma4_draft_layers(config.gemma4_layers, config.causal)]
    if config.laguna:
        return [*laguna_draft_layers(config, config.gating, config.causal)]
    traits, layer = dflash_traits(config), DecoderLayer
    if config.conv_taps:
        layer = partial(ConvolvedLayer, taps=config.conv_taps, group=config.conv_group)
    return [layer(config, i, traits, causal=config.causal[i]) for i in range(config.num_layers)]


def fuse_context_projection(config: DFlashConfig, params: Mapping[str, Array]) -> dict[str, Array]:
    """`params` with every layer's K and V rows also stacked into `context_kv_proj`, as `DFlash.context_kv` reads them: rows of keys
    that turn in pairs as `rotate` pairs them, and columns times the weights of the layer's input norm where it norms the context.

    A copy, not a view: a slice of a large parameter would be copied in every cycle instead.
    """
    queries, traits = config.num_heads * config.head_dim, dflash_traits(config)
    kinds = ("weight", "bias") if config.attention_bias else ("weight",)

    end = queries + 2 * config.num_kv_heads * config.head_dim if config.laguna else None

    def rows(name: str) -> Array:
        both = params[name][queries:end]
        if config.laguna:
            weights = params[name.replace("attn.qkv_proj", "input_norm")].astype(jnp.float32)
            both = (both.astype(jnp.float32) * weights).astype(both.dtype)
        if not traits.paired:
            return both
        heads = jnp.moveaxis(both.reshape(2, config.num_kv_heads, config.head_dim, -1), 2, -1)
        keys = halved(heads[:1], traits.rotary_dim)
        return jnp.moveaxis(jnp.concatenate([keys, heads[1:]]), -1, 2).reshape(both.shape)

    fused = {
        f"context_kv_proj.{kind}": jnp.concatenate(
            [rows(f"layers.{i}.attn.qkv_proj.{kind}") for i in range(config.num_layers)]
        )
        for kind in kinds
    }
    return {**params, **fused}


def dflash_parameters(config: DFlashConfig) -> tuple[Parameter, ...]:
    """Parameters of a DFlash checkpoint: 3 + 11 tensors a layer, and what it brings itself."""
    d, rows = config.hidden_size, config.draft_vocab_size or config.vocab_size
    features = len(config.target_layer_ids) * config.target_hidden_size
    if config.gemma4:
        layers = gemma4_draft_parameters(config.gemma4_layers)
    elif config.laguna:
        taps, how = len(config.target_layer_ids), config.gating
        layers = laguna_draft_parameters(config, taps, config.target_hidden_size, how, joined=config.joined_rows)
    else:
        layers = decoder_parameters(config, "", dflash_traits(config))
    table = [
        *((single("fc.weight", "fc.weight", (d, features)),) if config.projects else ()),
        single("hidden_norm.weight", "hidden_norm.weight", (d,)),
        *layers,
        single("norm.weight", "norm.weight", (d,)),
    ]
    if config.own_embedding:
        table.append(single("embed.weight", "embed_tokens.weight", (config.vocab_size, d)))
    if config.own_head:
        table.append(single("lm_head.weight", "lm_head.weight", (rows, d), cut=by_rows((rows, rows), optional=True)))
    if config.mask_embedding:
        table.append(single("mask_embedding", "mask_embedding", (d,)))
    if config.draft_vocab_size:
        table.append(single("d2t", "d2t", (config.draft_vocab_size,), "int32"))
    if config.conv_taps:
        table += conv_parameters(config, config.conv_taps, config.conv_group)
    if config.head is not None:
        table += head_parameters(config.head, config.head_sizes)
    return tuple(table)


# Other trainers' names of tensors, the last two of Meta's Muse assistant.
_RENAMED = {
    "draft_id_to_target_id": "d2t", "mask_embedding.weight": "mask_embedding", "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}  # fmt: skip


_OF_TRAINERS = ("t2d", "hc_head_base", "hc_head_fn", "hc_head_scale")


def dflash_canonical(name: str) -> str | None:
    """Checkpoint name as declared above: `model.` stripped, `midlayer.` is layer 0; None for what is not needed here, such as what
    a trainer copies of its target to make its last hidden states of several streams."""
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        name = "layers.0." + name.removeprefix("midlayer.")
    name = _RENAMED.get(name, name)
    name = name.replace("self_attn.sinks", "self_attn.attention_sink_bias")
    return None if name in _OF_TRAINERS or name.endswith("rotary_emb.inv_freq") else name
