"""Gated residuals: several residual streams in place of one; a sublayer reads a mean of them by gates, and writes to all of them.

Source: transformers' Qwen4ExpTextGatedResidual. Gates and the factors of what is written follow from all streams of the token, each
normed; those of entries come through a matrix of low rank. A stream is what it was and what sublayers have added to it.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dflash_jax.models.layers import Linear, ZeroCenteredNorm
from dflash_jax.models.parameters import Parameter, Source, single


class StreamNorm(ZeroCenteredNorm):
    """A zero-centered norm of each of several streams `[B,T,S,D]`, with a weight of its own `[S*D]`."""

    def __init__(self, streams: int, hidden: int, eps: float):
        super().__init__(streams * hidden, eps)

    def __call__(self, x: Float[Array, "B T S D"]) -> Float[Array, "B T S D"]:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * (1.0 + self.offset[...].astype(jnp.float32).reshape(x.shape[2:]))).astype(x.dtype)


class GatedResidual(nnx.Module):
    """Reading of the streams for a sublayer, and writing to them.

    The first projection's rows are those of the gates' latent and, where something is written, of its factors.

    Args:
      streams: S.
      rank: of the gates' latent.
      writes: whether what a sublayer gives is written.
    """

    def __init__(self, streams: int, hidden: int, rank: int, eps: float, *, writes: bool = True):
        self.streams, self.rank = streams, rank
        self.norm = StreamNorm(streams, hidden, eps)
        self.down = Linear(rank + streams * writes, streams * hidden)
        self.up = Linear(streams * hidden, rank)

    def read(self, x: Float[Array, "B T S D"]) -> tuple[Float[Array, "B T D"], Float[Array, "B T S"]]:
        """What the sublayer reads, and the float32 factors by which its result is written; none of these where nothing is."""
        normed = self.norm(x)
        down = self.down(normed.reshape(*x.shape[:2], -1)).astype(jnp.float32) / self.streams
        latent, factors = jnp.split(down, [self.rank], axis=-1)
        gates = jax.nn.sigmoid(self.up(jax.nn.silu(latent).astype(x.dtype)).astype(jnp.float32)).reshape(x.shape)
        mixed = jnp.mean(gates * normed.astype(jnp.float32), axis=2).astype(x.dtype)
        return mixed, 2 * jax.nn.sigmoid(factors)

    @staticmethod
    def write(
        x: Float[Array, "B T S D"], out: Float[Array, "B T D"], factors: Float[Array, "B T S"]
    ) -> Float[Array, "B T S D"]:
        """The streams after the sublayer that gave `out`."""
        return x + (factors[..., None] * out.astype(jnp.float32)[:, :, None]).astype(x.dtype)


class StreamMixer(GatedResidual):
    """What the head reads of the streams, in place of a final norm."""

    def __init__(self, streams: int, hidden: int, rank: int, eps: float):
        super().__init__(streams, hidden, rank, eps, writes=False)

    def __call__(self, x: Float[Array, "B T S D"]) -> Float[Array, "B T D"]:
        return self.read(x)[0]


def gated_residual_parameters(
    streams: int, hidden: int, rank: int, ours: str, theirs: str, *, writes: bool = True
) -> list[Parameter]:
    """Parameters of one `GatedResidual`."""
    width = streams * hidden
    down = [Source(f"{theirs}input_mix_weight_down.weight", (rank, width))]
    down += [Source(f"{theirs}block_inject_weight.weight", (streams, width))] if writes else []
    return [
        single(f"{ours}norm.offset", f"{theirs}hc_norm.weight", (width,)),
        Parameter(f"{ours}down.weight", tuple(down)),
        single(f"{ours}up.weight", f"{theirs}input_mix_weight_up.weight", (width, rank)),
    ]
