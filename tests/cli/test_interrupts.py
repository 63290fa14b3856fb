"""An interrupt is raised, also when it arrives where Python would drop the exception."""

import importlib
import signal
import sys
import time
import types
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

import dflash_jax.cli
from dflash_jax.cli.signals import arrived, interruption, interrupts, was_interrupted


@pytest.fixture(autouse=True)
def heard():
    """A shell without job control has what it starts in the background ignore interrupts, and `nohup` hangups."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Interrupted:
    """Its destructor is interrupted; an exception raised there is only printed."""

    def __del__(self):
        signal.raise_signal(signal.SIGINT)


def test_interrupt_is_raised():
    with pytest.raises(KeyboardInterrupt), interrupts():
        signal.raise_signal(signal.SIGINT)


def test_interrupt_in_a_destructor_is_raised_after_it():
    def run() -> None:
        with interrupts():
            thing = Interrupted()
            del thing
            reached.append(True)
            time.sleep(5)

    reached: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        run()
    assert reached == [True]


def test_interrupt_that_python_drops_comes_again():
    """In the callback of a weak reference, for example, which the handler does not know."""

    class Thing:
        pass

    thing = Thing()
    reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
    things, hook = [thing], sys.unraisablehook
    del thing

    def run() -> None:
        with interrupts():
            things.clear()
            assert reference() is None
            time.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert sys.unraisablehook is hook


IMPORTED = """
import signal
from tests_of_interrupts import steps
steps.append("begun")
for _ in range({times}):
    signal.raise_signal(signal.SIGINT)
steps.append("done")
"""


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_waits_for_an_import_unless_it_comes_twice(tmp_path, monkeypatch, times):
    """Extension modules print what is raised as they start, or take it for an error of theirs."""
    steps: list[str] = []
    holder = types.ModuleType("tests_of_interrupts")
    monkeypatch.setattr(holder, "steps", steps, raising=False)
    monkeypatch.setitem(sys.modules, "tests_of_interrupts", holder)
    (tmp_path / f"imported_{times}_times.py").write_text(IMPORTED.format(times=times))
    monkeypatch.syspath_prepend(tmp_path)

    def run() -> None:
        with interrupts():
            importlib.import_module(f"imported_{times}_times")
            time.sleep(5)
            steps.append("not reached")

    with pytest.raises(KeyboardInterrupt):
        run()
    assert steps == ["begun", "done"][: 3 - times]
    assert arrived()


def test_the_signal_has_a_name():
    for number, told in ((signal.SIGINT, "interrupted"), (signal.SIGHUP, "interrupted by SIGHUP")):
        with pytest.raises(KeyboardInterrupt), interrupts(signal.SIGHUP):
            signal.raise_signal(number)
        assert interruption() == told


def test_an_interrupt_of_an_earlier_call_is_over():
    with pytest.raises(KeyboardInterrupt), interrupts():
        signal.raise_signal(signal.SIGINT)
    assert was_interrupted(ImportError())
    with interrupts():
        pass
    assert not was_interrupted(ImportError())


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)
    with interrupts():
        assert signal.getsignal(signal.SIGINT) is not before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)) == before


def test_other_signals_interrupt_where_they_would_end_the_process():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt), interrupts(signal.SIGTERM):
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with interrupts(signal.SIGTERM):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_process_that_ignores_interrupts_goes_on_doing_so():
    """And what an earlier block has met is no reason for what fails in this one."""
    with pytest.raises(KeyboardInterrupt), interrupts():
        signal.raise_signal(signal.SIGINT)
    assert was_interrupted(ImportError())
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts():
            signal.raise_signal(signal.SIGINT)
        assert not was_interrupted(ImportError())
    finally:
        signal.signal(signal.SIGINT, before)


def test_commands_run_in_any_thread():
    """Python lets the main one alone set what answers a signal."""

    def run() -> bool:
        with interrupts():
            return True

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run).result()


def test_an_interrupt_before_the_commands_are_there(monkeypatch, capsys):
    """In the first tenth of a second."""

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "dflash_jax.cli.commands":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "dflash_jax.cli.commands", raising=False)
    monkeypatch.delattr("dflash_jax.cli.commands", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    assert dflash_jax.cli.main(["--version"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"
