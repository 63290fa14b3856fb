"""The sampling kernel for Hopper: radix selection of each filter's threshold, then a Gumbel-max argmax.

One CTA takes a row, or, where nothing is filtered, one of its parts: a row alone would take as long as one multiprocessor needs
for it. Noise is made where it is added. No token of a chunk has more noise than that of its first arrival (`noise.py`). The tokens
that these arrivals belong to are drawn first, whose largest sum is about as large as the row's; then a thread hashes for the
numbers that may exceed it. Without filters the row is read once.

A filter keeps what is not below a threshold. The first pass over the row keeps the largest number of each of some thousand places:
what enough of these reach, enough of the row do, which a search in registers finds. Few numbers of the row reach that or what
`min_p` asks for. They are put in order in shared memory, where one warpgroup does the rest.

Where they are too many, or `top_p` alone decides, thresholds are searched for among the numbers that bfloat16 has, two bits with
each pass. A pass reads the row from the L2 again, but for chunks that it cannot need: the first one also keeps the largest number
of every chunk, and chunks without one that may be kept are never looked at again. Of the last pass these are chunks whose bound of
noise is too low, too.
"""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_kernels.core.device import WARPGROUP
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.noise import QUEUED, best_with_noise, noise_at, rest_with_noise
from dflash_kernels.mosaic_gpu.rows import WARPS, Reduction, numbers_at, reduce_into
from dflash_kernels.mosaic_gpu.short_list import MOST, append, count_reaching, in_order, reached_by, reaching
from dflash_kernels.mosaic_gpu.thread_op import FACTOR, SCALAR, kernel, thread_op
from dflash_kernels.sampling.noise import BITS, CHUNK, arrivals, exponential, hashed

WARPGROUPS = 8  # of a CTA
VECTOR = CHUNK // WARPGROUP  # neighbouring entries of one thread: a warpgroup looks at a chunk of noise at a time
AT_ONCE = 4  # chunks asked for before the first is looked at, at most
MOST_SUMS = 3  # that warpgroups exchange
LOWEST = -32_641  # minus infinity among `_whole`

# Temperature from which on sums keep their digits, whatever logit they are relative to.
WARM = 0.1
SLACK = 1e-4  # of a bound: more than the hardware's logarithm errs

_STRIDED = plgpu.Layout.WG_STRIDED((CHUNK,), vec_size=VECTOR)
_ONE_EACH = plgpu.Layout.WG_STRIDED((WARPGROUP,), vec_size=1)


def choose(
    logits: jax.Array, keys: jax.Array, temperature: jax.Array, limits: Sequence[jax.Array] = (), *, parts: int = 1,
    warpgroups: int = WARPGROUPS, at_once: int = AT_ONCE, interpret: Any = None,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """`logits [R or more, V]` bfloat16, `keys [R, 2]` uint32, all others `[R]`. Gives `[R, parts]` of each: the place of a
    part's choice, its sum less the part's largest logit, and that logit.

    Args:
      limits: the logarithm of `min_p`, `top_k` and `top_p`, of rows in one part; none where nothing is refused.
      parts: of a row, each with every so manyth chunk.
    """
    rows, size = keys.shape[0], logits.shape[1]
    most = -(-size // (CHUNK * warpgroups * parts * at_once)) * at_once  # chunks of a warpgroup
    listed = most + -most % (WARPGROUP // warpgroups)
    chunks = jnp.arange(parts)[:, None, None] + parts * (
        jnp.arange(warpgroups)[:, None] + warpgroups * jnp.arange(listed)
    )
    least, first = arrivals(keys, jnp.broadcast_to(chunks.reshape(-1), (rows, chunks.size)))
    tokens = chunks.reshape(-1) * CHUNK + first
    arrived = [each.reshape(rows, parts, warpgroups * listed) for each in (least, first, tokens)]

    def body(*refs: Any, **buffers: Any) -> None:
        _Row(warpgroups, parts, at_once, refs[:6], refs[6:-3], refs[-3:], **buffers).run()

    body.__name__ = "filtered_choice" if limits else "drawn_choice"  # what profilers show
    out = (jax.ShapeDtypeStruct((rows, parts), dtype) for dtype in (jnp.int32, jnp.float32, jnp.float32))
    launch = kernel(
        body, out_type=tuple(out), grid=(rows, parts), grid_names=("row", "part"), num_threads=warpgroups, thread_name="wg",
        scratch_types={
            "sums": plgpu.SMEM((warpgroups, MOST_SUMS), jnp.float32),
            "scratch": plgpu.SMEM((warpgroups, WARPS), jnp.float32),
            "least": plgpu.SMEM((warpgroups * listed,), jnp.float32),
            "most_noise": plgpu.SMEM((warpgroups * listed,), jnp.float32),
            "first": plgpu.SMEM((warpgroups * listed,), jnp.int32),
            "queues": plgpu.SMEM((warpgroups * WARPS * QUEUED,), jnp.int32),
            **(_filters(warpgroups, most) if limits else {}),
            "met": plgpu.Barrier(num_arrivals=warpgroups),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True), interpret=interpret,
    )  # fmt: skip
    return launch(logits, jax.lax.bitcast_convert_type(keys, jnp.int32), *arrived, temperature, *limits)


def _filters(warpgroups: int, most: int) -> dict[str, Any]:
    """Shared memory for filters; `most`: chunks of a warpgroup."""
    return {
        "largest": plgpu.SMEM((warpgroups, most), jnp.float32),
        "alive": plgpu.SMEM((warpgroups, most + 1), jnp.int32),
        "reached": plgpu.SMEM((warpgroups * WARPS,), jnp.int32),
        "lists": plgpu.SMEM((warpgroups, 2, MOST), jnp.int32),
        "lengths": plgpu.SMEM((warpgroups,), jnp.int32),
        "ordered": plgpu.SMEM((MOST,), jnp.float32),
        "weights": plgpu.SMEM((MOST,), jnp.float32),
    }


class _Row:
    """The program of one CTA, for one row or a part of it. Every warpgroup knows every scalar."""

    def __init__(self, warpgroups, parts, at_once, given, limits, out, **buffers):
        self.warpgroups, self.parts, self.at_once, self.out = warpgroups, parts, at_once, out
        self.row, self.part, self.wg = (lax.axis_index(name) for name in ("row", "part", "wg"))
        self.logits, keys, *self.arrivals, temperature = given
        self.key = [keys[self.row, word] for word in (0, 1)]
        self.sums, self.scratch, self.met = (buffers[name] for name in ("sums", "scratch", "met"))
        # The first arrival in each chunk, and its noise.
        self.least, self.most_noise, self.first = (buffers[name] for name in ("least", "most_noise", "first"))
        self.queues, self.listed = buffers["queues"], self.least.shape[0] // warpgroups
        given, self.size = temperature[self.row], self.logits.shape[1]
        others = self.wg * parts + self.part  # chunks before the warpgroup's first one
        self.chunks = lax.div(-(-self.size // CHUNK) - others + (warpgroups * parts - 1), jnp.int32(warpgroups * parts))
        self.count = self.chunks
        self.samples = given > 0
        self.noise_factor = jnp.where(self.samples, jnp.float32(1), jnp.float32(0))
        # Of less than float32's smallest normal number only the largest logits are left either way.
        self.temperature = jnp.where(self.samples, jnp.maximum(given, jnp.finfo(jnp.float32).tiny), jnp.float32(1))
        self.filters = bool(limits)
        if self.filters:
            self.log_min_p, self.top_k, self.top_p = (limit[self.row] for limit in limits)
            # Of every chunk the largest number, and those that may hold what stays.
            self.largest, self.alive = buffers["largest"], buffers["alive"]
            self.reached, self.lists, self.lengths, self.ordered, self.weights = (
                buffers[name] for name in ("reached", "lists", "lengths", "ordered", "weights")
            )

    def run(self) -> None:
        arrived = self._load_arrivals()
        if not self.filters:
            self.top = self._shift(arrived)
            self._choose(arrived)
            return
        lanes = self._look()
        top, highest = self._met("max", [lanes, _whole(lanes).astype(jnp.float32)])
        self.top, highest = top, highest.astype(jnp.int32)
        counts = self.samples & (self.top_k > 0) & (self.top_k < self.size)
        low = jnp.where(self.samples, jnp.int32(LOWEST), highest)
        low = _search(low, jnp.where(counts, highest, low), self.top_k, self._lanes_that_reach(lanes))
        least = _as_number(low)

        def may_stay(largest):
            return (largest >= least) & (((largest - top) / self.temperature >= self.log_min_p) | ~self.samples)

        self._leave_out(lambda chunk: may_stay(self.largest[self.wg, chunk]))
        listed = self._list(low, counts | ~self.samples | (self.log_min_p > -jnp.inf))
        fits = (listed > 0) & (listed <= MOST)

        @pl.when(fits & (self.wg == 0))
        def _():
            self._choose_listed(listed, counts)

        @pl.when(~fits)
        def _():
            self._choose(arrived, self._least_that_stays(lanes, low, highest, counts))

    def _shift(self, arrived: list[tuple]):
        """What logits are compared with: the largest one of the first arrivals', or where that is too far from the others the
        largest of all."""
        self._reduce("max", functools.reduce(jnp.maximum, (of_first for of_first, _ in arrived)), self.sums, 0)
        shift = self.sums[self.wg, 0]
        too_far = (self.temperature < WARM) | (shift == -jnp.inf)

        def look(*_):
            return self._met(
                "max", [self._over(_full(jnp.float32(-jnp.inf)), lambda most, x, *_: jnp.maximum(most, x))]
            )[0]

        return lax.fori_loop(0, too_far.astype(jnp.int32), look, shift)

    def _list(self, low, wanted):
        """Lists the numbers from `low` on that `min_p` leaves, and tells how many they are: 0 where it is not wanted."""
        count, least = self.count, _number(low)
        self.count = jnp.where(wanted, count, 0)

        def add(carry, x, _, chunk):
            stays = (x >= least) & (((x - self.top) / self.temperature >= self.log_min_p) | ~self.samples)
            append(jnp.where(stays, x, -jnp.inf), self.lists, self.lengths, self.wg, self._begins(chunk)[1])
            return carry

        self._over(None, add)
        self.count = count
        self._meet()
        return sum((self.lengths[warpgroup] for warpgroup in range(self.warpgroups)), jnp.int32(0))

    def _choose_listed(self, listed, counts) -> None:
        """`_choose` among the numbers that are listed, by one warpgroup."""
        numbers, places = in_order(self.lists, self.lengths, self.ordered)
        last = self.ordered[jnp.where(counts, jnp.minimum(self.top_k, listed), listed) - 1]
        shifted = numbers - self.top
        weights = jnp.where(numbers >= last, jnp.exp(shifted * (1 / self.temperature)), 0.0)
        last_reached = self.ordered[reached_by(weights, self.weights, listed, self.top_p)]
        last = jnp.where(self.samples & (self.top_p < 1), last_reached, last)
        noise = noise_at(
            jnp.where(numbers > -jnp.inf, places, 0), [self.least, self.first], self.key,
            bits=BITS, step=self.warpgroups, listed=self.listed, hashed=hashed, exponential=exponential,
        )  # fmt: skip
        sums = jnp.where(numbers >= last, shifted / self.temperature + self.noise_factor * noise, -jnp.inf)
        self._reduce("max", sums, self.sums, 0)
        largest = self.sums[0, 0]
        self._reduce(
            "min", jnp.where(sums == largest, places.astype(jnp.float32), jnp.float32(self.size)), self.sums, 1
        )
        self._store(self.sums[0, 1], largest)

    def _lanes_that_reach(self, lanes) -> Callable:
        """How many of `lanes` reach each of three whole numbers."""

        def sums(least: tuple) -> list:
            count_reaching(lanes, [_as_number(one) for one in least], self.reached, self.wg)
            self._meet()
            found = reaching(self.reached)
            self._meet()  # before anyone writes again
            return found

        return sums

    def _least_that_stays(self, lanes, low, highest, counts):
        """The least whole number that the filters leave, from `low` on, which enough lanes reach for `top_k`."""

        def of_row(weight: Callable) -> Callable:
            def sums(least: tuple) -> list:
                least = tuple(_number(one) for one in least)

                def add(totals, x, *_):
                    return tuple(t + weighed for t, weighed in zip(totals, _reaching(x, weight(x), least), strict=True))

                totals = self._over((_full(jnp.float32(0)),) * len(least), add)
                return self._met("add", totals)

            return sums

        def of_lanes(weight: Callable) -> Callable:
            weights = weight(lanes)
            return lambda least: self._met("add", _reaching(lanes, weights, tuple(_number(one) for one in least)))

        def search(low, enough, wanted, sums: Callable):
            """The largest number from `low` on that `enough` weight reaches."""
            low = _search(low, jnp.where(wanted, highest, low), enough, sums)
            least = _as_number(low)
            self._leave_out(lambda chunk: self.largest[self.wg, chunk] >= least)
            return low

        low = search(low, self.top_k.astype(jnp.float32), counts, of_row(lambda x: _full(jnp.float32(1))))
        least = _number(low)

        def share(x):
            scaled = (x - self.top) * (1 / self.temperature)
            return jnp.where((x >= least) & (scaled >= self.log_min_p), jnp.exp(scaled), 0.0)

        some = self.samples & (self.top_p < 1)
        once = jnp.where(some, 1, 0)
        total = lax.fori_loop(0, once, lambda *_: of_row(share)((jnp.int32(LOWEST),))[0], jnp.float32(0))
        # A top_p below float32's smallest number is 0, which every number is reached by.
        enough = jnp.maximum(self.top_p * total, jnp.finfo(jnp.float32).tiny)
        for sums in (of_lanes, of_row):
            low = search(low, enough, some, sums(share))
        return low

    def _load_arrivals(self) -> list[tuple]:
        """The first arrivals in the CTA's chunks, and a bound of their noise, to shared memory; their tokens' logits and these
        bounds, 128 by 128."""
        arrived = []
        for start in range(0, self.least.shape[0], WARPGROUP):
            some = pl.ds(start, WARPGROUP)
            least, first, tokens = (
                plgpu.load(each.at[self.row, self.part, some], layout=_ONE_EACH, optimized=False)
                for each in self.arrivals
            )
            most_noise = (SLACK - jnp.log(least)) * self.noise_factor
            # All warpgroups write the same.
            self.least[some], self.most_noise[some], self.first[some] = least, most_noise, first
            arrived.append((numbers_at(self.logits.at[self.row], tokens), most_noise))
        return arrived

    def _look(self):
        """The first pass: the largest number of each place of the warpgroup's chunks; those of chunks go to shared memory."""

        def place(chunk, _):
            self.alive[self.wg, chunk] = chunk

        lax.fori_loop(0, self.chunks, place, None)
        self.lengths[self.wg] = jnp.int32(0)

        def keep(most, x, number, _):
            self._reduce("max", x, self.largest, number)
            return jnp.maximum(most, x)

        return self._over(_full(jnp.float32(-jnp.inf)), keep)

    def _leave_out(self, stays: Callable) -> None:
        """Passes from here on are over chunks that stay."""

        def add(chunk, count):
            here = stays(chunk)
            # Threads that are ahead read the list already: what is left out goes behind it, not where another's place will be.
            self.alive[self.wg, jnp.where(here, count, self.alive.shape[1] - 1)] = chunk
            return count + here.astype(jnp.int32)

        self.count = lax.fori_loop(0, self.chunks, add, jnp.int32(0))

    def _choose(self, arrived: list[tuple], low=None) -> None:
        """The place of the largest sum with noise of what is not below `low`, a whole number; of everything without one."""

        def scaled(x, layout):
            found = (x - self.top) / self.temperature
            if low is None:
                return jnp.where(x > -jnp.inf, found, -jnp.inf)
            stays = (x >= _number(low, layout)) & ((found >= self.log_min_p) | ~self.samples)
            return jnp.where(stays, found, -jnp.inf)

        # A sum that there is.
        known = _full(-jnp.inf, _ONE_EACH)
        for of_first, bound in arrived:
            known = jnp.maximum(known, scaled(of_first, _ONE_EACH) + bound)
        self._reduce("max", known, self.sums, 0)
        over = self.sums[self.wg, 0] - 2 * SLACK

        def most_noise(chunk):
            return self.most_noise[self.wg * self.listed + chunk]

        if low is not None:
            lowest = _as_number(low)
            self._leave_out(
                lambda chunk: (
                    (self.largest[self.wg, chunk] >= lowest)
                    & ((self.largest[self.wg, chunk] - self.top) / self.temperature + most_noise(chunk) > over)
                )
            )

        memory, of_chunks = [self.queues, self.least, self.first], {"bits": BITS, "step": self.warpgroups * self.parts}
        slots = [self.wg * self.listed, self.wg * self.parts + self.part]

        def better(best, x, _, chunk):
            _, start = self._begins(chunk)
            noise = {"hashed": hashed, "exponential": exponential}
            return tuple(
                best_with_noise(
                    list(best), scaled(x, _STRIDED), memory, self.key, slots, start, over, most_noise(chunk),
                    self.noise_factor, **of_chunks, **noise,
                )
            )  # fmt: skip

        nothing = _full(-jnp.inf, _ONE_EACH), _full(self.size, _ONE_EACH, jnp.int32), _full(0, _ONE_EACH, jnp.int32)
        best = self._over(nothing, better, at_once=min(2, self.at_once))
        values, places = rest_with_noise(list(best), memory, self.key, slots, self.noise_factor, **of_chunks)
        (largest,) = self._met("max", [values])
        found = jnp.where(values == largest, places.astype(jnp.float32), jnp.float32(self.size))
        (first,) = self._met("min", [found])

        @pl.when(self.wg == 0)
        def _():
            self._store(first, largest)

    def _store(self, place, largest) -> None:
        places, sums, tops = (each.at[self.row] for each in self.out)
        # Of a row without a number the last place: some place there is.
        places[self.part] = jnp.minimum(place.astype(jnp.int32), self.size - 1)
        sums[self.part], tops[self.part] = largest, self.top

    def _over(self, carry: Any, step: Callable, *, at_once: int | None = None) -> Any:
        """`step(carry, x, number, chunk)` for what is left of the warpgroup's chunks.

        Numbers count from 0 to a multiple of `at_once`; x is -inf for those that there are no chunks for.
        """
        count, together = self.count, at_once or self.at_once

        def load(start):
            return plgpu.load(self.logits.at[self.row, pl.ds(start, CHUNK)], layout=_STRIDED, optimized=False)

        def visit(turn, carry):
            numbers = [turn * together + place for place in range(together)]
            # Past the last one it is looked at again, and all of it left out.
            chunks = [jnp.minimum(number, count - 1) for number in numbers]
            if self.filters:
                chunks = [self.alive[self.wg, chunk] for chunk in chunks]
            begin = [self._begins(chunk) for chunk in chunks]
            found = [load(start) for _, start in begin]
            for x, number, chunk, (first, start) in zip(found, numbers, chunks, begin, strict=True):
                own = jnp.where(number < count, first - start, CHUNK)
                x = jnp.where(_places() >= own, x.astype(jnp.float32), -jnp.inf)
                carry = step(carry, x, number, chunk)
            return carry

        return lax.fori_loop(0, lax.div(count + (together - 1), jnp.int32(together)), visit, carry)

    def _begins(self, chunk) -> tuple:
        """Where a chunk begins, and where it is read: what would end beyond the row begins earlier, in another's numbers."""
        first = ((chunk * self.warpgroups + self.wg) * self.parts + self.part) * CHUNK
        return first, jnp.minimum(first, self.size - CHUNK)

    def _met(self, kind: Reduction, chunks: Sequence) -> list:
        """Sums or the like of what all warpgroups have, in their order."""
        for place, chunk in enumerate(chunks):
            self._reduce(kind, chunk, self.sums, place)
        return self._of_all(kind, len(chunks))

    def _of_all(self, kind: Reduction, count: int) -> list:
        combine = {"add": lax.add, "max": jnp.maximum, "min": jnp.minimum}[kind]
        self._meet()
        found = []
        for place in range(count):
            one = self.sums[0, place]
            for other in range(1, self.warpgroups):
                one = combine(one, self.sums[other, place])
            found.append(one)
        self._meet()  # before anyone writes again
        return found

    def _reduce(self, kind: Reduction, chunk, target, place) -> None:
        """A chunk's sum or the like to the warpgroup's line of `target`."""
        vector = chunk.shape[0] // WARPGROUP
        reduce_into(chunk, target, self.scratch, self.wg, place, kind=kind, vector=vector)

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
        reached = sums(tuple(found + unit * number for number in (1, 2, 3)))
        return found + unit * sum((one >= enough).astype(jnp.int32) for one in reached)

    return lax.fori_loop(0, digits, more, low)


def _reaching(x, weights, least: tuple) -> list:
    return [jnp.where(x >= one, weights, 0.0) for one in least]


def _whole(numbers):
    """Whole numbers in the order of bfloat16's, for a chunk of float32 that are such."""
    raw = lax.bitcast_convert_type(numbers, jnp.int32) >> 16
    return raw ^ ((raw >> 15) & 0x7FFF)


def _number(whole, layout=None):
    """`_as_number` as a chunk. Nothing reaches one beyond infinity."""
    raw = whole ^ ((whole >> 15) & 0x7FFF)
    return lax.bitcast_convert_type(_full(raw << 16, layout, jnp.int32), jnp.float32)


@thread_op(args=(SCALAR,), returns=FACTOR, interpret=lambda raw: lax.bitcast_convert_type(raw, jnp.float32))
def _read_as_float(raw):
    return th.as_real(raw)


def _as_number(whole):
    """The float32 of one of `_whole`."""
    return _read_as_float((whole ^ ((whole >> 15) & 0x7FFF)) << 16)


def _full(value, layout=None, dtype=None):
    layout = _STRIDED if layout is None else layout
    return plgpu.layout_cast(jnp.full(WARPGROUP if layout is _ONE_EACH else CHUNK, value, dtype), layout)


def _places():
    return plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=_STRIDED)
