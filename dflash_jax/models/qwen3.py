"""Qwen3 dense targets: the Flax module, its parameters and their Hugging Face names."""

from dflash_jax.config import Qwen3Config
from dflash_jax.models.decoder import Decoder, target_parameters
from dflash_jax.models.layers import DecoderLayer, decoder_parameters
from dflash_jax.models.parameters import Parameter


class Qwen3(Decoder):
    """A Qwen3 decoder; see `Decoder` for how it is called."""

    def __init__(self, config: Qwen3Config):
        layers = [DecoderLayer(config, i) for i in range(config.num_layers)]
        super().__init__(config, layers, tied=config.tie_embeddings)


def qwen3_parameters(config: Qwen3Config) -> tuple[Parameter, ...]:
    """Parameters of a dense Qwen3 checkpoint."""
    return target_parameters(config, decoder_parameters(config, "model."), tied=config.tie_embeddings)


def qwen3_canonical(name: str) -> str | None:
    """Checkpoint name as declared above; None for buffers that are computed here."""
    return None if name.endswith("rotary_emb.inv_freq") else name
