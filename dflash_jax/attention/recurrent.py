"""Attention over pages beside mixers over states of slots: what hybrid targets are called with.

Verification reads a slot's state and keeps factors of the verified tokens, from which the state after any number of them can be
made; it is made once it is known how many stand. So nothing is copied for tokens that are rejected.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from dflash_kernels import DeltaFactors, delta_fold
from dflash_kernels.recurrent.kda import KdaFactors, kda_fold
from dflash_kernels.recurrent.mamba2 import Mamba2Factors, mamba2_fold
from dflash_kernels.recurrent.ngrams import NgramFactors, ngram_fold
from dflash_kernels.recurrent.short_conv import ConvFactors, conv_fold
from jaxtyping import Array, Bool, Int

from dflash_jax.attention.indexed import IndexedCache, IndexedPages
from dflash_jax.attention.paged import PagedAttend
from dflash_jax.attention.pooled import pooled_attention
from dflash_jax.attention.relative import relative_attention
from dflash_jax.attention.whole_blocks import whole_block_attention
from dflash_jax.cache.pages import Pages
from dflash_jax.cache.recurrent import State
from dflash_jax.models.layers import Attention, BlockRows, PooledRows, Rotary

type Factors = DeltaFactors | Mamba2Factors | ConvFactors | KdaFactors | NgramFactors
# Of one mixer that keeps a state, a `models.layers.RecurrentMixer`: the layer, its projection and its state, to the output, the
# state after it and factors of its tokens.
type Mix = Callable[[Any, Array, State], tuple[Array, State, Factors | None]]


@no_type_check  # JAX rebuilds pytrees with shapes and placeholders in place of arrays
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HybridCache:
    """Cache of a hybrid target's layers.

    Attributes:
      pages: of layers with attention.
      states: of slots, one for each layer that keeps such.
      factors: of verified tokens, which are not in the states yet; None where states are final.
    """

    pages: Pages
    states: tuple[State, ...]
    factors: tuple[Factors | None, ...]


class HybridAttend:
    """An `Attend`, `LatentAttend`, `PooledAttend`, `WholeBlockAttend` or `RelativeAttend` over pages and a `DeltaAttend` over
    states; its cache is a `HybridCache`.

    Args:
      paged: what layers with attention are called with.
      mix: what layers with states do.
    """

    def __init__(self, paged: PagedAttend, mix: Mix):
        self.paged, self.mix = paged, mix

    def __call__(self, layer: Attention, qkv: Array, rotary: Rotary, cache: HybridCache) -> tuple[Array, HybridCache]:
        out, pages = self.paged(layer, qkv, rotary, cache.pages)
        return out, replace(cache, pages=pages)

    def latent(self, layer: Any, q: Array, row: Array, rotary: Rotary, cache: HybridCache) -> tuple[Array, HybridCache]:
        """See `LatentAttend`."""
        out, pages = self.paged.latent(layer, q, row, rotary, cache.pages)
        return out, replace(cache, pages=pages)

    def pooled(
        self, layer: Any, q: Array, row: Array, index: PooledRows, cache: HybridCache
    ) -> tuple[Array, HybridCache]:
        """See `PooledAttend`."""
        out, pages = pooled_attention(self.paged, layer, q, row, index, cache.pages)
        return out, replace(cache, pages=pages)

    def whole_blocks(
        self, layer: Any, qkv: Array, index: BlockRows, rotary: Rotary, cache: HybridCache
    ) -> tuple[Array, HybridCache]:
        """See `WholeBlockAttend`."""
        out, pages = whole_block_attention(self.paged, layer, qkv, index, rotary, cache.pages)
        return out, replace(cache, pages=pages)

    def relative(
        self, layer: Any, q: Array, k: Array, v: Array, mixes: Array, cache: HybridCache
    ) -> tuple[Array, HybridCache]:
        """See `RelativeAttend`."""
        out, pages = relative_attention(self.paged, layer, q, k, v, mixes, cache.pages)
        return out, replace(cache, pages=pages)

    def delta(self, layer: Any, projected: Array, cache: HybridCache) -> tuple[Array, HybridCache]:
        """See `DeltaAttend`."""
        i = layer.index
        out, state, factors = self.mix(layer, projected, cache.states[i])
        states, kept = (*cache.states[:i], state, *cache.states[i + 1 :]), (*cache.factors[:i], factors)
        return out, replace(cache, states=states, factors=(*kept, *cache.factors[i + 1 :]))


def verifying(paged: PagedAttend, pages: Pages, states: tuple[State, ...], live: Bool[Array, "B"]) -> tuple[Any, Any]:
    """Attention and cache for verification: `paged` over `pages`, with states or indexers if the target has any.

    Slots that are not live keep their states.

    One token alone always stands: then states are final at once, and there are no factors.
    """

    def mix(layer: Any, projected: Array, state: State) -> tuple[Array, State, Factors | None]:
        if projected.shape[1] == 1:
            return *layer.step(projected, state, live), None
        out, factors = layer.verify(projected, state)
        return out, state, factors

    return _with_states(paged, pages, states, mix)


def prefilling(
    paged: PagedAttend,
    pages: Pages,
    states: tuple[State, ...],
    slots: Int[Array, "n"],
    starts: Int[Array, "n"],
    lengths: Int[Array, "n"],
) -> tuple[Any, Any]:
    """Attention and cache for pieces of prompts: as `verifying`, with the states of `slots`, which may be past the last one for
    rows that nobody needs. A row goes on where the row before it ends if that is of the same slot; a prompt's first piece starts
    from zero, whatever the slot held.
    """
    fresh = starts == 0
    follows = ((slots == jnp.roll(slots, 1)) & ~fresh).at[0].set(False)

    def mix(layer: Any, projected: Array, state: State) -> tuple[Array, State, None]:
        after = layer.prefill(projected, state, slots=slots, follows=follows, fresh=fresh, lengths=lengths)
        return *after, None

    return _with_states(paged, pages, states, mix)


def _with_states(paged: PagedAttend, pages: Pages, states: tuple[State, ...], mix: Mix) -> tuple[Any, Any]:
    if not states:
        return (IndexedPages(paged), IndexedCache(pages, None)) if pages.index and not pages.v else (paged, pages)
    return HybridAttend(paged, mix), HybridCache(pages, states, (None,) * len(states))


def committed(cache: Any, counts: Int[Array, "B"]) -> tuple[Pages, tuple[State, ...]]:
    """Pages, and states after the first `counts` of the verified tokens; a count of 0 leaves a slot's as it is.

    Args:
      cache: as the target left it.
    """
    pages, after, factors = apart(cache)
    return pages, folded(after, factors, counts)


def apart(cache: Any) -> tuple[Pages, tuple[State, ...], tuple[Factors | None, ...]]:
    """Pages, states and factors of a cache as a target left it; () where it has none."""
    if isinstance(cache, HybridCache):
        return cache.pages, cache.states, cache.factors
    return (cache.pages if isinstance(cache, IndexedCache) else cache), (), ()


def folded(
    states: tuple[State, ...], factors: tuple[Factors | None, ...], counts: Int[Array, "B"]
) -> tuple[State, ...]:
    """States after the first `counts` of the verified tokens, whose factors are not in them yet."""
    return tuple(
        state if its is None else _folded(state, its, counts) for state, its in zip(states, factors, strict=True)
    )


def _folded(state: Any, factors: Factors, counts: Int[Array, "B"]) -> State:
    folds: dict[type, Any] = {
        ConvFactors: conv_fold, KdaFactors: kda_fold, Mamba2Factors: mamba2_fold, NgramFactors: ngram_fold
    }  # fmt: skip
    return folds.get(type(factors), delta_fold)(state, factors, counts)
