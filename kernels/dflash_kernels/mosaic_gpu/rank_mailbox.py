"""The mailbox between GPUs: words that every rank writes to all ranks' memory, and reads when they are there.

`core.rank_exchange` says why three areas take turns. Other GPUs' memory is reached by plain addresses, over NVLink, with stores
that the whole system sees; XLA lets the GPUs of a process reach one another's. Here is a thread's part: each of a place's words is
written, awaited and emptied by one thread on every rank.
"""

# pyright: reportAbstractUsage=false, reportCallIssue=false

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from dflash_kernels.core.device import WARPGROUP
from dflash_kernels.core.layouts import EMPTY
from dflash_kernels.core.rank_exchange import AREAS
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.mailbox import VECTOR, await_all, filled, set_count, store, words_of
from dflash_kernels.mosaic_gpu.thread_op import GLOBAL, MATRIX, SCALAR, matrix, thread_op

AT_ONCE = 96  # words of other ranks that a thread waits for together: they stand in registers


def strided(width: int, vector: int = VECTOR) -> Any:
    return plgpu.Layout.WG_STRIDED((width,), vec_size=vector)


@thread_op(args=(GLOBAL, GLOBAL))
def own_address(area, found) -> None:
    """Writes the address of `area`, two words, to `found`."""
    with th.one_thread():
        utils.inline_ptx("st.global.b64 [$0], $1;", th.address(found), th.address(area), has_side_effects=True)


@thread_op(
    args=lambda row, *_: (strided(row.shape[0]), GLOBAL, GLOBAL, GLOBAL, SCALAR),
    returns=lambda row, *_: plgpu.ShapeDtypeStruct(row.shape, jnp.dtype(jnp.float32), layout=strided(row.shape[0])),
)
def summed_row(row: Any, counts, area, peers, place):
    """The sum of all ranks' rows at a place in float32, added in order of ranks.

    Args:
      row: `[D]`, bfloat16 or float32, four neighbouring numbers a thread.
      counts, area, peers: of a `RankExchange` whose places have the words of one row.
      place: int32 scalar.
    """
    words = [word for register in row.registers.flat for word in _words(register)]
    total: list[Any] = []
    for found in _swapped(words, counts, area, peers, place):
        numbers = [number for word in found for number in _numbers(word, row.mlir_dtype)]
        total = numbers if not total else [arith.addf(*pair) for pair in zip(total, numbers, strict=True)]
    kind = ir.VectorType.get((VECTOR,), th.f32())
    groups = [total[first : first + VECTOR] for first in range(0, len(total), VECTOR)]
    registers = np.array([vector.from_elements(kind, group) for group in groups], dtype=object)
    return mgpu.FragmentedArray(
        _registers=registers.reshape(row.registers.shape), _layout=strided(row.shape[0]).to_mgpu(), _is_signed=None
    )


@thread_op(args=(MATRIX, GLOBAL, GLOBAL, GLOBAL, SCALAR), returns=lambda tile, *_: matrix(tile.shape, tile.dtype))
def summed_tile(tile: Any, counts, area, peers, place):
    """The sum of all ranks' tiles at a place, added in order of ranks.

    Args:
      tile: float32 in the layout of a matrix instruction's result.
      counts, area, peers: of a `RankExchange` whose places have the words of one tile.
      place: int32 scalar.
    """
    total: list[Any] = []
    for found in _swapped(words_of(tile.registers), counts, area, peers, place):
        numbers = [arith.bitcast(th.f32(), word) for word in found]
        total = numbers if not total else [arith.addf(*pair) for pair in zip(total, numbers, strict=True)]
    registers = np.empty_like(tile.registers)
    for index, at in enumerate(np.ndindex(registers.shape)):
        kind = tile.registers[at].type
        registers[at] = vector.from_elements(kind, total[2 * index : 2 * index + 2])
    return mgpu.FragmentedArray(_registers=registers, _layout=tile.layout, _is_signed=tile.is_signed)


@thread_op(args=(GLOBAL, GLOBAL, GLOBAL, GLOBAL, GLOBAL, SCALAR))
def gathered_words(given, found, counts, area, peers, place) -> None:
    """Writes all ranks' 512 words at a place to `found [ranks, words]`, of which `given [words]` are this one's."""
    pitch = th.shape_and_strides(found)[0][1]
    first = th.add(th.mul(place, WARPGROUP * VECTOR), th.mul(th.thread(), VECTOR))
    words = th.load(th.word_address(given, first), VECTOR)
    for rank, theirs in enumerate(_swapped(words, counts, area, peers, place)):
        names = ", ".join(f"${i + 1}" for i in range(VECTOR))
        to = th.word_address(found, th.add(first, rank * pitch))
        utils.inline_ptx(f"st.global.v4.b32 [$0], {{{names}}};", to, *theirs, has_side_effects=True)


def _swapped(words: Sequence[Any], counts, area, peers, place) -> list[list[Any]]:
    """These words of every rank, in order of ranks: one launch's use of a place."""
    (_, ranks, places, pitch), _ = th.shape_and_strides(area)
    groups = [list(words[first : first + VECTOR]) for first in range(0, len(words), VECTOR)]
    assert pitch == len(words) * WARPGROUP, (pitch, len(words))
    count = th.load(th.word_address(counts, place), op="ld.relaxed.gpu.global")[0]
    rank = th.load(th.word_address(peers, th.number(2 * ranks)))[0]

    def offset(turn, writer, group: int):
        """Bytes from an area's beginning to this thread's words."""
        row = th.add(th.mul(th.add(th.mul(turn, ranks), writer), places), place)
        word = th.add(th.mul(row, pitch), th.mul(th.thread(), len(groups[group])))
        return th.widen_index(th.mul(th.add(word, group * VECTOR * WARPGROUP), 4))

    own, now, later = th.address(area), th.rem(count, AREAS), th.rem(th.add(count, AREAS - 1), AREAS)
    _require_own(own, _peer(peers, rank))
    filled_groups = [[filled(word) for word in group] for group in groups]
    for distance in range(ranks):
        # The next rank first, so that not all write to the same one.
        peer = _peer(peers, th.rem(th.add(rank, (distance + 1) % ranks), ranks))
        for index, group in enumerate(filled_groups):
            store(th.add(peer, offset(now, rank, index)), group, scope="sys")
    for writer in range(ranks):
        for index, group in enumerate(groups):
            store(th.add(own, offset(later, th.number(writer), index)), [th.number(EMPTY)] * len(group))
    found = list[list[Any]]()
    together = max(1, AT_ONCE // len(words))
    for first in range(0, ranks, together):
        writers = range(first, min(first + together, ranks))
        found += _awaited([
            [(th.add(own, offset(now, th.number(writer), index)), len(group)) for index, group in enumerate(groups)]
            for writer in writers
        ])  # fmt: skip
    set_count(counts, place, th.add(count, 1))
    return found


def _awaited(wanted: list[list[tuple[Any, int]]]) -> list[list[Any]]:
    """The words at several lists of addresses, each with how many, when all are there."""
    flat = [one for each in wanted for one in each]
    got: dict[int, list[Any]] = {}
    for width in sorted({width for _, width in flat}):
        places = [place for place, (_, its) in enumerate(flat) if its == width]
        words = await_all([flat[place][0] for place in places], "u32", width, scope="sys")
        got |= {place: list(words[index * width : (index + 1) * width]) for index, place in enumerate(places)}
    found, place = [], 0
    for each in wanted:
        found.append([word for index in range(len(each)) for word in got[place + index]])
        place += len(each)
    return found


def _peer(peers, rank):
    """Address of a rank's area."""
    place = th.word_address(peers, th.mul(rank, 2))
    return utils.inline_ptx("ld.global.b64 $0, [$1];", place, result_types=th.i64(), has_side_effects=True)


def _require_own(own, told) -> None:
    """Ends the program where its memory does not lie where the others were told: they would write to somebody else's."""
    utils.inline_ptx(
        "{ .reg .pred p; setp.ne.b64 p, $0, $1; @p trap; }", own, told, has_side_effects=True
    )  # fmt: skip


def _words(register) -> list[Any]:
    """A vector of four numbers as words."""
    kind = ir.VectorType(register.type)
    count = kind.shape[0] * utils.bitwidth(kind.element_type) // 32
    held = vector.bitcast(ir.VectorType.get((count,), th.i32()), register)
    return [vector.extract(held, dynamic_position=[], static_position=[i]) for i in range(count)]


def _numbers(word, dtype) -> list[Any]:
    """The float32 of a word, or those of its two bfloat16."""
    if utils.bitwidth(dtype) == 32:
        return [arith.bitcast(th.f32(), word)]
    both = (th.shift_left(word, 16), th.bit_and(word, -(1 << 16)))
    return [arith.bitcast(th.f32(), half) for half in both]
