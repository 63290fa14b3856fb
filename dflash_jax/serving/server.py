"""One process that serves one model: it opens its port, loads, answers, and drains before it ends."""
# pyright: reportMissingImports=false

import asyncio
import errno
import gc
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn

from dflash_jax.errors import ParameterError
from dflash_jax.model import Model
from dflash_jax.serving.app import Front, ServeOptions, make_app

SWITCH_S = (
    0.0005  # between threads of Python: a cycle takes 3 ms, and its thread must not wait 5 for the one that writes JSON
)
BACKLOG = 2048  # connections that wait to be taken, as uvicorn has it
KEEP_ALIVE_S = 75  # of idle connections: longer than clients' pools keep theirs
LEAVE_S = 2.0  # for streams to write their last chunk once they were ended
POLL_S = 0.05


class _Uvicorn(uvicorn.Server):
    """A server that leaves signals to `serve`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(
    load: Callable[[], Model], options: ServeOptions, *, host: str, port: int, shutdown_timeout: float = 30.0,
    root_path: str = "", access_log: bool = False, opened: Callable[[int], None] = lambda _: None,
    ready: Callable[[Model], None] = lambda _: None,
) -> None:  # fmt: skip
    """Serves until SIGTERM or SIGINT: no request is taken then, those that run have `shutdown_timeout` seconds, and a second signal
    ends them at once. What there is once the model is loaded is no garbage until the server ends: to look through it, as Python's
    collector does now and then, takes as long as dozens of cycles.

    Args:
      load: gives the model; called in a thread, while the port is open and answers that it is loading.
      port: 0 takes one that is free.
      opened: called with the port's number once it is open, before anything is loaded.
      ready: called with the model once it is served.

    Raises:
      ParameterError: nothing can listen at this host and port.
      DFlashError, OSError: the model cannot be loaded; whatever `load` raises.
    """
    places = open_port(host, port)
    opened(places[0].getsockname()[1])
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        served = _serve(load, options, places, shutdown_timeout, root_path, access_log, ready)
        asyncio.run(served, loop_factory=_loop_factory())
    finally:
        sys.setswitchinterval(before)
        gc.unfreeze()
        for place in places:
            place.close()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed, as uvicorn by itself has it: it takes Python for less time from the thread that steps."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return None
    return new_event_loop


def open_port(host: str, port: int) -> list[socket.socket]:
    """Sockets at every address that `host` is a name of, as localhost is of two where there is IPv6.

    Raises:
      ParameterError: no address can be listened at, with the reasons.
    """
    places: list[socket.socket] = []
    without: list[OSError] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((one[0], str(one[4][0])) for one in found):
            # A port that was any free one is the same at all addresses.
            number = places[0].getsockname()[1] if places else port
            try:
                place = socket.create_server((address, number), family=family, backlog=BACKLOG)
                # Connections inherit it; asyncio sets it for sockets of its own making alone. A stream's second write would wait
                # until the first is acknowledged, 40 ms later.
                place.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                places.append(place)
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                without.append(error)  # a name of two addresses, of which this machine has one
        if not places:
            raise without[0]
    except (OSError, OverflowError, UnicodeError) as error:
        for place in places:
            place.close()
        raise ParameterError(f"the server cannot listen at {host!r}, port {port}: {_reason(error)}") from None
    return places


def _reason(error: Exception) -> str:
    """Why the server cannot listen at an address, and what to do."""
    if isinstance(error, OverflowError):
        return "ports end at 65535"
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return "another process has this port, name another one (--port)"
    if isinstance(error, OSError) and error.errno == errno.EACCES:
        return "the port is kept for the system, name one from 1024 on (--port)"
    told = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"{told.rstrip('.')}: name an address of this machine (--host)"


async def _serve(
    load: Callable[[], Model], options: ServeOptions, places: list[socket.socket], timeout: float, root_path: str,
    access_log: bool, ready: Callable[[Model], None],
) -> None:  # fmt: skip
    app = make_app(None, options)
    server = _Uvicorn(
        uvicorn.Config(
            app, log_level="info" if access_log else "warning", access_log=access_log,
            timeout_keep_alive=KEEP_ALIVE_S, root_path=root_path, timeout_graceful_shutdown=int(LEAVE_S) + 1, lifespan="off",
        )
    )  # fmt: skip
    loop, asked = asyncio.get_running_loop(), Signals()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.add)
    failed: list[BaseException] = []
    begin = asyncio.create_task(_load(load, app.front, ready, failed))
    watch = asyncio.create_task(_drain(app.front, server, asked, timeout, begin))
    try:
        await server.serve(sockets=places)
    finally:
        for task in (begin, watch):
            task.cancel()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)  # uvloop's end leaves them
    if failed:
        raise failed[0]


class Signals:
    """Counter of the signals that asked the process to end."""

    def __init__(self):
        self.count = 0
        self.first = asyncio.Event()

    def add(self) -> None:
        self.count += 1
        self.first.set()


async def _load(
    load: Callable[[], Model], front: Front, ready: Callable[[Model], None], failed: list[BaseException]
) -> None:
    """Loads in a daemon thread, which a process that is told to end does not wait for."""
    done, loop = asyncio.get_running_loop().create_future(), asyncio.get_running_loop()

    def tell(value: Any) -> None:
        if not done.done():
            gc.freeze()  # not in the thread: `serve` may have ended meanwhile, and would not undo it
            done.set_result(value)

    def run() -> None:
        try:
            value: Any = load()
            gc.collect()
        except BaseException as error:
            failed.append(error)
            value = None
        with suppress(RuntimeError):  # the loop is closed: the server was told to end meanwhile, and nobody waits
            loop.call_soon_threadsafe(tell, value)

    threading.Thread(target=run, name="dflash-jax load", daemon=True).start()
    if (model := await done) is not None:
        front.start(model)
        ready(model)


async def _drain(
    front: Front, server: uvicorn.Server, asked: Signals, timeout: float, begin: asyncio.Task[None]
) -> None:
    """Waits for a signal, or for a load that fails, and ends the server then."""
    signalled = asyncio.create_task(asked.first.wait())
    await asyncio.wait({signalled, begin}, return_when=asyncio.FIRST_COMPLETED)
    if front.engine is not None:
        await signalled
    front.draining = True
    loop = asyncio.get_running_loop()
    until = loop.time() + timeout
    while front.live and loop.time() < until and asked.count < 2:
        await asyncio.sleep(POLL_S)
    if front.engine is not None:
        front.engine.close("the server is shutting down")
    until = loop.time() + LEAVE_S
    while front.live and loop.time() < until:
        await asyncio.sleep(POLL_S)
    server.should_exit = True
