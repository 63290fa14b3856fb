"""Exchanges between the GPUs of one process: memory for them, words of all put side by side, and sums of all."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_kernels.core.device import require_hopper
from dflash_kernels.core.dispatch import first_fitting
from dflash_kernels.core.rank_exchange import SUMMED, RankExchange
from dflash_kernels.core.validation import check_axes, check_floats
from dflash_kernels.ranks import mosaic_gpu, reference

GATHER = {"mosaic_gpu": mosaic_gpu.gather_ranks_mosaic_gpu, "xla": reference.gather_ranks_xla}
REDUCE = {"mosaic_gpu": mosaic_gpu.reduce_ranks_mosaic_gpu, "xla": reference.reduce_ranks_xla}
GATHERED = mosaic_gpu.GATHERED


def rank_exchange_refusal(ranks: int) -> str | None:
    """Why so many GPUs have no exchange of this kind, on the device that is traced for; None where they have."""
    try:
        require_hopper()
    except NotImplementedError as reason:
        return str(reason)
    if jax.process_count() > 1:
        return "GPUs of several processes do not reach one another's memory"
    if not 1 < ranks <= mosaic_gpu.MOST_RANKS:
        return f"takes 2 to {mosaic_gpu.MOST_RANKS} GPUs, not {ranks}"
    if jax.default_backend() == "gpu" and not mosaic_gpu.reach_one_another(ranks):
        return "not every GPU reaches the others' memory (`nvidia-smi topo -p2p w` shows which)"
    return None


def rank_exchange(places: int, words: int, *, axis: str) -> RankExchange:
    """Memory for exchanges of `places` at once, of so many words each. One collective of JAX's tells everyone where it lies.

    To be called before a loop, in the `shard_map` whose `axis` the GPUs are along, on all of them. Who hands it on to one launch
    after the other orders them; launches that wait for other GPUs must not run side by side.
    """
    return mosaic_gpu.connected(places, words, axis)


def row_exchange(rows: int, width: int, dtype: Any, *, axis: str) -> RankExchange:
    """Of `reduce_add_norm` for up to `rows` rows of this width."""
    return rank_exchange(rows, width * jnp.dtype(dtype).itemsize // 4, axis=axis)


def sum_exchange(count: int, dtype: Any, *, axis: str) -> RankExchange:
    """Of `reduce_ranks` for up to `count` numbers of this dtype, or as many bytes of another."""
    return rank_exchange(-(-count * jnp.dtype(dtype).itemsize // (4 * SUMMED)), SUMMED, axis=axis)


def gather_ranks(
    words: Int[Array, "M"],
    *,
    axis: str | None = None,
    exchange: RankExchange | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Int[Array, "n M"]:
    """Words of all devices along a mesh's axis, in their order. A few KB of them: whatever is larger is `jax.lax.all_gather`'s.

    Args:
      words: int32. -1 comes as the largest number: as float32 both are NaN.
      axis: of the `shard_map` that this is called in; None on one device.
      exchange: of `rank_exchange(places, GATHERED)`, with a place for each `GATHERED` words or part of them.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Raises:
      NoImplementationError: nothing named takes these arguments.
    """
    with jax.named_scope("gather_ranks"):
        return first_fitting("gather_ranks", GATHER, implementation, words, axis=axis, exchange=exchange)


def reduce_ranks(
    x: Float[Array, "M D"],
    *,
    axis: str | None = None,
    exchange: RankExchange | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "M D"]:
    """The sum of what all devices along a mesh's axis have, added in float32 in order of devices and rounded once.

    So all have the same bits, and those of a number do not depend on how many there are.

    Args:
      x: of this device; bfloat16 or float32 for the kernel.
      axis: of the `shard_map` that this is called in; None on one device.
      exchange: of `sum_exchange`, for the kernel that writes to the other devices' memory itself.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Raises:
      ValueError: x is of another kind than said.
      NoImplementationError: nothing named takes these arguments.
    """
    check_axes(x=(x, "M D"))
    check_floats(x=x)
    with jax.named_scope("reduce_ranks"):
        return first_fitting("reduce_ranks", REDUCE, implementation, x, axis=axis, exchange=exchange)
