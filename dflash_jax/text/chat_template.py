"""Chat templates: Jinja from a model's folder, with the names, filters and tags that transformers gives them, in a sandbox."""

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dflash_jax.errors import ParameterError, PromptError, TokenizerError

_ROLES = ("system", "user", "assistant", "tool")


def render(
    template: str, messages: Sequence[Mapping[str, Any]], special: Mapping[str, str], options: Mapping[str, Any]
) -> str:
    """The text that a template makes of messages, ready for the answer.

    Args:
      special: named special tokens.
      options: what else it is told; `tools` and `documents` are None where they are not among them.

    Raises:
      PromptError: a message has no role or no content, or the template refuses these messages or leaves what one says out.
      ParameterError: it asks for no such option.
      TokenizerError: the template itself is broken.
    """
    _check_messages(messages)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    environment.filters["tojson"] = _to_json
    # Templates compare `tools` with none: a name that is not defined would not be equal to it.
    given = {"tools": None, "documents": None, "messages": list(messages), "add_generation_prompt": True, **special}
    try:
        _check_options(environment, template, options)
        text = environment.from_string(template).render({**given, **options})
    except _Refusal as error:
        raise PromptError(f"the chat template refused these messages: {error}") from error
    except ParameterError:
        raise
    except Exception as error:  # a template can fail in every way an expression can
        raise TokenizerError(f"the chat template fails on these messages: {error}") from error
    _check_left_out(messages, template, text)
    return text


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises PromptError for messages that nobody speaks or that say nothing: most templates would write an empty turn."""
    for place, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str):
            keys = ", ".join(map(str, message)) or "no key"
            raise PromptError(f"messages[{place}] has no role: expected 'user' for example, got {keys}")
        if role in ("system", "user") and message.get("content") is None:
            raise PromptError(f"messages[{place}], of the {role}, has no content: give a text")


def _check_left_out(messages: Sequence[Mapping[str, Any]], template: str, text: str) -> None:
    """Raises PromptError for content that templates pass over in silence: lists of parts where they know texts, unknown roles."""
    words = set(re.findall(r"\w+", template))
    for place, message in enumerate(messages):
        role, content = message["role"], message.get("content")
        if isinstance(content, list | tuple) and role in ("system", "user"):
            parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
            if any(isinstance(part, str) and not _shows(text, part) for part in parts):
                raise PromptError(
                    f"the chat template leaves out messages[{place}], whose content is a list of parts: give it as one text"
                )
        elif isinstance(content, str) and role not in (*_ROLES, *words) and not _shows(text, content):
            raise PromptError(f"the chat template leaves out messages[{place}]: it knows no role {role!r}")


def _shows(text: str, content: str) -> bool:
    """Whether a text holds a content, but for the space around it, as it is or inside JSON."""
    return content.strip() in text or _to_json(content.strip())[1:-1] in text


def _check_options(environment: Environment, template: str, options: Mapping[str, Any]) -> None:
    """Raises ParameterError for names that the template would pass over, a misspelt one for example."""
    tree = environment.parse(template)
    asked = meta.find_undeclared_variables(tree) - environment.globals.keys() - {"messages"}
    if unknown := options.keys() - asked:
        # What a loop assigns counts as asked for where only some branches do so; nobody means it as an option.
        inside = {
            name.name for loop in tree.find_all(nodes.For) for name in loop.find_all(nodes.Name) if name.ctx == "store"
        }
        known = sorted(asked - inside) or ["none"]
        raise ParameterError(
            f"the chat template asks for no {', '.join(sorted(unknown))}: its options are {', '.join(known)}"
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
