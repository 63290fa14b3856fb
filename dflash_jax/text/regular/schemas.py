"""JSON schemas whose documents are a regular language, written as llguidance writes them: properties in the schema's order, white
space between what a document is made of but not around it, texts with the shortest escapes.

What is left out is refused, and stays with llguidance: objects that may have other properties (which is what a schema says that
does not say otherwise), arrays of anything, references to themselves, and what only numbers beyond a few thousand would show.
"""

import json
from collections.abc import Mapping
from typing import Any

from dflash_jax.sampling_params import MAX_SCHEMA_DEPTH
from dflash_jax.text.regular.expressions import (
    ANY,
    Alt,
    Cat,
    Chars,
    Listed,
    Node,
    NotRegular,
    Repeat,
    Until,
    chars,
    literal,
    without,
)
from dflash_jax.text.regular.patterns import parse

# What says nothing of a document.
_WORDS = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions", "$ref"}
_MOST_WHOLE = 4096  # whole numbers between two bounds
_DIGIT = chars((48, 57))
_WHOLE = Alt((literal("0"), Cat((chars((49, 57)), Repeat(_DIGIT, 0, None)))))
_SIGNED = Cat((Repeat(literal("-"), 0, 1), _WHOLE))
_NUMBER = Cat((
    _SIGNED,
    Repeat(Cat((literal("."), Repeat(_DIGIT, 1, None))), 0, 1),
    Repeat(Cat((chars((69, 69), (101, 101)), Repeat(chars((43, 43), (45, 45)), 0, 1), Repeat(_DIGIT, 1, None))), 0, 1),
))  # fmt: skip
_SPACE = Repeat(chars((0x20, 0x20), (9, 10), (13, 13)), 0, 64)  # see `sampling_params.WHITE_SPACE`
_SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r"}
_CONTROLS = chars((0, 31), (127, 127))
_QUOTED = chars((34, 34), (92, 92))


def document(text: str) -> Node:
    """The documents of a schema.

    Raises:
      NotRegular: they are no regular language, or the schema has something that is left out.
    """
    root = json.loads(text)
    return _value(root, root, 0)


def _value(schema: Any, root: Mapping[str, Any], depth: int) -> Node:
    if depth > MAX_SCHEMA_DEPTH or not isinstance(schema, Mapping):
        raise NotRegular("a reference to itself" if depth > MAX_SCHEMA_DEPTH else f"the schema {schema!r:.40}")
    said = {key: value for key, value in schema.items() if key not in _WORDS}
    if "$ref" in schema:
        if said:
            raise NotRegular("$ref beside other words")
        return _value(_referred(schema["$ref"], root), root, depth + 1)
    if "enum" in said or "const" in said:
        return _listed_values(said)
    for word in ("anyOf", "allOf"):
        if word in said:
            choices = said.pop(word)
            if said or not choices or (word == "allOf" and len(choices) > 1):
                raise NotRegular(f"{word} beside other words")
            return Alt(tuple(_value(choice, root, depth + 1) for choice in choices))
    kinds = said.pop("type", None)
    if isinstance(kinds, list):
        if said or not kinds:
            raise NotRegular("several types with other words")
        return Alt(tuple(_value({"type": kind}, root, depth + 1) for kind in kinds))
    match kinds:
        case "object":
            return _object(said, root, depth)
        case "array":
            return _array(said, root, depth)
        case "string":
            return _string(said)
        case "integer":
            return _integer(said)
        case "number" | "null" | "boolean" if not said:
            plain = {"number": _NUMBER, "null": literal("null"), "boolean": Alt((literal("true"), literal("false")))}
            return plain[kinds]
    raise NotRegular(f"type {kinds!r:.20} with {', '.join(said) or 'nothing'}")


def _only(said: Mapping[str, Any], *names: str) -> None:
    if others := [name for name in said if name not in names]:
        raise NotRegular(f"the word {others[0]!r:.40}")


def _referred(path: Any, root: Mapping[str, Any]) -> Any:
    found: Any = root
    parts = path.split("/") if isinstance(path, str) else [""]
    if parts[0] != "#":
        raise NotRegular(f"$ref {path!r:.40}")
    for part in parts[1:]:
        if not isinstance(found, Mapping) or part not in found:
            raise NotRegular(f"$ref {path!r:.40}")
        found = found[part]
    return found


def _listed_values(said: Mapping[str, Any]) -> Node:
    _only(said, "enum", "const", "type")
    values = said["enum"] if "enum" in said else [said["const"]]
    if ("enum" in said and "const" in said) or not isinstance(values, list) or not values:
        raise NotRegular("enum and const")
    kind = said.get("type")
    if any(isinstance(value, dict | list) for value in values) or kind not in (None, "string"):
        raise NotRegular("enum or const of what is no text")
    texts = [value for value in values if isinstance(value, str)]
    if kind == "string" and len(texts) < len(values):
        raise NotRegular("enum of other types than its own")
    return Alt(tuple(_text(value) if isinstance(value, str) else literal(json.dumps(value)) for value in values))


def _text(value: str) -> Node:
    return Cat((literal('"'), *(_in_text(chars((ord(one), ord(one)))) for one in value), literal('"')))


def _in_text(found: Chars) -> Node:
    """Some characters as a JSON text has them."""
    plain = without(without(found, _CONTROLS), _QUOTED)
    kept = {code for low, high in found.ranges for code in range(low, min(high, 127) + 1)}
    quoted = [code for code in (34, 92) if code in kept]
    controls = [code for code in (*range(32), 127) if code in kept]
    choices: list[Node] = [plain] if plain.ranges else []
    choices += [literal("\\" + chr(code)) for code in quoted]
    choices += [literal("\\" + _SHORT[code]) for code in controls if code in _SHORT]
    choices += [Cat((literal("\\u00"), *map(_hex, f"{code:02x}"))) for code in controls]
    return choices[0] if len(choices) == 1 else Alt(tuple(choices))


def _hex(digit: str) -> Chars:
    return chars(*((ord(one), ord(one)) for one in {digit.lower(), digit.upper()}))


def _string(said: Mapping[str, Any]) -> Node:
    _only(said, "pattern", "minLength", "maxLength")
    if "pattern" in said:
        if len(said) > 1:
            raise NotRegular("pattern beside a length")
        inside = _quoted(_pattern(said["pattern"]))
    else:
        least, most = said.get("minLength", 0), said.get("maxLength")
        if any(type(one) is not int or not 0 <= one <= 1024 for one in (least, 0 if most is None else most)):
            raise NotRegular("lengths of texts")
        if most is not None and most < least:
            raise NotRegular("no text of such a length")
        inside = Repeat(_in_text(ANY), least, most)
    return Cat((literal('"'), inside, literal('"')))


def _pattern(pattern: Any) -> Node:
    """An expression that is searched for, where it does not begin or end at an anchor."""
    if not isinstance(pattern, str):
        raise NotRegular("a pattern that is no text")
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[begins : len(pattern) - ends]
    node = parse(inner, ascii_classes=True)
    if isinstance(node, Alt) and (begins or ends):
        raise NotRegular("an anchor of one of several")  # which binds closer than |
    anything = Repeat(ANY, 0, None)
    return Cat((*(() if begins else (anything,)), node, *(() if ends else (anything,))))


def _quoted(node: Node) -> Node:
    """Texts as JSON has them."""
    match node:
        case Chars():
            return _in_text(node)
        case Cat():
            return Cat(tuple(map(_quoted, node.parts)))
        case Alt():
            return Alt(tuple(map(_quoted, node.choices)))
        case Repeat():
            return Repeat(_quoted(node.part), node.least, node.most)
        case Listed() | Until():
            raise NotRegular("a list, or any text up to another, in an expression")


def _integer(said: Mapping[str, Any]) -> Node:
    _only(said, "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    if any(type(bound) is not int for bound in said.values()):
        raise NotRegular("bounds that are no whole numbers")
    lows = [said[name] + more for name, more in (("minimum", 0), ("exclusiveMinimum", 1)) if name in said]
    highs = [said[name] - less for name, less in (("maximum", 0), ("exclusiveMaximum", 1)) if name in said]
    low, high = max(lows, default=None), min(highs, default=None)
    if low is None and high is None:
        return _SIGNED
    if high is None and low in (0, 1):
        return _WHOLE if low == 0 else Cat((chars((49, 57)), Repeat(_DIGIT, 0, None)))
    if low is None or high is None or not 0 <= high - low < _MOST_WHOLE:
        raise NotRegular("bounds of whole numbers that are far apart, or none")
    texts = [str(number) for number in range(low, high + 1)]
    return Alt(tuple(map(literal, [*texts, "-0"] if low < 0 <= high else texts)))


def _array(said: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Node:
    _only(said, "items", "minItems", "maxItems")
    least, most = said.get("minItems", 0), said.get("maxItems")
    if any(type(one) is not int or not 0 <= one <= 1024 for one in (least, 0 if most is None else most)):
        raise NotRegular("lengths of arrays")
    if most is not None and most < max(least, 1):
        raise NotRegular("an array that is always empty, or none")
    item = _value(said.get("items"), root, depth + 1)
    more = Cat((_SPACE, literal(","), _SPACE, item))
    some = Cat((item, Repeat(more, max(least - 1, 0), None if most is None else most - 1), _SPACE))
    return Cat((literal("["), _SPACE, some if least else Repeat(some, 0, 1), literal("]")))


def _object(said: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Node:
    _only(said, "properties", "required", "additionalProperties")
    if said.get("additionalProperties") is not False:
        raise NotRegular("an object that may have other properties: additionalProperties is not false")
    properties, required = said.get("properties", {}), said.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list) or set(required) - set(properties):
        raise NotRegular("properties that are required and not named")
    items = [
        (Cat((_text(name), _SPACE, literal(":"), _SPACE, _value(told, root, depth + 1), _SPACE)), name in required)
        for name, told in properties.items()
    ]
    inside = Listed(tuple(items), Cat((literal(","), _SPACE)))
    return Cat((literal("{"), _SPACE, inside, literal("}")))
