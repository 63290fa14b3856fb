"""Steps of the chain that Pallas has no words for, and what stands for them in its interpreter."""

# Pallas declares what it inlines with the context that it passes itself.
# pyright: reportCallIssue=false, reportPrivateImportUsage=false

import contextlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, memref, scf
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

_SCALAR = plgpu.Layout.WG_SPLAT


def store_turned(target, first_feature, tile, *, rows: int, tokens: int, interpret: Any) -> None:
    """`target[token, first_feature + row] = tile[row, token]`, rounded to the target's dtype.

    Args:
      target: `[tokens or more, features]` in global memory.
      first_feature: int32 scalar.
      tile: `[64, N]` in the layout of a matrix instruction's result.
      rows, tokens: what of the tile counts, the first ones of each.
      interpret: not None under Pallas's interpreter.
    """
    if interpret is not None:
        turned = tile[:rows, :tokens].T.astype(target.dtype)
        target.at[pl.ds(0, tokens), pl.ds(first_feature, rows)][...] = turned
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR, plgpu.Layout.WGMMA))
    def store(_, target, first_feature, tile):
        index = ir.IndexType.get()
        feature0 = arith.index_cast(index, first_feature.registers.item())

        def put(value, position):
            limits = zip(position, (rows, tokens), tile.shape, strict=True)
            limits = [(place, limit) for place, limit, size in limits if limit < size]
            with contextlib.ExitStack() as stack:
                for place, limit in limits:
                    branch = scf.IfOp(arith.cmpi(arith.CmpIPredicate.slt, place, mgpu.c(limit, index)))
                    stack.enter_context(_then(branch))
                memref.store(value, target, [position[1], arith.addi(feature0, position[0])])

        tile.foreach(put)

    store(target, jnp.asarray(first_feature, jnp.int32), tile.astype(target.dtype))


@contextlib.contextmanager
def _then(branch: scf.IfOp) -> Iterator[None]:
    with ir.InsertionPoint(branch.then_block):
        yield
        scf.yield_([])


def counter_value(counter):
    """What the grid's counter holds, read past the caches."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=_SCALAR)
    )
    def read(_, counter):
        i32 = ir.IntegerType.get_signless(32)
        value = mgpu.utils.inline_ptx(
            "ld.acquire.gpu.global.b32 $0, [$1];",
            mgpu.utils.memref_ptr(counter),
            result_types=i32,
            has_side_effects=True,
        )
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return read(counter)


def meet(counter, target) -> None:
    """Waits until all CTAs are here: adds one to the counter, then waits for it to reach `target`.

    What a warpgroup wrote to global memory before is seen by all after, by loads and by asynchronous copies.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR))
    def sync(_, counter, target):
        semaphore = mgpu.SemaphoreRef(mgpu.utils.memref_ptr(counter))
        mgpu.utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)
        mgpu.utils.warpgroup_barrier()
        semaphore.signal(1, memory_scope="gpu")
        semaphore.wait(target.registers.item(), decrement=False, memory_scope="gpu")
        mgpu.utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)

    sync(counter, target)


def fence() -> None:
    """Orders what this warpgroup has learnt so far before asynchronous copies that it starts next."""

    @plgpu.inline_mgpu()
    def order(_):
        mgpu.utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)

    order()


def rows_of(ref, layout):
    return plgpu.load(ref, layout=layout, optimized=False)


def sigmoid(x):
    return 1.0 / (1.0 + jnp.exp(-x))


def rem(a, b: int):
    return lax.rem(a, jnp.int32(b))


def div(a, b: int):
    return lax.div(a, jnp.int32(b))
