"""One wheel with three import packages, and what an installation of it can and cannot do."""

import json
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

import pytest

VERSION = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["version"]
PACKAGES = ("dflash_convert", "dflash_jax", "dflash_kernels")
MAX_WHEEL_BYTES = 26_000_000
ROOT_NAMES = ("kernels", "convert", "tests", "benchmarks", "notebooks")


@pytest.fixture(params=["installed", "editable"])
def environment(request):
    return request.getfixturevalue(request.param)


def test_wheel_holds_the_packages_and_the_pair(wheel, sources):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {PurePosixPath(name).parts[0] for name in names} == {*PACKAGES, f"dflash_jax-{VERSION}.dist-info"}
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    roots = [sources, sources / "kernels", sources / "convert"]
    modules = {path.relative_to(root) for root in roots for path in root.glob("dflash_*/**/*.py")}
    assert {str(path) for path in modules} <= names
    tables = {str(path.relative_to(sources / "kernels")) for path in (sources / "kernels").glob("*/*/tuning.json")}
    assert tables <= names
    pair = {str(path.relative_to(sources)) for path in (sources / "dflash_jax" / "pair").glob("*/*")}
    assert {f"dflash_jax/pair/{part}/model.safetensors" for part in ("target", "draft")} <= pair <= names


def test_wheel_stays_small(wheel):
    assert wheel.stat().st_size < MAX_WHEEL_BYTES


def test_nothing_else_lands_in_site_packages(installed):
    found = {path.name for path in installed.packages.iterdir()} - {"dependencies.pth", "__pycache__"}
    assert found == {*PACKAGES, f"dflash_jax-{VERSION}.dist-info"}


def test_folders_of_the_repository_are_not_importable(environment):
    code = """
import importlib.util, json
specs = [spec for spec in map(importlib.util.find_spec, %r) if spec]
print(json.dumps([[str(place) for place in spec.submodule_search_locations or [spec.origin]] for spec in specs]))
"""
    for places in environment.evaluate(code % (ROOT_NAMES,)):
        # A package of that name may be installed beside this one; it must be that one that is found.
        assert all("site-packages" in place and not place.startswith(str(environment.packages)) for place in places)


def test_imports_work_from_another_folder(environment, sources):
    code = "import json, dflash_jax, dflash_kernels, dflash_convert\n"
    code += "print(json.dumps([module.__file__ for module in (dflash_jax, dflash_kernels, dflash_convert)]))"
    root = environment.packages if (environment.packages / "dflash_jax").exists() else sources / "src"
    names = ("dflash_jax", "dflash_kernels", "dflash_convert")
    assert environment.evaluate(code) == [str(root / name / "__init__.py") for name in names]


def test_what_an_editable_install_finds_is_what_is_edited(editable, sources):
    for root, name in (
        (sources, "dflash_jax"),
        (sources / "kernels", "dflash_kernels"),
        (sources / "convert", "dflash_convert"),
    ):
        new = root / name / "added_by_a_test.py"
        new.write_text("VALUE = 7\n")
        try:
            assert editable.evaluate(f"import json, {name}.added_by_a_test as new; print(json.dumps(new.VALUE))") == 7
        finally:
            new.unlink()


TYPED = """
import dflash_convert.errors
import dflash_jax as dj
import dflash_kernels

model = dj.load()
reveal_type(model)
reveal_type(dj.generate(model, "a").text)
reveal_type(dflash_kernels.paged_attention)
reveal_type(dflash_convert.errors.OutputError("x"))
"""


@pytest.mark.few("editable")
def test_a_type_checker_finds_the_packages_from_another_folder(environment, tmp_path):
    """And so an editor does: it reads path files, but runs none."""
    (tmp_path / "mine.py").write_text(TYPED)
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    python = environment.folder / "bin" / "python"
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", str(python), str(tmp_path / "mine.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert report["summary"]["errorCount"] == 0, report["generalDiagnostics"]
    told = [line["message"] for line in report["generalDiagnostics"] if line["severity"] == "information"]
    types = [line.partition(" is ")[2].strip('"') for line in told]
    assert [types[0], types[1], types[3]] == ["Model", "str", "OutputError"]
    assert types[2].startswith("(")  # a function with its arguments
    assert "Unknown" not in types[2]


@pytest.mark.few("installed")
def test_command_finds_the_pair_that_ships(environment):
    facts = json.loads(environment.run("dflash-jax", "info", "--json"))
    assert facts["versions"]["dflash-jax"] == VERSION
    assert [model["role"] for model in facts["models"]] == ["target", "draft"]


def test_commands_start(installed):
    assert "generate" in installed.run("dflash-jax", "--help")
    assert "--output" in installed.run("dflash-convert", "--help")


def test_version_is_that_of_the_metadata(installed):
    assert installed.evaluate("import json, dflash_jax; print(json.dumps(dflash_jax.__version__))") == VERSION
