"""Recurrent states: what the gated delta nets of a hybrid model keep for each slot in place of keys and values."""

import math

import jax
import jax.numpy as jnp
from dflash_kernels import DeltaShape, DeltaState
from jaxtyping import Array, Int

from dflash_jax.config import DecoderConfig

# Rows before the newest that the convolution reads.
CONV_ROWS = 3


def delta_layers(config: DecoderConfig) -> tuple[DeltaShape | None, int]:
    """The shape of a model's gated delta nets and their number; None and 0 where it has none."""
    shape: DeltaShape | None = getattr(config, "delta", None)
    return shape, 0 if shape is None else config.num_layers - config.cached_layers


def zero_state(slots: int, shape: DeltaShape, dtype: jnp.dtype) -> DeltaState:
    """The state before a first token: S `[B, Hv, dk, dv]` in float32, rows of the convolution `[B, 3, C]` in the model's dtype."""
    return DeltaState(
        jnp.zeros((slots, shape.value_heads, shape.key_dim, shape.value_dim), jnp.float32),
        jnp.zeros((slots, CONV_ROWS, shape.channels), dtype),
    )


def make_states(config: DecoderConfig, slots: int, dtype: jnp.dtype) -> tuple[DeltaState, ...]:
    """States of all gated delta nets of `config`, whose model computes in `dtype`; () where it has none."""
    shape, layers = delta_layers(config)
    if shape is None:
        return ()
    return tuple(jax.device_put(zero_state(slots, shape, dtype)) for _ in range(layers))


def copy_state(
    into: tuple[DeltaState, ...], source: tuple[DeltaState, ...], row: Int[Array, ""], of: Int[Array, ""]
) -> tuple[DeltaState, ...]:
    """`into` with row `of` of `source` in its row `row`, bit for bit; nothing else of it is touched."""

    def copied(whole: Array, other: Array) -> Array:
        part = jax.lax.dynamic_slice_in_dim(other, of, 1)
        return jax.lax.dynamic_update_slice_in_dim(whole, part, row, 0)

    return jax.tree.map(copied, into, source)


def state_bytes(config: DecoderConfig, dtype: jnp.dtype) -> int:
    """Bytes of one slot's states over all layers, however long its context is."""
    shape, layers = delta_layers(config)
    if shape is None:
        return 0
    parts = jax.eval_shape(lambda: zero_state(1, shape, dtype))
    return layers * sum(math.prod(part.shape) * part.dtype.itemsize for part in parts)
