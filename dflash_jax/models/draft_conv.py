"""DFlash 2's layers: grouped convolutions along the block around attention and around the feed-forward.

A slot's row is mixed with those of the slots just before it in its block, by weights of each channel plus some that the
sublayer's input gives to each group of channels:

    out[t, ch] = sum over taps o <= t of (base[o, ch] + own[t, o, ch // group]) * x[t - o, ch]

What goes into a sublayer is convolved by side 0 of both, what comes out by side 1, with the same input's `own`. Nothing crosses
blocks; keys and values of the context are not convolved.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dflash_jax.config import DecoderConfig
from dflash_jax.models.layers import Attend, Cache, DecoderLayer, Linear, Rotary
from dflash_jax.models.parameters import Parameter, single
from dflash_jax.models.traits import LayerTraits

SIDES = 2
_NAMES = ("attention_conv", "mlp_conv")


class GroupedConv(nnx.Module):
    """Both convolutions around one sublayer. `base_kernel` holds the sides of its taps, `kernel_projection` makes `own`, whose rows
    are ordered by side, tap and group."""

    def __init__(self, hidden: int, taps: int, group: int):
        self.taps, self.groups = taps, hidden // group
        self.base_kernel = nnx.Param(jnp.zeros((SIDES, taps, hidden)))
        self.kernel_projection = Linear(SIDES * taps * self.groups, hidden)

    def own(self, x: Float[Array, "B G D"]) -> Float[Array, "B G 2 k g"]:
        """The weights that a sublayer's input gives."""
        return self.kernel_projection(x).reshape(*x.shape[:-1], SIDES, self.taps, self.groups)

    def __call__(self, x: Float[Array, "B G D"], own: Float[Array, "B G 2 k g"], side: int) -> Float[Array, "B G D"]:
        """x convolved along its slots, summed in float32."""
        grouped = x.reshape(*x.shape[:-1], self.groups, -1).astype(jnp.float32)
        base = self.base_kernel[side].reshape(self.taps, self.groups, -1).astype(jnp.float32)
        total = jnp.zeros_like(grouped)
        for tap in range(min(self.taps, x.shape[1])):
            earlier = jnp.pad(grouped, ((0, 0), (tap, 0), (0, 0), (0, 0)))[:, : x.shape[1]]
            total += (base[tap] + own[:, :, side, tap, :, None].astype(jnp.float32)) * earlier
        return total.reshape(x.shape).astype(x.dtype)


class ConvolvedLayer(DecoderLayer):
    """A decoder layer with convolutions around its sublayers."""

    def __init__(self, config: DecoderConfig, index: int, traits: LayerTraits, *, causal: bool, taps: int, group: int):
        super().__init__(config, index, traits, causal=causal)
        self.attention_conv, self.mlp_conv = (GroupedConv(config.hidden_size, taps, group) for _ in _NAMES)

    def __call__(self, x: Array, rotary: Rotary, attend: Attend, cache: Cache = None) -> tuple[Array, Cache]:
        normed = self.input_norm(x)
        own = self.attention_conv.own(normed)
        attended, cache = self.attn(self.attention_conv(normed, own, 0), rotary, attend, cache)
        x = x + self.attention_conv(attended, own, 1)
        normed = self.post_norm(x)
        own = self.mlp_conv.own(normed)
        return x + self.mlp_conv(self.mlp(self.mlp_conv(normed, own, 0)), own, 1), cache


def conv_parameters(config: DecoderConfig, taps: int, group: int) -> list[Parameter]:
    """Parameters of all layers' convolutions."""
    d, rows = config.hidden_size, SIDES * taps * (config.hidden_size // group)
    table = []
    for i in range(config.num_layers):
        for name in (f"layers.{i}.{one}" for one in _NAMES):
            table.append(single(f"{name}.base_kernel", f"{name}.base_kernel", (SIDES, taps, d)))
            table.append(single(f"{name}.kernel_projection.weight", f"{name}.kernel_projection.weight", (rows, d)))
    return table
