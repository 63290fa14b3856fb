"""Choosing experts, inside the kernel or before it: a warp takes a token, its lanes a part of the logits each."""

# pyright: reportAbstractUsage=false, reportCallIssue=false, reportPrivateImportUsage=false

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu.utils import when
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.core.device import WARPGROUP
from dflash_kernels.fused.experts.plan import Choice, Plan
from dflash_kernels.mosaic_gpu.ptx import mul, number, thread, word_address

_LANES, _WARPS = 32, WARPGROUP // 32
_LOG2E = 1.4426950408889634
_SIGN = 1 << 31


def choices(plan: Plan, choice: Choice, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Experts and weights of all entries, `[T * k]` each, of logits `[T * E]`: a launch of its own, for many tokens."""

    def body(logits, entries, weights):
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT))
        def run(_, logits, entries, weights, cta):
            lane, warp = _lane_and_warp()
            token = arith.addi(mul(cta.registers.item(), _WARPS), warp)
            with when(arith.cmpi(arith.CmpIPredicate.ult, token, number(plan.tokens))):
                _choose_one(plan, choice, logits, token, lane, [(entries, "global"), (weights, "global")])

        run(logits, entries, weights, lax.axis_index("cta"))

    body.__name__ = "choose_experts"
    kinds = jax.ShapeDtypeStruct((plan.entries,), jnp.int32), jax.ShapeDtypeStruct((plan.entries,), jnp.float32)
    chosen, weights = plgpu.kernel(body, out_type=kinds, grid=(-(-plan.tokens // _WARPS),), grid_names=("cta",))(logits)
    return chosen, weights


def choose(plan: Plan, choice: Choice, logits, entries, weights) -> None:
    """Experts and weights of all entries, by one warpgroup.

    Args:
      logits: `[T * E]` float32 in global memory.
      entries, weights: addresses in shared memory, of a word for each entry.
    """
    lane, warp = _lane_and_warp()

    @mgpu.utils.fori(number(-(-plan.tokens // _WARPS)), [])
    def _(turn, carry):
        token = arith.addi(mul(turn, _WARPS), warp)
        with when(arith.cmpi(arith.CmpIPredicate.ult, token, number(plan.tokens))):
            _choose_one(plan, choice, logits, token, lane, [(entries, "shared"), (weights, "shared")])
        return carry


def _lane_and_warp():
    return arith.remui(thread(), number(_LANES)), arith.divui(thread(), number(_LANES))


def _choose_one(plan: Plan, choice: Choice, logits, token, lane, targets) -> None:
    """One token's experts and weights, to two places in memory of the kinds that are named."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    places = [arith.addi(lane, number(first)) for first in range(0, plan.experts, _LANES)]
    bits = [_logit(plan, logits, token, place) for place in places]
    keys = [_key(value) for value in bits]
    chosen, largest, top = number(0), number(0), number(0)
    for turn in range(plan.taken):
        best = keys[0]
        for key in keys[1:]:
            best = arith.maxui(best, key)
        best = _over_lanes("max", best)
        where = number(plan.experts)
        for key, place in zip(keys, places, strict=True):
            where = arith.minui(where, arith.select(_equal(key, best), place, number(plan.experts)))
        where = _over_lanes("min", where)
        keys = [arith.select(_equal(place, where), number(0), key) for key, place in zip(keys, places, strict=True)]
        mine = _equal(lane, number(turn))
        chosen, largest = arith.select(mine, where, chosen), arith.select(mine, best, largest)
        top = top if turn else best
    highest = arith.bitcast(f32, _unkey(top))
    inside = arith.cmpi(arith.CmpIPredicate.ult, lane, number(plan.taken))
    share = arith.select(inside, _exp(arith.subf(arith.bitcast(f32, _unkey(largest)), highest)), mgpu.c(0.0, f32))
    total = share
    if not choice.normed:
        total = mgpu.c(0.0, f32)
        for value in bits:
            total = arith.addf(total, _exp(arith.subf(arith.bitcast(f32, value), highest)))
    share = arith.mulf(arith.divf(share, _summed(total)), mgpu.c(choice.scale, f32))
    with when(inside):
        entry = arith.addi(mul(token, plan.taken), lane)
        for (target, space), value in zip(targets, (chosen, arith.bitcast(i32, share)), strict=True):
            where = word_address(target, entry) if space == "global" else arith.addi(target, mul(entry, 4))
            mgpu.utils.inline_ptx(f"st.{space}.b32 [$0], $1;", where, value, has_side_effects=True)


def _logit(plan: Plan, logits, token, place):
    """Bits of one logit; -inf past the last expert."""
    i32 = ir.IntegerType.get_signless(32)
    there = arith.cmpi(arith.CmpIPredicate.ult, place, number(plan.experts))
    where = arith.addi(mul(token, plan.experts), arith.select(there, place, number(0)))
    value = mgpu.utils.inline_ptx(
        "ld.global.b32 $0, [$1];", word_address(logits, where), result_types=i32, has_side_effects=True
    )
    return arith.select(there, value, number(0xFF800000 - (1 << 32)))


def _key(bits):
    """Bits of a float32 as an integer without sign in the same order, larger than 0; both zeros are the same."""
    bits = arith.select(_equal(bits, number(-_SIGN)), number(0), bits)
    negative = arith.cmpi(arith.CmpIPredicate.slt, bits, number(0))
    return arith.xori(bits, arith.select(negative, number(-1), number(-_SIGN)))


def _unkey(key):
    negative = arith.cmpi(arith.CmpIPredicate.sge, key, number(0))
    return arith.xori(key, arith.select(negative, number(-1), number(-_SIGN)))


def _equal(a, b):
    return arith.cmpi(arith.CmpIPredicate.eq, a, b)


def _over_lanes(kind: str, value):
    i32 = ir.IntegerType.get_signless(32)
    return mgpu.utils.inline_ptx(
        f"redux.sync.{kind}.u32 $0, $1, 0xffffffff;", value, result_types=i32, has_side_effects=True, convergent=True
    )


def _summed(value):
    """The sum over a warp's lanes, in every lane, always in the same order."""
    f32 = ir.F32Type.get()
    for distance in (16, 8, 4, 2, 1):
        other = mgpu.utils.inline_ptx(
            f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, 0xffffffff;", value, result_types=f32, has_side_effects=True,
            convergent=True,
        )  # fmt: skip
        value = arith.addf(value, other)
    return value


def _exp(value):
    f32 = ir.F32Type.get()
    scaled = arith.mulf(value, mgpu.c(_LOG2E, f32))
    return mgpu.utils.inline_ptx("ex2.approx.ftz.f32 $0, $1;", scaled, result_types=f32)
