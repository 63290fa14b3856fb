"""Qwen3 dense targets: the Flax module, its parameters and their Hugging Face names."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dflash_jax.config import Qwen3Config
from dflash_jax.models.layers import Attend, DecoderLayer, Linear, RMSNorm, decoder_parameters, linear
from dflash_jax.models.parameters import Parameter, single


class Embedding(nnx.Module):
    def __init__(self, rows: int, dim: int):
        self.weight = nnx.Param(jnp.zeros((rows, dim)))

    def __call__(self, ids: Int[Array, "..."]) -> Float[Array, "... D"]:
        return self.weight[...][ids]


class Qwen3(nnx.Module):
    """A Qwen3 decoder with taps on its residual stream."""

    def __init__(self, config: Qwen3Config):
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nnx.List([DecoderLayer(config, i) for i in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = None if config.tie_embeddings else Linear(config.vocab_size, config.hidden_size)

    def __call__(
        self, ids: Int[Array, "B T"], positions: Int[Array, "B T"], attend: Attend, taps: tuple[int, ...] = ()
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T nD"]]:
        """Hidden states after the final norm, and the tapped residual streams side by side in the order of `taps`.

        A tap of -1 is the embedding output, i is the stream after block i (arXiv 2602.06036, section 4.1). The last block's
        tap is raw: Hugging Face's last `hidden_states` entry is after the final norm, drafters are trained on what is before.
        """
        x = self.embed(ids)
        streams = {-1: x}
        for index, layer in enumerate(self.layers):
            x = layer(x, positions, attend)
            streams[index] = x
        tapped = [streams[tap] for tap in taps]
        features = jnp.concatenate(tapped, axis=-1) if tapped else jnp.zeros((*ids.shape, 0), x.dtype)
        return self.norm(x), features

    @property
    def head_weight(self) -> Float[Array, "V D"]:
        return self.embed.weight[...] if self.lm_head is None else self.lm_head.weight[...]

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """float32 logits of hidden states after the final norm."""
        return linear(hidden, self.head_weight).astype(jnp.float32)


def qwen3_parameters(config: Qwen3Config) -> tuple[Parameter, ...]:
    """Parameters of a dense Qwen3 checkpoint."""
    v, d = config.vocab_size, config.hidden_size
    table = [single("embed.weight", "model.embed_tokens.weight", (v, d)), *decoder_parameters(config, "model.")]
    table.append(single("norm.weight", "model.norm.weight", (d,)))
    if not config.tie_embeddings:
        table.append(single("lm_head.weight", "lm_head.weight", (v, d)))
    return tuple(table)


def qwen3_canonical(name: str) -> str | None:
    """Checkpoint name as declared above; None for buffers that are computed here."""
    return None if name.endswith("rotary_emb.inv_freq") else name
