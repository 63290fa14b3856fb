"""Structured outputs in request bodies: OpenAI's `response_format`, vLLM's names, calls of tools."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_jax.errors import ParameterError
from dflash_jax.sampling_params import Structured
from dflash_jax.serving.problems import Problem

# vLLM's older names, each with the one that it has become.
_OLDER = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
    "guided_json_object": "json_object",
}  # fmt: skip
FIELDS = ("response_format", "structured_outputs", *_OLDER)


def structure_of(body: Mapping[str, Any]) -> tuple[str, Structured] | None:
    """The structure that a body asks for, and the field that names it; None for any text. Raises Problem."""
    found = [(name, wanted) for name in FIELDS if name in body and (wanted := _wanted(name, body[name])) is not None]
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise Problem(400, f"{names} are one thing: give one of them", param=found[1][0], code="invalid_value")
    if not found:
        return None
    name, wanted = found[0]
    try:
        return name, Structured.of(wanted)
    except ParameterError as error:
        raise refused(name, error) from None


def refused(field: str, error: ParameterError) -> Problem:
    """The answer for what a field asks for and cannot be."""
    return Problem(400, str(error).replace("structured", field, 1), param=field, code="invalid_value")


def _wanted(name: str, value: Any) -> Any:
    if name in _OLDER:
        return {_OLDER[name]: value}
    if name == "structured_outputs":
        return {kind: one for kind, one in value.items() if one is not None} if isinstance(value, Mapping) else value
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    told = value.get("json_schema") if kind == "json_schema" else None
    if not isinstance(told, Mapping) or not isinstance(told.get("schema"), Mapping):
        came = repr(value)[:80]
        raise Problem(
            400,
            'response_format must be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": '
            f'{{"name": ..., "schema": {{...}}}}}}, got {came}',
            param="response_format",
            code="invalid_value",
        )
    return {"json": told["schema"]}


def functions_of(tools: Sequence[Mapping[str, Any]], choice: Any) -> list[Mapping[str, Any]] | None:
    """The functions one of which an answer has to call; None where none need be. Raises Problem."""
    functions = [tool["function"] for tool in tools]
    if choice == "required" and functions:
        return functions
    if choice in ("required", "auto", "none"):
        if choice == "required":
            raise Problem(400, "tool_choice required needs tools", param="tool_choice", code="invalid_value")
        return None
    named = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = named.get("name") if isinstance(named, Mapping) else None
    if not isinstance(name, str):
        came = json.dumps(choice)[:80]
        message = f'tool_choice must be auto, none, required or {{"type": "function", "function": {{"name": ...}}}}, got {came}'
        raise Problem(400, message, param="tool_choice", code="invalid_value")
    chosen = [function for function in functions if function["name"] == name]
    if not chosen:
        names = ", ".join(function["name"] for function in functions) or "none"
        message = f"tool_choice names {name:.80}, which is no tool: there are {names:.200}"
        raise Problem(400, message, param="tool_choice", code="invalid_value")
    return chosen[:1]
