"""A reader that leaves at the worst moment."""

import asyncio
import json
from typing import Any

import dflash_jax as dj


def test_who_leaves_before_the_first_chunk_leaves_nothing(app: Any, model: dj.Model) -> None:
    """The first pieces are there, so the answer begins, and its reader has gone: nothing of it is ever read."""
    body = json.dumps({"prompt": "def f(", "max_tokens": 4, "temperature": 0, "stream": True}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}, None]
    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"",
        "root_path": "", "scheme": "http", "headers": [], "client": ("127.0.0.1", 1), "server": ("testserver", 80),
        "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
    }  # fmt: skip

    async def receive() -> Any:
        message = messages.pop(0) if messages else {"type": "http.disconnect"}
        if message is None:  # whoever looks while the first pieces are made sees nobody leave
            await asyncio.Event().wait()
        return message

    async def send(_: Any) -> None:
        await asyncio.sleep(0)

    asyncio.run(app(scope, receive, send))
    assert not messages
    assert app.front.live == 0
    assert not app.front.engine._runs
