"""Sampling, with filters and without: shapes, dtypes and errors; the first implementation that supports the call runs."""

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Float, Int, UInt32

from dflash_kernels.core.device import require_hopper
from dflash_kernels.core.dispatch import first_fitting
from dflash_kernels.core.validation import check_axes, check_filled, check_floats, check_integers
from dflash_kernels.sampling import mosaic_gpu, reference

IMPLEMENTATIONS = {
    "filtered_choice": {
        "mosaic_gpu": mosaic_gpu.filtered_choice_mosaic_gpu,
        "xla": reference.filtered_choice_reference,
    },
    "drawn_choice": {"mosaic_gpu": mosaic_gpu.drawn_choice_mosaic_gpu, "xla": reference.drawn_choice_reference},
    "drawn_candidates": {
        "mosaic_gpu": mosaic_gpu.drawn_candidates_mosaic_gpu,
        "xla": reference.drawn_candidates_reference,
    },
}

type Implementation = str | Sequence[str] | None


def filtered_choice(
    logits: Float[Array, "M V"],
    keys: UInt32[Array, "R 2"],
    *,
    temperature: Float[Array, "R"],
    min_p: Float[Array, "R"],
    top_k: Int[Array, "R"],
    top_p: Float[Array, "R"],
    implementation: Implementation = None,
) -> Int[Array, "R"]:
    """Min-p, top-k and top-p sampling: in each row the index of the largest `logits / temperature + noise` that the filters keep.

    Filters apply in this order. With Gumbel noise the result is a sample from the filtered distribution (the Gumbel-max trick).
    Ties with the last kept logit are kept; of equal sums the first is taken.

    Args:
      logits: masked ones are -inf; no NaN, one finite in each row. Rows behind those that have keys are not read.
      keys: of each row the key of its noise, which is `noise_of_all`.
      temperature: 0 takes the largest logit, without filters and noise.
      min_p: least probability relative to the largest; 0 for all.
      top_k: 0 for all.
      top_p: 1 or more for all; the most probable token is kept in any case.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Raises:
      ValueError: shapes do not agree, or an array is of another kind than said.
      NoImplementationError: nothing named takes these arguments.
    """
    limits = {"min_p": min_p, "top_k": top_k, "top_p": top_p}
    return _call("filtered_choice", implementation, logits, keys, temperature=temperature, **limits)


def drawn_choice(
    logits: Float[Array, "M V"],
    keys: UInt32[Array, "R 2"],
    temperature: Float[Array, "R"],
    *,
    implementation: Implementation = None,
) -> Int[Array, "R"]:
    """`filtered_choice` without filters: a sample of each row's softmax. Arguments and errors: see there."""
    return _call("drawn_choice", implementation, logits, keys, temperature)


def drawn_candidates(
    logits: Float[Array, "M V"],
    keys: UInt32[Array, "R 2"],
    temperature: Float[Array, "R"],
    *,
    implementation: Implementation = None,
) -> Int[Array, "R C"]:
    """Shortlist of `drawn_choice` for logits that are not exact: the choice in each of eight groups of tokens, the row's among
    them.

    Which tokens form a group is the implementation's choice. Arguments and errors: see `filtered_choice`.
    """
    return _call("drawn_candidates", implementation, logits, keys, temperature)


def drawn_refusal(logits: Float[Array, "*R V"] | jax.ShapeDtypeStruct) -> str | None:
    """Why there is nothing that makes noise only where it is needed for logits like these, which may be a shape; None where there
    is."""
    try:
        require_hopper()
        mosaic_gpu.require_rows(logits)
    except NotImplementedError as reason:
        return str(reason)
    return None


def _call(op: str, implementation: Implementation, logits: Any, keys: Any, *rest: Any, **named: Any) -> Any:
    of_rows = {**named, **({"temperature": rest[0]} if rest else {})}
    check_axes(logits=(logits, "M V"), keys=(keys, "R 2"), **{name: (each, "R") for name, each in of_rows.items()})
    check_filled(logits=logits)
    whole = {"keys": keys, **({"top_k": of_rows.pop("top_k")} if "top_k" in of_rows else {})}
    check_floats(logits=logits, **of_rows)
    check_integers(**whole)
    sizes = [each.shape[0] for each in (*whole.values(), *of_rows.values())]
    if len(set(sizes)) > 1 or sizes[0] > logits.shape[0] or keys.shape[1] != 2:
        came = ", ".join(f"{name} {each.shape}" for name, each in {**whole, **of_rows}.items())
        raise ValueError(f"{came} do not fit logits {logits.shape}")
    with jax.named_scope(op):
        return first_fitting(op, IMPLEMENTATIONS[op], implementation, logits, keys, *rest, **named)
