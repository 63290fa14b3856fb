"""A model ready to generate: `load` finds the checkpoints, checks that target and drafter fit, and places them on the device."""

import itertools
import operator
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack, cast, get_args

from jaxtyping import Array

from dflash_jax.checkpoints.cache_scales import read_scales, save_scales
from dflash_jax.checkpoints.calibration import calibrate, check_texts
from dflash_jax.checkpoints.converted import Checkpoint
from dflash_jax.checkpoints.generation_config import sampling_defaults
from dflash_jax.checkpoints.pair import drafter_notice, open_pair
from dflash_jax.checkpoints.weights import read_weights, reading_jobs
from dflash_jax.compile.led import lead_or_follow
from dflash_jax.compile.programs import Programs, drop, start_compiling
from dflash_jax.config import DecoderConfig
from dflash_jax.decoding.sampling import Mode
from dflash_jax.engine import Engine, Run
from dflash_jax.engine.acceptance import DraftRecord
from dflash_jax.engine.measuring import MemoryReading, measure_memory
from dflash_jax.engine.memory import MemoryPlan, named_memory_errors, size
from dflash_jax.engine.planning import as_checkpoint_says, plan_engine, tower_shapes, vision_of
from dflash_jax.engine.progress import progress_bar
from dflash_jax.errors import ParameterError
from dflash_jax.execution.weight_layout import cycle_rows
from dflash_jax.models import DFlashConfig
from dflash_jax.options import (
    FROM_TRAFFIC,
    LoadKeywords,
    LoadOptions,
    as_flag,
    as_integer,
    is_list,
    read_options,
    taking_options,
)
from dflash_jax.quantization.attention_output import with_outputs
from dflash_jax.quantization.kv_formats import quantized_format
from dflash_jax.text.grammars import Grammars
from dflash_jax.text.pictures.encoder import VisionEncoder
from dflash_jax.text.pictures.films import FilmProcessor
from dflash_jax.text.pictures.float8 import VisionScales, read_vision_scales
from dflash_jax.text.pictures.reading import Processor
from dflash_jax.text.tokenizer import Tokenizer, end_notice, end_token_ids, tokenizer_notices


@dataclass(repr=False)
class Model:
    """A loaded target, its drafter where it has one, and the engine that serves them.

    Attributes:
      name: the path or id it was loaded from.
      eos_ids: end-of-text ids.
      memory: what of the device's memory was planned for what.
      notices: what loading left out on purpose, for example code in a model folder.
      sampling_defaults: what its `generation_config.json` says of sampling, by names of `SamplingParams`.
      tell: takes what is to be said while requests are served: once, that the drafter is hardly ever right.
      vision: what it sees pictures with; None for a model of texts alone.
      drafting: what became of the drafts of requests of `generate` and `stream`; those of benchmarks and warming up are in none.
    """

    name: str
    engine: Engine
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    memory: MemoryPlan
    notices: list[str] = field(default_factory=list)
    sampling_defaults: Mapping[str, float | int] = field(default_factory=dict)
    tell: Callable[[str], object] = warnings.warn
    vision: VisionEncoder | None = None
    drafting: DraftRecord = field(default_factory=DraftRecord, init=False)

    def __repr__(self) -> str:
        # Not the fields: those hold every weight.
        drafter = "no drafter" if self.draft is None else f"a drafter with blocks of {self.draft.block_size}"
        requests = "1 request" if self.engine.max_batch == 1 else f"{self.engine.max_batch} requests"
        most = f"up to {requests} of {self.engine.max_model_len} tokens"
        weights = f"{size(self.memory.weights)} of weights"
        if self.engine.tp > 1:
            weights += f" on each of {self.engine.tp} devices"
        if self.vision is not None:
            drafter += ", a vision tower"
        return f"Model({self.name!r}: {self.engine.dtype}, {weights}, {drafter}, {most})"

    @property
    def target(self) -> DecoderConfig:
        """Configuration of the target."""
        return self.engine.target

    @property
    def draft(self) -> DFlashConfig | None:
        """Configuration of the drafter; None where there is none."""
        return self.engine.draft

    def save_cache_scales(self, path: str | Path) -> None:
        """Writes the scales of its pages, for `load(cache_scales=path)`: texts they were found on are not needed again.

        Raises:
          ParameterError: nothing has found any.
        """
        scales, kept = self.engine.cache_scales, quantized_format(self.engine.cache_dtype)
        if scales is None or kept is None:
            raise ParameterError(
                "no scales were found: load with cache_dtype and calibration, or serve the first prompts first"
            )
        save_scales(path, scales, kept)

    def save_vision_scales(self, path: str | Path, margin: float = 1.5) -> None:
        """Writes the scales of its vision tower's float8 attention, for `load(vision_scales=path)`, by the last 16 calls.

        Args:
          margin: how many times as large numbers still fit.

        Raises:
          ParameterError: it has none that were found, or `margin` is below 1.
        """
        if self.vision is None or self.vision.float8 is None:
            raise ParameterError(
                'no scales were found: load with vision_attention_dtype="fp8", and show it pictures first'
            )
        self.vision.float8.save(path, margin)

    @cached_property
    def grammars(self) -> Grammars:
        """Compiled grammars of structured texts; see `dflash_jax.Structured`."""
        return Grammars(self.tokenizer, self.name, self.target.vocab_size, self.eos_ids, at_once=self.engine.tp > 1)

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """`Stats.acceptance_by_position` over all requests so far."""
        return self.drafting.by_position

    def warmup(
        self,
        *,
        modes: Iterable[Mode] = ("greedy", "sampled"),
        draft: Iterable[bool] = (True, False),
        batch: Iterable[int] | None = None,
        progress: bool = False,
    ) -> float:
        """Compiles every program that requests of these kinds can need, and returns the seconds it took.

        Of a model with a vision tower those for pictures are among them. The loops of requests with `logprobs`, or with more than 8
        end tokens, are programs of their own, compiled when those come.

        Args:
          modes: greedy; sampled adds temperature; full adds top_p, top_k, min_p and min_tokens; adjusted adds penalties,
            logit_bias, allowed_token_ids and bad_words; regular adds grammars that are tables, structured all others.
          draft: with the drafter, without it, or both.
          batch: numbers of slots; None for every bucket up to max_batch.
          progress: show a bar.

        Raises:
          ParameterError: something that is no list, an unknown mode, a number of slots outside 1 to max_batch, or drafting alone
            where there is no drafter.
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
        if draft and not drafts:
            raise ParameterError(
                f"draft must hold False for {self.name}, which was loaded without a drafter, got {draft}"
            )
        # What changes logits has a program for those who do not sample.
        setups = dict.fromkeys(
            self.engine.setup(mode=mode, draft=flag, sampling=sampling)
            for flag, mode, sampling in itertools.product(drafts, modes, (False, True))
        )
        jobs = list(self.engine.warmup_jobs(setups, None if batch is None else map(operator.index, batch)))
        if self.vision is not None:
            jobs += self.vision.jobs(self.engine.max_model_len)
        futures = start_compiling(jobs)
        try:
            bar = progress_bar(as_completed(futures), total=len(jobs), unit="program", disable=not progress)
            with named_memory_errors("programs were compiled"):
                for future in bar:
                    future.result()
        finally:
            drop(futures)
        return time.perf_counter() - started

    def measure_memory(self) -> MemoryReading:
        """Serves as many requests of full length as there are pages for, and reads what memory that took beside what was planned.
        It takes as long as those prompts; nobody else's requests may run meanwhile.

        Raises:
          CapacityError: the device's memory ran out.
        """
        return measure_memory(self.engine, self.memory)

    def compiled_shapes(self) -> list[str]:
        """One line for each program compiled so far."""
        return self.engine.programs.shapes()


@taking_options
def load(
    path: str | Path | None = None,
    *,
    ahead: Callable[[Model], Run] | None = None,
    progress: bool = False,
    **options: Unpack[LoadKeywords],
) -> Model:
    """Loads a target and its drafter.

    Scalars of numpy or JAX count as the numbers that they are. Where several processes share the model, only process 0 comes back:
    the others do what it does, and end when it ends.

    Args:
      path: a folder made by `dflash-convert`, a local Hugging Face folder, or a hub id; None for the pair that ships.
      **options: fields of `LoadOptions`.
      ahead: called with the model before its weights are there; what the run that it returns would call first is compiled while
        they are read. The run itself is not started.
      progress: show a bar while weights are read.

    Raises:
      CheckpointError, ConfigError, UnsupportedModelError: a checkpoint cannot be used, with every reason.
      PairError: target and drafter do not belong together, or `draft_revision` is given and there is no drafter.
      ParameterError: an option is outside its range.
      CapacityError: the device has no room for weights and pages, with the numbers.
      DeviceError: JAX starts no device.
    """
    asked = read_options(dict(options))
    target, drafter = open_pair(path, asked.draft, revision=asked.revision, draft_revision=asked.draft_revision)
    for checkpoint in (target, drafter):
        if checkpoint is not None:
            checkpoint.expect()
    asked = as_checkpoint_says(asked, target)
    if asked.cache_dtype == "int8" and not len(asked.calibration) and asked.cache_scales is None:
        raise ParameterError(
            'cache_dtype="int8" needs calibration: texts like those to be served, or take cache_dtype="fp8"'
        )
    engine, memory = plan_engine(target, drafter, asked)
    tower = vision_of(target, asked)
    vision = None if tower is None else _vision_encoder(tower, target, asked, engine)
    if asked.cache_scales == FROM_TRAFFIC:
        engine.scales_from_traffic = True
    elif asked.cache_scales is not None:
        engine.cache_scales = read_scales(asked.cache_scales, target.config, str(asked.cache_dtype))
    elif asked.cache_dtype == "fp8" and not len(asked.calibration):
        engine.cache_scales = target.cache_scales
    tokenizer = Tokenizer.from_folder(target.folder)
    texts = [_calibration_ids(tokenizer, text) for text in asked.calibration]
    if texts:
        check_texts(target.config, texts)
    defaults, left_out = sampling_defaults(target.folder)
    name = "the shipped pair" if path is None else str(path)
    eos_ids = end_token_ids(target.folder, tokenizer)
    notices = [
        *target.notices,
        *(() if drafter is None else drafter.notices),
        *drafter_notice(path, asked.draft, drafter),
        *_scheme_notice(target, asked),
        *tokenizer_notices(target.folder),
        *left_out,
        *_room_notice(memory, asked),
        *end_notice(eos_ids, target.config.vocab_size),
    ]
    model = Model(name, engine, tokenizer, eos_ids, memory, notices, defaults, vision=vision)

    def observe(params: Mapping[str, Array]) -> None:
        engine.cache_scales = calibrate(
            engine.target, params, texts, cache_dtype="int8" if asked.cache_dtype == "int8" else "fp8",
            reach=engine.scale_range, ranks=engine.programs.ranks,
        )  # fmt: skip

    compiled = start_compiling(reading_jobs(engine.weights), in_order=False)
    compiled += start_compiling(() if ahead is None else ahead(model).first_jobs())
    try:
        total = sum(len(one.family.parameters(one.config)) for one in (target, drafter) if one is not None)
        with (
            named_memory_errors("weights were loaded"),
            progress_bar(total=total, desc="weights", unit="array", disable=not progress) as bar,
        ):
            weights = read_weights(
                target, drafter, engine.dtype, asked.weight_dtype, asked.draft_weight_dtype, observe if texts else None,
                rows=cycle_rows(asked.max_batch, engine.draft), ranks=engine.programs.ranks, arrived=bar.update,
            )  # fmt: skip
            outputs = target.config, weights["target"], asked.attention_output, engine.programs.ranks
            engine.weights = weights | {"target": with_outputs(*outputs)}
            if vision is not None and tower is not None:
                vision.weights = tower.load(engine.dtype.name)
    except BaseException:
        drop(compiled)
        raise
    lead_or_follow(engine.programs, engine.weights, engine.makers)
    return model


def _vision_encoder(tower: Checkpoint, target: Checkpoint, asked: LoadOptions, engine: Engine) -> VisionEncoder:
    """The encoder of a target's vision tower, whose weights are still shapes.

    Raises:
      ConfigError: the folder's processor is not implemented.
      ParameterError: `vision_scales` does not fit the tower.
    """
    processor = Processor.from_folder(target.folder, tower.config)
    films = FilmProcessor.from_folder(target.folder, tower.config)
    # One device has the tower: where several share the models its programs are not theirs.
    programs = engine.programs if engine.tp == 1 else Programs()
    scales = None
    if asked.vision_attention_dtype is not None:
        blocks = tower.config.depth
        given = None if asked.vision_scales is None else read_vision_scales(asked.vision_scales, blocks)
        scales = VisionScales(blocks, given)
    return VisionEncoder(tower.config, processor, films, tower_shapes(tower, engine.dtype), programs, scales)


def _room_notice(memory: MemoryPlan, asked: LoadOptions) -> list[str]:
    """One sentence if the device has no room for the pages of `max_batch` requests of full length."""
    if memory.num_pages >= memory.full_pages or asked.num_pages is not None:
        return []
    return [
        f"the device has room for {memory.num_pages} pages; {asked.max_batch} requests of full length would fill "
        f"{memory.full_pages}"
    ]


def _items(name: str, value: Any) -> list:
    """Items of an argument of `Model.warmup`; a text is refused rather than read as its letters."""
    if not is_list(value):
        raise ParameterError(f"{name} must be a list, got {value!r}")
    return list(value)


def _scheme_notice(target: Checkpoint, asked: LoadOptions) -> list[str]:
    """One sentence where a checkpoint says that keys and values are in float8, and they are not, or not on its scales."""
    if target.cache_dtype is None:
        return []
    if asked.cache_dtype is None:
        return [
            'the checkpoint is for keys and values in float8, which cache_dtype="auto" (--cache-dtype auto) keeps so'
        ]
    if (
        asked.cache_dtype == "fp8"
        and target.cache_scales is None
        and not len(asked.calibration)
        and not asked.cache_scales
    ):
        return [
            "the checkpoint is for keys and values in float8 and has no scales of them: they are 1, or found with calibration"
        ]
    return []


def _calibration_ids(tokenizer: Tokenizer | None, text: Any) -> Sequence[int]:
    if isinstance(text, str):
        if tokenizer is None:
            raise ParameterError("the target's folder has no tokenizer.json: give calibration as token ids")
        return tokenizer.encode(text)
    tokens = [as_integer(token) for token in text] if is_list(text) else [None]
    if None in tokens:
        raise ParameterError(
            f"calibration must be a list of texts or of token ids, got one with {type(text).__name__} {text!r:.40} in it"
        )
    return cast(list[int], tokens)
