"""Sorting entries by expert: every thread of a warpgroup counts and places those of its own experts."""

# pyright: reportAbstractUsage=false, reportCallIssue=false, reportPrivateImportUsage=false

from typing import Any

import jax.numpy as jnp
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.layer_chain.mosaic_gpu_memory import WARPGROUP, address, number, thread, times, when
from dflash_kernels.routed_experts.mosaic_gpu_choose import choose
from dflash_kernels.routed_experts.mosaic_gpu_plan import Plan
from dflash_kernels.routed_experts.reference import chosen

_VECTOR = 4


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
        choose(plan, entries, flat, own_weights)
    mgpu.utils.warpgroup_barrier()

    zeros = [number(0) for _ in own]

    @mgpu.utils.fori(number(plan.padded // _VECTOR), zeros)
    def counted(step, carry):
        for value in _vector(flat, step):
            carry = [arith.addi(count, _one(value, expert)) for count, expert in zip(carry, own, strict=True)]
        return carry

    found = counted.results
    for expert, count in zip(own, found, strict=True):
        _store(counts, expert, count)
    mgpu.utils.warpgroup_barrier()

    @mgpu.utils.fori(number(-(-plan.experts // _VECTOR)), [zeros, zeros])
    def summed(step, carry):
        places, numbers = carry
        for lane, value in enumerate(_vector(counts, step)):
            other = arith.addi(times(step, _VECTOR), number(lane))
            full = arith.divui(arith.addi(value, number(plan.columns - 1)), number(plan.columns))
            for index, expert in enumerate(own):
                before = arith.cmpi(arith.CmpIPredicate.ult, other, expert)
                places = _added(places, index, arith.select(before, value, number(0)))
                numbers = _added(numbers, index, arith.select(before, full, number(0)))
        return [places, numbers]

    places, numbers = summed.results
    for expert, count, place, first in zip(own, found, places, numbers, strict=True):
        full = arith.divui(arith.addi(count, number(plan.columns - 1)), number(plan.columns))

        @mgpu.utils.fori(full, [])
        def _(index, carry, expert=expert, count=count, place=place, first=first):
            group, taken = arith.addi(first, index), times(index, plan.columns)
            live = arith.minsi(arith.subi(count, taken), number(plan.columns))
            for row, value in enumerate((expert, arith.addi(place, taken), live)):
                _store(groups, arith.addi(number(row * plan.groups), group), value)
            return carry

        with when(arith.cmpi(arith.CmpIPredicate.eq, expert, number(plan.experts - 1))):
            _store(groups, number(3 * plan.groups), arith.addi(first, full))

    @mgpu.utils.fori(number(plan.padded // _VECTOR), list(places))
    def _(step, carry):
        for lane, value in enumerate(_vector(flat, step)):
            for index, expert in enumerate(own):
                with when(arith.cmpi(arith.CmpIPredicate.eq, value, expert)):
                    _store(order, carry[index], arith.addi(times(step, _VECTOR), number(lane)))
            carry = [arith.addi(place, _one(value, expert)) for place, expert in zip(carry, own, strict=True)]
        return carry

    mgpu.utils.warpgroup_barrier()
    for first in range(0, plan.entries, WARPGROUP):
        place = arith.addi(thread(), number(first))
        with when(_below(place, plan.entries)):
            entry = _load(order, place)
            _store(share, place, _load(own_weights, entry) if weights is None else _global(weights, entry))
    mgpu.utils.warpgroup_barrier()


def _added(values, index: int, more):
    return [arith.addi(value, more) if place == index else value for place, value in enumerate(values)]


def _one(value, expert):
    i32 = ir.IntegerType.get_signless(32)
    return arith.extui(i32, arith.cmpi(arith.CmpIPredicate.eq, value, expert))


def _below(place, limit: int):
    return arith.cmpi(arith.CmpIPredicate.ult, place, number(limit))


def _not_below(place, limit: int):
    return arith.cmpi(arith.CmpIPredicate.uge, place, number(limit))


def _vector(base, step):
    """Four neighbouring words of shared memory."""
    i32 = ir.IntegerType.get_signless(32)
    return mgpu.utils.inline_ptx(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", arith.addi(base, times(step, 4 * _VECTOR)), result_types=[i32] * _VECTOR,
        has_side_effects=True,
    )  # fmt: skip


def _load(base, place):
    i32 = ir.IntegerType.get_signless(32)
    return mgpu.utils.inline_ptx(
        "ld.shared.b32 $0, [$1];", arith.addi(base, times(place, 4)), result_types=i32, has_side_effects=True
    )


def _store(base, place, value) -> None:
    mgpu.utils.inline_ptx("st.shared.b32 [$0], $1;", arith.addi(base, times(place, 4)), value, has_side_effects=True)


def _global(ref, place):
    i32 = ir.IntegerType.get_signless(32)
    return mgpu.utils.inline_ptx(
        "ld.global.b32 $0, [$1];", address(ref, place), result_types=i32, has_side_effects=True
    )
