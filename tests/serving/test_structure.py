"""Structured answers of the shipped pair: through Python and through the server, each a document of what was asked for."""

import json
import re
import threading

import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.serving.app import ServeOptions, make_app
from dflash_jax.serving.problems import Problem
from dflash_jax.serving.tools import chat_with_tools
from dflash_jax.text import grammars

from ..chat_pair import TEMPLATE

testclient = pytest.importorskip("starlette.testclient")

PROMPT, SCHEMA = (
    "def f(x):",
    {
        "type": "object", "required": ["name", "n"], "additionalProperties": False,
        "properties": {"name": {"enum": ["a", "b"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    },
)  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "required": ["city"], "properties": {"city": {"enum": ["Paris", "Rome"]}, "n": {"$ref": "#/$defs/n"}},
        "$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "additionalProperties": False}}}
    for name in ("first", "second")
]  # fmt: skip
CHAT = {"messages": [{"role": "user", "content": "x"}], "temperature": 0}


def is_document(text):
    found = json.loads(text)
    return (
        list(found) == ["name", "n"]
        and isinstance(found["name"], str)
        and len(found["name"]) < 10
        and 0 <= found["n"] < 100
    )


@pytest.mark.few
def test_answers_are_what_was_asked_for(model):
    pytest.importorskip("llguidance")
    sampled = {"max_tokens": 200, "temperature": 1.0}
    asked = [
        dj.SamplingParams(structured={"json": SCHEMA}, **sampled, seed=1),
        dj.SamplingParams(structured_outputs=dj.Structured(regex="[0-9]{8}"), **sampled, seed=2, top_k=20, top_p=0.9),
        dj.SamplingParams(
            structured={"choice": ["red\n", 'blu"e', "green sky"]}, **sampled, seed=3, repetition_penalty=1.3
        ),
        dj.SamplingParams(structured={"grammar": 'root ::= "x" [0-3]+ "y" | "z" root'}, max_tokens=24),
    ]
    for params in asked[:2]:  # those of tables, and of the host
        model.grammars.compiled(params.structured, at_once=True)
    rows = [dj.generate(model, PROMPT, params) for params in asked]
    assert [row.finish_reason for row in rows[:3]] == ["eos"] * 3
    assert is_document(rows[0].text)
    assert re.fullmatch("[0-9]{8}", rows[1].text)
    assert rows[2].text in ("red\n", 'blu"e', "green sky")
    assert re.fullmatch("z*(x[0-3]*y?)?", rows[3].text)
    kept = [model.grammars.compiled(one.structured, at_once=True) for one in asked]
    assert [one.table is None for one in kept] == [False, False, False, True]
    assert [one.reason for one in kept[:3]] == [""] * 3
    assert kept[3].reason.startswith("the rule 'root ::=")
    assert model.grammars.compiled({"json": SCHEMA}) is model.grammars.compiled(dj.Structured(json=json.dumps(SCHEMA)))


def test_tables_are_made_in_the_background_of_grammars_that_come_again(model, monkeypatch):
    pytest.importorskip("llguidance")
    kept, begin = grammars.Grammars(model.tokenizer, "it", model.target.vocab_size, model.eos_ids), threading.Event()
    table_of = grammars.table_of
    monkeypatch.setattr(grammars, "table_of", lambda *rest: begin.wait(60) and table_of(*rest))
    given = [{"regex": f"[0-9]{{{count}}}"} for count in range(3, 4 + grammars.MOST_MADE)]
    assert [kept.compiled(one).reason for one in given] == [grammars.NO_TABLE_YET] * len(given)
    assert not kept._making
    assert [kept.compiled(one).table for one in given] == [None] * len(given)
    assert len(kept._making) == grammars.MOST_MADE, "one waits until it comes again"
    begin.set()
    found = [kept.compiled(one, at_once=True) for one in given]
    assert all(one.table is not None for one in found)
    assert [kept.compiled(one) for one in given] == found
    assert not kept._making
    at_once = grammars.Grammars(model.tokenizer, "it", model.target.vocab_size, model.eos_ids, at_once=True)
    assert at_once.compiled(given[0]).table is not None


def test_whatever_is_wrong_with_a_table_the_host_is_asked(model, monkeypatch, caplog):
    pytest.importorskip("llguidance")
    expected = dj.generate(model, PROMPT, dj.SamplingParams(structured={"regex": "[0-9]{7}"}, max_tokens=12))
    kept = grammars.Grammars(model.tokenizer, "it", model.target.vocab_size, model.eos_ids)
    monkeypatch.setattr(grammars, "table_of", lambda *_: 1 // 0)
    monkeypatch.setitem(model.__dict__, "grammars", kept)
    found = dj.generate(model, PROMPT, dj.SamplingParams(structured={"regex": "[0-9]{7}"}, max_tokens=12))
    assert found.token_ids == expected.token_ids
    assert kept.compiled({"regex": "[0-9]{7}"}, at_once=True).reason.startswith(
        "no table could be made: ZeroDivisionError"
    )
    assert "the host is asked in every cycle" in caplog.text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object, got none"),
        ({"regex": "a", "choice": ["b"]}, "got regex and choice"), ({"xml": "a"}, "got 'xml'"), ("a", "a mapping such as"),
        ({"json": "{"}, "must be a JSON schema: "), ({"json": 3}, "which is an object, got 3"),
        ({"json": json.loads('{"items":' * 70 + "{}" + "}" * 70)}, "nested 64 deep"),
        ({"json": {"a": float("nan")}}, "must be a JSON schema: "), ({"json_object": 1}, "must be True or left out, got 1"),
        ({"json_object": np.ones(2)}, "must be True or left out, got array"), ({"json_object": False}, "got none"),
        ({"choice": []}, "1 to 1024 texts"), ({"choice": "ab"}, "1 to 1024 texts"), ({"regex": ""}, "not empty"),
        ({"grammar": "x" * 300_000}, "may have 262144 bytes"),
    ],
)  # fmt: skip
def test_forms_that_are_none_are_refused(given, said):
    with pytest.raises(dj.ParameterError, match=said):
        dj.SamplingParams(structured=given)
    for beside in ({"ignore_eos": True}, {"min_tokens": 2}, {"bad_words": ["a"]}, {"allowed_token_ids": [1]}):
        with pytest.raises(dj.ParameterError, match=f"{next(iter(beside))} cannot be beside structured"):
            dj.SamplingParams(structured={"regex": "a"}, **beside)


def test_what_grammars_say_is_looked_at_before_anything_runs(model, monkeypatch):
    pytest.importorskip("llguidance")
    for given, said in (
        ({"json": {"type": "strin"}}, "structured json is none that can be followed: Invalid type: strin"),
        ({"json": {"type": "object", "dependentSchemas": {}}}, "Unimplemented keys"), ({"json": {"$ref": "http://x/y"}}, "http"),
        ({"regex": "(ab"}, "unclosed group"), ({"grammar": "start: nothing"}, "nothing"),
        ({"grammar": "root ::= ["}, "grammar is none"),
    ):  # fmt: skip
        with pytest.raises(dj.ParameterError, match=re.escape(said)):
            dj.generate(model, PROMPT, dj.SamplingParams(structured=given))
    monkeypatch.setattr(model.tokenizer, "backend", None)
    with pytest.raises(dj.TokenizerError, match="no tokenizer"):
        grammars.Grammars(None, "it", 9, [0]).compiled({"regex": "a"})
    with pytest.raises(dj.ParameterError, match="names none"):
        grammars.Grammars(model.tokenizer, "it", 9, []).compiled({"regex": "a"})
    monkeypatch.setitem(grammars.__dict__, "importlib", type("none", (), {"import_module": staticmethod(missing)}))
    with pytest.raises(dj.ParameterError, match=r"pip install 'dflash-jax\[structured\]'"):
        dj.generate(model, [[1]], dj.SamplingParams(structured={"regex": "a"}))


def missing(name):
    raise ImportError(name)


def test_the_server_takes_every_form(model, monkeypatch):
    pytest.importorskip("llguidance")
    template = "{% if tools %}{% endif %}{# <tool_call> #}" + TEMPLATE
    with testclient.TestClient(make_app(model, ServeOptions(names=("pair",)))) as client:

        def ask(path, **fields):
            return client.post(f"/v1/{path}completions", json={"max_tokens": 120, "seed": 1} | fields)

        def said(path, **fields):
            return ask(path, **fields).json()["choices"][0]

        schema = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
        assert is_document(said("chat/", **CHAT, response_format=schema)["message"]["content"])
        assert re.fullmatch(
            "[ab]{3}", said("", prompt=PROMPT, structured_outputs={"regex": "[ab]{3}", "json": None})["text"]
        )
        assert said("", prompt=PROMPT, guided_choice=["yes", "no"])["text"] in ("yes", "no")
        few = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8}
        assert said("", **few, response_format={"type": "text"})["text"] == said("", **few)["text"]
        assert said("", **few, response_format={"type": "json_object"})["text"].startswith("{")
        for fields, param in (
            ({"guided_regex": "(ab"}, "guided_regex"), ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice"),
            ({"response_format": {"type": "json_schema"}}, "response_format"), ({"response_format": 3}, "response_format"),
            ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, "response_format"),
            ({"structured_outputs": {"xml": "a"}}, "structured_outputs"), ({"structured_outputs": []}, "structured_outputs"),
            ({"guided_regex": "a", "min_tokens": 3}, "min_tokens"),
        ):  # fmt: skip
            wrong = ask("", prompt=PROMPT, **fields)
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, param), wrong.text
        for form, mark in (("hermes", ""), ("qwen3_xml", "{# <function= #}")):
            monkeypatch.setattr(model.tokenizer, "template", template + mark)
            calling = CHAT | {"tools": TOOLS, "parallel_tool_calls": False}
            named = {"type": "function", "function": {"name": "second"}}
            choice = said("chat/", **calling, tool_choice="required" if form == "hermes" else named)
            (call,) = choice["message"]["tool_calls"]
            assert choice["finish_reason"] == "tool_calls", form
            arguments = json.loads(call["function"]["arguments"])
            assert call["function"]["name"] in (("first", "second") if form == "hermes" else ("second",))
            assert arguments["city"] in ("Paris", "Rome")
            assert int(arguments.get("n", 0)) in range(10)


@pytest.mark.parametrize(
    ("fields", "template", "said"),
    [
        ({"tool_choice": "required"}, "<tool_call>", "needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "h"}}, "tools": TOOLS}, "<tool_call>", "is no tool: there are"),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "<tool_call>", "must be auto, none, required or"),
        ({"tool_choice": "required", "tools": TOOLS}, "", "calls of a form that is known"),
        ({"tool_choice": "required", "tools": TOOLS, "guided_regex": "a"}, "<tool_call>", "both say what the text is"),
    ],
)  # fmt: skip
def test_calls_that_cannot_be_asked_for(model, monkeypatch, fields, template, said):
    monkeypatch.setattr(model.tokenizer, "template", f"{{# tools {template} #}}" + TEMPLATE)
    with pytest.raises(Problem, match=said):
        chat_with_tools(CHAT | fields, model.tokenizer)
