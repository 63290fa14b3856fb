"""QKV projection of a few rows with RoPE and the KV-cache write on Hopper: what the kernel takes, and its launch."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dflash_kernels.core.device import MATRIX_ROWS, require_hopper
from dflash_kernels.matmul.few_tiling import Plan, RowNorm, plan


def few_qkv_write_mosaic_gpu(*args: Any, **options: Any) -> tuple[Array, ...]:
    """See `few_qkv_write`. Raises NotImplementedError for what it does not take."""
    require_hopper()
    return launch(*args, **options)


def refuse(
    rows: int, dtype: Any, depth: int, *, head_dim: int, turned: int, page_dtype: Any, norms: bool = False
) -> None:
    """Raises NotImplementedError, with the reason, where `few_qkv_write_mosaic_gpu` would."""
    require_hopper()
    norm = RowNorm(0.0) if norms else None
    _planned(rows, dtype, head_dim, depth, head_dim=head_dim, turned=turned, page_dtype=page_dtype, norm=norm)


class AddNorm(NamedTuple):
    """Residual sum and norm before `few_qkv_write`, as its `add_norm`: `parts [S, 1, D]` float32, `weight [D]`."""

    parts: Array
    weight: Array
    eps: float
    zero_centered: bool = False
    rounds_last: bool = False


def _planned(
    rows: int, dtype: Any, features: int, depth: int, *, head_dim: int, turned: int, page_dtype: Any,
    norm: RowNorm | None = None,
) -> Plan:  # fmt: skip
    if head_dim != MATRIX_ROWS or turned != head_dim:
        raise NotImplementedError(f"turns whole heads of {MATRIX_ROWS}, not {turned} columns of {head_dim}")
    if page_dtype != dtype:
        raise NotImplementedError(f"takes pages in x's dtype, not {jnp.dtype(page_dtype)}")
    return plan(rows, dtype, features, depth, parts=False, room=4 * MATRIX_ROWS * (rows + -rows % 8), norm=norm)


def launch(
    k_pages: Array, v_pages: Array, x: Array, weight: Array, bias: Array | None, slots: Array, cos: Array, sin: Array, *,
    added: AddNorm | None = None, interpret: Any = None,
) -> tuple[Array, ...]:  # fmt: skip
    """The implementation without the device check: for tests on the CPU (`interpret`)."""
    scale = None if added is None else added.weight
    if any(one is not None and one.dtype != x.dtype for one in (weight, bias, v_pages, scale)):
        raise NotImplementedError(f"takes weights and pages in x's dtype, not {weight.dtype} and {v_pages.dtype}")
    sizes: Any = {"head_dim": k_pages.shape[3], "turned": 2 * cos.shape[1], "page_dtype": k_pages.dtype}
    norm = None if added is None else RowNorm(*added[2:])
    schedule = _planned(x.shape[0], x.dtype, *weight.shape, **sizes, norm=norm)
    given = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    given |= {"slots": slots.astype(jnp.int32), "cos": cos.astype(jnp.float32), "sin": sin.astype(jnp.float32)}
    given |= {} if added is None else {"added": added.parts, "norm": added.weight}
    return _run(schedule, given, k_pages, v_pages, interpret)


# Compiled as a function of its own, so that the layers of a model share one trace and one lowering of the kernel.
@functools.partial(jax.jit, static_argnums=(0, 4))
def _run(schedule: Plan, given: dict[str, Array], k_pages: Array, v_pages: Array, interpret: Any) -> tuple[Array, ...]:
    # Not at the top: other machines need neither Pallas nor the time its import takes.
    from dflash_kernels.fused.few_qkv.mosaic_gpu_sm90 import few_qkv_write

    return few_qkv_write(schedule, given, k_pages, v_pages, interpret)
