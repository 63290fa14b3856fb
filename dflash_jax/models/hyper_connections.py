"""Manifold-constrained hyper-connections (mHC): several residual streams in place of one, which every sublayer mixes.

Source: "mHC: Manifold-Constrained Hyper-Connections", arXiv 2512.24880, section 4; epsilons and the order of norms as in
transformers' Glm5NextTextHyperConnection. A sublayer reads one sum of the streams, adds its result to each of them by a factor, and
the streams themselves are mixed by a matrix whose rows and columns sum to 1. All three follow from the streams of the token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dflash_jax.models.layers import RMSNorm


class Mixing(NamedTuple):
    """Factors of one token's streams at a sublayer, float32.

    Attributes:
      read: of each stream in what the sublayer reads.
      write: of the sublayer's result in each stream.
      carry: of each old stream, by rows, in each new one.
    """

    read: Float[Array, "B T S"]
    write: Float[Array, "B T S"]
    carry: Float[Array, "B T S S"]


class HyperConnection(nnx.Module):
    """Reading of the streams `[B,T,S,D]` for a sublayer, and writing to them.

    Args:
      streams: S.
      rounds: of Sinkhorn's norms, each of rows and then of columns; the first one finds the rows normed.
      eps: added to read factors, to numbers that are normed and to what divides them.
      norm_eps: of the norm of all streams together.
    """

    def __init__(self, streams: int, hidden: int, *, rounds: int, eps: float, norm_eps: float):
        self.rounds, self.eps, self.norm_eps = rounds, eps, norm_eps
        rows = (2 + streams) * streams  # of read factors, write factors and the matrix
        self.rows = nnx.Param(jnp.zeros((rows, streams * hidden), jnp.float32))
        self.base = nnx.Param(jnp.zeros((rows,), jnp.float32))
        self.scale = nnx.Param(jnp.ones((3,), jnp.float32))

    def mixing(self, x: Float[Array, "B T S D"]) -> Mixing:
        """The factors at this sublayer."""
        streams = x.shape[2]
        flat = x.astype(jnp.float32).reshape(*x.shape[:2], -1)
        flat = flat * jax.lax.rsqrt(jnp.mean(flat * flat, axis=-1, keepdims=True) + self.norm_eps)
        products = jnp.einsum("btd,rd->btr", flat, self.rows[...], precision=jax.lax.Precision.HIGHEST)
        bounds = [streams, 2 * streams]
        read, write, carry = (
            product * self.scale[...][place] + base
            for place, (product, base) in enumerate(
                zip(jnp.split(products, bounds, axis=-1), jnp.split(self.base[...], bounds), strict=True)
            )
        )
        carry = jax.nn.softmax(carry.reshape(*x.shape[:2], streams, streams), axis=-1) + self.eps
        carry = self._normed(carry, -2)
        carry = jax.lax.fori_loop(1, self.rounds, lambda _, matrix: self._normed(self._normed(matrix, -1), -2), carry)
        return Mixing(jax.nn.sigmoid(read) + self.eps, 2 * jax.nn.sigmoid(write), carry)

    def _normed(self, matrix: Float[Array, "B T S S"], axis: int) -> Float[Array, "B T S S"]:
        return matrix / (jnp.sum(matrix, axis=axis, keepdims=True) + self.eps)

    def read(self, x: Float[Array, "B T S D"]) -> tuple[Float[Array, "B T D"], Mixing]:
        """What the sublayer reads, and the factors by which its result is written."""
        mixing = self.mixing(x)
        return jnp.sum(mixing.read[..., None] * x, axis=2).astype(x.dtype), mixing

    @staticmethod
    def write(x: Float[Array, "B T S D"], out: Float[Array, "B T D"], mixing: Mixing) -> Float[Array, "B T S D"]:
        """The streams after the sublayer that gave `out`."""
        carried = jnp.einsum(
            "btij,btid->btjd", mixing.carry, x.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
        )
        return (carried + mixing.write[..., None] * out.astype(jnp.float32)[:, :, None]).astype(x.dtype)


class MeanNorm(RMSNorm):
    """The norm of the mean of several streams `[B,T,S,D]`."""

    def __call__(self, x: Array) -> Array:
        return super().__call__(jnp.mean(x, axis=2))
