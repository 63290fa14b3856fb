"""A process that ends while a daemon thread generates."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

import dflash_jax as dj
from dflash_jax.compile.programs import start_compiling
from dflash_jax.engine import shutdown as leaving

SCRIPT = """
import sys, threading, time
import dflash_jax as dj

model = dj.load(dtype="float32", max_batch=1, max_model_len=512)
begun = threading.Event()

def serve():
    params = dj.SamplingParams(max_tokens=400, ignore_eos=True)
    while True:
        for piece in dj.stream(model, "def f(", params):
            begun.set()
        dj.generate(model, "def f(", params)

threading.Thread(target=serve, daemon=True).start()
begun.wait()
time.sleep(float(sys.argv[1]))
"""


def test_a_daemon_thread_that_generates_does_not_abort_the_process(all_cases):
    """Without the wait it ends with SIGABRT, most times."""
    for seconds in ("0", "0.15", "0.4") if all_cases else ("0.15",):
        ended = subprocess.run(
            [sys.executable, "-c", SCRIPT, seconds], capture_output=True, text=True, timeout=300, check=False
        )
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_who_is_told_to_end(monkeypatch):
    """Other threads, at once and without a word; the main thread's last functions may generate still."""
    model = dj.load(dtype="float32", max_batch=1, max_model_len=64)
    monkeypatch.setattr(leaving, "_ending", threading.Event())
    leaving._ending.set()
    texts, params = [], dj.SamplingParams(max_tokens=4, ignore_eos=True)

    def serve() -> None:
        try:
            texts.append(dj.generate(model, [1, 2, 3], params).token_ids)
        except SystemExit:  # of which threads say nothing
            texts.append("ended")

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert texts == ["ended"]
    serve()
    assert len(texts[1]) == 4


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("cannot schedule new futures after interpreter shutdown", SystemExit),
        ("can't create new thread at interpreter shutdown", SystemExit),
        ("cannot schedule new futures after shutdown", SystemExit),  # an idle thread of the pool has seen it first
        ("can't start new thread", RuntimeError),
    ],
)
def test_programs_that_no_thread_takes(monkeypatch, caplog, message, error):
    """Only Python's end goes by without a word: whoever asks for a program of the others is told.

    A pool that cannot start a thread has queued the call before it says so, and one of its other threads comes to it."""
    given, submit = [], ThreadPoolExecutor.submit

    def full(pool, *args):
        given.append(args)
        if len(given) > 2:
            if "new thread" in message:
                submit(pool, *args)
            raise RuntimeError(message)
        return submit(pool, *args)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", full)
    *done, refused, last = start_compiling([lambda: None] * 4)
    assert [one.result(timeout=30) for one in done] == [None, None]
    for one in (refused, last):
        with pytest.raises(error):
            one.result(timeout=30)
    assert not caplog.records


def test_a_thread_has_time_to_end_after_a_long_call(monkeypatch):
    """It is on its way through whoever called for it, once what the device did for it has ended."""
    monkeypatch.setattr(leaving, "_ending", threading.Event())
    begun, at_it = threading.Event(), SimpleNamespace(stepping=False)
    monkeypatch.setattr(leaving, "_schedulers", [at_it])

    def serve() -> None:
        leaving.check()
        at_it.stepping = True
        begun.set()
        time.sleep(2 * leaving.BETWEEN_S)
        at_it.stepping = False
        time.sleep(leaving.BETWEEN_S / 3)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    begun.wait()
    leaving._end()
    assert not thread.is_alive()


WARMING = """
import atexit, threading, time
import dflash_jax as dj
from dflash_jax.engine import Engine

begun, ended = threading.Event(), []

def jobs(self, setups, batch):
    def job():
        time.sleep(1)
        ended.append(1)
        begun.set()
    return [job] * 100

Engine.warmup_jobs = jobs
model = dj.load(dtype="float32", max_batch=1, max_model_len=64)
threading.Thread(target=model.warmup, daemon=True).start()
begun.wait()
atexit.register(lambda: print(len(ended)))
"""


@pytest.mark.few
def test_programs_that_have_not_begun_keep_no_process_waiting():
    """A daemon thread warms up as Python ends: what is being compiled is waited for, not the ninety-six behind it."""
    ended = subprocess.run([sys.executable, "-c", WARMING], capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert 1 <= int(ended.stdout) <= 12
