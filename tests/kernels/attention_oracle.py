"""Paged attention written out with loops in float64, and the inputs its tests share."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

# What a table may hold past a sequence's last page.
GARBAGE_ENTRIES = (2_147_480_000, -1, -7, -2_147_483_648)


@dataclasses.dataclass
class Case:
    """Inputs of one call; `options` are the keyword arguments that shape the mask and the softmax."""

    q: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    page_table: np.ndarray
    seq_lens: np.ndarray
    q_lens: np.ndarray
    options: dict[str, Any]

    def arrays(self) -> tuple[jnp.ndarray, ...]:
        fields = (self.q, self.k_pages, self.v_pages, self.page_table, self.seq_lens, self.q_lens)
        return tuple(jnp.asarray(field) for field in fields)

    def key(self, page: int, head: int, at: int) -> np.ndarray:
        """One key in float64, dequantized."""
        scale = self.options.get("k_scale")
        factor = 1.0 if scale is None else scale[head] if scale.ndim == 1 else scale[page, head, at]
        return self.k_pages[page, head, at].astype(np.float64) * np.float64(factor)

    def value(self, page: int, head: int, at: int) -> np.ndarray:
        """One value in float64, dequantized."""
        scale = self.options.get("v_scale")
        return self.v_pages[page, head, at].astype(np.float64) * (
            1.0 if scale is None else scale[head].astype(np.float64)
        )

    def rows(self, order: Sequence[int]) -> "Case":
        """The same pools with only these sequences, in this order."""
        picked = {name: getattr(self, name)[list(order)] for name in ("q", "page_table", "seq_lens", "q_lens")}
        return dataclasses.replace(self, **picked)

    @property
    def scale(self) -> float:
        return self.options.get("scale", self.q.shape[-1] ** -0.5)


def make_case(
    seq_lens: Sequence[int],
    q_lens: Sequence[int] | None = None,
    *,
    t: int,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 64,
    value_dim: int | None = None,
    page_size: int = 16,
    dtype: Any = np.float32,
    seed: int = 0,
    garbage: float = np.nan,
    width: int | None = None,
    shuffled: bool = True,
    stored: Any = None,
    **options: Any,
) -> Case:
    """Random inputs. Every slot, page, query row and table entry that must not matter holds `garbage`.

    Tokens of the sequences are the same for every `page_size`, `width`, `garbage` and `shuffled`: pages of different sequences
    interleave and a sequence's pages are in no order, unless `shuffled` is False. `stored` is the dtype of the pages where it is
    not that of the queries: float8, with a scale for each KV head, or int8, with scales of each token and of each channel.
    """
    rng = np.random.default_rng(seed)
    b, longest = len(seq_lens), max(*seq_lens, 1)
    q_lens = [t] * b if q_lens is None else list(q_lens)
    q = rng.standard_normal((b, t, kv_heads * group, head_dim)).astype(dtype)
    value_dim = head_dim if value_dim is None else value_dim
    widest = max(head_dim, value_dim)
    tokens = rng.standard_normal((2, b, longest, kv_heads, widest)).astype(dtype)
    k_scale = v_scale = None
    if stored is not None:
        tokens, k_scale, v_scale = quantized(tokens, stored, rng)
    for row in range(b):
        q[row, q_lens[row] :] = garbage

    needed = [-(-length // page_size) for length in seq_lens]
    pages = sum(needed) + 3
    order = rng.permutation(pages) if shuffled else np.arange(pages)
    width = max(*needed, 1) + 1 if width is None else width
    table = np.array([[GARBAGE_ENTRIES[(row + column) % 4] for column in range(width)] for row in range(b)], np.int32)
    pools = np.full((2, pages, kv_heads, page_size, widest), 113 if stored == np.int8 else garbage, tokens.dtype)
    paged_scale = np.full((pages, kv_heads, page_size), garbage, np.float32)
    for row, length in enumerate(seq_lens):
        own = order[sum(needed[:row]) :][: needed[row]]
        table[row, : needed[row]] = own
        for s in range(length):
            pools[:, own[s // page_size], :, s % page_size] = tokens[:, row, s]
            if k_scale is not None and stored == np.int8:
                paged_scale[own[s // page_size], :, s % page_size] = k_scale[row, s]
    if stored is not None:
        options |= {"k_scale": paged_scale if stored == np.int8 else k_scale, "v_scale": v_scale}
    lens = np.array(seq_lens, np.int32), np.array(q_lens, np.int32)
    k_pages, v_pages = pools[0][..., :head_dim], pools[1][..., :value_dim]
    if stored == np.int8:
        options["v_scale"] = options["v_scale"][:, :value_dim]
    return Case(q, k_pages, v_pages, table, *lens, options)


def with_wide_values(case: Case) -> Case:
    """A case in int8 with the values that its codes stand for, in the queries' dtype; NaN where keys' scales are."""
    wide = case.v_pages.astype(np.float32) * case.options["v_scale"][:, None]
    wide = np.where(np.isnan(case.options["k_scale"])[..., None], np.nan, wide).astype(case.q.dtype)
    options = {name: option for name, option in case.options.items() if name != "v_scale"}
    return dataclasses.replace(case, v_pages=wide, options=options)


def quantized(tokens: np.ndarray, stored: Any, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys and values `[2, B, S, K, H]` as they are stored, and the scales of both."""
    kv_heads = tokens.shape[3]
    if stored == np.int8:
        k_scale = np.abs(tokens[0]).max(axis=-1).astype(np.float32) / 127
        v_scale = np.abs(tokens[1]).max(axis=(0, 1)).astype(np.float32) / 127
        whole = np.stack([tokens[0] / k_scale[..., None], tokens[1] / v_scale])
        return np.round(whole.astype(np.float32)).astype(np.int8), k_scale, v_scale
    # Up to near the largest; e4m3's smallest have no exponent of their own.
    scales = rng.uniform(0.012, 0.03, (2, kv_heads)) * (448 / float(jnp.finfo(stored).max))
    scales = scales.astype(np.float32)
    return (tokens / scales[:, None, None, :, None]).astype(np.float32).astype(stored), *scales


def alibi(seen: Sequence[int], position: int, sqrt: bool) -> np.ndarray:
    """What each key's distance adds to its score, before the slope."""
    return np.array([-(max(position - s, 0) ** 0.5) if sqrt else s - position for s in seen], np.float64)


def oracle(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Output `[B, T, N, V]` and lse `[B, T, N]` in float64; reads nothing but what a query may see."""
    b, t, n = case.q.shape[:3]
    kv_heads, page_size = case.k_pages.shape[1:3]
    options = {"causal": True, "window": None, "soft_cap": None, "sinks": None, "alibi_slopes": None} | case.options
    left, right = options["window"] or (None, None)
    out, lse = np.zeros((b, t, n, case.v_pages.shape[3])), np.full((b, t, n), -np.inf)
    for row in range(b):
        for i in range(case.q_lens[row]):
            position = case.seq_lens[row] - case.q_lens[row] + i
            seen = [
                s
                for s in range(case.seq_lens[row])
                if not (options["causal"] and s > position)
                and not (left is not None and s < position - left)
                and not (right is not None and s > position + right)
            ]
            places = [(case.page_table[row, s // page_size], s % page_size) for s in seen]
            for head in range(n):
                kv = head // (n // kv_heads)
                query = case.q[row, i, head].astype(np.float64)
                scores = np.array([query @ case.key(page, kv, at) for page, at in places]) * case.scale
                if options["soft_cap"] is not None:
                    scores = options["soft_cap"] * np.tanh(scores / options["soft_cap"])
                if options["alibi_slopes"] is not None:
                    scores = scores + options["alibi_slopes"][head] * alibi(
                        seen, position, options.get("alibi_sqrt", False)
                    )
                everything = (
                    scores if options["sinks"] is None else np.append(scores, np.float64(options["sinks"][head]))
                )
                if len(everything) == 0:
                    continue
                top = everything.max()
                lse[row, i, head] = top + np.log(np.exp(everything - top).sum())
                for score, (page, at) in zip(scores, places, strict=True):
                    out[row, i, head] += np.exp(score - lse[row, i, head]) * case.value(page, kv, at)
    return out, lse
