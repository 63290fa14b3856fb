"""Recurrent states: what layers with short convolutions or a delta rule keep for each slot in place of keys and values."""

import math

import jax
import jax.numpy as jnp
from dflash_kernels import DeltaShape, DeltaState
from dflash_kernels.recurrent.kda import KdaShape, KdaState
from dflash_kernels.recurrent.short_conv import ConvShape, ConvState
from jaxtyping import Array, Int

from dflash_jax.config import DecoderConfig

# Rows before the newest that the convolution of a gated delta net, or of Kimi delta attention, reads.
CONV_ROWS = 3


# What one layer keeps of each slot.
type State = DeltaState | ConvState | KdaState
type StateShape = DeltaShape | ConvShape | KdaShape


def recurrent_layers(config: DecoderConfig) -> tuple[StateShape | None, int]:
    """The shape of a model's layers that keep states, and their number; None and 0 where it has none."""
    named = (getattr(config, name, None) for name in ("delta", "short_conv", "kda"))
    shape: StateShape | None = next(filter(None, named), None)
    return shape, 0 if shape is None else config.num_layers - config.cached_layers


def zero_state(slots: int, shape: StateShape, dtype: jnp.dtype) -> State:
    """The state before a first token: of a gated delta net S `[B, Hv, dk, dv]` in float32, likewise of Kimi delta attention, and of
    all kinds the rows that a convolution reads, `[B, taps - 1, C]` in the model's dtype."""
    if isinstance(shape, ConvShape):
        return ConvState(jnp.zeros((slots, shape.taps - 1, shape.channels), dtype))
    if isinstance(shape, KdaShape):
        s = jnp.zeros((slots, shape.heads, shape.dim, shape.dim), jnp.float32)
        return KdaState(s, jnp.zeros((slots, CONV_ROWS, shape.channels), dtype))
    return DeltaState(
        jnp.zeros((slots, shape.value_heads, shape.key_dim, shape.value_dim), jnp.float32),
        jnp.zeros((slots, CONV_ROWS, shape.channels), dtype),
    )


def make_states(config: DecoderConfig, slots: int, dtype: jnp.dtype) -> tuple[State, ...]:
    """States of all layers of `config` that keep one, whose model computes in `dtype`; () where it has none."""
    shape, layers = recurrent_layers(config)
    if shape is None:
        return ()
    return tuple(jax.device_put(zero_state(slots, shape, dtype)) for _ in range(layers))


def copy_state(
    into: tuple[State, ...], source: tuple[State, ...], row: Int[Array, ""], of: Int[Array, ""]
) -> tuple[State, ...]:
    """`into` with row `of` of `source` in its row `row`, bit for bit; nothing else of it is touched."""

    def copied(whole: Array, other: Array) -> Array:
        part = jax.lax.dynamic_slice_in_dim(other, of, 1)
        return jax.lax.dynamic_update_slice_in_dim(whole, part, row, 0)

    return jax.tree.map(copied, into, source)


def state_bytes(config: DecoderConfig, dtype: jnp.dtype) -> int:
    """Bytes of one slot's states over all layers, however long its context is."""
    shape, layers = recurrent_layers(config)
    if shape is None:
        return 0
    parts = jax.eval_shape(lambda: zero_state(1, shape, dtype))
    return layers * sum(math.prod(part.shape) * part.dtype.itemsize for part in parts)
