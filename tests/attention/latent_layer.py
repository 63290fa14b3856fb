"""A latent attention layer of plain arrays, and pages filled from whole sequences, for tests of attention alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

GARBAGE_ENTRIES = (2_147_480_000, -1, -7, -2_147_483_648)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """Weights `w_uk [N,P,R]`, `w_uv [N,V,R]`; a pytree, so that calls of one shape share a program."""

    w_uk: jax.Array
    w_uv: jax.Array
    scale: float = dataclasses.field(metadata={"static": True})
    index: int = dataclasses.field(default=0, metadata={"static": True})
    causal: bool = dataclasses.field(default=True, metadata={"static": True})

    def absorb(self, q_nope, q_pe):
        return jnp.concatenate([jnp.einsum("btnp,npr->btnr", q_nope, self.w_uk), q_pe], axis=-1)

    def up(self, o_latent):
        return jnp.einsum("btnr,nvr->btnv", o_latent, self.w_uv)

    def expand(self, kv_c):
        return jnp.einsum("...r,npr->...np", kv_c, self.w_uk), jnp.einsum("...r,nvr->...nv", kv_c, self.w_uv)


@dataclasses.dataclass
class Batch:
    """Sequences of latents, queries for all their positions, and the same sequences in pages.

    Attributes:
      q_nope, q_pe, latents: `[B, S, ...]` for every position, float64 by default.
      pages, page_table: as a cache holds them before the new tokens came; everything unused is `garbage`.
      context_lens, q_lens: the last `q_lens` tokens of each sequence are new.
    """

    layer: Layer
    q_nope: np.ndarray
    q_pe: np.ndarray
    latents: np.ndarray
    pages: np.ndarray
    page_table: np.ndarray
    context_lens: np.ndarray
    q_lens: np.ndarray

    @property
    def rotated(self) -> int:
        return self.q_pe.shape[-1]

    def new(self, array: np.ndarray, t: int, garbage: float = np.nan) -> np.ndarray:
        """The new tokens' rows of `array`, padded to `t` with garbage."""
        out = np.full((len(self.q_lens), t, *array.shape[2:]), garbage, array.dtype)
        for row, (start, count) in enumerate(zip(self.context_lens, self.q_lens, strict=True)):
            out[row, :count] = array[row, start : start + count]
        return out

    def written(self) -> np.ndarray:
        """The pages once the new tokens' rows are in them."""
        pages = self.pages.copy()
        page_size = pages.shape[2]
        for row, (start, count) in enumerate(zip(self.context_lens, self.q_lens, strict=True)):
            for s in range(start, start + count):
                pages[self.page_table[row, s // page_size], 0, s % page_size] = self.latents[row, s]
        return pages

    @property
    def seq_lens(self) -> np.ndarray:
        return self.context_lens * (self.q_lens > 0) + self.q_lens

    def oracle(self, t: int) -> np.ndarray:
        """`[B, t, N, V]` in float64 by loops over requests: expanded, one pass, zeros past `q_lens`."""
        w_uk, w_uv = (np.asarray(w, np.float64) for w in (self.layer.w_uk, self.layer.w_uv))
        out = np.zeros((len(self.q_lens), t, *w_uv.shape[:2]))
        rank = w_uk.shape[-1]
        for row, (start, count) in enumerate(zip(self.context_lens, self.q_lens, strict=True)):
            rows = self.latents[row, : start + count].astype(np.float64)
            k, v = np.einsum("sr,npr->snp", rows[:, :rank], w_uk), np.einsum("sr,nvr->snv", rows[:, :rank], w_uv)
            for i in range(count):
                seen = start + i + 1 if self.layer.causal else start + count
                scores = np.einsum("np,snp->ns", self.q_nope[row, start + i].astype(np.float64), k[:seen])
                scores += np.einsum("nr,sr->ns", self.q_pe[row, start + i].astype(np.float64), rows[:seen, rank:])
                weights = np.exp((scores - scores.max(1, keepdims=True)) * self.layer.scale)
                out[row, i] = np.einsum("ns,snv->nv", weights / weights.sum(1, keepdims=True), v[:seen])
        return out

    def rows(self, order) -> "Batch":
        """The same pool with only these sequences, in this order."""
        names = ("q_nope", "q_pe", "latents", "page_table", "context_lens", "q_lens")
        return dataclasses.replace(self, **{name: getattr(self, name)[list(order)] for name in names})


def make_batch(
    context_lens, q_lens, *, heads=3, nope=10, rotated=6, value=7, rank=12, page_size=4, dtype=np.float32, seed=0,
    garbage=np.nan, causal=True, width=None,
) -> Batch:  # fmt: skip
    """Random weights, queries and latents; pages of different sequences interleave."""
    rng = np.random.default_rng(seed)
    lengths = np.add(context_lens, q_lens)
    b, longest = len(lengths), max(*lengths, 1)
    w_uk = rng.standard_normal((heads, nope, rank)) * rank**-0.5
    w_uv = rng.standard_normal((heads, value, rank)) * rank**-0.5
    layer = Layer(jnp.asarray(w_uk, dtype), jnp.asarray(w_uv, dtype), (nope + rotated) ** -0.5, causal=causal)
    q_nope, q_pe = (rng.standard_normal((b, longest, heads, dim)).astype(dtype) for dim in (nope, rotated))
    latents = rng.standard_normal((b, longest, rank + rotated)).astype(dtype)

    needed = [-(-length // page_size) for length in lengths]
    order = rng.permutation(sum(needed) + 3)
    width = max(*needed, 1) + 1 if width is None else width
    table = np.array([[GARBAGE_ENTRIES[(row + column) % 4] for column in range(width)] for row in range(b)], np.int32)
    pages = np.full((len(order), 1, page_size, rank + rotated), garbage, dtype)
    for row in range(b):
        own = order[sum(needed[:row]) :][: needed[row]]
        table[row, : needed[row]] = own
        for s in range(context_lens[row]):
            pages[own[s // page_size], 0, s % page_size] = latents[row, s]
    lens = (np.array(lens, np.int32) for lens in (context_lens, q_lens))
    return Batch(layer, q_nope, q_pe, latents, pages, table, *lens)
