"""What a reader gets, one that leaves at the worst moment too; and what a server leaves behind."""

import asyncio
import gc
import json
import os
import signal
import threading
from typing import Any

import pytest

import dflash_jax as dj
from dflash_jax.compile.tracing import FROZEN


def scope() -> dict[str, Any]:
    return {
        "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"",
        "root_path": "", "scheme": "http", "headers": [], "client": ("127.0.0.1", 1), "server": ("testserver", 80),
        "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
    }  # fmt: skip


def test_what_comes_together_is_one_write(app: Any, model: dj.Model) -> None:
    """The last piece, the usage and the end of the stream among it."""
    options = {"max_tokens": 4, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    body, sent = json.dumps({"prompt": "def f(", **options}).encode(), list[Any]()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope(), receive, send))
    start, *bodies = sent
    assert b"content-length" not in dict(start["headers"])
    assert [one["more_body"] for one in bodies] == [True] * (len(bodies) - 1) + [False]
    last = [event.removeprefix(b"data: ") for event in bodies[-1]["body"].split(b"\n\n")]
    assert last[-2:] == [b"[DONE]", b""]
    piece, usage = (json.loads(event) for event in last[:-2])
    assert piece["choices"][0]["finish_reason"] == "length"
    assert usage["usage"]["completion_tokens"] == 4


def test_who_leaves_before_the_first_chunk_leaves_nothing(app: Any, model: dj.Model) -> None:
    """The first pieces are there, so the answer begins, and its reader has gone: nothing of it is ever read."""
    body = json.dumps({"prompt": "def f(", "max_tokens": 4, "temperature": 0, "stream": True}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}, None]

    async def receive() -> Any:
        message = messages.pop(0) if messages else {"type": "http.disconnect"}
        if message is None:  # whoever looks while the first pieces are made sees nobody leave
            await asyncio.Event().wait()
        return message

    async def send(_: Any) -> None:
        await asyncio.sleep(0)

    asyncio.run(app(scope(), receive, send))
    assert not messages
    assert app.front.live == 0
    assert not app.front.engine._runs


def test_what_is_there_with_the_model_is_no_garbage_until_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_jax.serving import server
    from dflash_jax.serving.app import ServeOptions

    gc.unfreeze()
    frozen, unfreeze, nothing = list[int](), gc.unfreeze, lambda: None
    monkeypatch.setattr(gc, "unfreeze", lambda: (frozen.append(gc.get_freeze_count()), unfreeze()))
    server.serve(nothing, ServeOptions(), host="127.0.0.1", port=0)  # type: ignore[arg-type]
    assert frozen[0] > 10_000
    assert gc.get_freeze_count() < FROZEN


def test_a_model_that_comes_after_the_end_freezes_nothing() -> None:
    from dflash_jax.serving import server
    from dflash_jax.serving.app import ServeOptions

    gc.unfreeze()
    ended, loading = threading.Event(), list[threading.Thread]()

    def load() -> None:
        loading.append(threading.current_thread())
        os.kill(os.getpid(), signal.SIGTERM)
        ended.wait(20)

    server.serve(load, ServeOptions(), host="127.0.0.1", port=0)  # type: ignore[arg-type]
    ended.set()
    loading[0].join(20)
    assert not loading[0].is_alive()
    assert gc.get_freeze_count() < FROZEN
