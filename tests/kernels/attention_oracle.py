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
    page_size: int = 16,
    dtype: Any = np.float32,
    seed: int = 0,
    garbage: float = np.nan,
    width: int | None = None,
    shuffled: bool = True,
    **options: Any,
) -> Case:
    """Random inputs. Every slot, page, query row and table entry that must not matter holds `garbage`.

    Tokens of the sequences are the same for every `page_size`, `width`, `garbage` and `shuffled`: pages of different sequences
    interleave and a sequence's pages are in no order, unless `shuffled` is False.
    """
    rng = np.random.default_rng(seed)
    b, longest = len(seq_lens), max(*seq_lens, 1)
    q_lens = [t] * b if q_lens is None else list(q_lens)
    q = rng.standard_normal((b, t, kv_heads * group, head_dim)).astype(dtype)
    tokens = rng.standard_normal((2, b, longest, kv_heads, head_dim)).astype(dtype)
    for row in range(b):
        q[row, q_lens[row] :] = garbage

    needed = [-(-length // page_size) for length in seq_lens]
    pages = sum(needed) + 3
    order = rng.permutation(pages) if shuffled else np.arange(pages)
    width = max(*needed, 1) + 1 if width is None else width
    table = np.array([[GARBAGE_ENTRIES[(row + column) % 4] for column in range(width)] for row in range(b)], np.int32)
    pools = np.full((2, pages, kv_heads, page_size, head_dim), garbage, dtype)
    for row, length in enumerate(seq_lens):
        own = order[sum(needed[:row]) :][: needed[row]]
        table[row, : needed[row]] = own
        for s in range(length):
            pools[:, own[s // page_size], :, s % page_size] = tokens[:, row, s]
    lens = np.array(seq_lens, np.int32), np.array(q_lens, np.int32)
    return Case(q, pools[0], pools[1], table, *lens, options)


def oracle(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Output `[B, T, N, H]` and lse `[B, T, N]` in float64; reads nothing but what a query may see."""
    b, t, n, h = case.q.shape
    kv_heads, page_size = case.k_pages.shape[1:3]
    options = {"causal": True, "window": None, "soft_cap": None, "sinks": None} | case.options
    left, right = options["window"] or (None, None)
    out, lse = np.zeros((b, t, n, h)), np.full((b, t, n), -np.inf)
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
                scores = (
                    np.array([query @ case.k_pages[page, kv, at].astype(np.float64) for page, at in places])
                    * case.scale
                )
                if options["soft_cap"] is not None:
                    scores = options["soft_cap"] * np.tanh(scores / options["soft_cap"])
                everything = (
                    scores if options["sinks"] is None else np.append(scores, np.float64(options["sinks"][head]))
                )
                if len(everything) == 0:
                    continue
                top = everything.max()
                lse[row, i, head] = top + np.log(np.exp(everything - top).sum())
                for score, (page, at) in zip(scores, places, strict=True):
                    out[row, i, head] += np.exp(score - lse[row, i, head]) * case.v_pages[page, kv, at].astype(
                        np.float64
                    )
    return out, lse
