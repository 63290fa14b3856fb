"""Losses over the drafted slots of a block."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

DPACE_FLOOR = 0.5


def decay_weights(slots: int, gamma: float = 7.0) -> Float[Array, "S"]:
    """exp(-(k - 1) / gamma) for slot k = 1 .. S (arXiv 2602.06036, section 4.2)."""
    return jnp.exp(-jnp.arange(slots) / gamma)


def dpace_weights(
    match: Float[Array, "M S"], floor: float = DPACE_FLOOR, seen: Bool[Array, "M S"] | None = None
) -> Float[Array, "M S"]:
    """Weight of slot j, its share of the expected accepted length: the sum over m >= j of the chance to get through slot m.

    Chances are lifted to `(1 - floor) * match + floor`, so that late slots learn before early ones are right (arXiv 2605.18810).
    Slots beyond the text's end, those that are not `seen`, add nothing.
    """
    through = jnp.cumprod((1 - floor) * jax.lax.stop_gradient(match) + floor, axis=-1)
    through = through if seen is None else through * seen
    return jnp.cumsum(through[..., ::-1], axis=-1)[..., ::-1]


def hard_terms(
    logits: Float[Array, "M S V"], labels: Int[Array, "M S"]
) -> tuple[Float[Array, "M S"], Float[Array, "M S"]]:
    """Cross-entropy against the given tokens, and the probability of each: the chance that the slot is accepted."""
    log_q = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(log_q, labels[..., None], axis=-1)[..., 0]
    return -picked, jnp.exp(picked)


def soft_terms(
    logits: Float[Array, "M S V"], target: Float[Array, "M S V"]
) -> tuple[Float[Array, "M S"], Float[Array, "M S"]]:
    """Cross-entropy against the target's distributions, and the mass both share.

    For sampled continuations this is the expectation of `hard_terms` over the token that was drawn: the same optimum, less noise.
    """
    log_q, p = jax.nn.log_softmax(logits), jax.nn.softmax(target)
    return -(p * log_q).sum(-1), jnp.minimum(p, jnp.exp(log_q)).sum(-1)


def block_stands(
    log_p: Float[Array, "M S V"], log_q: Float[Array, "M S V"], tokens: Int[Array, "M S"]
) -> Float[Array, "M S"]:
    """The chance that block verification accepts place i and those before it, where a text goes on with `tokens`, drawn from p.

    With W_i the product of q / p of the first i tokens, and M_i the least of W_0 = 1 .. W_i, that is M_i (arXiv 2403.10444: the
    weight k_i of `decoding.accept` is M_i / W_i, and a proposal comes with W_i times the chance of the text). Of its own place it
    is the expectation over the token there, the sum of min(M_{i-1} p, W_{i-1} q), so its gradient is less noisy. Summed up over
    the places it is the expected number of proposals that stand.
    """
    at = tokens[..., None]
    ratios = (jnp.take_along_axis(log_q, at, axis=-1) - jnp.take_along_axis(log_p, at, axis=-1))[..., 0]
    came = jnp.pad(jnp.cumsum(ratios, axis=-1)[:, :-1], ((0, 0), (1, 0)))[..., None]
    least = jax.lax.cummin(came, axis=1)
    return jnp.minimum(jnp.exp(least + log_p), jnp.exp(came + log_q)).sum(-1)


def cycle_weights(lengths: Float[Array, "B A"], reach: int = 2) -> Float[Array, "B A"]:
    """Weights, one on average, of blocks that gain so many tokens: as often as cycles begin in the stretch of text around them.

    Anchors lie evenly, cycles do not: where they gain twice the tokens, half as many begin. A stretch is a row's anchors from
    `reach` before a block to `reach` behind it.
    """
    lengths = jax.lax.stop_gradient(lengths)
    near = jnp.pad(jnp.stack([lengths, jnp.ones_like(lengths)]), ((0, 0), (0, 0), (reach, reach)))
    total, count = jnp.stack([near[..., i : i + lengths.shape[1]] for i in range(2 * reach + 1)]).sum(0)
    often = count / total
    return often / often.mean()


def weighted(
    terms: Float[Array, "M S"], match: Float[Array, "M S"], kind: str, seen: Bool[Array, "M S"] | None = None
) -> Float[Array, "M"]:
    """Per block: the slots' terms under the weights of `kind`. Slots that are not `seen` have none."""
    weights = dpace_weights(match, seen=seen) if kind == "dpace" else decay_weights(terms.shape[-1])
    return (weights * (terms if seen is None else terms * seen)).mean(-1)
