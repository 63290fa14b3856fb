"""Pictures and films of messages: taken out before the chat template, which writes a token in the place of each."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dflash_jax.errors import PromptError
from dflash_jax.options import as_integer

# A part of a message that is a picture says so by its type, and has it under one of these names; and one that is a film.
_TYPES, _NAMES = ("image", "image_url", "input_image"), ("image", "image_url")
_FILM_TYPES = _FILM_NAMES = ("video", "video_url")
# Pixels of a picture that OpenAI's clients ask to be seen with little detail.
LOW_DETAIL = 512 * 512


class Source(NamedTuple):
    """A picture as it was given, and pixels that it may have once it is resized; None for what the model's processor says."""

    given: Any
    most: int | None = None


class FilmSource(NamedTuple):
    """A film as it was given.

    Attributes:
      fps: frames a second of frames that are given; None beside what says it itself.
      frames: that are looked at; None for what the model's processor says.
      most: pixels of all of them once they are resized, as a picture's.
    """

    given: Any
    fps: Any = None
    frames: int | None = None
    most: int | None = None


def pictures_in(messages: Sequence[Any]) -> list[Source]:
    """The pictures of messages in order. Raises PromptError for a part that says it is one and holds none, or bounds it by nothing
    that is a number. What is no message holds none."""
    return [_source(part, at) for part, at in _parts_that(_shows, messages)]


def films_in(messages: Sequence[Any]) -> list[FilmSource]:
    """The films of messages in order. Raises PromptError as `pictures_in`."""
    return [_film(part, at) for part, at in _parts_that(_plays, messages)]


def without_pictures(messages: Sequence[Any]) -> list[Any]:
    """The same messages for a chat template, which is told only where pictures and films are."""
    return [
        {**message, "content": [_told(part) for part in parts]} if parts else message
        for message, parts in ((message, _parts(message)) for message in messages)
    ]


def _told(part: Any) -> Any:
    if _shows(part):
        return {"type": "image"}
    return {"type": "video"} if _plays(part) else part


def _parts_that(wanted: Callable[[Any], bool], messages: Sequence[Any]) -> list[tuple[Mapping[str, Any], str]]:
    return [
        (part, f"messages[{place}], part {number}")
        for place, message in enumerate(messages)
        for number, part in enumerate(_parts(message))
        if wanted(part)
    ]


def _parts(message: Any) -> Sequence[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, list | tuple) else ()


def _shows(part: Any) -> bool:
    return _is(part, _TYPES, _NAMES)


def _plays(part: Any) -> bool:
    return _is(part, _FILM_TYPES, _FILM_NAMES) and not _shows(part)


def _is(part: Any, types: Sequence[str], names: Sequence[str]) -> bool:
    if not isinstance(part, Mapping):
        return False
    kind = part.get("type")
    return kind in types if isinstance(kind, str) else any(name in part for name in names)


def _source(part: Mapping[str, Any], at: str) -> Source:
    found, told = _held(part, _NAMES)
    if found is None:
        raise PromptError(
            f'{at} holds no picture: give {{"type": "image", "image": ...}} with a path, bytes or an image'
        )
    return Source(found, _positive(told, "max_pixels", at, LOW_DETAIL if told.get("detail") == "low" else None))


def _film(part: Mapping[str, Any], at: str) -> FilmSource:
    found, told = _held(part, _FILM_NAMES)
    if found is None:
        raise PromptError(f'{at} holds no film: give {{"type": "video", "video": ...}} with a path, bytes or frames')
    frames, most = (_positive(told, name, at) for name in ("num_frames", "max_pixels"))
    return FilmSource(found, told.get("fps"), frames, most)


def _held(part: Mapping[str, Any], names: Sequence[str]) -> tuple[Any, Mapping[str, Any]]:
    """What a part holds under one of these names, and all that is said beside it."""
    found = next((part[name] for name in (*names, "url", "path") if part.get(name) is not None), None)
    if isinstance(found, Mapping):
        return found.get("url"), {**part, **found}
    return found, part


def _positive(told: Mapping[str, Any], name: str, at: str, default: int | None = None) -> int | None:
    value = told.get(name, default)
    if value is not None and (as_integer(value) or 0) < 1:
        raise PromptError(f"{at}: {name} must be a positive integer, got {value!r:.40}")
    return as_integer(value)
