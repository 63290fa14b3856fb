"""Grammars of answers that have to call a tool, in the forms that the parsers beside this file read. They are texts in llguidance's
form of Lark, where `%json` is a document of a schema."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_jax.sampling_params import WHITE_SPACE, quoted
from dflash_jax.text.answers.qwen3_xml import kind_of

_TEXT_END = "\n</parameter>\n"


def call_grammar(form: str, functions: Sequence[Mapping[str, Any]], *, several: bool) -> str:
    """A grammar of calls of any of these functions, without a word around them.

    Args:
      form: "hermes" or "qwen3_xml".
      functions: as tools have them, each with its name and the schema of its parameters.
      several: whether more than one call may come.
    """
    rules = ['start: call ("\\n" call)*' if several else "start: call"]
    rules.append("call: " + " | ".join(f"call_{place}" for place in range(len(functions))))
    for place, function in enumerate(functions):
        schema = function.get("parameters") or {}
        if form == "hermes":
            rules.append(_hermes(place, function["name"], schema))
        else:
            rules += _qwen3_xml(place, function["name"], schema)
    if any("text_value" in rule for rule in rules):
        rules.append(f"text_value[suffix={quoted(_TEXT_END)}]: /(?s:.*)/")
    return "\n".join(rules)


def _hermes(place: int, name: str, schema: Mapping[str, Any]) -> str:
    begin = f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
    return f"call_{place}: {quoted(begin)} {_json({'type': 'object'} | dict(schema))} {quoted('}' + chr(10) + '</tool_call>')}"


def _qwen3_xml(place: int, name: str, schema: Mapping[str, Any]) -> list[str]:
    """Parameters come in the schema's order, each at most once, those that are not required perhaps not at all."""
    required, shared = (
        schema.get("required") or (),
        {key: schema[key] for key in ("$defs", "definitions") if key in schema},
    )
    rules, parts = list[str](), [quoted(f"<tool_call>\n<function={name}>\n")]
    for number, (key, told) in enumerate((schema.get("properties") or {}).items()):
        rule = f"call_{place}_{number}"
        rules.append(f"{rule}: {quoted(f'<parameter={key}>{chr(10)}')} {_value(told, shared)}")
        parts.append(rule if key in required else f"{rule}?")
    return [f"call_{place}: {' '.join((*parts, quoted('</function>' + chr(10) + '</tool_call>')))}", *rules]


def _value(told: Any, shared: Mapping[str, Any]) -> str:
    """A parameter's value and what ends it. Texts come as they are, everything else as JSON."""
    schema = told if isinstance(told, Mapping) else {}
    listed = schema.get("enum")
    if isinstance(listed, list) and listed and all(isinstance(one, str) and one for one in listed):
        return f"({' | '.join(map(quoted, listed))}) {quoted(_TEXT_END)}"
    if kind_of(told) == "string" and "$ref" not in schema:
        return "text_value"
    return f"{_json({**schema, **shared})} {quoted(_TEXT_END)}"


def _json(schema: Mapping[str, Any]) -> str:
    bounded = {**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE}}
    return f"%json {json.dumps(bounded, ensure_ascii=False)}"
