"""Steps of the Hopper kernel that stand alone: layouts, bounds, and the two matrix products."""

# Pallas declares its transforms and ACC less public than it documents them, and what it inlines as if it were called as written.
# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false, reportCallIssue=false

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.attention.paged.launch import ROWS, Launch
from dflash_kernels.mosaic_gpu.layouts import swizzled
from dflash_kernels.mosaic_gpu.thread_op import WORDS

_SCALAR = plgpu.Layout.WG_SPLAT(())
_ENTRIES = plgpu.ShapeDtypeStruct((128,), jnp.dtype(jnp.int32), layout=plgpu.Layout.WG_STRIDED((128,), vec_size=1))


def scratch(launch: Launch, dtype: Any, interpret: Any) -> dict[str, Any]:
    """Shared memory and barriers of one CTA."""
    # The direct output leaves in slices of `group` rows, which a tiled layout cannot give.
    plain = launch.direct or launch.settles
    out: dict[str, Any] = {} if plain else {"transforms": swizzled(jnp.float32, launch.head_dim)}
    rows = (launch.warpgroups, ROWS, launch.head_dim)
    buffers = ring(launch, dtype, interpret) | {"q_sm": plain_queries(launch, dtype)}
    buffers["o_sm"] = plgpu.SMEM(rows, dtype if launch.direct else jnp.float32, **out)
    if launch.together:
        buffers["lse_sm"] = plgpu.SMEM((ROWS,), jnp.float32)
    return buffers


def ring(launch: Launch, dtype: Any, interpret: Any) -> dict[str, Any]:
    """Shared memory that keys and values come through, and its barriers."""
    tiles: dict[str, Any] = {"transforms": swizzled(dtype, launch.width)}
    # Rows that have to be padded come as they are and are moved to a tile of their own.
    padded = launch.width > launch.head_dim
    tile = plgpu.SMEM((launch.stages, launch.keys, launch.head_dim), dtype, **({} if padded else tiles))
    filled = plgpu.Barrier(num_arrivals=launch.copies, num_barriers=launch.stages)
    buffers = {"k_sm": tile, "v_sm": tile, "k_in": filled, "v_in": filled}
    freed = plgpu.Barrier(num_arrivals=launch.warpgroups, num_barriers=launch.stages)
    buffers |= {"k_out": freed, "v_out": freed}
    if padded:
        buffers |= {name: plgpu.SMEM((launch.keys, launch.width), dtype, **tiles) for name in ("k_wide", "v_wide")}
    if interpret is not None:
        buffers["p_sm"] = plgpu.SMEM((launch.warpgroups, ROWS, launch.keys), dtype)
    return buffers


def plain_queries(launch: Launch, dtype: Any) -> Any:
    """Shared memory for queries as they are given."""
    return plgpu.SMEM((launch.warpgroups, ROWS, launch.width), dtype, transforms=swizzled(dtype, launch.width))


def hold_entries(table, begin, stride: int, per_page: int):
    """Table entries of a part's first 32 tiles, `begin`, `begin + stride` and on, `per_page` to a page: one in each lane of a warp.

    They are asked for here, whatever is known later: an entry past the last one is any number.
    """
    from dflash_kernels.attention.paged import mosaic_gpu_lanes as lanes

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR), return_type=_ENTRIES)
    def hold(_ctx, table, begin):
        return lanes.hold_entries(table, begin, stride, per_page)

    return hold(table, begin)


def held_entry(entries, table, begin, index, stride: int, per_page: int):
    """The entry of the part's tile number `index`; read again from tile 32 on. Arguments as of `hold_entries`."""
    from dflash_kernels.attention.paged import mosaic_gpu_lanes as lanes

    word = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=_SCALAR)

    @plgpu.inline_mgpu(arg_types=(_ENTRIES.layout, plgpu.RefType(), _SCALAR, _SCALAR), return_type=word)
    def entry(_ctx, *operands):
        return lanes.held_entry(*operands, stride, per_page)

    return entry(entries, table, begin, index)


def ask_for_queries(source, first_row, rows: int, columns: int, interpret: Any) -> list[Any]:
    """Query rows, one head's for one token after the other, on their way to registers; zeros where there are none.

    Args:
      source: `[T, G, H]`, of whose rows `t * G + g` the first `rows` exist; given are 64 rows from `first_row` on.
      columns: of the memory they go to, H or more.
    """
    if interpret is not None:
        return []

    from dflash_kernels.attention.paged import mosaic_gpu_lanes as lanes
    from dflash_kernels.mosaic_gpu import ptx as th

    count = ROWS * 2 * columns // th.CHUNK // 128

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR), return_type=[WORDS] * count)
    def ask(_ctx, source, first_row):
        return [th.as_array(words) for words in lanes.ask_for_queries(source, first_row, rows, columns)]

    return ask(source, first_row)


def put_queries(asked: list[Any], source, target, first_row, interpret: Any):
    """What `ask_for_queries` of `source` has asked for, to `target [64, H or more]` in shared memory."""
    if interpret is not None:
        plain = source[...].reshape(-1, source.shape[2])
        more = target.shape[1] - plain.shape[1]
        plain = jnp.pad(plain, ((0, -plain.shape[0] % target.shape[0] + target.shape[0]), (0, more)))
        plain = lax.dynamic_slice_in_dim(plain, first_row, target.shape[0])
        target[...] = plain
        return

    from dflash_kernels.attention.paged import mosaic_gpu_lanes as lanes
    from dflash_kernels.mosaic_gpu import ptx as th

    swizzle = plgpu.RefType(swizzled(target.dtype, target.shape[1]))

    @plgpu.inline_mgpu(arg_types=(swizzle, *[WORDS.layout] * len(asked)))
    def put(_ctx, target, *held):
        lanes.put_queries([th.as_words(array) for array in held], target)

    put(target, *asked)


def pad_columns(source, target, interpret: Any):
    """A tile of rows in shared memory, packed, to one with more columns, zeros there, that matrix instructions can read."""
    if interpret is not None:
        target[...] = jnp.pad(source[...], ((0, 0), (0, target.shape[1] - source.shape[1])))
        return

    from dflash_kernels.attention.paged import mosaic_gpu_lanes as lanes

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(swizzled(target.dtype, target.shape[1]))))
    def pad(_ctx, source, target):
        lanes.pad_columns(source, target)

    pad(source, target)


def store_part(out, target, first_row):
    """Rows `[64, H]` of float32 from registers to `target [R, H]` from `first_row` on, as far as it has rows.

    By way of shared memory they would be there 0.3 us later: one sequence of 4,096 keys takes 9.75 us, not 9.97.
    """
    from dflash_kernels.attention.paged import mosaic_gpu_lanes as lanes

    rows = target.shape[0]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, _SCALAR))
    def store(_ctx, target, out, first_row):
        lanes.store_part(target, out, first_row, rows)

    store(target, out, first_row)


def store_part_by_lanes(out, target, first_row):
    """`store_part` for `merge_by_lanes`: every eight rows of the target as threads hold them."""
    from dflash_kernels.mosaic_gpu import combine as parts

    rows = target.shape[0]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, _SCALAR))
    def store(_ctx, target, out, first_row):
        parts.store_fragments(target, out, first_row, rows)

    store(target, out, first_row)


def clear_rows(tile, first, interpret: Any):
    """Zeroes rows of a tile in shared memory from the `first` on, an int32 scalar."""
    if interpret is not None:
        held = tile[...]
        tile[...] = jnp.where(lax.broadcasted_iota(jnp.int32, tile.shape, 0) < first, held, jnp.zeros_like(held))
        plgpu.commit_smem()
        return

    from dflash_kernels.attention.paged import mosaic_gpu_lanes as lanes

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(swizzled(tile.dtype, tile.shape[1])), _SCALAR))
    def clear(_ctx, *operands):
        lanes.clear_rows(*operands)

    clear(tile, first)


def merge_cluster(part, lse, target, rows: int, parts: int):
    """Puts together the parts that the CTAs of a cluster hold in their shared memories, each CTA some of the rows.

    Args:
      part: `[64, H]` float32, normalised; lse: `[64]`, natural, -inf where the part holds nothing.
      target: `[T, G, H]` in global memory, of whose rows `t * G + g` the first `rows` exist.
    """
    from dflash_kernels.mosaic_gpu import combine as lanes

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType()))
    def merge(_ctx, part, lse, target):
        lanes.combine_cluster(part, lse, target, rows, parts)

    merge(part, lse, target)
