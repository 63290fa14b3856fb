"""The scripts of benchmarks; and the package as a user installs it: a wheel, and virtual environments that hold it.

Nothing is downloaded: the wheel is built with the setuptools at hand, and the environments see the dependencies of the running
one through a path file.
"""

import importlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
SOURCES = ("dflash_jax", "kernels", "convert", "src", "pyproject.toml", "README.md", "LICENSE")


@dataclass(frozen=True)
class Environment:
    """A virtual environment with this package and nothing else of its own."""

    folder: Path

    @property
    def packages(self) -> Path:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder / "lib" / version / "site-packages"

    def install(self, *what: str) -> None:
        flags = ["--no-deps", "--no-build-isolation", "--no-index"]
        python = ["--python", str(self.folder / "bin" / "python")]
        subprocess.run([*PIP, *python, "install", *flags, *what], check=True, capture_output=True)

    def run(self, *command: str) -> str:
        """Output of a program of the environment, started from a folder that holds nothing."""
        elsewhere = self.folder / "elsewhere"
        elsewhere.mkdir(exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        program = [str(self.folder / "bin" / command[0]), *command[1:]]
        done = subprocess.run(program, cwd=elsewhere, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def python(self, code: str) -> str:
        return self.run("python", "-c", code)

    def evaluate(self, code: str):
        """What the last line of `code` prints as JSON."""
        return json.loads(self.python(code).splitlines()[-1])


def make_environment(folder: Path) -> Environment:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    environment = Environment(folder)
    # A plain path: path files inside that folder, such as that of an editable install, are not followed.
    (environment.packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return environment


@pytest.fixture(scope="session")
def script() -> Iterator[Callable[[str], Any]]:
    """Imports a script of the folder of benchmarks."""
    folder = str(ROOT / "benchmarks")
    sys.path.insert(0, folder)
    yield importlib.import_module
    sys.path.remove(folder)


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the wheel is made from; building leaves files behind."""
    folder = tmp_path_factory.mktemp("sources")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=ignored, symlinks=True)
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(sources)]
    subprocess.run(build, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel."""
    environment = make_environment(tmp_path_factory.mktemp("installed"))
    environment.install(str(wheel))
    return environment


@pytest.fixture(scope="session")
def editable(wheel: Path, sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with an editable install of the copy (made after the wheel, which must not see its traces)."""
    environment = make_environment(tmp_path_factory.mktemp("editable"))
    environment.install("--editable", str(sources))
    return environment
