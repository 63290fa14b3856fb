"""Jobs over GPUs, which are only names here; the processes are real."""

import dataclasses
import itertools
import signal
import sys
import threading

import pytest

from .children import gone, said

PYTHON = [sys.executable, "-S", "-c"]
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
# Says when it began and ended and where; all of one test write into one file.
NOTE = """
import os, sys, time
began = time.monotonic()
time.sleep(float(sys.argv[2]))
with open(sys.argv[1], "a") as file:
    file.write(f"{os.environ['CUDA_VISIBLE_DEVICES']} {began} {time.monotonic()}\\n")
"""
# Starts another process that outlives SIGTERM, says its number, and waits.
PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", {STUBBORN + "print(1, flush=True); import time; time.sleep(60)"!r}],
                         stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def schedule(script):
    return script("schedule")


@pytest.fixture
def run(schedule, tmp_path, monkeypatch):
    """Runs jobs on GPUs a and b; stubborn ones are killed after half a second."""
    monkeypatch.setattr(schedule, "GRACE", 0.5)

    def call(*jobs, gpus=("a", "b"), stop=None, **options):
        return schedule.run(jobs, gpus, tmp_path, stop=stop or threading.Event(), **options)

    return call


@pytest.fixture
def job(schedule):
    def make(name, code, *words, about=0.1, limit=30.0):
        return schedule.Job(name, [*PYTHON, code, *map(str, words)], about, limit)

    return make


def test_one_job_at_a_time_on_each_gpu(run, job, tmp_path):
    note = tmp_path / "note"
    outcomes = run(*(job(f"job{i}", NOTE, note, 0.3) for i in range(6)))
    assert [one.code for one in outcomes] == [0] * 6
    spans = {}
    for gpu, *times in map(str.split, note.read_text().splitlines()):
        spans.setdefault(gpu, []).append(tuple(map(float, times)))
    assert sorted(spans) == ["a", "b"]
    for times in spans.values():
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(times))
    # Both worked at the same time, which is what they are for.
    assert max(spans["a"][0][0], spans["b"][0][0]) < min(spans["a"][-1][1], spans["b"][-1][1])
    assert {one.job.name: one.gpu for one in outcomes}.keys() == {f"job{i}" for i in range(6)}


def test_a_job_of_several_gpus_waits_for_them(run, job, tmp_path):
    """And is passed over where there are fewer."""
    note = tmp_path / "note"
    several = [dataclasses.replace(job(f"job{count}", NOTE, note, 0.1), gpus=count) for count in (1, 2, 1, 3)]
    *ended, missing = run(*several)
    assert [one.code for one in ended] == [0] * 3
    assert (str(missing), missing.job.gpus) == ("not started: takes 3 GPUs", 3)
    first, second, third = map(str.split, note.read_text().splitlines())
    assert sorted(second[0].split(",")) == ["a", "b"]
    assert first[2] <= second[1]
    assert second[2] <= third[1]


def test_jobs_begin_in_order(run, job, tmp_path):
    note = tmp_path / "note"
    outcomes = run(*(job(name, NOTE, note, 0.1) for name in "cab"), gpus=("a",))
    assert [one.job.name for one in outcomes] == ["c", "a", "b"]


def test_a_job_that_fails_leaves_its_log_and_the_others_run(run, job, tmp_path):
    failed, fine = run(job("failing", "print('so far'); raise SystemExit('no luck')"), job("fine", "1"), gpus=("a",))
    assert (failed.code, failed.failed, str(failed)) == (1, True, "1")
    assert (fine.code, fine.failed) == (0, False)
    command, *lines = (tmp_path / "failing" / "log.txt").read_text().splitlines()
    assert command.startswith("CUDA_VISIBLE_DEVICES=a ")
    assert lines == ["so far", "no luck"]


def test_a_job_over_its_limit_is_told_to_end(run, job):
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); time.sleep(60)"
    (outcome,) = run(job("slow", code, limit=2.0))
    assert str(outcome) == "0: over its limit of 2 s"
    assert outcome.failed
    assert 2 <= outcome.seconds < 10


def test_a_job_that_does_not_end_is_killed_with_all_it_started(run, job, tmp_path):
    (outcome,) = run(job("stubborn", STUBBORN + PARENT, 60, limit=2.0))
    assert (outcome.code, outcome.why) == (-signal.SIGKILL, "over its limit of 2 s")
    assert gone(int(said(tmp_path / "stubborn" / "log.txt")[-1]))


def test_what_a_job_leaves_running_is_killed(run, job, tmp_path):
    log = tmp_path / "parent" / "log.txt"
    code = f"""
import pathlib, time
time.sleep(0.5)
state = pathlib.Path("/proc", open({str(log)!r}).read().split()[-1], "stat")
print(state.read_text().rpartition(")")[2].split()[0] if state.exists() else "gone")
"""
    parent, _ = run(job("parent", PARENT, 0), job("next", code), gpus=("a",))
    assert parent.code == 0
    assert said(tmp_path / "next" / "log.txt")[-1] in ("gone", "Z")  # or dead, and nobody has waited for it


def test_jobs_begin_only_if_they_fit_the_time_that_is_left(run, job):
    outcomes = run(job("long", "1", about=50), job("short", "1", about=1), seconds=20)
    assert [(one.job.name, str(one)) for one in outcomes] == [("short", "0"), ("long", "not started: no time left")]
    assert not any(one.failed for one in outcomes)


def test_what_runs_when_no_time_is_left_is_ended(run, job):
    (outcome,) = run(job("slow", "import time; time.sleep(60)"), seconds=1)
    assert str(outcome) == f"{-signal.SIGTERM}: no time left"
    assert outcome.failed


def test_a_stop_ends_all_and_starts_nothing_more(run, job, tmp_path):
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    waits = "import time; time.sleep(60)"
    outcomes = run(job("one", waits), job("two", waits), job("three", waits), stop=stop)
    assert {one.job.name: str(one) for one in outcomes} == {
        "one": "-15: interrupted", "two": "-15: interrupted", "three": "not started: interrupted",
    }  # fmt: skip
    assert not (tmp_path / "three").exists()


def test_an_error_of_the_scheduler_leaves_nothing_running(run, job, tmp_path):
    def full(line):
        if "two" in line:
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        run(job("one", STUBBORN + "import os, time; print(os.getpid(), flush=True); time.sleep(60)"),
            job("quick", "import time; time.sleep(1.5)"), job("two", "1"), say=full)  # fmt: skip
    assert gone(int(said(tmp_path / "one" / "log.txt")[-1]))
