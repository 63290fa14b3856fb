"""Bodies of `/v1/responses`, told as those of chats. Nothing is kept from one answer to the next: what was said comes with each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from dflash_jax.options import as_integer
from dflash_jax.serving.bodies import shown
from dflash_jax.serving.problems import Problem
from dflash_jax.serving.tools import ChatAsk, chat_with_tools
from dflash_jax.text.answers.choice import ToolParser
from dflash_jax.text.tokenizer import Tokenizer

# Taken as chats take them.
_SAME = ("model", "temperature", "top_p", "stream", "user", "metadata", "parallel_tool_calls", "service_tier",
         "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "seed", "top_k", "min_p", "repetition_penalty",
         "presence_penalty", "frequency_penalty", "chat_template_kwargs", "return_metrics")  # fmt: skip
_TOLD = ("input", "instructions", "tools", "tool_choice", "max_output_tokens", "text", "reasoning", "store")
# Taken where they say what happens anyway.
_FIXED: dict[str, tuple[Any, ...]] = {
    "truncation": ("disabled",), "background": (False,), "include": ([], ["reasoning.encrypted_content"]), "top_logprobs": (0,),
    "previous_response_id": (), "conversation": (), "prompt": (), "max_tool_calls": (),
}  # fmt: skip
# Names inside of fields; those that no answer here depends on are taken without effect.
_INSIDE = {"text": ("format", "verbosity"), "reasoning": ("effort", "summary", "generate_summary")}
_PARTS = ("input_text", "output_text", "text")


@dataclass(frozen=True)
class ResponseAsk(ChatAsk):
    """Parsed body of `/v1/responses`.

    Attributes:
      body: as it came; answers repeat some of it.
    """

    body: Mapping[str, Any] = field(default_factory=dict)


def response_ask(
    body: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    tool_parser: ToolParser = "auto",
) -> ResponseAsk:
    """See `chat_with_tools`. Raises Problem, ParameterError; what is wrong with a message is named as in a chat's body."""
    for name, value in body.items():
        if name in _FIXED and value not in _FIXED[name]:
            options = " or ".join(map(repr, _FIXED[name])) or "null"
            raise Problem(
                400, f"{name} is not supported: leave it out, or give {options}, got {shown(value)}", param=name,
                code="unsupported_parameter",
            )  # fmt: skip
        if name not in (*_SAME, *_TOLD, *_FIXED):
            raise _unknown(name)
        for inner in _mapping(body, name) if name in _INSIDE else ():
            if inner not in _INSIDE[name]:
                raise _unknown(f"{name}.{inner}")
    chat: dict[str, Any] = {name: body[name] for name in _SAME if name in body}
    chat["messages"] = _messages(body)
    if (most := body.get("max_output_tokens")) is not None:
        if (count := as_integer(most)) is None or count < 1:
            raise _wrong("max_output_tokens", "an integer of at least 1", most)
        chat["max_tokens"] = count
    if body.get("tools"):
        chat["tools"] = [_tool(tool, f"tools.{place}") for place, tool in enumerate(_list(body, "tools"))]
    if "tool_choice" in body:
        chat["tool_choice"] = _choice(body["tool_choice"])
    effort = _mapping(body, "reasoning").get("effort")
    if effort is not None:
        chat["reasoning_effort"] = effort
    told = _mapping(body, "text").get("format")
    if told is not None:
        chat["response_format"] = _format(told)
    ask = chat_with_tools(chat, tokenizer, defaults, tool_parser)
    return ResponseAsk(**vars(ask), body=body)


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    given, messages = body.get("input"), list[dict[str, Any]]()
    if isinstance(body.get("instructions"), str):
        messages.append({"role": "system", "content": body["instructions"]})
    elif "instructions" in body:
        raise _wrong("instructions", "a text", body["instructions"])
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise _wrong("input", "a text, or a list of items that is not empty", given)
    for place, item in enumerate(given):
        at = f"input.{place}"
        if not isinstance(item, dict):
            raise _wrong(at, "an item", item)
        match item.get("type", "message"):
            case "message":
                content = _content(item.get("content"), f"{at}.content", pictures=item.get("role") == "user")
                messages.append({"role": item.get("role"), "content": content})
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                if messages and messages[-1]["role"] == "assistant":
                    messages[-1].setdefault("tool_calls", []).append(call)
                else:
                    messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            case "function_call_output":
                output = _content(item.get("output"), f"{at}.output")
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
            case "reasoning":  # of earlier answers: templates leave it out
                continue
            case other:
                raise _wrong(f"{at}.type", "message, function_call, function_call_output or reasoning", other)
    return messages


def _content(value: Any, at: str, *, pictures: bool = False) -> Any:
    """A content as chats have it: one text, or parts where pictures may be and are among them."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong(at, "a text or a list of parts", value)
    texts, parts = list[str](), list[dict[str, Any]]()
    for place, part in enumerate(value):
        if pictures and isinstance(part, dict) and part.get("type") == "input_image":
            url = part.get("image_url")
            if not isinstance(url, str) or not url.startswith("data:"):
                wanted = (
                    'a picture {"type": "input_image", "image_url": "data:image/png;base64,..."}: nothing is fetched'
                )
                raise _wrong(f"{at}.{place}", wanted, part)
            parts.append({"type": "image_url", "image_url": {"url": url, "detail": part.get("detail", "auto")}})
            continue
        if not isinstance(part, dict) or part.get("type") not in _PARTS or not isinstance(part.get("text"), str):
            raise _wrong(f"{at}.{place}", 'a part {"type": "input_text", "text": ...}, others are not supported', part)
        texts.append(part["text"])
        parts.append({"type": "text", "text": part["text"]})
    return "\n".join(texts) if len(texts) == len(parts) else parts


def _tool(tool: Any, at: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise _wrong(at, 'a tool {"type": "function", "name": ...}: others are not supported', tool)
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _choice(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") == "function":
        return {"type": "function", "function": {"name": value.get("name")}}
    return value


def _format(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {name: one for name, one in value.items() if name != "type"}}
    return value


def _list(body: Mapping[str, Any], name: str) -> list[Any]:
    if not isinstance(body[name], list):
        raise _wrong(name, "a list", body[name])
    return body[name]


def _mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name, {})
    if not isinstance(value, dict):
        raise _wrong(name, "an object", value)
    return value


def _unknown(name: str) -> Problem:
    return Problem(400, f"unknown field: {name!r:.100}", param=name[:100], code="unknown_parameter")


def _wrong(name: str, wanted: str, value: Any) -> Problem:
    return Problem(400, f"{name} must be {wanted}, got {shown(value)}", param=name, code="invalid_value")
