"""Writes docs/api.md from signatures and docstrings: `python docs/make_api.py`. A test compares the file with what this writes."""

import functools
import inspect
import re
import textwrap
from pathlib import Path

import dflash_kernels

import dflash_jax as dj

HERE = Path(__file__).parent
FUNCTIONS = ("load", "plan", "convert", "generate", "stream", "show", "agenerate", "astream")
CLASSES = (
    "SamplingParams",
    "Structured",
    "Model",
    "Chat",
    "AsyncEngine",
    "Completion",
    "Piece",
    "Stats",
    "TokenLogprob",
)
HEAD = """# API

Written by `python docs/make_api.py` from the docstrings. `import dflash_jax as dj` is cheap and starts no device; names load what
they need on first use. Options of the command line are those of `load`, `SamplingParams` and
`generate`: `dflash-jax COMMAND --help`.
"""


def first_sentence(documented: object) -> str:
    text = " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())
    return re.sub(r":$", ".", re.split(r"(?<=[.:]) (?=[A-Z`])", text)[0])


def described(name: str) -> str:
    """A heading, the signature and the docstring of a public name."""
    thing = getattr(dj, name)
    try:
        signature = str(inspect.signature(thing)).replace("dflash_jax.", "").replace("'", "")
    except ValueError:
        signature = "(...)"
    parameters = ",\n".join(f"    {part}" for part in _split(signature[1 : signature.rindex(")")]))
    call = f"{name}(\n{parameters},\n)" if parameters.strip() else f"{name}()"
    doc = textwrap.dedent(inspect.getdoc(thing) or "")
    methods = ""
    if inspect.isclass(thing):
        public = [
            (key, value) for key, value in vars(thing).items()
            if not key.startswith("_") and (inspect.isfunction(value) or isinstance(value, property | functools.cached_property))
        ]  # fmt: skip
        rows = [f"| `{key}` | {first_sentence(value)} |" for key, value in public]
        methods = "\n".join(["", "| member | |", "| --- | --- |", *rows, ""]) if rows else ""
    return f"## `dj.{name}`\n\n```text\n{call}\n\n{doc}\n```\n{methods}"


def _split(parameters: str) -> list[str]:
    """Parameters apart at their own commas."""
    parts, depth, current = list[str](), 0, ""
    for letter in parameters:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += letter
    return [part for part in [*parts, current.strip()] if part]


def written() -> str:
    errors = [name for name in dj.__all__ if inspect.isclass(getattr(dj, name)) and name.endswith("Error")]
    rows = "\n".join(f"| `dj.{name}` | {first_sentence(getattr(dj, name))} |" for name in errors)
    ops = [name for name in dflash_kernels.__all__ if inspect.isroutine(getattr(dflash_kernels, name))]
    table = "\n".join(f"| `{name}` | {first_sentence(getattr(dflash_kernels, name))} |" for name in sorted(ops))
    return "\n".join(
        [
            HEAD,
            *[described(name) for name in (*FUNCTIONS, *CLASSES)],
            f"## Errors\n\n| error | when |\n| --- | --- |\n{rows}\n",
            f"## Functions of `dflash_kernels`\n\n| function | |\n| --- | --- |\n{table}\n",
        ]
    )


if __name__ == "__main__":
    (HERE / "api.md").write_text(written(), encoding="utf-8")
