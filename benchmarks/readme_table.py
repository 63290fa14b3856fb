"""Rows of `benchmarks/results/*.json` as lines of the README's table: `python benchmarks/readme_table.py [PREFIX ...]`.

A line is quoted in the README as it is printed here; a test compares them.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
HEADER = ("case", "metric", "measured", "floor", "peer", "device", "date", "commit")


def show(value: Any, unit: str = "") -> str:
    """A figure with four digits or all that stand before the point, anything else as it is, nothing as a dash."""
    if value is None:
        return "-"
    text = str(value)
    if isinstance(value, float):
        text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{text} {unit}".strip()


def line(row: dict[str, Any]) -> str:
    """One row of results as one line of the table."""
    peer = "-" if row["peer_value"] is None else f"{show(row['peer_value'], row['unit'])} ({row['peer']})"
    cells = (
        row["case"], row["metric"], show(row["value"], row["unit"]), show(row["floor"], row["unit"]), peer, row["device"],
        row["date"], show(row["commit"]),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def lines() -> Iterator[tuple[str, str]]:
    """The case and the line of every row on disk."""
    for path in sorted(RESULTS.glob("*.json")):
        for row in json.loads(path.read_text(encoding="utf-8")):
            yield row["case"], line(row)


if __name__ == "__main__":
    prefixes = tuple(sys.argv[1:]) or ("",)
    print(f"| {' | '.join(HEADER)} |\n|{' --- |' * len(HEADER)}")
    print("\n".join(text for case, text in lines() if case.startswith(prefixes)))
