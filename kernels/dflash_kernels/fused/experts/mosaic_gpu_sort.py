"""Sorting entries by expert: every thread of a warpgroup counts and places those of its own experts."""

# pyright: reportAbstractUsage=false, reportCallIssue=false, reportPrivateImportUsage=false

from typing import Any

import jax.numpy as jnp
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu.utils import when
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.core.device import WARPGROUP
from dflash_kernels.fused.experts.mosaic_gpu_choose import choose
from dflash_kernels.fused.experts.mosaic_gpu_ops import load_shared
from dflash_kernels.fused.experts.plan import LOOK, Plan
from dflash_kernels.fused.experts.reference import chosen
from dflash_kernels.mosaic_gpu.ptx import mul, number, thread, word_address

_VECTOR, _LANES = 4, 32
_PLACES = 1 << 16  # more than entries: what is packed above them counts groups


def sort_entries(plan: Plan, entries, weights, buffers: dict[str, Any], interpret: Any) -> None:
    """Writes the tables of a CTA.

    Args:
      entries, weights: expert and weight of each entry, `[T * k]` in global memory; with `plan.choice`, entries are the logits
        `[T * E]` and weights None.
      buffers: shared memory. `sorted`: entries by expert, those of one expert in order. `share`: their weights. `groups`: experts
        of all groups, then each one's first place, then how many entries it has, then the number of groups. `spare`: anything.
    """
    if interpret is not None:
        given = (
            chosen(entries[...].reshape(plan.tokens, -1), plan.taken, plan.choice)
            if plan.choice
            else (entries, weights)
        )
        _interpreted(plan, *[part[...].reshape(-1) for part in given], buffers)
        return
    names = ("sorted", "share", "spare", "groups")
    given = (entries,) if plan.choice else (entries, weights)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * (len(given) + len(names)))
    def sort(_, *held):
        i32 = ir.IntegerType.get_signless(32)
        shared = [llvm.ptrtoint(i32, mgpu.utils.memref_ptr(ref)) for ref in held[len(given) :]]
        _sort(plan, *held[: len(given)], **dict(zip(names, shared, strict=True)))

    sort(*given, *[buffers[name] for name in names])


def _interpreted(plan: Plan, entries, weights, buffers: dict[str, Any]) -> None:
    order = jnp.argsort(entries, stable=True).astype(jnp.int32)
    counts = (entries[:, None] == jnp.arange(plan.experts)).sum(axis=0).astype(jnp.int32)
    of_expert = -(-counts // plan.columns)
    ends, firsts = jnp.cumsum(of_expert), jnp.cumsum(counts) - counts
    groups = jnp.arange(plan.groups)
    experts = jnp.minimum(jnp.searchsorted(ends, groups, side="right"), plan.experts - 1)
    inside = (groups - (ends - of_expert)[experts]) * plan.columns
    table = experts, firsts[experts] + inside, jnp.minimum(counts[experts] - inside, plan.columns), ends[-1:]
    more = plan.padded - plan.entries
    buffers["sorted"][...] = jnp.pad(order, (0, more))
    buffers["share"][...] = jnp.pad(weights[order], (0, more))
    buffers["groups"][...] = jnp.concatenate([part.astype(jnp.int32) for part in table])


def _sort(plan: Plan, entries, weights=None, **shared) -> None:
    """Two rounds over all entries, one that counts and one that places."""
    order, share, flat, groups = (shared[name] for name in ("sorted", "share", "spare", "groups"))
    counts, own_weights = (arith.addi(flat, number(4 * place)) for place in (plan.padded, plan.padded + plan.threads))
    own = [arith.addi(thread(), number(first)) for first in range(0, plan.threads, WARPGROUP)]
    for first in range(0, plan.padded, WARPGROUP):
        place = arith.addi(thread(), number(first))
        if plan.choice is None:
            with when(_below(place, plan.entries)):
                _store(flat, place, _global(entries, place))
        with when(arith.andi(_below(place, plan.padded), _not_below(place, plan.entries))):
            _store(flat, place, number(-1))
    if plan.choice is not None:
        choose(plan, plan.choice, entries, flat, own_weights)
    mgpu.utils.warpgroup_barrier()

    zeros = [number(0) for _ in own]

    @mgpu.utils.fori(number(plan.padded // LOOK), zeros)
    def counted(step, carry):
        for value in _entries(flat, step):
            carry = [arith.addi(count, _one(value, expert)) for count, expert in zip(carry, own, strict=True)]
        return carry

    found = counted.results
    sums = _before(plan, [_packed(plan, count) for count in found], counts)
    places = [arith.andi(value, number(_PLACES - 1)) for value in sums]
    numbers = [arith.divui(value, number(_PLACES)) for value in sums]
    for expert, count, place, first in zip(own, found, places, numbers, strict=True):
        full = _groups(plan, count)

        @mgpu.utils.fori(full, [])
        def _(index, carry, expert=expert, count=count, place=place, first=first):
            group, taken = arith.addi(first, index), mul(index, plan.columns)
            live = arith.minsi(arith.subi(count, taken), number(plan.columns))
            for row, value in enumerate((expert, arith.addi(place, taken), live)):
                _store(groups, arith.addi(number(row * plan.groups), group), value)
            return carry

        with when(arith.cmpi(arith.CmpIPredicate.eq, expert, number(plan.experts - 1))):
            _store(groups, number(3 * plan.groups), arith.addi(first, full))

    @mgpu.utils.fori(number(plan.padded // LOOK), list(places))
    def _(step, carry):
        for lane, value in enumerate(_entries(flat, step)):
            for index, expert in enumerate(own):
                mgpu.utils.inline_ptx(
                    "st.shared.b32 [$0], $1;", arith.addi(order, mul(carry[index], 4)),
                    arith.addi(mul(step, LOOK), number(lane)), has_side_effects=True,
                    predicate=arith.cmpi(arith.CmpIPredicate.eq, value, expert),
                )  # fmt: skip
            carry = [arith.addi(place, _one(value, expert)) for place, expert in zip(carry, own, strict=True)]
        return carry

    mgpu.utils.warpgroup_barrier()
    for first in range(0, plan.entries, WARPGROUP):
        place = arith.addi(thread(), number(first))
        with when(_below(place, plan.entries)):
            entry = load_shared(order, place)
            _store(share, place, load_shared(own_weights, entry) if weights is None else _global(weights, entry))
    mgpu.utils.warpgroup_barrier()


def _groups(plan: Plan, count):
    return arith.divui(arith.addi(count, number(plan.columns - 1)), number(plan.columns))


def _packed(plan: Plan, count):
    """How many entries an expert has and how many groups, in one word."""
    return arith.addi(count, mul(_groups(plan, count), _PLACES))


def _before(plan: Plan, values, spare):
    """Sums over all experts before each thread's own, of words that threads hold for theirs; `spare` takes a word for each warp."""
    i32 = ir.IntegerType.get_signless(32)
    lane, warp = arith.remui(thread(), number(_LANES)), arith.divui(thread(), number(_LANES))
    warps, sums = WARPGROUP // _LANES, []
    for index, value in enumerate(values):
        upto = value
        for distance in (1, 2, 4, 8, 16):
            other = mgpu.utils.inline_ptx(
                f"shfl.sync.up.b32 $0, $1, {distance}, 0, 0xffffffff;", upto, result_types=i32, has_side_effects=True,
                convergent=True,
            )  # fmt: skip
            reaches = arith.cmpi(arith.CmpIPredicate.uge, lane, number(distance))
            upto = arith.addi(upto, arith.select(reaches, other, number(0)))
        with when(arith.cmpi(arith.CmpIPredicate.eq, lane, number(_LANES - 1))):
            _store(spare, arith.addi(warp, number(index * warps)), upto)
        sums.append(arith.subi(upto, value))
    mgpu.utils.warpgroup_barrier()
    wholes = [value for step in range(len(values)) for value in _vector(spare, number(step))]
    for index in range(len(values)):
        for place, whole in enumerate(wholes[: (index + 1) * warps]):
            earlier = arith.cmpi(arith.CmpIPredicate.ult, number(place), arith.addi(warp, number(index * warps)))
            sums[index] = arith.addi(sums[index], arith.select(earlier, whole, number(0)))
    return sums


def _one(value, expert):
    i32 = ir.IntegerType.get_signless(32)
    return arith.extui(i32, arith.cmpi(arith.CmpIPredicate.eq, value, expert))


def _below(place, limit: int):
    return arith.cmpi(arith.CmpIPredicate.ult, place, number(limit))


def _not_below(place, limit: int):
    return arith.cmpi(arith.CmpIPredicate.uge, place, number(limit))


def _entries(base, step):
    """`LOOK` neighbouring words of shared memory, all asked for before the first one is looked at."""
    vectors = LOOK // _VECTOR
    asked = [_vector(base, arith.addi(mul(step, vectors), number(place))) for place in range(vectors)]
    return [value for vector in asked for value in vector]


def _vector(base, step):
    """Four neighbouring words of shared memory."""
    i32 = ir.IntegerType.get_signless(32)
    return mgpu.utils.inline_ptx(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", arith.addi(base, mul(step, 4 * _VECTOR)), result_types=[i32] * _VECTOR,
        has_side_effects=True,
    )  # fmt: skip


def _store(base, place, value) -> None:
    mgpu.utils.inline_ptx("st.shared.b32 [$0], $1;", arith.addi(base, mul(place, 4)), value, has_side_effects=True)


def _global(ref, place):
    i32 = ir.IntegerType.get_signless(32)
    return mgpu.utils.inline_ptx(
        "ld.global.b32 $0, [$1];", word_address(ref, place), result_types=i32, has_side_effects=True
    )
