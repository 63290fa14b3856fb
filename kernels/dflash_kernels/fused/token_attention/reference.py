"""The definition: one operation after the other."""

from typing import Any

from jaxtyping import Array, Float, Int

from dflash_kernels.attention.paged.reference import paged_attention_reference
from dflash_kernels.fused.few_qkv.reference import few_qkv_write_reference
from dflash_kernels.matmul.few.reference import few_linear_reference


def token_attention_reference(
    k_pages: Float[Array, "P K p H"],
    v_pages: Float[Array, "P K p H"],
    x: Float[Array, "1 D"],
    qkv: Any,
    output: Any,
    page_table: Int[Array, "1 W"],
    seq_lens: Int[Array, "1"],
    q_lens: Int[Array, "1"],
    slots: Int[Array, "1"],
    cos: Float[Array, "1 half"],
    sin: Float[Array, "1 half"],
    added: Any,
    sinks: Float[Array, "N"] | None,
    exchange: Any,
    *,
    window: tuple[int | None, int | None],
    scale: float,
) -> tuple[Array, ...]:
    """See `token_attention`."""
    del exchange
    q, k_pages, v_pages, stream = few_qkv_write_reference(
        k_pages, v_pages, x, qkv[0], qkv[1], slots, cos, sin, added=added
    )  # fmt: skip
    out, _ = paged_attention_reference(
        q[None],
        k_pages,
        v_pages,
        page_table,
        seq_lens,
        q_lens,
        causal=True,
        window=window,
        soft_cap=None,
        sinks=sinks,
        scale=scale,
    )
    return few_linear_reference(out.reshape(1, -1), *output, parts=True), stream, k_pages, v_pages
