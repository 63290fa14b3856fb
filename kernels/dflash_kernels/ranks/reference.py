"""The definition, with JAX's own collective."""

from typing import Any

import jax
from jaxtyping import Array, Int


def gather_ranks_xla(words: Int[Array, "M"], *, axis: str | None, exchange: Any) -> Int[Array, "n M"]:
    """See `gather_ranks`."""
    del exchange
    return words[None] if axis is None else jax.lax.all_gather(words, axis)
