"""Recurrent states: what layers with Mamba 2, short convolutions or a delta rule keep for each slot in place of keys and values,
what hashed n-grams keep beside it, and convolutions beside attention."""

import math

import jax
import jax.numpy as jnp
from dflash_kernels import DeltaShape, DeltaState
from dflash_kernels.recurrent.kda import KdaShape, KdaState
from dflash_kernels.recurrent.mamba2 import Mamba2Shape, Mamba2State
from dflash_kernels.recurrent.ngrams import NgramShape, NgramState
from dflash_kernels.recurrent.residual_conv import ResidualConvShape
from dflash_kernels.recurrent.short_conv import ConvShape, ConvState
from jaxtyping import Array, Int

from dflash_jax.config import DecoderConfig

# Rows before the newest that the convolution of a gated delta net, or of Kimi delta attention, reads.
CONV_ROWS = 3

# What one layer keeps of each slot.
type State = DeltaState | Mamba2State | ConvState | KdaState | NgramState
type MixerShape = DeltaShape | Mamba2Shape | ConvShape | KdaShape
type StateShape = MixerShape | NgramShape | ResidualConvShape


def recurrent_layers(config: DecoderConfig) -> tuple[MixerShape | None, int]:
    """The shape of a model's layers that keep states and no keys, and their number; None and 0 where it has none."""
    named = (getattr(config, name, None) for name in ("delta", "mamba2", "short_conv", "kda"))
    shape: MixerShape | None = next(filter(None, named), None)
    return shape, 0 if shape is None else config.state_layers


def state_shapes(config: DecoderConfig) -> tuple[StateShape, ...]:
    """Shapes of all that a slot keeps: of such layers in their order, then of those with hashed n-grams, then of convolutions that
    layers have beside attention."""
    shape, layers = recurrent_layers(config)
    ngrams: tuple[NgramShape, ...] = getattr(config, "ngram_shapes", ())
    convs: tuple[ResidualConvShape, ...] = getattr(config, "conv_shapes", ())
    return (*(() if shape is None else (shape,) * layers), *ngrams, *convs)


def zero_state(slots: int, shape: StateShape, dtype: jnp.dtype) -> State:
    """The state before a first token: of a gated delta net S `[B, Hv, dk, dv]` in float32, likewise of Kimi delta attention, of
    Mamba 2 S `[B, H, P, N]`, and of all kinds the rows that a convolution reads, `[B, taps - 1, C]` in the model's dtype, of hashed
    n-grams more of them, and tokens `[B, size - 1, 1]`."""
    if isinstance(shape, Mamba2Shape):
        s = jnp.zeros((slots, shape.heads, shape.head_dim, shape.state_dim), jnp.float32)
        return Mamba2State(s, jnp.zeros((slots, shape.taps - 1, shape.channels), dtype))
    if isinstance(shape, ConvShape | ResidualConvShape):
        return ConvState(jnp.zeros((slots, shape.taps - 1, shape.channels), dtype))
    if isinstance(shape, KdaShape):
        s = jnp.zeros((slots, shape.heads, shape.dim, shape.dim), jnp.float32)
        return KdaState(s, jnp.zeros((slots, CONV_ROWS, shape.channels), dtype))
    if isinstance(shape, NgramShape):
        rows = jnp.zeros((slots, shape.reach, shape.channels), dtype)
        return NgramState(rows, jnp.zeros((slots, shape.size - 1, 1), jnp.int32))
    return DeltaState(
        jnp.zeros((slots, shape.value_heads, shape.key_dim, shape.value_dim), jnp.float32),
        jnp.zeros((slots, CONV_ROWS, shape.channels), dtype),
    )


def make_states(config: DecoderConfig, slots: int, dtype: jnp.dtype) -> tuple[State, ...]:
    """States of all layers of `config` that keep one, whose model computes in `dtype`; () where it has none."""
    return tuple(jax.device_put(zero_state(slots, shape, dtype)) for shape in state_shapes(config))


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
    parts = jax.eval_shape(lambda: [zero_state(1, shape, dtype) for shape in state_shapes(config)])
    return sum(math.prod(part.shape) * part.dtype.itemsize for part in jax.tree.leaves(parts))
