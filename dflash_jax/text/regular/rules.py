"""Grammars with rules, in llguidance's form of Lark, that are a regular language: those of choices and of tools' calls.

Read are texts in double quotes, other rules, groups, repetitions, documents of JSON schemas, and rules of any text that ends where
its suffix first stands. What is left out is refused: expressions, terminals, directives, and rules that come back to themselves.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from dflash_jax.sampling_params import MAX_SCHEMA_DEPTH, WHITE_SPACE
from dflash_jax.text.regular.expressions import Alt, Cat, Node, NotRegular, Repeat, Until, literal
from dflash_jax.text.regular.schemas import document

_RULE = re.compile(r"([a-z][a-z0-9_]*): *")
_SUFFIX = re.compile(r"([a-z][a-z0-9_]*)\[suffix=(\".*\")\]: /\(\?s:\.\*\)/")
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_TIMES = {"?": (0, 1), "*": (0, None), "+": (1, None)}
_DOCUMENT = "%json "
_DECODER = json.JSONDecoder()
_SPACES = {"whitespace_pattern": WHITE_SPACE}


def language(text: str) -> Node:
    """The texts of a grammar's rule `start`.

    Raises:
      NotRegular: they are no regular language, or a rule has something that is left out.
    """
    rules, suffixes = dict[str, str](), dict[str, str]()
    for line in text.split("\n"):
        if found := _SUFFIX.fullmatch(line):
            name, rest = found[1], _read(found[2], 0, found[2])[0]
            suffixes[name] = rest
        elif found := _RULE.match(line):
            name = found[1]
            rules[name] = line[found.end() :]
        else:
            raise NotRegular(f"the rule {line!r:.60}")
        if (name in rules) + (name in suffixes) > 1:
            raise NotRegular(f"two rules {name!r:.40}")
    return _Reader(rules, suffixes).rule("start", 0)


def _read(text: str, place: int, line: str) -> tuple[Any, int]:
    """A value in JSON at a place of a line, and the place behind it."""
    try:
        return _DECODER.raw_decode(text, place)
    except ValueError:
        raise NotRegular(f"the rule {line!r:.60}") from None


class _Reader:
    """Trees of rules.

    Args:
      rules: what stands behind their names.
      suffixes: of rules of any text.
    """

    def __init__(self, rules: Mapping[str, str], suffixes: Mapping[str, str]):
        self.rules, self.suffixes = rules, suffixes
        self.line, self.place, self.depth = "", 0, 0

    def rule(self, name: str, depth: int) -> Node:
        """The tree of a rule, within `depth` others."""
        if depth > MAX_SCHEMA_DEPTH:
            raise NotRegular("a rule that comes back to itself, or rules that are nested too deeply")
        if (suffix := self.suffixes.get(name)) is not None:
            return Until(suffix)
        if name not in self.rules:
            raise NotRegular(f"no rule {name!r:.40}")
        outer = self.line, self.place, self.depth
        self.line, self.place, self.depth = self.rules[name], 0, depth
        node = self.alternatives()
        if self.place < len(self.line):
            raise NotRegular(f"the rule {self.line!r:.60}")
        self.line, self.place, self.depth = outer
        return node

    def alternatives(self) -> Node:
        choices = [self.sequence()]
        while self.line.startswith("|", self.place):
            self.place += 1
            choices.append(self.sequence())
        return choices[0] if len(choices) == 1 else Alt(tuple(choices))

    def sequence(self) -> Node:
        parts = list[Node]()
        self.skip_spaces()
        while self.place < len(self.line) and self.line[self.place] not in "|)":
            node = self.item()
            if (times := _TIMES.get(self.line[self.place : self.place + 1])) is not None:
                self.place += 1
                node = Repeat(node, *times)
            parts.append(node)
            self.skip_spaces()
        if not parts:
            raise NotRegular(f"the rule {self.line!r:.60}")
        return Cat(tuple(parts))

    def item(self) -> Node:
        line, place = self.line, self.place
        if line[place] == '"':
            found, self.place = _read(line, place, line)
            if line.startswith("i", self.place):
                raise NotRegular("a text with flags")
            return literal(found)
        if line.startswith(_DOCUMENT, place):
            schema, self.place = _read(line, place + len(_DOCUMENT), line)
            # Of other white space nothing is known.
            if not isinstance(schema, dict) or schema.pop("x-guidance", None) != _SPACES:
                raise NotRegular("a schema whose white space is not bounded as elsewhere")
            return document(json.dumps(schema))
        if line[place] == "(":
            self.place += 1
            node = self.alternatives()
            if not self.line.startswith(")", self.place):
                raise NotRegular(f"the rule {line!r:.60}")
            self.place += 1
            return node
        if (found := _NAME.match(line, place)) is None:
            raise NotRegular(f"the rule {line!r:.60}")
        self.place = found.end()
        return self.rule(found[0], self.depth + 1)

    def skip_spaces(self) -> None:
        while self.line.startswith(" ", self.place):
            self.place += 1
