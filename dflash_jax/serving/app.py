"""The server's routes over an `AsyncEngine`: `make_app` gives an ASGI application for any server, or to mount in another one."""
# pyright: reportMissingImports=false

import asyncio
import importlib.metadata
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from dflash_jax.errors import DFlashError, PromptError
from dflash_jax.generation import prompted
from dflash_jax.model import Model
from dflash_jax.options import as_integer
from dflash_jax.serving.answers import Answer
from dflash_jax.serving.async_engine import AsyncEngine, AsyncRun
from dflash_jax.serving.bodies import Ask, check_names, completion_ask, flag, parsed, requests_of, shown
from dflash_jax.serving.chat_answers import ChatAnswer
from dflash_jax.serving.gate import Gate
from dflash_jax.serving.metrics import Metrics
from dflash_jax.serving.problems import Problem, dumped, problem_of, unavailable
from dflash_jax.serving.response_answers import ResponseAnswer
from dflash_jax.serving.responses import ResponseAsk, response_ask
from dflash_jax.serving.tools import ChatAsk, chat_with_tools
from dflash_jax.text.answers.choice import ReasoningParser, ToolParser
from dflash_jax.text.completion import Piece

KEEP_ALIVE_S = 15.0  # of silence, after which a stream says that it is alive
STALLED_S = 60.0  # without a step while there is work: longer than any program compiles
MOST_FAILURES = 3  # errors of the device in a row
CLIENT_LEFT = 499
INLINE_BODY = 8192  # bytes: what is larger is read and made token ids in another thread
log = logging.getLogger("dflash_jax.serve")


@dataclass(frozen=True)
class ServeOptions:
    """Options of a server.

    Attributes:
      names: what the model is called; the first is told, all are taken.
      keys: any of them opens what is guarded; none needs none.
      max_queue: requests that wait for a slot, at most.
      max_body_bytes: of a request.
      request_timeout: seconds that an answer may take; None for any.
      origins: of browsers that may ask, by CORS; "*" is all.
      here: whether it is reached from this machine alone.
      metrics: whether there is `/metrics`.
      model_defaults: whether what the model's `generation_config.json` says of sampling holds where a request says nothing.
      tool_parser: the form of calls of tools in answers; "auto" is the chat template's.
      reasoning_parser: the form of thoughts in answers, likewise.
      default_max_tokens: of a chat's answer that names no number, at most; None for what the model has room for.
      request_metrics: whether every answer has its times and acceptance; else those that ask for it.
    """

    names: Sequence[str] = ("dflash",)
    keys: Sequence[str] = ()
    max_queue: int = 256
    max_body_bytes: int = 8 << 20
    request_timeout: float | None = None
    origins: Sequence[str] = ()
    here: bool = False
    metrics: bool = True
    model_defaults: bool = True
    tool_parser: ToolParser = "auto"
    reasoning_parser: ReasoningParser = "auto"
    default_max_tokens: int | None = None
    request_metrics: bool = False


@dataclass
class Front:
    """A server's state.

    Attributes:
      engine: None until the model is there.
      live: choices that were admitted and have not ended.
      draining: whether no request is taken any more.
      failures: errors of the device since the last answer.
    """

    options: ServeOptions
    engine: AsyncEngine | None = None
    metrics: Metrics | None = None
    live: int = 0
    draining: bool = False
    failures: int = 0
    created: int = field(default_factory=lambda: int(time.time()))
    _stepped: tuple[object, float] = (None, 0.0)

    def start(self, model: Model) -> None:
        """Answers from here on."""
        self.metrics = Metrics(model, self.options.names[0])
        self.engine = AsyncEngine(model)

    def ready(self) -> AsyncEngine:
        """The engine. Raises Problem while there is none for new requests."""
        if self.engine is None:
            raise unavailable("the model is being loaded")
        if self.draining:
            raise unavailable("the server is shutting down")
        return self.engine

    @property
    def defaults(self) -> Mapping[str, float | int]:
        """Defaults of sampling fields that a request leaves out."""
        return self.ready().model.sampling_defaults if self.options.model_defaults else {}

    @property
    def healthy(self) -> bool:
        if self.engine is None or self.failures >= MOST_FAILURES:
            return False
        stats, now = self.engine.model.engine.scheduler.stats, time.monotonic()
        if stats is not self._stepped[0] or not self.live:  # replaced after each step
            self._stepped = stats, now
        return now - self._stepped[1] < STALLED_S

    def admit(self, choices: int) -> None:
        """Counts choices in. Raises Problem where as many wait as may."""
        model = self.ready().model
        room = model.engine.max_batch + self.options.max_queue
        if choices > room:
            raise Problem(400, f"at most {room} choices of one request are served, got {choices}", param="n")
        if self.live + choices > room:
            if self.metrics is not None:
                self.metrics.rejected("queue_full")
            raise Problem(429, "the queue is full: try again", code="queue_full", headers={"Retry-After": "1"})
        self.live += choices


def make_app(model: Model | None, options: ServeOptions | None = None) -> "ServedGate":
    """An ASGI application that serves `model`.

    Args:
      model: None for one that is loaded still: `app.front.start(model)` gives it later.
    """
    front = Front(options or ServeOptions())
    routes = Routes(front)
    app = Starlette(
        routes=[
            Route("/v1/models", routes.models),
            Route("/v1/models/{name:path}", routes.model),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
            Route("/v1/responses", routes.responses, methods=["POST"]),
            Route("/tokenize", routes.tokenize, methods=["POST"]),
            Route("/detokenize", routes.detokenize, methods=["POST"]),
            Route("/tokenizer_info", routes.tokenizer_info),
            Route("/health", routes.health),
            Route("/ready", routes.readiness),
            Route("/version", routes.version),
            *([Route("/metrics", routes.figures)] if front.options.metrics else []),
        ],
        exception_handlers={Problem: _told, DFlashError: _told, HTTPException: _http, Exception: _bug},
    )
    if front.options.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(front.options.origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    gate = ServedGate(app, front.options.keys, here=front.options.here and not front.options.keys)
    gate.front = front
    if model is not None:
        front.start(model)
    return gate


class ServedGate(Gate):
    """The application that `make_app` gives.

    Attributes:
      front: the server's state.
    """

    front: Front


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dumped(value), status, headers, media_type="application/json")


async def _told(_: Request, error: Exception) -> Response:
    problem = problem_of(error)
    return _json(problem.body(), problem.status, problem.headers)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, allowed = request.url.path, (error.headers or {}).get("Allow", "another method")
    taken = ", ".join(sorted(allowed.split(", ")))  # they come out of a set
    said = {
        404: f"there is no path {path[:80]}: there are /v1/completions, /v1/chat/completions, /v1/responses and /v1/models",
        405: f"{path} takes {taken}, got {request.method}",
    }
    problem = Problem(error.status_code, said.get(error.status_code, error.detail), headers=error.headers)
    return _json(problem.body(), problem.status, problem.headers)


async def _bug(request: Request, error: Exception) -> Response:
    log.error("request %s failed: %r", request.scope.get("request_id"), error)
    return await _told(request, error)


class Routes:
    """Handlers of the server's paths."""

    def __init__(self, front: Front):
        self.front = front

    # Answers.

    async def completions(self, request: Request) -> Response:
        """`/v1/completions`."""
        body = await self._body(request)
        return await self._answer(request, lambda: completion_ask(parsed(body), self.front.defaults), body, chat=False)

    async def chat(self, request: Request) -> Response:
        """`/v1/chat/completions`."""
        body, tokenizer = await self._body(request), self.front.ready().model.tokenizer
        return await self._answer(
            request,
            lambda: chat_with_tools(parsed(body), tokenizer, self.front.defaults, self.front.options.tool_parser),
            body,
            chat=True,
        )

    async def responses(self, request: Request) -> Response:
        """`/v1/responses`."""
        body, tokenizer = await self._body(request), self.front.ready().model.tokenizer
        return await self._answer(
            request,
            lambda: response_ask(parsed(body), tokenizer, self.front.defaults, self.front.options.tool_parser),
            body,
            chat=True,
        )

    async def _answer(self, request: Request, read: Callable[[], Ask], body: bytes, *, chat: bool) -> Response:
        engine, started = self.front.ready(), time.perf_counter()
        self._check_name(parsed(body).get("model"))
        ask = read()
        if chat and ask.max_tokens is None:
            ask = replace(ask, max_tokens=self.front.options.default_max_tokens)
        if self.front.options.request_metrics:
            ask = replace(ask, metrics=True)
        choices = len(ask.prompts) * ask.n
        self.front.admit(choices)
        call = None
        try:
            call = await self._begin(engine, ask, chat=chat, long=len(body) > INLINE_BODY)
            call.started = started
            return await (self._stream(request, call) if ask.stream else self._whole(request, call))
        except BaseException as error:
            if call is not None:
                call.end()
            else:
                self.front.live -= choices
            if isinstance(error, ClientDisconnect):
                return Response(status_code=CLIENT_LEFT)
            raise

    async def _begin(self, engine: AsyncEngine, ask: Ask, *, chat: bool, long: bool) -> "Call":
        model, name = engine.model, self.front.options.names[0]
        long = long or chat or ask.params.structured is not None
        made = await asyncio.to_thread(requests_of, model, ask) if long else requests_of(model, ask)
        answer = self._form(ask, model, made[0].prompt, chat=chat, name=name)
        answer.drafts = 0 if model.draft is None else model.draft.num_drafts
        for one in made:
            answer.prompt_seen(one.index, one.prompt)
            one.grammar = answer.grammar_of(one.grammar)
        self.front.ready()  # it may have begun to shut down meanwhile
        return Call(self.front, engine, engine.submit(made), answer, len(made))

    def _form(self, ask: Ask, model: Model, prompt: Sequence[int], *, chat: bool, name: str) -> Answer:
        if not isinstance(ask, ChatAsk) or model.tokenizer is None:
            return Answer(ask, model.tokenizer, chat=chat, model=name)
        options, made = self.front.options, ResponseAnswer if isinstance(ask, ResponseAsk) else ChatAnswer
        return made(
            ask,
            model.tokenizer,
            prompt,
            model=name,
            tool_parser=options.tool_parser,
            reasoning_parser=options.reasoning_parser,
        )

    async def _whole(self, request: Request, call: "Call") -> Response:
        async def work() -> None:
            while not call.run.ended:
                for piece in await call.take():
                    call.answer.note(piece)

        await call.unless_gone(request, call.within(work()))
        call.end()
        return _json(call.answer.whole())

    async def _stream(self, request: Request, call: "Call") -> Response:
        # The first pieces before the status: what is refused or fails until then is an answer of its own.
        first = await call.unless_gone(request, call.within(call.take()))
        return _Stream(request, call, first)

    # Tokens.

    async def tokenize(self, request: Request) -> Response:
        """`/tokenize`: of a text, or of messages through the chat template."""
        model, body = self.front.ready().model, parsed(await self._body(request))
        self._check_name(body.get("model"))
        tokenizer = model.tokenizer
        if tokenizer is None:
            raise PromptError("this model has no tokenizer.json: add the file to its folder, or ask with token ids")
        named = flag(body, "return_token_strs")
        if "messages" in body:
            ask = chat_with_tools({name: one for name, one in body.items() if name != "return_token_strs"}, tokenizer)
            told = {"chat": False, "chat_options": ask.chat_options}
            ids, _ = await asyncio.to_thread(prompted, model, ask.prompts[0], **told)
        else:
            check_names(body, ("model", "prompt", "add_special_tokens", "return_token_strs"))
            text, special = body.get("prompt"), flag(body, "add_special_tokens", default=True)
            if not isinstance(text, str):
                raise Problem(400, f"prompt must be a text, got {shown(text)}", param="prompt", code="invalid_value")
            ids = await asyncio.to_thread(tokenizer.encode, text, special=special)
        told = [tokenizer.token_bytes.of(token).decode("utf-8", "replace") for token in ids] if named else None
        limit = model.engine.max_model_len
        return _json({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": told})

    async def detokenize(self, request: Request) -> Response:
        """`/detokenize`."""
        model, body = self.front.ready().model, parsed(await self._body(request))
        self._check_name(body.get("model"))
        check_names(body, ("model", "tokens"))
        tokens = body.get("tokens")
        known = range(model.target.vocab_size)
        if not isinstance(tokens, list) or not all(as_integer(token) in known for token in tokens):
            message = f"tokens must be a list of token ids below {len(known)}, got {shown(tokens)}"
            raise Problem(400, message, param="tokens", code="invalid_value")
        if model.tokenizer is None:
            raise PromptError("this model has no tokenizer.json: add the file to its folder, or ask with token ids")
        return _json({"prompt": model.tokenizer.decode(tokens)})

    async def tokenizer_info(self, _: Request) -> Response:
        """`/tokenizer_info`: special tokens and the chat template."""
        tokenizer = self.front.ready().model.tokenizer
        if tokenizer is None:
            raise Problem(404, "this model has no tokenizer")
        special = {name: tokenizer.special.get(name) for name in ("bos_token", "eos_token", "pad_token")}
        return _json({"tokenizer_class": "PreTrainedTokenizerFast", **special, "chat_template": tokenizer.template})

    # About itself.

    async def models(self, _: Request) -> Response:
        """`/v1/models`."""
        return _json({"object": "list", "data": [self._card(name) for name in self.front.options.names]})

    async def model(self, request: Request) -> Response:
        """`/v1/models/{id}`; an id may hold slashes."""
        name = request.path_params["name"]
        self._check_name(name)
        return _json(self._card(name))

    async def health(self, _: Request) -> Response:
        """Whether it can answer at all."""
        if self.front.healthy:
            return _json({"status": "ok"})
        return _json({"status": "loading" if self.front.engine is None else "stalled"}, 503)

    async def readiness(self, _: Request) -> Response:
        """Whether new requests are taken."""
        self.front.ready()
        return _json({"status": "ready"})

    async def version(self, _: Request) -> Response:
        """Version of this package."""
        return _json({"version": importlib.metadata.version("dflash-jax")})

    async def figures(self, _: Request) -> Response:
        """`/metrics`."""
        if self.front.metrics is None:
            raise unavailable("the model is being loaded")
        return Response(self.front.metrics.text(), media_type="text/plain; version=0.0.4")

    def _card(self, name: str) -> dict[str, Any]:
        limit = self.front.ready().model.engine.max_model_len
        return {
            "id": name, "object": "model", "created": self.front.created, "owned_by": "dflash_jax",
            "root": self.front.options.names[0], "max_model_len": limit,
        }  # fmt: skip

    def _check_name(self, name: Any) -> None:
        if name is not None and name not in list(self.front.options.names):
            named = shown(name)[1:-1] if isinstance(name, str) else shown(name)
            message = f"The model `{named}` does not exist: this server has {self.front.options.names[0]}"
            raise Problem(404, message, param="model", code="model_not_found")

    async def _body(self, request: Request) -> bytes:
        most, parts, size = self.front.options.max_body_bytes, list[bytes](), 0
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise Problem(
                    413, f"a body may have {most:,} bytes, and this one has more", headers={"Connection": "close"}
                )
            parts.append(part)
        return b"".join(parts)


@dataclass
class Call:
    """A request that is being answered, from its admission to its end."""

    front: Front
    engine: AsyncEngine
    run: AsyncRun
    answer: Answer
    choices: int
    started: float = field(default_factory=time.perf_counter)
    heard: float | None = None
    _ended: bool = False
    _leaving: asyncio.Task[None] | None = None

    async def take(self, patience: float | None = None) -> list[Piece]:
        """Pieces that have come, counted; none after so many seconds of `patience`."""
        try:
            pieces = await self.run.take(patience)
        except DFlashError:
            raise
        except Exception:
            self.front.failures += 1
            raise
        if not pieces:
            return []
        self.front.failures = 0
        now, metrics = time.perf_counter(), self.front.metrics
        for piece in pieces:
            if metrics is not None and piece.completion is not None:
                metrics.answered(piece.completion, now - self.started)
        if metrics is not None and self.heard is not None:
            metrics.between.observe(now - self.heard)
        self.heard = now
        return pieces

    async def within[T](self, work: Awaitable[T]) -> T:
        """Awaits work for as long as an answer may take."""
        limit = self.front.options.request_timeout
        try:
            async with asyncio.timeout(limit):
                return await work
        except TimeoutError:
            raise _too_long(limit) from None

    async def unless_gone[T](self, request: Request, work: Awaitable[T]) -> T:
        """Awaits `work`. Raises ClientDisconnect, with the work cancelled, where the client leaves before that."""
        working = asyncio.ensure_future(work)
        self._leaving = self._leaving or asyncio.create_task(_gone(request))
        try:
            await asyncio.wait({working, self._leaving}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise ClientDisconnect
        finally:
            if not working.done():
                working.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await working

    def patience(self) -> float:
        """Seconds to wait for the next pieces before something is said."""
        limit = self.front.options.request_timeout
        left = KEEP_ALIVE_S if limit is None else self.started + limit - time.perf_counter()
        return max(0.0, min(KEEP_ALIVE_S, left))

    def check_time(self) -> None:
        """Raises Problem once the answer has taken as long as it may."""
        limit = self.front.options.request_timeout
        if limit is not None and time.perf_counter() - self.started >= limit:
            raise _too_long(limit)

    def end(self) -> None:
        """Ends what goes on, once."""
        if not self._ended:
            self._ended = True
            if self._leaving is not None:
                self._leaving.cancel()
            self.front.live -= self.choices
            self.engine.release(self.run)


class _Stream(Response):
    """A call's pieces as events: what came together is one write. The call ends with it, whatever ends it."""

    def __init__(self, request: Request, call: Call, pieces: list[Piece]):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(None, headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._request, self._call, self._pieces = request, call, pieces

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self._call.unless_gone(self._request, self._write(send))
        except ClientDisconnect:
            pass
        finally:
            self._call.end()

    async def _write(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        answer = self._call.answer
        try:
            more = True
            async for more, data in self._events():
                await send({"type": "http.response.body", "body": data, "more_body": more})
        except Exception as error:
            problem = problem_of(error, begun=True)
            if problem.status == 500:
                log.error("a stream failed: %r", error)
            data = answer.framed(answer.failed(problem)) + answer.END
            await send({"type": "http.response.body", "body": data, "more_body": False})

    async def _events(self) -> AsyncGenerator[tuple[bool, bytes]]:
        """Bytes to write, each with whether more follow."""
        call, answer, pieces = self._call, self._call.answer, self._pieces
        chunks = answer.opening()
        while True:
            chunks += [chunk for piece in pieces for chunk in answer.chunks(piece)]
            if call.run.ended:
                break
            if chunks:
                yield True, b"".join(map(answer.framed, chunks))
            if not (pieces := await call.take(call.patience())):
                call.check_time()
                yield True, b": keep-alive\n\n"
            chunks = []
        yield False, b"".join(map(answer.framed, [*chunks, *answer.closing()])) + answer.END


def _too_long(limit: float | None) -> Problem:
    message = f"the answer took longer than the {limit} seconds that it may"
    return Problem(504, message, code="request_timeout", headers={"x-should-retry": "false"})


async def _gone(request: Request) -> None:
    """Returns once the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
