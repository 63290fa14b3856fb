"""What docs/seeds.md names is there, what it leaves open says why, and its counts are those of its tables."""

import ast
import functools
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import dflash_kernels
import pytest

from dflash_jax.options import LoadOptions

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "seeds.md").read_text(encoding="utf-8")
STATES = ("works", "partly", "missing", "not applicable")


class Row(NamedTuple):
    """A row of a document's table, its two names without their quotation marks."""

    item: str
    state: str
    here: str
    test: str


def cells(line: str) -> list[str]:
    return [cell.strip().strip("`") for cell in line.strip("|").split("|")]


def rows(section: str) -> list[Row]:
    table = [cells(line) for line in section.splitlines() if line.startswith("|")]
    return [Row(*row) for row in table if len(row) == len(Row._fields) and row[1] in STATES]


SECTIONS = dict(zip(*[iter(re.split(r"^### (.*)$", TEXT, flags=re.MULTILINE)[1:])] * 2, strict=True))
ROWS = [row for section in SECTIONS.values() for row in rows(section)]


@functools.cache
def names_in(path: Path) -> frozenset[str]:
    """Functions, classes and constants of a module, and `Class.name` of what a class declares."""
    return frozenset(declared(ast.parse(path.read_text(encoding="utf-8")), ""))


def declared(scope: ast.Module | ast.ClassDef, prefix: str) -> list[str]:
    names: list[str] = []
    for node in scope.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(prefix + node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [prefix + one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
        if isinstance(node, ast.ClassDef) and not prefix:
            names += declared(node, f"{node.name}.")
    return names


def is_here(name: str) -> bool:
    if option := re.fullmatch(r"load\((\w+)\)", name):
        return option[1] in LoadOptions.__dataclass_fields__
    if name.startswith("dflash_kernels."):
        return name.removeprefix("dflash_kernels.") in dflash_kernels.__all__
    file, _, inside = name.partition(": ")
    path = ROOT / "dflash_jax" / file
    return path.is_file() and (not inside or inside in names_in(path))


def is_tested(name: str) -> bool:
    file, _, test = name.partition("::")
    path = ROOT / "tests" / file
    return path.is_file() and test in names_in(path)


def test_the_checks_see_what_is_not_there():
    assert rows("| an item | works | `here` | `there` |\n| item | state | here | test |") == [
        Row("an item", "works", "here", "there")
    ]
    assert is_here("models/dflash.py: DFlash.context")
    wrong = ("models/none.py", "models/dflash.py: DFlash.none", "load(none)", "dflash_kernels.none")
    assert not any(map(is_here, wrong))
    assert not is_tested("packaging/test_seeds.py::test_none")
    assert not is_tested("packaging/test_none.py::test_none")


def test_what_is_named_is_there():
    assert [row for row in ROWS if row.here and not is_here(row.here)] == []
    assert [row for row in ROWS if row.test and not is_tested(row.test)] == []
    assert [row for row in ROWS if row.state in STATES[:2] and not (row.here and row.test)] == []


@pytest.mark.parametrize("subject", SECTIONS)
def test_what_is_left_open_says_why(subject):
    """Every line of a table is a row, and those that do not work have a sentence each under it, in their order."""
    section, said = (
        SECTIONS[subject],
        re.findall(r"^\* \*\*(.*?)\*\*: \S", SECTIONS[subject].replace("\n  ", " "), re.MULTILINE),
    )
    found = rows(section)
    assert len(found) == section.count("\n|") - 2
    assert said == [row.item for row in found if row.state != "works"]


def test_counts_are_those_of_the_tables():
    documents = re.split(r"^## (.*)$", TEXT, flags=re.MULTILINE)[1:]
    counted = [cells(line) for line in TEXT.splitlines() if line.startswith(("| 00", "| all |"))]
    expected, whole = [], Counter(row.state for row in ROWS)
    for title, text in zip(documents[::2], documents[1::2], strict=True):
        states = Counter(row.state for row in rows(text))
        expected.append([title, *(str(states[state]) for state in STATES)])
    assert counted == [*expected, ["all", *(str(whole[state]) for state in STATES)]]
