"""Arguments of attention from a QKV projection on, as `qkv_attention` and `attention_chain` hand them to implementations."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from dflash_kernels.core.validation import FLOAT8, check_axes, check_floats, check_integers


class Heads(NamedTuple):
    """KV pools, QKV projection, page table, lengths, RoPE angles and norms, if any, of attention; see `attention_chain`."""

    k_pages: Shaped[Array, "P K p H"]
    v_pages: Shaped[Array, "P K p H"]
    qkv: Float[Array, "M E"]
    page_table: Int[Array, "B W"]
    seq_lens: Int[Array, "B"]
    q_lens: Int[Array, "B"]
    cos: Float[Array, "M half"]
    sin: Float[Array, "M half"]
    q_norm: Float[Array, "H"] | None
    k_norm: Float[Array, "H"] | None
    k_scale: Float[Array, "K"] | None = None
    v_scale: Float[Array, "K"] | None = None

    def check(self) -> None:
        """Raises ValueError where shapes do not agree."""
        of_sequences = {name: (getattr(self, name), "B") for name in ("seq_lens", "q_lens")}
        check_axes(qkv=(self.qkv, "M E"), page_table=(self.page_table, "B W"), **of_sequences)
        check_axes(cos=(self.cos, "M half"), sin=(self.sin, "M half"))
        check_floats(qkv=self.qkv, cos=self.cos, sin=self.sin, **self.norms)
        check_integers(page_table=self.page_table, seq_lens=self.seq_lens, q_lens=self.q_lens)
        k, v, qkv, b = self.k_pages, self.v_pages, self.qkv, self.page_table.shape[0]
        if k.ndim != 4 or k.shape != v.shape or k.dtype != v.dtype:
            raise ValueError(f"pools {k.dtype}{k.shape} and {v.dtype}{v.shape} must be alike and [P, K, p, H]")
        (rows, width), (_, kv_heads, _, head_dim) = qkv.shape, k.shape
        if width % (kv_heads * head_dim) or width <= 2 * kv_heads * head_dim:
            raise ValueError(
                f"qkv {qkv.shape} must be [M, (N + 2 * {kv_heads}) * {head_dim}], N a multiple of {kv_heads}"
            )
        if rows % b or self.seq_lens.shape != (b,) or self.q_lens.shape != (b,):
            raise ValueError(
                f"qkv {qkv.shape}, seq_lens {self.seq_lens.shape} and q_lens {self.q_lens.shape} do not fit {b} sequences of "
                "page_table"
            )
        cos, sin = self.cos.shape, self.sin.shape
        if cos != sin or cos[0] != rows or not 0 < 2 * cos[1] <= head_dim:
            raise ValueError(f"cos {cos} and sin {sin} must be [{rows}, half] with at most {head_dim} dims to turn")
        norms = [None if norm is None else norm.shape for norm in (self.q_norm, self.k_norm)]
        if norms not in ([(head_dim,)] * 2, [None] * 2):
            raise ValueError(
                f"q_norm {norms[0]} and k_norm {norms[1]} must be one weight for each of {head_dim} dims, or None both"
            )
        shapes = [None if scale is None else scale.shape for scale in (self.k_scale, self.v_scale)]
        if shapes != [(kv_heads,) if k.dtype in FLOAT8 else None] * 2:
            raise ValueError(f"pools of {k.dtype} and scales {shapes} do not go together: [{kv_heads}] each for float8")

    @property
    def norms(self) -> dict[str, Array]:
        """Weights of the norms by name, where there are norms."""
        given = {"q_norm": self.q_norm, "k_norm": self.k_norm}
        return {name: norm for name, norm in given.items() if norm is not None}

    def inputs(self) -> dict[str, Array]:
        """Kernel inputs by name, without the pools."""
        floats = {"cos": self.cos, "sin": self.sin}
        ints = {"table": self.page_table, "seq_lens": self.seq_lens, "q_lens": self.q_lens}
        scales = {"k_scale": self.k_scale, "v_scale": self.v_scale}
        floats |= {name: scale for name, scale in scales.items() if scale is not None}
        return {
            "qkv": self.qkv.reshape(self.qkv.shape[0], -1, self.k_pages.shape[3]),
            **self.norms,
            **{name: array.astype(jnp.float32) for name, array in floats.items()},
            **{name: array.astype(jnp.int32) for name, array in ints.items()},
        }
