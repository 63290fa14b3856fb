"""QKV projection of a few rows with RoPE and the KV-cache write. Checks shapes, then dispatches."""

from collections.abc import Sequence
from typing import Any, NamedTuple, overload

import jax
from jaxtyping import Array, Float, Int

from dflash_kernels.core.dispatch import first_fitting
from dflash_kernels.core.validation import check_axes, check_floats, check_integers
from dflash_kernels.fused.few_qkv.mosaic_gpu import AddNorm, few_qkv_write_mosaic_gpu, refuse
from dflash_kernels.fused.few_qkv.reference import few_qkv_write_reference

IMPLEMENTATIONS = {"mosaic_gpu": few_qkv_write_mosaic_gpu, "xla": few_qkv_write_reference}


class FewQkvWritten(NamedTuple):
    """Result of `few_qkv_write`: queries `[M, N, H]`, and the pools."""

    q: Array
    k_pages: Array
    v_pages: Array


def few_qkv_write_refusal(
    rows: int, dtype: Any, depth: int, *, head_dim: int, turned: int, page_dtype: Any, norms: bool = False
) -> str | None:
    """Why `few_qkv_write` has no kernel for these sizes; None where it has.

    Args:
      depth: columns of the rows.
      turned: columns of a head that turn with the position.
      norms: whether rows are `added` to and normed.
    """
    try:
        refuse(rows, dtype, depth, head_dim=head_dim, turned=turned, page_dtype=page_dtype, norms=norms)
    except NotImplementedError as reason:
        return str(reason)
    return None


@overload
def few_qkv_write(*args: Any, added: None = None, **options: Any) -> FewQkvWritten: ...


@overload
def few_qkv_write(*args: Any, added: AddNorm, **options: Any) -> tuple[Array, FewQkvWritten]: ...


def few_qkv_write(
    k_pages: Float[Array, "P K p H"],
    v_pages: Float[Array, "P K p H"],
    x: Float[Array, "M D"],
    weight: Float[Array, "F D"],
    bias: Float[Array, "F"] | None,
    slots: Int[Array, "M"],
    cos: Float[Array, "M half"],
    sin: Float[Array, "M half"],
    *,
    added: AddNorm | None = None,
    implementation: str | Sequence[str] | None = None,
) -> FewQkvWritten | tuple[Array, FewQkvWritten]:
    """QKV projection of a few rows with RoPE and the KV-cache write: `few_linear`, then `qkv_write` without norms.

    Heads are rounded once, after the rotation.

    Args:
      k_pages, v_pages, slots, cos, sin: as of `qkv_write`; `half` is half of H.
      x, weight, bias: as of `few_linear`, F = (N + 2 K) H.
      added: x is the residual stream, of one row: these parts are added to it and the sum normed before, as by `add_norm`.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Returns:
      What is written; with `added` the stream `[1, D]` after it as well, before that.

    Raises:
      ValueError: shapes do not agree.
      NoImplementationError: nothing named takes these arguments.
    """
    check_axes(k_pages=(k_pages, "P K p H"), v_pages=(v_pages, "P K p H"), x=(x, "M D"), weight=(weight, "F D"))
    check_axes(slots=(slots, "M"), cos=(cos, "M half"), sin=(sin, "M half"))
    check_floats(k_pages=k_pages, v_pages=v_pages, x=x, weight=weight, cos=cos, sin=sin)
    check_integers(slots=slots)
    (_, kv_heads, _, head_dim), (features, depth) = k_pages.shape, weight.shape
    if v_pages.shape != k_pages.shape or x.shape[1] != depth:
        raise ValueError(
            f"pools {k_pages.shape} and {v_pages.shape}, x {x.shape} and weight {weight.shape} do not belong together"
        )
    if features % head_dim or features <= 2 * kv_heads * head_dim:
        raise ValueError(
            f"weight {weight.shape} must be [(N + 2 * {kv_heads}) * {head_dim}, D] with a query head or more"
        )
    if slots.shape != x.shape[:1] or {cos.shape, sin.shape} != {(x.shape[0], head_dim // 2)}:
        raise ValueError(
            f"slots {slots.shape}, cos {cos.shape} and sin {sin.shape} must be of {x.shape[0]} rows and half of {head_dim} dims"
        )
    if bias is not None:
        check_axes(bias=(bias, "F"))
        check_floats(bias=bias)
        if bias.shape != (features,):
            raise ValueError(f"bias {bias.shape} does not fit a weight {weight.shape}")
    if added is not None and (added.parts.shape[1:] != x.shape or added.weight.shape != x.shape[1:]):
        raise ValueError(
            f"parts {added.parts.shape} and a norm's weight {added.weight.shape} do not fit a stream {x.shape}"
        )
    with jax.named_scope("few_qkv_write"):
        written = first_fitting(
            "few_qkv_write", IMPLEMENTATIONS, implementation, k_pages, v_pages, x, weight, bias, slots, cos, sin, added=added,
        )  # fmt: skip
    return FewQkvWritten(*written) if added is None else (written[3], FewQkvWritten(*written[:3]))
