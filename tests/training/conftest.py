import email
import json
import shutil
from pathlib import Path

import pytest

from dflash_jax.training.settings import TINY, Settings, with_changes


@pytest.fixture(scope="session")
def sources(tmp_path_factory) -> Path:
    """A handful of Python files: two packages of the standard library."""
    folder = tmp_path_factory.mktemp("sources")
    for package in (email, json):
        for path in Path(package.__file__).parent.glob("*.py"):
            shutil.copy(path, folder / f"{package.__name__}_{path.name}")
    return folder


@pytest.fixture(scope="session")
def tiny(sources) -> Settings:
    return with_changes(TINY, folder=str(sources))
