"""Weight layout: matrices of the layers in blocks of columns, where the execution plan says that this makes decoding faster.

With up to some hundred tokens a layer waits for its weights, and weights in blocks come faster and take less of the power that a
GPU may draw. Engines of Qwen3-4B's shapes with and without blocks took turns on one H200, medians of three turns at 1k of context:
2.789 and 2.837 ms for a cycle of one sequence, 3.857 and 3.976 of eight, 10.68 and 10.60 of 32, 2.153 and 2.185 for a step.

Only Hopper's kernels multiply them without a copy, so the head, the first layer's projection of queries, keys and values, and what
makes the drafter's context stay as they are: XLA multiplies those of some calls. Prompts are all multiplied by these kernels then,
which costs more than by cuBLAS: first tokens after 512 and 1,024 tokens take 9.57 and 17.2 ms in place of 9.40 and 16.6.

Experts in MXFP4 are kept in their four bits, in tiles, where the kernel of `mxfp4_mixture` reads them: nothing is rounded, and
fewer bytes are read than of sixteen bits.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from dflash_kernels import (
    MXFP4_MOST_SCALE,
    ColumnBlocks,
    Mxfp4Tiles,
    in_column_blocks,
    mxfp4_mixture_refusal,
    mxfp4_tiles,
)
from jaxtyping import Array

from dflash_jax.config import DecoderConfig
from dflash_jax.errors import CheckpointError
from dflash_jax.execution import switches
from dflash_jax.execution.plan import MATRICES, CallShape, choose
from dflash_jax.models.dflash_config import DFlashConfig
from dflash_jax.models.registry import layer_traits
from dflash_jax.parallel.ranks import Ranks
from dflash_jax.quantization.mxfp4 import Mxfp4

# Multiplied by XLA in some calls.
_IN_ROWS = "layers.0.attn.qkv_proj.weight", "layers.0.delta.in_proj.weight"


def cycle_rows(max_batch: int, draft: DFlashConfig | None) -> int:
    """Tokens that a cycle of `max_batch` sequences computes."""
    return max_batch * (1 if draft is None else draft.block_size)


def blocks_pay(config: DecoderConfig, dtype: Any, rows: int) -> bool:
    """Whether the plan of a model in `dtype` wants `block_columns`, on the device that is traced for, where the largest cycle has
    `rows` tokens."""
    plan = choose(layer_traits(config), CallShape(1, rows, jax.numpy.dtype(dtype)))
    return plan.weight_layout == "column_blocks"


_in_blocks = jax.jit(in_column_blocks)


def blocking_jobs(weights: Mapping[str, Mapping[str, Any]]) -> list[Callable[[], Any]]:
    """Jobs that compile the programs of `block_columns` for weights of these shapes."""
    every = (one for table in weights.values() for one in table.values())
    shapes = {(one.shape, one.dtype) for one in every if isinstance(one, ColumnBlocks)}
    return [partial(_compile, jax.ShapeDtypeStruct(*shape)) for shape in sorted(shapes, key=str)]


def _compile(matrix: jax.ShapeDtypeStruct) -> None:
    _in_blocks.lower(matrix).compile()


def block_columns(params: dict[str, Array]) -> dict[str, Array | ColumnBlocks]:
    """A model's parameters with the matrices of its layers in blocks, taken out of `params` one by one: no two copies at a time.

    Large ones first, all of a size one after the other: each has the place of the one before, and no more memory than that of one
    is left in pieces.
    """
    names = sorted(filter(_is_blocked, params), key=lambda name: -params[name].size)
    blocked = {name: _in_blocks(params.pop(name)) for name in names}
    return blocked | params


def _is_blocked(name: str) -> bool:
    return name.startswith("layers.") and name.endswith(MATRICES) and name not in _IN_ROWS


def tiles_pay(config: DecoderConfig, dtype: Any, ranks: int = 1) -> bool:
    """Whether a kernel reads a model's experts in MXFP4, or each rank's share of them, on the device that is traced for."""
    experts = layer_traits(config).experts
    if experts is None or not switches.FOUR_BITS:
        return False
    sizes = {"experts": experts.of_rank(ranks).count, "hidden": config.hidden_size, "inner": experts.inner}
    return mxfp4_mixture_refusal(1, experts.per_token, jnp.dtype(dtype), **sizes) is None


def check_scales(params: Mapping[str, Any], ranks: Ranks | None = None) -> None:
    """Raises CheckpointError where matrices in MXFP4 have scales so large that tiles have no room for them."""
    largest = _largest if ranks is None else _largest_of(ranks)
    found = {name: largest(one.scales) for name, one in params.items() if isinstance(one, Mxfp4)}
    for name, scale in found.items():
        if (scale := int(scale)) > MXFP4_MOST_SCALE:
            most = MXFP4_MOST_SCALE - 127
            raise CheckpointError(
                name,
                f"scales up to 2^{scale - 127} were found, experts in MXFP4 have 2^{most} at most: take the published release",
            )


_largest = jax.jit(jnp.max)


@cache
def _largest_of(ranks: Ranks) -> Callable[[Array], Array]:
    """`_largest` of an array that ranks share, which all of them have then."""
    return jax.jit(jnp.max, out_shardings=ranks.whole)


def _tiles(matrix: Mxfp4, *, count: int, gated: bool) -> Mxfp4Tiles:
    blocks, scales = (one.reshape(count, -1, *one.shape[1:]) for one in (matrix.blocks, matrix.scales))
    return mxfp4_tiles(blocks, scales, gated=gated, dtype=matrix.dtype)


_in_tiles = jax.jit(_tiles, static_argnames=("count", "gated"))


@cache
def _shares_in_tiles(ranks: Ranks, *, count: int, gated: bool) -> Callable[[Mxfp4], Mxfp4Tiles]:
    """`_tiles` of what each rank has, side by side: one function for all matrices, compiled once for each shape."""
    cut = ranks.along(0).spec
    tiles = partial(_tiles, count=count, gated=gated)
    return jax.jit(jax.shard_map(tiles, mesh=ranks.mesh, in_specs=(cut,), out_specs=cut, check_vma=False))


def tile_experts(
    config: DecoderConfig, params: dict[str, Any], ranks: Ranks | None = None, *, share: int = 1
) -> dict[str, Any]:
    """A model's parameters with its matrices in MXFP4 as tiles, in `params` itself: no two copies at a time.

    Args:
      ranks: who shares `params`, each of which gets tiles of its experts.
      share: of how many ranks `params` are one's own.
    """
    experts = layer_traits(config).experts
    assert experts is not None
    count = experts.of_rank(share if ranks is None else ranks.count).count
    for name in [name for name, one in params.items() if isinstance(one, Mxfp4)]:
        how: dict[str, Any] = {"count": count, "gated": name.endswith("gate_up_proj.weight")}
        in_tiles = partial(_in_tiles, **how) if ranks is None else _shares_in_tiles(ranks, **how)
        params[name] = in_tiles(params.pop(name))
    return params
