"""Draft heads: from a block's hidden states and base logits to proposals, each conditioned on those before it.

A head proposes by the law of its scores, and draws by no means of its own: the caller's `Pick` takes a column of each row of scores
and says what it was drawn from. So one walk serves greedy texts and sampled ones, and the law that rejection judges a proposal by
is the one that it came from.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.config import shown
from dflash_jax.errors import ConfigError
from dflash_jax.models.largest import largest

LARGEST_RANK, LARGEST_TOP_K = 1 << 16, 1 << 12


class Block(NamedTuple):
    """Inputs of a draft head.

    Attributes:
      anchor: the token before the first of g places.
      hidden: states of the slots that propose.
      logits: float32 base logits, over rows of the drafter's LM head: what it says of each place by itself.
      tokens: of each row of the LM head; None where row i is token i.
      slots: states of all slots, the anchor's among them.
      embed: embeddings of tokens, as the block's own were made.
      context: the context state of the last committed token, zeros where it is not at hand.
      listed: the rows that `logits` are of, where a head that regards the best few alone was given a shortlist; None for all.
      noise: what is added to base logits where the best few are chosen, and nowhere else: the noise that proposals will be drawn
        with. A token that wins by it may be far from the best without it.
    """

    anchor: Int[Array, "B"]
    hidden: Float[Array, "B g D"]
    logits: Float[Array, "B g S"]
    tokens: Int[Array, "rows"] | None
    slots: Float[Array, "B G D"]
    embed: Callable[[Array], Array]
    context: Callable[[], Array]
    listed: Int[Array, "B g S"] | None = None
    noise: Float[Array, "B g S"] | None = None

    def best(self, count: int) -> tuple[Float[Array, "B g C"], Int[Array, "B g C"], Int[Array, "B g C"]]:
        """The largest base logits of each place, chosen with `noise`, their rows of the LM head and those rows' tokens."""
        if self.noise is None:
            unary, columns = largest(self.logits, count)
        else:
            _, columns = largest(self.logits + self.noise, count)
            unary = jnp.take_along_axis(self.logits, columns, axis=-1)
        rows = columns if self.listed is None else jnp.take_along_axis(self.listed, columns, axis=-1)
        return unary, rows, rows if self.tokens is None else self.tokens[rows]

    def named(self, values: Float[Array, "B g V"]) -> Float[Array, "B g S"]:
        """Selects from numbers of all tokens those of the columns of `logits`."""
        rows = self.listed
        if self.tokens is not None:
            tokens = self.tokens if rows is None else self.tokens[rows]
            rows = jnp.broadcast_to(tokens, self.logits.shape)
        return values if rows is None else jnp.take_along_axis(values, rows, axis=-1)


class Law(NamedTuple):
    """Distribution of proposals (q of p/q rejection): softmax of `logits` over some tokens, 0 elsewhere.

    Attributes:
      logits: after temperature and filters.
      tokens: of each column; None where column i is token i.
    """

    logits: Float[Array, "B g C"]
    tokens: Int[Array, "B g C"] | None = None


@runtime_checkable
class Pick(Protocol):
    """Takes a column of each row of scores, and gives the columns and the logits of the law that they are from.

    Args:
      first: the place, from 0, that the first of n consecutive ones is.
      scores: of C columns, for each of P cases that a place may find itself in.
      tokens: of the columns, which all cases of a place share; None where column i is token i.
    """

    def __call__(
        self, first: int, scores: Float[Array, "B n P C"], tokens: Int[Array, "B n C"] | None
    ) -> tuple[Int[Array, "B n P"], Float[Array, "B n P C"]]: ...


@runtime_checkable
class DraftHead(Protocol):
    """A drafter's head beyond its LM head."""

    def propose(self, block: Block, pick: Pick) -> tuple[Int[Array, "B g"], Law]:
        """Tokens for the places of a block, and the law that each was picked from."""
        ...


class ConfidentHead(DraftHead, Protocol):
    """A head that estimates how likely its proposals are to stand (`HeadConfig.confident`)."""

    def log_odds(self, block: Block, before: Int[Array, "B g"]) -> Float[Array, "B g"]:
        """float32 log-odds of the chance that each place's proposal stands where those before it do.

        Args:
          before: the token before each place: the anchor, and the proposals but the last one. A place's own proposal is none of
            its own number's business: texts would have another law (`decoding.verify_budget`).
        """
        ...


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """A head's configuration.

    Attributes:
      kind: its name in the table of heads.
      rank: width of the vectors that tokens are told apart by (r).
      top_k: candidates of a place, the best by its base logits; 0 for all tokens.
    """

    kind: str
    rank: int
    top_k: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError for a value beyond its bound, or of another type, wherever it comes from."""
        for name, least, most in (("rank", 1, LARGEST_RANK), ("top_k", 0, LARGEST_TOP_K)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ConfigError(f"{type(self).__name__}: {name} must be {least} to {most:,}, got {shown(value)}")

    @property
    def regards(self) -> int:
        """Base logits of a place that the head reads, the best ones; 0 where it reads all."""
        return 0

    @property
    def confident(self) -> bool:
        """Whether the head is a `ConfidentHead`."""
        return False

    def of_all_tokens(self) -> "HeadConfig":
        """The same head where what its proposals were drawn from decides how many stand; itself where candidates are a part of it.

        Candidates by base logits alone are few of what a place's law says after the token that was drawn before it.
        """
        return self

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "HeadConfig":
        """From its fields by name. Raises ConfigError where they are others."""
        names = {field.name for field in fields(cls)}
        if set(values) != names:
            raise ConfigError(f"{cls.__name__}: expected the fields {sorted(names)}, got {shown(dict(values))}")
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes that a head must fit.

    Attributes:
      hidden: width of hidden states (D).
      vocab: tokens of the target (V).
      rows: of the drafter's LM head, fewer than that with a vocabulary of its own.
      slots: of a block (G).
      logit_scale: factor on products of the LM head.
      norm_eps: of norms.
    """

    hidden: int
    vocab: int
    rows: int
    slots: int = 0
    logit_scale: float = 1.0
    norm_eps: float = 1e-6
