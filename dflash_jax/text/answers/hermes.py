"""Calls as Hermes, Qwen2.5 and Qwen3 write them: `<tool_call>`, a JSON object with `name` and `arguments`, `</tool_call>`."""

import json

from dflash_jax.text.answers.events import Arguments, CallBegin, CallEnd, ContentAroundCalls, Event, held_back

BEGIN, END = "<tool_call>", "</tool_call>"
_ARGUMENTS = ("arguments", "parameters")


class Hermes:
    """A parser of such answers. Arguments are given as they come once the tool's name is known; what is no call is text."""

    def __init__(self):
        self._held = ""
        self._content = ContentAroundCalls()
        self._call: _Call | None = None
        self._calls = 0
        self._trailing = False  # behind a call: the end mark, and braces too many

    def feed(self, text: str) -> list[Event]:
        """The next piece."""
        self._held += text
        events: list[Event] = []
        while self._step(events):
            pass
        return events

    def finish(self) -> list[Event]:
        """No text follows: a call that is not complete stays so, and is text where nothing was said of it."""
        if self._call is not None:
            events = self._give_up(self._call, "")
            return events + self._content.finish()
        held = "" if self._trailing else self._held
        self._held = ""
        return [*self._content.take(held), *self._content.finish()]

    def _step(self, events: list[Event]) -> bool:
        """Whether there may be more to say of what is held."""
        if self._call is not None:
            return self._step_call(self._call, events)
        if self._trailing:
            left = self._held.lstrip().lstrip("}").lstrip()
            if END.startswith(left) and left != END:
                self._held = left
                return False
            self._held, self._trailing = left.removeprefix(END), False
            return True
        at = self._held.find(BEGIN)
        if at < 0:
            keep = held_back(self._held, BEGIN)
            given = self._held[: len(self._held) - keep]
            self._held = self._held[len(given) :]
            events += self._content.take(given)
            return False
        events += self._content.take(self._held[:at])
        self._held = self._held[at + len(BEGIN) :]
        self._call = _Call(self._calls)
        return True

    def _step_call(self, call: "_Call", events: list[Event]) -> bool:
        if call.state == "open":
            used = call.read(self._held, events)
            self._held = self._held[used:]
            if call.begun:
                self._content.call()
        if call.state == "end":
            self._calls += 1
            self._call, self._trailing = None, True
            return True
        if call.state == "broken":
            # What follows up to the end mark belongs to it.
            at = self._held.find(END)
            if at < 0:
                keep = held_back(self._held, END)
                call.raw += self._held[: len(self._held) - keep]
                self._held = self._held[len(self._held) - keep :]
                return False
            call.raw += self._held[:at]
            self._held = self._held[at + len(END) :]
            events += self._give_up(call, END)
            return True
        return False

    def _give_up(self, call: "_Call", end: str) -> list[Event]:
        """Events of a broken call."""
        raw, self._call = call.raw + (self._held if not end else ""), None
        self._held = self._held if end else ""
        if call.begun:  # it was told already
            self._calls += 1
            return []
        return self._content.take(f"{BEGIN}{raw}{end}")


class _Call:
    """A call's JSON object, read letter by letter.

    Attributes:
      state: "open", "end" behind the object's last brace, or "broken" where it is no object.
      raw: what was read.
      begun: whether it was told.
    """

    def __init__(self, index: int):
        self.index, self.state, self.raw, self.begun = index, "open", "", False
        self._depth, self._string, self._escaped = 0, False, False
        self._name: str | None = None
        # Of the names of the object itself.
        self._key = ""
        self._in_key = self._in_value = False
        self._value: list[str] = []
        self._streams: bool | None = (
            None  # whether the value is arguments that are given as they come; None before its first letter
        )
        self._waiting: list[str] = []  # arguments that were not given yet: they may come before the name
        self._given = False

    def read(self, text: str, events: list[Event]) -> int:
        """Takes a text up to the object's end, or to an end mark outside of strings, which breaks it. Returns how much it took."""
        taken = len(text)
        for place, letter in enumerate(text):
            if letter == "<" and not self._string:
                mark = text[place : place + len(END)]
                taken = place
                if not (END.startswith(mark) and mark != END):  # else it may be the end mark
                    self.state = "broken"
                break
            self._take(letter)
            if self.state != "open":
                taken = place + 1
                break
        self.raw += text[:taken]
        if self._name is not None:
            if not self.begun:
                self.begun = True
                events.append(CallBegin(self.index, self._name))
            events.append(Arguments(self.index, "".join(self._waiting)))
            self._waiting.clear()
            if self.state == "end":
                events += [] if self._given else [Arguments(self.index, "{}")]
                events.append(CallEnd(self.index))
        return taken

    def _take(self, letter: str) -> None:
        if self._string:
            if self._in_value:
                self._extend(letter)
            elif self._escaped or letter != '"':
                self._key += letter
            ends = letter == '"' and not self._escaped
            self._escaped = letter == "\\" and not self._escaped
            if ends:
                self._string = self._in_key = False
        elif self._depth == 0:
            if letter == "{":
                self._depth = 1
            elif not letter.isspace():
                self.state = "broken"
        elif self._depth == 1 and letter == "}":
            self._end_value()
            self.state = "end" if self._name is not None else "broken"
        elif self._in_value and self._depth == 1 and letter == ",":
            self._end_value()
        elif self._in_value:
            self._extend(letter)
            self._string = letter == '"'
            self._depth += (letter in "{[") - (letter in "}]")
        elif letter == '"':
            self._string, self._in_key, self._key = True, True, ""
        elif letter == ":":
            self._in_value, self._streams = True, None
        elif not (letter.isspace() or letter == ","):
            self.state = "broken"

    def _extend(self, letter: str) -> None:
        space = self._depth == 1 and not self._string and letter.isspace()
        if self._streams is None and not space:
            self._streams = letter == "{" and self._key in _ARGUMENTS
            self._given = self._given or self._streams
        if not space:
            (self._waiting if self._streams else self._value).append(letter)

    def _end_value(self) -> None:
        if self._in_value and not self._streams:
            value = "".join(self._value)
            try:
                told = json.loads(value)
            except ValueError:
                told = None
            if self._key == "name" and isinstance(told, str):
                self._name = told
            if self._key in _ARGUMENTS and told is not None and not self._given:
                self._waiting.append(told if isinstance(told, str) else value)
                self._given = True
        self._value.clear()
        self._in_value = False
