"""Tools and thoughts in chats: what the template is told of, and answers whole and in chunks, with a model that writes what it is
told to."""

import json
from dataclasses import replace

import pytest

from dflash_jax.generation import Writer
from dflash_jax.serving import async_engine
from dflash_jax.serving.app import ServeOptions, make_app
from dflash_jax.serving.bodies import parsed
from dflash_jax.serving.problems import Problem
from dflash_jax.serving.tools import chat_with_tools

from ..chat_pair import TEMPLATE

testclient = pytest.importorskip("starlette.testclient")

KNOWS_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}{# <tool_call> #}" + TEMPLATE
THINKS = (
    KNOWS_TOOLS
    + "{# </think> #}{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"city": {"type": "string"}}}}}]
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 40, "temperature": 0}
CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture
def says(model, monkeypatch):
    """Makes the model write a text and end there, a few letters for each token."""

    def of(text, reason="eos"):
        class Scripted(Writer):
            def write(self, update):
                before = 6 * len(self.tokens)
                piece = super().write(update)
                if piece.completion is None:
                    return replace(piece, text=text[before : 6 * len(self.tokens)])
                done = replace(piece.completion, text=text, finish_reason=reason)
                return replace(piece, text=text[before:], finish_reason=reason, completion=done)

        monkeypatch.setattr(async_engine, "Writer", Scripted)

    return of


@pytest.fixture
def client(model, monkeypatch):
    app = make_app(model, ServeOptions(names=("pair",)))
    with testclient.TestClient(app, raise_server_exceptions=False) as made:
        yield made


def ask(client, **fields):
    return client.post("/v1/chat/completions", json=CHAT | fields).json()


def streamed(client, **fields):
    """Deltas joined as clients join them, and the finish reason."""
    text, thought, calls, reason = "", "", [], None
    lines = client.post("/v1/chat/completions", json=CHAT | {"stream": True} | fields).text.splitlines()
    assert lines[-2] == "data: [DONE]"
    for line in lines[:-2]:
        if not line:
            continue
        choice = json.loads(line.removeprefix("data: "))["choices"][0]
        delta, reason = choice["delta"], choice["finish_reason"]
        text += delta.get("content") or ""
        thought += delta.get("reasoning_content") or ""
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append({"name": call["function"]["name"], "arguments": ""})
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
    return text, thought, calls, reason


def test_calls_whole_and_in_chunks(client, model, monkeypatch, says):
    monkeypatch.setattr(model.tokenizer, "template", KNOWS_TOOLS)
    says(f"I look.\n{CALL}\n{CALL}")
    told = {"name": "f", "arguments": '{"city": "Paris"}'}
    choice = ask(client, tools=TOOLS)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    assert "reasoning" not in choice["message"]
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [told, told]
    assert all(
        call["id"].startswith("call_") and call["type"] == "function" for call in choice["message"]["tool_calls"]
    )
    assert streamed(client, tools=TOOLS) == ("I look.", "", [told, told], "tool_calls")
    assert streamed(client, tools=TOOLS, parallel_tool_calls=False)[2] == [told]
    assert len(ask(client, tools=TOOLS, parallel_tool_calls=False)["choices"][0]["message"]["tool_calls"]) == 1
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):  # nothing is looked for
        choice = ask(client, **fields)["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (f"I look.\n{CALL}\n{CALL}", "stop")
        assert "tool_calls" not in choice["message"]
    says(CALL[:45], reason="length")
    choice = ask(client, tools=TOOLS)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL[:45], "length")
    says(CALL)
    assert ask(client, tools=TOOLS)["choices"][0]["message"]["content"] is None


def test_thoughts_whole_and_in_chunks(client, model, monkeypatch, says):
    monkeypatch.setattr(model.tokenizer, "template", THINKS)
    says(f"<think>\nwell\n</think>\n\nyes {CALL}")
    whole = ask(client, tools=TOOLS)
    message = whole["choices"][0]["message"]
    assert (message["content"], message["reasoning"], message["reasoning_content"]) == ("yes", "well", "well")
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    assert streamed(client, tools=TOOLS)[:2] == ("yes", "well")
    says("only thoughts", reason="length")
    message = ask(client)["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == (None, "only thoughts")
    off = ask(client, chat_template_kwargs={"enable_thinking": False})
    assert off["choices"][0]["message"]["content"] == "only thoughts"
    assert "completion_tokens_details" not in off["usage"]


@pytest.mark.few
def test_log_probabilities_come_with_what_was_told_apart(client, model, monkeypatch, says):
    monkeypatch.setattr(model.tokenizer, "template", THINKS)
    says("<think>\nwell\n</think>\n\nyes")
    lines = client.post("/v1/chat/completions", json=CHAT | {"stream": True, "logprobs": True}).text.splitlines()
    chunks = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    streamed = [one for chunk in chunks if chunk["logprobs"] for one in chunk["logprobs"]["content"]]
    assert streamed == ask(client, logprobs=True)["choices"][0]["logprobs"]["content"]


def test_messages_with_tools_become_tokens_as_in_chats(client, model, monkeypatch):
    monkeypatch.setattr(model.tokenizer, "template", KNOWS_TOOLS)
    body = {"messages": CHAT["messages"], "tools": TOOLS}
    tokens = client.post("/tokenize", json=body).json()["tokens"]
    assert tokens == model.tokenizer.encode_chat(CHAT["messages"], tools=TOOLS)
    assert len(tokens) > len(client.post("/tokenize", json=body | {"tool_choice": "none"}).json()["tokens"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": []}, "tools"), ({"tools": {}}, "tools"), ({"tools": [3]}, "tools.0"),
        ({"tools": [{"type": "magic"}]}, "tools.0"), ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"function": {"name": "f", "parameters": {"properties": 3}}}]}, "tools.0.function.parameters"),
        ({"tool_choice": "required"}, "tool_choice"), ({"tool_choice": "some"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"), ({"tools": TOOLS}, "tools"),
    ],
)  # fmt: skip
def test_wrong_tools_are_named(model, fields, param):
    with pytest.raises(Problem) as told:
        chat_with_tools(parsed(json.dumps(CHAT | fields).encode()), model.tokenizer)
    assert told.value.status == 400
    assert told.value.param == param
