"""The definition: one operation after the other."""

from typing import Any

from jaxtyping import Array, Float, Int

from dflash_kernels.kv_cache.write.reference import qkv_write_reference
from dflash_kernels.matmul.dense.reference import add_norm_reference
from dflash_kernels.matmul.few.reference import few_linear_reference


def few_qkv_write_reference(
    k_pages: Float[Array, "P K p H"],
    v_pages: Float[Array, "P K p H"],
    x: Float[Array, "M D"],
    weight: Float[Array, "F D"],
    bias: Float[Array, "F"] | None,
    slots: Int[Array, "M"],
    cos: Float[Array, "M half"],
    sin: Float[Array, "M half"],
    *,
    added: Any = None,
) -> tuple[Array, ...]:
    """See `few_qkv_write`."""
    stream = ()
    if added is not None:
        parts, scale, eps, zero_centered, rounds_last = added
        how = {"eps": eps, "zero_centered": zero_centered, "rounds_last": rounds_last}
        after, x = add_norm_reference(parts, x, scale, **how)
        stream = (after,)
    # Rounded after the rotation, as the kernel does.
    qkv = few_linear_reference(x, weight, bias, parts=True)[0]
    q, k_pages, v_pages, _ = qkv_write_reference(
        k_pages, v_pages, qkv, slots, cos, sin, None, None, None, None, eps=0.0
    )
    return q.astype(x.dtype), k_pages, v_pages, *stream
