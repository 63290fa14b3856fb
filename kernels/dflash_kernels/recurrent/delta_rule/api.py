"""The public functions: shapes, dtypes and errors; the first implementation that supports the call runs."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_kernels.core.dispatch import first_fitting
from dflash_kernels.core.validation import check_axes, check_filled, check_integers, check_wide
from dflash_kernels.recurrent.delta_rule import mosaic_gpu, reference, xla
from dflash_kernels.recurrent.delta_rule.inputs import KEPT, TAPS, DeltaFactors, DeltaShape, DeltaState, DeltaWeights

# Alone, XLA's fold takes half as long as the kernel's with one slot. In a decode loop the kernel's, in place, is the faster one:
# a cycle of Qwen3.5-4B's shapes takes 6.3 ms with it and 7.6 with XLA's for eight slots, 4.7 and 4.8 for one (H100s).
VERIFY = {
    "mosaic_gpu": mosaic_gpu.delta_verify_mosaic_gpu, "xla": xla.delta_verify_xla,
    "reference": reference.delta_verify_reference,
}  # fmt: skip
FOLD = {
    "mosaic_gpu": mosaic_gpu.delta_fold_mosaic_gpu, "xla": xla.delta_fold_xla, "reference": reference.delta_fold_reference,
}  # fmt: skip
STEP = {
    "mosaic_gpu": mosaic_gpu.delta_step_mosaic_gpu, "xla": xla.delta_step_xla, "reference": reference.delta_step_reference,
}  # fmt: skip
PREFILL = {
    "mosaic_gpu": mosaic_gpu.delta_prefill_mosaic_gpu, "xla": xla.delta_prefill_xla,
    "reference": reference.delta_prefill_reference,
}  # fmt: skip


def delta_verify(
    projected: Float[Array, "B T W"],
    weights: DeltaWeights,
    state: DeltaState,
    shape: DeltaShape,
    *,
    eps: float,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "B T O"], DeltaFactors]:
    """A gated delta net's mixer over T tokens of each slot: convolution, delta rule from the slot's state, gated norm.

    For each token and value head, with q and k of length 1 (q then times `dk ** -0.5`), `beta = sigmoid(b)` and
    `g = -exp(a_log) * softplus(a + dt_bias)`, in float32:

        S = exp(g) S;  u = beta (v - k^T S);  S = S + k u^T;  out = q^T S

    The state is read and stays as it is: `delta_fold` brings it to any of the tokens. A token depends on none after it.

    Args:
      projected: a token's columns `q | k | v | z | b | a`, the first three before the convolution.
      weights: the layer's.
      state: of the B slots. One that nobody uses may hold anything.
      shape: sizes, static.
      eps: of the gated norm.
      implementation: a name, names to try in order, or None for the best that takes the call. "reference" goes token after token.

    Returns:
      Gated and normed outputs of all heads, `O = Hv * dv`, in `projected`'s dtype, and the tokens' factors.

    Raises:
      ValueError: shapes do not agree, or an array is of another kind than said.
      NoImplementationError: nothing named takes these arguments.
    """
    _check_projected(projected, weights, shape)
    _check_state(state, projected, shape)
    if state.s.shape[0] != projected.shape[0]:
        raise ValueError(f"projected {projected.shape} and state.s {state.s.shape} must be of as many slots")
    with jax.named_scope("delta_verify"):
        return first_fitting("delta_verify", VERIFY, implementation, projected, weights, state, shape, eps=eps)


def delta_fold(
    state: DeltaState,
    factors: DeltaFactors,
    counts: Int[Array, "B"],
    *,
    implementation: str | Sequence[str] | None = None,
) -> DeltaState:
    """The states after the first `counts[b]` tokens that `factors` are of; 0 leaves a slot as it is, bit for bit.

    Args:
      state: what the tokens were verified from.
      factors: of `delta_verify`. Tokens past the count may hold anything.
      counts: int32, 0 to T.
      implementation: see `delta_verify`.

    Raises:
      ValueError: shapes do not agree, or an array is of another kind than said.
      NoImplementationError: nothing named takes these arguments.
    """
    check_axes(counts=(counts, "B"))
    check_integers(counts=counts)
    check_axes(**{
        "state.s": (state.s, "B Hv dk dv"), "state.conv": (state.conv, "B 3 C"), "factors.k": (factors.k, "B T Hk dk"),
        "factors.u": (factors.u, "B T Hv dv"), "factors.cum": (factors.cum, "B T Hv"), "factors.rows": (factors.rows, "B T C"),
    })  # fmt: skip
    _, t, key_heads, _ = factors.k.shape
    slots, value_heads, dk, dv = state.s.shape
    fitting = {
        "counts": (slots,), "state.conv": (slots, KEPT, state.conv.shape[2]), "factors.k": (slots, t, key_heads, dk),
        "factors.u": (slots, t, value_heads, dv), "factors.cum": (slots, t, value_heads),
        "factors.rows": (slots, t, state.conv.shape[2]),
    }  # fmt: skip
    came = (counts, state.conv, *factors)
    for (name, expected), array in zip(fitting.items(), came, strict=True):
        if array.shape != expected:
            raise ValueError(f"{name} {array.shape} must be {expected} beside state.s {state.s.shape}, T = {t}")
    if value_heads % key_heads:
        raise ValueError(f"factors.u {factors.u.shape} must have a multiple of the {key_heads} heads of factors.k")
    _check_float32(**{"state.s": state.s, "factors.k": factors.k, "factors.u": factors.u, "factors.cum": factors.cum})
    with jax.named_scope("delta_fold"):
        return first_fitting("delta_fold", FOLD, implementation, state, factors, counts)


def delta_step(
    projected: Float[Array, "B 1 W"],
    weights: DeltaWeights,
    state: DeltaState,
    live: Bool[Array, "B"],
    shape: DeltaShape,
    *,
    eps: float,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "B 1 O"], DeltaState]:
    """`delta_verify` and `delta_fold` of one token for each slot, in one pass over the states.

    Args:
      live: slots whose token counts. Others keep their states, bit for bit, and their outputs mean nothing.
      projected, weights, state, shape, eps, implementation: see `delta_verify`.

    Raises:
      ValueError: shapes do not agree, or an array is of another kind than said.
      NoImplementationError: nothing named takes these arguments.
    """
    _check_projected(projected, weights, shape)
    _check_state(state, projected, shape)
    _check_flags(live=live)
    if projected.shape[1] != 1:
        raise ValueError(
            f"projected {projected.shape} must be [B, 1, W], one token for each slot; delta_verify takes more"
        )
    if live.shape != projected.shape[:1] or state.s.shape[0] != projected.shape[0]:
        came = f"projected {projected.shape}, live {live.shape} and state.s {state.s.shape}"
        raise ValueError(f"{came} must be of as many slots")
    with jax.named_scope("delta_step"):
        return first_fitting("delta_step", STEP, implementation, projected, weights, state, live, shape, eps=eps)


def delta_prefill(
    projected: Float[Array, "n L W"],
    weights: DeltaWeights,
    state: DeltaState,
    shape: DeltaShape,
    *,
    eps: float,
    slots: Int[Array, "n"],
    follows: Bool[Array, "n"],
    fresh: Bool[Array, "n"],
    lengths: Int[Array, "n"],
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "n L O"], DeltaState]:
    """Prompts: n rows of up to L tokens, some of them pieces of one prompt in order. Differentiable as "xla" and "reference".

    Args:
      state: of all slots.
      slots: int32, each row's slot. Rows of no slot there is write nothing.
      follows: row i goes on where row i - 1, which is full and of the same slot, ended.
      fresh: other rows that start from nothing; what is neither goes on from its slot's state.
      lengths: int32 tokens of each row. What lies past them may be anything; outputs there mean nothing. Rows of 0 write nothing.
      projected, weights, shape, eps, implementation: see `delta_verify`.

    Returns:
      Gated and normed outputs in `projected`'s dtype, and all slots' states, those of slots that are named after their last row.

    Raises:
      ValueError: shapes do not agree, or an array is of another kind than said.
      NoImplementationError: nothing named takes these arguments.
    """
    _check_projected(projected, weights, shape)
    _check_state(state, projected, shape)
    of_rows = {"slots": slots, "follows": follows, "fresh": fresh, "lengths": lengths}
    check_axes(**{name: (array, "n") for name, array in of_rows.items()})
    check_integers(slots=slots, lengths=lengths)
    _check_flags(follows=follows, fresh=fresh)
    for name, array in of_rows.items():
        if array.shape != projected.shape[:1]:
            raise ValueError(
                f"{name} {array.shape} must be {projected.shape[:1]}, one for each row of projected {projected.shape}"
            )
    with jax.named_scope("delta_prefill"):
        return first_fitting(
            "delta_prefill", PREFILL, implementation, projected, weights, state, shape,
            eps=eps, slots=slots, follows=follows, fresh=fresh, lengths=lengths,
        )  # fmt: skip


def _check_projected(projected: Any, weights: DeltaWeights, shape: DeltaShape) -> None:
    check_axes(projected=(projected, "B T W"))
    check_wide("the delta rule's inputs have no scales", projected=projected)
    check_filled(projected=projected)
    if projected.shape[2] != shape.columns:
        raise ValueError(
            f"projected {projected.shape} must have {shape.columns} columns, q | k | v | z | b | a of {shape}"
        )
    fitting = {
        "weights.conv": (shape.channels, TAPS), "weights.a_log": (shape.value_heads,),
        "weights.dt_bias": (shape.value_heads,), "weights.norm": (shape.value_dim,),
    }  # fmt: skip
    for (name, expected), array in zip(fitting.items(), weights, strict=True):
        if jnp.shape(array) != expected:
            raise ValueError(f"{name} {jnp.shape(array)} must be {expected} for {shape}")
    check_wide("weights of a delta net are not quantized", **dict(zip(fitting, weights, strict=True)))


def _check_state(state: DeltaState, projected: Array, shape: DeltaShape) -> None:
    check_axes(**{"state.s": (state.s, "B Hv dk dv"), "state.conv": (state.conv, "B 3 C")})
    slots = state.s.shape[0]
    of_s, of_conv = (slots, shape.value_heads, shape.key_dim, shape.value_dim), (slots, KEPT, shape.channels)
    if state.s.shape != of_s or state.conv.shape != of_conv or slots < 1:
        came = f"state.s {state.s.shape} and state.conv {state.conv.shape}"
        raise ValueError(f"{came} must be {of_s} and {of_conv}, one slot or more, for {shape}")
    _check_float32(**{"state.s": state.s})
    if state.conv.dtype != projected.dtype:
        raise ValueError(
            f"state.conv of {state.conv.dtype} must hold rows as they come, {projected.dtype} as projected"
        )


def _check_float32(**of_each: Array) -> None:
    for name, array in of_each.items():
        if array.dtype != jnp.float32:
            raise ValueError(f"{name} must be float32, not {array.dtype}: fewer bits drift over long texts")


def _check_flags(**of_each: Any) -> None:
    check_axes(**{name: (array, "B" if name == "live" else "n") for name, array in of_each.items()})
    for name, array in of_each.items():
        if array.dtype != jnp.bool_:
            raise ValueError(f"{name} must hold booleans, not {array.dtype}")
