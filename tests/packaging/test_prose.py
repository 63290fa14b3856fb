"""Lines of text fit a window of 132 columns, as those of code do, which the linter holds. Rows of tables cannot be broken."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONGEST = 132
TEXTS = [
    *ROOT.glob("*.md"),
    *ROOT.glob("benchmarks/*.md"),
    *(path for path in ROOT.glob("docs/*.md") if path.name != "api.md"),
    *ROOT.glob("dflash_jax/**/*.md"),
    *ROOT.glob("notebooks/*.ipynb"),
    ROOT / "pyproject.toml",
    ROOT / "Makefile",
]


def lines_of(path: Path) -> list[str]:
    """Lines of a file; of a notebook, those that somebody wrote."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    return text.splitlines()


def too_long(lines: list[str]) -> list[str]:
    return [line for line in lines if len(line) > LONGEST and not line.startswith("|")]


def test_the_check_sees_long_lines():
    words = "word " * 30
    assert too_long([words, f"| {words}", words[:LONGEST]]) == [words]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_fit(path):
    lines = lines_of(path)
    assert lines
    assert too_long(lines) == []
