"""Chat templates: which messages may go through one, and what the answer of the process that renders it means."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_jax.errors import DFlashError, ParameterError, PromptError, TokenizerError
from dflash_jax.options import as_flag, as_number
from dflash_jax.text import template_process
from dflash_jax.text.template_process import MAX_TEXT_BYTES

_ROLES = ("system", "user", "assistant", "tool")


def render(
    template: str, messages: Sequence[Mapping[str, Any]], special: Mapping[str, str], options: Mapping[str, Any]
) -> str:
    """The text that a template makes of messages, ready for the answer.

    The template runs in Jinja's immutable sandbox, in a process of its own, with bounds on its time, its memory and its text
    (`dflash_jax.text.template_process`). Messages and options reach it as JSON.

    Args:
      special: named special tokens.
      options: what else it is told; `tools` and `documents` are None where they are not among them.

    Raises:
      PromptError: a message has no role or no content, or the template refuses these messages or leaves what one says out.
      ParameterError: it asks for no such option, or one is nothing that JSON could hold.
      TokenizerError: the template itself is broken, or passes a bound.
    """
    _check_messages(messages)
    request = {
        "template": json.dumps(template, ensure_ascii=False),
        "messages": _json(list(messages), PromptError, "messages"),
        "special": json.dumps(special, ensure_ascii=False),
        "options": _json(options, ParameterError, "chat_options"),
    }
    size = sum(len(request[name].encode("utf-8", "surrogatepass")) for name in ("messages", "options"))
    if size > MAX_TEXT_BYTES:
        raise PromptError(
            f"messages and chat_options may have {MAX_TEXT_BYTES:,} bytes together, these have {size:,}: give fewer"
        )
    answer = template_process.ask(request)
    kind, text = answer["kind"], answer["text"]
    if kind == "refused":
        raise PromptError(f"the chat template refused these messages: {text}")
    if kind == "option":
        raise ParameterError(f"the chat template {text}")
    if kind == "long":
        raise TokenizerError(
            f"the chat template makes a text of {text} bytes of these messages, at most {MAX_TEXT_BYTES:,} are taken"
        )
    if kind != "text":
        raise TokenizerError(f"the chat template fails on these messages: {text}")
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


def _json(value: Any, error: type[DFlashError], name: str) -> str:
    """The value as JSON, as the template will see it. Raises `error` for what JSON does not have."""
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as wrong:
        raise error(
            f"{name} must hold what JSON can (texts, numbers, True, False, None, lists and mappings with texts as keys): {wrong}"
        ) from None


def _plain(value: Any) -> Any:
    """JSON form of a mapping, a sequence or a scalar of another kind than Python's own."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return list(value)
    for scalar in (as_flag(value), as_number(value)):
        if scalar is not None:
            return scalar
    raise TypeError(f"{type(value).__name__} {value!r:.40} is none of these; give its JSON form")


def _check_left_out(messages: Sequence[Mapping[str, Any]], template: str, text: str) -> None:
    """Raises PromptError for content that templates pass over in silence, or write as Python does: lists of parts where they know
    texts, unknown roles."""
    words = set(re.findall(r"\w+", template))
    for place, message in enumerate(messages):
        role, content = message["role"], message.get("content")
        if isinstance(content, list | tuple) and content and str(json.loads(json.dumps(content))) in text:
            raise PromptError(
                f"the chat template writes messages[{place}], a list of parts, brackets and all: give its content as one text"
            )
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
    return content.strip() in text or json.dumps(content.strip(), ensure_ascii=False)[1:-1] in text
