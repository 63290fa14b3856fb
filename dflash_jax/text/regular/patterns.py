"""Regular expressions as Rust's are written, as far as they say which texts there are and nothing else.

What is left out is refused: flags, look-around, word boundaries, properties of Unicode by name, sets of characters within each
other. Classes such as `\\w` are those of llguidance, which is asked for them: tables of Unicode differ from version to version.
"""

import functools
from collections.abc import Callable
from typing import Any

from dflash_jax.text.regular.expressions import (
    ANY,
    LAST,
    Alt,
    Cat,
    Chars,
    Node,
    NotRegular,
    Repeat,
    chars,
    without,
)

MOST_TIMES = 1024
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_HEX = {"x": 2, "u": 4, "U": 8}
# In JSON schemas, whose expressions are ECMA's.
_ASCII = {"d": chars((48, 57)), "w": chars((48, 57), (65, 90), (95, 95), (97, 122))}


def parse(text: str, *, ascii_classes: bool = False) -> Node:
    """The tree of an expression for the whole text. Anchors may stand where they say nothing else: at its two ends.

    Args:
      ascii_classes: `\\d` and `\\w` are of ASCII.

    Raises:
      NotRegular: it has something that is left out, or is none.
    """
    parser = _Parser(text, ascii_classes)
    node = parser.alternatives()
    if parser.place < len(text):
        raise NotRegular(f"{text[parser.place]!r} at {parser.place}")
    return node


class _Parser:
    def __init__(self, text: str, ascii_classes: bool):
        self.text, self.place, self.ascii = text, 0, ascii_classes

    def peek(self) -> str:
        return self.text[self.place : self.place + 1]

    def take(self) -> str:
        if not (one := self.peek()):
            raise NotRegular("an expression that breaks off")
        self.place += 1
        return one

    def skip(self, text: str) -> bool:
        found = self.text.startswith(text, self.place)
        self.place += len(text) if found else 0
        return found

    def alternatives(self) -> Node:
        choices = [self.sequence()]
        while self.skip("|"):
            choices.append(self.sequence())
        return choices[0] if len(choices) == 1 else Alt(tuple(choices))

    def sequence(self) -> Node:
        parts = list[Node]()
        while self.peek() not in ("", "|", ")"):
            parts.append(self.repeated())
        return Cat(tuple(parts))

    def repeated(self) -> Node:
        node = self.atom()
        while (mark := self.peek()) and mark in "*+?{":
            self.place += 1
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(mark) or self.bounds()
            if self.peek() and self.peek() in "?+":
                raise NotRegular("a repetition that is lazy or possessive")
            node = Repeat(node, least, most)
        return node

    def bounds(self) -> tuple[int, int | None]:
        inside, closed, _ = self.text[self.place :].partition("}")
        least, comma, most = inside.partition(",")
        numbers = least, most if comma and most else least
        if not closed or not all(one.isascii() and one.isdigit() for one in numbers):
            raise NotRegular(f"{{{inside:.20}")
        self.place += len(inside) + 1
        low, high = int(least), None if comma and not most else int(numbers[1])
        if max(low, high or 0) > MOST_TIMES or (high is not None and high < low):
            raise NotRegular(f"a repetition of {inside}")
        return low, high

    def atom(self) -> Node:
        match self.take():
            case "(":
                if self.skip("?") and not self.skip(":"):
                    raise NotRegular("a group with flags or a name")
                node = self.alternatives()
                if self.take() != ")":
                    raise NotRegular("a group that is not closed")
                return node
            case "[":
                return self.listed()
            case ".":
                return without(ANY, chars((10, 10)))
            case "\\":
                return self.escaped()
            case one if one in "^$*+?{":
                raise NotRegular(f"{one!r} at {self.place - 1}")
            case one:
                return chars((ord(one), ord(one)))

    def escaped(self) -> Chars:
        one = self.take()
        if one.lower() in "dws":
            found = _ASCII[one] if self.ascii and one in _ASCII else None
            found = found or (_ASCII.get(one.lower()) if self.ascii else None) or class_of(one.lower())
            return found if one.islower() else without(ANY, found)
        if one in _HEX and not (one == "U" and self.ascii):
            digits = self.text[self.place : self.place + _HEX[one]]
            if len(digits) < _HEX[one] or any(digit not in "0123456789abcdefABCDEF" for digit in digits):
                raise NotRegular(f"\\{one} without {_HEX[one]} digits")
            self.place += len(digits)
            code = int(digits, 16)
            if code > LAST or 0xD800 <= code <= 0xDFFF:
                raise NotRegular(f"the code point {code:x}")
            return chars((code, code))
        if one in _CONTROLS and not (one == "a" and self.ascii):
            return chars((ord(_CONTROLS[one]), ord(_CONTROLS[one])))
        if one.isalnum() or not one.isascii():
            raise NotRegular(f"\\{one}")
        return chars((ord(one), ord(one)))

    def listed(self) -> Chars:
        negated, ranges = self.skip("^"), list[tuple[int, int]]()
        first = True
        while first or self.peek() != "]":
            first = False
            part = self.member()
            following = self.text[self.place + 1 : self.place + 2]
            if self.peek() == "-" and following not in ("", "]"):
                self.place += 1
                last = self.member()
                (low, same), (other, high) = part.ranges[0], last.ranges[-1]
                if len(part.ranges) + len(last.ranges) > 2 or low != same or other != high or high < low:
                    raise NotRegular("a range of characters from or to none")
                part = chars((low, high))
            ranges += part.ranges
        self.place += 1
        found = chars(*ranges)
        return without(ANY, found) if negated else found

    def member(self) -> Chars:
        one = self.take()
        if one == "\\":
            return self.escaped()
        if one == "[" or (one in "&~-" and self.peek() == one):
            raise NotRegular("a set within a set")
        return chars((ord(one), ord(one)))


@functools.cache
def class_of(name: str) -> Chars:
    """The characters of `\\d`, `\\w` or `\\s`, as llguidance has them: one that knows single bytes is asked along every path."""
    found = list[int]()
    matcher, allowed = byte_matcher(f"\\{name}")

    def follow(prefix: bytes) -> None:
        for byte in allowed():
            if byte == _END:
                found.append(ord(prefix.decode()))
            else:
                matcher.consume_token(byte)
                follow(prefix + bytes([byte]))
                matcher.rollback(1)

    follow(b"")
    return chars(*((code, code) for code in found))


_END = 256


def byte_matcher(pattern: str) -> tuple[Any, Callable[[], list[int]]]:
    """llguidance's matcher of an expression over tokens that are single bytes, and what may come next; 256 is the end."""
    import llguidance  # pyright: ignore[reportMissingImports]
    import numpy as np
    from llguidance.numpy import fill_next_token_bitmask  # pyright: ignore[reportMissingImports]

    class Bytes:
        eos_token_id, bos_token_id, special_token_ids = _END, None, (_END,)
        tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

        def __call__(self, text: bytes) -> list[int]:
            return list(text)

    tokens = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()), n_vocab=_END + 1, eos_token=_END)
    matcher = llguidance.LLMatcher(tokens, llguidance.LLMatcher.grammar_from_regex(pattern), log_level=0)
    row = np.zeros((1, -(-(_END + 1) // 32)), np.int32)

    def allowed() -> list[int]:
        fill_next_token_bitmask(matcher, row)
        return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()

    return matcher, allowed
