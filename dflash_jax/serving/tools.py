"""Tools in bodies of chats: which the template is told of, and what of the answer is looked for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from dflash_jax.errors import ParameterError
from dflash_jax.sampling_params import Structured
from dflash_jax.serving.bodies import Ask, chat_ask, shown
from dflash_jax.serving.problems import Problem
from dflash_jax.serving.structure import functions_of, refused
from dflash_jax.text.answers.call_grammars import call_grammar
from dflash_jax.text.answers.choice import ToolParser, tool_parser_of
from dflash_jax.text.tokenizer import Tokenizer

MAX_TOOLS = 128
_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")


@dataclass(frozen=True)
class ChatAsk(Ask):
    """Parsed chat request.

    Attributes:
      tools: that the answer may call; empty for none.
      one_call: whether calls behind the first are left out.
    """

    tools: list[dict[str, Any]] = field(default_factory=list)
    one_call: bool = False


def chat_with_tools(
    body: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    tool_parser: ToolParser = "auto",
) -> ChatAsk:
    """Parses a body of `/v1/chat/completions`; see `chat_ask`. Raises Problem, ParameterError."""
    one_call = not _flag(body, "parallel_tool_calls")
    tools = _tools(body)
    template = template_of(tokenizer, tools)
    if tools and "tools" not in template:
        raise Problem(
            400, "this model's chat template knows no tools", param="tools", code="unsupported_parameter"
        )  # fmt: skip
    ask = chat_ask({name: value for name, value in body.items() if name not in _FIELDS}, template or None, defaults)
    if (functions := functions_of(tools, body.get("tool_choice", "auto"))) is not None:
        several = not one_call and body["tool_choice"] == "required"
        ask = _calling(ask, tool_parser_of(tool_parser, template), functions, several=several)
    told: dict[str, Any] = vars(ask) | {"chat_options": ask.chat_options | ({"tools": tools} if tools else {})}
    return ChatAsk(**told, tools=tools, one_call=one_call)


def _calling(ask: Ask, form: str, functions: Sequence[Mapping[str, Any]], *, several: bool) -> Ask:
    """`ask` with an answer that has to be a call of one of these functions, or several of them."""
    if form == "none":
        raise Problem(
            400, "tool_choice needs calls of a form that is known, and this model's are of none: give auto or none",
            param="tool_choice", code="unsupported_parameter",
        )  # fmt: skip
    if ask.structured_by is not None:
        raise Problem(
            400, f"tool_choice and {ask.structured_by} both say what the text is: give one of them", param="tool_choice",
            code="invalid_value",
        )  # fmt: skip
    grammar = call_grammar(form, functions, several=several)
    try:
        params = replace(ask.params, structured=Structured(grammar=grammar))
    except ParameterError as error:
        raise refused("tools", error) from None
    return replace(ask, params=params, structured_by="tools")


def template_of(tokenizer: Tokenizer | None, tools: list[dict[str, Any]]) -> str:
    """The chat template that messages with these tools go through; empty where there is none."""
    if tokenizer is None:
        return ""
    special = tokenizer.tool_template if tools else None
    return special or tokenizer.template or ""


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tools that the template is told of: none where no call is wanted."""
    tools, wanted = body.get("tools"), body.get("tool_choice", "auto")
    if tools is not None:
        if not isinstance(tools, list) or not 0 < len(tools) <= MAX_TOOLS:
            raise _wrong("tools", f"a list of 1 to {MAX_TOOLS} tools", tools)
        for place, tool in enumerate(tools):
            _check(tool, f"tools.{place}")
    if not isinstance(wanted, dict) and wanted not in ("auto", "none", "required"):
        raise _wrong("tool_choice", "auto, none, required or a function's name", wanted)
    return [] if wanted == "none" or tools is None else tools


def _check(tool: Any, at: str) -> None:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        raise _wrong(at, 'a tool {"type": "function", "function": {"name": ..., "parameters": ...}}', tool)
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise _wrong(f"{at}.function", "an object with a name", function)
    schema = function.get("parameters")
    if schema is not None and (not isinstance(schema, dict) or not isinstance(schema.get("properties", {}), dict)):
        raise _wrong(f"{at}.function.parameters", "the JSON schema of an object", schema)


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name, True)
    if type(value) is not bool:
        raise _wrong(name, "true or false", value)
    return value


def _wrong(name: str, wanted: str, value: Any) -> Problem:
    return Problem(400, f"{name} must be {wanted}, got {shown(value)}", param=name, code="invalid_value")
