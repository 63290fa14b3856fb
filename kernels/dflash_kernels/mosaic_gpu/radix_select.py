"""Radix selection: places, or slots in pages, of a row's largest numbers, by a cluster of CTAs that hold the row in shared memory.

Numbers become integers of the same order, of which eight bits at a time are found. A pass counts how many of the numbers that begin
with what is found have which eight bits next, and sends the counts to all CTAs; the largest bits that enough numbers reach are the
next ones. Each lane counts in a place of its own, so that no distribution of numbers, all of them equal included, has two threads
of a warp wait for one another. Counts arrive at a barrier in shared memory: CTAs that wait for one another at a barrier of the
cluster first wait for their stores to global memory, too.

What is larger than the number found is taken, and of what equals it the first ones. A CTA knows from the counts how many of earlier
CTAs' numbers are taken, and a thread, whose numbers lie next to each other, how many of those before its own: places come out in
ascending order, the same ones each time.
"""

from typing import Any, NamedTuple

from dflash_kernels.core.device import WARP, WARPGROUP
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
_PACKED = BINS // 2  # words of a CTA's counts
TURNS = 2  # barriers of a CTA


def scratch(ctas: int) -> dict[str, int]:
    """Int32 words of a CTA's shared memory: counts of lanes, its own, those of all CTAs in turns, sums, earlier CTAs' sums, warps'."""
    given = TURNS * ctas * _PACKED if ctas > 1 else 4
    return {"bins": BINS * WARP, "totals": BINS, "given": given, "sums": BINS, "earlier": BINS, "of_warps": _WARPS}


@thread_op(args=(*[GLOBAL] * 3, SCALAR, *[GLOBAL] * 7, SCALAR))
def select_row(
    scores, table, out, sequence, held, bins, totals, given, sums, earlier, of_warps, barriers, *, count: int, ctas: int,
    page_size: int,
) -> None:  # fmt: skip
    """Writes the places of the `count` largest of a row's numbers, ascending, with -1 behind the last: -inf is never one.

    Args:
      scores: `[S]` float32 in global memory, no NaN among them; S is a multiple of 4.
      table: `[B, W]` int32 in global memory, of whose row `sequence` slots are made where `page_size` is not 0.
      out: `[count]` int32 in global memory, fewer than `MOST_PLACES`.
      held: int32 in shared memory, a multiple of `STEP` numbers, fewer than `MOST_PLACES`, and `1 / ctas` of the row or more.
      bins and so on: int32 in shared memory, sizes as in `scratch`.
      barriers: address of the first of `TURNS` barriers in shared memory, at which a warpgroup's threads arrive.
    """
    (size,), _ = th.shape_and_strides(scores)
    (own,), _ = th.shape_and_strides(held)
    cta = th.cta_of_cluster() if ctas > 1 else th.number(0)
    memory = [th.address(ref, space=3) for ref in (held, bins, totals, given, sums, earlier, of_warps)]
    row = _Row(own, ctas, cta, barriers, *memory)
    row.load(scores, size)
    pages = None
    if page_size:
        width = th.shape_and_strides(table)[0][1]
        pages = row.pages(th.offset(th.address(table), th.mul(th.mul(sequence, width), 4)), width, page_size)
    row.write(th.address(out), count, row.bound(count), pages)


class _Bound(NamedTuple):
    """What is taken: the numbers above `least`, and the first `missing` of those that equal it.

    Attributes:
      least: an integer, or the first bits of it.
      missing: how many are taken of what begins so; inside: how many there are.
      above: how many of earlier CTAs' numbers are larger; ties: how many of them begin so.
      chosen: how many are taken in all.
    """

    least: Any
    missing: Any
    inside: Any
    above: Any
    ties: Any
    chosen: Any


class _Row:
    """What a thread knows of its CTA's part of the row: four numbers after four, next to each other in the row."""

    def __init__(
        self, own: int, ctas: int, cta: Any, barriers: Any, held: Any, bins: Any, totals: Any, given: Any, sums: Any,
        earlier: Any, of_warps: Any,
    ):  # fmt: skip
        self.own, self.ctas, self.cta, self.barriers, self.held = own, ctas, cta, barriers, held
        self.bins, self.totals, self.given, self.earlier, self.of_warps = bins, totals, given, earlier, of_warps
        self.sums = sums if ctas > 1 else totals
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

    def bound(self, count: int) -> _Bound:
        """What the `count` largest are."""
        none = th.number(0)
        found = _Bound(none, th.number(count), none, none, none, th.number(count))
        for digit in range(3):
            found = self._next_bits(found, digit)
        # Where all numbers that begin so are taken, no more bits are needed.
        done = th.every(th.compare(found.inside, "eq", found.missing), th.compare(found.least, "ne", 0))

        @th.fori(th.as_word(th.compare(th.as_word(done), "eq", 0)), list(found))
        def last(_, carry):
            return list(self._next_bits(_Bound(*carry), 3))

        whole = _Bound(*last.results)
        least = th.select(done, th.sub(th.mul(found.least, BINS), 1), whole.least)
        # Fewer numbers than are wanted are all above 0, which is none.
        few = th.compare(least, "eq", 0)
        above = th.add(whole.above, th.select(done, whole.ties, none))
        missing, chosen = th.select(th.either(done, few), none, whole.missing), th.sub(th.number(count), whole.missing)
        return _Bound(least, missing, whole.inside, above, whole.ties, th.select(few, chosen, th.number(count)))

    def _next_bits(self, found: _Bound, digit: int) -> _Bound:
        """With the next eight bits."""
        self._count(found.least, 32 - BITS * (digit + 1))
        self._add_up(digit)
        # Every warp finds the same, eight bins a lane: how many numbers have the bits of a bin or larger ones.
        own_bins = self._of_lane(self.sums)
        # Bins of later lanes are larger: everything, less what lies in the own one and before.
        before = self._through_lane(_sum(own_bins))
        reached = th.sub(th.from_lane(before, WARP - 1), before)
        hits, above, least = th.number(0), th.number(0), th.number(-1)
        for place in range(7, -1, -1):
            reached = th.add(reached, own_bins[place])
            enough = th.compare(reached, "sge", found.missing)
            hits = th.add(hits, th.as_word(enough))
            # The bin of zeros is what is found where no bin is reached.
            fewer = reached if place else th.select(th.compare(self.lane, "eq", 0), th.number(0), reached)
            above = th.unsigned_max(above, th.select(enough, th.number(0), fewer))
            least = th.unsigned_min(least, th.select(enough, reached, th.number(-1)))
        hits, above, least = (
            th.over_lanes(value, kind) for value, kind in ((hits, "add"), (above, "max"), (least, "min"))
        )
        bits = th.sub(th.unsigned_max(hits, th.number(1)), 1)
        missing, inside = th.sub(found.missing, above), th.sub(least, above)
        larger, ties = found.above, found.ties
        if self.ctas > 1:
            first, later = th.mul(self.lane, 8), th.number(0)
            for place, number in enumerate(self._of_lane(self.earlier)):
                is_later = th.compare(th.add(first, place), "ugt", bits)
                later = th.add(later, th.select(is_later, number, th.number(0)))
            larger, ties = th.add(larger, th.over_lanes(later, "add")), th.shared_word(self.earlier, bits)
        return _Bound(th.add(th.mul(found.least, BINS), bits), missing, inside, larger, ties, found.chosen)

    def _of_lane(self, base: Any) -> list:
        """Eight bins, which lie next to each other."""
        first = th.mul(self.lane, 8)
        return [*th.shared_quad(base, first), *th.shared_quad(base, th.add(first, 4))]

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

    def _add_up(self, digit: int) -> None:
        """The counts of all CTAs to `sums`, those of earlier ones to `earlier`."""
        # Four threads add up a bin's 32 places.
        words, places = [], [th.add(th.mul(self.thread, WARP // 4), step) for step in (0, 4)]
        for place in places:
            words += th.shared_quad(self.bins, place)
        for place in places:
            self._empty(place)  # for the next pass, before which all meet
        total = _sum(words)
        for distance in (1, 2):
            total = th.add(total, th.shuffle_xor(total, distance))
        place = th.add(self.totals, th.mul(th.div(self.thread, 4), 4))
        th.when(th.compare(th.rem(self.thread, 4), "eq", 0), "st.shared.b32 [$0], $1;", place, total)
        th.cta_barrier()
        if self.ctas == 1:
            return
        # Two turns: a CTA that is ahead writes where nobody reads any more.
        turn = digit % TURNS
        barrier, area = th.add(self.barriers, 8 * turn), turn * self.ctas * _PACKED
        with th.branch(th.under(self.warp, self.ctas)):
            own = self._of_lane(self.totals)
            packed = [th.add(own[i], th.mul(own[i + 1], MOST_PLACES)) for i in (0, 2, 4, 6)]
            place = th.add(th.add(th.mul(self.cta, _PACKED), th.mul(self.lane, 4)), area)
            th.push_quad(self.given, place, self.warp, packed, barrier)
        with th.branch(th.under(self.thread, WARPGROUP)):
            th.expect_bytes(barrier, 4 * _PACKED * self.ctas // WARPGROUP)
            th.await_phase(barrier, th.number(digit // TURNS))
            sums, earlier = [th.number(0)] * 2, [th.number(0)] * 2
            for cta in range(self.ctas):
                pair = _halves(th.shared_word(self.given, th.add(self.thread, area + cta * _PACKED)))[::-1]
                before = th.compare(self.cta, "ugt", cta)
                sums = [th.add(a, b) for a, b in zip(sums, pair, strict=True)]
                earlier = [th.add(a, th.select(before, b, th.number(0))) for a, b in zip(earlier, pair, strict=True)]
            for base, pair in ((self.sums, sums), (self.earlier, earlier)):
                for step, value in enumerate(pair):
                    th.store_shared(base, th.add(th.mul(self.thread, 2), step), value)
        th.cta_barrier()

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

    def write(self, out: Any, count: int, bound: _Bound, pages: list | None) -> None:
        """Places of what is taken."""
        least, missing, own = bound.least, bound.missing, th.number(0)
        for quad in range(self.quads):
            for word in self._own(quad):
                own = th.add(own, th.select(th.compare(word, "ugt", least), th.number(MOST_PLACES), th.number(0)))
                own = th.add(own, th.as_word(th.compare(word, "eq", least)))
        through = self._through_lane(own)
        last = th.compare(self.lane, "eq", WARP - 1)
        th.when(last, "st.shared.b32 [$0], $1;", th.add(self.of_warps, th.mul(self.warp, 4)), through)
        th.cta_barrier()
        is_earlier = th.compare(self.lane, "ult", self.warp)
        earlier = th.select(is_earlier, th.shared_word(self.of_warps, self.lane), th.number(0))
        before = _halves(th.add(th.over_lanes(earlier, "add"), th.sub(through, own)))
        before = [th.add(a, b) for a, b in zip(before, (bound.above, bound.ties), strict=True)]
        # Where all that equal it are taken, they are above the integer before it.
        all_ties = th.every(th.compare(bound.inside, "eq", missing), th.compare(missing, "ne", 0))
        taken = th.add(before[0], th.unsigned_min(before[1], missing))
        plain = th.either(all_ties, th.compare(missing, "eq", 0))

        @th.fori(th.as_word(plain), [])
        def _(_, carry):
            under, place = th.sub(least, th.as_word(all_ties)), th.offset(out, th.mul(taken, 4))
            for quad in range(self.quads):
                for step, word in enumerate(self._own(quad)):
                    takes = th.compare(word, "ugt", under)
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

        for start in range(0, count, THREADS * self.ctas):
            place = th.add(th.add(th.mul(self.cta, THREADS), self.thread), start)
            empty = th.every(th.under(place, count), th.compare(place, "uge", bound.chosen))
            th.when(empty, "st.global.b32 [$0], $1;", th.offset(out, th.mul(place, 4)), th.number(-1))

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
