"""Pictures among a prompt's tokens: which tokens are their rows, and what each token turns by."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dflash_jax.errors import PromptError
from dflash_jax.models import VisionConfig


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture, or a pair of frames of a film, as a tower takes it.

    Attributes:
      pixels: float32 `[height * width, W]`, its patches, squares of neighbours one after the other.
      grid: height and width in patches.
    """

    pixels: np.ndarray
    grid: tuple[int, int]

    @cached_property
    def digest(self) -> bytes:
        """Names what it shows: two pictures of one name are the same."""
        name = hashlib.blake2b(np.array(self.grid, np.int64).tobytes(), digest_size=16)
        name.update(np.ascontiguousarray(self.pixels).data)
        return name.digest()


@dataclass(frozen=True, eq=False)
class Pictures:
    """A prompt's pictures.

    Attributes:
      marks: of each picture the place of its first token, and its digest.
      rows: of each picture `[tokens, D]`, on the host: a prompt may be prefilled more than once.
      positions: int32 `[L, 3]`, what each token of the prompt turns by.
      shift: added to the place of every token after the prompt gives what that turns by.
    """

    marks: tuple[tuple[int, bytes], ...]
    rows: tuple[np.ndarray, ...]
    positions: np.ndarray
    shift: int

    def piece(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """What tokens from `start` to `stop` turn by, `[tokens, 3]`, those of an answer too; and which are rows of pictures."""
        positions = np.repeat(np.arange(start, stop, dtype=np.int32)[:, None] + self.shift, 3, axis=1)
        inside = self.positions[start:stop]
        positions[: len(inside)] = inside
        placed = np.zeros((stop - start,), bool)
        for (first, _), rows in zip(self.marks, self.rows, strict=True):
            placed[max(0, first - start) : max(0, first + len(rows) - start)] = True
        return positions, placed

    def fill(self, whole: np.ndarray, start: int, stop: int) -> None:
        """Puts the rows of tokens from `start` to `stop` to their places in `whole [tokens, D]`."""
        for (first, _), rows in zip(self.marks, self.rows, strict=True):
            begin, end = max(first, start), min(first + len(rows), stop)
            if begin < end:
                whole[begin - start : end - start] = rows[begin - first : end - first]


# What stands in the place of the one token that a chat template wrote: tokens, and pictures, as many tokens as they have rows.
type Spread = Sequence[Sequence[int] | Picture]


def expanded(
    ids: Sequence[int], config: VisionConfig, pictures: Sequence[Picture], films: Sequence[Spread] = ()
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Picture, ...]]:
    """A prompt with pictures and films in their places, where the first token of each picture is, and all pictures in that order.

    Raises:
      PromptError: there are not as many tokens that stand for a picture, or a film, as there are of them.
    """
    left = {config.image_token_id: iter([[one] for one in pictures]), config.video_token_id: iter(films)}
    for token, kind, given in (
        (config.image_token_id, "pictures", pictures),
        (config.video_token_id, "films", films),
    ):
        if (count := sum(one == token for one in ids)) != len(given):
            raise PromptError(
                f"the prompt has {count} places for {kind} and {len(given)} {kind}: the chat template must write one place for "
                "each, and no text may hold the token that stands for one"
            )
    whole, starts, shown = list[int](), list[int](), list[Picture]()
    for one in ids:
        if one not in left:
            whole.append(one)
            continue
        for piece in next(left[one]):
            if isinstance(piece, Picture):
                starts.append(len(whole))
                shown.append(piece)
                whole += [one] * (len(piece.pixels) // config.merged)
            else:
                whole += piece
    return tuple(whole), tuple(starts), tuple(shown)


def three_axes(
    length: int, starts: Sequence[int], grids: Sequence[tuple[int, int]], merge: int
) -> tuple[np.ndarray, int]:
    """What each of `length` tokens turns by, int32 `[length, 3]`, and the shift of all tokens after them.

    A text's token is one further than the token before on all axes. A picture's rows all have one time; they are as far in rows and
    columns as they stand in it, and what comes after it is further by its longer edge.
    """
    positions, at, now = np.zeros((length, 3), np.int32), 0, 0

    def text(stop: int) -> None:
        nonlocal at, now
        positions[at:stop] = np.arange(now, now + stop - at)[:, None]
        now, at = now + stop - at, stop

    for start, (height, width) in zip(starts, grids, strict=True):
        text(start)
        rows, columns = height // merge, width // merge
        places = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1).reshape(-1, 2)
        positions[at : at + len(places), 0] = now
        positions[at : at + len(places), 1:] = now + places
        at, now = at + len(places), now + max(rows, columns)
    text(length)
    return positions, now - length
