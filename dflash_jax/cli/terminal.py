"""Output that is safe for a terminal: text of a model or its folder may hold control characters, which are escaped."""

import json
import sys
from typing import Any

_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\N{REPLACEMENT CHARACTER}")
# JSON allows these in strings; terminals obey some of them, and others end a line for who reads line by line.
_LEFT_BY_JSON = {code: f"\\u{code:04x}" for code in [*range(127, 160), 0x2028, 0x2029]}


def printable(text: str, stream: Any) -> str:
    """The text without control characters where `stream` is a terminal, as it is elsewhere."""
    return text.translate(_CONTROLS) if stream.isatty() else text


def note(text: str) -> None:
    """One line on stderr that is no error."""
    print(printable(f"note: {text}", sys.stderr), file=sys.stderr)


def shows_all(stream: Any) -> bool:
    """Whether every character can be written to `stream`."""
    return (stream.encoding or "").lower().replace("-", "").startswith("utf")


def json_line(value: Any, stream: Any) -> str:
    """JSON on one line that reads back as it was whatever the encoding of `stream` is, without control characters."""
    return json.dumps(value, ensure_ascii=not shows_all(stream)).translate(_LEFT_BY_JSON)
