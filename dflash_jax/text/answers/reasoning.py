"""Thoughts before an answer, between `<think>` and `</think>` as Qwen's and DeepSeek's models write them."""

from typing import Literal

from dflash_jax.text.answers.events import Event, Parser, Text, Thought, held_back

BEGIN, END, CALL = "<think>", "</think>", "<tool_call>"

type Start = Literal["inside", "maybe", "outside"]


class Reasoning:
    """Thoughts first, then what a parser of calls makes of the rest.

    Args:
      start: "inside": the answer begins with thoughts, be it with or without their mark; "maybe": with the mark alone; "outside":
        there are none.
      rest: takes what follows; None where that is text.
      calls: whether a call ends thoughts that have no end.
    """

    def __init__(self, start: Start, rest: Parser | None = None, *, calls: bool = False):
        self._state: Start = start
        self._rest, self._calls = rest, calls
        self._opening = start != "outside"
        self._held, self._fresh = (
            "",
            True,
        )  # before the first letter of the thoughts: line breaks there are part of nothing
        self._closing = False  # behind the end mark: there neither

    def feed(self, text: str) -> list[Event]:
        """The next piece."""
        self._held += text
        events: list[Event] = []
        if self._opening and not self._opened():
            return []
        if self._state == "inside":
            events += self._think()
        if self._state == "outside":
            events += self._after()
        return events

    def finish(self) -> list[Event]:
        """No text follows."""
        events: list[Event] = []
        if self._state == "inside":
            events += [Thought(self._held)] if self._held else []
        elif self._held and not self._closing:
            events += self._pass(self._held)
        self._held = ""
        return events + (self._rest.finish() if self._rest is not None else [])

    def _opened(self) -> bool:
        """Whether it is known if the text begins with the mark, which is then dropped."""
        text = self._held.lstrip()
        if BEGIN.startswith(text) and text != BEGIN:  # nothing but space, or a part of the mark
            return False
        if text.startswith(BEGIN):
            self._held, self._state = text.removeprefix(BEGIN), "inside"
        elif self._state == "maybe":
            self._state = "outside"
        self._opening = False
        return True

    def _think(self) -> list[Event]:
        if self._fresh:
            self._held = self._held.lstrip("\n")
            self._fresh = not self._held
        marks = (END, CALL) if self._calls else (END,)
        places = [(at, mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        if not places:
            # Line breaks before the mark are part of nothing either.
            keep = held_back(self._held, *marks)
            body = self._held[: len(self._held) - keep].rstrip("\n")
            self._held = self._held[len(body) :]
            return [Thought(body)] if body else []
        at, mark = min(places)
        thought = self._held[:at].rstrip("\n")
        self._held = self._held[at + len(END) :] if mark == END else self._held[at:]
        self._state, self._closing = "outside", mark == END
        return [Thought(thought)] if thought else []

    def _after(self) -> list[Event]:
        if self._closing:
            self._held = self._held.lstrip("\n")
            if not self._held:
                return []
            if END.startswith(self._held) and self._held != END:
                return []
            if self._held.startswith(END):  # once more
                self._held = self._held.removeprefix(END)
                return self._after()
            self._closing = False
        text, self._held = self._held, ""
        return self._pass(text)

    def _pass(self, text: str) -> list[Event]:
        if self._rest is not None:
            return self._rest.feed(text)
        return [Text(text)] if text else []
