"""Decode context parallelism: every sequence's pages spread over several ranks, which attend to what they hold, for all heads.

With D ranks and an interleave of I, the token at position s lies on rank `s // I % D`, there at `s // (I D) I + s % I`. I divides
a rank's page of p tokens, which it mostly is: pages with one number on all ranks are together a page of D p tokens to everybody
else. What ranks find is joined through its lse.
"""

from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from dflash_kernels import latent_decode, mla_attention
from jaxtyping import Array, Bool, Float, Int, Shaped

from dflash_jax.attention.mla import LatentLayer
from dflash_jax.cache.pages import slots_of
from dflash_jax.parallel.collectives import own_rank, ranks_here
from dflash_jax.parallel.ranks import AXIS


def local_lens(
    lens: Int[Array, "..."] | Int[np.ndarray, "..."], rank: int | Array, *, ranks: int, interleave: int
) -> Int[Array, "..."]:
    """The number of the first `lens` tokens that lie on `rank`."""
    turn = ranks * interleave
    rest = lens % turn
    return jnp.asarray(lens // turn * interleave + jnp.clip(rest - rank * interleave, 0, interleave))


def visible_on_rank(
    seq_lens: Int[Array, "B"], q_lens: Int[Array, "B"], t: int, rank: int | Array, *, ranks: int, interleave: int
) -> Int[Array, "B t"]:
    """The number of a rank's tokens that each of t query rows may see, the last `q_lens` of `seq_lens` tokens being the queries.

    A causal query at global position s sees the rank's share of s + 1 tokens: with several queries this is no longer the local
    length less a constant, which is why the rank's mask is made from global positions. Rows past `q_lens` see nothing.
    """
    rows = jnp.arange(t)
    seen = jnp.maximum((seq_lens - q_lens)[:, None] + rows + 1, 0)
    return jnp.where(rows < q_lens[:, None], local_lens(seen, rank, ranks=ranks, interleave=interleave), 0)


def most_queries(ranks: int, interleave: int) -> int:
    """Tokens that touch no more than one run of a rank's tokens, wherever they begin: for so many `limits_on_rank` holds."""
    return (ranks - 1) * interleave + 1


def limits_on_rank(
    seq_lens: Int[Array, "B"], q_lens: Int[Array, "B"], rank: int | Array, *, ranks: int, interleave: int
) -> tuple[Int[Array, "B"], tuple[Int[Array, "B"], Int[Array, "B"]]]:
    """`visible_on_rank` of at most `most_queries` as `mla_attention` takes it: where the queries stand among the rank's tokens,
    and the fewest and the most of them that they see.

    The queries' own tokens that lie on the rank are one run. It begins at the rank's first place from the queries' first position
    on; so many places before it as positions, the first query stands.
    """
    spread = {"ranks": ranks, "interleave": interleave}
    before = seq_lens - q_lens
    fewest, most = (local_lens(lens, rank, **spread) for lens in (before, seq_lens))
    begins = fewest // interleave * interleave * ranks + rank * interleave + fewest % interleave
    return fewest + seq_lens - begins, (fewest, most)


def combine_ranks(
    outs: Float[Array, "D *rows H"], lses: Float[Array, "D *rows"]
) -> tuple[Float[Array, "*rows H"], Float[Array, "*rows"]]:
    """Attention over all ranks' keys from each rank's normalised output and natural-log lse.

    A rank without a visible key has lse -inf, +inf or NaN and may hold anything; rows without one on any rank give 0 and -inf.
    """
    wide = jnp.promote_types(outs.dtype, jnp.float32)
    lses = jnp.where(jnp.isnan(lses) | (lses == jnp.inf), -jnp.inf, lses.astype(wide))
    top = jnp.max(lses, axis=0)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.exp(lses - top)
    total = jnp.sum(weights, axis=0)
    share = (weights / jnp.where(total > 0, total, 1.0))[..., None]
    # Chosen, not multiplied: 0 * NaN is NaN.
    out = jnp.sum(jnp.where(share > 0, outs.astype(wide) * share, 0.0), axis=0)
    return out.astype(outs.dtype), top + jnp.log(total)


def slots_on_rank(
    page_table: Int[Array, "B W"],
    positions: Int[Array, "B T"],
    live: Bool[Array, "B T"],
    page_size: int,
    ranks: int,
    interleave: int,
) -> Int[Array, "B T"]:
    """`slots_of` for this rank, whose pages have `page_size` of the tokens; -1 also where a token lies on another."""
    whole = slots_of(page_table, positions, live, ranks * page_size)
    page, place = whole // (ranks * page_size), whole % (ranks * page_size)
    owner, place = place // interleave % ranks, place // (interleave * ranks) * interleave + place % interleave
    return jnp.where((whole >= 0) & (owner == own_rank() % ranks), page * page_size + place, -1)


def absorbed_over_ranks(
    layer: LatentLayer,
    q_nope: Float[Array, "B T n P"],
    q_pe: Float[Array, "B T n r"],
    latent_pages: Shaped[Array, "pages 1 p stored"],
    page_table: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    q_lens: Int[Array, "B"],
    ranks: int,
    interleave: int,
    *,
    latent_scale: Float[Array, ""] | None = None,
) -> Float[Array, "B T n V"]:
    """`absorbed_attention` of a rank's n heads over all ranks' rows.

    Every rank has the queries of all heads attend to its own rows; then it gives each rank what that one's heads found, and has the
    same for its own from all. Two collectives: of queries, and of what they found with their lse.

    Args:
      q_nope, q_pe: of at most `most_queries(ranks, interleave)` tokens.
      latent_pages: in any format of `dflash_kernels.kv_cache.latent`. Rows in eight bits are unpacked into pages of their own
        first, all that the table names: no kernel takes them with limits.
      seq_lens, q_lens: of whole sequences.
      latent_scale: of float8 pages.
    """
    rank = layer.w_uv.shape[-1]
    q = jax.lax.all_gather(layer.absorb(q_nope, q_pe), AXIS, axis=2, tiled=True)
    if latent_pages.dtype != q.dtype:
        named = latent_pages[jnp.clip(page_table, 0, latent_pages.shape[0] - 1)].reshape(-1, *latent_pages.shape[1:])
        latent_pages = latent_decode(named, q.dtype, kv_lora_rank=rank, scale=latent_scale)
        page_table = jnp.arange(page_table.size, dtype=jnp.int32).reshape(page_table.shape)
    stand, limits = limits_on_rank(seq_lens, q_lens, own_rank(), ranks=ranks, interleave=interleave)
    found = mla_attention(
        q,
        latent_pages,
        page_table,
        stand,
        q_lens=q_lens,
        limits=limits,
        kv_lora_rank=rank,
        scale=layer.scale,
        return_lse=True,
    )
    return layer.up(combine_ranks(*given_back(*cast(tuple[Array, Array], found), ranks))[0])


def neighbours(ranks: int) -> list[list[int]] | None:
    """Groups of ranks that exchange, if so many neighbours share the same pages; None if all ranks do."""
    everyone = np.arange(ranks_here())
    return None if ranks == everyone.size else everyone.reshape(-1, ranks).tolist()


def given_back(
    out: Float[Array, "B T N V"], lse: Float[Array, "B T N"], ranks: int
) -> tuple[Float[Array, "D B T n V"], Float[Array, "D B T n"]]:
    """Results of each of `ranks` neighbours for this rank's n heads, from the results of all for the heads of all, N = D n."""
    (b, t, heads), width = lse.shape, out.shape[-1]
    # The lse of an output in sixteen bits are two numbers of its kind, so that one message has both.
    bits = jax.lax.bitcast_convert_type(lse.astype(jnp.float32), out.dtype).reshape(*lse.shape, -1)
    both = jnp.concatenate([out, bits], axis=-1).reshape(b, t, ranks, heads // ranks, -1)
    both = jax.lax.all_to_all(both, AXIS, split_axis=2, concat_axis=0, axis_index_groups=neighbours(ranks))
    outs, bits = both[..., :width], both[..., width:]
    bits = bits if out.dtype.itemsize < 4 else bits[..., 0]
    return outs, jax.lax.bitcast_convert_type(bits, jnp.float32)


def gathered_pages(
    latent_pages: Shaped[Array, "pages 1 p C"], pages: Int[Array, "n"], ranks: int, interleave: int
) -> Shaped[Array, "m 1 p C"]:
    """Pages in the order of their tokens: of each of `pages` every rank's."""
    everyones = jax.lax.all_gather(latent_pages[pages], AXIS, axis=1)
    if interleave < latent_pages.shape[2]:
        runs = everyones.reshape(pages.shape[0], ranks, -1, interleave, latent_pages.shape[3])
        everyones = jnp.swapaxes(runs, 1, 2)
    return everyones.reshape(ranks * pages.shape[0], *latent_pages.shape[1:])
