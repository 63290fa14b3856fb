"""The part all targets share: embedding, a stack of layers with taps on the residual stream, final norm and head."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.config import FINAL_HIDDEN, DecoderConfig
from dflash_jax.models.layers import (
    ONE_BY_ONE,
    Attend,
    Cache,
    IndexedAttend,
    LatentAttend,
    Linear,
    RMSNorm,
    Rotary,
    Runner,
    best_of_head,
    linear,
    rotary_tables,
    unit_norm,
)
from dflash_jax.models.parameters import Parameter, single
from dflash_jax.parallel.collectives import gathered
from dflash_jax.parallel.cut import by_rows
from dflash_jax.quantization.weights import Quantized


class Embedding(nnx.Module):
    """Token embedding: rows of a table `[rows, D]`."""

    def __init__(self, rows: int, dim: int):
        self.weight = nnx.Param(jnp.zeros((rows, dim)))

    def __call__(self, ids: Int[Array, "..."]) -> Float[Array, "... D"]:
        return self.weight[...][ids]


class Decoder(nnx.Module):
    """A decoder with taps on its residual stream; a family gives its layers, called as `layer(x, rotary, attend, cache)`.

    Args:
      norm: the final one; None for an `RMSNorm`.
      embedding_scale: factor on embeddings, rounded to their dtype; the head that shares them has none.
      logit_softcap: c of `c * tanh(logit / c)`; 0 for no cap.
      logit_scale: factor on logits, before that.
      normed_embeddings: whether embeddings are normed, without a weight; drafters that borrow the table take its rows as they are.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layers: Iterable[nnx.Module],
        *,
        tied: bool,
        norm: nnx.Module | None = None,
        embedding_scale: float = 1.0,
        logit_softcap: float = 0.0,
        logit_scale: float = 1.0,
        normed_embeddings: bool = False,
    ):
        self.config, self.embedding_scale, self.logit_softcap = config, embedding_scale, logit_softcap
        self.logit_scale, self.normed_embeddings = logit_scale, normed_embeddings
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nnx.List(layers)
        self.norm: Any = RMSNorm(config.hidden_size, config.norm_eps) if norm is None else norm
        self.lm_head = None if tied else Linear(config.vocab_size, config.hidden_size)

    def __call__(
        self,
        ids: Int[Array, "B T"],
        positions: Int[Array, "B T *axes"],
        attend: Attend | LatentAttend | IndexedAttend,
        taps: tuple[int, ...] = (),
        run: Runner = ONE_BY_ONE,
        cache: Cache = None,
        given: tuple[Bool[Array, "B T"], Float[Array, "B T D"]] | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T nF"], Cache]:
        """Hidden states after the final norm, the tapped residual streams side by side in the order of `taps`, and the cache.

        `positions` are what heads turn by; where a token is among the keys is for `attend` to know. `given` says of which tokens
        the embedding is not the table's, and what it is.

        `attend` takes the cache and gives it back with the new tokens, layer by layer; None where it keeps nothing.

        A tap of -1 is the embedding output, i is the stream after block i (arXiv 2602.06036, section 4.1). The last block's
        tap is raw: Hugging Face's last `hidden_states` entry is after the final norm, drafters are trained on what is before.
        `FINAL_HIDDEN` is what is after it.
        """
        x, normed = run.embed(self.layers, self.embed.weight[...], ids)
        if self.embedding_scale != 1.0:
            x, normed = x * jnp.asarray(self.embedding_scale, x.dtype), None
        if self.normed_embeddings:
            x, normed = unit_norm(x, self.config.norm_eps), None
        if given is not None:
            x, normed = jnp.where(given[0][:, :, None], given[1].astype(x.dtype), x), None
        layers, rotary = self.layers_for(ids, x), self.rotary(positions)
        streams, hidden, cache = run(layers, self.norm, self.spread(x), rotary, attend, cache, normed=normed)
        first = self.tapped_embedding(x)
        tapped = [
            hidden if tap == FINAL_HIDDEN else first if tap < 0 else self.tapped(streams[tap], tap) for tap in taps
        ]
        features = jnp.concatenate(tapped, axis=-1) if tapped else jnp.zeros((*ids.shape, 0), x.dtype)
        return hidden, features, cache

    def layers_for(self, ids: Int[Array, "B T"], x: Float[Array, "B T D"]) -> Sequence[Any]:
        """The layers as they are called for tokens with the embeddings x: layers that take more than the stream are given it."""
        del ids, x  # of no use to most
        return self.layers

    def spread(self, x: Float[Array, "B T D"]) -> Array:
        """The first layer's input, from embeddings."""
        return x

    def tapped(self, stream: Array, index: int) -> Float[Array, "B T F"]:
        """What drafters read of the output of layer `index`."""
        del index  # of no use where there is one stream
        return stream

    def tapped_embedding(self, x: Float[Array, "B T D"]) -> Float[Array, "B T F"]:
        """What drafters read of the embedding output."""
        return x

    def rotary(self, positions: Int[Array, "B T *axes"]) -> Rotary:
        """The rotation at `positions` that all layers share."""
        return rotary_tables(positions, self.config.rope, self.config.head_dim)

    @property
    def head_weight(self) -> Float[Array, "V D"] | Quantized:
        return self.embed.weight[...] if self.lm_head is None else self.lm_head.weight[...]

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """float32 logits of hidden states after the final norm."""
        out = gathered(linear(hidden, self.head_weight), self.config.vocab_size).astype(jnp.float32)
        out = out if self.logit_scale == 1.0 else out * self.logit_scale
        return jnp.tanh(out / self.logit_softcap) * self.logit_softcap if self.logit_softcap else out

    def best(self, hidden: Float[Array, "... D"]) -> Int[Array, "..."]:
        """The tokens of the greatest logits, the first of equal ones; float32 logits are nowhere written, and a soft cap does not
        change which are the greatest."""
        return best_of_head(hidden, self.head_weight, self.config.vocab_size)


def target_parameters(config: DecoderConfig, layers: Iterable[Parameter], *, tied: bool) -> tuple[Parameter, ...]:
    """A `Decoder`'s parameters around those of its layers, by their published names."""
    v, d = config.vocab_size, config.hidden_size
    return (
        single("embed.weight", "model.embed_tokens.weight", (v, d)),
        *layers,
        single("norm.weight", "model.norm.weight", (d,)),
        *(() if tied else (single("lm_head.weight", "lm_head.weight", (v, d), cut=by_rows((v, v), optional=True)),)),
    )
