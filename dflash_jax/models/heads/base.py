"""Draft heads: what turns a block's hidden states and base logits into proposals, each with regard to those before it.

A head proposes by the law of its scores, and draws by no means of its own: the caller's `Pick` takes a column of each row of scores
and says what it was drawn from. So one walk serves greedy texts and sampled ones, and the law that rejection judges a proposal by
is the one that it came from.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int

from dflash_jax.config import shown
from dflash_jax.errors import ConfigError

LARGEST_RANK, LARGEST_TOP_K = 1 << 16, 1 << 12


class Base(NamedTuple):
    """What a drafter says of each place by itself.

    Attributes:
      logits: float32, over the rows of its LM head.
      tokens: of each row; None where row i is token i.
    """

    logits: Float[Array, "B g rows"]
    tokens: Int[Array, "rows"] | None = None


class Law(NamedTuple):
    """What proposals were drawn from: softmax of `logits` over some tokens, and nothing elsewhere.

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

    def propose(
        self, hidden: Float[Array, "B g D"], base: Base, anchor: Int[Array, "B"], pick: Pick
    ) -> tuple[Int[Array, "B g"], Law]:
        """Tokens for g places, the first of which follows `anchor`, and the law that each was picked from."""
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

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "HeadConfig":
        """From its fields by name. Raises ConfigError where they are others."""
        names = {field.name for field in fields(cls)}
        if set(values) != names:
            raise ConfigError(f"{cls.__name__}: expected the fields {sorted(names)}, got {shown(dict(values))}")
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a head must fit.

    Attributes:
      hidden: width of hidden states (D).
      vocab: tokens of the target (V).
      rows: of the drafter's LM head, fewer than that with a vocabulary of its own.
      logit_scale: factor on its products.
    """

    hidden: int
    vocab: int
    rows: int
    logit_scale: float = 1.0
