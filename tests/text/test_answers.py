"""Parsers of thoughts and calls: what they say of written answers, whole and at every split."""

import json
import random

import pytest

from dflash_jax.text.answers import choice
from dflash_jax.text.answers.events import Arguments, CallBegin, CallEnd, Text, Thought, merged
from dflash_jax.text.answers.hermes import Hermes
from dflash_jax.text.answers.qwen3_xml import Qwen3Xml
from dflash_jax.text.answers.reasoning import Reasoning

PROPERTIES = {
    "city": {"type": "string"}, "days": {"type": "integer"}, "share": {"type": "number"}, "wet": {"type": "boolean"},
    "list": {"type": "array"}, "map": {"type": ["object", "null"]}, "any": {"anyOf": [{"type": "integer"}, {"type": "array"}]},
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": PROPERTIES}}}]


def call(index, name, arguments):
    return [CallBegin(index, name), Arguments(index, arguments), CallEnd(index)]


HERMES = {
    "one call": (
        'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"city": "Paris"}}\n</tool_call>',
        [Text("Let me see."), *call(0, "f", '{"city": "Paris"}')],
    ),
    "two calls and text": (
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>\n and so ',
        [*call(0, "f", "{}"), *call(1, "g", "{}"), Text("and so ")],
    ),
    "marks and braces in texts": (
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call> {[\\"\\\\", "b": [{"c": 1}, 2]}}</tool_call>',
        call(0, "f", '{"a": "</tool_call> {[\\"\\\\", "b": [{"c": 1}, 2]}'),
    ),
    "arguments first, as a text, and a name to pass over": (
        '<tool_call>{"id": 3, "arguments": "{\\"a\\": 1}", "name": "f"}</tool_call>', call(0, "f", '{"a": 1}'),
    ),
    "a brace too many and no end mark": ('<tool_call>{"name": "f", "arguments": {"a": 1}}}', call(0, "f", '{"a": 1}')),
    "no call": ("a < b <tool  <tool_cal \n", [Text("a < b <tool  <tool_cal \n")]),
    "no object": ("x <tool_call>hello</tool_call> y", [Text("x <tool_call>hello</tool_call> y")]),
    "no name": ('<tool_call>{"a": 1}</tool_call>', [Text('<tool_call>{"a": 1}</tool_call>')]),
    "cut before its name": ('<tool_call>{"name": "f', [Text('<tool_call>{"name": "f')]),
    "cut in its arguments": (
        '<tool_call>{"name": "f", "arguments": {"a": "b', [CallBegin(0, "f"), Arguments(0, '{"a": "b')]
    ),
    "ended inside": (
        '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>', [CallBegin(0, "f"), Arguments(0, '{"a": 1')]
    ),
}  # fmt: skip


def xml(name, *values):
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values)
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


XML = {
    "types": (
        xml("f", ("city", "Paris"), ("days", "3"), ("share", "0.5"), ("wet", "True"), ("list", "[1, 2]"), ("map", "null")),
        call(0, "f", '{"city": "Paris", "days": 3, "share": 0.5, "wet": true, "list": [1, 2], "map": null}'),
    ),
    "what does not convert, and what nobody knows": (
        xml("f", ("days", "soon"), ("share", "NaN"), ("wet", "1"), ("list", "{}"), ("any", "[3]"), ("other", "7")),
        call(0, "f", '{"days": "soon", "share": "NaN", "wet": "1", "list": "{}", "any": [3], "other": "7"}'),
    ),
    "line breaks of a value are its own but for two": (
        xml("f", ("city", "\n a\n\n"), ("x", 'q"\\\n<b> </functio')),
        call(0, "f", '{"city": "\\n a\\n\\n", "x": "q\\"\\\\\\n<b> </functio"}'),
    ),
    "a text that is null, almost null, and empty": (
        xml("f", ("city", "null"), ("x", "nullify"), ("y", "nul"), ("z", "")),
        call(0, "f", '{"city": null, "x": "nullify", "y": "nul", "z": ""}'),
    ),
    "marks left out": (
        "Go\n<function=f\n<parameter=city>\nParis\n<parameter=days>3</function>",
        [Text("Go"), *call(0, "f", '{"city": "Paris", "days": 3}')],
    ),
    "calls left open": (
        "<tool_call>\n<function=f>\n<parameter=city>\nParis\n</parameter>\n<tool_call>\n<function=g>\n<function=h>\n</tool_call> z",
        [*call(0, "f", '{"city": "Paris"}'), *call(1, "g", "{}"), *call(2, "h", "{}"), Text("z")],
    ),
    "a value left open": (
        "<function=f>\n<parameter=city>\nParis\n</tool_call>\nmore", [*call(0, "f", '{"city": "Paris"}'), Text("more")],
    ),
    "no call": ("a <tool_call> b <func </tool_call> ", [Text("a <tool_call> b <func </tool_call> ")]),
    "cut in a value": ("<function=f>\n<parameter=city>\nPar", [CallBegin(0, "f"), Arguments(0, '{"city": "Par')]),
    "cut between values": ("<function=f>\n<parameter=days>\n3\n</parameter>\n", call(0, "f", '{"days": 3}')),
    "cut in its name": ("x <function=f", [Text("x <function=f")]),
}  # fmt: skip
REASONING = {
    "with its mark": ("inside", "<think>\nso\n</think>\n\nyes", [Thought("so"), Text("yes")]),
    "without": ("inside", "so < 3\n\nand\n</think>yes</think>", [Thought("so < 3\n\nand"), Text("yes</think>")]),
    "twice ended": ("inside", "so</think>\n</think>\nyes", [Thought("so"), Text("yes")]),
    "none": ("inside", "<think>\n\n</think>\n\nyes", [Text("yes")]),
    "never ended": ("inside", "so on </thin", [Thought("so on </thin")]),
    "perhaps, with its mark": ("maybe", "\n<think>so</think>yes", [Thought("so"), Text("yes")]),
    "perhaps, without": ("maybe", " <thin air", [Text(" <thin air")]),
    "nothing": ("outside", "<think>", [Text("<think>")]),
    "ended by a call": (
        "inside", 'so\n<tool_call>{"name": "f"}</tool_call>', [Thought("so"), *call(0, "f", "{}")],
    ),
}  # fmt: skip


def makers():
    for name, (text, events) in HERMES.items():
        yield pytest.param(Hermes, text, events, id=f"hermes: {name}")
    for name, (text, events) in XML.items():
        yield pytest.param(lambda: Qwen3Xml(TOOLS), text, events, id=f"xml: {name}")
    for name, (start, text, events) in REASONING.items():
        calls = "call" in name
        make = lambda start=start, calls=calls: Reasoning(start, Hermes() if calls else None, calls=calls)  # noqa: E731
        yield pytest.param(make, text, events, id=f"reasoning: {name}")


@pytest.mark.parametrize(("make", "text", "events"), list(makers()))
def test_answers_are_told_apart_at_every_split(make, text, events):
    chance = random.Random(0)
    splits = [[], list(range(len(text))), *([at] for at in range(len(text)))]
    splits += [sorted(chance.sample(range(len(text)), min(len(text), 4))) for _ in range(20)]
    for split in splits:
        parser, said = make(), []
        for start, end in zip([0, *split], [*split, len(text)], strict=True):
            said += parser.feed(text[start:end])
        assert merged([*said, *parser.finish()]) == events, split


def test_texts_of_parts_of_marks_are_the_same_at_every_split():
    """Random ones: whatever they are, nothing depends on the pieces, and complete calls have arguments that are JSON."""
    chance = random.Random(1)
    parts = [
        "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=city>", "<parameter=days>\n", "</parameter>",
        "<think>", "</think>", "\n", "null", "a", '"', "\\", "{", "}", '{"name": "f", ', '"arguments": {"a": "b"}', " ", "<", "é",
    ]  # fmt: skip
    for _ in range(150):
        text = "".join(chance.choices(parts, k=chance.randint(1, 12)))
        for make in (Hermes, lambda: Qwen3Xml(TOOLS), lambda: Reasoning("inside", Qwen3Xml(TOOLS), calls=True)):
            whole, letters = make(), make()
            first = merged([*whole.feed(text), *whole.finish()])
            each = merged([*(event for letter in text for event in letters.feed(letter)), *letters.finish()])
            assert first == each, text
            if make is not Hermes:  # whose arguments are the model's own letters
                ended = {event.index for event in first if isinstance(event, CallEnd)}
                told = [event.text for event in first if isinstance(event, Arguments) and event.index in ended]
                assert all(isinstance(json.loads(one), dict) for one in told), text


def test_arguments_come_before_they_are_whole():
    for parser, begin in (
        (Hermes(), '<tool_call>{"name": "f", "arguments": {"city": "Par'),
        (Qwen3Xml(TOOLS), "<tool_call>\n<function=f>\n<parameter=city>\nPar"),
    ):
        said = parser.feed(begin)
        assert merged(said) == [CallBegin(0, "f"), Arguments(0, '{"city": "Par')]


def test_a_broken_call_is_text():
    start = Reasoning("inside", Hermes(), calls=True)
    text = 'so\n</think>\nx <tool_call>{"name": "f", "arguments": {"a": b}}</tool_call>'
    assert choice.parsed(start, text) == [Thought("so"), Text(text.partition("</think>\n")[2])]
    assert choice.parsed(Hermes(), text)[0] == Text(text)
    whole = choice.parsed(Hermes(), HERMES["one call"][0])
    assert whole == HERMES["one call"][1]


def test_parsers_are_chosen_by_template_and_prompt():
    assert choice.tool_parser_of("auto", "<tool_call> <function=") == "qwen3_xml"
    assert choice.tool_parser_of("auto", "<tool_call>") == "hermes"
    assert choice.tool_parser_of("auto", "") == "none"
    assert choice.tool_parser_of("none", "<tool_call>") == "none"
    thinking, plain = "</think> enable_thinking", "</think>"
    assert choice.start_of("auto", "", {}, "<think>\n") is None
    assert choice.start_of("qwen3", "", {}, "<think>\n") == "inside"
    assert choice.start_of("auto", thinking, {}, "assistant\n") == "inside"
    assert choice.start_of("auto", thinking, {"enable_thinking": False}, "assistant\n") is None
    assert choice.start_of("auto", thinking, {}, "<think>\n\n</think>\n\n") is None
    assert choice.start_of("auto", plain, {}, "assistant\n") == "maybe"
    assert choice.start_of("none", thinking, {}, "<think>") is None
    assert choice.parser_of("none", None, TOOLS) is None
    assert choice.parser_of("hermes", None, []) is None
