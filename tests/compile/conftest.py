"""What tests of compiled programs share: the folder of a random pair, and files of other users."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..cli.conftest import target

__all__ = ["target"]


@pytest.fixture
def belongs(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, int], None]:
    """Gives a file or folder to another user: root really does, for others the system's answers are changed."""
    owners: dict[tuple[int, int], int] = {}

    def changed(ask: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def answer(*what: Any, **options: Any) -> os.stat_result:
            found = ask(*what, **options)
            owner = owners.get((found.st_dev, found.st_ino), found.st_uid)
            return os.stat_result((*found[:4], owner, *found[5:]))

        return answer

    def give(path: Path, user: int) -> None:
        if os.geteuid() == 0:
            os.chown(path, user, -1)
            return
        found = path.stat()
        if not owners:
            monkeypatch.setattr(os, "stat", changed(os.stat))
            monkeypatch.setattr(os, "fstat", changed(os.fstat))
        owners[found.st_dev, found.st_ino] = user

    return give
