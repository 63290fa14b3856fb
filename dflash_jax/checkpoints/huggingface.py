"""Hugging Face folders as checkpoints.

    checkpoint = open_checkpoint("path/to/Qwen3-8B")
    params = checkpoint.load("bfloat16")

Weights may be bfloat16, float16 or float32, or quantized in a way that `quantized.releases` knows: then they are dequantized while
they are loaded. Others are refused: float64 because JAX keeps no such arrays by default, 8-bit floats and integers because they
mean nothing without scales.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.checkpoints.cache_scales import StoredScales, is_scale, stored_scales
from dflash_jax.checkpoints.converted import check_dtype, main_dtype
from dflash_jax.checkpoints.finite import DAMAGED, TOO_LARGE, all_finite
from dflash_jax.checkpoints.hf_folder import HuggingFaceFolder, read_folder
from dflash_jax.checkpoints.mapping import KEEP, Plan, Step, make_plan
from dflash_jax.checkpoints.prefetch import read_ahead
from dflash_jax.checkpoints.quantized.release import Release
from dflash_jax.checkpoints.quantized.releases import dequantized, notices, take_release
from dflash_jax.checkpoints.safetensors import DTYPES, Tensor, chunks, unread_dtypes
from dflash_jax.checkpoints.transfer import Incoming, place
from dflash_jax.config import DecoderConfig
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.models import Family, family_named, family_of
from dflash_jax.parallel.cut import Cut
from dflash_jax.parallel.ranks import Ranks
from dflash_jax.quantization.cache_scheme import take_cache_scheme

_MOST_NOTICES = 8
# What one thread reads and checks at a time, and what it converts at a time of that. Threads that check each 1 MiB wait for one
# another in Python: 8 GB take an H200's machine 1.01 s so, 0.79 s by whole parts, 0.70 s without the check.
PART_BYTES, CONVERTED_BYTES = 32 << 20, 2 << 20
# What a notice about many tensors names: up to the layer's number, otherwise the first part.
_PART = re.compile(r"^(?:[\w.]*?\blayers\.\d+\.|[^.]*\.?)")


class HuggingFaceCheckpoint:
    """An opened Hugging Face folder; see `dflash_jax.checkpoints.converted.Checkpoint`.

    Attributes:
      files: what was read from disk, as found.
      plan: how its tensors become parameters.
      stored_scales: the scales of float8 pages among its tensors.
      release: how its weights are quantized; None where they are not.
    """

    def __init__(
        self,
        files: HuggingFaceFolder,
        family: Family,
        config: Any,
        plan: Plan,
        stored_scales: StoredScales | None = None,
        vision: "HuggingFaceCheckpoint | None" = None,
        release: Release | None = None,
    ):
        self.files, self.family, self.config, self.plan, self.vision = files, family, config, plan, vision
        self.folder, self.stored_scales = files.folder, stored_scales
        self.cache_scales = None if stored_scales is None else stored_scales.scales
        says_float8 = self.cache_scales is not None or take_cache_scheme(files.config)[1]
        self.cache_dtype: Literal["fp8"] | None = "fp8" if says_float8 else None
        free = [step for step in plan.steps if step.parameter.dtype is None]
        self.dtype = main_dtype((step.dtype, step.parameter.size) for step in free)
        self.notices = [*files.notices]
        if release is not None:
            self.notices += notices(release, [tensor for step in plan.steps for tensor in step.tensors])
        self.notices += _left_out(plan.ignored)
        self.notices += [f"{copy.name} repeats {other.name} and is left out" for copy, other in plan.tied]
        if others := [step.parameter.name for step in free if step.dtype != self.dtype]:
            self.notices.append(
                f"{len(others)} of {len(free)} arrays are not stored in {self.dtype}; a model has all in one type"
            )

    def load(
        self,
        dtype: str | None = None,
        ranks: Ranks | None = None,
        arrived: Callable[[], Any] | None = None,
        keep: Callable[[str, jax.Array], Any] | None = None,
    ) -> dict[str, Any]:
        """See `dflash_jax.checkpoints.converted.Checkpoint.load`."""
        check_dtype(dtype)
        order = self.plan.steps
        if keep is not None:
            # The largest first: what is kept of the others then fills the memory that those leave.
            order = sorted(order, key=lambda step: step.parameter.size, reverse=True)
        arrays = [_incoming(step, jnp.dtype(step.parameter.dtype or dtype or step.dtype)) for step in order]
        if ranks is None:
            return place(arrays, arrived=arrived, keep=keep)
        parameters = {step.parameter.name: step.parameter for step in order}
        steps = zip(order, arrays, strict=True)
        shared = [_incoming_shares(step, whole.dtype, ranks) or whole for step, whole in steps]

        def send(name: str, array: np.ndarray) -> jax.Array:
            cut = ranks.cut_of(parameters[name])
            return ranks.placed(parameters[name], array) if cut is None else ranks.joined(list(array), cut.axis)

        return place(shared, send, arrived, keep)

    def expect(self) -> None:
        """See `dflash_jax.checkpoints.converted.Checkpoint.expect`."""
        stored = (one for step in self.plan.steps for tensor in step.tensors for one in tensor.stored)
        read_ahead(list(dict.fromkeys(one.path for one in stored)))


def open_checkpoint(path: str | Path, dtype: str = KEEP) -> HuggingFaceCheckpoint:
    """Opens a folder with config.json and safetensors files, checked against its family's parameter table.

    Args:
      dtype: what the plan turns parameters into, `keep` or the name of a floating point type.

    Raises:
      CheckpointError: the folder is not usable; lists every problem of files, tensors and configuration.
      ConfigError: the files are sound, but the configuration asks for something that is not implemented.
    """
    checkpoint, problems = inspect(path, dtype)
    if problems or checkpoint is None:
        raise CheckpointError(str(path), problems)
    return checkpoint


def inspect(path: str | Path, dtype: str = KEEP) -> tuple[HuggingFaceCheckpoint | None, list[str]]:
    """Like `open_checkpoint`, but hands back what could be made of the folder together with its problems."""
    files = read_folder(path)
    problems = list(files.problems)
    if not files.config:
        return None, problems or ["config.json is empty; fetch it again"]
    tensors, unreadable, of_codes = files.tensors, files.unreadable, list[str]()
    try:
        values, release = take_release(files.config)
        files = replace(files, config=values)
        if release is not None:
            tensors, unreadable = dequantized(release, tensors, unreadable, of_codes)
            files = replace(files, tensors=tensors)
        family = family_of(files.config)
        config = family.config(files.config, [*tensors, *unreadable], files.notices)
    except ConfigError as error:
        problems += unread_dtypes(files.tensors.values())
        if not problems:
            raise
        return None, [*problems, str(error)]
    parameters = family.parameters(config)
    tied = {}
    if getattr(config, "tie_embeddings", False):
        embedding = next(parameter for parameter in parameters if parameter.name == "embed.weight")
        tied = {"lm_head.weight": embedding.sources[0].name}
    canonical, of_scales = family.canonical_for(config), list[str]()
    scales, unread, weights = None, list[str](), dict(tensors)
    if family.role == "target":
        scales, unread = stored_scales(config, canonical, tensors, of_scales)
        weights = {name: tensor for name, tensor in tensors.items() if not is_scale(canonical(name))}
    plan = make_plan(parameters, canonical, weights, dtype=dtype, tied=tied, unreadable=unreadable)
    vision = None if family.vision is None else _tower(files, family_named(family.vision), config, dtype)
    seen = {} if vision is None else vision.files.tensors
    plan = replace(plan, ignored=(*(name for name in plan.ignored if name not in seen), *unread))
    checkpoint = HuggingFaceCheckpoint(files, family, config, plan, scales, vision, release)
    if not files.complete:
        return checkpoint, problems
    problems += [*of_codes, *plan.problems, *of_scales, *_other_numbers(family, config, files.tensors)]
    problems += [
        f"tensor {copy.name} differs from {other.name}, though config.json ties them; set tie_word_embeddings to false "
        "or remove the tensor"
        for copy, other in plan.tied
        if not same_bytes(copy, other)
    ]
    return checkpoint, problems


def _other_numbers(family: Family, config: Any, tensors: Mapping[str, Tensor]) -> list[str]:
    """Problems of tensors whose numbers follow from the configuration, and are others in the file."""
    problems, computed = list[str](), {} if family.computed is None else family.computed(config)
    for name, tensor in tensors.items() if computed else ():
        own = next((numbers for end, numbers in computed.items() if name.endswith(end)), None)
        if own is not None and (tensor.shape != (len(own),) or np.concatenate([*chunks(tensor)]).tolist() != [*own]):
            problems.append(
                f"tensor {name} is not what follows from config.json, which begins with {own[0]}; fetch both of one release"
            )
    return problems


def _tower(files: HuggingFaceFolder, family: Family, text: DecoderConfig, dtype: str) -> HuggingFaceCheckpoint | None:
    """The vision tower beside a text model. None where there is none, and where it cannot be read, which a notice then says: the
    text model is of use without."""
    tensors = {name: tensor for name, tensor in files.tensors.items() if family.canonical(name) is not None}
    if not isinstance(files.config.get("vision_config"), Mapping) or not tensors or not files.complete:
        return None
    own = replace(files, tensors=tensors, unreadable=[], problems=[], notices=[])
    try:
        config = family.config(files.config)
        plan = make_plan(family.parameters(config), family.canonical, tensors, dtype=dtype)
        problems = list(plan.problems)
        if config.out_hidden_size != text.hidden_size:
            problems.insert(0, f"out_hidden_size={config.out_hidden_size} is not the text model's {text.hidden_size}")
        if not problems:
            return HuggingFaceCheckpoint(own, family, config, plan)
    except ConfigError as error:
        problems = [str(error)]
    files.notices.append(f"the vision tower is left out, so no picture is read: {problems[0]}")
    return None


def _left_out(names: Sequence[str]) -> list[str]:
    """One notice for each tensor, or for each layer and tower where they are many (a layer of experts has hundreds)."""
    if len(names) <= _MOST_NOTICES:
        return [f"{name} is not needed and left out" for name in names]
    parts = Counter(_PART.findall(name)[0] for name in names)
    return [f"{part}*: {count} tensors are not needed and left out" for part, count in parts.items()]


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree in dtype, shape and every bit."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return all(
        np.array_equal(left.view(np.uint8), right.view(np.uint8))
        for left, right in zip(chunks(a), chunks(b), strict=True)
    )


def assemble(step: Step, dtype: str, advance: Callable[[int], Any] | None = None) -> np.ndarray:
    """The parameter as one host array of `dtype`: its tensors' rows one after the other.

    Args:
      advance: told of every piece's bytes.

    Raises:
      CheckpointError: an integer does not fit into the parameter's type.
    """
    kind = jnp.dtype(dtype)
    array, position = np.empty(step.parameter.shape, kind), 0
    flat = array.reshape(-1)
    for tensor in step.tensors:
        for piece in chunks(tensor):
            part = flat[position : position + piece.size]
            part[:] = cast(piece, part.dtype, tensor)
            position += piece.size
            if advance is not None:
                advance(part.nbytes)
    return array


def _incoming(step: Step, kind: np.dtype) -> Incoming:
    """The parameter as an array that several threads fill: each a span of one tensor."""
    parts, position = [], 0
    for tensor in step.tensors:
        most = max(1, PART_BYTES // DTYPES[tensor.dtype].itemsize)
        for begin in range(0, tensor.size, most):
            size = min(most, tensor.size - begin)
            parts.append((position + begin, size, partial(_fill_span, tensor=tensor, begin=begin)))
        position += tensor.size
    return Incoming(step.parameter.name, step.parameter.shape, kind, parts)


def _incoming_shares(step: Step, kind: np.dtype, ranks: Ranks) -> Incoming | None:
    """The shares of all ranks, one after the other, each filled from where it stands in the files; None where nothing is cut."""
    parameter, cut = step.parameter, ranks.cut_of(step.parameter)
    if cut is None:
        return None
    shape = (ranks.count, *ranks.own_shape(parameter))
    if cut.axis == 0:
        return Incoming(parameter.name, shape, kind, list(_rows_of_ranks(step, cut, ranks.count)))
    rows, columns = parameter.shape
    (tensor,) = step.tensors  # sources are stacked by rows, and columns of several are never cut
    most = max(1, PART_BYTES // (columns * DTYPES[tensor.dtype].itemsize))
    parts = [
        (0, math.prod(shape), partial(_fill_columns, shape=shape, cut=cut, tensor=tensor, rows=(first, min(first + most, rows))))
        for first in range(0, rows, most)
    ]  # fmt: skip
    return Incoming(parameter.name, shape, kind, parts)


def _rows_of_ranks(step: Step, cut: Cut, count: int) -> Iterator[tuple[int, int, Callable[[np.ndarray], None]]]:
    """Spans of all ranks' rows, as parts of an `Incoming`."""
    width, position = math.prod(step.parameter.shape[1:]), 0
    for begin, end in (run for rank in range(count) for run in cut.runs(rank, count)):
        start = 0
        for tensor in step.tensors:
            most = max(1, PART_BYTES // DTYPES[tensor.dtype].itemsize)
            first, last = max(begin * width, start), min(end * width, start + tensor.size)
            for at in range(first, last, most):
                size = min(most, last - at)
                yield position, size, partial(_fill_span, tensor=tensor, begin=at - start)
                position += size
            start += tensor.size


def _fill_columns(
    array: np.ndarray, *, shape: tuple[int, ...], cut: Cut, tensor: Tensor, rows: tuple[int, int]
) -> None:
    """Fills these rows of all ranks' columns in a flat `array` of `shape`. Raises CheckpointError: see `_fill_span`."""
    whole = np.empty((rows[1] - rows[0], tensor.shape[1]), array.dtype)
    _fill_span(whole.reshape(-1), tensor, rows[0] * tensor.shape[1])
    for rank, share in enumerate(array.reshape(shape)):
        at = 0
        for begin, end in cut.runs(rank, shape[0]):
            share[rows[0] : rows[1], at : at + end - begin] = whole[:, begin:end]
            at += end - begin


def _fill_span(array: np.ndarray, tensor: Tensor, begin: int) -> None:
    """Fills a flat `array` with the tensor's values from number `begin` on, converted to the array's type.

    Raises:
      CheckpointError: a value is not finite, or not any more in the array's type.
    """
    span = tensor.part(begin, (array.size,))
    floating, position = jnp.issubdtype(array.dtype, jnp.floating), 0
    whole = array.dtype == DTYPES[tensor.dtype]
    for piece in chunks(span, PART_BYTES if whole else CONVERTED_BYTES, into=array if whole else None):
        part = array[position : position + piece.size]
        if not whole:
            part[:] = cast(piece, array.dtype, tensor)
        if floating and not all_finite(part):
            problem = TOO_LARGE.format(array.dtype.name) if all_finite(piece) else DAMAGED
            raise CheckpointError(str(tensor.path), f"tensor {tensor.name} {problem}")
        position += piece.size


def cast(piece: np.ndarray, dtype: np.dtype, tensor: Tensor) -> np.ndarray:
    """`piece` in `dtype`; the one definition of a conversion's arithmetic, shared with its verification.

    Raises:
      CheckpointError: an integer of `tensor` does not fit into `dtype`.
    """
    if jnp.issubdtype(dtype, jnp.integer) and piece.size:
        limits = np.iinfo(dtype)
        if int(piece.min()) < limits.min or int(piece.max()) > limits.max:
            problem = f"tensor {tensor.name} holds {piece.min()} .. {piece.max()}, which does not fit into {dtype.name}"
            raise CheckpointError(str(tensor.path), f"{problem}; the file is damaged, fetch it again")
    with np.errstate(over="ignore"):
        return piece.astype(dtype, copy=False)
