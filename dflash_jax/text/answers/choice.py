"""Choice of a model's answer parsers, by its chat template and by the end of its prompt."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dflash_jax.text.answers.events import Arguments, CallBegin, CallEnd, Event, Parser, Text, Thought, merged
from dflash_jax.text.answers.hermes import Hermes
from dflash_jax.text.answers.qwen3_xml import Qwen3Xml
from dflash_jax.text.answers.reasoning import BEGIN, END, Reasoning, Start

type ToolParser = Literal["auto", "hermes", "qwen3_xml", "none"]
type ReasoningParser = Literal["auto", "qwen3", "none"]
TOOL_PARSERS = ("auto", "hermes", "qwen3_xml", "none")
REASONING_PARSERS = ("auto", "qwen3", "none")


def tool_parser_of(name: str, template: str) -> str:
    """The form of calls that a template writes, if `name` is "auto"."""
    if name != "auto":
        return name
    if "<function=" in template:
        return "qwen3_xml"
    return "hermes" if "<tool_call>" in template else "none"


def start_of(name: str, template: str, options: Mapping[str, Any], prompt_end: str) -> Start | None:
    """Where an answer begins (inside or outside of reasoning); None if no reasoning is parsed.

    Args:
      prompt_end: the last words of the prompt.
    """
    if name == "none" or (name == "auto" and END not in template):
        return None
    end = prompt_end.rstrip()
    if end.endswith(BEGIN):
        return "inside"
    if end.endswith(END) or options.get("enable_thinking") is False:
        return None
    return "inside" if "enable_thinking" in template else "maybe"


def parser_of(tool_parser: str, start: Start | None, tools: Sequence[Mapping[str, Any]]) -> Parser | None:
    """A parser for one answer; None where its text is all there is."""
    calls: Parser | None = None
    if tools and tool_parser != "none":
        calls = Hermes() if tool_parser == "hermes" else Qwen3Xml(tools)
    if start is None:
        return calls
    return Reasoning(start, calls, calls=calls is not None)


def broken(events: Sequence[Event]) -> bool:
    """Whether a call of an answer is not complete, or its arguments are no JSON."""
    arguments: dict[int, str] = {}
    for event in events:
        if isinstance(event, Arguments):
            arguments[event.index] = arguments.get(event.index, "") + event.text
    complete = {event.index for event in events if isinstance(event, CallEnd)}
    if {event.index for event in events if isinstance(event, CallBegin)} - complete:
        return True
    try:
        return not all(isinstance(json.loads(text), dict) for text in arguments.values())
    except (ValueError, RecursionError):
        return True


def parsed(parser: Parser, text: str) -> list[Event]:
    """Events of a whole answer. Where a call in it is broken, all that is no thought is text."""
    events = merged([*parser.feed(text), *parser.finish()])
    if not broken(events):
        return events
    thought = "".join(event.text for event in events if isinstance(event, Thought))
    rest = text.partition(thought)[2] if thought else text
    if isinstance(parser, Reasoning):
        for mark in (BEGIN, END):
            rest = rest.lstrip("\n").removeprefix(mark)
        rest = rest.lstrip("\n")
    return merged([Thought(thought), Text(rest)])
