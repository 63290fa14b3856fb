"""Chat templates in Jinja, as a program of its own: requests on stdin, answers on stdout, with limits of the system around it.

It has the names, filters and tags that transformers gives templates, in Jinja's immutable sandbox. A template is code by a stranger
all the same: it may loop for ever or take all memory, in a loop or in one expression, while it is rendered or while it is compiled.
So it gets a process that may be ended at any moment. `dflash_jax.text.template_process` starts it and says what ended it; this file
needs Jinja alone, for it is run as a script.
"""

import datetime
import functools
import json
import resource
import signal
import sys
from collections.abc import Mapping
from typing import IO, Any

from jinja2 import Environment, Template, TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# A number of bytes stands before each message, in so many bytes.
HEADER_BYTES = 8
_MOST_OF_A_REASON = 2000
_KEPT_TEMPLATES = 8


def main(stdin: IO[bytes], stdout: IO[bytes], *, seconds: int, memory: int, most: int) -> None:
    """Answers requests until stdin ends.

    Args:
      seconds: of the CPU for one request at most, also where nobody is left to end this process.
      memory: bytes of address space at most.
      most: bytes of a text at most.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever asks
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, memory)
    send(stdout, {"kind": "ready"})
    while (request := receive(stdin)) is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + seconds)
        send(stdout, answer(request, most))


def send(stream: IO[bytes], message: Mapping[str, Any]) -> None:
    """Writes one message; half of a surrogate pair stays what it is."""
    data = json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")
    stream.write(len(data).to_bytes(HEADER_BYTES, "big") + data)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes | None:
    """The bytes of one message, None at the end."""
    size = int.from_bytes(stream.read(HEADER_BYTES), "big")
    data = stream.read(size)
    return data if size and len(data) == size else None


def answer(request: bytes, most: int) -> dict[str, Any]:
    """Answer to a request: `kind` is text, refused, option, broken, long or memory; `text` says more.

    Args:
      request: JSON with the template, its messages, named special tokens and options.
    """
    try:
        asked = json.loads(request.decode("utf-8", "surrogatepass"))
        template, names = _compiled(asked["template"])
        if unknown := _unknown(names, asked["options"]):
            return {"kind": "option", "text": unknown}
        # Templates compare `tools` with none: a name that is not defined would not be equal to it.
        given = {"tools": None, "documents": None, "messages": asked["messages"], "add_generation_prompt": True}
        text = template.render({**asked["special"], **given, **asked["options"]})
        size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        return {"kind": "long", "text": f"{size:,}"} if size > most else {"kind": "text", "text": text}
    except MemoryError:
        return {"kind": "memory", "text": ""}
    except _Refusal as error:
        return {"kind": "refused", "text": str(error)[:_MOST_OF_A_REASON]}
    except Exception as error:  # a template can fail in every way an expression can
        return {"kind": "broken", "text": (str(error) or type(error).__name__)[:_MOST_OF_A_REASON]}


@functools.lru_cache(_KEPT_TEMPLATES)
def _compiled(source: str) -> tuple[Template, tuple[frozenset[str], frozenset[str]]]:
    """A template, the names that it asks for, and those of them that a loop assigns."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    environment.filters["tojson"] = to_json
    return environment.from_string(source), _names(environment, source)


def _names(environment: Environment, source: str) -> tuple[frozenset[str], frozenset[str]]:
    tree = environment.parse(source)
    asked = meta.find_undeclared_variables(tree) - environment.globals.keys() - {"messages"}
    inside = {
        name.name for loop in tree.find_all(nodes.For) for name in loop.find_all(nodes.Name) if name.ctx == "store"
    }
    return frozenset(asked), frozenset(inside)


def _unknown(names: tuple[frozenset[str], frozenset[str]], options: Mapping[str, Any]) -> str | None:
    """Error for options that the template ignores, for example a misspelt one."""
    asked, inside = names
    if not (unknown := options.keys() - asked):
        return None
    # What a loop assigns counts as asked for where only some branches do so; nobody means it as an option.
    known = sorted(asked - inside) or ["none"]
    return f"asks for no {', '.join(sorted(unknown))}: its options are {', '.join(known)}"


class _Generation(Extension):
    """`{% generation %}` around what training learns from: its content stands as it is."""

    tags = {"generation"}  # noqa: RUF012, as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Refusal(TemplateError):
    """Refusal by the template itself."""


def _refuse(message: str) -> None:
    raise _Refusal(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` as transformers has it: no character is escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _limit(kind: int, value: int) -> None:
    """Lowers a limit of this process, never beyond what the system set before."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer, **json.loads(sys.argv[1]))
