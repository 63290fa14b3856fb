"""`/v1/responses`, read by the types of OpenAI's client: what chats say, as items and as events."""

import json

import pytest

from dflash_jax.serving.app import ServeOptions, make_app
from dflash_jax.serving.problems import Problem
from dflash_jax.serving.responses import response_ask

from ..chat_pair import TEMPLATE
from .test_tools import CALL, THINKS, says

openai = pytest.importorskip("openai")
testclient = pytest.importorskip("starlette.testclient")
__all__ = ["says"]
TOOLS = [{"type": "function", "name": "f", "parameters": {"properties": {"city": {"type": "string"}}}}]
ASKED = {"model": "pair", "temperature": 0, "max_output_tokens": 40}


@pytest.fixture
def asgi(model):
    with testclient.TestClient(make_app(model, ServeOptions(names=("pair",)))) as made:
        yield made


def ask(asgi, **fields):
    return openai.types.responses.Response.model_validate(asgi.post("/v1/responses", json=ASKED | fields).json())


def events(asgi, **fields):
    text = asgi.post("/v1/responses", json=ASKED | {"stream": True} | fields).text
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    return found


def test_a_text_is_the_chats(asgi):
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "x"}]
    asked = {"messages": messages, "max_tokens": 8, "temperature": 0}
    chat = asgi.post("/v1/chat/completions", json=asked).json()
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}]
    whole = ask(asgi, input=parts, instructions="be", max_output_tokens=8, store=True)
    assert whole.output_text == chat["choices"][0]["message"]["content"]
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (chat["usage"]["prompt_tokens"], 8)
    told = events(asgi, input="x", instructions="be", max_output_tokens=8)
    assert [one["type"] for one in told[:4]] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert "".join(one["delta"] for one in told if one["type"] == "response.output_text.delta") == whole.output_text
    assert told[-1]["type"] == "response.incomplete"
    assert openai.types.responses.Response.model_validate(told[-1]["response"]).output_text == whole.output_text


def test_thoughts_and_calls_are_items(asgi, model, monkeypatch, says):
    monkeypatch.setattr(model.tokenizer, "template", THINKS)
    says(f"<think>\nwell\n</think>\n\nyes {CALL}")
    whole = ask(asgi, input="x", tools=TOOLS)
    assert whole.status == "completed"
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    thought, message, call = whole.output
    assert (thought.content[0].text, message.content[0].text) == ("well", "yes")
    assert (call.name, json.loads(call.arguments)) == ("f", {"city": "Paris"})
    told = events(asgi, input="x", tools=TOOLS)
    last = openai.types.responses.Response.model_validate(told[-1]["response"])
    assert [item.type for item in last.output] == ["reasoning", "message", "function_call"]
    assert last.output[2].arguments == call.arguments
    done = [one for one in told if one["type"] == "response.output_item.done"]
    assert [one["item"] for one in done] == told[-1]["response"]["output"]
    assert [one["output_index"] for one in done] == [0, 1, 2]


def test_items_of_earlier_answers_are_messages(model, monkeypatch):
    monkeypatch.setattr(model.tokenizer, "template", "{# tools #}" + TEMPLATE)
    items = [
        {"role": "user", "content": "x"}, {"type": "reasoning", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "look"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"city": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "rain"},
    ]  # fmt: skip
    asked = response_ask({"input": items, "tools": TOOLS}, model.tokenizer)
    (messages,) = asked.prompts
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1]["content"] == "look"
    assert messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"city": 1}}
    assert messages[2]["content"] == "rain"
    for fields, param in (
        ({"input": []}, "input"), ({"input": [3]}, "input.0"), ({"input": [{"type": "image"}]}, "input.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        ({"input": "x", "previous_response_id": "r"}, "previous_response_id"), ({"input": "x", "background": True}, "background"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools.0"), ({"input": "x", "messages": []}, "messages"),
        *[({"input": "x", "max_output_tokens": most}, "max_output_tokens") for most in (0, -1, 2.0, "8", True)],
        ({"input": "x", "instructions": 3}, "instructions"), ({"input": "x", "text": 3}, "text"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "n"}}}, "response_format"),
    ):  # fmt: skip
        with pytest.raises(Problem) as told:
            response_ask(fields, model.tokenizer)
        assert told.value.param == param
