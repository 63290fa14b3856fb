"""Files that are there whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """A path beside it, of the same suffix, for a file that takes its place when the block ends well and is gone otherwise."""
    path = Path(path)
    scratch = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        yield scratch
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
