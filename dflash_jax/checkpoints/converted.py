"""Checkpoints on disk: this package's converted folders, and the door to every other kind.

A converted folder holds

    conversion.json   the marker, written last: family, our configuration, every array's dtype and shape, sha256 of all files
    params/           one Orbax checkpoint of the flat parameter dict
    cache_scales.json scales of float8 pages, where the source had them
    config.json, tokenizer.json, ...   copied from the source
    draft/            the same again for a drafter, where one was converted along
    vision/           the same again for the vision tower, where the source has one

A folder without the marker is not a checkpoint: an interrupted conversion never looks like a finished one. Hugging Face
folders are read by `huggingface.py`.
"""

import ctypes
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.checkpoints.cache_scales import CONVERTED_SCALES, read_converted_scales
from dflash_jax.checkpoints.finite import DAMAGED, TOO_LARGE, all_finite
from dflash_jax.checkpoints.json_files import read_object
from dflash_jax.checkpoints.prefetch import read_ahead
from dflash_jax.errors import CheckpointError, ParameterError
from dflash_jax.models import Family, family_named
from dflash_jax.options import FLOAT_DTYPES
from dflash_jax.parallel.ranks import Ranks
from dflash_jax.quantization.kv_formats import CacheScales

MARKER, PARAMS, DRAFT, VISION = "conversion.json", "params", "draft", "vision"
FORMAT = 1
# Arrays are written and read in groups: one Orbax call for each array would cost more than the small arrays themselves.
MIN_GROUP_BYTES = 64 << 20


@runtime_checkable
class Checkpoint(Protocol):
    """An opened checkpoint: checked, not yet loaded.

    Attributes:
      dtype: of most bytes of weights, which a model takes for all of them where no other is asked for.
      notices: what was ignored or decided on opening, one sentence each.
      vision: the tower beside a text model, with which pictures can be part of prompts; None without one.
      cache_dtype: "fp8" where it says, by its configuration or by scales, that keys and values are kept in float8.
      cache_scales: those scales, None where it has none.
    """

    family: Family
    config: Any  # of the family's config_class
    folder: Path
    dtype: str
    notices: list[str]
    cache_dtype: Literal["fp8"] | None
    cache_scales: CacheScales | None

    @property
    def vision(self) -> "Checkpoint | None":
        """See above."""
        ...

    def expect(self) -> None:
        """Tells that `load` will follow: the system may begin to read."""
        ...

    def load(
        self,
        dtype: str | None = None,
        ranks: Ranks | None = None,
        arrived: Callable[[], Any] | None = None,
        keep: Callable[[str, jax.Array], Any] | None = None,
    ) -> dict[str, Any]:
        """Every parameter on the default device. Host memory stays below twice the largest array plus 300 MB.

        Args:
          dtype: what parameters without a fixed dtype become; None keeps the stored one.
          ranks: devices that share them: each gets its share alone. Host memory stays below three times the largest array then.
          arrived: called for each parameter that is on its way to the device.
          keep: makes of a parameter, given by name, what stands in its place, as soon as it is there.
        """
        ...


def open_converted(folder: str | Path, *, hashes: bool = False) -> "Converted":
    """Opens a converted folder and checks it against its marker.

    Args:
      hashes: also compare every file's sha256; otherwise only presence and size.

    Raises:
      CheckpointError: no marker, or the folder is not what the marker says; lists every problem.
    """
    folder = Path(folder)
    if not (folder / MARKER).exists():
        problem = f"has no {MARKER}: not a converted checkpoint, or its conversion did not finish; run dflash-convert"
        raise CheckpointError(str(folder), problem)
    try:
        marker = read_object(folder / MARKER)
    except ValueError as error:
        raise CheckpointError(str(folder), f"{error}, or convert again") from error
    if (found := marker.get("format")) != FORMAT:
        raise CheckpointError(str(folder), f"{MARKER} has format {found!r}, expected {FORMAT}; convert again")
    try:
        checkpoint = Converted(folder, marker)
        problems = _table_problems(checkpoint) + _file_problems(folder, marker["outputs"], hashes)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(str(folder), f"{MARKER} is malformed ({error!r}); convert again") from error
    if problems:
        raise CheckpointError(f"{folder} is not what its {MARKER} says, convert again", problems)
    return checkpoint


class Converted:
    """A converted folder. Made by `open_converted`; see `Checkpoint` for the attributes.

    Attributes:
      marker: the content of conversion.json.
      parameters: the family's parameter table for this configuration.
      draft: the folder of the drafter that was converted along, or None.
      vision: the vision tower that was, or None.
    """

    def __init__(self, folder: Path, marker: dict[str, Any]):
        self.folder, self.marker = folder, marker
        self.family: Family = family_named(marker["family"])
        self.config: Any = self.family.config_class.from_dict(marker["config"])
        self.parameters = self.family.parameters(self.config)
        stored = marker["parameters"]
        free = [one for one in self.parameters if one.dtype is None and one.name in stored]
        self.dtype = main_dtype((stored[one.name]["dtype"], one.size) for one in free)
        self.notices: list[str] = list(marker["notices"])
        self.cache_dtype: Literal["fp8"] | None = "fp8" if marker.get("cache_dtype") == "fp8" else None
        scaled = CONVERTED_SCALES in marker["outputs"]
        self.cache_scales = read_converted_scales(folder, self.config) if scaled else None
        self.draft = folder / DRAFT if (folder / DRAFT / MARKER).exists() else None
        self.vision: Converted | None = open_converted(folder / VISION) if (folder / VISION / MARKER).exists() else None

    def expect(self) -> None:
        """See `Checkpoint.expect`."""
        read_ahead([self.folder / name for name in self.marker["outputs"] if name.startswith(f"{PARAMS}/")])

    def load(
        self,
        dtype: str | None = None,
        ranks: Ranks | None = None,
        arrived: Callable[[], Any] | None = None,
        keep: Callable[[str, jax.Array], Any] | None = None,
    ) -> dict[str, Any]:
        """See `Checkpoint.load`."""
        check_dtype(dtype)
        params: dict[str, Any] = {}
        declared = {parameter.name: parameter for parameter in self.parameters}
        for arrays in self.groups():
            for name in list(arrays):
                array = arrays.pop(name)
                one = declared[name]
                checked = self._checked(name, array, one.dtype or dtype or array.dtype)
                sent = jax.device_put(checked) if ranks is None else ranks.placed(one, checked)
                # Frees the host's copy before the next array needs room for its own.
                sent.block_until_ready()
                params[name] = sent if keep is None else keep(name, sent)
                del array, checked, sent
                if arrived is not None:
                    arrived()
        return params

    def _checked(self, name: str, array: np.ndarray, dtype: Any) -> np.ndarray:
        """The array in `dtype`. Raises CheckpointError where values are not finite, or not any more."""
        with np.errstate(over="ignore"):
            converted = array.astype(dtype, copy=False)
        if jnp.issubdtype(converted.dtype, jnp.floating) and not all_finite(converted):
            problem = TOO_LARGE.format(converted.dtype.name) if all_finite(array) else DAMAGED
            raise CheckpointError(str(self.folder), f"parameter {name} {problem}")
        return converted

    def groups(self) -> Iterator[dict[str, np.ndarray]]:
        """All arrays as stored, on the host, in the marker's order and in groups of a bounded size.

        The caller may take arrays out of a group.
        """
        from orbax.checkpoint import v1 as ocp  # a third of a second that other folders need not wait

        stored = {name: _virtual(entry) for name, entry in self.marker["parameters"].items()}
        context = ocp.Context()
        context.pytree.loading.partial_load = True
        for names in group_names({name: array.nbytes for name, array in stored.items()}):
            wanted = {name: stored[name] for name in names if stored[name].size}
            try:
                with context:
                    found = ocp.load(str(self.folder.resolve() / PARAMS), wanted) if wanted else {}
            except (ValueError, KeyError, OSError, RuntimeError) as error:
                raise CheckpointError(str(self.folder), f"{PARAMS}/ cannot be read ({error}); convert again") from error
            for name in names:
                if name not in wanted:
                    found[name] = np.zeros(stored[name].shape, stored[name].dtype)
            # Taken out of `found`, so that nothing here keeps alive what the caller lets go of.
            yield {name: found.pop(name) for name in names}
            release_memory()


def main_dtype(stored: Iterable[tuple[str, int]]) -> str:
    """The dtype of most of the weights, given in their arrays' dtypes and sizes: fine-tuning may leave norms in another one."""
    sizes = Counter[str]()
    for dtype, size in stored:
        sizes[dtype] += size
    return max(sizes, key=lambda dtype: sizes[dtype], default="float32")


def check_dtype(dtype: str | None) -> None:
    """Raises ParameterError unless `dtype` is None or a floating point type that parameters may have."""
    if dtype is not None and str(dtype) not in FLOAT_DTYPES:
        raise ParameterError(
            f"dtype must be one of {', '.join(FLOAT_DTYPES)} or None for the stored one, got {dtype!r}"
        )


def group_names(nbytes: Mapping[str, int]) -> Iterator[list[str]]:
    """Names in order, in groups of at most as many bytes as the largest array has (but not below `MIN_GROUP_BYTES`)."""
    limit = max([MIN_GROUP_BYTES, *nbytes.values()])
    group, held = list[str](), 0
    for name, size in nbytes.items():
        if group and held + size > limit:
            yield group
            group, held = [], 0
        group.append(name)
        held += size
    if group:
        yield group


def release_memory() -> None:
    """Hands freed host memory back to the system.

    glibc keeps freed buffers for the thread that used them; with a thread for each core that is more than what is in use.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def sha256_of(path: Path, advance: Callable[[int], Any] | None = None) -> str:
    """The file's sha256 in hex. `advance` is told of every piece's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
            if advance is not None:
                advance(len(piece))
    return digest.hexdigest()


def _virtual(entry: Mapping[str, Any]) -> np.ndarray:
    """An array of an entry's shape and dtype that takes no memory."""
    return np.broadcast_to(np.zeros((), jnp.dtype(entry["dtype"])), tuple(entry["shape"]))


def _table_problems(checkpoint: Converted) -> list[str]:
    """Differences between the arrays that the marker lists and the family's parameter table."""
    stored, problems = dict(checkpoint.marker["parameters"]), []
    for parameter in checkpoint.parameters:
        entry = stored.pop(parameter.name, None)
        if entry is None:
            problems.append(f"parameter {parameter.name} is missing")
        elif tuple(entry["shape"]) != parameter.shape:
            problems.append(f"parameter {parameter.name} has shape {entry['shape']}, expected {list(parameter.shape)}")
        elif entry["dtype"] not in ((parameter.dtype,) if parameter.dtype else FLOAT_DTYPES):
            problems.append(f"parameter {parameter.name} has dtype {entry['dtype']}")
    return problems + [f"parameter {name} is not one of family {checkpoint.family.name}" for name in stored]


def _file_problems(folder: Path, outputs: Mapping[str, Mapping[str, Any]], hashes: bool) -> list[str]:
    """Files that are missing or differ from what the marker recorded."""
    problems, missing = [], []
    for name, entry in outputs.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            problems.append(f"file {name} lies outside the folder")
        elif not path.is_file():
            missing.append(name)
        elif path.stat().st_size != entry["bytes"]:
            problems.append(f"file {name} has {path.stat().st_size:,} bytes, expected {entry['bytes']:,}")
        elif hashes and sha256_of(path) != entry["sha256"]:
            problems.append(f"file {name} has changed: its sha256 is not the recorded one")
    if len(missing) > 3:
        return [*problems, f"{len(missing)} files are missing, {missing[0]} the first of them"]
    return problems + [f"file {name} is missing" for name in missing]
