"""MXFP4 in tiles (`core.mxfp4`): widened to a matrix instruction's operand in registers, and what follows their products.

Every function stands for code that all 128 threads of a warpgroup run together.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from dflash_kernels.core.device import WARPGROUP
from dflash_kernels.core.mxfp4 import PAIRS, PIECE, PIECES, SHIFT, TILE, tile_numbers
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.thread_op import GLOBAL, MATRIX, SCALAR, matrix, thread_op


def _pairs() -> str:
    """PTX that makes four pairs of bfloat16 of a word: rotated, masked (`core.mxfp4.PAIRS`), times the factor of the pair's row."""
    lines, rotated = ["{ .reg .b32 a, b, r;"], (0, "$4")
    for slot, parts in enumerate(PAIRS):
        for place, (turn, mask) in enumerate(parts):
            # Shifts have more units than rotations: a word is rotated where a bit under the mask comes over its end alone, and
            # what is farther on is a shift of that.
            for by, word in ((turn, "$4"), (turn - rotated[0], rotated[1])):
                if by >= 0 and not any(mask >> bit & 1 for bit in range(by)):
                    lines.append(f"shl.b32 b, {word}, {by};" if by else f"mov.b32 b, {word};")
                    break
            else:
                lines.append(f"shf.l.wrap.b32 r, $4, $4, {turn}; mov.b32 b, r;")
                rotated = turn, "r"
            lines.append(f"lop3.b32 a, b, {mask}, a, 0xEA;" if place else f"and.b32 a, b, {mask};")
        lines.append(f"mul.rn.bf16x2 ${slot}, a, ${5 + slot % 2};")
    return " ".join([*lines, "}"])


_PAIRS = _pairs()


def _widened_interpreted(tiles: Any, *, place: int = 0) -> Any:
    return tile_numbers(tiles[pl.ds(place * PIECES, PIECES)]).astype(jnp.bfloat16)


@thread_op(args=(GLOBAL,), returns=lambda *_, **__: matrix((TILE, TILE), jnp.bfloat16), interpret=_widened_interpreted)
def widened(tiles: Any, *, place: int = 0) -> Any:
    """Tile number `place` of tiles of MXFP4 `[n * 4, 136]` in shared memory as bfloat16, times 2 to the minus `SHIFT`, exactly."""
    i32, pair = th.i32(), ir.VectorType.get((2,), ir.BF16Type.get())
    lane, warp = th.lane_and_warp()
    base = th.add(th.address(tiles, space=3), 4 * place * PIECES * PIECE)
    words = th.load(th.add(base, th.mul(th.thread(), 16)), 4, op="ld.shared")
    of_rows = th.add(th.mul(warp, 32), th.mul(th.div(lane, 4), 4))
    scales = th.load(th.add(base, th.add(of_rows, 4 * 512)), op="ld.shared")[0]
    # A factor is a bfloat16 without sign and fraction, twice: its exponent is a byte of the scales' word. A product may read one
    # half of a register twice, which spares the permutation.
    even, odd = (
        utils.inline_ptx(f"{{ .reg .b32 a; {shift} and.b32 $0, a, 0x7F807F80; }}", scales, result_types=i32)
        for shift in ("shl.b32 a, $1, 7;", "shr.u32 a, $1, 1;")
    )
    factors = [
        utils.inline_ptx(f"{{ .reg .b16 l, h; mov.b32 {{l, h}}, $1; mov.b32 $0, {{{half}, {half}}}; }}", pair, result_types=i32)
        for half in "lh" for pair in (even, odd)
    ]  # fmt: skip
    registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((TILE, TILE)), dtype=object)
    for step, word in enumerate(words):
        upper, lower = factors[step // 2], factors[2 + step // 2]
        # A number's bits at a bfloat16's places are the number times 2^-126, the subnormal one included.
        slots = utils.inline_ptx(_PAIRS, word, upper, lower, result_types=[i32] * 4)
        for slot, value in enumerate(slots):
            registers[0, 2 * step + slot // 2, 0, 0, slot % 2, 0, 0, 0, 0] = utils.bitcast(value, pair)
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def _kept_interpreted(memory: Any, product: Any) -> None:
    memory[...] = product


@thread_op(args=(GLOBAL, MATRIX), interpret=_kept_interpreted)
def keep(memory: Any, product: Any) -> None:
    """Stores a matrix `[64, N]` float32 to as much shared memory, for the same threads of another warpgroup."""
    base = th.add(th.address(memory, space=3), th.mul(th.thread(), 8))
    for index, place in enumerate(np.ndindex(product.registers.shape)):
        both = [vector.extract(product.registers[place], [], [i]) for i in range(2)]
        th.inline("st.shared.v2.f32 [$0], {$1, $2};", th.add(base, index * 8 * WARPGROUP), *both)


@thread_op(
    args=(MATRIX, GLOBAL), returns=lambda product, _: matrix(product.shape), interpret=lambda product, kept: product + kept[...]
)  # fmt: skip
def add_kept(product: Any, memory: Any) -> Any:
    """`product` plus the matrix that another warpgroup kept."""
    base = th.add(th.address(memory, space=3), th.mul(th.thread(), 8))
    registers, pair = np.empty_like(product.registers), ir.VectorType.get((2,), th.f32())
    for index, place in enumerate(np.ndindex(registers.shape)):
        other = th.load(th.add(base, index * 8 * WARPGROUP), 2, op="ld.shared", kind="f32")
        registers[place] = th.fadd(product.registers[place], vector.from_elements(pair, other))
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


_WORDS = plgpu.ShapeDtypeStruct(
    (WARPGROUP,), jnp.dtype(jnp.int32), layout=plgpu.Layout.WG_STRIDED((WARPGROUP,), vec_size=1)
)  # one of each thread


def _gated_bias_interpreted(bias: Any, tile: Any) -> Any:
    # A word is a row's gate and up; four neighbouring threads have the same one.
    pairs = bias[pl.ds(tile * TILE, TILE)].reshape(-1, 2)
    return jnp.repeat(lax.bitcast_convert_type(pairs, jnp.int32), WARPGROUP // (TILE // 2))


@thread_op(args=(GLOBAL, SCALAR), returns=_WORDS, interpret=_gated_bias_interpreted)
def gated_bias(bias: Any, tile: Any) -> Any:
    """Bias that `store_gated` adds to a tile's gates and ups: loaded now, needed later.

    Args:
      bias: `[E * 2F]` bfloat16 in global memory, gates and ups in turns.
      tile: which rows, counted over all experts.
    """
    lane, warp = th.lane_and_warp()
    row = th.add(th.mul(warp, 8), th.div(lane, 4))
    word = th.load(th.word_address(bias, th.add(th.mul(tile, TILE // 2), row)), op="ld.global.nc")[0]
    held = vector.from_elements(ir.VectorType.get((1,), th.i32()), [word])
    layout = mgpu.WGStridedFragLayout((WARPGROUP,), 1)
    return mgpu.FragmentedArray(_registers=np.array([held], dtype=object), _layout=layout, _is_signed=True)


def _store_gated_interpreted(
    target: Any, product: Any, bias: Any, feature: Any, first: Any, live: Any, *, alpha: float, limit: float
) -> None:
    halves = (product * 2.0**SHIFT).reshape(4, 2, 8, -1)
    biases = lax.bitcast_convert_type(bias[:: WARPGROUP // (TILE // 2)], jnp.bfloat16)
    biases = biases.astype(jnp.float32).reshape(4, 8, 2, 1)
    gates, ups = (halves[:, half] + biases[:, :, half] for half in range(2))
    gates, ups = jnp.minimum(gates, limit), jnp.clip(ups, -limit, limit)
    found = ((ups + 1) * gates * jax.nn.sigmoid(alpha * gates)).reshape(TILE // 2, -1).astype(target.dtype)
    for column in range(found.shape[1]):

        @pl.when(column < live)
        def _(column=column):
            target.at[first + column, pl.ds(feature, TILE // 2)][...] = found[:, column]


@thread_op(args=(GLOBAL, MATRIX, _WORDS.layout, SCALAR, SCALAR, SCALAR), interpret=_store_gated_interpreted)
def store_gated(
    target: Any, product: Any, bias: Any, feature: Any, first: Any, live: Any, *, alpha: float, limit: float
) -> None:
    """SwiGLU of a tile's gates and ups to the `live` rows of `target` from `first` on, 32 features from `feature` on.

    Args:
      target: `[entries, F]` bfloat16 in global memory.
      product: `[64, N]`, times 2 to the minus `SHIFT`: of each sixteen rows eight gates, then their ups.
      bias: `gated_bias` of the same rows.
    """
    lane, warp = th.lane_and_warp()
    row, column = th.add(th.mul(warp, 8), th.div(lane, 4)), th.mul(th.rem(lane, 4), 2)
    both = vector.extract(bias.registers.item(), [], [0])
    biases = [th.as_real(th.shift_left(both, 16)), th.as_real(th.bit_and(both, -(1 << 16)))]
    scale, one = th.real(2.0**SHIFT), th.real(1.0)
    minus = th.real(-alpha)
    pitch, base = th.shape_and_strides(target)[1][0], th.word_address(target, th.number(0))
    for columns in range(product.shape[1] // 8):
        pairs = [product.registers[0, columns, 0, 0, half, 0, 0, 0, 0] for half in range(2)]
        for which in range(2):
            gates, ups = (
                th.fadd(th.fmul(vector.extract(pair, [], [which]), scale), own)
                for pair, own in zip(pairs, biases, strict=True)
            )
            gates, ups = _at_most(gates, limit), _at_least(_at_most(ups, limit), -limit)
            grown = th.fadd(one, th.exp(th.fmul(minus, gates)))
            value = th.fdiv(th.fmul(th.fadd(ups, one), gates), grown)
            place = th.add(column, 8 * columns + which)
            element = th.add(th.mul(th.add(first, place), pitch), th.add(feature, row))
            text = "{ .reg .b16 h; cvt.rn.bf16.f32 h, $2; @$0 st.global.b16 [$1], h; }"
            _if_there(th.compare(place, "ult", live), text, th.offset(base, th.mul(element, 2)), value)


def _if_there(there: Any, text: str, address: Any, value: Any) -> None:
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"), [there, address, value], text, "b,l,f", has_side_effects=True
    )  # fmt: skip


def _at_most(value: Any, bound: float) -> Any:
    # A NaN stays one.
    return utils.inline_ptx("min.NaN.f32 $0, $1, $2;", value, th.real(bound), result_types=th.f32())


def _at_least(value: Any, bound: float) -> Any:
    return utils.inline_ptx("max.NaN.f32 $0, $1, $2;", value, th.real(bound), result_types=th.f32())
