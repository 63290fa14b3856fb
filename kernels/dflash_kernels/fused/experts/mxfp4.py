"""Mixture of experts in MXFP4: `mxfp4_mixture`. Checks shapes, then dispatches."""

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from dflash_kernels.core.dispatch import first_fitting
from dflash_kernels.core.mxfp4 import Mxfp4Tiles
from dflash_kernels.core.validation import check_axes, check_count, check_floats, plain
from dflash_kernels.fused.experts.mosaic_gpu_mxfp4 import mxfp4_mixture_mosaic_gpu, refuse
from dflash_kernels.fused.experts.plan_mxfp4 import Gate
from dflash_kernels.fused.experts.reference_mxfp4 import mxfp4_mixture_reference

IMPLEMENTATIONS = {"mosaic_gpu": mxfp4_mixture_mosaic_gpu, "xla": mxfp4_mixture_reference}


def mxfp4_mixture_refusal(tokens: int, taken: int, dtype: Any, *, experts: int, hidden: int, inner: int) -> str | None:
    """Why `mxfp4_mixture` has no kernel for these sizes; None where it has."""
    try:
        refuse(tokens, taken, dtype, experts=experts, hidden=hidden, inner=inner)
    except NotImplementedError as reason:
        return str(reason)
    return None


def mxfp4_mixture(
    logits: Float[Array, "T A"],
    x: Float[Array, "T D"],
    gate_up: Mxfp4Tiles,
    gate_up_bias: Float[Array, "E twoF"],
    down: Mxfp4Tiles,
    down_bias: Float[Array, "E D"],
    *,
    taken: int,
    alpha: float,
    limit: float,
    first: Int[Array, ""] | None = None,
    exchange: Any = None,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "n T D"]:
    """Mixture of experts in MXFP4 with biases and a clamped SwiGLU: of a token's `taken` largest logits, the first of equal ones.

    An expert e that a token takes adds `w (down_e h + down_bias_e)`, where w is its share in the softmax of the logits that are
    taken, and h is `(u + 1) g sigmoid(alpha g)` of gates g up to `limit` and ups u from minus to plus `limit`, which are the even
    and the odd rows of `gate_up_e x + gate_up_bias_e`.

    Source: "gpt-oss-120b & gpt-oss-20b Model Card", arXiv 2508.10925, section 2.

    Args:
      logits: float32, of all experts.
      x: rows.
      gate_up: `[E, 2F, D]`, gated; down: `[E, D, F]`, not gated.
      first: int32, the number of the first expert of the matrices and biases, where these have a share of the experts; A is E
        without it. Rows of choices that others have are zeros.
      exchange: what `routed_experts_exchange` gave, made once for calls that follow one another; without it each makes its own.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Returns:
      Float32, some rows for each token: whoever wants the token's result adds its n rows. Sums are float32, what is between the two
      products is rounded to x's dtype.

    Raises:
      ValueError: shapes do not agree, or an array is of another kind than said.
      NoImplementationError: nothing named takes these arguments.
    """
    check_axes(logits=(logits, "T A"), x=(x, "T D"))
    check_floats(logits=logits, x=x, gate_up_bias=gate_up_bias, down_bias=down_bias)
    check_count(taken=taken)
    (count, both, hidden), (rows, scores) = gate_up.shape, logits.shape
    fits = rows == x.shape[0] and (scores == count if first is None else scores >= count)
    if not fits or not 0 < taken <= scores:
        raise ValueError(
            f"logits {logits.shape}, of which {taken} are taken, do not fit x {x.shape} and gate_up {gate_up.shape}"
        )
    if not gate_up.gated or down.gated:
        raise ValueError(f"gate_up must be gated and down not, they are {gate_up.gated} and {down.gated}")
    if x.shape[1] != hidden or down.shape != (count, hidden, both // 2):
        raise ValueError(
            f"x {x.shape}, gate_up {gate_up.shape} and down {down.shape} must be [T, D], [E, 2F, D], [E, D, F]"
        )
    if gate_up_bias.shape != (count, both) or down_bias.shape != (count, hidden):
        raise ValueError(
            f"gate_up_bias {gate_up_bias.shape} and down_bias {down_bias.shape} must be {(count, both)}, {(count, hidden)}"
        )
    with jax.named_scope("mxfp4_mixture"):
        return first_fitting(
            "mxfp4_mixture", IMPLEMENTATIONS, implementation, logits, x, gate_up, gate_up_bias, down, down_bias, taken=taken,
            gate=Gate(plain(alpha), plain(limit)), first=first, exchange=exchange,
        )  # fmt: skip
