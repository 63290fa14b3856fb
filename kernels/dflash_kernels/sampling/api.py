"""Sampling with filters: shapes, dtypes and errors; the first implementation that supports the call runs."""

from collections.abc import Sequence

import jax
from jaxtyping import Array, Float, Int

from dflash_kernels.core.dispatch import first_fitting
from dflash_kernels.core.validation import check_axes, check_filled, check_floats, check_integers
from dflash_kernels.sampling import mosaic_gpu, reference

IMPLEMENTATIONS = {
    "mosaic_gpu": mosaic_gpu.filtered_choice_mosaic_gpu,
    "xla": reference.filtered_choice_reference,
}


def filtered_choice(
    logits: Float[Array, "R V"],
    noise: Float[Array, "R V"],
    *,
    temperature: Float[Array, "R"],
    min_p: Float[Array, "R"],
    top_k: Int[Array, "R"],
    top_p: Float[Array, "R"],
    implementation: str | Sequence[str] | None = None,
) -> Int[Array, "R"]:
    """Min-p, top-k and top-p sampling: in each row the index of the largest `logits / temperature + noise` that the filters keep.

    Filters apply in this order. With Gumbel noise the result is a sample from the filtered distribution (the Gumbel-max trick).
    Ties with the last kept logit are kept; of equal sums the first is taken.

    Args:
      logits: masked ones are -inf; no NaN, one finite in each row.
      temperature: 0 takes the largest logit, without filters and noise.
      min_p: least probability relative to the largest; 0 for all.
      top_k: 0 for all.
      top_p: 1 or more for all; the most probable token is kept in any case.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Raises:
      ValueError: shapes do not agree, or an array is of another kind than said.
      NoImplementationError: nothing named takes these arguments.
    """
    of_rows = {"temperature": temperature, "min_p": min_p, "top_k": top_k, "top_p": top_p}
    check_axes(logits=(logits, "R V"), noise=(noise, "R V"), **{name: (each, "R") for name, each in of_rows.items()})
    check_filled(logits=logits)
    check_floats(logits=logits, noise=noise, temperature=temperature, min_p=min_p, top_p=top_p)
    check_integers(top_k=top_k)
    if noise.shape != logits.shape or any(each.shape != logits.shape[:1] for each in of_rows.values()):
        came = ", ".join(f"{name} {each.shape}" for name, each in {"noise": noise, **of_rows}.items())
        raise ValueError(f"{came} do not fit logits {logits.shape}")
    with jax.named_scope("filtered_choice"):
        return first_fitting("filtered_choice", IMPLEMENTATIONS, implementation, logits, noise, **of_rows)
