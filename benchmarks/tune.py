"""Measures the choices that kernels have on the GPU here and writes the tables that calls take theirs from.

    python benchmarks/tune.py                                          # every op that has a table
    python benchmarks/tune.py attention/ragged                         # one of them
    python benchmarks/tune.py --only "prefill B2 S8192 H16 D128 full bf16"
    python benchmarks/tune.py --dry-run --out /tmp/tables              # on a CPU: tiny cases, interpreted; their times mean nothing

Inputs, checks and loops are those of the benchmark of the op. A choice whose result is wrong is left out. All choices of a case
are compiled first and timed in turns, the default among them, so that a GPU that grows hot slows all of them; one that is not
faster than the default by a fiftieth does not replace it. The table is written whole, after each case: entries for other devices
and for cases left out stay as they are.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import jax
import tune_subjects
from record import commit_here

KERNELS = Path(__file__).parents[1] / "kernels" / "dflash_kernels"
GAIN = 0.98  # of the default's time, which a choice must stay below
ROUNDS = 7
COMPILED_AT_ONCE = 4


@dataclasses.dataclass(frozen=True)
class Timed:
    """A choice that is right, and seconds of one call in each round."""

    choice: dict[str, Any]
    run: Callable[[], float]
    seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def microseconds(self) -> float:
        return statistics.median(self.seconds) * 1e6


def tune(subject: tune_subjects.Subject, case: Any, rounds: int = ROUNDS, commit: str | None = None) -> dict[str, Any]:
    """The entry of one case."""
    trial, right = subject.prepare(case), []
    # Compiling takes longer than measuring: on a GPU it goes on side by side, and it is over before anything is timed.
    with ThreadPoolExecutor(COMPILED_AT_ONCE if jax.default_backend() == "gpu" else 1) as pool:
        futures = [(choice, pool.submit(trial.program, subject.make(**choice))) for choice in subject.candidates(case)]
    for choice, future in futures:
        try:
            run, wrong = future.result()
        except Exception as reason:  # a choice that does not compile or fit must not end the sweep
            print(f"{trial.name:44s} {choice} failed: {str(reason)[:200]}", flush=True)
            if not choice:
                raise
            continue
        if wrong is None:
            right.append(Timed(choice, run))
        else:
            print(f"{trial.name:44s} {choice} is wrong: {wrong}", flush=True)
    if not right or right[0].choice:
        raise SystemExit(f"{trial.name}: the default choice is wrong; nothing is written for it")
    for _ in range(rounds):
        for timed in right:
            timed.seconds.append(timed.run())
    for timed in right:
        print(f"{trial.name:44s} {timed.microseconds:9.1f} us {timed.choice}", flush=True)
    default = right[0]
    best = min(right, key=lambda timed: timed.microseconds)
    if best.microseconds > GAIN * default.microseconds:
        best = default
    exact, sizes = trial.key
    # All that was measured, not what differs from defaults that may change.
    choice = dataclasses.asdict(subject.make(**best.choice))
    choice = {name: value for name, value in choice.items() if value is not None}
    measured = {"date": time.strftime("%Y-%m-%d"), "jax": jax.__version__, "commit": commit or commit_here()}
    return {
        "case": trial.name, "exact": exact, "sizes": sizes, "choice": choice, "us": round(best.microseconds, 1),
        "default_us": round(default.microseconds, 1), "measured": measured,
    }  # fmt: skip


def merged(
    table: dict[str, list[dict[str, Any]]], device: str, entry: dict[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    """The table with this entry in place of the one for the same call."""
    kept = [old for old in table.get(device, []) if (old["exact"], old["sizes"]) != (entry["exact"], entry["sizes"])]
    entries = sorted([*kept, entry], key=lambda one: one["case"])
    return dict(sorted((table | {device: entries}).items()))


def write(path: Path, table: dict[str, list[dict[str, Any]]]) -> None:
    """All of the table or nothing, an entry to a line."""
    devices = [
        f" {json.dumps(device)}: [\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in entries) + "\n ]"
        for device, entries in table.items()
    ]
    scratch = path.with_suffix(".json.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch.write_text("{\n" + ",\n".join(devices) + "\n}\n")
    os.replace(scratch, path)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "ops", nargs="*", default=[], help=f"of {', '.join(tune_subjects.SUBJECTS)}; all where none is named"
    )
    parser.add_argument("--only", nargs="+", default=None, help="cases by name, quoted")
    parser.add_argument("--out", type=Path, default=KERNELS, help="folder of the ops' folders")
    parser.add_argument("--commit", default=None, help="commit measured, where the tree has no .git")
    parser.add_argument("--dry-run", action="store_true", help="tiny cases, interpreted on the CPU; needs --out")
    options = parser.parse_args(words)
    unknown = set(options.ops) - set(tune_subjects.SUBJECTS)
    if unknown:
        parser.error(f"no table for {', '.join(sorted(unknown))}; there are {', '.join(tune_subjects.SUBJECTS)}")
    if options.dry_run and options.out == KERNELS:
        parser.error("a dry run measures nothing; --out must name a folder other than the tables' own")
    if not options.dry_run and jax.default_backend() != "gpu":
        parser.error(f"measures on a GPU, and the default backend is {jax.default_backend()}; --dry-run needs none")
    for op in options.ops or tune_subjects.SUBJECTS:
        subject = tune_subjects.SUBJECTS[op]
        path = options.out / op / "tuning.json"
        for case in (subject.tiny,) if options.dry_run else subject.cases:
            if options.only and case.name not in options.only:
                continue
            entry = tune(subject, case, 1 if options.dry_run else ROUNDS, options.commit)
            table = json.loads(path.read_text()) if path.is_file() else {}
            write(path, merged(table, jax.devices()[0].device_kind, entry))
            print(f"{path}: {entry['case']}: {entry['choice']}", flush=True)


if __name__ == "__main__":
    main()
