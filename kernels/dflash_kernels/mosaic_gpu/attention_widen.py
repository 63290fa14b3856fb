"""Tiles of float8 pages as tiles of float16, from shared memory to shared memory; below Pallas, in terms of single threads."""

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir.dialects import arith

from dflash_kernels.fused.layer.mosaic_gpu_plan import KEYS
from dflash_kernels.mosaic_gpu import ptx as th

_LINE = 128  # bytes of a swizzled row: 128 columns of float8, 64 of float16


def widen(source, target) -> None:
    """All 128 threads of a warpgroup: `source [64, 128]` float8_e4m3fn to `target [2, 64, 64]` float16, both in swizzled tiles.

    Eight threads that go to memory together have 16 columns each, of two rows whose swizzles leave them no bank in common. At the
    end matrix instructions may read the target, and copies may fill the source.
    """
    lane, warp = th.lane_and_warp()
    thread = th.add(th.mul(warp, 32), lane)
    column, other = th.rem(thread, 4), th.rem(th.div(thread, 4), 2)
    first = th.xor(th.mul(th.div(thread, 8), 2), th.mul(other, 5))
    swizzle, line = th.rem(first, 8), th.mul(first, _LINE)
    sources, targets = (th.add(th.address(ref, space=3), line) for ref in (source, target))
    loaded = []
    for block in range(2):
        place = th.mul(th.xor(th.add(column, 4 * block), swizzle), th.CHUNK)
        for start in range(0, KEYS, 32):
            words = utils.inline_ptx(
                "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", th.add(th.add(sources, start * _LINE), place),
                result_types=[th.i32()] * 4, has_side_effects=True,
            )  # fmt: skip
            loaded.append((block, start, words))
    for block, start, words in loaded:
        halves = [half for word in words for half in _halves(word)]
        for chunk in range(2):
            place = th.mul(th.xor(th.add(th.mul(column, 2), chunk), swizzle), th.CHUNK)
            address = th.add(th.add(targets, (block * KEYS + start) * _LINE), place)
            four = halves[4 * chunk : 4 * chunk + 4]
            utils.inline_ptx("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", address, *four, has_side_effects=True)
    utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)
    utils.warpgroup_barrier()


def narrowed(values, scale):
    """float32 numbers over a scale as words of four float8_e4m3fn, cut to their range."""
    words = []
    for start in range(0, len(values), 4):
        four = [arith.divf(value, scale) for value in values[start : start + 4]]
        word = utils.inline_ptx(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;"
            " mov.b32 $0, {low, high}; }",
            *four, result_types=th.i32(),
        )  # fmt: skip
        words.append(word)
    return words


def widened(words):
    """Words of four float8_e4m3fn as words of two float16."""
    return [half for word in words for half in _halves(word)]


def _halves(word):
    return utils.inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
        word, result_types=[th.i32()] * 2,
    )  # fmt: skip
