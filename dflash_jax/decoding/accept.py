"""Acceptance: how many draft tokens stand, and what is emitted after them.

Proposals `d_1 .. d_g` are the tokens after the pending one; row j of the target's logits is its distribution for token j + 1,
given that the first j proposals stand. Emitted are the accepted proposals and one token of the target's.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.decoding.sampling import RequestArrays, noise_at
from dflash_jax.models.heads import Law


def accept_matching(
    proposals: Int[Array, "B g"], chosen: Int[Array, "B T"], lengths: Int[Array, "B"] | None = None
) -> tuple[Int[Array, "B"], Int[Array, "B T"]]:
    """Proposals stand as long as they equal the target's own choice at their place.

    Exact for every sampling law: the emitted tokens are the target's choices themselves, each made from its distribution given
    the tokens emitted before it, with noise that no proposal influences.

    Args:
      lengths: rows of `chosen` that were verified, where those are not all: what stands behind them is not looked at.

    Returns:
      Number of accepted proposals, and the emitted row (valid up to that number, inclusive).
    """
    refused = proposals != chosen[:, :-1]
    return first_true(refused if lengths is None else refused | ~_verified(proposals, lengths)), chosen


def _verified(proposals: Int[Array, "B g"], lengths: Int[Array, "B"]) -> Bool[Array, "B g"]:
    """Whether each proposal was judged, where so many tokens were verified, the pending one included."""
    return jnp.arange(proposals.shape[1]) < lengths[:, None] - 1


def first_true(marks: Bool[Array, "B n"]) -> Int[Array, "B"]:
    """The place of the first mark in each row, n where there is none."""
    first = jnp.full(marks.shape[:1], marks.shape[1], jnp.int32)
    # One place after the other: a reduction would be a launch of its own.
    for place in reversed(range(marks.shape[1])):
        first = jnp.where(marks[:, place], place, first)
    return first


def accept_rejection(
    proposals: Int[Array, "B g"],
    drafted: Law,
    target_logits: Float[Array, "B T V"],
    positions: Int[Array, "B T"],
    request: RequestArrays,
    lengths: Int[Array, "B"] | None = None,
) -> tuple[Int[Array, "B"], Int[Array, "B T"]]:
    """Block verification (arXiv 2403.10444, algorithm 2): how many proposals stand is settled for the whole block at once.

    With r_i = p(x_i) / q(x_i) of proposal i, drawn from q, the first i proposals have the weight k_i = min(1, k_{i-1} r_i) with
    k_0 = 1, and m_i is the sum of max(k_i p - q, 0) over the tokens that may follow them. Each i is drawn by itself with chance
    m_i / (m_i + 1 - k_i), the last with k_i; the longest prefix that is drawn stands, and the token after it is from the normalised
    max(k_i p - q, 0), after the last from p. Then i proposals or more stand with chance k_i on average over those after them, never
    less than where each is judged by itself (arXiv 2211.17192). What stands depends on noise at places behind it, so a cycle that
    comes to these places again must have other noise; nothing else is carried over.

    Both logits are after temperature and filters. Rows of temperature 0 must go through `accept_matching`.

    Args:
      drafted: q, the law that proposals were drawn from. Where it has columns for some tokens alone, no table of all is made of it.
      lengths: as of `accept_matching`; the block then ends after the last place that was verified. Exact where `lengths` depend on
        each place's law and on what was drawn before it, not on what was drawn there.
    """
    b, g = proposals.shape
    p, q = jax.nn.softmax(target_logits, axis=-1), jax.nn.softmax(drafted.logits, axis=-1)
    at = proposals[:, :, None]
    if drafted.tokens is None:
        p_x, q_x = (jnp.take_along_axis(law, at, axis=-1)[..., 0] for law in (p[:, :g], q))
    else:
        p_x = jnp.take_along_axis(p[:, :g], at, axis=-1)[..., 0]
        q_x = jnp.sum(jnp.where(drafted.tokens == at, q, 0.0), axis=-1)
    weights = _weights(p_x, q_x)
    if lengths is not None:
        q = jnp.where(_verified(proposals, lengths)[:, :, None], q, 0.0)
    weighted = weights[:, :, None] * p
    if drafted.tokens is None:
        left = jnp.maximum(weighted - jnp.pad(q, ((0, 0), (0, 1), (0, 0))), 0.0)
    else:
        rows, places = jnp.arange(b)[:, None, None], jnp.arange(g)[:, None]
        left = jnp.maximum(weighted.at[rows, places, drafted.tokens].add(-q), 0.0)
    # Behind the block's end no q is taken off, so that the chance there is k_i.
    rest = jnp.sum(left, axis=-1)
    # -log(U) of a uniform U is exponential; exp(-exp(-gumbel)) is that uniform, so one generator serves all.
    since = positions[:, 0]
    uniform = jnp.exp(-jnp.exp(-noise_at(request.seed, positions[:, :g], 1, stream=2, since=since)[..., 0]))
    drawn = uniform * (rest + 1 - weights)[:, 1:] < rest[:, 1:]
    if lengths is not None:
        drawn &= _verified(proposals, lengths)
    accepted = g - first_true(drawn[:, ::-1])
    left = jnp.where((rest > 0)[:, :, None], left, p)
    noise = noise_at(request.seed, positions, p.shape[-1], stream=3, since=since)
    replacement = jnp.argmax(jnp.log(left) + noise, axis=-1).astype(jnp.int32)
    padded = jnp.concatenate([proposals, jnp.zeros((b, 1), jnp.int32)], axis=1)
    places = jnp.arange(g + 1)
    return accepted, jnp.where(places < accepted[:, None], padded, replacement)


def _weights(p_x: Float[Array, "B g"], q_x: Float[Array, "B g"]) -> Float[Array, "B T"]:
    """k_0 .. k_g of `accept_rejection`."""
    weights = [jnp.ones(p_x.shape[0], p_x.dtype)]
    # One place after the other: a scan would be launches of its own.
    for place in range(p_x.shape[1]):
        weights.append(jnp.minimum(weights[-1] * p_x[:, place] / q_x[:, place], 1.0))
    return jnp.stack(weights, axis=1)


def accept_imposed(
    proposals: Int[Array, "B g"],
    chosen: Int[Array, "B T"],
    pending: Int[Array, "B"],
    seq_lens: Int[Array, "B"],
    chances: Float[Array, "B"],
    lengths: Int[Array, "B"] | None = None,
) -> tuple[Int[Array, "B"], Int[Array, "B T"]]:
    """As many proposals as if each stood with one chance whatever the target chose. For timing only: no text of a model.

    Args:
      chances: that a slot's proposal stands where those before it do; see `imposed_chances`.
      lengths: as of `accept_matching`.
    """
    # A hash of token and length in place of random numbers (the finaliser of MurmurHash3): the same in every run.
    bits = seq_lens.astype(jnp.uint32) + pending.astype(jnp.uint32) * jnp.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    uniform = ((bits ^ (bits >> 16)) >> 8).astype(jnp.float32) / 2**24
    stood = uniform[:, None] < chances[:, None] ** jnp.arange(1, proposals.shape[1] + 1, dtype=jnp.float32)
    accepted = jnp.sum(stood, axis=1, dtype=jnp.int32)
    if lengths is not None:
        accepted = jnp.minimum(accepted, jnp.maximum(lengths - 1, 0))
    padded = jnp.concatenate([proposals, chosen[:, -1:]], axis=1)
    return accepted, jnp.where(jnp.arange(chosen.shape[1]) < accepted[:, None], padded, chosen)


def imposed_chances(means: float | tuple[float, ...], drafts: int, slots: int) -> Float[Array, "B"]:
    """The chances with which slots gain so many tokens a cycle on average where all `drafts` proposals are verified; with fewer, as
    many as then follow. Several means are those of slots by turns."""
    each = [imposed_chance(mean, drafts) for mean in (means if isinstance(means, tuple) else (means,))]
    return jnp.array(each, jnp.float32)[jnp.arange(slots) % len(each)]


def imposed_chance(mean: float, drafts: int) -> float:
    """The chance of one proposal with which a cycle of `drafts` proposals gains `mean` tokens on average."""
    low, high = 0.0, 1.0
    for _ in range(50):
        chance = (low + high) / 2
        low, high = (chance, high) if sum(chance**k for k in range(drafts + 1)) < mean else (low, chance)
    return high
