"""The sampling kernel for Hopper: radix selection of each filter's threshold, then a Gumbel-max argmax; one CTA a row.

Every pass reads the row from the L2 again, but for chunks that it cannot need. A filter keeps what is not below a threshold, which
is searched for among the numbers that bfloat16 has, two bits with each pass. The first pass keeps the largest number of each of
some thousand places: what enough of these reach, enough of the row do, so that a search in registers leaves few bits to passes over
the row. It also keeps the largest number of every chunk: chunks without one that may be kept are never looked at again, and most
are such where a few tokens are kept, which is what filters are for.
"""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.mosaic_gpu.rows import WARPS, Reduction, reduce_into
from dflash_kernels.mosaic_gpu.thread_op import kernel

WARPGROUPS = 8  # of a CTA
VECTOR = 8  # neighbouring entries of one thread
CHUNK = 128 * VECTOR  # of one warpgroup
AT_ONCE = 4  # chunks asked for before the first is looked at
MOST_SUMS = 3  # that warpgroups exchange
LOWEST = -32_641  # minus infinity among `_whole`

_STRIDED = plgpu.Layout.WG_STRIDED((CHUNK,), vec_size=VECTOR)


def choose(
    logits: jax.Array, noise: jax.Array, temperature: jax.Array, log_min_p: jax.Array, top_k: jax.Array, top_p: jax.Array,
    warpgroups: int = WARPGROUPS, interpret: Any = None,
) -> jax.Array:  # fmt: skip
    """`logits [R, V]` bfloat16, `noise [R, V]` float32, all others `[R]`: as `filtered_choice` has them, but for `min_p`."""

    most = -(-logits.shape[1] // (CHUNK * warpgroups * AT_ONCE)) * AT_ONCE  # chunks of a warpgroup

    def body(*refs: Any, **buffers: Any) -> None:
        _Row(warpgroups, *refs, **buffers).run()

    body.__name__ = "filtered_choice"  # what profilers show
    launch = kernel(
        body, out_type=jax.ShapeDtypeStruct(logits.shape[:1], jnp.int32), grid=(logits.shape[0],), grid_names=("row",),
        num_threads=warpgroups, thread_name="wg",
        scratch_types={
            "sums": plgpu.SMEM((warpgroups, MOST_SUMS), jnp.float32),
            "scratch": plgpu.SMEM((warpgroups, WARPS), jnp.float32),
            "largest": plgpu.SMEM((warpgroups, most), jnp.float32),
            "alive": plgpu.SMEM((warpgroups, most + 1), jnp.int32),
            "met": plgpu.Barrier(num_arrivals=warpgroups),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True), interpret=interpret,
    )  # fmt: skip
    return launch(logits, noise, temperature, log_min_p, top_k, top_p)


class _Row:
    """The program of one CTA, for one row. Every warpgroup knows every scalar."""

    def __init__(self, warpgroups, logits, noise, temperature, log_min_p, top_k, top_p, out, **buffers):
        self.warpgroups, self.out = warpgroups, out
        self.row, self.wg = lax.axis_index("row"), lax.axis_index("wg")
        self.logits, self.noise = logits, noise
        self.sums, self.scratch, self.met = (buffers[name] for name in ("sums", "scratch", "met"))
        # Of every chunk the largest number, as a whole one, and those that may hold what stays.
        self.largest, self.alive = buffers["largest"], buffers["alive"]
        given, self.size = temperature[self.row], logits.shape[1]
        self.chunks = lax.div(-(-self.size // CHUNK) - self.wg + (warpgroups - 1), jnp.int32(warpgroups))
        self.count = self.chunks
        self.samples = given > 0
        # Of less than float32's smallest normal number only the largest logits are left either way.
        self.temperature = jnp.where(self.samples, jnp.maximum(given, jnp.finfo(jnp.float32).tiny), jnp.float32(1))
        self.log_min_p, self.top_k, self.top_p = log_min_p[self.row], top_k[self.row], top_p[self.row]

    def run(self) -> None:
        lanes = self._look()
        top, highest = self._met("max", [lanes, _whole(lanes).astype(jnp.float32)])
        self.top, highest = top, highest.astype(jnp.int32)

        def of_row(weight: Callable) -> Callable:
            def sums(least: tuple) -> list:
                def add(totals, x, *_):
                    return tuple(t + weighed for t, weighed in zip(totals, _reaching(x, weight(x), least), strict=True))

                totals = self._over((_full(jnp.float32(0)),) * len(least), add)
                return self._met("add", totals)

            return sums

        def of_lanes(weight: Callable) -> Callable:
            weights = weight(lanes)
            return lambda least: self._met("add", _reaching(lanes, weights, least))

        def search(weight: Callable, low, enough, wanted):
            """The largest number from `low` on that `enough` weight reaches."""
            for sums in (of_lanes(weight), of_row(weight)):
                low = _search(low, jnp.where(wanted, highest, low), enough, sums)
                self._leave_out(low)
            return low

        some = self.samples & (self.top_k > 0) & (self.top_k < self.size)
        low = jnp.where(self.samples, jnp.int32(LOWEST), highest)
        low = search(lambda x: _full(jnp.float32(1)), low, self.top_k.astype(jnp.float32), some)
        least = _number(low)

        def share(x):
            scaled = (x - top) * (1 / self.temperature)
            return jnp.where((x >= least) & (scaled >= self.log_min_p), jnp.exp(scaled), 0.0)

        some = self.samples & (self.top_p < 1)
        once = jnp.where(some, 1, 0)
        total = lax.fori_loop(0, once, lambda *_: of_row(share)((jnp.float32(-jnp.inf),))[0], jnp.float32(0))
        # A top_p below float32's smallest number is 0, which every number is reached by.
        enough = jnp.maximum(self.top_p * total, jnp.finfo(jnp.float32).tiny)
        least = _number(search(share, low, enough, some))
        self._choose(least)

    def _look(self):
        """The first pass: the largest number of each place of the warpgroup's chunks; those of chunks go to shared memory."""

        def place(chunk, _):
            self.alive[self.wg, chunk] = chunk

        lax.fori_loop(0, self.chunks, place, None)

        def keep(most, x, number, _):
            self._reduce("max", _whole(x).astype(jnp.float32), self.largest, number)
            return jnp.maximum(most, x)

        return self._over(_full(jnp.float32(-jnp.inf)), keep)

    def _leave_out(self, low) -> None:
        """Passes from here on are over chunks with a number from `low` on."""

        def add(chunk, count):
            stays = self.largest[self.wg, chunk] >= low.astype(jnp.float32)
            # Threads that are ahead read the list already: what is left out goes behind it, not where another's place will be.
            self.alive[self.wg, jnp.where(stays, count, self.alive.shape[1] - 1)] = chunk
            return count + stays.astype(jnp.int32)

        self.count = lax.fori_loop(0, self.chunks, add, jnp.int32(0))

    def _choose(self, least) -> None:
        """The place of the largest of what is left, with noise."""
        louder = jnp.where(self.samples, jnp.float32(1), jnp.float32(0))

        def better(best, x, _, chunk, noise):
            values, places = best
            _, start = self._begins(chunk)
            scaled = (x - self.top) / self.temperature
            stays = (x >= least) & ((scaled >= self.log_min_p) | ~self.samples)
            value = jnp.where(stays, scaled + noise * louder, -jnp.inf)
            larger = value > values  # of equal ones the first: a thread's places only grow
            return jnp.where(larger, value, values), jnp.where(larger, _places() + start, places)

        values, places = self._over((_full(jnp.float32(-jnp.inf)), _full(jnp.int32(self.size))), better, noise=True)
        (largest,) = self._met("max", [values])
        found = jnp.where(values == largest, places.astype(jnp.float32), jnp.float32(self.size))
        (first,) = self._met("min", [found])

        @pl.when(self.wg == 0)
        def _():
            # Of a row without a number the last place: some place there is.
            self.out[self.row] = jnp.minimum(first.astype(jnp.int32), self.size - 1)

    def _over(self, carry: Any, step: Callable, *, noise: bool = False) -> Any:
        """`step(carry, x, number, chunk)` for what is left of the warpgroup's chunks, or `step(carry, x, number, chunk, noise)`.

        Numbers count from 0 to a multiple of `AT_ONCE`; x is -inf for those that there are no chunks for.
        """
        at_once = 2 if noise else AT_ONCE

        def load(ref, start):
            source = ref.at[self.row, pl.ds(start, CHUNK)]
            return plgpu.load(source, layout=_STRIDED, optimized=False)

        def visit(turn, carry):
            numbers = [turn * at_once + place for place in range(at_once)]
            # Past the last one it is looked at again, and all of it left out.
            chunks = [self.alive[self.wg, jnp.minimum(number, self.count - 1)] for number in numbers]
            begin = [self._begins(chunk) for chunk in chunks]
            found = [[load(ref, start) for ref in (self.logits, self.noise)[: 1 + noise]] for _, start in begin]
            for (x, *more), number, chunk, (first, start) in zip(found, numbers, chunks, begin, strict=True):
                own = jnp.where(number < self.count, first - start, CHUNK)
                x = jnp.where(_places() >= own, x.astype(jnp.float32), -jnp.inf)
                carry = step(carry, x, number, chunk, *more)
            return carry

        return lax.fori_loop(0, lax.div(self.count + (at_once - 1), jnp.int32(at_once)), visit, carry)

    def _begins(self, chunk) -> tuple:
        """Where a chunk begins, and where it is read: what would end beyond the row begins earlier, in another's numbers."""
        first = (chunk * self.warpgroups + self.wg) * CHUNK
        return first, jnp.minimum(first, self.size - CHUNK)

    def _met(self, kind: Reduction, chunks: Sequence) -> list:
        """Sums or the like of what all warpgroups have, in their order."""
        combine = {"add": lax.add, "max": jnp.maximum, "min": jnp.minimum}[kind]
        for place, chunk in enumerate(chunks):
            self._reduce(kind, chunk, self.sums, place)
        self._meet()
        found = []
        for place in range(len(chunks)):
            one = self.sums[0, place]
            for other in range(1, self.warpgroups):
                one = combine(one, self.sums[other, place])
            found.append(one)
        self._meet()  # before anyone writes again
        return found

    def _reduce(self, kind: Reduction, chunk, target, place) -> None:
        """A chunk's sum or the like to the warpgroup's line of `target`."""
        reduce_into(chunk, target, self.scratch, self.wg, place, kind=kind, vector=VECTOR)

    def _meet(self) -> None:
        plgpu.barrier_arrive(self.met)
        plgpu.barrier_wait(self.met)


def _search(low, high, enough, sums: Callable):
    """The largest whole number from `low` to `high` whose sum is at least `enough`, `low` where there is none: it falls with the
    numbers."""
    span = high - low
    digits = sum((span >= 4**place).astype(jnp.int32) for place in range(9))

    def more(step, found):
        unit = jnp.int32(1) << (2 * (digits - 1 - step))
        reached = sums(tuple(_number(found + unit * number) for number in (1, 2, 3)))
        return found + unit * sum((one >= enough).astype(jnp.int32) for one in reached)

    return lax.fori_loop(0, digits, more, low)


def _reaching(x, weights, least: tuple) -> list:
    return [jnp.where(x >= one, weights, 0.0) for one in least]


def _whole(numbers):
    """Whole numbers in the order of bfloat16's, for a chunk of float32 that are such."""
    raw = lax.bitcast_convert_type(numbers, jnp.int32) >> 16
    return raw ^ ((raw >> 15) & 0x7FFF)


def _number(whole):
    """The float32 of one of `_whole`, as a chunk: a scalar cannot be read as another type. Nothing reaches one beyond infinity."""
    raw = whole ^ ((whole >> 15) & 0x7FFF)
    return lax.bitcast_convert_type(_full(raw << 16), jnp.float32)


def _full(value):
    return plgpu.layout_cast(jnp.full((CHUNK,), value), _STRIDED)


def _places():
    return plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=_STRIDED)
