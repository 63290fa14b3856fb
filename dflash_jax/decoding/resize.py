"""Slots come and go with the requests: the same sequences in another number of slots."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dflash_jax.cache.pages import Pages
from dflash_jax.decoding.state import DecodeState


def without_pools(state: DecodeState) -> DecodeState:
    """What belongs to slots; pages belong to sequences, wherever those sit."""
    none = Pages((), ())
    return replace(state, target_pages=none, draft_pages=none)


def resize(state: DecodeState, rows: Int[Array, "C"]) -> DecodeState:
    """A state of C slots that hold the sequences of slots `rows`; -1 is an empty slot. Both states are without pools."""
    taken = jax.tree.map(lambda leaf: leaf[jnp.maximum(rows, 0)], state)
    return replace(taken, done=taken.done | (rows < 0))
