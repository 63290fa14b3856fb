"""Radix selection: places, or slots in pages, of a row's largest numbers, by a cluster of CTAs that hold the row in shared memory.

Numbers become integers of the same order, of which eight bits at a time are found. A pass counts how many of the numbers that begin
with what is found have which eight bits next; counts of all CTAs are added up, and the largest bits that enough numbers reach are
the next ones. Each lane counts in a place of its own, so that no distribution of numbers, all of them equal included, has two
threads of a warp wait for one another.

What is larger than the number found is taken, and of what equals it the first ones. A thread has numbers that lie next to each
other, and knows from counts how many before them are taken: places come out in ascending order, the same ones each time.
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
_LINE = 7  # the place of a number of eight bits in lanes' counts: four bytes of each of 32 lanes
_SIGN, _LOWEST = -(1 << 31), -(1 << 23)  # bits of -0 and of -inf, as int32
MOST_PLACES = 1 << 16  # counts have half a word each
SCRATCH = {"bins": BINS * WARP, "totals": 2 * BINS, "sums": BINS, "of_warps": _WARPS, "of_cta": 1}  # int32 words


@thread_op(args=(*[GLOBAL] * 3, SCALAR, *[GLOBAL] * 6))
def select_row(
    scores, table, out, sequence, held, bins, totals, sums, of_warps, of_cta, *, count: int, ctas: int, page_size: int
) -> None:
    """Writes the places of the `count` largest of a row's numbers, ascending, with -1 behind the last: -inf is never one.

    Args:
      scores: `[S]` float32 in global memory, no NaN among them; S is a multiple of 4.
      table: `[B, W]` int32 in global memory, of whose row `sequence` slots are made where `page_size` is not 0.
      out: `[count]` int32 in global memory, fewer than `MOST_PLACES`.
      held: int32 in shared memory, a multiple of `STEP` numbers, fewer than `MOST_PLACES`, and `1 / ctas` of the row or more.
      bins and so on: int32 in shared memory, sizes as in `SCRATCH`.
    """
    (size,), _ = th.shape_and_strides(scores)
    (own,), _ = th.shape_and_strides(held)
    cta = th.cta_of_cluster() if ctas > 1 else th.number(0)
    row = _Row(own, ctas, cta, *(th.address(ref, space=3) for ref in (held, bins, totals, sums, of_warps, of_cta)))
    row.load(scores, size)
    least, missing = row.least(count)
    pages = None
    if page_size:
        width = th.shape_and_strides(table)[0][1]
        pages = row.pages(th.offset(th.address(table), th.mul(th.mul(sequence, width), 4)), width, page_size)
    row.write(th.address(out), count, least, missing, pages)


class _Row:
    """What a thread knows of its CTA's part of the row: four numbers after four, next to each other in the row."""

    def __init__(
        self, own: int, ctas: int, cta: Any, held: Any, bins: Any, totals: Any, sums: Any, of_warps: Any, of_cta: Any
    ):
        self.own, self.ctas, self.cta, self.held = own, ctas, cta, held
        self.bins, self.totals, self.sums, self.of_warps, self.of_cta = bins, totals, sums, of_warps, of_cta
        self.thread = th.thread_of_cta()
        self.lane, self.warp = th.rem(self.thread, WARP), th.div(self.thread, WARP)
        self.quads = own // STEP  # of a thread

    def load(self, scores: Any, size: int) -> None:
        """The part to shared memory, as integers; 0 for what is never taken. Nothing is counted yet."""
        for step in range(BINS * WARP // STEP):
            self._empty(th.add(th.mul(self.thread, 4), step * STEP))
        first, quads = th.mul(self.cta, self.own), [th.add(self.thread, step * THREADS) for step in range(self.quads)]
        for begin in range(0, self.quads, _AT_ONCE):
            some, loaded = quads[begin : begin + _AT_ONCE], []
            for quad in some:
                number = th.add(first, th.mul(quad, 4))
                address, there = th.word_address(scores, number), th.under(number, size)
                loaded.append(
                    th.load(address, 4, op="ld.global.nc", there=there, otherwise="0xff800000", ordered=False)
                )
            for quad, words in zip(some, loaded, strict=True):
                th.store_shared_quad(self.held, _swizzled(quad), [_ordered(word) for word in words])
        th.cta_barrier()

    def _empty(self, word: Any) -> None:
        th.store_shared_quad(self.bins, word, [th.number(0)] * 4)

    def _own(self, quad: int) -> list:
        """Four numbers of this thread's."""
        return th.shared_quad(self.held, _swizzled(th.add(th.mul(self.thread, self.quads), quad)))

    def _place(self, quad: int):
        """Place of the first of them in the row."""
        return th.add(th.mul(self.cta, self.own), th.mul(th.add(th.mul(self.thread, self.quads), quad), 4))

    def least(self, count: int) -> tuple[Any, Any]:
        """An integer and a number: the `count` largest are all above it, and so many of those that equal it."""
        found, missing, inside = th.number(0), th.number(count), None
        for digit in range(3):
            found, missing, inside = self._next_bits(found, missing, digit)
        # Where all numbers that begin so are taken, no more bits are needed.
        done = th.every(th.compare(inside, "eq", missing), th.compare(found, "ne", 0))

        @th.fori(th.as_word(th.compare(th.as_word(done), "eq", 0)), [found, missing])
        def last(_, carry):
            return list(self._next_bits(carry[0], carry[1], 3)[:2])

        below = th.sub(th.mul(found, BINS), 1)
        found, missing = last.results
        found, missing = th.select(done, below, found), th.select(done, th.number(0), missing)
        # Fewer numbers than are wanted are all above 0, which is none.
        return found, th.select(th.compare(found, "eq", 0), th.number(0), missing)

    def _next_bits(self, found: Any, missing: Any, digit: int) -> tuple[Any, Any, Any]:
        """With the next eight bits; how many are missing among those that begin so, and how many these are."""
        self._count(found, 32 - BITS * (digit + 1))
        bits, above, reached = self._enough(missing, digit % 2)
        return th.add(th.mul(found, BINS), bits), th.sub(missing, above), th.sub(reached, above)

    def _count(self, found: Any, shift: int) -> None:
        """Counts by their next bits the numbers that begin with `found`, for each lane apart."""
        of_lane = th.add(self.bins, th.mul(self.lane, 4))
        for quad in range(self.quads):
            for word in self._own(quad):
                counts = th.compare(word, "ne", 0)
                if shift + BITS < 32:
                    counts = th.every(counts, th.compare(th.div(word, 1 << (shift + BITS)), "eq", found))
                line = th.div(word, 1 << (shift - _LINE)) if shift >= _LINE else th.mul(word, 1 << (_LINE - shift))
                line = th.bit_and(line, (BINS - 1) << _LINE)
                th.when(counts, "red.shared.add.u32 [$0], 1;", th.add(of_lane, line))
        th.cta_barrier()

    def _enough(self, missing: Any, turn: int) -> tuple[Any, Any, Any]:
        """The largest next bits that `missing` numbers reach, 0 where none are; how many have larger ones, and these or larger."""
        # Four threads add up a bin's 32 places.
        words, places = [], [th.add(th.mul(self.thread, WARP // 4), step) for step in (0, 4)]
        for place in places:
            words += th.shared_quad(self.bins, place)
        for place in places:
            self._empty(place)  # for the next pass, before which all meet
        total = _sum(words)
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
        # Bins of later lanes are larger: everything, less what lies in the own one and before.
        before = self._through_lane(_sum(own_bins))
        reached = th.sub(th.from_lane(before, WARP - 1), before)
        hits, above, least = th.number(0), th.number(0), th.number(-1)
        for place in range(7, -1, -1):
            reached = th.add(reached, own_bins[place])
            enough = th.compare(reached, "sge", missing)
            hits = th.add(hits, th.as_word(enough))
            # The bin of zeros is what is found where no bin is reached.
            fewer = reached if place else th.select(th.compare(self.lane, "eq", 0), th.number(0), reached)
            above = th.unsigned_max(above, th.select(enough, th.number(0), fewer))
            least = th.unsigned_min(least, th.select(enough, reached, th.number(-1)))
        for distance in (1, 2, 4, 8, 16):
            hits = th.add(hits, th.shuffle_xor(hits, distance))
            above = th.unsigned_max(above, th.shuffle_xor(above, distance))
            least = th.unsigned_min(least, th.shuffle_xor(least, distance))
        return th.sub(th.unsigned_max(hits, th.number(1)), 1), above, least

    def _through_lane(self, value: Any):
        """The sum of all earlier lanes' values and the own one."""
        for distance in (1, 2, 4, 8, 16):
            value = th.add(value, th.from_lane_before(value, distance))
        return value

    def pages(self, table: Any, width: int, page_size: int) -> list:
        """Of each four numbers, what is added to their places so that these become slots in pages."""
        shifts = []
        for quad in range(self.quads):
            number = th.div(self._place(quad), page_size)
            entry = th.offset(table, th.mul(th.unsigned_min(number, th.number(width - 1)), 4))
            (page,) = th.load(entry, op="ld.global.nc", ordered=False)
            shifts.append(th.mul(th.sub(page, number), page_size))
        return shifts

    def write(self, out: Any, count: int, least: Any, missing: Any, pages: list | None) -> None:
        """Places of the numbers above `least`, and of the first `missing` that equal it."""
        own = th.number(0)
        for quad in range(self.quads):
            for word in self._own(quad):
                own = th.add(own, th.select(th.compare(word, "ugt", least), th.number(MOST_PLACES), th.number(0)))
                own = th.add(own, th.as_word(th.compare(word, "eq", least)))
        through = self._through_lane(own)
        last = th.compare(self.lane, "eq", WARP - 1)
        th.when(last, "st.shared.b32 [$0], $1;", th.add(self.of_warps, th.mul(self.warp, 4)), through)
        th.cta_barrier()
        of_cta = th.shared_word(self.of_warps, self.lane)
        earlier = th.select(th.compare(self.lane, "ult", self.warp), of_cta, th.number(0))
        for distance in (1, 2, 4, 8, 16):
            of_cta = th.add(of_cta, th.shuffle_xor(of_cta, distance))
            earlier = th.add(earlier, th.shuffle_xor(earlier, distance))
        before = _halves(th.add(earlier, th.sub(through, own)))
        everything = _halves(of_cta)
        if self.ctas > 1:
            th.when(th.compare(self.thread, "eq", 0), "st.shared.b32 [$0], $1;", self.of_cta, of_cta)
            th.cluster_barrier()
            parts = [_halves(th.load_peer(self.of_cta, cta)) for cta in range(self.ctas)]
            for which in range(2):
                everything[which] = _sum([part[which] for part in parts])
                for cta, part in enumerate(parts):
                    is_earlier = th.compare(self.cta, "ugt", cta)
                    before[which] = th.add(before[which], th.select(is_earlier, part[which], th.number(0)))
        # Where all that equal it are taken, they are above the integer before it.
        all_ties = th.every(th.compare(everything[1], "eq", missing), th.compare(missing, "ne", 0))
        taken = th.add(before[0], th.unsigned_min(before[1], missing))
        plain = th.either(all_ties, th.compare(missing, "eq", 0))

        @th.fori(th.as_word(plain), [])
        def _(_, carry):
            bound, place = th.sub(least, th.as_word(all_ties)), th.offset(out, th.mul(taken, 4))
            for quad in range(self.quads):
                for step, word in enumerate(self._own(quad)):
                    takes = th.compare(word, "ugt", bound)
                    th.when(takes, "st.global.b32 [$0], $1;", place, self._named(quad, step, pages))
                    place = th.offset(place, th.mul(th.as_word(takes), 4))
            return carry

        @th.fori(th.as_word(th.compare(th.as_word(plain), "eq", 0)), [])
        def _(_, carry):
            place, ties = th.offset(out, th.mul(taken, 4)), before[1]
            for quad in range(self.quads):
                for step, word in enumerate(self._own(quad)):
                    equal = th.compare(word, "eq", least)
                    takes = th.either(th.compare(word, "ugt", least), th.every(equal, th.compare(ties, "ult", missing)))
                    th.when(takes, "st.global.b32 [$0], $1;", place, self._named(quad, step, pages))
                    place = th.offset(place, th.mul(th.as_word(takes), 4))
                    ties = th.add(ties, th.as_word(equal))
            return carry

        chosen = th.add(everything[0], th.unsigned_min(everything[1], missing))
        for start in range(0, count, THREADS * self.ctas):
            place = th.add(th.add(th.mul(self.cta, THREADS), self.thread), start)
            empty = th.every(th.under(place, count), th.compare(place, "uge", chosen))
            th.when(empty, "st.global.b32 [$0], $1;", th.offset(out, th.mul(place, 4)), th.number(-1))
        if self.ctas > 1:
            th.cluster_barrier()  # nobody leaves whose memory is read

    def _named(self, quad: int, step: int, pages: list | None):
        """A number's place, or its slot."""
        place = th.add(self._place(quad), step)
        return place if pages is None else th.add(place, pages[quad])


def _swizzled(quad: Any):
    """Where four numbers lie, as the first one's word, so that threads reach neither theirs nor a copy's through the same banks."""
    return th.mul(th.xor(quad, th.rem(th.div(quad, 8), 8)), 4)


def _halves(word: Any) -> list:
    """Counts of larger and of equal numbers."""
    return [th.div(word, MOST_PLACES), th.rem(word, MOST_PLACES)]


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
