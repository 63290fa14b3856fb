"""Fills the tables of docs/numbers.md, docs/kernels.md and benchmarks/README.md from measured rows.

    python benchmarks/readme_table.py

A table stands between `<!-- figures NAMES [CASE ...] -->` and `<!-- /figures -->`. NAMES are result files, with commas in between
and perhaps with stars; each CASE is a regular expression for whole cases, or for `case: metric`, and rows that match none are left
out. With `rows` in place of `figures` all rows of the files are written, under the command that measured them. A test compares both
files with what this writes.
"""

import json
import re
import shlex
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LONGEST = 132  # characters of a line that is no row of a table
FILES = (ROOT / "docs" / "numbers.md", ROOT / "docs" / "kernels.md", ROOT / "benchmarks" / "README.md")
RESULTS = ROOT / "benchmarks" / "results"
_BATCH = re.compile(r" B([0-9]+)$")
BLOCK = re.compile(r"^<!-- (figures|rows) (.*) -->\n(?:.*\n)*?<!-- /\1 -->$", flags=re.MULTILINE)

Row = dict[str, Any]


def show(value: Any, unit: str = "") -> str:
    """A figure with four digits or all that stand before the point, anything else as it is, nothing as a dash."""
    if value is None:
        return "-"
    text = str(value)
    if isinstance(value, float):
        text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{text} {unit}".strip()


def table(rows: Sequence[Row]) -> str:
    """Columns that say something: the metric is the head of the figures' column where it is the same in all rows."""
    metrics = {row["metric"] for row in rows}
    columns = [("case", [row["case"] for row in rows])]
    if len(metrics) > 1:
        columns.append(("metric", [row["metric"] for row in rows]))
    columns.append(
        (metrics.pop() if len(metrics) == 1 else "measured", [show(row["value"], row["unit"]) for row in rows])
    )
    columns.append(("GPU", [short(row["device"]) for row in rows]))
    if any(row["floor"] is not None for row in rows):
        columns.append(("floor", [show(row["floor"], row["unit"]) for row in rows]))
    if any(row["peer_value"] is not None for row in rows):
        columns.append(("peer", [_peer(row) for row in rows]))
    heads, cells = zip(*columns, strict=True)
    lines = [heads, ["---"] * len(heads), *zip(*cells, strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def short(device: str) -> str:
    """A GPU's name without its maker and its memory: H200, H100."""
    return device.removeprefix("NVIDIA ").split()[0]


def _peer(row: Row) -> str:
    return "-" if row["peer_value"] is None else f"{show(row['peer_value'], row['unit'])} ({row['peer'].split(',')[0]})"


def source(row: Row) -> str:
    """Command, commit, day and machine of a row."""
    return f"`{row['command']}` ({row['commit'] or 'commit not recorded'}, {row['date']}, {row['device']})"


def wrapped(text: str) -> str:
    """The text in lines of at most `LONGEST` characters; what stands in backquotes stays in one piece."""
    lines = [""]
    for word in re.findall(r"(?:`[^`]*`|\S)+", text):
        if len(lines[-1]) + 1 + len(word) > LONGEST:
            lines.append(word)
        else:
            lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)


def files(names: str) -> list[Path]:
    return [path for name in names.split(",") for path in sorted(RESULTS.glob(f"{name}.json"))]


def read(names: str) -> list[Row]:
    return [row for path in files(names) for row in json.loads(path.read_text(encoding="utf-8"))]


def figures(names: str, cases: Sequence[str]) -> str:
    """One table of the rows that match, and where they come from; by numbers of sequences where all cases end in one."""
    wanted = re.compile("|".join(f"(?:{case})" for case in cases) or ".*")
    found = [row for row in read(names) if any(map(wanted.fullmatch, (row["case"], f"{row['case']}: {row['metric']}")))]
    if not found:
        raise ValueError(f"no row of {names} matches {' '.join(cases)}")
    if all(sizes := [_BATCH.search(row["case"]) for row in found]):
        found = [row for _, row in sorted(zip(sizes, found, strict=True), key=lambda pair: int(pair[0][1]))]
    first, *more = dict.fromkeys(source(row) for row in found)
    return f"{table(found)}\n\n" + ",\n".join(map(wrapped, [f"Measured by {first}", *more])) + "."


def rows(names: str) -> str:
    """A table for each command, with the distributions that rows carry."""
    parts = []
    for command, group in groupby(read(names), source):
        several = list(group)
        versions = ", ".join(f"{name} {version}" for name, version in several[0]["versions"].items())
        parts.append(wrapped(f"{command},") + "\n" + wrapped(f"with {versions}:") + f"\n\n{table(several)}")
        for row in several:
            if "histogram" in row:
                counts = ", ".join(map(str, row["histogram"]))
                what = f"Cycles of `{row['case']}` ({row['metric']}) that gained 1, 2, ... tokens"
                parts.append(wrapped(f"{what}: {counts}."))
    return "\n\n".join(parts) or "No results are kept."


def filled(text: str) -> str:
    """The text with its tables as the results have them."""

    def block(found: re.Match[str]) -> str:
        kind, (names, *cases) = found[1], shlex.split(found[2])
        body = figures(names, cases) if kind == "figures" else rows(names)
        return f"<!-- {kind} {found[2]} -->\n{body}\n<!-- /{kind} -->"

    return BLOCK.sub(block, text)


if __name__ == "__main__":
    for path in FILES:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
