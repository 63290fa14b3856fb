"""Middleware of every request: a name for the log, the check of its host, and the check of its key."""

import hashlib
import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from dflash_jax.serving.problems import Problem, dumped

GUARDED = ("/v1", "/tokenize", "/detokenize", "/tokenizer_info")
HERE = ("localhost", "127.0.0.1", "[::1]", "testserver")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Gate:
    """An ASGI application around another one. Not one of Starlette's middleware of functions: those put a task and a queue between
    a stream and its reader.

    Args:
      keys: of which a guarded path needs one; none needs none.
      here: whether only this machine's names are answered to: a page of another site, to whose name a browser was told this
        machine's address, is refused.
    """

    def __init__(self, app: Callable[..., Any], keys: Sequence[str] = (), *, here: bool = False):
        self.app, self.here = app, here
        self._keys = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get("x-request-id", "")
        scope["request_id"] = name = given if _NAME.fullmatch(given) else secrets.token_hex(16)

        async def named(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name.encode())]
            await send(message)

        if (problem := self._refused(scope, headers)) is None:
            await self.app(scope, receive, named)
            return
        body = dumped(problem.body())
        lines = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        lines += [(key.lower().encode(), value.encode()) for key, value in problem.headers.items()]
        await named({"type": "http.response.start", "status": problem.status, "headers": lines})
        await named({"type": "http.response.body", "body": body})

    def _refused(self, scope: Any, headers: dict[str, str]) -> Problem | None:
        host = headers.get("host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if self.here and host and name.lower() not in HERE:
            return Problem(
                403, f"this server answers to localhost alone, not to {host!r:.80}: give it a key, or --host"
            )
        if not self._keys or scope["method"] == "OPTIONS" or not self._guarded(_routed(scope)):
            return None
        kind, _, key = headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("latin-1", "replace")).digest()
        # All are compared: how long it takes says nothing of which one was nearly right.
        known = [secrets.compare_digest(digest, one) for one in self._keys]
        if kind.lower() == "bearer" and any(known):
            return None
        return Problem(
            401, "a key is needed: Authorization: Bearer KEY" if not key else "this key is not known",
            code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
        )  # fmt: skip

    def _guarded(self, path: str) -> bool:
        return any(path == one or path.startswith(f"{one}/") for one in GUARDED)


def _routed(scope: Any) -> str:
    """The path that routes are told apart by: without that of the application which this one is mounted in."""
    path, root = scope["path"], scope.get("root_path", "")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path
