"""Notebooks: short, of public names, run from top to bottom, and kept with the outputs of what stands in them."""

import ast
import importlib
import re
import sys
from pathlib import Path

import nbformat
import pytest

HERE = Path(__file__).parents[2] / "notebooks"
sys.path.insert(0, str(HERE))
from make_outputs import digest, run  # noqa: E402

NOTEBOOKS = sorted(HERE.glob("*.ipynb"))
MAX_CELLS = 26
MAX_LINE = 96  # of code, as notebooks/ruff.toml has it for the formatter
MAX_PRINTED = 112  # characters of a line of text in a page 1,000 pixels wide
MAX_BYTES = 1_500_000
# Modules of this repository whose `__all__` notebooks may import from, and the command line's entry.
PUBLIC = ("dflash_jax", "dflash_jax.bench", "dflash_kernels")
COMMAND = ("dflash_jax.cli", "main")
# What these decode as they stand takes longer than compiling it, and optimising saves more than it costs.
DECODING = ("01_quickstart",)
# Shorter texts, one prompt, one user and fewer steps, where not all cases run: every cell does what it does.
SMALLER = {
    "01_quickstart": {"max_tokens=64": "max_tokens=8", "model, prompts, params": "model, prompts[:1], params"},
    "02_your_own_models": {"max_tokens=40": "max_tokens=8"},
    "05_benchmark": {"max_batch=2": "max_batch=1", "prompts, 32)": "prompts, 8)", "users in (1, 2)": "users in (1,)"},
    "06_train_a_drafter": {"--steps 20": "--steps 4"},
}

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])


def code_cells(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert len(notebook.cells) <= MAX_CELLS
    return notebook, [cell for cell in notebook.cells if cell.cell_type == "code"]


@each_notebook
def test_a_notebook_is_short_and_its_lines_fit(path):
    _, cells = code_cells(path)
    assert all(len(line) <= MAX_LINE for cell in cells for line in cell.source.splitlines())


@each_notebook
def test_outputs_are_kept_and_are_of_this_code(path):
    notebook, cells = code_cells(path)
    assert notebook.metadata.outputs_of == digest(notebook), "run make notebooks"
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        says = re.search(r"\b(print|show|main)\(|^\w+$", cell.source, re.MULTILINE)
        assert bool(cell.outputs) == bool(says), cell.source
        assert ("plt.show()" in cell.source) == ("image/png" in kinds(cell)), cell.source
        assert not {"error", "stderr"} & set(kinds(cell)), cell.source
        for line in "\n".join(texts(cell)).splitlines():
            assert len(line) <= MAX_PRINTED, line
            assert not re.search(r"/(tmp|home|work|root|Users)/", line), line  # whose machine it was, nobody needs


def test_outputs_are_small():
    assert sum(path.stat().st_size for path in NOTEBOOKS) <= MAX_BYTES


def kinds(cell) -> list[str]:
    """What the outputs of a cell are: a stream's name, types of data, or an error."""
    found = []
    for one in cell.outputs:
        found += sorted(one.data) if "data" in one else [one.get("name", one.output_type)]
    return found


def texts(cell) -> list[str]:
    """What is shown as text: streams, and results that have no other form."""
    shown = [one.get("data", {"text/plain": one.get("text", "")}) for one in cell.outputs]
    return [data["text/plain"] for data in shown if len(data) == 1]


@each_notebook
def test_names_are_public(path):
    _, cells = code_cells(path)
    for node in ast.walk(ast.parse("\n".join(cell.source for cell in cells))):
        if isinstance(node, ast.Import):
            ours = [alias.name for alias in node.names if alias.name.startswith("dflash")]
            assert all(name in PUBLIC for name in ours), ours
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dflash"):
            names = {alias.name for alias in node.names}
            if (node.module, *names) != COMMAND:
                assert node.module in PUBLIC
                assert names <= set(importlib.import_module(node.module).__all__), names
        elif isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_") or node.attr.endswith("__"), node.attr


@each_notebook
def test_a_notebook_runs_and_its_outputs_are_of_the_same_kinds(path, tmp_path, all_cases):
    kept, cells = code_cells(path)
    env = {"IPYTHONDIR": str(tmp_path)}
    if all_cases:
        env |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"} if path.stem in DECODING else {}
    else:
        for words, fewer in SMALLER.get(path.stem, {}).items():
            assert any(words in cell.source for cell in cells), words
            for cell in cells:
                cell.source = cell.source.replace(words, fewer)
    run(kept, tmp_path, env)  # the outputs of `cells` take the place of those that were kept
    _, before = code_cells(path)
    assert [kinds(cell) for cell in cells] == [kinds(cell) for cell in before]
