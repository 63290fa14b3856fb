"""Domino's head: a recurrence over the block's tokens so far corrects each place's logits.

    s_k = GRU(s_(k - 1), embedding of the token before place k),   l_k = U_k + P2 silu(P1 [h_k ; s_k])

The first few places keep their base logits, though the recurrence runs over their tokens. It is that of torch: without biases, with
rows in the order reset, update, new.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dflash_jax.config import KeyReader, shown
from dflash_jax.errors import ConfigError
from dflash_jax.models.heads.base import LARGEST_RANK, Block, HeadConfig, Law, Pick, Sizes
from dflash_jax.models.heads.places import one_by_one, products_of
from dflash_jax.models.heads.reading import Source, missing
from dflash_jax.models.layers import Linear
from dflash_jax.models.parameters import Parameter, single

PREFIXES = ("prefix_gru.", "embed_proj.")
MOST_PREFIX = 1024


@dataclass(frozen=True, kw_only=True)
class DominoConfig(HeadConfig):
    """Domino's head; `rank` is `emb_dim` of a drafter's file.

    Attributes:
      state: width of the recurrence.
      kept: places that keep their base logits.
    """

    kind: Literal["domino"] = "domino"
    state: int = 0
    kept: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value, least, most in (("state", self.state, 1, LARGEST_RANK), ("kept", self.kept, 0, MOST_PREFIX)):
            if type(value) is not int or not least <= value <= most:
                raise ConfigError(f"{type(self).__name__}: {name} must be {least} to {most:,}, got {shown(value)}")


def read_domino(source: Source, names: Collection[str], sizes: Sizes) -> DominoConfig | None:
    """The configuration that a file's keys, found by `source`, and its tensors' names say; None where neither speaks of Domino.

    Raises:
      ConfigError: a key is missing, or cannot be.
    """
    named = source("projector_type").get("projector_type") == "domino"
    if not named and not any(name.startswith(PREFIXES) for name in names):
        return None
    keys: dict[str, KeyReader] = {key: source(key) for key in ("emb_dim", "gru_hidden_dim")}
    missing(keys, {key: reader.get(key) is not None for key, reader in keys.items()}, "Domino's head")
    rank, state = (reader.integer(key) for key, reader in keys.items())
    kept = source("pure_draft_prefix_len").integer("pure_draft_prefix_len", 0, minimum=0)
    if sizes.rows != sizes.vocab:
        raise ConfigError(
            f"{keys['emb_dim'].subject}: Domino's head proposes from the target's whole vocabulary of {sizes.vocab}, got "
            f"draft_vocab_size={sizes.rows}"
        )
    return DominoConfig(rank=rank, state=state, kept=kept)


class Domino(nnx.Module):
    """See the module. `input_proj` and `state_proj` are the recurrence's."""

    def __init__(self, config: DominoConfig, sizes: Sizes):
        d, s, r = sizes.hidden, config.state, config.rank
        self.config = config
        self.input_proj, self.state_proj = Linear(3 * s, d), Linear(3 * s, s)
        self.down_proj, self.up_proj = Linear(r, d + s), Linear(sizes.rows, r)

    def propose(self, block: Block, pick: Pick) -> tuple[Int[Array, "B g"], Law]:
        """See `DraftHead`."""
        first = jnp.zeros((block.hidden.shape[0], self.config.state), block.hidden.dtype)

        def bias(place: int, before: Array, rows: Array | None, state: Array) -> tuple[Array | float, Array]:
            state = self.step(block.embed(before), state)
            if place < self.config.kept:
                return 0.0, state
            latent = self.down_proj(jnp.concatenate([block.hidden[:, place], state], axis=-1))
            return products_of(jax.nn.silu(latent), self.up_proj.weight[...], rows), state

        return one_by_one(block, self.config.top_k, bias, first, pick)

    def step(self, x: Float[Array, "B D"], state: Float[Array, "B s"]) -> Float[Array, "B s"]:
        """The state after one more token."""
        given, kept = (
            jnp.split(one, 3, axis=-1) for one in (self.input_proj(x.astype(state.dtype)), self.state_proj(state))
        )
        reset, update = (jax.nn.sigmoid(given[i] + kept[i]) for i in range(2))
        return (1 - update) * jnp.tanh(given[2] + reset * kept[2]) + update * state


def domino_parameters(config: DominoConfig, sizes: Sizes) -> list[Parameter]:
    """Four tensors."""
    d, s, r = sizes.hidden, config.state, config.rank
    return [
        single("input_proj.weight", "prefix_gru.weight_ih_l0", (3 * s, d)),
        single("state_proj.weight", "prefix_gru.weight_hh_l0", (3 * s, s)),
        single("down_proj.weight", "embed_proj.0.weight", (r, d + s)),
        single("up_proj.weight", "embed_proj.2.weight", (sizes.rows, r)),
    ]


def domino_tables(config: DominoConfig) -> tuple[str, ...]:
    """Parameters of which a cycle reads a few rows alone."""
    return ("up_proj.weight",) if config.top_k else ()
