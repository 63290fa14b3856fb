"""Every example, with the pair that ships."""

import asyncio
import importlib.util
import json
import threading
import time
from pathlib import Path

import pytest

import dflash_jax as dj
from dflash_jax.serving.app import ServeOptions, make_app

FOLDER = Path(__file__).parents[2] / "examples"
PROMPTS = ["def quicksort(", "import os\n", "class Node:"]
TOKENS = 16


@pytest.fixture(scope="module")
def texts(model):
    """One by one: others of these tests run one request too, and share its programs."""
    return [dj.generate(model, prompt, dj.SamplingParams(max_tokens=TOKENS)).text for prompt in PROMPTS]


@pytest.fixture
def example(model, monkeypatch):
    """Imports one; what it loads is the model that is there."""
    monkeypatch.setattr(dj, "load", lambda *_, **__: model)

    def of(name):
        spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return of


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_client(model, example, texts, capsys):
    pytest.importorskip("openai")
    uvicorn = pytest.importorskip("uvicorn")
    app = make_app(model, ServeOptions(names=("pair",)))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    url = ["--url", f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1", "--max-tokens", str(TOKENS)]
    try:
        client = example("client")
        client.main([PROMPTS[0], *url])
        client.main([*PROMPTS[:2], *url])
    finally:
        server.should_exit = True
        thread.join(20)
    each = "".join(f"--- {prompt}\n{text}\n" for prompt, text in zip(PROMPTS[:2], texts, strict=False))
    assert capsys.readouterr().out == f"{texts[0]}\n{each}"


def test_batch_jsonl(example, texts, tmp_path, capsys):
    batch, questions, answers = example("batch_jsonl"), tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    questions.write_text("".join(json.dumps({"prompt": prompt, "mine": 1}) + "\n" for prompt in PROMPTS))
    answers.write_text('{"line": 1, "text": "\u2028"}\n{"line": 0}\n{"line": 2, "te')  # of a run that was broken off
    assert batch.main([str(questions), str(answers), "--max-tokens", str(TOKENS)]) == 1
    rows = {row["line"]: row for row in batch.rows_of(answers.read_text(encoding="utf-8"))}
    told = {"line": 2, "prompt": PROMPTS[2], "mine": 1, "text": texts[2], "finish_reason": "length", "tokens": TOKENS}
    assert rows[2] == told
    assert batch.main([str(questions), str(answers)]) == 0
    with pytest.raises(SystemExit):
        batch.main([str(questions), str(questions)])
    assert "both files must be JSON lines" in capsys.readouterr().err


def test_chat_loop(example, monkeypatch, capsys):
    said = ["hello", "again"]

    def asked(_):
        if not said:
            raise EOFError
        return said.pop(0)

    monkeypatch.setattr("builtins.input", asked)
    chat = example("chat_loop").main(["it", "--max-tokens", "8"])
    assert [message["content"] for message in chat.history[::2]] == ["hello", "again"]
    assert capsys.readouterr().out == "".join(f"{message['content']}\n" for message in chat.history[1::2])


def test_async_service(model, example, texts):
    service = example("async_service")

    async def several():
        ready = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(service.serve(model, 0, TOKENS, ready))
        port = await ready

        async def ask(prompt):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(prompt.encode() + b"\n")
            text = (await reader.readuntil(b"\0"))[:-1].decode()
            writer.close()
            await writer.wait_closed()
            return text

        found = [await ask(prompt) for prompt in (PROMPTS[0], PROMPTS[2])]
        too_long = await ask("x " * 400)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        return found, too_long

    found, too_long = asyncio.run(several())
    assert found == [texts[0], texts[2]]
    assert too_long.startswith("error: ")
