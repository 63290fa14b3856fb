"""The loss of each kind of drafter over the proposing slots of its blocks, with the tokens before each place given.

    v1        cross-entropy of the base logits
    DFlash 2  that, and the cross-entropy of the selector among each place's candidates (a token that is not among them is left out)
    DSpark    0.1 x cross-entropy + 0.9 x total variation of the corrected logits, and the confidence's binary cross-entropy against
              one minus that variation, which is the chance that a draft stands (arXiv 2607.05147); or, of texts drawn from the
              target, 0.9 x the chance that block verification stops before a place in place of the variation

Every term is against the tokens that came, or against the target's distributions: then it is its expectation over them.
"""

from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.models import DFlash
from dflash_jax.models.heads.markov import Markov
from dflash_jax.models.heads.selector import Selector
from dflash_jax.quantization.weights import Quantized
from dflash_jax.training.losses import block_stands, hard_terms, soft_terms

CROSS_ENTROPY, VARIATION = 0.1, 0.9
_SURE = 1e-6  # a confidence is kept this far from 0 and 1


class Places(NamedTuple):
    """The places of M blocks that are drafted for.

    Attributes:
      hidden: states of the slots that propose.
      anchor: the token before the first place.
      tokens: those that came.
      teacher: the target's float32 logits of each place; None for the loss against `tokens`.
    """

    hidden: Float[Array, "M S D"]
    anchor: Int[Array, "M"]
    tokens: Int[Array, "M S"]
    teacher: Float[Array, "M S V"] | None = None

    @property
    def before(self) -> Int[Array, "M S"]:
        """The token before each place."""
        return jnp.concatenate([self.anchor[:, None], self.tokens[:, :-1]], axis=1)


class Terms(NamedTuple):
    """Terms of the loss at each position.

    Attributes:
      loss: what training adds up.
      entropy: cross-entropy in nats of the law that proposes.
      match: the chance that a proposal of it stands.
      stopped: 0.9 x the chance that a block, judged as a whole, stops before the position's proposal; then `loss` has no variation.
        Positions weigh the same in it. None where they are judged one by one.
    """

    loss: Float[Array, "M S"]
    entropy: Float[Array, "M S"]
    match: Float[Array, "M S"]
    stopped: Float[Array, "M S"] | None = None


def terms(draft: DFlash, places: Places, head_weight: Float[Array, "V D"] | Quantized, *, whole: bool = False) -> Terms:
    """The loss of the drafter's kind. `head_weight` is the target's, for drafters without a head of their own.

    Args:
      whole: of DSpark, blocks are judged as a whole; `places` must have the target's logits, and tokens drawn from them.
    """
    base, kind = draft.logits(places.hidden, head_weight), draft.config.head and draft.config.head.kind
    if kind == "markov":
        return markov_terms(cast(Markov, draft.head), places, base, whole=whole)
    entropy, match = against(base, places)
    if kind == "selector":
        chosen, match = selector_terms(cast(Selector, draft.head), places, base)
        return Terms(entropy + chosen, chosen, match)
    return Terms(entropy, entropy, match)


def against(logits: Float[Array, "M S V"], places: Places) -> tuple[Float[Array, "M S"], Float[Array, "M S"]]:
    """Cross-entropy and chance to stand, against the tokens or the target's distributions."""
    if places.teacher is None:
        return hard_terms(logits, places.tokens)
    return soft_terms(logits, places.teacher)


def selector_terms(
    head: Selector, places: Places, base: Float[Array, "M S V"]
) -> tuple[Float[Array, "M S"], Float[Array, "M S"]]:
    """The same for a selector's law over the best candidates by the base logits, after the tokens that came."""
    _, candidates = jax.lax.top_k(jax.lax.stop_gradient(base), head.top_k)
    unary = jnp.take_along_axis(base, candidates, axis=-1)
    left = head.predecessor_codebook[...][places.before].astype(jnp.float32)
    left = left * head.hidden_projection(places.hidden).astype(jnp.float32)
    right = head.successor_codebook[...][candidates].astype(jnp.float32)
    log_q = jax.nn.log_softmax(unary + jnp.einsum("msr,mscr->msc", left, right))
    if places.teacher is None:
        wanted = (candidates == places.tokens[..., None]).astype(jnp.float32)
    else:
        wanted = jnp.take_along_axis(jax.nn.softmax(places.teacher), candidates, axis=-1)
    return -(wanted * log_q).sum(-1), jnp.minimum(wanted, jnp.exp(log_q)).sum(-1)


def corrected(
    head: Markov, base: Float[Array, "M S V"], hidden: Float[Array, "M S D"], before: Int[Array, "M S"]
) -> Float[Array, "M S V"]:
    """Base logits and a Markov head's bias after the tokens `before` each place; a recurrent head walks along the places."""
    table = head.markov_w2.weight[...]
    shape, dtype = (before.shape[0], table.shape[-1]), jnp.result_type(head.markov_w1.weight[...], hidden)
    if head.joint_proj is None:
        latent, _ = head.latent(before, hidden, jnp.zeros((*before.shape, shape[1]), dtype))
    else:

        def walk(state: Array, place: tuple[Array, Array]) -> tuple[Array, Array]:
            latent, state = head.latent(*place, state)
            return state, latent

        along = jnp.moveaxis(before, 1, 0), jnp.moveaxis(hidden, 1, 0)
        _, latent = jax.lax.scan(walk, jnp.zeros(shape, dtype), along)
        latent = jnp.moveaxis(latent, 0, 1)
    bias = jnp.einsum("msr,vr->msv", latent.astype(table.dtype), table).astype(jnp.float32)
    return base + bias * head.logit_scale


def markov_terms(head: Markov, places: Places, base: Float[Array, "M S V"], *, whole: bool = False) -> Terms:
    """DSpark's compound loss."""
    before = places.before
    logits = corrected(head, base, places.hidden, before)
    entropy, match = against(logits, places)
    loss, stopped = CROSS_ENTROPY * entropy, None
    if whole and places.teacher is not None:
        stands = block_stands(jax.nn.log_softmax(places.teacher), jax.nn.log_softmax(logits), places.tokens)
        stopped = VARIATION * (1 - stands)
    else:
        loss = loss + VARIATION * (1 - match)
    if head.confidence_proj is not None:
        sure = jnp.clip(head.confidence(before, places.hidden), _SURE, 1 - _SURE)
        stands = jax.lax.stop_gradient(match)
        loss = loss - stands * jnp.log(sure) - (1 - stands) * jnp.log1p(-sure)
    return Terms(loss, entropy, match, stopped)
