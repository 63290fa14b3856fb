"""The definition, with JAX's own collective."""

from typing import Any

import jax
from jaxtyping import Array, Int


def gather_ranks_xla(words: Int[Array, "k"], *, axis: str, exchange: Any) -> Int[Array, "n k"]:
    """See `gather_ranks`."""
    del exchange
    return jax.lax.all_gather(words, axis)
