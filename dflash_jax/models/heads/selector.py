"""DFlash 2's candidate selector: a place's best few tokens, judged by how each follows its predecessor's.

Of token c after token p a place with hidden state h says `U[c] + <A[p] * (W h), Z[c]>`, where U are its base logits and A and Z
hold a vector for each token. The scores of all pairs come from one product; the walk then only follows them from the anchor on.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dflash_jax.config import KeyReader
from dflash_jax.errors import ConfigError
from dflash_jax.models.heads.base import Block, HeadConfig, Law, Pick, Sizes
from dflash_jax.models.heads.pairs import walk
from dflash_jax.models.heads.reading import Source, missing
from dflash_jax.models.layers import Linear
from dflash_jax.models.parameters import Parameter, single

PREFIX = "candidate_selector."


@dataclass(frozen=True, kw_only=True)
class SelectorConfig(HeadConfig):
    """`selector_rank` and `selector_top_k` of a drafter's file."""

    kind: Literal["selector"] = "selector"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.top_k:
            raise ConfigError(f"{type(self).__name__}: top_k must be at least 1, a selector chooses among candidates")

    @property
    def regards(self) -> int:
        """See `HeadConfig`."""
        return self.top_k


def read_selector(source: Source, names: Collection[str], sizes: Sizes) -> SelectorConfig | None:
    """The configuration that a file's keys, found by `source`, and its tensors' names say; None where neither speaks of a selector.

    Raises:
      ConfigError: a key is missing, or cannot be.
    """
    keys: dict[str, KeyReader] = {key: source(key) for key in ("selector_rank", "selector_top_k")}
    said = {key: reader.get(key) is not None for key, reader in keys.items()}
    if not any(said.values()) and not any(name.startswith(PREFIX) for name in names):
        return None
    missing(keys, said, "a candidate selector")
    rank, top_k = (reader.integer(key) for key, reader in keys.items())
    config = SelectorConfig(rank=rank, top_k=top_k)
    if config.top_k > sizes.rows:
        raise ConfigError(
            f"selector_top_k={config.top_k} candidates are more than the {sizes.rows} tokens that are drafted from"
        )
    return config


class Selector(nnx.Module):
    """See the module. `predecessor_codebook` is A, `hidden_projection` W, `successor_codebook` Z."""

    def __init__(self, config: SelectorConfig, sizes: Sizes):
        self.top_k = config.top_k
        self.hidden_projection = Linear(config.rank, sizes.hidden)
        self.predecessor_codebook, self.successor_codebook = (
            nnx.Param(jnp.zeros((sizes.vocab, config.rank))) for _ in "AZ"
        )

    def propose(self, block: Block, pick: Pick) -> tuple[Int[Array, "B g"], Law]:
        """See `DraftHead`."""
        unary, _, tokens = block.best(self.top_k)
        return walk(self.scores(block.hidden, unary, tokens, block.anchor), tokens, pick)

    def scores(
        self,
        hidden: Float[Array, "B g D"],
        unary: Float[Array, "B g C"],
        tokens: Int[Array, "B g C"],
        anchor: Int[Array, "B"],
    ) -> Float[Array, "B g C C"]:
        """float32 scores of each place's candidates, the last axis, after each candidate of the place before."""
        first = jnp.broadcast_to(anchor[:, None, None], tokens[:, :1].shape)
        before = jnp.concatenate([first, tokens[:, :-1]], axis=1)
        books = (self.predecessor_codebook[...][before], self.successor_codebook[...][tokens])
        left, right = (book.astype(jnp.float32) for book in books)
        left = left * self.hidden_projection(hidden).astype(jnp.float32)[:, :, None]
        pairs = jnp.einsum("bgpr,bgcr->bgpc", left, right, precision=jax.lax.Precision.HIGHEST)
        return unary[:, :, None] + pairs


def selector_parameters(config: SelectorConfig, sizes: Sizes) -> list[Parameter]:
    """Three tensors."""
    books = ("predecessor_codebook", "successor_codebook")
    return [
        single("hidden_projection.weight", f"{PREFIX}hidden_projection.weight", (config.rank, sizes.hidden)),
        *(single(book, f"{PREFIX}{book}", (sizes.vocab, config.rank)) for book in books),
    ]


def selector_tables(config: SelectorConfig) -> tuple[str, ...]:
    """Parameters of which a cycle reads a few rows alone."""
    del config
    return "predecessor_codebook", "successor_codebook"
