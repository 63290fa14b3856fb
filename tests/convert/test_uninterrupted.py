"""Steps that an interrupt does not part."""

import signal
import threading

import pytest

from dflash_jax.checkpoints.atomic import uninterrupted, written_whole


@pytest.fixture(autouse=True)
def heard():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_is_heard_afterwards():
    steps = []

    def run():
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            steps.append("inside")
        steps.append("after")

    with pytest.raises(KeyboardInterrupt):
        run()
    assert steps == ["inside"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_nobody_answers_stays_as_it_is():
    with uninterrupted():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler


def test_an_error_inside_is_told_where_no_interrupt_came():
    with pytest.raises(ZeroDivisionError), uninterrupted():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_are_not_interrupted_anyway():
    done = []

    def run():
        with uninterrupted():
            done.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert done == [signal.default_int_handler]


def test_a_file_is_whole_or_as_it_was(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")

    def interrupted():
        with written_whole(path) as scratch:
            scratch.write_text("half")
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    with written_whole(path) as scratch:
        scratch.write_text("new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]
