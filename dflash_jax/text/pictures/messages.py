"""Pictures of messages: taken out before the chat template, which writes a token in the place of each."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dflash_jax.errors import PromptError
from dflash_jax.options import as_integer

# A part of a message that is a picture says so by its type, and has it under one of these names.
_TYPES = ("image", "image_url", "input_image")
# Pixels of a picture that OpenAI's clients ask to be seen with little detail.
LOW_DETAIL = 512 * 512


class Source(NamedTuple):
    """A picture as it was given, and pixels that it may have once it is resized; None for what the model's processor says."""

    given: Any
    most: int | None = None


def pictures_in(messages: Sequence[Any]) -> list[Source]:
    """The pictures of messages in order. Raises PromptError for a part that says it is one and holds none, or bounds it by nothing
    that is a number. What is no message holds none."""
    return [
        _source(part, f"messages[{place}], part {number}")
        for place, message in enumerate(messages)
        for number, part in enumerate(_parts(message))
        if _shows(part)
    ]


def without_pictures(messages: Sequence[Any]) -> list[Any]:
    """The same messages for a chat template, which is told only where pictures are."""
    return [
        {**message, "content": [{"type": "image"} if _shows(part) else part for part in parts]} if parts else message
        for message, parts in ((message, _parts(message)) for message in messages)
    ]


def _parts(message: Any) -> Sequence[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, list | tuple) else ()


def _shows(part: Any) -> bool:
    if not isinstance(part, Mapping):
        return False
    kind = part.get("type")
    return kind in _TYPES if isinstance(kind, str) else any(name in part for name in ("image", "image_url"))


def _source(part: Mapping[str, Any], at: str) -> Source:
    found = next((part[name] for name in ("image", "image_url", "url", "path") if part.get(name) is not None), None)
    told = {**part, **found} if isinstance(found, Mapping) else part
    found = found.get("url") if isinstance(found, Mapping) else found
    if found is None:
        raise PromptError(
            f'{at} holds no picture: give {{"type": "image", "image": ...}} with a path, bytes or an image'
        )
    most = told.get("max_pixels", LOW_DETAIL if told.get("detail") == "low" else None)
    if most is not None and (as_integer(most) or 0) < 1:
        raise PromptError(f"{at}: max_pixels must be a positive integer, got {most!r:.40}")
    return Source(found, as_integer(most))
