"""Films as users have them: frames, animated pictures that Pillow opens, and files that PyAV decodes (extra `vision`).

Nothing is fetched, and a file is told by its first bytes, never by what a name says: what may name other files or addresses, such
as a playlist, is no film here. Frames are decoded one after the other and only those that are asked for are kept.
"""

import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dflash_jax.errors import PromptError
from dflash_jax.options import as_number
from dflash_jax.text.pictures.reading import MOST_PIXELS, data_of, on_white, opened

# What is decoded at most: frames, an hour of 30 a second and some more, and their pixels, such an hour of 1280 x 720 and some more.
MOST_FRAMES, MOST_DECODED = 2**17, 2**37
# By what they begin with, and where that is: the demuxer of each.
_FILES = (
    (4, b"ftyp", "mov"),
    (4, b"moov", "mov"),
    (4, b"mdat", "mov"),
    (0, b"\x1a\x45\xdf\xa3", "matroska"),
    (8, b"AVI ", "avi"),
)
_ANIMATED = ("GIF", "WEBP", "PNG")
# What browsers take for the time of a frame that says none.
_UNTOLD_MS = 100.0
_FRAMES = "data:video/jpeg;"
_WAYS = (
    "give frames with fps (a list of pictures, or an array [T, height, width, 3] of uint8), or a path, bytes or a data URL of an "
    "animated GIF, WEBP or PNG or of an mp4, mov, mkv, webm or avi file"
)


class Clip(NamedTuple):
    """A film that was opened.

    Attributes:
      frames: of the whole film.
      fps: how many of them are shown in a second.
      seen: frames at ascending places, uint8 `[height, width, 3]`. Raises PromptError for what cannot be decoded, and `Ended`.
    """

    frames: int
    fps: float
    height: int
    width: int
    seen: Callable[[Sequence[int]], Iterator[np.ndarray]]


class Ended(Exception):
    """A film has fewer frames than its file says.

    Attributes:
      frames: that it has.
    """

    def __init__(self, frames: int):
        super().__init__(f"{frames} frames")
        self.frames = frames


def clip_of(source: Any, fps: Any = None) -> Clip:
    """Opens a film.

    Args:
      fps: of frames that are given, which have no times of their own.

    Raises:
      PromptError: it is none, or cannot be opened, or is too large; or `fps` is missing, or beside a film that has its own.
    """
    if isinstance(source, str) and source.startswith(_FRAMES):
        head, _, content = source.partition(",")
        source = [f"{head.replace('video', 'image', 1)},{one}" for one in content.split(",")]
    if isinstance(source, list | tuple | np.ndarray):
        return _checked(_given(source, fps))
    if fps is not None:
        raise PromptError(
            f"fps={fps!r:.40} is for frames that are given: this film says itself how long it is, and num_frames says how many of "
            "its frames are looked at"
        )
    return _checked(_read(source))


def _checked(clip: Clip) -> Clip:
    size = clip.height * clip.width
    if not 0 < size <= MOST_PIXELS:
        raise PromptError(
            f"a film of {clip.width} x {clip.height} pixels cannot be read: it must have some, and at most {MOST_PIXELS:,}"
        )
    if clip.frames > MOST_FRAMES or clip.frames * size > MOST_DECODED:
        raise PromptError(
            f"a film of {clip.frames:,} frames of {clip.width} x {clip.height} pixels is too long: at most {MOST_FRAMES:,} frames "
            f"and {MOST_DECODED:,} pixels are decoded. Cut it, or make it smaller"
        )
    return clip


def _given(source: Any, fps: Any) -> Clip:
    rate = as_number(fps)
    if rate is None or not math.isfinite(rate) or rate <= 0:
        raise PromptError(f"frames need fps, the positive number of them that are shown in a second, got {fps!r:.40}")
    if isinstance(source, np.ndarray) and (source.dtype != np.uint8 or source.ndim != 4 or source.shape[3] != 3):
        raise PromptError(f"an array of {source.dtype} {list(source.shape)} is no film: {_WAYS}")
    if not len(source):
        raise PromptError(f"a film without a frame shows nothing: {_WAYS}")

    def frame(place: int) -> np.ndarray:
        try:
            return np.asarray(opened(source[place], white=True))
        except PromptError as error:
            raise PromptError(f"frame {place} of a film: {error}") from None

    height, width, _ = frame(0).shape if isinstance(source, list | tuple) else source.shape[1:]

    def seen(places: Sequence[int]) -> Iterator[np.ndarray]:
        for place in places:
            found = source[place] if isinstance(source, np.ndarray) else frame(place)
            yield _of_size(found, place, height, width)

    return Clip(len(source), float(rate), height, width, seen)


def _of_size(frame: np.ndarray, place: int, height: int, width: int) -> np.ndarray:
    if frame.shape != (height, width, 3):
        raise PromptError(
            f"frame {place} of a film has {frame.shape[1]} x {frame.shape[0]} pixels, the first has {width} x {height}: make all "
            "of one size"
        )
    return frame


def _read(source: Any) -> Clip:
    """A film of a file, of bytes, or of an image that Pillow has opened."""
    if isinstance(source, str) and source.startswith("data:"):
        source = data_of(source, "film", "video/mp4")
    if isinstance(source, str) and "://" in source:
        raise PromptError(f"nothing is fetched, so a film cannot be the URL {source!r:.60}: {_WAYS}")
    shown = f"the file {str(source)!r:.80}" if isinstance(source, str | Path) else "a film"
    if isinstance(source, str | Path):
        source = Path(source).expanduser()
        try:
            with source.open("rb") as file:
                first = file.read(12)
        except OSError as error:
            raise PromptError(f"{shown} cannot be opened as a film ({error.strerror}): {_WAYS}") from error
    elif isinstance(source, bytes | bytearray):
        source = bytes(source)
        first = source[:12]
    elif hasattr(source, "n_frames"):
        return _animation(lambda: nullcontext(source), shown)
    else:
        raise PromptError(f"{type(source).__name__} {source!r:.40} is no film: {_WAYS}")
    for at, mark, kind in _FILES:
        if first[at : at + len(mark)] == mark:
            return _file(source, kind, shown)
    try:
        from PIL import Image
    except ImportError:
        raise PromptError(
            "animated pictures are opened by Pillow, which is not installed: pip install 'dflash-jax[vision]'"
        ) from None

    def image() -> Any:
        return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=_ANIMATED)

    return _animation(image, shown)


def _animation(image: Callable[[], AbstractContextManager[Any]], shown: str) -> Clip:
    """Frames of an animated picture, as many a second as it has on average: positions in time are counted in frames."""

    def decoded(places: Sequence[int]) -> Iterator[Any]:
        try:
            with image() as film:
                # Before anything is decoded: a small file may say that it holds billions.
                _checked(Clip(getattr(film, "n_frames", 1), 1.0, film.height, film.width, seen))
                for place in places:
                    film.seek(place)
                    film.load()
                    yield film
        except PromptError:
            raise
        except Exception as error:  # what a damaged file raises depends on its format
            raise PromptError(
                f"{shown} cannot be opened as a film ({' '.join(str(error).split()):.200}): {_WAYS}"
            ) from error

    def seen(places: Sequence[int]) -> Iterator[np.ndarray]:
        for place, film in zip(places, decoded(places), strict=True):
            yield _of_size(np.asarray(on_white(film)), place, clip.height, clip.width)

    first = next(decoded([0]))
    clip = Clip(getattr(first, "n_frames", 1), 1.0, first.height, first.width, seen)
    lasting = math.fsum(float(film.info.get("duration") or _UNTOLD_MS) for film in decoded(range(clip.frames)))
    return clip._replace(fps=1000 * clip.frames / lasting)


def _file(source: bytes | Path, kind: str, shown: str) -> Clip:
    """Frames of a film's file: as many as packets that are shown, as many a second as it has on average."""
    try:
        import av
        from av.error import FFmpegError
    except ImportError:
        raise PromptError(
            f"{shown} is decoded by PyAV, which is not installed: pip install 'dflash-jax[vision]', or give frames with fps"
        ) from None

    def container() -> Any:
        # By the demuxer that its first bytes name, none of which opens anything else.
        return av.open(io.BytesIO(source) if isinstance(source, bytes) else f"file:{source.absolute()}", format=kind)

    def wrong(error: Exception) -> PromptError:
        return PromptError(f"{shown} cannot be decoded as a film ({' '.join(str(error).split()):.200}): {_WAYS}")

    try:
        with container() as file:
            if not file.streams.video:
                raise PromptError(f"{shown} has no pictures in it: {_WAYS}")
            stream = file.streams.video[0]
            rate = stream.average_rate or stream.guessed_rate
            height, width = stream.height, stream.width
            if not rate:
                raise PromptError(f"{shown} does not say how many frames are shown in a second: give frames with fps")
            _checked(Clip(1, 1.0, height, width, lambda _: iter(())))
            frames = 0
            for packet in file.demux(stream):
                frames += bool(packet.size) and not packet.is_discard
    except (FFmpegError, ValueError) as error:
        raise wrong(error) from error

    def seen(places: Sequence[int]) -> Iterator[np.ndarray]:
        wanted, decoded = iter(places), 0
        place = next(wanted, None)
        try:
            with container() as file:
                file.streams.video[0].thread_type = "AUTO"
                for frame in file.decode(video=0):
                    if place is None:
                        return
                    if decoded == place:
                        yield _of_size(frame.to_ndarray(format="rgb24"), place, height, width)
                        place = next(wanted, None)
                    decoded += 1
        except (FFmpegError, ValueError) as error:
            raise wrong(error) from error
        if place is not None:
            raise Ended(decoded)

    return Clip(frames, float(rate), height, width, seen)
