"""Radix selection: places, or slots in pages, of a row's largest numbers, by a cluster of CTAs that hold the row in shared memory.

Numbers become integers of the same order, of which eight bits at a time are found. A pass counts how many of the numbers that begin
with what is found have which eight bits next; counts of all CTAs are added up, and the largest bits that enough numbers reach are
the next ones. Each lane counts in a place of its own, so that no distribution of numbers, all of them equal included, has two
threads of a warp wait for one another.

What is larger than the number found is taken, and of what equals it the first ones. A warp has numbers that lie next to each other,
and knows from counts how many before them are taken: places come out in ascending order, the same ones each time.
"""

from typing import Any

from dflash_kernels.core.device import WARP
from dflash_kernels.mosaic_gpu import ptx as th
from dflash_kernels.mosaic_gpu.thread_op import GLOBAL, SCALAR, thread_op

WARPGROUPS = 8  # of a CTA
THREADS = 128 * WARPGROUPS
STEP = 4 * THREADS  # numbers that a CTA's threads have four each of
BITS = 8  # of a pass
BINS = 1 << BITS
_WARPS = THREADS // WARP
_AT_ONCE = 4  # loads of a thread that are on their way at a time
_SIGN, _LOWEST = -(1 << 31), -(1 << 23)  # bits of -0 and of -inf, as int32
SCRATCH = {"bins": BINS * WARP, "totals": 2 * BINS, "sums": BINS, "of_warps": 2 * _WARPS, "of_cta": 2}  # int32 words


@thread_op(args=(*[GLOBAL] * 3, SCALAR, *[GLOBAL] * 6))
def select_row(scores, table, out, sequence, held, bins, totals, sums, of_warps, of_cta, *, count: int, ctas: int,
               page_size: int) -> None:  # fmt: skip
    """Writes the places of the `count` largest of a row's numbers, ascending, with -1 behind the last: -inf is never one.

    Args:
      scores: `[S]` float32 in global memory, no NaN among them; S is a multiple of 4.
      table: `[B, W]` int32 in global memory, of whose row `sequence` slots are made where `page_size` is not 0.
      out: `[count]` int32 in global memory.
      held: int32 in shared memory, a multiple of `STEP` numbers, `1 / ctas` of the row or more.
      bins and so on: int32 in shared memory, sizes as in `SCRATCH`.
    """
    (size,), _ = th.shape_and_strides(scores)
    (own,), _ = th.shape_and_strides(held)
    cta = th.cta_of_cluster() if ctas > 1 else th.number(0)
    row = _Row(own, ctas, cta, *(th.address(ref, space=3) for ref in (held, bins, totals, sums, of_warps, of_cta)))
    row.load(scores, size)
    least, missing = row.least(count)
    slots = None
    if page_size:
        width = th.shape_and_strides(table)[0][1]
        slots = th.offset(th.address(table), th.mul(th.mul(sequence, width), 4)), page_size
    row.write(th.address(out), count, least, missing, slots)


class _Row:
    """What a thread knows of its CTA's part of the row."""

    def __init__(
        self, own: int, ctas: int, cta: Any, held: Any, bins: Any, totals: Any, sums: Any, of_warps: Any, of_cta: Any
    ):
        self.own, self.ctas, self.cta, self.held = own, ctas, cta, held
        self.bins, self.totals, self.sums, self.of_warps, self.of_cta = bins, totals, sums, of_warps, of_cta
        self.thread = th.thread_of_cta()
        self.lane, self.warp = th.rem(self.thread, WARP), th.div(self.thread, WARP)

    def load(self, scores: Any, size: int) -> None:
        """The part to shared memory, as integers; 0 for what is never taken."""
        first, places = th.mul(self.cta, self.own), [self._quad(start) for start in range(0, self.own, STEP)]
        for begin in range(0, len(places), _AT_ONCE):
            some = places[begin : begin + _AT_ONCE]
            loaded = []
            for place in some:
                number = th.add(first, place)
                loaded.append(
                    th.load(
                        th.word_address(scores, number), 4, op="ld.global.nc", there=th.under(number, size),
                        otherwise="0xff800000", ordered=False,
                    )
                )  # fmt: skip
            for place, words in zip(some, loaded, strict=True):
                th.store_shared_quad(self.held, place, [_ordered(word) for word in words])

    def least(self, count: int) -> tuple[Any, Any]:
        """The `count`-th largest of the row's integers, or 0, and how many of those that equal it are taken."""
        found, missing = th.number(0), th.number(count)
        for digit, shift in enumerate(range(32 - BITS, -1, -BITS)):
            self._count(found, shift)
            next_bits, above = self._enough(missing, digit % 2)
            found, missing = th.add(th.mul(found, BINS), next_bits), th.sub(missing, above)
        return found, th.select(th.compare(found, "eq", 0), th.number(0), missing)

    def _quad(self, start: int):
        return th.add(th.mul(self.thread, 4), start)

    def _count(self, found: Any, shift: int) -> None:
        """Counts by their next bits the numbers that begin with `found`, for each lane apart."""
        for start in range(0, BINS * WARP, STEP):
            th.store_shared_quad(self.bins, self._quad(start), [th.number(0)] * 4)
        th.cta_barrier()

        @th.fori(th.number(self.own // STEP), [self._quad(0)])
        def _(_, carry):
            (place,) = carry
            for word in th.shared_quad(self.held, place):
                counts = th.compare(word, "ne", 0)
                if shift + BITS < 32:
                    counts = th.every(counts, th.compare(th.div(word, 1 << (shift + BITS)), "eq", found))
                digit = th.rem(th.div(word, 1 << shift), BINS)
                place_of_lane = th.add(self.bins, th.mul(th.add(th.mul(digit, WARP), self.lane), 4))
                th.when(counts, "red.shared.add.u32 [$0], 1;", place_of_lane)
            return [th.add(place, STEP)]

        th.cta_barrier()

    def _enough(self, missing: Any, turn: int) -> tuple[Any, Any]:
        """The largest next bits that `missing` numbers reach, 0 where none are, and how many numbers have larger ones."""
        # Four threads add up a bin's 32 places.
        first = th.mul(self.thread, WARP // 4)
        total = _sum([*th.shared_quad(self.bins, first), *th.shared_quad(self.bins, th.add(first, 4))])
        for distance in (1, 2):
            total = th.add(total, th.shuffle_xor(total, distance))
        totals = th.add(self.totals, 4 * BINS * turn)
        place = th.add(totals, th.mul(th.div(self.thread, 4), 4))
        th.when(th.compare(th.rem(self.thread, 4), "eq", 0), "st.shared.b32 [$0], $1;", place, total)
        if self.ctas == 1:
            th.cta_barrier()
            sums = totals
        else:
            # Two turns: a CTA that is ahead writes where nobody reads any more.
            th.cluster_barrier()
            with th.branch(th.under(self.thread, BINS)):
                place = th.mul(self.thread, 4)
                of_all = _sum([th.load_peer(th.add(totals, place), cta) for cta in range(self.ctas)])
                th.store_shared(self.sums, self.thread, of_all)
            th.cta_barrier()
            sums = self.sums
        # Every warp finds the same, eight bins a lane: how many numbers have the bits of a bin or larger ones.
        first = th.mul(self.lane, 8)
        own_bins = [*th.shared_quad(sums, first), *th.shared_quad(sums, th.add(first, 4))]
        own_sum = _sum(own_bins)
        reached = th.sub(self._from_lane_on(own_sum), own_sum)
        hits, above = th.number(0), th.number(0)
        for place in range(7, -1, -1):
            reached = th.add(reached, own_bins[place])
            enough = th.compare(reached, "sge", missing)
            hits = th.add(hits, th.as_word(enough))
            # The bin of zeros is what is found where no bin is reached.
            fewer = reached if place else th.select(th.compare(self.lane, "eq", 0), th.number(0), reached)
            above = th.unsigned_max(above, th.select(enough, th.number(0), fewer))
        for distance in (1, 2, 4, 8, 16):
            hits = th.add(hits, th.shuffle_xor(hits, distance))
            above = th.unsigned_max(above, th.shuffle_xor(above, distance))
        return th.sub(th.unsigned_max(hits, th.number(1)), 1), above

    def _from_lane_on(self, value: Any):
        """The sum of the own and all later lanes' values."""
        for distance in (1, 2, 4, 8, 16):
            other = th.add(self.lane, distance)
            there = th.under(other, WARP)
            later = th.from_lane(value, th.rem(other, WARP))
            value = th.add(value, th.select(there, later, th.number(0)))
        return value

    def write(self, out: Any, count: int, least: Any, missing: Any, slots: tuple[Any, int] | None) -> None:
        """Places of the numbers above `least`, and of the first `missing` that equal it."""
        run = self.own // _WARPS
        begin = th.add(th.mul(self.warp, run), self.lane)

        def numbers(carry, body):
            @th.fori(th.number(run // WARP), [begin, *carry])
            def loop(_, state):
                place, *rest = state
                word = th.shared_word(self.held, place)
                rest = body(place, th.compare(word, "ugt", least), th.compare(word, "eq", least), rest)
                return [th.add(place, WARP), *rest]

            return loop.results[1:]

        def tally(_, above, equal, carry):
            return [th.add(total, th.all_below(these)[1]) for total, these in zip(carry, (above, equal), strict=True)]

        own = numbers([th.number(0)] * 2, tally)
        leads = th.compare(self.lane, "eq", 0)
        for which, total in enumerate(own):
            place = th.add(self.of_warps, th.add(th.mul(self.warp, 4), 4 * _WARPS * which))
            th.when(leads, "st.shared.b32 [$0], $1;", place, total)
        th.cta_barrier()
        before, everything = [], []
        for which in range(2):
            of_warp = th.shared_word(self.of_warps, th.add(self.lane, _WARPS * which))
            of_cta, earlier = of_warp, th.select(th.compare(self.lane, "ult", self.warp), of_warp, th.number(0))
            for distance in (1, 2, 4, 8, 16):
                of_cta = th.add(of_cta, th.shuffle_xor(of_cta, distance))
                earlier = th.add(earlier, th.shuffle_xor(earlier, distance))
            th.when(th.compare(self.thread, "eq", 0), "st.shared.b32 [$0], $1;", th.add(self.of_cta, 4 * which), of_cta)
            before.append(earlier)
            everything.append(of_cta)
        if self.ctas > 1:
            th.cluster_barrier()
            for which in range(2):
                parts = [th.load_peer(th.add(self.of_cta, 4 * which), cta) for cta in range(self.ctas)]
                everything[which] = _sum(parts)
                mine = [
                    th.select(th.compare(self.cta, "ugt", cta), part, th.number(0)) for cta, part in enumerate(parts)
                ]
                before[which] = th.add(before[which], _sum(mine))
        first = th.mul(self.cta, self.own)

        def put(place, above, equal, carry):
            taken, ties = carry
            earlier, of_warp = th.all_below(equal)
            takes = th.either(above, th.every(equal, th.compare(th.add(ties, earlier), "ult", missing)))
            at, more = th.all_below(takes)
            address = th.offset(out, th.mul(th.add(taken, at), 4))
            th.when(takes, "st.global.b32 [$0], $1;", address, _named(th.add(first, place), takes, slots))
            return [th.add(taken, more), th.add(ties, of_warp)]

        taken = th.add(before[0], th.unsigned_min(before[1], missing))
        numbers([taken, before[1]], put)
        chosen = th.add(everything[0], th.unsigned_min(everything[1], missing))
        for start in range(0, count, THREADS * self.ctas):
            place = th.add(th.add(th.mul(self.cta, THREADS), self.thread), start)
            empty = th.every(th.under(place, count), th.compare(place, "uge", chosen))
            th.when(empty, "st.global.b32 [$0], $1;", th.offset(out, th.mul(place, 4)), th.number(-1))
        if self.ctas > 1:
            th.cluster_barrier()  # nobody leaves whose memory is read


def _named(place: Any, takes: Any, slots: tuple[Any, int] | None):
    """A place that is taken as it is told: itself, or its slot in the pages."""
    if slots is None:
        return place
    table, page_size = slots
    entry = th.offset(table, th.mul(th.div(place, page_size), 4))
    (page,) = th.load(entry, op="ld.global.nc", there=takes, ordered=False)
    return th.add(th.mul(page, page_size), th.rem(place, page_size))


def _ordered(word: Any):
    """A float32 number's bits as an integer without sign, in the order of numbers: -0 is 0, and -inf the integer 0."""
    word = th.select(th.compare(word, "eq", _SIGN), th.number(0), word)
    turned = th.select(th.compare(word, "slt", 0), th.xor(word, -1), th.xor(word, _SIGN))
    return th.select(th.compare(word, "eq", _LOWEST), th.number(0), turned)


def _sum(words: list):
    total, *rest = words
    for word in rest:
        total = th.add(total, word)
    return total
