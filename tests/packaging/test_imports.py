"""Imports run in one direction, dflash_kernels <- dflash_jax <- dflash_convert, and importing the package is cheap."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dflash_jax

ROOT = Path(__file__).parents[2]
# Each package, where it lies, and the packages of this repository it may import besides itself. One file may name one above it:
# users see all three packages through `dflash_jax`, so its list of public names says where `convert` is. No import runs there.
PACKAGES = {
    "dflash_kernels": (ROOT / "kernels" / "dflash_kernels", set()),
    "dflash_jax": (ROOT / "dflash_jax", {"dflash_kernels"}),
    "dflash_convert": (ROOT / "convert" / "dflash_convert", {"dflash_kernels", "dflash_jax"}),
}
FRONT = "dflash_jax/__init__.py"
MAX_IMPORT_SECONDS = 2.0


def imported(source: str) -> set[str]:
    """Top-level names a module imports anywhere, inside functions and by `import_module` or `__import__` of a literal too."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module or "")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names |= {str(argument.value) for argument in node.args if isinstance(argument, ast.Constant)}
    return {name.partition(".")[0] for name in names}


def test_the_check_sees_every_way_to_import():
    source = "import a.b\nfrom c.d import e\ndef f():\n    import g\n    importlib.import_module('h.i')\n    __import__('j')\n"
    assert imported(source) == {"a", "c", "g", "h", "j"}


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_in_one_direction(package):
    folder, allowed = PACKAGES[package]
    files = sorted(folder.rglob("*.py"))
    assert files
    forbidden = set(PACKAGES) - allowed - {package}
    wrong = {str(path.relative_to(ROOT)): names for path in files if (names := imported(path.read_text()) & forbidden)}
    assert wrong == ({FRONT: {"dflash_convert"}} if package == "dflash_jax" else {})


@pytest.mark.few
def test_the_front_loads_the_converter_when_it_is_asked_for():
    front = ast.parse((ROOT / FRONT).read_text())
    (unread,) = (node for node in front.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    front.body.remove(unread)
    assert "dflash_convert" not in imported(ast.unparse(front))
    code = "import sys, dflash_jax as dj; dj.load; print('dflash_convert' in sys.modules, dj.convert.__module__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "dflash_convert.convert"]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_reaches_into_tests_or_changes_the_path(package):
    folder, _ = PACKAGES[package]
    for path in folder.rglob("*.py"):
        source = path.read_text()
        assert not imported(source) & {"tests", "benchmarks"}, path
        assert "sys.path" not in source, path
        assert "__path__" not in source, path


def test_import_is_quick_and_starts_no_backend():
    names = ", ".join(dflash_jax.__all__)
    code = f"""
import sys, time
started = time.perf_counter()
import dflash_jax
print(time.perf_counter() - started, "jax" in sys.modules)
from dflash_jax import {names}
import dflash_kernels
from jax._src import xla_bridge
print(len(xla_bridge._backends))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, backends = done.stdout.splitlines()
    seconds, has_jax = first.split()
    assert float(seconds) < MAX_IMPORT_SECONDS
    assert has_jax == "False"
    assert backends == "0"


def test_every_public_name_is_there():
    assert all(getattr(dflash_jax, name) is not None for name in dflash_jax.__all__)
    assert sorted(dflash_jax.__all__) == dir(dflash_jax)


def test_former_names_are_the_same_objects():
    from dflash_convert import hf_reader

    from dflash_jax import cli, tokenizer
    from dflash_jax.checkpoints import huggingface
    from dflash_jax.cli import commands
    from dflash_jax.text import tokenizer as text_tokenizer

    assert all(getattr(hf_reader, name) is getattr(huggingface, name) for name in hf_reader.__all__)
    assert all(getattr(tokenizer, name) is getattr(text_tokenizer, name) for name in tokenizer.__all__)
    with pytest.raises(SystemExit) as ended:
        cli.main(["--no-such-option"])
    assert ended.value.code == commands.USAGE
