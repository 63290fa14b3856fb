"""Radix selection: places, or slots in pages, of a row's largest numbers, by a cluster of CTAs that hold the row in shared memory.

Numbers become integers of the same order, of which eight bits at a time are found. A pass counts how many of the numbers that begin
with what is found have which eight bits next, and sends the counts to all CTAs; the largest bits that enough numbers reach are the
next ones. Threads of a warp that count in the same place do so at once. Counts arrive at a barrier in shared memory: CTAs that wait
for one another at a barrier of the cluster first wait for their stores to global memory, too. A warpgroup looks for the bits, two
bins of a thread, while another one adds up what earlier CTAs have: a warp alone would add for as long as everything else takes.

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
DIGITS = 32 // BITS  # passes, and barriers of a CTA
_AT_ONCE = 4  # loads of a thread that are on their way at a time
_KEPT = 4  # times four numbers of a thread that its registers hold over all passes
_SIGN, _LOWEST = -(1 << 31), -(1 << 23)  # bits of -0 and of -inf, as int32
MOST_PLACES = 1 << 16  # counts have half a word each
_PACKED = BINS // 2  # words of a CTA's counts, of two bins each: one of a thread of a warpgroup
_OF_WARPGROUP = WARPGROUP // WARP  # warps
_TOTALS = 4 + 2 * DIGITS  # where counts of the warps that look for bits lie, in what they tell
_NOWHERE = BINS * DIGITS  # the place of what does not count


def scratch(ctas: int) -> dict[str, int]:
    """Int32 words of a CTA's shared memory: its counts, those of all CTAs, earlier CTAs' sums; what a warp tells the others."""
    several = DIGITS * BINS if ctas > 1 else 4
    return {
        "bins": _NOWHERE + 4, "given": DIGITS * ctas * _PACKED, "earlier": several, "of_warps": _WARPS,
        "told": _TOTALS + _OF_WARPGROUP,
    }  # fmt: skip


@thread_op(args=(*[GLOBAL] * 3, SCALAR, *[GLOBAL] * 6, SCALAR))
def select_row(
    scores,
    table,
    out,
    sequence,
    held,
    bins,
    given,
    earlier,
    of_warps,
    told,
    barriers,
    *,
    count: int,
    ctas: int,
    page_size: int,
) -> None:
    """Writes the places of the `count` largest of a row's numbers, ascending, with -1 behind the last: -inf is never one.

    Args:
      scores: `[S]` float32 in global memory, no NaN among them; S is a multiple of 4.
      table: `[B, W]` int32 in global memory, of whose row `sequence` slots are made where `page_size` is not 0.
      out: `[count]` int32 in global memory, fewer than `MOST_PLACES`.
      held: int32 in shared memory, a multiple of `STEP` numbers, fewer than `MOST_PLACES`, and `1 / ctas` of the row or more.
      bins and so on: int32 in shared memory, sizes as in `scratch`.
      barriers: address of the first of `DIGITS` barriers in shared memory, at which a warpgroup's threads arrive.
    """
    (size,), _ = th.shape_and_strides(scores)
    (own,), _ = th.shape_and_strides(held)
    cta = th.cta_of_cluster() if ctas > 1 else th.number(0)
    memory = [th.address(ref, space=3) for ref in (held, bins, given, earlier, of_warps, told)]
    row = _Row(own, ctas, cta, barriers, *memory)
    row.load(scores, size)
    pages = None
    if page_size:
        width = th.shape_and_strides(table)[0][1]
        pages = row.pages(th.offset(th.address(table), th.mul(th.mul(sequence, width), 4)), width, page_size)
    row.write(th.address(out), count, row.bound(count), pages)


class _Bound(NamedTuple):
    """Threshold of the selection: the numbers above `least`, and the first `missing` of those that equal it.

    Attributes:
      least: an integer.
      missing: how many are taken of what equals it; inside: how many there are.
      chosen: how many are taken in all.
      bits: the integer before which there is nothing to take, eight bits from each pass; done: whether three passes were enough.
    """

    least: Any
    missing: Any
    inside: Any
    chosen: Any
    bits: Any
    done: Any


class _Row:
    """A thread's elements of its CTA's part of the row: four numbers after four, next to each other in the row."""

    def __init__(
        self,
        own: int,
        ctas: int,
        cta: Any,
        barriers: Any,
        held: Any,
        bins: Any,
        given: Any,
        earlier: Any,
        of_warps: Any,
        told: Any,
    ):
        self.own, self.ctas, self.cta, self.barriers, self.held = own, ctas, cta, barriers, held
        self.bins, self.given, self.earlier, self.of_warps, self.told = bins, given, earlier, of_warps, told
        self.thread = th.thread_of_cta()
        self.lane, self.warp = th.rem(self.thread, WARP), th.div(self.thread, WARP)
        self.quads = own // STEP  # of a thread
        self.kept: list | None = None

    def load(self, scores: Any, size: int) -> None:
        """The part to shared memory, as integers; 0 for what is never taken. Nothing is counted yet."""
        with th.branch(th.under(self.thread, (_NOWHERE + 4) // 4)):
            th.store_shared_quad(self.bins, th.mul(self.thread, 4), [th.number(0)] * 4)
        if self.ctas > 1:
            with th.branch(th.compare(self.warp, "eq", 0)):
                for digit in range(DIGITS):
                    # A warp arrives for a warpgroup.
                    th.expect_bytes(self._barrier(digit), 4 * _PACKED * self.ctas // WARP, others=WARPGROUP // WARP - 1)
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
        if self.quads <= _KEPT:
            self.kept = [self._own(quad) for quad in range(self.quads)]

    def _barrier(self, digit: int):
        return th.add(self.barriers, 8 * digit)

    def _own(self, quad: int) -> list:
        """Four numbers of this thread's."""
        if self.kept is not None:
            return self.kept[quad]
        return th.shared_quad(self.held, _swizzled(th.add(th.mul(self.thread, self.quads), quad)))

    def _place(self, quad: int):
        """Place of the first of them in the row."""
        return th.add(th.mul(self.cta, self.own), th.mul(th.add(th.mul(self.thread, self.quads), quad), 4))

    def bound(self, count: int) -> _Bound:
        """Threshold of the `count` largest."""
        found, missing, inside = th.number(0), th.number(count), th.number(0)
        for digit in range(DIGITS - 1):
            found, missing, inside = self._next_bits(found, missing, digit)
        # Where all numbers that begin so are taken, no more bits are needed.
        done = th.every(th.compare(inside, "eq", missing), th.compare(found, "ne", 0))

        @th.fori(th.as_word(th.compare(th.as_word(done), "eq", 0)), [found, missing, inside])
        def last(_, carry):
            return list(self._next_bits(carry[0], carry[1], DIGITS - 1))

        whole, missing, inside = last.results
        bits, none = th.select(done, th.mul(found, BINS), whole), th.number(0)
        least = th.select(done, th.sub(bits, 1), whole)
        # Fewer numbers than are wanted are all above 0, which is none.
        few = th.compare(bits, "eq", 0)
        chosen = th.select(few, th.sub(th.number(count), missing), th.number(count))
        return _Bound(least, th.select(th.either(done, few), none, missing), inside, chosen, bits, done)

    def _next_bits(self, found: Any, missing: Any, digit: int) -> list:
        """Extends the threshold by the next eight bits; how many are missing among those that begin so, and how many these are."""
        self._count(found, digit)
        if self.ctas > 1:
            self._send(digit)
        with th.branch(th.under(self.warp, _OF_WARPGROUP)):
            self._find(found, missing, digit)
        if self.ctas > 1:
            is_next = th.every(th.compare(self.warp, "uge", _OF_WARPGROUP), th.under(self.warp, 2 * _OF_WARPGROUP))
            with th.branch(is_next):
                first = th.add(th.mul(th.sub(self.thread, WARPGROUP), 2), BINS * digit)
                for step, of_bin in enumerate(self._sums(digit, th.sub(self.thread, WARPGROUP), before=True)):
                    th.store_shared(self.earlier, th.add(first, step), of_bin)
        th.cta_barrier()
        return th.shared_quad(self.told, th.number(0))[:3]

    def _count(self, found: Any, digit: int) -> None:
        """Counts by their next bits the numbers that begin with `found`."""
        shift, first = 32 - BITS * (digit + 1), th.add(self.bins, 4 * BINS * digit)
        for quad in range(self.quads):
            for word in self._own(quad):
                place = th.add(first, th.mul(th.bit_and(th.div(word, 1 << shift), BINS - 1), 4))
                if digit:
                    counts = th.compare(th.div(word, 1 << (shift + BITS)), "eq", found)
                    counts = th.every(counts, th.compare(word, "ne", 0))
                    th.when(counts, "red.shared.add.u32 [$0], 1;", place)
                else:
                    # Nearly all do: no branch.
                    place = th.select(th.compare(word, "ne", 0), place, th.add(self.bins, 4 * _NOWHERE))
                    th.inline("red.shared.add.u32 [$0], 1;", place)
        th.cta_barrier()

    def _send(self, digit: int) -> None:
        """The counts to all CTAs, a warp to each."""
        with th.branch(th.under(self.warp, self.ctas)):
            own = self._of_lane(self.bins, BINS * digit)
            packed = [th.add(own[i], th.mul(own[i + 1], MOST_PLACES)) for i in (0, 2, 4, 6)]
            place = th.add(th.mul(self.cta, _PACKED), digit * self.ctas * _PACKED)
            th.push(self.given, th.add(place, th.mul(self.lane, 4)), self.warp, packed, self._barrier(digit))

    def _sums(self, digit: int, word: Any, *, before: bool = False) -> list:
        """Counts of two bins, those of word number `word`: of all CTAs, or of those before the own one."""
        if self.ctas == 1:
            first = th.add(th.mul(word, 2), BINS * digit)
            return [th.shared_word(self.bins, th.add(first, step)) for step in range(2)]
        th.await_phase(self._barrier(digit), th.number(0))
        sums, at_once = [th.number(0)] * 2, (MOST_PLACES - 1) // self.own
        for begin in range(0, self.ctas, at_once):
            words = []
            for cta in range(begin, min(begin + at_once, self.ctas)):
                held = th.shared_word(self.given, th.add(word, (digit * self.ctas + cta) * _PACKED))
                words.append(th.select(th.compare(self.cta, "ugt", cta), held, th.number(0)) if before else held)
            # No bin of so many CTAs has more than half a word holds.
            sums = [th.add(a, b) for a, b in zip(sums, reversed(_halves(_sum(words))), strict=True)]
        return sums

    def _of_lane(self, base: Any, start: int) -> list:
        """Eight words of a lane, which lie next to each other."""
        first = th.add(th.mul(self.lane, BINS // WARP), start)
        return [*th.shared_quad(base, first), *th.shared_quad(base, th.add(first, 4))]

    def _find(self, found: Any, missing: Any, digit: int) -> None:
        """Tells the largest next bits that `missing` numbers reach, 0 where none are; what is missing then, and what has them.

        By a warpgroup: a thread knows two bins, and how many numbers have larger bits. One of them has found it.
        """
        low, high = self._sums(digit, self.thread)
        through = self._through_lane(th.add(low, high))
        last = th.compare(self.lane, "eq", WARP - 1)
        th.when(last, "st.shared.b32 [$0], $1;", th.add(self.told, th.mul(th.add(self.warp, _TOTALS), 4)), through)
        th.warpgroup_barrier()
        larger = th.sub(th.number(0), through)
        for warp, total in enumerate(th.shared_quad(self.told, th.number(_TOTALS))):
            larger = th.add(larger, th.select(th.compare(self.warp, "ugt", warp), th.number(0), total))
        with_high = th.add(larger, high)
        enough = th.compare(with_high, "uge", missing)
        is_high = th.every(th.compare(larger, "ult", missing), enough)
        # The bin of zeros is what is found where no bin is reached.
        reached = th.either(th.compare(th.add(with_high, low), "uge", missing), th.compare(self.thread, "eq", 0))
        is_low = th.every(th.compare(with_high, "ult", missing), reached)
        with th.branch(th.either(is_high, is_low)):
            bits = th.add(th.mul(self.thread, 2), th.as_word(is_high))
            above, inside = th.select(is_high, larger, with_high), th.select(is_high, high, low)
            words = [th.add(th.mul(found, BINS), bits), th.sub(missing, above), inside, th.number(0)]
            th.store_shared_quad(self.told, th.number(0), words)

    def _tell_earlier(self, bound: _Bound) -> None:
        """Counts of earlier CTAs' numbers above the threshold and equal to it: a warp for each pass."""
        bits, none = th.number(0), th.number(0)
        for digit in range(DIGITS):
            of_digit = th.bit_and(th.div(bound.bits, 1 << (32 - BITS * (digit + 1))), BINS - 1)
            bits = th.select(th.compare(self.warp, "eq", digit), of_digit, bits)
        passes = th.select(bound.done, th.number(DIGITS - 1), th.number(DIGITS))
        is_last = th.compare(th.add(self.warp, 1), "eq", passes)
        with th.branch(th.under(self.warp, DIGITS)):
            first = th.mul(self.lane, BINS // WARP)
            place, above, ties = th.add(first, th.mul(self.warp, BINS)), none, none
            words = [*th.shared_quad(self.earlier, place), *th.shared_quad(self.earlier, th.add(place, 4))]
            for step, word in enumerate(words):
                bin_ = th.add(first, step)
                above = th.add(above, th.select(th.compare(bin_, "ugt", bits), word, none))
                ties = th.add(ties, th.select(th.compare(bin_, "eq", bits), word, none))
            is_pass = th.compare(passes, "ugt", self.warp)
            above = th.select(is_pass, th.over_lanes(above, "add"), none)
            ties = th.select(is_last, th.over_lanes(ties, "add"), none)
            with th.branch(th.compare(self.lane, "eq", 0)):
                th.store_shared(self.told, th.add(self.warp, 4), above)
                th.store_shared(self.told, th.add(self.warp, 4 + DIGITS), ties)

    def _through_lane(self, value: Any):
        """The sum of all earlier lanes' values and the own one."""
        for distance in (1, 2, 4, 8, 16):
            value = th.add(value, th.from_lane_before(value, distance))
        return value

    def pages(self, table: Any, width: int, page_size: int) -> list:
        """Offset of each four numbers from their places to slots in pages."""
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
        if self.ctas > 1:
            self._tell_earlier(bound)
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
        if self.ctas > 1:
            above, ties = (_sum(th.shared_quad(self.told, th.number(first))) for first in (4, 4 + DIGITS))
            # Where three passes were enough, all that begins so is above.
            above = th.add(above, th.select(bound.done, ties, th.number(0)))
            before = [th.add(a, b) for a, b in zip(before, (above, ties), strict=True)]
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
    """Swizzled place of four numbers, as the first one's word: threads reach neither theirs nor a copy's through the same banks."""
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
