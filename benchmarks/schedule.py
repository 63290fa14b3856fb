"""Jobs over GPUs, one at a time on each, as timings must not share one; a job may take several. Every job is a process with a log
and a limit of its own.

    outcomes = run(jobs, ["0", "1"], Path("folder"), seconds=590, stop=threading.Event())

Nothing that a job has started outlives it: its process group gets SIGTERM, and SIGKILL `GRACE` seconds later or when the job itself
has ended.
"""

import contextlib
import math
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
GRACE = 10.0  # seconds
TICK = 0.1  # seconds between two looks at what runs
LOG = "log.txt"


@dataclass(frozen=True)
class Job:
    """A command.

    Args:
      name: also its folder's, which holds its log and what it writes.
      words: the command line; it runs in the root of the checkout.
      about: seconds that it takes, start included; it is not begun where fewer are left.
      limit: seconds after which it is ended.
      environment: variables beside those of this process.
      gpus: how many it has at once.
    """

    name: str
    words: Sequence[str]
    about: float
    limit: float
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 1


@dataclass(frozen=True)
class Outcome:
    """What became of a job: `code` is its exit status, minus a signal's number, or None where it was not started."""

    job: Job
    gpu: str | None = None
    seconds: float = 0.0
    code: int | None = None
    why: str = ""

    @property
    def failed(self) -> bool:
        return self.code is not None and (self.code != 0 or self.why != "")

    def __str__(self) -> str:
        status = "not started" if self.code is None else str(self.code)
        return ": ".join(filter(None, (status, self.why)))


class _Running:
    """A job on a GPU; times are seconds of `time.monotonic`."""

    def __init__(self, job: Job, gpu: str, folder: Path, end: float):
        self.job, self.gpu, self.why, self.killing = job, gpu, "", math.inf
        folder.mkdir(parents=True, exist_ok=True)
        # A process that a signal ends does not write what it has only put aside.
        added = {"CUDA_VISIBLE_DEVICES": gpu, "PYTHONUNBUFFERED": "1", **job.environment}
        with open(folder / LOG, "w") as log:
            print(*(f"{name}={value}" for name, value in added.items()), shlex.join(job.words), file=log, flush=True)
            self.process = subprocess.Popen(
                job.words, cwd=ROOT, env=os.environ | added, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        self.began = time.monotonic()
        self.end = min(self.began + job.limit, end)

    def look(self) -> Outcome | None:
        """The outcome where the job is over. One that is late is told to end, and killed when that does not help."""
        now = time.monotonic()
        # The process is left to be waited for until its group has been killed: no other group can have its number before.
        if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            self.signal(signal.SIGKILL)
            return Outcome(self.job, self.gpu, now - self.began, self.process.wait(), self.why)
        if now > self.killing:
            self.signal(signal.SIGKILL)
        elif now > self.end:
            over = self.job.limit <= now - self.began
            self.stop(f"over its limit of {self.job.limit:.0f} s" if over else "no time left")
        return None

    def stop(self, why: str) -> None:
        if self.killing == math.inf:
            self.why, self.killing = why, time.monotonic() + GRACE
            self.signal(signal.SIGTERM)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def _say(line: str) -> None:
    print(line, flush=True)


def run(
    jobs: Sequence[Job],
    gpus: Sequence[str],
    out: Path,
    *,
    seconds: float = math.inf,
    stop: threading.Event,
    say: Callable[[str], object] = _say,
) -> list[Outcome]:
    """Runs jobs in their order, each on the next GPUs that are free, and passes over those that do not fit the time that is left.

    Args:
      gpus: each a value of CUDA_VISIBLE_DEVICES; those of a job that takes more are not started.
      out: where each job has a folder.
      seconds: after which all have been told to end.
      stop: set, from a signal's handler for example, to end all.
      say: gets a line when a job begins and when it has ended.

    Returns:
      An outcome for each job, in the order in which they ended; those that were not started come last.
    """
    began = time.monotonic()
    end, waiting, free = began + seconds, list(jobs), list(gpus)
    running, outcomes = list[_Running](), list[Outcome]()
    try:
        while True:
            for one in list(running):
                if stop.is_set():
                    one.stop("interrupted")
                if (outcome := one.look()) is not None:
                    running.remove(one)
                    free += one.gpu.split(",")
                    outcomes.append(outcome)
                    say(f"{time.monotonic() - began:6.0f} s  GPU {one.gpu}  {one.job.name} ended ({outcome})")
            while free and not stop.is_set():
                left = end - time.monotonic()
                job = next((job for job in waiting if job.about <= left and job.gpus <= len(gpus)), None)
                if job is None or job.gpus > len(free):  # one of several waits for them, and those behind it as well
                    break
                waiting.remove(job)
                taken, free = free[: job.gpus], free[job.gpus :]
                running.append(_Running(job, ",".join(taken), out / job.name, end))
                started = running[-1]
                say(f"{started.began - began:6.0f} s  GPU {started.gpu}  {job.name} begins, about {job.about:.0f} s")
            if not running:
                break
            time.sleep(TICK)
    finally:
        # Only after an error of this loop's own: whatever happens, no job is left on a GPU.
        for one in running:
            one.signal(signal.SIGKILL)
            one.process.wait()
    why = "interrupted" if stop.is_set() else "no time left"
    return outcomes + [Outcome(job, why=why if job.gpus <= len(gpus) else f"takes {job.gpus} GPUs") for job in waiting]
