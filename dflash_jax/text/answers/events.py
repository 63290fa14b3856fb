"""Events of answer parsers, and their common helpers."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class Text:
    """A part of what is for the reader."""

    text: str


@dataclass(frozen=True)
class Thought:
    """A part of the reasoning before it."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A call of a tool begins, the `index`-th of the answer."""

    index: int
    name: str


@dataclass(frozen=True)
class Arguments:
    """A part of a call's arguments, which are a text of JSON."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """A call is complete."""

    index: int


type Event = Text | Thought | CallBegin | Arguments | CallEnd


@runtime_checkable
class Parser(Protocol):
    """Takes an answer in pieces. What it says does not depend on where the pieces end, but for how texts are cut."""

    def feed(self, text: str) -> list[Event]: ...
    def finish(self) -> list[Event]: ...


def held_back(text: str, *marks: str) -> int:
    """Characters at the end of a text with which one of `marks` may begin."""
    longest = max(map(len, marks)) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks if len(mark) > size):
            return size
    return 0


def first_of(text: str, *marks: str) -> tuple[int, str]:
    """Position of the first of `marks` in a text, and the mark: of two at one place the longer. (-1, "") where there is none."""
    found = [(at, -len(mark), mark) for mark in marks if (at := text.find(mark)) >= 0]
    if not found:
        return -1, ""
    at, _, mark = min(found)
    return at, mark


def merged(events: list[Event]) -> list[Event]:
    """The same events with texts that follow each other in one, and without empty ones."""
    made: list[Event] = []
    for event in events:
        last = made[-1] if made else None
        match last, event:
            case (_, Text("") | Thought("") | Arguments(_, "")):
                pass
            case (Text(before), Text(text)):
                made[-1] = Text(before + text)
            case (Thought(before), Thought(text)):
                made[-1] = Thought(before + text)
            case (Arguments(index, before), Arguments(same, text)) if index == same:
                made[-1] = Arguments(index, before + text)
            case _:
                made.append(event)
    return made


class ContentAroundCalls:
    """Text before, between and after calls: white space beside a call is dropped, all other text is given."""

    def __init__(self):
        self._space = ""
        self._after_call = False

    def take(self, text: str) -> list[Event]:
        """A part of it. White space at its end waits."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if not kept:
            return []
        if self._after_call:
            kept, self._after_call = kept.lstrip(), False
        return [Text(kept)]

    def call(self) -> None:
        """A call stands here."""
        self._space, self._after_call = "", True

    def finish(self) -> list[Event]:
        """No text follows."""
        space, self._space = self._space, ""
        return [] if self._after_call or not space else [Text(space)]
