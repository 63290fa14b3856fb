"""Brings rows that were measured elsewhere into `results`: `python benchmarks/suite.py --merge FOLDER [FOLDER ...]`.

A row replaces the one of the same file, case, metric, device and settings, unless it is of an earlier day. Of rows of one day the
last one counts, in the order of the folders and then of paths. Rows keep all that they were measured with, the command among it,
and stand together by run; a run whose rows have all been measured anew is gone.
"""

import json
import shlex
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import write_rows

Row = dict[str, Any]
FIELDS = {"case", "metric", "value", "unit", "device", "versions", "date", "commit", "command"}
# Options that change a figure and stand neither in its case nor in its file's name. Others choose what is measured, or how often.
OF_SCRIPTS = {
    "bench.py": ("--output-length", "--requests", "--imposed-acceptance"),
    "cold_start.py": ("--folder",),
    "pair.py": ("--prompts", "--tokens", "--max-model-len"),
}
OF_METRICS = {"compile time, all programs": ("--batch", "--kinds")}


@dataclass(frozen=True)
class Change:
    """What merging does to a file: rows that it had, rows that it had not, and rows left out as they are older than its own."""

    path: Path
    renewed: int
    new: int
    older: int

    def __str__(self) -> str:
        return f"{self.path.name}: {self.renewed} rows renewed, {self.new} new, {self.older} older than those here left out"


def settings(row: Row) -> frozenset[tuple[str, ...]]:
    """Options of a row's command, each with its values, that make it another measurement than a row of the same case and metric."""
    _, script, *words = shlex.split(row["command"])
    options = list[list[str]]()
    for word in words:
        if word.startswith("--"):
            options.append(word.split("=", 1))
        elif options:
            options[-1].append(word)
    matter = OF_SCRIPTS.get(Path(script).name, ()) + OF_METRICS.get(row["metric"], ())
    return frozenset(tuple(option) for option in options if option[0] in matter)


def key(row: Row) -> Hashable:
    """The same for two measurements of one thing."""
    return row["case"], row["metric"], row["device"], settings(row)


def run_of(row: Row) -> Hashable:
    """The same for rows that were measured together."""
    return row["command"], row["commit"], row["date"], row["device"], tuple(sorted(row["versions"].items()))


def read_rows(path: Path) -> list[Row]:
    """Rows of a file.

    Raises:
      SystemExit: the file holds something else.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SystemExit(f"{path}: rows of a measurement were expected, found what is no JSON ({error})") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) and row.keys() >= FIELDS for row in rows):
        raise SystemExit(f"{path}: a list of rows with {', '.join(sorted(FIELDS))} was expected; take the file out")
    return rows


def merged(own: Sequence[Row], others: Sequence[Row]) -> tuple[list[Row], int, int, int]:
    """A file's rows with others brought in; how many were renewed, how many are new, and how many were left out as older."""
    before = {key(row): row for row in own}
    latest, older = dict(before), 0
    for row in others:
        if row["date"] >= latest.get(key(row), row)["date"]:
            latest[key(row)] = row
        else:
            older += 1
    renewed, new = sum(latest[one] != row for one, row in before.items()), len(latest) - len(before)
    if not renewed and not new:
        return list(own), 0, 0, older
    first: dict[Hashable, int] = {}
    for place, row in enumerate(latest.values()):
        first.setdefault(run_of(row), place)
    return sorted(latest.values(), key=lambda row: first[run_of(row)]), renewed, new, older


def merge(folders: Sequence[Path], into: Path) -> list[Change]:
    """Merges all files of rows in the folders and their folders into those of the same names.

    Raises:
      SystemExit: a folder holds no rows, or a file something else. Nothing has been written then.
    """
    found: dict[str, list[Row]] = {}
    for folder in folders:
        paths = sorted(folder.rglob("*.json"))
        if not paths:
            raise SystemExit(f"{folder}: a folder with rows (*.json) was expected, and none are there")
        for path in paths:
            found.setdefault(path.name, []).extend(read_rows(path))
    changes = list[tuple[Change, list[Row]]]()
    for name, others in found.items():
        path = into / name
        rows, *counts = merged(read_rows(path) if path.exists() else [], others)
        changes.append((Change(path, *counts), rows))
    for change, rows in changes:
        if change.renewed or change.new:
            write_rows(change.path, rows)
    return [change for change, _ in changes]
