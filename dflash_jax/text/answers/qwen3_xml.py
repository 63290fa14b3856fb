"""Calls as Qwen3-Coder and Qwen3.5 write them: `<function=NAME>` with `<parameter=NAME>` values inside, in `<tool_call>` marks.

Values are texts there. Their types come from the tool's JSON schema. Marks that models leave out are not missed: the end of a
value, of a call, and `>` behind a name.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_jax.text.answers.events import Arguments, CallBegin, CallEnd, ContentAroundCalls, Event, first_of, held_back

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
# What ends a value: two of them only where a line begins, since code may hold them.
_VALUE_ENDS = (PARAMETER_END, PARAMETER, FUNCTION_END, f"\n{END}", f"\n{BEGIN}", f"\n{FUNCTION}")
_NULL = "null"


class Qwen3Xml:
    """A parser of such answers. Values that are texts are given as they come, others at their end.

    Args:
      tools: as the request has them, `{"type": "function", "function": {"name", "parameters"}}`.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()):
        functions = [tool.get("function", {}) for tool in tools]
        self._schemas = {one.get("name"): one.get("parameters") or {} for one in functions}
        self._held, self._state = "", self._content
        self._around = ContentAroundCalls()
        self._index = -1
        self._types: Mapping[str, Any] = {}
        self._parameters = 0
        self._kind, self._raw = "", ""
        self._open = self._started = False  # of a text's value: its first line break is read; its quote was given

    def feed(self, text: str) -> list[Event]:
        """The next piece."""
        self._held += text
        events: list[Event] = []
        while self._state(events):
            pass
        return events

    def finish(self) -> list[Event]:
        """No text follows. A call between two values is complete, one inside a value is not."""
        held, self._held = self._held, ""
        events: list[Event] = []
        if self._state == self._content:
            events += self._around.take(held)
        elif self._state == self._marked:
            events += self._around.take(BEGIN + held)
        elif self._state == self._named:
            events += self._around.take(held)
        elif self._state == self._inside:
            self._end_call(events)
        return events + self._around.finish()

    # States. Each says whether there may be more to do with what is held.

    def _content(self, events: list[Event]) -> bool:
        at, mark = first_of(self._held, BEGIN, FUNCTION, END)
        if at < 0:
            keep = held_back(self._held, BEGIN, FUNCTION, END)
            events += self._around.take(self._drop(len(self._held) - keep))
            return False
        before = self._drop(at)
        if mark == END and self._index < 0:  # of no call
            events += self._around.take(before + self._drop(len(END)))
            return True
        events += self._around.take(before)
        if mark != FUNCTION:
            self._drop(len(mark))
        if mark == BEGIN:
            self._state = self._marked
        elif mark == FUNCTION:
            self._state = self._named
        return True

    def _marked(self, events: list[Event]) -> bool:
        """Behind a mark, which is none where no function follows."""
        left = self._held.lstrip()
        if left.startswith(FUNCTION):
            self._held, self._state = left, self._named
        elif FUNCTION.startswith(left):
            return False
        else:
            events += self._around.take(BEGIN)
            self._state = self._content
        return True

    def _named(self, events: list[Event]) -> bool:
        name = self._name(FUNCTION)
        if name is None:
            return False
        self._index += 1
        self._around.call()
        events.append(CallBegin(self._index, name))
        self._types = self._schemas.get(name, {}).get("properties") or {}
        self._parameters, self._state = 0, self._inside
        return True

    def _inside(self, events: list[Event]) -> bool:
        marks = PARAMETER, FUNCTION_END, END, BEGIN, FUNCTION
        at, mark = first_of(self._held, *marks)
        if at < 0:
            self._drop(len(self._held) - held_back(self._held, *marks))
            return False
        self._drop(at)
        if mark == PARAMETER:
            name = self._name(PARAMETER)
            if name is None:
                return False
            opening = ", " if self._parameters else "{"
            events.append(Arguments(self._index, f"{opening}{json.dumps(name, ensure_ascii=False)}: "))
            self._parameters += 1
            self._kind, self._raw = kind_of(self._types.get(name)), ""
            self._open = self._started = False
            self._state = self._value
            return True
        if mark == FUNCTION_END:
            self._drop(len(mark))
        self._end_call(events)
        return True

    def _value(self, events: list[Event]) -> bool:
        at, mark = first_of(self._held, *_VALUE_ENDS)
        ended = at >= 0
        if ended:
            part = self._drop(at)
            self._drop(len(mark) if mark == PARAMETER_END else mark.startswith("\n"))
        else:
            # A line break at the end may be markup.
            part = self._drop(len(self._held) - held_back(self._held, *_VALUE_ENDS, "\n\n"))
        self._raw += part
        if not self._open and self._raw:
            self._raw, self._open = self._raw.removeprefix("\n"), True
        if ended and mark in _VALUE_ENDS[:3]:
            self._raw = self._raw.removesuffix("\n")
        if self._kind == "string":
            self._give_text(events, ended=ended)
        elif ended:
            events.append(Arguments(self._index, _converted(self._raw, self._kind)))
        if ended:
            self._state = self._inside
        return ended

    def _give_text(self, events: list[Event], *, ended: bool) -> None:
        """Events of the new part of a text value: its letters as JSON has them, one line break held back."""
        if not self._started:
            if ended and self._raw == _NULL:
                events.append(Arguments(self._index, _NULL))
                return
            if not ended and _NULL.startswith(self._raw.removesuffix("\n")):
                return
            self._started = True
            events.append(Arguments(self._index, '"'))
        keep = not ended and self._raw.endswith("\n")
        given = self._raw[: len(self._raw) - keep]
        self._raw = self._raw[len(given) :]
        events.append(Arguments(self._index, json.dumps(given, ensure_ascii=False)[1:-1] + ('"' if ended else "")))

    def _end_call(self, events: list[Event]) -> None:
        events.append(Arguments(self._index, "}" if self._parameters else "{}"))
        events.append(CallEnd(self._index))
        self._state = self._content

    def _name(self, mark: str) -> str | None:
        """The name behind a mark, with both dropped; None while it may go on. A line ends it where `>` is left out."""
        at, _ = first_of(self._held, ">", "\n")
        if at < 0:
            return None
        name = self._drop(at)[len(mark) :].strip()
        if self._held.startswith(">"):
            self._drop(1)
        return name

    def _drop(self, size: int) -> str:
        dropped, self._held = self._held[:size], self._held[size:]
        return dropped


def kind_of(schema: Any) -> str:
    """Type of a parameter's values: "string" also if its schema does not say."""
    if not isinstance(schema, Mapping):
        return "string"
    told = schema.get("type")
    kinds = told if isinstance(told, list) else [told] if isinstance(told, str) else []
    for other in (*_listed(schema.get("anyOf")), *_listed(schema.get("oneOf"))):
        kinds = [*kinds, kind_of(other)]
    kinds = [kind for kind in kinds if kind != _NULL]
    return (
        kinds[0]
        if len(set(kinds)) == 1 and isinstance(kinds[0], str)
        else "string"
        if "string" in kinds or not kinds
        else "any"
    )


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _converted(text: str, kind: str) -> str:
    """A value as JSON: what is none of its kind stays a text."""
    word = text.strip()
    made: Any = text
    if word == _NULL:
        made = None
    elif kind == "boolean" and word.lower() in ("true", "false"):
        made = word.lower() == "true"
    else:
        kinds = {"integer": int, "number": (int, float), "boolean": bool, "object": dict, "array": list}.get(
            kind, object
        )
        try:
            told = json.loads(word, parse_constant=_refuse)
        except (ValueError, RecursionError):
            told = text
        if isinstance(told, kinds) and not (kind in ("integer", "number") and isinstance(told, bool)):
            made = told
    return json.dumps(made, ensure_ascii=False)


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON's")
