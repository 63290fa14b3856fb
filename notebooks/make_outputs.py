"""Runs the notebooks and keeps their outputs in them: `python notebooks/make_outputs.py [NOTEBOOK ...]`, or `make notebooks`.

Each runs from top to bottom on the CPU, in a folder of its own that is thrown away. A digest of the code is kept beside the
outputs, by which a test sees outputs of other code than what stands there.
"""

import hashlib
import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
CELL_SECONDS = 600


def digest(notebook: nbformat.NotebookNode) -> str:
    """Of the code of all cells."""
    code = "\0".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()


def run(notebook: nbformat.NotebookNode, folder: str | Path, env: dict[str, str]) -> None:
    """Runs every cell in `folder`; outputs take the place of those that were there.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raised.
    """
    client = NotebookClient(
        notebook, timeout=CELL_SECONDS, kernel_name="python3", record_timing=False, coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    )  # fmt: skip
    client.execute(env=dict(os.environ) | env)


def keep(path: Path) -> None:
    """Runs a notebook and writes it back with its outputs, and without what differs from machine to machine for no reason."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        run(notebook, folder, {"JAX_PLATFORMS": "cpu", "IPYTHONDIR": folder})
    notebook.metadata.language_info = {"name": "python"}
    notebook.metadata.outputs_of = digest(notebook)
    nbformat.write(notebook, path)
    print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    for given in map(Path, sys.argv[1:] or sorted(HERE.glob("*.ipynb"))):
        keep(given)
