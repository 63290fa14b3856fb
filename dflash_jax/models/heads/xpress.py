"""XPress's head: the correction of a whole block at once, repeated until each place knows the ones before it (arXiv 2608.02438).

One pass gives every slot t a vector of the token before it and of the block's states,

    hc_t = [down_h h_t ; down_g mean h],   x_t = in [hc_t ; W1[token t - 1]],   y_t = x_t + sum over j <= t of L[t, j] * x_j
    lat_t = y_t + down(silu(gate y_t) * up y_t),   l_t = U_t + W2 lat_t

where L mixes each channel for itself. Passes start from each place's best token alone; after k of them the first k places are those
of a walk from left to right. Before the anchor stands the anchor itself.

The last pass is the one that picks. Its scores depend on the greedy block of the pass before it and on no token that is drawn, so
where requests sample each place is drawn by itself.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dflash_jax.config import KeyReader, shown
from dflash_jax.errors import ConfigError
from dflash_jax.models.heads.base import LARGEST_RANK, Block, HeadConfig, Law, Pick, Sizes
from dflash_jax.models.heads.places import products_of
from dflash_jax.models.heads.reading import Source, missing
from dflash_jax.models.largest import largest
from dflash_jax.models.layers import Linear
from dflash_jax.models.parameters import Parameter, single

PREFIX = "xpress_head."
PASSES, CANDIDATES = 6, 512  # where a file names none
MOST_PASSES = 64


@dataclass(frozen=True, kw_only=True)
class XPressConfig(HeadConfig):
    """XPress's head.

    Attributes:
      inner: width of its feed-forward.
      passes: corrections of the block.
    """

    kind: Literal["xpress"] = "xpress"
    inner: int = 0
    passes: int = PASSES

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value, most in (("inner", self.inner, LARGEST_RANK), ("passes", self.passes, MOST_PASSES)):
            if type(value) is not int or not 1 <= value <= most:
                raise ConfigError(f"{type(self).__name__}: {name} must be 1 to {most:,}, got {shown(value)}")


def read_xpress(source: Source, names: Collection[str], sizes: Sizes) -> XPressConfig | None:
    """The configuration that a file's keys, found by `source`, and its tensors' names say; None where neither speaks of XPress.

    Raises:
      ConfigError: a key is missing, or cannot be.
    """
    said: KeyReader = source("xpress_rank")
    there = said.get("xpress_rank") is not None
    if not there and not any(name.startswith(PREFIX) for name in names):
        return None
    missing({"xpress_rank": said}, {"xpress_rank": there}, "XPress's head")
    rank = said.integer("xpress_rank")
    inner, passes, slots, top_k = (
        source(key).integer(key, default, minimum=least)
        for key, default, least in (
            ("xpress_mlp_hidden", 2 * rank, 1), ("xpress_num_passes", PASSES, 1), ("xpress_block_size", sizes.slots, 1),
            ("xpress_topc", min(CANDIDATES, sizes.rows), 0),
        )
    )  # fmt: skip
    if slots != sizes.slots or sizes.rows != sizes.vocab or top_k > sizes.rows:
        raise ConfigError(
            f"{said.subject}: XPress's head needs xpress_block_size={slots} to be block_size={sizes.slots}, the target's whole "
            f"vocabulary of {sizes.vocab} where {sizes.rows} are drafted from, and xpress_topc={top_k} at most that many"
        )
    return XPressConfig(rank=rank, top_k=top_k, inner=inner, passes=passes)


class Mix(nnx.Module):
    """`L` of the module, as it is stored: what lies above the diagonal counts for nothing."""

    def __init__(self, rank: int, slots: int):
        self.L = nnx.Param(jnp.zeros((rank, slots, slots)))

    def __call__(self, x: Float[Array, "B G r"]) -> Float[Array, "B G r"]:
        slots = x.shape[1]
        lower = jnp.tril(self.L[...][:, :slots, :slots].astype(jnp.float32))
        mixed = jnp.einsum("rtj,bjr->btr", lower, x.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
        return x + mixed.astype(x.dtype)


class XPress(nnx.Module):
    """See the module."""

    def __init__(self, config: XPressConfig, sizes: Sizes):
        d, r = sizes.hidden, config.rank
        self.config = config
        self.w1, self.w2 = Linear(sizes.vocab, r), Linear(sizes.rows, r)
        self.down_h, self.down_g, self.in_proj = Linear(r, d), Linear(r, d), Linear(r, 3 * r)
        self.mix = Mix(r, sizes.slots)
        self.gate_proj, self.up_proj, self.down_proj = (
            Linear(config.inner, r),
            Linear(config.inner, r),
            Linear(r, config.inner),
        )

    def propose(self, block: Block, pick: Pick) -> tuple[Int[Array, "B g"], Law]:
        """See `DraftHead`."""
        places, top_k = block.hidden.shape[1], self.config.top_k
        unary, tokens = largest(block.logits, top_k) if top_k else (block.logits, None)
        hidden = block.slots[:, : 1 + places]
        whole = jnp.mean(block.slots.astype(jnp.float32), axis=1, keepdims=True).astype(hidden.dtype)
        states = [self.down_h(hidden), jnp.broadcast_to(self.down_g(whole), (*hidden.shape[:-1], self.config.rank))]
        given = jnp.concatenate(states, axis=-1)
        path = jnp.argmax(block.logits, axis=-1).astype(jnp.int32)
        # More passes than places find nothing new.
        for _ in range(min(self.config.passes, places) - 1):
            path = _tokens(jnp.argmax(self.scores(given, path, block.anchor, unary, tokens), axis=-1), tokens)
        scores = self.scores(given, path, block.anchor, unary, tokens)
        picked, logits = pick(0, scores[:, :, None], tokens)
        return _tokens(picked[:, :, 0], tokens), Law(logits[:, :, 0], tokens)

    def scores(
        self,
        given: Float[Array, "B T states"],
        path: Int[Array, "B g"],
        anchor: Int[Array, "B"],
        unary: Float[Array, "B g C"],
        tokens: Int[Array, "B g C"] | None,
    ) -> Float[Array, "B g C"]:
        """float32 scores of each place's candidates after the tokens of `path`."""
        ids = jnp.concatenate([anchor[:, None], anchor[:, None], path[:, :-1]], axis=1)
        x = self.mix(self.in_proj(jnp.concatenate([given, self.w1.weight[...][ids]], axis=-1)))
        latent = x + self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
        return unary + products_of(latent[:, 1:], self.w2.weight[...], tokens)


def _tokens(columns: Int[Array, "B g"], tokens: Int[Array, "B g C"] | None) -> Int[Array, "B g"]:
    if tokens is None:
        return columns.astype(jnp.int32)
    return jnp.take_along_axis(tokens, columns[..., None], axis=-1)[..., 0]


def xpress_parameters(config: XPressConfig, sizes: Sizes) -> list[Parameter]:
    """Nine tensors."""
    d, r, f, g = sizes.hidden, config.rank, config.inner, sizes.slots
    shapes = {
        "w1.weight": (sizes.vocab, r), "w2.weight": (sizes.rows, r), "down_h.weight": (r, d), "down_g.weight": (r, d),
        "in_proj.weight": (r, 3 * r), "mix.L": (r, g, g), "mlp.gate_proj.weight": (f, r), "mlp.up_proj.weight": (f, r),
        "mlp.down_proj.weight": (r, f),
    }  # fmt: skip
    return [single(name.removeprefix("mlp."), f"{PREFIX}{name}", shape) for name, shape in shapes.items()]


def xpress_tables(config: XPressConfig) -> tuple[str, ...]:
    """Parameters of which a cycle reads a few rows alone."""
    return ("w1.weight", "w2.weight") if config.top_k else ("w1.weight",)
