"""GPU tests that need jax-triton where it is not installed: they are not run and say so; nothing else is excused."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
CASES = """
import importlib
import sys

import pytest
from dflash_kernels.core.dispatch import NoImplementationError, first_fitting
from dflash_kernels.core.triton_call import jax_triton


class Absent:
    def find_spec(self, name, *_):
        if name in ("triton", "jax_triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Absent())


def refuses(*_):
    raise NotImplementedError("needs another GPU")


def triton(*_):
    return jax_triton()


@pytest.mark.gpu
def test_named():
    first_fitting("an_op", {"mosaic_gpu": refuses, "triton": triton}, "triton")


@pytest.mark.gpu
def test_asked_for():
    jax_triton()


@pytest.mark.gpu
def test_others_refused_first():
    first_fitting("an_op", {"mosaic_gpu": refuses, "triton": triton}, ("mosaic_gpu", "triton"))


@pytest.mark.gpu
def test_another_refusal():
    first_fitting("an_op", {"mosaic_gpu": refuses}, "mosaic_gpu")


@pytest.mark.gpu
def test_expected():
    with pytest.raises(NoImplementationError, match="jax-triton"):
        first_fitting("an_op", {"triton": triton}, "triton")


def test_without_the_mark():
    jax_triton()
"""


def outcomes(folder: Path, chosen: str) -> dict[str, str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "conftest",
        "-p",
        "no:cacheprovider",
        "-v",
        "-rs",
        "-m",
        chosen,
        str(folder),
    ]
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    lines = [line.split() for line in done.stdout.splitlines() if "::" in line and "%]" in line]
    found = {line[0].partition("::")[2]: line[1] for line in lines}
    return found | {"told": "yes" if "jax-triton is not installed: pip install" in done.stdout else "no"}


def test_what_needs_jax_triton_is_not_run_and_the_rest_fails(tmp_path):
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu: needs a GPU\n")
    assert outcomes(tmp_path, "gpu") == {
        "test_named": "SKIPPED", "test_asked_for": "SKIPPED", "test_others_refused_first": "FAILED",
        "test_another_refusal": "FAILED", "test_expected": "PASSED", "told": "yes",
    }  # fmt: skip
    assert outcomes(tmp_path, "not gpu") == {"test_without_the_mark": "FAILED", "told": "no"}
