"""Shape buckets: the few numbers of slots, page-table widths and prompt shapes that programs are compiled for."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def round_up(value: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds `value`, or the largest one."""
    return next((bucket for bucket in buckets if bucket >= value), buckets[-1])


def powers(first: int, last: int, base: int) -> tuple[int, ...]:
    """`first`, `first * base`, ... and `last` at the end; one that `last` exceeds by less than half is left out."""
    buckets = []
    while first < last:
        buckets.append(first)
        first *= base
    if buckets and last < 1.5 * buckets[-1]:
        buckets.pop()  # nearly the same program twice
    return (*buckets, last)


def _with_one_more(buckets: tuple[int, ...], bucket: int) -> tuple[int, ...]:
    """`buckets` with one between the least and the largest."""
    return tuple(sorted({*buckets, bucket})) if buckets[0] < bucket < buckets[-1] else buckets


# Prompts are prefilled in rows of so many tokens, the pieces of one or of several, in numbers of rows that double from the least to
# the most. Measured on an H200 in the shapes of Qwen3-4B, with calls queued one behind the other: 1 x 32, 1 x 128 and 4 x 32 tokens
# take 3.4 ms each, for they read the same weights, 8 x 32 4.3, 16 x 32 6.9 and 1 x 512 7.0. So fewer rows than 4 gain nothing, and
# from 8 to 16 each prompt more costs what its products cost.
PIECE, LEAST_PIECES, MOST_PIECES = 32, 4, 16
# One prompt alone that lacks more is one row: then attention is that of a prompt, which reads the keys before it once for 128 of
# its queries, and latent keys are expanded once.
PIECES_OF_ONE = 8


@dataclass(frozen=True)
class Buckets:
    """The shapes an engine runs in.

    Attributes:
      batch: slots.
      width: pages of a page table.
      piece: tokens of a row in which prompts are prefilled.
      pieces: rows of a call.
      whole: the row of one prompt that is not cut into pieces, where prompts may be so long.
    """

    batch: tuple[int, ...]
    width: tuple[int, ...]
    piece: int
    pieces: tuple[int, ...]
    whole: tuple[int, int] | None

    @classmethod
    def build(
        cls, *, max_batch: int, max_tokens: int, page_size: int, longest: int, max_chunk: int, dense: int = 0,
        one_shape: bool = False,
    ) -> "Buckets":  # fmt: skip
        """Buckets for sequences of `max_tokens` tokens and prompts of `longest`; `max_chunk` tokens are prefilled at once at most.

        `dense`: up to so many tokens a program is another one than beyond; 0 where it is not. Some width ends there. `one_shape`:
        the largest of each alone, and prompts in pieces only.
        """
        pages, one = -(-max_tokens // page_size), min(longest, max_chunk)
        piece = min(PIECE, one)
        limit = MOST_PIECES if max_batch > 1 else PIECES_OF_ONE
        most = min(max_chunk // piece, limit, max_batch * -(-longest // piece))
        if one_shape:
            return cls((max_batch,), (pages,), piece, (most,), None)
        return cls(
            batch=powers(1, max_batch, 2),
            width=_with_one_more(powers(min(pages, max(1, 256 // page_size)), pages, 4), dense // page_size),
            piece=piece,
            pieces=powers(min(LEAST_PIECES, most), most, 2),
            whole=(1, one) if one > PIECES_OF_ONE * piece else None,
        )

    def prompts(self, lefts: Sequence[int]) -> tuple[int, int]:
        """Rows and tokens of each in which prompts are prefilled together that lack so many tokens; one alone may lack more."""
        count = self.count(lefts)
        if len(lefts) == 1 and count > PIECES_OF_ONE and self.whole:
            return self.whole
        return round_up(count, self.pieces), self.piece

    def count(self, lefts: Iterable[int]) -> int:
        """Pieces of prompts that lack so many tokens."""
        return sum(-(-left // self.piece) for left in lefts)

    def room(self, lefts: Sequence[int], most: int | None = None) -> int:
        """Tokens that one more prompt may lack to be prefilled together with these, in a call of at most so many tokens, or of the
        fewest that there is."""
        pieces = [count for count in self.pieces if most is None or count * self.piece <= most] or self.pieces[:1]
        return (pieces[-1] - self.count(lefts)) * self.piece

    @property
    def chunk(self) -> int:
        """Tokens of a call at most."""
        return max(self.pieces[-1] * self.piece, 0 if self.whole is None else self.whole[1])
