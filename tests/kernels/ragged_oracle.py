"""Ragged attention written out with loops in float64, and the inputs its tests share."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .attention_oracle import GARBAGE_ENTRIES


@dataclasses.dataclass
class Case:
    """Inputs of one call, keys both packed and in pages; `options` are the keyword arguments that shape mask and softmax."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    cu_q_lens: np.ndarray
    cu_kv_lens: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    page_table: np.ndarray
    options: dict[str, Any]

    def dense(self) -> tuple[jnp.ndarray, ...]:
        return tuple(jnp.asarray(x) for x in (self.q, self.k, self.v, self.cu_q_lens, self.cu_kv_lens))

    def paged(self) -> tuple[jnp.ndarray, ...]:
        lens = np.diff(self.cu_kv_lens).astype(np.int32)
        return tuple(
            jnp.asarray(x) for x in (self.q, self.k_pages, self.v_pages, self.cu_q_lens, self.page_table, lens)
        )

    @property
    def scale(self) -> float:
        return self.options.get("scale", self.q.shape[-1] ** -0.5)


def make_case(
    q_lens: Sequence[int],
    kv_lens: Sequence[int] | None = None,
    *,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 64,
    value_dim: int | None = None,
    page_size: int = 16,
    dtype: Any = np.float32,
    padding: tuple[int, int] = (3, 5),
    garbage: float = np.nan,
    seed: int = 0,
    **options: Any,
) -> Case:
    """Random inputs. Padding rows after the packed ones, unused page rows and table entries hold `garbage`.

    The first packed rows do not depend on `padding`, `page_size` or `garbage`.
    """
    rng = np.random.default_rng(seed)
    kv_lens = q_lens if kv_lens is None else kv_lens
    value_dim = head_dim if value_dim is None else value_dim
    cu_q, cu_kv = (np.cumsum([0, *lens]).astype(np.int32) for lens in (q_lens, kv_lens))

    def packed(rows: int, heads: int, dim: int, extra: int) -> np.ndarray:
        array = np.full((rows + extra, heads, dim), garbage, dtype)
        array[:rows] = rng.standard_normal((rows, heads, dim)).astype(dtype)
        return array

    q = packed(cu_q[-1], kv_heads * group, head_dim, padding[0])
    k, v = packed(cu_kv[-1], kv_heads, head_dim, padding[1]), packed(cu_kv[-1], kv_heads, value_dim, padding[1])

    needed = [-(-length // page_size) for length in kv_lens]
    pages = sum(needed) + 2
    order = rng.permutation(pages)
    width = max(*needed, 1) + 1
    table = np.array([[GARBAGE_ENTRIES[(b + w) % 4] for w in range(width)] for b in range(len(kv_lens))], np.int32)
    pools = [np.full((pages, kv_heads, page_size, x.shape[-1]), garbage, dtype) for x in (k, v)]
    for b, length in enumerate(kv_lens):
        own = order[sum(needed[:b]) :][: needed[b]]
        table[b, : needed[b]] = own
        for s in range(length):
            for pool, array in zip(pools, (k, v), strict=True):
                pool[own[s // page_size], :, s % page_size] = array[cu_kv[b] + s]
    return Case(q, k, v, cu_q, cu_kv, *pools, table, options)


def in_eight_bits(case: Case, stored: Any) -> Case:
    """The case with its pages in int8 or float8, their scales as options, and packed keys and values as those stand for.

    Unused rows are NaN where the dtype has one, else their scales are.
    """
    held, options, packed = [], {}, []
    for name, pool, array in (("k", case.k_pages, case.k), ("v", case.v_pages, case.v)):
        wide = pool.astype(np.float32)
        seen = np.where(np.isfinite(wide), np.abs(wide), 0)
        if stored != np.int8:
            scale = seen.max(axis=(0, 2, 3)) / (float(jnp.finfo(stored).max) * 0.67)
            factor = scale[:, None, None]
        elif name == "k":
            scale = np.where(np.isfinite(wide).all(axis=3), np.maximum(seen.max(axis=3), 1e-9) / 127, np.nan)
            factor = scale[..., None]
        else:
            scale = np.maximum(seen.max(axis=(0, 2)), 1e-9) / 127
            factor = scale[:, None]
        quotient = wide / factor
        narrow = np.where(np.isfinite(quotient), np.round(quotient), 77) if stored == np.int8 else quotient
        held.append(narrow.astype(stored))
        options[f"{name}_scale"] = scale.astype(np.float32)
        true, filled = held[-1].astype(np.float64) * factor.astype(np.float32), array.astype(np.float64)
        for b, start in enumerate(case.cu_kv_lens[:-1]):
            for s in range(case.cu_kv_lens[b + 1] - start):
                page, row = divmod(s, pool.shape[2])
                filled[start + s] = true[case.page_table[b, page], :, row]
        packed.append(filled)
    return dataclasses.replace(
        case, k=packed[0], v=packed[1], k_pages=held[0], v_pages=held[1], options=case.options | options
    )


def oracle(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Output `[T, N, V]` and lse `[T, N]` in float64; reads nothing but what a query may see."""
    (t, n, _), kv_heads = case.q.shape, case.k.shape[1]
    options = {
        "causal": True,
        "window": None,
        "soft_cap": None,
        "sinks": None,
        "alibi_slopes": None,
        "alibi_sqrt": False,
    }
    options |= case.options
    left, right = options["window"] or (None, None)
    out, lse = np.zeros((t, n, case.v.shape[2])), np.full((t, n), -np.inf)
    for b in range(len(case.cu_q_lens) - 1):
        keys, queries = np.diff(case.cu_kv_lens)[b], np.diff(case.cu_q_lens)[b]
        k, v = (x[case.cu_kv_lens[b] :][:keys].astype(np.float64) for x in (case.k, case.v))
        for i in range(queries):
            row, position = case.cu_q_lens[b] + i, keys - queries + i
            ahead = np.arange(keys) - position
            seen = np.ones(keys, bool)
            if options["causal"]:
                seen &= ahead <= 0
            if left is not None:
                seen &= ahead >= -left
            if right is not None:
                seen &= ahead <= right
            for head in range(n):
                kv = head // (n // kv_heads)
                scores = k[seen, kv] @ case.q[row, head].astype(np.float64) * case.scale
                if options["soft_cap"] is not None:
                    scores = options["soft_cap"] * np.tanh(scores / options["soft_cap"])
                if options["alibi_slopes"] is not None:
                    distance = ahead[seen].astype(np.float64)
                    bias = -np.sqrt(np.maximum(-distance, 0)) if options["alibi_sqrt"] else distance
                    scores = scores + float(options["alibi_slopes"][head]) * bias
                everything = scores if options["sinks"] is None else np.append(scores, float(options["sinks"][head]))
                if len(everything) == 0:
                    continue
                lse[row, head] = everything.max() + np.log(np.exp(everything - everything.max()).sum())
                out[row, head] = np.exp(scores - lse[row, head]) @ v[seen, kv]
    return out, lse
