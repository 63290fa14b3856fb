"""The server through a socket, with OpenAI's client where it is installed: answers, streams, errors, clients that leave."""

import asyncio
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dflash_jax as dj

openai = pytest.importorskip("openai")
parser = pytest.importorskip("prometheus_client.parser")

from dflash_jax.engine.requests import MODES  # noqa: E402
from dflash_jax.serving.app import ServeOptions, make_app  # noqa: E402
from dflash_jax.serving.bodies import chat_ask, completion_ask, requests_of  # noqa: E402

PROMPT = "def quicksort("
OTHERS = ["import os\n", "class Node:", "for i in range(", PROMPT]
BROKEN = int(os.environ.get("BROKEN_BODIES", "150"))
STORM = int(os.environ.get("STORM", "24"))
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # sockets of clients that leave


@pytest.fixture(scope="module")
def client(port):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def told(model):
    """Prompts' texts as `generate` has them."""
    rows = dj.generate(model, OTHERS, dj.SamplingParams(max_tokens=24))
    return {prompt: row.text for prompt, row in zip(OTHERS, rows, strict=True)}


def post(port, path, body, **headers):
    """Status, headers and body of an answer."""
    link = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        link.request("POST", path, body if isinstance(body, bytes) else json.dumps(body), headers)
        answer = link.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        link.close()


def get(port, path, **headers):
    link = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        link.request("GET", path, headers=headers)
        answer = link.getresponse()
        return answer.status, answer.read()
    finally:
        link.close()


def resident_bytes() -> int:
    """The memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def assert_free(model, front, seconds=10.0):
    engine, until = model.engine, time.monotonic() + seconds
    while (
        front.live or engine.allocator.num_free < engine.num_pages or engine.scheduler._live or engine.scheduler._inbox
    ):
        assert time.monotonic() < until, "pages were kept"
        time.sleep(0.01)


def test_completions_are_those_of_generate(client, told):
    answer = client.completions.create(model="pair", prompt=PROMPT, max_tokens=24, temperature=0)
    assert answer.choices[0].text == told[PROMPT]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 24, 29)
    assert answer.choices[0].finish_reason == "length"
    several = client.completions.create(model="a/b", prompt=OTHERS, max_tokens=24, temperature=0)
    assert [choice.text for choice in several.choices] == [told[prompt] for prompt in OTHERS]
    chunks = list(
        client.completions.create(
            model="pair",
            prompt=PROMPT,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == told[PROMPT]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == 29
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.few
def test_sixteen_at_once(port, told):
    async def all_at_once():
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x") as client:
            asked = [
                client.completions.create(model="pair", prompt=OTHERS[i % 4], max_tokens=24, temperature=0)
                for i in range(16)
            ]
            return await asyncio.gather(*asked)

    assert [one.choices[0].text for one in asyncio.run(all_at_once())] == [told[OTHERS[i % 4]] for i in range(16)]


def test_seeds_choices_and_stops(client, model):
    """Choice i has seed + i, in a stream as well; the prompt is counted once."""
    asked = {"model": "pair", "prompt": PROMPT, "max_tokens": 12, "temperature": 1.0}
    several = client.completions.create(**asked, n=3, seed=7)
    params = dj.SamplingParams(max_tokens=12, temperature=1.0)
    alone = dj.generate(model, [PROMPT] * 3, [replace(params, seed=7 + i) for i in range(3)])
    assert [choice.text for choice in several.choices] == [row.text for row in alone]
    assert [row.text for row in dj.generate(model, [PROMPT], replace(params, n=3, seed=7))] == [
        row.text for row in alone
    ]
    with pytest.raises(dj.ParameterError, match="n=3 gives a list of completions"):
        dj.generate(model, PROMPT, replace(params, n=3))
    assert several.usage.prompt_tokens == 5
    texts = dict.fromkeys(range(3), "")
    for chunk in client.completions.create(**asked, n=3, seed=7, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(texts.values()) == [row.text for row in alone]
    stop = alone[0].text[3:6]
    ended = client.completions.create(**asked, seed=7, stop=[stop]).choices[0]
    assert ended.text == alone[0].text[: alone[0].text.index(stop)]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", stop)


@pytest.mark.few
def test_penalties_and_biases_are_those_of_generate(client, model):
    """Each field by its name in a body; the ids of a body's biases are texts."""
    first = dj.generate(model, PROMPT, dj.SamplingParams(max_tokens=12)).token_ids
    fields = {
        "frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {str(first[0]): -100.0},
        "bad_words": ["return"],
    }  # fmt: skip
    params = dj.SamplingParams(max_tokens=12, **fields | {"logit_bias": {first[0]: -100}})
    row = dj.generate(model, PROMPT, params)
    openais = {name: fields.pop(name) for name in ("frequency_penalty", "presence_penalty", "logit_bias")}
    answer = client.completions.create(
        model="pair", prompt=PROMPT, max_tokens=12, temperature=0, **openais, extra_body=fields
    )
    assert answer.choices[0].text == row.text
    assert row.token_ids[0] != first[0]
    assert "return" not in row.text


def test_prompts_come_again_with_their_scores(client, model):
    """lm-eval's payload; one text and ids; a stream; no token at all; and vLLM's own field."""
    ids = model.tokenizer.encode(PROMPT)
    params = dj.SamplingParams(max_tokens=1, logprobs=1, prompt_logprobs=1)
    row = dj.generate(model, PROMPT, params)
    known = [(one.token_id, one.logprob) for one in (*row.prompt_logprobs[1:], *row.logprobs)]
    asked = {"model": "pair", "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234}
    answers = [client.completions.create(**asked, prompt=prompt) for prompt in ([ids], PROMPT)]
    for answer in answers:
        choice = answer.choices[0]
        rows = choice.logprobs
        assert choice.text == PROMPT + row.text
        assert [*zip([*ids[1:], row.token_ids[0]], rows.token_logprobs[1:], strict=True)] == known
        assert (rows.token_logprobs[0], rows.top_logprobs[0]) == (None, None)
        for token, logprob, tops, one in zip(
            rows.tokens[1:], rows.token_logprobs[1:], rows.top_logprobs[1:], (*row.prompt_logprobs[1:], *row.logprobs),
            strict=True,
        ):  # fmt: skip
            assert (max(tops.values()) == logprob) == (one.top[0][0] == one.token_id)
            assert tops[token] == logprob
        assert all(choice.text[at:].startswith(token) for token, at in zip(rows.tokens, rows.text_offset, strict=True))
    chunks = list(client.completions.create(**asked, prompt=PROMPT, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT + row.text
    told = [one for chunk in chunks if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.token_logprobs]
    assert told == answers[0].choices[0].logprobs.token_logprobs
    alone = client.completions.create(**asked | {"max_tokens": 0}, prompt=PROMPT, extra_body={"prompt_logprobs": 0})
    choice = alone.choices[0]
    assert (choice.text, choice.finish_reason, alone.usage.completion_tokens) == (PROMPT, "length", 0)
    assert choice.logprobs.token_logprobs == told[:-1]
    assert [one and one[str(token)]["logprob"] for token, one in zip(ids, choice.prompt_logprobs, strict=True)] == told[
        :-1
    ]


def test_logprobs_of_both_kinds(client):
    answer = client.completions.create(model="pair", prompt=PROMPT, max_tokens=8, temperature=0, logprobs=2)
    rows, text = answer.choices[0].logprobs, answer.choices[0].text
    assert len(rows.tokens) == len(rows.token_logprobs) == len(rows.top_logprobs) == len(rows.text_offset) == 8
    each = zip(rows.tokens, rows.token_logprobs, rows.top_logprobs, rows.text_offset, strict=True)
    for token, logprob, tops, offset in each:
        assert text[offset:].startswith(token)
        assert tops[token] == logprob == max(tops.values())
    messages = [{"role": "user", "content": "é"}]
    asked = {
        "model": "pair",
        "messages": messages,
        "max_tokens": 8,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    chat = client.chat.completions.create(**asked).choices[0]
    assert bytes(b for one in chat.logprobs.content for b in one.bytes).decode() == chat.message.content
    assert all(len(one.top_logprobs) == 2 for one in chat.logprobs.content)
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == chat.message.content
    assert [one for chunk in chunks if chunk.logprobs for one in chunk.logprobs.content] == chat.logprobs.content
    assert (chunks[0].delta.role, chunks[-1].finish_reason) == ("assistant", chat.finish_reason)


def test_the_models_defaults_hold_where_a_request_says_nothing(model):
    """And a request's own fields count; prompts are shortened before anything else."""
    own = replace(model, sampling_defaults={"temperature": 0.6, "top_k": 20})
    front = make_app(own).front
    params = completion_ask({"prompt": "x", "top_k": 5, "skip_special_tokens": False}, front.defaults).params
    assert (params.temperature, params.top_k, params.skip_special_tokens) == (0.6, 5, False)
    assert chat_ask(CHAT, None, front.defaults).params.top_k == 20
    assert completion_ask({"prompt": "x"}, make_app(own, ServeOptions(model_defaults=False)).front.defaults).params == (
        completion_ask({"prompt": "x"}).params
    )
    body = {"prompt": [*range(1, 301)], "truncate_prompt_tokens": -1, "max_tokens": 6}
    assert requests_of(model, completion_ask(body))[0].prompt == (*range(51, 301),)
    assert requests_of(model, completion_ask(body | {"truncate_prompt_tokens": 2}))[0].prompt == (299, 300)


def test_calls_without_arguments_come_back_as_they_were_streamed():
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
    messages = [*CHAT["messages"], {"role": "assistant", "content": None, "tool_calls": [called]}]
    assert chat_ask({"messages": messages}, None).prompts[0][1]["tool_calls"][0]["function"]["arguments"] == {}


CHAT = {"messages": [{"role": "user", "content": "x"}]}
WRONG = [
    ("/v1/completions", {"prompt": "x", "model": "other"}, 404, "model", "model_not_found"),
    ("/v1/completions", {"prompt": "x", "temperature": "hot"}, 400, "temperature", "invalid_value"),
    ("/v1/completions", {"prompt": "x", "max_tokens": -1}, 400, "max_tokens", "invalid_value"),
    ("/v1/completions", {"prompt": "x", "colour": 1}, 400, "colour", "unknown_parameter"),
    ("/v1/completions", {"prompt": "x", "presence_penalty": 3}, 400, "presence_penalty", "invalid_value"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias", "invalid_value"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens", "invalid_value"),
    (
        "/v1/completions",
        {"prompt": "x", "prompt_logprobs": 1, "stream": True},
        400,
        "prompt_logprobs",
        "unsupported_parameter",
    ),
    ("/v1/chat/completions", CHAT | {"echo": True}, 400, "echo", "unsupported_parameter"),
    ("/v1/completions", b"{", 400, None, None),
    ("/v1/completions", b"[" * 60000, 400, None, None),
    ("/v1/completions", b" " * 70000, 413, None, None),
    ("/v1/completions", {"prompt": [1] * 300}, 400, "prompt", "context_length_exceeded"),
    ("/v1/completions", {"prompt": "\ud800"}, 400, None, "invalid_value"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages", "invalid_value"),
    ("/v1/chat/completions", CHAT | {"tools": []}, 400, "tools", "invalid_value"),
    ("/v1/chat/completions", CHAT | {"top_logprobs": 1}, 400, "top_logprobs", "invalid_value"),
    ("/v1/chat/completions", {"messages": [{"role": "x", "content": ""}]}, 400, "messages.0.role", "invalid_value"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 4, "min_tokens": 5}, 400, "min_tokens", "invalid_value"),
    ("/v1/chat/completions", CHAT | {"reasoning_effort": 5}, 400, "reasoning_effort", "invalid_value"),
    (
        "/v1/chat/completions",
        CHAT | {"chat_template_kwargs": {"messages": []}},
        400,
        "chat_template_kwargs",
        "invalid_value",
    ),
    ("/v1/nothing", {}, 404, None, None),
    ("/v1/models", {}, 405, None, None),
    ("/tokenize", {}, 400, "prompt", "invalid_value"),
]


SAID = {
    ("/v1/nothing", 404): "there is no path /v1/nothing: there are /v1/completions, ",
    ("/v1/models", 405): "/v1/models takes GET",
    ("/v1/completions", 413): "and this one has more",
    ("/tokenize", 400): "prompt must be a text, got nothing",
}


@pytest.mark.parametrize(("path", "body", "status", "param", "code"), WRONG, ids=range(len(WRONG)))
def test_errors_are_objects(port, path, body, status, param, code):
    came, headers, text = post(port, path, body)
    error = json.loads(text)["error"]
    assert (came, error["param"], error["code"]) == (status, param, code), error
    assert error["type"] == "invalid_request_error"
    assert headers["x-request-id"]
    if said := SAID.get((path, status)):
        assert said in error["message"]


def broken_body(rng: random.Random) -> bytes:
    """A good body with some of it replaced, or with some of its bytes."""
    junk = [
        None,
        True,
        -1,
        10**30,
        1e308,
        "",
        "hot",
        "\ud800",
        [],
        {},
        [[]],
        [{}],
        [None],
        {"a": [1]},
        ["x"] * 40,
        [1, "x"],
        -0.5,
    ]
    body = rng.choice(
        [
            {"prompt": "x", "max_tokens": 1, "temperature": 0, "n": 1, "stop": ["\n"], "logprobs": 1, "seed": 1},
            {
                "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
                "max_tokens": 1,
                "temperature": 0,
            },
        ]
    )
    names = [
        *body,
        "stream_options",
        "chat_template_kwargs",
        "top_k",
        "stop_token_ids",
        "min_tokens",
        "tools",
        "model",
        "echo",
    ]
    for name in rng.sample(names, rng.randint(1, 3)):
        body[name] = rng.choice(junk)
    text = json.dumps(body).encode()
    if rng.random() < 0.3:
        place = rng.randrange(len(text))
        text = text[:place] + rng.randbytes(rng.randint(0, 3)) + text[place + rng.randint(0, 4) :]
    return text


def test_broken_bodies_are_never_the_servers_fault(port, caplog):
    """`BROKEN_BODIES` of them: an answer or an object of 4xx, no traceback."""
    rng, seen = random.Random(0), dict[int, int]()
    link = HTTPConnection("127.0.0.1", port, timeout=60)
    for _ in range(BROKEN):
        body = broken_body(rng)
        link.request("POST", rng.choice(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]), body)
        answer = link.getresponse()
        text = answer.read()
        seen[answer.status] = seen.get(answer.status, 0) + 1
        if answer.status != 200:
            assert 400 <= answer.status < 500, (answer.status, body, text)
            assert json.loads(text)["error"]["message"], body
    link.close()
    print(f"statuses: {seen}")
    assert not caplog.records


def test_clients_that_leave_free_their_pages(port, client, model, app):
    """`STORM` streams and whole answers, each dropped at some moment; one read slowly; then all are answered as ever.
    Of a thousand, the second half leaves no thread and no memory more than the first."""
    assert_free(model, app.front)
    stream = client.completions.create(model="pair", prompt=PROMPT, max_tokens=200, stream=True, temperature=0)
    next(iter(stream))
    stream.close()
    assert_free(model, app.front)

    def leave(number: int) -> None:
        rng = random.Random(number)
        body = {"prompt": rng.choice(OTHERS), "max_tokens": 200, "temperature": 0, "stream": rng.random() < 0.6}
        link = HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            link.request("POST", "/v1/completions", b"{" if rng.random() < 0.1 else json.dumps(body))
            link.sock.settimeout(rng.uniform(0.01, 0.6))
            answer = link.getresponse()
            for _ in range(rng.randint(0, 3)):
                answer.read1(256)
                time.sleep(rng.uniform(0, 0.2))
        except TimeoutError:
            pass
        finally:
            link.close()

    held = []
    for half in (range(STORM // 2), range(STORM // 2, STORM)):
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(leave, half))
        assert_free(model, app.front, 30.0)
        gc.collect()
        held.append((threading.active_count(), resident_bytes()))
    if STORM >= 1000:  # by then every program is compiled
        assert held[1][0] == held[0][0]
        assert held[1][1] - held[0][1] < 32 << 20, held
    model.engine.allocator.check_integrity()
    assert model.engine.driver.join(10.0)


def test_metrics_have_vllms_names(port, client, model, app):
    def figures():
        text = get(port, "/metrics")[1].decode()
        return {
            (one.name, one.labels.get("position")): one.value
            for family in parser.text_string_to_metric_families(text) for one in family.samples
        }  # fmt: skip

    before = figures()
    row = dj.generate(model, PROMPT, dj.SamplingParams(max_tokens=24))
    client.completions.create(model="pair", prompt=PROMPT, max_tokens=24, temperature=0)
    after, late = figures(), time.monotonic() + 10
    # An answer goes out before its turn is counted.
    while after["vllm:num_requests_running", None] and time.monotonic() < late:
        time.sleep(0.05)
        after = figures()
    gained = {key: after[key] - before.get(key, 0) for key in after}
    drafts = gained["vllm:spec_decode_num_drafts_total", None]
    accepted = gained["vllm:spec_decode_num_accepted_tokens_total", None]
    assert accepted / drafts + 1 == pytest.approx(np.mean(row.acceptance_lengths))
    assert gained["vllm:spec_decode_num_draft_tokens_total", None] == drafts * model.draft.num_drafts
    places = [
        gained["vllm:spec_decode_num_accepted_tokens_per_pos_total", str(i)] for i in range(model.draft.num_drafts)
    ]
    assert sum(places) == accepted
    assert gained["vllm:generation_tokens_total", None] == 24
    assert after["vllm:num_requests_running", None] == 0


def test_about_itself(port, model):
    status, _, text = post(port, "/tokenize", {"prompt": PROMPT, "return_token_strs": True})
    row = json.loads(text)
    assert status == 200
    assert (row["tokens"], row["count"], row["max_model_len"]) == (model.tokenizer.encode(PROMPT), 5, 256)
    assert "".join(row["token_strs"]) == PROMPT
    assert json.loads(post(port, "/detokenize", {"tokens": row["tokens"]})[2]) == {"prompt": PROMPT}
    assert json.loads(get(port, "/v1/models/a/b")[1])["id"] == "a/b"
    assert [one["id"] for one in json.loads(get(port, "/v1/models")[1])["data"]] == ["pair", "a/b"]
    assert [get(port, path)[0] for path in ("/health", "/ready", "/version", "/tokenizer_info")] == [200] * 4


def test_keys_hosts_queues_and_draining(model):
    """Through the application itself: nothing is listened to."""
    keyed = make_app(model, ServeOptions(keys=("secret",), max_queue=0))
    asked = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    assert asyncio.run(through(keyed, asked))[0] == 401
    assert asyncio.run(through(keyed, asked, authorization="Bearer wrong"))[0] == 401
    assert asyncio.run(through(keyed, asked, authorization="Bearer secret"))[0] == 200
    keyed.front.live = 4
    status, headers, body = asyncio.run(through(keyed, asked, authorization="Bearer secret"))
    assert (status, headers["retry-after"], body["error"]["type"]) == (429, "1", "rate_limit_error")
    keyed.front.live, keyed.front.draining = 0, True
    status, headers, body = asyncio.run(through(keyed, asked, authorization="Bearer secret"))
    assert (status, headers["retry-after"], body["error"]["type"]) == (503, "1", "server_error")
    here = make_app(model, ServeOptions(here=True))
    assert asyncio.run(through(here, asked, host="evil.example:80"))[0] == 403
    assert asyncio.run(through(here, asked, host="localhost:80"))[0] == 200
    quick = make_app(model, ServeOptions(request_timeout=0.01))
    status, headers, _ = asyncio.run(through(quick, asked | {"max_tokens": 200}))
    assert (status, headers["x-should-retry"]) == (504, "false")
    status, _, body = asyncio.run(through(make_app(None), asked))
    assert (status, body["error"]["message"]) == (503, "the model is being loaded")


async def through(app, body, path="/v1/completions", **headers):
    """Status, headers and object of an answer of an ASGI application."""
    sent, lines = [], [(name.encode(), value.encode()) for name, value in headers.items()]
    came = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive():
        if came:
            return came.pop()
        return await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
        "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http", "headers": lines,
        "client": ("127.0.0.1", 1), "server": ("x", 80),
    }  # fmt: skip
    await app(scope, receive, send)
    told = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], told, json.loads(b"".join(one.get("body", b"") for one in sent[1:]))


def test_what_the_command_tells_a_server(model, monkeypatch, tmp_path):
    """Its template, its default number of tokens, and figures in each answer."""
    from starlette.testclient import TestClient

    from dflash_jax.cli import serve
    from dflash_jax.cli.parser import build_parser

    served = []
    monkeypatch.setattr(serve, "serve", lambda load, options, **_: served.append((load(), options)))
    monkeypatch.setattr(serve, "load", lambda *_: model)
    for name in ("template", "tool_template"):
        monkeypatch.setattr(model.tokenizer, name, getattr(model.tokenizer, name))
    (tmp_path / "told.jinja").write_text("{{ messages[0].content }}!")

    def told(*options):
        serve.serve_model(build_parser().parse_args(["serve", "--no-warmup", *options]), {})

    told("--default-max-tokens", "5", "--request-metrics", "--chat-template", str(tmp_path / "told.jinja"))
    ((_, options),) = served
    with TestClient(make_app(model, options)) as client:
        asked = {"messages": [{"role": "user", "content": "def f("}], "temperature": 0}
        answer = client.post("/v1/chat/completions", json=asked).json()
        assert answer["usage"]["completion_tokens"] == 5
        assert answer["usage"]["prompt_tokens"] == len(model.tokenizer.encode("def f(!", special=False))
        figures = answer["metrics"]
        stood = figures["speculative_decoding"]
        assert stood["num_draft_tokens"] == 15 * stood["num_spec_steps"]
        assert sum(stood["acceptance_histogram"]) == stood["num_spec_steps"]
        assert stood["mean_acceptance_length"] == 1 + stood["num_accepted_draft_tokens"] / stood["num_spec_steps"]
        assert figures["time_to_first_token_ms"] > figures["queue_time_ms"] >= 0
        assert client.post("/v1/chat/completions", json=asked | {"n": 2}).json()["metrics"] is None
    with TestClient(make_app(model, ServeOptions(names=("pair",)))) as client:
        asked = {"prompt": "def f(", "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}}
        lines = client.post("/v1/completions", json=asked | {"return_metrics": True}).text.splitlines()
        assert json.loads(lines[-4].removeprefix("data: "))["metrics"]["tokens_per_second"] > 0
        assert "metrics" not in client.post("/v1/completions", json=asked).text
    with pytest.raises(dj.TokenizerError, match="a chat template was expected"):
        told("--chat-template", str(tmp_path / "none"))
    with pytest.raises(dj.ParameterError, match="at least 1, got 0"):
        told("--default-max-tokens", "0")


COMMAND = """
import sys
import dflash_jax.cli
sys.exit(dflash_jax.cli.main(["serve", "--port", sys.argv[1], "--max-batch", "1", "--max-model-len", "256", "--no-warmup"]))
"""


def test_a_signal_lets_streams_end():
    """SIGTERM while a stream runs: it comes to its end, new requests are refused meanwhile, and the process ends with 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, "-c", COMMAND, str(port)], stderr=subprocess.PIPE, text=True) as process:
        try:
            until, states = time.monotonic() + 120, []
            while not states or states[-1] != 200:
                assert time.monotonic() < until
                assert process.poll() is None
                try:
                    states.append(get(port, "/ready")[0])
                except ConnectionRefusedError:
                    time.sleep(0.05)
            link = HTTPConnection("127.0.0.1", port, timeout=60)
            body = {"prompt": PROMPT, "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}
            link.request("POST", "/v1/completions", json.dumps(body))
            answer = link.getresponse()
            first = answer.read1(64)
            process.send_signal(signal.SIGTERM)
            text = first + answer.read()
            link.close()
            assert text.endswith(b"data: [DONE]\n\n")
            assert b'"finish_reason":"length"' in text
            assert process.wait(30) == 0
            assert "Traceback" not in process.stderr.read()
            assert set(states) <= {503, 200}
        finally:
            process.kill()


def test_a_port_that_cannot_be_had_is_told_before_anything_is_loaded(capsys):
    """Another process's, one past the last, and an address that is not this machine's."""
    from dflash_jax.cli import main

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for options, told in (
            (["--port", port], f"the server cannot listen at '127.0.0.1', port {port}: another process has this port"),
            (["--port", "65536"], "--port must be at most 65535"),
            (["--host", "192.0.2.1", "--port", "0"], "name an address of this machine (--host)"),
            (["--host", "no.such.host.invalid"], "name an address of this machine (--host)"),
        ):
            assert main(["serve", *options]) == 2
            assert told in capsys.readouterr().err


def test_any_free_port_is_told():
    from dflash_jax.serving.server import open_port

    places = open_port("localhost", 0)
    numbers = {place.getsockname()[1] for place in places}
    for place in places:
        place.close()
    assert len(numbers) == 1
    assert 0 not in numbers


def test_no_write_waits_until_the_one_before_is_acknowledged():
    """Which takes 40 ms where a client has nothing to say, as one that reads a stream."""
    from dflash_jax.serving.server import open_port

    (place,) = open_port("127.0.0.1", 0)
    with place, socket.create_connection(place.getsockname()) as caller:
        taken, _ = place.accept()
        with taken, caller:
            assert taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_server_on_a_cpu_compiles_ahead_for_one_request(model, monkeypatch, capsys):
    """All programs of all kinds of requests take a CPU many minutes."""
    from dflash_jax.cli import serve

    asked = []
    monkeypatch.setattr(dj.Model, "warmup", lambda self, **options: asked.append(options))
    serve._warm_up(model)
    assert "one request at a time" in capsys.readouterr().err
    monkeypatch.setattr(serve, "local_device", lambda: SimpleNamespace(platform="gpu"))
    serve._warm_up(model)
    assert asked[0] == {"modes": ("greedy", "sampled"), "draft": (True,), "batch": (1,), "progress": False}
    assert asked[1] == {"modes": MODES, "draft": (True,), "progress": False}


def test_a_model_that_comes_after_the_server_has_ended_is_nobodys():
    """As one that was being loaded when Ctrl-C came: its thread ends without a word."""
    from dflash_jax.serving.server import _load

    go, threads = threading.Event(), threading.active_count()
    loop = asyncio.new_event_loop()
    task = loop.create_task(_load(lambda: go.wait(60), None, lambda _: None, []))
    loop.run_until_complete(asyncio.sleep(0))
    task.cancel()
    loop.run_until_complete(asyncio.wait([task]))
    loop.close()
    go.set()
    until = time.monotonic() + 30
    while threading.active_count() > threads and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() == threads
