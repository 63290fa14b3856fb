"""What a text has to be: a JSON document of a schema, or a sentence of a regular expression, of a list or of a grammar."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, no_type_check

from dflash_jax.errors import ParameterError

type Kind = Literal["json", "regex", "grammar"]

KINDS = ("json", "regex", "choice", "grammar", "json_object")
MAX_BYTES = 256 << 10
MAX_DEPTH = 64  # of a schema's objects and lists within each other
MAX_CHOICES = 1024
# Between the parts of a JSON document: a model that writes nothing else would never come to an end.
WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,64}"


@dataclass(frozen=True)
class _Form:
    kind: Kind
    text: str


@no_type_check  # it checks what it is given: what is wrong is a ParameterError, whoever else watches types
@dataclass(frozen=True, init=False)
class Structured:
    """What a text has to be, by exactly one of the names that vLLM's `StructuredOutputsParams` has.

    It needs the extra `structured` (llguidance). Wherever a token is chosen, those that no such text could go on with are refused
    before anything else looks at the logits: what is sampled follows the law of the tokens that are left, with and without
    drafting. A text that `max_tokens` cuts short is the beginning of one.

    Args:
      json: a JSON schema, as an object or as its JSON. White space is free between what it asks for, at most 64 in a row.
      regex: a regular expression of Rust's for the whole text; it has no look-around.
      choice: texts, of which it is one.
      grammar: a context-free grammar, in llguidance's form of Lark or in llama.cpp's GBNF.
      json_object: True for any JSON object.

    Raises:
      ParameterError: none or several are given, or one is not of its kind. What a grammar says is looked at with the first prompt.
    """

    form: _Form

    def __init__(
        self,
        *,
        json: Mapping[str, Any] | str | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
        json_object: bool | None = None,
    ):
        given = {"json": json, "regex": regex, "choice": choice, "grammar": grammar, "json_object": json_object or None}
        named = {name: value for name, value in given.items() if value is not None}
        if len(named) != 1:
            came = " and ".join(named) or "none"
            raise ParameterError(f"structured must have exactly one of {', '.join(KINDS)}, got {came}")
        ((name, value),) = named.items()
        form = _READ[name](value)
        if len(form.text.encode("utf-8", "replace")) > MAX_BYTES:
            raise ParameterError(f"structured {name} may have {MAX_BYTES} bytes, got {len(form.text)} characters")
        object.__setattr__(self, "form", form)

    def __repr__(self) -> str:
        return f"Structured({self.form.kind}={self.form.text!r:.80})"

    @classmethod
    def of(cls, value: Any) -> "Structured":
        """From one of these, or from a mapping with one of their names, as it comes from JSON. Raises ParameterError."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ParameterError(
                f'structured must be a dflash_jax.Structured or a mapping such as {{"regex": "[0-9]+"}}, got {value!r:.80}'
            )
        if unknown := [name for name in value if name not in KINDS]:
            raise ParameterError(f"structured takes {', '.join(KINDS)}, got {unknown[0]!r:.40}")
        return cls(**value)


def quoted(text: str) -> str:
    """A text as grammars of Lark's form write it."""
    return json.dumps(text, ensure_ascii=False)


def _schema(value: Any) -> _Form:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ParameterError(f"structured json must be a JSON schema: {error!s:.200}") from None
    if not isinstance(value, Mapping):
        raise ParameterError(f"structured json must be a JSON schema, which is an object, got {value!r:.80}")
    if _deep(value):
        raise ParameterError(f"structured json may be nested {MAX_DEPTH} deep, got a schema that is deeper")
    try:
        return _Form("json", json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ParameterError(f"structured json must be a JSON schema: {error!s:.200}") from None


def _deep(value: Any) -> bool:
    """Whether objects and lists are nested too deeply. Not by recursion: the value is anybody's."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            part
            for one in level
            for part in (one.values() if isinstance(one, Mapping) else one)
            if isinstance(part, Mapping | list | tuple)
        ]
        if not level:
            return False
    return True


def _object(value: Any) -> _Form:
    if value is not True:
        raise ParameterError(f"structured json_object must be True or left out, got {value!r:.80}")
    return _Form("json", '{"type": "object"}')


def _pattern(value: Any) -> _Form:
    return _Form("regex", _text("regex", value))


def _grammar(value: Any) -> _Form:
    return _Form("grammar", _text("grammar", value))


def _choice(value: Any) -> _Form:
    listed = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    if not listed or not 0 < len(value) <= MAX_CHOICES or not all(isinstance(one, str) and one for one in value):
        raise ParameterError(
            f"structured choice must be a list of 1 to {MAX_CHOICES} texts that are not empty, got {value!r:.80}"
        )
    return _Form("grammar", "start: " + " | ".join(map(quoted, value)))


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ParameterError(f"structured {name} must be a text that is not empty, got {value!r:.80}")
    return value


_READ = {"json": _schema, "regex": _pattern, "choice": _choice, "grammar": _grammar, "json_object": _object}
