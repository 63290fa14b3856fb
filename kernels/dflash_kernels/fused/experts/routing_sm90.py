"""Routing on Hopper: the router, and a counting sort of a call's entries by expert.

Every CTA sorts for itself, in shared memory. For many tokens the router is a launch of its own.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dflash_kernels.core.device import WARP, WARPGROUP
from dflash_kernels.fused.experts.plan import NOBODY, WARPS, Choice, Plan
from dflash_kernels.fused.experts.reference import chosen
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.thread_op import GLOBAL, SCALAR, kernel, thread_op

_SIGN = 1 << 31
_PLACES = 1 << 16  # more than entries: what is packed above them counts groups


def choices(
    plan: Plan, choice: Choice, given: Sequence[jax.Array], interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Experts and weights of all entries, `[T * k]` each, a launch of its own, for many tokens.

    Args:
      given: logits `[T * plan.scores]`; of a share of the experts also the number of the first one, `[1]`.
    """

    def body(*refs: Any) -> None:
        *given, entries, weights = refs
        _choose_tokens(given, entries, weights, lax.axis_index("cta"), plan=plan, choice=choice)

    body.__name__ = "choose_experts"
    kinds = jax.ShapeDtypeStruct((plan.entries,), jnp.int32), jax.ShapeDtypeStruct((plan.entries,), jnp.float32)
    grid = {"grid": (-(-plan.tokens // WARPS),), "grid_names": ("cta",)}
    experts, weights = kernel(body, out_type=kinds, **grid, interpret=interpret)(*given)
    return experts, weights


# Router: a warp takes a token, its lanes a part of the logits each


def _tokens_chosen(given: list[Any], entries: Any, weights: Any, cta: Any, *, plan: Plan, choice: Choice) -> None:
    for warp in range(WARPS):
        token = cta * WARPS + warp

        @pl.when(token < plan.tokens)
        def _(token: Any = token) -> None:
            one = given[0][pl.ds(token * plan.scores, plan.scores)][None]
            for target, (found,) in zip((entries, weights), _chosen(plan, choice, one, given[1:]), strict=True):
                target[pl.ds(token * plan.top_k, plan.top_k)] = found.astype(target.dtype)


def _chosen(plan: Plan, choice: Choice, logits: Any, first: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
    """Of `logits [T, plan.scores]`, in the interpreter; `first`: none or one Ref."""
    experts, weights = chosen(logits, plan.top_k - int(choice.shared), choice)
    for word in first:
        local = experts - word[0]
        own = (local >= 0) & (local < plan.routed)
        if choice.shared:
            local, own = local.at[:, -1].set(plan.routed), own.at[:, -1].set(word[0] == 0)
        experts = jnp.where(own, local, NOBODY)
    return experts, weights


@thread_op(args=(GLOBAL, GLOBAL, GLOBAL, SCALAR), interpret=_tokens_chosen)
def _choose_tokens(given: list[Any], entries: Any, weights: Any, cta: Any, *, plan: Plan, choice: Choice) -> None:
    lane, warp = _lane_and_warp()
    token = th.add(th.mul(cta, WARPS), warp)
    with th.branch(th.under(token, plan.tokens)):
        _choose_one(plan, choice, given, token, lane, [(entries, "global"), (weights, "global")])


def _choose(plan: Plan, choice: Choice, given: list[Any], entries: Any, weights: Any) -> None:
    """Experts and weights of all entries, by one warpgroup.

    Args:
      given: as of `choices`, in global memory.
      entries, weights: addresses in shared memory, of a word for each entry.
    """
    lane, warp = _lane_and_warp()

    @th.fori(th.number(-(-plan.tokens // WARPS)), [])
    def _(turn: Any, carry: list) -> list:
        token = th.add(th.mul(turn, WARPS), warp)
        with th.branch(th.under(token, plan.tokens)):
            _choose_one(plan, choice, given, token, lane, [(entries, "shared"), (weights, "shared")])
        return carry


def _lane_and_warp() -> tuple[Any, Any]:
    return th.rem(th.thread(), WARP), th.div(th.thread(), WARP)


def _choose_one(plan: Plan, choice: Choice, given: list[Any], token: Any, lane: Any, targets: list) -> None:
    """One token's experts and weights, to two places in memory of the kinds that are named."""
    expert, share = _choice_of(plan, choice, given[0], token, lane)
    if plan.among is not None:
        expert = _own_choice(plan, choice, given[1], lane, expert)
    with th.branch(th.under(lane, plan.top_k)):
        entry = th.add(th.mul(token, plan.top_k), lane)
        for (target, space), value in zip(targets, (expert, th.bits(share)), strict=True):
            where = th.word_address(target, entry) if space == "global" else th.add(target, th.mul(entry, 4))
            th.inline(f"st.{space}.b32 [$0], $1;", where, value)


def _choice_of(plan: Plan, choice: Choice, logits: Any, token: Any, lane: Any) -> tuple[Any, Any]:
    """Expert and weight of one of a token's choices, in as many lanes as it has choices."""
    taken = plan.top_k - int(choice.shared)
    places = [th.add(lane, first) for first in range(0, plan.ranked, WARP)]
    bits = [_logit(plan, logits, token, place) for place in places]
    gate = None
    if choice.shared:
        # Asked for with the others: once the rounds are over it would be waited for, and all weights with it.
        gate = th.as_real(th.global_word(logits, th.add(th.mul(token, plan.scores), plan.ranked)))
    keys = [_key(value) for value in bits]
    expert, largest, top = th.number(0), th.number(0), th.number(0)
    for turn in range(taken):
        own, first = _largest(list(zip(keys, places, strict=True)))
        best = th.over_lanes(own, "max")
        where = th.over_lanes(th.select(_equal(own, best), first, th.number(plan.scores)), "min")
        keys = [th.select(_equal(place, where), th.number(0), key) for key, place in zip(keys, places, strict=True)]
        mine = _equal(lane, th.number(turn))
        expert, largest = th.select(mine, where, expert), th.select(mine, best, largest)
        top = top if turn else best
    highest = th.as_real(_unkey(top))
    inside = th.under(lane, taken)
    share = th.select(inside, th.exp(th.fsub(th.as_real(_unkey(largest)), highest)), th.real(0.0))
    total = share
    if not choice.normed:
        total = th.real(0.0)
        for value in bits:
            total = th.fadd(total, th.exp(th.fsub(th.as_real(value), highest)))
    share = th.fmul(th.fdiv(share, _summed(total)), th.real(choice.scale))
    if gate is not None:
        last, of_shared = _equal(lane, th.number(taken)), th.exp(th.fsub(th.real(0.0), gate))
        of_shared = th.fdiv(th.real(1.0), th.fadd(th.real(1.0), of_shared))
        expert, share = th.select(last, th.number(plan.ranked), expert), th.select(last, of_shared, share)
    return expert, share


def _own_choice(plan: Plan, choice: Choice, first: Any, lane: Any, expert: Any) -> Any:
    """A lane's choice by its number in the call, whose first expert is number `first[0]`; `NOBODY` where others have it.

    The call with the first experts has the shared one's rows for all: which one adds it may not depend on a token's place.
    """
    number = th.global_word(first, th.number(0))
    local = th.sub(expert, number)
    own = th.under(local, plan.routed)
    if choice.shared:
        last = _equal(lane, th.number(plan.top_k - 1))
        local = th.select(last, th.number(plan.routed), local)
        own = th.select(last, _equal(number, th.number(0)), own)
    return th.select(own, local, th.number(NOBODY))


def _largest(pairs: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """The largest of a lane's keys and its place, the first of equal ones."""
    while len(pairs) > 1:
        better = []
        for (key, place), *others in itertools.batched(pairs, 2):
            for other, behind in others:
                stays = th.compare(key, "uge", other)
                key, place = th.select(stays, key, other), th.select(stays, place, behind)
            better.append((key, place))
        pairs = better
    return pairs[0]


def _logit(plan: Plan, logits: Any, token: Any, place: Any) -> Any:
    """Bits of one logit; -inf past the last expert that is chosen by its logit."""
    there = th.under(place, plan.ranked)
    where = th.add(th.mul(token, plan.scores), th.select(there, place, th.number(0)))
    return th.select(there, th.global_word(logits, where), th.number(0xFF800000 - (1 << 32)))


def _key(bits: Any) -> Any:
    """Bits of a float32 as an integer without sign in the same order, larger than 0; both zeros are the same."""
    bits = th.select(_equal(bits, th.number(-_SIGN)), th.number(0), bits)
    negative = th.compare(bits, "slt", 0)
    return th.xor(bits, th.select(negative, th.number(-1), th.number(-_SIGN)))


def _unkey(key: Any) -> Any:
    negative = th.compare(key, "sge", 0)
    return th.xor(key, th.select(negative, th.number(-1), th.number(-_SIGN)))


def _equal(a: Any, b: Any) -> Any:
    return th.compare(a, "eq", b)


def _summed(value: Any) -> Any:
    """The sum over a warp's lanes, in every lane, always in the same order."""
    for distance in (16, 8, 4, 2, 1):
        text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, 0xffffffff;"
        other = th.inline(text, value, returns=th.f32(), convergent=True)
        value = th.fadd(value, other)
    return value


# Counting sort by expert: a warp counts and places a part of the entries, 32 at a time


def _sort_interpreted(given: list[Any], tables: list[Any], *, plan: Plan) -> None:
    order_sm, shares_sm, spare_sm, groups_sm = tables
    if plan.choice:
        given = list(_chosen(plan, plan.choice, given[0][...].reshape(plan.tokens, -1), given[1:]))
    entries, weights = (part[...].reshape(-1) for part in given)
    more = plan.padded - plan.entries
    if _unsorted(plan):
        group = jnp.arange(plan.groups)
        experts = jnp.pad(entries.astype(jnp.int32), (0, plan.groups - plan.entries))
        table = experts, group, jnp.ones_like(group), jnp.full((1,), plan.top_k)
        order_sm[...], shares_sm[...] = jnp.arange(plan.padded), jnp.pad(weights, (0, more))
        groups_sm[...] = jnp.concatenate([part.astype(jnp.int32) for part in table])
        return
    order = jnp.argsort(jnp.where(entries < 0, plan.experts, entries), stable=True).astype(jnp.int32)
    spare_sm[: plan.entries] = entries.astype(jnp.int32)
    counts = (entries[:, None] == jnp.arange(plan.experts)).sum(axis=0).astype(jnp.int32)
    of_expert = -(-counts // plan.columns)
    ends, firsts = jnp.cumsum(of_expert), jnp.cumsum(counts) - counts
    groups = jnp.arange(plan.groups)
    owners = jnp.minimum(jnp.searchsorted(ends, groups, side="right"), plan.experts - 1)
    inside = (groups - (ends - of_expert)[owners]) * plan.columns
    table = owners, firsts[owners] + inside, jnp.minimum(counts[owners] - inside, plan.columns), ends[-1:]
    order_sm[...] = jnp.pad(order, (0, more))
    shares_sm[...] = jnp.pad(weights[order], (0, more))
    groups_sm[...] = jnp.concatenate([part.astype(jnp.int32) for part in table])


def _unsorted(plan: Plan) -> bool:
    """Whether entries stay in the order they come in: each of one token's is another expert's, and so a group."""
    return plan.tokens == 1 and plan.choice is not None and plan.among is None


@thread_op(args=(GLOBAL, GLOBAL), interpret=_sort_interpreted)
def sort_entries(given: list[Any], tables: list[Any], *, plan: Plan) -> None:
    """Writes the tables of a CTA in two rounds over all entries, one that counts and one that places: all CTAs have the same.

    Args:
      given: expert and weight of each entry, `[T * k]` in global memory; with `plan.choice`, what `choices` is given.
      tables: shared memory. Entries by expert, those of one expert in order; their weights; the expert of each entry, and anything
        behind; experts of all groups, then each one's first place, then how many entries it has, then the number of groups.
    """
    order, shares, flat, groups = (th.address(table, space=3) for table in tables)
    if _unsorted(plan):
        _tell(plan, given[0], order, shares, groups)
        th.warpgroup_barrier()
        return
    own_weights = th.add(flat, 4 * plan.padded)
    counts = th.add(own_weights, 4 * plan.padded)
    sums_of_warps = th.add(counts, 4 * WARPS * plan.threads)
    for first in range(0, WARPS * plan.threads, WARPGROUP):
        th.store_shared(counts, th.add(th.thread(), first), th.number(0))
    if plan.choice is None:
        for first in range(0, plan.entries, WARPGROUP):
            place = th.add(th.thread(), first)
            with th.branch(th.under(place, plan.entries)):
                th.store_shared(flat, place, th.global_word(given[0], place))
                th.store_shared(own_weights, place, th.global_word(given[1], place))
    else:
        _choose(plan, plan.choice, given, flat, own_weights)
    th.warpgroup_barrier()
    _each_entry(plan, flat, counts, lambda *_: None)
    th.warpgroup_barrier()

    own = [th.add(th.thread(), first) for first in range(0, plan.threads, WARPGROUP)]
    of_warps = [
        [th.shared_word(counts, th.add(expert, warp * plan.threads)) for warp in range(WARPS)] for expert in own
    ]
    found = [functools.reduce(th.add, each) for each in of_warps]
    sums = _sums_before([_packed(plan, count) for count in found], sums_of_warps)
    for expert, count, each, value in zip(own, found, of_warps, sums, strict=True):
        full, first, place = _groups(plan, count), th.div(value, _PLACES), th.bit_and(value, _PLACES - 1)

        @th.fori(full, [])
        def _(index: Any, carry: list, expert=expert, count=count, place=place, first=first) -> list:
            group, taken = th.add(first, index), th.mul(index, plan.columns)
            live = th.least(th.sub(count, taken), plan.columns)
            for row, value in enumerate((expert, th.add(place, taken), live)):
                th.store_shared(groups, th.add(th.number(row * plan.groups), group), value)
            return carry

        with th.branch(_equal(expert, th.number(plan.experts - 1))):
            th.store_shared(groups, th.number(3 * plan.groups), th.add(first, full))
        for warp, its in enumerate(each):
            th.store_shared(counts, th.add(expert, warp * plan.threads), place)
            place = th.add(place, its)
    th.warpgroup_barrier()

    def store(entry: Any, place: Any) -> None:
        th.store_shared(order, place, entry)
        th.store_shared(shares, place, th.shared_word(own_weights, entry))

    _each_entry(plan, flat, counts, store)
    th.warpgroup_barrier()


def sort_call(cta: Any) -> None:
    """`sort_entries` of a call, by the names that its arrays and buffers have in each of these kernels."""
    given = [cta.refs[name] for name in ("entries", "weights", "first") if name in cta.refs]
    sort_entries(given, [cta.buffers[name] for name in ("sorted", "shares", "spare", "groups")], plan=cta.plan)


def _each_entry(plan: Plan, flat: Any, counts: Any, work: Callable[[Any, Any], None]) -> None:
    """`work(entry, count)` for entries that are somebody's, where count is what this warp has counted for its expert before.

    Args:
      flat: experts of entries; counts: of each warp for each expert, which go on from what they are.
    """
    lane, warp = _lane_and_warp()
    steps = -(-plan.entries // (WARP * WARPS))
    of_warp = th.add(counts, th.mul(warp, 4 * plan.threads))

    @th.fori(th.number(steps), [])
    def _(step: Any, carry: list) -> list:
        entry = th.add(th.mul(th.add(th.mul(warp, steps), step), WARP), lane)
        inside = th.under(entry, plan.entries)
        read = th.shared_word(flat, th.select(inside, entry, th.number(0)))
        expert = th.select(inside, read, th.number(NOBODY))
        somebodys = th.compare(expert, "sge", 0)
        where = th.select(somebodys, expert, th.number(0))
        alike = th.inline("match.any.sync.b32 $0, $1, 0xffffffff;", expert, returns=th.i32(), convergent=True)
        before = th.bits_set(th.lower_lanes(alike, lane))
        count = th.shared_word(of_warp, where)
        th.warp_barrier()
        with th.branch(somebodys):
            work(entry, th.add(count, before))
            with th.branch(_equal(before, th.number(0))):
                th.store_shared(of_warp, where, th.add(count, th.bits_set(alike)))
        th.warp_barrier()
        return carry


def _tell(plan: Plan, logits: Any, order: Any, shares: Any, groups: Any) -> None:
    """The tables of one token's choices, by one warp."""
    lane, warp = _lane_and_warp()
    with th.branch(_equal(warp, th.number(0))):
        assert plan.choice is not None
        expert, share = _choice_of(plan, plan.choice, logits, th.number(0), lane)
        with th.branch(th.under(lane, plan.top_k)):
            th.store_shared(order, lane, lane)
            th.store_shared(shares, lane, th.bits(share))
            for row, value in enumerate((expert, lane, th.number(1))):
                th.store_shared(groups, th.add(lane, row * plan.groups), value)
            th.store_shared(groups, th.number(3 * plan.groups), th.number(plan.top_k))


def _groups(plan: Plan, count: Any) -> Any:
    return th.div(th.add(count, plan.columns - 1), plan.columns)


def _packed(plan: Plan, count: Any) -> Any:
    """An expert's numbers of entries and of groups, in one word."""
    return th.add(count, th.mul(_groups(plan, count), _PLACES))


def _sums_before(values: list, spare: Any) -> list:
    """Sums over all experts before each thread's own, of words that threads hold for theirs; `spare` takes a word for each warp."""
    lane, warp = _lane_and_warp()
    sums = []
    for index, value in enumerate(values):
        upto = value
        for distance in (1, 2, 4, 8, 16):
            text = f"shfl.sync.up.b32 $0, $1, {distance}, 0, 0xffffffff;"
            other = th.inline(text, upto, returns=th.i32(), convergent=True)
            reaches = th.compare(lane, "uge", distance)
            upto = th.add(upto, th.select(reaches, other, th.number(0)))
        with th.branch(_equal(lane, th.number(WARP - 1))):
            th.store_shared(spare, th.add(warp, index * WARPS), upto)
        sums.append(th.sub(upto, value))
    th.warpgroup_barrier()
    wholes = [value for step in range(len(values)) for value in _shared_vector(spare, th.number(step))]
    for index in range(len(values)):
        for place, whole in enumerate(wholes[: (index + 1) * WARPS]):
            earlier = th.compare(th.number(place), "ult", th.add(warp, index * WARPS))
            sums[index] = th.add(sums[index], th.select(earlier, whole, th.number(0)))
    return sums


def _shared_vector(base: Any, step: Any) -> list:
    """Words of all warps, neighbours in shared memory."""
    return th.load(th.add(base, th.mul(step, 4 * WARPS)), WARPS, op="ld.shared")
