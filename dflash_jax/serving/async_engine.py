"""Generation from asyncio. A thread of the engine's own steps for all loops; each caller awaits its own pieces."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypedDict, Unpack, cast, overload

from dflash_jax.engine.requests import Request, Update
from dflash_jax.errors import DFlashError
from dflash_jax.generation import (
    GENERATE_CYCLES,
    STREAM_CYCLES,
    Params,
    Writer,
    check_cycles,
    check_flags,
    check_single,
    make_requests,
)
from dflash_jax.model import Model
from dflash_jax.sampling_params import SamplingParams
from dflash_jax.serving.feed import Bell, Feed
from dflash_jax.text.completion import Completion, Piece
from dflash_jax.text.prompts import Prompt, is_single

# Tokenizers and templates keep a loop for about a millisecond with so many characters; longer texts go to a thread.
INLINE_CHARACTERS = 8192


class AsyncOptions(TypedDict, total=False):
    """Keywords of `agenerate`."""

    draft: bool
    chat: bool
    chat_options: Mapping[str, Any] | None


class AsyncRun:
    """One caller's requests. Iterating yields their pieces; `close` ends those that go on, and may be called from any thread."""

    def __init__(self, model: Model, requests: Sequence[Request], bell: Bell, *, draft: bool, cycles: int):
        self._engine, self.feed = model.engine, Feed(bell)
        self._pieces: list[Piece] = []
        scheduler = self._engine.scheduler
        tickets = scheduler.tickets(len(requests))
        self._writers = {ticket: Writer(model, one) for ticket, one in zip(tickets, requests, strict=True)}
        self._open = set(tickets)  # as this side sees it
        self._left = len(tickets)
        drafts = draft and model.draft is not None
        scheduler.submit_all(dict(zip(tickets, requests, strict=True)), self._put, draft=drafts, cycles=cycles)
        self._engine.driver.wake(self._engine)

    def __aiter__(self) -> "AsyncRun":
        return self

    async def __anext__(self) -> Piece:
        while not self._pieces:
            if not self._left:
                raise StopAsyncIteration
            self._pieces = await self.take()
        return self._pieces.pop(0)

    async def take(self, patience: float | None = None) -> list[Piece]:
        """Pieces that have come, at most one of each prompt, once there are some; none after so many seconds of `patience`. Raises
        what ended a request early."""
        try:
            pieces = await self.feed.take(patience)
        except BaseException:
            self.close()
            raise
        self._left -= sum(piece.completion is not None for piece in pieces)
        return pieces

    @property
    def ended(self) -> bool:
        """Whether every prompt's last piece was taken."""
        return not self._left

    def close(self) -> None:
        """Ends what goes on; pages are free after the call of the device that is under way."""
        for ticket in list(self._open):
            self._engine.abort(ticket)
        self._open.clear()

    def _put(self, ticket: int, what: Update | Exception) -> Callable[[], None] | None:
        """The scheduler's thread: text is made here, as a stop string has to end its request at once."""
        writer = self._writers[ticket]
        if ticket not in self._open or writer.finished:
            return None
        if isinstance(what, Exception):
            self._open.discard(ticket)
            self.feed.put(what)()
            return None
        if what.start < len(writer.tokens):  # sent again after an interrupt
            return None
        piece = writer.write(what)
        if writer.stopped_by_text:
            self._engine.abort(ticket)
        if writer.finished:
            self._open.discard(ticket)
        # A first piece is what its user waits for longest, and who has the last one may ask again.
        return self.feed.put(piece, first=what.first or writer.finished)


class AsyncEngine:
    """Generates with a model from coroutines: all of a process, of several loops too, and threads beside them, share one batch.

    `async with AsyncEngine(model) as engine` ends what still goes on as it is left. A thread steps while there are requests and
    ends by itself. Cancelling a task that awaits a result ends its requests; their pages are free two calls of the device later.
    """

    def __init__(self, model: Model):
        check_flags(model, True, False, None)
        self.model = model
        self._bell: tuple[asyncio.AbstractEventLoop, Bell] | None = None
        self._runs: set[AsyncRun] = set()
        self._closed = False

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self, why: str = "the engine was closed: make another AsyncEngine") -> None:
        """Ends every request that goes on, with a DFlashError that says why. Nothing can be asked for afterwards."""
        self._closed = True
        for run in list(self._runs):
            run.close()
            run.feed.put(DFlashError(why))()
        self._runs.clear()

    @overload
    async def generate(  # pyright: ignore[reportOverlappingOverload]
        self, prompts: Prompt, params: Params = None, **options: Unpack[AsyncOptions]
    ) -> Completion: ...
    @overload
    async def generate(
        self, prompts: Sequence[Prompt], params: Params = None, **options: Unpack[AsyncOptions]
    ) -> list[Completion]: ...
    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        draft: bool = True,
        chat: bool = False,
        chat_options: Mapping[str, Any] | None = None,
    ) -> Completion | list[Completion]:
        """`dflash_jax.generate` for coroutines; see there."""
        options: AsyncOptions = {"draft": draft, "chat": chat, "chat_options": chat_options}
        check_single(params, single=is_single(prompts))
        done: dict[int, Completion] = {}
        async with aclosing(self.stream(prompts, params, **options, cycles=GENERATE_CYCLES)) as pieces:
            async for piece in pieces:
                if piece.completion is not None:
                    done[piece.index] = piece.completion
        return done[0] if is_single(prompts) else [done[place] for place in range(len(done))]

    async def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        draft: bool = True,
        chat: bool = False,
        chat_options: Mapping[str, Any] | None = None,
        cycles: int = STREAM_CYCLES,
    ) -> AsyncGenerator[Piece]:
        """`dflash_jax.stream` for coroutines. Wrong arguments are errors at the first piece. What a slow reader has not read yet
        comes as one piece of each prompt. Leave it by `aclose` (`contextlib.aclosing`), so that its requests end at once."""
        cycles = check_cycles(cycles)
        draft, chat = check_flags(self.model, draft, chat, chat_options)
        single = is_single(prompts)
        listed = cast(list[Any], [prompts] if single else list(prompts))
        requests = await self.prepare(listed, params, chat=chat, chat_options=chat_options)
        run = self.submit(requests, draft=draft, cycles=cycles)
        try:
            async for piece in run:
                yield piece
        finally:
            self.release(run)

    async def prepare(
        self, prompts: Sequence[Any], params: Params = None, *, chat: bool = False, chat_options: Any = None
    ) -> list[Request]:
        """Requests of prompts, numbered in order. Long texts, all messages and grammars are seen to in another thread."""

        def make() -> list[Request]:
            requests = make_requests(self.model, prompts, params, chat=chat, chat_options=chat_options)
            for request in requests:
                self.model.engine.check(request)
            return requests

        long = sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) > INLINE_CHARACTERS
        templated = chat or any(isinstance(prompt, Sequence) and not isinstance(prompt, str) for prompt in prompts)
        listed = [params] if isinstance(params, SamplingParams) else params or ()
        structured = any(getattr(one, "structured", None) is not None for one in listed)
        return await asyncio.to_thread(make) if long or templated or structured else make()

    def submit(self, requests: Sequence[Request], *, draft: bool = True, cycles: int = STREAM_CYCLES) -> AsyncRun:
        """Queues what `prepare` made, whose numbers pieces carry. `release` the run when it has been read or is not wanted."""
        if self._closed:
            raise DFlashError("the engine was closed: make another AsyncEngine")
        run = AsyncRun(self.model, requests, self._bell_of(asyncio.get_running_loop()), draft=draft, cycles=cycles)
        self._runs.add(run)
        return run

    def release(self, run: AsyncRun) -> None:
        """Ends what goes on of a run, which nobody will read any more."""
        run.close()
        self._runs.discard(run)

    def _bell_of(self, loop: asyncio.AbstractEventLoop) -> Bell:
        if self._bell is None or self._bell[0] is not loop:
            scheduler = self.model.engine.scheduler
            self._bell = loop, Bell(loop, lambda: scheduler.calling)
        return self._bell[1]


@overload
async def agenerate(  # pyright: ignore[reportOverlappingOverload]
    model: Model, prompts: Prompt, params: Params = None, **options: Unpack[AsyncOptions]
) -> Completion: ...
@overload
async def agenerate(
    model: Model, prompts: Sequence[Prompt], params: Params = None, **options: Unpack[AsyncOptions]
) -> list[Completion]: ...
async def agenerate(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    params: Params = None,
    *,
    draft: bool = True,
    chat: bool = False,
    chat_options: Mapping[str, Any] | None = None,
) -> Completion | list[Completion]:
    """`generate` for coroutines: tasks, loops and threads that share a model share its batch. Cancelling the task that awaits it
    ends its prompts and frees their pages."""
    options: AsyncOptions = {"draft": draft, "chat": chat, "chat_options": chat_options}
    return await AsyncEngine(model).generate(prompts, params, **options)


async def astream(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    params: Params = None,
    *,
    draft: bool = True,
    chat: bool = False,
    chat_options: Mapping[str, Any] | None = None,
    cycles: int = STREAM_CYCLES,
) -> AsyncGenerator[Piece]:
    """`stream` for coroutines. Pieces that nobody has read yet are one for each prompt. Closing it ends its prompts: leave a loop
    over it early through `contextlib.aclosing`.

    Raises:
      PromptError, CapacityError, ParameterError, TokenizerError: at the first piece.
    """
    options: AsyncOptions = {"draft": draft, "chat": chat, "chat_options": chat_options}
    async with aclosing(AsyncEngine(model).stream(prompts, params, **options, cycles=cycles)) as pieces:
        async for piece in pieces:
            yield piece
