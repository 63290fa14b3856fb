"""Strict JSON: the one place where the small files of a model folder become values.

Every reader of `config.json`, an index, a safetensors header, a marker or a tokenizer's settings goes through here, so that
whatever is wrong in such a file has a name: bytes that are no UTF-8, a key that appears twice, nesting without a bound, numbers
that no double holds, text that has no UTF-8 form.

    values = read_object(folder / "config.json")
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_jax.checkpoints.hub import POINTER, is_pointer

MAX_JSON_BYTES = 256 << 20
MAX_DEPTH = 100
_SHOWN = 20
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_object(path: Path, most: int = MAX_JSON_BYTES, *, infinity: bool = False) -> dict[str, Any]:
    """A JSON object from a file.

    Args:
      most: bytes that the file may have.
      infinity: see `parse`.

    Raises:
      ValueError: the file is missing, too large, unreadable or holds something else; the sentence begins with the file's name and
        ends with what to do.
    """
    name = path.name
    try:
        if not path.is_file():
            raise ValueError(f"{name} is missing; give the folder that holds it")
        if (size := path.stat().st_size) > most:
            raise ValueError(f"{name} has {size:,} bytes, at most {most:,} are permitted; fetch the file again")
        if is_pointer(path):
            raise ValueError(f"{name} {POINTER}")
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{name} cannot be read ({error.strerror or error}); fetch the file again") from error
    try:
        value = parse(raw, infinity=infinity)
    except ValueError as error:
        raise ValueError(f"{name} is not usable: {error}; fetch the file again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} must hold a JSON object, got {type(value).__name__}; fetch the file again")
    return value


def parse(raw: bytes, *, infinity: bool = False) -> Any:
    """Parsed JSON (RFC 8259) in which no object names a key twice: two readers could disagree on which of the values counts.

    Integers are of any size, as in `model_max_length`; whoever uses one bounds it.

    Args:
      infinity: whether Infinity, which is no JSON but which Python writes, is read as the object that transformers writes for it,
        `{"__float__": "Infinity"}`.

    Raises:
      ValueError: not UTF-8, not JSON, nested more than `MAX_DEPTH` deep, a key that appears twice, a number beyond a double's range
        (NaN and Infinity are no JSON), or text with half of a surrogate pair.
    """
    try:
        value = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_float=_finite,
            parse_constant=_infinity if infinity else _no_constant,
        )
    except RecursionError:
        raise _too_deep() from None
    paired = _SURROGATE.search(raw) is None
    for key, each in _walk(value):
        for text in () if paired else (key, each):
            if isinstance(text, str):
                _check_text(text)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        raise ValueError(f"keys appear twice: {', '.join(map(ascii, twice[:_SHOWN]))}")
    return entries


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"number {text[:40]} is beyond what a double holds")
    return value


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")


def _infinity(text: str) -> Any:
    return {"__float__": text} if text == "Infinity" else _no_constant(text)


def _walk(value: Any) -> Iterator[tuple[str | None, Any]]:
    """Every value with its key, without recursion. Raises ValueError below `MAX_DEPTH`."""
    waiting = [(0, None, value)]
    while waiting:
        depth, key, each = waiting.pop()
        yield key, each
        if isinstance(each, dict | list):
            if depth == MAX_DEPTH:
                raise _too_deep()
            inner = each.items() if isinstance(each, dict) else ((None, one) for one in each)
            waiting += [(depth + 1, name, one) for name, one in inner]


def _too_deep() -> ValueError:
    return ValueError(f"JSON is nested too deeply, at most {MAX_DEPTH} levels are read")


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"text {ascii(text)[:80]} holds half of a surrogate pair, which no UTF-8 text has") from None
