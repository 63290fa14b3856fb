"""What README and docs say is so: their Python runs, commands parse, files exist, figures are the results'."""

import functools
import importlib.util
import inspect
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import dflash_kernels
import pytest
from dflash_convert import cli as convert_cli

import dflash_jax as dj
from dflash_jax.cli.commands import COMMANDS
from dflash_jax.cli.parser import build_parser

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
LONGEST_README = 160  # lines


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


def commands(program: str) -> list[list[str]]:
    lines = "".join(blocks("sh")).splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.split()[:1] == [program]]


def test_python_runs(capsys, monkeypatch):
    # As written, but for short texts only, which leaves `warmup` fewer programs to compile.
    monkeypatch.setattr(dj, "load", functools.partial(dj.load, max_model_len=128, max_batch=1))
    names: dict = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    assert len(names["out"].token_ids) == 64
    assert capsys.readouterr().out.startswith(names["out"].text)


def test_first_block_is_short():
    assert len([line for line in blocks("python")[0].splitlines() if line]) <= 5


def test_a_published_model_is_run_before_anything_else_is_told():
    """Whoever comes with a GPU finds every command, in the order they are needed, without scrolling past tables."""
    sections = re.findall(r"^## (.*)$", TEXT, flags=re.MULTILINE)
    assert sections[:3] == ["Try it", "Run Qwen3-4B with its drafter", "Install"]
    assert len(TEXT.splitlines()) <= LONGEST_README
    run = next(block for block in blocks("sh") if "Qwen/Qwen3-4B" in block)
    steps = re.findall(r"^(pip install|dflash-convert|dflash-jax \w+)", run, flags=re.MULTILINE)
    assert steps == ["pip install", "dflash-convert", "dflash-jax info", "dflash-jax generate", "dflash-jax bench"]
    folder = re.search(r"--output (\S+)", run)
    assert folder is not None
    assert all(folder[1] in line for line in run.splitlines() if line.startswith("dflash-"))


@pytest.mark.parametrize("arguments", commands("dflash-jax"), ids=" ".join)
def test_commands_parse(arguments):
    assert build_parser().parse_args(arguments).command in COMMANDS


@pytest.mark.parametrize("arguments", commands("dflash-convert"), ids=" ".join)
def test_converter_options_exist(arguments, capsys):
    with pytest.raises(SystemExit):
        convert_cli.main(["--help"])
    known = capsys.readouterr().out
    assert all(argument in known for argument in arguments if argument.startswith("--"))


def test_the_reference_is_written_from_the_docstrings():
    """In a process without the test run's type checks, which change signatures."""
    code = "import make_api; print(make_api.written(), end='')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "docs", capture_output=True, text=True, check=True)
    assert done.stdout == (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), "run python docs/make_api.py"


@pytest.mark.parametrize("function", [dj.load, dj.SamplingParams, dj.generate], ids=lambda one: one.__name__)
def test_options_are_all_documented(function):
    """Each option of a signature is told of under Args or Attributes, and nothing else is."""
    listed = re.findall(r"^ {2,6}(\w+(?:, \w+)*): ", inspect.getdoc(function) or "", flags=re.MULTILINE)
    documented = [name for names in listed for name in names.split(", ") if not name[0].isupper()]
    assert sorted(documented) == sorted(inspect.signature(function).parameters)


def test_every_operation_is_listed_with_its_implementations():
    text = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[\w`, ]+`) \| .* \| (`[\w`, ]+`) \|$", text, flags=re.MULTILINE)
    listed = {name: re.findall(r"\w+", names) for ops, names in rows for name in re.findall(r"\w+", ops)}
    functions = {name: getattr(dflash_kernels, name) for name in dflash_kernels.__all__}
    taking = {name for name, one in functions.items() if "implementation" in getattr(one, "__annotations__", ())}
    assert taking
    assert set(listed) == taking
    of_folders: dict[Path, set[str]] = {}  # what some operation of a folder has
    for name, names in listed.items():
        source = Path(inspect.getfile(sys.modules[functions[name].__module__])).parent
        of_folders.setdefault(source, set()).update(names)
        assert "xla" in names, name
    for source, names in of_folders.items():
        assert ("triton" in names) == (source / "triton.py").exists(), source
        assert ("mosaic_gpu" in names) == any(source.glob("mosaic_gpu*.py")), source


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = {
        name for path in DOCS for name in re.findall(r"^(?:.*`)?make (\w+)", path.read_text(), flags=re.MULTILINE)
    }
    assert {"demo", "test", "lint"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_named_exist(path):
    text = path.read_text(encoding="utf-8")
    linked = {path.parent / target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target}
    quoted = {
        ROOT / name for name in re.findall(r"`((?:tests|benchmarks|docs|dflash_jax|kernels|\.ci)/[\w./]+)`", text)
    }
    assert [str(name) for name in sorted(linked | quoted) if not name.exists()] == []


def anchors(text: str) -> set[str]:
    """What headings of a document are linked to by, as GitHub makes it of them."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    plain = [re.sub(r"\]\([^)]*\)|[`*\[]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_headings_named_exist(path):
    """Of documents here, by links and, in notebooks, by the name of a heading."""
    text = path.read_text(encoding="utf-8")
    linked = [
        (path.parent / file if file else path, at) for file, at in re.findall(r"\]\(([^)#\s:]*)#([\w-]+)\)", text)
    ]
    assert [f"{file}#{at}" for file, at in linked if at not in anchors(file.read_text(encoding="utf-8"))] == []


def test_notebooks_name_headings_of_the_readme():
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "notebooks").glob("*.ipynb")]
    named = {heading for text in texts for heading in re.findall(r'README under \\"(.*?)\\"', text)}
    assert named
    assert {heading.lower().replace(" ", "-") for heading in named} <= anchors(TEXT)


def test_readme_leads_to_every_document():
    linked = set(re.findall(r"\]\((docs/\w+\.md)\)", TEXT))
    assert linked == {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}


@pytest.fixture(scope="module")
def tables():
    """The script that fills the tables."""
    spec = importlib.util.spec_from_file_location("readme_table", ROOT / "benchmarks" / "readme_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_what_the_results_say(tables):
    for path in tables.FILES:
        text = path.read_text(encoding="utf-8")
        assert tables.BLOCK.search(text), path
        assert tables.filled(text) == text, f"{path}: run benchmarks/readme_table.py"


def test_every_result_is_in_the_complete_tables(tables):
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    shown = {path for found in tables.BLOCK.finditer(text) for path in tables.files(found[2])}
    assert shown == set(tables.RESULTS.glob("*.json"))


def test_figures_in_the_text_are_rows(tables):
    rows = {
        row["metric"]: tables.show(row["value"])
        for row in tables.read("pair")
        if row["case"] == "pair T0 B1 bfloat16" and row["device"] == "NVIDIA H200"
    }
    fast, plain, gained = (
        rows[metric] for metric in ("decode with drafting", "decode without drafting", "acceptance, mean over cycles")
    )
    words = " ".join(TEXT.split())
    assert f"decodes {fast} tokens a second with drafting and {plain} without, {gained} tokens to a cycle" in words
    cycles = {
        row["case"]: row
        for row in tables.read("decode")
        if row["case"].startswith("cycle") and row["device"] == "NVIDIA H200"
    }
    for model, said in (
        ("4b", "takes {} ms for one sequence and {} ms for eight, vLLM's {} and {}"),
        ("8b", "{} and {} ms, vLLM's {} and {}"),
    ):
        one, eight = (cycles[f"cycle qwen3-{model}-b16 ctx1k B{batch}"] for batch in (1, 8))
        figures = [tables.show(row[key]) for key in ("value", "peer_value") for row in (one, eight)]
        assert said.format(*figures) in words


ROW = {
    "case": "step B1", "metric": "median", "value": 3.14159, "unit": "ms", "floor": None, "peer": None, "peer_value": None,
    "device": "GPU", "date": "2026-01-01", "commit": "abc", "command": "measure", "versions": {"jax": "1"},
}  # fmt: skip


def test_tables_have_the_columns_that_rows_fill(tables):
    assert tables.table([ROW]) == "| case | median | GPU |\n| --- | --- | --- |\n| step B1 | 3.142 ms | GPU |"
    full = ROW | {"metric": "mean", "value": 12345.6, "floor": 2.0, "peer": "other, elsewhere", "peer_value": 4}
    assert tables.table([full, ROW]).splitlines() == [
        "| case | metric | measured | GPU | floor | peer |",
        "| --- | --- | --- | --- | --- | --- |",
        "| step B1 | mean | 12,346 ms | GPU | 2 ms | 4 ms (other) |",
        "| step B1 | median | 3.142 ms | GPU | - | - |",
    ]


def test_what_tables_are_followed_by_is_wrapped_between_commands(tables):
    command, rest = f"`measure {'--option ' * 12}`", "(abc, 2026-01-01, GPU), with one 1.2.3:"
    assert tables.wrapped(f"Measured by {command} {rest}").splitlines() == [f"Measured by {command}", rest]
    words = tables.wrapped("word " * 60).splitlines()
    assert [len(line) for line in words] == [129, 129, 39]


def test_figures_stand_by_numbers_of_sequences(tables, tmp_path, monkeypatch):
    """Whichever run measured them; rows that are not all of such cases stay as they are."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    cases = "step B16", "cycle B16", "step B2", "cycle B2", "cycle B2 int8"
    (tmp_path / "one.json").write_text(json.dumps([ROW | {"case": case} for case in cases]))

    def shown(pattern):
        return re.findall(r"^\| (\w+ B.*?) \|", tables.figures("one", [pattern]), flags=re.MULTILINE)

    assert shown("(step|cycle) B[0-9]+") == ["step B2", "cycle B2", "step B16", "cycle B16"]
    assert shown(".*") == list(cases)


def test_tables_are_filled_from_the_files(tables, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    (tmp_path / "one.json").write_text(json.dumps([ROW, ROW | {"case": "other", "commit": None, "histogram": [3, 1]}]))
    blocks = ("figures on* step.*", "old\n", "figures"), ("rows none", "", "rows"), ("rows one", "", "rows")
    text = "\n".join(f"<!-- {head} -->\n{body}<!-- /{kind} -->" for head, body, kind in blocks)
    filled = tables.filled(text)
    assert tables.filled(filled) == filled
    short, rest = filled.split("<!-- /figures -->")
    assert short.endswith("| step B1 | 3.142 ms | GPU |\n\nMeasured by `measure` (abc, 2026-01-01, GPU).\n")
    empty, whole = rest.split("<!-- rows one -->")
    assert "No results are kept." in empty
    assert "`measure` (commit not recorded, 2026-01-01, GPU),\nwith jax 1:\n" in whole
    assert "Cycles of `other` (median) that gained 1, 2, ... tokens: 3, 1." in whole
    with pytest.raises(ValueError, match="no row of one matches nothing"):
        tables.filled(text.replace("on* step.*", "one nothing"))


def test_the_chart_is_drawn_from_rows(script):
    chart = script("chart")
    assert chart.CHART.read_text(encoding="utf-8") == chart.drawn(chart.values()), "run python benchmarks/chart.py"
