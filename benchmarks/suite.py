"""Measures what `results` holds, and runs the tests that need a GPU, over all GPUs that are visible; brings rows home.

    python benchmarks/suite.py --list
    python benchmarks/suite.py --seconds 590 --out run1 --only 'decode*' attention
    python benchmarks/suite.py --only 'tests*'
    python benchmarks/suite.py --merge run1 run2

One job at a time runs on each GPU, and one of the tests' on two. Each has a folder with its log and its rows; nothing is written
into `results` but by `--merge`, after which `readme_table.py` fills the tables. Without `--only` the longest are measured first;
with it, jobs begin in the order named. Those that do not fit into `--seconds` are passed over, and what still runs at their end is
ended, with the rows that it has and what its tests have said.
The exit status is 1 where a job failed or was ended.
"""

import argparse
import fnmatch
import importlib.util
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import jobs
import schedule
from merge import merge
from record import RESULTS

TAIL = 15  # lines of the log of a job that failed


def visible_gpus() -> list[str]:
    """Values of CUDA_VISIBLE_DEVICES that show one GPU each."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [gpu.strip() for gpu in named.split(",") if gpu.strip()]
    try:
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return []
    return [str(index) for index, _ in enumerate(line for line in answer.splitlines() if line.startswith("GPU "))]


def chosen(patterns: Sequence[str] | None, gpu_tests: bool) -> list[str]:
    """Names of jobs in the order in which they are to begin.

    Raises:
      SystemExit: a pattern matches none.
    """
    everything = [*jobs.BENCHMARKS, *jobs.TESTS]
    names = sorted(jobs.BENCHMARKS, key=lambda name: -jobs.BENCHMARKS[name][1])
    if patterns is not None:
        groups = {pattern: fnmatch.filter(everything, pattern) for pattern in patterns}
        if unknown := [pattern for pattern, group in groups.items() if not group]:
            raise SystemExit(f"no job is named {', '.join(unknown)}; there are {', '.join(everything)}")
        names = [name for group in groups.values() for name in group]
    return list(dict.fromkeys(names + (jobs.TESTS if gpu_tests else [])))


def installed(name: str) -> bool:
    return any(distribution.name == name for distribution in distributions(name=name))


def refuse_without(names: Sequence[str]) -> None:
    """Minutes of a GPU would pass before jobs said one by one that they cannot start.

    Raises:
      SystemExit: the package is not installed, or what tests import is not.
    """
    if not installed("dflash-jax"):
        raise SystemExit("dflash-jax is not installed, it was only found (pip install -e '.[test]')")
    needed = ("pytest", "hypothesis", "nbclient", "nbformat") if {*names} & {*jobs.TESTS} else ()
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise SystemExit(f"the tests import {', '.join(missing)}, which is not installed (pip install -e '.[test]')")


def tests_of(folder: Path) -> list[dict[str, Any]]:
    """Those that have ended, whether or not the run of them has."""
    path = folder / jobs.OUTCOMES
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def found(folder: Path) -> str:
    """What a job has left: the number of its rows, or what its tests said."""
    if tests := tests_of(folder):
        counts = Counter(test["outcome"] for test in tests)
        return ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "error", "skipped"))
    return f"{sum(len(json.loads(path.read_text())) for path in folder.glob('*.json'))} rows"


def report(outcomes: Sequence[schedule.Outcome], out: Path) -> str:
    """A table of all jobs, and the ends of the logs of those that failed."""
    lines = [("job", "GPU", "seconds", "about", "exit status", "found")]
    lines += [
        (
            one.job.name, one.gpu or "-", f"{one.seconds:.0f}", f"{one.job.about:.0f}", str(one), found(out / one.job.name),
        )
        for one in outcomes
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    for one in outcomes:
        if one.failed:
            log = out / one.job.name / schedule.LOG
            text += ["", f"{log}:", *log.read_text(errors="replace").splitlines()[-TAIL:]]
            tests = tests_of(out / one.job.name)
            text += [f"{test['outcome']}: {test['test']}" for test in tests if test["outcome"] in ("failed", "error")]
    return "\n".join(text)


def measure(options: argparse.Namespace) -> int:
    """Runs what was asked for; the exit status."""
    names = chosen(options.only, options.gpu_tests)
    refuse_without(names)
    gpus = list(dict.fromkeys(options.gpus or visible_gpus()))  # a GPU named twice is one
    if not gpus:
        raise SystemExit("no GPU is visible (CUDA_VISIBLE_DEVICES, nvidia-smi -L): name those to use with --gpus")
    out = (options.out or Path(tempfile.mkdtemp(prefix="dflash-suite-"))).absolute()
    if out.exists() and any(out.iterdir()):
        raise SystemExit(f"{out} is not empty: name a folder for this run alone, so that no row of another is counted")
    plan = [jobs.job(name, out, options.commit, options.processes) for name in names]
    about = sum(job.about for job in plan)
    print(f"{len(plan)} jobs, about {about:,.0f} s of one GPU, on GPUs {', '.join(gpus)}, into {out}", flush=True)
    stop = threading.Event()
    ending = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in ending}
    outcomes = schedule.run(plan, gpus, out, seconds=options.seconds, stop=stop)
    for number, handler in before.items():
        signal.signal(number, handler)
    print(f"\n{report(outcomes, out)}\n\nTo keep the rows: python benchmarks/suite.py --merge {out}", flush=True)
    return 130 if stop.is_set() else int(any(one.failed for one in outcomes))


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="the jobs, with the seconds that each takes, about")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="jobs by name, stars allowed, in this order")
    parser.add_argument("--seconds", type=float, default=math.inf, help="for everything together")
    parser.add_argument("--out", type=Path, help="an empty folder for logs and rows; with --merge, the one merged into")
    parser.add_argument("--gpu-tests", action="store_true", help="the tests that need a GPU too, after all others")
    parser.add_argument(
        "--processes", type=int, default=jobs.PROCESSES, help="tests at a time on a GPU, with pytest-xdist"
    )
    parser.add_argument("--gpus", nargs="+", metavar="GPU", help="those to use, as in CUDA_VISIBLE_DEVICES")
    parser.add_argument("--commit", default=None, help="commit measured, where the tree has no .git")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FOLDER", help="measure nothing, bring rows home")
    options = parser.parse_args(words)
    if options.processes < 1:
        parser.error(f"--processes: at least 1 was expected, {options.processes} came")
    if options.merge:
        print(*merge(options.merge, options.out or RESULTS), sep="\n")
        return 0
    if options.list:
        for name in chosen(options.only, options.gpu_tests or not options.only):
            job = jobs.job(name, Path("OUT"), options.commit, options.processes)
            print(f"{job.name:28s} about {job.about:4.0f} s  {shlex.join(['python', *job.words[1:]])}")
        return 0
    return measure(options)


if __name__ == "__main__":
    sys.exit(main())
