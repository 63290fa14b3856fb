"""The process in which chat templates are rendered: started at the first one, asked for each, ended with its limits or with Python.

A template comes with a model's folder, and Jinja's sandbox bounds neither its time nor its memory. An exception from a timer would
not do: `9**9**9` is one step of the interpreter. Here the system bounds both, whatever the template finds.
"""

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, cast

from dflash_jax.errors import TokenizerError
from dflash_jax.text import template_worker

SECONDS = 10.0  # of one rendering, compiling the template included
MEMORY_BYTES = 1 << 30  # address space of the process
MAX_TEXT_BYTES = 16 << 20  # of a text, and of messages with their options

_START_SECONDS = 60.0
_LEAVE_SECONDS = 1.0
_NEEDED = "jinja2", "markupsafe"


class TemplateProcess:
    """One process, for one rendering at a time. Threads wait for each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False

    def start(self) -> None:
        """Starts the process and does not wait for it. Raises TokenizerError where the system starts none."""
        with self._lock:
            self._started()

    def ask(self, request: bytes) -> dict[str, Any]:
        """The answer to a request, as `template_worker.answer` gives it.

        Raises:
          TokenizerError: there was none within the limits.
        """
        with self._lock:
            process = self._started()
            try:
                if not self._ready:
                    if _answer(process, b"", _START_SECONDS) is None:
                        raise TokenizerError(f"{_NO_START}: {sys.executable} ended, or has no Jinja")
                    self._ready = True
                answer = _answer(process, request, SECONDS)
            except _Late:
                what = _too_much(f"{SECONDS:g} s") if self._ready else f"{_NO_START} within {_START_SECONDS:g} s"
                self._end()
                raise TokenizerError(what) from None
            except BaseException:
                self._end()  # an answer that is still to come would be taken for the next one's
                raise
            if answer is None or answer["kind"] == "memory":
                code = self._end()
                how = f" (its process ended with {code})" if code else ""
                raise TokenizerError(_too_much(f"{MEMORY_BYTES >> 20} MiB of memory", how))
            return answer

    def close(self) -> None:
        """Ends the process; the next request starts another one."""
        with self._lock:
            self._end()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            limits = {"seconds": int(SECONDS), "memory": MEMORY_BYTES, "most": MAX_TEXT_BYTES}
            script = [str(Path(template_worker.__file__)), json.dumps(limits)]
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-S", "-P", "-s", *script], env=_environment(),
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                )  # fmt: skip
            except OSError as error:
                raise TokenizerError(f"{_NO_START}: {error}") from error
        return self._process

    def _end(self) -> int | None:
        """Ends the process and returns its exit code; minus the number of a signal that ended it."""
        process, self._process, self._ready = self._process, None, False
        if process is None:
            return None
        for stream in (process.stdin, process.stdout):
            with suppress(OSError):  # what it has not read is lost
                cast(IO[bytes], stream).close()
        try:
            return process.wait(_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


_NO_START = "chat templates are rendered in a process of their own, which does not start"


def _environment() -> dict[str, str]:
    """This process's without its settings of Python. Modules are found where they are here, with no look at what else there is."""
    homes = {str(Path(spec.origin).parent.parent) for name in _NEEDED if (spec := find_spec(name)) and spec.origin}
    kept = {name: value for name, value in os.environ.items() if name == "PYTHONHOME" or not name.startswith("PYTHON")}
    return kept | {"PYTHONPATH": os.pathsep.join(sorted(homes))}


def _too_much(much: str, how: str = "") -> str:
    return (
        f"the chat template takes more than {much} on these messages{how} and is not rendered; check where it is from"
    )


class _Late(Exception):
    """No answer came in time; the process was ended."""


def _answer(process: subprocess.Popen[bytes], request: bytes, seconds: float) -> dict[str, Any] | None:
    """Answer of the process to a request, or its first message if that is empty; None if it ends. Raises _Late."""
    stdin, stdout = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
    late, data = threading.Event(), None

    def end() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        if request:
            stdin.write(len(request).to_bytes(template_worker.HEADER_BYTES, "big") + request)
            stdin.flush()
        data = template_worker.receive(stdout)
    except BrokenPipeError:
        pass
    finally:
        timer.cancel()
        timer.join()
    if late.is_set():
        raise _Late
    return None if data is None else json.loads(data.decode("utf-8", "surrogatepass"))


_PROCESS = TemplateProcess()
atexit.register(_PROCESS.close)


def start() -> None:
    """Starts the process ahead of the first template. It is ready a tenth of a second later."""
    _PROCESS.start()


def ask(request: Mapping[str, str]) -> dict[str, Any]:
    """The answer to a request whose values are JSON. Raises TokenizerError where there is none within the limits."""
    text = ", ".join(f'"{name}": {value}' for name, value in request.items())
    return _PROCESS.ask(f"{{{text}}}".encode("utf-8", "surrogatepass"))


def _forked() -> None:
    """A forked process has pipes to its parent's: it starts one of its own."""
    _PROCESS.__init__()


os.register_at_fork(after_in_child=_forked)
