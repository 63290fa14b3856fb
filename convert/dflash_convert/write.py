"""Writing folders that appear whole or not at all.

Everything is written to a temporary sibling, forced to disk, and renamed; whenever the process dies, the output's name either does
not exist or is a whole folder. A converted folder is recognised by its marker, which is the last file written.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from orbax.checkpoint import v1 as ocp

from dflash_convert.errors import OutputError, OutputExistsError
from dflash_jax.checkpoints.atomic import uninterrupted
from dflash_jax.checkpoints.cache_scales import CONVERTED_SCALES, save_scales
from dflash_jax.checkpoints.converted import FORMAT, MARKER, PARAMS, group_names, release_memory, sha256_of
from dflash_jax.checkpoints.hf_folder import SIDECARS
from dflash_jax.checkpoints.huggingface import HuggingFaceCheckpoint, assemble

# Called with a phase's name and its bytes; the context gives a function to call with every piece's bytes.
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], Any]]]

# Larger arrays are stored in several pieces, which are written and read side by side without a second copy of the whole.
_PIECE_BYTES = 64 << 20
# Removing what was begun: how often at most, and how long it must stay gone.
_LOOKS, _BETWEEN_LOOKS_S = 50, 0.1
# No room: of the disk, of a quota, of what a process may write.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SYSTEM_ERROR = re.compile(r"os_error_code='(\d+)'")


def silent(phase: str, nbytes: int) -> AbstractContextManager[Callable[[int], Any]]:
    """The `Progress` that shows nothing."""
    return nullcontext(lambda count: None)


@contextmanager
def output_folder(output: Path, *, overwrite: bool = False, nbytes: int = 0) -> Iterator[Path]:
    """A temporary folder that becomes `output` when the block ends well, and disappears when it does not.

    An interrupt leaves nothing else behind either, whenever it comes: once the folder takes its place, it is heard afterwards.

    Args:
      overwrite: replace an existing converted folder.
      nbytes: of what will be written, at least.

    Raises:
      OutputExistsError: `output` exists and is not a converted folder, or `overwrite` is false.
      OutputError: nothing can be written there, the disk has less room than `nbytes`, or it fills up meanwhile.
    """
    output = _named(output)
    temporary = output.with_name(f"{output.name}.tmp-{os.getpid()}")
    try:
        made = [folder for folder in output.parents if not folder.exists()]
    except OSError as error:
        raise _unusable(output, error) from error
    ours, lock = False, None
    try:
        _prepare(output, overwrite=overwrite, nbytes=nbytes)
        # Asked before: an interrupt may come as soon as it is made.
        ours = not os.path.lexists(temporary)
        _make(temporary, output)
        lock = _lock(temporary)
        yield temporary
        _sync(temporary)
        refuse_existing(output, overwrite=overwrite)
        with uninterrupted():
            _replace(temporary, output)
    except BaseException as error:
        with uninterrupted():
            if ours:
                _remove(temporary)
            for folder in made:  # the innermost first
                with suppress(OSError):  # it holds something
                    folder.rmdir()
        if isinstance(error, OSError) and error.errno in _FULL:
            raise OutputError(
                f"{output} cannot be written ({error.strerror}): nothing is left of it; make room or name another output"
            ) from error
        raise
    finally:
        if lock is not None:
            os.close(lock)


def _named(output: Path) -> Path:
    """The absolute path of a folder that has a name of its own, which "..", for one, is not."""
    output = output.absolute()
    if output.name in ("", ".."):
        output = Path(os.path.realpath(output))
    if not output.name:
        raise OutputExistsError(f"{output} is the root of the file system; name another output")
    return output


def _unusable(output: Path, error: OSError) -> OutputError:
    return OutputError(f"{output} cannot be written ({error}); name another output")


def _prepare(output: Path, *, overwrite: bool, nbytes: int) -> None:
    """Makes the folder above, and refuses what cannot be written there."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with uninterrupted():
            _clean(output)
        refuse_existing(output, overwrite=overwrite)
        free = shutil.disk_usage(output.parent).free
    except OSError as error:
        raise _unusable(output, error) from error
    if nbytes > free:
        raise OutputError(
            f"{output} takes {nbytes:,} bytes, its disk has {free:,} free; make room or name another output"
        )


def _make(folder: Path, output: Path) -> None:
    try:
        folder.mkdir()
    except OSError as error:
        raise _unusable(output, error) from error


def _replace(temporary: Path, output: Path) -> None:
    """Puts the temporary folder in its place. What lay there is put back where that fails, and removed where it does not."""
    old = temporary.with_name(temporary.name + ".old")
    replaces = output.exists()
    try:
        if replaces:
            output.rename(old)
        temporary.rename(output)
    except BaseException:
        if old.exists() and not output.exists():
            old.rename(output)
        raise
    try:
        _sync_path(output.parent)
    finally:
        if replaces:
            old.rename(temporary)  # a name that is removed whatever happens from here on
            shutil.rmtree(temporary, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Removes a folder in which Orbax's threads may still be writing, as they do when another one's write has failed.

    They make what they miss, so it is looked at once more.
    """
    for _ in range(_LOOKS):
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(_BETWEEN_LOOKS_S)
        if not os.path.lexists(folder):
            return


def refuse_existing(output: Path, *, overwrite: bool) -> None:
    """Raises OutputExistsError if `output` is there and may not be replaced, OutputError if that cannot be told."""
    try:
        linked, marked = output.is_symlink(), (output / MARKER).is_file()
        if not (linked or output.exists()):
            return
    except OSError as error:
        raise _unusable(output, error) from error
    if linked or not marked:
        raise OutputExistsError(
            f"{output} exists and is not a converted folder ({MARKER}); remove it or name another output"
        )
    if not overwrite:
        raise OutputExistsError(
            f"{output} already holds a converted checkpoint; name another output or pass --overwrite (overwrite=True)"
        )


def _lock(folder: Path) -> int | None:
    """A lock on the folder that ends with this process, or None when another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _clean(output: Path) -> None:
    """Removes what earlier runs for the same output left when they were killed.

    A run that was killed between its two renames has moved the folder it replaces aside; that folder is put back.
    """
    prefix = f"{output.name}.tmp-"
    for entry in sorted(output.parent.iterdir()):
        pid = entry.name.removeprefix(prefix).removesuffix(".old")
        if not entry.name.startswith(prefix) or not pid.isdecimal() or entry.is_symlink() or not entry.is_dir():
            continue
        lock = _lock(entry)
        if lock is None or (int(pid) != os.getpid() and _alive(int(pid))):
            if lock is not None:
                os.close(lock)
            continue
        if entry.name.endswith(".old") and not output.exists():
            entry.rename(output)
        else:
            shutil.rmtree(entry, ignore_errors=True)
        os.close(lock)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sync(folder: Path) -> None:
    """Forces every file and folder below `folder` to disk."""
    for root, _, files in os.walk(folder):
        for name in files:
            _sync_path(Path(root, name))
        _sync_path(Path(root))


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_converted(
    folder: Path, checkpoint: HuggingFaceCheckpoint, origin: dict[str, Any], progress: Progress = silent
) -> None:
    """Writes a converted checkpoint into an existing empty folder, the marker last.

    Args:
      checkpoint: opened with the dtype to convert to.
      origin: where it came from, kept in the marker beside the hashes of its files.
    """
    _write_params(folder / PARAMS, checkpoint, progress)
    copy_sidecars(checkpoint.folder, folder)
    stored = checkpoint.stored_scales
    if stored is not None:
        save_scales(folder / CONVERTED_SCALES, stored.scales, "fp8")
    inputs = checkpoint.files.files
    with progress("hashing source", sum(path.stat().st_size for path in inputs)) as advance:
        sources = {path.name: _entry(path, advance) for path in inputs}
    outputs = sorted(path for path in folder.rglob("*") if path.is_file())
    with progress("hashing output", sum(path.stat().st_size for path in outputs)) as advance:
        written = {str(path.relative_to(folder)): _entry(path, advance) for path in outputs}
    plan = checkpoint.plan
    marker = {
        "format": FORMAT,
        "package": f"dflash-jax {version('dflash-jax')}",
        "family": checkpoint.family.name,
        "config": checkpoint.config.to_dict(),
        "source": {**origin, "files": sources},
        "outputs": written,
        "parameters": {
            step.parameter.name: {"shape": list(step.parameter.shape), "dtype": step.dtype} for step in plan.steps
        },
        "tensors": [{key: row[key] for key in ("source", "parameter", "row", "shape", "from")} for row in plan.rows()],
        "tied": {copy.name: other.name for copy, other in plan.tied},
        "left_out": list(plan.ignored),
        "notices": checkpoint.notices,
        "cache_dtype": checkpoint.cache_dtype,
        "cache_scales": [
            {"source": one.name, "layer": place, "side": side, "shape": list(one.shape), "from": one.dtype_name}
            for one, place, side in (() if stored is None else stored.tensors)
        ],
    }
    (folder / MARKER).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")


def _entry(path: Path, advance: Callable[[int], Any]) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path, advance)}


def copy_sidecars(source: Path, target: Path) -> None:
    """Copies configuration and tokenizer files that are present."""
    for name in SIDECARS:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _write_params(target: Path, checkpoint: HuggingFaceCheckpoint, progress: Progress) -> None:
    """One Orbax checkpoint, built group by group so that one group's arrays are all that is held."""
    steps = {step.parameter.name: step for step in checkpoint.plan.steps}
    context = ocp.Context()
    context.array.saving.use_compression = False
    context.array.saving.scoped_storage_options_creator = _storage
    context.memory.deepcopy_host_arrays = False
    with (
        _by_descriptor(target.parent) as folder,
        progress("converting", checkpoint.plan.nbytes) as advance,
        context,
        _system_errors(),
    ):
        for names in group_names({name: step.nbytes for name, step in steps.items()}):
            # Orbax stores no empty arrays; readers make them from the marker.
            arrays = {name: assemble(steps[name], steps[name].dtype, advance) for name in names if steps[name].nbytes}
            if arrays:
                ocp.partial.save(str(folder / target.name), arrays)
            del arrays
            release_memory()
        ocp.partial.finalize(str(folder / target.name))
    # Orbax notes here where it wrote to. The note is not read again, and a local path does not belong in a result.
    (target / "commit_success.txt").unlink(missing_ok=True)


@contextmanager
def _by_descriptor(folder: Path) -> Iterator[Path]:
    """A name of the folder that leads nowhere once it is removed; on systems without /proc the folder's own.

    When one of Orbax's writes has failed, others are still under way, and make the folders that they miss: after a tenth of a
    second on a busy machine. The descriptor is left open then, or its number could come to mean a folder of somebody else's.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    named = Path(f"/proc/self/fd/{descriptor}")
    yield named if named.is_dir() else folder
    os.close(descriptor)


@contextmanager
def _system_errors() -> Iterator[None]:
    """Turns what Orbax raises when the system refuses to write, a text with the system's number in it, into an OSError."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        number = _SYSTEM_ERROR.search(str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def _storage(key: object, value: np.ndarray) -> ocp.options.ArrayOptions.Saving.StorageOptions | None:
    """In how many pieces an array is stored: Orbax splits at divisors of the axes, so only where they have small ones."""
    if value.nbytes <= _PIECE_BYTES or any(size % 128 for size in value.shape):
        return None
    return ocp.options.ArrayOptions.Saving.StorageOptions(chunk_byte_size=_PIECE_BYTES)
