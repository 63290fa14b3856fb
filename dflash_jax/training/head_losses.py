"""The loss of each kind of drafter over the proposing slots of its blocks, with the tokens before each place given.

    v1        cross-entropy of the base logits
    DFlash 2  that, and the cross-entropy of the selector among each place's candidates (a token that is not among them is left out)
    DSpark    0.1 x cross-entropy + 0.9 x total variation of the corrected logits, and the confidence's binary cross-entropy against
              one minus that variation, which is the chance that a draft stands (arXiv 2607.05147)

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
from dflash_jax.training.losses import hard_terms, soft_terms

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
    """

    loss: Float[Array, "M S"]
    entropy: Float[Array, "M S"]
    match: Float[Array, "M S"]


def terms(draft: DFlash, places: Places, head_weight: Float[Array, "V D"] | Quantized) -> Terms:
    """The loss of the drafter's kind. `head_weight` is the target's, for drafters without a head of their own."""
    base, kind = draft.logits(places.hidden, head_weight), draft.config.head and draft.config.head.kind
    if kind == "markov":
        return markov_terms(cast(Markov, draft.head), places, base)
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


def markov_terms(head: Markov, places: Places, base: Float[Array, "M S V"]) -> Terms:
    """DSpark's compound loss. The head must be of the form "vanilla" or "gated": a recurrent one has a state to walk along."""
    table, before = head.markov_w2.weight[...], places.before
    state = jnp.zeros((*before.shape, table.shape[-1]), places.hidden.dtype)
    latent, _ = head.latent(before, places.hidden, state)
    bias = jnp.einsum("msr,vr->msv", latent.astype(table.dtype), table).astype(jnp.float32) * head.logit_scale
    entropy, match = against(base + bias, places)
    loss = CROSS_ENTROPY * entropy + VARIATION * (1 - match)
    if head.confidence_proj is not None:
        sure = jnp.clip(head.confidence(before, places.hidden), _SURE, 1 - _SURE)
        stands = jax.lax.stop_gradient(match)
        loss = loss - stands * jnp.log(sure) - (1 - stands) * jnp.log1p(-sure)
    return Terms(loss, entropy, match)
