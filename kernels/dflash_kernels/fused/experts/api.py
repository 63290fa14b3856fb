"""Mixture of experts: `routed_experts`, and `mixture` with the router. Checks shapes, then dispatches."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_kernels.core.dispatch import first_fitting
from dflash_kernels.core.validation import check_axes, check_count, check_floats, check_integers, plain
from dflash_kernels.fused.experts.mosaic_gpu import mixture_mosaic_gpu, refuse, routed_experts_mosaic_gpu
from dflash_kernels.fused.experts.plan import Choice, most_groups
from dflash_kernels.fused.experts.reference import mixture_reference, routed_experts_reference

MIXTURES = {"mosaic_gpu": mixture_mosaic_gpu, "xla": mixture_reference}
IMPLEMENTATIONS = {"mosaic_gpu": routed_experts_mosaic_gpu, "xla": routed_experts_reference}


def routed_experts_refusal(tokens: int, taken: int, dtype: Any, *, experts: int, hidden: int, inner: int) -> str | None:
    """Why `routed_experts` has nothing faster than XLA for these sizes; None where it has."""
    try:
        refuse(tokens, taken, dtype, experts=experts, hidden=hidden, inner=inner)
    except NotImplementedError as reason:
        return str(reason)
    return None


def routed_experts_exchange(experts: int) -> Any:
    """A Ref that calls of `routed_experts` with up to so many experts may share which never run at the same time: each leaves it as
    it was."""
    return jax.new_ref(jnp.zeros((most_groups(experts),), jnp.int32))


def routed_experts(
    x: Float[Array, "T D"],
    experts: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    gate_up: Float[Array, "E twoF D"],
    down: Float[Array, "E D F"],
    *,
    exchange: Any = None,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "k T D"]:
    """Routed experts of a mixture: SwiGLU feed-forwards of those that each token takes.

    Choice j of token t gives `weights[t, j] * down[e] (silu(gate) * up)` with `e = experts[t, j]`.

    Args:
      x: rows.
      experts: int32, from 0 to E - 1, in any distribution: one expert for all tokens or none for some experts.
      weights: float32.
      gate_up: F gate rows before as many up rows of each expert, as in SwiGLU (arXiv 2002.05202, section 2).
      down: of each expert.
      exchange: what `routed_experts_exchange` gave, made once for calls that follow one another; without it each makes its own.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Returns:
      Float32, one row for each choice of each token: whoever wants the token's result adds its k rows. Sums are float32, what
      is between the two products is rounded to x's dtype.

    Raises:
      ValueError: shapes do not agree, or an array is of another kind than said.
      NoImplementationError: nothing named takes these arguments.
    """
    _check(x, gate_up, down)
    check_axes(experts=(experts, "T k"), weights=(weights, "T k"))
    check_integers(experts=experts)
    check_floats(weights=weights)
    if experts.shape != weights.shape or experts.shape[0] != x.shape[0]:
        raise ValueError(f"experts {experts.shape} and weights {weights.shape} must be [{x.shape[0]}, k]")
    with jax.named_scope("routed_experts"):
        return first_fitting(
            "routed_experts", IMPLEMENTATIONS, implementation, x, experts, weights, gate_up, down, exchange=exchange
        )  # fmt: skip


def mixture(
    logits: Float[Array, "T A"],
    x: Float[Array, "T D"],
    gate_up: Float[Array, "E twoF D"],
    down: Float[Array, "E D F"],
    *,
    taken: int,
    normed: bool,
    scale: float = 1.0,
    shared: bool = False,
    first: Int[Array, ""] | None = None,
    exchange: Any = None,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "k T D"]:
    """Mixture of experts with a top-k router: `routed_experts` of each token's `taken` largest logits, the first of equal ones.

    Args:
      logits: float32, of all experts.
      normed: weights are the softmax of the logits that are taken; otherwise of all of them.
      scale: of the weights.
      shared: every token takes the last expert as well, which is not among those that logits choose from, as its choice
        `taken`; its weight is the sigmoid of its logit.
      first: int32, the number of the first expert of `gate_up` and `down`, where these have a share of the experts, and the shared
        one last; A is E without it. Rows of choices that others have are zeros, the shared one's too unless `first` is 0.
      x, gate_up, down, exchange, implementation: see `routed_experts`; what it gives and raises, too.
    """
    _check(x, gate_up, down)
    check_axes(logits=(logits, "T A"))
    check_floats(logits=logits)
    check_count(taken=taken)
    (rows, scores), here = logits.shape, gate_up.shape[0]
    fits = rows == x.shape[0] and (scores == here if first is None else scores >= here)
    if not fits or not 0 < taken <= scores - shared:
        raise ValueError(
            f"logits {logits.shape}, of which {taken} are taken, do not fit x {x.shape} and gate_up {gate_up.shape}"
        )
    choice = Choice(normed, plain(scale), shared)
    with jax.named_scope("routed_experts"):
        return first_fitting(
            "mixture", MIXTURES, implementation, logits, x, gate_up, down, taken=taken, choice=choice, first=first,
            exchange=exchange,
        )  # fmt: skip


def _check(x: Any, gate_up: Any, down: Any) -> None:
    check_axes(x=(x, "T D"), gate_up=(gate_up, "E twoF D"), down=(down, "E D F"))
    check_floats(x=x, gate_up=gate_up, down=down)
    count, both, hidden = gate_up.shape
    if x.shape[1] != hidden or both % 2 or down.shape != (count, hidden, both // 2):
        raise ValueError(
            f"x {x.shape}, gate_up {gate_up.shape} and down {down.shape} must be [T, D], [E, 2F, D] and [E, D, F]"
        )
