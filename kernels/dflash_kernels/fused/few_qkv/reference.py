"""The definition: one operation after the other."""

from jaxtyping import Array, Float, Int

from dflash_kernels.kv_cache.write.reference import qkv_write_reference
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
) -> tuple[Array, Array, Array]:
    """See `few_qkv_write`."""
    # Rounded after the rotation, as the kernel does.
    qkv = few_linear_reference(x, weight, bias, parts=True)[0]
    q, k_pages, v_pages, _ = qkv_write_reference(
        k_pages, v_pages, qkv, slots, cos, sin, None, None, None, None, eps=0.0
    )
    return q.astype(x.dtype), k_pages, v_pages
