"""Programs that the tests of one run share: what one test has compiled, no other test and no other process compiles again.

They are kept as a user's are (`dflash_jax.compile.executable_cache`), and within a process as they are called.
"""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from dflash_jax.compile.executable_cache import StoredPrograms

# The variable that names the folder of the run.
FOLDER = "DFLASH_JAX_TEST_PROGRAMS"
# What runs around programs, and is no part of one.
AROUND = (
    "dflash_jax.bench", "dflash_jax.checkpoints", "dflash_jax.cli", "dflash_jax.engine", "dflash_jax.serving", "dflash_jax.text",
    "os", "sys", "time",
)  # fmt: skip


def traced(target: Any) -> bool:
    """Whether an attribute of this module, class or object, or what a text names, may be traced: all is that is not `AROUND`."""
    if isinstance(target, ModuleType):
        name = target.__name__
    elif isinstance(target, str):
        name = target
    else:
        name = (target if isinstance(target, type) else type(target)).__module__
    # What the package itself names is what others call.
    return name != "dflash_jax" and not any(name == known or name.startswith(known + ".") for known in AROUND)


class SharedPrograms:
    """What `Programs.stored` is while tests run.

    Args:
      folder: for all processes of the run.
    """

    def __init__(self, folder: Path):
        self.on_disk = StoredPrograms(folder, make=True)
        self.called: dict[str, jax.stages.Compiled] = {}

    def program(
        self, function: Callable, static: tuple, donate: tuple[int, ...], args: tuple,
        lower: Callable[[], jax.stages.Lowered],
    ) -> tuple[jax.stages.Compiled, Callable[[], object]]:  # fmt: skip
        """See `StoredPrograms.program`. A test's own function is compiled each time: it may be another one under the same name."""
        home = vars(sys.modules[function.__module__]).get(function.__qualname__)
        if home is not function or not function.__module__.startswith("dflash_jax."):
            return lower().compile(), _nothing
        key = self.on_disk.key(function, static, donate, args)
        if key is not None and (known := self.called.get(key)) is not None:
            return known, _nothing
        program, keep = self.on_disk.program(function, static, donate, args, lower)
        if key is not None:
            self.called[key] = program
        return program, keep


@functools.cache
def shared() -> SharedPrograms:
    """This process's, in the folder of the run."""
    return SharedPrograms(Path(os.environ[FOLDER]))


def _nothing() -> None:
    pass
