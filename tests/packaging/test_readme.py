"""What the README says is so: its Python runs, its commands parse, its files exist, its figures are rows of the results."""

import functools
import importlib.util
import re
import shlex
from pathlib import Path

import pytest
from dflash_convert import cli as convert_cli

import dflash_jax as dj
from dflash_jax.cli import build_parser

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


def commands(program: str) -> list[list[str]]:
    lines = "".join(blocks("sh")).splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.split()[:1] == [program]]


def test_python_runs(capsys, monkeypatch):
    # As written, but for short texts only, which leaves `warmup` fewer programs to compile.
    monkeypatch.setattr(dj, "load", functools.partial(dj.load, max_model_len=256, max_batch=2))
    names: dict = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    assert len(names["out"].token_ids) == 64
    assert capsys.readouterr().out.startswith(names["out"].text)


def test_first_block_is_short():
    assert len([line for line in blocks("python")[0].splitlines() if line]) <= 5


@pytest.mark.parametrize("arguments", commands("dflash-jax"), ids=" ".join)
def test_commands_parse(arguments):
    assert build_parser().parse_args(arguments).run


@pytest.mark.parametrize("arguments", commands("dflash-convert"), ids=" ".join)
def test_converter_options_exist(arguments, capsys):
    with pytest.raises(SystemExit):
        convert_cli.main(["--help"])
    known = capsys.readouterr().out
    assert all(argument in known for argument in arguments if argument.startswith("--"))


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^(?:.*`)?make (\w+)", TEXT, flags=re.MULTILINE))
    assert {"demo", "test", "lint"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


def test_files_named_exist():
    linked = {target for target in re.findall(r"\]\(([^)]+)\)", TEXT) if "://" not in target}
    quoted = set(re.findall(r"`((?:tests|benchmarks|\.ci)/[\w./]+)`", TEXT))
    assert linked
    assert quoted
    assert [name for name in sorted(linked | quoted) if not (ROOT / name).exists()] == []


def test_every_figure_is_a_row_of_the_results():
    spec = importlib.util.spec_from_file_location("readme_table", ROOT / "benchmarks" / "readme_table.py")
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    quoted = re.search(r"<!-- numbers -->\n(.*?)<!-- /numbers -->", TEXT, flags=re.DOTALL).group(1).splitlines()
    assert quoted[0] == f"| {' | '.join(table.HEADER)} |"
    known = {text for _, text in table.lines()}
    assert [text for text in quoted[2:] if text not in known] == []


def test_table_lines_hold_every_column():
    spec = importlib.util.spec_from_file_location("readme_table", ROOT / "benchmarks" / "readme_table.py")
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    row = {
        "case": "step B1", "metric": "median", "value": 3.14159, "unit": "ms", "floor": 2.0, "peer": "other", "peer_value": None,
        "device": "GPU", "date": "2026-01-01", "commit": "abc",
    }  # fmt: skip
    assert table.line(row) == "| step B1 | median | 3.142 ms | 2 ms | - | GPU | 2026-01-01 | abc |"
    assert table.line(row | {"peer_value": 4}).count("4 ms (other)") == 1
