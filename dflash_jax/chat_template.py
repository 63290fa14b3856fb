"""Chat templates: Jinja from a model's folder, with the names, filters and tags that transformers gives them, in a sandbox."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dflash_jax.errors import ParameterError, PromptError, TokenizerError


def render(
    template: str, messages: Sequence[Mapping[str, Any]], special: Mapping[str, str], options: Mapping[str, Any]
) -> str:
    """The text that a template makes of messages, ready for the answer.

    Args:
      special: named special tokens.
      options: what else it is told; `tools` and `documents` are None where they are not among them.

    Raises:
      PromptError: it refuses these messages.
      ParameterError: it asks for no such option.
      TokenizerError: the template itself is broken.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    environment.filters["tojson"] = _to_json
    # Templates compare `tools` with none: a name that is not defined would not be equal to it.
    given = {"tools": None, "documents": None, "messages": list(messages), "add_generation_prompt": True, **special}
    try:
        _check_options(environment, template, options)
        return environment.from_string(template).render({**given, **options})
    except _Refusal as error:
        raise PromptError(f"the chat template refused these messages: {error}") from error
    except ParameterError:
        raise
    except Exception as error:  # a template can fail in every way an expression can
        raise TokenizerError(f"the chat template fails on these messages: {error}") from error


def _check_options(environment: Environment, template: str, options: Mapping[str, Any]) -> None:
    """Raises ParameterError for names that the template would pass over, a misspelt one for example."""
    asked = meta.find_undeclared_variables(environment.parse(template)) - environment.globals.keys() - {"messages"}
    if unknown := options.keys() - asked:
        raise ParameterError(
            f"the chat template asks for no {', '.join(sorted(unknown))}: its options are {', '.join(sorted(asked)) or 'none'}"
        )


class _Generation(Extension):
    """`{% generation %}` around what training learns from: its content stands as it is."""

    tags = {"generation"}  # noqa: RUF012, as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Refusal(TemplateError):
    """What a template says itself."""


def _refuse(message: str) -> None:
    raise _Refusal(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
