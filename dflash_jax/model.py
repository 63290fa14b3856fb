"""A model ready to generate: `load` finds the checkpoints, checks that target and drafter fit, and places them on the device."""

import itertools
import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

import tqdm
from jax.typing import DTypeLike
from jaxtyping import Array

from dflash_jax._scalars import as_flag, as_integer
from dflash_jax.cache import CacheDtype
from dflash_jax.checkpoints.calibration import calibrate, check_texts
from dflash_jax.checkpoints.pair import drafter_notice, open_pair
from dflash_jax.checkpoints.weights import read_weights, reading_jobs
from dflash_jax.compile.programs import drop, start_compiling
from dflash_jax.config import DecoderConfig
from dflash_jax.decoding.sampling import Mode
from dflash_jax.engine import Engine, Run
from dflash_jax.engine.memory import MemoryPlan, named_memory_errors, size
from dflash_jax.errors import ParameterError
from dflash_jax.execution.weight_layout import cycle_rows
from dflash_jax.models import DFlashConfig
from dflash_jax.options import check_limits, plan_engine
from dflash_jax.quantization.kv_formats import CALIBRATED
from dflash_jax.quantization.weights import WeightDtype
from dflash_jax.text.tokenizer import Tokenizer, end_token_ids, tokenizer_notices


@dataclass(repr=False)
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

    def __repr__(self) -> str:
        # Not the fields: those hold every weight.
        drafter = "no drafter" if self.draft is None else f"a drafter with blocks of {self.draft.block_size}"
        requests = "1 request" if self.engine.max_batch == 1 else f"{self.engine.max_batch} requests"
        most = f"up to {requests} of {self.engine.max_model_len} tokens"
        return f"Model({self.name!r}: {self.engine.dtype}, {size(self.memory.weights)} of weights, {drafter}, {most})"

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

        The loops of requests with `logprobs`, or with more than 8 end tokens, are programs of their own, compiled when those come.

        Args:
          modes: greedy; sampled adds temperature; full adds top_p, top_k, min_p and min_tokens.
          draft: with the drafter, without it, or both.
          batch: numbers of slots; None for every bucket up to max_batch.
          progress: show a bar.

        Raises:
          ParameterError: something that is no list, an unknown mode, or a number of slots outside 1 to max_batch.
          CapacityError: the device's memory ran out.
        """
        started, modes, draft = time.perf_counter(), _items("modes", modes), _items("draft", draft)
        batch = None if batch is None else _items("batch", batch)
        if unknown := [mode for mode in modes if mode not in get_args(Mode)]:
            raise ParameterError(f"modes must be among {', '.join(get_args(Mode))}, got {unknown}")
        if wrong := [flag for flag in draft if as_flag(flag) is None]:
            raise ParameterError(f"draft must hold True, False or both, got {wrong}")
        if wrong := [size for size in batch or () if as_integer(size) not in range(1, self.engine.max_batch + 1)]:
            raise ParameterError(
                f"batch must hold integers from 1 to max_batch, which is {self.engine.max_batch}, got {wrong}"
            )
        drafts = [bool(flag) for flag in draft if self.draft is not None or not flag]
        setups = [self.engine.setup(mode=mode, draft=flag) for flag, mode in itertools.product(drafts, modes)]
        jobs = list(self.engine.warmup_jobs(setups, None if batch is None else map(operator.index, batch)))
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
    dtype: DTypeLike | None = None,
    max_model_len: int | None = None,
    max_batch: int = 8,
    page_size: int = 64,
    num_pages: int | None = None,
    proposals: Literal["shared_noise", "argmax", "rejection"] = "shared_noise",
    cache_dtype: CacheDtype | None = None,
    calibration: Sequence[str | Sequence[int]] = (),
    weight_dtype: WeightDtype | None = None,
    draft_weight_dtype: WeightDtype | None = None,
    verify_length: int | str | None = None,
    draft_window: int | None = None,
    revision: str | None = None,
    draft_revision: str | None = None,
    ahead: Callable[[Model], Run] | None = None,
) -> Model:
    """Loads a target and its drafter.

    Scalars of numpy or JAX count as the numbers that they are.

    Args:
      path: a folder made by `dflash-convert`, a local Hugging Face folder, or a hub id; None for the pair that ships.
      draft: a drafter's path or id. None takes the one beside the target (a `draft` folder in it) or the published one for a
        hub id, where there is one; True insists on that; False loads none.
      dtype: of weights, activations and pages; None keeps the checkpoint's on GPUs and is float32 on CPUs.
      max_model_len: prompt and produced tokens of one request at most; None is the model's own limit, at most 4096.
      max_batch: requests that run side by side, no more than are expected: on Hopper weights lie in memory as is best for so many
        (`dflash_jax.execution.weight_layout`).
      page_size: tokens of one page.
      num_pages: pages shared by all requests; None is enough for `max_batch` requests of full length, fewer where the device has
        no room for them.
      proposals: how the drafter proposes where a request samples (never changes the text's law): "shared_noise", "argmax", or
        "rejection" for its own samples judged by p/q rejection.
      cache_dtype: None keeps the target's pages in `dtype`, "fp8" in eight bits, "int8" (keys and values of heads) with a scale of
        each key and of each channel of the values, "fp8_packed" (latent attention) in eight bits with scales in each row; keys and
        values of all layers alike. Texts may differ from those of unquantised pages; drafting changes them no more than before, but
        for numbers that lie on the border between two roundings.
      calibration: texts or token ids like those to be served, on which the scales of "fp8" pages and of "int8" values are found;
        without, those of "fp8" are 1, and "int8" is refused.
      weight_dtype: None keeps weights in `dtype`; "int8" and "fp8" keep the large matrices of both models in eight bits, one scale
        a row, so that a step reads nearly half as much. Texts are those of the rounded target. Experts stay in `dtype`.
        "fp8_dynamic" is "fp8" that also rounds the rows which matrices multiply, where 64 or more are multiplied at once: faster
        for prompts and many requests. Then a token's logits depend on how many are computed with it, and drafting changes texts
        somewhat more often.
      draft_weight_dtype: the same for the drafter alone; None is `weight_dtype`. The text stays the target's own: only proposals
        change. A drafter that proposes with the target's head keeps a copy of it in eight bits.
      verify_length: how many tokens the target verifies in a cycle, of those that the drafter offers; the emitted text is the
        target's own with any. None is the whole block, an integer stays, 1 is no drafting. "auto" chooses anew every few cycles,
        by how many proposals stood and what cycles cost, and stops drafting for a while where it does not pay; on CPUs it is None.
      draft_window: tokens of a context that the drafter sees, the last ones, up to a page more; None for all. For contexts longer
        than a drafter was trained on, where it may guess better so, and faster. No text depends on it.
      revision, draft_revision: of hub ids.
      ahead: called with the model before its weights are there; what the run that it returns would call first is compiled while
        they are read. The run itself is not started.

    Raises:
      CheckpointError, ConfigError, UnsupportedModelError: a checkpoint cannot be used, with every reason.
      PairError: target and drafter do not belong together, or `draft_revision` is given and there is no drafter.
      ParameterError: an option is outside its range.
      CapacityError: the device has no room for weights and pages, with the numbers.
      DeviceError: JAX starts no device.
    """
    max_batch, page_size, num_pages = check_limits(max_batch, page_size, num_pages)
    if proposals not in ("shared_noise", "argmax", "rejection"):
        raise ParameterError(f"proposals must be shared_noise, argmax or rejection, got {proposals!r}")
    target, drafter = open_pair(path, draft, revision=revision, draft_revision=draft_revision)
    for checkpoint in (target, drafter):
        if checkpoint is not None:
            checkpoint.expect()
    if isinstance(calibration, str):
        raise ParameterError(
            f"calibration must be a list of texts or of token ids, got one text: [{calibration!r:.40}]"
        )
    if isinstance(calibration, bytes | bytearray) or not isinstance(calibration, Sequence):
        raise ParameterError(
            f"calibration must be a list of texts or of token ids, got {type(calibration).__name__}; leave it out for none"
        )
    if len(calibration) and cache_dtype not in CALIBRATED:
        raise ParameterError(
            f'calibration finds scales for cache_dtype "fp8" and "int8", not for {cache_dtype!r}: leave it out'
        )
    if cache_dtype == "int8" and not len(calibration):
        raise ParameterError(
            'cache_dtype="int8" needs calibration: texts like those to be served, or take cache_dtype="fp8"'
        )
    engine, memory = plan_engine(
        target, drafter, dtype=dtype, weight_dtype=weight_dtype, draft_weight_dtype=draft_weight_dtype, cache_dtype=cache_dtype,
        max_model_len=max_model_len,
        max_batch=max_batch, num_pages=num_pages, page_size=page_size, proposals=proposals, verify_length=verify_length,
        draft_window=draft_window,
    )  # fmt: skip
    tokenizer = Tokenizer.from_folder(target.folder)
    texts = [_calibration_ids(tokenizer, text) for text in calibration]
    if texts:
        check_texts(target.config, texts)
    notices = [*target.notices, *(() if drafter is None else drafter.notices), *drafter_notice(path, draft, drafter)]
    notices += tokenizer_notices(target.folder)
    if memory.num_pages < memory.full_pages and num_pages is None:
        notices.append(
            f"the device has room for {memory.num_pages} pages; {max_batch} requests of full length would fill {memory.full_pages}"
        )
    name = "the shipped pair" if path is None else str(path)
    model = Model(name, engine, tokenizer, end_token_ids(target.folder, tokenizer), memory, notices)

    def observe(params: Mapping[str, Array]) -> None:
        if texts:
            engine.cache_scales = calibrate(
                target.config, params, texts, cache_dtype="int8" if cache_dtype == "int8" else "fp8"
            )

    compiled = start_compiling(reading_jobs(engine.weights))
    compiled += start_compiling(() if ahead is None else ahead(model).first_jobs())
    try:
        with named_memory_errors("weights were loaded"):
            engine.weights = read_weights(
                target, drafter, engine.dtype, weight_dtype, draft_weight_dtype, observe,
                rows=cycle_rows(max_batch, engine.draft),
            )  # fmt: skip
    except BaseException:
        drop(compiled)
        raise
    return model


def _items(name: str, value: Any) -> list:
    """What an argument of `Model.warmup` holds; the letters of a text are not what was meant."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ParameterError(f"{name} must be a list, got {value!r}")
    return list(value)


def _calibration_ids(tokenizer: Tokenizer | None, text: Any) -> Sequence[int]:
    if isinstance(text, str):
        if tokenizer is None:
            raise ParameterError("the target's folder has no tokenizer.json: give calibration as token ids")
        return tokenizer.encode(text)
    listed = isinstance(text, Iterable) and not isinstance(text, bytes)  # which would pass for token ids
    tokens = [as_integer(token) for token in text] if listed else [None]
    if None in tokens:
        raise ParameterError(
            f"calibration must be a list of texts or of token ids, got one with {type(text).__name__} {text!r:.40} in it"
        )
    return cast(list[int], tokens)
