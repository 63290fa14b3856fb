"""A model ready to generate: `load` finds the checkpoints, checks that target and drafter fit, and places them on the device."""

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import tqdm
from jaxtyping import Array

from dflash_jax.cache import CacheDtype, check_cache_dtype
from dflash_jax.cache.calibration import calibrate, check_texts
from dflash_jax.checkpoint_pair import check_pair, open_pair
from dflash_jax.config import DecoderConfig
from dflash_jax.decoding.sampling import Mode
from dflash_jax.engine import Engine, Run
from dflash_jax.errors import ParameterError
from dflash_jax.memory import MemoryPlan, free_memory, named_memory_errors, plan_memory, workspace_bytes
from dflash_jax.models import DFlashConfig
from dflash_jax.models.quantised import WEIGHT_DTYPES, WeightDtype
from dflash_jax.programs import drop, start_compiling
from dflash_jax.tokenizer import Tokenizer, end_token_ids
from dflash_jax.weights import read_weights, reading_bytes, same_shapes, weight_bytes, weight_shapes

DEFAULT_MODEL_LEN = 4096


@dataclass
class Model:
    """A loaded target, its drafter where it has one, and the engine that serves them.

    Attributes:
      name: the path or id it was loaded from.
      eos_ids: end-of-text ids.
      memory: what of the device's memory was planned for what.
      notices: what loading left out on purpose, for example code in a model folder.
    """

    name: str
    engine: Engine
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    memory: MemoryPlan
    notices: list[str] = field(default_factory=list)

    @property
    def target(self) -> DecoderConfig:
        return self.engine.target

    @property
    def draft(self) -> DFlashConfig | None:
        return self.engine.draft

    def warmup(
        self,
        *,
        modes: Iterable[Mode] = ("greedy", "sampled"),
        draft: Iterable[bool] = (True, False),
        batch: Iterable[int] | None = None,
        progress: bool = False,
    ) -> float:
        """Compiles every program that requests of these kinds can need, and returns the seconds it took.

        Args:
          modes: greedy; sampled adds temperature; full adds top_p, top_k, min_p and min_tokens.
          draft: with the drafter, without it, or both.
          batch: numbers of slots; None for every bucket up to max_batch.
          progress: show a bar.

        Raises:
          ParameterError: an unknown mode, or a number of slots outside 1 to max_batch.
          CapacityError: the device's memory ran out.
        """
        started, modes, batch = time.perf_counter(), list(modes), None if batch is None else list(batch)
        if unknown := [mode for mode in modes if mode not in get_args(Mode)]:
            raise ParameterError(f"modes must be among {', '.join(get_args(Mode))}, got {unknown}")
        if wrong := [size for size in batch or () if not 1 <= size <= self.engine.max_batch]:
            raise ParameterError(
                f"batch must hold numbers from 1 to max_batch, which is {self.engine.max_batch}, got {wrong}"
            )
        drafts = [flag for flag in draft if self.draft is not None or not flag]
        setups = [self.engine.setup(mode=mode, draft=flag) for flag, mode in itertools.product(drafts, modes)]
        jobs = list(self.engine.warmup_jobs(setups, batch))
        futures = start_compiling(jobs)
        try:
            bar = tqdm.tqdm(as_completed(futures), total=len(jobs), unit="program", disable=not progress)
            with named_memory_errors("programs were compiled"):
                for future in bar:
                    future.result()
        finally:
            drop(futures)
        return time.perf_counter() - started

    def compiled_shapes(self) -> list[str]:
        """One line for each program compiled so far."""
        return self.engine.programs.shapes()


def load(
    path: str | Path | None = None,
    *,
    draft: str | Path | bool | None = None,
    dtype: str | None = None,
    max_model_len: int | None = None,
    max_batch: int = 8,
    page_size: int = 64,
    num_pages: int | None = None,
    proposals: Literal["shared_noise", "argmax", "rejection"] = "shared_noise",
    cache_dtype: CacheDtype | None = None,
    calibration: Sequence[str | Sequence[int]] = (),
    weight_dtype: WeightDtype | None = None,
    verify_length: int | str | None = None,
    revision: str | None = None,
    draft_revision: str | None = None,
    ahead: Callable[[Model], Run] | None = None,
) -> Model:
    """Loads a target and its drafter.

    Args:
      path: a folder made by `dflash-convert`, a local Hugging Face folder, or a hub id; None for the pair that ships.
      draft: a drafter's path or id. None takes the one beside the target (a `draft` folder in it) or the published one for a
        hub id, where there is one; True insists on that; False loads none.
      dtype: of weights, activations and pages; None keeps the checkpoint's on GPUs and is float32 on CPUs.
      max_model_len: prompt and produced tokens of one request at most; None is the model's own limit, at most 4096.
      max_batch: requests that run side by side.
      page_size: tokens of one page.
      num_pages: pages shared by all requests; None is enough for `max_batch` requests of full length, fewer where the device has
        no room for them.
      proposals: how the drafter proposes where a request samples (never changes the text's law): "shared_noise", "argmax", or
        "rejection" for its own samples judged by p/q rejection.
      cache_dtype: None keeps the target's pages in `dtype`, "fp8" in eight bits, "fp8_packed" (targets with latent attention)
        in eight bits with scales in each row. Texts may differ from those of unquantised pages; drafting changes them no more than
        before, but for numbers that lie on the border between two roundings.
      calibration: texts or token ids like those to be served, on which the scales of "fp8" pages are found; without, they are 1.
      weight_dtype: None keeps weights in `dtype`; "int8" and "fp8" keep the large matrices of both models in eight bits, one scale
        a row, so that a step reads nearly half as much. Texts are those of the rounded target. Experts stay in `dtype`.
      verify_length: how many tokens the target verifies in a cycle, of those that the drafter offers; the emitted text is the
        target's own with any. None is the whole block, an integer stays, 1 is no drafting. "auto" chooses anew every few cycles,
        by how many proposals stood and what cycles cost, and stops drafting for a while where it does not pay; on CPUs it is None.
      revision, draft_revision: of hub ids.
      ahead: called with the model before its weights are there; what the run that it returns would call first is compiled while
        they are read. The run itself is not started.

    Raises:
      CheckpointError, ConfigError, UnsupportedModelError: a checkpoint cannot be used, with every reason.
      PairError: target and drafter do not belong together.
      ParameterError: an option is outside its range.
      CapacityError: the device has no room for weights and pages, with the numbers.
    """
    pages = 1 if num_pages is None else num_pages
    limits = {"max_batch": (max_batch, 4096), "page_size": (page_size, 4096), "num_pages": (pages, 2**31 - 1)}
    for name, (value, most) in limits.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ParameterError(f"{name} must be an integer from 1 to {most}, got {value!r}")
    if proposals not in ("shared_noise", "argmax", "rejection"):
        raise ParameterError(f"proposals must be shared_noise, argmax or rejection, got {proposals!r}")
    target, drafter = open_pair(path, draft, revision=revision, draft_revision=draft_revision)
    for checkpoint in (target, drafter):
        if checkpoint is not None:
            checkpoint.expect()
    if drafter is not None:
        check_pair(target.config, drafter.config)
    check_cache_dtype(target.config, cache_dtype)
    check_weight_dtype(weight_dtype)
    if len(calibration) and cache_dtype != "fp8":
        raise ParameterError(f'calibration finds scales for cache_dtype="fp8", not for {cache_dtype!r}: leave it out')
    length = choose_verify_length(None if drafter is None else drafter.config, verify_length)
    tokenizer = Tokenizer.from_folder(target.folder)
    texts = [_calibration_ids(tokenizer, text) for text in calibration]
    if texts:
        check_texts(target.config, texts)
    dtype_used = jnp.dtype(choose_dtype(dtype) or target.dtype)
    pair = [(one.config, one.family) for one in (target, drafter) if one is not None]
    expected = weight_shapes(pair, dtype_used, weight_dtype)
    stored = expected if weight_dtype is None else weight_shapes(pair, dtype_used)
    engine = Engine(
        target=target.config,
        draft=None if drafter is None else drafter.config,
        weights=expected,
        dtype=dtype_used,
        max_model_len=choose_model_len(target.config, max_model_len),
        max_batch=max_batch,
        page_size=page_size,
        proposals=proposals,
        cache_dtype=cache_dtype,
        verify_length=length,
    )
    memory = plan_for(engine, reading_bytes(stored, expected), num_pages)
    engine = replace(engine, num_pages=memory.num_pages)
    notices = [*target.notices, *(() if drafter is None else drafter.notices)]
    if memory.num_pages < memory.full_pages and num_pages is None:
        notices.append(
            f"the device has room for {memory.num_pages} pages; {max_batch} requests of full length would fill {memory.full_pages}"
        )
    name = "the shipped pair" if path is None else str(path)
    model = Model(name, engine, tokenizer, end_token_ids(target.folder, tokenizer), memory, notices)

    def observe(params: Mapping[str, Array]) -> None:
        engine.cache_scales = calibrate(target.config, params, texts) if texts else None

    compiled = start_compiling(() if ahead is None else ahead(model).first_jobs())
    try:
        with named_memory_errors("weights were loaded"):
            engine.weights = read_weights(target, drafter, choose_dtype(dtype), dtype_used, weight_dtype, observe)
    except BaseException:
        drop(compiled)
        raise
    if not same_shapes(engine.weights, expected):
        drop(compiled)
        engine.programs.forget()
    return model


def plan_for(engine: Engine, reading: int, num_pages: int | None) -> MemoryPlan:
    """What the weights of `engine`, which may be shapes, and its pages take of the device's free memory. Raises CapacityError.

    Args:
      reading: see `MemoryPlan`.
    """
    workspace = workspace_bytes(
        engine.target, engine.draft, engine.dtype,
        tokens=engine.max_model_len, batch=engine.max_batch, chunk=engine.buckets.chunk[-1],
    )  # fmt: skip
    return plan_memory(
        weights=weight_bytes(engine.weights), reading=reading, workspace=workspace, page=engine.page_bytes,
        longest_pages=engine.buckets.width[-1], max_batch=engine.max_batch, num_pages=num_pages, free=free_memory(),
    )  # fmt: skip


def _calibration_ids(tokenizer: Tokenizer | None, text: str | Sequence[int]) -> Sequence[int]:
    if not isinstance(text, str):
        return text
    if tokenizer is None:
        raise ParameterError("the target's folder has no tokenizer.json: give calibration as token ids")
    return tokenizer.encode(text)


def check_weight_dtype(weight_dtype: str | None) -> None:
    """Raises ParameterError unless weights can be kept in it."""
    if weight_dtype not in (None, *WEIGHT_DTYPES):
        raise ParameterError(f"weight_dtype must be None, {' or '.join(WEIGHT_DTYPES)}, got {weight_dtype!r}")


def choose_dtype(dtype: str | None) -> str | None:
    """The dtype to load in: as asked; otherwise the checkpoint's on a GPU (None) and float32 on a CPU."""
    if dtype is None:
        return None if jax.default_backend() != "cpu" else "float32"
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ParameterError(f"dtype must be float32, bfloat16 or float16, got {dtype!r}")
    return dtype


def choose_model_len(config: DecoderConfig, length: int | None) -> int:
    """The longest sequence to serve: as asked, or the model's own limit up to `DEFAULT_MODEL_LEN`.

    Raises:
      ParameterError: the model was not made for that length.
    """
    limit = config.max_position
    chosen = min(limit, DEFAULT_MODEL_LEN) if length is None else length
    if isinstance(chosen, bool) or not isinstance(chosen, int) or not 2 <= chosen <= limit:
        raise ParameterError(f"max_model_len must be an integer from 2 to the model's {limit}, got {length!r}")
    return chosen


def choose_verify_length(draft: DFlashConfig | None, length: int | str | None) -> int | Literal["auto"] | None:
    """As asked; None, the whole block, for "auto" on a CPU: its costs are a GPU's, on a CPU each token costs what the first costs.

    Raises:
      ParameterError: the drafter does not offer so many tokens.
    """
    if length is None:
        return None
    if length == "auto":
        return None if jax.default_backend() == "cpu" else "auto"
    offered = 0 if draft is None else draft.num_drafts + 1
    if isinstance(length, int) and not isinstance(length, bool) and 1 <= length <= offered:
        return length
    which = f"an integer from 1 to {offered}, all that the drafter offers" if offered else "left out without a drafter"
    raise ParameterError(f'verify_length must be "auto" or {which}; got {length!r}')
