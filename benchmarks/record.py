"""Rows of evidence: one JSON list for each benchmark, as the README quotes them.

A row is `{"case", "metric", "value", "unit", "floor", "peer", "peer_value", "device", "versions", "date", "commit", "command"}`.
"""

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from card import card, measured_here

RESULTS = Path(__file__).parent / "results"


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with the options every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON file")
    parser.add_argument("--commit", default=None, help="commit measured, where the tree has no .git")
    return parser


class Record:
    """Collects rows; the file holds all of them after each."""

    def __init__(self, name: str, options: argparse.Namespace, packages: Sequence[str] = ()):
        self.name, self.out, self.rows = name, options.out, []
        packages = ("jax", "jaxlib", "flax", "numpy", *packages)
        self.common = {
            "device": jax.devices()[0].device_kind,
            "versions": {package: metadata.version(package) for package in packages},
            "date": datetime.date.today().isoformat(),
            "commit": options.commit or commit_here(),
            "command": _command(),
        }

    def add(
        self,
        case: str,
        metric: str,
        value,
        unit: str,
        *,
        floor=None,
        peer=None,
        peer_value=None,
        peer_card=None,
        **more,
    ) -> None:
        """One figure; prints it too.

        The floor is left out on a card whose rates are not known, and so is a peer's figure of another card.

        Args:
          peer_card: kind of GPU of the peer's figure, where it is of an earlier run; None where it is of this one.
          more: what does not fit a column, for example a histogram.
        """
        floor = floor if card().known else None
        if peer_card is not None and not measured_here(peer_card):
            peer = peer_value = None
        row = {"case": case, "metric": metric, "value": value, "unit": unit, "floor": floor, "peer": peer}
        self.rows.append(row | {"peer_value": peer_value} | more | self.common)
        self.write()
        print(f"{case:34s} {metric:34s} {value!s:>12} {unit}" + (f"  floor {floor}" if floor else ""), flush=True)

    def write(self) -> Path:
        """Writes the rows so far as `<name>.json`; `merge.py` brings them to rows of other runs."""
        return write_rows(self.out / f"{self.name}.json", self.rows)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Writes a file of rows whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".json.tmp")
    scratch.write_text(json.dumps(rows, indent=1) + "\n")
    os.replace(scratch, path)
    return path


def commit_here() -> str | None:
    """Short name of the commit that the tree is at; None outside of git."""
    answer = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None


def _command() -> str:
    """The command line, without where the file went and what was measured."""
    kept, words = [], iter([Path(sys.argv[0]).name, *sys.argv[1:]])
    for word in words:
        if word in ("--out", "--commit"):
            next(words, None)
        elif not word.startswith(("--out=", "--commit=")):
            kept.append(word)
    return f"python benchmarks/{shlex.join(kept)}"
