"""Parsers of values on the command line: options of a chat template, token ids."""

import argparse
import ast
import re
import warnings
from typing import Any

from dflash_jax.checkpoints.json_files import parse

# What is a word of a language for values in another spelling than the language's: nobody means the text.
_NO_TEXT = ("true", "false", "null", "none", "nan", "infinity", "inf")


def chat_option(text: str) -> tuple[str, Any]:
    """A name and its value."""
    name, sign, value = text.partition("=")
    if not (name.isidentifier() and sign):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, such as enable_thinking=false, got {text!r}")
    return name, spoken_value(value)


def spoken_value(text: str) -> Any:
    """The value of a text in JSON or in Python: true, True, null, None, numbers, quoted texts, lists, mappings. A word is itself.

    Raises:
      argparse.ArgumentTypeError: it says nothing in either, and is no word.
    """
    try:
        return parse(text.encode())
    except ValueError:
        pass
    try:
        with warnings.catch_warnings(action="ignore"):
            value = ast.literal_eval(text.strip())
        if _in_json(value):
            return value
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        if re.fullmatch(r"[^\W\d][\w.-]*", text) and text.casefold() not in _NO_TEXT:
            return text
    raise argparse.ArgumentTypeError(
        f"expected true, false, null, a number, a word, a text in quotes, or a list or mapping of those, as JSON or Python write "
        f"them; got {text!r:.80}"
    )


def _in_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _in_json(each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return all(map(_in_json, value))
    return value is None or isinstance(value, str | int) or (isinstance(value, float) and abs(value) < float("inf"))


def token_bias(text: str) -> tuple[int, float]:
    """A token id and what is added to its logit."""
    token, sign, bias = text.partition("=")
    try:
        return int(token), float(bias if sign else "")
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected a token id and a number, such as 151645=-2.5, got {text!r:.80}"
        ) from None


def token_ids(text: str) -> list[int]:
    """Token ids between commas."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected token ids between commas, such as 151645,151643, got {text!r:.80}"
        ) from None


def layer_ids(text: str) -> tuple[int, ...]:
    """Layers of a target between commas; -1 is what its embedding gives."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected layers between commas, such as 1,9,17, got {text!r:.80}") from None
